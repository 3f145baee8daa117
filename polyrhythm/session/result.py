"""The final parameters as a file in safetensors format, without a copy: a header, and tensors as they lie."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# The format's names, in the order in which the library writes tensors: wide ones first, so all are aligned.
_NAMES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_NAMES)}
_SMALL = 1 << 16  # bytes: shorter tensors are joined, so that the parts of a file are few
_NAMED = 3  # entries that a note names
_NO_DATA = "no data"


def digest(vectors: Sequence[Tensor]) -> str:
    """The SHA-256 of the bytes of some vectors."""
    made = hashlib.sha256()
    for vector in vectors:
        made.update(content(vector).numpy().data)
    return made.hexdigest()


def safetensors(model: nn.Module, names: Collection[str] = ()) -> list[Tensor]:
    """The state of a model as a file in safetensors format: its parts, large ones in the model's own memory.

    `names`: of its entries, in their order, where they are not its own.
    The library would write the same bytes, but needs the whole file in memory beside the model. Entries that
    the format cannot hold are left out: see `left_out`.
    """
    whole = model.state_dict()
    if len(names) == len(whole):
        whole = dict(zip(names, whole.values(), strict=True))
    state = {name: value for name, value in whole.items() if _obstacle(value) is None}
    layout = FileLayout({name: (each.dtype, list(each.shape)) for name, each in state.items()})
    parts, file = [content(state[name]) for name in layout.places], [layout.header]
    for small, run in itertools.groupby(parts, lambda part: part.nbytes < _SMALL):
        several = list(run)
        file += [torch.cat(several)] if small else several
    return file


class FileLayout:
    """Where the entries of a model's state lie in a file in safetensors format."""

    def __init__(self, entries: Mapping[str, tuple[torch.dtype, list[int]]]) -> None:
        """`entries`: dtype and shape of each."""
        names = sorted(entries, key=lambda name: (_ORDER[entries[name][0]], name))
        sizes = [math.prod(entries[name][1]) * entries[name][0].itemsize for name in names]
        offsets = dict(zip(names, itertools.pairwise(itertools.accumulate(sizes, initial=0)), strict=True))
        described = {
            name: {
                "dtype": _NAMES[entries[name][0]],
                "shape": entries[name][1],
                "data_offsets": offsets[name],
            }
            for name in names
        }
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.header = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        first = self.header.nbytes
        # The beginning and end of each entry, in the order of the file.
        self.places = {name: (first + start, first + stop) for name, (start, stop) in offsets.items()}
        self.size = first + sum(sizes)


def left_out(model: nn.Module) -> str | None:
    """A note that names the entries of the model's state that the file cannot hold; None if it holds all."""
    kinds = {name: _obstacle(value) for name, value in model.state_dict().items()}
    entries = [f"{name} ({kind})" for name, kind in kinds.items() if kind is not None]
    if not entries:
        return None
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return (
        f"consensus.safetensors leaves out what its format cannot hold: {', '.join(entries[:_NAMED])}{more}"
    )


def savable(value: Any) -> bool:
    """True for an entry of a model's state that the format can hold, here or on another worker."""
    return _obstacle(value) in (None, _NO_DATA)


def _obstacle(value: Any) -> str | None:
    """What about an entry of a model's state the format cannot hold, such as its type; None if it can."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_meta:
        return _NO_DATA
    if value.is_nested:
        return "nested"
    if value.layout is not torch.strided:
        return str(value.layout)
    return None if value.dtype in _NAMES else str(value.dtype)


def content(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as they are in a file, in its own memory if they lie there in order."""
    # Views that torch conjugates or negates when they are read have other bytes in memory.
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
