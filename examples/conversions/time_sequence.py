"""A recurrent network that continues sine waves, trained by LBFGS on the whole data set.

python examples/conversions/time_sequence.py
polyrhythm run examples/conversions/time_sequence.py --workers 2 --strategy allreduce
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.linear = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0])


def waves(count: int) -> Tensor:
    """Sine waves that begin at different phases."""
    phase = torch.linspace(0, 6, count).unsqueeze(1)
    return torch.sin(phase + torch.arange(41) / 4).unsqueeze(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    session = pr.init()
    data, test = waves(24), waves(7)
    model = Sequence()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8)
    loader = DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=len(data))
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in range(args.steps):
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    with torch.no_grad():
        agreed = session.consensus().eval()
        session.log(loss=F.mse_loss(agreed(test[:, :-1]), test[:, 1:]).item())


if __name__ == "__main__":
    main()
