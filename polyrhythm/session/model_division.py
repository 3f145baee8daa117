"""ModelDivision: how a script's model is divided over the workers that hold it together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.split import ModelSplit
from polyrhythm.model.spilled import paging
from polyrhythm.parallel.divide import choose, divide, doubt
from polyrhythm.parallel.estimates import estimate
from polyrhythm.parallel.example import Call
from polyrhythm.parallel.graph import ModelGraph, capture
from polyrhythm.parallel.grid import Grid
from polyrhythm.parallel.partition import Partition, split
from polyrhythm.parallel.rows import check_rows
from polyrhythm.parallel.splits import TensorParallel
from polyrhythm.parallel.tensor_shards import TensorShards
from polyrhythm.session.arguments import Arguments

Decide = Callable[[Callable[[], list[int]], str], list[int]]


@contextmanager
def _calling(model: nn.Module, from_loader: bool) -> Iterator[None]:
    """Explains an error of the model when it is called with its example."""
    try:
        yield
    except PolyrhythmError:
        raise
    except Exception as error:
        what = "with a batch of the loader as it is" if from_loader else "with its example"
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{type(model).__name__} cannot be called {what} ({why}): pass an example of what the script "
            "gives it, as in session.prepare(model, optimizer, loader, example=(x,))"
        ) from error


class ModelDivision:
    """How a model is divided, as every node of the run knows it."""

    def __init__(
        self,
        splits: Sequence[ModelSplit],
        model: nn.Module,
        given: Arguments,
        call: Call,
        decide: Decide,
        place: int,
    ) -> None:
        """`decide` lets worker 0 choose for all nodes. `place`: that of this worker; 0 on servers."""
        how = self.how = _main_split(splits)
        self.grid = Grid(splits)
        self.model, self.loss = model, given.loss
        if how.recompute and any(isinstance(each, _BatchNorm) for each in self.model.modules()):
            raise UsageError("recompute=yes would update BatchNorm's statistics twice: leave it out")
        with _calling(model, given.example is None):
            self.graph: ModelGraph = capture(self.model, *call)
        inputs = self.graph.signature.values(*call)
        owned = {
            id(each)
            for optimizer in given.optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        trained = {name for name, each in self.model.named_parameters() if id(each) in owned}
        # The inputs that have a row for each example.
        self.batched = [
            name
            for name, each in zip(inputs, self.graph.signature.inputs, strict=True)
            if each.rows is not None
        ]
        if how.micro_batches > 1:
            with _calling(model, given.example is None):
                check_rows(split(self.graph, ()), inputs, self.batched)
        captured, whole = self.graph.hash, sum(estimate(self.graph.train, inputs).seconds)
        self.tensors = self._take_shards(splits, place, given)
        chosen = decide(lambda: choose(self.graph, how, inputs, trained), captured)
        self.parts: Partition = divide(self.graph, how, chosen)
        costs = estimate(self.graph.train, inputs)
        self.shares = self._shares(costs.seconds, whole)
        self.doubt = doubt(self.graph, how, self.parts, costs)
        self._ranks = self._owning_ranks(trained)

    def _owning_ranks(self, trained: Collection[str]) -> dict[str, int]:
        """The ranks on the tensor axis that own whole parameters; those of others are owned by rank 0.

        In a section without divided parameters all ranks own some, because each must have one to train.
        """
        sections: dict[int, list[str]] = {}
        for name, _ in self.model.named_parameters():
            if name in trained:
                sections.setdefault(self._sections(name)[0], []).append(name)
        divided = self.tensors.shardings if self.tensors is not None else {}
        return {
            name: number % self.grid.tensor
            for names in sections.values()
            if not any(name in divided for name in names)
            for number, name in enumerate(names)
        }

    def _take_shards(self, splits: Sequence[ModelSplit], place: int, given: Arguments) -> TensorShards | None:
        """Leaves this worker's parts of divided tensors in the model, and its operations in the graph."""
        for each in splits:
            if isinstance(each, TensorParallel):
                tensors = TensorShards(self.graph, each, self.grid.rank(place))
                with paging():
                    tensors.take(self.model, given.optimizers)
                self.graph = tensors.graph
                return tensors
        return None

    def _shares(self, costs: Sequence[float], whole: float) -> list[float]:
        """By segment: its share of the computation of the whole model."""
        spent = [0.0] * len(self.parts.train)
        for segment, cost in zip(self.parts.operations, costs, strict=True):
            spent[segment] += cost
        return [each / whole for each in spent]

    def _sections(self, name: str) -> tuple[int, ...]:
        """The sections of the grid that use a tensor of the model, the owner first."""
        return self.parts.users.get(self.graph.names.get(name, name), ()) or (0,)

    def users(self, name: str, place: int) -> tuple[int, ...]:
        """The places that use the same tensor as one place does, the owner first.

        Of a divided tensor each rank on the tensor axis has another part; a whole one belongs to one rank.
        """
        sections = self._sections(name)
        if self.tensors is not None and name in self.tensors.shardings:
            return tuple(self.grid.place(each, self.grid.rank(place)) for each in sections)
        count, first = self.grid.tensor, self._ranks.get(name, 0)
        ranks = [(first + rank) % count for rank in range(count)]
        return tuple(self.grid.place(each, rank) for each in sections for rank in ranks)

    def owner(self, name: str, place: int) -> int:
        """The place that owns a tensor: it trains it, and lends it to the others that use it."""
        return self.users(name, place)[0]


def _main_split(splits: Sequence[ModelSplit]) -> ModelSplit:
    """The way in which the operations of a model are divided; tensors may be divided besides."""
    others = [each for each in splits if not isinstance(each, TensorParallel)]
    if len(others) > 1:
        raise UsageError(
            f"{'@'.join(map(str, splits))} would divide one model in {len(others)} ways: use one of them, "
            "alone or with tensor"
        )
    if others and others[0].asynchronous and len(splits) > 1:
        raise UsageError(
            f"{others[0]} keeps old versions of parameters, and tensor lends some: use schedule=1f1b"
        )
    return others[0] if others else splits[0]
