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

from polyrhythm.coordination.coordinator import COORDINATOR
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.launch import program
from polyrhythm.launch.zygote import NodeConfig
from polyrhythm.session.context import ServerDone, session, world_context
from polyrhythm.session.distributed import DistributedSession
from polyrhythm.wire.transport import Transport
from polyrhythm.worlds.processes.context import ProcessContext
from polyrhythm.worlds.processes.node import ProcessNode


def live(
    me: Peer, incarnation: int, arena: int, coordinator: str, config: NodeConfig, script: Callable[[], None]
) -> int:
    """Runs the script as this node, in this one of its lives; returns the exit code of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears Ctrl-C and ends all of us in order
    torch.set_num_threads(config.threads if me.role == "worker" else max(1, config.threads // 2))
    transport = Transport(
        me,
        config.key,
        listen=config.listen,
        arenas=config.arenas,
        host=config.host,
        wait=config.wait,
        incarnation=incarnation,
    )
    transport.introduce(COORDINATOR, coordinator)
    node = ProcessNode(me, transport, 0, config.began, config.arenas, arena, config.collective)
    here = ProcessContext(node)
    world_context.set(here)
    error: tuple[str, int] | None = None
    try:
        error = _run(me, script)
        if error is not None:
            node.flush()
            here.request("failed", error=error[0], exit_code=error[1])
    except PolyrhythmError as failure:
        error = (str(failure), failure.exit_code)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        node.close()
    return error[1] if error else 0


def _run(me: Peer, script: Callable[[], None]) -> tuple[str, int] | None:
    """None if all went well, otherwise what to say of it and the exit code."""
    try:
        script()
        mine = session.get()
        if not isinstance(mine, DistributedSession):
            raise UsageError("the script never called polyrhythm.init() and session.prepare(...)")
        mine.close()
    except ServerDone:
        return None
    except PolyrhythmError as error:
        return str(error), error.exit_code
    except Exception as error:
        traceback.print_exception(error.with_traceback(_of_script(error.__traceback__)))
        return f"{me} failed: {type(error).__name__}: {error}", 1
    return None


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without its outer part, which is how we came to call the script."""
    ours = (__file__, program.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def be(
    me: Peer, incarnation: int, arena: int, coordinator: str, config: NodeConfig, script: Callable[[], None]
) -> None:
    """Lives, and ends the process without running what the launcher left to be run at exit."""
    code = 1
    try:
        code = live(me, incarnation, arena, coordinator, config, script)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
