"""Codecs in a plain script of DistributedDataParallel, as its communication hook.

    model = DistributedDataParallel(network)
    model.register_comm_hook(*pr.integrations.ddp.hook("topk:0.01"))

Every codec works, and all ranks get the same bits. What can be summed travels by all-reduce, all else is
gathered. Exchanges overlap with backward: each goes a round further whenever another bucket is full, in the
same order on all ranks. A codec that takes the mean in rounds of all (powersgd) waits for the last bucket,
and takes it of all of them at once.

After the first step DDP fills its buckets anew. What a codec remembers belongs to parameters, and moves with
them. A gradient that is not finite comes out as NaN on all ranks, and codecs never see it.

**GradScaler.** Give it: `hook(codec, scaler=scaler)`. Then codecs see gradients without its scale, which
changes while what is owed waits; and a step that it skips has never been: what is remembered is put back.
Without it, a GradScaler is not supported with a codec that has feedback, or that knows sizes (`threshold`).

A bucket is coded by itself: the share of `topk`, and the norm that `clip` of `dgc` looks at, are a bucket's.
"""

# No `from __future__ import annotations`: DDP compares the annotations of its hook with types, not with text.

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # as torch.distributed has it, but with types

from polyrhythm.compress.compressor import Compressor, any_within, wide
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import parse_codec
from polyrhythm.integrations.carried import Home, Remembered
from polyrhythm.integrations.group import Gather, Mean, Rounds
from polyrhythm.model.layout import Layout, Piece
from polyrhythm.session.data import mix

if TYPE_CHECKING:
    from polyrhythm.core.group import Group

_SPARSE = (
    "{codec}: {who} has sparse gradients, which a codec cannot take: make the embedding with sparse=False"
)
_ORDER = (
    " (they are known by their order only; give the model when saving and when loading: hook(codec, model))"
)

Future = torch.futures.Future[Tensor]
Hook = Callable[["State", GradBucket], Future]


def hook(
    codec: str | Codec,
    model: nn.Module | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple["State", Hook]:
    """What `register_comm_hook` of DistributedDataParallel takes: a state and a function.

    The model is needed by a codec that leaves out layers by name, such as `topk:dense=head`; and a state that
    is saved with it has the names of parameters, without it only their order and shapes. The optimizer is
    only looked at: is it one that the codec works with (dgc, which keeps the momentum itself, must know), and
    has the learning rate of SGD changed since what was not sent yet was computed. The scaler is the one that
    scales the loss, if there is one. `group` is the process group of DDP.
    """
    made = parse_codec(codec) if isinstance(codec, str) else codec
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{made}: there is no process group yet; call torch.distributed.init_process_group first"
        )
    group = cast(dist.ProcessGroup, group or dist.group.WORLD)
    return State(made, model, optimizer, scaler, seed, group), exchange


def exchange(state: "State", bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: DDP calls it with every bucket that is full."""
    return state.begin(bucket)


class State:
    """What the hook of one model remembers on one rank: save it with that rank's checkpoint."""

    def __init__(
        self,
        codec: Codec,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        seed: int,
        group: dist.ProcessGroup,
    ) -> None:
        if optimizer is not None:
            codec.check_groups(optimizer.param_groups)
        elif type(codec).check_groups is not Codec.check_groups:
            raise UsageError(
                f"{codec} does not work with every optimizer, and DDP does not tell which this is; give it: "
                f'hook("{codec}", optimizer=optimizer)'
            )
        self.codec, self._optimizer, self._scaler = codec, optimizer, scaler
        self._seed, self._group = seed, group
        module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        named: dict[str, nn.Parameter] = dict(module.named_parameters()) if module is not None else {}
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._left_out = [word for word in codec.dense.split("/") if word]
        self._check_names()
        self._check_layers(module)
        for dtype in {wide(parameter.dtype) for parameter in named.values()} or {torch.float32}:
            codec.prepare(dtype)  # not in the middle of the first backward
        # By name, or by number in the order in which the first buckets show them.
        self._shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self._wanted: dict[str, tuple[int, ...]] = {}  # the shapes in a state that was loaded, to be checked
        self._seen: dict[int, tuple[str, Tensor]] = {}
        self._senders: dict[tuple[str, ...], Compressor] = {}
        self._homes: dict[str, Home] = {}  # where what is remembered of a parameter is now
        self._rates: list[float] = []  # by parameter group, that what is owed was computed for
        self._pending: list[Iterator[bool]] = []
        self._waiting: list[tuple[Compressor, Tensor, Future]] = []
        self._scale, self._sound = 1.0, True  # of this pass: the scaler's, and whether all of it is finite
        self._before: list[tuple[Home, Remembered]] = []  # what was remembered before this pass

    def begin(self, bucket: GradBucket) -> Future:
        """Begins the exchange of a bucket, and takes those before it a round further."""
        if bucket.index() == 0:
            self._pending, self._waiting, self._before = [], [], []  # whatever a failed pass has left
            self._sound, self._scale = True, self._scaler.get_scale() if self._scaler is not None else 1.0
            self._rescale()
        flat = bucket.buffer()
        if flat.layout != torch.strided:
            raise UsageError(_SPARSE.format(codec=self.codec, who="a layer"))
        sender = self._sender(bucket.parameters(), flat)
        future = Future(devices=[flat.device]) if flat.is_cuda else Future()
        if self.codec.shared:
            self._waiting.append((sender, flat, future))
            if bucket.is_last():
                self._mean()
        else:
            self._pending.append(self._exchange(sender, flat, future))
            self._advance()
            while bucket.is_last() and self._pending:
                self._advance()
        if bucket.is_last():
            self._finish()
        return future

    def state_dict(self) -> dict[str, Any]:
        """What this rank has not sent yet, and what else the codec remembers."""
        homes = {id(home): home for home in self._homes.values()}
        return {
            "codec": str(self.codec), "homes": [home.saved() for home in homes.values()],
            "rates": list(self._rates), "named": bool(self._names),
            "shapes": dict(self._wanted or self._shapes),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict()` gave, for the same model.

        Without names only the order and the shapes of parameters tell whose is what: give `hook` the model.
        """
        if state["codec"] != str(self.codec):
            raise UsageError(f"this state is of {state['codec']}, and the hook is of {self.codec}")
        if state["named"] != bool(self._names):
            had, has = ("with", "without") if state["named"] else ("without", "with")
            raise UsageError(
                f"this state was saved by a hook {had} a model, and this one is {has}: what is remembered of "
                "which parameter cannot be told; give the model both times: hook(codec, model)"
            )
        self._wanted = {name: tuple(shape) for name, shape in state["shapes"].items()}
        if self._names:  # else the first pass will show
            self._check_shapes(whole=True)
        homes = [Home.loaded(saved) for saved in state["homes"]]
        self._senders, self._homes = {}, {name: home for home in homes for name in home.places}
        self._rates = list(state["rates"])

    def _finish(self) -> None:
        """A pass is over. What it did to memories does not count if the scaler will skip the step.

        It skips if any number is not finite; and all ranks have got the same numbers.
        """
        if not self._sound:
            for home, remembered in self._before:
                home.put_back(remembered)
        self._before = []
        if self._wanted:
            self._check_shapes(whole=True)
            self._wanted = {}

    # --- the exchange -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Each exchange goes a round further, in the order in which they began."""
        self._pending = [each for each in self._pending if next(each, False)]

    def _exchange(self, sender: Compressor, flat: Tensor, future: Future) -> Iterator[bool]:
        """Replaces a bucket by its mean over all ranks. Where it yields it would have to wait."""
        plain = Mean(self._group, sender.plain([flat]))
        finite = bool(torch.isfinite(flat).all())
        values = self._unscaled(flat)
        given: list[list[Tensor]] | None
        if self.codec.summable:
            codes = sender.send([values if finite else torch.zeros_like(values)])
            shown = codes if finite else [torch.full_like(code, torch.nan) for code in codes]
            mean = Mean(self._group, shown)
            yield True
            given = [mean.wait()]
            if not all(bool(torch.isfinite(code).all()) for code in given[0]):
                given = None
        else:
            codes = sender.send([values]) if finite else []
            gather = Gather(self._group, flat.device, len(sender.coded), codes if finite else None)
            yield True
            gather.exchange()
            yield True
            given = gather.wait()
        if given is not None:
            sender.combine(given, [values])
        else:
            _spoil(sender, values, codes)
        self._set(future, sender, values, plain, flat)

    def _unscaled(self, flat: Tensor) -> Tensor:
        """A bucket as codecs see it: without the scale, and then in at least 32 bits."""
        return flat if self._scale == 1 else flat.to(wide(flat.dtype)).div_(self._scale)

    def _set(self, future: Future, sender: Compressor, values: Tensor, plain: Mean, flat: Tensor) -> None:
        """Gives DDP the mean of a bucket, with the scale again."""
        if self._scale != 1:
            flat.copy_(values.mul_(self._scale))
        plain.into(sender.plain([flat]))
        if self._scaler is not None:
            self._sound &= bool(torch.isfinite(flat).all())
        future.set_result(flat)

    def _mean(self) -> None:
        """The codec takes the mean of all buckets at once, in rounds of all ranks."""
        waiting, self._waiting = self._waiting, []
        plain = [Mean(self._group, sender.plain([flat])) for sender, flat, _ in waiting]
        node = Rounds(self._group)
        finite = all(bool(torch.isfinite(flat).all()) for _, flat, _ in waiting)
        buckets = [(sender, self._unscaled(flat)) for sender, flat, _ in waiting]
        if node.all(finite, waiting[0][1].device):
            pairs = [sender.pairs([values]) for sender, values in buckets]
            self.codec.mean(cast("Group", node), [pair for each in pairs for pair in each])
            for (sender, values), each in zip(buckets, pairs, strict=True):
                sender.sent(each, [values])
        else:
            for sender, values in buckets:
                _spoil(sender, values, [])
        for (sender, flat, future), (_, values), mean in zip(waiting, buckets, plain, strict=True):
            self._set(future, sender, values, mean, flat)

    # --- what is remembered -------------------------------------------------------------------------

    def _sender(self, parameters: Sequence[Tensor], flat: Tensor) -> Compressor:
        """Who codes a bucket of these parameters; what is remembered of them comes along."""
        names = tuple(map(self._name, parameters))
        if names not in self._senders:
            layout = _Bucket(names, parameters, flat)
            # The layers that travel as they are may be in other buckets.
            words = [word for word in self._left_out if word == "1d" or any_within(names, word)]
            home = Home({piece.name: (piece.start, piece.stop) for piece in layout.pieces}, flat)
            home.take_vectors(self._homes)
            sender = Compressor(
                dataclasses.replace(self.codec, dense="/".join(words)), layout, home, "ddp",
                seed=mix("ddp", self._seed, names[0]), worker=self._group.rank(), workers=self._group.size(),
            )  # fmt: skip
            home.take_notes(self._homes, [(segment.low, segment.high) for segment in sender.coded])
            self._homes.update(dict.fromkeys(names, home))
            # A bucket that has lost a parameter to this one would be out of date if it ever came back.
            self._senders = {key: each for key, each in self._senders.items() if not {*key} & {*names}}
            self._senders[names] = sender
        if self._scaler is not None:
            home = self._homes[names[0]]
            self._before.append((home, home.remembered()))
        return self._senders[names]

    def _rescale(self) -> None:
        """What is owed is worth what it was when it was computed, though SGD's rate has changed since."""
        if not isinstance(self._optimizer, torch.optim.SGD) or not self.codec.feedback:
            return
        groups = self._optimizer.param_groups
        rates = [float(group["lr"]) for group in groups]
        before = self._rates or rates
        self._rates = [now or then for now, then in zip(rates, before, strict=True)]  # a rate of 0 is a pause
        for group, now, then in zip(groups, self._rates, before, strict=True):
            for parameter in group["params"] if now != then else ():
                name = self._names.get(id(parameter)) or self._seen.get(id(parameter), ("",))[0]
                if name in self._homes:
                    self._homes[name].scale(name, then / now)

    def _name(self, parameter: Tensor) -> str:
        """Its name, or without a model a number, in the order in which the first buckets show them."""
        if self._names:
            if id(parameter) not in self._names:
                raise UsageError(
                    f"{self.codec}: DDP trains a parameter that is not in the model given to hook()"
                )
            return self._names[id(parameter)]
        name: str = self._seen.setdefault(id(parameter), (str(len(self._seen)), parameter))[0]
        if name not in self._shapes:
            self._shapes[name] = tuple(parameter.shape)
            self._check_shapes()
        return name

    def _check_shapes(self, whole: bool = False) -> None:
        """Raises UsageError if a state that was loaded is not of the parameters that there are."""
        if not self._wanted:
            return
        for name, shape in self._shapes.items():
            if self._wanted.get(name) != shape:
                had = f"{self._wanted[name]}" if name in self._wanted else "none of that name"
                raise UsageError(
                    f"the state that was loaded is of another model: parameter {name} is {shape}, and there "
                    f"it was {had}{_ORDER if not self._names else ''}"
                )
        if whole and len(self._shapes) != len(self._wanted):
            raise UsageError(
                f"the state that was loaded is of another model: it has {len(self._wanted)} parameters, "
                f"and here there are {len(self._shapes)}"
            )

    def _check_names(self) -> None:
        for word in self._left_out:
            if word != "1d" and not self._names:
                raise UsageError(
                    f"{self.codec}: DDP does not tell which layer is {word!r}; give the model too: "
                    f'hook("{self.codec}", model)'
                )
            if word != "1d" and not any_within(self._names.values(), word):
                raise UsageError(f"{self.codec}: the model has no layer {word!r} to leave as it is")

    def _check_layers(self, module: nn.Module | None) -> None:
        for name, layer in module.named_modules() if module is not None else ():
            if getattr(layer, "sparse", False) is True and isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                raise UsageError(_SPARSE.format(codec=self.codec, who=f"layer {name!r}"))


class _Bucket(Layout):
    """The layout of one bucket."""

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], flat: Tensor) -> None:
        self.parameters, self.pieces, self.total = list(parameters), [], 0
        for name, parameter in zip(names, parameters, strict=True):
            self.pieces.append(Piece(name, parameter.shape, 0, 0, self.total))
            self.total += parameter.numel()
        self.kinds, self.counts = [(flat.dtype, flat.device)], [self.total]
        if self.total != flat.numel():
            raise UsageError(f"DDP gave a bucket of {flat.numel()} numbers for parameters of {self.total}")


def _spoil(sender: Compressor, flat: Tensor, codes: Sequence[Tensor]) -> None:
    """Some rank's gradient is not finite: nobody is to take this step, and what was sent is owed again."""
    for segment in sender.coded:
        segment.of([flat]).fill_(torch.nan)
    for code, memory in zip(codes, sender.memories, strict=False):
        if memory.residual is not None:
            sender.codec.decode(code, memory.residual)
