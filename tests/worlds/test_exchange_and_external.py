"""Groups exchange tensors in both worlds, and scripts may train by other tools than `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import polyrhythm as pr
from polyrhythm.coordination.key_values import KeyValues
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.key_value import KeyValue, KeyValueReply
from polyrhythm.core.peer import Peer
from polyrhythm.session.context import world_context
from tests.support.runs import WORLDS, run_in


def external(program: Callable[[Any], Any]) -> Callable[[], None]:
    """A script that trains by another tool; the program gets its node."""

    def script() -> None:
        pr.init().train_by("another tool")
        here = world_context.get()
        assert here is not None
        program(here.node)

    return script


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", ["auto", "ring"])
def test_groups_exchange_and_reduce(world: str, collective: str) -> None:
    """All members, and some of them under several names, each with its own order."""

    def program(node: Any) -> None:
        def got(group: Any) -> list[list[float]]:
            found: list[list[float]] = []

            def use(given: Sequence[Sequence[Tensor]]) -> None:
                found.extend([each.item() for each in row] for row in given)

            rows = [[torch.tensor([10.0 * group.rank + to])] * to for to in range(group.size)]
            group.exchange("all-to-all", rows, use)
            return found

        everyone, rank = node.everyone, node.rank
        assert got(everyone) == [[10.0 * sender + rank] * rank for sender in range(3)]
        product = torch.tensor([rank + 1.0, 2.0])
        everyone.all_reduce(product, op="product")
        assert product.tolist() == [6.0, 8.0]
        if rank < 2:
            pair = [Peer("worker", each) for each in range(2)]
            one, other = everyone.split(pair, "one"), everyone.split(pair, "other")
            assert one is everyone.split(pair, "one") and one is not other
            for group in (one, other, one):
                assert got(group) == [[10.0 * sender + rank] * rank for sender in range(2)]

    result = run_in(world, external(program), collective=collective)
    assert result["strategy"] == "another tool" and result["ended"] == "finished" and not result["digest"]


@pytest.mark.parametrize("world", WORLDS)
def test_members_in_different_exchanges_are_told_apart(world: str) -> None:
    def program(node: Any) -> None:
        what = "barrier" if node.rank else "broadcast"
        node.everyone.exchange(what, [[]] * 2, lambda given: None)

    with pytest.raises(PolyrhythmError, match=r"is in (barrier|broadcast) but worker . is in"):
        run_in(world, external(program), workers=2, collective="ring" if world == "real" else "auto")


@pytest.mark.parametrize("world", WORLDS)
def test_a_script_without_prepare_counts_steps_and_logs(world: str) -> None:
    def script() -> None:
        session = pr.init()
        session.train_by("another tool")
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3 + session.rank):  # workers may take different numbers of steps
            weight.grad = torch.ones(1)
            optimizer.step()
        session.log(weight=weight.item(), reduce="min")
        assert session.gather(session.rank) == [0, 1]

    result = run_in(world, script, workers=2)
    assert result["steps"] == 7 and result["metrics"] == {"weight": -0.4}
    assert [row["step"] for row in sorted(result.metrics, key=lambda row: row["node"])] == [3, 4]


@pytest.mark.parametrize("world", WORLDS)
def test_a_script_that_trains_by_nothing_is_refused(world: str) -> None:
    with pytest.raises(UsageError, match=r"never called session.prepare\(model, optimizer, loader\)"):
        run_in(world, lambda: pr.init().log(nothing=0), workers=2)


def test_key_values_are_those_of_a_store() -> None:
    """Each operation as torch.distributed.Store defines it."""
    values, me = KeyValues(), Peer("worker", 0)

    def ask(*args: Any, **kwargs: Any) -> KeyValueReply:
        replies: list[KeyValueReply] = []
        values.handle(me, KeyValue(*args, **kwargs), replies.append)
        return replies[0]

    assert ask("get", "a").value is None
    ask("set", "a", b"1")
    ask("append", "a", b"2")
    ask("append", "b", b"3")
    assert ask("get", "a").value == b"12" and ask("get", "b").value == b"3"
    assert [ask("add", "n", number=each).number for each in (2, 0, -5)] == [2, 2, -3]
    assert ask("get", "n").value == b"-3"
    assert ask("compare", "a", b"new", b"other").value == b"12"
    assert ask("compare", "a", b"new", b"12").value == b"new" == ask("get", "a").value
    assert ask("compare", "c", b"new", b"expected").value is None and ask("get", "c").value is None
    assert ask("compare", "c", b"new", b"").value == b"new" == ask("get", "c").value
    assert ask("count").number == 4
    assert [ask("delete", "c").number for _ in range(2)] == [1, 0] and ask("count").number == 3
