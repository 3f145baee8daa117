"""A mistake is answered with one line that says what is wrong and what would work, and an exit code."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from polyrhythm.cli.entry import main
from tests.support.combine import each_value

SCRIPTS = Path(__file__).parents[1] / "scripts"
TRAIN, MISTAKES = str(SCRIPTS / "train.py"), str(SCRIPTS / "mistakes.py")

# What is asked for, the exit code, and what the one line must tell.
COMMANDS = {
    "unknown strategy": (["-s", "asynk"], 2, "asynk.*did you mean 'async'.*Known: adpsgd, allreduce, async"),
    "unknown field": (["-s", "async:tau=3"], 2, "no field 'tau'; async has: wait_for, max_staleness, weight"),
    "value out of range": (["-s", "local:0"], 2, "local:0: period must be 1 or more"),
    "value of no use": (["-s", "local:x"], 2, "local:x: period takes a whole number or auto, not 'x'"),
    "more than there are": (["-s", "async:wait_for=3"], 2, "wait_for is 3 but there are 2 workers"),
    "edges with spaces": (
        ["-s", "gossip:0-1 / 1-2", "-n", "3"],
        2,
        r"gossip:0-1 / 1-2: a slash with a space .* did you mean gossip:0-1/1-2\?",
    ),
    "a value with spaces": (["-s", "async:weight=1 / tau"], 2, r"did you mean async:weight=1/tau\?"),
    "levels with a mistake": (
        ["-s", "allreduce / diloc"],
        2,
        "unknown strategy 'diloc'; did you mean 'diloco'",
    ),
    "receivers": (["-s", "push:fanout=9", "-n", "3"], 2, "with 3 workers fanout is at most 2"),
    "the first": (["-s", "broadcast:first=9,warmup=2", "-n", "3"], 2, "first is at most 3, the number of"),
    "a graph of others": (["-s", "gossip:0-1/1-2"], 2, "names worker 2, and the 2 workers are 0 to 1"),
    "a grid": (["-s", "adpsgd:torus", "-n", "3"], 2, r"an odd grid, one row of 3; 4 \(2x2\) would work"),
    "DDP": (["-s", "ddp"], 2, "unknown strategy 'ddp'; it is called 'allreduce' here. Known: "),
    "a sharded model": (
        ["-s", "FSDP"],
        2,
        "FSDP keeps a part of the parameters on each .* use allreduce. Known",
    ),
    "a comma": (["-s", "local,8"], 2, r"unknown strategy 'local,8'; did you mean 'local:8'\? Known"),
    "parentheses": (["-s", "diloco(50)"], 2, r"did you mean 'diloco:50'\?"),
    "only a colon": (["-s", "diloco:"], 2, "nothing after the colon; leave it out, or set a field: period"),
    "torchrun": (
        ["--nproc-per-node", "4"],
        2,
        "--nproc-per-node is not an option here; write --workers 4; see",
    ),
    "torchrun with _": (["--nproc_per_node=4"], 2, "--nproc_per_node is not .* write --workers 4"),
    "mpirun": (["-np", "4"], 2, "-np is not an option here; write --workers 4; see"),
    "torchrun on machines": (["--nnodes", "2"], 2, "--nnodes is not .* `polyrhythm join`"),
    "no workers": (["-n", "0"], 2, "workers is 0; there must be 1 or more"),
    "workers in words": (["-n", "two"], 2, "--workers: invalid int value: 'two'; see .* --help"),
    "fewer than no servers": (["--servers", "-1"], 2, "servers is -1; there cannot be fewer than 0"),
    "no servers": (["-s", "async", "--servers", "0"], 2, "async needs servers, and servers is 0: leave out"),
    "servers in words": (["--servers", "two"], 2, "servers is 'two'; it must be a whole number or the word"),
    "servers beside nobody": (
        ["-s", "local", "--servers", "colocated"],
        2,
        "local:8 uses no servers; leave out",
    ),
    "servers for nobody": (["-s", "allreduce", "--servers", "1"], 2, "allreduce uses no servers; leave out"),
    "a large seed": (["--seed", "99999999999999999999"], 2, r"seed is 9+; it must be between 0 and"),
    "no threads": (["--threads", "-3"], 2, "threads is -3; there must be 1 or more, or 0"),
    "a path": (["--name", "../../there"], 2, "cannot be the name of a run; it must be a plain folder name"),
    "the beginning of an option": (
        ["--n", "3"],
        2,
        "unknown arguments --n 3; arguments of the script follow --",
    ),
    "unknown option": (
        ["--wrokers", "2"],
        2,
        r"unknown arguments --wrokers 2 \(did you mean --workers\?\); arguments of .*; see .* --help",
    ),
}

SCRIPT_MISTAKES = {
    "no_init": (2, r"never called polyrhythm.init\(\) and session.prepare"),
    "no_prepare": (2, r"never called session.prepare\(model, optimizer, loader\)"),
    "no_parameters": (2, r"no parameters to train; give the optimizer model.parameters\(\)"),
    "lbfgs": (2, "LBFGS calls a closure .* use allreduce, .* or an optimizer such as SGD or Adam"),
    "sparse_adam": (2, "SparseAdam needs sparse gradients.*use Adam or SGD"),
    "different_models": (1, "worker [01] and worker [01] have different models"),
    "prepare_twice": (2, r"session.prepare\(\) was called twice"),
    "consensus_first": (2, r"before session.consensus\(\)"),
    "load_late": (2, r"call load_state_dict\(\) before session.prepare\(\)"),
    "bad_strategy": (2, "unknown strategy 'asink'; did you mean 'async'"),
}


def request(capfd: pytest.CaptureFixture[str], *arguments: str, lines: int = 1) -> tuple[int, str]:
    """The exit code and the one line; of a run that has trained, a second one says what is left."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(str(end.code))
    out, error = capfd.readouterr()
    assert not out
    assert any(line.startswith("polyrhythm") for line in error.splitlines())
    assert error.count("\n") == lines, error
    return code, error


@pytest.mark.parametrize("command", ["run", "simulate"])
@pytest.mark.parametrize("what", COMMANDS)
def test_invalid_command_line_is_refused_in_one_line(
    command: str, what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A wrong command is refused before anything starts or is written."""
    arguments, expected, line = COMMANDS[what]
    code, error = request(capfd, command, TRAIN, "--runs", str(tmp_path / "runs"), *arguments)
    assert code == expected
    assert re.search(line, error)
    assert not (tmp_path / "runs").exists()


@each_value(("command", ["run", "simulate"]), ("mistake", SCRIPT_MISTAKES))
def test_script_misuse_is_reported_in_one_line_without_traceback(
    command: str, mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that uses polyrhythm wrongly is told so without a traceback."""
    expected, line = SCRIPT_MISTAKES[mistake]
    lines = 2 if mistake in ("no_init", "no_prepare") else 1  # the first comes when it begins to train
    code, error = request(capfd, command, MISTAKES, "-q", "--runs", str(tmp_path), "--", mistake, lines=lines)
    assert re.search(line, error)
    assert code == expected


UNTOLD = """
import torch
import helper
from pathlib import Path

model = torch.nn.Linear(2, 1)
for step in range(3):
    Path("reached").write_text(str(step))
    model(torch.ones(2)).sum().backward()
"""


@pytest.mark.parametrize(("command", "strategy"), [("run", "allreduce"), ("simulate", "async")])
def test_a_script_that_never_imports_polyrhythm_is_told_before_it_trains(
    command: str,
    strategy: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At its first backward pass, unless a module of its own may still make a session."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(UNTOLD)
    for helper, reached, line in (
        ("", "0", r"train\.py never imports polyrhythm, .* add import polyrhythm as pr, session = pr\.init"),
        (
            "from polyrhythm import data",
            "0",
            r"train\.py never calls pr\.init\(\), .* add session = pr\.init\(\) and",
        ),
        (
            "import polyrhythm.data, torch\ntorch.nn.init.zeros_(torch.empty(1))",
            "0",
            r"train\.py never calls pr\.init\(\)",
        ),
        ("def f():\n    import polyrhythm.integrations", "2", r"never called polyrhythm\.init"),
        ("def f():\n    from polyrhythm import init", "2", r"never called polyrhythm\.init"),
    ):
        (tmp_path / "helper.py").write_text(helper)
        told = reached == "0"
        code, error = request(capfd, command, "train.py", "-s", strategy, lines=1 if told else 2)
        assert (
            told or "backward() before pr.init(): what it trains there, every worker trains by its" in error
        )
        assert (code, (tmp_path / "reached").read_text()) == (2, reached)
        assert re.search(line, error)


@pytest.mark.parametrize("command", ["run", "simulate"])
@pytest.mark.parametrize("strategy", ["allreduce", "async", "local:2"])
def test_cli_error_for_a_nan_gradient_names_worker_and_step(
    command: str, strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A gradient that is no number ends the run; the worker and the step where it began are named."""
    how = ["-q", "-s", strategy, "--batch-norm", "local", "--runs", str(tmp_path)]
    code, error = request(capfd, command, TRAIN, *how, "--", "--do", "nan", "--step", "2", lines=2)
    assert code == 1
    assert re.search(r"worker 1\b.*step 2\b", error)


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_cli_refuses_more_servers_than_parameters(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """More servers than parameters cannot share them."""
    how = ["-s", "async", "--servers", "7", "--runs", str(tmp_path)]
    code, error = request(capfd, command, MISTAKES, *how, "--", "two_loaders")
    assert code == 2
    assert "7 servers for 6 parameters: use at most one per parameter" in error


def test_preparing_two_loaders_is_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two loaders are no mistake."""
    assert main(["run", MISTAKES, "--runs", str(tmp_path), "-s", "async", "--", "two_loaders"]) == 0
    assert "polyrhythm:" not in capfd.readouterr().err


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_cli_names_a_missing_script_or_unusable_run_folder(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that is not there, and a folder that cannot be made, are named."""
    missing = str(tmp_path / "missing.py")
    code, error = request(capfd, command, missing, "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert f"there is no script {missing}; give the path" in error
    (tmp_path / "file").touch()
    code, error = request(capfd, command, TRAIN, "--runs", str(tmp_path / "file"))
    assert code == 2
    assert re.search(r"cannot make the run folder .*/file/.*: Not a directory; use --runs DIR", error)


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--workers", "100000", "processes are more than 1024"),
        ("--timeout", "nan", "timeout is nan; it must be"),
    ],
)
def test_run_refuses_options_that_real_processes_cannot_support(
    option: str, value: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What real processes cannot do is refused before any of them starts."""
    code, error = request(capfd, "run", TRAIN, "--runs", str(tmp_path / "runs"), option, value)
    assert code == 2
    assert line in error
    assert not (tmp_path / "runs").exists()


def test_listen_option_names_a_port_in_use_or_invalid(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A port that is in use is named, and so is one that is no port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, error = request(capfd, "run", TRAIN, "--listen", address, "--runs", str(tmp_path))
    assert code == 2
    assert re.search(rf"cannot listen at {address}: Address already in use; use another port", error)
    for wrong in ("localhost", "127.0.0.1:http", "127.0.0.1:99999"):
        code, error = request(capfd, "run", TRAIN, "--listen", wrong, "--runs", str(tmp_path))
        assert code == 2
        assert wrong in error
        assert "HOST:PORT" in error
    assert list(tmp_path.iterdir()) == []  # no folder of a run that never began


def test_cli_names_a_missing_or_invalid_cluster_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A cluster file that is missing, or has a unit nobody knows, is named with what would work."""
    file = tmp_path / "office.toml"
    code, error = request(capfd, "simulate", TRAIN, "--cluster", str(file), "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert str(file) in error
    file.write_text('[[hosts]]\ncount = 2\nstep_time = "20 parsecs"\n')
    code, error = request(capfd, "simulate", TRAIN, "--cluster", str(file), "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert "20 parsecs" in error
    assert "ms" in error
    assert not (tmp_path / "runs").exists()
