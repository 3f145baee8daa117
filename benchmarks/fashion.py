"""Fashion-MNIST and the small network that several benchmarks train on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def missing() -> str:
    """What to tell if the data are not here."""
    from polyrhythm.core.errors import UsageError
    from polyrhythm.data.mnist import mnist

    try:
        mnist()
    except UsageError as error:
        return str(error)
    return ""


def network() -> nn.Module:
    """Two convolutions and two dense layers: 105,194 parameters."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def trained_on(examples: int, batch: int, rate: float) -> tuple[Any, Any, Any]:
    """The network, plain SGD and a loader of so many images of Fashion-MNIST, for `prepare`."""
    from torch.optim import SGD
    from torch.utils.data import DataLoader, TensorDataset

    from polyrhythm.data.mnist import mnist

    images, labels = mnist()[0].tensors
    model = network()
    data = TensorDataset(images[:examples], labels[:examples])
    return model, SGD(model.parameters(), lr=rate), DataLoader(data, batch_size=batch, shuffle=True)


def accuracy(model: nn.Module, count: int | None = None) -> float:
    """On the first so many test images; on all if not given."""
    import torch

    from polyrhythm.data.mnist import mnist

    images, labels = (each[:count] for each in mnist()[1].tensors)
    with torch.no_grad():
        # In portions that fit the cache, in half the time.
        right = torch.cat([model(part).argmax(1) for part in images.split(500)]) == labels
    return right.float().mean().item()
