"""Runs cases in a child process, and compares what they give with what the golden file says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden.cases import Case

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "digests.json"

# One thread, and instructions that every x86-64 processor has: results must not depend on the machine.
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2,-FMA_Usable,-FMA4_Usable,-AVX2_Usable",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "NUMBA_DISABLE_JIT": "0",
}

Result = dict[str, Any]
Differences = dict[str, list[str]]  # by case, in lines


@dataclass
class Golden:
    """The versions that digests were made with, and what each case gave, by its name."""

    versions: dict[str, str]
    cases: dict[str, Result]

    @staticmethod
    def load() -> Golden:
        content = json.loads(FILE.read_text()) if FILE.exists() else {"versions": {}, "cases": {}}
        return Golden(content["versions"], content["cases"])

    def text(self) -> str:
        """One case a line, sorted."""
        lines = [f"    {json.dumps(name)}: {json.dumps(self.cases[name])}" for name in sorted(self.cases)]
        cases = "{\n" + ",\n".join(lines) + "\n  }"
        return f'{{\n  "versions": {json.dumps(self.versions)},\n  "cases": {cases}\n}}\n'


def run(
    cases: Iterable[Case],
    environment: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda name: None,
) -> Golden:
    """What these cases give now, all in one process; `tell` is called with the name of each that is done."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    names = [case.name for case in cases]
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(
        [sys.executable, "-m", "tests.golden.child"], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
        env={**os.environ, "PYTHONPATH": path, **ENVIRONMENT, **(environment or {})},
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        try:
            with child.stdin as asked:
                json.dump(names, asked)
            found = Golden(json.loads(child.stdout.readline() or "{}"), {})
            for line in child.stdout:
                name, result = json.loads(line)
                found.cases[name] = result
                tell(name)
            if child.wait() or [*found.cases] != names:
                said.seek(0)
                raise RuntimeError(f"the golden cases ended with status {child.returncode}:\n{said.read()}")
        finally:
            child.kill()
        return found


def differences(golden: Golden, found: Golden) -> Differences:
    """Where results that were found differ from those in the golden file."""
    wrong: Differences = {}
    for name, now in found.cases.items():
        before = golden.cases.get(name)
        if "error" in now:
            wrong[name] = [f"failed: {now['error']}"]
        elif before is None:
            wrong[name] = [f"is not in the golden file; python -m tests.golden renew --only '{name}' adds it"]
        elif before != now:
            wrong[name] = [
                f"{field:<10} {before.get(field, 'nothing')} -> {now.get(field, 'nothing')}"
                for field in dict.fromkeys([*before, *now])
                if before.get(field) != now.get(field)
            ]
    return wrong


def obsolete(golden: Golden, known: Collection[Case]) -> Differences:
    """Lines of the golden file for which there is no case."""
    names = {case.name for case in known}
    return {
        name: ["is in the golden file, but there is no such case; make golden-renew removes it"]
        for name in golden.cases
        if name not in names
    }


def contradictions(golden: Golden, known: Iterable[Case]) -> Differences:
    """Where a run on real processes and the simulation of it have different results."""
    wrong: Differences = {}
    for case in known:
        real, simulated = (golden.cases.get(each.name, {}) for each in (case, case.simulated))
        lines = [
            f"{field:<10} {simulated.get(field, 'nothing')} in simulation, {now} on real processes"
            for field, now in real.items()
            if simulated.get(field) != now
        ]
        if lines:
            wrong[case.name] = lines
    return wrong


def report(wrong: Differences, golden: Golden, found: Golden) -> str:
    """A readable list of all differences."""
    lines = [line for name, each in sorted(wrong.items()) for line in [name, *(f"    {x}" for x in each)]]
    if golden.versions and (other := versions(golden, found)):
        lines += [f"The golden file was made with other versions, which may be the reason: {other}."]
    return "\n".join(lines)


def versions(golden: Golden, found: Golden) -> str:
    """Which versions are others than those of the golden file; empty if none."""
    return ", ".join(
        f"{name} {golden.versions.get(name, 'none')} (here {now})"
        for name, now in found.versions.items()
        if golden.versions.get(name) != now
    )
