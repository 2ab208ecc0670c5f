"""Layers' kernels on the stand-in for CuPy beside NumPy's: the formulas, what is written where, and for which strides.

Sums along rows, matmul and decompositions are a library's on a GPU and NumPy's here, in the same order: so bits are
compared, and what they show is that everything around the library is the same. No GPU runs here.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.backends.fakes import differing, kernels
from tests.backends.test_cupy_arithmetic import DTYPES, both
from zerosim.numerics.arrays import to_host
from zerosim.numerics.kernels import NumpyKernels

__all__ = ["kernels"]
NUMPY = NumpyKernels()
COMPUTE = ["fp32", "bf16", "fp16", "fp8_e5m2", "fp64"]


def normal(shape: tuple[int, ...] | int, name: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[name])


def zeros(shape: tuple[int, ...] | int, name: str) -> np.ndarray:
    return np.zeros(shape, DTYPES[name])


def wide(name: str) -> str:
    return "fp64" if name == "fp64" else "fp32"


@pytest.mark.parametrize("name", COMPUTE)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (64, 33, 17), (3, 0, 2)])
def test_products_are_rounded_once_with_their_bias(kernels: Any, name: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b, bias = normal((m, k), name), normal((k, n), name, 1), normal(n, name, 2)
    for out in (name, wide(name)):
        both(kernels, lambda k, a, b, out: k.matmul(a, b, out=out), a, b, zeros((m, n), out))
        both(kernels, lambda k, a, b, c, out: k.matmul(a, b, bias=c, out=out), a, b, bias, zeros((m, n), out))
    both(kernels, lambda k, a, b, out: k.matmul(a.T, b.T, out=out), a.T.copy(), b.T.copy(), zeros((m, n), name))
    if m > 1:
        both(kernels, lambda k, a, b, out: k.matmul(a[::2], b, out=out[::2]), a, b, zeros((m, n), name))


def test_operands_of_two_formats_are_multiplied_as_float32(kernels: Any) -> None:
    a, b = normal((9, 20), "bf16"), normal((20, 11), "fp16", 1)
    both(kernels, lambda k, a, b, out: k.matmul(k.widen(a), b, out=out), a, b, zeros((9, 11), "bf16"))


@pytest.mark.parametrize("name", COMPUTE)
@pytest.mark.parametrize("shape", [(1, 1), (40, 24), (700, 130)])
def test_rows_are_normalized_by_the_same_formula(kernels: Any, name: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    x, w, b, dy = normal(shape, name), normal(columns, name, 1), normal(columns, name, 2), normal(shape, name, 3)
    mean, rstd = zeros(rows, wide(name)), zeros(rows, wide(name))
    both(kernels, lambda k, x, w, b, mean, rstd, y: k.normalize_rows(x, w, b, 1e-5, mean, rstd, y), x, w, b, mean, rstd,
         zeros(shape, name), written=(3, 4, 5))
    NUMPY.normalize_rows(x, w, b, 1e-5, mean, rstd, np.empty_like(x))
    both(kernels, lambda k, *a: k.scale_rows(*a), x, w, b, mean, rstd, zeros(shape, name))
    if columns > 1:
        both(kernels, lambda k, *a: k.normalize_rows_gradient(*a), x, w, mean, rstd, dy, zeros(shape, name),
             zeros(columns, name), zeros(columns, name), written=(5, 6, 7))


@pytest.mark.parametrize(("shape", "name"), [*product([(1, 2), (50, 11)], COMPUTE), ((140, 500), "bf16")])
def test_the_loss_of_softmax_is_the_same_formula(kernels: Any, name: str, shape: tuple[int, int]) -> None:
    logits = normal(shape, name)
    for dtype in (np.int64, np.int32) if shape[0] < 100 else (np.int64,):
        targets = np.random.default_rng(1).integers(-1, shape[1], shape[0]).astype(dtype)
        both(kernels, lambda k, x, t, s: k.softmax_loss(x, t, s), logits, targets, zeros(shape[0], wide(name)))
        both(kernels, lambda k, t: (k.count_targets(t), k.index_range(t)), targets, written=())
        log_sums = zeros(shape[0], wide(name))
        NUMPY.softmax_loss(logits, targets, log_sums)
        both(kernels, lambda k, x, t, s, out: k.softmax_loss_gradient(x, t, s, 0.37, out), logits, targets, log_sums,
             zeros(shape, name))
        both(kernels, lambda k, x, t, s: k.softmax_loss_gradient(x, t, s, 0.37, x), logits, targets, log_sums,
             written=(0,))
        both(kernels, lambda k, x, t, s, out: k.softmax_loss_gradient(x.T, t, s, 0.37, out.T), logits.T.copy(), targets,
             log_sums, zeros(shape[::-1], name))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize(("batch", "tokens", "heads", "width"), [(1, 1, 1, 1), (2, 9, 3, 4), (3, 64, 2, 8)])
def test_attention_is_the_same_formula(kernels: Any, name: str, batch: int, tokens: int, heads: int,
                                       width: int) -> None:  # fmt: skip
    channels = heads * width
    qkv, do = normal((batch, tokens, 3 * channels), name), normal((batch, tokens, channels), name, 1)
    p, o, dqkv = zeros((batch, heads, tokens, tokens), name), zeros(do.shape, name), zeros(qkv.shape, name)
    both(kernels, lambda k, qkv, p, o: k.attend(qkv, heads, p, o), qkv, p, o, written=(1, 2))
    both(kernels, lambda k, qkv, o: k.attend(qkv, heads, None, o), qkv, o)
    NUMPY.attend(qkv, heads, p, o)
    for again in (False, True):
        both(kernels, lambda k, qkv, p, do, d, a=again: k.attend_gradient(qkv, heads, p, do, d, again=a), qkv, p, do,
             dqkv, written=(1, 3))
    sums = zeros((batch, heads, tokens), wide(name))
    both(kernels, lambda k, qkv, s, o: k.attend_tiled(qkv, heads, s, o), qkv, sums, o, written=(1, 2))
    NUMPY.attend_tiled(qkv, heads, sums, o)
    both(kernels, lambda k, *x: k.attend_tiled_gradient(x[0], heads, *x[1:]), qkv, sums, o, do, dqkv)


def test_attention_in_strips_tiles_and_groups_is_that_of_one(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short strips, so that a strip has a past; the sums over tiles are in another order: within 1e-5 of each other."""
    qkv, do = normal((2, 23, 24), "fp32"), normal((2, 23, 8), "fp32", 1)
    p, o, dqkv, sums = (np.zeros(s, np.float32) for s in ((2, 2, 23, 23), (2, 23, 8), (2, 23, 24), (2, 2, 23)))
    NUMPY.attend(qkv, 2, p, o)
    NUMPY.attend_gradient(qkv, 2, p, do, dqkv)
    for name, value in (("STRIP", 5), ("TILE", 4), ("GROUP", 100)):
        monkeypatch.setattr(type(kernels), name, value)
    up = kernels.uploaded
    found = [up(np.full_like(x, np.nan)) for x in (p, o, dqkv, sums, o, dqkv, dqkv)]
    kernels.attend(up(qkv), 2, found[0], found[1])
    kernels.attend_gradient(up(qkv), 2, found[0], up(do), found[2])
    kernels.attend_tiled(up(qkv), 2, found[3], found[4])
    kernels.attend_tiled_gradient(up(qkv), 2, found[3], found[4], up(do), found[5])
    kernels.attend_gradient(up(qkv), 2, found[0], up(do), found[6], again=True)
    for x, expected in zip((*found[:3], *found[4:]), (p, o, dqkv, o, dqkv, dqkv), strict=True):
        assert np.abs(to_host(x) - expected).max() < 1e-5


def test_decompositions_and_means_of_matrices_are_the_same_formula(kernels: Any) -> None:
    x = normal((12, 12), "fp32")
    a = x @ x.T
    both(kernels, lambda k, a: k.trace(a), a, written=())
    both(kernels, lambda k, a, out: k.eigenvectors(a, out), a, np.zeros_like(a))
    both(kernels, lambda k, a, out: k.orthogonal_factor(a, out), a, np.zeros_like(a))
    found, expected = kernels.uploaded(np.zeros_like(a)), np.zeros_like(a)
    kernels.symmetric_power(kernels.uploaded(a), -0.25, 1e-4, found)
    NUMPY.symmetric_power(a, -0.25, 1e-4, expected)
    assert np.abs(to_host(found) - expected).max() < 1e-5
    y = normal((40, 9), "fp32")
    both(kernels, lambda k, *x: k.mean_squares(*x), y, np.zeros(40, np.float32), np.zeros(9, np.float32),
         written=(1, 2))
    rows, columns = np.abs(normal(40, "fp32", 1)), np.abs(normal(9, "fp32", 2))
    both(kernels, lambda k, *x: k.divide_by_roots(*x), y, rows, columns, np.zeros_like(y))
    a[3, 4] = np.inf
    with pytest.raises(ValueError, match=r"symmetric_power found inf or NaN in a matrix \(12, 12\)"):
        kernels.symmetric_power(kernels.uploaded(a), -0.25, 1e-4, found)
    assert differing(to_host(found), to_host(found)) == 0
