"""The final parameters of a divided model: a file that several workers write."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.coordination.ports import NullRecorder
from polyrhythm.coordination.received_result import ReceivedResult
from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.core.result_part import ResultPart
from polyrhythm.parallel.sharding import Sharding
from polyrhythm.parallel.tensor_parallel import TensorAxis
from polyrhythm.record.result_file import ResultFile, open_result
from polyrhythm.session import result_parts
from polyrhythm.session.result import digest, safetensors
from polyrhythm.session.result_parts import ResultParts, TensorShare

COUNT = 3
DIVIDED = {"rows.weight": Sharding(0), "columns.weight": Sharding(1), "fused.weight": Sharding(0, 2)}
DIVIDED["tied.weight"] = DIVIDED["rows.weight"]


class Model(nn.Module):
    """Layers whose tensors are at different places, some of them divided."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 30), nn.Linear(30, 12).double()
        self.rows, self.columns, self.fused = nn.Linear(5, 6), nn.Linear(12, 7), nn.Linear(4, 18)
        self.tied = self.rows
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("empty", torch.empty(0))
        self.register_state_dict_post_hook(rename)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([3.5, 4.5])

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def rename(_: nn.Module, state: dict[str, Tensor], *__: object) -> None:
    state["old.second"] = state.pop("second.weight")
    state["old.rows"] = state.pop("rows.weight")


def place_of(name: str) -> int:
    return {"f": 0, "s": 1}.get(name[0], 2)


def at(place: int) -> tuple[nn.Module, ResultParts]:
    """The model as one place has it, and what that sends."""
    torch.manual_seed(0)
    model = Model()
    whole = copy.deepcopy(model)
    axis = TensorAxis(place, COUNT)
    for name, parameter in [*model.named_parameters()]:
        if name in DIVIDED:
            parameter.data = axis.shard(parameter, DIVIDED[name])
        elif place_of(name) != place:
            module, _, last = name.rpartition(".")
            model.get_submodule(module)._parameters[last] = nn.Parameter(
                torch.empty_like(parameter, device="meta")
            )
    shares = {name: TensorShare(each.dim, int(each.blocks), place, COUNT) for name, each in DIVIDED.items()}
    return whole, ResultParts(
        model, lambda name: name in DIVIDED or place_of(name) == place, shares, leads=place == 0
    )


@pytest.mark.parametrize("longest", [8, 100, 1 << 24])
def test_parts_of_all_places_are_the_file_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    monkeypatch.setattr(result_parts, "MESSAGE", longest)
    path = tmp_path / "consensus.safetensors"
    file, order = None, torch.empty(0, dtype=torch.uint8)
    for place in reversed(range(COUNT)):  # in any order
        whole, parts = at(place)
        for part, tensors in parts.messages():
            file = file or open_result(path, part.size)
            header = part.start == 0
            assert header or sum(each.nbytes for each in tensors) <= longest
            file.write(part, [each.numpy().data for each in tensors])
        order = parts.order
    assert file is not None and not path.exists()
    starts = iter(order.view(torch.int64).tolist())
    found = file.finish(zip(starts, starts, strict=True))
    assert path.read_bytes() == b"".join(each.numpy().tobytes() for each in safetensors(whole))
    assert found == digest([each.detach().reshape(-1) for each in whole.parameters()])


@pytest.mark.parametrize(
    "part",
    [ResultPart(10, 8, 4), ResultPart(10, 0, 3), ResultPart(10, 0, 2, 9), ResultPart(10, 0, 2, 1)],
    ids=["after the end", "half a piece", "the last after the end", "over each other"],
)
def test_parts_that_do_not_fit_the_file_are_refused(tmp_path: Path, part: ResultPart) -> None:
    file = open_result(tmp_path / "it", 10)
    with pytest.raises(PolyrhythmError, match="could not be written"):
        file.write(part, [bytes(4)])


def test_a_file_is_complete_if_every_byte_has_arrived_once_or_more(tmp_path: Path) -> None:
    whole = bytes(range(10))
    parts = [ResultPart(10, 1, 2, 5), ResultPart(10, 8, 2), ResultPart(10, 0, 1), ResultPart(10, 0, 1)]
    held = [whole[1:3] + whole[6:8], whole[8:], whole[:1], whole[:1]]
    file = open_result(tmp_path / "it", 10)
    for part, content in zip(parts, held, strict=True):
        file.write(part, [content])
    with pytest.raises(PolyrhythmError, match="from byte 3 on did not all arrive"):
        file.finish([])
    file.write(ResultPart(10, 3, 3), [whole[3:6]])
    file.finish([])
    assert (tmp_path / "it").read_bytes() == whole


class FullDisk(NullRecorder):
    """A recorder that has no room for parts, and remembers a whole file."""

    saved = b""

    def consensus(self, file: Sequence[bytes | memoryview]) -> None:
        self.saved = b"".join(file)

    def consensus_file(self, size: int) -> ResultFile:
        raise PolyrhythmError("no room")


def test_after_a_part_has_failed_nothing_is_saved() -> None:
    record, failures = FullDisk(), list[str]()
    received = ReceivedResult(record, failures.append)
    received.add(ResultPart(8, 0, 4), [memoryview(b"abcd")])
    assert received.complete("", [memoryview(bytes(16))]) == "" and record.saved == b""
    assert failures[0] == "no room"
    assert received.complete("digest", [memoryview(b"whole")]) == "digest" and record.saved == b"whole"


@pytest.mark.parametrize("how", ["the run fails", "a part is missing", "a part does not fit"])
def test_parts_of_a_failed_run_are_removed(tmp_path: Path, how: str) -> None:
    class Record(NullRecorder):
        def consensus_file(self, size: int) -> ResultFile:
            return open_result(tmp_path / "it", size)

    failures: list[str] = []
    received = ReceivedResult(Record(), failures.append)
    received.add(ResultPart(8, 0, 4), [memoryview(b"abcd")])
    assert [each.name for each in tmp_path.iterdir()] == ["it.part"]
    if how == "the run fails":
        received.discard()
    elif how == "a part is missing":
        assert received.complete("", [memoryview(bytes(16))]) == ""
    else:
        received.add(ResultPart(8, 6, 4), [memoryview(b"abcd")])
    received.add(ResultPart(8, 4, 4), [memoryview(b"efgh")])  # another worker's, which comes later
    assert [*tmp_path.iterdir()] == [] and len(failures) == (how != "the run fails")
