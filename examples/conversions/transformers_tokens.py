"""A Trainer of Transformers: PolyrhythmTrainer in the place of Trainer, and the rest stays as it is.

python examples/conversions/transformers_tokens.py
polyrhythm run examples/conversions/transformers_tokens.py --workers 2 --strategy local:8
"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import polyrhythm as pr


def examples(count: int) -> list[dict[str, object]]:
    """Rows of tokens; the label says whether the first one is large."""
    tokens = torch.randint(0, 8, (count, 12))
    return [{"input_ids": row, "labels": int(row[0] >= 4)} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = pr.integrations.transformers.PolyrhythmTrainer(
            BertForSequenceClassification(config),
            TrainingArguments(
                folder, num_train_epochs=args.epochs, learning_rate=3e-3, eval_strategy="epoch",
                save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True, seed=args.seed,
            ),
            train_dataset=examples(400),
            eval_dataset=examples(100),
        )  # fmt: skip
        trainer.train()
        found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"eval_loss {found['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
