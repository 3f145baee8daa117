"""Coordinator: what the nodes of a run have to agree on, as logic without I/O.

It takes in who joins, checks that all train the same model, leases batches, records metrics and events,
knows who is still there, and ends with the summary. The launcher feeds it from sockets, the simulator
calls it directly; both hand in a `respond` that it may call now or later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from polyrhythm.coordination.leases import Deals, Leases
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.record.folder import RunFolder, spread

COORDINATOR = Peer("coordinator", 0)  # its name on the wire

Respond = Callable[[dict[str, Any]], None]


@dataclass
class Failure:
    """Why a run ends before its time."""

    message: str
    exit_code: int = 1


@dataclass
class Totals:
    """What one node has done so far, by its own last word."""

    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    bytes_between: int = 0  # of these, to other sites
    compute_s: float = 0.0
    wait_s: float = 0.0


@dataclass
class _Gate:
    """Holds everyone's answer until all are here."""

    waiting: dict[Peer, Respond] = field(default_factory=dict)

    def add(self, peer: Peer, respond: Respond) -> None:
        self.waiting[peer] = respond

    def open(self, answer: Callable[[Peer], dict[str, Any]]) -> None:
        waiting, self.waiting = self.waiting, {}
        for peer, respond in waiting.items():
            respond(answer(peer))


class Coordinator:
    """One run, from the first node that joins to the summary."""

    def __init__(
        self,
        plan: Plan,
        strategy: ResolvedStrategy | None,
        *,
        clock: Callable[[], float],
        start_servers: Callable[[int], None],
        tell: Callable[[str, dict[str, Any]], None],
        replace: Callable[[Peer], bool] = lambda peer: False,
        rescue: Callable[[Peer], bool] = lambda peer: False,
        released: Callable[[Peer, int], None] = lambda peer, incarnation: None,
        folder: RunFolder | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.plan = plan
        self.workers = plan.workers
        self.servers = plan.servers
        self.strategy: ResolvedStrategy | None = None
        self.batch_norm = plan.batch_norm
        self.seed = plan.seed
        self.clock = clock
        self.failure: Failure | None = None
        self.members: dict[Peer, list[Any]] = {}  # who is in the run, and where: address, host, arena
        self.gone: dict[Peer, str] = {}  # who has left for good, and why
        self.expected: set[Peer] = set()  # whose replacement is on its way
        self.incarnations: Counter[Peer] = Counter()  # which life of a peer is the present one
        self.replaced: Counter[str] = Counter()  # how often a peer joined anew
        self.metrics: dict[str, Any] = {}
        self.staleness: Counter[int] = Counter()
        self.lost_updates: dict[str, Any] | None = None  # of those that were counted, where some may be
        self.dropped = 0  # updates that came too late to be applied
        self.totals: dict[tuple[Peer, int], Totals] = {}  # of each life of a peer
        self._due: dict[tuple[Peer, int], int] = {}  # examples that a worker was to have trained on by then
        self._fallen: list[tuple[Peer, int]] = []  # the lives that ended by death
        self.digest = ""
        self.blob: bytes | memoryview = b""
        self.began = self.ended = 0.0
        self.leases = Leases()
        self.epoch = (0, 0)  # the epoch the first worker is in, and how many there will be
        self.running = False
        self._start_servers = start_servers
        self._tell, self._replace, self._rescue, self._released = tell, replace, rescue, released
        self._folder = folder
        self._say = say
        self._sites = plan.sites
        self._site_of = {rank: name for name, ranks in self._sites.items() for rank in ranks}
        self._servers_at = plan.servers_at
        self._joining, self._preparing, self._settling = _Gate(), _Gate(), _Gate()
        self._layouts: dict[Peer, str] = {}
        self._deaths: dict[Peer, Counter[str]] = {}  # of what they died, and how often
        self._holders: dict[tuple[Peer, int], set[Peer]] = {}  # who may still use a dead worker's memory
        # Workers that take no more steps but stay until the result is home, and those that wait for that.
        self._done: set[Peer] = set()
        self._leaving: dict[Peer, Respond] = {}
        self._bringer: Peer | None = None  # who brings it
        self._deals = Deals(plan.workers)
        if strategy is not None:
            self.settle(strategy)

    # --- what nodes say -----------------------------------------------------------------------------

    def handle(
        self, peer: Peer, kind: str, fields: dict[str, Any], respond: Respond, incarnation: int = 0
    ) -> None:
        """Takes in one message of a node."""
        handler = getattr(self, f"_on_{kind}", None)
        if kind == "events":
            self._take_lines(peer, incarnation, fields["lines"])
            respond({})
        elif handler is None:
            respond({"error": f"the coordinator knows no {kind!r}"})
        elif incarnation != self.incarnations[peer]:
            respond({})  # sent before its process died, read since: it has been seen to
        else:
            handler(peer, fields, respond)

    def _on_join(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        if self.strategy is None:
            self.settle(ResolvedStrategy.from_json(fields["strategy"]))
        if self.batch_norm is None:
            self.batch_norm = fields["batch_norm"]
        self.members[peer] = fields.get("place", [])
        self._event("join", peer, incarnation=self.incarnations[peer])
        self.expected.discard(peer)
        self._joining.add(peer, respond)
        if self.running or len(self.members) >= self.workers + self.servers:
            self._joining.open(self._welcome)

    def _welcome(self, peer: Peer) -> dict[str, Any]:
        peers = [[each.role, each.rank, place] for each, place in sorted(self.members.items())]
        return {
            "strategy": None if self.strategy is None else self.strategy.to_json(),
            "seed": self.seed, "peers": peers, "workers": self.workers,
            "incarnation": self.incarnations[peer], "batch_norm": self.batch_norm,
            "group": self._deals.number,
            "sites": [list(ranks) for ranks in self._sites.values()], "far": self._far(peer),
        }  # fmt: skip

    def _far(self, peer: Peer) -> list[list[Any]]:
        """Who is at another site than this node: role and rank of each."""
        counts = {"worker": self.workers, "server": self.servers} if self._sites else {}
        nodes = [Peer(role, rank) for role, count in counts.items() for rank in range(count)]
        return [[each.role, each.rank] for each in nodes if self._site(each) != self._site(peer)]

    def _site(self, peer: Peer) -> str:
        if peer.role == "server" and self._servers_at is not None:
            return self._servers_at
        return self._site_of[peer.rank]

    def _on_prepared(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        layout = fields["layout"]
        first = next(iter(self._layouts), peer)  # that came; the lowest rank may be this very peer
        if self._layouts.setdefault(first, layout) != layout:
            self.fail(
                f"{peer} and {first} have different models (layouts {layout} and "
                f"{self._layouts[first]}): every node must build the same model and optimizer"
            )
            return
        self._layouts[peer] = layout
        self.totals[peer, self.incarnations[peer]] = Totals()
        if self.running:
            self.replaced[str(peer)] += 1
            self.leases.enter(peer.rank)
            # Now that it can push, and before it hears that it may: nobody waits for one that still loads its
            # data, and nobody gets a message from a stranger.
            address = next(iter(self.members[peer]), "")
            self._tell("joined", {"role": peer.role, "rank": peer.rank, "address": address})
        self._preparing.add(peer, respond)
        if self.running or len(self._layouts) >= self.workers + self.servers:
            if not self.running:
                self.running, self.began = True, self.clock()
            self._preparing.open(lambda peer: {})

    def _on_lease(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        totals = self.totals[peer, self.incarnations[peer]]  # it may not live to say it again
        totals.steps, totals.samples = fields["steps"], fields["samples"]
        workers = sum(1 for each in self.members if each.role == "worker")
        longest = self.strategy.traits.max_lease if self.strategy is not None else 1
        lease = self.leases.take(
            peer.rank,
            fields["loader"],
            fields["epoch"],
            fields["batches"],
            workers,
            fields["unseen"],
            longest,
        )
        if lease is None:
            respond({"over": True})
        else:
            self._event("lease", peer, loader=fields["loader"], **asdict(lease))
            respond(asdict(lease))

    def _on_give_back(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        returned = self.leases.give_back(peer.rank, fields["loader"], fields["unseen"])
        self._event("give back", peer, loader=fields["loader"], returned=returned)
        respond({})

    def _take_lines(self, peer: Peer, incarnation: int, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            self.record(peer, incarnation, line)
        if self._folder is not None:
            self._folder.flush()

    def record(self, peer: Peer, incarnation: int, line: dict[str, Any]) -> None:
        """One line of a node's event log."""
        event = line["event"]
        if event == "apply":
            self.staleness[line["staleness"]] += 1
        elif event == "drop":
            self.dropped += 1
        elif event == "left" and line["reason"] != "finished":
            role, rank = line["peer"].split()
            self._let_go(peer, (Peer(role, int(rank)), line["incarnation"]))
        elif event == "lost updates":
            self.lost_updates = {key: line[key] for key in ("counted", "lost", "share")}
        elif event == "totals":
            totals = self.totals.setdefault((peer, incarnation), Totals())
            totals.steps, totals.samples = line["steps"], line["samples"]
            totals.bytes_sent, totals.bytes_between = line["bytes_sent"], line["bytes_between"]
            totals.compute_s, totals.wait_s = line["compute_s"], line["wait_s"]
        if self._folder is not None:
            self._folder.event({"node": str(peer), **line})

    def _on_metrics(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        self.metrics.update(fields["metrics"])
        if self._folder is not None:
            self._folder.metric(
                {"t": fields["t"], "node": str(peer), "step": fields["step"], **fields["metrics"]}
            )
        respond({})

    def _on_epoch(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        self.epoch = max(self.epoch, (fields["epoch"] + 1, fields["count"]))
        respond({})

    def _on_done(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        """A worker has taken its last step, and has the answers to all that it asked others.

        Answered when that is true of all: from then on what each has sent in training is final. Until then
        a worker that is done still answers the others.
        """
        if peer not in self.members:  # it died while the message was on its way
            return
        self._done.add(peer)
        self._settling.add(peer, respond)
        self._part()

    def _on_bye(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        """A node is done. One worker is asked to bring the final parameters before it goes.

        It is the last one, for only then are they final; in lockstep worker 0, for there all have the same
        and so the buffers are always of the same worker.
        """
        if self._stays and peer.role == "worker":
            self._done.add(peer)
            self._leaving[peer] = respond
            self._part()
            return
        others = bool(self.expected) or any(each.role == "worker" and each != peer for each in self.members)
        lockstep = self.strategy is not None and self.strategy.traits.lockstep
        last = peer.role == "worker" and (peer.rank == 0 if lockstep else not others)
        respond({"last": last})
        if not last:
            self.leave(peer, "finished")

    @property
    def _stays(self) -> bool:
        """Whether the workers hold the parameters, and stay until the result is home."""
        return self.strategy is not None and self.strategy.traits.parameters_held_by_peers

    def _part(self) -> None:
        """Once all workers are done, one of them brings the result, while the others still answer it."""
        workers = [each for each in sorted(self.members) if each.role == "worker"]
        self._deal()
        if self.expected or not workers or {*workers} - self._done:
            return
        self._settling.open(lambda peer: {})
        if self._bringer is None and not {*workers} - {*self._leaving}:
            self._bringer = workers[0]
            self._leaving.pop(workers[0])({"last": True})

    def _on_deal(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        """A worker is about to begin an epoch of a loader."""
        self._deals.request(peer, self.incarnations[peer], fields["loader"], fields["epoch"], respond)
        self._deal()

    def _on_due(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        """A worker has got its part of an epoch, which nobody else has."""
        self._due[peer, self.incarnations[peer]] = fields["samples"]
        respond({})

    def _on_late(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        """Who has others wait: for an epoch to begin, or at the end."""
        waiting = {*self._done, *self._deals.waiting}
        respond({"workers": [str(each) for each in sorted(self.members) if each not in waiting]})

    def _deal(self) -> None:
        """Answers those who wait to begin an epoch, if all are there."""
        workers = (each for each in self.members if each.role == "worker" and each not in self._done)
        self._deals.reply({each: self.incarnations[each] for each in workers})

    def result(self, peer: Peer, digest: str, blob: bytes | memoryview) -> None:
        """The last worker has brought the final parameters, in safetensors form."""
        self.digest, self.blob = digest, blob
        self.ended = self.clock()
        if self._folder is not None:
            self._folder.consensus(blob)
        self.leave(peer, "finished")
        leaving, self._leaving = self._leaving, {}
        for other, respond in leaving.items():
            respond({"last": False})
            self.leave(other, "finished")

    def _on_failed(self, peer: Peer, fields: dict[str, Any], respond: Respond) -> None:
        respond({})
        self.fail(fields["error"], fields["exit_code"])

    # --- what happens to nodes ----------------------------------------------------------------------

    def leave(self, peer: Peer, reason: str) -> None:
        """A node has finished, or is out of the run for another reason."""
        if self.members.pop(peer, None) is None:
            return
        self.gone[peer] = reason
        self._let_go(peer, *self._holders)
        incarnation = self.incarnations[peer]
        returned = self.leases.lose(peer.rank) if peer.role == "worker" and reason != "finished" else 0
        self._event("leave", peer, incarnation=incarnation, reason=reason, returned=returned)
        self._tell(
            "left", {"role": peer.role, "rank": peer.rank, "incarnation": incarnation, "reason": reason}
        )
        if peer.role == "worker" and self._alone:
            self._tell("over", {})

    @property
    def _alone(self) -> bool:
        """No worker is there, and none will come."""
        return not self.expected and not any(each.role == "worker" for each in self.members)

    def died(self, peer: Peer, reason: str) -> None:
        """A node's process ended without saying goodbye: also one that never joined, in place of another."""
        if peer in self.gone or self.failure is not None:
            return
        self._deaths.setdefault(peer, Counter())[reason] += 1
        strategy = self.strategy
        if not self.running:
            self.fail(f"{peer} {reason} before training began")
        elif peer.role == "server":
            self.fail(f"{peer} {reason}; its part of the parameters is gone")
        elif strategy is None or not strategy.traits.survives:
            self.fail(f"{peer} {reason}; under {strategy} no worker can go on without it (async can)")
        else:
            self._lose(peer, reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        """A worker is dead, and the others can go on: with another in its place, if there is one."""
        incarnation, joined = self.incarnations[peer], peer in self.members
        self._fallen.append((peer, incarnation))
        self.expected.discard(peer)
        done = peer in self._done
        self._done.discard(peer)
        self._settling.waiting.pop(peer, None)
        self._leaving.pop(peer, None)
        if peer == self._bringer:
            self._bringer = None
        again = not done and self._replace(peer)
        if not again and not self.digest and not any(o.role == "worker" and o != peer for o in self.members):
            # Unless they went with it, somebody has to bring home what servers or shared memory hold.
            again = not self.expected and not self._stays and self._rescue(peer)
        if again:
            self.expected.add(peer)
        self.leave(peer, reason)
        if again:
            self.gone.pop(peer, None)
            self.incarnations[peer] += 1
        else:
            self.gone[peer] = reason
        # Where workers stay, they lend to each other.
        holders = {each for each in self.members if self._stays or each.role == "server"}
        if joined and holders:
            self._holders[peer, incarnation] = holders
        else:
            self._released(peer, incarnation)
        self._part()
        if self._alone and not self.digest:
            self.fail(f"{peer} {reason} and no worker is left to bring the parameters home")

    def _let_go(self, holder: Peer, *dead: tuple[Peer, int]) -> None:
        """A node holds nothing of a dead worker any longer; once none does, its memory is free."""
        for worker, incarnation in dead:
            holders = self._holders.get((worker, incarnation), set())
            holders.discard(holder)
            if not holders and self._holders.pop((worker, incarnation), None) is not None:
                self._released(worker, incarnation)

    def fail(self, message: str, exit_code: int = 1) -> None:
        """The first failure is the run's."""
        if self.failure is None:
            self.failure = Failure(message, exit_code)
            if self._folder is not None:
                self._folder.event(
                    {"node": "coordinator", "t": self.clock(), "event": "fail", "message": message}
                )

    @property
    def finished(self) -> bool:
        return bool(self.digest) and not self.members

    # --- the summary --------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        wall = max(self.ended - self.began, 1e-9)
        workers = [totals for (peer, _), totals in self.totals.items() if peer.role == "worker"]
        summary: dict[str, Any] = {
            "strategy": str(self.strategy),
            "workers": self.workers,
            "servers": self.servers,
            "batch_norm": self.batch_norm,
            "wall_s": wall,
            "samples_per_s": sum(each.samples for each in workers) / wall,
            "steps": sum(each.steps for each in workers),
            "samples": sum(each.samples for each in workers),
            "bytes_sent": sum(each.bytes_sent for each in self.totals.values()),
            "compute_s": sum(each.compute_s for each in workers),
            "wait_s": sum(each.wait_s for each in workers),
            "staleness": spread(self.staleness),
            "dropped": self.dropped,
            "metrics": self.metrics,
            "lost": self.lost,
            "joined": sum(self.replaced.values()),
            "replaced": dict(self.replaced),
            "batches_undone": self.leases.undone,
            "samples_left_out": self.left_out,
            "digest": self.digest,
        }
        if self._sites:
            summary["bytes_between_sites"] = sum(each.bytes_between for each in self.totals.values())
        if self.lost_updates is not None:
            summary["lost_updates"] = self.lost_updates
        if self._folder is not None:
            summary["folder"] = str(self._folder.path)
            self._folder.summary(summary)
        return summary

    @property
    def left_out(self) -> int:
        """Examples that were for one worker alone, which died before it had trained on them, as it said."""
        trained = {
            incarnation: self.totals.get(incarnation, Totals()).samples for incarnation in self._fallen
        }
        return sum(
            max(0, self._due.get(incarnation, 0) - samples) for incarnation, samples in trained.items()
        )

    @property
    def deaths(self) -> int:
        return sum(deaths.total() for deaths in self._deaths.values())

    @property
    def lost(self) -> dict[str, str]:
        """Who did not go by itself, and why; how often, if more than once."""
        return {
            str(peer): "; ".join(
                reason if count == 1 else f"{reason} {count} times" for reason, count in deaths.items()
            )
            for peer, deaths in self._deaths.items()
        }

    def progress(self) -> tuple[int, int]:
        """Steps and samples of all workers so far."""
        workers = [totals for (peer, _), totals in self.totals.items() if peer.role == "worker"]
        return sum(each.steps for each in workers), sum(each.samples for each in workers)

    def settle(self, strategy: ResolvedStrategy) -> None:
        """The strategy is known from here on, and so is the number of servers."""
        self.strategy = strategy
        if strategy.traits.uses_servers:
            self.servers = self.servers or 1
        for note in strategy.notes:
            self._say(note)
        if self.servers:
            self._start_servers(self.servers)

    @property
    def settled_plan(self) -> Plan:
        """The plan, with what the script has chosen."""
        if self.strategy is None:
            return self.plan
        return replace(
            self.plan,
            strategy=self.strategy.text,
            classes=self.strategy.classes,
            servers=self.servers,
            batch_norm=self.batch_norm,
        )

    def _event(self, kind: str, peer: Peer, **fields: Any) -> None:
        if self._folder is not None:
            self._folder.event(
                {"node": "coordinator", "t": self.clock(), "event": kind, "peer": str(peer), **fields}
            )
