"""Codecs on one core: their speed relative to a copy of the vector, their bits relative to theory.

Speeds are those of sending with feedback (adding to the residual, selecting, encoding, subtracting what was
sent) and of decoding (reading, checking, adding), for 10 million float32 numbers. In each round a copy of the
vector (`x.clone()`) is timed too, and the ratio is to that one. Bits are those of whole messages, headers
included. For random indexes they are compared to the expected length of Rice codes, and for gradients of the
Fashion-MNIST network to two entropies:

- given how many indexes there are in each block of 2^16 parameters. For evenly drawn indexes, as many in each
  block as a real gradient has there, no code takes fewer bits: the bar is 3 % above that bound. Real indexes
  are clustered (inputs that are always dark have no gradient), so they must take less
- of the gaps between real indexes, given how often each occurs in blocks of that density. No code that works
  gap by gap takes fewer bits. There is no bar, because the frequencies would have to be sent too
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.allreduce import network
from benchmarks.processes import apart
from benchmarks.report import Row, ratio

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Array = np.ndarray[Any, Any]
    Gaps = dict[int, list[Array]]

COUNT = 10_000_000
SEND, DECODE = "send", "decode"

# What is timed: a codec, the share of the entries that reach a threshold, and the bars for sending and for
# decoding, in copies. A new codec needs a line here.
SPEEDS: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    ("threshold:1", 0.001, 1.5, 0.5),
    ("threshold:1", 0.01, 1.5, 0.5),
    ("threshold:1,pulses=many", 0.01, None, None),
    ("topk:0.01", None, None, 0.5),
    ("topk:0.01,pick=exact", None, None, 0.5),
    ("topk:0.001", None, None, 0.5),
    ("randomk:0.01", None, None, None),
    ("fp16", None, None, None),
    ("bf16", None, None, None),
    ("fp8", None, 1.0, 0.5),
    ("int8", None, 1.0, 0.5),
    ("int8:rounding=stochastic", None, None, 0.5),
    ("int4", None, 1.0, 0.5),
    ("qsgd", None, None, None),
    ("terngrad", None, None, 0.5),
    ("sign", None, 0.5, 0.5),
    ("sign:vote=yes", None, 0.5, 0.5),
)
# Those that pick the largest entries, relative to `torch.topk(x.abs(), k)`.
PICKS = ("topk:0.01", "topk:0.01,pick=exact", "topk:0.001")

# Expected bits of a Rice code with the best parameter, plus one for the sign.
TABLE = {0.1: 5.756, 1 / 16: 6.480, 0.03: 7.592, 0.01: 9.108, 1e-3: 12.495, 1e-4: 15.788}

# With 1,100 entries in 17 blocks, the header and the counts of the blocks alone are 5 %.
FEW = "topk:0.001"
EVENLY = "evenly, as dense as real gradients: bits per index / entropy"

Times = dict[str, list[float]]  # seconds of each round, by what was done


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    times = apart(_speeds, 5 if quick else 15)
    rows = [row for each in SPEEDS for row in _speed_rows(*each, times)]
    for text in PICKS:
        mine, theirs = times[f"{SEND} {text}"], times[f"topk {text}"]
        rows.append(_row(f"{text}: send / torch.topk", mine, theirs, ratio(theirs, mine), 8.0, "at least"))
    for count in (1 << 20, COUNT):
        for density, wanted in TABLE.items():
            if density * count >= 1000:  # below that the header of 19 bytes is more than 1 %
                bits = apart(_bits, count, density)
                what = f"signs: {density:.2%} of {count:,}, bits per entry / theory"
                rows.append(Row(what, bits, "bits", wanted, bits / wanted, 1.02, "below"))
    for text, even, real, bound, gaps in apart(_real, 20 if quick else 100):
        for what, bits, least, bar in (
            (EVENLY, even, bound, None if text == FEW else 1.03),
            ("of real gradients: bits per index / entropy of as dense ones", real, bound, 1.03),
            ("of real gradients: bits per index / entropy of gaps", real, gaps, None),
        ):
            rows.append(Row(f"{text} {what}", bits, "bits", least, bits / least, bar, "below"))
    first, again = apart(_warm), apart(_warm)
    rows.append(Row("loading compiled kernels, in the second process", again, "s", bar=1.0, wanted="below"))
    notes = [
        f"ms for {COUNT:,} numbers, medians of rounds in which all take turns",
        f"kernels of float32 took {first:.1f} s in the first process, which compiles what is not cached",
    ]
    return rows, notes


def _row(what: str, mine: list[float], theirs: list[float], of: float, bar: float | None, wanted: Any) -> Row:
    middle = [1000 * statistics.median(values) for values in (mine, theirs)]
    return Row(what, middle[0], "ms", middle[1], of, bar, wanted)


def _speed_rows(
    text: str, share: float | None, send: float | None, decode: float | None, times: Times
) -> list[Row]:
    label = text if share is None else f"{text} at {share:.1%}"
    return [
        _row(f"{label}: {what} / copy", mine, times["copy"], ratio(mine, times["copy"]), bar, "below")
        for what, bar in ((SEND, send), (DECODE, decode))
        for mine in [times[f"{what} {label}"]]
    ]


def _speeds(rounds: int) -> Times:
    import torch

    from polyrhythm.compress import feedback
    from polyrhythm.compress.state import CodecState
    from polyrhythm.core.registry import parse_codec

    torch.set_num_threads(1)
    values = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    magnitudes = values.abs().sort(descending=True).values
    # Numbers of which the wanted share reaches a threshold of 1.
    scaled = {share: values / magnitudes[round(share * COUNT)] for _, share, _, _ in SPEEDS if share}
    into, kept = torch.zeros(COUNT), CodecState.alone(count=COUNT)
    times: Times = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        times.setdefault(what, []).append(time.perf_counter() - began)
        return result

    codecs = [(text, share, parse_codec(text)) for text, share, _, _ in SPEEDS]
    for _, _, codec in codecs:
        codec.prepare(values.dtype)
    for number in range(rounds + 1):
        if number == 1:
            times.clear()  # the first round warms up
        timed("copy", values.clone)
        for text, share, codec in codecs:
            given = values if share is None else scaled[share]
            label = text if share is None else f"{text} at {share:.1%}"
            if kept.residual is not None:
                kept.residual.zero_()
            state = kept if codec.feedback else CodecState.alone(0, feedback=False)
            code = timed(f"{SEND} {label}", lambda: feedback.encode(codec, given, state))  # noqa: B023
            timed(f"{DECODE} {label}", lambda: codec.decode(code, into))  # noqa: B023
            if text in PICKS:
                timed(f"topk {text}", lambda: torch.topk(values.abs(), round(COUNT * codec.density)))  # type: ignore[attr-defined]  # noqa: B023
    return times


def _bits(count: int, density: float) -> float:
    """The bits per entry, if each is present with this probability."""
    import numpy as np

    from polyrhythm.compress.kernels import entropy

    draws = np.random.default_rng(0)
    indexes = np.flatnonzero(draws.random(count) < density)
    signs = draws.choice(np.array([-1, 1], np.int32), len(indexes))
    return 8 * len(entropy.pack_pulses(count, indexes, signs, 1e-3)) / len(indexes)


def _real(steps: int) -> list[tuple[str, float, float, float, float]]:
    """For some codecs, while the network trains: bits per index, drawn evenly and real; and their bounds."""
    import numpy as np
    import torch
    from torch.nn import functional as F

    from polyrhythm.compress import feedback
    from polyrhythm.compress.kernels import entropy
    from polyrhythm.compress.state import CodecState
    from polyrhythm.core.registry import parse_codec
    from polyrhythm.data import mnist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = mnist()[0].tensors
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    size = sum(parameter.numel() for parameter in net.parameters())
    texts = ("topk:0.05", "topk:0.01", "topk:0.001", "threshold:0.01", "threshold:adaptive=yes")
    codecs = [(text, parse_codec(text), CodecState.alone(count=size)) for text in texts]
    totals = {text: np.zeros(4) for text in texts}  # bits of even and of real ones, entropy, and count
    gaps: dict[str, Gaps] = {text: {} for text in texts}
    draws = np.random.default_rng(0)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (100,))
        optimizer.zero_grad()
        F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        gradient = _flat([parameter.grad for parameter in net.parameters()])
        for text, codec, state in codecs:
            code = feedback.encode(codec, gradient, state).numpy()
            state.sent()
            indexes, values = entropy.unpack(code, size, "float32")
            plane = 2 * len(values) if text.startswith("topk") else math.ceil(len(values) / 8)
            even = _evenly(indexes, size, draws)
            ones = np.ones(len(even), np.int32)
            drawn = entropy.pack_pulses(size, even, ones, 1e-3)
            totals[text] += (
                8 * (len(drawn) - math.ceil(len(even) / 8)), 8 * (len(code) - plane), _entropy(indexes, size),
                len(indexes),
            )  # fmt: skip
            _count_gaps(indexes, size, gaps[text])
    found = []
    for text, (*bits, count) in totals.items():
        counted = [np.unique(np.concatenate(each), return_counts=True)[1] for each in gaps[text].values()]
        least = sum(float((each * np.log2(each.sum() / each)).sum()) for each in counted)
        even, real, bound = (float(each / count) for each in bits)
        found.append((text, even, real, bound, least / float(count)))
    return found


def _evenly(indexes: Array, size: int, draws: np.random.Generator) -> Array:
    """Evenly drawn indexes, as many in each block as these."""
    import numpy as np

    counts = np.bincount(indexes >> 16)
    parts = [
        (block << 16) + np.sort(draws.choice(min(1 << 16, size - (block << 16)), count, replace=False))
        for block, count in enumerate(counts)
    ]
    return np.concatenate(parts)


def _count_gaps(indexes: Array, size: int, gaps: Gaps) -> None:
    """Adds the gaps of each block to those of blocks of about the same density."""
    import numpy as np

    for block in np.unique(indexes >> 16):
        inside = indexes[indexes >> 16 == block]
        room = min(1 << 16, size - (int(block) << 16))
        alike = round(2 * math.log2(room / len(inside)))  # within a factor of the root of two
        gaps.setdefault(alike, []).append(np.diff(inside, prepend=(block << 16) - 1))


def _flat(gradients: list[Tensor | None]) -> Tensor:
    import torch

    return torch.cat([gradient.view(-1) for gradient in gradients if gradient is not None])


def _entropy(indexes: Array, size: int) -> float:
    """The entropy of indexes, given how many there are in each block."""
    import numpy as np

    total = 0.0
    for block, count in enumerate(np.bincount(indexes >> 16)):
        room = min(1 << 16, size - (block << 16))
        p = count / room
        if 0 < p < 1:
            total -= room * (p * math.log2(p) + (1 - p) * math.log2(1 - p))
    return float(total)


def _warm() -> float:
    import torch

    from polyrhythm.compress.kernels import selection

    began = time.perf_counter()
    selection.warm(torch.float32)
    return time.perf_counter() - began
