"""A script with a Hugging Face Trainer, with one line for polyrhythm: `train_transformers.py --epochs 2`."""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import polyrhythm as pr


class Sequences(Dataset[dict[str, Tensor]]):
    """Is the first token one of the last four?"""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 8, (count, 12), generator=generator)
        self.labels = (self.tokens[:, 0] >= 4).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class StopAfterAnEpoch(TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = True
        return control


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


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
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in the folder")
    parser.add_argument("--sequential", action="store_true", help="do not shuffle")
    parser.add_argument("--plain", action="store_true", help="by the library's own Trainer")
    parser.add_argument("--folder", type=Path, default=Path("transformers"))
    options = parser.parse_args(arguments)

    set_seed(1)
    config = BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        options.folder,
        num_train_epochs=options.epochs,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=3e-3,
        eval_strategy="epoch" if options.steps < 0 else "steps",
        eval_steps=10,
        save_strategy="epoch" if options.steps < 0 else "steps",
        save_steps=10,
        logging_steps=5,
        train_sampling_strategy="sequential" if options.sequential else "random",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    kind = Trainer if options.plain else pr.integrations.transformers.PolyrhythmTrainer
    trainer = kind(
        model,
        args,
        train_dataset=Sequences(200, seed=1),
        eval_dataset=Sequences(100, seed=2),
        compute_metrics=accuracy,
    )
    if options.stop:
        trainer.add_callback(StopAfterAnEpoch)
    trainer.train(resume_from_checkpoint=options.resume)
    result = trainer.evaluate()
    trainer.save_model(options.folder / "final")
    rank = trainer.args.process_index
    row = {"rank": int(rank), "accuracy": result["eval_accuracy"], "digest": digest(model)}
    row |= {"steps": trainer.state.global_step, "rate": trainer.lr_scheduler.get_last_lr()[0]}
    row |= {"scheduled": trainer.lr_scheduler.last_epoch}
    (options.folder / f"worker-{int(rank)}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
