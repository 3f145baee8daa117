"""PolyrhythmTrainer: the Trainer of Transformers, training by the strategy of a run.

    trainer = pr.integrations.transformers.PolyrhythmTrainer(model, args, train_dataset=...)

Alone it is `transformers.Trainer`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.integrations.trainers import CurrentRank, Trainee, TrainerSession

__all__ = ["PolyrhythmTrainer", "TrainerMixin"]


_Trainer: Any = object  # of a subclass: some Trainer


class TrainerMixin(_Trainer):  # type: ignore[misc]
    """For a Trainer of your own: `class MyTrainer(TrainerMixin, Seq2SeqTrainer)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.workers = TrainerSession(self._trainee)
        super().__init__(*args, **kwargs)
        self._resumes_at = 0  # the step of the checkpoint that training resumes from
        self._set_rank()

    def _set_rank(self) -> None:
        """One worker logs and saves. Other TrainingArguments, made since, may have reset this."""
        if self.workers.run is not None:
            for state in (self.args.distributed_state, self.accelerator.state):
                state.process_index = state.local_process_index = CurrentRank(self.workers.rank)

    # --- training -----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.workers.run is not None:
            self.workers.check_untrained("Trainer.train()")
            self._set_rank()
            self._check(self.args, bool(resume_from_checkpoint))
            self._resumes_at = self._step_of(resume_from_checkpoint)
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self.workers.show_consensus()
        return output

    def _check(self, args: Any, resumes: bool) -> None:
        """Raises UsageError for what this strategy cannot do."""
        strategy = self.workers.session.strategy
        assert strategy is not None
        if args.load_best_model_at_end and (strategy.traits.uses_servers or not strategy.traits.lockstep):
            raise UsageError(
                f"load_best_model_at_end=True cannot replace the parameters under {strategy}: set it to "
                "False, and load trainer.state.best_model_checkpoint after the run"
            )
        if strategy.traits.lockstep:
            return
        unequal = f"under {strategy} workers take unequal numbers of steps"
        if args.gradient_accumulation_steps > 1:
            raise UsageError(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}: {unequal}, and the last "
                "batches of an epoch would be lost: set it to 1 and raise per_device_train_batch_size"
            )
        if resumes:
            raise UsageError(
                f"resume_from_checkpoint: {unequal}, so the place in the data is not known: start from the "
                "checkpoint's model by from_pretrained()"
            )
        for name in ("eval_strategy", "save_strategy"):
            if args.max_steps <= 0 and str(getattr(getattr(args, name), "value", "")) == "steps":
                raise UsageError(
                    f'{name}="steps": {unequal}, and would wait for each other in vain: use "epoch" or "no", '
                    "or set max_steps"
                )

    def _step_of(self, checkpoint: Any) -> int:
        if checkpoint is True:
            checkpoint = transformers.trainer_utils.get_last_checkpoint(self.args.output_dir)
        path = Path(checkpoint or "") / "trainer_state.json"
        return int(json.loads(path.read_text())["global_step"]) if checkpoint and path.exists() else 0

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self.workers.run is None:
            return loader
        args = self.args
        if self.workers.lockstep:
            length = self.workers.share_of(loader)
            updates = math.ceil(length / args.gradient_accumulation_steps)
            if self._resumes_at % updates and not args.ignore_data_skip:
                raise UsageError(
                    f"the checkpoint is of step {self._resumes_at}, in the middle of an epoch of {updates} "
                    'steps: save with save_strategy="epoch", or set ignore_data_skip=True to begin it again'
                )
            return self.workers.share(loader, length)
        # By epochs each worker takes what it gets, at most all. By steps it takes as many epochs as it needs.
        return self.workers.share(loader, None if args.max_steps > 0 else len(loader))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return super().create_scheduler(num_training_steps, optimizer or self._own_optimizer)

    @property
    def _own_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # not that of Accelerate

    def _trainee(self) -> Trainee:
        epoch, equal_steps = int(self.state.epoch or 0), self.args.max_steps > 0
        return Trainee(self.model, [self._own_optimizer], epoch, [self.lr_scheduler], equal_steps)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.workers.begin_batch()
        gradients = self.accelerator.gradient_state
        complete = gradients.sync_gradients
        if complete:
            loss = super().training_step(*args, **kwargs)
        else:
            with self.workers.session.accumulating():
                loss = super().training_step(*args, **kwargs)
        gradients._set_sync_gradients(complete)  # other workers of a simulation share it
        return loss

    # --- evaluation and checkpoints -----------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.workers.consensus_shown():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._set_rank()
        meets = self.workers.shows_replica
        with self.workers.consensus_shown():
            super().save_model(*args, **kwargs)
            if meets:
                self.workers.barrier()  # the others may read it

    def _save_rng_state(self, output_dir: str) -> None:
        if self.workers.run is None:  # in a run each worker has its own, and prepare() seeds it
            super()._save_rng_state(output_dir)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float | Tensor)}
        if self.workers.run is not None and numbers:
            self.workers.run.log(**numbers)


class PolyrhythmTrainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]  # may not be installed
    """`transformers.Trainer`, training by the strategy of the run."""
