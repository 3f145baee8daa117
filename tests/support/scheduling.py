"""Which tests pytest-xdist runs in the same process, and in which order: the longest groups first."""

from __future__ import annotations

import re
from typing import Any

import pytest

# The files that take longest, longest first. One that began last would leave the other processes idle.
LONGEST = ("test_conformance.py",)
ROW = re.compile(r"test_conformance\.py::\w+\[(?:simulated-|real-)?(?P<row>.*)\]$")
COLLECTED = pytest.StashKey[frozenset[str]]()  # the ids of all tests, those that a marker deselects too


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class SharedRuns(LoadScopeScheduling):
        """The tests of a file run in one process, and so do the tests of one row of conformance."""

        def _split_scope(self, nodeid: str) -> str:
            row = ROW.search(nodeid)
            return f"row {row['row']}" if row else nodeid.partition("::")[0]

    return SharedRuns(config, log)
