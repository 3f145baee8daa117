"""Wrong uses of a session, and the one line that each is answered with: what is wrong, what would work."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import polyrhythm as pr
from tests.support.runs import run_in

WIDTH, EXAMPLES = 3, 16


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 1))


def loader(**options: Any) -> DataLoader[Any]:
    rows = torch.randn(EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows), **({"batch_size": 2} | options))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.01)


def ready(session: pr.Session, **options: Any) -> tuple[Any, Any, Any]:
    model = network()
    made: tuple[Any, Any, Any] = session.prepare(model, sgd(model), loader(**options))
    return made


def take(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
    for (x,) in batches:
        take(model, optimizer, x)


# --- what is passed to prepare ----------------------------------------------------------------------


def a_list(session: pr.Session) -> None:
    model = network()
    session.prepare([model, sgd(model)], loader())


def a_dataset(session: pr.Session) -> None:
    model = network()
    session.prepare(model, sgd(model), loader().dataset)


def no_optimizer(session: pr.Session) -> None:
    session.prepare(network(), loader())


def no_model(session: pr.Session) -> None:
    session.prepare(sgd(network()), loader())


def the_same_model_twice(session: pr.Session) -> None:
    model = network()
    session.prepare(model, model, sgd(model))


def a_second_optimizer_left_out(session: pr.Session) -> None:
    model = network()
    session.prepare(model, sgd(model[0]), loader())


def a_parameter_in_two_optimizers(session: pr.Session) -> None:
    model = network()
    session.prepare(model, sgd(model), sgd(model[2]), loader())


def a_model_prepared_later(session: pr.Session) -> None:
    ready(session)
    other = network()
    session.prepare(other, sgd(other))


def a_distributed_sampler(session: pr.Session) -> None:
    data = loader().dataset
    ready(session, sampler=DistributedSampler(data, session.workers, session.rank))


def a_scheduler_of_another_optimizer(session: pr.Session) -> None:
    model = network()
    stray = lr_scheduler.StepLR(sgd(network()), 1)
    session.prepare(model, sgd(model), loader(), stray)


def integers_that_train(session: pr.Session) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)])
    session.prepare(model, SGD(model.parameters(), lr=0.1), loader())


# --- what is done to the model and the optimizer ----------------------------------------------------


def a_group_added_later(session: pr.Session) -> None:
    model = network()
    model[2].requires_grad_(False)
    _, optimizer, _ = session.prepare(model, sgd(model[0]), loader())
    optimizer.add_param_group({"params": list(model[2].parameters())})


def another_dtype_later(session: pr.Session) -> None:
    model, optimizer, batches = ready(session)
    model.to(torch.float64)
    for (x,) in batches:
        take(model, optimizer, x.double())


def other_values_loaded_later(session: pr.Session) -> None:
    model, _, _ = ready(session)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def one_worker_changes_its_model(session: pr.Session) -> None:
    model, optimizer, batches = ready(session)
    train(model, optimizer, batches)
    if session.rank == 1:
        with torch.no_grad():
            model[0].weight.add_(1.0)


def a_rate_of_its_own(session: pr.Session) -> None:
    model, optimizer, batches = ready(session)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        train(model, optimizer, batches)
        scheduler.step(-float(session.rank * epoch))


def not_a_number(session: pr.Session) -> None:
    model, optimizer, batches = ready(session)
    for (x,) in batches:
        take(model, optimizer, x * float("nan") if session.rank == 1 else x)


def a_scaler_where_workers_differ(session: pr.Session) -> None:
    model, optimizer, batches = ready(session)
    scaler = torch.amp.GradScaler("cpu")
    for (x,) in batches:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def a_step_inside_backward(session: pr.Session) -> None:
    model = network()
    optimizers = {each: SGD([each], lr=0.1) for each in model.parameters()}
    model, batches, *_ = session.prepare(model, loader(), *optimizers.values())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: optimizers[each].step())
    for (x,) in batches:
        model(x).square().mean().backward()


# --- what is done to the data -----------------------------------------------------------------------


def the_test_loader_shared_out(session: pr.Session) -> None:
    model = network()
    model, optimizer, batches, tests = session.prepare(model, sgd(model), loader(), loader())
    train(model, optimizer, batches)
    model.eval()
    with torch.no_grad():
        for (x,) in tests:
            model(x)


def an_older_iterator(session: pr.Session) -> None:
    model, optimizer, batches = ready(session)
    first = iter(batches)
    take(model, optimizer, *next(first))
    second = iter(batches)
    take(model, optimizer, *next(second))
    next(first)


def one_worker_ends_early(session: pr.Session) -> None:
    model, optimizer, batches = ready(session)
    for (x,) in batches:
        take(model, optimizer, x)
        if session.rank == 1:
            return


# --- what workers do together -----------------------------------------------------------------------


def consensus_on_one_worker(session: pr.Session) -> None:
    train(*ready(session))
    if session.rank == 0:
        session.consensus()


def consensus_too_soon(session: pr.Session) -> None:
    session.consensus()


def state_too_soon(session: pr.Session) -> None:
    session.load_state_dict({"strategy": "allreduce"})


def state_of_another_strategy(session: pr.Session) -> None:
    ready(session)
    session.load_state_dict({**session.state_dict(), "strategy": "gossip"})


def state_of_other_workers(session: pr.Session) -> None:
    ready(session)
    session.load_state_dict({**session.state_dict(), "workers": 7})


def state_of_another_model(session: pr.Session) -> None:
    ready(session)
    session.load_state_dict({**session.state_dict(), "layout": "another"})


def another_model_on_each_worker(session: pr.Session) -> None:
    model = nn.Linear(WIDTH, 1 + session.rank)
    session.prepare(model, sgd(model), loader())


def no_prepare(session: pr.Session) -> None:
    model = network()
    train(model, sgd(model), loader())


def a_closure_under_servers(session: pr.Session) -> None:
    model = network()
    session.prepare(model, torch.optim.LBFGS(model.parameters()), loader())


# What is done, under which strategy, and what the answer must say: the thing, and what would work.
def the_old_loader(session: pr.Session) -> None:
    model, batches = network(), loader()
    optimizer = sgd(model)
    session.prepare(model, optimizer, batches)
    train(model, optimizer, batches)


def updates_by_hand(session: pr.Session) -> None:
    model, _, batches = ready(session, batch_size=1)
    for (x,) in batches:
        model.zero_grad()
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.data -= 0.01 * parameter.grad  # type: ignore[operator]


WRONG: dict[Callable[[pr.Session], None], tuple[str, str]] = {
    a_list: ("allreduce", "takes models, optimizers.* not list; pass each as an argument of its own"),
    a_dataset: ("allreduce", "not TensorDataset"),
    no_optimizer: ("allreduce", "got 1 models and 0 optimizers; pass them all to one call"),
    no_model: ("allreduce", "got 0 models and 1 optimizers"),
    the_same_model_twice: ("allreduce", "the same Sequential twice"),
    a_second_optimizer_left_out: ("async", r"2\.weight.*(pass|requires_grad_)"),
    a_parameter_in_two_optimizers: ("allreduce", r"2\.weight.*two optimizers|2\.weight.*twice"),
    a_model_prepared_later: ("allreduce", "one call"),
    a_distributed_sampler: ("allreduce", "DistributedSampler.*leave it out|DistributedSampler.*shuffle"),
    a_scheduler_of_another_optimizer: ("allreduce", "StepLR.*optimizer"),
    integers_that_train: ("allreduce", "only floating-point|no parameters to train"),
    a_group_added_later: ("async", r"add_param_group.*requires_grad_"),
    another_dtype_later: ("allreduce", r"0\.weight.*(dtype|float64)"),
    other_values_loaded_later: ("async", r"load_state_dict\(\) before session.prepare\(\)"),
    one_worker_changes_its_model: (
        "allreduce",
        r"0\.weight.*worker [01] differ, but .* outside optimizer\.step.* a model of their own",
    ),
    a_rate_of_its_own: ("allreduce", "lr.*worker [01].*ReduceLROnPlateau"),
    not_a_number: ("gossip", "worker 1.*not finite.*lower the learning rate"),
    a_scaler_where_workers_differ: ("async", "GradScaler.*(bfloat16|allreduce)"),
    a_step_inside_backward: ("allreduce", r"inside backward\(\).*call step\(\) after it"),
    the_test_loader_shared_out: ("async", r"prepare\(\.\.\., evaluate=loader\)"),
    an_older_iterator: ("local:2", "one iteration at a time.*make a second DataLoader"),
    one_worker_ends_early: ("gossip", "worker 1"),
    consensus_on_one_worker: ("local:3", "worker 0"),
    consensus_too_soon: ("allreduce", r"prepare\(model, optimizer, loader\) before session.consensus\(\)"),
    state_too_soon: ("allreduce", r"before session.load_state_dict\(\)"),
    state_of_another_strategy: ("allreduce", "saved under gossip, but this run uses allreduce"),
    state_of_other_workers: ("allreduce", "saved by 7 workers.*use --workers 7"),
    state_of_another_model: ("allreduce", "different model"),
    another_model_on_each_worker: ("allreduce", "worker [01] and worker [01] have different models"),
    no_prepare: ("allreduce", r"never called session.prepare\(model, optimizer, loader\)"),
    the_old_loader: (
        "async",
        r"trains on the loader that it passed to session.prepare\(\).* use what it returns",
    ),
    updates_by_hand: ("gossip", r"never calls optimizer.step\(\).*under gossip.* or use allreduce"),
    a_closure_under_servers: ("async", "LBFGS calls a closure.*use allreduce"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_use_is_answered_in_one_line(wrong: Callable[[pr.Session], None]) -> None:
    strategy, line = WRONG[wrong]
    with pytest.raises(pr.PolyrhythmError) as caught:
        run_in("simulated", lambda: wrong(pr.init()), strategy=strategy, workers=2)
    assert re.search(line, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_use_is_answered_on_real_processes(wrong: Callable[[pr.Session], None]) -> None:
    strategy, line = WRONG[wrong]
    with pytest.raises(pr.PolyrhythmError) as caught:
        run_in("real", lambda: wrong(pr.init()), strategy=strategy, workers=2, timeout=20.0)
    assert re.search(line, str(caught.value)), caught.value
