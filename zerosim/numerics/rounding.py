"""Rounding to a format's grid, the result still in a float32 or float64 array (its *container*).

p mantissa bits, emin the smallest normal exponent, as in `formats`; t the container's own mantissa bits, 23 or
52. A number x of exponent e lies between two neighbors of the grid that are q = 2^(max(e, emin) - p) apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from zerosim.numerics.arrays import BLOCK, SMALL, Array, Scratch, in_blocks
from zerosim.numerics.checks import check_array, is_floating
from zerosim.numerics.formats import FORMATS, Format, format_of

Mode = Literal["nearest", "toward_zero", "stochastic"]
MODES: tuple[Mode, ...] = get_args(Mode)


@np.errstate(all="ignore")  # overflow is an answer here, not an accident
def round_to(
    x: npt.ArrayLike,
    fmt: Format | str | npt.DTypeLike,
    mode: Mode = "nearest",
    *,
    bits: npt.NDArray[np.uint32] | None = None,
    saturate: bool = False,
    out: Array | None = None,
) -> Array:
    """Every element of x becomes a number of the format, rounded once.

    x: any shape; float64 (or a Python float), float32, or a format's own array type, which is widened first.
    Returns a float64 array where x is float64, else float32; `out`, of that type and of x's shape, may be x.

    - `nearest`: ties to even. From `overflow_from` on (e4m3: above it) the result is infinite; e4m3, which has
      no infinity, gives NaN.
    - `toward_zero`: the next number toward zero. A finite x never overflows: it becomes the largest number.
    - `stochastic`: away from zero with the probability of x's place between its two neighbors, that is if and only
      if (bits + 1/2)/2^32 < (|x| - lower)/(upper - lower). `bits` is a uint32 array of x's shape. A number of the grid
      stays. Above the largest number, the upper neighbor is the number that would come next, and overflows.
    - In all modes subnormal numbers are kept, a result of 0 keeps x's sign, NaN stays NaN, and an infinite x stays
      infinite (NaN in e4m3). `saturate=True` gives the largest number in place of every overflow and infinity.

    Raises ValueError for an unknown mode or format, an x that is not of floating point, an `out` or `bits` of the
    wrong shape or type, `bits` missing where the mode is stochastic, and `bits` given where it is not.
    """
    fmt = format_of(fmt)
    values = _container(x, "round_to")
    if mode not in MODES:
        raise ValueError(f"rounding mode {mode!r} is none of {', '.join(MODES)}")
    _check_bits(bits, mode, values)
    result, scratch = _result(values, out), Scratch()
    for y, x, *words in in_blocks(result, values, *([] if bits is None else [bits])):
        if mode == "nearest":
            nearest_block(x, y, fmt, scratch, saturate)
        else:
            _directed_block(x, y, fmt, saturate, *words)
    return result


def nearest_block(x: Array, y: Array, fmt: Format, scratch: Scratch, saturate: bool = False) -> None:
    """Rounds one block x (n,) to nearest even into y (n,), of x's type; y may be x.

    With c = 1.5·2^t·q the sum x + c lies where the container's own spacing is q, so the processor rounds x just as
    it is wanted, ties and subnormals included, and to subtract c again is exact (Sterbenz 1974). What leaves the
    format is replaced afterwards.
    """
    if x.dtype == np.float32 and (x.size <= SMALL or fmt.exponent_bits == FORMATS["fp32"].exponent_bits):
        _cast_block(x, y, fmt, scratch, saturate)
        return
    rounder = _rounder(fmt, x.dtype)
    c = scratch.array("rounding constant", x.size, x.dtype)
    sign = scratch.array("rounding sign", x.size, rounder.word)
    word = x.view(rounder.word)
    np.bitwise_and(word, rounder.exponent_mask, out=c.view(rounder.word))
    np.maximum(c, rounder.smallest_normal[:x.size], out=c)
    suspicious = c.max(initial=0) >= rounder.largest_power
    beyond = _beyond(x, fmt) if suspicious else None
    instead = None if beyond is None else _overflowed(x[beyond], fmt, saturate)
    np.multiply(c, rounder.constant, out=c)
    np.bitwise_and(word, rounder.sign_mask, out=sign)
    np.add(x, c, out=y)
    np.subtract(y, c, out=y)
    result = y.view(rounder.word)
    np.bitwise_or(result, sign, out=result)  # -0 + c - c is +0: give every result its sign back
    if beyond is not None:
        y[beyond] = instead


def round_sums(x: npt.NDArray[np.float32], fmt: Format, scratch: Scratch) -> None:
    """Rounds one block of sums of two numbers of a format of at most 16 bits, in place, as `nearest_block` does, in
    half its time.

    Such a sum is a multiple of the smallest subnormal: below the normal numbers there is nothing to round. Above, with
    l = x·2^(23-p) the difference l - x lies where the container's spacing is q, but for x close above a power of two,
    where it is q/2, and the power is nearest all the same; and l is an even multiple of q where x is halfway.
    Source: Dekker 1971, Numerische Mathematik 18 (Veltkamp's splitting), but by 2^s: 2^s + 1 leaves ties to chance.
    """
    if not max(x.max(initial=0), -x.min(initial=0)) <= min(fmt.largest, 2.0**100):  # no NaN is, and l must be finite
        nearest_block(x, x, fmt, scratch)
        return
    lifted = scratch.array("rounding lifted", x.size, x.dtype)
    np.multiply(x, 2.0 ** (23 - fmt.mantissa_bits), out=lifted)
    np.subtract(lifted, x, out=x)
    np.subtract(lifted, x, out=x)


def _cast_block(x: Array, y: Array, fmt: Format, scratch: Scratch, saturate: bool) -> None:
    """Nearest even for a float32 block by the array type's own cast: fast where the format has float32's exponents,
    for which c would overflow, and where there are few elements."""
    beyond = _beyond(x, fmt) if saturate else None
    instead = None if beyond is None else _overflowed(x[beyond], fmt, saturate)
    if fmt.dtype != y.dtype:
        low = scratch.array("rounding cast", x.size, fmt.dtype)
        np.copyto(low, x, casting="unsafe")
        np.copyto(y, low, casting="unsafe")
    elif y is not x:
        np.copyto(y, x)
    if beyond is not None:
        y[beyond] = instead


def _directed_block(
    x: Array, y: Array, fmt: Format, saturate: bool, bits: npt.NDArray[np.uint32] | None = None
) -> None:
    """Rounds one block toward zero, or stochastically where there are bits. In float64 all of this is exact: x/q
    has at most 53 bits whatever x, and its fraction and (bits + 1/2)/2^32 are compared as they are."""
    wide = x.astype(np.float64)
    magnitude = np.abs(wide)
    _, exponent = np.frexp(magnitude)
    shift = np.maximum(exponent - 1, fmt.min_exponent) - fmt.mantissa_bits
    ratio = np.ldexp(magnitude, -shift)
    steps = np.floor(ratio)
    if bits is not None:
        steps += (bits + 0.5) * 2.0**-32 < ratio - steps
    rounded = np.ldexp(steps, shift)
    finite = np.isfinite(magnitude)
    if bits is None:
        rounded[finite] = np.minimum(rounded[finite], fmt.largest)
    over = ~finite | (rounded > fmt.largest)
    rounded[over] = _overflowed(magnitude[over], fmt, saturate)
    y[...] = np.copysign(rounded, wide)


def _beyond(x: Array, fmt: Format) -> npt.NDArray[np.intp] | None:
    """The places of NaN, infinities and numbers that overflow; None where there are none."""
    magnitude = np.abs(x)
    limit = magnitude.dtype.type(fmt.overflow_from)  # exact: 24 bits are enough for every format's midpoint
    inside = magnitude < limit if fmt.has_infinity else magnitude <= limit
    return None if inside.all() else np.flatnonzero(~inside)


def _overflowed(x: Array, fmt: Format, saturate: bool) -> Array:
    """The results for x that the format does not hold: NaN stays, the others keep their sign."""
    instead = x.dtype.type(fmt.largest if saturate else fmt.overflow_value)
    return np.where(np.isnan(x), x, np.copysign(instead, x))


@dataclass(frozen=True, slots=True)
class _Rounder:
    """The constants of `nearest_block` for one format and container, as arrays without dimension: NumPy takes
    these twice as fast as Python's numbers."""

    word: np.dtype[Any]
    exponent_mask: Array
    sign_mask: Array
    smallest_normal: Array
    largest_power: float
    constant: Array


@cache
def _rounder(fmt: Format, container: np.dtype[Any]) -> _Rounder:
    word, exponent_mask, container_bits = {
        np.dtype(np.float32): (np.uint32, 0x7F80_0000, 23),
        np.dtype(np.float64): (np.uint64, 0x7FF0_0000_0000_0000, 52),
    }[container]
    return _Rounder(
        np.dtype(word),
        np.array(exponent_mask, word),
        np.array(1 << (8 * container.itemsize - 1), word),
        np.full(BLOCK, fmt.smallest_normal, container),
        2.0**fmt.max_exponent,
        np.array(1.5 * 2.0 ** (container_bits - fmt.mantissa_bits), container),
    )


def _container(x: npt.ArrayLike, asked: str) -> Array:
    values = np.asarray(x)
    if values.dtype in (np.float32, np.float64):
        return values
    if is_floating(values.dtype):
        return values.astype(np.float32)
    raise ValueError(
        f"{asked} was given elements of type {values.dtype.name}; it rounds float64, float32 and the formats' own "
        "array types: convert first, with astype"
    )


def _result(values: Array, out: Array | None) -> Array:
    if out is None:
        return np.empty(values.shape, values.dtype)
    check_array("round_to", "out", out)
    if out.shape != values.shape or out.dtype != values.dtype:
        raise ValueError(
            f"round_to needs out of shape {values.shape} and type {values.dtype.name}, "
            f"got {out.shape} and {out.dtype.name}"
        )
    return out


def _check_bits(bits: npt.NDArray[np.uint32] | None, mode: Mode, values: Array) -> None:
    if mode != "stochastic":
        if bits is not None:
            raise ValueError(f"mode {mode!r} takes no bits; only 'stochastic' does")
        return
    if bits is None:
        raise ValueError(
            "stochastic rounding needs bits=, one uint32 for each element: "
            "numerics.random.bits(key, start, count) makes them"
        )
    check_array("stochastic rounding", "bits", bits)
    if bits.dtype != np.uint32 or bits.shape != values.shape:
        raise ValueError(
            f"stochastic rounding needs bits of shape {values.shape} and type uint32, "
            f"got {bits.shape} and {bits.dtype.name}"
        )


def spacing(x: npt.ArrayLike, fmt: Format | str | npt.DTypeLike) -> Array:
    """The gap from |x|, rounded to the format, to the next larger magnitude of the grid.

    Any shape; float32, or float64 where x is float64 (a Python float is). Below the smallest normal number the
    gap is the smallest subnormal; at the largest number it is the gap that its binade has; NaN where x is NaN or
    overflows.

    >>> float(spacing(1.0, "fp16")) == 2.0**-10
    True
    """
    fmt = format_of(fmt)
    y = round_to(_container(x, "spacing"), fmt)
    magnitude = np.maximum(np.abs(y), y.dtype.type(fmt.smallest_normal))
    _, exponent = np.frexp(magnitude)  # magnitude = m·2^exponent with 1/2 <= m < 1
    gap = np.ldexp(y.dtype.type(1), exponent - 1 - fmt.mantissa_bits)
    result: Array = np.where(np.isfinite(y), gap, y.dtype.type(np.nan))
    return result


def errors_in_ulps(found: Array, expected: Array, scale: npt.ArrayLike = 0.0) -> Array:
    """The distance of each number from the expected one, in ULPs of that, the gaps of its array's format, or of
    ``scale`` where it is larger; float64. 0 for two NaNs; inf at an inf or NaN that the other is not.

    >>> errors_in_ulps(np.float32([1 + 2**-22, 2**-30, np.inf]), np.float32([1, 0, 1]), scale=2**-7)
    array([ 2.,  1., inf])
    """
    fmt, a, b = format_of(expected.dtype), found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(np.maximum(np.abs(b), np.maximum(scale, fmt.smallest_normal)))
        apart = np.ldexp(np.abs(a - b), fmt.mantissa_bits + 1 - exponent)
    result: Array = np.where((a == b) | np.isnan(a) & np.isnan(b), 0.0, np.where(np.isnan(apart), np.inf, apart))
    return result


# -- Packing: float32 numbers to 16- and 8-bit codes, rounded to nearest even, and back --------------------------------
# NumPy's own casts to and from float16 take 2 ns for a normal number and 65 ns for a subnormal one, and gradients
# are full of those; ml_dtypes' 8-bit casts take 6 ns. Packing here takes 0.8 ns whatever the numbers. It never makes
# a float32 subnormal, which many processors handle in microcode, a hundred times slower.

_BF16 = FORMATS["bf16"].dtype


def pack_block(x: npt.NDArray[np.float32], out: Array, scratch: Scratch) -> None:
    """out (n,), of the array type of fp16 or fp8, becomes x (n,) rounded to nearest even; n <= BLOCK.

    With c = 2^(23-p)·2^max(e, emin), e the exponent of x, and x's sign, the sum x + c has the format's spacing, so the
    addition rounds x as the format does, and leaves the significand of the result as an integer in the sum's lowest
    bits. The code is that integer plus (e - emin)·2^p: for a normal number the significand's leading 1 counts the
    exponent up by the 1 that tells it from a subnormal. c is a number of bf16, the upper half of an fp32, so that all
    but the addition is done with words of 16 bits, in half the time.
    """
    coder = _coder(format_of(out.dtype))
    total = scratch.array("pack sum", x.size, np.float32)
    sign, power = (scratch.array(name, x.size, np.uint16) for name in ("pack sign", "pack power"))
    code = out.view(np.uint16) if out.itemsize == 2 else scratch.array("pack code", x.size, np.uint16)
    word = total.view(np.uint32)
    np.right_shift(x.view(np.uint32), _HALF, out=word)
    np.copyto(sign, word, casting="unsafe")
    np.bitwise_and(sign, _POWER_MASK, out=power)
    suspicious = power.max(initial=0) >= coder.largest_power
    np.maximum(power, coder.smallest_power[: x.size], out=power)
    np.add(power, coder.scale, out=power)
    np.bitwise_and(sign, _SIGN_MASK, out=sign)
    np.bitwise_or(power, sign, out=power)
    np.copyto(total, power.view(_BF16))
    np.add(x, total, out=total)
    np.copyto(code, word, casting="unsafe")
    coder.align(power, coder.places, out=power)
    np.add(code, power, out=code)
    np.subtract(code, coder.bias, out=code)
    if out.itemsize == 1:
        np.right_shift(sign, 8, out=sign)
    np.bitwise_or(code, sign, out=code)
    if out.itemsize == 1:
        np.copyto(out.view(np.uint8), code, casting="unsafe")
    if suspicious:  # few, or the step is lost anyway: the array type's own cast knows NaN and infinity
        beyond = np.flatnonzero(np.bitwise_and(x.view(np.uint32), _MAGNITUDE_MASK, out=word) >= coder.overflow_word)
        out[beyond] = x[beyond].astype(out.dtype)


def unpack_block(x: Array, out: npt.NDArray[np.float32]) -> None:
    """out (n,) becomes the values of x (n,), of the type of fp16 or fp8: exact, every bit of a NaN included.

    The bits are shifted to where fp32 has them, their sign with them, and a power of two makes up for the exponents'
    other bias, of subnormal numbers too. A block with an infinity or a NaN is looked up.
    """
    coder = _coder(format_of(x.dtype))
    signed, word = x.view(f"i{x.itemsize}"), out.view(np.int32)
    np.copyto(word, signed)
    np.left_shift(word, coder.shift, out=word)
    np.bitwise_and(word, coder.word_mask, out=word)
    np.multiply(out, coder.unbias, out=out)
    code = x.view(f"u{x.itemsize}")
    if signed.max(initial=0) >= coder.beyond or code.max(initial=0) >= coder.negative_beyond:
        out[...] = values_of(format_of(x.dtype))[code]


@cache
@np.errstate(all="ignore")
def values_of(fmt: Format) -> npt.NDArray[np.float32]:
    """The values of a format in the order of its codes (2^bits,)."""
    return np.arange(2**fmt.bits).astype(f"u{fmt.nbytes}").view(fmt.dtype).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Coder:
    """The constants of `pack_block` and `unpack_block` for one format, as arrays without dimension: NumPy takes these
    twice as fast as Python's numbers. A maximum with one number it takes in eight times the time of one with as many as
    there are. ``beyond`` is the first code of none of the numbers, ``negative_beyond`` the same with a sign."""

    largest_power: int
    smallest_power: Array
    scale: Array
    align: np.ufunc
    places: Array
    bias: Array
    overflow_word: int
    shift: Array
    word_mask: Array
    unbias: Array
    beyond: int
    negative_beyond: int


_HALF = np.array(16, np.uint32)
_POWER_MASK = np.array(0x7F80, np.uint16)
_SIGN_MASK = np.array(0x8000, np.uint16)
_MAGNITUDE_MASK = np.array(0x7FFF_FFFF, np.uint32)


@cache
def _coder(fmt: Format) -> _Coder:
    p, sign = fmt.mantissa_bits, 2 ** (fmt.bits - 1)
    beyond = 1 + int(np.array(fmt.largest, fmt.dtype).view(f"u{fmt.nbytes}"))
    return _Coder(
        largest_power=(fmt.max_exponent + 127) << 7,
        smallest_power=np.full(BLOCK, (fmt.min_exponent + 127) << 7, np.uint16),
        scale=np.array((23 - p) << 7, np.uint16),
        align=np.multiply if p > 7 else np.right_shift,
        places=np.array(2 ** (p - 7) if p > 7 else 7 - p, np.uint16),
        # c's exponent field holds e + (23 - p) + 127, where the code wants e - emin, modulo what the code can hold.
        bias=np.array(((23 - p + 127 + fmt.min_exponent) << p) % 2**fmt.bits, np.uint16),
        overflow_word=int(np.float32(fmt.overflow_from).view(np.uint32)),
        shift=np.array(23 - p, np.int32),
        word_mask=np.array(1 << 31 | (sign - 1) << 23 - p, np.uint32).view(np.int32),
        unbias=np.array(2.0 ** (126 + fmt.min_exponent), np.float32),
        beyond=beyond,
        negative_beyond=beyond + sign,
    )
