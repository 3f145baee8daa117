"""What tests of quantizers share: which there are, and how to send by them."""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.compress import feedback
from polyrhythm.compress.kernels.dense import plain
from polyrhythm.compress.state import CodecState
from polyrhythm.core.codec import Codec

NEAREST = ["fp8", "fp8:100", "int8", "int8:9", "int4", "int4:33"]
FAIR = ["int8:rounding=stochastic", "int4:rounding=stochastic", "qsgd", "qsgd:3,block=8", "terngrad:0"]
ALL = [
    *NEAREST,
    *FAIR,
    "qsgd:1",
    "qsgd:32767",
    "terngrad",
    "sign",
    "sign:vote=yes",
    "sign:vote=yes,momentum=0.5",
]
LENGTHS = [0, 1, 2, 4, 5, 7, 8, 9, 255, 256, 257, 511, 512, 513, 1279, 1280, 1281, 3001]
WIDTHS = [torch.float32, torch.float64]


def drawn(count: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    values = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (values * scale).to(dtype)


def alone(codec: Codec, like: Tensor, feedback: bool | None = None, **origin: int) -> CodecState:
    kept = codec.feedback if feedback is None else feedback
    return CodecState.alone(len(like), feedback=kept, dtype=like.dtype, **origin)


def decoded(codec: Codec, code: Tensor, like: Tensor) -> Tensor:
    into = torch.zeros_like(like)
    codec.decode(code, into)
    return into


def sent(codec: Codec, values: Tensor, state: CodecState) -> Tensor:
    got = decoded(codec, feedback.encode(codec, values, state), values)
    state.sent()
    return got


def units(codec: Codec, values: Tensor) -> Tensor:
    """For each number, the unit of its block, by the definitions of the papers."""
    block = getattr(codec, "block", max(1, len(values)))
    tables = list(plain.rows(values, block))
    most = [table.abs().amax(1) for table in tables]
    each = {
        "int8": [size / 127 for size in most],
        "int4": [size / 7 for size in most],
        "terngrad": most,
        "qsgd": [table.norm(dim=1) / getattr(codec, "levels", 1) for table in tables],
        "sign": [table.abs().mean(1) for table in tables],
    }[codec.name]
    return plain.spread(torch.cat(each), len(values), block) if each else values
