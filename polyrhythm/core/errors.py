"""Every error raised on purpose. Each says what was requested, what is wrong and what would work."""

from __future__ import annotations


class PolyrhythmError(Exception):
    """Something went wrong while training. The command line prints it as one line and exits with 1."""

    exit_code = 1


class UsageError(PolyrhythmError):
    """The request cannot work. The command line prints this as one line and exits with 2."""

    exit_code = 2


class UnknownName(UsageError):
    """No strategy or codec of this name is known here; another process may know it."""


class WireError(PolyrhythmError):
    """Invalid bytes from the wire; names the sender. The node that read them continues."""


class WaitError(PolyrhythmError):
    """A wait ended without its result; names who waited for whom, for what and how long."""


class PeerLost(WaitError):
    """The node that another waited for is gone."""

    def __init__(self, message: str, untouched: bool = False) -> None:
        super().__init__(message)
        self.untouched = untouched  # the exchange that failed has changed no parameter


class NotFinite(PolyrhythmError):
    """A gradient, or a codec's residual, holds NaN or infinity; names the worker."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM during a run; the caller of the run gets a KeyboardInterrupt."""

    exit_code = 130
