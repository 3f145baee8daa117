"""All-reduce by our ring against Gloo's, between hosts (network namespaces, or loopback without root).

All live in the same processes and take turns: Gloo's `all_reduce`, our ring over the transport with plain and
with encrypted TCP, the direct exchange over plain TCP, and our ring over Gloo's send and receive.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import hosts
from benchmarks.processes import Together, together
from benchmarks.report import Row, ratio

MEBIBYTE = 1 << 20
BAR = 0.9
LOOPBACK = hosts.Host("", "127.0.0.1")

SMALL = 1 / 16  # MiB

Times = dict[tuple[float, str], list[float]]  # seconds of an all-reduce by MiB and system, one per round


class Crowd(NamedTuple):
    """Ranks that share hosts: each rank's host, by name, and the arenas of each host."""

    homes: list[str]
    arenas: dict[str, Any]

    def place(self, rank: int) -> int:
        """Which of its host's ranks, and so which arena, this is."""
        return self.homes[:rank].count(self.homes[rank])


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds, sizes = (5, (SMALL, 1, 16)) if quick else (15, (SMALL, 1, 16, 100))
    rows: list[Row] = []
    reason = hosts.why_not()
    for count in (2,) if quick else (2, 4):
        rows += _rows(f"{count} hosts", between(count, sizes, rounds))
    if not reason and not quick:
        rows += _rows("2 hosts of 2", crowded(2, 2, (1, 16), rounds))
    where = f"on loopback: {reason}" if reason else "between network namespaces, without offloads"
    return rows, [
        f"ms per all-reduce {where}; medians of {rounds} rounds in turn; the ratio is theirs / ours"
    ]


def between(
    count: int, sizes: tuple[float, ...], rounds: int, rate: str = "", offloads: bool = False
) -> Times:
    """Measures `count` hosts; sizes in MiB."""
    if hosts.why_not(rate):
        return together(count, _host, LOOPBACK, sizes, rounds)[0]  # type: ignore[no-any-return]
    with hosts.hosts(count, rate, offloads) as places:
        return hosts.on_hosts(places, _host, sizes, rounds)[0]  # type: ignore[no-any-return]


def crowded(count: int, each: int, sizes: tuple[float, ...], rounds: int) -> Times:
    """Measures `count` hosts with `each` ranks on every one."""
    from polyrhythm.wire.arena import Arenas

    homes = [host for host in range(count) for _ in range(each)]
    arenas = [Arenas(each, 1 << 32) for _ in range(count)]  # before forking, so that all have them
    try:
        with hosts.hosts(count) as places:
            crowd = Crowd([str(home) for home in homes], {str(home): arenas[home] for home in homes})
            return hosts.on_hosts([places[home] for home in homes], _host, sizes, rounds, crowd)[0]  # type: ignore[no-any-return]
    finally:
        for arena in arenas:
            arena.close()


def _rows(where: str, times: Times) -> list[Row]:
    rows = []
    for (size, system), seconds in times.items():
        if system != "gloo":
            theirs = times[size, "gloo"]
            rows.append(Row(
                f"{system}, {where}, {size:g} MiB", 1e3 * statistics.median(seconds), "ms",
                1e3 * statistics.median(theirs), ratio=ratio(theirs, seconds),
                bar=BAR if system.startswith("ring, ") else None,
            ))  # fmt: skip
    return rows


def _host(
    place: Together, host: hosts.Host, sizes: tuple[float, ...], rounds: int, crowd: Crowd | None = None
) -> Times:
    import torch
    from torch import distributed

    from polyrhythm.collectives import direct, ring

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if host.name else "lo"
    store = f"file://{place.folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=place.rank, world_size=place.count)
    plain, sealed = (
        node(place, f"tcp:{host.address}:0", crowd, encrypt=encrypt) for encrypt in (False, True)
    )
    numbers = iter(range(1, 1 << 30))
    systems: dict[str, Callable[[Any], None]] = {
        "gloo": distributed.all_reduce,
        "ring, plain": lambda x: ring.all_reduce(plain, plain.members.workers, [x], "sum", next(numbers)),
        "ring, encrypted": lambda x: ring.all_reduce(
            sealed, sealed.members.workers, [x], "sum", next(numbers)
        ),
        "direct, plain": lambda x: direct.all_reduce(plain, plain.members.workers, [x], "sum", next(numbers)),
        "ring over gloo": ring.all_reduce_distributed,
    }
    if crowd is not None:
        systems = {
            "gloo": systems["gloo"],
            "hierarchical, plain": lambda x: plain.everyone.all_reduce(x, op="sum"),
        }
    times: Times = {}
    for size in sizes:
        vector = plain.memory.empty(int(size * MEBIBYTE) // 4, torch.float32)
        repeats = max(1, min(16, int(4 / size)))
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


def node(place: Together, listen: str, crowd: Crowd | None = None, encrypt: bool = False) -> Any:
    """This process as a worker among all of them, without a launcher."""
    from polyrhythm.core.peer import Peer
    from polyrhythm.wire import Transport, TransportOptions
    from polyrhythm.worlds.processes.node import ProcessNode

    class Unlogged(ProcessNode):
        """A node without a coordinator."""

        def log(self, event: str, /, **fields: Any) -> None:
            pass

    crowd = crowd or Crowd([""] * place.count, {"": None})
    me, home = Peer("worker", place.rank), crowd.homes[place.rank]
    arenas = crowd.arenas[home]
    options = TransportOptions(listen, arenas, host=home, encrypt=encrypt, wait=60.0)
    transport = Transport(me, b"b" * 32, options)
    mine = Unlogged(me, transport, 0, time.monotonic(), arenas, crowd.place(place.rank))
    mine.meet([
        ("worker", rank, (address, crowd.homes[rank], crowd.place(rank)))
        for rank, address in enumerate(place.exchange(transport.address))
    ])  # fmt: skip
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
    print(show(_rows(f"{asked.hosts} hosts", found)))
