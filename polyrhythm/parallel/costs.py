"""Costs: the time and memory of each operation of a captured model, measured on an example batch."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from polyrhythm.parallel.graph import ModeGraph, ModelGraph
from polyrhythm.parallel.hazards import alias_groups, mutated_arguments
from polyrhythm.parallel.tracing import value_name
from polyrhythm.parallel.trees import flatten
from polyrhythm.parallel.untouched import attributes_kept, random_states_kept, tensors_kept

FEWEST, MOST, LONG = 5, 200, 0.5  # how often a whole model is run, and for how many seconds


@dataclass(frozen=True)
class OperationCost:
    """One operation: seconds forward and backward, and the memory that it uses."""

    forward: float
    backward: float
    parameters: tuple[tuple[str, int], ...] = ()  # name and bytes of each
    saved: tuple[tuple[str, int], ...] = ()  # name and bytes of each tensor that it keeps for backward

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Costs:
    """The costs of all operations, and of cutting at each position."""

    operations: tuple[OperationCost, ...]
    crossing: tuple[int, ...]  # by position, 0 to the end: bytes of activations and of their gradients
    illegal: frozenset[int] = frozenset()

    def seconds(self, first: int, last: int) -> float:
        """The time of the operations first to last - 1, forward and backward."""
        return sum(each.seconds for each in self.operations[first:last])

    def parameter_bytes(self, first: int, last: int) -> int:
        return sum(dict(pair for each in self.operations[first:last] for pair in each.parameters).values())

    def saved_bytes(self, first: int, last: int) -> int:
        """The memory that these operations keep for backward; what several of them keep counts once."""
        return sum(dict(pair for each in self.operations[first:last] for pair in each.saved).values())


def measure(graph: ModelGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any], repeats: int = 5) -> Costs:
    """Runs every operation of the train graph forward and backward, several times, and takes the best."""
    values = graph.values(args, kwargs)
    with _unchanged(graph.train):
        meter = _Meter(graph, values)
        for _ in range(repeats):
            meter.run()
        return meter.costs()


@contextmanager
def _unchanged(mode: ModeGraph) -> Iterator[None]:
    """Restores the model's buffers and modes and the random states; modules of a chain train."""
    modules = nn.ModuleList([value for value in mode.attributes.values() if isinstance(value, nn.Module)])
    tensors = [value for value in mode.attributes.values() if isinstance(value, Tensor)]
    buffers = [*(each for each in tensors if not isinstance(each, nn.Parameter)), *modules.buffers()]
    with attributes_kept(modules), tensors_kept(buffers), random_states_kept():
        modules.train()
        yield


def _empty_backward() -> float:
    """What it costs to call autograd at all; a real backward pass calls it once."""
    leaf = torch.zeros(1, requires_grad=True)

    def once() -> float:
        output = leaf.view(1)
        began = clock()
        torch.autograd.grad(output, leaf, torch.ones(1))
        return clock() - began

    return min(once() for _ in range(20))


def clock(values: Iterable[Any] = ()) -> float:
    """The time, once the devices of these tensors have done their work.

    On one thread of the CPU it is the time of that thread, which other processes disturb less.
    """
    devices = {value.device.type for value in values if isinstance(value, Tensor)} - {"cpu"}
    for kind in devices:
        torch.get_device_module(kind).synchronize()
    return time.thread_time() if _alone() else time.perf_counter()


def _alone() -> bool:
    return torch.get_num_threads() == 1 and not torch.cuda.is_available()


class _Meter:
    """Interprets a graph; measures each operation on detached inputs before it runs it."""

    def __init__(self, graph: ModelGraph, values: Mapping[str, Any]) -> None:
        self.model, self.mode = graph, graph.train
        self.inputs: dict[fx.Node, Any] = {
            node: values[value_name(node)] for node in self.mode.graph.nodes if node.op == "placeholder"
        }
        self.values: dict[fx.Node, Any] = {}
        self.needs: dict[fx.Node, bool] = {}  # True for what autograd differentiates by
        self.groups = alias_groups(self.mode.graph)
        self.best: dict[fx.Node, tuple[float, float]] = {}  # seconds forward and backward
        self.saved: dict[fx.Node, dict[str, int]] = {}
        self.sizes: dict[fx.Node, tuple[int, int]] = {}  # bytes of a value, and of its gradient
        self.empty = _empty_backward()

    def run(self) -> None:
        """One pass. A disturbance of the machine hits a few operations of one pass, not all passes of one."""
        self.values = dict(self.inputs)
        last = {node: user for user in self.mode.graph.nodes for node in user.all_input_nodes}
        for node in self.mode.graph.nodes:
            if node.op == "placeholder":
                self.needs[node] = isinstance(self.values[node], Tensor) and self.values[node].requires_grad
            elif node.op == "get_attr":
                self.values[node] = self.mode.attributes[str(node.target)]
                self.needs[node] = getattr(self.values[node], "requires_grad", False)
            elif node.op in ("call_function", "call_module"):
                if node.target is operator.getitem:
                    self.needs[node] = self.needs[node.args[0]]
                elif node in self.mode.sizes:
                    self.needs[node] = False
                else:
                    self._measure(node)
                with torch.no_grad():
                    self.values[node] = self._function(node)(*self._map(node.args), **self._map(node.kwargs))
                self.sizes[node] = self._size(node)
                for other in node.all_input_nodes:
                    if last[other] is node:
                        del self.values[other]

    def _size(self, node: fx.Node) -> tuple[int, int]:
        tensors = [leaf for leaf in flatten(self.values[node])[0] if isinstance(leaf, Tensor)]
        size = sum(tensor.nbytes for tensor in tensors)
        continuous = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        return size, size if continuous and self.needs[node] else 0

    def costs(self) -> Costs:
        found = []
        for node in self.mode.operations:
            names = self.mode.tensors_of(node)
            parameters = tuple((self.model.names.get(name, name), self._bytes(node, name)) for name in names)
            found.append(OperationCost(*self.best[node], parameters, tuple(self.saved[node].items())))
        return Costs(tuple(found), self._crossing(), frozenset(self.model.illegal))

    def _function(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_module":
            module: Callable[..., Any] = self.mode.attributes[str(node.target)]
            return module
        assert callable(node.target)
        return node.target

    def _map(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda node: self.values[node])

    def _measure(self, node: fx.Node) -> None:
        if node not in self.saved:
            self.saved[node] = {}
            kept: list[Tensor] = []
            output, _, prepared = self._call(node, kept)
            self._count(node, kept, prepared, output)
        else:
            self._call(node)  # not timed: the first run is slower
        began = clock(self.values.values())
        output, leaves, _ = self._call(node)
        forward = clock(output) - began
        forward_before, backward_before = self.best.get(node, (float("inf"), float("inf")))
        self.best[node] = min(forward, forward_before), min(self._backward(output, leaves), backward_before)
        self.needs[node] = any(leaf.requires_grad for leaf in output if isinstance(leaf, Tensor))

    def _call(
        self, node: fx.Node, kept: list[Tensor] | None = None
    ) -> tuple[list[Any], list[Tensor], dict[fx.Node, Any]]:
        """Runs an operation on detached inputs. Returns outputs, leaves to differentiate by, and inputs."""
        changed = mutated_arguments(node, self.mode.attributes)
        leaves: list[Tensor] = []
        prepared = {other: self._input(other, other in changed, leaves) for other in node.all_input_nodes}
        if node.op == "call_module":
            leaves += [p for p in self.mode.attributes[str(node.target)].parameters() if p.requires_grad]

        def keep(tensor: Tensor) -> Tensor:
            if kept is not None:
                kept.append(tensor)
            return tensor

        args = fx.node.map_arg(node.args, prepared.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, prepared.__getitem__)
        hooks = nullcontext() if kept is None else saved_tensors_hooks(keep, keep)
        with torch.enable_grad(), hooks:
            output = self._function(node)(*args, **kwargs)
        return flatten(output)[0], leaves, prepared

    def _bytes(self, node: fx.Node, name: str) -> int:
        if node.op == "call_module":
            inner = name.removeprefix(f"{node.target}.")
            path, _, last = inner.rpartition(".")
            tensor = getattr(self.mode.attributes[str(node.target)].get_submodule(path), last)
        else:
            tensor = self.mode.attributes[name]
        return int(tensor.nbytes)

    def _input(self, node: fx.Node, changed: bool, leaves: list[Tensor]) -> Any:
        """The value of a node without its history; a copy if the operation changes it."""
        value = self.values[node]
        if not isinstance(value, Tensor):
            return value
        if self.needs[node] and (value.is_floating_point() or value.is_complex()):
            leaf = value.detach().requires_grad_()
            leaves.append(leaf)
            return leaf.clone() if changed else leaf
        return value.detach().clone() if changed else value.detach()

    def _backward(self, output: list[Any], leaves: list[Tensor]) -> float:
        roots = [leaf for leaf in output if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not roots or not leaves:
            return 0.0
        grads = [torch.ones_like(root) for root in roots]
        began = clock(grads)
        found = torch.autograd.grad(roots, leaves, grads, allow_unused=True)
        return max(0.0, clock(found) - began - self.empty)

    def _count(
        self, node: fx.Node, kept: list[Tensor], prepared: Mapping[fx.Node, Any], outputs: list[Any]
    ) -> None:
        """Counts what autograd keeps: the operation's inputs, its outputs, and tensors of its own."""
        owners = {
            value.untyped_storage().data_ptr(): f"value {self.groups[other]}"
            if other.op != "get_attr"
            else None
            for other, value in prepared.items()
            if isinstance(value, Tensor)
        }
        saved = self.saved[node]
        for leaf in outputs:
            if isinstance(leaf, Tensor):
                owners.setdefault(leaf.untyped_storage().data_ptr(), f"value {self.groups[node]}")
        if node.op == "call_module":
            for tensor in self.mode.attributes[str(node.target)].state_dict(keep_vars=True).values():
                owners[tensor.untyped_storage().data_ptr()] = None
        for tensor in kept:
            storage = tensor.untyped_storage()
            name = owners.setdefault(storage.data_ptr(), f"{node.name} {len(saved)}")
            if name is not None:  # parameters are counted by themselves
                saved[name] = max(saved.get(name, 0), storage.nbytes())

    def _crossing(self) -> tuple[int, ...]:
        """The bytes that cross each position. Inputs of the model do not cross: every stage has them."""
        count = len(self.mode.operations)
        change = [0] * (count + 2)
        for node, (size, gradient) in self.sizes.items():
            if node not in self.mode.positions:  # a size
                continue
            users = [self.mode.positions[user] for user in node.users if user in self.mode.positions]
            made, last = self.mode.positions[node], max(users, default=-1)
            if any(user.target is not operator.getitem for user in node.users) and last > made:
                change[made + 1] += size + gradient
                change[last + 1] -= size + gradient
        found, now = [], 0
        for position in range(count + 1):
            now += change[position]
            found.append(now)
        return tuple(found)


def whole_seconds(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], runs: int | None = None
) -> float:
    """The time of a forward and a backward pass of the whole model in training mode, best of several."""
    finish, done = time.monotonic() + LONG, 0
    least, most = (FEWEST, MOST) if runs is None else (runs, runs)
    parameters = [each for each in model.parameters() if each.requires_grad]
    best = float("inf")
    with attributes_kept(model), tensors_kept(model.buffers()), random_states_kept(), torch.enable_grad():
        if not model.training:
            model.train()
        while done < least or (done < most and time.monotonic() < finish):
            done += 1
            began = clock(flatten((args, dict(kwargs)))[0])
            output = flatten(model(*args, **kwargs))[0]
            roots = [leaf for leaf in output if isinstance(leaf, Tensor) and leaf.requires_grad]
            found: tuple[Tensor, ...] = ()
            if roots and parameters:
                grads = [torch.ones_like(root) for root in roots]
                found = torch.autograd.grad(roots, parameters, grads, allow_unused=True)
            best = min(best, clock((*output, *found)) - began)
    return best
