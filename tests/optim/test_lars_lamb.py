"""LARS and LAMB: their laws, and that no strategy takes their layers apart."""

from __future__ import annotations

import copy
import doctest
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyrhythm as pr
import polyrhythm.optim.lars_lamb
from polyrhythm.core.errors import UsageError
from polyrhythm.model.layout import Layout
from polyrhythm.model.replica import Replica
from polyrhythm.model.shard import Shard
from polyrhythm.model.vectors import cut, split
from tests.support.combine import each_value
from tests.support.programs import Script, alone, distance, mlp, normed, odd, same, trained

LARS = partial(pr.LARS, lr=0.2, trust=0.2, weight_decay=0.01)
LAMB = partial(pr.LAMB, lr=0.05, weight_decay=0.01)
MUON = partial(torch.optim.Muon, lr=0.02)
ADAFACTOR = partial(torch.optim.Adafactor, lr=0.02)
OURS = {"lars": LARS, "lamb": LAMB}
both = pytest.mark.parametrize("optimizer", OURS.values(), ids=OURS.keys())


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).to(dtype)


def walk(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scale: float = 1.0) -> nn.Module:
    """Steps with random gradients, of this size."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for each in model.parameters():
            gradient = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            each.grad = (scale * gradient).to(each.dtype)
        optimizer.step()
    return model


def layers(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters() if each.dim() > 1]


def vectors(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters() if each.dim() <= 1]


# --- laws -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [partial(pr.LARS, lr=1.0, trust=0.1), partial(pr.LAMB, lr=0.1, eps=1e-30)],
    ids=["lars", "lamb"],
)
@pytest.mark.parametrize("scale", [2.0**-20, 0.5, 1024.0, 3.7])
def test_the_scale_of_the_gradient_does_not_matter(optimizer: Any, scale: float) -> None:
    """Without decay and eps: to the bit for powers of two, which do not round."""
    found = [layers(walk(model := net(), optimizer(model.parameters()), 5, each)) for each in (1.0, scale)]
    if scale == 3.7:
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    else:
        assert all(map(torch.equal, *found))


def test_lars_is_its_formula() -> None:
    """v <- m v + trust |w| / (|g| + decay |w|) (g + decay w), w <- w - lr v; vectors take plain momentum."""
    lr, momentum, trust, decay = 0.5, 0.9, 0.1, 0.02
    model = net()
    walk(model, pr.LARS(model.parameters(), lr, momentum, decay, trust), 4)
    expected = [each.detach().clone() for each in net().parameters()]
    buffers = [torch.zeros_like(each) for each in expected]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for w, v in zip(expected, buffers, strict=True):
            g = torch.randn(w.shape, generator=generator, dtype=torch.float64)
            if w.dim() > 1:
                g = trust * w.norm() / (g.norm() + decay * w.norm()) * (g + decay * w)
            v.mul_(momentum).add_(g)
            w.sub_(lr * v)
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-12, atol=1e-12)


def test_lamb_is_its_formula() -> None:
    """r = m̂ / (sqrt(v̂) + eps) + decay w, w <- w - lr |w| / |r| r; vectors take the steps of Adam."""
    lr, (b1, b2), eps, decay = 0.05, (0.8, 0.95), 1e-3, 0.02
    model = net()
    walk(model, pr.LAMB(model.parameters(), lr, (b1, b2), eps, decay), 4)
    expected = [each.detach().clone() for each in net().parameters()]
    m, v = ([torch.zeros_like(each) for each in expected] for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for t in range(1, 5):
        for i, w in enumerate(expected):
            g = torch.randn(w.shape, generator=generator, dtype=torch.float64)
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            r = m[i] / (1 - b1**t) / ((v[i] / (1 - b2**t)).sqrt() + eps)
            if w.dim() > 1:
                r = r + decay * w
                r *= w.norm() / r.norm()
            w.sub_(lr * r)
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_lars_and_lamb_step_length_is_proportional_to_the_weight_norm(ratio: float) -> None:
    """|step| = lr trust |w| for LARS, lr |w| for LAMB, whatever the layer."""
    for optimizer in (partial(pr.LARS, lr=1.0, trust=ratio), partial(pr.LAMB, lr=ratio)):
        model = net()
        before = layers(model)
        after = layers(walk(model, optimizer(model.parameters()), 1))
        for one, other in zip(before, after, strict=True):
            assert (one - other).norm().item() == pytest.approx(ratio * one.norm().item())


@both
def test_vectors_are_neither_adapted_nor_decayed(optimizer: Any) -> None:
    """Biases and norm layers take the steps of plain SGD, or Adam, as do groups that say so."""
    plain: Any = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
    if optimizer is LAMB:
        plain = partial(torch.optim.Adam, lr=0.05, eps=1e-6)
    model, other, third = net(), net(), net()
    walk(model, optimizer(model.parameters()), 5)
    walk(other, plain(other.parameters()), 5)
    walk(third, optimizer([{"params": third.parameters(), "adapt": False}]), 5)
    for one, two in zip(vectors(model), vectors(other), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    for one, two in zip(third.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    assert not any(map(torch.equal, layers(model), layers(other)))


@both
def test_sparse_gradients_are_refused(optimizer: Any) -> None:
    """Alone; in a run they have become dense by then."""
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(UsageError, match=r"does not support sparse gradients.*leave out sparse=True"):
        optimizer(embedding.parameters()).step()


@both
def test_a_norm_of_zero_makes_the_ratio_one(optimizer: Any) -> None:
    """Weights of zero can begin to move; where the gradient is zero, decay goes on at the plain rate."""
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer([weight]).step()
    moved = 0.2 if optimizer is LARS else 0.05
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, -moved), rtol=1e-5, atol=0)
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    weight.grad = torch.zeros_like(weight)
    optimizer([weight], weight_decay=0.0).step()
    assert torch.equal(weight, torch.ones_like(weight))
    if optimizer is LARS:
        optimizer([weight]).step()
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1 - 0.2 * 0.01))


@both
def test_lars_and_lamb_do_not_modify_the_gradient(optimizer: Any) -> None:
    """On a server it is lent, and a script may look at it after the step."""
    model = net()
    each = optimizer(model.parameters())
    for _ in range(3):
        gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        each.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lars_and_lamb_work_in_low_precision(optimizer: Any, dtype: torch.dtype) -> None:
    """They go where double precision goes, as near as they can; large layers do not overflow."""
    exact, short = net(), net(dtype)
    walk(exact, optimizer(exact.parameters(), weight_decay=0.0), 3)
    walk(short, optimizer(short.parameters(), weight_decay=0.0), 3)
    for one, two in zip(exact.parameters(), short.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach().double(), rtol=0.1, atol=0.05)
    large = nn.Parameter(torch.full((300, 300), 300.0, dtype=dtype))  # its norm is above what 16 bits hold
    large.grad = torch.full_like(large, 300.0)
    optimizer([large], lr=0.5).step()
    assert torch.isfinite(large).all() and bool((large < 300).all())
    small = nn.Parameter(torch.ones(20, 20, dtype=dtype))
    small.grad = torch.full_like(small, 1e-6)  # the ratio of the norms is above it too
    optimizer([small], lr=0.5, weight_decay=0.0).step()
    assert torch.isfinite(small).all() and bool((small < 1).all())


@both
def test_lars_and_lamb_resume_exactly_from_state_dict(optimizer: Any) -> None:
    model = net()
    first = optimizer(model.parameters())
    walk(model, first, 3)
    again = copy.deepcopy(model)
    second = optimizer(again.parameters(), lr=1e-9)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    walk(model, first, 3)
    walk(again, second, 3)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@both
def test_parameters_without_gradient_stay(optimizer: Any) -> None:
    model = net()
    each = optimizer(model.parameters())
    walk(model, each, 2)
    before = copy.deepcopy(model.state_dict())
    each.zero_grad()
    each.step()
    assert same(before, model.state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: pr.LARS(p, lr=-1), "LARS: lr is -1; it must be a finite number, 0 or more"),
        (
            lambda p: pr.LARS(p, lr=1, momentum=1),
            "momentum is 1; it must be a number of 0 or more, and below 1",
        ),
        (lambda p: pr.LARS(p, lr=1, trust=float("inf")), "trust is inf"),
        (lambda p: pr.LAMB(p, betas=(0.9, 1.0)), r"betas\[1\] is 1\.0"),
        (lambda p: pr.LAMB(p, eps=0), "eps is 0; it must be a finite number above 0"),
        (lambda p: pr.LAMB(p, betas=(0.9,)), r"betas is \(0\.9,\); it must be two numbers"),
        (lambda p: pr.LAMB(p, lr="0.1"), r"lr is '0\.1'; it must be a finite number"),
        (lambda p: pr.LARS([{"params": p, "lr": -0.5}], lr=1), r"LARS: lr is -0\.5"),
        (lambda p: pr.LAMB([{"params": p, "lr": -0.5}]), r"LAMB: lr is -0\.5"),
        (lambda p: pr.LAMB(p, weight_decay=-0.1), r"weight_decay is -0\.1"),
    ],
)
def test_lars_and_lamb_refuse_invalid_settings(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(net().parameters())


def test_layerwise_docstring_examples_pass() -> None:
    found = doctest.testmod(polyrhythm.optim.lars_lamb)
    assert found.attempted == 6 and found.failed == 0


# --- servers ----------------------------------------------------------------------------------------


def matrices() -> nn.Module:
    """Only layers, for Muon takes no vectors."""
    return nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()


WHOLE = {
    "lars": Script(optimizer=LARS, size=50, shuffle=True),
    "lamb": Script(optimizer=LAMB, size=50, shuffle=True),
    "lamb groups": Script(optimizer=LAMB, size=50, groups=True, schedule=True),
    "lars odd": Script(optimizer=LARS, model=odd, size=50),
    "lamb batchnorm": Script(optimizer=LAMB, model=normed, size=48),
    "muon": Script(optimizer=MUON, model=matrices, size=50),
    "adafactor": Script(optimizer=ADAFACTOR, size=50),
}
whole = pytest.mark.parametrize("script", WHOLE.values(), ids=WHOLE.keys())


@whole
@pytest.mark.parametrize("servers", [1, 2, "most"])
def test_sync_with_layerwise_optimizers_gives_the_bits_of_allreduce(
    simulate: Any, script: Script, servers: Any
) -> None:
    """However many servers share the model, they compute what each worker would: the same bits."""
    count = len([p for p in script.model().parameters() if p.requires_grad or script.model is odd])
    servers = count if servers == "most" else servers
    found = simulate(script, "sync", 3, servers)
    assert found["digest"] == simulate(script, "allreduce", 3)["digest"]


@pytest.mark.parametrize("make", [mlp, normed, odd, matrices])
def test_layerwise_optimizers_get_whole_tensors_on_each_server(make: Any) -> None:
    """Every server has whole tensors, and near its share: no more than one tensor above it."""
    for optimizer in (LARS, LAMB, ADAFACTOR):
        model = make()
        layout = Layout(model, optimizer(model.parameters()))
        ends = [0]
        for piece in layout.pieces:
            ends.append(ends[-1] + piece.shape.numel())
        for count in range(1, len(layout.pieces) + 1):
            ranges = layout.ranges(count)
            assert len(ranges) == count and ranges[0][0] == 0 and ranges[-1][1] == layout.total
            assert all(one[1] == two[0] for one, two in pairwise(ranges))
            assert all(start < stop and start in ends and stop in ends for start, stop in ranges)
            largest = max(piece.shape.numel() for piece in layout.pieces)
            assert max(stop - start for start, stop in ranges) <= layout.total / count + largest


def test_elementwise_optimizers_are_cut_anywhere() -> None:
    model = mlp()
    layout = Layout(model, torch.optim.Adam(model.parameters()))
    assert layout.ranges(7) == split(layout.total, 7)


@pytest.mark.parametrize("world", ["simulated", "real"])
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_more_servers_than_tensors_are_refused(world: str, strategy: str) -> None:
    """It says what is wrong and what would work, before the first step."""
    how = pr.simulate if world == "simulated" else pr.run
    message = r"5 servers: LARS may need whole tensors.*the model has 4; use at most that many.*allreduce"
    with pytest.raises(UsageError, match=message):
        how(Script(optimizer=LARS), workers=2, strategy=strategy, servers=5, threads=1, runs=None)


@pytest.mark.parametrize("optimizer", [LARS, LAMB, ADAFACTOR], ids=["lars", "lamb", "adafactor"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_state_of_servers_is_the_state_of_one_optimizer(optimizer: Any, count: int) -> None:
    """State of any shape comes back from the servers as it would be here."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return mlp()

    worker = model()
    replica = Replica(worker, optimizer(worker.parameters()))
    servers = [Shard(m := model(), optimizer(m.parameters()), index, count) for index in range(count)]
    for step in range(3):
        torch.manual_seed(step)
        worker(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
        replica.gradients.gather()
        for server in servers:
            server.apply(cut(replica.gradient, server.start, server.stop), (), replica.settings())
        replica.apply()
        worker.zero_grad()
    mine = copy.deepcopy(replica.optimizer.state_dict()["state"])
    replica.optimizer.state.clear()
    replica.restore([server.state() for server in servers])
    theirs = replica.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for index, entry in mine.items():
        assert entry.keys() == theirs[index].keys()
        for name, value in entry.items():
            assert value.shape == theirs[index][name].shape and torch.equal(value, theirs[index][name])


# --- strategies -------------------------------------------------------------------------------------


@each_value(
    ("optimizer", [pytest.param(each, id=str(each)) for each in OURS.values()]),
    ("world", ["simulated", "real"]),
    ("strategy, servers", [("allreduce", 0), ("local:4", 0), ("sync", 2), ("async", 3), ("easgd", 2)]),
)
def test_lars_and_lamb_train_under_every_kind_of_strategy(
    optimizer: Any, world: str, strategy: str, servers: int, tmp_path: Path
) -> None:
    """The loss falls under every kind of strategy, in both worlds."""
    how = pr.simulate if world == "simulated" else pr.run
    script = Script(optimizer=optimizer, size=50, epochs=6, shuffle=True, schedule=True)
    summary = how(script, workers=3, strategy=strategy, servers=servers, runs=tmp_path, threads=1)
    assert summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]


@both
@pytest.mark.parametrize("strategy", ["allreduce", "local:4"])
def test_lars_and_lamb_give_the_same_bits_simulated_and_real(optimizer: Any, strategy: str) -> None:
    script = Script(optimizer=optimizer, size=50, shuffle=True)
    found = [how(script, workers=3, strategy=strategy, threads=1, runs=None) for how in (pr.simulate, pr.run)]
    assert found[0]["digest"] == found[1]["digest"]


@both
@pytest.mark.parametrize("strategy", ["allreduce", "local:4", "sync", "async", "ssp"])
def test_lars_and_lamb_with_one_worker_are_plain_pytorch(
    simulate: Any, optimizer: Any, strategy: str
) -> None:
    """With groups, accumulation, clipping and a scheduler: bit for bit."""
    script = Script(optimizer=optimizer, size=22, groups=True, accumulate=2, clip=0.5, schedule=True)
    assert same(trained(simulate(script, strategy, 1)), alone(script))


@both
def test_allreduce_is_one_machine_with_the_union_batch(simulate: Any, optimizer: Any) -> None:
    union = alone(Script(optimizer=optimizer, size=50, batch=12))
    assert distance(trained(simulate(Script(optimizer=optimizer, size=50), "allreduce", 3)), union) < 1e-9
