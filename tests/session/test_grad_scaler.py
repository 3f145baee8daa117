"""`torch.amp.GradScaler`: exact under allreduce, refused where workers would skip different steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from tests.support.programs import Examples, mlp
from tests.support.runs import run_in

OVERFLOWS = 3  # the step at which the gradient of worker 1 is too large for its scale


@dataclass
class Scaled:
    """Trains with a scaler, or skips by itself the step that a scaler has to skip."""

    scales: bool = True
    fused: bool = False
    clips: bool = False
    enabled: bool = True

    def __call__(self) -> None:
        session = pr.init()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=self.fused)
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(Examples(24), batch_size=2))
        scaler = torch.amp.GradScaler("cpu", enabled=self.enabled and self.scales)
        for step, (x, y) in enumerate(loader):
            huge = 1e305 if session.rank == 1 and step == OVERFLOWS and self.scales else 1.0
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y) * huge).backward()
            if self.clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            if self.scales or step != OVERFLOWS:
                scaler.step(optimizer)
                scaler.update()
        session.log(scale=scaler.get_scale(), reduce="max")


@pytest.mark.parametrize(
    ("world", "fused", "clips"),
    [
        ("simulated", False, False),
        ("simulated", True, False),
        ("simulated", False, True),
        ("real", True, True),
    ],
)
def test_all_workers_skip_the_step_in_which_one_overflows(world: str, fused: bool, clips: bool) -> None:
    """The scale is a power of two, so the result has the bits of a run without it that skips that step."""
    digests = []
    for scales in (True, False):
        summary = run_in(world, Scaled(scales, fused, clips), workers=2, check_replicas=1)
        assert summary["steps"] == 2 * 5
        digests.append(summary["digest"])
        if scales:
            assert summary["metrics"]["scale"] == 2.0**15  # halved once, on both workers
    assert digests[0] == digests[1]


REFUSED = ["async", "sync", "allreduce+topk:0.1", "local:2", "gossip", "hogwild", "broadcast:0.01"]


@pytest.mark.parametrize(
    ("world", "strategy"), [*(("simulated", each) for each in REFUSED), ("real", "async")]
)
def test_a_scaler_is_refused_elsewhere(world: str, strategy: str) -> None:
    with pytest.raises(
        pr.PolyrhythmError, match=r"GradScaler .* bfloat16, .* allreduce without a codec \(test_grad"
    ):
        run_in(world, Scaled(), strategy=strategy, workers=2)


def test_a_scaler_that_is_switched_off_is_fine() -> None:
    run_in("simulated", Scaled(enabled=False, scales=False), strategy="async", workers=2)
