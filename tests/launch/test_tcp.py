"""Over TCP, encrypted and without shared memory, a run is the same run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import polyrhythm as pr
from tests.scripts.train import EXAMPLES, train


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce+topk:0.1", "sync", "local:4"])
def test_lockstep_run_gives_the_same_bits_over_tcp_and_unix_sockets(strategy: str) -> None:
    """Lockstep strategies give the same bits whatever carries them."""
    unix, tcp = (
        pr.run(train, workers=3, strategy=strategy, listen=listen, runs=None)
        for listen in ("unix:", "tcp:127.0.0.1:0")
    )
    assert tcp["digest"] == unix["digest"]
    assert tcp["bytes_sent"] == unix["bytes_sent"]


def test_asynchronous_run_over_tcp_trains_on_every_example() -> None:
    """An asynchronous run trains over TCP too."""
    assert pr.run(train, strategy="async", listen="tcp:127.0.0.1:0", runs=None)["samples"] == EXAMPLES


def test_missing_library_for_encryption_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, `run --listen` and `join` say in one line what to install."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    hint = r"encrypted, and that needs cryptography.*pip install 'polyrhythm\[hosts\]'"
    with pytest.raises(pr.UsageError, match=hint):
        pr.run(train, listen="tcp:127.0.0.1:0", runs=None)
    with pytest.raises(pr.UsageError, match=hint):
        pr.join("127.0.0.1:7000", train, key=tmp_path / "run.key")
