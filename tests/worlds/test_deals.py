"""Who shares the epochs of a run where workers step together: a share is for one incarnation only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from polyrhythm.coordination.leases import Cohorts
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import EpochShare, Prepared, Request, ShareEpoch, ShareReply
from tests.support.launchers import SilentLauncher, coordinator, join

OVER = ShareReply(None)
W0, W1, W2 = (Peer("worker", rank) for rank in range(3))
WORKERS = (W0, W1, W2)


@dataclass
class Table:
    """Three workers that share a run, and what each was answered last."""

    cohorts: Cohorts = field(default_factory=lambda: Cohorts(3))
    there: dict[Peer, int] = field(default_factory=lambda: dict.fromkeys(WORKERS, 0))
    answers: dict[tuple[Peer, int], ShareReply] = field(default_factory=dict)

    def request(self, epoch: int, *workers: Peer, loader: int = 0) -> None:
        for worker in workers:
            incarnation = self.there[worker]

            def respond(answer: ShareReply, key: tuple[Peer, int] = (worker, incarnation)) -> None:
                self.answers[key] = answer

            self.cohorts.request(worker, incarnation, loader, epoch, respond)
            self.cohorts.reply(self.there)

    def told(self) -> dict[tuple[Peer, int], ShareReply]:
        """What was answered since the last look."""
        answers, self.answers = self.answers, {}
        return answers

    def die(self, worker: Peer) -> None:
        incarnation = self.there.pop(worker)
        self.cohorts.reply(self.there)
        self.there[worker] = incarnation + 1  # and comes back at once


def share(ranks: list[int], number: int, epoch: int) -> ShareReply:
    return ShareReply(EpochShare(ranks, number, epoch))


def test_an_epoch_begins_when_all_are_there() -> None:
    table = Table()
    table.request(0, W2, W0)
    assert table.told() == {} and table.cohorts.waiting == {W0, W2}
    table.request(0, W1)
    assert table.told() == dict.fromkeys(((worker, 0) for worker in WORKERS), share([0, 1, 2], 0, 0))
    assert table.cohorts.waiting == set()


def test_one_that_came_back_has_no_share_of_what_has_begun() -> None:
    """The life before it was dealt a part of the first epoch. It died with it: for this one it is over."""
    table = Table()
    table.request(0, *WORKERS)
    table.told()
    table.die(W1)
    table.request(0, W1)
    assert table.told() == {(W1, 1): OVER} and table.cohorts.waiting == set()


def test_nobody_waits_for_one_that_came_back() -> None:
    """It may still load its data, or be elsewhere in the script; it is in when it has asked in time."""
    table = Table()
    table.request(0, *WORKERS)
    table.told()
    table.die(W1)
    table.request(1, W0, W2)
    assert table.told() == dict.fromkeys(((W0, 0), (W2, 0)), share([0, 2], 1, 1))
    table.request(1, W1)
    assert table.told() == {(W1, 1): OVER}
    table.request(2, W1, W0)
    assert table.told() == {}
    table.request(2, W2)
    assert table.told() == dict.fromkeys(((W0, 0), (W1, 1), (W2, 0)), share([0, 1, 2], 2, 2))
    table.request(3, W0, W2)
    assert table.told() == {}  # now it is one of those that are waited for
    table.request(3, W1)
    assert {answer.share.number for answer in table.told().values() if answer.share} == {2}


def test_the_same_ranks_in_another_life_are_another_group() -> None:
    """A replacement has nothing of what the group has exchanged, so the group starts again with it."""
    table = Table()
    table.request(0, *WORKERS)
    table.told()
    table.die(W1)
    table.request(1, W1, W0, W2)
    assert table.told() == dict.fromkeys(((W0, 0), (W1, 1), (W2, 0)), share([0, 1, 2], 1, 1))


def test_who_is_in_gets_the_next_epoch_of_a_second_loader() -> None:
    """For those of a second loader one that came back never asked: it gets the one that all begin now."""
    table = Table()
    for epoch in (0, 1):
        table.request(epoch, *WORKERS, loader=1)
    table.die(W1)
    table.request(0, W1, W0, W2)
    table.told()
    table.request(0, W1, loader=1)
    table.request(2, W0, W2, loader=1)
    assert table.told() == dict.fromkeys(((W0, 0), (W1, 1), (W2, 0)), share([0, 1, 2], 1, 2))


@pytest.mark.parametrize("again", [True, False])
def test_the_coordinator_gives_the_share_of_the_dead_to_nobody(again: bool) -> None:
    """Neither who asked before its death nor the life after it is answered in its place."""
    here = coordinator("gossip", 3, SilentLauncher(3 if again else 0))
    answers: dict[tuple[Peer, int], Any] = {}

    def say(peer: Peer, request: Request[Any], incarnation: int = 0) -> None:
        here.handle(peer, request, lambda answer: answers.update({(peer, incarnation): answer}), incarnation)

    def request(epoch: int, *incarnations: tuple[Peer, int]) -> dict[tuple[Peer, int], Any]:
        answers.clear()
        for peer, incarnation in incarnations:
            say(peer, ShareEpoch(0, epoch), incarnation)
        return dict(answers)

    for first in (join("gossip"), Prepared("x")):
        for peer in WORKERS:
            say(peer, first)
    assert len(request(0, (W0, 0), (W1, 0), (W2, 0))) == 3
    assert request(1, (W0, 0), (W1, 0)) == {}
    here.died(W1, "fell")
    if again:
        say(W1, join("gossip"), incarnation=1)
        say(W1, Prepared("x"), incarnation=1)
        assert request(0, (W1, 1)) == {(W1, 1): OVER}
    assert request(1, (W2, 0)) == dict.fromkeys(((W0, 0), (W2, 0)), share([0, 2], 1, 1))
    if again:
        assert request(1, (W1, 1)) == {(W1, 1): OVER}
        found = request(2, (W1, 1), (W0, 0), (W2, 0))
        assert found == dict.fromkeys(((W0, 0), (W1, 1), (W2, 0)), share([0, 1, 2], 2, 2))
