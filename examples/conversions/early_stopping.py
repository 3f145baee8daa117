"""Early stopping: training ends when the validation loss has not improved for some epochs.

python examples/conversions/early_stopping.py
polyrhythm run examples/conversions/early_stopping.py --workers 2 --strategy async
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.data import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="at most")
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    session = pr.init()
    train_set, test_set = digits()
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    best, since = math.inf, 0
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        agreed = session.consensus().eval()
        images, labels = test_set.tensors
        with torch.no_grad():
            output = agreed(images)
        accuracy = (output.argmax(1) == labels).float().mean().item()
        # Where workers go at their own pace each sees another moment, so the decision is on the mean.
        loss = session.mean(F.cross_entropy(output, labels).item())
        session.log(epoch=epoch, loss=loss, accuracy=accuracy)
        since = 0 if loss < best - 1e-3 else since + 1
        best = min(best, loss)
        if since > args.patience:
            break


if __name__ == "__main__":
    main()
