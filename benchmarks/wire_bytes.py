"""Bytes per step that gradients take on the wire: sparse codecs against dense 32-bit floats, at the socket.

Two real processes train the Fashion-MNIST network (1,111,946 parameters) over TCP, encrypted, without shared
memory. All bytes that the two workers write to the socket between them are counted, per worker and step,
after the warm-up: codes, headers of messages, replies, and the overhead of encryption. Bytes between a worker
and the launcher, mostly the event log, are counted separately. `slow_network` counts TCP's own headers.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.allreduce import network
from benchmarks.fashion import missing
from benchmarks.processes import apart
from benchmarks.report import Row

if TYPE_CHECKING:
    from torch import Tensor

WORKERS, BATCH, RATE = 2, 50, 0.02
TRAINING = 12_000  # the first of the images
SIZE = 1_111_946
USUAL = "allreduce"


@dataclass(frozen=True)
class Case:
    """A strategy with a codec, and by which factor it must take fewer bytes than dense."""

    strategy: str
    bar: float | None = None


CASES = (
    Case(USUAL),
    Case("allreduce+bf16"),
    Case("allreduce+int8"),
    Case("allreduce+powersgd:1"),
    Case("allreduce+topk:0.01", bar=120.0),
    Case("allreduce+threshold:0.125", bar=2000.0),  # found in a trial to send a thousandth of the entries
)


@dataclass(frozen=True)
class Outcome:
    """Bytes per worker and step."""

    exchanged: float
    payload: float  # of them codes
    apart: float  # to the launcher
    density: float  # the share of the entries that are in a code
    loss: float  # at the end, to show that it trains


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    if reason := apart(missing):
        return [], [f"not measured: {reason}"]
    warmup, steps = (80, 20) if quick else (100, 100)
    found = {case: _outcome(case, warmup, steps) for case in CASES}
    dense = found[CASES[0]].exchanged
    rows = [
        Row(
            case.strategy, outcome.exchanged, "B", None if case.strategy == USUAL else dense,
            ratio=None if case.strategy == USUAL else dense / outcome.exchanged, bar=case.bar,
            more={
                "of them codes": f"{outcome.payload:,.0f} B",
                "entries": f"{outcome.density:.3%}",
                "to the launcher, apart": f"{outcome.apart:,.0f} B",
                "loss": f"{outcome.loss:.3f}",
            },
        )
        for case, outcome in found.items()
    ]  # fmt: skip
    return rows, [
        f"bytes per worker and step at the socket between {WORKERS} workers, TCP and encrypted, over {steps} "
        f"steps after {warmup}; theirs and the ratio: dense float32",
    ]


# --- in processes of their own ----------------------------------------------------------------------


def _outcome(case: Case, warmup: int, steps: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        apart(_launch, case.strategy, warmup, steps, Path(folder))
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    return Outcome(**{name: statistics.mean(each[name] for each in told) for name in told[0]})


def _launch(strategy: str, warmup: int, steps: int, folder: Path) -> None:
    from polyrhythm.launch import run

    program = functools.partial(_worker, warmup, steps, folder)
    run(program, workers=WORKERS, strategy=strategy, threads=1, listen="tcp:127.0.0.1:0", runs=None)


def _worker(warmup: int, steps: int, folder: Path) -> None:
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import polyrhythm as pr
    from polyrhythm.compress.compressor import Decompressor
    from polyrhythm.data.mnist import mnist

    entries: list[int] = []
    combine = Decompressor.combine

    def counted(self: Decompressor, codes: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
        """Counts the entries in the codes of all workers."""
        entries.append(0)
        for given in codes:
            for code, segment in zip(given, self.coded, strict=True):
                alone = torch.zeros(segment.high - segment.low)
                self.codec.decode(code, alone)
                entries[-1] += int(alone.count_nonzero())
        combine(self, codes, into)

    Decompressor.combine = counted  # type: ignore[method-assign]
    session = pr.init()
    images, labels = mnist()[0].tensors
    data = TensorDataset(images[:TRAINING], labels[:TRAINING])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    transport: Any = session._context.node.transport

    def sent() -> dict[str, int]:
        traffic = transport.traffic.by_peer()
        return {
            "exchanged": sum(nbytes for peer, nbytes in traffic.items() if peer.role == "worker"),
            "apart": sum(nbytes for peer, nbytes in traffic.items() if peer.role != "worker"),
            "payload": transport.traffic.bytes_sent,
        }

    before, losses, step = sent(), [], 0
    while step < warmup + steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.item())
            if step == warmup:
                before = sent()
            if step == warmup + steps:
                break
    told = {name: (nbytes - before[name]) / steps for name, nbytes in sent().items()}
    told["loss"] = statistics.mean(losses[-20:])
    told["density"] = statistics.mean(entries[-steps:]) / WORKERS / SIZE if entries else 1.0
    (folder / f"{session.rank}.json").write_text(json.dumps(told))
