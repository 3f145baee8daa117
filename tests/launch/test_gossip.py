"""Workers without a server on real processes: neighbours that are killed, and others in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.combine import few
from tests.support.programs import Script, events, mlp, trained
from tests.support.runs import run_in

FAMILY = ["gossip", "gossip:torus,order=step-then-mix", "choco:0.5,topology=complete+topk:0.3"]


def run_with_kills(folder: Path, strategy: str, kills: dict[int, int], **options: Any) -> dict[str, Any]:
    """Four workers, some of which kill themselves in the step that `kills` names."""
    script = Script(size=96, epochs=6, kills=kills, pause=0.02 if kills else 0.0)
    return run_in("real", script, strategy=strategy, workers=4, runs=folder, timeout=30.0, **options)


@few(
    "strategy, victim, restarts",
    [("gossip", 0, 0), *((each, 2, at % 2) for at, each in enumerate(FAMILY, 1))],
    quick=1,
)
def test_gossip_continues_after_a_neighbour_is_killed(
    tmp_path: Path, strategy: str, restarts: int, victim: int
) -> None:
    """The three others go on, with another in its place or without, and what they agree on is trained."""
    summary = run_with_kills(tmp_path, strategy, {victim: 5}, restarts=restarts)
    assert summary["lost"] == {f"worker {victim}": "was killed by SIGKILL"}
    assert summary["joined"] == restarts
    assert summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]
    mlp().load_state_dict(trained(summary), strict=True)


@few("strategy", FAMILY, quick=0)
def test_gossip_over_tcp_gives_the_same_bits_and_survives_a_kill(tmp_path: Path, strategy: str) -> None:
    """Without shared memory it is the same; undisturbed, to the last bit."""
    plain, tcp = (run_with_kills(tmp_path, strategy, {}, listen=how) for how in ("unix:", "tcp:127.0.0.1:0"))
    assert plain["digest"] == tcp["digest"]
    summary = run_with_kills(tmp_path, strategy, {1: 3}, restarts=1, listen="tcp:127.0.0.1:0")
    assert summary["joined"] == 1 and summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]


@few("strategy", FAMILY, quick=0)
def test_last_gossip_worker_trains_on_alone_after_all_others_are_killed(
    tmp_path: Path, strategy: str
) -> None:
    """The last one has no neighbours, and trains on alone."""
    summary = run_with_kills(tmp_path, strategy, {0: 3, 1: 9, 3: 9})
    assert set(summary["lost"]) == {"worker 0", "worker 1", "worker 3"}
    assert {line["node"] for line in events(summary, "step")} >= {"worker 2"}
    assert summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]
