"""What training loops do, under every family of strategies: it works, or is refused in one line."""

from __future__ import annotations

import pytest

from tests.features.outcomes import FAMILIES, WORKS, outcome, stored
from tests.features.scripts import FEATURES
from tests.support.combine import each_value

RENEW = "run `python -m tests.features` and read the difference"


@each_value(("strategy", FAMILIES.values()), ("feature", FEATURES))
def test_a_feature_works_or_is_refused_as_the_table_says(feature: str, strategy: str) -> None:
    found = outcome(feature, strategy)
    assert found == stored().get(feature, {}).get(strategy), RENEW
    assert "\n" not in found and "failed: " not in found and "deadlock" not in found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "async", "gossip"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_has_the_same_outcome_on_real_processes(feature: str, strategy: str) -> None:
    assert outcome(feature, strategy, "real") == stored()[feature][strategy]


def test_the_table_of_features_is_complete() -> None:
    assert {name: list(row) for name, row in stored().items()} == {
        name: list(FAMILIES.values()) for name in FEATURES
    }, RENEW


def test_most_features_work_under_every_family() -> None:
    """A refusal is the exception: it says what would work."""
    everywhere = [name for name, row in stored().items() if set(row.values()) == {WORKS}]
    assert len(everywhere) > len(FEATURES) * 2 // 3
