"""init() and Session: the three lines a user adds.

Alone (`python train.py`) a session does nothing: `prepare` gives back the very objects it got. In a run,
`prepare` is where the roles part: a server serves inside it and never returns; a worker gets its model on
flat vectors, an optimizer whose `step()` is the strategy's, and its share of the loader.
"""

from __future__ import annotations

import copy
import hashlib
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyrhythm.data.sharing import SharedLoader, mix, seed_all
from polyrhythm.errors import UsageError
from polyrhythm.node import Node, Peer
from polyrhythm.replica import Replica
from polyrhythm.shard import Shard
from polyrhythm.strategy import Strategy, parse
from polyrhythm.worlds.leases import Lease


class ServerDone(BaseException):
    """A server has served; nothing of the script after `prepare` is its business."""


class Seat(ABC):
    """A node's place in a run, given by its world: its identity, its Node and the way to the coordinator."""

    me: Peer
    node: Node
    processes: bool = True  # whether DataLoader may start processes of its own

    @abstractmethod
    def request(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Asks the coordinator, and blocks until it answers."""

    @abstractmethod
    def join(self, strategy: str | None) -> dict[str, Any]:
        """Enters the run; returns once every node is there."""

    @abstractmethod
    def bring(self, digest: str, blob: bytes) -> None:
        """Brings the final parameters to the coordinator."""

    def computed(self) -> None:
        """One backward pass is done; a simulated world lets its time pass."""

    def away(self) -> AbstractContextManager[None]:
        """Around whatever may let other nodes of this process run: keeps random numbers apart."""
        return nullcontext()

    @abstractmethod
    def flush(self) -> None:
        """Hands in what is left of the event log."""


seat: ContextVar[Seat | None] = ContextVar("seat", default=None)
session: ContextVar[Session | None] = ContextVar("session", default=None)


def init(strategy: str | Strategy | None = None) -> Session:
    """Enters the run that this process belongs to, or makes a session for one process alone.

    `strategy` is the way the workers keep time, such as "async" or "local:8". One given on the command line
    wins over it.
    """
    text = str(parse(strategy) if isinstance(strategy, str) else strategy) if strategy is not None else None
    here = seat.get()
    mine = Session() if here is None else _Member(here, text)
    session.set(mine)
    return mine


class Session:
    """What `init()` returns. This one is for a process alone: plain PyTorch."""

    rank: int = 0
    workers: int = 1
    strategy: Strategy | None = None

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._copy: nn.Module | None = None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: DataLoader[Any]) -> Any:
        """Call once, with the model, its optimizer and the training loader; go on with what it returns."""
        self._model = model
        return (model, optimizer, *loaders)

    def epochs(self, count: int) -> Iterator[int]:
        """Counts epochs like `range(count)`, and lets the progress line know."""
        yield from range(count)

    def log(self, **metrics: Any) -> None:
        """Records numbers: in the run folder and the summary, or alone on the screen."""
        print("  ".join(f"{name} {_plain(value)}" for name, value in metrics.items()), flush=True)

    def consensus(self) -> nn.Module:
        """The one model the run has agreed on: the server's parameters, or the average of the replicas.

        It is a copy; training does not touch it. All workers call it at the same places of the script.
        """
        if self._model is None:
            raise UsageError("session.consensus() comes after session.prepare(model, optimizer, loader)")
        if self._copy is None:
            self._copy = copy.deepcopy(self._model)
        self._copy.load_state_dict(self._model.state_dict())
        return self._copy.train(self._model.training)


class _Member(Session):
    """A session that is part of a run."""

    def __init__(self, here: Seat, strategy: str | None) -> None:
        super().__init__()
        welcome = here.join(strategy)
        self._seat, self._node = here, here.node
        self.strategy: Strategy = parse(welcome["strategy"])
        self.seed: int = welcome["seed"]
        self.rank = here.me.rank
        self.workers = welcome["workers"]  # that the run began with, whoever is there now
        self._late: bool = welcome["life"] > 0  # it takes the place of one that died
        self._loaders: list[SharedLoader] = []
        self._replica: Replica | None = None
        self._samples = self._seen = 0
        self._mark = self._exchange = self._compute = self._wait = 0.0
        self._charged = False
        # The same on every node, so that all build the same model.
        seed_all(mix("model", self.seed))

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: DataLoader[Any]) -> Any:
        if self._replica is not None:
            raise UsageError("session.prepare() was called twice; a run trains one model")
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "session.prepare() takes a model, its optimizer and the training loader, in this order"
            )
        node = self._node
        _check_optimizer(self.strategy, optimizer)
        if self._seat.me.role == "server":
            self._serve(model, optimizer)
        replica = self._replica = Replica(model, optimizer, node.empty)
        replica.layout.check_servers(len(node.servers))
        self._seat.request("prepared", layout=replica.layout.hash)
        seed_all(mix("worker", self.seed, self.rank))  # from here on each draws its own
        shared = self._loaders = [self._share(loader, number) for number, loader in enumerate(loaders)]
        optimizer.step = types.MethodType(self._step_of(replica), optimizer)  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(lambda _: self.strategy.restore(node, replica))
        if node.servers:
            _refuse_loading(model, optimizer)
        _watch_backward()
        if self._late:  # it runs through past epochs without a step, and schedulers would complain
            optimizer._opt_called = True  # type: ignore[attr-defined]
        with self._seat.away():
            self.strategy.start(node, replica)
        self._mark = node.now()
        return (model, optimizer, *shared)

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in range(count):
            self._seat.request("epoch", epoch=epoch, count=count)
            yield epoch

    def log(self, **metrics: Any) -> None:
        if self._late and self._replica is not None and not self._replica.steps:
            return  # it runs through epochs that are over, and knows nothing of them
        plain = {name: _plain(value) for name, value in metrics.items()}
        step = self._replica.steps if self._replica else 0
        self._seat.request("metrics", t=self._node.now(), step=step, metrics=plain)

    def consensus(self) -> nn.Module:
        if self._replica is None:
            return super().consensus()
        with torch.no_grad(), self._seat.away():
            return self._replica.shown(self.strategy.consensus(self._node, self._replica))

    def close(self) -> None:
        """The script is done: the strategy finishes, and the last worker brings the result home."""
        replica, node = self._replica, self._node
        if replica is None:
            raise UsageError("the script never called session.prepare(model, optimizer, loader)")
        with torch.no_grad():
            self.strategy.finish(node, replica)
            self._totals()
            self._seat.flush()
            if self._seat.request("bye")["last"]:
                final = self.strategy.collect(node, replica)
                self._totals()
                self._seat.flush()
                digest, blob = _pack(final, replica.shown(final))
                self._seat.bring(digest, blob)

    # --- a worker's step ----------------------------------------------------------------------------

    def before_backward(self) -> None:
        if self._replica is not None:
            self._replica.before_backward()

    def after_backward(self) -> None:
        """A backward pass has ended: unless it was another model's, the gradient is complete."""
        if self._replica is not None and self._replica.touched:
            self._complete(self._replica)

    def _complete(self, replica: Replica) -> None:
        with torch.no_grad(), self._seat.away():
            self._seat.computed()
            self._charged = True
            replica.after_backward()
            before = self._node.now()
            self.strategy.ready(self._node, replica)
        replica.bind()
        self._exchange += self._node.now() - before

    def _step_of(self, replica: Replica) -> Callable[..., Any]:
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(replica)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so that one made earlier does not complain
        return step

    def _step(self, replica: Replica) -> None:
        node = self._node
        if self._charged:
            replica.gather()
        else:  # gradients that did not come by `backward()`
            replica.before_anything()
            self._complete(replica)
        self._charged = False
        replica.steps += 1
        replica.check_finite(node.me)
        before = node.now()
        with torch.no_grad(), self._seat.away():
            self.strategy.step(node, replica)
        after = node.now()
        wait = after - before + self._exchange
        compute = after - self._mark - wait
        self._mark, self._exchange = after, 0.0
        self._compute += compute
        self._wait += wait
        samples, self._seen = self._samples - self._seen, self._samples
        node.log("step", step=replica.steps, samples=samples, compute_s=compute, wait_s=wait)
        self._totals()

    def _totals(self) -> None:
        assert self._replica is not None
        self._node.totals(
            steps=self._replica.steps, samples=self._samples, compute_s=self._compute, wait_s=self._wait
        )

    # --- sharing out --------------------------------------------------------------------------------

    def _share(self, loader: DataLoader[Any], number: int) -> SharedLoader:
        def take(epoch: int, batches: int, unseen: int) -> Lease | None:
            assert self._replica is not None
            request = {
                "loader": number, "epoch": epoch, "batches": batches, "unseen": unseen,
                "steps": self._replica.steps, "samples": self._samples,
            }  # fmt: skip
            answer = self._seat.request("lease", **request)
            return None if "over" in answer else Lease(**answer)

        def give_back(unseen: int) -> None:
            self._seat.request("give_back", loader=number, unseen=unseen)

        return SharedLoader(
            loader,
            rank=self.rank,
            workers=self.workers,
            seed=self.seed,
            leases=None if self.strategy.lockstep else (take, give_back),
            counted=self._counted,
            processes=self._seat.processes,
        )

    def _counted(self, samples: int, scale: float) -> None:
        assert self._replica is not None
        self._replica.scale(float(scale > 0) if self.strategy.weighs else scale)
        self._replica.samples += samples
        self._samples += samples

    # --- a server's life ----------------------------------------------------------------------------

    def _serve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        node = self._node
        shard = Shard(model, optimizer, self.rank, len(node.servers), node.empty)
        self._seat.request("prepared", layout=shard.layout.hash)
        with torch.no_grad():
            self.strategy.serve(node, shard)
        node.totals(steps=shard.version, samples=0, compute_s=0.0, wait_s=0.0)
        self._seat.flush()
        self._seat.request("bye")
        raise ServerDone


def _check_optimizer(strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Some strategies are about what one optimizer does, and would be wrong with another."""
    wanted = strategy.optimizers
    if wanted != "any" and type(optimizer) is not getattr(torch.optim, wanted):
        raise UsageError(
            f"{strategy} needs torch.optim.{wanted}, and this script has {type(optimizer).__name__}"
        )
    strategy.check_groups(optimizer.param_groups)


def _refuse_loading(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Where servers hold the parameters and the optimizer's state, what is loaded into a worker is lost."""

    def refuse(what: object, *_: object) -> None:
        if what is model or what is optimizer:
            raise UsageError("load_state_dict() comes before session.prepare(): the servers start from it")

    model.register_load_state_dict_post_hook(refuse)  # type: ignore[no-untyped-call]
    optimizer.register_load_state_dict_post_hook(refuse)


def _pack(vectors: Sequence[Tensor], model: nn.Module) -> tuple[str, bytes]:
    """The SHA-256 of the final parameters, and the whole model in safetensors form."""
    digest = hashlib.sha256()
    for vector in vectors:
        digest.update(vector.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    state = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    return digest.hexdigest(), safetensors.torch.save(state)


def _plain(value: Any) -> Any:
    """A number or text that JSON can hold."""
    if isinstance(value, Tensor | np.generic):
        value = value.item()
    if isinstance(value, float):
        return round(value, 6)
    return value if isinstance(value, int | str | bool | None) else str(value)


_backward = torch.autograd.backward


def _watch_backward() -> None:
    """Lets a session know when a backward pass has ended.

    `Tensor.backward` looks this function up at each call. A hook inside the engine would not do: a strategy
    may block here, and the engine must not be held while others use it (in simulation, hundreds of workers
    take turns on one thread).
    """
    if torch.autograd.backward is _backward:
        torch.autograd.backward = _backward_and_tell


def _backward_and_tell(*args: Any, **kwargs: Any) -> None:
    mine = session.get()
    if not isinstance(mine, _Member):
        return _backward(*args, **kwargs)
    mine.before_backward()
    _backward(*args, **kwargs)
    mine.after_backward()
