"""LightningStrategy: a Lightning Trainer trains by the strategy of a run.

    trainer = lightning.Trainer(strategy=pr.integrations.lightning.Strategy())

Alone it is Lightning's strategy for one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from polyrhythm.core import strategy as core
from polyrhythm.core.errors import UsageError
from polyrhythm.integrations.trainers import CurrentRank, Trainee, TrainerSession

__all__ = ["LightningStrategy", "Strategy"]


class LightningStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # Lightning may not be installed
    """Trains by the strategy of the run: `Trainer(strategy=LightningStrategy())`.

    `strategy` and `batch_norm` are those of `pr.init()`; the command line overrides both. `device` and the
    other arguments are those of Lightning's `SingleDeviceStrategy`.
    """

    strategy_name = "polyrhythm"

    def __init__(
        self,
        strategy: str | core.Strategy | None = None,
        *,
        batch_norm: str | None = None,
        device: torch.device | str = "cpu",
        **more: Any,
    ) -> None:
        super().__init__(device=device, **more)
        self.workers = TrainerSession(self._trainee, strategy, batch_norm)
        self.global_rank, self.world_size = self.workers.rank, self.workers.workers
        if self.workers.run is not None:
            rank_zero_only.rank = CurrentRank(self.global_rank)

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        return bool(self.world_size > 1)  # or Lightning ignores `sync_dist`

    # --- training -----------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        if self.is_distributed:  # the session shares training data, and each worker evaluates on all data
            trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)
        if trainer.training:
            self._check(trainer)

    def _check(self, trainer: Any) -> None:
        """Raises UsageError for what this strategy cannot do."""
        self.workers.check_untrained("Trainer.fit()")
        if self.workers.lockstep:
            return
        unequal = f"under {self.workers.session.strategy} workers take unequal numbers of steps"
        if trainer.max_steps >= 0:
            raise UsageError(f"Trainer(max_steps={trainer.max_steps}): {unequal}; use max_epochs")
        if trainer.ckpt_path is not None:
            raise UsageError(
                f"fit(ckpt_path=...): {unequal}, so the place in the data is not known; start from the "
                "checkpoint's model by load_from_checkpoint()"
            )

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.workers.run is None or not self.lightning_module.trainer.training:
            return dataloader
        # Lightning draws one batch ahead of a loader without a length, to know which is the last.
        length = self.workers.share_of(dataloader) if self.workers.lockstep else None
        return self.workers.share(dataloader, length)

    def _trainee(self) -> Trainee:
        if not self.optimizers:
            raise UsageError(
                "the number of training batches is not known in configure_optimizers(): under "
                f"{self.workers.session.strategy} workers take unequal numbers of steps; use max_epochs and "
                "the length of your DataLoader"
            )
        each_step = [config.scheduler for config in self.lr_scheduler_configs if config.interval == "step"]
        epoch = self.lightning_module.trainer.current_epoch
        return Trainee(self.lightning_module, self.optimizers, epoch, each_step)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.workers.begin_batch()
        return super().training_step(*args, **kwargs)

    def on_train_end(self) -> None:
        self.workers.show_consensus()
        self._log()

    # --- evaluation and checkpoints -----------------------------------------------------------------

    def on_validation_start(self) -> None:
        self.workers.show_consensus()

    def on_validation_end(self) -> None:
        if self.lightning_module.trainer.state.fn == "fit":
            self.workers.show_replica()
            self._log()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._meet("a checkpoint")
        with self.workers.consensus_shown():
            return {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self.workers.loading():
            super().load_model_state_dict(checkpoint, strict=strict)

    def _log(self) -> None:
        """Lightning's metrics, into the run folder."""
        metrics = self.lightning_module.trainer.callback_metrics
        if self.workers.run is not None and metrics:
            self.workers.run.log(**{name.replace("/", "_"): value for name, value in metrics.items()})

    # --- collectives --------------------------------------------------------------------------------

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: Any = "mean", *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        self._meet("sync_dist=True with on_step=True")
        parts = torch.stack(self.workers.gather(tensor))
        operation = str(reduce_op or "mean").rpartition(".")[2].lower()
        match operation:
            case "sum":
                return parts.sum(0)
            case "mean" | "avg":
                return (parts if parts.is_floating_point() else parts.float()).mean(0)
            case "max":
                return parts.amax(0)
            case "min":
                return parts.amin(0)
        raise UsageError(f"reduce_op is {reduce_op!r}; it can be sum, mean, max or min")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.world_size == 1:
            return tensor
        if sync_grads:
            raise UsageError(
                "all_gather(sync_grads=True) cannot pass gradients between workers; set it to False"
            )
        self._meet("all_gather()")
        return torch.stack(self.workers.gather(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._meet("a decision of all workers")
        votes = [bool(vote) for vote in self.workers.gather(torch.tensor(int(decision)))]
        return min(votes) if all else max(votes)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._meet("a barrier")
        self.workers.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._meet("a broadcast")
        return self.workers.broadcast(obj, src)

    def _meet(self, what: str) -> None:
        """Workers that are not in lockstep must not wait for each other in the middle of an epoch."""
        if self.workers.lockstep or self.lightning_module is None:
            return
        batches = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.ready != batches.completed:
            raise UsageError(
                f"{what} needs all workers, and under {self.workers.session.strategy} they take unequal "
                "numbers of steps: do it at the end of an epoch"
            )


Strategy = LightningStrategy
