"""Plan: the configuration of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import EventPolicy
from polyrhythm.core.mesh import Axis, Mesh


@dataclass(frozen=True)
class Plan:
    """The configuration of a run: data only.

    It is made once, from the command line or from Python, and passed whole to the launcher, the coordinator
    and all nodes, also those on other hosts. `config.json` in the run folder holds it.
    """

    strategy: str | None = None  # as text; None: the script chooses
    workers: int = 2
    servers: int | None = None  # None: as many as the strategy needs
    sites: Mapping[str, Sequence[int]] = field(default_factory=dict)  # the ranks of the workers at each site
    # The class path of each name in `strategy` that is not built in, as in {"codec round": "mine:Round"}.
    classes: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()  # modules that define strategies and codecs
    colocated: bool = False  # one server beside each worker
    servers_at: str | None = ""  # the site of the servers; "": none, None: each is beside a worker
    batch_norm: str | None = None  # None: the script chooses
    collective: str = "auto"
    balance: bool = False  # give fast workers larger batches
    check_replicas: int | None = None  # compare replicas every so many steps; 0: never, None: every 100
    seed: int = 0
    threads: int = 0  # per worker; 0: an equal share of the cores
    timeout: float = 1800.0  # seconds, for every wait
    restarts: int = 0
    here: int | None = None  # workers on the first host; None: all
    listen: str = "unix:"
    key: str | None = None  # the file that holds the key
    cluster: str | None = None  # the file that describes hosts, links and sites
    events: EventPolicy = "all"  # which events the run folder records
    world: Literal["run", "simulate"] = "run"
    predicts_with: str | None = None  # the file of the model with which the script predicts, without training
    predictions: str | None = None  # the file for what it predicts
    program: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def local_workers(self) -> int:
        """The number of workers on the first host."""
        return self.workers if self.here is None else self.here

    @property
    def nodes(self) -> int:
        """The number of workers and servers."""
        return self.workers + (self.servers or 0)

    @property
    def mesh(self) -> Mesh:
        """The place of every worker. Without sites all are at one."""
        return self.mesh_of({})

    def mesh_of(self, model: Mapping[Axis, int]) -> Mesh:
        """The place of every worker, where each model is divided along axes of these sizes."""
        return Mesh.of_sites(list(self.sites.values()) or [range(self.workers)], model)

    def by_models(self, size: int) -> Plan:
        """The plan as the workers of the strategy see it, where `size` processes hold one model."""
        sites = {name: sorted({rank // size for rank in ranks}) for name, ranks in self.sites.items()}
        here = None if self.here is None else self.here // size
        return replace(self, workers=self.workers // size, sites=sites, here=here) if size > 1 else self

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, for `config.json` and for messages."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`; fields that it does not know are ignored."""
        try:
            return msgspec.convert(dict(plain), Plan)
        except msgspec.ValidationError as error:
            raise UsageError(f"this is not the plan of a run: {error}") from None

    @staticmethod
    def read(folder: Path) -> Plan:
        """The plan of the run that left this folder."""
        path = folder / "config.json"
        try:
            return Plan.from_json(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; give the folder of a run") from None
        except msgspec.DecodeError as error:
            raise UsageError(f"{path} is not the plan of a run: {error}") from None
