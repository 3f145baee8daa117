"""The wire format of sparse messages: sorted indexes in a vector of known length, and a value for each.

    magic "Sp" | version and mode u8 | length | count | tau f32, or a power of two i16 | [k of magnitudes u8]
    | [log2 of the block u8, directory, blocks] | plane of values | CRC32C of all before u32

Lengths and counts are varints, all else is little-endian. What the plane holds depends on the mode:

    signs    one bit each (1 is minus); the value is ±tau
    pulses   the same, and after each gap in a block the magnitude less one; the value is ±magnitude · tau
    trits    signs, when nearly all entries are present: one base-3 digit per parameter, five to a byte
    half     16-bit floats, times a power of two that brings the largest near the top of their range, so
             that small gradients do not vanish
    single, double    32 and 64-bit floats

Indexes are gaps (how many parameters are skipped) in Rice codes, in blocks. The first gap of a block counts
from the start of the block, on a byte of its own, so blocks can be read in any order. For each block the
directory has its count and, unless that is 0, its k (layers differ in density) and its bytes. Blocks have
2^16 parameters, or 4, 16, 64, 256 times as many where entries are so few that directories would cost more
than they save. The writer computes the exact cost of each choice. The sender, the step and the layout of the
model are in the frame around the message (`polyrhythm.wire.frame`).

The reader trusts nothing: a message that is not exactly of this form, for a vector of exactly this length,
is a WireError, and then nothing has been added to anything.
"""

from __future__ import annotations

from polyrhythm.compress.kernels.entropy.format import LARGEST_TAU
from polyrhythm.compress.kernels.entropy.reader import add, count, unpack, unpack_pulses
from polyrhythm.compress.kernels.entropy.writer import pack_pulses, pack_values

__all__ = ["LARGEST_TAU", "add", "count", "pack_pulses", "pack_values", "unpack", "unpack_pulses"]
