"""A parameter server's push and pull, 2 workers, beside torch RPC and Gloo send/recv.

Every system does the same: a worker sends a gradient and gets back as many parameters; the server does
`parameters.add_(gradient, alpha=-0.01)` in between. Ours is the real `async` strategy with plain SGD, over
shared memory, plain TCP and encrypted TCP. All systems live in the same processes and take turns.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from benchmarks.processes import Together, apart, together
from benchmarks.report import Row, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.wire.arena import Arenas

WORKERS = 2
MEBIBYTE = 1 << 20
RATE = 0.01

Times = dict[tuple[int, str], list[float]]  # seconds of a round trip by size and system, one per round


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds, work = (3, 100) if quick else (7, 200)
    sizes = (1, 16) if quick else (1, 16, 100)
    rows: list[Row] = [_apply_row(*apart(_apply, count, 9 if quick else 31), count) for count in (1, 1000)]
    for servers in (1, 2):
        rows += round_trips(servers, sizes, rounds, work)
    return rows, [f"ms per round trip, medians of {rounds} rounds in turn; the ratio is theirs / ours"]


def round_trips(servers: int, sizes: Sequence[int], rounds: int, work: int) -> list[Row]:
    """A push and a pull of so many MiB; `work` MiB are moved by each system in a round."""
    times = apart(_stage, servers, sizes, rounds, work)
    return [row for size in sizes for row in _rows(servers, size, times)]


def _apply(tensors: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of one update of 16 MiB by a server's optimizer, and of the bare arithmetic, in turn."""
    import torch

    from polyrhythm.model.shard import Shard

    torch.set_num_threads(1)
    count = 16 * MEBIBYTE // 4
    model = torch.nn.ParameterList(torch.zeros(count).tensor_split(tensors))
    shard = Shard(model, torch.optim.SGD(model.parameters(), lr=RATE), 0, 1)
    bare, gradient = torch.zeros(count), torch.full((count,), 1e-3)
    ours, theirs = [], []
    with torch.no_grad():
        for _ in range(rounds):
            began = time.perf_counter()
            shard.apply([gradient], [], [{"lr": RATE}])
            middle = time.perf_counter()
            bare.add_(gradient, alpha=-RATE)
            ours.append(middle - began)
            theirs.append(time.perf_counter() - middle)
    return ours[2:], theirs[2:]


def _apply_row(ours: list[float], theirs: list[float], tensors: int) -> Row:
    middle = [1000 * statistics.median(values) for values in (ours, theirs)]
    what = f"one update of 16 MiB, model of {tensors:,} tensor{'s' * (tensors > 1)} / w.add_(g)"
    return Row(what, middle[0], "ms", middle[1], ratio=ratio(theirs, ours))


def _rows(servers: int, size: int, times: Times) -> list[Row]:
    def row(ours: str, theirs: str, bar: float | None = None) -> Row:
        mine, other = times[size, ours], times[size, theirs]
        what = f"servers: {servers}, {size:3} MiB, {ours} / {theirs}"
        middle = [1000 * statistics.median(values) for values in (mine, other)]
        return Row(what, middle[0], "ms", middle[1], ratio=ratio(other, mine), bar=bar)

    return [
        row("shared memory", "torch RPC", 3.0),
        row("shared memory", "Gloo"),
        row("TCP plain", "Gloo", 0.9),
        row("TCP encrypted", "Gloo"),
    ]


def _stage(servers: int, sizes: Sequence[int], rounds: int, work: int) -> Times:
    """Imports torch once, then forks the nodes."""
    import torch._dynamo
    import torch.distributed.rpc  # noqa: F401

    import polyrhythm.worlds.processes  # noqa: F401
    from polyrhythm.wire.arena import Arenas

    arenas = Arenas(WORKERS + servers, 1 << 34)
    results: list[Times] = together(WORKERS + servers, _node, servers, sizes, rounds, work, arenas)
    # Both workers waited for the same server, so their mean is the time of a round trip.
    return {
        key: [
            statistics.mean(values)
            for values in zip(*(result[key] for result in results[:WORKERS]), strict=True)
        ]
        for key in results[0]
    }


def _node(
    here: Together, servers: int, sizes: Sequence[int], rounds: int, work: int, arenas: Arenas
) -> Times:
    """The life of a worker (ranks 0 and 1) or a server, in all systems."""
    import torch

    warnings.simplefilter("ignore")  # RPC uses what torch has declared outdated
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    systems: dict[str, System] = {
        "shared memory": Ours(here, servers, arenas=arenas),
        "torch RPC": Rpc(here, servers),
        "TCP plain": Ours(here, servers, encrypt=False),
        "Gloo": Gloo(here, servers),
        "TCP encrypted": Ours(here, servers),
    }
    times: Times = {(size, name): [] for size in sizes for name in systems}
    for size in sizes:
        trips = max(5, min(100, work // size))
        for system in systems.values():
            system.prepare(size * MEBIBYTE // 4)
        for number in range(rounds + 1):
            for name in systems if number % 2 else reversed(systems):
                here.barrier()
                seconds = systems[name].run(trips)
                if number:  # the first round warms up
                    times[size, name].append(seconds)
    here.barrier()
    for system in systems.values():
        system.close()
    return times


class System(ABC):
    """One way to serve parameters, as one process takes part in it."""

    def __init__(self, here: Together, servers: int) -> None:
        self.here, self.servers = here, servers
        self.index = here.rank - WORKERS  # among the servers; negative for a worker

    @abstractmethod
    def prepare(self, count: int) -> None:
        """Makes room for so many float32 parameters in all."""

    def run(self, trips: int) -> float:
        """Every worker makes so many round trips; the median seconds of one (0 for a server)."""
        if self.index >= 0:
            self.serve(trips)
            return 0.0
        trip = self.begin()
        seconds = []
        for _ in range(trips):
            began = time.perf_counter()
            trip()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    @abstractmethod
    def serve(self, trips: int) -> None:
        """A server's part of a run."""

    @abstractmethod
    def begin(self) -> Callable[[], object]:
        """Makes a worker ready; what it returns makes one round trip with every server."""

    def close(self) -> None:
        """Lets go of connections."""


class Ours(System):
    def __init__(
        self, here: Together, servers: int, arenas: Arenas | None = None, encrypt: bool = True
    ) -> None:
        super().__init__(here, servers)
        from polyrhythm.core.peer import Peer
        from polyrhythm.strategies.server.presets import Async
        from polyrhythm.wire import Transport, TransportOptions

        listen = "unix:" if arenas else "tcp:127.0.0.1:0"
        peers = [Peer("worker", rank) for rank in range(WORKERS)] + [
            Peer("server", r) for r in range(servers)
        ]
        me = peers[here.rank]
        transport = Transport(me, bytes(32), TransportOptions(listen, arenas, host="here", encrypt=encrypt))
        self.node = _counting_node()(me, transport, 0, time.monotonic(), arenas, here.rank if arenas else -1)
        addresses = here.exchange(transport.address)
        self.node.meet([
            (peer.role, peer.rank, (address, transport.host, number if arenas else -1))
            for number, (peer, address) in enumerate(zip(peers, addresses, strict=True))
        ])  # fmt: skip
        self.strategy = Async()

    def prepare(self, count: int) -> None:
        import torch
        from torch import nn

        from polyrhythm.model.replica import Replica
        from polyrhythm.model.shard import Shard

        model = nn.ParameterList([torch.zeros(count)])
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        if self.index >= 0:
            self.shard = Shard(model, optimizer, self.index, self.servers, self.node.memory.empty)
        else:
            self.replica = Replica(model, optimizer, self.node.memory.empty)
            model[0].grad = torch.full((count,), 1e-3)
            self.replica.gradients.gather()

    def serve(self, trips: int) -> None:
        import torch

        # Worker 0 initializes, then all pull, then all push.
        self.node.serve_messages(1 + WORKERS + WORKERS * trips)
        with torch.no_grad():
            self.strategy.server(self.node, self.shard).serve()

    def begin(self) -> Callable[[], object]:
        worker = self.strategy.worker(self.node, self.replica, self.node.everyone)
        worker.start()

        def trip() -> None:
            self.replica.steps += 1
            worker.step()

        return trip

    def close(self) -> None:
        self.node.close()


def _counting_node() -> type[Any]:
    """A ProcessNode whose run is over after so many messages, and that keeps its event log to itself."""
    from polyrhythm.worlds.processes.node import ProcessNode

    class Counting(ProcessNode):
        left = 0

        def serve_messages(self, count: int) -> None:
            self.left, self.members.over = count, False

        def receive(self, *kinds: str) -> Message | None:
            if not self.left:
                self.members.over = True
                return None
            message = super().receive(*kinds)
            self.left -= message is not None
            return message

    return Counting


class Rpc(System):
    parameters: Tensor  # of the server in this process

    def __init__(self, here: Together, servers: int) -> None:
        super().__init__(here, servers)
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{here.folder / 'rpc'}", rpc_timeout=300
        )
        rpc.init_rpc(f"node-{here.rank}", rank=here.rank, world_size=here.count, rpc_backend_options=options)

    def prepare(self, count: int) -> None:
        import torch

        if self.index >= 0:
            Rpc.parameters = torch.zeros(count // self.servers)
        else:
            self.parts = torch.full((count,), 1e-3).chunk(self.servers)

    def serve(self, trips: int) -> None:
        self.here.barrier()  # the threads of RPC do all

    def begin(self) -> Callable[[], object]:
        from torch.distributed import rpc

        def trip() -> None:
            if len(self.parts) == 1:
                rpc.rpc_sync(f"node-{WORKERS}", _push, (self.parts[0],))
                return
            futures = [
                rpc.rpc_async(f"node-{WORKERS + index}", _push, (part,))
                for index, part in enumerate(self.parts)
            ]
            for future in futures:
                future.wait()

        return trip

    def run(self, trips: int) -> float:
        seconds = super().run(trips)
        if self.index < 0:
            self.here.barrier()
        return seconds

    def close(self) -> None:
        from torch.distributed import rpc

        with suppress(RuntimeError):
            rpc.shutdown()


def _push(gradient: Tensor) -> Tensor:
    return Rpc.parameters.add_(gradient, alpha=-RATE)


class Gloo(System):
    def __init__(self, here: Together, servers: int) -> None:
        super().__init__(here, servers)
        from torch import distributed

        distributed.init_process_group(
            "gloo", init_method=f"file://{here.folder / 'gloo'}", rank=here.rank, world_size=here.count
        )

    def prepare(self, count: int) -> None:
        import torch

        if self.index >= 0:
            self.mine = torch.zeros(count // self.servers)
            self.inputs = [torch.zeros_like(self.mine) for _ in range(WORKERS)]
        else:
            self.gradient = torch.full((count,), 1e-3).chunk(self.servers)
            self.parameters = torch.zeros(count).chunk(self.servers)

    def serve(self, trips: int) -> None:
        """A thread per worker, so that one is received from while another is sent to."""
        threads = [threading.Thread(target=self._serve, args=(rank, trips)) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, worker: int, trips: int) -> None:
        from torch import distributed

        for _ in range(trips):
            distributed.recv(self.inputs[worker], src=worker)
            self.mine.add_(self.inputs[worker], alpha=-RATE)
            distributed.send(self.mine, dst=worker)

    def begin(self) -> Callable[[], object]:
        from torch import distributed

        def trip() -> None:
            works = []
            for index in range(self.servers):
                works.append(distributed.isend(self.gradient[index], dst=WORKERS + index))
                works.append(distributed.irecv(self.parameters[index], src=WORKERS + index))
            for work in works:
                work.wait()

        return trip

    def close(self) -> None:
        from torch import distributed

        distributed.destroy_process_group()
