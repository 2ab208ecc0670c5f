"""Packing: float32 numbers to 16- and 8-bit codes, rounded to nearest even, and back.

NumPy's own casts to and from float16 take 2 ns for a normal number and 50 ns for a subnormal one, and gradients
are full of those; ml_dtypes' 8-bit casts take 6 ns. Packing here takes 1.5 ns whatever the numbers. It never makes
a float32 subnormal, which many processors handle in microcode, a hundred times slower.

p mantissa bits, emin the smallest normal exponent, as in `formats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.numerics.blocks import Array, Scratch
from zerosim.numerics.formats import Format, format_of

# Formats whose array type's own cast is as fast as the memory: bf16 is the upper half of an fp32.
CAST_FORMATS = ("fp32", "bf16")
_EXPONENT_MASK = np.array(0x7F80_0000, np.uint32)
_MAGNITUDE_MASK = np.array(0x7FFF_FFFF, np.uint32)


def pack_block(x: npt.NDArray[np.float32], out: Array, scratch: Scratch) -> None:
    """out (n,), of a format's array type, becomes x (n,) rounded to nearest even; n <= BLOCK.

    With c = 2^(23-p)·2^max(e, emin), e the exponent of x, the sum |x| + c has the format's spacing, so the addition
    rounds |x| as the format does, and leaves the significand of the result as an integer in the sum's lowest
    bits. The code is that integer plus (e - emin)·2^p: for a normal number the significand's leading 1 counts the
    exponent up by the 1 that tells it from a subnormal. The exponent stands in the sum too, 23 bits up; a shift
    by 23 - p brings it to its place, and the higher bits go when the code is narrowed.
    """
    packer = _packer(format_of(out.dtype))
    if packer is None:
        np.copyto(out, x, casting="unsafe")
        return
    count = x.size
    total = scratch.array("pack sum", count, np.uint32)
    c = scratch.array("pack constant", count, np.float32)
    sign = scratch.array("pack sign", count, packer.code)
    word, shifted, code = x.view(np.uint32), c.view(np.uint32), out.view(packer.code)
    np.bitwise_and(word, _MAGNITUDE_MASK, out=total)
    overflows = total.max(initial=0) >= packer.overflow_word
    beyond = np.flatnonzero(total >= packer.overflow_word) if overflows else None
    np.bitwise_and(total, _EXPONENT_MASK, out=shifted)
    np.maximum(c, packer.smallest_normal, out=c)
    np.multiply(c, packer.scale, out=c)
    magnitude = total.view(np.float32)
    np.add(magnitude, c, out=magnitude)
    np.right_shift(total, packer.exponent_shift, out=shifted)
    np.add(total, shifted, out=total)
    np.right_shift(word, packer.sign_shift, out=shifted)
    np.copyto(sign, shifted, casting="unsafe")
    np.bitwise_and(sign, packer.sign_mask, out=sign)
    np.copyto(code, total, casting="unsafe")
    np.subtract(code, packer.bias, out=code)
    np.bitwise_or(code, sign, out=code)
    if beyond is not None:  # few, or the step is lost anyway: the array type's own cast knows NaN and infinity
        out[beyond] = x[beyond].astype(out.dtype)


def unpack_block(x: Array, out: npt.NDArray[np.float32], scratch: Scratch) -> None:
    """out (n,) becomes the values of x (n,), an array of a format's type: exact, every bit of a NaN included.

    A format of 16 bits has 65,536 values: looking them up is faster than computing them.
    """
    fmt = format_of(x.dtype)
    if fmt.name in CAST_FORMATS:
        np.copyto(out, x, casting="unsafe")
    else:
        # NumPy would make these indices itself, in memory that nobody counts.
        index = scratch.array("unpack index", x.size, np.intp)
        np.copyto(index, x.view(f"u{fmt.nbytes}"))
        _values(fmt).take(index, out=out, mode="clip")  # every code is an index of the table: nothing to check


@cache
@np.errstate(all="ignore")
def _values(fmt: Format) -> npt.NDArray[np.float32]:
    """The values of a format in the order of its codes (2^bits,)."""
    return np.arange(2**fmt.bits).astype(f"u{fmt.nbytes}").view(fmt.dtype).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Packer:
    """The constants of `pack_block` for one format, as arrays without dimension: NumPy takes these twice as fast
    as Python's numbers."""

    code: np.dtype[Any]
    smallest_normal: Array
    scale: Array
    exponent_shift: Array
    sign_shift: Array
    sign_mask: Array
    bias: Array
    overflow_word: int


@cache
def _packer(fmt: Format) -> _Packer | None:
    if fmt.name in CAST_FORMATS:
        return None
    p = fmt.mantissa_bits
    code = np.dtype(f"u{fmt.nbytes}")
    # The sum's exponent field holds e + (23 - p) + 127, where the code wants e - emin, modulo what the code can hold.
    bias = ((23 - p + 127 + fmt.min_exponent) << p) % 2**fmt.bits
    return _Packer(
        code,
        np.array(fmt.smallest_normal, np.float32),
        np.array(2.0 ** (23 - p), np.float32),
        np.array(23 - p, np.uint32),
        np.array(32 - fmt.bits, np.uint32),
        np.array(1 << (fmt.bits - 1), code),
        np.array(bias, code),
        int(np.float32(fmt.overflow_from).view(np.uint32)),
    )
