"""The parameters in the buckets of DDP: their names, and whether they match a loaded state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from polyrhythm.compress.segments import any_within
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError

SPARSE = "{codec}: {who} has sparse gradients, which codecs do not support: use sparse=False"
ORDER = " (matched by order only; pass the model when saving and when loading: hook(codec, model))"

Shapes = dict[str, tuple[int, ...]]


class KnownParameters:
    """Names the parameters of a model; without a model, numbers them in the order of the buckets."""

    def __init__(self, codec: Codec, model: nn.Module | None) -> None:
        module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        named: dict[str, nn.Parameter] = dict(module.named_parameters()) if module is not None else {}
        self.codec = codec
        self.dtypes = {parameter.dtype for parameter in named.values()}
        self.shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self.expected: Shapes = {}  # the shapes in a state that was loaded, until they have been checked
        self.named = bool(named)
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._seen: dict[int, Tensor] = {}  # a reference to each parameter keeps its id valid
        self._dense = [word for word in codec.dense.split("/") if word]
        self._check_dense()
        self._check_sparse(module)

    def name(self, parameter: Tensor) -> str:
        """The name of a parameter that is in a bucket."""
        if id(parameter) not in self._names:
            if self.named:
                raise UsageError(
                    f"{self.codec}: DDP trains a parameter that is not in the model passed to hook()"
                )
            name = self._names[id(parameter)] = str(len(self._seen))
            self._seen[id(parameter)] = parameter
            self.shapes[name] = tuple(parameter.shape)
            self.check_shapes()
        return self._names[id(parameter)]

    def find(self, parameter: Tensor) -> str | None:
        """The name of a parameter, if it is known already."""
        return self._names.get(id(parameter))

    def dense_in(self, names: Sequence[str]) -> str:
        """The codec's `dense` restricted to layers in a bucket of these parameters."""
        return "/".join(word for word in self._dense if word == "1d" or any_within(names, word))

    def expect(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Sets the shapes of a loaded state. Without names they are checked during the first pass."""
        self.expected = {name: tuple(shape) for name, shape in shapes.items()}
        if self.named:
            self.check_shapes(whole=True)

    def check_shapes(self, whole: bool = False) -> None:
        """Raises UsageError if the loaded state belongs to other parameters."""
        if not self.expected:
            return
        for name, shape in self.shapes.items():
            if self.expected.get(name) != shape:
                had = f"{self.expected[name]}" if name in self.expected else "missing"
                raise UsageError(
                    f"the loaded state is of another model: parameter {name} has shape {shape}, but in the "
                    f"state it is {had}{ORDER if not self.named else ''}"
                )
        if whole and len(self.shapes) != len(self.expected):
            raise UsageError(
                f"the loaded state is of another model: it has {len(self.expected)} parameters, but this "
                f"model has {len(self.shapes)}"
            )

    def _check_dense(self) -> None:
        for word in self._dense:
            if word != "1d" and not self.named:
                raise UsageError(
                    f"{self.codec}: DDP does not know which layer is {word!r}; pass the model too: "
                    f'hook("{self.codec}", model)'
                )
            if word != "1d" and not any_within(self.shapes, word):
                raise UsageError(f"{self.codec}: the model has no layer {word!r} to leave uncompressed")

    def _check_sparse(self, module: nn.Module | None) -> None:
        for name, layer in module.named_modules() if module is not None else ():
            if getattr(layer, "sparse", False) is True and isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                raise UsageError(SPARSE.format(codec=self.codec, who=f"layer {name!r}"))
