"""Logistic regression on sparse rows: each uses 50 of a million weights, so workers rarely conflict.

python examples/sparse_logistic.py
polyrhythm run examples/sparse_logistic.py --workers 2 --strategy hogwild -- --epochs 5
polyrhythm run examples/sparse_logistic.py --workers 2 --strategy hogwild:lock=yes -- --epochs 5
polyrhythm run examples/sparse_logistic.py --workers 2 -- --compiled --rows 400000 --batch 8192 --lr 0.1
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import polyrhythm as pr

FEATURES, TOUCHED = 1_000_000, 50


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Random features, some more frequent than others, and a label that depends on all features of a row."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = (FEATURES * torch.rand(count, TOUCHED, generator=generator) ** 2).long()
        truth = torch.randn(FEATURES, generator=generator)
        self.y = (truth[self.x].sum(1) > 0).float()

    def __len__(self) -> int:
        return len(self.y)

    def __getitems__(self, indexes: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[indexes], self.y[indexes]  # a whole batch at once


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--compiled", action="store_true", help="a step for each row, by SparseSGD")
    args = parser.parse_args()

    session = pr.init("hogwild")
    rows = Rows(args.rows)
    model = nn.EmbeddingBag(FEATURES, 1, mode="sum", sparse=True)  # the gradient has the touched rows only
    nn.init.zeros_(model.weight)
    kind = pr.SparseSGD if args.compiled else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=args.lr)
    loader = DataLoader(rows, batch_size=args.batch, shuffle=True, collate_fn=lambda batch: batch)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(args.epochs):
        for x, y in loader:
            if args.compiled:
                optimizer.learn(x, None, y)
                continue
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x)[:, 0], y).backward()
            optimizer.step()
        with torch.no_grad():
            loss = F.binary_cross_entropy_with_logits(model(rows.x)[:, 0], rows.y)
        session.log(loss=loss)


if __name__ == "__main__":
    main()
