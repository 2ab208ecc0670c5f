"""Layers as pairs of pure functions, forward and backward, and the context that they are called with.

A forward returns its result and what it saved for backward; a backward writes the gradients of the weights into the
arrays it is given and returns that of the input. A context knows nothing of ranks: a layer asks it for memory, and
notes there what it computed. The same layer runs alone (`Context.standalone`) and inside a rank.

Legend: B batch, T tokens of a sample, M rows (samples times tokens), I inputs, O outputs, C channels, H heads,
D = C/H, K = H_kv·D channels of all keys, V vocabulary; n elements of any shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, overload

import numpy as np

from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import is_number, require_integers, require_matrix, require_shape
from zerosim.numerics.kernels import NumpyKernels, do_nothing
from zerosim.numerics.layer_kernels import packed_nbytes
from zerosim.numerics.policy import Policy
from zerosim.numerics.ranges import Range, require_range

Gradients = dict[str, Array]

# What a unit keeps of its inside for backward, where it has a choice: everything; its parts' inputs alone; everything
# but attention's probabilities; or the same, and these never whole, but tile by tile.
ALL, SUB_BLOCK, SELECTIVE, TILED = INSIDE = ("all", "sub_block", "selective", "tiled")


def require_inside(where: str, inside: Any) -> None:
    """Raises ValueError unless a unit can keep this of its inside."""
    if inside not in INSIDE:
        raise ValueError(f"{where} was asked to keep {inside!r} of the inside of a unit; it keeps one of "
                         f"{', '.join(map(repr, INSIDE))}")


# -- The context -------------------------------------------------------------------------------------------------------


class Workspace(Protocol):
    """The source of arrays that outlive a kernel: a rank's memory."""

    def alloc(self, shape: int | tuple[int, ...], dtype: Any, kind: str, name: str = "") -> Array:
        """A new uninitialized array, charged to ``kind``."""


def draw_for(seed: int, step: int, number: int, name: str, span: slice) -> Array:
    """Some of the random words of micro-batch ``number`` of a step, uint32.

    The number is part of the key: no two micro-batches share a word, however many each of them draws.
    """
    return random.bits((seed, f"dropout of micro-batch {number}", step, name), span.start, span.stop - span.start)


draw_first = partial(draw_for, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Context:
    """Array module, policy, kernels and workspace of the layers that are called with it.

    Where ``workspace`` is None, the kernels make the arrays, which are charged to nobody.
    ``note(flops=0, nbytes=0)`` hears what was computed, ``observe(weight, x, dy)`` a linear layer's input (M, I) and
    output gradient (M, O). ``gradients(unit)`` says where the gradients of a unit's parameters are to be written: one
    array of the parameter's shape per name, in the parameter's own format (the compute dtype, or its group's).
    ``draw(name, span)`` gives random words: those of the first micro-batch of the first step, if nothing is said.
    ``keep`` is what units keep of their inside. Raises ValueError for another.
    """

    xp: Any
    policy: Policy
    kernels: NumpyKernels
    workspace: Workspace | None
    note: Callable[..., None]
    gradients: Callable[[Any], Gradients]
    draw: Callable[[str, slice], Array] = draw_first
    observe: Callable[[str, Array, Array], None] = do_nothing
    keep: str = ALL

    def __post_init__(self) -> None:
        require_inside("a context", self.keep)

    @classmethod
    def standalone(cls, policy: Policy, kernels: NumpyKernels | None = None) -> Context:
        """A context without ranks: plain allocation, fresh gradients at each backward, nothing noted."""
        own = kernels or NumpyKernels()

        def fresh(unit: Any) -> Gradients:
            return {name: own.empty(shape, policy.compute_dtype) for name, shape in unit.shapes.items()}

        return cls(np, policy, own, None, do_nothing, fresh)

    @property
    def dtype(self) -> np.dtype:
        """The compute dtype: that of every value at rest."""
        return self.policy.compute_dtype

    @property
    def wide_dtype(self) -> np.dtype:
        """The dtype of arithmetic inside a kernel: float64 where values rest in float64, else float32."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def empty(self, shape: int | tuple[int, ...], kind: str = "activation", dtype: Any = None, name: str = "") -> Array:
        """A new uninitialized array charged to ``kind``; in the compute dtype unless another is given."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        if self.workspace is None:
            return self.kernels.empty(shape, dtype)
        return self.workspace.alloc(shape, dtype, kind, name)

    def matmul(self, a: Array, b: Array, out: Array, bias: Array | None = None, gradient: str | None = None) -> None:
        """out (M, N) = a (M, K) @ b (K, N) + bias (N,), added up in fp32, rounded once; and what it cost.

        ``gradient`` ("a" or "b") names the operand that is a gradient: in the fp8 experiment it is rounded to e5m2,
        other operands to e4m3, each with a scale of its own. An operand may have been widened: what is read is what is
        at rest, in the compute dtype.
        """
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1] + (0 if bias is None else out.size)
        at_rest = (a.size + b.size) * self.dtype.itemsize
        self.note(flops=flops, nbytes=at_rest + out.nbytes + (bias.nbytes if bias is not None else 0))
        if self.policy.matmul == "fp8":
            a, b = (self.kernels.quantized(x, "fp8_e5m2" if gradient == name else "fp8_e4m3")
                    for name, x in (("a", a), ("b", b)))
        self.kernels.matmul(a, b, bias=bias, out=out)

    def cast(self, x: Array, kind: str = "input", name: str = "") -> Array:
        """``x`` in the compute dtype: itself where it is so already, else a new array, nearest even."""
        if x.dtype == self.dtype:
            return x
        out = self.empty(x.shape, kind, name=name)
        self.kernels.cast_pack(x, out)
        return out


def require_at_rest(ctx: Context, where: str, **arrays: Array | None) -> None:
    """Raises ValueError unless all arrays are in the compute dtype.

    A wider input would be computed with silently, and would hide a rounding that the hardware makes.
    """
    for what, array in arrays.items():
        if array is not None and array.dtype != ctx.dtype:
            raise ValueError(f"{where} computes in {ctx.dtype}, and found {what} in {array.dtype}; "
                             f"round it first, with ctx.cast({what})")


# -- Linear ------------------------------------------------------------------------------------------------------------

OWN_OUTPUT = "hand it the gradient of this layer's own output"


def out_or_new(ctx: Context, where: str, out: Array | None, shape: tuple[int, ...], name: str,
               saved: Array | None = None) -> Array:
    """A new activation, or the caller's ``out`` where that fits and does not overwrite what is saved."""
    if out is None:
        return ctx.empty(shape, name=name)
    require_shape(where, "out", out, shape, "give it the shape of the result, or leave it out")
    require_at_rest(ctx, where, out=out)
    if saved is not None and ctx.xp.may_share_memory(out, saved):
        raise ValueError(f"{where} asked for an out of its own, and found one that shares memory with x, which it "
                         "saves for backward; give it other memory, or leave it out")
    return out


def linear_forward(ctx: Context, x: Array, w: Array, b: Array | None = None,
                   out: Array | None = None) -> tuple[Array, Array]:
    """y = x @ w + b, rounded once: x (B, I), w (I, O), b (O,) -> y (B, O); saves x.

    Raises ValueError for shapes that do not fit and for arrays that are not in the compute dtype.
    """
    where = "linear_forward"
    require_matrix(where, "x", x, "(B, I)")
    require_matrix(where, "w", w, "(I, O)")
    require_shape(where, "w", w, (x.shape[1], w.shape[1]), "w needs a row for each column of x")
    if b is not None:
        require_shape(where, "b", b, (w.shape[1],), "a bias has one element per column of w")
    require_at_rest(ctx, where, x=x, w=w, b=b)
    y = out_or_new(ctx, where, out, (x.shape[0], w.shape[1]), "linear.y", saved=x)
    ctx.matmul(x, w, y, bias=b)
    return y, x


@overload
def linear_backward(ctx: Context, w: Array, saved: Array, dy: Array, dw: Array,
                    db: Array | None = None, *, input_gradient: Literal[True] = True) -> Array: ...


@overload
def linear_backward(ctx: Context, w: Array, saved: Array, dy: Array, dw: Array,
                    db: Array | None = None, *, input_gradient: bool) -> Array | None: ...


def linear_backward(ctx: Context, w: Array, saved: Array, dy: Array, dw: Array,
                    db: Array | None = None, *, input_gradient: bool = True) -> Array | None:
    """dw = xᵀ @ dy, db = Σ_B dy, dx = dy @ wᵀ, each added up in fp32 and rounded once.

    w (I, O), saved = x (B, I), dy (B, O). Writes dw (I, O) and db (O,); returns dx (B, I), or None where
    nobody asks for it. Raises ValueError for shapes that do not fit and for a dy that is not in the compute
    dtype.
    """
    where, x = "linear_backward", saved
    require_shape(where, "dy", dy, (x.shape[0], w.shape[1]), OWN_OUTPUT)
    require_shape(where, "dw", dw, w.shape, "the gradient has the shape of the weight")
    require_at_rest(ctx, where, w=w, dy=dy)
    wide = ctx.kernels.widen(dy)
    ctx.matmul(x.T, wide, dw, gradient="b")
    if db is not None:
        require_shape(where, "db", db, (w.shape[1],), "the gradient has the shape of the bias")
        ctx.kernels.column_sum(wide, db)
        ctx.note(flops=dy.size, nbytes=dy.nbytes + db.nbytes)
    if not input_gradient:
        return None
    dx = ctx.empty(x.shape, "activation_gradient", name="linear.dx")
    ctx.matmul(wide, w.T, dx, gradient="a")
    return dx


# -- Embedding ---------------------------------------------------------------------------------------------------------

def embedding_forward(ctx: Context, tokens: Array, w: Array) -> tuple[Array, Array]:
    """y[..., :] = w[tokens]: tokens (B, T) of integers, w (V, C) -> y (B, T, C); saves the tokens.

    Raises ValueError for tokens that are no integers, or that the table has not.
    """
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"embedding_forward asked for tokens as integers, and found {tokens.dtype}; a token is the "
                         "index of a row")
    require_matrix("embedding_forward", "w", w, "(V, C)")
    require_at_rest(ctx, "embedding_forward", w=w)
    smallest, largest = ctx.kernels.index_range(tokens)
    if smallest < 0 or largest >= w.shape[0]:
        raise ValueError(f"embedding_forward asked for tokens from 0 to {w.shape[0] - 1}, and found {smallest} to "
                         f"{largest}; take a vocabulary that has them all")
    y = ctx.empty((*tokens.shape, w.shape[1]), name="embedding.y")
    ctx.kernels.take_rows(w, tokens.reshape(-1), y.reshape(-1, w.shape[1]))
    ctx.note(nbytes=2 * y.nbytes)
    return y, tokens


def embedding_backward(ctx: Context, saved: Array, dy: Array, dw: Array) -> None:
    """Writes dw (V, C): for each row the sum of dy (B, T, C) over its tokens, in the order of the batch, in fp32,
    rounded once; 0 for rows that no token named."""
    require_matrix("embedding_backward", "dw", dw, "(V, C)")
    require_shape("embedding_backward", "dy", dy, (*saved.shape, dw.shape[1]), OWN_OUTPUT)
    require_at_rest(ctx, "embedding_backward", dy=dy)
    ctx.kernels.add_rows(dy.reshape(-1, dw.shape[1]), saved.reshape(-1), dw)
    ctx.note(flops=dy.size, nbytes=dy.nbytes + dw.nbytes)


# -- Norms -------------------------------------------------------------------------------------------------------------
# LayerNorm (Ba, Kiros & Hinton 2016, arXiv:1607.06450, section 3), and RMSNorm (Zhang & Sennrich 2019,
# arXiv:1910.07467, section 4), which neither subtracts a mean nor adds a bias. The output is not saved: it can be
# computed again from its input and one or two fp32 numbers per row.

EPSILON = 1e-5
SavedByNorm = tuple[Array, Array | None, Array]


def norm_forward(ctx: Context, x: Array, w: Array, b: Array | None = None, *, epsilon: float = EPSILON,
                 out: Array | None = None) -> tuple[Array, SavedByNorm]:
    """y = (x - mean)/√(variance + ε)·w + b over the last axis, or, without b, x/√(mean of x² + ε)·w, in fp32, rounded
    once: x and y (M, …, C), w and b (C,) of any format.

    Saves x and, in fp32, mean (None without b) and 1/√(...) (M, …). Raises ValueError for shapes that do not fit.
    """
    where, name = "norm_forward", _norm_name(b)
    if not is_number(epsilon) or epsilon < 0:
        raise ValueError(f"{where} was given epsilon={epsilon!r}; it is added to a variance, so take 0 or a small "
                         "positive number")
    require_shape(where, "w", w, x.shape[-1:], "w has one element per channel of x")
    if b is not None:
        require_shape(where, "b", b, x.shape[-1:], "b has one element per channel of x")
    require_at_rest(ctx, where, x=x)
    y = out_or_new(ctx, where, out, x.shape, f"{name}.y", saved=x)
    mean = None if b is None else ctx.empty(x.shape[:-1], dtype=ctx.wide_dtype, name=f"{name}.mean")
    rstd = ctx.empty(x.shape[:-1], dtype=ctx.wide_dtype, name=f"{name}.rstd")
    ctx.kernels.normalize_rows(x, w, b, epsilon, mean, rstd, y)
    statistics_nbytes = rstd.nbytes * (1 if mean is None else 2)
    ctx.note(flops=(5 if b is None else 8) * x.size, nbytes=x.nbytes + y.nbytes + statistics_nbytes)
    return y, (x, mean, rstd)


def norm_output(ctx: Context, saved: SavedByNorm, w: Array, b: Array | None = None, out: Array | None = None) -> Array:
    """The output again, from what was saved: the same bits."""
    x, mean, rstd = saved
    y = out_or_new(ctx, "norm_output", out, x.shape, f"{_norm_name(b)}.y", saved=x)
    ctx.kernels.scale_rows(x, w, b, mean, rstd, y)
    ctx.note(flops=(2 if b is None else 4) * x.size, nbytes=x.nbytes + y.nbytes)
    return y


def norm_backward(ctx: Context, w: Array, saved: SavedByNorm, dy: Array, dw: Array,
                  db: Array | None = None, out: Array | None = None) -> Array:
    """dx (M, …, C) in fp32, rounded once; writes dw = Σ dy·x̂ and db = Σ dy, each added up in fp32, rounded once.

    ``out`` may be dy.
    """
    x, mean, rstd = saved
    require_shape("norm_backward", "dy", dy, x.shape, OWN_OUTPUT)
    require_at_rest(ctx, "norm_backward", dy=dy)
    dx = ctx.empty(x.shape, "activation_gradient", name=f"{_norm_name(db)}.dx") if out is None else out
    ctx.kernels.normalize_rows_gradient(x, w, mean, rstd, dy, dx, dw, db)
    ctx.note(flops=(10 if db is None else 14) * x.size, nbytes=x.nbytes + dy.nbytes + dx.nbytes)
    return dx


def _norm_name(b: Array | None) -> str:
    return "rmsnorm" if b is None else "layernorm"


def rows_of(x: Array) -> Array:
    """(..., C) as (M, C)."""
    return x.reshape(-1, x.shape[-1])


# -- Activation functions ----------------------------------------------------------------------------------------------

def relu_forward(ctx: Context, x: Array, out: Array | None = None) -> tuple[Array, Array]:
    """y = max(x, 0), x and y of n elements; saves a bit per element. NaN stays NaN; ``out`` may be x."""
    require_at_rest(ctx, "relu_forward", x=x)
    y = out_or_new(ctx, "relu_forward", out, x.shape, "relu.y")
    bits = ctx.empty(packed_nbytes(y.size), dtype=np.uint8, name="relu.bits")
    ctx.kernels.relu(x, y, bits)
    ctx.note(flops=x.size, nbytes=x.nbytes + y.nbytes + bits.nbytes)
    return y, bits


def relu_backward(ctx: Context, saved: Array, dy: Array) -> Array:
    """dx = dy where x was positive or NaN, else 0: a choice, not a product, so no NaN is multiplied by 0.

    saved (⌈n/8⌉,) uint8, dy and dx of n elements. Raises ValueError for a dy of another length or dtype.
    """
    if saved.size != packed_nbytes(dy.size):
        raise ValueError(f"relu_backward asked for dy with one element per bit that was saved ({saved.size} "
                         f"bytes of them), and found shape {dy.shape}; {OWN_OUTPUT}")
    require_at_rest(ctx, "relu_backward", dy=dy)
    dx = ctx.empty(dy.shape, "activation_gradient", name="relu.dx")
    ctx.kernels.relu_gradient(saved, dy, dx)
    ctx.note(flops=dy.size, nbytes=saved.nbytes + dy.nbytes + dx.nbytes)
    return dx


def gelu_forward(ctx: Context, x: Array, out: Array | None = None, *, exact: bool = False) -> tuple[Array, Array]:
    """y = x/2 · (1 + tanh(√(2/π)·(x + 0.044715 x³))), the tanh form, in fp32, rounded once; saves x.

    ``exact``: y = x·Φ(x), Φ the normal distribution function. x and y of n elements.
    Source: Hendrycks & Gimpel 2016 (arXiv:1606.08415), section 2, for both.
    """
    require_at_rest(ctx, "gelu_forward", x=x)
    y = out_or_new(ctx, "gelu_forward", out, x.shape, "gelu.y", saved=x)
    ctx.kernels.gelu(x, y, exact=exact)
    ctx.note(flops=8 * x.size, nbytes=x.nbytes + y.nbytes)
    return y, x


def gelu_backward(ctx: Context, saved: Array, dy: Array, *, exact: bool = False) -> Array:
    """dx = dy · d gelu/dx at the saved x, in fp32, rounded once; n elements in and out, ``exact`` as it was forward."""
    require_shape("gelu_backward", "dy", dy, saved.shape, OWN_OUTPUT)
    require_at_rest(ctx, "gelu_backward", dy=dy)
    dx = ctx.empty(dy.shape, "activation_gradient", name="gelu.dx")
    ctx.kernels.gelu_gradient(saved, dy, dx, exact=exact)
    ctx.note(flops=14 * dy.size, nbytes=saved.nbytes + dy.nbytes + dx.nbytes)
    return dx


# -- Causal multi-head attention ---------------------------------------------------------------------------------------
# Vaswani et al. 2017 (arXiv:1706.03762), section 3.2; Korthikanti et al. 2022 (arXiv:2205.05198), section 5, for
# leaving out P alone; Dao et al. 2022 (arXiv:2205.14135) for tiles.

# Operations per score, beside the products of matrices.
SOFTMAX = 5  # ·1/√D, - maximum, exp, the sum, the division
FROM_LOG_SUM = 3  # ·1/√D, - log-sum-exp, exp
SOFTMAX_GRADIENT = 5  # P·dP, its sum; dP - that, ·P, ·1/√D
ROW_SUM = 2  # the first two of them


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """qkv (B, T, C + 2K), and: P (B, H, T, T), or nothing, or fp32 log-sum-exps (B, H, T) and the output (B, T, C)."""

    heads: int
    channels: int
    qkv: Array
    p: Array | None = None
    log_sums: Array | None = None
    o: Array | None = None


def attention_forward(ctx: Context, qkv: Array, heads: int,
                      key_value_heads: int | None = None) -> tuple[Array, SavedAttention]:
    """o (B, T, C) = softmax(QKᵀ/√D, over the past) V from qkv (B, T, C + 2K); ctx.keep says what backward gets.

    K = H_kv·D for H_kv ``key_value_heads``, H if nothing is said: H/H_kv heads share them (Ainslie et al. 2023).

    Where all is kept backward gets P, where it is tiled log-sum-exps, else neither; with P and without, bits are the
    same. "tiled" rounds P before it is divided by its sum, and adds in another order: o and the gradients differ by at
    most four roundings to the compute dtype, and T to fp32, of the sum of the magnitudes of what they are sums of.
    Raises ValueError for shapes and heads that cannot be.
    """
    where = "attention_forward"
    shared = heads if key_value_heads is None else key_value_heads
    require_integers(where, 1, heads=heads, key_value_heads=shared)
    if heads % shared or qkv.ndim != 3 or qkv.shape[2] % (heads + 2 * shared):
        raise ValueError(f"{where} asked for qkv (B, T, C + 2K) of {heads} heads of queries, {shared} of keys, which "
                         f"divide them, and {shared} of values, and found shape {qkv.shape}; they lie side by side")
    require_at_rest(ctx, where, qkv=qkv)
    batch, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (heads + 2 * shared) * heads
    o = ctx.empty((batch, tokens, channels), name="attention.o")
    _note(ctx, qkv, heads, channels, products=2, per_score=SOFTMAX)
    if ctx.keep == TILED:
        log_sums = ctx.empty((batch, heads, tokens), dtype=ctx.wide_dtype, name="attention.log_sums")
        ctx.kernels.attend_tiled(qkv, heads, log_sums, o)
        return o, SavedAttention(heads, channels, qkv, log_sums=log_sums, o=o)
    p = ctx.empty((batch, heads, tokens, tokens), name="attention.p") if ctx.keep == ALL else None
    ctx.kernels.attend(qkv, heads, p, o)
    return o, SavedAttention(heads, channels, qkv, p)


def attention_backward(ctx: Context, saved: SavedAttention, dy: Array) -> Array:
    """do (B, T, C) -> dqkv (B, T, C + 2K); of shared keys and values, the sum over their heads.

    dV = Pᵀ dO; dS = P·(dP - Σ P·dP) with dP = dO Vᵀ; dQ = dS K/√D; dK = dSᵀ Q/√D.
    """
    qkv = saved.qkv
    require_shape("attention_backward", "dy", dy, (*qkv.shape[:2], saved.channels), OWN_OUTPUT)
    require_at_rest(ctx, "attention_backward", dy=dy)
    dqkv = ctx.empty(qkv.shape, "activation_gradient", name="attention.dqkv")
    if saved.log_sums is not None and saved.o is not None:
        ctx.kernels.attend_tiled_gradient(qkv, saved.heads, saved.log_sums, saved.o, dy, dqkv)
        _note(ctx, qkv, saved.heads, saved.channels, products=5, per_score=FROM_LOG_SUM + SOFTMAX_GRADIENT - ROW_SUM)
        ctx.note(flops=ROW_SUM * dy.size)  # of dO·O, which stands for that of P·dP
        return dqkv
    p, again = saved.p, saved.p is None
    if p is None:
        p = ctx.empty((len(qkv), saved.heads, qkv.shape[1], qkv.shape[1]), name="attention.p")
    ctx.kernels.attend_gradient(qkv, saved.heads, p, dy, dqkv, again=again)
    _note(ctx, qkv, saved.heads, saved.channels, products=4 + again, per_score=SOFTMAX_GRADIENT + again * SOFTMAX)
    return dqkv


def _note(ctx: Context, qkv: Array, heads: int, channels: int, products: int, per_score: int) -> None:
    """Products of matrices, 2·B·T²·C operations each, and what each of B·H·T² scores costs beside them: all of them,
    as published formulas count them, those of the future too."""
    batch, tokens = qkv.shape[:2]
    flops = batch * tokens * tokens * (products * 2 * channels + heads * per_score)
    ctx.note(flops=flops, nbytes=2 * qkv.nbytes)


# -- Dropout (Srivastava et al. 2014, section 10, with the scaling by 1/(1 - rate) in training) ------------------------
# No mask is saved: the same random words are drawn again.

RATE = Range("it is the share of elements that are dropped, from 0 to less than 1",
             lambda value: is_number(value) and 0 <= value < 1)


def dropout_forward(ctx: Context, x: Array, rate: float, name: str) -> tuple[Array, str]:
    """y = x/(1 - rate) where the word drawn for the element is at least rate·2³², else 0; rate 0 returns x itself.

    ``name`` says which random numbers these are: one for each place of the model. Saves the name. Raises ValueError
    for a rate outside [0, 1).
    """
    require_range("dropout_forward", "rate", rate, RATE)
    require_at_rest(ctx, "dropout_forward", x=x)
    return (x if rate == 0 else _dropped(ctx, x, rate, name, "activation")), name


def dropout_backward(ctx: Context, saved: str, dy: Array, rate: float) -> Array:
    """dx = dy/(1 - rate) where the element was let through, else 0: the same words are drawn again."""
    require_at_rest(ctx, "dropout_backward", dy=dy)
    return dy if rate == 0 else _dropped(ctx, dy, rate, saved, "activation_gradient")


def _dropped(ctx: Context, x: Array, rate: float, name: str, kind: str) -> Array:
    y = ctx.empty(x.shape, kind, name=f"{name}.dropped")
    ctx.kernels.drop(x, partial(ctx.draw, name), round(rate * 2**32), 1 / (1 - rate), y)
    ctx.note(flops=x.size, nbytes=x.nbytes + y.nbytes)
    return y
