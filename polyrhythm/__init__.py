"""polyrhythm: your PyTorch loop, unchanged; choose in one line how the workers keep time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from polyrhythm import integrations
    from polyrhythm.errors import NotFinite, PeerLost, PolyrhythmError, UsageError, WaitError, WireError
    from polyrhythm.launch import join, run, simulate
    from polyrhythm.layerwise import LAMB, LARS
    from polyrhythm.node import Message, Node, Peer
    from polyrhythm.replica import Replica
    from polyrhythm.rows import RowSGD
    from polyrhythm.scaling import LinearScaling
    from polyrhythm.session import Session, init
    from polyrhythm.shard import Shard
    from polyrhythm.strategy import Codec, Strategy, parse

# Found on first use: `polyrhythm --help` and the launcher do without torch, which takes seconds to import.
_HOME = {
    "init": "session", "Session": "session", "run": "launch", "simulate": "launch",
    "join": "launch",
    "Strategy": "strategy", "Codec": "strategy", "parse": "strategy",
    "Node": "node", "Message": "node", "Peer": "node", "Replica": "replica", "Shard": "shard",
    "PolyrhythmError": "errors", "UsageError": "errors", "WireError": "errors", "WaitError": "errors",
    "PeerLost": "errors", "NotFinite": "errors",
    "LinearScaling": "scaling", "LARS": "layerwise", "LAMB": "layerwise", "RowSGD": "rows",
}  # fmt: skip

__all__ = [
    "LAMB", "LARS", "Codec", "LinearScaling", "Message", "Node", "NotFinite", "Peer", "PeerLost",
    "PolyrhythmError", "Replica", "RowSGD", "Session", "Shard", "Strategy", "UsageError", "WaitError",
    "WireError", "init", "integrations", "join", "parse", "run", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "integrations":
        return import_module("polyrhythm.integrations")
    if name not in _HOME:
        raise AttributeError(f"polyrhythm has no {name!r}")
    return getattr(import_module(f"polyrhythm.{_HOME[name]}"), name)
