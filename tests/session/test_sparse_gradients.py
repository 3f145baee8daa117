"""Sparse gradients outside hogwild: exchanged dense, with the same result, and said once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.support.runs import run_in

NOTE = "the gradient of 0.weight is sparse: under {} it is made dense"


class Table:
    """Trains an embedding table and a dense layer; each batch uses rows of its own."""

    def __init__(self, sparse: bool, momentum: float = 0.9) -> None:
        self.sparse, self.momentum = sparse, momentum

    def __call__(self) -> None:
        session = pr.init()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 3, sparse=self.sparse), nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=self.momentum)
        loader = DataLoader(TensorDataset(torch.arange(16)), batch_size=2)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in range(2):
            for (rows,) in loader:
                optimizer.zero_grad()
                model(rows).square().sum().backward()
                optimizer.step()


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        ("simulated", "allreduce"), ("simulated", "async"), ("simulated", "local:2"), ("simulated", "gossip"),
        ("simulated", "allreduce+topk:0.1"), ("real", "allreduce"),
    ],
)  # fmt: skip
def test_sparse_gradients_mean_the_same_and_are_noted_once(
    world: str, strategy: str, capsys: Any, tmp_path: Path
) -> None:
    digests = []
    for sparse in (True, False):
        summary = run_in(world, Table(sparse), strategy=strategy, workers=2, runs=tmp_path)
        assert capsys.readouterr().err.count(NOTE.format(strategy)) == sparse
        digests.append(summary["digest"])
    assert digests[0] == digests[1]


def test_hogwild_keeps_them_sparse_and_says_nothing(capsys: Any, tmp_path: Path) -> None:
    run_in("simulated", Table(True, momentum=0.0), strategy="hogwild", workers=2, runs=tmp_path)
    assert "sparse" not in capsys.readouterr().err
