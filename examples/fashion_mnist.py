"""Trains a convolutional network of 1,111,946 parameters on Fashion-MNIST, or any data in MNIST format.

python examples/fashion_mnist.py --subset 6000
polyrhythm run examples/fashion_mnist.py --workers 4 --strategy local:8 -- --data DIR
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import polyrhythm as pr
from polyrhythm.data import mnist


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", metavar="DIR", help="folder with the four files in MNIST format")
    parser.add_argument("--subset", type=int, metavar="N", help="train on N images, always the same ones")
    return parser.parse_args()


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),  # 28 x 28 to 12 x 12: no padding
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),  # to 4 x 4
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def subset(data: TensorDataset, size: int | None) -> Dataset[tuple[Tensor, ...]]:
    """The first `size` examples after a fixed shuffle; all of them without a size."""
    if size is None:
        return data
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return Subset(data, order[:size].tolist())


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset) -> dict[str, float]:
    """Accuracy, and the mean of the ten classes' F1 = 2 TP / (2 TP + FP + FN)."""
    model.eval()
    images, labels = test_set.tensors
    guesses = torch.cat([model(x).argmax(1) for x in images.split(1000)])
    hits = torch.bincount(labels[guesses == labels], minlength=10)
    # Predictions of a class are TP + FP, its labels TP + FN: together the denominator. If both are 0, so is
    # F1.
    seen = torch.bincount(guesses, minlength=10) + torch.bincount(labels, minlength=10)
    f1 = 2 * hits / seen.clamp(min=1)
    return {"accuracy": hits.sum().item() / len(labels), "f1": f1.mean().item()}


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    session = pr.init()
    try:
        train_set, test_set = mnist(args.data)
    except pr.UsageError as error:
        raise SystemExit(str(error)) from error
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(subset(train_set, args.subset), batch_size=args.batch, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # The strategy decides how many batches a worker gets: none, if others are much faster.
        loss_mean = sum(losses) / max(1, len(losses))
        session.log(epoch=epoch, loss=loss_mean, **evaluate(session.consensus(), test_set))


if __name__ == "__main__":
    main()
