"""Callbacks that a run adds to `fit`, before and after those of the script."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import keras
import torch

from polyrhythm.integrations.trainers import TrainerSession

# Those that write files of their own: worker 0 has the values of all workers.
WRITERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)


def listed(callbacks: Any) -> list[Any]:
    """The callbacks that `fit` was given, in any form, as a list."""
    given = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    return list(keras.tree.flatten(given or []))


class Fitted(Protocol):
    """What the callbacks need of a distributed model."""

    model: Any
    workers: TrainerSession


class EpochStart(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs before the callbacks of the script, which see one model and the same metrics on all workers.

    `shows`: the callbacks of the script may look at the model after each epoch.
    """

    def __init__(self, fitted: Fitted, epochs: int, shows: bool) -> None:
        super().__init__()
        self._fitted, self._workers, self._epochs, self._shows = fitted, fitted.workers, epochs, shows
        self._summed: dict[str, Any] | None = None  # the metrics of this epoch over all workers
        self.training = False  # between the first and the last batch of an epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._workers.show_replica()
        self._summed, self.training = None, True
        if self._workers.run is not None:
            self._workers.run._begin_epoch(epoch, self._epochs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Keras uses the same metrics for validation."""
        self._end_training()
        self._workers.show_consensus()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        summed = self._end_training()
        if logs is not None:
            known = {name for name in logs if name in summed or name.startswith("val_")}
            rest = {name: value for name, value in numbers(logs).items() if name not in known}
            logs.update(summed | self._means(rest))
        if self._shows:
            self._workers.show_consensus()

    def _end_training(self) -> dict[str, Any]:
        self.training = False
        if self._summed is None:
            self._summed = self._sum_metrics()
        return self._summed

    def _sum_metrics(self) -> dict[str, Any]:
        """The metrics of the epoch on the batches of all workers: their states are sums."""
        model = self._fitted.model
        variables = model.metrics_variables
        if not variables:
            return {}
        flat = [each.value.detach().reshape(-1).double().cpu() for each in variables]
        total = torch.stack(self._workers.gather(torch.cat(flat))).sum(0)
        parts = torch.split(total, [len(each) for each in flat])
        with torch.no_grad():
            for variable, part in zip(variables, parts, strict=True):
                variable.value.copy_(part.view(variable.value.shape))
        found: dict[str, Any] = model.get_metrics_result()
        return found | numbers(found)

    def _means(self, values: dict[str, float]) -> dict[str, float]:
        """The means of what a train_step of the script has returned besides metrics."""
        if not values:
            return {}
        found = torch.stack(self._workers.gather(torch.tensor([*values.values()], dtype=torch.float64)))
        return dict(zip(values, found.mean(0).tolist(), strict=True))


class EpochEnd(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs after the callbacks of the script: all workers stop together, and the run logs the metrics."""

    def __init__(self, fitted: Fitted) -> None:
        super().__init__()
        self._fitted, self._workers = fitted, fitted.workers

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        model, run = self._fitted.model, self._workers.run
        votes = self._workers.gather(torch.tensor(int(bool(model.stop_training))))
        model.stop_training = any(bool(vote) for vote in votes)
        if run is not None and logs:
            run.log(epoch=epoch, **numbers(logs))


def numbers(logs: dict[str, Any]) -> dict[str, float]:
    """The metrics that are one number each."""
    found = {}
    for name, value in logs.items():
        with suppress(TypeError, ValueError, RuntimeError):  # several values, or none
            found[name] = float(value)
    return found
