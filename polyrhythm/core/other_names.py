"""Names that other tools and papers have for strategies, and what to write here instead."""

from __future__ import annotations

import re
from collections.abc import Collection

_SHARDED = "keeps a part of the parameters on each worker, and here each has all of them: use allreduce"
OTHER_NAMES = {
    **dict.fromkeys(
        ("ddp", "horovod", "dp", "nccl", "gloo", "ring", "all-reduce", "all_reduce"), "allreduce"
    ),
    **dict.fromkeys(("ps", "downpour", "asgd", "parameter-server"), "async"),
    **dict.fromkeys(("ssgd", "bsp"), "sync"),
    **dict.fromkeys(("localsgd", "local-sgd", "local_sgd", "fedavg"), "local:8"),
    **dict.fromkeys(("dpsgd", "d-psgd"), "gossip"),
    **dict.fromkeys(("ad-psgd",), "adpsgd"),
    **dict.fromkeys(("sgp",), "push"),
    **dict.fromkeys(("fedbuff",), "softsync"),
    **dict.fromkeys(("hivemind", "torchft", "opendiloco"), "diloco:50"),
}
SHARDED = {"fsdp", "fsdp2", "zero", "zero1", "zero2", "zero3", "deepspeed"}


def instead(name: str, known: Collection[str]) -> str:
    """What to write instead of an unknown name; "" if it is like no other."""
    plain = name.lower()
    if plain in SHARDED:
        return f"{name} {_SHARDED}"
    if plain in OTHER_NAMES:
        return f"it is called {OTHER_NAMES[plain]!r} here"
    found = re.fullmatch(r"([a-z0-9_-]+?)\s*[,=(;.]\s*(.+?)\)?", plain)
    if found is not None and found[1] in known:
        return f"did you mean '{found[1]}:{found[2]}'?"
    return ""
