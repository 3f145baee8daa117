"""Member: the session of a node that is part of a run.

What a worker does between the script's lines: it hands parts of the gradient to the strategy while backward
goes on, lets the strategy take the optimizer's step, and counts.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyrhythm.core.errors import UsageError
from polyrhythm.core.lease import Lease
from polyrhythm.core.peer import Peer
from polyrhythm.core.registry import parse
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.buckets import Bucket
from polyrhythm.model.replica import Replica
from polyrhythm.model.shard import Shard
from polyrhythm.session.api import Session, plain
from polyrhythm.session.batch_norm.choose import choose
from polyrhythm.session.batch_norm.policies import Policy
from polyrhythm.session.context import Seat, ServerDone, session
from polyrhythm.session.data import SharedLoader, mix, seed_all


class Member(Session):
    """A session that is part of a run."""

    def __init__(self, here: Seat, strategy: str | None, batch_norm: str | None = None) -> None:
        super().__init__()
        welcome = here.join(strategy, batch_norm)
        self._seat, self._node = here, here.node
        self._node.sites = [[Peer("worker", rank) for rank in site] for site in welcome["sites"]]
        self.strategy: Strategy = parse(welcome["strategy"])
        self.batch_norm = welcome["batch_norm"]
        self._norms: Policy | None = None
        self.seed: int = welcome["seed"]
        self.rank = here.me.rank
        self.workers = welcome["workers"]  # that the run began with, whoever is there now
        self._group = list(range(self.workers))  # who shares the data, where they step together
        self._group_number = 0  # how many groups there were before this one
        self._late: bool = welcome["life"] > 0  # it takes the place of one that died
        self._loaders: list[SharedLoader] = []
        self._replica: Replica | None = None
        self._seen = 0  # examples, at the last step
        self._due = 0  # those that it is the only one to get, and has not got yet
        self._mark = self._exchange = self._compute = self._wait = 0.0
        self._charged = self._agreed = self._accumulating = False
        self._depth = 0
        self._observing = False  # in which order gradients become ready
        # Where time is simulated it has not passed yet: buckets are handed on later, at their times.
        self._early = self.strategy.overlaps and here.processes
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
        replica = self._replica = Replica(model, optimizer, node.empty, self.strategy.sparse)
        replica.clock = node.now
        replica.layout.check_servers(len(node.servers))
        self._observing = self.strategy.overlaps and self.workers > 1 and len(replica.buckets) > 1
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
            self._norms = choose(
                self.batch_norm, node, replica, shared, lambda: replica.samples, self.seed, self._sum_within,
                self.strategy,
            )  # fmt: skip
            self.strategy.enter(node, replica)
        if self._norms is not None and self._norms.waits:
            # Its collectives are in the midst of backward: whose gradients come when would change the order.
            self._early = False
        if self.strategy.watches_forward:
            self._watch_forward(model)
        self._mark = node.now()
        return (model, optimizer, *shared)

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in range(count):
            self._seat.request("epoch", epoch=epoch, count=count)
            yield epoch

    def log(self, **metrics: Any) -> None:
        if self._late and self._replica is not None and not self._replica.steps:
            return  # it runs through epochs that are over, and knows nothing of them
        told = {name: plain(value) for name, value in metrics.items()}
        step = self._replica.steps if self._replica else 0
        self._seat.request("metrics", t=self._node.now(), step=step, metrics=told)

    def consensus(self) -> nn.Module:
        if self._replica is None:
            return super().consensus()
        with torch.no_grad(), self._seat.away():
            if self._norms is not None:
                self._norms.agree()
            return self._shown(self._replica, self.strategy.consensus(self._node, self._replica))

    def _shown(self, replica: Replica, vectors: Sequence[Tensor]) -> nn.Module:
        shown = replica.shown(vectors)
        if self._norms is not None:
            self._norms.show(shown)
        return shown

    def state_dict(self) -> dict[str, Any]:
        if self._replica is None:
            return {}
        with torch.no_grad(), self._seat.away():
            kept = self.strategy.keep(self._node, self._replica)
        memory = self._replica.memory(self.strategy.remembers)
        return {"strategy": str(self.strategy), **memory, "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._replica is None:
            raise UsageError(
                "session.load_state_dict() comes after session.prepare(model, optimizer, loader)"
            )
        if state and state.get("strategy") != str(self.strategy):
            raise UsageError(
                f"this state was saved under {state.get('strategy')}, and this run is {self.strategy}"
            )
        # One that came in place of another goes on with what the others have: the dead one has gone further.
        if state and not self._late:
            with torch.no_grad(), self._seat.away():
                self._replica.remember(state)
                self.strategy.resume(self._node, self._replica, state.get("kept", {}))

    def close(self) -> None:
        """The script is done: the strategy finishes, and the last worker brings the result home."""
        replica, node = self._replica, self._node
        if replica is None:
            raise UsageError("the script never called session.prepare(model, optimizer, loader)")
        replica.leaves_early = any(loader.left_early for loader in self._loaders)
        with torch.no_grad():
            self.strategy.finish(node, replica)
            if self._norms is not None:
                self._norms.finish()
            if self.strategy.stays:
                self._seat.request("done")  # until all are, others ask, and the answers count
            self._totals()
            self._seat.flush()
            if self._seat.request("bye")["last"]:
                final = self.strategy.collect(node, replica)
                if self._norms is not None:
                    self._norms.collect()
                self._totals()
                self._seat.flush()
                digest, blob = _pack(final, self._shown(replica, final))
                self._seat.bring(digest, blob)

    # --- a worker's step ----------------------------------------------------------------------------

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _watch_forward(self, model: nn.Module) -> None:
        """Lets the strategy know when the script is about to read the parameters for a step."""

        def begin(module: nn.Module, _: object) -> None:
            # Not a copy of the model, which has this hook too, nor an evaluation.
            if module is model and torch.is_grad_enabled():
                assert self._replica is not None
                self._before_forward(self._replica)

        model.register_forward_pre_hook(begin)

    def _before_forward(self, replica: Replica) -> None:
        before = self._node.now()
        with torch.no_grad(), self._seat.away():
            self.strategy.before_forward(self._node, replica)
        self._exchange += self._node.now() - before

    def before_backward(self) -> None:
        self._depth += 1
        replica = self._replica
        if replica is None:
            return
        if self._depth > 1:  # checkpointing calls backward inside backward, and may complete a gradient twice
            self._early = False
            replica.wait_for_the_end()
        else:
            several = self.workers > 1 and len(replica.buckets) > 1
            early = self._early and several and not self._observing and not self._accumulating
            replica.before_backward(self._begin if early else None)

    def after_backward(self) -> None:
        """A backward pass has ended: unless it was another model's, the gradient is complete."""
        self._depth -= 1
        if self._replica is not None and self._replica.touched and not self._depth:
            self._complete(self._replica)

    def failed_backward(self) -> None:
        """The script may catch what was raised and go on: if all do, only this step's gradient is lost."""
        self._depth -= 1
        replica = self._replica
        if replica is not None and not self._depth:
            with torch.no_grad(), self._seat.away():
                if replica.give_up(self._begin):
                    self.strategy.ready(self._node, replica)
                    replica.recover()

    def _complete(self, replica: Replica) -> None:
        with torch.no_grad(), self._seat.away():
            seconds = self._seat.compute_time()
            replica.after_backward()
            self._charged, self._agreed = True, False
            if self._accumulating:
                self._seat.spend(seconds)
            else:
                self._agree(replica, seconds)

    def _agree(self, replica: Replica, seconds: float = 0.0) -> None:
        """The strategy's part between the end of backward and whatever the script does to gradients."""
        if self.strategy.overlaps:
            # A third of a step is forward; the rest is shared out by the elements of each bucket.
            spans = [seconds * (bucket.share * 2 / 3) for bucket in replica.buckets[1:]]
            for span in [seconds - sum(spans), *spans][replica.begun :]:
                self._seat.spend(span)
                replica.hand_on(self._begin)
        else:
            self._seat.spend(seconds)
        before = self._node.now()
        self.strategy.ready(self._node, replica)
        self._exchange += self._node.now() - before
        replica.bind()
        self._agreed = True
        if self._observing:
            self._observing = False
            everyone = reversed(range(len(replica.layout.pieces)))
            order = torch.tensor(list(dict.fromkeys([*replica.touched, *everyone])))
            self.strategy.peers(self._node).broadcast(order)
            replica.arrange(order.tolist())

    def _begin(self, bucket: Bucket) -> None:
        replica = self._replica
        assert replica is not None
        with torch.no_grad():
            self.strategy.part(self._node, replica, bucket.gradient, bucket is replica.buckets[-1])

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
        else:  # gradients that did not come by `backward()`, or none at all
            if self.strategy.watches_forward:
                self._before_forward(replica)
            replica.before_anything()
            self._complete(replica)
        if not self._agreed:
            with torch.no_grad(), self._seat.away():
                self._agree(replica)
        self._charged = False
        replica.steps += 1
        replica.check_finite(node.me)
        before, applying = node.now(), replica.applying
        with torch.no_grad(), self._seat.away():
            self.strategy.step(node, replica)
        after = node.now()
        wait = after - before + self._exchange - (replica.applying - applying)
        compute = after - self._mark - wait
        self._mark, self._exchange = after, 0.0
        self._compute += compute
        self._wait += wait
        samples, self._seen = replica.samples - self._seen, replica.samples
        node.log("step", step=replica.steps, samples=samples, compute_s=compute, wait_s=wait)
        self._totals()

    def _totals(self) -> None:
        assert self._replica is not None
        self._node.totals(
            steps=self._replica.steps,
            samples=self._replica.samples,
            compute_s=self._compute,
            wait_s=self._wait,
        )

    # --- sharing out --------------------------------------------------------------------------------

    def _share(self, loader: DataLoader[Any], number: int) -> SharedLoader:
        def take(epoch: int, batches: int, unseen: int) -> Lease | None:
            assert self._replica is not None
            request = {
                "loader": number, "epoch": epoch, "batches": batches, "unseen": unseen,
                "steps": self._replica.steps, "samples": self._replica.samples,
            }  # fmt: skip
            answer = self._seat.request("lease", **request)
            return None if "over" in answer else Lease(**answer)

        def give_back(unseen: int) -> None:
            self._seat.request("give_back", loader=number, unseen=unseen)

        def deal(epoch: int) -> tuple[int, int, int] | None:
            answer = self._seat.request("deal", loader=number, epoch=epoch)
            if "over" in answer:
                return None
            self._join_group(answer["ranks"], answer["number"])
            return self._group.index(self.rank), len(self._group), answer["epoch"]

        def due(examples: int) -> None:
            assert self._replica is not None
            self._due += examples
            self._seat.request("due", samples=self._replica.samples + self._due)

        return SharedLoader(
            loader,
            rank=self.rank,
            workers=self.workers,
            seed=self.seed,
            leases=None if self.strategy.lockstep else (take, give_back),
            counted=self._counted,
            deal=deal if self.strategy.lockstep and self.strategy.survives else None,
            due=due,
            processes=self._seat.processes,
            peers=[peer.rank for peer in self.strategy.peers(self._node).workers]
            if self.strategy.weighs
            else None,
        )

    def _join_group(self, ranks: list[int], number: int) -> None:
        """From here on these workers share the data; in lockstep they are the ones to keep in step with."""
        if number != self._group_number:
            assert self._replica is not None
            self._group, self._group_number = ranks, number
            with torch.no_grad(), self._seat.away():
                self.strategy.regroup(self._node, self._replica, ranks, number)

    def _counted(self, samples: int, scale: float) -> None:
        assert self._replica is not None
        self._replica.scale(scale)
        self._replica.samples += samples
        self._due -= samples

    # --- BatchNorm ----------------------------------------------------------------------------------

    def _sum_within(self, tensor: Tensor) -> None:
        """Sums up over all workers in the middle of a pass."""
        assert self._replica is not None
        device = self._replica.parameters[0].device.type

        def wait() -> None:
            before = self._node.now()
            # Off while others run: in simulation they are on the same thread.
            with torch.no_grad(), torch.autocast(device, enabled=False), self._seat.away():
                self._node.all_reduce(tensor)
            self._exchange += self._node.now() - before

        self._seat.within(wait)

    def passes(self, backward: Callable[[], None]) -> None:
        """A backward pass; one in which workers wait for each other needs care."""
        if self._norms is not None and self._norms.waits:
            self._seat.passes(backward)
        else:
            backward()

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
    if getattr(optimizer, "own_gradients", False) and not strategy.in_place:
        raise UsageError(
            f"{strategy} works on gradients, and {type(optimizer).__name__} makes its own, row by row: use "
            "hogwild, or torch.optim.SGD with backward()"
        )
    strategy.check_groups(optimizer.param_groups)
    if strategy.codec is not None:
        strategy.codec.check_groups(optimizer.param_groups)


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
    if not isinstance(mine, Member):
        return _backward(*args, **kwargs)
    mine.before_backward()
    try:
        mine.passes(lambda: _backward(*args, **kwargs))
    except BaseException:
        mine.failed_backward()
        raise
    mine.after_backward()
