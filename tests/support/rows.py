"""The table of strategies, with fields other than their defaults and with codecs, that whole suites run over.

A new strategy or codec joins by itself, as it is by default; rows add more. `tests/test_conformance.py` runs
all of them in both worlds, `tests/test_strategy_laws.py` those without a codec. One of a user, which is not
in the package, joins by a row and an import.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from polyrhythm.core import extensions
from polyrhythm.core.registry import describe


class Row(NamedTuple):
    """A strategy and the servers it gets; None lets it have its default. Two levels have two sites."""

    strategy: str
    servers: int | None = None
    least: int = 1  # workers, if there are several

    @property
    def cluster(self) -> Path | None:
        return SITES if " / " in self.strategy else None

    def __str__(self) -> str:
        return f"{self.strategy}/{self.servers}" if self.servers else self.strategy


SITES = Path(__file__).parents[1] / "sites.toml"
MORE = [
    Row("local:3"),
    Row("local:3,momentum=average"),
    Row("local:10,momentum=reset"),
    Row("local:auto,shortest=2,longest=2"),  # one choice, because the clocks of the two worlds differ
    Row("average:3,momentum=average"),
    Row("postlocal:3,after=7"),
    Row("slowmo:3,alpha=0.9,momentum=average"),
    Row("diloco:4+bf16"),
    Row("streaming-diloco:6,fragments=3"),
    Row("streaming-diloco:8,fragments=2,overlap=3,mix=0.1+fp16"),
    Row("sync", 2),
    Row("async", 3),
    Row("async:weight=1/tau,discard=4", 2),
    Row("async:push_every=3,fetch_every=2", 2),
    Row("async:prefetch=yes"),
    Row("ssp:0"),
    Row("ssp:1", 2),
    Row("backup:0"),
    Row("softsync:2,pull=next-version", 3),
    Row("backup:1,clip=0.5", 3),
    Row("sync:clip=0.5", 2),
    Row("dc-asgd:2,adaptive=yes", 2),
    Row("dana-zero:weight=exp", 2),
    Row("easgd:max_staleness=0", 2),
    Row("delayed-nesterov:3,dynamic=yes", 2),
    Row("async+bf16"),
    Row("gossip:complete,order=step-then-mix"),
    Row("gossip:exponential-all"),
    Row("gossip:exponential"),
    Row("adpsgd:ring"),
    Row("push:1"),
    Row("push:2,fanout=2", least=3),
    Row("noloco:4"),
    Row("hogwild:lock=yes"),
    Row("allreduce / local:3,momentum=average"),
    Row("allreduce / average:3"),
    Row("allreduce / slowmo:3"),
    Row("allreduce / diloco:4"),
    Row("allreduce / streaming-diloco:6,fragments=3"),
    Row("local:2 / diloco:4"),
    Row("average:2,momentum=average / average:4,momentum=average"),
    Row("broadcast:0.02,pulses=one"),
    Row("broadcast:0.004,topology=tree,fanout=1,warmup=3"),
]
# Every codec joins by itself too: under allreduce as it is by default, unless that would hardly send anything
# of a network as small as the one here.
SMALL = {
    "topk": "topk:0.3", "randomk": "randomk:0.4", "dgc": "dgc:0.3",
    "threshold": "threshold:0.004,pulses=many",
}  # fmt: skip
CODED = [
    *(Row(f"allreduce+{SMALL.get(each.name, each.name)}") for each in describe("codec")),
    Row("allreduce+topk:0.1,warmup=3"),
    Row("async+topk:0.1,values=fp32,pick=exact,per=layer", 2),
    Row("local:3+topk:0.1,dense=1d"),
    Row("ssp:2+randomk:0.5,feedback=no"),
    Row("allreduce+threshold:0.1,adaptive=yes,high=0.5"),
    Row("async+threshold:0.01,pulses=many", 2),
    Row("allreduce+sign:vote=yes"),
    Row("async+topk:0.4,pull=dense", 2),
    Row("async+powersgd", 2),
    Row("sync+int8", 2),
    Row("ssp:1+qsgd"),
    Row("dc-asgd+topk:0.4"),
    Row("easgd+int8"),
    Row("local:3+int8"),
    Row("average:3+topk:0.3"),
    Row("postlocal:3,after=7+sign"),
    Row("diloco:4+int4"),
    Row("streaming-diloco:6,fragments=3+topk:0.3"),
    Row("delayed-nesterov:3+int8"),
    Row("async+int4:rounding=stochastic,feedback=no", 2),
    Row("allreduce+qsgd:1"),
    Row("sync+terngrad", 2),
    Row("ssp:1+sign"),
    Row("choco:0.5+topk:0.3"),
    Row("choco:topology=complete+int8"),
    Row("choco+sign:dense=1d"),
    Row("allreduce+bf16 / diloco:4+int4"),
    Row("allreduce+topk:0.3 / local:3+topk:0.3,dense=1d"),
    Row("allreduce / streaming-diloco:6,fragments=3+int8"),
]
DEFAULTS = [Row(each.name) for each in describe()]
# The example of a user's own strategy and codec.
extensions.import_file(Path(__file__).parents[2] / "examples" / "own_strategy.py", "own_strategy")
OWN = [Row("bmuf:3"), Row("bmuf:3+turns:2")]
ROWS = [*DEFAULTS, *MORE, *CODED, *OWN]
