"""Codecs in a plain script of DistributedDataParallel, as its communication hook.

    model = DistributedDataParallel(network)
    model.register_comm_hook(*pr.integrations.ddp.hook("topk:0.01"))

Every codec works, and all ranks get the same bits. Codes that can be summed travel by all-reduce, all others
are gathered. Exchanges overlap with backward: each advances by a round whenever another bucket is full, in
the same order on all ranks. A codec whose workers compute the mean together (powersgd) waits for the last
bucket, and takes the mean of all buckets at once.

After the first step DDP fills its buckets again. What a codec keeps belongs to parameters, and moves with
them. A gradient that is not finite comes out as NaN on all ranks, and codecs never see it.

**GradScaler.** Pass it: `hook(codec, scaler=scaler)`. Then codecs see gradients without its scale, which may
change before a residual is sent; and a step that it skips leaves no trace: the codec's state is restored.
Without it, a GradScaler is not supported with a codec that has feedback, or that knows sizes (`threshold`).

A bucket is encoded by itself: the share of `topk`, and the norm that `clip` of `dgc` uses, are a bucket's.
"""

# No `from __future__ import annotations`: DDP compares the annotations of its hook with types, not with text.

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # as torch.distributed has it, but with types

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
    """What `register_comm_hook` of DistributedDataParallel takes: a state and a function.

    A codec that leaves out layers by name, such as `topk:dense=head`, needs the model. A state that is saved
    with the model has the names of parameters, without it only their order and shapes. The optimizer is only
    read: whether the codec works with it (dgc, which keeps the momentum itself, must know), and whether the
    learning rate of SGD has changed since a residual was computed. The scaler is the one that scales the
    loss, if there is one. `group` is the process group of DDP.
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
    """What the hook of one model keeps on one rank: save it with that rank's checkpoint."""

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
            codec.prepare(wide(dtype))  # not in the middle of the first backward
        self._compressors: dict[tuple[str, ...], Compressor] = {}  # by the parameters of a bucket
        self._states: dict[str, BucketState] = {}  # that has a parameter, by its name
        self._rates = ResidualRates()
        self._pending: list[Iterator[bool]] = []
        self._waiting: list[tuple[Compressor, Tensor, Future]] = []
        self._scale, self._finite = 1.0, True  # of this pass: the scaler's, and whether all means are finite
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
        """What this rank has not sent yet, and what else the codec keeps."""
        buckets = {id(state): state for state in self._states.values()}
        return {
            "codec": str(self.codec), "buckets": [state.state_dict() for state in buckets.values()],
            "rates": list(self._rates.rates), "named": self._known.named,
            "shapes": dict(self._known.expected or self._known.shapes),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict()` returned, for the same model.

        Without names only the order and the shapes of parameters tell which is which: give `hook` the model.
        """
        if state["codec"] != str(self.codec):
            raise UsageError(f"this state is of {state['codec']}, and the hook is of {self.codec}")
        if state["named"] != self._known.named:
            had, has = ("with", "without") if state["named"] else ("without", "with")
            raise UsageError(
                f"this state was saved by a hook {had} a model, and this one is {has}: parameters cannot be "
                "matched; give the model both times: hook(codec, model)"
            )
        self._known.expect(state["shapes"])
        buckets = [BucketState.loaded(saved) for saved in state["buckets"]]
        self._compressors, self._states = {}, {name: each for each in buckets for name in each.places}
        self._rates = ResidualRates(state["rates"])

    def _finish(self) -> None:
        """Ends a pass. If the scaler will skip the step, what the pass did to the codec's state is undone.

        It skips if any number is not finite, and all ranks have the same numbers.
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
        """Replaces a bucket by its mean over all ranks. Yields where it would have to wait."""
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
        """A bucket as codecs see it: without the scaler's scale, and then in at least 32 bits."""
        return flat if self._scale == 1 else flat.to(wide(flat.dtype)).div_(self._scale)

    def _set(
        self, future: Future, compressor: Compressor, values: Tensor, dense: PendingMean, flat: Tensor
    ) -> None:
        """Gives DDP the mean of a bucket, with the scale again."""
        if self._scale != 1:
            flat.copy_(values.mul_(self._scale))
        dense.wait_into(compressor.dense([flat]))
        if self._scaler is not None:
            self._finite &= bool(torch.isfinite(flat).all())
        future.set_result(flat)

    def _joint_mean(self, reducer: JointReducer) -> None:
        """The ranks compute the mean of all buckets together."""
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

    # --- what is kept -------------------------------------------------------------------------------

    def _compressor(self, parameters: Sequence[Tensor], flat: Tensor) -> Compressor:
        """Compresses a bucket of these parameters. What is kept for them moves along."""
        names = tuple(map(self._known.name, parameters))
        if names not in self._compressors:
            shapes = {name: parameter.shape for name, parameter in zip(names, parameters, strict=True)}
            layout = BucketLayout(shapes, flat)
            if layout.total != flat.numel():
                raise UsageError(
                    f"DDP gave a bucket of {flat.numel()} numbers for parameters of {layout.total}"
                )
            seed = mix("ddp", self._seed, names[0])
            state = BucketState(layout, seed, self._group.rank(), self._group.size())
            state.take_vectors(self._states)
            codec = dataclasses.replace(self.codec, dense=self._known.dense_in(names))
            compressor = Compressor(codec, state)
            state.take_segments(self._states)
            self._states.update(dict.fromkeys(names, state))
            # A bucket that has lost a parameter to this one would be out of date if it ever came back.
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
            f"{codec} does not work with every optimizer, and DDP does not tell which this is; give it: "
            f'hook("{codec}", optimizer=optimizer)'
        )


def _fill_with_nan(compressor: Compressor, flat: Tensor, codes: Sequence[Tensor]) -> None:
    """Some rank's gradient is not finite: makes the mean NaN, and puts what was sent back into residuals."""
    for segment in compressor.codable([flat]):
        segment.fill_(torch.nan)
    for code, state in zip(codes, compressor.states, strict=False):
        if state.residual is not None:
            compressor.codec.decode(code, state.residual)
