"""The event log: how many bytes a step of `async` leaves, and what recording costs in samples/s.

Both are of real processes that train a small network on the embedded digits, where a step takes about a
millisecond: recording costs as much under larger models, and is a smaller part of the step. Within one run,
all nodes record for a second and then do not, in turn; the ratio is of windows that follow each other. CPU
seconds, of all nodes and the launcher, tell the same and depend less on what else the machine does.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.processes import apart
from benchmarks.report import Row, ratio

WORKERS, BATCH = 2, 32
WINDOW = 1.0  # seconds
REPORT = 0.1  # seconds between two reports of a node, so that what a window records is sent in it


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    steps = 500 if quick else 5000
    rows = [
        Row(
            f"bytes of events per step: async, {WORKERS} workers, {servers} server{'s' * (servers > 1)}",
            apart(_bytes_per_step, servers, steps), "B", bar=100, wanted="below",
        )
        for servers in (1, 2)
    ]  # fmt: skip
    samples, cpu = apart(_alternating, 20 if quick else 180)
    on, off = ([count / WINDOW for count in counts] for counts in samples)
    spent = [sum(seconds) / sum(counts) for seconds, counts in zip(cpu, samples, strict=True)]
    rows += [
        Row(
            "samples/s of async: events recorded / not", statistics.median(on), "/s", statistics.median(off),
            ratio=ratio(on, off), bar=0.98,
        ),
        Row(
            "CPU time per sample: events recorded / not", spent[0] * 1e6, "µs", spent[1] * 1e6,
            ratio=spent[0] / spent[1], bar=1.02, wanted="below",
        ),
    ]  # fmt: skip
    low, _, high = statistics.quantiles([a / b for a, b in zip(on, off, strict=True)], n=4)
    pairs = f"{len(on)} pairs of windows of {WINDOW:.0f} s"
    return rows, [f"{pairs}; half of the ratios of samples/s are in {low:.3f} – {high:.3f}"]


def _bytes_per_step(servers: int, steps: int) -> float:
    """The size of the event log of a run, per step of all workers."""
    import polyrhythm as pr
    from polyrhythm.record.event_file import event_files

    with tempfile.TemporaryDirectory() as folder:
        summary = pr.run(
            functools.partial(_train, lambda: None, steps // WORKERS), workers=WORKERS, servers=servers,
            strategy="async", runs=folder, threads=1,
        )  # fmt: skip
        size = sum(path.stat().st_size for path in event_files(Path(summary["folder"])))
        return float(size / summary["steps"])


Pair = tuple[list[float], list[float]]  # of windows with events, and without


def _alternating(windows: int) -> tuple[Pair, Pair]:
    """Samples of all workers in pairs of windows, and CPU seconds of all processes."""
    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as folder:
        pr.run(
            functools.partial(_alternate, Path(folder), windows, os.getpid()), workers=WORKERS,
            strategy="async", runs=folder, threads=1,
        )  # fmt: skip
        samples = [_read(path) for path in Path(folder).glob("samples-*")]
        cpu = [_read(path) for path in Path(folder).glob("cpu-*")]
    # The first and the last windows are not complete. Those with events are even.
    first, last = max(map(min, samples + cpu)), min(map(max, samples + cpu))
    evens = range(first + 1 + (first + 1) % 2, last - 1, 2)

    def paired(found: list[dict[int, float]]) -> Pair:
        sums = [[sum(each.get(even + odd, 0) for each in found) for even in evens] for odd in (0, 1)]
        return sums[0], sums[1]

    return paired(samples), paired(cpu)


def _read(path: Path) -> dict[int, float]:
    return {int(window): value for window, value in json.loads(path.read_text()).items()}


def _window() -> int:
    return int(time.monotonic() / WINDOW)  # the same in all processes of a host


def _alternate(folder: Path, windows: int, launcher: int) -> None:
    """Trains for so many windows. In the odd ones all nodes of this run behave as with --events off."""
    from polyrhythm.record.event_buffer import EventBuffer
    from polyrhythm.worlds.processes import reporter

    clocks: dict[str, Callable[[], float]] = {f"cpu-{os.getpid()}": time.process_time}
    samples: Counter[int] = Counter()
    used: dict[str, dict[int, float]] = {}
    state = {"window": _window()}

    def policy(buffer: EventBuffer) -> str:
        window = _window()
        if window != state["window"]:
            state["window"] = window
            for name, clock in clocks.items():
                seconds = used.setdefault(name, {})
                seconds[window] = clock()
                (folder / name).write_text(json.dumps(_differences(seconds)))
        return "off" if window % 2 else "all"

    def count() -> None:
        samples[_window()] += BATCH

    reporter.INTERVAL = REPORT
    EventBuffer.policy = property(policy, lambda buffer, value: None)  # type: ignore[assignment]

    def begin(rank: int) -> None:
        if rank == 0:
            clocks["cpu-launcher"] = functools.partial(_cpu_of, launcher)

    until = time.monotonic() + (windows + 2) * WINDOW
    rank = _train(count, 1 << 30, until, begin)
    (folder / f"samples-{rank}").write_text(json.dumps(samples))


def _differences(clock: dict[int, float]) -> dict[int, float]:
    """What was used in each window, from the readings at their beginnings."""
    return {window: clock[window + 1] - value for window, value in clock.items() if window + 1 in clock}


def _cpu_of(process: int) -> float:
    """The CPU seconds of a process so far."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _train(
    each: Callable[[], None],
    steps: int,
    until: float = float("inf"),
    begin: Callable[[int], None] = lambda rank: None,
) -> int:
    """Takes so many steps, or until a time; calls a function after each. Returns the rank."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import polyrhythm as pr
    from polyrhythm.data import digits

    data, _ = digits()
    session = pr.init()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    begin(session.rank)
    for x, y in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        each()
        if time.monotonic() > until:
            break
    return session.rank
