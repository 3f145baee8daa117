"""The final parameters of a divided model: each worker sends its part to the launcher, and nobody has all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.core.result_part import ResultPart
from polyrhythm.session.result import FileLayout, content, savable

MESSAGE = 1 << 24  # bytes of a message, so that no process needs memory for more
_TENSORS = 1000  # in a message


@dataclass(frozen=True)
class TensorShare:
    """A worker's part of a tensor that is divided along a dimension: part `rank` of each block."""

    dim: int
    blocks: int
    rank: int
    count: int

    def whole(self, shape: Sequence[int]) -> list[int]:
        """The shape of the tensor, from that of a part."""
        return [size * self.count if dim == self.dim else size for dim, size in enumerate(shape)]

    def part(self, tensor: Tensor, size: int, start: int) -> ResultPart:
        """Where a part belongs in a file of `size` bytes in which the tensor starts at `start`."""
        piece = math.prod(tensor.shape[self.dim :]) // self.blocks * tensor.itemsize
        return ResultPart(size, start + self.rank * piece, piece, piece * self.count)


class ResultParts:
    """The parts of one worker, and where they belong in the file.

    `owned`: by the name of a parameter or buffer, True if this worker has it. The worker that `leads` sends
    the beginning of the file and all other tensors of the state, which every worker has.
    `shares`: by name, of tensors that are divided; equal on all workers but for the rank.
    """

    def __init__(
        self, model: nn.Module, owned: Callable[[str], bool], shares: Mapping[str, TensorShare], leads: bool
    ) -> None:
        state = {key: each for key, each in model.state_dict().items() if savable(each)}
        origins = _origins(model, state)
        self._shares = {key: shares[name] for key, name in origins.items() if name in shares}
        shapes = {
            key: self._shares[key].whole(each.shape) if key in self._shares else list(each.shape)
            for key, each in state.items()
        }
        self._file = FileLayout({key: (each.dtype, shapes[key]) for key, each in state.items()})
        self._own = {
            key: state[key] for key in self._file.places if (owned(origins[key]) if key in origins else leads)
        }
        self._leads = leads
        for key, tensor in self._own.items():
            if tensor.is_meta:
                raise UsageError(
                    f"a hook of state_dict() computes {key!r} from tensors that other workers hold, so it "
                    "cannot be saved: remove the hook, or apply it to the consensus.safetensors of the run"
                )
        places = {origins[key]: place for key, place in self._file.places.items() if key in origins}
        self._parameters = [places[name] for name, _ in model.named_parameters() if name in places]

    def messages(self) -> Iterator[tuple[ResultPart, list[Tensor]]]:
        """What this worker sends."""
        size, run, start = self._file.size, [self._file.header] if self._leads else [], 0
        for name, tensor in self._own.items():
            begin, data = self._file.places[name][0], content(tensor)
            if name in self._shares:
                yield from _cut(self._shares[name].part(tensor, size, begin), data)
                continue
            held = sum(each.nbytes for each in run)
            if run and (start + held != begin or held + data.nbytes > MESSAGE or len(run) == _TENSORS):
                yield ResultPart(size, start, held), run
                run = []
            if data.nbytes > MESSAGE:
                yield from _cut(ResultPart(size, begin, data.nbytes), data)
            elif data.nbytes:
                start, run = start if run else begin, [*run, data]
        if run:
            yield ResultPart(size, start, sum(each.nbytes for each in run)), run

    @property
    def order(self) -> Tensor:
        """The beginning and end of each parameter in the file, in the order of the model, as bytes."""
        return torch.tensor(self._parameters, dtype=torch.int64).reshape(-1).view(torch.uint8)


def _origins(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """By key of the state: the name of its parameter or buffer, which hooks of `state_dict()` may change."""
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    own = {name for name, _ in tensors}
    names = {_memory(each): name for name, each in reversed(tensors) if savable(each)}
    found = {key: key if key in own else names.get(_memory(each)) for key, each in state.items()}
    return {key: name for key, name in found.items() if name is not None}


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def _cut(part: ResultPart, data: Tensor) -> Iterator[tuple[ResultPart, list[Tensor]]]:
    """One tensor in messages that are not too long."""
    if part.piece > MESSAGE:
        for number, (start, stop) in enumerate(part.places(data.nbytes)):
            for at in range(0, stop - start, MESSAGE):
                piece = data[number * part.piece :][at : min(at + MESSAGE, part.piece)]
                yield ResultPart(part.size, start + at, piece.nbytes), [piece]
        return
    several = MESSAGE // part.piece
    for number in range(0, data.nbytes // part.piece, several):
        piece = data[number * part.piece : (number + several) * part.piece]
        yield ResultPart(part.size, part.start + number * part.stride, part.piece, part.stride), [piece]
