"""A small model on made-up data that can be told to misbehave: `train.py --do kill --rank 1 --step 3`."""

import argparse
import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # for tests that fork from their own process: otherwise every node imports it anew
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import polyrhythm as pr

EXAMPLES, FEATURES, CLASSES = 240, 8, 4


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Each example comes with its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(EXAMPLES, FEATURES, generator=generator)
        self.y = self.x[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        return number, self.x[number], self.y[number]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def misbehave(what: str, folder: Path | None) -> None:
    match what:
        case "raise":
            raise RuntimeError("the user's own mistake")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill the server":
            assert folder is not None
            os.kill(int((folder / "server 0").read_text()), signal.SIGKILL)
        case "kill two":
            assert folder is not None
            os.kill(int((folder / "worker 2").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        case "vanish":
            os._exit(0)
        case "exit 3":
            sys.exit(3)
        case "hang":
            time.sleep(600)
        case "stuck":
            ctypes.PyDLL(None).sleep(600)  # it keeps the interpreter's lock: no other thread runs either


def train(
    do: str = "",
    rank: int = 1,
    step: int = 3,
    epochs: int = 1,
    pause: float = 0.0,
    processes: int = 0,
    folder: Path | None = None,
    strategy: str | None = None,
) -> None:
    """Trains; in `folder` every node leaves its process id, and every worker the examples it trained on."""
    session = pr.init(strategy, batch_norm="rank0")
    me = session._context.me if session.strategy else "alone"
    if folder is not None:
        (folder / str(me)).write_text(str(os.getpid()))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbered(), batch_size=4, shuffle=True, num_workers=processes)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    steps, loss = 0, torch.tensor(0.0)
    for epoch in range(epochs):
        for numbers, x, y in loader:
            steps += 1
            if folder is not None and steps == step:
                (folder / f"trains {session.rank}").touch()
            if session.rank == rank and steps == step:
                misbehave(do, folder)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss * math.nan if do == "nan" and session.rank == rank and steps == step else loss).backward()
            optimizer.step()
            if folder is not None:
                with (folder / f"examples {session.rank}").open("a") as file:
                    file.write(" ".join(map(str, numbers.tolist())) + "\n")
            time.sleep(pause)
        session.log(epoch=epoch, loss=loss.item())
    if not do:
        print(f"{me} is done")
    if do == "exit 0":
        sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--do", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--strategy")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
