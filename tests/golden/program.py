"""The training script of all golden cases. Its arithmetic has the same bits on every processor.

Each operation acts on single elements and rounds once; sums add halves to halves, in an order of their own.
There is no matrix product and no transcendental function, because libraries round those differently on
different processors. Learning rates and weight decay are powers of two: then `x + alpha * y` is rounded once,
whether or not the processor fuses the multiplication with the addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.golden.arithmetic import halved

FEATURES, HIDDEN, OUTPUTS = 7, 6, 4
BATCH, EXAMPLES, EPOCHS = 3, 29, 3  # in the last round of an epoch 3 workers have 2 examples

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "plain": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
}


class Affine(torch.autograd.Function):
    """x W^T + b, whose forward and backward sums are `halved`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return halved(x[:, None, :] * weight, 2) + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return (
            halved(gradient[:, :, None] * weight, 1),
            halved(gradient[:, :, None] * x[:, None, :], 0),
            halved(gradient, 0),
        )


class SquaredError(torch.autograd.Function):
    """Half the squared error of an example, as the mean of a batch."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, wanted: Tensor) -> Tensor:
        ctx.save_for_backward(found, wanted)
        return halved((found - wanted).square().view(-1), 0) / (2 * len(found))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        found, wanted = ctx.saved_tensors
        return (found - wanted) / len(found) * gradients[0], None


class Layer(nn.Module):
    """An affine layer whose initial values are multiples of a power of two."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(outputs, inputs, dtype=dtype) - 0.5)
        self.bias = nn.Parameter(torch.rand(outputs, dtype=dtype) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return Affine.apply(x, self.weight, self.bias)


class Net(nn.Module):
    """Two layers, of 64 and of 32 bits, with softsign between them, and a parameter that gets no gradient."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.first = Layer(FEATURES, HIDDEN, torch.float64)
        self.norm = nn.BatchNorm1d(HIDDEN, dtype=torch.float64) if normed else nn.Identity()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.last = Layer(HIDDEN, OUTPUTS, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        return self.last((hidden / (1 + hidden.abs())).float())


def examples() -> TensorDataset:
    """Inputs and targets that are multiples of 1/8, by a rule that two layers can nearly learn."""
    row, column = torch.arange(EXAMPLES)[:, None], torch.arange(FEATURES)
    x = ((7 * row * row + 5 * row * column + 3 * column) % 17 - 8).double() / 8
    return TensorDataset(x, torch.cat([x[:, :2].abs() - 0.5, x[:, 2:4] * x[:, 4:6]], 1).float())


@dataclass(frozen=True)
class Script:
    """A user's `main()`: two parameter groups, a scheduler, and a look at the consensus after each epoch."""

    optimizer: str = "momentum"
    normed: bool = False

    def __call__(self) -> None:
        session = pr.init()
        data = examples()
        model: Any = Net(self.normed)
        weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        optimizer: Any = OPTIMIZERS[self.optimizer](
            [{"params": weights, "weight_decay": 2**-7}, {"params": others, "lr": 2**-5}], lr=2**-4
        )
        loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
        for _ in range(EPOCHS):
            for x, wanted in loader:
                optimizer.zero_grad()
                SquaredError.apply(model(x), wanted).backward()
                optimizer.step()
                scheduler.step()
            session.log(loss=loss(session.consensus(), data))


def loss(model: nn.Module, data: TensorDataset) -> float:
    """Of all examples."""
    training = model.training
    with torch.no_grad():
        found = SquaredError.apply(model.eval()(data.tensors[0]), data.tensors[1]).item()
    model.train(training)
    return found
