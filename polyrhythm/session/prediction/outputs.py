"""Outputs of a model: tensors, and tuples, lists and dicts of tensors, with a row for each example."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError


def plain_output(output: Any, where: str = "the output") -> Any:
    """The output of one batch on the CPU, in plain containers. UsageError if it has other things."""
    if isinstance(output, Tensor):
        return output.detach().cpu()
    if isinstance(output, Mapping):
        return {str(name): plain_output(each, f"{where}[{name!r}]") for name, each in output.items()}
    if isinstance(output, tuple | list):
        plain = [plain_output(each, f"{where}[{place}]") for place, each in enumerate(output)]
        return tuple(plain) if isinstance(output, tuple) else plain
    if output is None:
        return None
    raise UsageError(
        f"session.predict() takes models that return tensors, and tuples, lists and dicts of tensors, but "
        f"{where} is of type {type(output).__name__}: wrap the model in one that returns its tensors"
    )


def check_rows(output: Any, examples: int) -> None:
    """Raises UsageError if a tensor of the output of a batch has not one row for each of its examples."""
    for name, each in named_tensors(output):
        rows = len(each) if each.dim() else 0
        if rows != examples:
            shape = f"has shape {list(each.shape)}" if each.dim() else "is a single number"
            raise UsageError(
                f"{name} {shape} for a batch of {examples} examples, and session.predict() joins the "
                "outputs of all batches along dimension 0: return a row for each example, or take each "
                "batch by itself with stream=True"
            )


def joined_outputs(outputs: Sequence[Any], where: str = "output") -> Any:
    """The outputs of all batches as one, joined along dimension 0."""
    first = outputs[0]
    if any(_kind(each) != _kind(first) for each in outputs):
        raise UsageError(
            f"{where} differs between batches in its type or its keys, and session.predict() joins the "
            "outputs of all batches: return the same for each, or take them one by one with stream=True"
        )
    if isinstance(first, dict):
        return {name: joined_outputs([each[name] for each in outputs], f"{where}.{name}") for name in first}
    if isinstance(first, tuple | list):
        parts = [joined_outputs(each, f"{where}.{place}") for place, each in enumerate(zip(*outputs))]  # noqa: B905
        return tuple(parts) if isinstance(first, tuple) else parts
    if first is None:
        return None
    if shapes := [each.shape for each in outputs if each.shape[1:] != first.shape[1:]]:
        raise UsageError(
            f"{where} has shape {list(first.shape)} in one batch and {list(shapes[0])} in another, and "
            "session.predict() joins them along dimension 0: pad them, or take each batch by itself with "
            "stream=True"
        )
    return torch.cat(outputs)  # type: ignore[arg-type]


def named_tensors(output: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, by names such as "output", "output.0" and "output.logits"."""
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, dict):
        for key, each in output.items():
            yield from named_tensors(each, f"{name}.{key}")
    elif isinstance(output, tuple | list):
        for place, each in enumerate(output):
            yield from named_tensors(each, f"{name}.{place}")


def write_outputs(path: Path, outputs: Any) -> None:
    """Writes outputs as a file in safetensors format, which is always complete."""
    import safetensors.torch

    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        safetensors.torch.save_file(dict(named_tensors(outputs)), part)
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # as for any other file
        part.replace(path)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"cannot write the outputs to {path}: {error}") from None


def _kind(output: Any) -> Any:
    if isinstance(output, dict):
        return tuple(output)
    if isinstance(output, tuple | list):
        return type(output), len(output)
    return (Tensor, output.dtype) if isinstance(output, Tensor) else type(output)
