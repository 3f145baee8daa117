"""A user who has only the wheel can train."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.code_blocks import ROOT, blocks

SOURCES = ("polyrhythm", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


def run(*words: object, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Builds a copy, because a build leaves files beside the sources."""
    copy = folder / "source"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=copy)
    (wheel,) = folder.glob("*.whl")
    return wheel


def fresh_environment(folder: Path) -> Path:
    """An environment with the packages of this one, torch among them, but without polyrhythm."""
    packages = folder / "packages"
    packages.mkdir()
    for entry in map(Path, sys.path):
        for item in entry.iterdir() if entry.name == "site-packages" else ():
            ours = item.name.startswith(("polyrhythm", "__editable__", "pip", "_distutils_hack"))
            if not ours and item.suffix != ".pth" and not (packages / item.name).exists():
                (packages / item.name).symlink_to(item)
    venv.create(folder / "venv", with_pip=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    for old in site.glob("setuptools*"):  # torch wants a newer one, which is among the packages
        shutil.rmtree(old)
    (site / "others.pth").write_text(f"{packages}\n", encoding="utf-8")
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_wheel_trains_the_digits_in_a_fresh_environment(tmp_path: Path) -> None:
    """Its metadata installs, its data is in it, and the script of the README trains on two workers."""
    wheel = build_wheel(tmp_path)
    names = ZipFile(wheel).namelist()
    assert {"polyrhythm/py.typed", "polyrhythm/data/digits.npz"} <= set(names)
    assert all(name.startswith("polyrhythm") for name in names)

    programs = fresh_environment(tmp_path)
    run(programs / "python", "-m", "pip", "install", "--no-index", f"{wheel}[codecs,hosts]", cwd=tmp_path)
    where = run(programs / "python", "-c", "import polyrhythm; print(polyrhythm.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path / "venv"))

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (script,) = (block.text for block in blocks(page) if block.title == "train.py")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    out = run(
        programs / "polyrhythm", "run", "train.py", "--workers", 2, "--strategy", "local:4+topk:0.1",
        "--json", cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(out)["metrics"]["accuracy"] > 0.85
