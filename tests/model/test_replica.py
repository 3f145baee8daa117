"""Replica and Shard: flat vectors behind the model's back, and PyTorch none the wiser."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from polyrhythm.collectives.arithmetic import OPERATIONS, reduce
from polyrhythm.core.errors import NotFinite, UsageError
from polyrhythm.model.consensus import ConsensusModel
from polyrhythm.model.layout import Layout
from polyrhythm.model.packing import pack, unpack
from polyrhythm.model.replica import Replica
from polyrhythm.model.shard import Shard
from polyrhythm.model.vectors import BLOCK, copied, cut, split
from tests.support.programs import (
    ADAM,
    CLASSES,
    FEATURES,
    MOMENTUM,
    SGD,
    Examples,
    Half,
    Mixed,
    Script,
    mlp,
    normed,
    odd,
)

MODELS = [mlp, normed, odd, Mixed, Half]
every_model = pytest.mark.parametrize("make", MODELS, ids=["mlp", "normed", "odd", "mixed", "half"])


def pair(make: Callable[[], nn.Module], optimizer: Any = MOMENTUM) -> tuple[Replica, nn.Module, Any]:
    """A replica, and a plain model and optimizer equal to it."""
    model = make()
    plain = copy.deepcopy(model)
    return Replica(model, optimizer(model.parameters())), plain, optimizer(plain.parameters())


def backward(model: nn.Module, seed: int = 0) -> None:
    x, y = Examples(12 + seed).tensors
    nn.functional.cross_entropy(model(x), y).backward()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


# --- the flat vectors -------------------------------------------------------------------------------


@every_model
def test_parameters_are_views(make: Any) -> None:
    """What is written to the flat vector shows in the model and the other way round; values do not change."""
    replica, plain, _ = pair(make)
    assert equal(replica.model, plain)
    for vector in replica.parameters:
        vector.fill_(2.0)
    assert all((parameter == 2.0).all() for parameter in replica.model.parameters())
    with torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.fill_(3.0)
    assert all((vector == 3.0).all() for vector in replica.parameters)
    replica.model.load_state_dict(plain.state_dict())
    assert sum(vector.double().sum().item() for vector in replica.parameters) == pytest.approx(
        sum(parameter.double().sum().item() for parameter in plain.parameters())
    )


@every_model
def test_layout_pieces_tile_the_flat_vectors(make: Any) -> None:
    """The pieces tile the vectors: no gap, no overlap, a tied parameter once."""
    replica, _, _ = pair(make)
    for part, vector in enumerate(replica.parameters):
        pieces = [piece for piece in replica.layout.pieces if piece.part == part]
        ends = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == ends[:-1] and ends[-1] == vector.numel()
    assert replica.layout.total == sum(parameter.numel() for parameter in replica.model.parameters())


@every_model
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_a_replica_steps_like_plain_pytorch(make: Any, set_to_none: bool, optimizer: Any) -> None:
    """Gradients that zero_grad stole are found again, parameters without one are skipped: the same bits."""
    replica, plain, reference = pair(make, optimizer)
    for step in range(3):
        for model in (replica.model, plain):
            backward(model, step)
        assert replica.gradients.gather()
        for vector, view in zip(replica.layout.parameters, replica.gradients._views, strict=True):
            assert vector.grad is None or vector.grad.data_ptr() == view.data_ptr()
        replica.apply()
        reference.step()
        replica.optimizer.zero_grad(set_to_none=set_to_none)
        reference.zero_grad(set_to_none=set_to_none)
    assert equal(replica.model, plain)


def test_absent_gradients_are_zero_and_known() -> None:
    """A parameter that loses its gradient leaves none of the old one in the flat vector."""
    replica, _, _ = pair(mlp)
    backward(replica.model)
    replica.gradients.gather()
    assert replica.gradients.absent == [] and replica.gradients.present.tolist() == [1.0] * 4
    replica.optimizer.zero_grad()
    replica.model[2](torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    assert replica.gradients.gather() and replica.gradients.absent == [0, 1]
    start = replica.layout.pieces[2].start
    assert (replica.gradient[0][:start] == 0).all() and (replica.gradient[0][start:] != 0).all()
    replica.optimizer.zero_grad()
    assert not replica.gradients.gather() and (replica.gradient[0] == 0).all()


def test_replica_bind_shows_gradients_changed_by_other_workers() -> None:
    """After others have added to the gradient and to `present`, `.grad` shows what is there now."""
    replica, _, _ = pair(mlp)
    replica.model[2](torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    replica.gradients.gather()
    replica.gradient[0][:] = 5.0
    replica.gradients.present.copy_(torch.tensor([0.5, 0.5, 0.0, 1.0]))
    replica.gradients.bind()
    assert [parameter.grad is None for parameter in replica.model.parameters()] == [False, False, True, False]
    assert (replica.model[0].weight.grad == 5.0).all()


def test_sparse_gradients_become_dense() -> None:
    """A sparse embedding trains like plain PyTorch."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)).double()

    replica, plain, reference = pair(make, SGD)
    for _ in range(2):
        for model in (replica.model, plain):
            model(torch.tensor([1, 1, 4])).square().sum().backward()
        replica.gradients.gather()
        replica.apply()
        reference.step()
        replica.optimizer.zero_grad()
        reference.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.allclose(replica.model.state_dict()[name], value, rtol=1e-14, atol=1e-15)


def test_the_finite_check_tells_overflow_from_nan() -> None:
    """Large finite gradients pass, though their sum overflows; a NaN is told with worker and step."""
    replica, _, _ = pair(mlp)
    backward(replica.model)
    replica.gradients.gather()
    replica.gradient[0].fill_(1e308)
    replica.gradients.after_backward()
    replica.check_finite("worker 3")
    replica.gradient[0][7] = float("nan")
    replica.steps = 9
    replica.gradients.after_backward()
    with pytest.raises(NotFinite, match=r"worker 3: the gradient of 0\.weight at step 9"):
        replica.check_finite("worker 3")


@every_model
def test_replica_shown_model_is_an_independent_copy(make: Any) -> None:
    """It has the given parameters and the replica's buffers, frozen ones too, and is never trained."""
    replica, plain, _ = pair(make)
    for model in (replica.model, plain):
        backward(model)
    copies = ConsensusModel([replica.model], [replica])
    (shown,) = copies.copy(replica.parameters)
    assert equal(shown, plain) and shown.state_dict().keys() == plain.state_dict().keys()
    for vector in replica.parameters:
        vector.zero_()
    assert equal(shown, plain)
    (other,) = copies.copy(replica.parameters)
    assert equal(shown, plain) and not equal(other, plain)


def test_replica_shown_model_takes_memory_only_while_it_is_referenced() -> None:
    """One vector: a consensus written to `consensus_vectors` is not copied again. A state dict keeps it."""
    replica, plain, _ = pair(mlp)
    made: list[weakref.ref[Tensor]] = []

    def noted(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        vector = torch.empty(count, dtype=dtype, device=device)
        made.append(weakref.ref(vector.untyped_storage()))
        return vector

    replica._temporary = noted
    consensus = copied(replica.parameters, replica.consensus_vectors())
    copies = ConsensusModel([replica.model], [replica])
    (shown,) = copies.copy(consensus)
    assert equal(shown, plain) and len(made) == 1
    first, stop = consensus[0].data_ptr(), consensus[0].data_ptr() + consensus[0].nbytes
    assert all(first <= each.data_ptr() < stop for each in shown.parameters())
    kept = shown.state_dict()
    del shown, consensus
    gc.collect()
    replica.parameters[0].zero_()
    (again,) = copies.copy(replica.parameters)
    assert len(made) == 2 and all(
        torch.equal(kept[name], value) for name, value in plain.state_dict().items()
    )
    assert not any(value.any() for value in again.parameters())


@pytest.mark.parametrize("make", [mlp, odd, Mixed], ids=["mlp", "odd", "mixed"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_replica_scales_only_the_gradient_of_later_passes(make: Any, set_to_none: bool) -> None:
    """Factors hold for the passes after them; what was accumulated before keeps its own."""
    replica, plain, _ = pair(make)
    for round_ in range(2):
        law: dict[str, Any] = {}
        for step, factor in enumerate((1.0, 0.5, 2.25, 0.0, 1.0)):
            plain.zero_grad()
            backward(plain, step)
            for name, parameter in plain.named_parameters():
                if parameter.grad is not None:
                    law[name] = law.get(name, 0) + factor * parameter.grad.double()
            replica.gradients.scale(factor)
            replica.gradients.before_backward()
            backward(replica.model, step)
            replica.gradients.after_backward()
        for name, parameter in replica.model.named_parameters():
            if name in law:
                assert torch.allclose(parameter.grad.double(), law[name], rtol=1e-5, atol=1e-7), (
                    round_,
                    name,
                )
            else:
                assert parameter.grad is None or not parameter.grad.any()
        replica.optimizer.zero_grad(set_to_none=set_to_none)


def test_a_batch_with_factor_0_leaves_the_gradient_unchanged() -> None:
    """With factor 0 the gradient stays as it was, bit for bit, though the pass gave NaN."""
    replica, _, _ = pair(mlp)
    backward(replica.model)
    replica.gradients.after_backward()
    before = replica.gradient[0].clone()
    replica.gradients.scale(0.0)
    replica.gradients.before_backward()
    (replica.model(Examples(3).tensors[0]).sum() * float("nan")).backward()
    replica.gradients.after_backward()
    assert torch.equal(replica.gradient[0], before)
    replica.check_finite("worker 0")


def test_a_replica_knows_its_own_backward_passes() -> None:
    """Another model's pass does not touch it; one that reaches any of its parameters does."""
    replica, other, _ = pair(mlp)
    backward(other)
    assert not replica.gradients.touched
    replica.model[2](torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    assert replica.gradients.touched
    replica.gradients.after_backward()
    replica.gradients.before_backward()
    assert not replica.gradients.touched


# --- shards -----------------------------------------------------------------------------------------


def shards(make: Any, optimizer: Any, count: int, state: dict[str, Any] | None = None) -> list[Shard]:
    """The same model on `count` servers, each of which built it for itself."""
    made = []
    for index in range(count):
        torch.manual_seed(0)
        model = make()
        chosen = optimizer(model)
        if state is not None:
            chosen.load_state_dict(state)
        made.append(Shard(model, chosen, index, count))
    return made


def grouped(optimizer: Any) -> Callable[[nn.Module], Any]:
    return lambda model: optimizer(Script(groups=True).divided(model))


@pytest.mark.parametrize("make", [mlp, normed, odd, Mixed], ids=["mlp", "normed", "odd", "mixed"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_together_are_one_optimizer(make: Any, optimizer: Any, count: int) -> None:
    """Each range has its own hyper-parameters and skips what has no gradient; together they are plain."""
    torch.manual_seed(0)
    model = make()
    replica = Replica(model, grouped(optimizer)(model))
    servers = shards(make, grouped(optimizer), count)
    for step in range(3):
        backward(model, step)
        replica.gradients.gather()
        replica.optimizer.param_groups[0]["lr"] *= 0.5
        for server in servers:
            gradient = cut(replica.gradient, server.start, server.stop)
            server.apply(gradient, replica.gradients.absent, replica.settings())
        replica.apply()
        for server in servers:
            mine = cut(replica.parameters, server.start, server.stop)
            assert all(map(torch.equal, server.parameters, mine))
            assert server.version == step + 1
        replica.optimizer.zero_grad()
    assert sum(server.total for server in servers) == replica.layout.total


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_loaded_optimizer_state_is_sliced(optimizer: Any, count: int) -> None:
    """A run that goes on from a saved optimizer goes on exactly where that one was."""
    torch.manual_seed(0)
    model = mlp()
    chosen = optimizer(model.parameters())
    backward(model)
    chosen.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(chosen.state_dict())

    def resumed() -> nn.Module:
        again = mlp()
        again.load_state_dict(weights)
        return again

    servers = shards(resumed, lambda model: optimizer(model.parameters()), count, state)
    replica = Replica(model, chosen)
    replica.optimizer.zero_grad()
    backward(model, 1)
    replica.gradients.gather()
    for server in servers:
        server.apply(cut(replica.gradient, server.start, server.stop))
    replica.apply()
    for server in servers:
        assert all(map(torch.equal, server.parameters, cut(replica.parameters, server.start, server.stop)))


@pytest.mark.parametrize("make", [mlp, odd, Mixed], ids=["mlp", "odd", "mixed"])
@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_state_of_shards_is_the_state_of_one_optimizer(make: Any, optimizer: Any, count: int) -> None:
    """Put together from slices, the optimizer's state has the bits, names and shapes of plain PyTorch."""
    torch.manual_seed(0)
    model = make()
    replica = Replica(model, optimizer(model.parameters()))
    servers = shards(make, lambda model: optimizer(model.parameters()), count)
    for step in range(3):
        backward(model, step)
        replica.gradients.gather()
        for server in servers:
            server.apply(cut(replica.gradient, server.start, server.stop), replica.gradients.absent)
        replica.apply()
        replica.optimizer.zero_grad()
    law = copy.deepcopy(replica.optimizer.state_dict()["state"])
    replica.optimizer.state.clear()
    replica.restore([server.state() for server in servers])
    found = replica.optimizer.state_dict()["state"]
    for index, entry in law.items():
        assert found[index].keys() == entry.keys()
        for name, value in entry.items():
            same = (
                torch.equal(found[index][name], value)
                if isinstance(value, Tensor)
                else found[index][name] == value
            )
            assert same, (index, name)
    assert all(not entry for index, entry in found.items() if index not in law)


def test_buffers_of_a_replica_are_new_and_zero() -> None:
    """A buffer is zero and as long as the parameters, and no two share memory."""
    replica, _, _ = pair(Mixed)
    first, second = replica.buffer(), replica.buffer()
    assert sizes(first) == sizes(replica.parameters)
    first[0].fill_(1.0)
    assert all((part == 0).all() for part in second)


@pytest.mark.parametrize("make", [Mixed, Half], ids=["mixed", "half"])
def test_zeros_of_a_shard_are_like_its_range(make: Any) -> None:
    """New vectors each time, with the dtypes of the range, or in at least 32 bits."""
    for server in shards(make, lambda model: SGD(model.parameters()), 3):
        first, second = server.zeros(), server.zeros()
        assert sizes(first) == sizes(server.parameters)
        assert all((part == 0).all() for part in first)
        assert not any(one is other for one, other in zip(first, second, strict=True))
        exact = server.zeros(exact=True)
        assert all(part.element_size() >= 4 for part in exact)
        assert [part.numel() for part in exact] == [part.numel() for part in server.parameters]


def sizes(vectors: Any) -> list[tuple[int, torch.dtype]]:
    return [(part.numel(), part.dtype) for part in vectors]


@pytest.mark.parametrize("make", [mlp, odd, Mixed], ids=["mlp", "odd", "mixed"])
@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_saved_shards_continue_with_the_same_bits(make: Any, optimizer: Any, count: int) -> None:
    """Saved after any step, packed for the wire and loaded into servers that have gone another way."""
    chosen = lambda model: optimizer(model.parameters())  # noqa: E731
    torch.manual_seed(0)
    model = make()
    replica = Replica(model, chosen(model))
    servers, others = shards(make, chosen, count), shards(make, chosen, count)
    for step in range(6):
        backward(model, step)
        replica.gradients.gather()
        absent = replica.gradients.absent if step != 3 else [0, *replica.gradients.absent]
        for number in range(count):
            if step == 2:
                others[number].load_state_dict(unpack(pack(servers[number].state_dict())))
            for server in (servers[number], others[number]):
                gradient = cut(replica.gradient, server.start, server.stop)
                server.apply(gradient, absent if step > 1 or server is servers[number] else [])
        replica.optimizer.zero_grad()
    for one, other in zip(servers, others, strict=True):
        assert one.version == other.version == 6
        assert all(map(torch.equal, one.parameters, other.parameters))
        (slices, held), (same, alike) = one.state(), other.state()
        assert slices == same and all(map(torch.equal, held, alike))


# --- what cannot work -------------------------------------------------------------------------------


def test_lbfgs_is_refused() -> None:
    """An optimizer that evaluates the loss several times per step leaves no place for most strategies."""
    model = mlp()
    with pytest.raises(UsageError, match="LBFGS calls a closure several times per step"):
        Replica(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("server", [False, True])
def test_sparse_adam_is_refused(server: bool) -> None:
    """It takes only sparse gradients, and here they become dense."""
    model = nn.Embedding(6, 3, sparse=True)
    with pytest.raises(UsageError, match=r"SparseAdam needs sparse gradients.*use Adam or SGD"):
        optimizer = torch.optim.SparseAdam(model.parameters())
        Shard(model, optimizer, 0, 1) if server else Replica(model, optimizer)


def test_nothing_to_train_is_refused() -> None:
    """A model without numbers in its parameters cannot be trained."""
    with pytest.raises(UsageError, match="no parameters to train"):
        Layout(nn.Module(), SGD([nn.Parameter(torch.empty(0))]))


def test_a_shard_refuses_more_servers_than_parameters() -> None:
    """Each server must have something to serve."""
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="3 servers for 2 parameters"):
        Shard(model, SGD(model.parameters()), 0, 3)


def test_layouts_tell_models_apart() -> None:
    """Names, shapes, groups and dtypes are in the hash; values are not."""

    def hashed(model: nn.Module, groups: bool = False) -> str:
        return Layout(model, SGD(Script(groups=groups).divided(model))).hash

    assert hashed(mlp()) == hashed(mlp())
    others = [
        hashed(mlp(), groups=True),
        hashed(mlp().float()),
        hashed(nn.Linear(FEATURES, CLASSES)),
        hashed(odd()),
    ]
    assert len({hashed(mlp()), *others}) == 5


# --- arithmetic -------------------------------------------------------------------------------------


@given(some.integers(0, 1000), some.integers(1, 50))
def test_split_is_fair(count: int, parts: int) -> None:
    """Ranges are consecutive, cover everything, and differ by one at most, the longer ones first."""
    ranges = split(count, parts)
    sizes = [stop - start for start, stop in ranges]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert sum(sizes) == count and len(ranges) == parts
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(some.lists(some.integers(0, 9), min_size=1, max_size=5), some.integers(1, 7))
def test_cuts_are_views_of_the_whole(lengths: list[int], parts: int) -> None:
    """Cutting vectors at a split and laying the pieces end to end gives the vectors back, as views."""
    numbers = torch.arange(sum(lengths), dtype=torch.float64)
    vectors = numbers.split(lengths)
    pieces = [cut(vectors, *range_) for range_ in split(sum(lengths), parts)]
    assert all(len(piece) == len(lengths) for piece in pieces)
    for index, vector in enumerate(vectors):
        assert torch.equal(torch.cat([piece[index] for piece in pieces]), vector)
    for piece in pieces:
        for part in piece:
            part.add_(1)
    assert torch.equal(numbers, torch.arange(1.0, sum(lengths) + 1, dtype=torch.float64))


numbers = partial(some.integers, 0, 2**32 - 1)
kinds = some.sampled_from([torch.float64, torch.float32, torch.bfloat16])
some_workers = some.integers(1, 6)


def draws(seed: int, workers: int, count: int, kind: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator, dtype=torch.float64).to(kind) for _ in range(workers)]


@given(
    numbers(), some_workers, some.sampled_from(OPERATIONS), kinds, some.integers(1, 200), some.integers(1, 9)
)
def test_reducing_in_slices_is_reducing_whole(
    seed: int, workers: int, op: str, kind: torch.dtype, count: int, parts: int
) -> None:
    """The bits do not depend on which worker reduces which slice."""
    inputs = draws(seed, workers, count, kind)
    whole, sliced = torch.empty(count, dtype=kind), torch.empty(count, dtype=kind)
    reduce(inputs, op, [whole])
    for start, stop in split(count, parts):
        reduce([each[start:stop] for each in inputs], op, [sliced[start:stop]])
    assert torch.equal(whole, sliced)


@given(numbers(), some_workers, some.integers(1, 30))
def test_reduce_mean_is_the_sum_divided_by_the_count(seed: int, workers: int, count: int) -> None:
    """The sum by the number of inputs, on every output, also in place."""
    inputs = draws(seed, workers, count)
    law = sum(inputs) / workers
    reduce(inputs, "mean", inputs)
    for each in inputs:
        assert torch.allclose(each, law, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_the_mean_of_short_floats_is_rounded_once(kind: torch.dtype) -> None:
    """Added up in 32 bits, in which five of the largest fit: digits are lost in the result only."""
    inputs = [
        each.where(each.abs() > 0.01, torch.finfo(torch.float16).max) for each in draws(2, 5, BLOCK + 5)
    ]
    short = [each.to(kind) for each in inputs]
    found = torch.empty_like(short[0])
    reduce(short, "mean", [found])
    assert torch.equal(found, (sum(each.float() for each in short) / 5).to(kind))
    assert bool(found.isfinite().all())


def test_reduction_is_in_rank_order() -> None:
    """(a + b) + c, beyond one block too; one input is itself; max and min are max and min."""
    inputs = draws(1, 3, BLOCK + 5, torch.float32)
    found = torch.empty_like(inputs[0])
    reduce(inputs, "sum", [found])
    assert torch.equal(found, (inputs[0] + inputs[1]) + inputs[2])
    reduce(inputs, "mean", [found])
    assert torch.equal(found, ((inputs[0] + inputs[1]) + inputs[2]) / 3)
    reduce(inputs[:1], "mean", [found])
    assert torch.equal(found, inputs[0])
    for op, law in (("max", torch.amax), ("min", torch.amin)):
        reduce(inputs, op, [found])
        assert torch.equal(found, law(torch.stack(inputs), 0))
    with pytest.raises(ValueError, match="sum, mean, max, min"):
        reduce(inputs, "median", [found])
