"""A Keras script as many have it, with two lines for polyrhythm: `train_keras.py --epochs 2`."""

import argparse
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.data import digits
from polyrhythm.integrations.keras import distribute  # 1
from polyrhythm.session.context import session


class Batches(keras.utils.PyDataset):
    """The digits, batch by batch."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return math.ceil(len(self._x) / 32)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = slice(32 * index, 32 * (index + 1))
        return self._x[chosen], self._y[chosen]


class Custom(keras.Sequential):
    """Has a train_step of its own, which clips gradients and returns a number besides metrics."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self(x, training=True)
        self.zero_grad()
        loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
        loss.backward()
        variables = list(self.trainable_variables)
        self.optimizer.apply([each.value.grad.clamp(-0.01, 0.01) for each in variables], variables)
        return {**self.compute_metrics(x, y, predicted, weight), "largest": float(predicted.max())}


def network(kind: str) -> keras.Model:
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, strides=2, activation="relu"),
        *([keras.layers.BatchNormalization()] if kind == "normed" else []),
        keras.layers.Flatten(),
        *([keras.layers.Dropout(0.2, seed=3)] if kind == "dropout" else []),
        keras.layers.Dense(10, activation="softmax", kernel_constraint=keras.constraints.MaxNorm(5.0)),
    ]
    return (Custom if kind == "custom" else keras.Sequential)(layers)


def digest(model: keras.Model) -> str:
    made = hashlib.sha256()
    for array in model.get_weights():
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--examples", type=int, default=1437)
    parser.add_argument("--model", default="plain")
    parser.add_argument("--optimizer", default="Adam", help="its name, and JSON of its settings")
    parser.add_argument("--data", default="arrays")
    parser.add_argument("--decay", action="store_true", help="lower the rate after each batch")
    parser.add_argument("--lower", action="store_true", help="lower the rate after each epoch")
    parser.add_argument("--sequential", action="store_true", help="do not shuffle")
    parser.add_argument("--plain", action="store_true", help="without distribute()")
    parser.add_argument("--again", action="store_true", help="fit() once more")
    parser.add_argument("--patience", type=int, help="stop early")
    parser.add_argument("--steps-per-epoch", type=int)
    parser.add_argument("--save-freq", default="epoch")
    parser.add_argument("--folder", type=Path, default=Path("keras"))
    options = parser.parse_args(arguments)

    keras.utils.set_random_seed(1)
    sets = [(x.permute(0, 2, 3, 1).numpy(), y.numpy()) for x, y in (each.tensors for each in digits())]
    (x, y), test = sets
    x, y = x[: options.examples], y[: options.examples]
    model = network(options.model)
    name, _, settings = options.optimizer.partition(":")
    made = {"learning_rate": 0.01, **json.loads(settings or "{}")}
    if options.decay:
        made["learning_rate"] = keras.optimizers.schedules.PolynomialDecay(
            0.01, 45 * options.epochs, 0.0, 1.0
        )
    optimizer = getattr(keras.optimizers, name)(**made)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    if not options.plain:
        distribute(model)  # 2
    saved = options.folder / "best.keras"
    save_freq = options.save_freq if options.save_freq == "epoch" else int(options.save_freq)
    callbacks: list[Any] = [keras.callbacks.ModelCheckpoint(saved, save_freq=save_freq)]
    callbacks.append(keras.callbacks.CSVLogger(options.folder / "log.csv"))
    if options.patience is not None:
        stop = keras.callbacks.EarlyStopping(
            "val_loss", min_delta=10.0, patience=options.patience, restore_best_weights=True
        )
        callbacks.append(stop)
    if options.lower:
        callbacks.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch)))
    options.folder.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"x": x, "y": y, "batch_size": 32, "shuffle": not options.sequential}
    if options.data == "weights":
        data["sample_weight"] = np.where(y < 5, 1.0, 0.5)
    elif options.data == "split":
        data["validation_split"] = 0.2
    elif options.data == "batches":
        data = {"x": Batches(x, y), "shuffle": not options.sequential}
    elif options.data == "loader":
        rows = TensorDataset(*digits()[0].tensors)
        rows.tensors = rows.tensors[0].permute(0, 2, 3, 1), rows.tensors[1]
        data = {"x": DataLoader(rows, batch_size=32, shuffle=not options.sequential), "shuffle": False}
    if options.data != "split":
        data["validation_data"] = test
    more = {"verbose": 0, "callbacks": callbacks, "steps_per_epoch": options.steps_per_epoch}
    history = model.fit(**data, epochs=options.epochs, **more)
    if options.again:
        history = model.fit(**data, epochs=options.epochs + 1, initial_epoch=options.epochs, **more)
    model.save(options.folder / "final.keras")
    result = model.evaluate(*test, verbose=0, return_dict=True)
    predicted = model.predict(test[0], verbose=0).argmax(1)
    mine = session.get()
    rank = 0 if mine is None else mine.rank
    row = {"rank": rank, "digest": digest(model), "result": result, "history": history.history}
    row["predicted"] = float((predicted == test[1]).mean())
    row["rate"] = float(optimizer.learning_rate)
    (options.folder / f"worker-{rank}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
