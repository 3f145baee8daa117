"""All-reduce side by side: Gloo, the ring and shared memory on one host, and the ring between hosts.

All systems live in the same processes, have one torch thread each, and take turns on the same number of
float32 elements. The ratio is Gloo's time over ours. Between hosts (network namespaces; without root it is
loopback, and says so) links are the kernel's own; `python -m benchmarks.ring --rate 1gbit` limits them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import ring as between_hosts
from benchmarks.processes import Together, together
from benchmarks.report import Row, ratio

SIZES = (1 << 16, 1 << 20, 16 << 20, 100 << 20)


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds = 5 if quick else 15
    rows = [row for count in (2, 4) for row in one_host(count, SIZES[:3] if quick else SIZES, rounds)]
    more, notes = between_hosts.measure(quick)
    return [*rows, *more], [f"medians of {rounds} rounds in turn", *notes]


def one_host(count: int, sizes: tuple[int, ...], rounds: int) -> list[Row]:
    """Shared memory and the ring against Gloo, for each number of bytes."""
    from polyrhythm.wire.arena import Arenas

    arenas = Arenas(count, 1 << 32)  # before forking, so that all have them
    times = together(count, _rank, arenas, sizes, rounds)[0]
    arenas.close()
    rows = []
    for size in sizes:
        theirs = times[size, "gloo"]
        for system, bar in (("shared memory", 8.0 if size <= 1 << 20 else 3.0), ("ring", None)):
            ours = times[size, system]
            rows.append(Row(
                f"{system}, one host, {count} ranks, {_size(size)}", 1e3 * statistics.median(ours), "ms",
                1e3 * statistics.median(theirs), ratio=ratio(theirs, ours), bar=bar,
            ))  # fmt: skip
    return rows


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _rank(place: Together, arenas: Any, sizes: tuple[int, ...], rounds: int) -> Any:
    import torch
    from torch import distributed

    from polyrhythm.collectives import ring

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{place.folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=place.rank, world_size=place.count)
    crowd = between_hosts.Crowd(["here"] * place.count, {"here": arenas})
    node = between_hosts.node(place, "unix:", crowd)
    numbers = iter(range(1, 1 << 30))
    systems: dict[str, Callable[[Any], None]] = {
        "gloo": distributed.all_reduce,
        "ring": lambda x: ring.all_reduce(node, node.members.workers, [x], "sum", next(numbers)),
        "shared memory": lambda x: node.everyone.all_reduce(x, op="sum"),
    }
    times: dict[tuple[int, str], list[float]] = {}
    for size in sizes:
        vector = node.memory.empty(size // 4, torch.float32)
        repeats = max(1, min(50, (8 << 20) // size))
        for number in range(-1, rounds):  # the first round is a rehearsal
            for name in list(systems) if number % 2 else list(reversed(systems)):
                vector.zero_()
                systems[name](vector)  # all are awake
                began = time.perf_counter()
                for _ in range(repeats):
                    systems[name](vector)
                seconds = (time.perf_counter() - began) / repeats
                if number >= 0:
                    times.setdefault((size, name), []).append(seconds)
                place.barrier()
    node.close()
    return times
