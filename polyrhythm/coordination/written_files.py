"""WrittenFiles: the last file that the script has saved, and those that several workers write. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.coordination.membership import Membership
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import NOWHERE, FileWritten


class WrittenFiles:
    """The files that scripts write by `torch.save` and `session.save`, and who wrote each first."""

    def __init__(self, membership: Membership, say: Callable[[str], None]) -> None:
        self._membership, self._say = membership, say
        self._first: dict[tuple[str, str], Peer] = {}  # by host and path
        self._said = False
        self.last: FileWritten | None = None

    def add(self, peer: Peer, file: FileWritten, respond: Callable[[None], None]) -> None:
        """A worker has written a file; says once if another worker of the same host had written it, too."""
        respond(None)
        self.last = file
        if self._said or file.once:
            return
        _, host, _ = self._membership.members.get(peer, NOWHERE)
        first = self._first.setdefault((host, file.path), peer)
        if first != peer:
            self._said = True
            self._say(
                f"{first} and {peer} both write {file.path} by torch.save(): the last one wins, or the file "
                "is torn; use session.save(value, path), which writes it once, or session.worker in its name"
            )
