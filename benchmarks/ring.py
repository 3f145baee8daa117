"""All-reduce by our ring against Gloo's, between hosts (network namespaces, or loopback without root).

All live in the same processes and take turns: Gloo's `all_reduce`, our ring over the transport with plain and
with encrypted TCP, the direct exchange over plain TCP, and our ring over Gloo's send and receive.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import hosts
from benchmarks.processes import Together, together
from benchmarks.report import Row, ratio

MEBIBYTE = 1 << 20
BAR = 0.9
LOOPBACK = hosts.Host("", "127.0.0.1")

Times = dict[tuple[float, str], list[float]]  # seconds of an all-reduce by MiB and system, one per round


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds, sizes = (5, (1, 16)) if quick else (15, (1, 16, 100))
    rows: list[Row] = []
    reason = hosts.why_not()
    for count in (2,) if quick else (2, 4):
        rows += _rows(count, between(count, sizes, rounds))
    where = f"on loopback: {reason}" if reason else "between network namespaces, without offloads"
    return rows, [
        f"ms per all-reduce {where}; medians of {rounds} rounds in turn; the ratio is theirs / ours"
    ]


def between(
    count: int, sizes: tuple[float, ...], rounds: int, rate: str = "", offloads: bool = False
) -> Times:
    """Measures `count` hosts; sizes in MiB."""
    if hosts.why_not():
        return together(count, _host, LOOPBACK, sizes, rounds)[0]  # type: ignore[no-any-return]
    with hosts.hosts(count, rate, offloads) as places:
        return hosts.on_hosts(places, _host, sizes, rounds)[0]  # type: ignore[no-any-return]


def _rows(count: int, times: Times) -> list[Row]:
    rows = []
    for (size, system), seconds in times.items():
        if system != "gloo":
            theirs = times[size, "gloo"]
            rows.append(Row(
                f"{system}, {count} hosts, {size} MiB", 1e3 * statistics.median(seconds), "ms",
                1e3 * statistics.median(theirs), ratio=ratio(theirs, seconds),
                bar=BAR if system.startswith("ring, ") else None,
            ))  # fmt: skip
    return rows


def _host(place: Together, host: hosts.Host, sizes: tuple[float, ...], rounds: int) -> Times:
    import torch
    from torch import distributed

    from polyrhythm.collectives import direct, ring

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if host.name else "lo"
    store = f"file://{place.folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=place.rank, world_size=place.count)
    plain, sealed = (node(place, f"tcp:{host.address}:0", encrypt=encrypt) for encrypt in (False, True))
    numbers = iter(range(1, 1 << 30))
    systems: dict[str, Callable[[Any], None]] = {
        "gloo": distributed.all_reduce,
        "ring, plain": lambda x: ring.all_reduce(plain, plain.workers, [x], "sum", next(numbers)),
        "ring, encrypted": lambda x: ring.all_reduce(sealed, sealed.workers, [x], "sum", next(numbers)),
        "direct, plain": lambda x: direct.all_reduce(plain, plain.workers, [x], "sum", next(numbers)),
        "ring over gloo": ring.all_reduce_distributed,
    }
    times: Times = {}
    for size in sizes:
        vector = torch.ones(int(size * MEBIBYTE) // 4)
        repeats = max(1, int(4 / size))
        for number in range(-1, rounds):  # the first round is a rehearsal
            for name in list(systems) if number % 2 else list(reversed(systems)):
                vector.fill_(1.0)
                place.barrier()
                began = time.perf_counter()
                for _ in range(repeats):
                    systems[name](vector)
                place.barrier()
                if number >= 0:
                    times.setdefault((size, name), []).append((time.perf_counter() - began) / repeats)
                if vector[-1] != float(place.count) ** repeats:
                    raise RuntimeError(f"{name} is wrong: {vector[-1]}")
    place.barrier()
    for each in (plain, sealed):
        each.close()
    return times


def node(place: Together, listen: str, arenas: Any = None, encrypt: bool = False) -> Any:
    """This process as a worker among all of them, without a launcher; with arenas they are on one host."""
    from polyrhythm.node import Peer
    from polyrhythm.wire import Transport
    from polyrhythm.worlds.processes import ProcessNode

    class Unlogged(ProcessNode):
        """A node without a coordinator."""

        def log(self, event: str, /, **fields: Any) -> None:
            pass

    me, host = Peer("worker", place.rank), "here" if arenas else ""
    transport = Transport(me, b"b" * 32, listen=listen, arenas=arenas, host=host, encrypt=encrypt, wait=60.0)
    mine = Unlogged(me, transport, 0, time.monotonic(), arenas, place.rank if arenas else -1)
    addresses = place.exchange(transport.address)
    mine.meet([("worker", rank, address, host, rank) for rank, address in enumerate(addresses)])
    return mine


if __name__ == "__main__":  # a look at one setting
    import argparse

    from benchmarks.report import show

    options = argparse.ArgumentParser()
    options.add_argument("--hosts", type=int, default=2)
    options.add_argument("--sizes", default="1,16,100", help="MiB")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--rate", default="", help="of every link, such as 1gbit")
    options.add_argument("--offloads", action="store_true")
    asked = options.parse_args()
    found = between(
        asked.hosts, tuple(map(float, asked.sizes.split(","))), asked.rounds, asked.rate, asked.offloads
    )
    print(show(_rows(asked.hosts, found)))
