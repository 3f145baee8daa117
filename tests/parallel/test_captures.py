"""Simulated workers share a capture if their models are the same program, and only then."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.utils import _pytree as pytree

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.parallel import captures, tracing
from polyrhythm.parallel.fingerprint import Incomparable, fingerprint
from polyrhythm.parallel.graph import capture
from tests.parallel.test_pipelines import Skipping, Training, chain
from tests.support.programs import trained

SCRIPT = """
import os, time
import torch
from torch import nn
import helpers
import polyrhythm as pr

SCALE, TABLE, UNREAD = 2.0, {"tanh": torch.tanh}, object()

def act(x, slope=0.5):
    return helpers.shift(x) * slope

def twice(f):
    def inner(*args):
        return f(f(*args))
    return inner

class Model(nn.Module):
    POWER = 2

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.sizes, self.act = [1, 2], twice(act)

    @property
    def offset(self):
        return 3

    def forward(self, x):
        return TABLE["tanh"](self.two(self.act(self.one(x)))) ** self.POWER * SCALE + self.offset
"""
HELPERS = "AMOUNT, UNREAD = 1.0, object()\ndef shift(x): return x + AMOUNT"
X = torch.zeros(3, 4)


def built(
    change: Callable[[nn.Module], object] | None = None, script: str = SCRIPT, helpers: str = HELPERS
) -> nn.Module:
    """The model of a node with its own copies of two modules."""
    made = types.ModuleType("script"), types.ModuleType("helpers")
    exec(compile(helpers, "helpers.py", "exec"), vars(made[1]))
    source = script.replace("import helpers", "")
    vars(made[0])["helpers"] = made[1]
    exec(compile(source, "script.py", "exec"), vars(made[0]))
    model: nn.Module = made[0].Model()  # type: ignore[attr-defined]
    if change is not None:
        change(model)
    return model


def tie(model: Any) -> None:
    model.two.weight = model.one.weight


def nest(model: Any) -> None:
    for _ in range(400):
        model.one = nn.Sequential(model.one)


def edit(old: str, new: str) -> dict[str, str]:
    assert (old in SCRIPT) != (old in HELPERS)
    return {"script": SCRIPT.replace(old, new), "helpers": HELPERS.replace(old, new)}


DIFFERENT: dict[str, dict[str, Any]] = {
    "code": edit("f(f(*args))", "f(*args)"),
    "constant in code": edit("return 3", "return 4"),
    "type of a constant": edit("return 3", "return 3.0"),
    "class attribute": edit("POWER = 2", "POWER = 3"),
    "default": edit("slope=0.5", "slope=0.25"),
    "global": edit("SCALE, TABLE, UNREAD = 2.0", "SCALE, TABLE, UNREAD = 3.0"),
    "global in a dict": edit("torch.tanh", "torch.sin"),
    "global of another module": edit("AMOUNT, UNREAD = 1.0", "AMOUNT, UNREAD = 2.0"),
    "code of another module": edit("x + AMOUNT", "x - AMOUNT"),
    "closure": {"change": lambda model: setattr(model.act.__closure__[0], "cell_contents", torch.tanh)},
    "attribute": {"change": lambda model: model.sizes.append(3)},
    "a further attribute": {"change": lambda model: setattr(model, "width", 4)},
    "attribute of a layer": {"change": lambda model: setattr(model.one, "eps", 1.0)},
    "order of modules": edit("self.one, self.two =", "self.two, self.one ="),
    "hook": {"change": lambda model: model.one.register_forward_hook(lambda *_: None)},
    "tied": {"change": tie},
    "shape": edit("torch.zeros(4)", "torch.zeros(5)"),
    "dtype": {"change": lambda model: model.double()},
    "frozen": {"change": lambda model: model.one.weight.requires_grad_(False)},
    "mode": {"change": lambda model: model.eval()},
    "attribute of a parameter": {"change": lambda model: setattr(model.one.weight, "shared", True)},
}
REFUSED: dict[str, dict[str, Any]] = {
    "tensor that is no buffer": {"change": lambda model: setattr(model, "table", torch.ones(2))},
    "object": {"change": lambda model: setattr(model, "session", object())},
    "iterator": {"change": lambda model: setattr(model, "turn", itertools.count())},
    "method of a list": {"change": lambda model: setattr(model, "seen", model.sizes.append)},
    "global object": edit("return 3", "return UNREAD"),
    "assigned global": edit("return 3", "global UNREAD; UNREAD = 3; return 3"),
    "import": edit("return 3", "import math; return 3"),
    "eval": edit("return 3", "return eval('3')"),
    "getattr of a module": edit("helpers.shift(x)", "getattr(helpers, 'shift')(x)"),
    "module with __getattr__": edit("AMOUNT, UNREAD", "def __getattr__(name): return 3\nAMOUNT, UNREAD"),
    "environment": edit("return 3", "return len(torch.os.environ)"),
    "function that reads the environment": edit("torch.tanh", "os.getenv"),
    "alias of eval": edit("torch.tanh", "eval"),
    "time": edit("torch.tanh", "time.time"),
    "rank": edit("return 3", "return pr.init().rank"),
    "variable without a value": edit("    return inner", "    del f\n    return inner"),
    "nested too deeply": {"change": nest},
}  # fmt: skip


def test_copies_of_a_program_have_one_fingerprint() -> None:
    one = fingerprint(built(), (X,), {})
    assert one == fingerprint(built(lambda model: nn.init.ones_(model.one.weight)), (X + 1,), {})  # type: ignore[union-attr, arg-type]
    assert one != fingerprint(built(), (X[:2],), {}), "another batch"
    with torch.autocast("cpu", torch.bfloat16):
        assert one != fingerprint(built(), (X,), {}), "other precisions"


@pytest.mark.parametrize("what", DIFFERENT)
def test_another_program_has_another_fingerprint(what: str) -> None:
    assert fingerprint(built(**DIFFERENT[what]), (X,), {}) != fingerprint(built(), (X,), {})


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compared_has_no_fingerprint(what: str) -> None:
    with pytest.raises(Incomparable):
        fingerprint(built(**REFUSED[what]), (X,), {})


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were exported."""
    found: list[nn.Module] = []
    export = tracing.export_graph

    def counted(model: nn.Module, *call: Any) -> Any:
        found.append(model)
        return export(model, *call)

    monkeypatch.setattr(tracing, "export_graph", counted)
    return found


@pytest.mark.parametrize("make", [Skipping, chain])
def test_a_simulation_captures_a_model_once(
    make: Callable[[], nn.Module], simulate: Any, exports: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = trained(simulate(Training(make), "pipeline:2", 2))
    assert len(exports) == 1

    def refuse(*_: object) -> None:
        raise Incomparable("a test")

    monkeypatch.setattr(captures, "fingerprint", refuse)
    alone = trained(simulate(Training(make), "pipeline:2", 2))
    assert len(exports) == 1 + 2
    assert all(torch.equal(shared[name], alone[name]) for name in alone)


def test_workers_with_different_models_are_still_refused(simulate: Any) -> None:
    class Ranked(nn.Sequential):
        def __init__(self, rank: int) -> None:
            super().__init__(*chain())
            self.rank = rank

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x)
            return result * self.rank if self.rank else result

    with pytest.raises(UsageError, match="capture different operations"):
        simulate(Training(lambda: Ranked(pr.init().rank)), "allreduce@pipeline:2", 4)


def test_a_model_that_cannot_be_exported_is_tried_once(exports: list[nn.Module]) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())

    known = captures.Captures()
    for _ in range(2):
        with pytest.raises(tracing.NotExportable):
            known.export(tracing.export_graph, nn.Sequential(Odd(), nn.Linear(4, 4)), (X,), {})
    assert len(exports) == 1


def test_constants_in_code_are_not_shared(exports: list[nn.Module]) -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])

    known = captures.Captures()
    graphs = [known.export(tracing.export_graph, Shifted(4, 4), (X,), {}) for _ in range(2)]
    assert len(exports) == 2 and graphs[0].hash == graphs[1].hash


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, last = self.layer(x)
        return h.reshape(x.shape[0], -1), last[0] if isinstance(last, tuple) else last


@pytest.mark.parametrize(
    ("kind", "settings"), [(nn.LSTM, {}), (nn.GRU, {"bidirectional": True}), (nn.RNN, {"num_layers": 2})]
)
def test_a_recurrent_layer_is_captured_by_its_first_steps(
    kind: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    original = decompositions._rnn_helper

    def counted(data: Tensor, *rest: Any) -> Any:
        lengths.append(data.shape[1])
        return original(data, *rest)

    def values() -> list[Any]:
        graph = capture(Recurrent(kind(4, 6, batch_first=True, **settings)), (torch.zeros(3, 4, 4),), {})
        leaves = pytree.tree_leaves([node.meta.get("val") for node in graph.train.graph.nodes])
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        return [(str(each.shape), str(each.stride()), each.dtype, each.requires_grad) for each in tensors]

    monkeypatch.setattr(decompositions, "_rnn_helper", counted)
    short = values()
    assert set(lengths) == {2} and decompositions._rnn_helper is counted
    monkeypatch.setattr(tracing, "short_sequences", nullcontext)
    assert short == values() and set(lengths) == {2, 4}
