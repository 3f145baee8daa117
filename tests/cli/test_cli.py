"""The commands of the README, as a person types them: every start here is a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.cli.entry import main
from polyrhythm.core.codec import Codec
from polyrhythm.core.docstrings import plain, read
from polyrhythm.core.registry import describe
from polyrhythm.core.strategy import Strategy
from polyrhythm.worlds.cost_model import Host

ROOT = Path(__file__).parents[2]
DIGITS, FASHION = ROOT / "examples" / "digits.py", ROOT / "examples" / "fashion_mnist.py"
TRAIN = ROOT / "tests" / "scripts" / "train.py"
KEYS = {
    "strategy",
    "workers",
    "servers",
    "wall_s",
    "samples_per_s",
    "steps",
    "bytes_sent",
    "metrics",
    "digest",
}
EXAMPLES = 1437  # digits to train on
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@cache
def python(*arguments: str) -> Done:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )


def polyrhythm(*arguments: object) -> Done:
    return python("-m", "polyrhythm", *map(str, arguments))


@pytest.mark.slow
def test_a_script_without_the_launcher_is_plain_pytorch() -> None:
    """Without polyrhythm's launcher a script is plain PyTorch."""
    done = python(str(DIGITS), "--epochs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "epoch 1" in done.stdout
    assert "accuracy 0.9" in done.stdout


def test_run_command_prints_a_table_and_prefixes_worker_output(runs: str) -> None:
    """A run trains, ends with a table and names its folder; what workers print has their name before it."""
    done = polyrhythm("run", TRAIN, "--workers", "4", "--strategy", "async", "--runs", runs)
    assert done.returncode == 0
    said = sorted(done.stdout.splitlines())
    assert said == [f"[worker {rank}] worker {rank} is done" for rank in range(4)]
    head, _, row, *rest = done.stderr[done.stderr.index("strategy ") :].splitlines()
    assert head.startswith("strategy")
    assert row.startswith("async")
    folder = Path(rest[-1].removeprefix("folder: "))
    assert (folder / "summary.json").is_file()
    for rank in range(4):
        assert (folder / f"worker-{rank}.log").read_text() == f"worker {rank} is done\n"


@pytest.mark.slow
def test_run_and_simulate_json_print_one_json_object(runs: str) -> None:
    """With --json standard output is one JSON object, whatever the script and its children print there."""
    script = Path(runs, "loud.py")
    script.write_text(
        TRAIN.read_text().replace("    steps, loss", "    os.system('echo loud')\n    steps, loss")
    )
    for command in ("run", "simulate"):
        done = polyrhythm(command, script, "-n", "2", "-s", "async", "--runs", runs, "--json")
        assert done.returncode == 0
        assert done.stdout.count("\n") == 1
        summary = json.loads(done.stdout)
        assert summary.keys() >= KEYS
        assert summary["staleness"].keys() == {"mean", "p95", "max"}
        assert (summary["strategy"], summary["workers"], summary["servers"]) == ("async", 2, 1)
        assert done.stderr.count("loud") == 2
        assert "[worker 1] worker 1 is done" in done.stderr


@pytest.mark.slow
def test_run_passes_arguments_after_double_dash_to_the_script(runs: str) -> None:
    """What follows -- is the script's; all-reduce has no server."""
    done = polyrhythm("run", DIGITS, "-s", "allreduce", "--runs", runs, "--json", "--", "--epochs", "2")
    summary = json.loads(done.stdout)
    assert summary["servers"] == 0
    assert summary["samples"] == 2 * EXAMPLES
    assert summary["metrics"]["epoch"] == 1
    assert summary["metrics"]["accuracy"] > 0.85


@pytest.mark.slow
def test_the_strategy_option_overrides_the_strategy_in_the_script(runs: str) -> None:
    """The strategy in the script counts, servers included, unless the command line gives one."""
    asked = ("--runs", runs, "--json", "--", "--strategy", "async")
    summary = json.loads(polyrhythm("run", TRAIN, *asked).stdout)
    assert (summary["strategy"], summary["servers"]) == ("async", 1)
    assert json.loads(Path(summary["folder"], "config.json").read_text())["strategy"] == "async"
    summary = json.loads(polyrhythm("run", TRAIN, "-s", "local:4", *asked).stdout)
    assert (summary["strategy"], summary["servers"]) == ("local:4", 0)


@pytest.mark.slow
def test_simulate_command_with_64_workers_is_reproducible(runs: str) -> None:
    """Sixty-four virtual workers train on a described cluster, twice with the same bits."""
    cluster = ROOT / "examples" / "cluster.toml"
    command = ["simulate", DIGITS, "-n", 64, "-s", "async", "--cluster", cluster, "--json", "--runs", runs]
    first, second = (
        json.loads(polyrhythm(*command, "--name", name, "--", "--epochs", "3").stdout) for name in "ab"
    )
    assert first["samples"] == 3 * EXAMPLES
    assert first["staleness"]["max"] >= 1
    assert first["metrics"]["accuracy"] > 0.2  # a guess has 0.1; gradients are 63 updates late
    assert {**first, "folder": ""} == {**second, "folder": ""}


@pytest.mark.slow
def test_example_with_missing_data_says_how_to_get_it(runs: str) -> None:
    """An example whose data is missing says how to get it, alone and in a run, and shows no traceback."""
    done = polyrhythm("run", FASHION, "--runs", runs, "--", "--data", "/nowhere")
    alone = python(str(FASHION), "--data", "/nowhere")
    assert (done.returncode, alone.returncode) == (2, 1)
    for error in (done.stderr, alone.stderr):
        assert error.count("\n") == 1
        assert "/nowhere" in error
        assert "get the data with" in error


@pytest.mark.parametrize(("command", "kind"), [("strategies", "strategy"), ("codecs", "codec")])
def test_cli_lists_every_strategy_and_codec(command: str, kind: str) -> None:
    """Every strategy and codec is listed with its fields, their defaults and its paper."""
    done = polyrhythm(command)
    for row in describe(kind):
        block = next(
            part for part in done.stdout.split("\n\n") if part.partition("\n")[0].split(":")[0] == row.name
        )
        assert row.paper in block
        assert all(f"{name} = {default}" in block for name, _, default in row.fields)
    listed = json.loads(polyrhythm(command, "--json").stdout)
    assert [each["name"] for each in listed] == [row.name for row in describe(kind)]


@pytest.mark.parametrize(("command", "kind"), [("strategies", "strategy"), ("codecs", "codec")])
def test_cli_describes_one_strategy_or_codec(
    command: str, kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One by its name: its idea, its rule without LaTeX, what its fields mean, and its paper."""
    for row in describe(kind):
        assert main([command, row.name]) == 0
        told = capsys.readouterr().out
        cls = (Codec if kind == "codec" else Strategy).registry[row.name]
        assert row.summary in told and all(line in told for line in plain(read(cls).text).splitlines())
        assert not any(sign in told for sign in (">>>", "$", "\\"))
        words = " ".join(told.split())
        assert all(" ".join(plain(read(cls).fields[name]).split()) in words for name, *_ in row.fields)
        assert row.paper in told and all(f"{name} = {default}" in told for name, _, default in row.fields)
        assert main([command, row.name, "--json"]) == 0
        assert [each["name"] for each in json.loads(capsys.readouterr().out)] == [row.name]
    assert main([command, "nobody"]) == 2
    assert f"unknown {kind} 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--help"], "examples:"),
        (["run", "--help"], "--restarts"),
        (["strategies"], "softsync:WAIT_FOR"),
        (["strategies", "gossip"], "or edges as in 0-1/1-2/2-0"),
        (["run", "missing.py"], "missing.py"),
        (["bench", "--help"], "servers"),
        (["bench", "servers", "--help"], "servers"),
        (["bench", "servers", "--size", "x"], "--size x"),
    ],
)
def test_cli_help_and_errors_do_not_import_torch(command: list[str], said: str) -> None:
    """Help and mistakes are answered without importing torch."""
    code = (
        "import sys; from polyrhythm.cli.entry import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = python("-c", code, *command)
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert said in done.stdout + done.stderr


def test_a_simulation_says_whose_seconds_it_prints_and_where_it_writes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Time is simulated, at costs that are named if nobody gave any; a name that is taken is said at once."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[hosts]]\nstep_time = "3 ms"\n')
    command = ["simulate", str(TRAIN), "--runs", str(tmp_path), "--name", "mine"]
    for options in ([], ["--cluster", str(cluster)]):
        assert main([*command, *options]) == 0
    first, second = capfd.readouterr().err.split("folder: ")[:2]
    assert "each step takes 10 ms of simulated time" in first
    assert Host().step_time.parameters == (0.010,)
    assert "strategy   simulated time  samples/simulated s" in first
    assert "exists already" not in first
    assert "10 ms" not in second
    said, *_, last = (line for line in second.splitlines() if "mine" in line or "simulated time" in line)
    assert f"{tmp_path / 'mine'} exists already: this run is in {tmp_path / 'mine-2'}" in second
    assert "simulated time" in last and "simulated time" not in said
