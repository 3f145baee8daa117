"""Which tests pytest-xdist runs in the same process: those that share runs, the longest groups first."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

ROW = re.compile(r"test_conformance\.py::\w+\[(?:simulated-|real-)?(?P<row>.*)\]$")


class SharedRuns(LoadScopeScheduling):
    """The tests of a file run in one process, and so do the tests of one row of conformance."""

    def _split_scope(self, nodeid: str) -> str:
        row = ROW.search(nodeid)
        return f"row {row['row']}" if row else nodeid.partition("::")[0]
