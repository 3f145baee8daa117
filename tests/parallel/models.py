"""Models for the tests of capture and cutting, each with inputs of any number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Case:
    build: Callable[[], nn.Module]
    call: Callable[[int], Call]
    note: str = ""  # what the graph's note says, in part


@dataclass(frozen=True)
class Scores:
    logits: Tensor
    hidden: dict[str, Tensor]


class Residual(nn.Module):
    """BatchNorm, in-place ReLU, dropout, and a skip connection over several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.2))
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(torch.relu_(self.second(h) + h).flatten(1))


class Tied(nn.Module):
    """An embedding whose matrix is the output layer, and integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.embed(tokens))))


class Several(nn.Module):
    """Several inputs, a tensor attribute, a constant in the code, and a dataclass as output."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(4, 5), nn.Linear(3, 5), nn.Linear(2, 2)
        self.register_buffer("offset", torch.linspace(0, 1, 5))
        self.scale = torch.full((5,), 1.5)

    def forward(
        self, x: Tensor, power: int, *, other: dict[str, Tensor], mask: Tensor | None = None
    ) -> Scores:
        left = self.left(x) ** power
        right = self.right(other["y"]) * self.scale + torch.tensor([2.0, 1.0, 0.0, 1.0, 2.0])
        with torch.no_grad():
            mean = (left + right).mean(0)
        logits = left * right - mean + self.offset
        return Scores(logits, {"right": right, "x": x, "rows": x.shape[0], "none": mask, "name": "several"})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, (last, _) = self.lstm(x)
        return self.out(h[:, -1]), last.transpose(0, 1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.attention(x, x, x, need_weights=False)
        return self.norm(x + h)


class Branch(nn.Module):
    """Control flow that depends on data, which torch.export does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(x) * 2


class Wrapped(nn.Module):
    """A module whose only work is one Sequential."""

    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)),
        Branch(),
        nn.Dropout(0.1),
        Branch(),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def unequal(widths: tuple[int, ...] = (8, 64, 48, 16, 80, 32, 56, 24, 40)) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs])


def rows(*shape: int) -> Callable[[int], Call]:
    return lambda n: ((torch.randn(n, *shape),), {})


def several_inputs(n: int) -> Call:
    return (torch.randn(n, 4), 2), {"other": {"y": torch.randn(n, 3)}, "mask": None}


CASES = {
    "mlp": Case(unequal, rows(8)),
    "residual": Case(Residual, rows(1, 4, 4)),
    "tied": Case(Tied, lambda n: ((torch.randint(11, (n, 5)),), {})),
    "several": Case(Several, several_inputs),
    "lstm": Case(Recurrent, rows(3, 4)),
    "attention": Case(Attention, rows(5, 8)),
    "encoder": Case(encoder, rows(5, 8)),
    "chain": Case(chain, rows(4), note="module by module"),
}


def loss_of(output: Any) -> Tensor:
    """A scalar that depends on every floating-point output, each element with another weight."""
    from polyrhythm.parallel.trees import flatten

    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([F.softplus(t).cumsum(0).double().mean() for t in tensors]).sum()
