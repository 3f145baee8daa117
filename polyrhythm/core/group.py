"""Group: some workers that act together in collectives.

All members of a group begin the same collectives in the same order; they may be joined in any order. On one
host and in simulation sums are taken in rank order, so lockstep strategies give the same bits in both.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.codec import Codec
    from polyrhythm.core.peer import Peer


class Task(ABC):
    """Work in progress beside its node: a function in a thread (a greenlet in simulation) or a collective."""

    @abstractmethod
    def join(self) -> None:
        """Blocks until the work is done. Raises the error that ended it, if any."""


class Coding(Protocol):
    """The methods of a compressor that collectives use. Segments are parts of vectors."""

    codec: Codec

    def send(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The codes of the coded segments."""

    def combine(self, codes: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
        """Overwrites the coded segments with the mean over all workers."""

    def codable(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The coded segments."""

    def adopt(self, theirs: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Copies the coded segments of other vectors."""

    def values(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The coded segments in at least 32 bits."""

    def encode_chunk(self, values: Sequence[Tensor], number: int, count: int) -> list[Tensor]:
        """The codes of chunk `number` of `count` of each of these segments."""

    def add_chunk(self, codes: Sequence[Tensor], into: Sequence[Tensor], number: int, count: int) -> None:
        """Decodes a chunk and adds it to these segments."""

    def combine_chunks(self, chunks: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
        """Overwrites the coded segments with the mean, from sums received in chunks, one per worker."""


# What a member gets in an exchange, by the place of the sender.
Use = Callable[[Sequence[Sequence["Tensor"]]], None]


class Group(ABC):
    """Some workers that act together, as one of them sees it."""

    members: Sequence[Peer]  # in rank order
    rank: int  # the place of this worker among them

    @property
    def size(self) -> int:
        return len(self.members)

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None:
        """Replaces each tensor by its sum, mean, max, min or product over the group, in place."""
        self.begin_all_reduce(*tensors, op=op).join()

    @abstractmethod
    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        """Starts an all-reduce without waiting. The tensors are lent until `join()` returns."""

    @abstractmethod
    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        """Starts to replace the coded parts of the vectors by their mean over the group.

        Every member gathers the codes of all others and combines them; around a ring, codes are decoded,
        added and encoded again at each hop. The flags, a few numbers, travel uncoded and become their mean.
        All tensors are lent until `join()` returns.
        """

    @abstractmethod
    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        """Overwrites each tensor with that of the member at place `root`, in place."""

    @abstractmethod
    def exchange(self, what: str, outgoing: Sequence[Sequence[Tensor]], use: Use) -> None:
        """Sends the tensors `outgoing[i]` to the member at place i. Calls `use` with the tensors that this
        member got, by place.

        All tensors are flat. Those that `use` gets are lent: they must not be changed, nor used later. `what`
        is the name of the collective, which must be the same on all members.
        """

    @abstractmethod
    def split(self, members: Sequence[Peer], name: str = "") -> Group:
        """The group of some of the members, of which this worker is one. Each of them calls this.

        Groups of different names are independent, also if they have the same members: their collectives may
        be in any order relative to each other.
        """


def first_number(members: Sequence[Peer], name: str = "") -> int:
    """Where a part of the workers begins to number its collectives, so that no two parts share a number."""
    return zlib.crc32((repr([peer.rank for peer in members]) + name).encode()) << 40
