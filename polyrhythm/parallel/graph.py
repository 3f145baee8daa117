"""ModelGraph: the operations of a model in training and in evaluation, in the order in which they run."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from polyrhythm.core.errors import UsageError
from polyrhythm.model.spilled import paging
from polyrhythm.parallel.hazards import bound_nodes
from polyrhythm.parallel.progress_bars import without_progress_bars
from polyrhythm.parallel.sizes import size_nodes
from polyrhythm.parallel.trees import flatten_call, flatten_inputs, input_name, unflatten

if TYPE_CHECKING:
    from polyrhythm.parallel.estimates import Estimate

__all__ = ["Input", "ModeGraph", "ModelGraph", "Result", "capture", "flatten_inputs"]


@dataclass(frozen=True)
class Input:
    """One leaf of the model's inputs: a tensor, of which only the batch may vary, or a constant."""

    constant: Any = None  # of an input that is no tensor
    dtype: torch.dtype | None = None  # None: not a tensor
    shape: tuple[int, ...] = ()
    rows: tuple[int, float] | None = None  # the sizes that dimension 0 may have; None: only the captured one

    def refusal(self, value: Any) -> str:
        """Why this value does not fit the graph, or ""."""
        if self.dtype is None:
            same = type(value) is type(self.constant) and bool(value == self.constant)
            return "" if same else f"is {value!r}, and the model was captured with {self.constant!r}"
        if not isinstance(value, torch.Tensor):
            return f"is a {type(value).__name__}, and the model was captured with a tensor"
        shape = tuple(value.shape)
        if value.dtype is not self.dtype:
            return f"has dtype {value.dtype}, and the model was captured with {self.dtype}"
        captured = f"has shape {shape}; the model was captured with {self.shape}"
        if self.rows is None:
            return "" if shape == self.shape else f"{captured}, which cannot vary"
        if shape[1:] != self.shape[1:] or len(shape) != len(self.shape):
            return f"{captured}, of which only the first number may vary"
        least, most = self.rows
        in_range = least <= shape[0] <= most
        return "" if in_range else f"{captured}, and its operations are valid for {least} to {most} rows"


@dataclass(frozen=True)
class Result:
    """How the model's output is built from named values."""

    spec: pytree.TreeSpec
    leaves: tuple[str | None, ...]  # the names of values; None: the constant at this place
    constants: tuple[Any, ...]

    def build(self, values: Mapping[str, Any]) -> Any:
        return unflatten(
            [
                c if name is None else values[name]
                for name, c in zip(self.leaves, self.constants, strict=True)
            ],
            self.spec,
        )


@dataclass(frozen=True)
class ModeGraph:
    """The operations of one mode. Parameters and buffers are `get_attr` nodes by their names in the model."""

    graph: fx.Graph
    attributes: Mapping[
        str, Any
    ]  # what get_attr and call_module nodes name: the model's own tensors and modules
    result: Result
    # By the shapes of inputs, because an estimate takes long. Models with the same graph share them.
    estimates: dict[tuple[Any, ...], Estimate] = field(default_factory=dict)

    @cached_property
    def operations(self) -> tuple[fx.Node, ...]:
        """What a cut counts: every call except sizes, and `getitem`, which stays with its call."""
        return tuple(
            node
            for node in self.graph.nodes
            if node.op in ("call_function", "call_module")
            and node.target is not operator.getitem
            and node not in self.sizes
        )

    @cached_property
    def sizes(self) -> frozenset[fx.Node]:
        """The nodes that compute sizes of tensors. They belong to no stage, because each computes its own."""
        return size_nodes(self.graph)

    @cached_property
    def positions(self) -> dict[fx.Node, int]:
        """The number of every operation; a `getitem` has that of its operation."""
        found = {node: number for number, node in enumerate(self.operations)}
        for node in self.graph.nodes:
            if node.target is operator.getitem:
                found[node] = found[node.args[0]]
        return found

    def tensors_of(self, node: fx.Node) -> list[str]:
        """The names of the parameters and buffers that an operation uses."""
        inside: list[str] = []
        if node.op == "call_module":
            module = self.attributes[str(node.target)]
            inside = [f"{node.target}.{name}" for name in _tensor_names(module)]
        return inside + [str(other.target) for other in node.all_input_nodes if self.is_tensor(other)]

    def is_tensor(self, node: fx.Node) -> bool:
        """True for a parameter, buffer or other tensor of the model."""
        return node.op == "get_attr" and isinstance(self.attributes[str(node.target)], torch.Tensor)

    @cached_property
    def bound(self) -> list[tuple[set[fx.Node], str]]:
        """Sets of operations that must run in one stage, each with the reason."""
        found = bound_nodes(self.graph, self.attributes)
        return [(nodes - self.sizes, reason) for nodes, reason in found if nodes - self.sizes]

    def module_of(self, position: int) -> str:
        """The path of the submodule that an operation belongs to; "" for the model itself."""
        return str(self.operations[position].meta.get("module", ""))

    def digest(self) -> str:
        lines = [
            f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}" for node in self.graph.nodes
        ]
        for name, value in sorted(self.attributes.items()):
            if isinstance(value, torch.Tensor):
                lines.append(f"{name} {tuple(value.shape)} {value.dtype}")
            elif isinstance(value, fx.GraphModule):
                lines.append(f"{name} {value.code}")
        return hashlib.sha256("\n".join([*lines, repr(self.result)]).encode()).hexdigest()


def _tensor_names(module: nn.Module) -> list[str]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [name for name, _ in named]


@dataclass(frozen=True)
class Signature:
    """The arguments that a captured model is called with."""

    inputs: tuple[Input, ...]
    spec: pytree.TreeSpec  # of (args, kwargs)

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Flattens and checks the inputs of one call."""
        leaves, spec = flatten_call(args, kwargs)
        if spec != self.spec:
            raise UsageError(
                "the model was captured with other arguments than it is called with; "
                "pass the same arguments in every call"
            )
        for number, (given, leaf) in enumerate(zip(self.inputs, leaves, strict=True)):
            if reason := given.refusal(leaf):
                raise UsageError(f"{input_name(number)} of the model {reason}")
        return {input_name(number): leaf for number, leaf in enumerate(leaves)}


@dataclass(frozen=True)
class ModelGraph:
    """A captured model: one graph per mode, on the model's own parameters and buffers."""

    train: ModeGraph
    eval: ModeGraph
    inputs: tuple[Input, ...]
    spec: pytree.TreeSpec  # of (args, kwargs)
    names: Mapping[str, str]  # every name of a parameter or buffer: the first name of the same tensor
    note: str = ""
    modules: tuple[str, ...] = field(default=())  # the paths of all submodules

    @cached_property
    def hash(self) -> str:
        """Equal on two workers whose models are the same sequence of operations."""
        return hashlib.sha256(f"{self.train.digest()} {self.eval.digest()} {self.spec}".encode()).hexdigest()[
            :16
        ]

    @cached_property
    def illegal(self) -> dict[int, str]:
        """The positions of the train graph at which it cannot be cut, each with the reason."""
        graph = self.train
        found: dict[int, str] = {}
        spans = [
            (
                min(graph.positions[node] for node in nodes),
                max(graph.positions[node] for node in nodes),
                reason,
            )
            for nodes, reason in graph.bound
        ]
        for first, last, reason in spans:
            for position in range(first + 1, last + 1):
                found.setdefault(position, reason)
        return found

    @property
    def signature(self) -> Signature:
        """The arguments that the model is called with. It does not hold the graph."""
        return Signature(self.inputs, self.spec)

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Flattens and checks the inputs of one call."""
        return self.signature.values(args, kwargs)


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelGraph:
    """Captures the operations of a model from an example call, without a trace on the model.

    What `torch.export` takes is captured operation by operation, for any number of rows. Another chain of
    modules (`nn.Sequential`) is captured module by module.
    """
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise UsageError(
            f"{type(model).__name__} has lazy modules, which have no parameters yet: call it once before"
        )
    from polyrhythm.parallel.captures import captures
    from polyrhythm.parallel.chain import chain_graph
    from polyrhythm.parallel.tracing import NotExportable, export_graph

    shared = captures.get()
    try:
        with without_progress_bars():
            if shared is not None:
                return shared.export(export_graph, model, args, kwargs)
            return export_graph(model, args, kwargs)
    except NotExportable as error:
        with paging():
            found = chain_graph(model, args, kwargs, str(error))
        if found is None:
            raise UsageError(
                f"{type(model).__name__} cannot be cut into stages: {error}; "
                "a model that torch.export takes works, and so does an nn.Sequential of any modules"
            ) from error
        return found
