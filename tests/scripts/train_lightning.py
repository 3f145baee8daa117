"""A Lightning script as many have it, with one line for polyrhythm: `train_lightning.py --epochs 2`."""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.data import digits


class Classifier(lightning.LightningModule):
    def __init__(self, rate: float, each_step: bool, decay: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=self.hparams["each_step"], on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), self.hparams["rate"])
        if decay := self.hparams["decay"]:
            linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=decay)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear, "interval": "step"}}
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)}


def digest(model: nn.Module) -> str:
    made = hashlib.sha256()
    for tensor in model.state_dict().values():
        made.update(tensor.detach().numpy().tobytes())
    return made.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="after the first epoch")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint in the folder")
    parser.add_argument("--each-step", action="store_true", help="log the loss of each step, of all workers")
    parser.add_argument("--decay", action="store_true", help="lower the rate after each batch")
    parser.add_argument("--sequential", action="store_true", help="do not shuffle")
    parser.add_argument("--plain", action="store_true", help="by Lightning's own strategy")
    parser.add_argument("--folder", type=Path, default=Path("lightning"))
    options = parser.parse_args(arguments)

    lightning.seed_everything(1, verbose=False)
    train, test = digits()
    loader = DataLoader(train, batch_size=32, shuffle=not options.sequential)
    model = Classifier(0.1, options.each_step, options.epochs * len(loader) if options.decay else 0)
    trainer = lightning.Trainer(
        strategy="auto" if options.plain else pr.integrations.lightning.Strategy(),
        accelerator="cpu",
        max_epochs=1 if options.stop else options.epochs,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        default_root_dir=options.folder,
        callbacks=[ModelCheckpoint(options.folder, "best", monitor="accuracy", mode="max")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = options.folder / "best.ckpt" if options.resume else None
    trainer.fit(model, loader, DataLoader(test, batch_size=128), ckpt_path=checkpoint)
    trainer.save_checkpoint(options.folder / "final.ckpt")
    scheduled = trainer.lr_scheduler_configs[0].scheduler
    loss = float(trainer.callback_metrics["train_loss"])
    (result,) = trainer.validate(model, DataLoader(test, batch_size=128), verbose=False)
    row = {"rank": trainer.global_rank, "accuracy": result["accuracy"], "digest": digest(model)}
    row |= {"train_loss": loss, "steps": trainer.global_step, "scheduled": scheduled.last_epoch}
    trainer.validate(model, DataLoader(test, batch_size=128), options.folder / "best.ckpt", verbose=False)
    assert trainer.callback_metrics["accuracy"] == trainer.checkpoint_callback.best_model_score
    (options.folder / f"worker-{trainer.global_rank}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
