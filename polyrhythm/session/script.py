"""Runs the script of one node to its end, or to the end of the run if that comes first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError
from polyrhythm.core.stopping import RunStopped, Stopping
from polyrhythm.session.context import session
from polyrhythm.session.distributed import DistributedSession
from polyrhythm.session.patches import installed
from polyrhythm.session.places import located, place_of_error


def run_script(script: Callable[[], None], stopping: Stopping) -> None:
    """Runs the script and ends its session. Raises ServerDone on a server."""
    try:
        with installed():
            script()
    except RunStopped:
        if stopping.alone:
            raise PeerLost("the run has failed on another node") from None
    except NameError as error:
        _explain(error)
        raise
    mine = session.get()
    if not isinstance(mine, DistributedSession):
        raise UsageError("the script never called polyrhythm.init() and session.prepare(...)")
    mine.close()


def explained(error: PolyrhythmError) -> str:
    """The message of an error; that of a wrong use with the line of the script."""
    return located(str(error), place_of_error(error)) if isinstance(error, UsageError) else str(error)


def _explain(error: NameError) -> None:
    """A loop without a batch leaves variables unset, such as the last loss."""
    mine = session.get()
    data = mine._data if isinstance(mine, DistributedSession) else None
    if data is not None and (reason := data.no_batch):
        error.args = (f"{error}; {reason}: set the variable before the loop",)


def salvage(error: Exception) -> None:
    """The run has failed: saves what this worker has trained, unless another worker does."""
    mine = session.get()
    if isinstance(mine, DistributedSession):
        mine.stopping.salvaging.set()
        with contextlib.suppress(PolyrhythmError):  # there is nothing more that could be saved
            mine.salvage(untouched=isinstance(error, PeerLost) and error.untouched)
