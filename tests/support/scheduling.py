"""Which tests pytest-xdist runs in the same process, and in which order."""

from __future__ import annotations

import re
from typing import Any

import pytest

# Files that take long come first: one that began last would leave the other processes idle. The rows of
# conformance come last, because they are many small groups.
FIRST = (
    "test_signals.py", "test_hosts.py", "test_batch_norm.py", "test_cli.py", "test_algorithms.py",
    "test_two_level_laws.py",
    "test_failures.py", "test_golden.py", "test_gossip.py", "test_ddp.py", "test_broadcast_laws.py",
)  # fmt: skip
LAST = "test_conformance.py"
ROW = re.compile(r"test_conformance\.py::\w+\[(?:simulated-|real-)?(?P<row>.*)\]$")
COLLECTED = pytest.StashKey[frozenset[str]]()  # the ids of all tests, those that a marker deselects too


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    rank = {name: number for number, name in enumerate(FIRST)} | {LAST: len(FIRST) + 1}
    items.sort(key=lambda item: rank.get(item.path.name, len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class SharedRuns(LoadScopeScheduling):
        """The tests of a file run in one process, and so do the tests of one row of conformance."""

        def _split_scope(self, nodeid: str) -> str:
            row = ROW.search(nodeid)
            return f"row {row['row']}" if row else nodeid.partition("::")[0]

    return SharedRuns(config, log)
