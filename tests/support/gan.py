"""A script with two models and two optimizers, and three backward passes in each round."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.session.seeds import mix
from tests.support.programs import FEATURES, SGD, Examples

NOISE = 2


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 6), nn.Tanh(), nn.Linear(6, FEATURES)).double()


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1)).double()


@dataclass
class Gan:
    """Trains a generator against a discriminator; `folder`: saves there, and with `begin` resumes from it.

    The generator's loss leaves gradients in the discriminator, which the script drops.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    size: int = 24
    batch: int = 2
    begin: int = 0
    epochs: int = 2
    folder: Path | None = None
    freezes: bool = False  # the generator's loss leaves no gradients in the discriminator
    kills: int = -1  # the rank of a worker that kills itself in its third round
    seen: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict)  # both models after each round
    consensus: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        here = pr.init()
        g, d = generator(), discriminator()
        for_g, for_d = self.optimizer(g.parameters()), self.optimizer(d.parameters())
        loader = DataLoader(Examples(self.size), batch_size=self.batch)
        path = None if self.folder is None else self.folder / f"{here.worker}.pt"
        saved = torch.load(path, weights_only=True) if path and self.begin else None
        if saved:
            for thing, state in zip((g, d, for_g, for_d), saved["states"], strict=True):
                thing.load_state_dict(state)
        example = [torch.zeros(2, FEATURES).double(), torch.zeros(2, NOISE).double()]  # of d, and of g
        loss, for_d, loader, d, for_g, g = here.prepare(
            nn.BCEWithLogitsLoss(), for_d, loader, d, for_g, g, example=example
        )
        if saved:
            here.load_state_dict(saved["session"])
        rounds = self.seen.setdefault(here.worker, [])
        for _ in range(self.begin, self.epochs):
            for number, (x, _) in enumerate(loader):
                if here.rank == self.kills and number == 2 and not here._node.incarnation:
                    os.kill(os.getpid(), signal.SIGKILL)
                fake = g(x[:, :NOISE])
                for_d.zero_grad()
                loss(d(x), torch.ones(len(x), 1).double()).backward()
                loss(d(fake.detach()), torch.zeros(len(x), 1).double()).backward()
                for_d.step()
                for_g.zero_grad()
                d.requires_grad_(not self.freezes)
                loss(d(fake), torch.ones(len(x), 1).double()).backward()
                for_g.step()
                d.requires_grad_(True)
                rounds.append(state_of(d, g))
        if path and not self.begin:
            states = [each.state_dict() for each in (g, d, for_g, for_d)]
            torch.save({"states": states, "session": here.state_dict()}, path)
        self.consensus[here.worker] = state_of(*here.consensus())
        return nn.ModuleList([d, g])


def state_of(*models: nn.Module) -> dict[str, Tensor]:
    """A copy of the state of several models, with the names that a run gives them."""
    return {name: value.clone() for name, value in nn.ModuleList(models).state_dict().items()}


def alone(script: Gan, seed: int = 0) -> dict[str, Tensor]:
    """What the script trains in plain PyTorch, from the models that a run with this seed begins with."""
    torch.manual_seed(mix("model", seed))
    return dict(script().state_dict())


def plain(rounds: int, batches: Callable[[int], Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The same algorithm without polyrhythm, on these batches."""
    torch.manual_seed(mix("model", seed))
    g, d = generator(), discriminator()
    for_g, for_d = SGD(g.parameters()), SGD(d.parameters())
    for number in range(rounds):
        x = batches(number)
        ones, zeros = torch.ones(len(x), 1).double(), torch.zeros(len(x), 1).double()
        fake = g(x[:, :NOISE])
        errors = [F.binary_cross_entropy_with_logits(d(x), ones)]
        errors.append(F.binary_cross_entropy_with_logits(d(fake.detach()), zeros))
        for parameter, slope in zip(
            d.parameters(), torch.autograd.grad(sum(errors), d.parameters()), strict=True
        ):  # type: ignore[arg-type]
            parameter.grad = slope
        for_d.step()
        error = F.binary_cross_entropy_with_logits(d(fake), ones)
        for parameter, slope in zip(g.parameters(), torch.autograd.grad(error, g.parameters()), strict=True):
            parameter.grad = slope
        for_g.step()
    return state_of(d, g)
