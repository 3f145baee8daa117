"""Prediction: the workers of a run predict a loader together.

Theory of operation
-------------------

Batches have the numbers that they have in the loader. All workers first agree on what they predict: the same
loader, by the same model. Then they take a *window* of batches at a time: all of them, or, if the script
takes the outputs one by one, as many as fit well into memory. A window takes rounds, usually one:

    1  The batches of the window that are missing are dealt to the workers, and computed (`batches`).
    2  All exchange which ones they have computed. A worker that has died is not among them.
    3  Those that want the outputs fetch them from each other (`output_exchange`).
    4  All exchange which ones they still lack. If nobody lacks any, the window is complete. Otherwise a
       worker has died with what it had, and there is another round for these.

So no worker needs to know who was dealt what, and it does not matter when one dies. The exchanges of 2 and 4
go through the coordinator, which gives all workers the same answer.

A worker that replaces a dead one comes later. The coordinator repeats to it what the others have exchanged
before, so it takes the same way through the windows, but has nothing of those that are over: it computes them
by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.parallel.example import Call
from polyrhythm.session.order import ENDLESS
from polyrhythm.session.prediction.batches import Deal, DealtBatches
from polyrhythm.session.prediction.models import Predictor
from polyrhythm.session.prediction.output_exchange import Outputs, packed
from polyrhythm.session.prediction.outputs import check_rows, plain_output

To = Literal["all", "main"]
WINDOW = 16  # batches of each worker whose outputs are kept for a script that takes them one by one
Runs = list[list[int]]  # numbers as pairs: the first of some that follow each other, and how many


class Together:
    """What one worker needs to predict with others. The default: it is alone."""

    rank = 0
    workers = 1
    processes = True  # DataLoaders may start worker processes

    def number(self) -> int:
        """A number for the next round, equal on all workers."""
        return 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers that are alive, by rank."""
        return [value]

    def computed(self, examples: int) -> None:
        """This worker has computed a batch of so many examples."""

    def deal(self, name: str, count: int) -> Deal:
        """Deals so many batches to all workers."""
        return Deal(None, name, count, 1)

    def publish(self, number: int, readers: Sequence[int], packed: Tensor) -> None:
        """Lets these workers fetch outputs."""

    def fetch(self, number: int, sizes: Mapping[int, int]) -> Outputs:
        """The outputs of other workers, by their ranks and the bytes that they have published."""
        return {}


class Prediction:
    """One call of `session.predict`."""

    def __init__(
        self,
        run: Together,
        batches: DealtBatches,
        predictor: Predictor,
        inputs: Callable[[Any], Call],
        to: To,
        stream: bool,
    ) -> None:
        """`inputs`: what the model takes from a batch."""
        self._run, self._batches, self._to, self._stream = run, batches, to, stream
        self._predictor, self._inputs = predictor, inputs
        self._main: int | None = None  # the worker that gets the outputs, if one does

    def __iter__(self) -> Iterator[Any]:
        """The outputs of all batches in order, on the workers that get them. On others nothing, but all must
        iterate to the end."""
        start = 0
        width = WINDOW * self._run.workers if self._stream else ENDLESS
        while start < self._batches.count:
            mine, receives = self._window(start, start + width)
            start = min(start + width, self._batches.count)
            if receives:
                yield from (mine[number] for number in sorted(mine))

    def _window(self, start: int, stop: int) -> tuple[Outputs, bool]:
        """The outputs of these batches, and whether this worker gets them."""
        mine: Outputs = {}
        missing: Sequence[int] = range(start, min(stop, self._batches.count))
        while True:
            number = self._run.number()
            computed = self._compute(missing, self._deal(number, missing))
            mine.update(computed)
            receivers = self._exchange(number, computed, mine)
            window = range(start, min(stop, self._batches.count))
            receives = self._run.rank in receivers
            lacks = [each for each in window if receives and each not in mine]
            theirs = self._run.gather(runs(lacks))
            missing = sorted({each for some in theirs for each in numbers(some)})
            if missing:
                continue
            if lacks:  # this worker replaces another, and the others have these
                mine.update(self._compute(lacks, Deal(None, "", len(lacks), 1)))
            return mine, receives

    def _deal(self, number: int, missing: Sequence[int]) -> Deal:
        count = len(missing) if missing[-1] < ENDLESS - 1 else ENDLESS
        return self._run.deal(f"prediction {number}", count)

    def _compute(self, missing: Sequence[int], deal: Deal) -> Outputs:
        """The outputs of those batches that this worker is dealt."""
        found: Outputs = {}
        begun: deque[tuple[int, int, Callable[[], Any]]] = deque()

        def settle() -> None:
            number, examples, wait = begun.popleft()
            output = plain_output(wait())
            if not self._stream:
                check_rows(output, examples)
            found[number] = output
            self._run.computed(examples)

        with self._predictor.active():
            for number, examples, content in self._batches.load(missing, deal):
                begun.append((number, examples, self._predictor.begin(self._inputs(content))))
                if len(begun) > self._predictor.ahead:
                    settle()
            while begun:
                settle()
        return found

    def _exchange(self, number: int, computed: Outputs, mine: Outputs) -> list[int]:
        """Fetches what other workers have computed. Returns the ranks of those that get all outputs."""
        me, count = self._run.rank, self._batches.count
        content = packed(computed) if computed and self._run.workers > 1 else None
        found = self._run.gather([me, count, 0 if content is None else len(content)])
        self._batches.count = min(each[1] for each in found)  # one may have come to the end
        ranks = [each[0] for each in found]
        receivers = ranks if self._to == "all" else self._mains(min(ranks))
        if content is not None:
            self._run.publish(number, [rank for rank in receivers if rank != me], content)
        if me in receivers:
            sizes = {rank: size for rank, _, size in found if size and rank != me}
            mine.update(self._run.fetch(number, sizes))
        return receivers

    def _mains(self, first: int) -> list[int]:
        if self._stream and self._main not in (None, first):
            raise PolyrhythmError(
                f"worker {self._main} died, and it alone got the outputs of session.predict(to='main'): "
                "predict again, or give them to all workers"
            )
        self._main = first
        return [first]


def runs(some: Iterable[int]) -> Runs:
    """Increasing numbers as runs, which are shorter to send."""
    found: Runs = []
    for each in some:
        if found and found[-1][0] + found[-1][1] == each:
            found[-1][1] += 1
        else:
            found.append([each, 1])
    return found


def numbers(some: Runs) -> Iterator[int]:
    """The numbers in some runs."""
    for first, count in some:
        yield from range(first, first + count)
