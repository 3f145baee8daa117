"""Training by steps instead of epochs: the loader starts over whenever it ends.

python examples/conversions/endless.py
polyrhythm run examples/conversions/endless.py --workers 2 --strategy local:8
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.data import digits


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    session = pr.init()
    train_set, test_set = digits()
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    batches = forever(loader)
    for _ in range(args.steps):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    images, labels = test_set.tensors
    with torch.no_grad():
        right = session.consensus().eval()(images).argmax(1) == labels
    session.log(accuracy=right.float().mean().item())


if __name__ == "__main__":
    main()
