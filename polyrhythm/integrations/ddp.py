"""Codecs in a plain script of DistributedDataParallel, as its communication hook.

    model = DistributedDataParallel(network)
    model.register_comm_hook(*pr.integrations.ddp.hook("topk:0.01"))

Every codec works, and all ranks get the same bits. What can be summed travels by all-reduce, all else is
gathered. Exchanges overlap with backward: each goes a round further whenever another bucket is full, in the
same order on all ranks. A codec that takes the mean in rounds of all (powersgd) waits for the last bucket,
and takes it of all of them at once.

After the first step DDP fills its buckets anew. What a codec remembers belongs to parameters, and moves with
them. A gradient that is not finite comes out as NaN on all ranks, and codecs never see it. So a GradScaler
works; but what was not sent yet stays in the scale of its time.
"""

# No `from __future__ import annotations`: DDP compares the annotations of its hook with types, not with text.

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # as torch.distributed has it, but with types

from polyrhythm.coder import Sender
from polyrhythm.data.sharing import mix
from polyrhythm.errors import UsageError
from polyrhythm.integrations.carried import Home
from polyrhythm.integrations.group import Gather, Mean, Rounds
from polyrhythm.layout import Layout, Piece
from polyrhythm.strategy import Codec, parse_codec

if TYPE_CHECKING:
    from polyrhythm.node import Node

Future = torch.futures.Future[Tensor]
Hook = Callable[["State", GradBucket], Future]


def hook(
    codec: str | Codec,
    model: nn.Module | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple["State", Hook]:
    """What `register_comm_hook` of DistributedDataParallel takes: a state and a function.

    The model is needed by a codec that leaves out layers by name, such as `topk:dense=head`. The optimizer is
    only looked at: is it one that the codec works with (dgc keeps the momentum itself), and has the learning
    rate of SGD changed since what was not sent yet was computed. `group` is the process group of DDP.
    """
    made = parse_codec(codec) if isinstance(codec, str) else codec
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{made}: there is no process group yet; call torch.distributed.init_process_group first"
        )
    return State(made, model, optimizer, seed, cast(dist.ProcessGroup, group or dist.group.WORLD)), exchange


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
        seed: int,
        group: dist.ProcessGroup,
    ) -> None:
        if optimizer is not None:
            codec.check_groups(optimizer.param_groups)
        self.codec, self._optimizer = codec, optimizer
        self._seed, self._group = seed, group
        module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._names = {id(p): name for name, p in module.named_parameters()} if module is not None else {}
        self._left_out = [word for word in codec.dense.split("/") if word]
        self._check_names()
        self._seen: dict[int, tuple[str, Tensor]] = {}
        self._senders: dict[tuple[str, ...], Sender] = {}
        self._homes: dict[str, Home] = {}  # where what is remembered of a parameter is now
        self._rates: list[float] = []  # by parameter group, that what is owed was computed for
        self._pending: list[Iterator[bool]] = []
        self._waiting: list[tuple[Sender, Tensor, Future]] = []

    def begin(self, bucket: GradBucket) -> Future:
        """Begins the exchange of a bucket, and takes those before it a round further."""
        if bucket.index() == 0:
            self._pending, self._waiting = [], []  # whatever a failed pass has left
            self._rescale()
        flat = bucket.buffer()
        sender = self._sender(bucket.parameters(), flat)
        future = Future(devices=[flat.device]) if flat.is_cuda else Future()
        if self.codec.shared:
            self._waiting.append((sender, flat, future))
            if bucket.is_last():
                self._mean()
            return future
        self._pending.append(self._exchange(sender, flat, future))
        self._advance()
        while bucket.is_last() and self._pending:
            self._advance()
        return future

    def state_dict(self) -> dict[str, Any]:
        """What this rank has not sent yet, and what else the codec remembers."""
        homes = {id(home): home for home in self._homes.values()}
        return {
            "codec": str(self.codec), "homes": [home.saved() for home in homes.values()],
            "rates": list(self._rates),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict()` gave, for the same model."""
        if state["codec"] != str(self.codec):
            raise UsageError(f"this state is of {state['codec']}, and the hook is of {self.codec}")
        homes = [Home.loaded(saved) for saved in state["homes"]]
        self._senders, self._homes = {}, {name: home for home in homes for name in home.places}
        self._rates = list(state["rates"])

    # --- the exchange -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Each exchange goes a round further, in the order in which they began."""
        self._pending = [each for each in self._pending if next(each, False)]

    def _exchange(self, sender: Sender, flat: Tensor, future: Future) -> Iterator[bool]:
        """Replaces a bucket by its mean over all ranks. Where it yields it would have to wait."""
        plain = Mean(self._group, sender.plain([flat]))
        finite = bool(torch.isfinite(flat).all())
        given: list[list[Tensor]] | None
        if self.codec.summable:
            codes = sender.send([flat if finite else torch.zeros_like(flat)])
            shown = codes if finite else [torch.full_like(code, torch.nan) for code in codes]
            mean = Mean(self._group, shown)
            yield True
            given = [mean.wait()]
            if not all(bool(torch.isfinite(code).all()) for code in given[0]):
                given = None
        else:
            codes = sender.send([flat]) if finite else []
            gather = Gather(self._group, flat.device, len(sender.coded), codes if finite else None)
            yield True
            gather.exchange()
            yield True
            given = gather.wait()
        if given is not None:
            sender.combine(given, [flat])
        else:
            _spoil(sender, flat, codes)
        plain.into(sender.plain([flat]))
        future.set_result(flat)

    def _mean(self) -> None:
        """The codec takes the mean of all buckets at once, in rounds of all ranks."""
        waiting, self._waiting = self._waiting, []
        plain = [Mean(self._group, sender.plain([flat])) for sender, flat, _ in waiting]
        node = Rounds(self._group)
        if node.all(all(bool(torch.isfinite(flat).all()) for _, flat, _ in waiting), waiting[0][1].device):
            pairs = [sender.pairs([flat]) for sender, flat, _ in waiting]
            self.codec.mean(cast("Node", node), [pair for each in pairs for pair in each])
            for (sender, flat, _), each in zip(waiting, pairs, strict=True):
                sender.sent(each, [flat])
        else:
            for sender, flat, _ in waiting:
                _spoil(sender, flat, [])
        for (sender, flat, future), mean in zip(waiting, plain, strict=True):
            mean.into(sender.plain([flat]))
            future.set_result(flat)

    # --- what is remembered -------------------------------------------------------------------------

    def _sender(self, parameters: Sequence[Tensor], flat: Tensor) -> Sender:
        """Who codes a bucket of these parameters; what is remembered of them comes along."""
        names = tuple(map(self._name, parameters))
        if names not in self._senders:
            layout = _Bucket(names, parameters, flat)
            # The layers that travel as they are may be in other buckets.
            words = [word for word in self._left_out if word == "1d" or _any_within(names, word)]
            home = Home({piece.name: (piece.start, piece.stop) for piece in layout.pieces}, flat)
            home.take_vectors(self._homes)
            sender = Sender(
                dataclasses.replace(self.codec, dense="/".join(words)), layout, home, "ddp",
                seed=mix("ddp", self._seed, names[0]), worker=self._group.rank(), workers=self._group.size(),
            )  # fmt: skip
            home.take_notes(self._homes, [(stretch.low, stretch.high) for stretch in sender.coded])
            self._homes.update(dict.fromkeys(names, home))
            # A bucket that has lost a parameter to this one would be out of date if it ever came back.
            self._senders = {key: each for key, each in self._senders.items() if not {*key} & {*names}}
            self._senders[names] = sender
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
        return self._seen.setdefault(id(parameter), (str(len(self._seen)), parameter))[0]

    def _check_names(self) -> None:
        for word in self._left_out:
            if word != "1d" and not self._names:
                raise UsageError(
                    f"{self.codec}: DDP does not tell which layer is {word!r}; give the model too: "
                    f'hook("{self.codec}", model)'
                )
            if word != "1d" and not _any_within(self._names.values(), word):
                raise UsageError(f"{self.codec}: the model has no layer {word!r} to leave as it is")


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


def _spoil(sender: Sender, flat: Tensor, codes: Sequence[Tensor]) -> None:
    """Some rank's gradient is not finite: nobody is to take this step, and what was sent is owed again."""
    for stretch in sender.coded:
        stretch.of([flat]).fill_(torch.nan)
    for code, memory in zip(codes, sender.memories, strict=False):
        if memory.residual is not None:
            sender.codec.decode(code, memory.residual)


def _any_within(names: Iterable[str], layer: str) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for name in names)
