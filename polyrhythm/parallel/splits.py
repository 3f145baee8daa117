"""The ways to divide a model over several workers: their configuration, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal, Self

from polyrhythm.core.errors import UsageError
from polyrhythm.core.mesh import Axis
from polyrhythm.core.split import ModelSplit


@dataclass(frozen=True)
class Pipeline(ModelSplit):
    r"""Consecutive layers of the model are on different workers; batches stream through them in pieces.

    A batch is cut into M micro-batches, which pass through the K stages one behind the other; the backward
    passes follow in the opposite direction (GPipe). The gradient is that of the whole batch. Of each pass a
    stage is idle for

    $$\frac{K-1}{M+K-1}$$

    of the time. Where `split_at` names no layers, the model is cut where the slowest stage is fastest.

    Other values of `schedule` need a script that gives its loss function to `session.prepare(..., loss=fn)`,
    and calls `session.backward(x, y)` in place of `loss.backward()`:

    - `1f1b` computes the same in the same time. Forward and backward passes take turns, so stage s (from 0)
      keeps the activations of K - s micro-batches and not of M.
    - `interleaved` cuts the model into K times `chunks` segments, and worker i has the segments i, i + K, ...
      So it waits `chunks` times less, sends as many times more, and keeps more activations.
    - `zerobubble` computes the weight gradients of linear layers and convolutions later than those of inputs,
      when it would wait otherwise (ZB-H1). It waits a third as long, and keeps K micro-batches at most.
    - `pipedream` does not wait for a batch to come back. Stage s updates after each batch $t$, with the
      gradient at its parameters of K - s - 1 updates before, which it keeps until then:
      $w(t+1) = w(t) - \eta g(t)$ with $g(t) = \nabla f(w_1(t-K+1), ..., w_K(t))$. A batch is not cut.
      With `lookahead=yes` and an optimizer with Nesterov momentum $\gamma$ late gradients are discounted:
      $w(t+1) = w(t) + d(t) - \eta (1-\gamma) g(t)$ with $d(t) = \gamma (w(t) - w(t-1))$ and gradients at
      $w + d$.
    - `2bw` does not wait, either, and cuts batches: $w(t+1) = w(t) - \eta \nabla f(w(t-1))$ on all stages,
      with two versions of the parameters. Use as many micro-batches as stages, or more.

    >>> import polyrhythm as pr
    >>> print(pr.parse("async") @ pr.Pipeline(2, micro_batches=4))
    async@pipeline:2,micro_batches=4
    """

    name = "pipeline"
    main = "stages"
    shows_main = True
    paper = (
        "Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism; "
        "Narayanan et al. 2019, PipeDream; Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN "
        "Training; Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters; "
        "Qi et al. 2023, Zero Bubble Pipeline Parallelism; Ajanthan et al. 2025, Nesterov Method for "
        "Asynchronous Pipeline Parallel Optimization"
    )
    axis: ClassVar[Axis] = "stage"
    advice: ClassVar[str] = (
        "use fewer stages, or name the layers that begin a stage, as in pipeline:split_at=layers.2/layers.4"
    )

    stages: int | None = None  # None: one more than the layers in `split_at`, or 2
    micro_batches: int = 8
    recompute: bool = False  # keep the inputs of a stage only, and compute its activations again in backward
    schedule: Literal["gpipe", "1f1b", "interleaved", "zerobubble", "pipedream", "2bw"] = "gpipe"
    chunks: int = 1  # segments of the model on each worker; 2 under interleaved, where it is not given
    lookahead: bool = False  # under pipedream and 2bw: discount late gradients, with Nesterov momentum
    split_at: str = ""  # the layers that begin a stage, such as layers.2/layers.4; in Python also a list
    spill: bool = False  # keep parameters in a file while the model is built; always done under ulimit -v

    def __new__(cls, *values: Any, **named: Any) -> Self:
        return super().__new__(cls, *values, **_joined(named, "split_at"))

    def __post_init__(self) -> None:
        names = _names(self.split_at)
        object.__setattr__(self, "split_at", "/".join(names))
        if self.schedule == "interleaved" and self.chunks == 1:
            object.__setattr__(self, "chunks", 2)
        if self.chunks < 1 or (self.chunks > 1 and self.schedule not in ("interleaved", "zerobubble")):
            raise UsageError(
                f"pipeline: chunks is {self.chunks} under schedule={self.schedule}; several segments on each "
                "worker need schedule=interleaved or schedule=zerobubble"
            )
        if self.stages is None:
            object.__setattr__(self, "stages", max(1, (len(names) + 1) // self.chunks) if names else 2)
        if self.size < 1:
            raise UsageError(f"pipeline: stages is {self.stages}; there must be 1 or more")
        if names and len(names) != self.segments - 1:
            each = f" of {self.chunks} chunks" if self.chunks > 1 else ""
            raise UsageError(
                f"pipeline: {self.size} stages{each} begin at {self.segments - 1} layers, but split_at names "
                f"{len(names)}; leave stages out, or name one layer less than there are parts of the model"
            )
        if self.micro_batches < 1:
            raise UsageError(f"pipeline: micro_batches is {self.micro_batches}; there must be 1 or more")

        if self.lookahead and not self.asynchronous:
            raise UsageError(
                f"pipeline: lookahead=yes corrects late gradients, and those of schedule={self.schedule} are "
                "not late: leave it out, or use schedule=pipedream or 2bw"
            )
        if self.schedule == "pipedream":
            if self.micro_batches not in (1, type(self).micro_batches):
                raise UsageError(
                    "pipeline: schedule=pipedream updates after each batch and does not cut it: leave "
                    "micro_batches out, or use schedule=2bw"
                )
            object.__setattr__(self, "micro_batches", 1)

    @property
    def needs_loss(self) -> bool:
        return self.schedule != "gpipe"

    @property
    def asynchronous(self) -> bool:
        return self.schedule in ("pipedream", "2bw")

    @property
    def apart(self) -> bool:
        """True if weight gradients are computed later than gradients of inputs."""
        return self.schedule == "zerobubble"

    @property
    def size(self) -> int:
        assert self.stages is not None
        return self.stages

    @property
    def segments(self) -> int:
        """The parts that the model is cut into; part i is on worker i mod `size`."""
        return self.size * self.chunks

    @property
    def layers(self) -> list[str]:
        """The layers that begin a stage, if they were named."""
        return _names(self.split_at)


@dataclass(frozen=True)
class Branches(ModelSplit):
    r"""Branches of the model that do not depend on each other run on different workers at the same time.

    They are found in the graph of the model's operations, such as two towers, or experts whose outputs are
    added, and are divided so that the longest worker takes least, messages included. What comes before and
    after the branches runs on the first worker. A module that several branches share has one copy of each
    parameter $w$ to train, whose gradient is the sum over its uses $u$,

    $$rac{\partial L}{\partial w}=\sum_u rac{\partial L}{\partial w_u}.$$

    >>> import polyrhythm as pr
    >>> print(pr.parse("ssp:3") @ pr.Branches(2))
    ssp:3@branches:2
    """

    name = "branches"
    main = "workers"
    shows_main = True
    paper = "Abadi et al. 2016, TensorFlow: A System for Large-Scale Machine Learning"
    axis: ClassVar[Axis] = "branch"
    advice: ClassVar[str] = (
        "use fewer workers, or name submodules to run side by side, as in modules=left/right"
    )

    workers: int | None = None  # None: one for each submodule in `modules`, or 2
    micro_batches: int = 1  # pieces that a batch is cut into
    modules: str = ""  # submodules to run side by side, such as left/right; in Python also a list; "": found

    def __new__(cls, *values: Any, **named: Any) -> Self:
        return super().__new__(cls, *values, **_joined(named, "modules"))

    def __post_init__(self) -> None:
        names = _names(self.modules)
        object.__setattr__(self, "modules", "/".join(names))
        if self.workers is None:
            object.__setattr__(self, "workers", len(names) or 2)
        if self.size < 1:
            raise UsageError(f"branches: workers is {self.workers}; there must be 1 or more")
        if names and len(names) < self.size:
            raise UsageError(
                f"branches: {self.size} workers need as many submodules, but modules names {len(names)}"
            )
        if self.micro_batches < 1:
            raise UsageError(f"branches: micro_batches is {self.micro_batches}; there must be 1 or more")

    @property
    def size(self) -> int:
        assert self.workers is not None
        return self.workers

    @property
    def names(self) -> list[str]:
        """The submodules to run side by side, if they were named."""
        return _names(self.modules)


def _names(layers: str | Sequence[str]) -> list[str]:
    return layers.split("/") if isinstance(layers, str) and layers else list(layers)


def _joined(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Fields with a list of layers as the text that the grammar has for it."""
    layers = fields.get(name, "")
    return fields if isinstance(layers, str) else {**fields, name: "/".join(layers)}


@dataclass(frozen=True)
class TensorParallel(ModelSplit):
    r"""The neurons of linear layers are divided over workers, which compute each layer together.

    A column layer has a part of its outputs on each worker, and the row layer that follows it the same part
    of its inputs. Elementwise operations and attention heads between them work on parts, and the sum over the
    workers is the output (Megatron):

    $$Z = \sum_p f(X A_p) \, B_p$$

    Without a plan, column and row layers are found in the operations of the model: MLP and attention blocks.
    A dict in Python names them: `pr.TensorParallel(2, plan={"fc1": "column", "fc2": "row"})`.

    >>> import polyrhythm as pr
    >>> print(pr.parse("local:8") @ pr.TensorParallel(2, plan={"fc1": "column", "fc2": "row"}))
    local:8@tensor:2,column=fc1,row=fc2
    """

    name = "tensor"
    main = "parts"
    shows_main = True
    paper = "Shoeybi et al. 2019, Megatron-LM: Training Multi-Billion Parameter Language Models"
    axis: ClassVar[Axis] = "tensor"

    parts: int = 2
    column: str = ""  # layers whose outputs are divided, such as layers.0.fc1/layers.1.fc1
    row: str = ""  # layers whose inputs are divided

    plan: InitVar[Mapping[str, str] | None] = None  # in Python: the style of each layer

    def __post_init__(self, plan: Mapping[str, str] | None) -> None:
        if self.parts < 1:
            raise UsageError(f"tensor: parts is {self.parts}; there must be 1 or more")
        for layer, style in (plan or {}).items():
            if style not in ("column", "row"):
                raise UsageError(f"plan: {layer} is {style!r}; a layer is divided as 'column' or as 'row'")
            object.__setattr__(self, style, "/".join([*_names(getattr(self, style)), layer]))
        if both := sorted(set(_names(self.column)) & set(_names(self.row))):
            raise UsageError(f"tensor: {both[0]} is both a column and a row; choose one")

    @property
    def size(self) -> int:
        return self.parts

    @property
    def layers(self) -> dict[str, Literal["column", "row"]]:
        """The style of each layer of the user's plan; empty if there is none."""
        column: Literal["column"] = "column"
        row: Literal["row"] = "row"
        return {
            **dict.fromkeys(_names(self.column), column),
            **dict.fromkeys(_names(self.row), row),
        }
