"""The laws of what codecs are given: which layers, by which collective, how many bytes; and only numbers."""

from __future__ import annotations

import io
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyrhythm as pr
from polyrhythm.compress import feedback
from polyrhythm.compress.compressor import Decompressor
from polyrhythm.compress.state import CodecState
from polyrhythm.core.errors import NotFinite, PolyrhythmError, UsageError
from polyrhythm.core.registry import parse_codec
from polyrhythm.core.worker import Worker
from polyrhythm.launch.console import Console
from tests.support.combine import each_value
from tests.support.planes import CODECS, FEEDBACK, HOPS, MODELS, Plane, equal, layers, residual_of, ways
from tests.support.programs import Script, trained

WORKERS = 3


def takes(strategy: str, codec: str, **_: object) -> bool:
    """True if the strategy sends something that this codec can code: some code gradients only."""
    return codec in ways(CODECS) or ":" not in strategy


def with_field(codec: str, text: str) -> str:
    return f"{codec}{',' if ':' in codec else ':'}{text}"


# --- layers that are left as they are ---------------------------------------------------------------


@each_value(
    ("codec", CODECS),
    (
        "dense, left",
        [
            ("1d", {"0.bias", "1.bias"}),
            ("1", {"1.weight", "1.bias"}),
            ("0.weight/1d", {"0.weight", "0.bias", "1.bias"}),
        ],
    ),
    ("strategy", ["allreduce", "sync"]),
)
def test_layers_that_are_left_out_get_the_dense_mean(
    simulate: Any, strategy: str, codec: str, dense: str, left: set[str]
) -> None:
    """They have the bits that they have without a codec, and the others do not."""
    found = trained(simulate(Plane(5), f"{strategy}+{with_field(codec, f'dense={dense}')}", WORKERS))
    law = trained(simulate(Plane(5), strategy, WORKERS))
    alike = {name for name in law if torch.equal(found[name], law[name])}
    exact = {"powersgd": {"0.bias", "1.bias"}}.get(codec, set())  # of one row, which P and Q do not shorten
    assert left <= alike <= left | exact


@each_value(
    ("strategy", ["allreduce", "local:2", "async", "diloco:2"]),
    ("world", [pytest.param(pr.simulate, id="simulated"), pytest.param(pr.run, id="real")]),
)
def test_a_layer_that_is_not_there_is_named(world: Any, strategy: str) -> None:
    """With the layers that are."""
    with pytest.raises(UsageError, match=r"has no layer 'head' to leave uncompressed; it has: 0, 1"):
        world(Plane(2), workers=2, strategy=f"{strategy}+topk:0.1,dense=1d/head", runs=None, threads=1)


@pytest.mark.parametrize("codec", ["topk:0.01", "randomk:0.01", "dgc:0.01"])
def test_per_layer_sparsification_sends_an_entry_of_every_layer(simulate: Any, codec: str) -> None:
    """However few are sent of the whole, one entry of each layer is; not so if a code is about all of it."""
    moves = {}
    for per in ("layer", "vector"):
        plane = Plane(4)
        simulate(plane, f"allreduce+{codec},per={per}", 1)
        moves[per] = [
            [int((now != then).sum()) for now, then in zip(after, before, strict=True)]
            for before, after in zip(plane.x[0][:-1], plane.x[0][1:], strict=True)
        ]
    assert all(each == [1, 1, 1, 1] for each in moves["layer"])
    assert all(sum(each) == 1 for each in moves["vector"])


# --- collectives ------------------------------------------------------------------------------------


def marks(path: Path, strategy: str | None = None) -> None:
    """Leaves a trace of having been started."""
    path.touch()
    here = pr.init(strategy) if strategy else pr.init()
    model = layers()
    model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()


APART = [codec for codec in CODECS if parse_codec(codec).reduction.gathered]


@each_value(
    ("codec", APART),
    ("collective", ["ring", "hierarchical"]),
    ("strategy", ["allreduce", "postlocal:3,after=2"]),
    where=lambda codec, collective, strategy: (
        takes(strategy, codec) and not (collective == "ring" and codec in HOPS)
    ),
)
def test_codecs_that_cannot_be_summed_are_refused_on_a_ring(
    strategy: str, collective: str, codec: str, tmp_path: Path
) -> None:
    """It is refused before anything starts, in words that say what would work."""
    text = f"{strategy}+{codec}"
    with pytest.raises(UsageError) as error:
        pr.run(partial(marks, tmp_path / "mark"), strategy=text, collective=collective, runs=tmp_path)
    assert f"what {parse_codec(codec).name} sends cannot be added up on its way" in str(error.value)
    assert f"leave out --collective {collective}" in str(error.value)
    assert f"async+{codec}" in str(error.value) and pr.parse(f"async+{codec}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("world", [pr.simulate, pr.run], ids=["simulated", "real"])
def test_a_codec_unfit_for_a_ring_is_refused_if_the_script_chooses_it(world: Any, tmp_path: Path) -> None:
    """What is known only when the script has begun is refused then."""
    script = partial(marks, tmp_path / "mark", "allreduce+topk:0.1")
    with pytest.raises(UsageError, match=r"what topk sends cannot be added up on its way round a ring"):
        world(script, workers=2, collective="ring", runs=None, threads=1)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("codec", HOPS)
def test_codecs_reencoded_at_each_ring_hop_print_a_notice(codec: str) -> None:
    """Decoded and coded again at each hop, which rounds each time: a person should know."""
    for strategy, told in ((f"allreduce+{codec}", True), ("allreduce", False), (f"async+{codec}", False)):
        stream = io.StringIO()
        pr.simulate(Plane(2), workers=3, strategy=strategy, collective="ring", console=Console(stream))
        line = f"{strategy}: in the ring, {parse_codec(codec).name} is decoded, added and encoded again"
        assert (line in stream.getvalue()) == told


@pytest.mark.slow
def test_cli_reports_codecs_on_a_ring_without_a_traceback(tmp_path: Path) -> None:
    """On stderr, in both cases, and without a traceback."""
    path = tmp_path / "train.py"
    path.write_text(
        "import polyrhythm as pr, torch\n\n\ndef main():\n"
        "    here, model = pr.init(), torch.nn.Linear(5, 3)\n"
        "    model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "    for _ in range(3):\n        model(torch.ones(1, 5)).sum().backward()\n        optimizer.step()\n"
        "\n\n"
        'if __name__ == "__main__":\n    main()\n'
    )

    def run_command(codec: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "polyrhythm",
            "run",
            str(path),
            "--workers",
            "2",
            "--collective",
            "ring",
        ]
        command += ["--strategy", f"allreduce+{codec}"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)

    done = run_command("int8")
    assert done.returncode == 0 and "in the ring, int8 is decoded" in done.stderr
    done = run_command("topk")
    assert done.returncode == 2 and "cannot be added up on its way round a ring" in done.stderr
    assert "Traceback" not in done.stderr


def test_int8_on_a_ring_of_processes_matches_the_simulator() -> None:
    """The hops are the same: so are the bits."""
    script = Script(size=50)
    one, other = (
        how(script, workers=3, strategy="allreduce+int8", collective="ring", runs=None, threads=1)
        for how in (pr.run, pr.simulate)
    )
    assert one["digest"] == other["digest"] and one["bytes_sent"] == other["bytes_sent"]


# --- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "sign", "terngrad"])
@pytest.mark.parametrize("workers", [2, 5])
def test_every_code_goes_to_all_others(simulate: Any, codec: str, workers: int) -> None:
    """Where codes have one length: N-1 times that of each worker, beside the start and the flags."""
    steps, plane = 4, Plane(4)
    summary = simulate(plane, f"allreduce+{codec}", workers)
    chosen, total = parse_codec(codec), plane.replicas[0].layout.total
    coder = Decompressor(chosen, plane.replicas[0].layout)
    sizes = [segment.high - segment.low for segment in coder.coded]
    assert sum(sizes) == total
    codes = sum(
        feedback.encode(
            chosen, torch.ones(size, dtype=torch.float64), CodecState.alone(size, dtype=torch.float64)
        ).nbytes
        for size in sizes
    )
    start = (workers - 1) * 8 * total
    flags = 4 * len(list(layers().parameters()))  # which parameters have a gradient: they go along
    assert summary["bytes_sent"] == start + steps * workers * (workers - 1) * (codes + flags)


@pytest.mark.parametrize(
    "strategy",
    ["allreduce+topk:0.1", "allreduce+qsgd", "allreduce+powersgd", "sync+topk:0.1", "local:3+int4"],
)
def test_coded_runs_send_the_same_bytes_in_simulator_and_processes(strategy: str) -> None:
    """The same codes on processes, and the same bytes."""
    one, other = (
        how(Script(size=50), workers=3, strategy=strategy, runs=None, threads=1)
        for how in (pr.run, pr.simulate)
    )
    assert one["digest"] == other["digest"]
    assert one["bytes_sent"] == other["bytes_sent"]


# --- numbers of two kinds ---------------------------------------------------------------------------


@each_value(
    ("model", ["mixed", "half"]),
    ("codec", CODECS),
    ("strategy", ["allreduce", "local:3", "diloco:3"]),
    where=takes,
)
def test_codecs_keep_replicas_equal_for_models_of_mixed_dtypes(
    simulate: Any, strategy: str, codec: str, model: str
) -> None:
    """Replicas stay equal, and what waits is kept in at least 32 bits."""
    plane = Plane(6, model=MODELS[model])
    simulate(plane, f"{strategy}+{codec}", WORKERS)
    assert all(equal(plane.x[rank][-1], plane.x[0][-1]) for rank in range(WORKERS))
    assert not equal(plane.x[0][0], plane.x[0][-1])
    kept = [residual_of(worker) for worker in plane.workers.values()]
    assert all(part.element_size() >= 4 for parts in kept for part in parts)
    assert any(kept) == parse_codec(codec).feedback


@pytest.mark.parametrize("model", ["mixed", "half"])
@pytest.mark.parametrize("codec", HOPS)
def test_codecs_on_a_ring_keep_replicas_equal_for_mixed_dtypes(simulate: Any, codec: str, model: str) -> None:
    """Each kind is cut into chunks by itself."""
    plane = Plane(6, model=MODELS[model])
    simulate(plane, f"allreduce+{codec}", 4, collective="ring")
    for step in range(6):
        assert all(equal(plane.x[rank][step], plane.x[0][step]) for rank in range(4)), step


@pytest.mark.parametrize("codec", FEEDBACK)
def test_bfloat16_models_lose_only_their_own_rounding_with_a_codec(simulate: Any, codec: str) -> None:
    """With bfloat16 the mean rounds once a step, and what waits does not."""
    steps = 20
    plane, law = Plane(steps, model=MODELS["half"]), Plane(steps, model=MODELS["half"])
    found = trained(simulate(plane, f"allreduce+{codec}", WORKERS))
    dense = trained(simulate(law, "allreduce", WORKERS))
    residual = plane.residual([0.5])
    for name, value in dense.items():
        top = max(float(value.abs().max()), float(residual[name].abs().max()), 1.0)
        error = (found[name].double() - residual[name].double() - value.double()).abs().max()
        assert error <= (2 * steps * 2**-8 if value.dtype == torch.bfloat16 else 1e-12) * top


# --- what is no number ------------------------------------------------------------------------------


class Broken(Plane):
    """Worker 1 gets a bad number in the second layer at its third step; keeps what waited before it."""

    def __init__(self, bad: float) -> None:
        super().__init__(5)
        self.bad = bad
        self.kept: list[tuple[list[Tensor], list[Tensor]]] = []

    def __call__(self) -> None:
        here = pr.init()
        model = layers()
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        worker = here._worker
        for step in range(1, 6):
            optimizer.zero_grad()
            before = waiting(worker)
            loss = sum(parameter.sum() * (1 + here.rank + step) for parameter in model.parameters())
            if (here.rank, step) == (1, 3):
                loss = loss + model[1].weight[0, 0] * self.bad
            try:
                loss.backward()
                optimizer.step()
            except NotFinite:
                self.kept.append((before, waiting(worker)))
                raise


def waiting(worker: Worker) -> list[Tensor]:
    return [part.clone() for part in residual_of(worker)]


@each_value(
    ("codec", CODECS),
    ("strategy", ["allreduce", "sync", "async", "local:1", "local:4", "postlocal:2,after=4"]),
    ("bad", [float("nan"), float("inf")]),
    where=takes,
)
def test_nonfinite_gradient_is_named_and_not_added_to_the_residual(
    simulate: Any, strategy: str, codec: str, bad: float
) -> None:
    """The error names worker, layer and step, and what waits is as it was, bit for bit."""
    script = Broken(bad)
    error = r"worker 1: the gradient of 1\.weight at step 3 is not finite"
    with pytest.raises(PolyrhythmError, match=error):
        simulate(script, f"{strategy}+{codec}", 2)
    ((before, after),) = script.kept
    assert equal(before, after) and bool(before) == (parse_codec(codec).feedback and strategy != "local:4")


STREAMING = "streaming-diloco:2,fragments=2,overlap=0"


class Wild(Plane):
    """Goes so far in its first step that there are no numbers for it."""

    def __call__(self) -> None:
        here = pr.init()
        model = layers()
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=1.7e308))
        for _ in range(self.count):
            optimizer.zero_grad()
            sum(20 * parameter.square().sum() for parameter in model.parameters()).backward()
            optimizer.step()


@each_value(
    ("codec", CODECS),
    (
        "strategy",
        ["allreduce", "async", "sync", "local:1", "diloco:1", "easgd:1", "delayed-nesterov:1", STREAMING],
    ),
    where=takes,
)
def test_a_diverging_run_with_a_codec_ends_with_a_clear_error(
    simulate: Any, strategy: str, codec: str
) -> None:
    """Where it is parameters that are no numbers any longer, the run ends, and says so."""
    with pytest.raises(PolyrhythmError, match="not finite"):
        simulate(Wild(30), f"{strategy}+{codec}", 2)


def far() -> None:
    """Two numbers whose gradients are finite, but twice one of them is not."""
    session, model = pr.init(), torch.nn.Linear(2, 1, bias=False)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-38))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 2), 3e38 if session.rank else 1.0)).backward()
        optimizer.step()


@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
@pytest.mark.parametrize("codec", ["topk:0.5", "dgc:0.5", "threshold", "randomk:0.5"])
def test_an_overflowing_residual_raises_an_error_naming_the_worker(
    simulate: Any, strategy: str, codec: str
) -> None:
    """Who owes more than there are numbers for is named, before anybody gets it."""
    with pytest.raises(PolyrhythmError, match=r"worker 1: the residual of .* has grown beyond the largest"):
        simulate(far, f"{strategy}+{codec}", 2)
