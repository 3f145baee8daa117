"""What HogWild! is measured on: logistic regression on sparse rows, on text, and on rows that are dense."""

from __future__ import annotations

import functools
import itertools
import math
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

FEATURES, TOUCHED = 1_000_000, 50
HASHED = 1 << 20

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """Rows of features, end to end, with where each begins; labels; and how it is trained to which loss."""

    name: str
    features: int
    words: Array
    starts: Array
    labels: Array
    lr: float
    target: float
    batch: int = 8
    values: Array | None = None  # of a dense problem: all features of each row

    def __len__(self) -> int:
        return len(self.labels)

    @functools.cached_property
    def width(self) -> int | None:
        """How long all rows are, if all are equally long."""
        lengths = set(np.diff(self.starts).tolist())
        return lengths.pop() if len(lengths) == 1 else None


def synthetic(rows: int, lr: float, target: float, batch: int) -> Problem:
    """50 features of a million in each row, some more often than others; the label depends on all of them."""
    random = np.random.default_rng(0)
    words = (FEATURES * random.random((rows, TOUCHED)) ** 2).astype(np.int32)
    truth = random.normal(size=FEATURES)
    chance = 1 / (1 + np.exp(-4 * truth[words].sum(1) / math.sqrt(TOUCHED)))
    labels = (random.random(rows) < chance).astype(np.float32)
    starts = np.arange(0, rows * TOUCHED + 1, TOUCHED)
    return Problem("synthetic", FEATURES, words.reshape(-1), starts, labels, lr, target, batch)


def dense(rows: int, lr: float, target: float, batch: int, features: int = 2000) -> Problem:
    """Every feature in every row: where HogWild! is not at home."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, features)).astype(np.float32) / np.float32(math.sqrt(features))
    labels = (x @ random.normal(size=features).astype(np.float32) > 0).astype(np.float32)
    # A batch's worth of words will do: they are the same in all rows.
    words = np.tile(np.arange(features, dtype=np.int32), batch)
    return Problem("dense", features, words, np.arange(0), labels, lr, target, batch, x)


@functools.cache
def _text(rows: int) -> list[tuple[list[int], int]]:
    """Lines of two kinds of file, as words and pairs of words: is it Python, or a copyright notice?"""
    kinds = {
        "Python's own sources": sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")),
        "/usr/share/doc/*/copyright": sorted(Path("/usr/share/doc").glob("*/copyright")),
    }
    lines: list[tuple[list[int], int]] = []
    for label, (what, files) in enumerate(kinds.items()):
        some = list(itertools.islice(_lines(files), 50 * rows))
        if len(some) < rows // 2:
            raise RuntimeError(
                f"the text is made of files on this machine, and {what} has {len(some)} lines of 3 words; "
                f"{rows // 2} are needed (on Debian and its relatives they are there)"
            )
        lines += [(line, label) for line in some[:: len(some) // (rows // 2)][: rows // 2]]
    order = np.random.default_rng(0).permutation(len(lines))
    return [lines[place] for place in order]


def text(rows: int, lr: float, target: float, batch: int) -> Problem:
    lines = _text(rows)
    lengths = [len(words) for words, _ in lines]
    words = np.array([word for words, _ in lines for word in words], np.int32)
    labels = np.array([label for _, label in lines], np.float32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Problem("text", HASHED, words, starts, labels, lr, target, batch)


def _lines(files: list[Path]) -> Iterator[list[int]]:
    """Each line with three words or more, as the hashes of its words and of pairs of them."""
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            words = line.lower().split()[:40]
            if len(words) >= 3:
                pairs = (f"{one} {other}" for one, other in itertools.pairwise(words))
                yield [zlib.crc32(word.encode()) % HASHED for word in (*words, *pairs)]


class Rows:
    """The rows of a problem, by batches: words, offsets, labels and values, as `SparseSGD.learn` takes them.

    Rows that lie one after the other are slices, and are not copied.
    """

    def __init__(self, problem: Problem, long: bool = False) -> None:
        import torch

        self.problem, self.width = problem, problem.width
        words = torch.from_numpy(problem.words)
        self.words, self.labels = words.long() if long else words, torch.from_numpy(problem.labels)
        self.values = None if problem.values is None else torch.from_numpy(problem.values)
        self.starts = torch.from_numpy(problem.starts)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indexes: range | list[int]) -> tuple[Tensor | None, ...]:
        import torch

        which = slice(indexes.start, indexes.stop) if isinstance(indexes, range) else indexes
        labels = self.labels[which]
        if self.values is not None:
            return self.words.view(-1, self.problem.features)[: len(labels)], None, labels, self.values[which]
        if self.width:
            return self.words.view(-1, self.width)[which], None, labels, None
        if isinstance(indexes, range):
            starts = self.starts[indexes.start : indexes.stop + 1]
            return self.words[int(starts[0]) : int(starts[-1])], starts[:-1] - starts[0], labels, None
        parts = [self.words[int(self.starts[each]) : int(self.starts[each + 1])] for each in indexes]
        offsets = [0, *itertools.accumulate(len(part) for part in parts[:-1])]
        return torch.cat(parts), torch.tensor(offsets), labels, None


class Blocks:
    """Batches of rows that lie one after the other; the batches are in another order every epoch."""

    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.size = rows, size

    def __len__(self) -> int:
        return math.ceil(self.rows / self.size)

    def __iter__(self) -> Iterator[range]:
        import torch

        for block in torch.randperm(len(self)).tolist():
            yield range(block * self.size, min(self.rows, (block + 1) * self.size))


@dataclass
class Logistic:
    """400 rows, to a loss of 0.3, for simulated workers: they are in one process, and can be watched."""

    seed: int
    features: int
    touched: int
    lr: float
    limit: int = 4000
    steps: int = 0
    reached: int = 0  # after so many steps of all workers
    conflicts: int = 0  # how often a row of the weights was changed between reading and writing
    touches: int = 0

    def __post_init__(self) -> None:
        self.versions = np.zeros(self.features, np.int64)

    def __call__(self) -> None:
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        import polyrhythm as pr

        session = pr.init()
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.rand(400, self.features, generator=generator).argsort(1)[:, : self.touched]
        y = (torch.randn(self.features, generator=generator)[x].sum(1) > 0).float()
        model = nn.EmbeddingBag(self.features, 1, mode="sum", sparse=True)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        loader = DataLoader(TensorDataset(x, y), batch_size=1, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        while True:
            for batch, label in loader:
                if self.reached:
                    return
                optimizer.zero_grad()
                touched = batch[0].numpy()
                read = self.versions[touched]
                F.binary_cross_entropy_with_logits(model(batch)[:, 0], label).backward()
                optimizer.step()  # before it, in `backward()`, time passes and others step
                self.conflicts += int((self.versions[touched] != read).sum())
                self.versions[touched] += 1
                self.touches += self.touched
                self.steps += 1
                if self.steps % 10 == 0 and not self.reached:
                    with torch.no_grad():
                        loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)
                    if loss < 0.3 or self.steps >= self.limit:
                        self.reached = self.steps
