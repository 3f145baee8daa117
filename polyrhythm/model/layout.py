"""Layout: where each parameter of a model lies when all are laid end to end in flat vectors.

The trainable parameters come parameter group by parameter group, in one flat vector per dtype and device. Two
nodes can train together if their layouts agree.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import NotFinite, UsageError
from polyrhythm.model.vectors import split

Empty = Callable[[int, torch.dtype, torch.device], Tensor]

# A shard's optimizer state: for each slice (parameter index, low, high, plain values, [name, shape] of its
# tensors, with no shape for those that have a number for each element), and the tensors of all slices in this
# order, flat.
State = tuple[list[tuple[int, int, int, dict[str, Any], list[tuple[str, list[int] | None]]]], list[Tensor]]


# Element-wise optimizers. All others, such as LARS, LAMB, Muon and Adafactor, need whole tensors.
ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
}  # fmt: skip


def private(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)


def untouched(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. Pages that are never written take no memory, if the system supports that."""
    if device.type != "cpu" or not count:
        return torch.zeros(count, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)


@dataclass(frozen=True)
class Piece:
    """One parameter's place in the flat vectors."""

    name: str
    shape: torch.Size
    group: int
    part: int  # which flat vector
    start: int  # where in it

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class Span(NamedTuple):
    """A stretch of the flat vectors whose parameters share the settings of one group."""

    settings: dict[str, Any]
    group: int
    part: int
    start: int
    stop: int

    def of(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[self.part][self.start : self.stop]


def spans_of(
    slices: Iterable[tuple[int, int, int, int, int]], absent: frozenset[int]
) -> list[tuple[int, int, int, int]]:
    """Joins slices (parameter index, group, part, start, stop) that lie side by side, but for the absent."""
    spans: list[tuple[int, int, int, int]] = []
    for index, group, part, start, stop in slices:
        if index in absent:
            continue
        if spans and spans[-1][:2] == (group, part) and spans[-1][3] == start:
            spans[-1] = (group, part, spans[-1][2], stop)
        else:
            spans.append((group, part, start, stop))
    return spans


class Layout:
    """Where each parameter of a model lies. Two nodes can train together if their layouts' hashes agree."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        kinds: dict[tuple[torch.dtype, torch.device], int] = {}
        counts: list[int] = []
        self.pieces: list[Piece] = []
        self.parameters: list[Tensor] = []
        for group, settings in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(settings["params"]):
                name = names.get(id(parameter), f"group {group} parameter {number}")
                if not parameter.is_floating_point():
                    raise UsageError(
                        f"parameter {name} is {parameter.dtype}; only floating-point ones can train"
                    )
                part = kinds.setdefault((parameter.dtype, parameter.device), len(kinds))
                if part == len(counts):
                    counts.append(0)
                self.pieces.append(Piece(name, parameter.shape, group, part, counts[part]))
                self.parameters.append(parameter)
                counts[part] += parameter.numel()
        self.kinds = list(kinds)
        self.counts = counts
        self.total = sum(counts)
        if not self.total:
            raise UsageError("the model has no parameters to train; give the optimizer model.parameters()")
        self.optimizer = type(optimizer)
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        text = repr([(p.name, tuple(p.shape), p.group, str(self.kinds[p.part][0])) for p in self.pieces])
        self.hash = hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def outline(self) -> list[str]:
        """What the hash is of, in words: a line for each parameter."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype, _ in self.kinds]
        return [
            f"{piece.name} {list(piece.shape)} {dtypes[piece.part]}"
            + (f" in parameter group {piece.group}" if piece.group else "")
            for piece in self.pieces
        ]

    def vectors(self, empty: Empty = private, exact: bool = False) -> tuple[Tensor, ...]:
        """New flat vectors of this layout, one per dtype and device; `exact`: in at least 32 bits."""
        return tuple(
            empty(count, torch.float32 if exact and dtype.itemsize < 4 else dtype, device)
            for (dtype, device), count in zip(self.kinds, self.counts, strict=True)
        )

    def check_servers(self, count: int) -> None:
        """Raises UsageError for more servers than parameters, or than tensors if those stay whole."""
        if count > self.total:
            raise UsageError(f"{count} servers for {self.total} parameters: use at most one per parameter")
        most = len(self._bounds())
        if self.optimizer not in ELEMENTWISE and count > most:
            raise UsageError(
                f"{count} servers: {self.optimizer.__name__} may need whole tensors, so none is split, and "
                f"the model has {most}; use at most that many servers, or a strategy without any, such as "
                "allreduce or local"
            )

    def ranges(self, count: int) -> list[tuple[int, int]]:
        """The range of each of `count` servers: near-equal parts.

        An optimizer that is not element-wise needs whole tensors: for it each border moves to
        the nearest one between two tensors.
        """
        if count not in self._ranges:
            ranges = split(self.total, count)
            if self.optimizer not in ELEMENTWISE and count > 1:
                bounds = self._bounds()
                cuts, first = [0], 0
                for number, (_, goal) in enumerate(ranges[:-1], 1):
                    last = len(bounds) - (count - number)  # each of the others must have a tensor too
                    first = min(range(first, last), key=lambda place: abs(bounds[place] - goal)) + 1
                    cuts.append(bounds[first - 1])
                ranges = list(pairwise([*cuts, self.total]))
            self._ranges[count] = ranges
        return self._ranges[count]

    def _bounds(self) -> list[int]:
        """Where in the whole the tensors end, in order."""
        offsets = [sum(self.counts[:part]) for part in range(len(self.counts))]
        return sorted({offsets[piece.part] + piece.stop for piece in self.pieces} - {0})

    def check_finite(
        self, vectors: Sequence[Tensor], where: str, start: int = 0, stop: int | None = None
    ) -> None:
        """Raises `NotFinite` if parameters, or changes of them, are not; the vectors are a range of this.

        Called before a codec, whose output might be finite all the same.
        """
        if all(math.isfinite(float(vector.sum())) for vector in vectors):
            return
        layers, offsets = [], [0] * len(self.counts)
        for _, piece, low, high in self.groups(start, self.total if stop is None else stop):
            begin = offsets[piece.part]
            offsets[piece.part] += high - low
            if not bool(torch.isfinite(vectors[piece.part][begin : begin + high - low]).all()):
                layers.append(piece.name)
        if layers:  # the sum of large finite numbers may overflow too
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            raise NotFinite(
                f"{where}: the parameters of {layers[0]}{more} are not finite (training has diverged): lower "
                "the learning rate or clip gradients"
            )

    def view(self, vectors: Sequence[Tensor], piece: Piece) -> Tensor:
        """The part of `vectors` that is this parameter, in its own shape."""
        return vectors[piece.part][piece.start : piece.stop].view(piece.shape)

    def tensor(self, vectors: Sequence[Tensor], piece: Piece) -> Tensor:
        """The same with a storage of its own on the same memory.

        `torch.save` writes whole storages: of a view it would save the flat vector.
        """
        vector, size = vectors[piece.part], self.kinds[piece.part][0].itemsize
        start = (vector.storage_offset() + piece.start) * size
        storage = vector.untyped_storage()[start : start + piece.shape.numel() * size]
        tensor = torch.empty(0, dtype=vector.dtype, device=vector.device)
        tensor.set_(storage, 0, piece.shape)  # type: ignore[call-overload]
        return tensor

    def groups(self, start: int, stop: int) -> Iterator[tuple[int, Piece, int, int]]:
        """(index, piece, low, high): the pieces in a range of the whole, from low to high of each."""
        offsets = [sum(self.counts[:part]) for part in range(len(self.counts))]
        for index, piece in enumerate(self.pieces):
            first = offsets[piece.part] + piece.start
            low = max(0, start - first)
            high = min(piece.stop - piece.start, stop - first)
            if low < high:
                yield index, piece, low, high


def check_optimizer(optimizer: torch.optim.Optimizer, sparse: bool = False, closures: bool = False) -> None:
    """Raises UsageError for optimizers that the strategy does not support.

    `sparse`: it keeps sparse gradients. `closures`: gradients can be computed several times in a step.
    """
    if isinstance(optimizer, torch.optim.SparseAdam) and not sparse:
        raise UsageError("SparseAdam needs sparse gradients, but gradients are dense here; use Adam or SGD")
    if needs_closure(optimizer) and not closures:
        name = type(optimizer).__name__
        raise UsageError(
            f"{name} calls a closure several times per step: use allreduce, where all workers evaluate it "
            "together, or an optimizer such as SGD or Adam"
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True for optimizers that evaluate the loss themselves, such as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


_PLAIN = (int, float, str, bool, tuple, list, type(None))  # not a union: isinstance is five times as slow


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings without its parameters, as values that any wire can carry."""
    plain: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, _PLAIN):
            if key != "params":
                plain[key] = value
        elif isinstance(value, Tensor) and value.numel() == 1:
            plain[key] = value.item()
    return plain
