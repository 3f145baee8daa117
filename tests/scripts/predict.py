"""Trains on random numbers, and predicts; does wrong things on demand."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr


class Numbers(TensorDataset):
    """Ends the worker that dies when it reads an example; the others wait for that."""

    dies, file = False, Path("/")

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        if self.dies:
            self.file.touch()
            os._exit(9)
        while not self.file.exists():
            time.sleep(0.001)
        return super().__getitem__(number)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mistake", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    session = pr.init()
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(args.width, args.width), nn.BatchNorm1d(args.width))
            for _ in range(args.layers)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = Numbers(torch.randn(107, 8), torch.randn(107, 8))
    loader = DataLoader(numbers, 10, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    if args.mistake == "step":
        optimizer.step()
    if args.mistake == "loop":
        next(iter(loader))
    if not session.predicting:
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    if args.mistake == "die":
        numbers.dies, numbers.file = session.rank == 1, args.folder / "dying"
    times = {"never": 0, "twice": 2}.get(args.mistake, 1)
    for _ in range(times):
        outputs = session.predict(DataLoader(numbers, 10), stream=args.mistake == "stream")
    if args.folder and session.is_main and times == 1:
        torch.save(outputs, args.folder / f"{'predicted' if session.predicting else 'trained'}.pt")


if __name__ == "__main__":
    main()
