"""Scripts that use polyrhythm wrongly, or only unusually: `mistakes.py NAME`."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr

Loader = DataLoader[tuple[Tensor, ...]]


def parts(width: int = 2) -> tuple[nn.Module, torch.optim.Optimizer, Loader]:
    model = nn.Linear(2, width)
    loader = DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: Loader) -> None:
    for loader in loaders:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def no_init() -> None:
    train(*parts())


def no_prepare() -> None:
    pr.init()
    train(*parts())


def no_parameters() -> None:
    model = nn.ReLU()
    pr.init().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def load_late() -> None:
    session = pr.init(strategy="sync")
    model, _, _ = session.prepare(*parts())
    model.load_state_dict(model.state_dict())  # loading what is there already is fine
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def lbfgs() -> None:
    session, (model, _, loader) = pr.init(strategy="local:4"), parts()
    session.prepare(model, torch.optim.LBFGS(model.parameters()), loader)


def sparse_adam() -> None:
    session, model = pr.init(), nn.Embedding(6, 3, sparse=True)
    session.prepare(model, torch.optim.SparseAdam(model.parameters()))


def different_models() -> None:
    session = pr.init()
    train(*session.prepare(*parts(width=2 + session.rank)))


def prepare_twice() -> None:
    session = pr.init()
    session.prepare(*session.prepare(*parts()))


def consensus_first() -> None:
    pr.init().consensus()


def bad_strategy() -> None:
    pr.init(strategy="asink")


def two_loaders() -> None:
    session, (model, optimizer, loader) = pr.init(), parts()
    train(*session.prepare(model, optimizer, loader, DataLoader(TensorDataset(torch.randn(6, 2)))))


def main() -> None:
    globals()[sys.argv[1]]()


if __name__ == "__main__":
    main()
