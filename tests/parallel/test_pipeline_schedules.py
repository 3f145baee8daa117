"""Schedules of pipelines that know the loss: what they compute, what they keep, how long they are idle."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.parallel.orders import order
from tests.parallel.test_pipelines import Skipping, chain
from tests.support.combine import each_value, few
from tests.support.programs import ADAM, MOMENTUM, SPEEDS, events, same, trained
from tests.support.runs import WORLDS, run_in

ROWS, BATCH = 61, 8  # the last batch is smaller
Make = Callable[[], nn.Module]


def deep_chain() -> nn.Module:
    return nn.Sequential(*chain(), *chain())


class DeepSkipping(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.inner.extend(nn.Linear(8, 8) for _ in range(4))


# By model and number of segments: the layers that begin one.
CUTS: dict[Make, dict[int, str]] = {
    chain: {2: "4", 3: "2/4", 4: "2/4/6"},
    Skipping: {2: "inner.2", 3: "inner.1/inner.3", 4: "inner.1/inner.2/inner.3"},
    deep_chain: {8: "2/4/6/8/10/12/14"},
    DeepSkipping: {8: "/".join(f"inner.{number}" for number in range(1, 8))},
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(ROWS, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    return TensorDataset(x, y)


class Training:
    """Trains by `session.backward`; each worker writes the losses that it has got."""

    def __init__(
        self,
        make: Make,
        folder: Path,
        optimizer: Any = MOMENTUM,
        epochs: int = 1,
        loss: Callable[..., Tensor] = F.mse_loss,
        schedule: bool = False,
        between: Callable[[Any, nn.Module], None] = lambda session, model: None,
    ) -> None:
        self.make, self.folder, self.optimizer = make, folder, optimizer
        self.epochs, self.loss, self.schedule, self.between = epochs, loss, schedule, between

    def __call__(self) -> None:
        torch.manual_seed(5)
        session = pr.init()
        model = self.make().double()
        optimizer = self.optimizer(model.parameters())
        loader = DataLoader(data(), BATCH)
        model, optimizer, loader = session.prepare(model, optimizer, loader, loss=self.loss)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if self.schedule else None
        losses = []
        for _ in range(self.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                losses.append(session.backward(x, y).item())
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            self.between(session, model)
        context: Any = getattr(session, "_context", None)
        name = context.worker_node.me.rank if hasattr(context, "worker_node") else "alone"
        (self.folder / f"losses {name}.json").write_text(json.dumps(losses))


def losses(folder: Path, workers: int) -> list[list[float]]:
    return [json.loads((folder / f"losses {rank}.json").read_text()) for rank in range(workers)]


def owner(make: Make, stages: int, name: str) -> int:
    """The stage that owns a parameter."""
    if stages == 1:
        return 0
    cuts = CUTS[make][stages].split("/")
    if make is chain:
        return sum(int(cut) <= int(name.split(".", 1)[0]) for cut in cuts)
    return sum(cut <= name[:7] for cut in cuts) if name.startswith("inner") else 0


def serially(
    make: Make,
    stages: int,
    version: Callable[[int, int], int],
    optimizer: Any,
    pieces: int = 1,
    epochs: int = 1,
    decay: int = 0,
    discount: float = 1.0,
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains as the formula says; the losses by batch.

    For batch t the parameters of stage s have the version `version(t, s)`: as after so many updates.
    Gradients are multiplied by the discount.
    """
    torch.manual_seed(5)
    model = make().double()
    used = optimizer(model.parameters())
    history = [{name: each.detach().clone() for name, each in model.named_parameters()}]
    found = []
    batches = [batch for _ in range(epochs) for batch in DataLoader(data(), BATCH)]
    for t, (x, y) in enumerate(batches):
        weights = {
            name: history[version(t, owner(make, stages, name))][name].clone().requires_grad_()
            for name in history[0]
        }
        total = torch.zeros((), dtype=torch.float64)
        gradients: list[Tensor] = []
        count = min(pieces, len(x))
        for x_m, y_m in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
            share = len(x_m) / len(x)
            loss = F.mse_loss(functional_call(model, weights, (x_m,)), y_m)
            total += loss.detach() * share
            new = torch.autograd.grad(loss, list(weights.values()), torch.full_like(loss, share))
            gradients = [a + b for a, b in zip(gradients, new, strict=True)] if gradients else list(new)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient * discount
        used.step()
        if decay and (t + 1) % decay == 0:
            for group in used.param_groups:
                group["lr"] *= 0.5
        history.append({name: each.detach().clone() for name, each in model.named_parameters()})
        found.append(total.item())
    return history[-1], found


def most_in_flight(summary: dict[str, Any], apart: bool = False) -> list[int]:
    """By stage: the micro-batches of a chunk that have passed forward and not backward, at most.

    `apart`: a backward pass ends with the weight gradients, which come later.
    """
    now, most = Counter[int](), Counter[int]()
    change = {"forward": 1, "backward": -1, "input": 0, "weights": -apart}
    for event in events(summary, "micro-batch"):
        now[event["stage"]] += change[event["direction"]]
        most[event["stage"]] = max(most[event["stage"]], now[event["stage"]])
    assert not any(now.values())
    return [most[stage] for stage in sorted(most)]


def ran(summary: dict[str, Any], stage: int) -> list[tuple[str, int, int]]:
    """What a stage has run, in order: the direction, the micro-batch and the segment."""
    return [
        (each["direction"], each["micro_batch"], each["segment"])
        for each in events(summary, "micro-batch")
        if each["stage"] == stage
    ]


@each_value(
    ("schedule", ["1f1b", "interleaved", "zerobubble", "zerobubble,chunks=2"]),
    ("make", [Skipping, chain]),
    ("stages", [2, 4]),
    ("pieces", [3, 8]),
    ("world", WORLDS),
)
def test_synchronous_schedules_train_like_micro_batches_in_one_process(
    schedule: str, make: Make, stages: int, pieces: int, world: str, tmp_path: Path
) -> None:
    chunks = 2 if schedule in ("interleaved", "zerobubble,chunks=2") else 1
    make = {chain: deep_chain, Skipping: DeepSkipping}[make] if stages * chunks > 4 else make
    cuts, apart = CUTS[make][stages * chunks], schedule.startswith("zerobubble")
    strategy = f"pipeline:{stages},micro_batches={pieces},schedule={schedule},split_at={cuts}"
    summary = run_in(world, Training(make, tmp_path), strategy=strategy, workers=stages, runs=tmp_path)
    expected, computed = serially(make, 1, lambda t, s: t, MOMENTUM, pieces)
    found = trained(summary)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-12)
    each, *others = losses(tmp_path, stages)
    assert each == pytest.approx(computed, abs=1e-12)
    assert all(other == each for other in others)
    for stage in range(stages):
        wanted = [
            (each.kind, each.micro_batch, each.chunk * stages + stage)
            for rows in [BATCH] * (ROWS // BATCH) + [ROWS % BATCH]
            for each in order(stage, stages, chunks, min(pieces, rows), apart)
        ]
        assert [each for each in ran(summary, stage) if apart or each[0] != "weights"] == wanted
    if chunks == 1:
        bounds = [stages if apart else stages - stage for stage in range(stages)]
        assert most_in_flight(summary, apart) == [min(bound, pieces) for bound in bounds]
    else:
        assert max(most_in_flight(summary, apart)) <= chunks * pieces


@few("schedule", ["interleaved", "zerobubble,chunks=2", "zerobubble"], 2)
def test_synchronous_schedules_have_the_bits_of_1f1b_on_the_same_segments(
    schedule: str, tmp_path: Path
) -> None:
    """They add the gradients of micro-batches in order, also of an uneven batch and of tied weights."""
    stages = 4 if schedule == "zerobubble" else 2

    def final(world: str, schedule: str, stages: int) -> dict[str, Tensor]:
        strategy = f"pipeline:{stages},micro_batches=5,schedule={schedule},split_at={CUTS[Skipping][4]}"
        program = Training(Skipping, tmp_path)
        return trained(run_in(world, program, strategy=strategy, workers=stages, runs=tmp_path))

    wanted = final("simulated", "1f1b", 4)
    assert all(same(final(world, schedule, stages), wanted) for world in WORLDS)


class Recurring(nn.Module):
    """A weight in the segments 0 and 2, a value of 0 that 2 takes, and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Conv1d(1, 1, 3, padding=1)
        self.third, self.fourth = nn.Linear(6, 6), nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        begin = torch.tanh(self.first(x))
        h = torch.tanh(self.second(begin.unsqueeze(1)).squeeze(1))
        h = torch.tanh(self.third(h) + F.linear(begin, self.first.weight))
        return self.fourth(h.unsqueeze(1)).squeeze(1) + begin


@few("schedule", ["zerobubble,chunks=2", "interleaved"], 1)
def test_chunks_of_one_worker_share_values_and_weights(schedule: str, tmp_path: Path) -> None:
    strategy = f"pipeline:2,micro_batches=3,schedule={schedule},split_at=second/third/fourth"
    program = Training(Recurring, tmp_path)
    summary = run_in("simulated", program, strategy=strategy, workers=2, runs=tmp_path)
    found, (expected, _) = trained(summary), serially(Recurring, 1, lambda t, s: t, MOMENTUM, 3)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-12)


@few(
    "strategy, world",
    [
        ("pipeline:2,schedule=zerobubble@tensor:2", "real"),
        ("tensor:2@pipeline:2,schedule=1f1b", "simulated"),
        ("pipeline:2,schedule=interleaved@tensor:2", "simulated"),
        ("allreduce@pipeline:2,schedule=1f1b@tensor:2", "simulated"),
    ],
    quick=1,
)
def test_stages_of_divided_layers_train_like_the_whole_model(
    strategy: str, world: str, tmp_path: Path
) -> None:
    workers = 8 if strategy.startswith("allreduce") else 4
    summary = run_in(world, Training(chain, tmp_path), strategy=strategy, workers=workers, runs=tmp_path)
    found = trained(summary)
    torch.manual_seed(5)
    model = chain().double()
    optimizer = MOMENTUM(model.parameters())
    for x, y in DataLoader(data(), BATCH * workers // 4):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    for name, each in model.state_dict().items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-12)
    assert len({tuple(each) for each in losses(tmp_path, workers)}) == workers // 4


SCHEDULES: dict[str, Callable[[int, int, int], int]] = {  # the version that stage s of K takes for batch t
    "pipedream": lambda t, s, count: max(0, t - (count - s - 1)),
    "2bw": lambda t, s, count: max(0, t - 1),
}


@each_value(
    ("schedule", list(SCHEDULES)),
    ("stages", [2, 3, 4]),
    ("make", [Skipping, chain]),
    ("optimizer", [MOMENTUM, ADAM]),
    ("world", WORLDS),
)
def test_asynchronous_pipelines_follow_their_formula(
    schedule: str, stages: int, make: Make, optimizer: Any, world: str, tmp_path: Path
) -> None:
    pieces = 1 if schedule == "pipedream" else 4
    strategy = f"pipeline:{stages},schedule={schedule},split_at={CUTS[make][stages]},micro_batches={pieces}"
    program = Training(make, tmp_path, optimizer, epochs=2, schedule=True)
    summary = run_in(world, program, strategy=strategy, workers=stages, runs=tmp_path)

    def version(t: int, stage: int) -> int:
        return SCHEDULES[schedule](t, stage, stages)

    expected, computed = serially(make, stages, version, optimizer, pieces, epochs=2, decay=2)
    found = trained(summary)
    if pieces == 1:
        assert same({name: found[name] for name in expected}, expected)
    else:  # sums over micro-batches are rounded differently
        for name, each in expected.items():
            torch.testing.assert_close(found[name], each, rtol=0, atol=1e-13)
    # Every stage reports the loss that all know by then.
    heard = stages - 1 if schedule == "pipedream" else 1
    known = [computed[max(0, t - heard)] for t in range(len(computed))]
    assert all(each == pytest.approx(known, abs=1e-13) for each in losses(tmp_path, stages))
    # Every batch was applied on every stage, as stale as the formula says, and nothing more was kept.
    assert summary["samples"] == 2 * ROWS
    stale = {(int(each["node"].split()[1]), each["sequence"]): each for each in events(summary, "apply")}
    assert {key: each["staleness"] for key, each in stale.items()} == {
        (stage, t): t - version(t, stage) for stage in range(stages) for t in range(len(computed))
    }
    assert all(most <= stages - stage for stage, most in enumerate(most_in_flight(summary)))


NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.75, nesterov=True)
NADAM = partial(torch.optim.NAdam, lr=0.01, betas=(0.99, 0.999), decoupled_weight_decay=True)


@each_value(("discount", [0.25, 1.0]), ("stages", [2, 4]), ("world", WORLDS))
def test_late_gradients_are_discounted_if_the_optimizer_looks_ahead(
    discount: float, stages: int, world: str, tmp_path: Path
) -> None:
    optimizer = NESTEROV if discount < 1 else NADAM  # which has the discount in its own rule
    strategy = f"pipeline:{stages},schedule=pipedream,lookahead=yes,split_at={CUTS[Skipping][stages]}"
    program = Training(Skipping, tmp_path, optimizer, epochs=2)
    found = trained(run_in(world, program, strategy=strategy, workers=stages, runs=tmp_path))
    expected, _ = serially(
        Skipping, stages, lambda t, s: max(0, t - (stages - s - 1)), optimizer, epochs=2, discount=discount
    )
    assert same({name: found[name] for name in expected}, expected)


def test_the_look_ahead_is_that_of_the_paper(tmp_path: Path) -> None:
    """w(t+1) = w(t) + d(t) - lr (1-m) g(t), d(t) = m (w(t) - w(t-1)), with g at an earlier w + d."""
    stages, lr, momentum = 4, 0.05, 0.75
    strategy = f"pipeline:{stages},schedule=pipedream,lookahead=yes,split_at={CUTS[chain][stages]}"
    program = Training(chain, tmp_path, NESTEROV)
    found = trained(run_in("simulated", program, strategy=strategy, workers=stages, runs=tmp_path))
    torch.manual_seed(5)
    model = chain().double()
    w = {name: each.detach().clone() for name, each in model.named_parameters()}
    before, ahead = dict(w), [dict(w)]  # ahead: w + d after so many updates
    for t, (x, y) in enumerate(DataLoader(data(), BATCH)):
        used = {
            name: ahead[max(0, t - (stages - owner(chain, stages, name) - 1))][name].clone().requires_grad_()
            for name in w
        }
        F.mse_loss(functional_call(model, used, (x,)), y).backward()
        after = {
            name: w[name] + momentum * (w[name] - before[name]) - lr * (1 - momentum) * used[name].grad
            for name in w
        }
        before, w = w, after
        ahead.append({name: w[name] + momentum * (w[name] - before[name]) for name in w})
    for name, each in ahead[-1].items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-13)


def idle(summary: dict[str, Any]) -> list[float]:
    """By stage: the share of the time from the first to the last micro-batch in which it computes nothing."""
    found = events(summary, "micro-batch")
    begin, end = min(each["began"] for each in found), max(each["began"] + each["seconds"] for each in found)
    busy = Counter[int]()
    for each in found:
        busy[each["stage"]] += each["seconds"]
    return [1 - busy[stage] / (end - begin) for stage in sorted(busy)]


@pytest.mark.slow
def test_the_bubble_is_that_of_the_formula(tmp_path: Path) -> None:
    def waits(schedule: str, make: Make = chain) -> list[float]:
        cuts = CUTS[make][8 if make is deep_chain else 4]
        program, strategy = Training(make, tmp_path), f"pipeline:4,schedule={schedule},split_at={cuts}"
        simulated = run_in(
            "simulated", program, strategy=strategy, workers=4, runs=tmp_path, cluster=SPEEDS["constant"]
        )
        return idle(simulated)

    def expected(bubble: float) -> list[float]:
        """Seven batches of 8 micro-batches, and one of 5, which take 3 each in a stage."""
        return [1 - 8 / (7 * (24 + bubble) / 24 + (15 + bubble) / 15)] * 4

    assert waits("gpipe") == pytest.approx(expected(9), abs=2e-3)  # messages take a little
    assert waits("1f1b") == pytest.approx(expected(9), abs=2e-3)
    assert waits("zerobubble") == pytest.approx(expected(3), abs=2e-3)
    assert waits("interleaved", deep_chain) == pytest.approx(expected(9 / 2), abs=2e-3)
    assert waits("zerobubble,chunks=2", deep_chain) == pytest.approx(expected(3 / 2), abs=2e-3)
    assert max(waits("2bw")) < expected(9)[0] / 2


def test_two_models_in_asynchronous_pipelines_are_one_with_their_batches_together(tmp_path: Path) -> None:
    """Also in the last round, in which one of them has fewer examples, and its batch is in the pipeline."""
    strategy = "allreduce@pipeline:2,schedule=pipedream,split_at=4"
    found = trained(
        run_in("simulated", Training(chain, tmp_path), strategy=strategy, workers=4, runs=tmp_path)
    )
    torch.manual_seed(5)
    model = chain().double()
    optimizer = MOMENTUM(model.parameters())
    history = [{name: each.detach().clone() for name, each in model.named_parameters()}]
    for t, (x, y) in enumerate(DataLoader(data(), 2 * BATCH)):
        used = {name: history[max(0, t - 1 + owner(chain, 2, name))][name] for name in history[0]}
        weights = {name: each.clone().requires_grad_() for name, each in used.items()}
        F.mse_loss(functional_call(model, weights, (x,)), y).backward()
        for name, parameter in model.named_parameters():
            parameter.grad = weights[name].grad
        optimizer.step()
        history.append({name: each.detach().clone() for name, each in model.named_parameters()})
    for name, each in history[-1].items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-12)


def test_a_consensus_is_of_all_batches_and_the_pipeline_fills_again(tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    def evaluate(session: Any, model: nn.Module) -> None:
        seen.append(session.consensus().state_dict())
        with torch.no_grad():
            model(torch.zeros(2, 6, dtype=torch.float64))  # nothing is in the pipeline

    program = Training(chain, tmp_path, epochs=2, between=evaluate)
    strategy = "pipeline:2,schedule=pipedream,split_at=4"
    final = trained(run_in("simulated", program, strategy=strategy, workers=2, runs=tmp_path))
    first, _ = serially(chain, 2, lambda t, s: max(0, t - 1 + s), MOMENTUM)
    second, _ = serially(chain, 2, lambda t, s: max(8 * (t >= 8), t - 1 + s), MOMENTUM, epochs=2)
    assert len(seen) == 4
    assert all(same(each, state) for each, state in zip(seen, [first, first, second, second], strict=True))
    assert same(final, second)


@few("schedule", ["pipedream", "2bw", "1f1b", "gpipe"], 1)
def test_local_steps_go_with_every_schedule(schedule: str, tmp_path: Path) -> None:
    strategy = f"local:2@pipeline:2,schedule={schedule}"
    summary = run_in("simulated", Training(Skipping, tmp_path), strategy=strategy, workers=4, runs=tmp_path)
    assert summary["samples"] == ROWS
    assert summary["steps"] == 8  # four of each model


class Several(nn.Module):
    """Two inputs, and outputs of two stages, one of which is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        inner = torch.tanh(self.first(x)) * scale
        return {"inner": inner, "outer": self.second(inner), "x": x}


def two_losses(output: dict[str, Tensor], y: Tensor, more: dict[str, Any]) -> Tensor:
    return F.mse_loss(output["outer"], y) + more["weight"] * F.l1_loss(
        output["inner"], more["z"] + output["x"]
    )


class Calling:
    """Trains a model of several inputs and outputs, with several targets; keeps the losses."""

    def __init__(self, seen: list[Any], named: bool) -> None:
        self.seen, self.named = seen, named

    def __call__(self) -> None:
        torch.manual_seed(1)
        session = pr.init()
        model = Several().double()
        x, scale, y, z = (torch.randn(7, 6, dtype=torch.float64) for _ in range(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = {"scale": scale, "x": x} if self.named else (x, scale)
        model, optimizer = session.prepare(model, optimizer, example=inputs, loss=two_losses)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            found.append(session.backward(inputs, y, {"z": z, "weight": 0.5}).item())
            optimizer.step()
        self.seen.append((found, session.consensus().state_dict()))


def test_several_inputs_outputs_and_targets(tmp_path: Path) -> None:
    seen: list[Any] = []
    Calling(seen, named=False)()  # plain PyTorch
    for strategy, workers in (
        ("allreduce", 1),
        ("pipeline:2,schedule=1f1b,micro_batches=3,split_at=second", 2),
    ):
        run_in("simulated", Calling(seen, named=workers > 1), strategy=strategy, workers=workers)
    (computed, alone), *others = seen
    assert len(others) == 3
    for found, state in others:
        assert found == pytest.approx(computed, abs=1e-12)
        for name, each in alone.items():
            torch.testing.assert_close(state[name], each, rtol=0, atol=1e-12)


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output @ y.T, torch.arange(len(y)))


class Wrong(Training):
    """Trains in some wrong way."""

    def __init__(self, wrong: str, loss: Any = F.mse_loss) -> None:
        super().__init__(chain, Path(), loss=loss)
        self.wrong = wrong

    def __call__(self) -> None:
        session, model = pr.init(), chain().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = None if self.wrong == "no loss" else self.loss
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data(), BATCH), loss=loss)
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            if self.wrong == "call":
                F.mse_loss(model(x), y).backward()
            session.backward(x.requires_grad_(self.wrong == "input"), y[:2] if self.wrong == "rows" else y)
            if self.wrong == "accumulate" and not number:
                continue
            if self.wrong == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if self.wrong == "evaluate":
                with torch.no_grad():
                    model(x)
            optimizer.step()


@few(
    "schedule, program, error",
    [
        ("1f1b", Wrong("no loss"), "needs to know the loss"),
        ("1f1b", Wrong("call"), "call that instead of the model"),
        ("1f1b", Wrong("input"), "an input of the model requires a gradient"),
        ("1f1b", Wrong("rows"), "cannot be cut into micro-batches"),
        ("1f1b", Wrong("", nn.MSELoss(reduction="sum")), "not the mean of the losses of its rows"),
        ("1f1b", Wrong("", nn.MSELoss(reduction="none")), "a tensor without dimensions"),
        ("2bw,micro_batches=4", Wrong("", contrastive), "not the mean of the losses of its rows"),
        ("pipedream,micro_batches=4", Wrong(""), "leave micro_batches out"),
        ("1f1b,chunks=2", Wrong(""), "need schedule=interleaved or schedule=zerobubble"),
        ("interleaved,split_at=2", Wrong(""), "2 stages of 2 chunks begin at 3 layers, but split_at names 1"),
        ("interleaved,chunks=3", Wrong(""), "has more segments .2 x 3. than the model has layers"),
        ("pipedream@tensor:2", Wrong(""), "keeps old versions of parameters, and tensor lends some"),
        ("pipedream,lookahead=yes", Wrong(""), "needs an optimizer with Nesterov momentum"),
        ("1f1b,lookahead=yes", Wrong(""), "those of schedule=1f1b are not late"),
        ("pipedream", Wrong("clip"), "leave out clip_grad_norm_"),
        ("pipedream", Wrong("accumulate"), "called twice before optimizer.step"),
        ("pipedream", Wrong("evaluate"), "evaluate session.consensus"),
    ],
    quick=5,
)
def test_what_a_schedule_cannot_do_is_refused_in_one_line(schedule: str, program: Wrong, error: str) -> None:
    with pytest.raises(pr.UsageError, match=error) as raised:
        workers = 4 if "tensor" in schedule else 2
        run_in("simulated", program, strategy=f"pipeline:2,schedule={schedule}", workers=workers)
    assert "\n" not in str(raised.value)


def test_asynchronous_pipelines_refuse_servers_and_workers_that_do_not_step_together() -> None:
    for strategy in ("async", "sync", "ssp:3", "adpsgd"):
        with pytest.raises(pr.UsageError, match="would count staleness twice"):
            pr.parse(f"{strategy}@pipeline:2,schedule=pipedream")
    assert str(pr.parse("pipeline:4,schedule=2bw")) == "allreduce@pipeline:4,schedule=2bw"
    with pytest.raises(pr.UsageError, match="needs the loss function"):
        pr.init().backward(torch.zeros(1))
