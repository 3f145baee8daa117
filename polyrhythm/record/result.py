"""RunResult: what a run has left, for programs and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

PARAMETERS = "consensus.safetensors"


class MetricsTable(list[dict[str, Any]]):
    """What the script has logged, a row for each call of `session.log`: `t`, `node`, `step`, its values."""

    def to_frame(self) -> Any:
        """The table as a DataFrame of pandas."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise UsageError(
                "to_frame() needs pandas; pip install pandas, or use the rows as they are"
            ) from None
        return pandas.DataFrame(self)


@dataclass(frozen=True, eq=False)
class RunResult(Mapping[str, Any]):
    """The result of a run: its summary, its metrics, its folder and the model that it has trained.

    The fields of the summary are attributes, as in `result.wall_s`, and items, as in `result["wall_s"]`. Two
    differ: `result["metrics"]` has the last value of each metric and `result["folder"]` is a text.
    """

    summary: dict[str, Any]
    _rows: list[dict[str, Any]] = field(default_factory=list, repr=False)
    _file: bytes = field(default=b"", repr=False)  # of a run without a folder

    @property
    def folder(self) -> Path | None:
        """The run folder; None if the run has none."""
        return Path(self.summary["folder"]) if "folder" in self.summary else None

    @property
    def metrics(self) -> MetricsTable:
        """All metrics that the script has logged."""
        if self.folder is None:
            return MetricsTable(self._rows)
        from polyrhythm.record.reader import read_metrics

        return MetricsTable(read_metrics(self.folder))

    def model_state(self) -> dict[str, Tensor]:
        """The parameters and buffers of the model that the workers agreed on, for `model.load_state_dict`."""
        import safetensors.torch

        if not self.summary["digest"]:
            raise UsageError("the run has left no model: load the files that its script has saved")
        if self.folder is None:
            return safetensors.torch.load(self._file)
        return safetensors.torch.load_file(self.summary.get("parameters", self.folder / PARAMETERS))

    def load_into(self, model: nn.Module) -> nn.Module:
        """Loads the trained parameters and buffers into a model; returns it."""
        model.load_state_dict(self.model_state())
        return model

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("summary", {}):
            return self.summary[name]
        raise AttributeError(
            f"a run has no {name!r}; its summary has {', '.join(self.__dict__.get('summary', {}))}"
        )

    def __getitem__(self, name: str) -> Any:
        return self.summary[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)


def kept(summary: Mapping[str, Any]) -> str:
    """A line for the user of a run that ended early: what is left of it, and how to continue."""
    folder, file = summary["folder"], summary.get("last_saved")
    saved = f"; the script saved {file['path']} at step {file['step']:,} of a worker" if file else ""
    if not summary["digest"]:
        remedy = f"load that file: {GUIDE}" if file else f"to keep one, save it: {GUIDE}"
        return f"{folder} has the summary, metrics and logs, but no model{saved}; {remedy}"
    path = summary.get("parameters", f"{folder}/{PARAMETERS}")
    whose = summary.get("source", "")
    of = f" of {whose}" if whose else ""
    seen = f"{summary['steps']:,} steps of all workers"
    then = f"to continue, load {'one of them' if file else 'it'} before session.prepare(): {GUIDE}"
    return f"the model{of} after {seen} is in {path}{saved}; {then}"


GUIDE = "docs/how-to/save-and-resume.md"
