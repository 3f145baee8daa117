"""The law of a server's answers: whatever the code, what a worker has comes to what the server has."""

from __future__ import annotations

import torch

from polyrhythm.compress.replies import reply_codec
from polyrhythm.compress.state import CodecState
from polyrhythm.core.registry import describe, parse_codec
from tests.support.combine import each_value

COUNT = 400
# In how many answers what is lacking falls to a hundredth. A codec that sends a share of the entries needs as
# many as there are shares; one that sends a bit each has one size for all of them, and is slow at the end.
ROUNDS = {
    "fp16": 1, "bf16": 1, "fp8": 3, "int8": 2, "int4": 4, "qsgd": 4, "terngrad": 4, "threshold": 12,
    "powersgd": 30, "topk": 150, "sign": 400, "dgc": 600, "randomk": 1000,
}  # fmt: skip
MORE = [
    "topk:0.1,values=fp32", "randomk:0.1,feedback=no", "threshold:1", "threshold:adaptive=yes", "qsgd:1",
    "qsgd:3", "int8:rounding=stochastic", "int4:rounding=stochastic", "terngrad:0", "sign:vote=yes",
    "sign:vote=yes,momentum=0.9", "powersgd:1", "fp16:feedback=yes",
]  # fmt: skip


@each_value(("scale", [1e-4, 1.0, 1e4]), ("text", [*(row.name for row in describe("codec")), *MORE]))
def test_coded_replies_converge_to_the_parameters_of_the_server(text: str, scale: float) -> None:
    """known <- known + what the code of (x - known) stands for; x stays, and known comes to it."""
    codec = reply_codec(parse_codec(text))
    x = scale * torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    known, state = torch.zeros(COUNT), CodecState.alone(COUNT, feedback=False, shapes=[(20, 20)])
    for _ in range(ROUNDS[text.partition(":")[0]]):
        codec.decode(codec.encode(x - known, state), known)
        state.sent()
    assert float((x - known).norm()) <= 0.01 * float(x.norm())
