"""Trains two towers that share one LSTM: which of two texts is by the first author?

Each text is a sequence of 140 characters out of 256. The towers can run on two workers at the same time.

python examples/two_towers.py
polyrhythm run examples/two_towers.py --workers 2 --strategy branches:2
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import polyrhythm as pr

LENGTH, CHARACTERS = 140, 256
Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Texts(Dataset[Pair]):
    """Pairs of texts, one by each of two authors, who use characters with different frequencies."""

    def __init__(self, pairs: int, seed: int) -> None:
        habits = torch.rand(2, CHARACTERS, generator=torch.Generator().manual_seed(0)) ** 2
        draw = torch.Generator().manual_seed(seed)
        self.first_wrote = torch.randint(2, (pairs,), generator=draw)  # the author of the first text
        authors = torch.stack([self.first_wrote, 1 - self.first_wrote], 1).flatten()
        drawn = torch.multinomial(habits[authors], LENGTH, replacement=True, generator=draw)
        self.texts = drawn.view(pairs, 2, LENGTH)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Pair:
        one, two = F.one_hot(self.texts[index], CHARACTERS).float()
        return one, two, self.first_wrote[index].float()


class Towers(nn.Module):
    """One LSTM reads both texts; a linear layer compares its two last states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(CHARACTERS, width, batch_first=True)
        self.compare = nn.Linear(2 * width, 1)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        ends = [self.lstm(text)[0][:, -1] for text in (one, two)]
        return self.compare(torch.cat(ends, 1)).squeeze(1)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Pair]) -> float:
    """The accuracy on pairs that were not trained on."""
    model.eval()
    right = [(model(one, two) > 0) == (author > 0) for one, two, author in loader]
    return torch.cat(right).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=384)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()
    torch.manual_seed(0)
    session = pr.init()
    model = Towers(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(Texts(args.pairs, seed=1), batch_size=args.batch, shuffle=True)
    test = DataLoader(Texts(128, seed=2), batch_size=128)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(args.epochs):
        model.train()
        losses = [0.0]
        for one, two, author in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(one, two), author)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        session.log(epoch=epoch, accuracy=evaluate(session.consensus(), test), loss=losses[-1])


if __name__ == "__main__":
    main()
