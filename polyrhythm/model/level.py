"""Level: a replica as one of two strategies sees it that share a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polyrhythm.model.replica import Replica

if TYPE_CHECKING:
    from torch import Tensor


class Level(Replica):
    """Model and optimizer are the replica's; what the strategy remembers is this level's own.

    So two strategies may use the same names for buffers and notes. What this one takes for the optimizer's
    step is `apply`, and for the examples of a worker `samples`. It is kept in `replica.levels`, and saved
    with it: `remembers` is what the strategy says is to be saved.
    """

    def __init__(
        self,
        whole: Replica,
        remembers: tuple[str, ...],
        apply: Callable[[], None] | None = None,
        samples: Callable[[], int] | None = None,
    ) -> None:
        # Not that of a replica: whatever is not set here is looked up in the whole.
        self.whole, self.remembers = whole, remembers
        self.notes, self.buffers, self.levels = {}, {}, {}
        self.senders, self.readers, self.outstanding = {}, {}, []
        self._take_step, self._samples = apply or whole.apply, samples

    def __getattr__(self, name: str) -> Any:
        if name == "samples" and self._samples is not None:
            return self._samples()
        return getattr(self.whole, name)

    def apply(self) -> None:
        self._take_step()

    @contextmanager
    def at(self, vectors: Sequence[Tensor]) -> Iterator[None]:
        """For a while this level's parameters are these: what another has made of the model's own."""
        self.parameters = tuple(vectors)
        try:
            yield
        finally:
            del self.parameters
