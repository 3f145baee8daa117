"""torch.distributed inside `polyrhythm run`: DDP, FSDP2, DTensor, pipelining and DCP on its transports.

    session = pr.init()
    pr.integrations.process_group.install(session)
    model = fully_shard(model)  # and whatever else torch.distributed has

`install` makes a process group of all workers, with the backend "polyrhythm". On one host tensors go through
shared memory, between hosts through encrypted TCP. torch opens no port of its own: what it keeps in its store
is at the coordinator of the run. A script may then train without `session.prepare`; metrics are logged by
`session.log`, and the script saves its model. In a single process the group has one member.

Tensors on a GPU are copied through host memory.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store  # behind torch.distributed, where they are untyped

from polyrhythm.core.errors import UsageError
from polyrhythm.core.group import Group
from polyrhythm.core.peer import Peer
from polyrhythm.integrations.process_group.alone import Alone
from polyrhythm.integrations.process_group.group import BACKEND, PolyrhythmGroup
from polyrhythm.integrations.process_group.point_to_point import PointToPoint
from polyrhythm.integrations.process_group.store import CoordinatorStore
from polyrhythm.session.api import Session
from polyrhythm.session.context import world_context
from polyrhythm.session.distributed import DistributedSession
from polyrhythm.worlds.processes.node import ProcessNode

__all__ = ["install"]

TOOL = "torch.distributed"


def install(session: Session) -> None:
    """Initializes torch.distributed with a process group of all workers of the run."""
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed has a process group already; call install(session) instead of "
            "torch.distributed.init_process_group()"
        )
    here = world_context.get()
    if here is None:
        _initialize(_Groups.of(None, Peer("worker", 0)), HashStore(), 1, None)
        return
    if not isinstance(session, DistributedSession):
        raise UsageError("pass the session of the run, which pr.init() returns: install(session)")
    node = here.node
    if not isinstance(node, ProcessNode):
        raise UsageError(f"{TOOL} needs real processes: use polyrhythm run instead of polyrhythm simulate")
    if node.incarnation:
        raise UsageError(f"{node.me} replaces a worker that died, but cannot join its process groups")
    session.train_by(TOOL)
    groups = _Groups.of(node, node.me)
    if groups.close not in session.before_close:
        session.before_close.append(groups.close)
    _initialize(groups, CoordinatorStore(here), session.workers, timedelta(seconds=here.plan.timeout))


def _initialize(groups: _Groups, store: Store, size: int, timeout: timedelta | None) -> None:
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    groups.store = store
    dist.init_process_group(BACKEND, store=store, rank=groups.me.rank, world_size=size, timeout=timeout)


def _create(options: Any, _: Any = None) -> PolyrhythmGroup:
    """Called by torch for each process group that this process is a member of."""
    assert _Groups.current is not None
    return _Groups.current.create(options)


class _Groups:
    """The process groups of this worker."""

    current: _Groups | None = None  # torch passes nothing of ours to `_create`

    def __init__(self, node: ProcessNode | None, me: Peer) -> None:
        self.node, self.me = node, me
        self._messages = PointToPoint(node, me)
        self.store: Store | None = None  # torch does not keep the part of it that is in Python

    @classmethod
    def of(cls, node: ProcessNode | None, me: Peer) -> _Groups:
        """Those of a node, made once: a script may destroy its process group and install another."""
        if cls.current is None or cls.current.node is not node:
            cls.current = cls(node, me)
        return cls.current

    def create(self, options: Any) -> PolyrhythmGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        name = options.group_id
        group: Group = Alone()
        if self.node is not None:
            group = self.node.everyone.split([Peer("worker", rank) for rank in ranks], f"torch {name}")
        return PolyrhythmGroup(group, ranks, name, self._messages)

    def close(self) -> None:
        """The script is done: waits for what is in flight, and ends all groups."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._messages.close()
        _Groups.current = None
