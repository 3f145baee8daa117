"""Counting: the examples that a script has got, and those of them that count.

In the last round of an epoch a worker may borrow examples of another, so that it can take part in the step. A
script that counts `len(x)` counts them too, and one that counts `session.count(x)` does not. A weight of
`session.mean()` that equals the number of examples given since the last mean, epoch or batch, or since the
start, most likely includes them. That is a guess (it may be the size of a validation set), so the person is
told, and the weight stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, NamedTuple

BORROWED = (
    "a weight of session.mean() seems to include examples that a worker has borrowed to take part in the "
    "last round: count the examples of a batch x by session.count(x), not by len(x)"
)


class _Given(NamedTuple):
    examples: int
    borrowed: int  # of these


class Counting:
    """The examples that the loaders of one worker have given to the script; `note` tells the person."""

    def __init__(
        self,
        counts: Callable[[Any], bool | None] = lambda batch: True,
        note: Callable[[str], object] | None = None,
    ) -> None:
        """`counts`: whether a batch has a weight; None if that is unknown."""
        self._counts, self._note = counts, note
        self._given = _Given(0, 0)
        self._marks = {"start": self._given}  # moments from which a script may count
        self._borrows = False  # the last batch is borrowed
        self._asked = False  # the script asks what counts

    def mark(self, moment: str) -> None:
        """A script may count from here: a "batch", an "epoch" or a "mean"."""
        self._marks[moment] = self._given

    def give(self, examples: int, counts: bool) -> None:
        """The script gets a batch; not `counts` if it is borrowed."""
        self.mark("batch")
        self._borrows = not counts
        self._given = _Given(self._given.examples + examples, self._given.borrowed + examples * self._borrows)

    def count(self, batch: Sized) -> int:
        """How many examples of a batch count; of the last one, if it is a new tensor."""
        self._asked = True
        counts = self._counts(batch)
        return len(batch) if counts or (counts is None and not self._borrows) else 0

    def on_mean(self, weight: float) -> None:
        """The script averages a value of this weight over all workers."""
        if self._note is not None and self.includes_borrowed(weight):
            self._note(BORROWED)
        self.mark("mean")

    def includes_borrowed(self, weight: float) -> bool:
        """True if a weight is most likely a number of examples some of which do not count."""
        return not self._asked and any(
            weight == self._given.examples - then.examples and self._given.borrowed > then.borrowed
            for then in self._marks.values()
        )
