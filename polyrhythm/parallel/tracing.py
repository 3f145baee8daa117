"""Capture with torch.export: one graph of operations per mode."""

from __future__ import annotations

import io
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from polyrhythm.parallel.graph import Input, ModeGraph, ModelGraph, Result
from polyrhythm.parallel.recurrent import short_sequences
from polyrhythm.parallel.trees import flatten, flatten_call, input_name, unflatten
from polyrhythm.parallel.untouched import attributes_kept, random_states_kept

MODEL = "model"  # the name of the model in the module that is exported
# Checks that export inserts. They compare with the dtypes of the example, which autocast changes.
ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class NotExportable(Exception):
    """torch.export cannot capture this model, or would capture it wrong."""


class _Flat(nn.Module):
    """The model as a function of flat tensors, which reports what each leaf of the output is.

    The report is (spec of the output, its constants, a reason to refuse the model or ""). It goes to a
    function, because export undoes changes of a module's own lists.
    """

    def __init__(
        self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, report: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self.model = model
        constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._call = (constants, places, spec)
        self._report = report

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        constants, places, spec = self._call
        leaves = list(constants)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = unflatten(leaves, spec)
        before = _settings(self.model)
        output, out_spec = flatten(self.model(*args, **kwargs))
        self._report((out_spec, [_constant(leaf) for leaf in output], _difference(before, self.model)))
        return tuple(
            leaf for leaf in output if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat)
        )


class _Computed:
    """Stands for a leaf of the output that the graph computes."""


COMPUTED = _Computed()


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat):
        return COMPUTED
    if isinstance(leaf, NUMBERS):
        return leaf
    kind = type(leaf).__name__
    hint = ", which config.use_cache=False leaves out" if kind.endswith("Cache") else ""
    raise NotExportable(f"forward returns a {kind}{hint}")


def _settings(model: nn.Module) -> dict[tuple[str, str], Any]:
    """The plain attributes of all modules."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _difference(before: dict[tuple[str, str], Any], model: nn.Module) -> str:
    after = _settings(model)
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    return "".join(f"forward changes the attribute {'.'.join(filter(None, key))}" for key in changed[:1])


def export_graph(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelGraph:
    """Captures a model; raises NotExportable."""
    leaves, spec = flatten_call(args, kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise NotExportable("it is called without a tensor")
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *NUMBERS)):
            raise NotExportable(f"forward takes a {type(leaf).__name__}")
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise NotExportable(f"{path or 'the model'} has backward hooks")
    if all(tensor.dim() == 0 or len(tensor) == 1 for tensor in tensors):
        # Export takes a size of one for a constant.
        leaves = [torch.cat([x, x]) if isinstance(x, torch.Tensor) and x.dim() else x for x in leaves]
    names = first_names(model)
    with (
        attributes_kept(model),
        random_states_kept(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        if not model.training:
            model.train()
        train, inputs = _mode_graph(model, leaves, spec, names)
        model.eval()
        evaluation, _ = _mode_graph(model, leaves, spec, names)
    modules = tuple(path for path, _ in model.named_modules() if path)
    return ModelGraph(train, evaluation, inputs, spec, names, modules=modules)


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer, and the first name of the same tensor."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


@contextmanager
def _custom_functions() -> Iterator[list[str]]:
    """The names of the autograd functions that run: export would lose their backward."""
    found: list[str] = []
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        found.append(cls.__name__)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    """Export logs and prints what it then raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _mode_graph(
    model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, names: Mapping[str, str]
) -> tuple[ModeGraph, tuple[Input, ...]]:
    reports: list[Any] = []
    flat = _Flat(model, leaves, spec, reports.append)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    dynamic = tuple({0: torch.export.Dim.AUTO} if tensor.dim() else None for tensor in tensors)
    drawn = _python_numbers()
    try:
        with _quiet(), short_sequences(), _custom_functions() as functions:
            program = torch.export.export(flat, tensors, dynamic_shapes=(dynamic,), strict=False)
    except NotExportable:
        raise
    except Exception as error:  # export passes on whatever forward raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
        raise NotExportable(f"torch.export failed: {reason}") from error
    if functions:
        raise NotExportable(
            f"it uses the autograd function {functions[0]}, whose backward torch.export loses"
        )
    if drawn != _python_numbers():
        raise NotExportable("forward draws numbers from random or numpy.random, which torch.export fixes")
    out_spec, constants, refusal = reports[-1]
    if refusal:
        raise NotExportable(f"{refusal}, which torch.export fixes")
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return _Copy(program, model, names).graph(out_spec, constants, places), _inputs(program, leaves)


def _python_numbers() -> tuple[Any, ...]:
    """The states of the generators that export does not see."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(keys).tobytes(), position


def _inputs(program: torch.export.ExportedProgram, leaves: list[Any]) -> tuple[Input, ...]:
    """What each input may be; at least one must have a first dimension that may vary."""
    entries = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    order = iter(program.graph_signature.user_inputs)
    found = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            found.append(Input(constant=leaf))
            continue
        value = entries[str(next(order))].meta["val"]
        rows = _row_range(program, value.shape[0]) if leaf.dim() else None
        found.append(Input(dtype=leaf.dtype, shape=tuple(leaf.shape), rows=rows))
    if all(given.rows is None for given in found):
        raise NotExportable("forward fixes the number of rows in a batch")
    return tuple(found)


def _row_range(program: torch.export.ExportedProgram, size: Any) -> tuple[int, float] | None:
    if not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols:
        return None
    limits = program.range_constraints.get(size.node.expr)
    if limits is None:  # an expression of another input's size
        return 0, math.inf
    # Export never tries zero and one rows, and reports two as the least.
    least = 0 if int(limits.lower) <= 2 else int(limits.lower)
    most = math.inf if limits.upper > 2**40 else int(limits.upper)
    return least, most


class _Copy:
    """Copies an exported graph, in which parameters are inputs, to one that gets them from the model."""

    def __init__(
        self, program: torch.export.ExportedProgram, model: nn.Module, names: Mapping[str, str]
    ) -> None:
        self.program, self.names, self.new = program, names, fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.model_tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }

    def graph(self, spec: pytree.TreeSpec, constants: list[Any], places: list[int]) -> ModeGraph:
        signature = self.program.graph_signature
        held = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        held_nodes: dict[str, fx.Node] = {}
        numbers = {str(name): number for name, number in zip(signature.user_inputs, places, strict=True)}
        outputs: list[fx.Node | Any] = []
        for node in self.program.graph.nodes:
            if node.op == "output":
                outputs = list(node.args[0])
            elif node.op == "placeholder" and node.name in held:
                name = self._tensor(held[node.name])
                if name not in held_nodes:
                    held_nodes[name] = self._add(node, self.new.get_attr(name))
                self.nodes[node] = held_nodes[name]
            elif node.op == "placeholder" and node.name in numbers:
                self._add(node, self.new.placeholder(f"input_{numbers[node.name]}"))
            elif node.op == "placeholder":
                raise NotExportable(f"forward uses an object that is no tensor ({node.target})")
            elif node.op == "get_attr":
                name = f"_region_{node.target}"
                self.attributes[name] = self._region(str(node.target))
                self._add(node, self.new.get_attr(name))
            elif not any(part in str(node.target) for part in ASSERTIONS):
                self._add(node, self.new.node_copy(node, lambda other: self.nodes[other]))
        results = [self.nodes[entry] if isinstance(entry, fx.Node) else entry for entry in outputs]
        self.new.output(tuple(results))
        self._remove_unused_sizes()
        self.new.lint()
        return ModeGraph(self.new, self.attributes, self._result(spec, constants, results))

    def _add(self, old: fx.Node, new: fx.Node) -> fx.Node:
        self.nodes[old] = new
        stack = list((old.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]) if stack else ""
        inside = path.startswith(f"{MODEL}.")
        new.meta = {"val": old.meta.get("val"), "module": path.removeprefix(f"{MODEL}.") if inside else ""}
        return new

    def _tensor(self, target: str) -> str:
        """Keeps a tensor of the model, or a constant of its code, as an attribute, and returns its name."""
        name = target.removeprefix(f"{MODEL}.")
        if name in self.model_tensors:
            name = self.names[name]
            self.attributes[name] = self.model_tensors[name]
        else:
            value = self.program.constants[target]
            name = f"_constant_{name.replace('.', '_')}"
            self.attributes[name] = value
        return name

    def _region(self, target: str) -> fx.GraphModule:
        region = self.program.graph_module.get_submodule(target)
        assert isinstance(region, fx.GraphModule)
        for node in list(region.graph.nodes):
            if any(part in str(node.target) for part in ASSERTIONS):
                region.graph.erase_node(node)
        region.recompile()
        return region

    def _remove_unused_sizes(self) -> None:
        """Sizes that were only computed for the assertions."""
        for node in reversed(list(self.new.nodes)):
            number = isinstance(
                node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat | int | bool
            )
            if node.op == "call_function" and not node.users and number:
                self.new.erase_node(node)

    def _result(self, spec: pytree.TreeSpec, constants: list[Any], results: list[Any]) -> Result:
        computed, leaves, fixed = iter(results), [], []
        for constant in constants:
            value = next(computed) if constant is COMPUTED else constant
            leaves.append(value_name(value) if isinstance(value, fx.Node) else None)
            fixed.append(None if isinstance(value, fx.Node) else value)
        return Result(spec, tuple(leaves), tuple(fixed))


def value_name(node: fx.Node) -> str:
    """The name of a value: that of its node, or `input 0`, ... for the inputs of the model."""
    if node.op == "placeholder":
        return input_name(int(str(node.target).removeprefix("input_")))
    return node.name
