"""Trains a small network on handwritten digits, in one process or in a run.

python examples/digits.py
polyrhythm run examples/digits.py --workers 4 --strategy async -- --epochs 10
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.data import digits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def network() -> nn.Module:
    # LayerNorm allows a large learning rate: even gradients that are seven updates stale still train well.
    return nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset) -> float:
    """The accuracy on the test set."""
    images, labels = test_set.tensors
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    session = pr.init()
    train_set, test_set = digits()
    model = network()
    # No momentum: it amplifies stale gradients, and this script is for all strategies.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
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
        seen = {"loss": sum(losses) / len(losses)} if losses else {}
        session.log(epoch=epoch, accuracy=evaluate(session.consensus(), test_set), **seen)


if __name__ == "__main__":
    main()
