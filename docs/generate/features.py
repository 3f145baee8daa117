"""What training loops do, and which strategies support it: as the tests have found."""

from __future__ import annotations

import json
from pathlib import Path

from docs.generate.composition import answer_table

OUTCOMES = Path(__file__).parents[2] / "tests" / "features" / "outcomes.json"
WORKS = "works"

PAGE = """\
# What training loops do

Each row is a short training script (`tests/features/scripts.py`), each column one strategy of a family. The
tests run all of them on simulated workers, and some on real processes. ✓ means that it works as it does
alone. A number refers to the message below the table, with which the run ends before it trains wrongly.

{table}

`python -m tests.features` runs everything again and rewrites the table.
"""


def page() -> str:
    outcomes = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    answers = {
        (feature, f"`{strategy}`"): "" if outcome == WORKS else outcome.replace(strategy, "this strategy")
        for feature, row in outcomes.items()
        for strategy, outcome in row.items()
    }
    return PAGE.format(table=answer_table(answers, "what the script does"))
