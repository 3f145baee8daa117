"""Trains a model of 768 MiB by SGD and prints the loss; under `polyrhythm predict` it predicts."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr


def main() -> None:
    session = pr.init()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.Tanh()) for _ in range(24)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 2048)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(x, x), 8))
    if session.predicting:
        output = session.predict(DataLoader(TensorDataset(x), 8))
        return session.print(f"sum {output.sum().item()!r}")
    for rows, _ in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(rows), rows)
        loss.backward()
        optimizer.step()
    session.print(f"loss {loss.item()!r}")


if __name__ == "__main__":
    main()
