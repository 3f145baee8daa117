"""Hosts on one machine: network namespaces joined by a bridge, and a process in each.

Between them there is a real network stack and no shared address: what is measured here are links, not
loopback. Making them needs root and `ip`, and `tc` for links with a rate (iproute2).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Together, _all, _fork

BURST, QUEUE = "128kb", "50ms"  # of a link with a rate
PORT, START = 7000, 60.0  # where a run listens, and seconds until it does
_CLONE_NEWNET = 0x40000000  # os.setns, which has it, came with Python 3.12
_SIOCETHTOOL = 0x8946
_SWITCHES = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}  # ETHTOOL_STSO, _SGSO, _SGRO


class Host:
    """A network namespace with one link, `eth0`, to the bridge that all hosts are on."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def enter(self) -> None:
        """Moves this thread there; processes and threads that it starts follow."""
        with open(f"/run/netns/{self.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.name}")


def sent() -> int:
    """Bytes that have left the host that this thread is on, headers of all layers included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "eth0":
            return int(counters.split()[8])
    raise RuntimeError("this thread is not on a host")


def why_not(rate: str = "") -> str:
    """Why there can be no hosts here, with links of this rate; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid():
        return "making network namespaces needs root"
    for tool in ("ip", "tc") if rate else ("ip",):
        if not shutil.which(tool):
            return f"making network namespaces needs `{tool}` (Debian: apt-get install iproute2)"
    return ""


@contextlib.contextmanager
def hosts(count: int, rate: str = "", offloads: bool = False) -> Iterator[list[Host]]:
    """`count` hosts, gone at the end whatever happens.

    `rate`, such as "100mbit", limits every link both ways. Without `offloads` a packet is what a wire could
    carry; with them the kernel hands on up to 64 KiB at a time.
    """
    if reason := why_not(rate):
        raise RuntimeError(reason)
    tag = f"pr{os.getpid():x}"
    bridge, made = f"{tag}b", [Host(f"{tag}-{rank}", f"10.77.0.{rank + 1}") for rank in range(count)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for rank, host in enumerate(made):
            outer = f"{tag}v{rank}"
            _ip("netns", "add", host.name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
            if not offloads:
                _no_offloads(outer)
                _all([(_no_offloads_in, (host,))])
            if rate:
                _limit((), outer, rate)
                _limit(("-n", host.name), "eth0", rate)
        yield made
    finally:
        for host in made:
            _ip("netns", "del", host.name, must=False)  # its link goes with it
        for rank in range(count):
            _ip("link", "del", f"{tag}v{rank}", must=False)
        _ip("link", "del", bridge, must=False)


def on_hosts(places: Sequence[Host], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls `function(together, host, *args)` in a process on each host; what each returned, by rank."""
    barrier = _fork.Barrier(len(places))
    with tempfile.TemporaryDirectory() as folder:
        calls = [
            (_there, (host, function, Together(rank, len(places), barrier, Path(folder)), *args))
            for rank, host in enumerate(places)
        ]
        return _all(calls)


def _there(host: Host, function: Callable[..., Any], place: Together, *args: Any) -> Any:
    host.enter()
    return function(place, host, *args)


def _ip(*words: str, must: bool = True) -> None:
    _call("ip", *words, must=must)


def _limit(where: Sequence[str], device: str, rate: str) -> None:
    words = (*where, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", BURST)
    _call("tc", *words, "latency", QUEUE)


def _call(*command: str, must: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if must and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _no_offloads_in(host: Host) -> None:
    host.enter()
    _no_offloads("eth0")


def _no_offloads(device: str) -> None:
    """What `ethtool -K DEVICE tso off gso off gro off` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in _SWITCHES.values():
            value = array.array("I", [command, 0])
            request = struct.pack("16sP", device.encode(), value.buffer_info()[0]).ljust(40, b"\0")
            fcntl.ioctl(sock, _SIOCETHTOOL, request)


def launch(
    places: Sequence[Host], program: Callable[[], Any], strategy: str, seed: int = 0
) -> dict[str, Any] | None:
    """Trains a program with one worker on each host, by a launcher on each; the summary of the run."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "run.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(32))
        return on_hosts(places, _launch, places, key, program, strategy, seed)[0]  # type: ignore[no-any-return]


def _launch(
    place: Together, host: Host, places: Sequence[Host], key: Path, program: Any, strategy: str, seed: int
) -> Any:
    import polyrhythm as pr
    from polyrhythm.launch.console import Console

    address = f"{places[0].address}:{PORT}"
    with open(os.devnull, "w") as nowhere:
        console = Console(nowhere, quiet=True)
        if place.rank == 0:
            return pr.run(
                program, workers=len(places), here=1, strategy=strategy, listen=f"tcp:{address}", key=key,
                threads=1, seed=seed, runs=None, console=console,
            )  # fmt: skip
        deadline = time.monotonic() + START
        while True:
            try:
                return pr.join(address, program, workers=1, key=key, threads=1, console=console)
            except pr.UsageError as error:
                if "nobody listens" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
