"""What the floor of numbers refuses: with what was asked, what was found and what to do."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import zerosim as zs
from zerosim.numerics import arrays, formats, kernels, loss_scale, random, rounding

K = kernels.NumpyKernels()
Z = np.zeros
F2, F4, I8 = np.float16, np.float32, np.int64
FLOATING = "bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2"
SCALE = "it is a positive finite number of fp32's normal range; 1.0 scales nothing"
NULL = arrays.NullArray(3, F4)
STATIC, TORCH, DEEPSPEED, LEGACY = (loss_scale.Static(8), *map(loss_scale.Dynamic, loss_scale.SCALERS))
Refusal = tuple[Callable[[], object], str]


def spoiled() -> np.ndarray:
    a = np.eye(300, dtype=F4)
    a[299, 299] = np.nan
    return a


KERNELS: list[Refusal] = [
    (lambda: K.add_rounded(Z(2), Z(3), Z(2)), "add_rounded needs arrays of one shape, got a (2,), b (3,), out (2,)"),
    (lambda: K.add_rounded(Z(2, F4), Z(2, F4), Z(2, F2)),
     "add_rounded needs its first operand in the type of out, got float32 and float16: cast_pack one of them first"),
    (lambda: K.multiply_rounded(Z(2, I8), 2.0, Z(2)),
     f"multiply_rounded computes in floating point ({FLOATING}), got x of type int64"),
    (lambda: K.sum_rounded([], Z(2)), "sum_rounded needs at least one addend, got none"),
    (lambda: K.sum_rounded([Z(2), Z(3)], Z(2)),
     "sum_rounded needs arrays of one shape, got out (2,), addend 0 (2,), addend 1 (3,)"),
    *[(partial(K.matmul, Z(a), Z(b), bias=None if bias is None else Z(bias), out=Z(out)),
       f"matmul needs a (m, k), b (k, n), bias (n,) if any, and out (m, n), got a {a}, b {b}, ")
      for a, b, bias, out in [((2, 3), (4, 5), None, (2, 5)), ((2, 3), (3, 5), (4,), (2, 5)),
                              ((2, 3), (3, 5), None, (5, 2)), ((3,), (3, 5), None, (5,))]],
    (lambda: K.matmul(Z((2, 2)), Z((2, 2), I8), out=Z((2, 2))),
     f"matmul computes in floating point ({FLOATING}), got b of type int64"),
    (lambda: K.column_sum(Z((3, 4)), Z(3)), "column_sum adds the rows of x (m, n) into out (n,), got (3, 4) and (3,)"),
    (lambda: K.column_sum(Z((3, 4), I8), Z(4)), "column_sum computes in floating point"),
    (lambda: K.sum_of_squares(Z(4, I8)), "sum_of_squares computes in floating point"),
    *[(call, f"{name} takes a square matrix, got shape (2, 3)") for name, call in {
        "trace": lambda: K.trace(Z((2, 3))), "symmetric_power": lambda: K.symmetric_power(Z((2, 3)), 1.0, 0.0, Z(1)),
        "eigenvectors": lambda: K.eigenvectors(Z((2, 3)), Z(1)),
        "orthogonal_factor": lambda: K.orthogonal_factor(Z((2, 3)), Z(1))}.items()],
    *[(call, f"{name} found inf or NaN in a matrix (300, 300): sums of squares of gradients have left float32's range; "
       "clip the gradients, or scale the loss less") for name, call in {
        "symmetric_power": lambda: K.symmetric_power(spoiled(), 1.0, 0.0, Z((300, 300), F4)),
        "eigenvectors": lambda: K.eigenvectors(spoiled(), Z((300, 300), F4)),
        "orthogonal_factor": lambda: K.orthogonal_factor(spoiled(), Z((300, 300), F4))}.items()],
    (lambda: K.mean_squares(Z((2, 3), F4), Z(3, F4), Z(2, F4)),
     "mean_squares takes x (r, c), rows (r,) and columns (c,), got (2, 3), (3,), (2,)"),
    (lambda: K.normalize_rows_gradient(Z((2, 4), F4), Z(4, F4), Z(2, F4), Z(2, F4), Z((2, 4), F4), Z((2, 4), F4),
                                       Z(3, F2), Z(4, F2)),
     "4 numbers were to be written to an array of 3; pass one of their shape"),
    *[(partial(K.step_blocks, print, w), f"step_blocks needs arrays of float32 in C order, got array 0 {what}")
      for w, what in ((Z((4, 6), F4)[:, ::2], "(4, 3) of type float32, with gaps or in another order"),
                      (Z((4, 6), F4).T, "(6, 4) of type float32, with gaps or in another order"),
                      (Z((4, 6)), "(4, 6) of type float64"))],
    (lambda: K.step_blocks(print, Z((4, 6), F4), Z((6, 4), F4)),
     "step_blocks needs arrays of one shape, got array 0 (4, 6), array 1 (6, 4)"),
]
ROUNDING: list[Refusal] = [
    (lambda: zs.round_to(1.0, "fp16", "up"), "rounding mode 'up' is none of nearest, toward_zero, stochastic"),
    (lambda: zs.round_to(Z(2, I8), "fp16"), "round_to was given elements of type int64; it rounds float64, float32 and "
     "the formats' own array types: convert first, with astype"),
    (lambda: zs.spacing(1, "fp16"), "spacing was given elements of type int64; it rounds float64, float32 and "),
    (lambda: zs.round_to(Z(3, F4), "fp16", out=Z(4, F4)),
     "round_to needs out of shape (3,) and type float32, got (4,) and float32"),
    (lambda: zs.round_to(Z(3), "fp16", out=Z(3, F4)),
     "round_to needs out of shape (3,) and type float64, got (3,) and float32"),
    (lambda: zs.round_to(1.0, "fp17"), "no number format is named 'fp17'; there are fp16, "),
    (lambda: zs.round_to(Z(2, F4), "fp16", out=[0.0, 0.0]),
     "round_to needs out as a NumPy array, got list; wrap it with np.array"),
    (lambda: zs.round_to(Z(2, F4), "fp16", "stochastic", bits=[1, 2]),
     "stochastic rounding needs bits as a NumPy array, got list; wrap it with np.array"),
    (lambda: zs.round_to(Z(3, F4), "fp16", "stochastic"),
     "stochastic rounding needs bits=, one uint32 for each element: numerics.random.bits(key, start, count) makes"),
    (lambda: zs.round_to(Z(3, F4), "fp16", bits=Z(3, np.uint32)),
     "mode 'nearest' takes no bits; only 'stochastic' does"),
    *[(partial(rounding.round_to, Z(3, F4), "fp16", "stochastic", bits=bits),
       f"stochastic rounding needs bits of shape (3,) and type uint32, got {bits.shape} and {bits.dtype}")
      for bits in (Z(2, np.uint32), Z(3, I8))],
    (lambda: formats.format_of("fp61"), "no number format is named 'fp61'; there are fp16, "),
    (lambda: formats.format_of("bfloat"), "no number format is named 'bfloat'; there are bf16, "),
    (lambda: zs.Policy("float64"), "no number format is named 'float64'; there are fp16, bf16, fp8_e4m3, fp32, "
     "fp8_e5m2; only the compute of a policy may be fp64"),
    (lambda: zs.Policy("bf16", reduce="fp64"), "no number format is named 'fp64'; there are fp16, fp32, bf16, "
     "fp8_e4m3, fp8_e5m2; only the compute of a policy may be fp64"),
    (lambda: formats.format_of(None), "no number format is None; there are fp32, fp16, "),
    (lambda: formats.format_of(np.float64),
     "no number format has the array type float64; there are fp32 (float32), fp16 (float16), "),
    (lambda: random.bits((0, "x", 0, 0), -1, 3), "random words need start >= 0 and count >= 0, got start -1, count 3"),
    (lambda: random.normal((0, "x", 0, 0), 0, -3), "random words need start >= 0 and count >= 0, got start 0,"),
    *[(partial(arrays.sha256, value), "a fingerprint is of arrays, numbers, texts and collections of them, found "
       f"{type(value).__name__}; return what is in it") for value in (object(), {1, 2}, print, 1j, NULL)],
]
ARRAYS: list[Refusal] = [
    (lambda: NULL.reshape(2, 2), "an array of shape (3,) has not as many elements as shape (2, 2)"),
    (lambda: NULL.reshape((2, -1)), "an array of shape (3,) has not as many elements as shape (2, -1)"),
    (lambda: NULL.view(np.float64), "an array of shape (3,) and type float32 has no view as float64"),
    (lambda: arrays.NullArray(-1, F4), "an array has no negative lengths, got shape (-1,)"),
    (lambda: arrays.to_host(NULL), "NullArray((3,), float32) has no data to look at; run the program on a Cluster for"),
]
WITHOUT_DATA: list[Refusal] = [
    (lambda: bool(NULL), "a null array has no data, so it is neither true nor false: a branch on numbers cannot be"),
    (lambda: np.asarray(NULL), "a null array has no data: NumPy's functions cannot compute with it, NullKernels can"),
    (lambda: NULL[[0, 1]], "a null array is indexed by integers, slices, ... and None, got [0, 1]"),
    (lambda: len(arrays.NullArray((), F4)), "an array without dimensions has no length"),
    (lambda: hash(NULL), "unhashable type"),
]
POLICIES: list[Refusal] = [
    *[(partial(zs.Policy, **{name: "fp17"}), "no number format is named 'fp17'") for name in (
        "compute", "reduce", "accumulate", "wire", "master", "state", "output")],
    *[(partial(zs.Policy, **{name: None}), "no number format is None; there are fp32") for name in (
        "compute", "master", "state")],
    *[(partial(zs.Policy, compute, master="bf16"),
       f"master='bf16' has fewer mantissa bits than compute={compute!r}, so that the copy that computes would be finer "
       f"than the weights that are updated; take master='fp32', or master={compute!r} for no second copy")
      for compute in ("fp32", "fp16")],
    (lambda: zs.Policy(np.int64(3)), "no number format has the array type int64; there are fp32 (float32), "),
    (lambda: zs.Policy(np.array([1, 2])), "no number format is array([1, 2]); there are fp32, "),
    (lambda: zs.Policy("fp8_e4m3", matmul="fp8"), "matmul='fp8' rounds what rests in more bits, and compute='fp8_e4m3' "
     "has 8 already; take compute='bf16' with it, or matmul=None"),
    *[(partial(zs.Policy, "fp64", **other), f"compute='fp64' is for checking gradients, which matmul={matmul!r}, "
       f"master={master!r} would hide in roundings; take matmul=None, master='fp32'")
      for other, matmul, master in (({"matmul": "fp8"}, "fp8", "fp32"), ({"master": "bf16"}, None, "bf16"))],
    (lambda: zs.Policy("bf16", master_from="computed"), "masters do not begin as 'computed'; choose one of "
     "first_values, compute; did you mean 'compute'?"),
    (lambda: zs.Policy(matmul="fp16"), "matmul='fp16' is no way to multiply; choose one of None, 'fp8'"),
    (lambda: zs.Policy(average="splitt"),
     "no averaging rule 'splitt'; choose one of cast_then_divide, sum_then_divide, divide_then_sum, split, "
     "premultiply; did you mean 'split'?"),
    *[(partial(zs.Policy, loss_scale=scale), f"loss_scale={scale!r} must be a positive finite number of fp32's normal "
       "range, or zs.numerics.loss_scale.Dynamic('torch')") for scale in ("big", True, loss_scale.Dynamic, None)],
    *[(partial(loss_scale.Static, scale), f"Static was given loss_scale={scale!r}; {SCALE}") for scale in (
        0, -1, float("inf"), float("nan"), "8", None, 10**400)],
    *[(partial(zs.Policy, loss_scale=scale), f"Static was given loss_scale={scale!r}; {SCALE}") for scale in (
        0.0, float("inf"), float("nan"))],
    (lambda: loss_scale.Dynamic("deepsped"), "no dynamic loss scaler is called 'deepsped'; choose one of torch, "
     "deepspeed, deepspeed-legacy; did you mean 'deepspeed'?"),
    *[(partial(loss_scale.Dynamic, **{name: value}), f"Dynamic was given {name}={value!r}; {text}")
      for name, text, *values in (
        ("initial", SCALE, 0, "2"), ("smallest", SCALE, -1),
        ("hysteresis", "hysteresis is a whole number, 1 or more", 0),
        ("window", "window is a whole number, 1 or more", 0, 1.5, True),
        ("factor", "factor is a number above 1; 2.0 moves the exponent alone", 1, float("nan"), float("inf")))
      for value in values],
    *[(partial(loss_scale.Dynamic, **{name: value}), "the kind 'torch' shrinks on every overflow, without end, and was "
       f"given {name}={value!r}; take 'deepspeed', or leave it out") for name, value in (
        ("hysteresis", 2), ("smallest", 0.5))],
    (lambda: loss_scale.Dynamic("deepspeed", initial=2, smallest=4),
     "initial=2 lies below smallest=4; begin at the smallest scale or above"),
    *[(partial(rule.start().restore, state), f"a loss scaler of the kind {kind!r} goes on from {names}, and was given "
       f"{found}; restore the state of a scaler of the same kind") for rule, state, kind, names, found in (
        (STATIC, {}, "static", "scale", "nothing"), (TORCH, {"scale": 1.0}, "torch", "good_steps, scale", "scale"),
        (DEEPSPEED, {"scale": 1.0, "good_steps": 0}, "deepspeed", "overflows_left, scale, steps_since",
         "scale, good_steps"),
        (DEEPSPEED, None, "deepspeed", "overflows_left, scale, steps_since", "None"))],
    *[(partial(rule.start().restore, state), f"{name}={state[name]!r} is no state that a loss scaler of the kind "
       f"{kind!r} comes to; restore what its state() said") for rule, state, kind, name in (
        (STATIC, {"scale": float("nan")}, "static", "scale"),
        (TORCH, {"scale": 1.0, "good_steps": -1}, "torch", "good_steps"),
        (TORCH, {"scale": -1.0, "good_steps": 0}, "torch", "scale"),
        (TORCH, {"scale": 10**400, "good_steps": 0}, "torch", "scale"),
        (LEGACY, {"scale": 1.0, "steps_since": 2, "overflows_left": 0}, "deepspeed-legacy", "overflows_left"),
        (LEGACY, {"scale": 1.0, "steps_since": 1.5, "overflows_left": 1}, "deepspeed-legacy", "steps_since"))],
]


@pytest.mark.parametrize(("error", "refusals"), [
    (ValueError, KERNELS), (ValueError, ROUNDING), (ValueError, ARRAYS), (TypeError, WITHOUT_DATA),
    (ValueError, POLICIES)], ids=["kernels", "rounding", "arrays", "without data", "policies"])
def test_what_makes_no_sense_is_refused_with_what_was_found(error: type[Exception], refusals: list[Refusal]) -> None:
    for call, text in refusals:
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            call()


def test_a_state_that_is_refused_changes_nothing() -> None:
    for rule in (STATIC, TORCH, DEEPSPEED, LEGACY):
        scaler = rule.start()
        before = scaler.state()
        for state in (None, {}, before | {"scale": -1.0}, before | {"more": 1}):
            with pytest.raises(ValueError, match="restore"):
                scaler.restore(state)
        assert scaler.state() == before
