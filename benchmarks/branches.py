"""Two towers that share an LSTM, on two processes at the same time, against one process with one thread."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.divided import Speeds, by_turns
from benchmarks.processes import apart
from benchmarks.report import Row, ratio

BATCH, LENGTH, CHARACTERS, WIDTH = 64, 140, 256, 64
BAR = 1.6


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    found: Speeds = apart(by_turns, _towers, "branches:2", 3 if quick else 9, 2)
    row = Row(
        f"two towers, LSTM {WIDTH} on {LENGTH} × {CHARACTERS}, batch {BATCH}: steps/s, 2 workers against one",
        statistics.median(found["divided"]), "/s", statistics.median(found["alone"]),
        ratio(found["divided"], found["alone"]), BAR,
    )  # fmt: skip
    return [row], [
        "--strategy branches:2, which finds the branches in the graph; one thread for each process; "
        "forward, backward and a step of SGD"
    ]


def _towers() -> tuple[Any, tuple[Any, ...], Any]:
    import torch
    from torch import Tensor, nn

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(CHARACTERS, WIDTH, batch_first=True)
            self.compare = nn.Linear(2 * WIDTH, 1)

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            ends = [self.lstm(text)[0][:, -1] for text in (one, two)]
            return torch.sigmoid(self.compare(torch.cat(ends, 1)))

    torch.manual_seed(0)
    one, two = torch.randn(2, BATCH, LENGTH, CHARACTERS)
    return Towers(), (one, two), torch.rand(BATCH, 1)
