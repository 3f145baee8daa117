"""The fork server: a process that imports torch once and forks every node.

It has a single thread, so forking is safe. It owns its children: however the launcher ends, the socket
between them closes, and the fork server kills every child before it exits. If the fork server is killed, the
kernel kills its children, and the launcher kills the processes that they started.

Messages are JSON: the launcher sends ["fork", ...] with the files for the node's output and ["kill",
signal]; the fork server sends ["ready", strategy or null], ["failed", why, exit code], ["forked", role, rank,
pid] and ["exit", role, rank, status].
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
from dataclasses import replace
from importlib import import_module

from polyrhythm.core import extensions
from polyrhythm.core.errors import PolyrhythmError, UnknownName
from polyrhythm.core.peer import Peer
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.launch.node_config import NodeConfig, NodeStart
from polyrhythm.launch.program import Program
from polyrhythm.launch.quick_imports import quick_imports
from polyrhythm.launch.signals import TERMINATION

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LIMIT = 1 << 16


class ForkServer:
    """The side of the launcher. The constructor returns at once; "ready" arrives when torch is imported.

    The fork server closes the sockets in `private`: such a connection must end with its launcher.
    """

    def __init__(self, program: Program, config: NodeConfig, private: Sequence[socket.socket] = ()) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        self._ready = False
        self._groups: dict[Peer, int] = {}  # the process group of each living node
        # An exception raised by a signal handler during a fork would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._socket.close()
                for each in private:
                    os.close(each.detach())
                _show_as("pr fork server")
                _Server(there, program, config).run(mask)
            finally:
                os._exit(0)
        there.close()
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:  # a signal arrived meanwhile
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, start: NodeStart, outputs: tuple[int, int]) -> None:
        """Requests a node whose standard output and error are these files."""
        command = ["fork", start.peer.role, start.peer.rank, *start[1:]]
        with contextlib.suppress(OSError):  # if it is gone, `receive` returns []
            socket.send_fds(self._socket, [json.dumps(command).encode()], list(outputs))

    def kill(self, number: int, node: Peer | None = None) -> None:
        """Sends a signal to a node, or to all that live, and to the processes that they started."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(["kill", int(number), *(node or ())]).encode())

    def receive(self) -> list[object]:
        """Returns the next message of the fork server, or [] if it is gone."""
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
            os.kill(self.pid, signal.SIGKILL)  # it has no children yet, and importing torch takes long
        with contextlib.suppress(ChildProcessError):
            status = os.waitpid(self.pid, 0)[1]
            if os.WIFSIGNALED(status):  # it could not kill the processes that its children started
                for group in self._groups.values():
                    _kill_group(group)


class _Server:
    """The side of the fork server."""

    def __init__(self, there: socket.socket, program: Program, config: NodeConfig) -> None:
        self._there, self._program, self._config = there, program, config
        self._children: dict[int, Peer] = {}

    def run(self, mask: set[int | signal.Signals]) -> None:
        for number in TERMINATION:
            signal.signal(number, signal.SIG_IGN)  # the launcher gets them too, and ends all nodes in order
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # it would start threads on import
        try:
            with quick_imports():
                # Every optimizer imports the compiler on first use: once here, instead of in every node.
                for name in ("torch._dynamo", "torch.utils.data", "polyrhythm.launch.child"):
                    import_module(name)
        except Exception as error:
            return self._send("failed", f"torch cannot be imported: {error!r}", 1)
        try:
            with quick_imports():
                strategy = self._resolve()
        except PolyrhythmError as error:
            return self._send("failed", str(error), error.exit_code)
        try:
            self._send("ready", strategy.to_json() if strategy is not None else None)
            while True:
                ready, _, _ = select.select([self._there.fileno(), read], [], [])
                if read in ready:
                    os.read(read, 4096)
                    self._reap()
                if self._there.fileno() in ready and not self._handle_command():
                    break
        except OSError:
            pass  # the launcher is gone
        finally:
            self._kill(signal.SIGKILL)

    def _resolve(self) -> ResolvedStrategy | None:
        """Imports the modules of the plan and resolves its strategy; None if only the script can define it.

        Kernels of the strategy are compiled here, once for all nodes, for 32-bit floats.
        """
        import torch

        from polyrhythm.session.strategy_check import check_strategy, planned

        plan, resolved = self._config.plan, self._config.strategy
        extensions.search(self._program.folder)
        extensions.import_modules(plan.imports)
        if plan.strategy is None:
            return None
        try:
            strategy = planned(plan)
        except UnknownName:
            if not self._program.may_define(plan.strategy):
                raise
            return None
        if resolved is None:
            resolved = check_strategy(plan, strategy)
            self._config = replace(self._config, strategy=resolved)
        with contextlib.suppress(Exception):  # the nodes report it
            strategy.prepare(torch.float32)
        return resolved

    def _handle_command(self) -> bool:
        """Executes the launcher's next command; False when the launcher is gone."""
        data, files, _, _ = socket.recv_fds(self._there, _LIMIT, 2)
        if not data:
            return False
        command = json.loads(data)
        if command[0] == "kill":
            self._kill(command[1], *command[2:])
        else:
            _, role, rank, *rest = command
            self._fork(NodeStart(Peer(role, rank), *rest), files)
        return True

    def _fork(self, start: NodeStart, files: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children[pid] = start.peer
            self._send("forked", start.peer.role, start.peer.rank, pid)
            for file in files:
                os.close(file)
            return
        os.setsid()  # its own group, so that the processes it starts can be killed with it
        _show_as(f"pr {start.peer}")
        _exit_with(parent)
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

        child.run_and_exit(start, self._config, self._program)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            peer = self._children.pop(pid, None)
            _kill_group(pid)  # the processes that the node started and left behind
            if peer is not None:
                self._send("exit", peer.role, peer.rank, os.waitstatus_to_exitcode(status))

    def _kill(self, number: int, *node: object) -> None:
        for pid, peer in self._children.items():
            if not node or node == peer:
                _kill_group(pid, number)

    def _send(self, *words: object) -> None:
        self._there.send(json.dumps(words).encode())


def _kill_group(group: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _show_as(name: str) -> None:
    """Names this process for `ps` and `top`: at most 15 bytes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _exit_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent exits."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
