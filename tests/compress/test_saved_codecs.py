"""Every codec is saved and restored: a run that stops at any step and resumes gives the same bits."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import polyrhythm as pr
from polyrhythm.compress.state import CodecState, SenderState
from polyrhythm.model.layout import Layout
from tests.support.combine import each_value
from tests.support.planes import CODECS, HOPS, layers, slopes, values, ways

STEPS, WORKERS = 9, 3
# Besides every codec as it is by default: fields that make it keep more, or draw by lot.
MORE = [
    "topk:0.1,warmup=7", "dgc:0.1,nesterov=yes,clip=1,warmup=4", "threshold:0.25,adaptive=yes,warmup=3",
    "fp16:feedback=yes", "randomk:0.2,feedback=no", "int8:rounding=stochastic", "qsgd:feedback=yes",
    "sign:vote=yes,momentum=0.9", "powersgd:1,warm=no", "powersgd:1,per=vector,dense=", "int4:8,per=layer",
]  # fmt: skip

Saved = dict[int, bytes]  # by rank


def script(begin: int, end: int, saved: Saved, ended: dict[int, list[Tensor]]) -> Callable[[], None]:
    """Takes some of the steps, from what the ranks have saved; saves what the next run needs."""

    def main() -> None:
        here = pr.init()
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        state: dict[str, Any] = {}
        if begin:
            state = torch.load(io.BytesIO(saved[here.rank]), weights_only=True)
            model.load_state_dict(state["model"])
        model, optimizer = here.prepare(model, optimizer)
        if state:
            here.load_state_dict(state["session"])
        for step in range(begin + 1, end + 1):
            for group in optimizer.param_groups:
                group["lr"] = 0.5 / (1 + step // 3)
            optimizer.zero_grad()
            given = slopes(here.rank, step, model)
            sum((each * g).sum() for each, g in zip(model.parameters(), given, strict=True)).backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "session": here.state_dict()}, file)
        saved[here.rank], ended[here.rank] = file.getvalue(), values(model)

    return main


def check_resumes(simulate: Any, strategy: str, stop: int, **more: Any) -> None:
    whole: dict[int, list[Tensor]] = {}
    digest = simulate(script(0, STEPS, {}, whole), strategy, WORKERS, **more)["digest"]
    saved: Saved = {}
    found: dict[int, list[Tensor]] = {}
    simulate(script(0, stop, saved, {}), strategy, WORKERS, **more)
    assert simulate(script(stop, STEPS, saved, found), strategy, WORKERS, **more)["digest"] == digest
    for rank in range(WORKERS):
        assert all(torch.equal(a, b) for a, b in zip(whole[rank], found[rank], strict=True))


@each_value(("codec", [*CODECS, *MORE]), ("stop", [1, 4, 7]))
def test_allreduce_with_a_codec_resumes_exactly(simulate: Any, codec: str, stop: int) -> None:
    check_resumes(simulate, f"allreduce+{codec}", stop)


@each_value(("codec", ways([*CODECS, *MORE])), ("stop", [3, 4, 8]))
def test_local_sgd_with_a_codec_resumes_exactly(simulate: Any, codec: str, stop: int) -> None:
    """Between two rounds, and in the middle of one."""
    check_resumes(simulate, f"local:3+{codec}", stop)


@pytest.mark.parametrize("codec", [*HOPS, "int8:rounding=stochastic"])
def test_codecs_on_a_ring_resume_exactly(simulate: Any, codec: str) -> None:
    """Each chunk of a segment has a state of its own."""
    check_resumes(simulate, f"allreduce+{codec}", 4, collective="ring")


def test_codec_state_keeps_what_was_loaded_until_it_is_asked_for() -> None:
    """A state that is saved again before its first message loses nothing."""
    one, other = (CodecState.alone(8, feedback=False) for _ in range(2))
    for part in (one, one.part(0, 4)):
        part.sent()
    saved = one.state_dict()
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    assert (other.count, other.part(0, 4).count, other.part(4, 8).count) == (1, 1, 0)
    assert other.state_dict()["parts"][0] == saved["parts"][0]


def test_sender_state_is_loaded_in_place() -> None:
    """Vectors that were not saved become zero again: nothing of before is left."""
    layout = Layout(model := layers(), torch.optim.SGD(model.parameters(), lr=0.1))
    state = SenderState(layout)
    fresh = state.state_dict()
    (residual,) = state.vector("residual")
    saved = state.state_dict()
    residual.fill_(1.0)
    kept = state.state_dict()
    state.load_state_dict(fresh)
    assert not residual.any()
    state.load_state_dict(kept)
    assert bool((residual == 1).all()) and state.vector("residual")[0] is residual
    state.load_state_dict(saved)
    assert not residual.any()
