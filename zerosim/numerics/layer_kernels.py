"""Kernels of layers: activation functions, dropout, attention, normalization, tables of rows, losses of softmax.

Functions of arrays, and of the kernels `k` that compute with them; `NumpyKernels` makes them its methods and keeps a
user's np.errstate out. Everything is computed in float32 (float64 where an array is), block by block, and rounded once.
An element's or a row's result depends on that element or row alone, not on the block that it is in. Attention,
normalization and the sums of softmax's losses are written in what `k` offers, so that they compute on a device too.

Legend: n elements of any shape; M rows, C columns, V classes; B batch, T tokens, H heads of D channels, C = H·D. Keys
and values have K channels, C where each head has its own, else a divisor of it: as many heads share one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from zerosim.numerics.arrays import BLOCK, Array, Scratch, in_blocks, spans, to_host, words
from zerosim.numerics.blockwise import BlockKernels, PerColumn, PerRow, cast_block, quiet
from zerosim.numerics.checks import FP32, check_operands, check_same_type, check_shapes, work_type
from zerosim.numerics.formats import format_of
from zerosim.numerics.rounding import values_of

# -- The complementary error function, which NumPy has not -------------------------------------------------------------
# erfc(z) = t·exp(-z² + P(t)) with t = 2/(2 + z), for z >= 0: P is smooth on (0, 1], so that a Chebyshev series of few
# terms is as exact as the arithmetic, and relative to the result, however small that is. The series is stored, so that
# the same numbers come out of every version of NumPy.
# Source: Abramowitz & Stegun 1964, 7.1.14 (continued fraction); the substitution is common.

SATURATED = 40.0  # beyond it exp(-z²) is 0 in float64 too
_SMALLEST = 2 / (2 + SATURATED)  # t there

# The Chebyshev coefficients of P(t) = log(erfc(z)·exp(z²)) - log(t), z = 2/t - 2, on t from _SMALLEST to 1, up to the
# last that float64 notices: those of its interpolation in 41 Chebyshev points, computed on 2026-11-22 with 60 digits
# and rounded once. A test holds the exact GELU that is made of them to `math.erfc`, to some roundings of float64.
SERIES = (
    -0.6234339344287685, 0.6168926782133124, 0.015549576220624277, -0.008673861197536449,
    -0.0006548713320332943, 0.00031321414827867284, 2.252373240408973e-05, -1.5758183468720783e-05,
    -3.6171208348166863e-07, 8.79833056095182e-07, -4.7020038867346186e-08, -4.702843528418933e-08,
    7.406312391095885e-09, 2.0315460012999305e-09, -6.861552443507438e-10, -3.7957862121604446e-11,
    4.6817669482678025e-11, -4.284505204596573e-12, -2.180873480487288e-12, 5.941467867319483e-13,
    3.061758844878569e-14, -3.933640603592662e-14, 5.371598076958874e-15, 1.120436955296228e-15,
    -5.122386018052103e-16, 5.5351558292550955e-17,
)


def complement(z: Array, out: Array, scratch: Scratch) -> Array:
    """out = erfc(z) of one block z >= 0 (n,), float32 or float64; z is clamped to SATURATED; NaN stays NaN."""
    np.minimum(z, SATURATED, out=z)
    t = np.add(z, 2, out=out)
    np.divide(2, t, out=t)
    u = np.multiply(t, 2 / (1 - _SMALLEST), out=scratch.array("erfc u", z.size, z.dtype))
    np.subtract(u, (1 + _SMALLEST) / (1 - _SMALLEST), out=u)
    power = _chebyshev(u, _series(z.dtype), scratch)
    np.multiply(z, z, out=u)
    np.subtract(power, u, out=power)
    np.exp(power, out=power)
    return np.multiply(t, power, out=t)


def _chebyshev(u: Array, series: tuple[float, ...], scratch: Scratch) -> Array:
    """Σ series[i]·T_i(u), by Clenshaw's recurrence."""
    newer, older, spare = (scratch.array(f"erfc {name}", u.size, u.dtype) for name in ("newer", "older", "spare"))
    newer[...], older[...] = 0, 0
    for coefficient in reversed(series[1:]):
        np.multiply(u, newer, out=spare)
        np.multiply(spare, 2, out=spare)
        np.subtract(spare, older, out=spare)
        np.add(spare, coefficient, out=spare)
        newer, older, spare = spare, newer, older
    np.multiply(u, newer, out=spare)
    np.subtract(spare, older, out=spare)
    return np.add(spare, series[0], out=spare)


@cache
def _series(dtype: np.dtype[Any]) -> tuple[float, ...]:
    """The coefficients of P up to the last that the type can notice."""
    noticed = np.flatnonzero(np.abs(SERIES) > np.finfo(dtype).eps / 8)
    return SERIES[:noticed[-1] + 1]


# -- Activation functions and dropout ----------------------------------------------------------------------------------
# A format of 16 bits has 65,536 values: on the host a function of one of them is looked up in a table, which holds what
# the float32 formula gives for each, rounded. Looking up costs a fifth of computing, and gives the same bits. x is
# clamped where a function is saturated exactly, so that no infinity meets a zero: NumPy clips in a third of the time
# that it takes for a maximum with a number.

_Function = Callable[..., None]  # (scratch, x, ..., result): blocks of one type

# NumPy copies what does not lie in one row, piece by piece, into buffers of 8,192 elements, unless a piece fills one.
# With buffers as short as this, halves of rows are read and written where they lie. np.errstate, in which each kernel
# runs, ends with the size that was before.
PIECE = 1024  # elements

# GELU's tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2).
_SLOPE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_TANH_SATURATED = 10.0  # beyond it the tanh is exactly -1 or 1, in float64 too
_SIGMOID_SATURATED = 1000.0  # beyond it the sigmoid is exactly 0 or 1, in float64 too
_DENSITY = 1 / math.sqrt(2 * math.pi)


def relu(k: BlockKernels, x: Array, out: Array, bits: Array) -> None:
    """out = max(x, 0), +0 for -0, NaN for NaN; bits (⌈n/8⌉,) uint8 says which elements are let through."""
    check_operands("relu", x=x, out=out)
    k.run_blocks(_relu, [x], out, in_place=True)
    codes = _codes_of(out)
    for here, packed in _blocks_of_bits(codes.size):
        bits[packed] = np.packbits(codes[here] != 0)


def relu_gradient(bits: Array, dy: Array, out: Array) -> None:
    """out = dy where its bit is set, else +0, even for a NaN; equal shapes and types."""
    check_shapes("relu_gradient", dy=dy, out=out)
    check_same_type("relu_gradient", dy, out)
    for (_, packed), (chosen, codes) in zip(_blocks_of_bits(out.size), in_blocks(out, dy), strict=True):
        mask = np.unpackbits(bits[packed])[: codes.size]
        np.multiply(_codes_of(codes), mask, out=_codes_of(chosen))


def packed_nbytes(count: int) -> int:
    """Bytes that ``count`` bits take."""
    return -(-count // 8)


def _codes_of(x: Array) -> Array:
    """The elements' codes (n,), in which +0 is 0: to choose by them widens no format."""
    return x.reshape(-1).view(f"u{x.itemsize}")


def _blocks_of_bits(count: int) -> Iterator[tuple[slice, slice]]:
    """The elements of each block, and the bytes that hold their bits: blocks begin at multiples of 8."""
    for here in spans(count):
        yield here, slice(here.start // 8, packed_nbytes(here.stop))


def gelu(k: BlockKernels, x: Array, out: Array, *, exact: bool = False) -> None:
    """out = x/2·(1 + tanh(√(2/π)·(x + 0.044715x³))), or, ``exact``, x·Φ(x) with Φ the normal distribution function;
    equal shapes."""
    check_operands("gelu", x=x, out=out)
    function = _gelu_exact if exact else _gelu
    if k.LOOKS_UP and x.dtype == out.dtype and x.dtype.itemsize <= 2:
        _look_up(k, _codes(function, x.dtype), x, out)
    else:
        k.run_blocks(function, [x], out, with_scratch=True)


def gelu_gradient(k: BlockKernels, x: Array, dy: Array, out: Array, *, exact: bool = False) -> None:
    """out = dy · d gelu(x)/dx; equal shapes."""
    check_operands("gelu_gradient", x=x, dy=dy, out=out)
    function = _gelu_exact_slope if exact else _gelu_slope
    if k.LOOKS_UP and x.dtype.itemsize <= 2 and work_type(dy, out) == FP32:
        _multiply_by(k, _values(function, x.dtype), x, dy, out)
    else:
        k.run_blocks(partial(_times_slope, function), [x, dy], out, with_scratch=True)


def swiglu(k: BlockKernels, h: Array, out: Array) -> None:
    """out (M, F) = silu(gate)·up, silu(x) = x/(1 + e⁻ˣ); gate and up lie side by side in h (M, 2F).

    Source: Shazeer 2020 (arXiv:2002.05202), section 2.
    """
    np.setbufsize(PIECE)
    gate, up = _halves(h)
    for rows in k.row_blocks(h):
        k.apply(_swiglu, [gate[rows], up[rows]], out[rows], with_scratch=True)


def swiglu_gradient(k: BlockKernels, h: Array, dy: Array, out: Array) -> None:
    """out (M, 2F): the gradient of gate, dy·up·silu'(gate), and that of up, dy·silu(gate), side by side; dy (M, F)."""
    np.setbufsize(PIECE)
    (gate, up), (d_gate, d_up) = _halves(h), _halves(out)
    for rows in k.row_blocks(h):
        k.apply(_swiglu_gradients, [gate[rows], up[rows], dy[rows]], d_gate[rows], also=d_up[rows], with_scratch=True)


def _halves(x: Array) -> tuple[Array, Array]:
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def drop(k: BlockKernels, x: Array, draw: Callable[[slice], npt.NDArray[np.uint32]], threshold: int, factor: float,
         out: Array) -> None:
    """out = x·factor where the word drawn for the element is at least the threshold, else +0, even for a NaN.

    ``draw(span)`` gives the words of some elements, (n,); equal shapes, n elements of any.
    """
    check_operands("drop", x=x, out=out)
    work = work_type(x, out)
    scale, bits = np.array(factor, work), np.dtype(f"u{work.itemsize}")
    for span, (here, block) in zip(spans(out.size), in_blocks(out, x), strict=True):
        result, through = k.room("result", here.size, work), k.room("let through", here.size, np.dtype(np.bool_))
        np.multiply(k.wide("input 0", block, work), scale, out=result)
        np.greater_equal(draw(span), threshold, out=through)
        word = result.view(bits)  # an integer times 0 is +0, a NaN times 0 is not
        np.multiply(word, through, out=word)
        cast_block(result, here, k.scratch_memory)


# --- tables ---------------------------------------------------------------------------------------------


def _look_up(k: BlockKernels, table: Array, x: Array, out: Array) -> None:
    """out = table[code of x], in the table's type, which is as wide as out's."""
    for here, block in in_blocks(out, x):
        table.take(_codes_in(k, block), out=here.view(table.dtype), mode="clip")


def _multiply_by(k: BlockKernels, table: Array, x: Array, dy: Array, out: Array) -> None:
    """out = dy·table[code of x] in float32, rounded once."""
    for here, block, dy_block in in_blocks(out, x, dy):
        result = k.room("result", here.size, FP32)
        table.take(_codes_in(k, block), out=result, mode="clip")
        np.multiply(result, k.wide("input 0", dy_block, FP32), out=result)
        cast_block(result, here, k.scratch_memory)


def _codes_in(k: BlockKernels, x: Array) -> Array:
    """The codes of a block, as indices: NumPy would make these itself, in memory that nobody counts."""
    index = k.room("table index", x.size, np.dtype(np.intp))
    np.copyto(index, _codes_of(x))
    return index


@cache
@quiet
def _values(function: _Function, dtype: np.dtype[Any]) -> npt.NDArray[np.float32]:
    """A function's float32 results for all values of a narrow format, in the order of its codes."""
    values = values_of(format_of(dtype))
    results = np.empty_like(values)
    function(Scratch(), values, results)
    return results


@cache
@quiet
def _codes(function: _Function, dtype: np.dtype[Any]) -> Array:
    """The same, rounded to the format, as its codes."""
    results = np.empty(2 ** (8 * dtype.itemsize), format_of(dtype).dtype)
    cast_block(_values(function, dtype), results, Scratch())
    return results.view(f"u{dtype.itemsize}")


# --- formulas ---------------------------------------------------------------------------------------------------


def _times_slope(slope: _Function, scratch: Scratch, x: Array, dy: Array, dx: Array) -> None:
    """dx = dy·slope(x)."""
    slope(scratch, x, dx)
    np.multiply(dx, dy, out=dx)


def _relu(x: Array, y: Array) -> None:
    np.maximum(x, 0, out=y)
    # Which of -0 and +0 is the maximum, the processor decides (x86: the second operand). Adding +0 makes it +0 on all
    # of them, so that "not the pattern of +0" means "let through".
    np.add(y, 0, out=y)


def _gelu(scratch: Scratch, x: Array, y: Array) -> None:
    tanh = _tanh_term(x, scratch.array("gelu tanh", x.size, x.dtype))
    np.add(tanh, 1, out=tanh)
    np.clip(x, -_TANH_SATURATED, math.inf, out=y)  # below, the factor is exactly 0, and -inf·0 would be NaN
    np.multiply(y, 0.5, out=y)
    np.multiply(y, tanh, out=y)


def _gelu_slope(scratch: Scratch, x: Array, slope: Array) -> None:
    """(1 + t)/2 + x/2·(1 - t²)·√(2/π)·(1 + 3·0.044715x²), with t the tanh."""
    clamped = np.clip(x, -_TANH_SATURATED, _TANH_SATURATED, out=scratch.array("gelu clamped", x.size, x.dtype))
    tanh = _tanh_term(clamped, scratch.array("gelu tanh", x.size, x.dtype))
    inner = np.multiply(clamped, clamped, out=slope)
    np.multiply(inner, 3 * _SLOPE * _CUBIC, out=inner)
    np.add(inner, _SLOPE, out=inner)
    np.multiply(inner, clamped, out=inner)
    factor = np.multiply(tanh, tanh, out=clamped)
    np.subtract(1, factor, out=factor)
    np.multiply(inner, factor, out=slope)
    np.add(slope, tanh, out=slope)
    np.add(slope, 1, out=slope)
    np.multiply(slope, 0.5, out=slope)


def _tanh_term(x: Array, out: Array) -> Array:
    """tanh(√(2/π)·(x + 0.044715x³))."""
    np.multiply(x, x, out=out)
    np.multiply(out, _SLOPE * _CUBIC, out=out)
    np.add(out, _SLOPE, out=out)
    np.multiply(out, x, out=out)
    return np.tanh(out, out=out)


def _swiglu(scratch: Scratch, gate: Array, up: Array, y: Array) -> None:
    clamped, growth = _clamped_and_growth(scratch, gate)
    np.divide(clamped, growth, out=clamped)
    np.multiply(clamped, up, out=y)


def _swiglu_gradients(scratch: Scratch, gate: Array, up: Array, dy: Array, d_gate: Array, d_up: Array) -> None:
    """dy·up·s·(1 + x·(1 - s)), with s the sigmoid of the gate x; and dy·x·s."""
    clamped, growth = _clamped_and_growth(scratch, gate)
    change = np.divide(clamped, growth, out=scratch.array("swiglu change", gate.shape, gate.dtype))
    np.multiply(change, dy, out=d_up)
    sigmoid = np.divide(1, growth, out=growth)
    np.subtract(1, sigmoid, out=change)
    np.clip(clamped, -_SIGMOID_SATURATED, _SIGMOID_SATURATED, out=clamped)
    np.multiply(clamped, change, out=change)
    np.add(change, 1, out=change)
    np.multiply(change, sigmoid, out=change)
    np.multiply(dy, up, out=clamped)
    np.multiply(change, clamped, out=d_gate)


def _clamped_and_growth(scratch: Scratch, gate: Array) -> tuple[Array, Array]:
    """x and 1 + e⁻ˣ, for the gate x clamped to where the sigmoid is not yet saturated at 0."""
    clamped, growth = (scratch.array(f"swiglu {name}", gate.shape, gate.dtype) for name in ("clamped", "growth"))
    np.clip(gate, -_SIGMOID_SATURATED, math.inf, out=clamped)
    np.exp(np.multiply(clamped, -1, out=growth), out=growth)
    return clamped, np.add(growth, 1, out=growth)


def _gelu_exact(scratch: Scratch, x: Array, y: Array) -> None:
    distribution = _normal_distribution(scratch, x, y)
    np.clip(x, -SATURATED, math.inf, out=y)
    np.multiply(y, distribution, out=y)


def _gelu_exact_slope(scratch: Scratch, x: Array, slope: Array) -> None:
    """Φ(x) + x·φ(x), φ the normal density."""
    distribution = _normal_distribution(scratch, x, slope)
    clamped = np.clip(x, -SATURATED, SATURATED, out=scratch.array("gelu clamped", x.size, x.dtype))
    np.multiply(clamped, clamped, out=slope)
    np.multiply(slope, -0.5, out=slope)
    np.exp(slope, out=slope)
    np.multiply(slope, _DENSITY, out=slope)
    np.multiply(slope, clamped, out=slope)
    np.add(slope, distribution, out=slope)


def _normal_distribution(scratch: Scratch, x: Array, spare: Array) -> Array:
    """Φ(x) = erfc(-x/√2)/2, by erfc of |x|/√2 and 1 minus that for positive x; ``spare`` is written over."""
    z = np.abs(x, out=scratch.array("gelu magnitude", x.size, x.dtype))
    np.multiply(z, math.sqrt(0.5), out=z)
    tail = complement(z, scratch.array("gelu distribution", x.size, x.dtype), scratch)
    np.multiply(tail, 0.5, out=tail)
    np.subtract(1, tail, out=spare)
    np.copyto(tail, spare, where=x > 0)
    return tail


# -- Causal attention --------------------------------------------------------------------------------------------------
# P = softmax of QKᵀ/√D over the past, O = P V, and their gradients. R rows and S columns of a part of P. qkv
# (B, T, C + 2K) has the queries, keys and values of all heads side by side; heads that share keys and values are
# neighbors, and see copies of these, whose gradients are added up in the order of the heads. Scores and softmax are
# float32 and never rest; P is rounded to the type that it rests in before it is multiplied by V, and so is dS before it
# is multiplied by Q and K, as matrix units take them. Rows are taken in strips, so that little of what lies above the
# diagonal is computed; sequences and heads are taken in groups, so that a strip of them lies in the cache. A head's
# results do not depend on its group. `k` are the kernels that compute, NumPy's or a device's, whose numbers STRIP, TILE
# and GROUP are.
# Sources: Vaswani et al. 2017, section 3.2.1; Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022
# (FlashAttention), section 3.1 and appendix B, for the tiled form; Ainslie et al. 2023 (arXiv:2305.13245), section 2.2,
# for shared keys and values.

Part = tuple[slice, slice]  # of the sequences, and of the heads


def attend(k: BlockKernels, qkv: Array, heads: int, p: Array | None, o: Array) -> None:
    """o (B, T, C) from qkv (B, T, C + 2K); where it is to be saved, P (B, H, T, T) too, zeros above the diagonal."""
    for part in _groups(qkv, heads, o.shape[2], k.STRIP, k.GROUP):
        query, key, value = _queries_keys_values(k, qkv, heads, o.shape[2], part)
        target = by_head(o, heads)[part]
        wide = k.room_for("o", target, query.dtype)
        for rows in spans(qkv.shape[1], k.STRIP):
            s = _probabilities(k, query, key, rows, None if p is None else p[part], qkv.dtype)
            k.xp.matmul(s, value[:, :, : rows.stop], out=wide[:, :, rows])
        k.round_into(wide, target)


def attend_gradient(k: BlockKernels, qkv: Array, heads: int, p: Array, do: Array, dqkv: Array, *,
                    again: bool = False) -> None:
    """dqkv (B, T, C + 2K) from do (B, T, C) and P, which is read, or written ``again`` first, to the same bits."""
    for part in _groups(qkv, heads, do.shape[2], k.STRIP, k.GROUP):
        query, key, value = _queries_keys_values(k, qkv, heads, do.shape[2], part)
        g = k.wide("do", by_head(do, heads)[part], query.dtype)
        targets = _parts_of(dqkv, heads, do.shape[2], part)
        dq, dk, dv = wide = _room_for_gradients(k, targets, query)
        for rows in reversed([*spans(qkv.shape[1], k.STRIP)]):  # the last strip has all columns: others add to it
            past, last = slice(0, rows.stop), rows.stop == qkv.shape[1]
            if again:
                s = _probabilities(k, query, key, rows, p[part], qkv.dtype)
            else:
                s = k.wide("saved p", p[part][:, :, rows, past], query.dtype)
            ds = _score_gradients(k, s, g[:, :, rows], value[:, :, past], None, qkv.dtype)
            k.xp.matmul(ds, key[:, :, past], out=dq[:, :, rows])
            _add_product(k, ds.swapaxes(2, 3), query[:, :, rows], dk[:, :, past], anew=last)
            _add_product(k, s.swapaxes(2, 3), g[:, :, rows], dv[:, :, past], anew=last)
        _round_gradients(k, wide, targets)


def _probabilities(k: BlockKernels, query: Array, key: Array, rows: slice, p: Array | None,
                   dtype: np.dtype[np.generic]) -> Array:
    """One strip of P (b, h, R, stop), wide and on the grid of its type; written into p (b, h, T, T) too."""
    s = _scores(k, query, key, rows, slice(0, rows.stop))
    k.apply(_exponential, [s, PerRow(k.row_maxima(s))], s)
    sums = PerRow(k.row_sums(s))
    if p is None:
        k.apply(np.divide, [s, sums], s, grid=dtype)
        return s
    if rows.stop < p.shape[3]:
        words(p)[:, :, rows] = 0  # whole rows, which lie side by side
    saved = p[:, :, rows, : rows.stop]
    k.apply(np.divide, [s, sums], saved)
    return k.wide("scores", saved, s.dtype)


def _score_gradients(k: BlockKernels, p: Array, g: Array, value: Array, dots: Array | None,
                     dtype: np.dtype[np.generic]) -> Array:
    """One part of P·(dP - Σ P·dP)/√D (b, h, R, S), dP = dO Vᵀ, wide and on the grid of its type. The sums ``dots``
    are those of whole rows, which it computes where P has these."""
    dp = k.room("score gradients", p.shape, g.dtype)
    k.xp.matmul(g, value.swapaxes(2, 3), out=dp)
    dots = k.row_products(p, dp) if dots is None else dots
    k.apply(_score_gradient, [p, dp, PerRow(dots), g.shape[-1] ** -0.5], dp, grid=dtype)
    return dp


def _score_gradient(p: Array, dp: Array, dots: Array, scale: float, result: Array) -> None:
    np.subtract(dp, dots, out=result)
    result *= p
    result *= scale


# --- tiled: no T·T array at any moment ------------------------------------------------------------------


def attend_tiled(k: BlockKernels, qkv: Array, heads: int, log_sums: Array, o: Array) -> None:
    """o (B, T, C) and the logs of the sums of each row's exponentials (B, H, T), tile by tile."""
    for part in _groups(qkv, heads, o.shape[2], k.TILE, k.GROUP):
        query, key, value = _queries_keys_values(k, qkv, heads, o.shape[2], part)
        target = by_head(o, heads)[part]
        wide = k.room_for("o", target, query.dtype)
        for rows in spans(qkv.shape[1], k.TILE):
            _attend_row_of_tiles(k, query, key, value, rows, log_sums[part][:, :, rows], wide[:, :, rows], qkv.dtype)
        k.round_into(wide, target)


def _attend_row_of_tiles(k: BlockKernels, query: Array, key: Array, value: Array, rows: slice, log_sums: Array,
                         o: Array, dtype: np.dtype[np.generic]) -> None:
    sums = k.room("tile sums", o.shape, query.dtype)
    total, top = k.xp.zeros(log_sums.shape, query.dtype), cast(Any, None)
    sums[...] = 0
    for columns in spans(rows.stop, k.TILE):
        s = _scores(k, query, key, rows, columns)
        higher = k.row_maxima(s)
        if top is not None:
            k.apply(_larger, [top, higher], higher)
            shrink = k.room("shrink", top.shape, query.dtype)
            k.apply(_exponential, [top, higher], shrink)
            k.apply(np.multiply, [total, shrink], total)
            k.apply(np.multiply, [sums, PerRow(shrink)], sums)
        k.apply(_exponential, [s, PerRow(higher)], s)
        k.apply(np.add, [total, k.row_sums(s)], total)
        k.onto_grid(s, dtype)
        _add_product(k, s, value[:, :, columns], sums)
        top = higher
    k.apply(np.divide, [sums, PerRow(total)], o)
    k.apply(_log_of_sum, [total, top], log_sums)


def attend_tiled_gradient(k: BlockKernels, qkv: Array, heads: int, log_sums: Array, o: Array, do: Array,
                          dqkv: Array) -> None:
    """dqkv (B, T, C + 2K), every tile of P computed again from the row's log-sum-exp; Σ dO·O stands for Σ P·dP."""
    for part in _groups(qkv, heads, o.shape[2], k.TILE, k.GROUP):
        query, key, value = _queries_keys_values(k, qkv, heads, o.shape[2], part)
        g, wide_o = (k.wide(name, by_head(x, heads)[part], query.dtype) for name, x in (("do", do), ("saved o", o)))
        targets = _parts_of(dqkv, heads, o.shape[2], part)
        dq, dk, dv = wide = _room_for_gradients(k, targets, query)
        for gradient in wide:
            gradient[...] = 0
        for rows in spans(qkv.shape[1], k.TILE):
            dots = k.row_products(g[:, :, rows], wide_o[:, :, rows])
            for columns in spans(rows.stop, k.TILE):
                s = _scores(k, query, key, rows, columns)
                k.apply(_exponential, [s, PerRow(log_sums[part][:, :, rows])], s, grid=qkv.dtype)
                _add_product(k, s.swapaxes(2, 3), g[:, :, rows], dv[:, :, columns])
                ds = _score_gradients(k, s, g[:, :, rows], value[:, :, columns], dots, qkv.dtype)
                _add_product(k, ds, key[:, :, columns], dq[:, :, rows])
                _add_product(k, ds.swapaxes(2, 3), query[:, :, rows], dk[:, :, columns])
        _round_gradients(k, wide, targets)


# --- parts ----------------------------------------------------------------------------------------------


def _scores(k: BlockKernels, query: Array, key: Array, rows: slice, columns: slice) -> Array:
    """QKᵀ/√D of some rows and columns (b, h, R, S), -inf above the diagonal."""
    shape, scale = (*query.shape[:2], rows.stop - rows.start, columns.stop - columns.start), query.shape[-1] ** -0.5
    s = k.room("scores", shape, query.dtype)
    k.xp.matmul(query[:, :, rows], key[:, :, columns].swapaxes(2, 3), out=s)
    if columns.stop == rows.stop:
        k.scale_past(s, scale, future(rows.stop - rows.start))
    else:
        k.apply(np.multiply, [s, scale], s)
    return s


def _add_product(k: BlockKernels, a: Array, b: Array, total: Array, *, anew: bool = False) -> None:
    """total += a @ b, all wide, in stacks (b, h); ``anew``: total = a @ b."""
    if anew:
        k.xp.matmul(a, b, out=total)
    else:
        k.apply(np.add, [total, k.xp.matmul(a, b, out=k.room("product", total.shape, total.dtype))], total)


def _queries_keys_values(k: BlockKernels, qkv: Array, heads: int, channels: int, part: Part) -> list[Array]:
    """Queries, keys and values of some sequences and heads, wide, each (b, h, T, D): a copy for each head that shares
    them."""
    query, *shared = (k.wide(name, x, work_type(qkv)) for name, x in zip(
        ("queries", "keys", "values"), _parts_of(qkv, heads, channels, part), strict=True))
    return [query, *(_copied(k, name, x, query.shape) for name, x in zip(("all keys", "all values"), shared,
                                                                        strict=True))]


def _copied(k: BlockKernels, name: str, x: Array, shape: tuple[int, ...]) -> Array:
    """x (b, h_kv, T, D) for every head (b, h, T, D): itself where no head shares it."""
    if x.shape == shape:
        return x
    copies = k.room(name, (*x.shape[:2], shape[1] // x.shape[1], *x.shape[2:]), x.dtype)
    copies[...] = x[:, :, None]
    return copies.reshape(shape)


def _room_for_gradients(k: BlockKernels, targets: list[Array], query: Array) -> list[Array]:
    """Memory in which the gradients of queries, keys and values are computed, each (b, h, T, D)."""
    return [k.room_for(name, x, query.dtype) if x.shape == query.shape else k.room(name, query.shape, query.dtype)
            for name, x in zip(("dq", "dk", "dv"), targets, strict=True)]


def _round_gradients(k: BlockKernels, wide: list[Array], targets: list[Array]) -> None:
    """Rounds each gradient into its place, those of shared keys and values after they are added up."""
    for x, target in zip(wide, targets, strict=True):
        if x.shape != target.shape:
            of_heads = x.reshape(*target.shape[:2], -1, *target.shape[2:])
            x = k.room("of all heads", target.shape, x.dtype)
            k.apply(np.add, [of_heads[:, :, 0], of_heads[:, :, 1]], x)
            for head in range(2, of_heads.shape[2]):
                k.apply(np.add, [x, of_heads[:, :, head]], x)
        k.round_into(x, target)


def _groups(qkv: Array, heads: int, channels: int, rows: int, elements: int) -> Iterator[Part]:
    """The sequences and heads of qkv that are taken together: whole sequences where they fit, and all heads that share
    keys and values."""
    batch, tokens, width = qkv.shape
    sharing = 2 * channels // max(1, width - channels)
    per_head = tokens * max(min(rows, tokens), channels // heads, 1)
    at_once = max(1, elements // max(1, per_head))
    for sequences in spans(batch, max(1, at_once // heads)):
        for some in spans(heads, min(heads, max(1, at_once // sharing) * sharing)):
            yield sequences, some


def _parts_of(qkv: Array, heads: int, channels: int, part: Part) -> list[Array]:
    """Views of some heads of qkv (B, T, C + 2K): queries (b, h, T, D), keys and values (b, h_kv, T, D)."""
    (sequences, some), every = part, by_head(qkv, qkv.shape[2] * heads // channels)
    found, shared = [every[sequences, some]], (every.shape[1] - heads) // 2
    for first in (heads, heads + shared):
        found.append(every[sequences, first + some.start * shared // heads : first + some.stop * shared // heads])
    return found


def by_head(x: Array, heads: int) -> Array:
    """x (B, T, heads·D) as (B, heads, T, D), a view where x is contiguous."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


@cache
def future(count: int) -> Array:
    """True above the diagonal (count, count)."""
    return np.triu(np.ones((count, count), np.bool_), 1)


# --- formulas of elements -------------------------------------------------------------------------------


def _larger(x: Array, y: Array, result: Array) -> None:
    np.maximum(x, y, out=result)  # NumPy takes no result by position here


def _exponential(x: Array, shift: Array, result: Array) -> None:
    np.subtract(x, shift, out=result)
    np.exp(result, out=result)


def _log_of_sum(total: Array, top: Array, result: Array) -> None:
    np.add(top, np.log(total), out=result)


# -- Rotary positions --------------------------------------------------------------------------------------------------
# Channels i and i + D/2 of a head are a point in plane i, which is turned by t times the plane's frequency at place t.
# Source: Su et al. 2021 (RoFormer, arXiv:2104.09864), section 3.4.2; its pairs are neighbors, these lie half a head
# apart, as in GPT-NeoX and in the checkpoints of the `transformers` library.


def rotate(k: BlockKernels, x: Array, heads: int, frequencies: tuple[float, ...], *, back: bool = False) -> None:
    """Turns the first ``heads`` heads of D channels each of x (B, T, …) in place, each plane by its frequency (D/2,) in
    radians per place; ``back``: the other way."""
    np.setbufsize(PIECE)
    work, points = work_type(x), x.reshape(*x.shape[:2], -1, 2, len(frequencies))[:, :, :heads]
    cosine, sine = angles(x.shape[1], frequencies)
    signed = np.stack([-sine, sine] if back else [sine, -sine], axis=1)
    tables = [k.uploaded(part.astype(work)) for part in (cosine[:, None], signed)]
    for rows in k.row_blocks(points[0]):
        of_heads = [k.room(name, points[0, rows].shape, work) for name in ("cosines", "sines")]
        for table, part in zip(of_heads, tables, strict=True):
            table[...] = part[rows, None]
        for sequences in k.row_blocks(points[:, rows]):
            here = points[sequences, rows]
            k.apply(_turned, [here, here[..., ::-1, :], *map(PerColumn, of_heads)], here, work, with_scratch=True)


@cache
def angles(tokens: int, frequencies: tuple[float, ...]) -> tuple[Array, Array]:
    """Cosines and sines of the angles of all places and planes (T, D/2), float64."""
    turns = np.outer(np.arange(tokens), frequencies)
    return np.cos(turns), np.sin(turns)


def _turned(scratch: Scratch, x: Array, y: Array, cosine: Array, sine: Array, result: Array) -> None:
    """x·cosine - y·sine."""
    product = np.multiply(y, sine, out=scratch.array("turned", y.shape, y.dtype))
    np.multiply(x, cosine, out=result)
    np.subtract(result, product, out=result)


# -- Rows: normalization, tables, losses of softmax --------------------------------------------------------------------
# Sums over rows are added block by block, from the first row on.

Tokens = npt.NDArray[np.integer]


def normalize_rows(k: BlockKernels, x: Array, w: Array, b: Array | None, epsilon: float, mean: Array | None,
                   rstd: Array, y: Array) -> None:
    """y = (x - mean)·rstd·w + b, x and y (M, C), w and b (C,); writes mean and rstd = 1/√(variance + ε) (M,).

    Without b and mean, RMSNorm's: y = x·rstd·w and rstd = 1/√(mean square + ε). Rows may be parts of rows: x (M, H, D)
    with w (D,) and statistics (M, H).
    """
    work, columns = work_type(x), x.shape[-1]
    for rows in k.row_blocks(x):
        centered = wide = k.wide("rows", x[rows], work)
        if mean is not None:
            k.apply(np.divide, [k.row_sums(wide), columns], mean[rows], work)
            centered = k.room("centered", wide.shape, work)
            k.apply(np.subtract, [wide, PerRow(mean[rows])], centered, work)
        k.apply(_reciprocal_deviation, [k.row_products(centered, centered), columns, epsilon], rstd[rows], work)
        k.apply(_scaled, [centered, PerRow(rstd[rows]), *_per_column(w, b)], y[rows], work)


def _reciprocal_deviation(squares: Array, columns: int, epsilon: float, result: Array) -> None:
    np.divide(squares, columns, out=result)
    result += epsilon
    np.divide(1, np.sqrt(result, out=result), out=result)


def scale_rows(k: BlockKernels, x: Array, w: Array, b: Array | None, mean: Array | None, rstd: Array,
               y: Array) -> None:
    """y as `normalize_rows` computes it, from the statistics that it wrote: the same bits."""
    work = work_type(x)
    for rows in k.row_blocks(x):
        k.apply(_scaled if mean is None else _centered_and_scaled,
                [x[rows], *_statistics(mean, rstd, rows), *_per_column(w, b)], y[rows], work)


def _statistics(mean: Array | None, rstd: Array, rows: slice) -> list[PerRow]:
    return [PerRow(one[rows]) for one in (mean, rstd) if one is not None]


def _per_column(w: Array, b: Array | None) -> list[PerColumn]:
    return [PerColumn(one) for one in (w, b) if one is not None]


def _centered_and_scaled(x: Array, mean: Array, *rest: Array) -> None:
    _scaled(np.subtract(x, mean, out=rest[-1]), *rest)


def _scaled(centered: Array, rstd: Array, w: Array, *rest: Array) -> None:
    *bias, result = rest
    np.multiply(centered, rstd, out=result)
    result *= w
    for b in bias:
        result += b


def normalize_rows_gradient(k: BlockKernels, x: Array, w: Array, mean: Array | None, rstd: Array, dy: Array, dx: Array,
                            dw: Array, db: Array | None) -> None:
    """dx = (dŷ - mean(dŷ) - x̂·mean(dŷ·x̂))·rstd with dŷ = dy·w; dw = Σ_M dy·x̂, db = Σ_M dy.

    Without mean and db, RMSNorm's: dx = (dŷ - x̂·mean(dŷ·x̂))·rstd.
    """
    work, columns = work_type(x, dy), x.shape[-1]
    sums = k.room("row sums", (2, columns), work)
    sums[...] = 0
    for rows in k.row_blocks(x):
        statistics = _statistics(mean, rstd, rows)
        normal, gradient = (k.room(name, x[rows].shape, work) for name in ("centered", "gradient"))
        wide_dy = k.wide("dy", dy[rows], work)
        k.apply(np.multiply if mean is None else _normal, [x[rows], *statistics], normal, work)
        k.apply(np.multiply, [wide_dy, normal], gradient, work)
        k.add_column_sums(gradient.reshape(-1, columns), sums[0])
        if db is not None:
            k.add_column_sums(wide_dy.reshape(-1, columns), sums[1])
        k.apply(np.multiply, [wide_dy, PerColumn(w)], gradient, work)
        along, shift = k.row_products(gradient, normal), [] if mean is None else [k.row_sums(gradient)]
        k.apply(_through_norm, [gradient, normal, columns, statistics[-1], *map(PerRow, (along, *shift))], dx[rows],
                work)
    k.round_into(sums[0], dw)
    if db is not None:
        k.round_into(sums[1], db)


def _through_norm(gradient: Array, normal: Array, columns: int, rstd: Array, along: Array, *rest: Array) -> None:
    *shift, result = rest
    np.multiply(normal, np.divide(along, columns), out=result)
    np.subtract(gradient, result, out=result)
    for one in shift:
        result -= np.divide(one, columns)
    result *= rstd


def _normal(x: Array, mean: Array, rstd: Array, result: Array) -> None:
    np.subtract(x, mean, out=result)
    result *= rstd


# --- tables of rows -------------------------------------------------------------------------------------


def index_range(x: Tokens) -> tuple[int, int]:
    """The smallest and the largest of some whole numbers; 0 and -1 where there are none."""
    return (int(x.min()), int(x.max())) if x.size else (0, -1)


def take_rows(table: Array, rows: Tokens, out: Array) -> None:
    """out (M, C) = table[rows]: rows (M,) of whole numbers that the table (V, C), of out's type, has."""
    np.take(table, rows, axis=0, out=out, mode="clip")  # nothing to check, and so no buffer


def add_rows(k: BlockKernels, x: Array, rows: Tokens, out: Array) -> None:
    """out (V, C): for each v the sum of the x[i] with rows[i] == v, 0 where there is none; x (M, C), rows (M,).

    The rows of x are sorted by v, in their order, and cut into blocks; within a block NumPy adds those of one v,
    and what a block begins with is added to what the one before has left of it.
    """
    work, columns = work_type(x, out), x.shape[1]
    out.fill(0)
    order = np.argsort(rows, kind="stable")
    left, left_of = np.zeros(columns, work), -1  # the last v of a block may go on in the next
    for block in k.row_blocks(x):
        here = order[block]
        owners = rows[here]
        starts = np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1])))
        present = owners[starts]
        taken, sums = k.room("taken", (len(here), columns), x.dtype), k.room("row sums", (len(starts), columns), work)
        np.take(x, here, axis=0, out=taken, mode="clip")
        np.add.reduceat(k.wide("rows", taken, work), starts, axis=0, out=sums)
        if present[0] == left_of:
            np.add(left, sums[0], out=sums[0])
        left[...], left_of = sums[-1], present[-1]
        rounded = k.room_for("rounded sums", sums, out.dtype)
        k.round_into(sums, rounded)
        out[present] = rounded


# --- losses of softmax ----------------------------------------------------------------------------------


def count_targets(targets: Tokens) -> int:
    """The number of targets that are classes: 0 or more."""
    return int((targets >= 0).sum())


def softmax_loss(k: BlockKernels, logits: Array, targets: Tokens, log_sums: Array) -> float:
    """Σ over rows with a target of log Σ_v exp(logit_v) - logit_target, in float64; targets (M,), below 0 for none.

    The log of each row's sum is written to log_sums (M,), in its own type.
    """
    total, work = 0.0, work_type(logits)
    for rows in k.row_blocks(logits):
        wide = k.wide("rows", logits[rows], work)
        top = k.row_maxima(wide)
        shifted, log_sum = k.room("centered", wide.shape, work), k.room("logs", top.shape, work)
        k.apply(np.subtract, [wide, PerRow(top)], shifted)
        picked = k.picked(shifted, targets[rows])
        k.apply(np.exp, [shifted], shifted)
        k.apply(np.log, [k.row_sums(shifted)], log_sum)
        k.apply(np.add, [log_sum, top], log_sums[rows], work)
        total += _total(to_host(log_sum), to_host(picked), to_host(targets[rows]), logits.shape[1])
    return total


def _total(log_sum: Array, picked: Array, targets: Tokens, columns: int) -> float:
    """The sum of the losses of rows with a target, in float64: that of each block first, then of the blocks."""
    total, step = 0.0, max(1, BLOCK // max(1, columns))
    for rows in [slice(0, len(log_sum))] if step == 1 else spans(len(log_sum), step):
        here = rows.start + np.flatnonzero(targets[rows] >= 0)
        losses = np.subtract(log_sum[here], picked[here], dtype=np.float64)
        if step > 1:
            total += float(np.add.reduce(losses))
        elif losses.size:  # each row is a block, and a GPU has all rows at once: their sum without a loop of Python
            total += float(np.add.accumulate(losses)[-1])
    return total


def softmax_loss_gradient(k: BlockKernels, logits: Array, targets: Tokens, log_sums: Array, factor: float,
                          out: Array) -> None:
    """out = (softmax(logits) - [v = target])·factor, 0 in rows without a target; out (M, V) may be the logits."""
    work = work_type(logits)
    for rows in k.row_blocks(logits):
        p = k.room_for("centered", out[rows], work)
        np.subtract(k.wide("rows", logits[rows], work), log_sums[rows, None], out=p)
        np.exp(p, out=p)
        here = np.flatnonzero(targets[rows] >= 0)
        p[here, targets[rows][here]] -= 1
        p *= p.dtype.type(factor)
        p[targets[rows] < 0] = 0
        k.round_into(p, out[rows])
