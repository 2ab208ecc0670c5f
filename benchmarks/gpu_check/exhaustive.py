"""Arithmetic over all inputs: exp, log, tanh and the casts of every float32, the sum of every pair of codes of a narrow
format, and in fp8, where two are computed at once, also extremes and a sum that is rounded in between.

The kernels compute as in a training. Functions are compared on the card with CUDA's in float64, whose own error is at
most 2 ULP of float64 (CUDA C++ Programming Guide, "Mathematical Functions"), 4e-9 of float32's. Casts, which are
instructions of the card, are compared there with the formulas that a card without them takes. Sums are compared on
the host with NumPy's in float32, rounded once: the exact ones rounded once, since float32 has more than twice the bits
of the formats and two (S. Figueroa, "When is double rounding innocuous?", 1995, SIGNUM Newsletter).

Legend: n elements of a slice, t threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_check.report import Machine, Writer, Wrong
from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.backends.cupy.tracing import cast_formulas, launch
from zerosim.numerics.arrays import to_host, words
from zerosim.numerics.formats import FORMATS

FUNCTIONS: dict[str, Callable[..., Any]] = {"exp": np.exp, "log": np.log, "tanh": np.tanh}
LARGEST_ULPS = 2.0  # that backends/cupy/kernels.py promises
SLICE, THREADS = 1 << 26, 1 << 18

_DISTANCE = """
union Float { float value; u32 word; };
ZS double zs_ulps(double found, double exact) {
  if (found != found || exact != exact) return found != found && exact != exact ? 0.0 : 1e300;
  const double next = 340282366920938463463374607431768211456.0;  // 2^128, the next number if there were one
  found = fmin(fmax(found, -next), next), exact = fmin(fmax(exact, -next), next);
  int exponent = exact == 0 ? -126 : ilogb(exact);
  if (exponent < -126) exponent = -126;
  if (exponent > 127) exponent = 127;
  return ldexp(fabs(found - exact), 23 - exponent);
}
extern "C" __global__ void zs_distance(const float* x, const float* y, double* largest, u32* where, u64 t, u64 n) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= t) return;
  double most = 0; u32 at = 0;
  for (u64 i = thread; i < n; i += t) {
    double apart = zs_ulps(y[i], FUNCTION((double)x[i]));
    if (apart > most) { most = apart; Float argument; argument.value = x[i]; at = argument.word; }
  }
  largest[thread] = most; where[thread] = at;
}
"""
# The cast of every float32, and the value of its code, both by the kernels' way and by formulas.
_CASTS = """
extern "C" __global__ void zs_casts(u32* wrong, u32* where, u64 t, u64 first, u64 stop) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= t) return;
  u32 count = 0, at = 0;
  for (u64 code = first + thread; code < stop; code += t) {
    float x = zs_value((u32)code);
    auto packed = zs_narrow_NAME(x), right = zs_narrow_formula(x);
    float back = zs_widen_NAME(packed), same = zs_widen_formula(right);
    bool nan = same != same;
    if (nan ? back == back : packed != right || zs_word(back) != zs_word(same)) { ++count; at = (u32)code; }
  }
  wrong[thread] = count; where[thread] = at;
}
"""


def check_exhaustive(report: Writer, machine: Machine) -> None:
    """Functions and casts of all floats, and what is computed of all pairs of narrow numbers."""
    for name in FUNCTIONS:
        report.check(f"{name} of every float32", lambda name=name: all_arguments(CupyKernels(), name),
                     remark=remark_on_function)
    for name in FORMATS:
        if name != "fp32":
            report.check(f"every float32 to {name}", lambda name=name: all_casts(CupyKernels(), name),
                         remark=remark_on_casts)
    for name, fmt in FORMATS.items():
        for formula in OF_PAIRS:
            if fmt.bits == 8 or (fmt.bits == 16 and formula == "a + b"):
                report.check(f"every {formula} in {name}", partial(all_pairs, CupyKernels(), name, formula),
                             remark=remark_on_pairs)


def distance(kernels: CupyKernels, name: str, x: Any, y: Any, threads: int = THREADS) -> tuple[float, float]:
    """The largest distance of y (n,) from the function of x (n,), in ULP of float32, and an x where it is found."""
    largest, where = kernels.empty(threads, np.float64), kernels.empty(threads, np.uint32)
    launch(_DISTANCE.replace("FUNCTION", f"zs_{name}"), "zs_distance", threads, [x, y, largest, where, threads, x.size])
    found = to_host(largest)
    at = int(found.argmax())
    return float(found[at]), float(to_host(where)[at : at + 1].view(np.float32)[0])


def all_arguments(kernels: CupyKernels, name: str, spans: Iterable[tuple[int, int]] | None = None) -> dict[str, Any]:
    """The function of every float32, or of those of some codes, slice by slice: the largest distance, and where."""
    most, argument, seen = 0.0, 0.0, 0
    for first, stop in spans or ((first, first + SLICE) for first in range(0, 1 << 32, SLICE)):
        x = kernels.xp.arange(first, stop, dtype=np.uint32).view(np.float32)
        y = kernels.empty(x.size, np.float32)
        kernels.elementwise(FUNCTIONS[name], x, out=y)
        apart, at = distance(kernels, name, x, y)
        seen += stop - first
        if apart > most:
            most, argument = apart, at
    return {"arguments": seen, "largest_ulps": most, "at": argument.hex()}


def remark_on_function(found: dict[str, Any]) -> str:
    """The largest error; Wrong beyond the bound that is promised."""
    at_most = f"{found['largest_ulps']:.4f} ULP, at {found['at']}"
    if found["largest_ulps"] > LARGEST_ULPS:
        raise Wrong(f"{at_most}, from the exact value, and {LARGEST_ULPS:g} are promised")
    return f"{found['arguments']:,} arguments, at most {at_most}"


def all_casts(kernels: CupyKernels, name: str, spans: Sequence[tuple[int, int]] = ((0, 1 << 32),),
              threads: int = THREADS) -> dict[str, Any]:
    """The cast of every float32, or of those of some codes, to a format and back: how many are not as by the formulas,
    any NaN being any NaN, and an example."""
    formulas = cast_formulas(replace(FORMATS[name], name="formula"))
    wrong, where = (kernels.empty(threads, np.uint32) for _ in range(2))
    total, example = 0, ""
    for first, stop in spans:
        launch(formulas + _CASTS.replace("NAME", name), "zs_casts", threads, [wrong, where, threads, first, stop])
        counts = to_host(wrong)
        if counts.any():
            total, example = total + int(counts.sum(dtype=np.int64)), f"{to_host(where)[counts.argmax()]:#010x}"
    return {"casts": sum(stop - first for first, stop in spans), "wrong": total, "example": example}


def remark_on_casts(found: dict[str, Any]) -> str:
    """The number of casts; a single wrong one is Wrong."""
    if found["wrong"]:
        raise Wrong(f"{found['wrong']:,} of {found['casts']:,} casts differ from the formula's, that of the float32 of "
                    f"code {found['example']} among them")
    return f"{found['casts']:,} casts, the formula's bits"


# What is computed of a pair: by the kernels, of arrays, and in float32, of which the result is rounded to the format.
OF_PAIRS: dict[str, tuple[Callable[..., None], Callable[..., Any]]] = {
    "a + b": (CupyKernels.add_rounded, lambda a, b, rounded: a + b),
    "(a + b) + b": (lambda k, a, b, out: k.sum_rounded([a, b, b], out), lambda a, b, rounded: rounded(a + b) + b),
    "max(a, b)": (CupyKernels.maximum_rounded,
                  lambda a, b, _: np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b))),
    "min(a, b)": (CupyKernels.minimum_rounded,
                  lambda a, b, _: np.where(a == b, np.where(np.signbit(a), a, b), np.minimum(a, b)))}


def all_pairs(kernels: CupyKernels, name: str, formula: str, left: Iterable[int] | None = None) -> dict[str, Any]:
    """The formula of every code, or of some codes, with every code: how many results are wrong, any NaN being any
    NaN, and an example."""
    fmt, (run, exact), seen, wrong, example = FORMATS[name], OF_PAIRS[formula], 0, 0, ""
    dtype = fmt.dtype
    codes = np.arange(1 << fmt.bits, dtype=f"u{dtype.itemsize}")
    numbers = codes.view(dtype).astype(np.float32)
    is_nan = np.isnan(numbers)
    a, b, result = (kernels.empty(codes.size, dtype) for _ in range(3))
    words(b).set(codes)
    for code in codes if left is None else left:
        words(a).fill(int(code))
        run(kernels, a, b, result)
        found = to_host(words(result))
        with np.errstate(all="ignore"):
            right = exact(numbers[code], numbers, lambda x: x.astype(dtype).astype(np.float32))
            right = right.astype(dtype).view(codes.dtype)
        differs = found != right
        differs[differs] = ~(is_nan[found[differs]] & is_nan[right[differs]])
        if differs.any() and not example:
            at = int(differs.argmax())
            example = f"codes {code:#x} and {at:#x} make {found[at]:#x} and should make {right[at]:#x}"
        wrong, seen = wrong + int(differs.sum()), seen + codes.size
    return {"pairs": seen, "wrong": wrong, "example": example}


def remark_on_pairs(found: dict[str, Any]) -> str:
    """The number of pairs; a single wrong bit is Wrong."""
    if found["wrong"]:
        raise Wrong(f"{found['wrong']:,} of {found['pairs']:,} results are wrong: {found['example']}")
    return f"{found['pairs']:,} pairs, every bit right"
