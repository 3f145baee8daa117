"""The laws of Deep Gradient Compression: exact, where they are exact."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyrhythm as pr
from polyrhythm.compress import feedback
from polyrhythm.compress.codecs.dgc import DGC
from polyrhythm.compress.codecs.sparsify import TopK
from polyrhythm.compress.state import CodecState
from polyrhythm.compress.transforms.base import check_optimizer
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import parse_codec
from tests.support import programs
from tests.support.programs import Script, distance

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def gradients(steps: int, size: int = 300, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, dtype=dtype, generator=generator) for _ in range(steps)]


def sent(codec: TopK, given: list[Tensor], state: CodecState) -> list[Tensor]:
    """What the others get, step by step."""
    received = []
    for gradient in given:
        before, into = gradient.clone(), torch.zeros_like(gradient)
        codec.decode(feedback.encode(codec, gradient, state), into)
        state.sent()
        assert torch.equal(gradient, before)
        received.append(into)
    return received


def trained(updates: list[Tensor], **settings: Any) -> Tensor:
    """Where torch.optim.SGD gets with these gradients."""
    point = torch.zeros_like(updates[0], requires_grad=True)
    optimizer = torch.optim.SGD([point], lr=0.1, **settings)
    for update in updates:
        point.grad = update.clone()
        optimizer.step()
    return point.detach()


@DTYPES
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_of_density_1_without_masking_equals_momentum_sgd(dtype: torch.dtype, nesterov: bool) -> None:
    """Density 1, masking off: bit for bit torch.optim.SGD with that momentum, or Nesterov's."""
    given = gradients(40, dtype=dtype)
    codec = DGC(1.0, values="fp32", momentum=0.9, nesterov=nesterov, masking=False)
    received = sent(codec, given, CodecState.alone(300, dtype=dtype))
    assert torch.equal(trained(received), trained(given, momentum=0.9, nesterov=nesterov))


@DTYPES
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_of_density_1_with_masking_has_no_momentum(dtype: torch.dtype, nesterov: bool) -> None:
    """Density 1, masking on: the mask takes all momentum away. Plain SGD is left, or Nesterov's first."""
    given = gradients(10, dtype=dtype)
    codec = DGC(1.0, values="fp32", nesterov=nesterov)
    received = sent(codec, given, CodecState.alone(300, dtype=dtype))
    plain = [g.add(g, alpha=0.9) for g in given] if nesterov else given
    assert all(torch.equal(one, other) for one, other in zip(received, plain, strict=True))


@DTYPES
@pytest.mark.parametrize("fields", [{}, {"values": "fp32", "pick": "exact"}, {"warmup": 5}])
def test_dgc_without_momentum_sends_the_bytes_of_topk(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    """The same bytes."""
    one, other = (CodecState.alone(300, dtype=dtype) for _ in range(2))
    dgc, topk = DGC(0.05, momentum=0.0, **fields), TopK(0.05, **fields)
    for gradient in gradients(20, dtype=dtype):
        assert torch.equal(feedback.encode(dgc, gradient, one), feedback.encode(topk, gradient, other))
        one.sent()
        other.sent()
    assert torch.equal(one.residual, other.residual)


@given(
    size=st.integers(1, 60),
    density=st.floats(0.01, 1.0),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
    masking=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_dgc_step_matches_the_update_rule_of_the_paper(
    size: int, density: float, momentum: float, nesterov: bool, masking: bool
) -> None:
    """u <- mu u + g, v <- v + u; or u <- mu (u + g), v <- v + u + g. The largest go; u and v are 0 there."""
    codec = DGC(density, 0, "fp32", "exact", momentum, nesterov, masking)
    state = CodecState.alone(size, dtype=torch.float64)
    given = gradients(6, size)
    u, v = torch.zeros(2, size, dtype=torch.float64)
    for gradient, received in zip(given, sent(codec, given, state), strict=True):
        u = momentum * (u + gradient) if nesterov else momentum * u + gradient
        v = v + u + gradient if nesterov else v + u
        largest = v.abs().topk(codec.quota(size, 0)).indices
        mask = torch.zeros(size, dtype=torch.bool)
        mask[largest] = True
        torch.testing.assert_close(received, torch.where(mask, v, 0.0), rtol=0, atol=1e-12)
        v = torch.where(mask, 0.0, v)
        u = torch.where(mask, 0.0, u) if masking else u
    torch.testing.assert_close(state.residual, v, rtol=0, atol=1e-12)


def test_dgc_sent_values_plus_residual_equal_the_accumulated_momentum() -> None:
    """Without masking, all that was sent and what is left are all that momentum has gathered."""
    given, state = gradients(50), CodecState.alone(300, dtype=torch.float64)
    received = sent(DGC(0.1, masking=False), given, state)
    velocity, total = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for gradient in given:
        velocity = 0.9 * velocity + gradient
        total += velocity
    torch.testing.assert_close(sum(received) + state.residual, total, rtol=0, atol=1e-11)


@pytest.mark.parametrize("workers", [1, 4, 9])
def test_dgc_clips_the_gradient_of_each_worker_to_clip_over_sqrt_n(workers: int) -> None:
    """To clip / sqrt(N); shorter ones stay as they are."""
    long, short = torch.full((100,), 3.0), torch.full((100,), 0.01)
    codec = DGC(1.0, values="fp32", momentum=0.0, clip=6.0)
    received = sent(codec, [long, short], CodecState.alone(100, workers=workers))
    assert received[0].norm().item() == pytest.approx(6 / math.sqrt(workers), rel=1e-6)
    assert torch.equal(received[1], short)


class Step:
    """One step of SGD along known gradients; keeps how far it went, layer by layer."""

    def __init__(self) -> None:
        self.moved: list[Tensor] = []

    def __call__(self) -> None:
        session = pr.init()
        network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).double()
        before = [parameter.detach().clone() for parameter in network.parameters()]
        model, optimizer = session.prepare(network, torch.optim.SGD(network.parameters(), lr=1.0))
        optimizer.zero_grad()
        numbers = [torch.arange(1.0, each.numel() + 1).view_as(each) for each in before]
        sum((mine * each).sum() for mine, each in zip(model.parameters(), numbers, strict=True)).backward()
        optimizer.step()
        self.moved = [was - now.detach() for was, now in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("more", ["", ",per=layer", ",per=layer,dense=1d"])
@pytest.mark.parametrize(("strategy", "servers"), [("allreduce", 0), ("sync", 1), ("sync", 3)])
def test_the_whole_gradient_is_clipped(simulate: Any, strategy: str, servers: int, more: str) -> None:
    """Not each stretch, nor each server's: all that is coded is as long as `clip`, and goes the same way."""
    step, law = Step(), Step()
    simulate(step, f"{strategy}+dgc:1,values=fp32,momentum=0,pull=dense,clip=2{more}", 1, servers)
    simulate(law, "allreduce", 1)
    coded = [not ("dense" in more and len(each.shape) == 1) for each in law.moved]
    length = math.hypot(
        *(float(each.norm()) for each, is_coded in zip(law.moved, coded, strict=True) if is_coded)
    )
    for found, whole, is_coded in zip(step.moved, law.moved, coded, strict=True):
        torch.testing.assert_close(found, whole * (2 / length if is_coded else 1), rtol=1e-6, atol=0)


def test_warming_up_sends_more() -> None:
    given, state = gradients(8, 10_000), CodecState.alone(10_000, dtype=torch.float64)
    counts = [int((each != 0).sum()) for each in sent(DGC(0.001, warmup=4, pick="exact"), given, state)]
    assert counts[0] == 2500 and counts == sorted(counts, reverse=True) and counts[4:] == [10] * 4


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("workers", "near"), [(1, 0.0), (3, 1e-12)])
def test_allreduce_with_dgc_of_density_1_equals_momentum_sgd(
    simulate: Any, workers: int, near: float, nesterov: bool
) -> None:
    """Bit for bit with one worker; with more, the mean of momenta is the momentum of means, near enough."""
    codec = f"dgc:1,masking=no,values=fp32,momentum=0.9,nesterov={nesterov}"
    plain = Script(optimizer=partial(torch.optim.SGD, lr=0.05), size=50, epochs=3)
    moved = replace(plain, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=nesterov))
    law = programs.trained(simulate(moved, "allreduce", workers))
    assert distance(programs.trained(simulate(plain, f"allreduce+{codec}", workers)), law) <= near


def test_a_run_with_dgc_refuses_an_optimizer_with_momentum(simulate: Any) -> None:
    with pytest.raises(UsageError, match="dgc applies momentum itself"):
        simulate(Script(optimizer=programs.MOMENTUM), "allreduce+dgc:0.1", 2)


def test_the_server_answers_in_plain_topk() -> None:
    codec = parse_codec("dgc:0.01,momentum=0.5,per=layer,dense=1d,values=fp32")
    reply = codec.for_replies()
    assert type(reply) is TopK
    assert (reply.density, reply.values, reply.per, reply.dense) == (0.01, "fp32", "layer", "1d")


@pytest.mark.parametrize(
    ("optimizer", "fits"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "momentum": 0.5}], lr=0.1), False),
        (torch.optim.Adam, False),
        (lambda p: torch.optim.Adam(p, betas=(0.0, 0.999)), True),
        (torch.optim.Adagrad, True),
    ],
)
def test_the_optimizer_has_no_momentum_of_its_own(optimizer: Any, fits: bool) -> None:
    groups = optimizer([torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)]).param_groups
    check_optimizer(parse_codec("dgc:0.01,momentum=0"), groups)
    if fits:
        check_optimizer(parse_codec("dgc"), groups)
    else:
        with pytest.raises(UsageError, match=r"applies momentum itself.*set momentum=0"):
            check_optimizer(parse_codec("dgc"), groups)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dgc:0", "density must be more than 0"),
        ("dgc:momentum=1", "momentum must be 0 or more, and below 1"),
        ("dgc:clip=0", "clip must be above 0"),
        ("dgc:feedback=no", "without feedback use topk"),
    ],
)
def test_dgc_refuses_invalid_settings(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_codec(text)
