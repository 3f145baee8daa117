"""What `prepare` takes, what a script may do to its models afterwards, and what it is told otherwise."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.session.seeds import mix
from tests.support.combine import each_value
from tests.support.programs import FEATURES, MOMENTUM, SGD, Examples, distance, mlp, same, trained
from tests.support.runs import WORLDS, run_in

BOTH = pytest.mark.parametrize("where", ["alone", "simulated"])


def carry_out(where: str, program: Callable[[], None], **options: Any) -> None:
    program() if where == "alone" else run_in(where, program, **{"workers": 2, **options})


def loader(size: int = 24, batch: int = 2) -> DataLoader[Any]:
    return DataLoader(Examples(size), batch_size=batch)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def states(*models: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in nn.ModuleList(models).state_dict().items()}


# --- what prepare refuses ---------------------------------------------------------------------------


def foreign() -> None:
    one, other = mlp(), mlp()
    pr.init().prepare(one, SGD(one.parameters()), SGD(other.parameters()))


def shared() -> None:
    model = mlp()
    pr.init().prepare(model, SGD(model.parameters()), SGD(model[2].parameters()))


def forgotten() -> None:
    model = mlp()
    pr.init().prepare(model, SGD(model[0].parameters()))


def no_optimizer() -> None:
    pr.init().prepare(mlp(), loader())


def twice() -> None:
    session, model, other = pr.init(), mlp(), mlp()
    session.prepare(model, SGD(model.parameters()))
    session.prepare(other, SGD(other.parameters()))


def new_group() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    _, optimizer = pr.init().prepare(model, SGD(model[2].parameters()))
    optimizer.add_param_group({"params": model[0].parameters()})


def new_head() -> None:
    session, model = pr.init(), mlp()
    session.prepare(model, SGD(model.parameters()))
    model[2] = nn.Linear(8, 3).double()
    session.consensus()


REFUSED = {
    foreign: r"parameter 0 of SGD, of shape \[8, 5\], is in none of the models .*: pass its model too",
    shared: "2.weight is in two optimizers .*: leave it out of one",
    forgotten: r"no optimizer .* has 2.weight, 2.bias: pass the optimizer .* or freeze them",
    no_optimizer: "got 1 models and 0 optimizers; pass them all to one call",
    twice: "called twice: pass all models, optimizers and schedulers to one call",
    new_group: r"before session.prepare\(\): give the optimizer all parameters at the start, freeze",
    new_head: "no optimizer given to session.prepare.. has 2.weight, 2.bias",
}


@BOTH
@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_prepare_refuses_what_would_not_be_trained(program: Callable[[], None], where: str) -> None:
    """In a run as alone, in one line that says what would work."""
    with pytest.raises(UsageError, match=REFUSED[program]) as refused:
        carry_out(where, program)
    assert "\n" not in str(refused.value)


@BOTH
def test_a_later_prepare_takes_loaders(where: str) -> None:
    def program() -> None:
        session, model = pr.init(), mlp()
        model, optimizer = session.prepare(model, SGD(model.parameters()))
        frozen = nn.Linear(2, 2).requires_grad_(False)
        batches, same_frozen = session.prepare(loader(), frozen)
        train(model, optimizer, batches)
        assert same_frozen is frozen

    carry_out(where, program)


# --- two optimizers on one model, frozen parts, closures --------------------------------------------


def body_and_head(session: pr.Session, batches: Any) -> nn.Module:
    """Two optimizers on one model; the head begins to train in the second epoch."""
    model = mlp()
    body, head = MOMENTUM(model[0].parameters()), SGD(model[2].parameters())
    model[2].requires_grad_(False)
    model, head, body, batches = session.prepare(model, head, body, batches)
    for epoch in range(2):
        model[2].requires_grad_(epoch > 0)
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            body.step()
            if epoch:
                head.step()
    return model


@pytest.mark.parametrize("strategy", ["allreduce", "local:3", "async", "gossip"])
def test_two_optimizers_on_one_model_and_unfreezing_train_like_plain_pytorch(strategy: str) -> None:
    seen = {}

    def program() -> None:
        session = pr.init()
        seen["run"] = states(body_and_head(session, loader()))

    run_in("simulated", program, strategy=strategy, workers=1)
    torch.manual_seed(mix("model", 0))
    assert same(seen["run"], states(body_and_head(pr.Session(), loader())))


def unfreezing(session: pr.Session, batches: Any) -> nn.Module:
    """One optimizer that has all parameters from the start; at first only the head is trained."""
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer, batches = session.prepare(model, MOMENTUM(model.parameters()), batches)
    for epoch in range(2):
        model[0].requires_grad_(epoch > 0)
        model[2].requires_grad_(epoch == 0)  # so that the second epoch reaches only what was unfrozen
        train(model, optimizer, batches)
    return model


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_parameters_that_are_unfrozen_later_are_trained(strategy: str, world: str) -> None:
    """With one worker as in plain PyTorch, with two under allreduce as on the union of their batches."""
    torch.manual_seed(mix("model", 0))
    law = states(unfreezing(pr.Session(), loader(batch=4)))

    def program() -> None:
        session = pr.init()
        model = unfreezing(session, loader(batch=4 // session.workers))
        session.log(close=distance(states(model), law) < 1e-12)

    for workers in (1, 2) if strategy == "allreduce" else (1,):
        assert run_in(world, program, strategy=strategy, workers=workers)["metrics"]["close"]


def line_search(session: pr.Session, batches: Any) -> nn.Module:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    model, optimizer, batches = session.prepare(model, optimizer, batches)
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("size", [24, 21])
def test_lbfgs_under_allreduce_searches_on_the_union_of_the_batches(size: int, world: str) -> None:
    """Gradient and loss of each evaluation are averaged, so all workers take the same steps."""
    torch.manual_seed(mix("model", 0))
    law = states(line_search(pr.Session(), loader(size, batch=12)))

    def program() -> None:
        session = pr.init()
        model = line_search(session, loader(size, batch=12 // session.workers))
        session.log(**{f"distance{session.rank}": distance(states(model), law)})

    metrics = run_in(world, program, workers=2)["metrics"]
    assert max(metrics.values()) < 1e-9
    assert run_in(world, program, workers=1)["metrics"]["distance0"] == 0


# --- parameters that the script replaces ------------------------------------------------------------


def by_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 0.5


def by_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


@pytest.mark.parametrize("replace", [by_data, by_vector], ids=["data", "vector"])
@pytest.mark.parametrize("strategy", ["allreduce", "local:3", "gossip", "hogwild"])
def test_replaced_parameters_are_taken_in(replace: Any, strategy: str) -> None:
    """A script that sets `p.data` in the middle trains, and shows, what it would alone."""

    def program(session: pr.Session) -> dict[str, Tensor]:
        model = mlp()
        model, optimizer, batches = session.prepare(model, MOMENTUM(model.parameters()), loader())
        train(model, optimizer, batches)
        replace(model)
        train(model, optimizer, batches)
        replace(model)
        return {**states(session.consensus()), **{f"own {k}": v for k, v in states(model).items()}}

    seen = {}
    run_in("simulated", lambda: seen.update(program(pr.init())), strategy=strategy, workers=1)
    torch.manual_seed(mix("model", 0))
    assert same(seen, program(pr.Session()))


class ReplacingSGD(torch.optim.Optimizer):
    """Makes new tensors instead of working in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.data = torch.add(each.data, each.grad, alpha=-0.1)


@pytest.mark.parametrize("strategy", ["allreduce", "local:3", "async", "gossip"])
def test_an_optimizer_may_replace_parameters(strategy: str) -> None:
    digests = []
    for kind in (SGD, ReplacingSGD):

        def program(kind: Any = kind) -> None:
            session, model = pr.init(), mlp()
            model, optimizer, batches = session.prepare(model, kind(model.parameters()), loader())
            train(model, optimizer, batches)

        digests.append(run_in("simulated", program, strategy=strategy, workers=2)["digest"])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("strategy", ["sync", "async", "broadcast:0.01"])
def test_replaced_parameters_are_refused_where_a_step_would_overwrite_them(strategy: str) -> None:
    def program(replace: Callable[[nn.Module], None]) -> None:
        session, model = pr.init(), mlp()
        model, optimizer, batches = session.prepare(model, SGD(model.parameters()), loader())
        model[0].weight.data = model[0].weight.data.clone()  # the same values
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        optimizer.load_state_dict(optimizer.state_dict())
        replace(model)
        train(model, optimizer, batches)

    run_in("simulated", lambda: program(lambda model: None), strategy=strategy, workers=2)
    with pytest.raises(UsageError, match=r"0\.weight was given other values after session\.prepare"):
        run_in("simulated", lambda: program(by_data), strategy=strategy, workers=2)
    with pytest.raises(UsageError, match=r"weight: call load_state_dict\(\) before session.prepare\(\)"):
        run_in("simulated", lambda: program(lambda model: model[0].load_state_dict(mlp()[0].state_dict())),
               strategy=strategy, workers=2)  # fmt: skip


def test_another_dtype_is_refused() -> None:
    def program() -> None:
        session, model = pr.init(), mlp()
        model, optimizer, _ = session.prepare(model, SGD(model.parameters()), loader())
        model.float()
        train(model, optimizer, [(x.float(), y) for x, y in loader()])

    with pytest.raises(UsageError, match=r"0.weight was float64 \[8, 5\] on cpu .* is float32 .*: convert"):
        run_in("simulated", program, workers=2)


# --- saving and copying a prepared model ------------------------------------------------------------


class Renamed(nn.Module):
    """Copies of it have other names, and it keeps the last activation, as some libraries' models do."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.add()

    def add(self) -> None:
        Renamed.made += 1
        self.add_module(f"layer{Renamed.made}", nn.Linear(FEATURES, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        self.last = next(self.children())(x)
        return self.last

    def __deepcopy__(self, memo: dict[int, Any]) -> Renamed:
        other = Renamed()
        mine, theirs = next(self.children()), next(other.children())
        theirs.weight, theirs.bias = (copy.deepcopy(p, memo) for p in mine.parameters())  # type: ignore[assignment]
        return other


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        self.last = [self.layer(x)]
        return self.last[0]


@pytest.mark.parametrize("make", [Renamed, Keeps])
def test_models_that_are_hard_to_copy_are_not_lost_at_the_end(make: Any, tmp_path: Path) -> None:
    """The file has the names of the model, whatever those of its copies are."""
    names: list[str] = []

    def program() -> None:
        session, model = pr.init(), make()
        model, optimizer, batches = session.prepare(model, SGD(model.parameters()), loader())
        session.consensus()
        train(model, optimizer, batches)
        session.consensus()
        names.extend(model.state_dict())

    assert trained(run_in("simulated", program, workers=1, runs=tmp_path)).keys() == set(names)


def nbytes(thing: Any) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return len(file.getvalue())


@each_value(
    ("world", WORLDS),
    ("strategy", ["allreduce", "async", "broadcast:0.01", "hogwild:lock=yes", "local:2,momentum=average"]),
)
def test_a_prepared_model_is_saved_and_copied_like_any_other(strategy: str, world: str) -> None:
    """A head is saved without the body; copies and pickles work, and have no part in the run."""
    moves = strategy.startswith("hogwild")  # other workers step on the same memory

    def program() -> None:
        session = pr.init()
        model = nn.Sequential(nn.Linear(FEATURES, 2000), nn.Tanh(), nn.Linear(2000, 3)).double()
        model, optimizer, batches = session.prepare(model, MOMENTUM(model.parameters()), loader())
        train(model, optimizer, batches)
        head = sum(each.nbytes for each in model[2].parameters())
        assert nbytes(model[2].state_dict()) < head + 4000
        assert nbytes(model[2]) < head + 8000
        assert nbytes(session.consensus()[2].state_dict()) < head + 4000
        before = states(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert moves or same(states(other), before)
            train(other, SGD(other.parameters()), loader())
            other.load_state_dict({name: value + 1 for name, value in other.state_dict().items()})
        copy.deepcopy(optimizer), nbytes(optimizer)
        assert moves or same(states(model), before)

    run_in(world, program, strategy=strategy, workers=2)


@pytest.mark.parametrize("strategy", ["allreduce", "async", "local:3", "gossip", "hogwild"])
def test_a_consensus_stays_as_it_was(strategy: str) -> None:
    """`best = session.consensus()` is not changed by training, nor by the next call."""

    def program() -> None:
        session, model = pr.init(), mlp()
        model, optimizer, batches = session.prepare(model, SGD(model.parameters()), loader())
        best = session.consensus()
        kept = states(best)
        train(model, optimizer, batches)
        assert not same(states(session.consensus()), kept)
        assert same(states(best), kept)

    run_in("simulated", program, strategy=strategy, workers=2)
