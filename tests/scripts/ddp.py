"""A plain script of DistributedDataParallel, for torchrun: what every codec does as its hook, into a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import polyrhythm as pr

SHAPES = [(20, 30), (30,), (40, 20), (5, 4, 3), (7,), (30, 30)]
STEPS = 5
LOTS = ("qsgd", "terngrad")  # draw again for a step that is tried again
CAP = 0.002  # MB: a few buckets for so small a model


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 5))


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    return x.to(dtype), torch.randint(0, 5, (16,), generator=generator)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).clone()


class Known(nn.Module):
    """A model whose gradients are given to it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES)

    def forward(self, gradient: Tensor) -> Tensor:
        return (flatten(self.tensors) * gradient).sum()


def flatten(tensors: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def given(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(sum(torch.Size(s).numel() for s in SHAPES), generator=generator).to(dtype)


def made(module: nn.Module, codec: str, **more: Any) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(module, bucket_cap_mb=more.pop("cap", CAP))
    more.setdefault("optimizer", torch.optim.SGD(module.parameters(), lr=0.1))
    state, function = pr.integrations.ddp.hook(codec, **more)
    model.register_comm_hook(state, function)
    return model, state


def residual(state: Any) -> Tensor:
    """What is not sent yet, in the model's order; its parameters were given with their names."""
    found = {}
    for bucket in state.state_dict()["buckets"]:
        sizes = [torch.Size(shape).numel() for shape in bucket["shapes"].values()]
        for vector in bucket["vectors"].get("residual", ()):
            found |= dict(zip(bucket["shapes"], vector.split(sizes), strict=True))
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    return torch.cat([found.get(f"tensors.{n}", torch.zeros(size)).double() for n, size in enumerate(sizes)])


def train(
    rank: int, codec: str, dtype: torch.dtype = torch.float32, cap: float = CAP, pace: float = 1.0
) -> list[Tensor]:
    """The parameters after every step; the learning rate changes by a factor from each to the next."""
    module = network().to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, pace)
    model, _ = made(module, codec, cap=cap, optimizer=optimizer)
    seen = []
    for step in range(STEPS):
        x, y = batch(rank, step, dtype)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        seen.append(flat(model.parameters()))
    return seen


def owe(rank: int, codec: str, spoilt: int = -1) -> dict[str, Any]:
    """Known gradients: what each rank gave, what it got, what it owes after each step, and the buckets."""
    module = Known()
    model, state = made(module, codec, model=module)
    got, kept, buckets = [], [], []
    for step in range(6):
        model.zero_grad()
        gradient = given(rank, step)
        if step == spoilt and rank == 1:
            gradient[17] = torch.inf
        model(gradient).backward()
        got.append(flat(p.grad for p in module.tensors))
        kept.append(residual(state))
        buckets.append([list(names) for names in state._compressors])
    return {"got": got, "owed": kept, "buckets": buckets}


def resume(rank: int, codec: str) -> tuple[list[Tensor], list[Tensor]]:
    """What six steps give, and what they give if another process had done the first three."""
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for stop, received in zip((6, 3), seen, strict=True):
        module = Known()
        model, state = made(module, codec)
        for step in range(6):
            if step == stop:
                saved = torch.load(save(state.state_dict()), weights_only=True)
                module = Known()
                model, state = made(module, codec)
                state.load_state_dict(saved)
            model.zero_grad()
            model(given(rank, step)).backward()
            received.append(flat(p.grad for p in module.tensors))
    return seen


class Two(nn.Module):
    """Two parameters in two buckets; the gradient of the second is of 16 bits, and soon overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000))

    def forward(self, step: int) -> Tensor:
        a, b = torch.randn(2, 1000, generator=torch.Generator().manual_seed(step)).abs().add_(1)
        return (self.wide * a).sum() + (self.narrow.half() * b.half()).sum().float()


def scaled(codec: str) -> dict[str, Any]:
    """Twenty steps that are taken: with a scaler, which skips some and doubles its scale, and without one."""
    ends, skipped = [], 0
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=4)):
        module = Two()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        model, state = made(module, codec, model=module, optimizer=optimizer, scaler=scaler)
        fresh = state.state_dict()
        model(0).backward()
        state.load_state_dict(fresh)  # as nothing had been, but the buckets are those that stay
        step = 0
        while step < 20:
            optimizer.zero_grad()
            if scaler is None:
                model(step).backward()
                optimizer.step()
                step += 1
                continue
            scaler.scale(model(step)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            step += scaler.get_scale() >= before  # one that is skipped is tried again
            skipped += scaler.get_scale() < before
        kept = [
            vector
            for bucket in state.state_dict()["buckets"]
            for _, parts in sorted(bucket["vectors"].items())
            for vector in parts
        ]
        ends.append(flat([*module.parameters(), *kept]))
    return {"ends": ends, "skipped": skipped}


def compiled() -> list[int]:
    """How much is compiled: before there is a hook, when there is one, and after a step."""
    from polyrhythm.compress.kernels.dense import loops

    def count() -> int:
        return sum(len(getattr(each, "signatures", ())) for each in vars(loops).values())

    counts = [count()]
    model, _ = made(network(), "int8")
    counts.append(count())
    model(batch(0, 0)[0]).sum().backward()
    return [*counts, count()]


def save(state: dict[str, Any]) -> Path:
    path = Path(sys.argv[1]) / f"state{dist.get_rank()}.pt"
    torch.save(state, path)
    return path


def left_out(rank: int) -> dict[str, Any]:
    """Layers that travel as they are, by name and by dimension."""
    module = Known()
    model, _ = made(module, "topk:0.01,dense=tensors.0/1d", model=module)
    model(given(rank, 0)).backward()
    parts = flat(p.grad for p in module.tensors)
    bounds = list(accumulate(torch.Size(shape).numel() for shape in SHAPES))
    return {"got": parts, "bounds": bounds}


def refused(does: Callable[[], Any]) -> str:
    try:
        does()
    except pr.UsageError as error:
        return str(error)
    return "not refused"


def mistakes() -> list[str]:
    hook = pr.integrations.ddp.hook
    momentum = torch.optim.SGD(network().parameters(), 0.1, momentum=0.9)
    return [
        refused(lambda: hook("topk:dense=head")),
        refused(lambda: hook("topk:dense=head", network())),
        refused(lambda: hook("topq")),
        refused(lambda: hook("dgc", optimizer=momentum)),
        refused(lambda: hook("topk")[0].load_state_dict({"codec": "powersgd"})),
        refused(lambda: hook("dgc")),
        refused(lambda: hook("topk", nn.Sequential(nn.Embedding(9, 4, sparse=True)))),
        refused(lambda: step(nn.Embedding(9, 4, sparse=True), torch.tensor([1, 2]))),
        *moved(),
    ]


def step(module: nn.Module, x: Tensor, state: dict[str, Any] | None = None, named: bool = False) -> Any:
    """The state after a step, from the one that is given."""
    model, mine = made(module, "topk", model=module if named else None)
    if state is not None:
        mine.load_state_dict(state)
    model(x).sum().backward()
    return mine.state_dict()


def moved() -> list[str]:
    """States that are loaded for other parameters than they were saved of."""
    x = torch.ones(1, 4)
    for_one, for_two = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    turned = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
    state, named = step(for_two, x), step(for_two, x, named=True)
    step(for_two, x, state)  # the same model: all is well
    step(for_two, x, named, named=True)
    return [
        refused(lambda: step(turned, x, state)),
        refused(lambda: step(for_one, x, state)),
        refused(lambda: step(turned, x, named, named=True)),
        refused(lambda: step(for_two, x, named)),
    ]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    codecs = sys.argv[2:]
    owing = ["topk:0.05", "topk:0.05,per=layer", "powersgd", "powersgd:1,per=vector,dense="]
    resumed = ["topk:0.05,per=layer", "powersgd", "dgc:0.05,per=layer"]
    single = ["topk:0.05,values=fp32", "topk", "threshold", "dgc:0.01", "bf16"]
    counts = compiled()  # before anything else is
    results: dict[str, Any] = {
        "compiled": counts,
        "scaled": {codec: scaled(codec) for codec in codecs if codec not in LOTS},
        "float32": {codec: train(rank, codec) for codec in codecs},
        "bfloat16": {codec: train(rank, codec, torch.bfloat16) for codec in codecs},
        "float64": {codec: train(rank, codec, torch.float64) for codec in codecs},
        "owe": {codec: owe(rank, codec) for codec in [*owing, "topk:1,values=fp32"]},
        "spoilt": {codec: owe(rank, codec, 2) for codec in [*codecs, "fp16:feedback=yes"]},
        "resume": {codec: resume(rank, codec) for codec in resumed},
        "one bucket": {codec: train(rank, codec, cap=25.0, pace=0.8) for codec in single},
        "left out": left_out(rank),
        "mistakes": mistakes(),
    }
    torch.save(results, Path(sys.argv[1]) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
