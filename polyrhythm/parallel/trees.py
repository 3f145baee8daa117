"""Nested inputs and outputs of a model as flat lists, with dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch.utils import _pytree as pytree


class _Record:
    """A dataclass instance on its way through pytree, which does not know its class."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _flatten_record(record: _Record) -> tuple[list[Any], Any]:
    names = tuple(field.name for field in fields(record.value))
    return [_wrap(getattr(record.value, name)) for name in names], (type(record.value), names)


def _build_record(values: Any, context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # frozen ones, too
    return made


pytree.register_pytree_node(_Record, _flatten_record, _build_record)


def _wrap(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: _Record(leaf) if is_dataclass(leaf) and not isinstance(leaf, type) else leaf, value
    )


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of nested tuples, lists, dicts and dataclasses, and how to rebuild it from them."""
    return pytree.tree_flatten(_wrap(value))


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens the arguments of a call. The order of keyword arguments does not matter."""
    return flatten((tuple(args), {name: kwargs[name] for name in sorted(kwargs)}))


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs by the names that stages use: `input 0`, `input 1`, ..."""
    return {input_name(number): leaf for number, leaf in enumerate(flatten_call(args, kwargs)[0])}


def input_name(number: int) -> str:
    return f"input {number}"
