"""One node's process, from the fork to its exit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import torch

from polyrhythm.core.compile_note import compile_note
from polyrhythm.core.errors import PeerLost, PolyrhythmError, WaitError
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.core.requests import NodeFailed
from polyrhythm.launch import program
from polyrhythm.launch.address_space import spare
from polyrhythm.launch.node_config import NodeConfig, NodeStart
from polyrhythm.session.context import ServerDone, world_context
from polyrhythm.session.script import explained, run_script, salvage
from polyrhythm.session.seeds import start_script
from polyrhythm.wire.options import TransportOptions
from polyrhythm.wire.transport import Transport
from polyrhythm.worlds.processes.context import ProcessContext
from polyrhythm.worlds.processes.node import ProcessNode


def run_node(start: NodeStart, config: NodeConfig, script: Callable[[], None]) -> int:
    """Runs the script as this node; returns the exit code of the process."""
    me, plan = start.peer, config.plan
    spare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher gets Ctrl-C too, and ends all nodes in order
    torch.set_num_threads(config.threads if me.role == "worker" else max(1, config.threads // 2))
    options = TransportOptions(
        listen=config.listen,
        arenas=config.arenas,
        arena=start.arena,
        host=config.host,
        wait=plan.timeout,
        incarnation=start.incarnation,
    )
    transport = Transport(me, config.key, options)
    transport.introduce(COORDINATOR, start.coordinator)
    node = ProcessNode(me, transport, 0, config.began, config.arenas, start.arena, plan.collective)
    here = ProcessContext(node, plan, config.strategy)
    world_context.set(here)
    code = 0
    compile_note.begin_run(says=me == Peer("worker", 0))
    try:
        start_script(plan.seed)
        run_script(script, node.stopping)
    except ServerDone:
        pass
    except Exception as error:
        node.stopping.alone = True  # what follows needs no other worker
        what, code = _explain(me, error)
        with contextlib.suppress(PolyrhythmError):
            node.flush()
            waited = isinstance(error, WaitError) and not isinstance(error, PeerLost)
            here.request(NodeFailed(what, code, waited))
            salvage(error)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        node.close()
    return code


def _explain(me: Peer, error: Exception) -> tuple[str, int]:
    """An error message and the exit code; prints the traceback of an error that the script has made."""
    if isinstance(error, PolyrhythmError):
        return explained(error), error.exit_code
    traceback.print_exception(error.with_traceback(_of_script(error.__traceback__)))
    return f"{me} failed: {type(error).__name__}: {error}", 1


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without its outer frames, which only call the script."""
    ours = (__file__, program.__file__, run_script.__code__.co_filename, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def run_and_exit(start: NodeStart, config: NodeConfig, script: Callable[[], None]) -> None:
    """Runs a node and ends the process, without the exit handlers that the launcher's process registered."""
    code = 1
    try:
        code = run_node(start, config, script)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
