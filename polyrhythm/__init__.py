"""polyrhythm: your PyTorch loop, unchanged; choose in one line how the workers keep time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from polyrhythm import integrations
    from polyrhythm.core.codec import Codec, Reduction
    from polyrhythm.core.errors import NotFinite, PeerLost, PolyrhythmError, UsageError, WaitError, WireError
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.core.plan import Plan
    from polyrhythm.core.registry import parse
    from polyrhythm.core.strategy import Strategy, Traits
    from polyrhythm.core.worker import Server, Worker
    from polyrhythm.launch import join, run, simulate
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard
    from polyrhythm.optim.lars_lamb import LAMB, LARS
    from polyrhythm.optim.linear_scaling import LinearScaling
    from polyrhythm.optim.sparse_sgd import SparseSGD
    from polyrhythm.parallel.replicate import replicate
    from polyrhythm.parallel.splits import Branches, Pipeline, TensorParallel
    from polyrhythm.record.result import RunResult
    from polyrhythm.session.api import Session, init
    from polyrhythm.strategies.reduce_ops import MeanReducer

# Imported on first use: `polyrhythm --help` and the launcher do without torch, which takes seconds to import.
_HOME = {
    "init": "session.api", "Session": "session.api",
    "run": "launch", "simulate": "launch", "join": "launch", "RunResult": "record.result",
    "Strategy": "core.strategy", "Traits": "core.strategy", "Worker": "core.worker", "Server": "core.worker",
    "MeanReducer": "strategies.reduce_ops", "Codec": "core.codec", "Reduction": "core.codec",
    "parse": "core.registry", "Plan": "core.plan",
    "Node": "core.node", "Message": "core.message", "Peer": "core.peer",
    "Replica": "model.replica", "Shard": "model.shard",
    "PolyrhythmError": "core.errors", "UsageError": "core.errors", "WireError": "core.errors",
    "WaitError": "core.errors", "PeerLost": "core.errors", "NotFinite": "core.errors",
    "LinearScaling": "optim.linear_scaling", "LARS": "optim.lars_lamb", "LAMB": "optim.lars_lamb",
    "SparseSGD": "optim.sparse_sgd", "Pipeline": "parallel.splits", "Branches": "parallel.splits",
    "TensorParallel": "parallel.splits",
    "replicate": "parallel.replicate",
}  # fmt: skip

__all__ = [
    "LAMB", "LARS", "Branches", "Codec", "LinearScaling", "MeanReducer", "Message", "Node", "NotFinite",
    "Peer", "PeerLost", "Pipeline", "Plan", "PolyrhythmError", "Reduction", "Replica", "RunResult", "Server",
    "Session", "Shard", "SparseSGD", "Strategy", "TensorParallel", "Traits", "UsageError", "WaitError",
    "WireError", "Worker", "init", "integrations", "join", "parse", "replicate", "run", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "integrations":
        return import_module("polyrhythm.integrations")
    if name not in _HOME:
        raise AttributeError(f"polyrhythm has no {name!r}")
    return getattr(import_module(f"polyrhythm.{_HOME[name]}"), name)
