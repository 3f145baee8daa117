"""A Lightning module: the Trainer gets polyrhythm's strategy, and the rest stays as it is.

python examples/conversions/lightning_digits.py
polyrhythm run examples/conversions/lightning_digits.py --workers 2 --strategy async
"""

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.data import digits


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.network(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train_set, test_set = digits()
    trainer = lightning.Trainer(
        strategy=pr.integrations.lightning.Strategy(), max_epochs=args.epochs, accelerator="cpu",
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(
        Classifier(), DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(test_set, batch_size=128)
    )
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.4f}")


if __name__ == "__main__":
    main()
