"""replicate: one process runs a model on several devices, each on a part of the batch.

    model = pr.replicate(model, ["cuda:0", "cuda:1"])

There is one set of parameters. A forward pass gives each device a part of the batch and a replica of the
module, which refers to the parameters or to differentiable copies of them, and concatenates the outputs. So
the loss is that of the whole batch, and backward leaves the gradient of the whole batch in `.grad`:

    L(w) = loss(concat_k f(w, x_k), y)          dL/dw = sum_k dL/df_k df_k/dw

The first device runs the module itself, in the calling thread; the others run replicas, which live for one
pass. It is what `torch.nn.DataParallel` does, for any kind and mixture of devices, and what Keras'
`multi_gpu_model` did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from polyrhythm.core.errors import UsageError
from polyrhythm.model.hooks import Hook
from polyrhythm.model.vectors import split
from polyrhythm.parallel.threads import run_threads

Device = str | int | torch.device

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def replicate(
    model: nn.Module,
    devices: Sequence[Device],
    merge_device: Device | None = None,
    weight_device: Device | None = None,
) -> Replicated:
    """Returns a module that divides each batch over several devices of this process.

    `devices` may name a device several times: `["cpu", "cpu"]` runs two threads. Outputs are concatenated on
    `merge_device`, and the parameters are kept on `weight_device`; both are the first device unless given.
    `merge_device="cpu"` is `cpu_merge`, and `weight_device="cpu"` is `cpu_relocation`, of Keras' former
    `multi_gpu_model`.

    Dimension 0 of each tensor that the model gets and returns is the batch. The last batch may be of any
    size. Buffers, such as BatchNorm's statistics, are those of the first device, and the statistics of a
    batch are those of a device's part. The names in `state_dict()` are those of `model`, which stays usable
    as `.module`.

    >>> model = replicate(nn.Linear(3, 2), ["cpu", "cpu"])
    >>> model(torch.zeros(5, 3)).shape, list(model.state_dict())
    (torch.Size([5, 2]), ['weight', 'bias'])
    """
    if isinstance(devices, str | int | torch.device) or not devices:
        raise UsageError(
            f'replicate(devices={devices!r}): pass a list of devices, such as ["cuda:0", "cuda:1"]'
        )
    if isinstance(model, Replicated) or not isinstance(model, nn.Module):
        raise UsageError(f"replicate() takes a plain torch.nn.Module, not {type(model).__name__}")
    if any(is_lazy(each) for each in [*model.parameters(), *model.buffers()]):
        raise UsageError(
            "replicate() needs the shapes of all parameters: run a batch through the model first"
        )
    places = [_device(each) for each in devices]
    model.to(places[0] if weight_device is None else _device(weight_device))
    return Replicated(model, places, places[0] if merge_device is None else _device(merge_device))


class Replicated(nn.Module):
    """The result of `replicate()`: its modules, parameters and buffers are those of `module`."""

    module: nn.Module

    def __init__(
        self, module: nn.Module, devices: Sequence[torch.device], merge_device: torch.device
    ) -> None:
        super().__init__()
        # Not a child: names have no prefix. Both share their dicts, also in copies.
        self.__dict__["module"] = module
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self.training = module.training
        self.devices, self.merge_device = list(devices), merge_device
        self._draws: dict[bool, bool] = {}  # in training, or not: the model draws random numbers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        ranges = split(_rows(leaves), len(self.devices)) if len(self.devices) > 1 else []
        ranges = [(low, high) for low, high in ranges if low < high]
        if len(ranges) < 2:  # one device, or one example
            placed = [_placed(leaf, self.devices[0]) for leaf in leaves]
            return self._moved(self._on_first(*pytree.tree_unflatten(placed, form)))
        places = self.devices[: len(ranges)]
        calls: list[tuple[Callable[[], Any], torch.device]] = []
        copies: list[nn.Module | None] = [None, *self._replicas(places)]
        for copy, device, (low, high) in zip(copies, places, ranges, strict=True):
            part = [_placed(leaf, device, low, high) for leaf in leaves]
            inputs = pytree.tree_unflatten(part, form)
            calls.append((_call(self._on_first if copy is None else copy, inputs), device))
        outputs = self._run(calls)
        return _merged(outputs, [high - low for low, high in ranges], self.merge_device)

    def _on_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module itself on the first device, with its own parameters and buffers if they are there."""
        device = self.devices[0]
        own = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        if all(each.device == device for each in own.values()):
            return self.module(*args, **kwargs)
        there = {name: each.to(device) for name, each in own.items()}
        buffers = [(each, there[name]) for name, each in self.module.named_buffers()]
        versions = [copy._version for _, copy in buffers]
        result = torch.func.functional_call(self.module, there, args, kwargs)
        with torch.no_grad():
            for (buffer, copy), version in zip(buffers, versions, strict=True):
                if self.training or copy._version != version:  # BatchNorm does not count as a change
                    buffer.copy_(copy)
        return result

    def _replicas(self, devices: Sequence[torch.device]) -> list[nn.Module]:
        """A replica for each device but the first, for one pass."""
        kind, tensors = devices[0].type, [*self.module.parameters(), *self.module.buffers()]
        apart = len(set(devices)) == len(devices) and all(each.type == kind for each in devices)
        if kind in ("cuda", "xpu") and apart and all(each.device == devices[0] for each in tensors):
            # PyTorch's own broadcasts all parameters in few large messages.
            made = parallel.replicate(self.module, devices, detach=not torch.is_grad_enabled())[1:]
        else:
            made = [_replica(self.module, device) for device in devices[1:]]
        for each in made:
            _drop_hooks(each)
        return made

    def _run(self, calls: Sequence[tuple[Callable[[], Any], torch.device]]) -> list[Any]:
        """All outputs. Replicas that draw from one generator take turns, so that a run can be repeated."""
        devices = [device for _, device in calls]
        _seed_apart(devices)
        shared = {device for device in devices if devices.count(device) > 1}
        if not shared:
            return run_threads(calls)
        # One GPU gains nothing from two threads. On CPUs the first pass shows whether the model draws.
        before = torch.get_rng_state()
        turns = self._draws.get(self.training, True) or any(each.type != "cpu" for each in shared)
        outputs = run_threads(calls, turns)
        drawn = not torch.equal(before, torch.get_rng_state())
        self._draws[self.training] = drawn or self._draws.get(self.training, False)
        return outputs

    def _moved(self, output: Any) -> Any:
        return pytree.tree_map(lambda leaf: _placed(leaf, self.merge_device), output)

    # --- the rest is that of the module -------------------------------------------------------------

    def train(self, mode: bool = True) -> Replicated:
        self.module.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Replicated:
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.module._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.module._load_from_state_dict(*args)

    def extra_repr(self) -> str:
        names = ", ".join(map(str, self.devices))
        return f"{type(self.module).__name__} on {names}; merges on {self.merge_device}"


def _device(device: Device) -> torch.device:
    """The device with its index; UsageError if this machine has none of this name."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"{device!r} is no device: {str(error).splitlines()[0]}") from error
    if found.type in ("cpu", "meta"):
        return torch.device(found.type)
    try:
        module: Any = torch.get_device_module(found)
        count = module.device_count() if module.is_available() else 0
    except (AttributeError, RuntimeError):
        count = 0
    if (found.index or 0) >= count:
        here = f"{count} of kind {found.type}" if count else "no such device"
        raise UsageError(f"there is no {found}: PyTorch finds {here} on this machine")
    return found if found.index is not None else torch.device(found.type, module.current_device())


def _call(function: Callable[..., Any], inputs: tuple[Any, Any]) -> Callable[[], Any]:
    args, kwargs = inputs
    if isinstance(function, nn.Module):
        return lambda: function(*args, **kwargs)
    return lambda: function(args, kwargs)


# --- inputs and outputs -----------------------------------------------------------------------------


def _rows(leaves: Sequence[Any]) -> int:
    """The examples of a batch; UsageError if the arguments do not say how many."""
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if len({shape[0] for shape in shapes}) != 1:
        found = "of shapes " + ", ".join(map(str, shapes)) if shapes else "without a tensor"
        raise UsageError(
            f"a replicated model was called with arguments {found}, which cannot be divided: dimension 0 of "
            "each tensor must be the batch; keep other tensors in the model, as buffers"
        )
    return shapes[0][0]


def _placed(leaf: Any, device: torch.device, low: int = 0, high: int | None = None) -> Any:
    """Rows `low` to `high` of a tensor, on a device; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    part = leaf if high is None or not leaf.dim() else leaf[low:high]
    return part.to(device, non_blocking=device.type != "cpu")


def _merged(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """The outputs of all replicas as one."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    if any(form != flat[0][1] for _, form in flat):
        raise UsageError(
            "the replicas of a model returned outputs of different structure, which cannot be merged: return "
            "the same structure for batches of every size"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_column(column, sizes, device) for column in columns], flat[0][1])


def _column(parts: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """One leaf of the output, of which each replica has returned a part."""
    if all(isinstance(part, Tensor) for part in parts):
        if any(not part.dim() or len(part) != size for part, size in zip(parts, sizes, strict=True)):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise UsageError(
                f"a replicated model returned tensors of shapes {shapes} for {', '.join(map(str, sizes))} "
                "examples, which cannot be merged: return tensors with a row per example, and compute means "
                "and losses outside the model"
            )
        return torch.cat([part.to(device) for part in parts])
    if all(type(part) is type(parts[0]) and _equal(part, parts[0]) for part in parts):
        return parts[0]
    raise UsageError(
        f"the replicas of a model returned different values, {parts[0]!r:.40} and others, which cannot be "
        "merged: return tensors with a row per example"
    )


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # arrays
        return False


# --- replicas ---------------------------------------------------------------------------------------


def _replica(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the module's structure for one pass on a device.

    Parameters that are there already are shared, others are copied so that gradients find their way back.
    Buffers are copied: only those of the first device last.
    """
    copies: dict[nn.Module, nn.Module] = {}
    for each in module.modules():
        copies[each] = each._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    tensors: dict[Tensor, Tensor] = {}  # a tied one is copied once
    for original, copy in copies.items():
        for name, child in original._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in original._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:  # not into `_parameters`: recurrent layers keep a second list, by their own __setattr__
                setattr(copy, name, tensors.setdefault(parameter, parameter.to(device)))
        for name, buffer in original._buffers.items():
            if buffer is not None:
                copy._buffers[name] = tensors.setdefault(buffer, buffer.to(device, copy=True))
    return copies[module]


def _drop_hooks(replica: nn.Module) -> None:
    """Leaves out hooks that a session has registered on the module: they are about the whole batch."""
    for module in replica.modules():
        for name in _HOOKS:
            hooks = module.__dict__[name]
            if any(isinstance(hook, Hook) for hook in hooks.values()):
                kept = {key: hook for key, hook in hooks.items() if not isinstance(hook, Hook)}
                module.__dict__[name] = type(hooks)(kept)


def _seed_apart(devices: Sequence[torch.device]) -> None:
    """Gives generators of different devices different seeds: `torch.manual_seed` seeds all of them alike."""
    seeds: set[int] = set()
    for generator in _generators(devices):
        seed = generator.initial_seed()
        if seed in seeds:
            seed = (seed + 0x9E3779B97F4A7C15 * len(seeds)) % (1 << 63)
            generator.manual_seed(seed)
        seeds.add(seed)


def _generators(devices: Sequence[torch.device]) -> Iterator[torch.Generator]:
    for device in dict.fromkeys(devices):
        if device.type not in ("cpu", "meta"):
            generators = getattr(torch.get_device_module(device), "default_generators", ())
            if len(generators) > (device.index or 0):
                yield generators[device.index or 0]
