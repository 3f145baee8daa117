"""One short training script for each feature that real loops have.

A script gets the session, trains a few steps and raises if the feature did not do what it does alone.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import polyrhythm as pr

EXAMPLES, WIDTH, CLASSES, BATCH = 24, 6, 3, 4
Script = Callable[[pr.Session], None]
FEATURES: dict[str, Script] = {}


def feature(text: str) -> Callable[[Script], Script]:
    """Adds a script to the table, under this text."""

    def add(script: Script) -> Script:
        FEATURES[text] = script
        return script

    return add


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(EXAMPLES, WIDTH, generator=draw)
    return TensorDataset(images, torch.arange(EXAMPLES) % CLASSES)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(data(), **({"batch_size": BATCH, "shuffle": True} | options))


def sgd(model: nn.Module, rate: float = 0.05, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, **options)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, epochs: int = 2) -> None:
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


def prepared(session: pr.Session, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """A model, plain SGD and a loader, ready to train."""
    mine = network() if model is None else model
    made: tuple[Any, Any, Any] = session.prepare(mine, sgd(mine), loader(**options))
    return made


# --- the loop ---------------------------------------------------------------------------------------


@feature("clipping the weights")
def clipping_weights(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    # An outer momentum moves them on.
    assert max(each.abs().max() for each in session.consensus().parameters()) < 0.2


@feature("hooks of the optimizer")
def hooks(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, batches, epochs=1)
    assert calls and calls == ["before", "after"] * (len(calls) // 2)


@feature("clipping the gradient")
def clipping(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@feature("gradient accumulation")
def accumulation(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for number, (x, y) in enumerate(batches, 1):
        (loss_of(model, x, y) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@feature("a closure given to `optimizer.step`")
def closure(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:

        def again(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        assert math.isfinite(float(optimizer.step(again)))


@feature("LBFGS")
def lbfgs(session: pr.Session) -> None:
    mine = network()
    model, optimizer, batches = session.prepare(
        mine, torch.optim.LBFGS(mine.parameters(), lr=0.1, max_iter=3), loader(batch_size=EXAMPLES)
    )
    for x, y in batches:

        def again(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(again)


@feature("Adam")
def adam(session: pr.Session) -> None:
    mine = network()
    train(*session.prepare(mine, torch.optim.Adam(mine.parameters(), lr=1e-3), loader()))


@feature("momentum")
def momentum(session: pr.Session) -> None:
    mine = network()
    train(*session.prepare(mine, sgd(mine, momentum=0.5), loader()))


@feature("gradient penalty (`create_graph=True`)")
def penalty(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:
        optimizer.zero_grad()
        points = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(model, points, y), points, create_graph=True)
        (loss_of(model, x, y) + slope.square().sum()).backward()
        optimizer.step()


@feature("gradient checkpointing")
def checkpointing(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
        optimizer.step()


@feature("autocast in bfloat16")
def autocast(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()


@feature("GradScaler")
def grad_scaler(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()


@feature("`session.accumulating()`")
def accumulating(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:
        optimizer.zero_grad()
        with session.accumulating():
            (loss_of(model, x, y) / 2).backward()
        (loss_of(model, x, y) / 2).backward()
        optimizer.step()


@feature("several losses and `retain_graph=True`")
def several_losses(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:
        optimizer.zero_grad(set_to_none=False)
        output = model(x)
        F.cross_entropy(output, y).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()


@feature("two passes for one step (SAM)")
def two_passes(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad.sign(), alpha=0.01)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        optimizer.step()


@feature("updates without `optimizer.step`")
def updates_by_hand(session: pr.Session) -> None:
    model, _, batches = prepared(session, batch_size=1)
    for x, y in batches:
        model.zero_grad()
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)


# --- the model --------------------------------------------------------------------------------------


@feature("several parameter groups")
def groups(session: pr.Session) -> None:
    mine = network()
    optimizer = torch.optim.SGD([
        {"params": mine[0].parameters(), "lr": 0.1}, {"params": mine[2].parameters(), "lr": 0.01}
    ])  # fmt: skip
    train(*session.prepare(mine, optimizer, loader()))


@feature("frozen parameters")
def frozen(session: pr.Session) -> None:
    mine = network()
    mine[0].requires_grad_(False)
    before = mine[0].weight.clone()
    head = torch.optim.SGD(mine[2].parameters(), lr=0.1)
    model, optimizer, batches = session.prepare(mine, head, loader())
    train(model, optimizer, batches)
    assert torch.equal(session.consensus()[0].weight, before)


@feature("unfreezing during training")
def unfreezing(session: pr.Session) -> None:
    mine = network()
    mine[0].requires_grad_(False)
    before = mine[0].weight.clone()
    model, optimizer, batches = session.prepare(mine, sgd(mine), loader())
    train(model, optimizer, batches, epochs=1)
    mine[0].requires_grad_(True)
    train(model, optimizer, batches, epochs=1)
    assert not torch.equal(session.consensus()[0].weight, before)


@feature("tied parameters")
def tied(session: pr.Session) -> None:
    mine = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    mine[1].weight = mine[0].weight
    train(*prepared(session, mine))
    agreed = session.consensus()
    assert agreed[0].weight is agreed[1].weight


@feature("BatchNorm")
def batch_norm(session: pr.Session) -> None:
    mine = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    train(*prepared(session, mine))
    assert session.consensus()[1].running_var.isfinite().all()


@feature("dropout")
def dropout(session: pr.Session) -> None:
    mine = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    train(*prepared(session, mine))


@feature("a sparse embedding")
def sparse(session: pr.Session) -> None:
    mine = nn.Sequential(nn.Embedding(EXAMPLES, 4, sparse=True), nn.Flatten(), nn.Linear(4, CLASSES))
    words = TensorDataset(torch.arange(EXAMPLES).unsqueeze(1), torch.arange(EXAMPLES) % CLASSES)
    train(*session.prepare(mine, sgd(mine), DataLoader(words, BATCH, shuffle=True)))


@feature("two optimizers for one model")
def two_optimizers(session: pr.Session) -> None:
    mine = network()
    first, second = sgd(mine[0]), torch.optim.Adam(mine[2].parameters(), lr=1e-3)
    model, first, second, batches = session.prepare(mine, first, second, loader())
    for x, y in batches:
        first.zero_grad()
        second.zero_grad()
        loss_of(model, x, y).backward()
        first.step()
        second.step()


@feature("two models that train each other (GAN)")
def gan(session: pr.Session) -> None:
    maker, judge = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
    maker, judge, by_maker, by_judge, batches = session.prepare(
        maker, judge, sgd(maker), sgd(judge), loader()
    )
    for x, _ in batches:
        fake = maker(torch.randn(len(x), 2))
        by_judge.zero_grad()
        (judge(fake.detach()).mean() - judge(x).mean()).backward()
        by_judge.step()
        by_maker.zero_grad()
        (-judge(fake).mean()).backward()
        by_maker.step()


@feature("a moving average of the model (EMA)")
def moving_average(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        average.update_parameters(model)
    assert all(parameter.isfinite().all() for parameter in average.parameters())


@feature("`optimizer.add_param_group` after `prepare`")
def add_group(session: pr.Session) -> None:
    mine = network()
    mine[2].requires_grad_(False)
    model, optimizer, batches = session.prepare(mine, torch.optim.SGD(mine[0].parameters(), lr=0.1), loader())
    train(model, optimizer, batches, epochs=1)
    mine[2].requires_grad_(True)
    before = mine[2].weight.clone()
    optimizer.add_param_group({"params": list(mine[2].parameters())})
    train(model, optimizer, batches, epochs=1)
    assert not torch.equal(session.consensus()[2].weight, before)


@feature("`parameter.data = ...` after `prepare`")
def replaced_data(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    model[0].weight.data = torch.ones_like(model[0].weight)
    train(model, optimizer, batches, epochs=1)
    assert (session.consensus()[0].weight - 1).abs().max() < 0.9


@feature("`model.to(dtype)` after `prepare`")
def to_double(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    model.to(torch.float64)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x.double(), y).backward()
        optimizer.step()


@feature("`copy.deepcopy` and `torch.save` of the model")
def saving_the_model(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    train(model, optimizer, batches)
    assert torch.equal(copy.deepcopy(model)[0].weight, model[0].weight)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)[0].weight, model[0].weight)


@feature("loading the same values after `prepare`")
def loading_equal_values(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, batches)


@feature("spectral norm")
def spectral_norm(session: pr.Session) -> None:
    mine = network()
    nn.utils.parametrizations.spectral_norm(mine[0])
    train(*prepared(session, mine))
    assert torch.linalg.matrix_norm(session.consensus()[0].weight, 2) < 1.5


@feature("pruned weights")
def pruned(session: pr.Session) -> None:
    mine = network()
    prune.l1_unstructured(mine[0], "weight", 0.5)
    zero = mine[0].weight == 0
    model, optimizer, batches = prepared(session, mine)
    train(model, optimizer, batches)
    assert zero.any() and (model[0].weight[zero] == 0).all()
    agreed = session.consensus()
    agreed(torch.zeros(1, WIDTH))  # applies the mask
    assert (agreed[0].weight[zero] == 0).all()


@feature("averaged weights, and `update_bn` on all of the data")
def averaged_weights(session: pr.Session) -> None:
    mine = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    model, optimizer, batches = prepared(session, mine)
    average = swa_utils.AveragedModel(model)
    for _ in range(2):
        train(model, optimizer, batches, epochs=1)
        average.update_parameters(model)
    swa_utils.update_bn(loader(), average)
    assert average.module[1].num_batches_tracked == EXAMPLES // BATCH


# --- the data ---------------------------------------------------------------------------------------


@feature("a weighted sampler")
def weighted(session: pr.Session) -> None:
    sampler = WeightedRandomSampler([1.0 + n for n in range(EXAMPLES)], EXAMPLES)
    train(*prepared(session, shuffle=False, sampler=sampler))


@feature("a batch sampler")
def batch_sampler(session: pr.Session) -> None:
    mine = network()
    batches = DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), BATCH, False))
    train(*session.prepare(mine, sgd(mine), batches))


@feature("a dataset that grows between epochs")
def growing(session: pr.Session) -> None:
    class Growing(Dataset[Any]):
        size = EXAMPLES // 2

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, index: int) -> Any:
            return data()[index]

    grows, mine, seen = Growing(), network(), 0
    model, optimizer, batches = session.prepare(mine, sgd(mine), DataLoader(grows, BATCH))
    for _ in range(2):
        for x, y in batches:
            seen += session.count(x)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        grows.size = EXAMPLES
    assert sum(session.gather(seen)) == EXAMPLES * 3 // 2


@feature("a sampler with `set_epoch`")
def sampler_with_epochs(session: pr.Session) -> None:
    class Shuffled(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return EXAMPLES

        def __iter__(self) -> Iterator[int]:
            draw = torch.Generator().manual_seed(self.epoch)
            yield from torch.randperm(EXAMPLES, generator=draw).tolist()

    model, optimizer, batches = prepared(session, shuffle=False, sampler=Shuffled())
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        train(model, optimizer, batches, epochs=1)


@feature("an endless sampler")
def endless(session: pr.Session) -> None:
    model, optimizer, batches = prepared(
        session, shuffle=False, sampler=RandomSampler(data(), replacement=True, num_samples=10**10)
    )
    several = iter(batches)
    for _ in range(5):
        x, y = next(several)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from data()


@feature("an IterableDataset")
def stream(session: pr.Session) -> None:
    mine = network()
    train(*session.prepare(mine, sgd(mine), DataLoader(Stream(), batch_size=BATCH)), epochs=1)


@feature("two loaders side by side")
def two_loaders(session: pr.Session) -> None:
    mine = network()
    model, optimizer, one, other = session.prepare(mine, sgd(mine), loader(), loader())
    for (x, y), (z, _) in zip(one, other, strict=False):
        optimizer.zero_grad()
        (loss_of(model, x, y) + model(z).square().mean()).backward()
        optimizer.step()


@feature("no loader")
def no_loader(session: pr.Session) -> None:
    mine = network()
    model, optimizer = session.prepare(mine, sgd(mine))
    x, y = data().tensors
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


@feature("fewer examples than workers")
def tiny_data(session: pr.Session) -> None:
    mine = network()
    one = DataLoader(TensorDataset(*data()[:1]), batch_size=1)
    train(*session.prepare(mine, sgd(mine), one))


@feature("leaving an epoch early, on all workers")
def leaving_early(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            break


# --- schedules, evaluation, saving ------------------------------------------------------------------


@feature("a scheduler that steps once per epoch")
def per_epoch(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        train(model, optimizer, batches, epochs=1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05 / 4


@feature("a prepared OneCycleLR")
def one_cycle(session: pr.Session) -> None:
    mine = network()
    optimizer, batches = sgd(mine), loader()
    steps = 2 * len(batches)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    model, optimizer, batches, scheduler = session.prepare(mine, optimizer, batches, scheduler)
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            scheduler.step()


@feature("a prepared ReduceLROnPlateau")
def plateau(session: pr.Session) -> None:
    mine = network()
    optimizer = sgd(mine)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, batches, scheduler = session.prepare(mine, optimizer, loader(), scheduler)
    for epoch in range(2):
        train(model, optimizer, batches, epochs=1)
        scheduler.step(float(session.rank + epoch))


@feature("evaluating the consensus")
def evaluating(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    x, y = data().tensors
    for _ in range(2):
        train(model, optimizer, batches, epochs=1)
        with torch.no_grad():
            session.log(loss=loss_of(session.consensus().eval(), x, y))


@feature("keeping the best model so far")
def keeping_the_best(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    train(model, optimizer, batches, epochs=1)
    best = session.consensus()
    kept = copy.deepcopy(best.state_dict())
    train(model, optimizer, batches, epochs=1)
    session.consensus()
    assert all(torch.equal(value, kept[name]) for name, value in best.state_dict().items())


@feature("saving and loading the session")
def saving(session: pr.Session) -> None:
    model, optimizer, batches = prepared(session)
    train(model, optimizer, batches, epochs=1)
    torch.save(session.state_dict(), file := io.BytesIO())
    file.seek(0)
    assert set(torch.load(file, weights_only=True)) == set(session.state_dict())
