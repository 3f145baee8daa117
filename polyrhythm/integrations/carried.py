"""What a codec remembers of the parameters in a bucket, and how it moves when buckets are filled anew."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.compress.compressor import wide
from polyrhythm.core.errors import UsageError

Remembered = tuple[dict[str, Tensor], dict[str, Any]]  # vectors by name, and notes by place


class Home:
    """Where the sender of a bucket keeps what it remembers; each parameter has a place in its vectors.

    One that was saved, or whose bucket is no more, only gives to others.
    """

    def __init__(self, places: dict[str, tuple[int, int]], like: Tensor) -> None:
        self.places = places
        self.notes: dict[str, Any] = {}
        self.vectors: dict[str, Tensor] = {}
        self._segments: list[tuple[int, int]] = []
        self._empty = torch.empty(0, dtype=wide(like.dtype), device=like.device)

    def buffer(self, name: str, exact: bool = False) -> tuple[Tensor, ...]:
        """A vector by name, zero at first; always in at least 32 bits."""
        if name not in self.vectors:
            self.vectors[name] = self._empty.new_zeros(max(stop for _, stop in self.places.values()))
        return (self.vectors[name],)

    def scale(self, name: str, factor: float) -> None:
        """Multiplies what is owed of a parameter."""
        start, stop = self.places[name]
        for what, vector in self.vectors.items():
            if what.endswith(": residual"):
                vector[start:stop] *= factor

    def take_vectors(self, homes: Mapping[str, Home]) -> None:
        """Parameter by parameter, from where each was."""
        for name, (start, stop) in self.places.items():
            if name not in homes:
                continue
            low, high = homes[name].places[name]
            if high - low != stop - start:
                raise UsageError(f"parameter {name} has {stop - start} numbers, and had {high - low} before")
            for what, vector in homes[name].vectors.items():
                self.buffer(what)[0][start:stop] = vector[low:high]

    def take_notes(self, homes: Mapping[str, Home], segments: Sequence[tuple[int, int]]) -> None:
        """Numbers from where a stretch's first parameter was; tensors only if the stretch is the same.

        Called when a sender has made the notes of these stretches, in this order.
        """
        self._segments = list(segments)
        for inside, note in self._noted():
            home = homes.get(inside[0]) if inside else None
            for then, old in home._noted() if home is not None else ():
                if inside[0] in then:
                    note["numbers"].update(old["numbers"])
                    note["tensors"].update(old["tensors"] if then == inside else {})
                    note["count"] = old["count"]

    def _noted(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The parameters in each stretch, and its note."""
        for (low, high), note in zip(self._segments, self.notes.get("codecs", {}).values(), strict=True):
            yield [name for name, (start, stop) in self.places.items() if low <= start < stop <= high], note

    def remembered(self) -> Remembered:
        """A copy of all that is remembered, to be put back."""
        vectors = {name: vector.clone() for name, vector in self.vectors.items()}
        return vectors, copy.deepcopy(self.notes.get("codecs", {}))

    def put_back(self, before: Remembered) -> None:
        """All is as it was; in place, for the sender's memories look at it."""
        vectors, notes = before
        for name, vector in self.vectors.items():
            vector.copy_(vectors[name]) if name in vectors else vector.zero_()
        for place, note in self.notes.get("codecs", {}).items():
            for what, then in notes[place].items():
                if isinstance(then, dict):
                    note[what].clear()
                    note[what].update(then)
                else:
                    note[what] = then

    def saved(self) -> dict[str, Any]:
        """All of it, as plain values and tensors."""
        return {
            "places": dict(self.places),
            "like": self._empty.clone(),
            "vectors": {name: vector.clone() for name, vector in self.vectors.items()},
            "stretches": list(self._segments),
            "notes": copy.deepcopy(self.notes),
        }

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> Home:
        home = cls({name: (start, stop) for name, (start, stop) in saved["places"].items()}, saved["like"])
        home.vectors, home.notes = dict(saved["vectors"]), copy.deepcopy(saved["notes"])
        home._segments = [(low, high) for low, high in saved["stretches"]]
        return home
