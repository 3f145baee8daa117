"""The laws of codecs between workers and servers: both ends always know, bit for bit, what a worker has."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

import polyrhythm as pr
from polyrhythm.core.group import Group
from polyrhythm.core.message import Message
from polyrhythm.core.node import Node
from polyrhythm.model.replica import Replica
from polyrhythm.model.shard import Shard
from polyrhythm.model.vectors import cut
from polyrhythm.strategies.server.client import ServerClient
from polyrhythm.strategies.server.parameter_server import ParameterServer
from polyrhythm.strategies.server.server_loop import ServerLoop
from tests.support.combine import each_value
from tests.support.planes import CODECS, FEEDBACK, MODELS, Plane, equal, layers, moved, near, residual_of
from tests.support.programs import SPEEDS, events, trained

WORKERS = 3
UNEVEN = SPEEDS["heterogeneous"]


@dataclass
class Watch:
    """What was seen of a run: the servers, and how often a worker and they were compared."""

    servers: dict[int, ServerLoop] = field(default_factory=dict)
    views: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    compared: Counter[int] = field(default_factory=Counter)
    forgotten: list[int] = field(default_factory=list)
    lost: list[tuple[float, list[str]]] = field(default_factory=list)  # when, and what is left of worker 1
    repeats: bool = False  # a worker asks again for what it got just now, and for what it got before
    last: dict[int, int] = field(default_factory=dict)  # the sequence number of each worker's last request


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Strategies under the name `watched-...` that compare, after every reply, both ends of it."""
    watch = Watch()
    made = []
    pr.parse("async")
    for name, cls in list(pr.Strategy.registry.items()):
        if issubclass(cls, ParameterServer):
            made.append(f"watched-{name}")
            _watched(cls, made[-1], watch)
    yield watch
    for name in made:
        del pr.Strategy.registry[name]


def _watched(base: type[ParameterServer], title: str, watch: Watch) -> None:
    class Watched(base):  # type: ignore[misc, valid-type]
        __qualname__, name = title, title

        def server(self, node: Node, shard: Shard) -> Any:
            server = super().server(node, shard)
            _watch_server(watch, server)
            return server

        def worker(self, node: Node, replica: Replica, group: Group) -> Any:
            worker = super().worker(node, replica, group)
            _watch_client(watch, worker.servers)
            return worker

    dataclasses.dataclass(frozen=True)(Watched)


def _watch_server(watch: Watch, server: Any) -> None:
    """Keeps what each worker is to see."""
    watch.servers[server.node.rank] = server
    view, forget = server.view, server.forget

    def viewed(reader: Message) -> Sequence[Tensor]:
        seen: Sequence[Tensor] = view(reader)
        watch.views[server.node.rank, reader.sender.rank] = [part.clone() for part in seen]
        return seen

    def forgotten(worker: int) -> None:
        forget(worker)
        watch.forgotten.append(worker)

    server.view, server.forget = viewed, forgotten


def _watch_client(watch: Watch, client: Any) -> None:
    """Compares both ends after each reply."""
    pull, take = client.pull, client._take

    def pulled(into: Sequence[Tensor] | None = None, fresh: bool = False) -> None:
        pull(into, fresh)
        if fresh and client.known:
            _compare(watch, client, client.replica.parameters)
        if fresh and watch.repeats:
            _begin_again(watch, client)

    def taken(replies: Any, into: Sequence[Tensor]) -> list[Message]:
        answers: list[Message] = take(replies, into)
        if client.known:
            _compare(watch, client, into)
            if watch.repeats:
                _ask_again(watch, client, answers, into)
            return answers
        for rank, server in watch.servers.items():
            mine = cut(into, server.shard.start, server.shard.stop)
            assert equal(mine, watch.views[rank, client.node.rank])
        watch.compared[client.node.rank] += 1
        return answers

    client.pull, client._take = pulled, taken


def _compare(watch: Watch, client: ServerClient, into: Sequence[Tensor]) -> None:
    """What every server believes that this worker has is what it has."""
    rank = client.node.rank
    for server in watch.servers.values():
        assert server.coded is not None
        believed = server.coded.known[rank]
        assert equal(believed, cut(client.known, server.shard.start, server.shard.stop))
        if rank != 1:
            watch.lost.append((client.node.now(), _left_of(server, 1)))
    assert equal(client.known, into)
    watch.compared[rank] += 1


def _left_of(server: ServerLoop, worker: int) -> list[str]:
    """What a server keeps for a worker only."""
    replies = server.coded
    assert replies is not None
    kept = {"known": replies.known, "state": replies.states, "given": replies.given}
    kept["compressor"] = replies._compressors
    return [name for name, by_worker in kept.items() if worker in by_worker]


def _begin_again(watch: Watch, client: ServerClient) -> None:
    """The first request of all, again, when others may have pushed already."""
    node: Any = client.node
    sequence, first = node._sequence, [part.clone() for part in client.replica.parameters]
    node.take_time(0.05 * node.rank)
    node._sequence -= 1
    again = node.request(node.members.servers[0], "pull").wait()
    assert equal(again.tensors, first) and again["version"] == client.versions[0]
    assert node._sequence == sequence
    _compare(watch, client, client.replica.parameters)


def _ask_again(
    watch: Watch, client: ServerClient, answers: Sequence[Message], into: Sequence[Tensor]
) -> None:
    """As a transport does whose connection broke: the same request, under the same sequence number."""
    node: Any = client.node
    sequence = node._sequence
    last = watch.last.get(node.rank, sequence)
    watch.last[node.rank] = sequence
    for old in (sequence, sequence, last):
        node._sequence = old - 1
        server = node.members.servers[0]
        again = node.request(server, "push", fetch=True, step=client.replica.steps, version=0).wait()
        if old == sequence:
            assert again["version"] == answers[0]["version"]
            assert equal(again.tensors, answers[0].tensors)
        _compare(watch, client, into)
    node._sequence = sequence


# --- both ends know the same ------------------------------------------------------------------------


@each_value(("codec", [*CODECS, "sign:vote=yes", "topk:0.1,per=layer,dense=1d"]), ("servers", [1, 4]))
def test_a_server_knows_what_each_worker_has(simulate: Any, watch: Watch, codec: str, servers: int) -> None:
    """What it believes a worker has is what that has, bit for bit, after every answer of every server."""
    simulate(Plane(8), f"watched-async+{codec}", WORKERS, servers, UNEVEN)
    assert all(watch.compared[rank] == 9 for rank in range(WORKERS))


STRATEGIES = [
    "sync", "ssp:1", "softsync:2", "softsync:2,pull=next-version", "backup:1", "dc-asgd", "dana-zero",
    "delayed-nesterov:2", "easgd:2", "async:prefetch=yes", "sync:prefetch=yes", "async:push_every=3",
    "async:fetch_every=3", "async:push_every=2,fetch_every=3", "async:clip=0.5", "async:discard=2",
]  # fmt: skip


@each_value(
    ("codec", ["topk:0.1", "int4:dense=0", "threshold:0.25,pulses=many", "bf16"]), ("strategy", STRATEGIES)
)
def test_servers_know_what_each_worker_has_under_every_strategy(
    simulate: Any, watch: Watch, strategy: str, codec: str
) -> None:
    """The same under every strategy with servers, also where answers are waited for later or seldom."""
    simulate(Plane(9), f"watched-{strategy}+{codec}", WORKERS, 2, UNEVEN)
    assert all(watch.compared[rank] > 3 for rank in range(WORKERS))


@each_value(("model", ["mixed", "half"]), ("codec", CODECS), ("servers", [1, 5]))
def test_servers_know_what_workers_have_for_models_of_mixed_dtypes(
    simulate: Any, watch: Watch, model: str, codec: str, servers: int
) -> None:
    """Also in short floats, and where a server has nothing of one kind."""
    plane = Plane(6, model=MODELS[model])
    simulate(plane, f"watched-async+{codec}", WORKERS, servers, UNEVEN)
    assert all(watch.compared[rank] == 7 for rank in range(WORKERS))
    for rank in range(WORKERS):
        assert all(part.element_size() >= 4 for part in residual_of(plane.workers[rank]))


@each_value(("codec", CODECS), ("strategy", ["async", "sync", "async:push_every=2"]))
def test_pull_dense_gives_workers_the_exact_server_parameters(
    simulate: Any, watch: Watch, strategy: str, codec: str
) -> None:
    """With pull=dense a worker gets the server's parameters, bit for bit; only pushes are coded."""
    text = f"{codec},pull=dense" if ":" in codec else f"{codec}:pull=dense"
    summary = simulate(Plane(6), f"watched-{strategy}+{text}", WORKERS, 2, UNEVEN)
    assert all(watch.compared[rank] >= 3 for rank in range(WORKERS))
    assert all(server.coded is None for server in watch.servers.values())
    assert not codec.startswith("topk") or any(line["bytes"] < 200 for line in events(summary, "apply"))


@pytest.mark.parametrize("codec", [*CODECS, "topk:0.1,dense=1d", "int8:dense=1"])
def test_repeated_requests_get_the_same_coded_reply(simulate: Any, watch: Watch, codec: str) -> None:
    """It has the same bits, whatever the server has told others meanwhile, and changes nothing.

    Nor does one that is asked for when a later one has been given: that worker waits for it no longer.
    """
    watch.repeats = True
    slow = UNEVEN + '\n[servers]\nlatency = "2 ms"'
    summary = simulate(Plane(8), f"watched-async+{codec}", WORKERS, 1, slow)
    assert summary["steps"] == len(events(summary, "apply"))
    assert all(watch.compared[rank] == 10 + 3 * 8 for rank in range(WORKERS))


# --- conservation -----------------------------------------------------------------------------------


@each_value(("codec", FEEDBACK), ("servers, rate", [(1, 0.5), (3, 0.5), (2, 0.125)]))
def test_sync_parameters_minus_residuals_equal_plain_sgd(
    simulate: Any, codec: str, servers: int, rate: float
) -> None:
    """Under `sync` as without a server: w - lr * mean_i(residual_i) is where SGD would be, to rounding, also
    if the rate has changed on the way."""
    plane, law = (
        Plane(11, groups=True, rate=lambda step: 0.5 if step < 6 or step > 11 else rate) for _ in range(2)
    )
    found = trained(simulate(plane, f"sync+{codec}", WORKERS, servers))
    dense = trained(simulate(law, "allreduce", WORKERS))
    assert near(moved(found, plane.residual([rate, rate / 5])), dense)
    assert not near(found, dense, 1e-6)


def fading(step: int) -> float:
    """Down to nothing, as many schedules end."""
    return 0.5 * (1 - step / 12)


RATES = {"constant": lambda step: 0.5, "falls": lambda step: 0.5 if step < 5 else 0.125, "fades": fading}
ASYNC = [
    "ssp:2", "async:prefetch=yes", "async:pull=next-version", "async:push_every=3", "dc-asgd:0", "dana-slim",
    "async:push_every=2,fetch_every=3", "delayed-nesterov:2,beta=0", "softsync:2,reduce=sum",
]  # fmt: skip


@each_value(("codec", FEEDBACK), ("rate", RATES))
def test_a_worker_that_leaves_pushes_the_rest(simulate: Any, codec: str, rate: str) -> None:
    """Nothing is left: the model is where all gradients lead, each at the rate that it was computed at."""
    plane = Plane(11, rate=RATES[rate], early=True)
    found, law = (
        trained(simulate(each, strategy, WORKERS, 2, UNEVEN))
        for each, strategy in ((plane, f"async+{codec}"), (Plane(11, rate=RATES[rate]), "async"))
    )
    assert near(found, law)
    assert all(float(part.abs().max()) == 0 for part in plane.residuals())


@pytest.mark.parametrize("codec", FEEDBACK)
def test_workers_keep_their_residual_at_the_end_of_the_data(simulate: Any, codec: str) -> None:
    """Nobody goes on, so nothing moves the model from where it was evaluated: the rest stays, to be saved."""
    plane = Plane(11)
    found = trained(simulate(plane, f"async+{codec}", WORKERS, 2, UNEVEN))
    residual = plane.residual([0.5 * WORKERS])
    assert near(moved(found, residual), trained(simulate(Plane(11), "async", WORKERS, 2, UNEVEN)))
    assert max(float(each.abs().max()) for each in residual.values()) > 0


@pytest.mark.parametrize("codec", ["topk:0.1", "int4", "sign"])
def test_easgd_with_a_codec_keeps_no_residual_and_conserves_the_sum(simulate: Any, codec: str) -> None:
    """What a code leaves out is in x_i - c still, and waits nowhere else; what one loses the other gains."""
    sums, names = [], [name for name, _ in layers().named_parameters()]
    for text in (f"easgd:1+{codec}", "easgd:1"):
        plane = Plane(24, early=True)
        centre = trained(simulate(plane, text, WORKERS, 2, UNEVEN))
        last = [dict(zip(names, plane.x[rank][-1], strict=True)) for rank in range(WORKERS)]
        sums.append({name: centre[name] + sum(each[name] for each in last) for name in centre})
        assert not any(residual_of(plane.workers[rank]) for rank in range(WORKERS))
    assert near(*sums)


@each_value(("codec", ["topk:0.1", "int4", "powersgd"]), ("strategy", ASYNC))
def test_every_async_strategy_pushes_residuals_when_workers_leave(
    simulate: Any, strategy: str, codec: str
) -> None:
    """However pushes are collected, all that was computed counts in the end."""
    plane = Plane(11, early=True)
    found, law = (
        trained(simulate(each, text, WORKERS, 2, UNEVEN))
        for each, text in ((plane, f"{strategy}+{codec}"), (Plane(11), strategy))
    )
    assert near(found, law)


@each_value(("codec", FEEDBACK), ("strategy", ["sync", "async"]))
def test_server_strategies_push_residuals_of_layers_without_a_gradient(
    simulate: Any, codec: str, strategy: str
) -> None:
    """What waits for a parameter arrives, also with a push that has no gradient for it."""

    def skips(rank: int, step: int, index: int) -> bool:
        return step > 4 and index == 2

    plane, law = Plane(9, skips=skips, early=True), Plane(9, skips=skips)
    found, dense = (
        trained(simulate(each, text, WORKERS, 2, UNEVEN))
        for each, text in ((plane, f"{strategy}+{codec}"), (law, strategy))
    )
    assert near(moved(found, plane.residual([0.5])), dense)


# --- those who die ----------------------------------------------------------------------------------


@each_value(
    ("codec", ["topk:0.1", "powersgd", "threshold:0.25,adaptive=yes", "int4:dense=0"]),
    ("back", ["", 'back = "125 ms"']),
    ("strategy", ["async", "async:prefetch=yes", "ssp:2", "dc-asgd", "softsync:2"]),
)
def test_a_worker_that_dies_is_forgotten(
    simulate: Any, watch: Watch, strategy: str, back: str, codec: str
) -> None:
    """The others go on, and nothing is kept for it; if it comes back it begins with a full reply."""
    cluster = f'[[hosts]]\nlatency = "1 ms"\n[[failures]]\nworkers = [1]\nat = "61 ms"\n{back}'
    summary = simulate(Plane(20), f"watched-{strategy}+{codec}", WORKERS, 2, cluster)
    assert watch.forgotten.count(1) == (4 if back else 2)  # each server, each time that it left
    assert "worker 1" in summary["lost"] and summary["joined"] == (1 if back else 0)
    before, gone, after = (
        [left for at, left in watch.lost if low <= at < high]
        for low, high in ((0.03, 0.06), (0.07, 0.12), (0.16, 0.19))
    )
    assert before and all("known" in left for left in before)
    assert gone and not any(gone)
    assert after and all(("known" in left) == bool(back) for left in after)
    assert watch.compared[0] == watch.compared[2] == 21
    assert watch.compared[1] > 21 if back else watch.compared[1] < 10
