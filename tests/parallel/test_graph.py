"""Capture and cutting: stages in order are the model, bit for bit, and capture leaves no trace."""

from __future__ import annotations

import copy
import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.graph import ModelGraph, capture, flatten_inputs
from polyrhythm.parallel.partition import Partition, cuts_at, split
from polyrhythm.parallel.trees import flatten
from tests.parallel.models import CASES, Branch, Case, Tied, Wrapped, loss_of, unequal
from tests.support.combine import each_value

Made = tuple[nn.Module, ModelGraph, Case, bool]


@pytest.fixture(scope="module")
def captured() -> dict[str, Made]:
    """Every model, captured once with six rows, and whether that left no trace."""
    made = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        model = case.build()
        args, kwargs = case.call(6)
        loss_of(model(*args, **kwargs)).backward()
        model.train(name != "tied")
        before = contents(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            graph = capture(model, args, kwargs)
        made[name] = model, graph, case, contents(model) == before
    return made


def contents(model: nn.Module) -> Any:
    """All that capture could change."""
    held = [{k: id(v) for k, v in vars(m).items() if k != "_modules"} for m in model.modules()]
    inner = [{k: id(v) for k, v in (m._parameters | m._buffers).items()} for m in model.modules()]
    flat = [[id(weight) for weight in getattr(m, "_flat_weights", ())] for m in model.modules()]
    tensors = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    grads = [None if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]
    drawn = torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), random.getstate()
    return held, inner, flat, tensors, grads, drawn, [m.training for m in model.modules()]


def legal(graph: ModelGraph) -> list[int]:
    return [cut for cut in range(1, len(graph.train.operations)) if cut not in graph.illegal]


def some_cuts(graph: ModelGraph) -> list[list[int]]:
    """Every single cut of a short graph, and about eight of a long one; thirds; and as many as possible."""
    found = legal(graph)
    single = found if len(found) <= 12 else found[:: len(found) // 8]
    thirds = [found[len(found) // 3], found[2 * len(found) // 3]]
    return [[], *([cut] for cut in single), sorted(set(thirds)), found]


def outcome(run: Any, model: nn.Module, seed: int = 3) -> list[Any]:
    """The outputs, the gradients, the buffers and the next random number."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = run()
    loss_of(output).backward()
    leaves, spec = flatten(output)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*leaves, str(spec), *grads, *[b.clone() for b in model.buffers()], torch.rand(1)]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@each_value(("mode", ["train", "eval"]), ("name", CASES), most=4)
def test_stages_in_order_equal_the_model(name: str, mode: Any, captured: dict[str, Made]) -> None:
    """Outputs, gradients, statistics and random numbers have the same bits, with any number of rows."""
    model, graph, case, _ = captured[name]
    for count in (6, 9, 1 if mode == "eval" else 2):
        args, kwargs = case.call(count)
        for cuts in some_cuts(graph) if count == 9 else [legal(graph)]:
            eager = copy.deepcopy(model).train(mode == "train")
            before = copy.deepcopy(model.state_dict())
            model.train(mode == "train")
            expected = outcome(partial(eager, *args, **kwargs), eager)
            values = graph.values(args, kwargs)
            run = outcome(partial(split(graph, cuts).run, mode, values), model)
            assert same(run, expected), (cuts, count)
            model.load_state_dict(before)
    assert case.note in graph.note and bool(graph.note) == bool(case.note)


@pytest.mark.parametrize("name", CASES)
def test_a_stage_holds_its_own_parameters_only(name: str, captured: dict[str, Made]) -> None:
    model, graph, _, _ = captured[name]
    parts = split(graph, legal(graph)[:: max(1, len(legal(graph)) // 3)])
    ids = {id(tensor): first for first, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert set(parts.users) == set(ids.values())
    used: dict[str, set[int]] = {first: set() for first in ids.values()}
    for stages in (parts.train, parts.eval):
        for number, stage in enumerate(stages):
            assert isinstance(stage.module, torch.fx.GraphModule)
            for each in stage.module.parameters():
                used[ids[id(each)]].add(number)  # the model's own objects
            for each in stage.module.buffers():
                if id(each) in ids:
                    used[ids[id(each)]].add(number)
    assert {first: tuple(sorted(numbers)) for first, numbers in used.items()} == parts.users


def test_a_tied_parameter_is_on_both_stages(captured: dict[str, Made]) -> None:
    _, graph, _, _ = captured["tied"]
    assert split(graph, cuts_at(graph, ["middle", "out"])).users == {
        "embed.weight": (0, 2),
        "middle.weight": (1,),
        "middle.bias": (1,),
    }


class Views(nn.Module):
    """Asks once for the number of rows, and uses it in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        for layer in self.layers:
            x = layer(x.view(rows, 2, 2)).transpose(1, 2).reshape(rows, 4)
        return x


def test_sizes_do_not_cross() -> None:
    """A stage takes the number of rows from a tensor that it gets anyway."""
    graph = capture(Views(), (torch.randn(6, 4),), {})
    parts = split(graph, cuts_at(graph, ["layers.1", "layers.2"]))
    for stages in (parts.train, parts.eval):
        assert (
            [len(stage.inputs) for stage in stages] == [1, 1, 1] == [len(stage.outputs) for stage in stages]
        )


def test_an_unused_parameter_is_on_no_stage(captured: dict[str, Made]) -> None:
    _, graph, _, _ = captured["several"]
    assert split(graph, [3]).users["unused.weight"] == ()


@pytest.mark.parametrize("name", CASES)
def test_capture_leaves_no_trace(name: str, captured: dict[str, Made]) -> None:
    """Modules, modes, buffers, gradients and random states are the same objects with the same values."""
    assert captured[name][3]


def test_the_hash_compares_models(captured: dict[str, Made]) -> None:
    """Another worker with other weights and rows has the same hash; another model has not."""
    torch.manual_seed(1)
    assert capture(Tied(), (torch.randint(11, (3, 5)),), {}).hash == captured["tied"][1].hash
    hashes = {graph.hash for _, graph, _, _ in captured.values()}
    assert len(hashes) == len(CASES)


@pytest.mark.parametrize("name", ["mlp", "residual", "lstm", "attention", "encoder", "chain"])
def test_autocast_at_run_time(name: str, captured: dict[str, Made]) -> None:
    """Under autocast, stages compute what the model computes under autocast."""
    model, graph, case, _ = captured[name]
    model.train()
    args, kwargs = case.call(5)
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(3)
        expected = flatten(eager(*args, **kwargs))[0]
        torch.manual_seed(3)
        got = flatten(split(graph, legal(graph)[1:3]).run("train", graph.values(args, kwargs)))[0]
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_graph_captured_with_one_row_takes_any() -> None:
    graph = capture(unequal(), (torch.randn(1, 8),), {})
    assert split(graph, [4]).run("eval", graph.values((torch.randn(7, 8),), {})).shape == (7, 40)


def test_submodules_in_evaluation_mode_stay_so() -> None:
    """A frozen BatchNorm of a model that trains uses its statistics, in the graph too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    model[1].eval()
    graph = capture(model, (torch.randn(6, 4),), {})
    assert [module.training for module in model.modules()] == [True, True, False]
    x = torch.randn(3, 4)
    assert torch.equal(split(graph, [1]).run("train", graph.values((x,), {})), model(x))
    assert int(model[1].num_batches_tracked) == 0


# --- where a model cannot be cut --------------------------------------------------------------------


def test_an_in_place_operation_stays_with_its_value(captured: dict[str, Made]) -> None:
    _, graph, _, _ = captured["residual"]
    inplace = [n for n, node in enumerate(graph.train.operations) if "relu_" in str(node.target)]
    assert inplace and all(position in graph.illegal for position in inplace)
    with pytest.raises(UsageError, match=r"cannot cut at position \d+, in first.2: .* in place; position"):
        split(graph, [inplace[0]])


def test_a_chain_stays_with_an_in_place_module(captured: dict[str, Made]) -> None:
    _, graph, _, _ = captured["chain"]
    assert legal(graph) == [1, 3, 4, 5]  # not before the in-place ReLU


class Statistics(nn.Module):
    """One BatchNorm that is used twice: its statistics cannot be on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.norm(x))).relu()


def test_shared_statistics_stay_on_one_stage() -> None:
    graph = capture(Statistics(), (torch.randn(4, 4),), {})
    assert legal(graph) == [len(graph.train.operations) - 1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["midle"], r"no submodule 'midle'; similar ones: middle"),
        (["out", "middle"], r"'middle' does not come after 'out'"),
        (["embed"], r"'embed' begins with the model"),
    ],
)
def test_cuts_at_refuses_names(names: list[str], message: str, captured: dict[str, Made]) -> None:
    with pytest.raises(UsageError, match=message):
        cuts_at(captured["tied"][1], names)


def test_cuts_at_refuses_a_module_that_computes_nothing(captured: dict[str, Made]) -> None:
    with pytest.raises(UsageError, match="'unused' computes nothing"):
        cuts_at(captured["several"][1], ["unused"])


@pytest.mark.parametrize(
    ("cuts", "message"), [([0], "positions 1 to 2"), ([2, 1], "increasing"), ([1, 1], "increasing")]
)
def test_split_refuses_cuts(cuts: list[int], message: str) -> None:
    graph = capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), (torch.randn(3, 2),), {})
    with pytest.raises(UsageError, match=message):
        split(graph, cuts)


# --- what cannot be captured ------------------------------------------------------------------------


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 100


class Odd(nn.Module):
    """Does something that export would capture wrong, or not at all."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.calls = nn.Linear(4, 4), what, 0

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        if self.what == "function":
            return Doubling.apply(h)
        if self.what == "random":
            return h * random.random()
        if self.what == "numpy":
            return h * float(np.random.rand())
        if self.what == "counter":
            self.calls += 1
            return h * self.calls
        if self.what == "rows":
            return h.view(6, 4)
        if self.what == "object":
            return iter([h])
        return h if h.sum() > 0 else -h


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("function", "the autograd function Doubling"),
        ("random", "draws numbers from random"),
        ("numpy", "draws numbers from random or numpy"),
        ("counter", "changes the attribute calls"),
        ("rows", "fixes the number of rows"),
        ("object", "returns a list_iterator"),
        ("data", "torch.export failed"),
    ],
)
def test_what_would_be_wrong_is_refused(what: str, message: str) -> None:
    model = Odd(what)
    with pytest.raises(
        UsageError, match=rf"Odd cannot be cut into stages: .*{message}.*nn.Sequential"
    ) as error:
        capture(model, (torch.randn(6, 4),), {})
    assert "\n" not in str(error.value) and model.calls == 0


def test_a_chain_takes_what_export_does_not() -> None:
    """Modules of a chain run themselves, so their own backward and state are kept."""
    model = nn.Sequential(Odd("function"), Odd("random"), Odd("counter"))
    graph = capture(model, (torch.randn(6, 4),), {})
    assert model[2].calls == 0
    x = torch.randn(3, 4)
    random.seed(0)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model[2].calls = 0
    random.seed(0)
    split(graph, [1, 2]).run("train", graph.values((x,), {})).sum().backward()
    assert same([p.grad for p in model.parameters()], expected)


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(UsageError, match="call it once before"):
        capture(nn.Sequential(nn.LazyLinear(4)), (torch.randn(6, 4),), {})


class InPlace(nn.Module):
    """Changes a value in place by a constant and by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, -1)
        right = right.clone()
        right[:, 0] = 0.0
        right *= self.scale  # on the stage that has the buffer
        return self.second(left) * right


def test_values_that_are_changed_in_place_stay_together_in_evaluation() -> None:
    model = InPlace()
    graph = capture(model, (torch.randn(6, 4),), {})
    x = torch.randn(3, 4)
    for cut in legal(graph):
        parts = split(graph, [cut])
        for stages in (parts.train, parts.eval):
            values = graph.values((x,), {})
            for stage in stages:
                # As from another process: a leaf that requires a gradient cannot be changed in place.
                given = [values[name].detach().requires_grad_() for name in stage.inputs]
                values.update(zip(stage.outputs, stage.module(*given), strict=True))
            assert torch.equal(parts.build_output("train", values), model(x))


def test_a_module_with_a_forward_of_its_own_is_no_chain() -> None:
    """It may do something else for another batch, which no example would show."""
    with pytest.raises(UsageError, match="Wrapped cannot be cut"):
        capture(Wrapped(nn.Sequential(Branch())), (torch.randn(6, 4),), {})


# --- what a graph refuses to run --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.randn(2, 4), 3), {}, "power|input 1 of the model is 3, and the model was captured with 2"),
        ((torch.randn(2, 5), 2), {}, r"input 0 .* of which only the first number may vary"),
        ((torch.randn(2, 4).double(), 2), {}, "input 0 of the model has dtype"),
        ((torch.randn(2, 4), 2), {"mask": torch.ones(2)}, "is a?"),
        ((torch.randn(2, 4), 2, 1), {}, "other arguments"),
    ],
)
def test_other_inputs_are_refused(args: Any, kwargs: Any, message: str, captured: dict[str, Made]) -> None:
    given = {"other": {"y": torch.randn(2, 3)}, "mask": None} | kwargs
    with pytest.raises(UsageError, match=message):
        captured["several"][1].values(args, given)


class Threshold(nn.Module):
    """Does something else with few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.shape[0] > 3 else x


def test_a_branch_on_the_number_of_rows_is_checked() -> None:
    graph = capture(Threshold(), (torch.randn(6, 4),), {})
    graph.values((torch.randn(4, 4),), {})
    with pytest.raises(UsageError, match="valid for 4 to inf rows"):
        graph.values((torch.randn(3, 4),), {})


def test_the_order_of_keywords_does_not_matter() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert list(flatten_inputs((), {"b": x, "a": y}).values()) == [y, x]
    assert list(flatten_inputs((x,), {"a": {"k": [y]}})) == ["input 0", "input 1"]


def test_a_model_that_returns_a_parameter() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x)), self.second.weight

    model = Norm()
    graph = capture(model, (torch.randn(3, 4),), {})
    parts: Partition = split(graph, [1])
    assert parts.run("train", graph.values((torch.randn(3, 4),), {}))[1] is model.second.weight
    assert parts.train[1].outputs[-1] == parts.results["train"].leaves[1]
