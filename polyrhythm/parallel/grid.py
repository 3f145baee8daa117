"""Grid: the places of the workers that hold one model, where it is divided along two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyrhythm.core.split import ModelSplit
from polyrhythm.parallel.splits import TensorParallel


class Grid:
    """The places of a model by *section*, the place of its segments, and by rank on the tensor axis.

    The workers of one section run the same segments, each on its parts of divided tensors.
    """

    def __init__(self, splits: Sequence[ModelSplit]) -> None:
        tensors = [each.size for each in splits if isinstance(each, TensorParallel)]
        self.tensor = math.prod(tensors)
        self.sections = math.prod(each.size for each in splits) // self.tensor
        self._tensor_last = isinstance(splits[-1], TensorParallel)  # the last axis varies fastest

    @property
    def places(self) -> int:
        return self.sections * self.tensor

    def place(self, section: int, tensor: int) -> int:
        return section * self.tensor + tensor if self._tensor_last else tensor * self.sections + section

    def section(self, place: int) -> int:
        return place // self.tensor if self._tensor_last else place % self.sections

    def rank(self, place: int) -> int:
        """The rank of a place on the tensor axis."""
        return place % self.tensor if self._tensor_last else place // self.sections

    def column(self, place: int) -> list[int]:
        """The places with the same parts of divided tensors: values go from one to another."""
        return [self.place(section, self.rank(place)) for section in range(self.sections)]

    def row(self, place: int) -> list[int]:
        """The places that compute the same segments together."""
        return [self.place(self.section(place), tensor) for tensor in range(self.tensor)]
