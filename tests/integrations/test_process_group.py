"""torch.distributed on the transports of a run: real workers, started as `polyrhythm run` starts them."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError
from polyrhythm.integrations.process_group import install
from polyrhythm.integrations.process_group.lane import Lane
from polyrhythm.launch.console import Console
from polyrhythm.record.result import RunResult
from polyrhythm.session.context import session

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OTHERS = (torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn)  # cannot be reduced
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SIZES = ((), (0,), (1,), (3, 5), (70_001,))
TRANSPORTS = {"shared memory": {}, "TCP": {"listen": "tcp:127.0.0.1:0"}}
OPS = {
    dist.ReduceOp.SUM: sum,
    dist.ReduceOp.AVG: lambda values: sum(each.double() for each in values) / len(values),
    dist.ReduceOp.MIN: lambda values: torch.stack(values).amin(0),
    dist.ReduceOp.MAX: lambda values: torch.stack(values).amax(0),
    dist.ReduceOp.PRODUCT: lambda values: torch.stack(values).double().prod(0),
}


def run(program: Callable[[], Any], workers: int = 2, **options: Any) -> RunResult:
    """Runs a program that calls `install`; its assertions are those of the test."""

    def installed() -> None:
        install(pr.init())
        program()

    return pr.run(installed, workers=workers, threads=1, **{"runs": None, "timeout": 60, **options})


def drawn(*seeds: int, shape: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers that every worker can compute. Small ones, so that no sum or product is rounded."""
    generator = torch.Generator().manual_seed(sum(31**at * seed for at, seed in enumerate(seeds, 1)))
    values = torch.randint(0, 4, shape, generator=generator)
    if dtype in (torch.uint16, torch.float8_e4m3fn):
        return values.to(torch.float32).to(dtype)
    return values.to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers in memory with gaps."""
    if tensor.dim() == 0:
        return tensor
    gaps = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)
    gaps[..., 0] = tensor
    return gaps[..., 0]


Case = tuple[int, torch.dtype, tuple[int, ...], Callable[[Tensor], Tensor]]


def cases(dtypes: tuple[torch.dtype, ...], sizes: int) -> Iterator[Case]:
    """Each dtype with some sizes in turn, contiguous or not."""
    shapes = itertools.cycle(itertools.product(SIZES, (lambda each: each, strided)))
    for number, dtype in enumerate(dtypes):
        for _ in range(sizes):
            yield number, dtype, *next(shapes)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    wide = torch.complex128 if found.is_complex() else torch.float64  # torch cannot compare all dtypes
    assert torch.equal(found.to(wide), expected.to(wide))


# --- collectives ------------------------------------------------------------------------------------


def reductions(sizes: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for seed, dtype, shape, layout in cases(DTYPES, sizes):
        for op, law in OPS.items():
            if op == dist.ReduceOp.AVG and dtype not in FLOATS:
                continue
            factor = 6 if op == dist.ReduceOp.AVG else 1  # no quotient is rounded
            values = [(factor * drawn(seed, each, shape=shape)).to(dtype) for each in range(n)]
            expected = law(values).to(dtype)
            tensor = layout(values[rank].clone())
            dist.all_reduce(tensor, op)
            same(tensor, expected)
            root = seed % n
            tensor = layout(values[rank].clone())
            dist.reduce(tensor, root, op)
            same(tensor, expected if rank == root else values[rank])
            # A part of each worker for each worker.
            parts = [
                [(factor * drawn(seed, a, b, shape=shape)).to(dtype) for b in range(n)] for a in range(n)
            ]
            expected = law([parts[each][rank] for each in range(n)]).to(dtype)
            output = layout(torch.empty(shape, dtype=dtype))
            dist.reduce_scatter(output, [layout(each) for each in parts[rank]], op)
            same(output, expected)
            output = layout(torch.empty(shape, dtype=dtype))
            dist.reduce_scatter_single(output, layout(torch.stack(parts[rank])), op)
            same(output, expected)


def uneven() -> None:
    """Lists whose tensors differ in size from rank to rank, or from place to place."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        outputs = [torch.empty(each, 2, dtype=dtype) for each in range(n)]
        dist.all_gather(outputs, drawn(rank, shape=(rank, 2), dtype=dtype))
        for each, output in enumerate(outputs):
            same(output, drawn(each, shape=(each, 2), dtype=dtype))
        # From a to b: a + 2 b rows.
        inputs = [drawn(rank, to, shape=(rank + 2 * to, 3), dtype=dtype) for to in range(n)]
        outputs = [torch.empty(each + 2 * rank, 3, dtype=dtype) for each in range(n)]
        dist.all_to_all(outputs, inputs)
        whole = torch.empty(sum(len(each) for each in outputs), 3, dtype=dtype)
        dist.all_to_all_single(whole, torch.cat(inputs), [*map(len, outputs)], [*map(len, inputs)])
        for each, output in enumerate(outputs):
            same(output, drawn(each, rank, shape=(each + 2 * rank, 3), dtype=dtype))
        same(whole, torch.cat(outputs))
    parts = [drawn(rank, each, shape=(each,)) for each in range(n)]
    output = torch.empty(rank)
    dist.reduce_scatter(output, [each.float() for each in parts])
    same(output, sum(drawn(each, rank, shape=(rank,)).float() for each in range(n)))


def moves(sizes: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for seed, dtype, shape, layout in cases((*DTYPES, *OTHERS), sizes):
        values = [drawn(seed, each, shape=shape, dtype=dtype) for each in range(n)]
        root = seed % n

        def empty(shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype, layout: Any = layout) -> Tensor:
            return layout(torch.empty(shape, dtype=dtype))

        tensor = layout(values[rank].clone())
        dist.broadcast(tensor, root)
        same(tensor, values[root])
        outputs = [empty() for _ in range(n)]
        dist.all_gather(outputs, layout(values[rank]))
        for output, expected in zip(outputs, values, strict=True):
            same(output, expected)
        output = empty((n, *shape))
        dist.all_gather_single(output, layout(values[rank]))
        same(output, torch.stack(values))
        outputs = [empty() for _ in range(n)] if rank == root else []
        dist.gather(layout(values[rank]), outputs or None, root)
        for output, expected in zip(outputs, values, strict=rank == root):
            same(output, expected)
        output = empty()
        dist.scatter(output, [layout(each) for each in values] if rank == root else None, root)
        same(output, values[rank])
        output = empty((n, *shape))
        dist.all_to_all_single(output, layout(torch.stack([values[rank]] * n)))
        same(output, torch.stack(values))
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": each, "text": "x" * each} for each in range(n)]


def coalesced() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensors = [drawn(rank, number, shape=(number,)) for number in range(30)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        same(tensor, sum(drawn(each, number, shape=(number,)) for each in range(n)))
    from torch.distributed.distributed_c10d import _coalescing_manager

    ones, outputs = [torch.ones(2), torch.ones(3)], [torch.empty(2 * n), torch.empty(3 * n)]
    with _coalescing_manager():
        for tensor in ones:
            dist.all_reduce(tensor)
    assert [each.tolist() for each in ones] == [[float(n)] * 2, [float(n)] * 3]
    with _coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(outputs, ones, strict=True):
            dist.all_gather_single(output, tensor)
    manager.wait()
    assert [each.tolist() for each in outputs] == [[float(n)] * 2 * n, [float(n)] * 3 * n]


def futures() -> None:
    """Works tell when they are done, and futures have the tensors."""
    n = dist.get_world_size()
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.get_future().wait() == [tensor] and tensor[0] == n
    assert work.is_completed() and work.is_success() and work.exception() is None
    then = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0].sum().item())
    assert then.wait() == 1000 * n * n
    work = dist.barrier(async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    dist.barrier(timeout=timedelta(seconds=30))
    import torch.distributed._functional_collectives as functional

    added = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert added.tolist() == [float(n)] * 3
    whole = functional.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
    part = functional.reduce_scatter_tensor(whole + 0, "sum", 0, dist.group.WORLD)
    assert whole.tolist() == [1.0] * 2 * n and part.tolist() == [float(n)] * 2


def messages(sizes: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    for seed, dtype, shape, layout in cases((*DTYPES, *OTHERS), sizes):
        tensor = layout(torch.empty(shape, dtype=dtype))
        pair = [
            dist.P2POp(dist.irecv, tensor, left),
            dist.P2POp(dist.isend, layout(drawn(seed, rank, shape=shape, dtype=dtype)), right),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        same(tensor, drawn(seed, left, shape=shape, dtype=dtype))
    # Tags tell messages apart; those of one tag keep their order. All are larger than what is sent inline.
    sends = [
        dist.isend(torch.full((5000,), float(10 * tag + at)), right, tag=tag)
        for at in (0, 1)
        for tag in (0, 1)
    ]
    found = {(tag, at): torch.empty(5000) for tag in (1, 0) for at in (0, 1)}
    receives = {key: dist.irecv(tensor, left, tag=key[0]) for key, tensor in found.items()}
    for key in reversed(list(receives)):
        receives[key].wait()
        assert found[key].unique().tolist() == [float(10 * key[0] + key[1])]
    for work in sends:
        work.wait()
    # From any worker, and the rank that it was.
    if rank == 0:
        seen = set()
        for _ in range(n - 1):
            tensor = torch.empty(2)
            sender = dist.recv(tensor)
            assert tensor.tolist() == [float(sender)] * 2
            seen.add(sender)
        assert seen == set(range(1, n))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    # More messages than a connection holds, before the first is received, and a collective in between.
    sends = [dist.isend(torch.tensor([each]), right, tag=7) for each in range(200)]
    dist.barrier()
    for each in range(200):
        tensor = torch.empty(1, dtype=torch.int64)
        dist.recv(tensor, left, tag=7)
        assert tensor.item() == each
    # To itself.
    receive = dist.irecv(tensor, rank)
    dist.isend(torch.tensor([rank + 40]), rank).wait()
    receive.wait()
    assert tensor.item() == rank + 40
    # Large and small ones, more than there are slots, that are received only when the senders are elsewhere.
    sends = [dist.isend(torch.full((4000 * (each % 9),), each), right, tag=8) for each in range(150)]
    if rank % 2:
        dist.barrier()
    for each in range(150):
        values = torch.empty(4000 * (each % 9), dtype=torch.int64)
        dist.recv(values, left, tag=8)
        assert (values == each).all()
    if not rank % 2:
        dist.barrier()
    assert sends[0].get_future().wait()[0].numel() == 0
    for work in sends:
        work.wait()


def posted_receives() -> None:
    """A receive that has begun completes while its worker waits for something else."""
    rank, n = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % n if n == 2 else (1 - rank if rank < 2 else None)
    if other is not None:
        tensor = torch.empty(100_000)
        if rank == 0:
            dist.isend(torch.ones(100_000), other).wait()
            dist.recv(tensor, other)
        else:
            receive = dist.irecv(tensor, other)
            dist.isend(torch.ones(100_000), other).wait()  # rank 0 receives it after its own send is over
            receive.wait()
        assert tensor.sum() == 100_000
    dist.barrier()


def groups() -> None:
    """Some workers are a group, in any order, and several groups of the same workers are independent."""
    rank, n = dist.get_rank(), dist.get_world_size()
    one, other = dist.new_group([1, 0]), dist.new_group([0, 1])
    last = dist.new_group([n - 1])
    if rank < 2:
        first, second = (one, other) if rank else (other, one)
        a, b = torch.full((3,), rank + 1.0), torch.full((4,), rank + 10.0)
        works = [
            dist.all_reduce(a if each is one else b, group=each, async_op=True) for each in (first, second)
        ]
        for work in works:
            work.wait()
        assert a.tolist() == [3.0] * 3 and b.tolist() == [21.0] * 4
        outputs = [torch.empty(1) for _ in range(2)]
        dist.all_gather(outputs, torch.tensor([float(rank)]), group=one)
        assert [dist.get_global_rank(one, each) for each in range(2)] == [
            int(each.item()) for each in outputs
        ]
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, 1, group=one)
        assert tensor.item() == 1
        pair = [
            dist.P2POp(dist.isend, torch.tensor([rank]), 1 - rank, one, 3),
            dist.P2POp(dist.irecv, tensor, 1 - rank, one, 3),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        assert tensor.item() == 1 - rank
        dist.destroy_process_group(one)
    if rank == n - 1:
        tensor = torch.tensor([5.0])
        for _ in range(3):
            dist.all_reduce(tensor, group=last)
        assert tensor.item() == 5.0 and last.size() == 1
    assert dist.get_backend() == "polyrhythm"
    dist.destroy_process_group()
    install(session.get())
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.item() == n - 1
    dist.barrier()


def every_collective(sizes: int) -> None:
    for laws in (reductions, moves, messages):
        laws(sizes)
    for law in (uneven, coalesced, futures, posted_receives, groups):
        law()


def test_each_collective_is_its_definition() -> None:
    """On two workers in shared memory, for each dtype, and for tensors of any size and stride."""
    result = run(partial(every_collective, sizes=1))
    assert (
        result["strategy"] == "torch.distributed" and result["ended"] == "finished" and result.bytes_sent > 0
    )
    with pytest.raises(UsageError, match="left no model"):
        result.model_state()


class Inviting(Console):
    """Writes the address at which other hosts join to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.StringIO(), quiet=True)
        self._path = path

    def line(self, text: str) -> None:
        if found := re.search(r"join\('(\S+)'", text):
            self._path.write_text(found[1])


def join_soon(address: Path, key: Path, program: Callable[[], Any]) -> None:
    while not (address.exists() and address.read_text()):
        time.sleep(0.02)
    pr.join(address.read_text(), program, workers=2, key=key)


@pytest.mark.slow
def test_each_collective_is_its_definition_on_two_hosts(tmp_path: Path) -> None:
    """Two workers on each: they share memory inside a host, and use TCP between hosts."""

    def program() -> None:
        install(pr.init())
        every_collective(2)
        ddp()

    address, key = tmp_path / "address", tmp_path / "key"
    other = multiprocessing.get_context("fork").Process(target=join_soon, args=(address, key, program))
    other.start()
    try:
        options = {"here": 2, "listen": "tcp:127.0.0.1:0", "key": key, "console": Inviting(address)}
        pr.run(program, workers=4, threads=1, runs=None, timeout=60, **options)
        other.join(30)
        assert other.exitcode == 0
    finally:
        other.kill()
        other.join()
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_collective_is_its_definition_on_three_workers(transport: str) -> None:
    run(partial(every_collective, sizes=3), workers=3, **TRANSPORTS[transport])


# --- what torch builds on them ----------------------------------------------------------------------

BATCH, FEATURES, WIDTH, STEPS = 12, 6, 12, 4  # divisible by two and three


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Mlp(), Mlp(), nn.Linear(FEATURES, 2)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    return drawn(step, 1, shape=(BATCH, FEATURES)), drawn(step, 2, shape=(BATCH, 2))


def trained(model: nn.Module, part: Callable[[Tensor], Tensor] = lambda each: each) -> nn.Module:
    """Adam, on a part of each batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = map(part, batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def mine(each: Tensor) -> Tensor:
    """This worker's part of a batch."""
    return each.chunk(dist.get_world_size())[dist.get_rank()]


def close(found: nn.Module | dict[str, Tensor], alone: nn.Module) -> None:
    state = found.state_dict() if isinstance(found, nn.Module) else found
    assert state.keys() == alone.state_dict().keys()
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-12)


def ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    for options in ({}, {"bucket_cap_mb": 1e-4}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        model = DistributedDataParallel(network(), **options)
        trained(model, mine)
        close(model.module, trained(network()))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    held = torch.tensor(sum(_local(each).numel() for each in model.parameters()))
    dist.all_reduce(held)
    assert held.item() == sum(each.numel() for each in network().parameters())
    trained(model, mine)
    close({name: each.full_tensor() for name, each in model.state_dict().items()}, trained(network()))


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for layer in (model[0], model[1]):
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    trained(model)
    whole = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in model.state_dict().items()
    }
    close(whole, trained(network()))


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, n = dist.get_rank(), dist.get_world_size()
    for schedule_of in (ScheduleGPipe, Schedule1F1B):
        layers = list(network())
        parts = [[layers[0]], layers[1:]] if n == 2 else [[each] for each in layers]
        module = nn.Sequential(*parts[rank])
        stage = PipelineStage(module, rank, n, torch.device("cpu"))
        schedule = schedule_of(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == n - 1 else {}))
            optimizer.step()
        alone = list(trained(network()))
        close(
            module, nn.Sequential(*([[alone[0]], alone[1:]] if n == 2 else [[each] for each in alone])[rank])
        )


def checkpoint(folder: Path) -> None:
    """What FSDP2 has saved by DCP, whole models and other splits load again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(network())
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    model, optimizer = sharded()
    for step in range(STEPS):
        x, y = map(mine, batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    state, states = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": states}, checkpoint_id=folder / "saved")
    again, other = sharded()
    state, states = get_state_dict(again, other)
    dcp.load({"model": state, "optimizer": states}, checkpoint_id=folder / "saved")
    set_state_dict(again, other, model_state_dict=state, optim_state_dict=states)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(_local(one), _local(two))
        for name in ("exp_avg", "exp_avg_sq", "step"):
            moments = [each[name] for each in (optimizer.state[one], other.state[two])]
            assert torch.equal(*map(_local, moments))
    plain = network()
    whole = {"model": plain.state_dict()}
    dcp.load(whole, checkpoint_id=folder / "saved")
    close(whole["model"], trained(network()))
    saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "beside")
    saving.result()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "transport"), [(2, "shared memory"), (3, "TCP")])
def test_models_split_by_torch_train_like_whole_ones(workers: int, transport: str, tmp_path: Path) -> None:
    """DDP, FSDP2, tensor parallel and pipelines: the parameters of one process, within 1e-12."""

    def program() -> None:
        for law in (ddp, fsdp, tensor_parallel, pipeline, partial(checkpoint, tmp_path)):
            law()

    result = run(program, workers, **TRANSPORTS[transport])
    assert result["steps"] > 0


# --- wrong uses and failures ------------------------------------------------------------------------


def killed(how: Callable[[], Any]) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    how()


def endless_steps() -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(network())
    while True:
        trained(model, mine)


def receive_from_the_dead() -> None:
    dist.recv(torch.empty(1), 1)


def send_to_the_dead() -> None:
    dist.send(torch.ones(1 << 16), 1)


def wait_for_the_dead() -> None:
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()


WAITS = (dist.barrier, wait_for_the_dead, receive_from_the_dead, send_to_the_dead, endless_steps)
LOST = "worker 1 was killed.*no worker can continue without it under torch.distributed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "transport"),
    [*((how, "shared memory") for how in WAITS), (dist.barrier, "TCP"), (receive_from_the_dead, "TCP")],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_killed_worker_ends_the_run_with_its_name(how: Callable[[], Any], transport: str) -> None:
    with pytest.raises(PolyrhythmError, match=LOST):
        run(partial(killed, how), 3, **TRANSPORTS[transport])


def never_received() -> None:
    """More than there are slots, in both directions: nobody waits for that at the end."""
    for _ in range(100):
        dist.isend(torch.ones(3), 1 - dist.get_rank())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared memory", "TCP"])
def test_what_is_never_received_does_not_keep_a_run_from_ending(transport: str) -> None:
    assert run(never_received, **TRANSPORTS[transport])["ended"] == "finished"


def ends_early() -> None:
    """Worker 0 leaves, and the other waits for it."""
    if dist.get_rank():
        dist.all_reduce(torch.ones(3))


def different_collectives() -> None:
    if dist.get_rank():
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_gather_single(torch.ones(6), torch.ones(3))


def different_sizes() -> None:
    dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2 + dist.get_rank()))


def different_messages() -> None:
    if dist.get_rank():
        dist.send(torch.ones(3), 0)
    else:
        dist.recv(torch.ones(4), 1)


def never_sent() -> None:
    if not dist.get_rank():
        dist.irecv(torch.ones(4), 1).wait(timedelta(seconds=0.2))
    dist.barrier()


def never_called() -> None:
    if not dist.get_rank():
        dist.all_reduce(torch.ones(4), async_op=True).wait(timedelta(seconds=0.2))
    time.sleep(60)


MISTAKES = {
    ends_early: "worker 1 waited .* for worker 0 in a collective; it has finished",
    different_collectives: "is in (broadcast|all-gather) but .* all workers must call the same collectives",
    different_sizes: "worker . sent . elements of torch.float32 in all_gather, but worker . has 2 elements",
    different_messages: "worker 1 sent 3 elements of torch.float32 in a send, but worker 0 has 4 elements",
    never_sent: "worker 0 waited 0.. s for worker 1 in a receive",
    never_called: "waited 0.20 s in all_reduce",
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__)
def test_a_wrong_use_is_answered(mistake: Callable[[], None]) -> None:
    with pytest.raises(PolyrhythmError, match=MISTAKES[mistake]):
        run(mistake)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared memory", "TCP"])
def test_no_wait_is_longer_than_the_timeout_of_the_run(transport: str) -> None:
    def program() -> None:
        if dist.get_rank():
            time.sleep(60)
        dist.barrier()

    with pytest.raises(PolyrhythmError, match=r"worker 0 waited .* for .*worker 1"):
        run(program, timeout=2, **TRANSPORTS[transport])


@pytest.fixture
def alone() -> Iterator[pr.Session]:
    """The session of a single process, whose process group has one member."""
    session = pr.Session()
    install(session)
    yield session
    dist.destroy_process_group()


def test_a_single_process_is_a_group_of_one(alone: pr.Session) -> None:
    """So a script runs alone, too."""
    for law in (reductions, moves):
        law(1)
    for other in (uneven, coalesced, futures, ddp):
        other()
    tensor = torch.empty(2)
    work = dist.irecv(tensor, 0)
    assert not work.is_completed()
    dist.isend(torch.ones(2), 0).wait()
    assert work.wait() and tensor.tolist() == [1.0, 1.0]
    assert dist.get_world_size() == 1


WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.BXOR),
        "cannot reduce by BXOR; use SUM, AVG, MIN, MAX or PRODUCT",
    ),
    (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG),
        "the mean of torch.int32 is not torch.int32: use ReduceOp.SUM, or floats",
    ),
    (
        lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e5m2)),
        "cannot reduce torch.float8_e5m2 by sum; convert it first",
    ),
    (
        lambda: dist.all_reduce(torch.eye(3).to_sparse()),
        r"cannot move a tensor of layout torch.sparse_coo; use to_dense\(\)",
    ),
    (
        lambda: dist.all_gather_single(torch.ones(4), torch.ones(3)),
        "all_gather of 3 elements from 1 workers into 4: the output must have 3",
    ),
    (lambda: install(pr.Session()), "has a process group already"),
]


@pytest.mark.parametrize(("use", "answer"), WRONG, ids=lambda each: each if isinstance(each, str) else "")
def test_what_cannot_work_is_refused_at_once(alone: pr.Session, use: Callable[[], Any], answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        use()


def test_simulations_refuse_process_groups() -> None:
    with pytest.raises(UsageError, match="needs real processes: use polyrhythm run instead of"):
        pr.simulate(lambda: install(pr.init()), workers=2)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"strategy": "async"}, "torch.distributed has no servers, but async starts some"),
        ({"strategy": "local:8"}, "--strategy local:8 has no effect: the script trains by torch.distributed"),
        ({"balance": True}, "--balance has no effect"),
        ({"batch_norm": "mean"}, "--batch-norm mean has no effect"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_options_that_need_prepare_are_refused(options: dict[str, Any], answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        run(lambda: trained(network()), **options)


def test_a_script_may_prepare_and_use_the_process_group(tmp_path: Path) -> None:
    """Then the strategy trains, and the run has a result. Without it the steps of optimizers are counted."""

    def both() -> None:
        session = pr.init("local:2")
        install(session)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        total = torch.ones(1)
        dist.all_reduce(total)
        session.log(total=total.item())

    result = pr.run(both, workers=2, threads=1, runs=tmp_path)
    assert result["strategy"] == "local:2" and result.metrics[-1]["total"] == 2.0
    assert result.samples == 8 and set(result.model_state()) == {"weight", "bias"}

    def only() -> None:
        session = pr.init()
        install(session)
        trained(network())
        session.log(loss=1.0)
        session.save({"step": STEPS}, tmp_path / "saved.pt")

    result = pr.run(only, workers=2, threads=1, runs=tmp_path)
    assert result["strategy"] == "torch.distributed" and result["steps"] == 2 * STEPS
    assert result.metrics[-1]["step"] == STEPS and (tmp_path / "saved.pt").exists()
    assert not list(result.folder.glob("*.safetensors"))


def test_a_work_that_fails_raises_wherever_it_is_waited_for() -> None:
    """Also in a future, and in one that follows it; and all later works of its lane fail with it."""
    lane = Lane("test")

    def fails() -> None:
        raise PeerLost("worker 1 is gone")

    work, later = lane.begin("a test", fails, []), lane.begin("a test", lambda: None, [])
    following = work.get_future().then(lambda done: done.value())
    for wait in (work.wait, later.wait):
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            wait()
    for future in (work.get_future(), following, later.get_future()):
        with pytest.raises(RuntimeError, match="worker 1 is gone"):
            future.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), PeerLost)
    lane.close()
    aborted = Lane("test")
    aborted.abort()
    with pytest.raises(PolyrhythmError, match="test was aborted"):
        aborted.run("a test", lambda: None, []).wait()
