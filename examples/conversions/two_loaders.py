"""Two loaders side by side: labeled digits, and others whose prediction should not depend on noise.

python examples/conversions/two_loaders.py
polyrhythm run examples/conversions/two_loaders.py --workers 2 --strategy gossip
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import polyrhythm as pr
from polyrhythm.data import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    session = pr.init()
    train_set, test_set = digits()
    half = len(train_set) // 2
    labeled = DataLoader(Subset(train_set, range(half)), batch_size=32, shuffle=True)
    unlabeled = DataLoader(Subset(train_set, range(half, len(train_set))), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, labeled, unlabeled = session.prepare(model, optimizer, labeled, unlabeled)
    for epoch in range(args.epochs):
        for (x, y), (z, _) in zip(labeled, unlabeled, strict=False):
            optimizer.zero_grad()
            noisy = z + 0.1 * torch.randn_like(z)
            steady = F.mse_loss(model(noisy).softmax(1), model(z).softmax(1).detach())
            (F.cross_entropy(model(x), y) + steady).backward()
            optimizer.step()
        images, labels = test_set.tensors
        with torch.no_grad():
            right = session.consensus().eval()(images).argmax(1) == labels
        session.log(epoch=epoch, accuracy=right.float().mean().item())


if __name__ == "__main__":
    main()
