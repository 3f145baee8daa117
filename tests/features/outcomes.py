"""Runs every feature under one strategy of each family, and compares with what `outcomes.json` says."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import polyrhythm as pr
from tests.features.scripts import FEATURES
from tests.support.runs import run_in

FILE = Path(__file__).parent / "outcomes.json"
WORKS = "works"
WORKERS = 2
FAMILIES = {
    "all-reduce": "allreduce", "local SGD": "local:2", "outer optimizer": "diloco:2",
    "synchronous server": "sync", "asynchronous server": "async", "stale gradients": "dana-slim",
    "gossip": "gossip", "asynchronous, no server": "adpsgd", "broadcast": "broadcast",
    "shared memory": "hogwild", "two levels": "allreduce / local:2", "with a codec": "async+topk:0.5",
}  # fmt: skip
SITES = '[[hosts]]\ncount = 2\nsite = "a"\n[[hosts]]\ncount = 2\nsite = "b"\n'


def outcome(feature: str, strategy: str, world: str = "simulated") -> str:
    """ "works", or the message with which the feature is refused."""

    def main() -> None:
        FEATURES[feature](pr.init())

    levels = "/" in strategy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_in(
                world, main, strategy=strategy, workers=2 * WORKERS if levels else WORKERS,
                cluster=SITES if levels else None,
            )  # fmt: skip
    except pr.PolyrhythmError as error:
        return re.sub(r" \([^()]*, line \d+\)$", "", str(error))  # without the line of the script
    return WORKS


def stored() -> dict[str, dict[str, str]]:
    """The outcomes by feature and strategy."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def renew() -> None:
    """Runs everything and writes the file."""
    made = {
        feature: {strategy: outcome(feature, strategy) for strategy in FAMILIES.values()}
        for feature in FEATURES
    }
    FILE.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
