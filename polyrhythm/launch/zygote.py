"""The zygote: a process that imports torch once and forks every node.

It has one thread for all of its life, so forking is safe, and it owns its children: when the launcher goes,
however it goes, the socket between them closes and the zygote ends every child before itself. A child in
turn dies with the zygote, and the launcher then ends what the child had started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module

from polyrhythm.core.peer import Peer
from polyrhythm.launch.program import Program
from polyrhythm.wire.arena import Arenas

_PR_SET_PDEATHSIG = 1
_LIMIT = 1 << 16
POLITE = (signal.SIGINT, signal.SIGTERM)  # how people, and those who look after processes, ask for an end


@dataclass(frozen=True)
class NodeConfig:
    """What every node is given at birth. The key never appears in a command line, an environment or a log."""

    key: bytes = field(repr=False)
    host: str  # nodes with the same host share memory
    began: float
    threads: int
    wait: float
    listen: str
    arenas: Arenas | None = None
    collective: str = "auto"
    strategy: str = ""  # what has to be compiled is what it needs


class Zygote:
    """The launcher's handle on it. `start` returns at once; the zygote says "ready" when torch is there.

    What is `private` to the launcher the zygote closes: a connection ends with its launcher, not with nodes.
    """

    def __init__(self, program: Program, config: NodeConfig, private: Sequence[socket.socket] = ()) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        self._ready = False
        self._groups: dict[Peer, int] = {}  # the nodes that live, each with the process group it leads
        # What a signal raises while Python forks is lost, in one of its hooks.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._socket.close()
                for each in private:
                    os.close(each.detach())
                _Forker(there, program, config).run(mask)
            finally:
                os._exit(0)
        there.close()
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:  # it came meanwhile
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(
        self, peer: Peer, incarnation: int, arena: int, coordinator: str, outputs: tuple[int, int]
    ) -> None:
        """Asks for a node whose standard output and error are these files."""
        command = ["fork", peer.role, peer.rank, incarnation, arena, coordinator]
        with contextlib.suppress(OSError):  # if it is gone, `hear` tells
            socket.send_fds(self._socket, [json.dumps(command).encode()], list(outputs))

    def kill(self, number: int) -> None:
        """Sends a signal to every node that still lives, and to what it started."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(["kill", int(number)]).encode())

    def hear(self) -> list[object]:
        """What the zygote says next: ["ready"], ["failed", why], ["forked", role, rank, pid],
        ["exit", role, rank, status], or [] when it is gone."""
        try:
            data = self._socket.recv(_LIMIT)
        except ConnectionError:
            data = b""
        words = list(json.loads(data)) if data else []
        self._ready |= bool(words)
        if words and words[0] == "forked":
            self._groups[Peer(words[1], words[2])] = words[3]
        elif words and words[0] == "exit":
            self._groups.pop(Peer(words[1], words[2]), None)
        return words

    def close(self) -> None:
        """Ends it with all its children."""
        self._socket.close()
        if not self._ready:
            os.kill(self.pid, signal.SIGKILL)  # it has no children yet, and may be long in importing torch
        with contextlib.suppress(ChildProcessError):
            status = os.waitpid(self.pid, 0)[1]
            if os.WIFSIGNALED(status):  # it could not end what its children have started
                for group in self._groups.values():
                    _end_group(group)


class _Forker:
    """The zygote's own side."""

    def __init__(self, there: socket.socket, program: Program, config: NodeConfig) -> None:
        self._there, self._program, self._passport = there, program, config
        self._children: dict[int, Peer] = {}

    def run(self, mask: set[int | signal.Signals]) -> None:
        for number in POLITE:
            signal.signal(number, signal.SIG_IGN)  # the launcher hears them and ends all of us in order
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # it would start threads on import
        # Every optimizer imports the compiler on first use: once here, instead of in every node.
        try:
            for name in ("torch._dynamo", "torch.utils.data", "polyrhythm.launch.child"):
                import_module(name)
        except Exception as error:
            return self._say("failed", f"torch cannot be imported: {error!r}")
        if self._passport.strategy:  # compiled once here too, for numbers of the usual kind
            import torch

            from polyrhythm.core.registry import parse

            with contextlib.suppress(Exception):  # whatever it is, the nodes will say so
                parse(self._passport.strategy).prepare(torch.float32)
        try:
            self._say("ready")
            while True:
                ready, _, _ = select.select([self._there.fileno(), read], [], [])
                if read in ready:
                    os.read(read, 4096)
                    self._reap()
                if self._there.fileno() in ready and not self._obey():
                    break
        except OSError:
            pass  # the launcher is gone
        finally:
            self._kill(signal.SIGKILL)

    def _obey(self) -> bool:
        data, files, _, _ = socket.recv_fds(self._there, _LIMIT, 2)
        if not data:
            return False
        command = json.loads(data)
        if command[0] == "kill":
            self._kill(command[1])
        else:
            self._fork(Peer(command[1], command[2]), command[3], command[4], command[5], files)
        return True

    def _fork(self, peer: Peer, incarnation: int, arena: int, coordinator: str, files: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children[pid] = peer
            self._say("forked", peer.role, peer.rank, pid)
            for file in files:
                os.close(file)
            return
        os.setsid()  # a group of its own, so that what it starts can be ended with it
        _die_with(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._there.close()
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        for file in files:
            os.close(file)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from polyrhythm.launch import child

        child.be(peer, incarnation, arena, coordinator, self._passport, self._program)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            peer = self._children.pop(pid, None)
            _end_group(pid)  # what the node started and left behind
            if peer is not None:
                self._say("exit", peer.role, peer.rank, os.waitstatus_to_exitcode(status))

    def _kill(self, number: int) -> None:
        for pid in self._children:
            _end_group(pid, number)

    def _say(self, *words: object) -> None:
        self._there.send(json.dumps(words).encode())


def _end_group(group: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _die_with(parent: int) -> None:
    """Asks the kernel to end this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
