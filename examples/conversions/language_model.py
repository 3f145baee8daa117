"""A language model of characters, trained by steps on an endless sampler, with gradient accumulation.

python examples/conversions/language_model.py
polyrhythm run examples/conversions/language_model.py --workers 2 --strategy local:8
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

import polyrhythm as pr

BLOCK = 16
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ONES = ("", "-one", "-two", "-three", "-four", "-five", "-six", "-seven", "-eight", "-nine")
TEXT = " ".join(
    f"{tens}{ones} is {'odd' if ONES.index(ones) % 2 else 'even'}." for tens in TENS for ones in ONES
)


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of the text, and the same blocks one character later."""

    def __init__(self) -> None:
        self.alphabet = sorted(set(TEXT))
        self.codes = torch.tensor([self.alphabet.index(letter) for letter in TEXT])

    def __len__(self) -> int:
        return len(self.codes) - BLOCK

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        return self.codes[start : start + BLOCK], self.codes[start + 1 : start + BLOCK + 1]


class LanguageModel(nn.Module):
    def __init__(self, letters: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.position = nn.Parameter(torch.zeros(BLOCK, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, letters, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.block(self.embedding(x) + self.position[: x.shape[1]], src_mask=mask))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    session = pr.init()
    data = Characters()
    model = LanguageModel(len(data.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = RandomSampler(data, replacement=True, num_samples=10**10)
    loader = DataLoader(data, sampler=sampler, batch_size=16)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    batches = iter(loader)
    for _ in range(args.steps):
        optimizer.zero_grad()
        with session.accumulating():
            (loss_of(model, *next(batches)) / 2).backward()
        (loss_of(model, *next(batches)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    every = torch.stack([data[start][0] for start in range(0, len(data), 7)])
    nexts = torch.stack([data[start][1] for start in range(0, len(data), 7)])
    with torch.no_grad():
        session.log(loss=loss_of(session.consensus().eval(), every, nexts).item())


if __name__ == "__main__":
    main()
