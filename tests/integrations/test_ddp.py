"""Every codec as a communication hook of DistributedDataParallel: two ranks of torchrun, on Gloo."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import describe
from tests.support.combine import each_value

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/scripts/ddp.py"
CODECS = [row.name for row in describe("codec")]
DTYPES = ["float32", "bfloat16", "float64"]

spec = importlib.util.spec_from_file_location("ddp_script", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

pytestmark = pytest.mark.timeout(330)

Found = list[dict[str, Any]]  # what the script found out, by rank


def torchrun(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """As from a fresh shell, but with this copy of the package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        *arguments,
    ]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ddp")
    done = torchrun(str(SCRIPT), str(folder), *CODECS)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@each_value(("dtype", DTYPES), ("codec", CODECS))
def test_replicas_stay_the_same_bits(ranks: Found, codec: str, dtype: str) -> None:
    """After every step, also when DDP has filled its buckets anew; and they do move."""
    one, other = (rank[dtype][codec] for rank in ranks)
    assert len(one) == 5
    assert all(torch.equal(mine, yours) for mine, yours in zip(one, other, strict=True))
    assert all(torch.isfinite(each).all() for each in one)
    assert not torch.equal(one[0], one[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", ["topk:0.05", "topk:0.05,per=layer", "powersgd", "powersgd:1,per=vector,dense="]
)
def test_ddp_hook_residuals_follow_parameters_when_buckets_change(ranks: Found, codec: str) -> None:
    """All that was got, with the mean of what is owed, is the mean of all that was given, after every step.

    Though after the first the buckets are others.
    """
    found = [rank["owe"][codec] for rank in ranks]
    buckets = found[0]["buckets"]
    assert buckets[0] != buckets[1] == buckets[-1]
    assert sorted(chain(*buckets[-1])) == sorted(chain(*buckets[0]))
    total, got = torch.zeros(2, script.given(0, 0).numel(), dtype=torch.float64)
    for step in range(6):
        total = total + (script.given(0, step).double() + script.given(1, step).double()) / 2
        got = got + found[0]["got"][step].double()
        residual = (found[0]["owed"][step] + found[1]["owed"][step]) / 2
        assert residual.abs().max() > 0.1
        torch.testing.assert_close(got + residual, total, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_ddp_hook_with_topk_of_density_1_gives_the_plain_mean(ranks: Found) -> None:
    """Density 1, in full: bit for bit what DDP gives without a hook."""
    for step, got in enumerate(ranks[0]["owe"]["topk:1,values=fp32"]["got"]):
        assert torch.equal(got, (script.given(0, step) + script.given(1, step)) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*CODECS, "fp16:feedback=yes"])
def test_a_gradient_that_is_not_finite_spoils_one_step_only(ranks: Found, codec: str) -> None:
    """An infinity on one rank: NaN on both, for a GradScaler to see, and the next steps are sound."""
    for rank in ranks:
        got, residual = rank["spoilt"][codec]["got"], rank["spoilt"][codec]["owed"]
        assert not torch.isfinite(got[2]).all()
        assert all(torch.isfinite(each).all() for each in (*got[:2], *got[3:], *residual))
        assert got[3].abs().max() > 0
    one, other = (rank["spoilt"][codec]["got"] for rank in ranks)
    assert all(torch.equal(mine.isnan(), yours.isnan()) for mine, yours in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec not in script.LOTS])
def test_ddp_hook_gives_the_same_bits_with_a_grad_scaler(ranks: Found, codec: str) -> None:
    """Scales are powers of two, and a step that is skipped leaves no trace: bit for bit as without one."""
    for rank in ranks:
        assert rank["scaled"][codec]["skipped"] > 5
        plain, scaled = rank["scaled"][codec]["ends"]
        assert plain.abs().max() > 0
        assert torch.equal(plain, scaled)


@pytest.mark.slow
def test_nothing_is_compiled_in_backward(ranks: Found) -> None:
    for rank in ranks:
        before, hooked, trained = rank["compiled"]
        assert before == 0 < hooked == trained


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["topk:0.05,per=layer", "powersgd", "dgc:0.05,per=layer"])
def test_ddp_hook_resumes_exactly_from_saved_state(ranks: Found, codec: str) -> None:
    """Bit for bit, though buckets begin again as they were before the first step.

    Matrix products may round by where in a bucket a matrix lies.
    """
    for rank in ranks:
        for one, other in zip(*rank["resume"][codec], strict=True):
            near = 2e-5 if codec == "powersgd" else 0
            torch.testing.assert_close(one, other, rtol=0, atol=near)


@pytest.mark.slow
def test_ddp_hook_sends_excluded_layers_uncompressed(ranks: Found) -> None:
    got, bounds = ranks[0]["left out"]["got"], ranks[0]["left out"]["bounds"]
    mean = (script.given(0, 0) + script.given(1, 0)) / 2
    for number, (low, high) in enumerate(zip([0, *bounds], bounds, strict=False)):
        dense = number == 0 or len(script.SHAPES[number]) == 1
        assert torch.equal(got[low:high], mean[low:high]) == dense


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (0, "topk:dense=head: DDP does not know which layer is 'head'; pass the model too"),
        (1, "topk:dense=head: the model has no layer 'head'"),
        (2, "topq: unknown codec 'topq'; did you mean 'topk'?"),
        (3, "dgc applies momentum itself"),
        (4, "this state was saved with powersgd, but the hook uses topk"),
        (
            5,
            "dgc does not work with every optimizer, and DDP does not know the optimizer; pass it: hook(",
        ),
        (6, "topk: layer '0' has sparse gradients, which codecs do not support"),
        (7, "topk: a layer has sparse gradients, which codecs do not support"),
        (8, "of another model: parameter 0 has shape"),
        (9, "of another model: it has 4 parameters, but this model has 2"),
        (10, "of another model: parameter 0.weight has shape (5, 4), but in the state it is (4, 4)"),
        (11, "saved by a hook with a model, but this one is without"),
    ],
)
def test_ddp_hook_explains_usage_errors(ranks: Found, number: int, says: str) -> None:
    assert says in ranks[0]["mistakes"][number]


def test_ddp_hook_needs_an_initialized_process_group() -> None:
    with pytest.raises(UsageError, match="init_process_group first"):
        pr.integrations.ddp.hook("fp16")


@pytest.mark.slow
def test_cli_starts_without_importing_torch_for_integrations() -> None:
    """Nothing of torch is imported for the sake of integrations."""
    text = (
        "import sys, polyrhythm as pr, polyrhythm.cli\nassert 'torch' not in sys.modules\n"
        "pr.integrations\nassert 'torch' not in sys.modules\n"
        "pr.integrations.ddp.hook\nassert 'torch.distributed' in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", text], env=environment, check=True, timeout=60)


class Ours:
    """The script's network trains in a simulation; keeps the parameters after every step."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Tensor]] = {}

    def __call__(self) -> None:
        here = pr.init()
        network = script.network()
        model, optimizer = here.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        self.seen[here.rank] = []
        for step in range(script.STEPS):
            x, y = script.batch(here.rank, step)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            self.seen[here.rank].append(script.flat(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["topk:0.05,values=fp32", "topk", "threshold", "dgc:0.01", "bf16"])
def test_ddp_hook_with_one_bucket_gives_the_bits_of_allreduce(
    ranks: Found, simulate: Any, codec: str
) -> None:
    """All parameters in one bucket, learning rates that change: the bits of `allreduce` with that codec."""
    ours = Ours()
    simulate(ours, f"allreduce+{codec}", 2)
    for one, other in zip(ranks[0]["one bucket"][codec], ours.seen[0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_ddp_hook_example_learns() -> None:
    done = torchrun("examples/ddp_hook.py", "--codec=topk:0.05", "--epochs=4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"epoch {number}" for number in range(4)]
    assert float(lines[-1].split()[-1]) > 0.9
