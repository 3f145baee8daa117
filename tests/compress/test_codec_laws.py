"""The laws of codecs in strategies without servers: what is sent, what is kept, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.registry import parse_codec
from tests.support.combine import each_value
from tests.support.planes import CODECS, FEEDBACK, HOPS, Plane, equal, layers, moved, near, values, ways
from tests.support.programs import SGD, Examples, mlp, same, trained

WORKERS = 3
NAMES = [name for name, _ in layers().named_parameters()]

# --- replicas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*CODECS, "sign:vote=yes", "topk:0.1,per=layer,dense=1d"])
def test_replicas_have_the_same_bits_after_every_step(simulate: Any, codec: str) -> None:
    """All decode the same codes in the same order, so none can drift from the others."""
    plane = Plane(12)
    simulate(plane, f"allreduce+{codec}", WORKERS)
    for step in range(12):
        assert all(equal(plane.x[rank][step], plane.x[0][step]) for rank in range(WORKERS)), step
    assert not equal(plane.x[0][0], plane.x[0][11])


@pytest.mark.parametrize("codec", ways(CODECS))
@pytest.mark.parametrize(("strategy", "period"), [("local:3", 3), ("diloco:4", 4), ("average:3", 3)])
def test_replicas_have_the_same_bits_after_every_round(
    simulate: Any, codec: str, strategy: str, period: int
) -> None:
    """Where workers step alone they differ, until they exchange."""
    plane = Plane(12)
    simulate(plane, f"{strategy}+{codec}", WORKERS)
    for step in range(12):
        together = all(equal(plane.x[rank][step], plane.x[0][step]) for rank in range(WORKERS))
        assert together == ((step + 1) % period == 0), step


def noted(folder: Path) -> None:
    """Trains, and notes the digest of this worker's parameters after each step."""
    import hashlib

    here = pr.init()
    model = mlp()
    loader = DataLoader(Examples(50), batch_size=4)
    model, optimizer, loader = here.prepare(model, SGD(model.parameters()), loader)
    with (folder / str(here.rank)).open("w") as file:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in values(model)))
            file.write(digest.hexdigest() + "\n")


@pytest.mark.parametrize("codec", ["topk:0.1", "int4"])
def test_allreduce_with_a_codec_has_the_simulated_bits_on_processes(codec: str, tmp_path: Path) -> None:
    """And they are those of the simulated ones."""
    found = []
    for how in (pr.run, pr.simulate):
        how(partial(noted, tmp_path), workers=3, strategy=f"allreduce+{codec}", runs=None, threads=1)
        found += [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert all(each == found[0] for each in found)
    assert len(set(found[0])) == 5


@pytest.mark.parametrize("codec", CODECS)
def test_allreduce_with_a_codec_works_with_one_worker(simulate: Any, codec: str) -> None:
    """Alone, a worker takes what its own code stands for: nothing else is special about it."""
    plane = Plane(6)
    summary = simulate(plane, f"allreduce+{codec}", 1)
    assert all(value.isfinite().all() for value in trained(summary).values())
    assert summary["steps"] == 6


# --- conservation -----------------------------------------------------------------------------------


def dense(simulate: Any, plane: Plane, strategy: str, workers: int = WORKERS) -> dict[str, Tensor]:
    """Where the same steps lead if all is sent."""
    return trained(simulate(replace(plane, x={}, shown={}, replicas={}, workers={}), strategy, workers))


@pytest.mark.parametrize("codec", FEEDBACK)
@pytest.mark.parametrize("workers", [1, 3])
def test_allreduce_parameters_minus_residuals_equal_plain_sgd(
    simulate: Any, codec: str, workers: int
) -> None:
    """w - lr * mean_i(residual_i) is where SGD would be without a codec, to rounding."""
    plane = Plane(11, groups=True)
    found = trained(simulate(plane, f"allreduce+{codec}", workers))
    law = dense(simulate, plane, "allreduce", workers)
    assert near(moved(found, plane.residual([0.5, 0.5])), law)
    assert not near(found, law, 1e-6)


@pytest.mark.parametrize("codec", [f"{name}:feedback=yes" for name in ("qsgd", "terngrad")])
def test_unbiased_codecs_with_feedback_keep_a_residual(simulate: Any, codec: str) -> None:
    """Feedback is not for the biased only."""
    plane = Plane(11)
    found = trained(simulate(plane, f"allreduce+{codec}", WORKERS))
    assert near(moved(found, plane.residual([0.5])), dense(simulate, plane, "allreduce"))


ROUND = [codec for codec in HOPS if parse_codec(codec).feedback]


@each_value(
    ("codec", [*ROUND, "qsgd:feedback=yes", *(f"{codec}:per=layer" for codec in ROUND)]),
    ("workers", [2, 3, 6]),
)  # more than the shortest layer is long
def test_ring_hops_keep_the_residual_on_the_encoding_worker(simulate: Any, codec: str, workers: int) -> None:
    """Each hop codes a partial sum: what that leaves out stays with the worker that made the code."""
    plane = Plane(11)
    found = trained(simulate(plane, f"allreduce+{codec}", workers, collective="ring"))
    law = dense(simulate, plane, "allreduce", workers)
    assert near(moved(found, plane.residual([0.5])), law)
    assert not near(found, law, 1e-6)
    assert all(equal(plane.x[rank][-1], plane.x[0][-1]) for rank in range(workers))


@pytest.mark.parametrize(("codec", "bits"), [("fp16:feedback=yes", 11), ("bf16:feedback=yes", 8)])
def test_summing_fp16_codes_rounds_the_mean_once_more(simulate: Any, codec: str, bits: int) -> None:
    """Where codes are summed on their way it is the mean that is rounded, to half of its last bit: nobody
    has that to keep. One worker alone loses nothing."""
    for workers in (1, WORKERS):
        plane = Plane(11)
        found = moved(trained(simulate(plane, f"allreduce+{codec}", workers)), plane.residual([0.5]))
        law = dense(simulate, plane, "allreduce", workers)
        assert near(found, law) == (workers == 1)
        assert all(float((found[name] - law[name]).abs().max()) <= 11 * 0.5 * 4 * 2.0**-bits for name in law)


@each_value(
    ("codec", ways(FEEDBACK)),
    ("strategy", ["local:3", "average:3", "diloco:3,lr=1,beta=0", "slowmo:3,beta=0"]),
    ("steps", [11, 12]),
)
def test_averaging_with_a_codec_keeps_unsent_displacements(
    simulate: Any, codec: str, strategy: str, steps: int
) -> None:
    """Where rounds are exchanged the residual is a way: with it every worker is where it would be without.

    A last round that is not whole is exchanged as it is; what was left out before stays with its worker.
    """
    plane = Plane(steps)
    found = trained(simulate(plane, f"{strategy}+{codec}", WORKERS))
    law = dense(simulate, plane, strategy)
    residual = plane.residual([1.0])
    assert near(moved(found, residual, -1.0 if strategy.startswith("diloco") else 1.0), law)
    assert max(each.abs().max() for each in residual.values()) > 0


@each_value(("codec", ways(FEEDBACK)), ("fragments, mix", [(1, 0), (3, 0), (3, 0.5), (1, 0.9)]))
def test_streaming_diloco_keeps_the_residual_of_each_fragment(
    simulate: Any, codec: str, fragments: int, mix: float
) -> None:
    """Also where each fragment has its turn by itself, and a worker keeps some of where it was."""
    strategy = f"streaming-diloco:6,fragments={fragments},overlap=1,mix={mix},lr=1,beta=0"
    plane = Plane(21)
    found = trained(simulate(plane, f"{strategy}+{codec}", WORKERS))
    assert near(moved(found, plane.residual([1.0])), dense(simulate, plane, strategy))


def falling(step: int) -> float:
    return 0.5 if step < 5 else 0.125 if step < 8 else 0.3


@pytest.mark.parametrize("codec", FEEDBACK)
def test_residuals_keep_the_learning_rate_of_their_gradient(simulate: Any, codec: str) -> None:
    """A gradient that is sent later moves the model as far as it would have when it was computed."""
    plane = Plane(11, rate=falling, groups=True)
    found = trained(simulate(plane, f"allreduce+{codec}", WORKERS))
    law = dense(simulate, plane, "allreduce")
    assert near(moved(found, plane.residual([0.3, 0.06])), law)


@pytest.mark.parametrize("codec", FEEDBACK)
def test_residuals_from_a_zero_learning_rate_count_for_nothing(simulate: Any, codec: str) -> None:
    """What was computed when the rate was 0 is worth nothing, however long it waits."""
    plane = Plane(7, rate=lambda step: 0.1 * (step - 1))
    found = trained(simulate(plane, f"allreduce+{codec}", WORKERS))
    assert near(moved(found, plane.residual([0.6])), dense(simulate, plane, "allreduce"))


@each_value(
    ("codec", [codec for codec in FEEDBACK if codec in ways(FEEDBACK)]),
    (
        "rate",
        [
            pytest.param(None, id="one"),
            pytest.param(falling, id="two"),
            pytest.param(lambda step: 0.5 * 0.9**step, id="many"),
        ],
    ),
    ("steps", [11, 12]),
)
def test_postlocal_converts_residuals_at_the_switch(
    simulate: Any, codec: str, rate: Callable[[int], float] | None, steps: int
) -> None:
    """At the change a gradient that was not sent becomes a way that was not told, at the rate it had."""
    plane = Plane(steps, rate=rate, groups=True)
    strategy = "postlocal:3,after=6"
    found = trained(simulate(plane, f"{strategy}+{codec}", WORKERS))
    assert near(moved(found, plane.residual([1.0, 1.0]), 1.0), dense(simulate, plane, strategy))


@pytest.mark.parametrize("codec", FEEDBACK)
def test_gradient_accumulation_with_a_codec_counts_gradients_once(simulate: Any, codec: str) -> None:
    """A gradient that is exchanged, added to and exchanged again is counted once."""
    plane = Plane(7, batches=3)
    found = trained(simulate(plane, f"allreduce+{codec}", WORKERS))
    assert near(moved(found, plane.residual([0.5])), dense(simulate, plane, "allreduce"))


@pytest.mark.parametrize("codec", FEEDBACK)
@pytest.mark.parametrize("who", ["all", "one"])
def test_allreduce_sends_residuals_of_layers_without_a_gradient(simulate: Any, codec: str, who: str) -> None:
    """What waits for a parameter arrives, also in a step in which nobody has a gradient for it."""

    def skips(rank: int, step: int, index: int) -> bool:
        return step > 4 and index == 2 and (who == "all" or rank == 1)

    plane = Plane(9, skips=skips)
    found = trained(simulate(plane, f"allreduce+{codec}", WORKERS))
    assert near(moved(found, plane.residual([0.5])), dense(simulate, plane, "allreduce"))


LOOKED = ["allreduce", "local:3", "average:3", "slowmo:3", "diloco:3", "postlocal:3,after=4"]
LOOKED += ["streaming-diloco:6,fragments=3", "streaming-diloco:4,fragments=2,overlap=1,mix=0.3"]


@each_value(("codec", ["topk:0.1", "powersgd", "fp16"]), ("strategy", LOOKED))
def test_consensus_does_not_change_a_run_with_a_codec(simulate: Any, strategy: str, codec: str) -> None:
    """The consensus in the middle of a round shows what the run would end with, and leaves what waits."""
    seen, law = Plane(8, look=True), Plane(8)
    one, other = (simulate(each, f"{strategy}+{codec}", WORKERS)["digest"] for each in (seen, law))
    assert one == other
    for rank in range(WORKERS):
        assert all(equal(a, b) for a, b in zip(seen.x[rank], law.x[rank], strict=True))
        assert all(equal(a, b) for a, b in zip(seen.shown[rank], seen.shown[0], strict=True))
    for steps in (1, 3, 5):
        ended = trained(simulate(Plane(steps), f"{strategy}+{codec}", WORKERS))
        shown = dict(zip(NAMES, seen.shown[0][steps - 1], strict=True))
        assert same(ended, shown), steps
