"""Trains linear layers, and prints speed and peak memory: the script of `python -m benchmarks toolarge`."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr

BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    session = pr.init()
    torch.manual_seed(0)
    width = args.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(args.layers)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(BATCH * (args.steps + 1), width)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(x), BATCH))
    began = time.monotonic()
    for number, (rows,) in enumerate(loader):
        if number == 1:
            began = time.monotonic()  # the first step is slower
        optimizer.zero_grad()
        F.mse_loss(model(rows), rows).backward()
        optimizer.step()
    speed = args.steps * BATCH / (time.monotonic() - began)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, mapped = (int(status[name].split()[0]) >> 10 for name in ("VmHWM", "VmPeak"))
    print(f"figures {speed:.3f} {resident} {mapped}", flush=True)


if __name__ == "__main__":
    main()
