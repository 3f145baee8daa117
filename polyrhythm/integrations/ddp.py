"""Codecs in a plain DistributedDataParallel script, as its communication hook.

    model = DistributedDataParallel(network)
    model.register_comm_hook(*pr.integrations.ddp.hook("topk:0.01"))

Every codec works, and all ranks get the same bits. Codes that can be summed are all-reduced, all others are
gathered. Exchanges overlap with backward: each advances by one round whenever another bucket is full, in the
same order on all ranks. A codec whose workers compute the mean together (powersgd) waits for the last bucket,
and averages all buckets at once.

After the first step DDP rebuilds its buckets. Codec state belongs to parameters, and moves with them. If a
gradient is not finite, the mean is NaN on all ranks, and codecs do not see it.

**GradScaler.** Pass it: `hook(codec, scaler=scaler)`. Then codecs see unscaled gradients, since the scale may
change before a residual is sent; and if the scaler skips a step, the codec state is restored. Without it, a
GradScaler is not supported with a codec that has feedback or an absolute threshold (`threshold`).

Each bucket is encoded by itself: the density of `topk`, and the norm that `clip` of `dgc` uses, are per
bucket.
"""

# No `from __future__ import annotations`: DDP compares the annotations of its hook with types, not with text.

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # the type behind torch.distributed.GradBucket

from polyrhythm.compress.compressor import Compressor
from polyrhythm.compress.feedback import ResidualRates
from polyrhythm.compress.reducers import reducer_for
from polyrhythm.compress.reducers.base import JointReducer
from polyrhythm.compress.segments import wide
from polyrhythm.compress.transforms.base import transform_of
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import parse_codec
from polyrhythm.integrations.bucket_state import BucketLayout, BucketState
from polyrhythm.integrations.group import PendingGather, PendingMean, TorchGroup
from polyrhythm.integrations.parameters import SPARSE, KnownParameters
from polyrhythm.session.seeds import mix

Future = torch.futures.Future[Tensor]
Hook = Callable[["HookState", GradBucket], Future]


def hook(
    codec: str | Codec,
    model: nn.Module | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple["HookState", Hook]:
    """The arguments of `register_comm_hook` of DistributedDataParallel: a state and a function.

    A codec that leaves out layers by name, such as `topk:dense=head`, needs the model. With the model, saved
    states identify parameters by name, without it only by order and shape. The optimizer is only read: to
    check that the codec works with it (dgc, which replaces the momentum, needs it), and to rescale residuals
    when the learning rate of SGD changes. `scaler` is the GradScaler of the loss, if any. `group` is the
    process group of DDP.
    """
    made = parse_codec(codec) if isinstance(codec, str) else codec
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{made}: there is no process group yet; call torch.distributed.init_process_group first"
        )
    group = cast(dist.ProcessGroup, group or dist.group.WORLD)
    return HookState(made, model, optimizer, scaler, seed, group), exchange


def exchange(state: "HookState", bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: DDP calls it with every bucket that is full."""
    return state.begin(bucket)


class HookState:
    """The state of the hook of one model on one rank; save it with the checkpoint of that rank."""

    def __init__(
        self,
        codec: Codec,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        seed: int,
        group: dist.ProcessGroup,
    ) -> None:
        _check_optimizer(codec, optimizer)
        self.codec, self._optimizer, self._scaler = codec, optimizer, scaler
        self._seed, self._group = seed, group
        self._reducer = reducer_for(codec)
        self._known = KnownParameters(codec, model)
        for dtype in self._known.dtypes or {torch.float32}:
            codec.prepare(wide(dtype))  # compile now, not inside the first backward
        self._compressors: dict[tuple[str, ...], Compressor] = {}  # by the parameters of a bucket
        self._states: dict[str, BucketState] = {}  # the state that contains a parameter, by its name
        self._rates = ResidualRates()
        self._pending: list[Iterator[bool]] = []
        self._waiting: list[tuple[Compressor, Tensor, Future]] = []
        self._scale, self._finite = (
            1.0,
            True,
        )  # of this pass: the scale of the scaler, and whether all means are finite
        self._before: list[tuple[BucketState, dict[str, Any]]] = []  # states before this pass

    def begin(self, bucket: GradBucket) -> Future:
        """Starts the exchange of a bucket, and advances those before it by a round."""
        if bucket.index() == 0:
            self._pending, self._waiting, self._before = [], [], []  # a failed pass may have left some
            self._finite, self._scale = True, self._scaler.get_scale() if self._scaler is not None else 1.0
            self._rescale()
        flat = bucket.buffer()
        if flat.layout != torch.strided:
            raise UsageError(SPARSE.format(codec=self.codec, who="a layer"))
        compressor = self._compressor(bucket.parameters(), flat)
        future = Future(devices=[flat.device]) if flat.is_cuda else Future()
        if isinstance(self._reducer, JointReducer):
            self._waiting.append((compressor, flat, future))
            if bucket.is_last():
                self._joint_mean(self._reducer)
        else:
            self._pending.append(self._exchange(compressor, flat, future))
            self._advance()
            while bucket.is_last() and self._pending:
                self._advance()
        if bucket.is_last():
            self._finish()
        return future

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank, and the other state of the codec."""
        buckets = {id(state): state for state in self._states.values()}
        return {
            "codec": str(self.codec), "buckets": [state.state_dict() for state in buckets.values()],
            "rates": list(self._rates.rates), "named": self._known.named,
            "shapes": dict(self._known.expected or self._known.shapes),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict()` returned, for the same model.

        Without a model, parameters are matched by order and shape only: pass the model to `hook`.
        """
        if state["codec"] != str(self.codec):
            raise UsageError(f"this state was saved with {state['codec']}, but the hook uses {self.codec}")
        if state["named"] != self._known.named:
            had, has = ("with", "without") if state["named"] else ("without", "with")
            raise UsageError(
                f"this state was saved by a hook {had} a model, but this one is {has}: parameters cannot be "
                "matched; pass the model both times: hook(codec, model)"
            )
        self._known.expect(state["shapes"])
        buckets = [BucketState.loaded(saved) for saved in state["buckets"]]
        self._compressors, self._states = {}, {name: each for each in buckets for name in each.places}
        self._rates = ResidualRates(state["rates"])

    def _finish(self) -> None:
        """Ends a pass. If the scaler will skip the step, restores the state of the codec before the pass.

        It skips if any value is not finite, and all ranks have the same values.
        """
        if not self._finite:
            for state, before in self._before:
                state.load_state_dict(before)
        self._before = []
        self._known.check_shapes(whole=True)
        self._known.expected = {}

    # --- the exchange -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Advances each exchange by a round, in the order in which they began."""
        self._pending = [each for each in self._pending if next(each, False)]

    def _exchange(self, compressor: Compressor, flat: Tensor, future: Future) -> Iterator[bool]:
        """Replaces a bucket by its mean over all ranks. Yields where it would block."""
        dense = PendingMean(self._group, compressor.dense([flat]))
        finite = bool(torch.isfinite(flat).all())
        values = self._unscaled(flat)
        given: list[list[Tensor]] | None
        if self.codec.reduction.summed:
            codes = compressor.send([values if finite else torch.zeros_like(values)])
            shown = codes if finite else [torch.full_like(code, torch.nan) for code in codes]
            mean = PendingMean(self._group, shown)
            yield True
            given = [mean.wait()]
            if not all(bool(torch.isfinite(code).all()) for code in given[0]):
                given = None
        else:
            codes = compressor.send([values]) if finite else []
            gather = PendingGather(self._group, flat.device, len(compressor.coded), codes if finite else None)
            yield True
            gather.exchange()
            yield True
            given = gather.wait()
        if given is not None:
            compressor.combine(given, [values])
            self._reducer.decide([values], compressor)
        else:
            _fill_with_nan(compressor, values, codes)
        self._set(future, compressor, values, dense, flat)

    def _unscaled(self, flat: Tensor) -> Tensor:
        """A bucket without the scale of the scaler, in at least 32 bits if there is one."""
        return flat if self._scale == 1 else flat.to(wide(flat.dtype)).div_(self._scale)

    def _set(
        self, future: Future, compressor: Compressor, values: Tensor, dense: PendingMean, flat: Tensor
    ) -> None:
        """Passes the mean of a bucket to DDP, scaled again."""
        if self._scale != 1:
            flat.copy_(values.mul_(self._scale))
        dense.wait_into(compressor.dense([flat]))
        if self._scaler is not None:
            self._finite &= bool(torch.isfinite(flat).all())
        future.set_result(flat)

    def _joint_mean(self, reducer: JointReducer) -> None:
        """All ranks compute the mean of all buckets together."""
        waiting, self._waiting = self._waiting, []
        dense = [PendingMean(self._group, compressor.dense([flat])) for compressor, flat, _ in waiting]
        group = TorchGroup(self._group)
        finite = all(bool(torch.isfinite(flat).all()) for _, flat, _ in waiting)
        buckets = [(compressor, self._unscaled(flat)) for compressor, flat, _ in waiting]
        if group.all(finite, waiting[0][1].device):
            values = [compressor.values([flat]) for compressor, flat in buckets]
            states = [state for compressor, _ in buckets for state in compressor.states]
            reducer.mean(group, [segment for each in values for segment in each], states)
            for (compressor, flat), each in zip(buckets, values, strict=True):
                compressor.exchanged(each, [flat])
        else:
            for compressor, flat in buckets:
                _fill_with_nan(compressor, flat, [])
        for (compressor, flat, future), (_, mean), rest in zip(waiting, buckets, dense, strict=True):
            self._set(future, compressor, mean, rest, flat)

    # --- state --------------------------------------------------------------------------------------

    def _compressor(self, parameters: Sequence[Tensor], flat: Tensor) -> Compressor:
        """The compressor of a bucket of these parameters, with the state that they have so far."""
        names = tuple(map(self._known.name, parameters))
        if names not in self._compressors:
            shapes = {name: parameter.shape for name, parameter in zip(names, parameters, strict=True)}
            layout = BucketLayout(shapes, flat)
            if layout.total != flat.numel():
                raise UsageError(
                    f"DDP passed a bucket of {flat.numel()} elements for parameters of {layout.total}"
                )
            seed = mix("ddp", self._seed, names[0])
            state = BucketState(layout, seed, self._group.rank(), self._group.size())
            state.take_vectors(self._states)
            codec = dataclasses.replace(self.codec, dense=self._known.dense_in(names))
            compressor = Compressor(codec, state)
            state.take_segments(self._states)
            self._states.update(dict.fromkeys(names, state))
            # A bucket that shares a parameter with this one would have outdated state if it were used again.
            self._compressors = {
                key: each for key, each in self._compressors.items() if not {*key} & {*names}
            }
            self._compressors[names] = compressor
        if self._scaler is not None:
            state = self._states[names[0]]
            self._before.append((state, state.state_dict()))
        return self._compressors[names]

    def _rescale(self) -> None:
        """Scales the residuals after SGD's learning rate has changed."""
        if not isinstance(self._optimizer, torch.optim.SGD) or not self.codec.feedback:
            return
        groups = self._optimizer.param_groups
        factors = self._rates.change([float(group["lr"]) for group in groups])
        for group, factor in zip(groups, factors, strict=True):
            for parameter in group["params"] if factor != 1 else ():
                name = self._known.find(parameter)
                if name in self._states:
                    self._states[name].scale(name, factor)


def _check_optimizer(codec: Codec, optimizer: torch.optim.Optimizer | None) -> None:
    transform = transform_of(codec)
    if transform is None:
        return
    if optimizer is not None:
        transform.check_optimizer(optimizer.param_groups)
    elif transform.replaces_momentum:
        raise UsageError(
            f"{codec} does not work with every optimizer, and DDP does not know the optimizer; pass it: "
            f'hook("{codec}", optimizer=optimizer)'
        )


def _fill_with_nan(compressor: Compressor, flat: Tensor, codes: Sequence[Tensor]) -> None:
    """A gradient is not finite on some rank: makes the mean NaN, and returns the codes to the residuals."""
    for segment in compressor.codable([flat]):
        segment.fill_(torch.nan)
    for code, state in zip(codes, compressor.states, strict=False):
        if state.residual is not None:
            compressor.codec.decode(code, state.residual)
