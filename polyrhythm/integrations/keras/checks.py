"""What a run cannot do with a Keras model, refused before it trains."""

from __future__ import annotations

from typing import Any

import keras

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy
from polyrhythm.integrations.keras.callbacks import listed


def check_model(model: Any) -> None:
    """Raises UsageError for models whose `fit` cannot be part of a run."""
    if not model.compiled:
        raise UsageError("call compile() before fit()")
    if model.jit_compile is True:
        raise UsageError("compile(jit_compile=True) cannot exchange gradients: set it to False")
    for name, value in vars(model).items():
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer:
            raise UsageError(
                f"the model has another optimizer, {name}: fit() trains with the one of compile() only"
            )


def check_arguments(arguments: dict[str, Any], workers: int) -> None:
    """Raises UsageError for arguments of `fit` that have no meaning for several workers."""
    if arguments["steps_per_epoch"]:
        raise UsageError(
            f"fit(steps_per_epoch={arguments['steps_per_epoch']}): in a run an epoch is one pass over the "
            "data by all workers; leave it out, or train on a part of the data"
        )
    backups = [
        each for each in listed(arguments["callbacks"]) if isinstance(each, keras.callbacks.BackupAndRestore)
    ]
    if backups and workers > 1:
        raise UsageError(
            "BackupAndRestore would let all workers write the same files: use ModelCheckpoint, and start "
            "from its file with initial_epoch"
        )


def check_optimizer(optimizer: Any, strategy: Strategy, servers: int) -> None:
    """Raises UsageError for settings of an optimizer that a strategy cannot follow."""
    traits = strategy.traits
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "LossScaleOptimizer skips steps, which workers cannot do alone: use the policy mixed_bfloat16"
        )
    if optimizer.global_clipnorm and servers > 1:
        raise UsageError(
            f"global_clipnorm needs the whole gradient, and {servers} servers have a part each: use one "
            "server, or clipnorm"
        )
    equal = traits.identical_optimizers and traits.sync_period == 1 and not traits.uses_servers
    if optimizer.use_ema and not equal:
        raise UsageError(
            f"use_ema=True needs the same average on all workers, which {strategy} does not give: use "
            "allreduce, or set it to False"
        )
    if optimizer.gradient_accumulation_steps and not traits.lockstep:
        raise UsageError(
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}: under {strategy} workers "
            "take unequal numbers of steps; leave it out and raise batch_size"
        )


def check_norms(model: Any, policy: str) -> None:
    """Raises UsageError for a BatchNorm policy that the layers of Keras do not follow."""
    normed = any(isinstance(each, keras.layers.BatchNormalization) for each in model._flatten_layers())
    if normed and policy not in ("rank0", "local"):
        raise UsageError(
            f"batch_norm={policy} is for BatchNorm of torch; with BatchNormalization of Keras use rank0 or "
            "local"
        )
