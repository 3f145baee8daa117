"""Every error raised on purpose, written for a person: what was asked, what is wrong, what would work."""

from __future__ import annotations


class PolyrhythmError(Exception):
    """Something went wrong while training. The command line prints it as one line and exits with 1."""

    exit_code = 1


class UsageError(PolyrhythmError):
    """What was asked for cannot work. The command line prints it as one line and exits with 2."""

    exit_code = 2


class WireError(PolyrhythmError):
    """Bytes from the wire that no honest node sends; names the sender. The node that read them lives on."""


class WaitError(PolyrhythmError):
    """A wait ended without what it waited for; names who waited for whom, for what and how long."""


class PeerLost(WaitError):
    """The node that was waited for is gone."""


class NotFinite(PolyrhythmError):
    """A gradient, or what a codec keeps of it, holds NaN or infinity; names the worker."""


class Interrupted(BaseException):
    """Ctrl-C, or a polite request to end: what a run hears; its caller gets a KeyboardInterrupt."""

    exit_code = 130
