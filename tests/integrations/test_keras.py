"""A Keras script with the real library: alone, simulated and on two workers."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyrhythm as pr
from tests.support.programs import trained
from tests.support.runs import run_in

os.environ.setdefault("KERAS_BACKEND", "torch")  # before the first `import keras`
EXAMPLES = 1437
STRATEGIES = ("allreduce", "async", "local:8", "gossip", "async+topk:0.01")

Row = dict[str, Any]  # what a worker wrote at the end


def program(folder: Path, *options: str) -> Callable[[], None]:
    script = importlib.import_module("tests.scripts.train_keras")  # Keras takes seconds to import
    return functools.partial(script.main, ["--folder", str(folder), *options])


def rows(folder: Path) -> list[Row]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]


def arrays(file: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The weights of a saved model, and the state of its optimizer but for its learning rate."""
    import keras

    model = keras.models.load_model(file, custom_objects={"Custom": _custom()})
    rate = model.optimizer._learning_rate
    kept = [each for each in model.optimizer.variables if each is not rate]
    return model.get_weights(), [np.array(each) for each in kept]


def _custom() -> Any:
    return importlib.import_module("tests.scripts.train_keras").Custom


def same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other)
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert np.array_equal(mine, theirs), number


def check(strategy: str, world: str, folder: Path, workers: int, *options: str) -> list[Row]:
    """Trains two epochs; what must be so under every strategy."""
    summary = run_in(
        world, program(folder, *options), strategy=strategy, workers=workers, runs=folder / "runs"
    )
    found = rows(folder)
    assert [row["rank"] for row in found] == list(range(workers))
    for name in ("digest", "result", "history", "predicted"):  # all workers evaluated one model
        assert all(row[name] == found[0][name] for row in found), name
    assert found[0]["history"]["val_loss"][-1] == found[0]["result"]["loss"]
    assert summary["samples"] == 2 * EXAMPLES  # each example once per epoch
    if strategy not in ("adpsgd", "broadcast"):  # exchanges that have begun end after the script
        result = {int(name.partition("_")[0]): tensor.numpy() for name, tensor in trained(summary).items()}
        same(
            [result[place] for place in sorted(result)], arrays(folder / "final.keras")[0]
        )  # by position, saved from the consensus
    return found


def test_alone_the_script_gives_the_bits_of_plain_keras(tmp_path: Path) -> None:
    """And so does a run with one worker and a server, which draws the same batches if not shuffled."""
    options = ("--sequential", "--model", "dropout", "--lower", "--examples", "160")
    program(tmp_path / "plain", "--plain", *options)()
    program(tmp_path / "alone", *options)()
    run_in("simulated", program(tmp_path / "one", *options), strategy="async", workers=1)
    (plain,), (alone,), (run,) = (rows(tmp_path / name) for name in ("plain", "alone", "one"))
    assert plain == alone == run
    weights, state = arrays(tmp_path / "plain" / "final.keras")
    for name in ("alone", "one"):  # the state of the optimizer comes back from the server
        others = arrays(tmp_path / name / "final.keras")
        same(weights, others[0])
        same(state, others[1])


def test_simulated_workers_train_one_model(tmp_path: Path) -> None:
    check("async", "simulated", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_workers_train_one_model(strategy: str, tmp_path: Path) -> None:
    check(strategy, "real", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("allreduce+int8", "plain"),
        ("allreduce", "normed"),
        ("local:4,momentum=average", "custom"),
        ("local:4,momentum=reset", "dropout"),
        ("adpsgd", "normed"),
        ("broadcast", "plain"),
        ("ssp:3", "custom"),
        ("diloco:5", "plain"),
    ],
)
def test_eight_simulated_workers_train_one_model(strategy: str, model: str, tmp_path: Path) -> None:
    check(strategy, "simulated", tmp_path, 8, "--model", model)


OPTIMIZERS = (
    'SGD:{"momentum": 0.9, "nesterov": true, "clipnorm": 0.5}',
    'RMSprop:{"momentum": 0.5, "centered": true}',
    'AdamW:{"weight_decay": 0.01, "amsgrad": true}',
    "Nadam",
    "Adagrad",
    "Adadelta",
    "Ftrl",
    'Lion:{"global_clipnorm": 1.0}',
    'SGD:{"loss_scale_factor": 8.0, "clipvalue": 0.1}',
)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_keeps_its_bits_on_a_server(optimizer: str, tmp_path: Path) -> None:
    options = ("--sequential", "--optimizer", optimizer, "--epochs", "1", "--examples", "320")
    program(tmp_path / "plain", "--plain", *options)()
    one = program(tmp_path / "one", *options)
    run_in("simulated", one, strategy="async", workers=1, servers=1 if "global" in optimizer else 2)
    weights, state = (arrays(tmp_path / name / "final.keras") for name in ("plain", "one"))
    same(weights[0], state[0])
    same(weights[1], state[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--optimizer", 'Adam:{"gradient_accumulation_steps": 2}'),
        ("--optimizer", 'SGD:{"use_ema": true, "ema_momentum": 0.9, "momentum": 0.9}'),
        ("--optimizer", "Adafactor"),
        ("--optimizer", "Muon"),
        ("--decay",),
        ("--model", "normed"),
        ("--model", "custom"),
        ("--data", "weights"),
        ("--data", "split"),
        ("--data", "batches"),
        ("--data", "loader"),
        ("--again",),
    ],
    ids=" ".join,
)
def test_a_worker_alone_in_a_run_gives_the_bits_of_plain_keras(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    options += ("--sequential", "--examples", "330")
    program(tmp_path / "plain", "--plain", *options)()
    run_in("simulated", program(tmp_path / "one", *options), workers=1)
    (plain,), (one,) = rows(tmp_path / "plain"), rows(tmp_path / "one")
    assert plain == one


@pytest.mark.slow
def test_replicas_are_equal_after_each_step_under_allreduce() -> None:
    """Bit for bit, though each worker has other examples and drops other units."""
    import keras

    from polyrhythm.integrations.keras import distribute

    steps: dict[int, list[bytes]] = {}
    seeds: list[list[int]] = []

    def train() -> None:
        session = pr.init()
        keras.utils.set_random_seed(0)
        drop = keras.layers.Dropout(0.5, seed=3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), drop, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        distribute(model)
        mine = steps.setdefault(session.rank, [])

        class Record(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                mine.append(b"".join(array.tobytes() for array in model.get_weights()))

        x = np.random.RandomState(0).randn(100, 6).astype("float32")
        model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, callbacks=[Record()])
        seeds.append(np.array(drop.seed_generator.state).tolist())
        assert not session._data.left_early  # type: ignore[attr-defined]  # Keras asks for no batch too many

    run_in("simulated", train, strategy="allreduce", workers=3)
    assert len(steps[0]) == 2 * 5 and steps[0] == steps[1] == steps[2]
    assert len(set(steps[0])) == len(steps[0]) and len({seed for seed, _ in seeds}) == 3


@pytest.mark.slow
def test_a_dataset_that_shuffles_itself_has_one_order_on_all_workers() -> None:
    import keras

    from polyrhythm.integrations.keras import distribute

    orders: dict[int, list[list[int]]] = {}
    seen: list[float] = []

    class Shuffles(keras.utils.PyDataset):
        def __init__(self, mine: list[list[int]]) -> None:
            super().__init__()
            self.order, self._mine = np.arange(12), mine

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            seen.append(float(self.order[index]))
            x = np.full((2, 1), self.order[index], "float32")
            return x, x

        def on_epoch_end(self) -> None:
            np.random.shuffle(self.order)
            self._mine.append(self.order.tolist())

    def train() -> None:
        session = pr.init()
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        distribute(model)
        model.fit(Shuffles(orders.setdefault(session.rank, [])), epochs=2, shuffle=False, verbose=0)

    run_in("simulated", train, strategy="allreduce", workers=2)
    assert orders[0] == orders[1] and len({tuple(each) for each in orders[0]}) == len(orders[0]) > 2
    assert sorted(seen[2:]) == sorted([*range(12)] * 2)  # each worker has built its model by one batch


@pytest.mark.slow
def test_borrowed_batches_change_neither_metrics_nor_statistics() -> None:
    """Three batches on two workers: in the last round the second one has none of its own."""
    import keras

    from polyrhythm.integrations.keras import distribute

    class Count(keras.metrics.Mean):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(float(len(y_true)))

        def result(self) -> Any:
            return self.total

    script = importlib.import_module("tests.scripts.train_keras")
    found: dict[int, tuple[float, float]] = {}

    def train() -> None:
        session = pr.init()
        norm = keras.layers.BatchNormalization(momentum=0.0)
        model = keras.Sequential([keras.Input((2,)), norm, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Count(name="count")])
        distribute(model)
        x = np.repeat(np.arange(3.0), 32)[:, None] * np.ones(2)
        last = script.Batches(x.astype("float32"), x[:, :1].astype("float32"))

        class Means(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                found[session.rank] = float(np.array(norm.moving_mean)[0]), float(batch)

        history = model.fit(last, shuffle=False, verbose=0, callbacks=[Means()]).history
        assert history["count"] == [3 * 32]

    run_in("simulated", train, strategy="allreduce", workers=2)
    assert found == {0: (2.0, 1.0), 1: (1.0, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_schedule_counts_the_steps_of_the_run(strategy: str, tmp_path: Path) -> None:
    """It was built for the batches of a single process, and ends with them on any number of workers."""
    import keras

    from polyrhythm.integrations.keras import distribute

    rates: dict[int, list[float]] = {}

    def train() -> None:
        session = pr.init()
        decay = keras.optimizers.schedules.PolynomialDecay(1.0, 40, 0.0, 1.0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(decay), "mse")
        distribute(model)
        mine = rates.setdefault(session.rank, [])

        class Record(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                mine.append(session._parts.first.optimizer.param_groups[0]["lr"])  # type: ignore[attr-defined]

        x = np.ones((160, 2), "float32")
        model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[Record()])

    cluster = '[[hosts]]\nstep_time = "10 ms"\n[[stragglers]]\nworkers = [1]\nslowdown = 3.3\n'
    run_in("simulated", train, strategy=strategy, workers=2, cluster=cluster)
    if strategy == "allreduce":
        assert rates[0] == rates[1] == pytest.approx([1 - step / 20 for step in range(1, 21)])
    else:
        assert len(rates[0]) > 2 * len(rates[1]) and len(rates[0]) + len(rates[1]) == 40
        ends = sorted(rates[0] + rates[1])
        assert ends[0] == 0 and ends == pytest.approx([step / 40 for step in range(40)], abs=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_all_workers_stop_early_together(strategy: str, tmp_path: Path) -> None:
    run_in(
        "real",
        program(tmp_path, "--epochs", "5", "--patience", "1"),
        strategy=strategy,
        workers=2,
        runs=tmp_path,
    )
    found = rows(tmp_path)
    assert [len(row["history"]["loss"]) for row in found] == [2, 2]
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["result"]["loss"] == found[0]["history"]["val_loss"][0]  # the best weights are restored
    assert (tmp_path / "log.csv").read_text().count("\n") == 3  # written by one worker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("allreduce", ["--steps-per-epoch", "3"], r"steps_per_epoch=3\).*one pass over the data"),
        ("async", ["--save-freq", "5"], r"save\(\) needs all workers.*at the end of an epoch"),
        ("async", ["--optimizer", 'SGD:{"use_ema": true}'], "use_ema=True needs.*use allreduce"),
        ("async", ["--optimizer", 'SGD:{"gradient_accumulation_steps": 2}'], "unequal numbers.*batch_size"),
        ("async", ["--optimizer", "Adafactor"], "Adafactor keeps state.*another optimizer"),
        ("dana-slim", [], "needs torch.optim.SGD"),
    ],
)
def test_what_cannot_work_is_refused(strategy: str, options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(pr.UsageError, match=message):
        run_in("simulated", program(tmp_path, *options), strategy=strategy, workers=2)


@pytest.mark.slow
def test_models_and_callbacks_that_cannot_work_are_refused() -> None:
    import keras

    from polyrhythm.integrations.keras import distribute

    class Other(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {}

    def train(kind: type, more: dict[str, Any], policy: str = "rank0", **attributes: Any) -> None:
        norm = keras.layers.BatchNormalization()
        model = kind([keras.Input((2,)), norm, keras.layers.Dense(1)])
        model.compile(attributes.pop("trained", keras.optimizers.SGD(0.1)), "mse")
        for name, value in attributes.items():
            setattr(model, name, value)
        distribute(model, batch_norm=policy)
        model.fit(**{"x": np.ones((8, 2), "float32"), "y": np.ones((8, 1), "float32"), "verbose": 0} | more)

    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    plain = keras.Sequential
    wrong: list[tuple[str, Callable[[], None]]] = [
        ("Other has not called self.optimizer.apply", lambda: train(Other, {})),
        ("another optimizer, generator", lambda: train(plain, {}, generator=keras.optimizers.SGD(0.1))),
        ("batch_norm=mean is for BatchNorm of torch", lambda: train(plain, {}, "mean")),
        ("generator.* cannot be shared", lambda: train(plain, {"x": (each for each in []), "y": None})),
        ("write the same files", lambda: train(plain, {"callbacks": keras.callbacks.BackupAndRestore("b")})),
        ("use the policy mixed_bfloat16", lambda: train(plain, {}, trained=scaled())),
        ("takes a keras.Model", lambda: distribute(3)),
    ]
    for message, program in wrong:
        with pytest.raises(pr.UsageError, match=message):
            run_in("simulated", program, strategy="allreduce", workers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        # Which of the two depends on whether this backend can run at all.
        ("numpy", "Keras (runs on |cannot start with KERAS_BACKEND=)numpy.* set KERAS_BACKEND=torch before"),
        ("", r"distribute\(\) takes a keras.Model, not int"),  # the integration has chosen torch
    ],
)
def test_another_backend_is_refused_in_one_line(backend: str, message: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment |= {"KERAS_BACKEND": backend} if backend else {}
    lines = [
        "import polyrhythm as pr",
        "try:",
        "    pr.integrations.keras.distribute(3)",
        "except pr.UsageError as error:",
        "    print(error)",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert re.match(message, done.stdout) and done.stdout.count("\n") == 1


def test_weights_are_paired_by_position(tmp_path: Path) -> None:
    """Keras numbers layers per process: a second model of the same kind has other names."""
    from polyrhythm.integrations.keras.weights import KerasWeights

    script = importlib.import_module("tests.scripts.train_keras")
    one, other = (KerasWeights(script.network("normed"), lambda data: data) for _ in range(2))
    assert list(one.state_dict()) == list(other.state_dict())
    assert [name for name, _ in one.named_parameters()][:3] == ["0_kernel", "1_bias", "2_gamma"]
    assert len(list(one.buffers())) == 2 and one(3) == 3
    assert torch.equal(next(one.parameters()), next(one.parameters()))
