"""The leak fixture catches each kind of leak, name it, and leave clean tests alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

LEAKS = """
import os, socket, subprocess, sys, threading, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

kept = []

def sleeper(seconds):
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])

def test_process():
    kept.append(sleeper(60))

def test_zombie():
    kept.append(subprocess.Popen(["true"]))

def test_thread():
    threading.Thread(target=time.sleep, args=(60,), name="left-behind", daemon=True).start()

def test_socket():
    kept.append(socket.socket())

def test_memfd():
    kept.append(os.memfd_create("left-behind"))

def test_second_memfd_of_that_name():
    kept.append(os.memfd_create("left-behind"))

def test_shared_memory():
    Path(f"/dev/shm/left-behind-{os.getpid()}").touch()

def test_clean_after_leaks():
    Path(f"/dev/shm/left-behind-{os.getpid()}").unlink()
    child = sleeper(0)
    child.wait()
    with socket.socket():
        pass
    os.close(os.memfd_create("closed"))
    memory = SharedMemory(create=True, size=8)
    memory.close()
    memory.unlink()

def test_gone_within_the_grace():
    threading.Thread(target=time.sleep, args=(0.2,)).start()

def test_garbage_is_no_leak():
    cycle = [socket.socket()]
    cycle.append(cycle)
"""

MESSAGES = {
    "test_process": r"process \d+ \(.*time.sleep\(60\)\)",
    "test_zombie": r"process \d+ \(ended, but nobody waited for it\)",
    "test_thread": "thread 'left-behind'",
    "test_socket": r"descriptor of socket:\[\d+\]",
    "test_memfd": "descriptor of /memfd:left-behind",
    "test_second_memfd_of_that_name": "descriptor of /memfd:left-behind",
    "test_shared_memory": r"shared memory /dev/shm/left-behind-\d+",
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are listed in /proc")
def test_each_leak_fails_its_test_by_name(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest(
        "from tests.support import leaks\nfrom tests.support.leaks import no_leaks\nleaks.GRACE = 0.5"
    )
    pytester.makepyfile(LEAKS)
    # A process of its own, or this test would be the one that leaks.
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=10, errors=len(MESSAGES))
    for test, message in MESSAGES.items():
        pattern = rf"ERROR at teardown of {test} _+\nthe test leaked: {message}"
        assert re.search(pattern, result.stdout.str()), test


def test_forked_children_cannot_hang_on_openmp() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
