"""One call of `session.predict`, from its arguments to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.stopping import RunStopped
from polyrhythm.parallel.example import Call, given_call, model_inputs, on_device
from polyrhythm.session.context import WorldContext
from polyrhythm.session.prediction.batches import Deal, DealtBatches, whole_loader
from polyrhythm.session.prediction.models import Predictor
from polyrhythm.session.prediction.output_exchange import OutputExchange, Outputs
from polyrhythm.session.prediction.outputs import joined_outputs
from polyrhythm.session.prediction.rounds import Prediction, To, Together

Inputs = Callable[[Any], Any]
SEED = 0  # of what a loader draws


def predict(
    run: Together,
    model: Callable[[], Predictor],
    loader: Any,
    inputs: Inputs | None = None,
    to: To = "all",
    stream: bool = False,
) -> Any:
    """The outputs for all batches of a loader, joined; with `stream` an iterator that gives them one by one.

    `model` makes the model that predicts, when all workers have come here.
    """
    if to not in ("all", "main"):
        raise UsageError(f"session.predict() can give outputs to 'all' workers or to 'main', not to {to!r}")
    batches = DealtBatches(whole_loader(loader), SEED, run.processes)
    run.gather(None)  # so none of them trains any longer
    predictor = model()
    if run.workers > 1:
        wanted = [run.rank, f"{batches.identity}, to={to!r}, stream={stream}", predictor.digest]
        _check_same(run.gather(wanted), wanted)
    outputs = iter(Prediction(run, batches, predictor, _inputs_of(predictor, inputs), to, stream))
    if stream:
        return outputs
    found = list(outputs)
    if not batches.count:
        raise UsageError(
            "session.predict() got no batch from the loader, so the shape of the outputs is unknown: give "
            "it a loader with examples, or take each batch by itself with stream=True"
        )
    return joined_outputs(found) if found else None


def _inputs_of(predictor: Predictor, inputs: Inputs | None) -> Callable[[Any], Call]:
    """What the model takes from a batch, as the script says or as its forward does."""
    if inputs is None:
        return lambda batch: model_inputs(predictor.model, batch, labelled=False)
    return lambda batch: on_device(predictor.model, given_call(inputs(batch)))


def _check_same(found: list[Any], mine: list[Any]) -> None:
    """Raises if workers predict on different data, or by different models."""
    if mine not in found:
        return  # this worker replaces one that died, and repeats what the others have done
    (first, what, model), *others = found
    for other, theirs, digest in others:
        if theirs != what:
            raise UsageError(
                f"worker {other} predicts on {theirs}, but worker {first} on {what}: all workers must call "
                "session.predict() with the same arguments, and with a loader in the same order"
            )
        if digest != model:
            raise PolyrhythmError(
                f"workers {first} and {other} have different models in session.predict(): none may train "
                "or change it meanwhile, and under batch_norm=local each has its own statistics (use rank0)"
            )


class RunTogether(Together):
    """Predicts with the other workers of a run."""

    def __init__(self, context: WorldContext, workers: int, exchanges: Callable[[], int]) -> None:
        """`exchanges`: how many there were in the run; each round has some."""
        self._context, self._exchanges = context, exchanges
        self.rank, self.workers, self.processes = context.me.rank, workers, context.processes
        self._gather: Callable[[Any], list[Any]] = lambda value: [value]
        self._exchange: OutputExchange | None = None

    def number(self) -> int:
        return self._exchanges()

    def begin(self, gather: Callable[[Any], list[Any]]) -> RunTogether:
        """Begins a prediction, in which all workers exchange small values by `gather`."""
        if self.workers > 1:
            self._gather, self._exchange = gather, self._exchange or OutputExchange(self._context.node)
        return self

    def gather(self, value: Any) -> list[Any]:
        return self._gather(value)

    def computed(self, examples: int) -> None:
        if self._context.node.stopping.alone:
            raise RunStopped

    def deal(self, name: str, count: int) -> Deal:
        return Deal(self._context if self.workers > 1 else None, name, count, self.workers)

    def publish(self, number: int, readers: Sequence[int], packed: Tensor) -> None:
        assert self._exchange is not None
        self._exchange.publish(number, readers, packed)

    def fetch(self, number: int, sizes: Mapping[int, int]) -> Outputs:
        if self._exchange is None:
            return {}
        with self._context.blocking():
            return self._exchange.fetch(number, sizes)
