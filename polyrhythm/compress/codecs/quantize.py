"""Quantizers: codecs that give every number a few bits. Here 8-bit floats, and 8 or 4-bit integers.

A code is bytes: a header of 8 (codec, width of a number, how many numbers), the units of the blocks, and the
digits. Its length follows from the vector that it is for, so a message never decides how much is allocated.

Units are as wide as the values. With rounding to the nearest, the sent value plus the residual is the value
to the last bit: a number and the nearest multiple of the unit are within a factor of two of each other, and
the difference of two such floats is exact. With stochastic rounding, and with signs, a small number may be
sent as a large one; then it holds to half a bit of the larger.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.kernels import dense
from polyrhythm.core.codec import Codec, Reduction
from polyrhythm.core.errors import UsageError, WireError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.compress.state import CodecState

HEADER = 8


@dataclass(frozen=True)
class Quantizer(Codec):
    """What quantizers share: the header, and how a code is checked before it is decoded."""

    form: ClassVar[int]  # the first byte of a code; changes with the format

    def header(self, like: Tensor) -> bytes:
        return bytes([self.form, like.element_size()]) + len(like).to_bytes(6, "little")

    def new_code(self, like: Tensor, length: int) -> Tensor:
        """A code for such a vector with its header; `length` more bytes are to be filled in."""
        import torch

        code = torch.empty(HEADER + length, dtype=torch.uint8)
        code[:HEADER] = torch.frombuffer(bytearray(self.header(like)), dtype=torch.uint8)
        return code

    def body(self, code: Tensor, into: Tensor, length: int, more: bool = False) -> Tensor:
        """The bytes after the header; WireError if this is not a code for such a vector."""
        import torch

        if code.dtype != torch.uint8 or code.dim() != 1:
            raise WireError(f"{self.name}: a code is a row of bytes, not {code.dim()}-D {code.dtype}")
        if len(code) < HEADER or bytes(code[:HEADER].tolist()) != self.header(into):
            raise WireError(f"{self.name}: not a code for {len(into)} numbers of {into.dtype}")
        if len(code) < HEADER + length or (len(code) > HEADER + length and not more):
            raise WireError(
                f"{self.name}: a code for {len(into)} numbers has {HEADER + length} bytes"
                f"{' or more' if more else ''}, not {len(code)}"
            )
        return code[HEADER:]

    def units(self, body: Tensor, count: int, dtype: torch.dtype, most: float) -> Tensor:
        """The units that a body starts with; WireError if one overflows when taken `most` times."""
        from polyrhythm.compress.kernels.dense.plain import units_between

        units = body[: count * dtype.itemsize].clone().view(dtype)  # a copy: a message may not be aligned
        if not bool(((units >= 0) & (units <= units_between(dtype, most)[1])).all()):
            raise WireError(f"{self.name}: a unit that is negative, not finite or too large")
        return units

    def prepare(self, dtype: torch.dtype) -> None:
        import torch

        from polyrhythm.compress import feedback
        from polyrhythm.compress.state import CodecState

        state = CodecState.alone(3, feedback=self.feedback, dtype=dtype)
        values = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
        self.decode(feedback.encode(self, values, state), values)


def blocks_of(count: int, block: int) -> int:
    return -(-count // block)


def check_block(block: int) -> None:
    if not 8 <= block <= 1 << 20:
        raise UsageError("block must be from 8 to 1048576")


@dataclass(frozen=True)
class Float8(Quantizer):
    r"""Sends 8-bit floats (E4M3) with 4 bits of precision and one power of two per block.

    $$
    \hat{g}_i = 2^e \operatorname{fp8}(2^{-e} g_i)
    $$

    The power brings the largest number of a block to 448 or just below, the largest of these floats; what is
    $2^{15}$ times smaller still has one bit.

    - `block`: numbers that share one power of two

    >>> import torch
    >>> import polyrhythm as pr
    >>> from polyrhythm.compress.state import CodecState
    >>> codec, got = pr.parse("allreduce+fp8").codec, torch.zeros(3)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 0.3, -0.01]), CodecState.alone(count=3)), got)
    >>> got.tolist()
    [1.0, 0.3125, -0.009765625]
    """

    name: ClassVar[str] = "fp8"
    main: ClassVar[str] = "block"
    paper: ClassVar[str] = "Micikevicius et al. 2022, FP8 Formats for Deep Learning"
    reduction: ClassVar[Reduction] = Reduction.HOPS
    form: ClassVar[int] = 1

    block: int = 256
    feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_block(self.block)

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        return self._encode(values, None)

    def encode_with_feedback(self, values: Tensor, residual: Tensor, state: CodecState) -> Tensor:
        return self._encode(values, residual)

    def _encode(self, values: Tensor, residual: Tensor | None) -> Tensor:
        import torch

        blocks = blocks_of(len(values), self.block)
        code = self.new_code(values, 2 * blocks + len(values))
        powers, body = code[HEADER : HEADER + 2 * blocks].view(torch.int16), code[HEADER + 2 * blocks :]
        dense.backend(values).floats(values, residual, self.block, powers, body)
        return code

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        import torch

        from polyrhythm.compress.kernels.dense.plain import limits

        blocks = blocks_of(len(into), self.block)
        body = self.body(code, into, 2 * blocks + len(into))
        powers, body = body[: 2 * blocks].clone().view(torch.int16), body[2 * blocks :]
        least, most = limits(into.dtype)
        if not bool(((powers >= least) & (powers <= most)).all()):
            raise WireError("fp8: a power of two that is beyond the floats")
        if dense.backend(body).largest_float(body) == 0x7F:
            raise WireError("fp8: a code that holds NaN")
        dense.backend(into).add_floats(powers, body, into, scale, self.block)


@dataclass(frozen=True)
class Integers(Quantizer):
    """Whole multiples of a unit; the largest magnitude of a block is `top` units.

    - `block`: numbers that share one unit
    - `rounding`: to the nearest, with feedback; or stochastic, which is unbiased and needs none
    """

    top: ClassVar[int]
    reduction: ClassVar[Reduction] = Reduction.HOPS

    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_block(self.block)

    def for_replies(self) -> Codec:
        return replace(self, rounding="nearest")  # stochastic rounding lengthens differences

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        return self._encode(values, None, state)

    def encode_with_feedback(self, values: Tensor, residual: Tensor, state: CodecState) -> Tensor:
        return self._encode(values, residual, state)

    def _size(self, count: int) -> int:
        return count if self.top > 7 else dense.packed_size(count, self.block, 2)

    def _encode(self, values: Tensor, residual: Tensor | None, state: CodecState) -> Tensor:
        wide = values.element_size() * blocks_of(len(values), self.block)
        code = self.new_code(values, wide + self._size(len(values)))
        units, body = code[HEADER : HEADER + wide].view(values.dtype), code[HEADER + wide :]
        seed = None if self.rounding == "nearest" else state.stream()
        dense.backend(values).integers(values, residual, self.block, self.top, seed, units, body)
        return code

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        blocks = blocks_of(len(into), self.block)
        wide = into.element_size() * blocks
        body = self.body(code, into, wide + self._size(len(into)))
        units = self.units(body, blocks, into.dtype, self.top)
        dense.backend(into).add_integers(units, body[wide:], into, scale, self.block, self.top)


@dataclass(frozen=True)
class Int8(Integers):
    r"""Sends 8-bit integers and one scale per block: its largest magnitude over 127.

    $$
    s = \frac{1}{127} \max_i \lvert g_i \rvert, \qquad \hat{g}_i = s \operatorname{round}(g_i / s)
    $$

    >>> import torch
    >>> import polyrhythm as pr
    >>> from polyrhythm.compress.state import CodecState
    >>> codec, got = pr.parse("allreduce+int8").codec, torch.zeros(3)
    >>> codec.decode(codec.encode(torch.tensor([1.27, 0.5, -0.004]), CodecState.alone(count=3)), got)
    >>> got
    tensor([1.2700, 0.5000, 0.0000])
    """

    name: ClassVar[str] = "int8"
    main: ClassVar[str] = "block"
    paper: ClassVar[str] = "Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning"
    form: ClassVar[int] = 2
    top: ClassVar[int] = 127


@dataclass(frozen=True)
class Int4(Integers):
    r"""Sends 4-bit integers, two to a byte, and one scale per block: its largest magnitude over 7.

    $$
    s = \frac{1}{7} \max_i \lvert g_i \rvert, \qquad \hat{g}_i = s \operatorname{round}(g_i / s)
    $$

    >>> import torch
    >>> import polyrhythm as pr
    >>> from polyrhythm.compress.state import CodecState
    >>> codec, got = pr.parse("allreduce+int4").codec, torch.zeros(3)
    >>> codec.decode(codec.encode(torch.tensor([0.7, 0.26, -0.1]), CodecState.alone(count=3)), got)
    >>> got
    tensor([ 0.7000,  0.3000, -0.1000])
    """

    name: ClassVar[str] = "int4"
    main: ClassVar[str] = "block"
    paper: ClassVar[str] = "Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization"
    form: ClassVar[int] = 3
    top: ClassVar[int] = 7
