"""Fine-tuning that trains a new head first and then unfreezes the rest of the network.

python examples/conversions/fine_tuning.py
polyrhythm run examples/conversions/fine_tuning.py --workers 2 --strategy async
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.data import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    session = pr.init()
    train_set, test_set = digits()
    backbone = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU())
    model = nn.Sequential(backbone, nn.Linear(128, 10))
    backbone.requires_grad_(False)
    # The optimizer has all parameters from the start. PyTorch skips those without a gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        if epoch == args.epochs // 2:
            backbone.requires_grad_(True)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        images, labels = test_set.tensors
        with torch.no_grad():
            right = session.consensus().eval()(images).argmax(1) == labels
        session.log(epoch=epoch, accuracy=right.float().mean().item())


if __name__ == "__main__":
    main()
