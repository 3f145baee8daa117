"""Trains a deep network on handwritten digits, on one worker or divided over several.

python examples/deep_mlp.py
polyrhythm run examples/deep_mlp.py --workers 4 --strategy allreduce@pipeline:2
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.data import digits


class Block(nn.Module):
    """A layer with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.linear(self.norm(x)))


def network(width: int, depth: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 10)
    )


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset) -> float:
    """The accuracy on the test set."""
    images, labels = test_set.tensors
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    torch.manual_seed(0)
    session = pr.init()
    train_set, test_set = digits()
    model = network(args.width, args.depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(args.epochs):
        model.train()
        losses = [0.0]
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        session.log(epoch=epoch, accuracy=evaluate(session.consensus(), test_set), loss=losses[-1])


if __name__ == "__main__":
    main()
