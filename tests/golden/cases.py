"""Which runs the golden file holds. Every registered strategy and codec is among them by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from polyrhythm.core.registry import describe, parse

World = Literal["simulated", "real"]


@dataclass(frozen=True)
class Case:
    """One run, by default in simulation and without failures."""

    strategy: str
    workers: int = 3  # an odd number: to divide by a power of two would hide how means are rounded
    servers: int | Literal["colocated"] | None = None  # None lets a strategy have its default
    optimizer: str = "momentum"
    collective: str = "auto"
    batch_norm: str = ""  # if any, the model has a BatchNorm layer
    seed: int = 1
    failures: bool = False
    world: World = "simulated"

    @property
    def name(self) -> str:
        """What the case is called in the golden file: the strategy, then whatever is not the default."""
        parts = [self.strategy]
        parts += [f"workers={self.workers}"] if self.workers != 3 else []
        parts += [f"servers={self.servers}"] if self.servers else []
        parts += [f"optimizer={self.optimizer}"] if self.optimizer != "momentum" else []
        parts += [f"collective={self.collective}"] if self.collective != "auto" else []
        parts += [f"batch_norm={self.batch_norm}"] if self.batch_norm else []
        parts += [f"seed={self.seed}"]
        parts += ["failures"] if self.failures else []
        parts += ["real"] if self.world == "real" else []
        return " ".join(parts)

    @property
    def simulated(self) -> Case:
        """The simulated run that must give the same bits."""
        return replace(self, world="simulated")


# Fields that change what is computed. The default periods are longer than these runs, hence some short ones.
VARIANTS = [
    Case("allreduce", collective="ring"),
    Case("allreduce", optimizer="adamw"),
    Case("local:3"),
    Case("local:3,momentum=average"),
    Case("local:3,momentum=average", optimizer="adamw"),
    Case("local:3,momentum=reset"),
    Case("local:auto,longest=4"),
    Case("average:3,momentum=average"),
    Case("postlocal:3,after=7"),
    Case("slowmo:3"),
    Case("slowmo:3,alpha=0.9,momentum=average"),
    Case("diloco:4"),
    Case("diloco:4", optimizer="adamw"),
    Case("streaming-diloco:6,fragments=3"),
    Case("streaming-diloco:8,fragments=2,overlap=3,mix=0.1"),
    Case("noloco:2", workers=5),
    Case("sync:clip=0.5", servers=2),
    Case("sync:prefetch=yes"),
    Case("async", servers=3),
    Case("async", servers="colocated"),
    Case("async:weight=1/tau,discard=4", servers=2),
    Case("async:weight=exp,reduce=sum,wait_for=2"),
    Case("async:push_every=3,fetch_every=2", servers=2),
    Case("async:prefetch=yes"),
    Case("ssp:0"),
    Case("ssp:1", servers=2),
    Case("backup:1,clip=0.5", servers=3),
    Case("softsync:2,pull=next-version", servers=3),
    Case("dc-asgd:2,adaptive=yes", servers=2),
    Case("dana-slim:prefetch=yes"),
    Case("dana-zero:weight=exp", servers=2),
    Case("ormo:prefetch=yes"),
    Case("easgd:2,alpha=0.2,max_staleness=0", servers=2),
    Case("delayed-nesterov:3"),
    Case("delayed-nesterov:3,dynamic=yes", servers=2),
    Case("gossip", workers=5),
    Case("gossip:complete,order=step-then-mix"),
    Case("gossip:exponential", workers=5),
    Case("gossip:exponential-all", workers=5),
    Case("choco:0.5", workers=5),
    Case("adpsgd:0-1/1-2/2-3/3-4", workers=5),
    Case("push:1", workers=5),
    Case("push:2,fanout=2", workers=5),
    Case("broadcast:0.02,pulses=one"),
    Case("broadcast:0.004,topology=tree,fanout=1,warmup=3,reduce=mean"),
    Case("hogwild:lock=yes"),
    Case("allreduce / local:3,momentum=average"),
    Case("allreduce / average:3"),
    Case("allreduce / slowmo:3"),
    Case("allreduce / diloco:4"),
    Case("allreduce / streaming-diloco:6,fragments=3"),
    Case("local:2 / diloco:4"),
    Case("average:2,momentum=average / average:4,momentum=average"),
    Case("allreduce", batch_norm="local"),
    Case("allreduce", batch_norm="rank0"),
    Case("allreduce", batch_norm="mean"),
    Case("allreduce", batch_norm="sync"),
    Case("allreduce", batch_norm="recompute"),
    Case("gossip", batch_norm="mean"),
]

# By default these would send next to nothing of so small a model. (DGC has a momentum of its own.)
SMALL = {
    "topk": Case("allreduce+topk:0.3"),
    "randomk": Case("allreduce+randomk:0.4"),
    "dgc": Case("allreduce+dgc:0.3", optimizer="plain"),
    "threshold": Case("allreduce+threshold:0.004,pulses=many"),
}
CODED = [
    Case("allreduce+int8", collective="ring"),
    Case("allreduce+topk:0.1,warmup=3"),
    Case("allreduce+threshold:0.1,adaptive=yes,high=0.5"),
    Case("allreduce+sign:vote=yes,momentum=0.5"),
    Case("allreduce+dgc:0.3,nesterov=yes,clip=1", optimizer="plain"),
    Case("allreduce+int4:8,dense=1d"),
    Case("allreduce+qsgd:1"),
    Case("local:3+topk:0.1,dense=1d"),
    Case("average:3+topk:0.3"),
    Case("postlocal:3,after=7+sign"),
    Case("slowmo:3+int8:8"),
    Case("diloco:4+int4"),
    Case("streaming-diloco:6,fragments=3+topk:0.3"),
    Case("sync+int8", servers=2),
    Case("sync+terngrad", servers=2),
    Case("async+topk:0.1,values=fp32,pick=exact,per=layer", servers=2),
    Case("async+topk:0.4,pull=dense", servers=2),
    Case("async+threshold:0.01,pulses=many", servers=2),
    Case("async+powersgd", servers=2),
    Case("async+int4:rounding=stochastic,feedback=no", servers=2),
    Case("ssp:2+randomk:0.5,feedback=no"),
    Case("ssp:1+qsgd"),
    Case("dc-asgd+topk:0.4"),
    Case("dana-zero+fp16"),
    Case("easgd+int8"),
    Case("delayed-nesterov:3+int8"),
    Case("choco:0.5+topk:0.3"),
    Case("choco:topology=complete+int8"),
    Case("allreduce+bf16 / diloco:4+int4"),
    Case("allreduce+topk:0.3 / local:3+topk:0.3,dense=1d"),
]

# What also runs with failures, besides every strategy as it is by default, if the others survive.
FAILING = [
    Case("noloco:2", workers=5),
    Case("delayed-nesterov:3"),
    Case("async:weight=1/tau,discard=4", servers=2),
    Case("async:prefetch=yes"),
    Case("gossip:complete,order=step-then-mix"),
    Case("push:1", workers=5),
    Case("broadcast:0.004,topology=tree,fanout=1,warmup=3,reduce=mean"),
    Case("async+topk:0.4,pull=dense", servers=2),
    Case("ssp:1+qsgd"),
    Case("choco:0.5+topk:0.3"),
]

# What also runs on real processes, besides every strategy in lockstep as it is by default.
REAL = [
    Case("local:3,momentum=average"),
    Case("diloco:4"),
    Case("streaming-diloco:6,fragments=3"),
    Case("slowmo:3"),
    Case("noloco:2", workers=5),
    Case("sync:clip=0.5", servers=2),
    Case("allreduce", collective="ring"),
    Case("allreduce", batch_norm="sync"),
    Case("allreduce+topk:0.3"),
    Case("sync+int8", servers=2),
    Case("local:2 / diloco:4"),
]


def cases() -> list[Case]:
    """All cases in the order of their names."""
    found = sorted(_cases(), key=lambda case: case.name)
    assert len({case.name for case in found}) == len(found), "two cases have the same name"
    return found


def chosen(only: str = "", world: World | None = None) -> list[Case]:
    """The case of this name; or those that match a shell pattern, or contain a text without wildcards."""
    here = [case for case in cases() if world in (None, case.world)]
    if exact := [case for case in here if case.name == only]:
        return exact
    pattern = only if any(sign in only for sign in "*?[") else f"*{only}*"
    return [case for case in here if fnmatchcase(case.name, pattern)]


def _cases() -> Iterator[Case]:
    plain = [Case(row.name) for row in describe()]
    coded = [SMALL.get(row.name, Case(f"allreduce+{row.name}")) for row in describe("codec")]
    for case in (*plain, *coded):
        yield from (case, replace(case, seed=2))
    yield from (*VARIANTS, *CODED)
    for case in (*plain, *FAILING):
        if parse(case.strategy).traits.survives:
            yield replace(case, failures=True)
    for case in (*plain, *REAL):
        if parse(case.strategy).traits.lockstep:
            yield replace(case, world="real")
