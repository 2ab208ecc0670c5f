"""Arithmetic over all inputs: exp, log and tanh of every float32, and the sum of every pair of fp16 and bf16 codes.

The kernels compute as in a training; texts of their own, which share no line of arithmetic with them, judge on the card
what came out. Functions are compared with CUDA's in float64, whose own error is at most 2 ULP of float64 (CUDA C++
Programming Guide, "Mathematical Functions"), 4e-9 of float32's. A sum of two 16-bit numbers in float32, rounded once,
is the exact sum rounded once, since float32 has more than twice their bits and two (S. Figueroa, "When is double
rounding innocuous?", 1995, SIGNUM Newsletter); so is one in float64, which is rounded here on whole numbers.

Legend: n elements of a slice, t threads, p mantissa bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.backends.cupy.tracing import launch
from zerosim.numerics.arrays import to_host
from zerosim.numerics.formats import FORMATS, Format

FUNCTIONS: dict[str, Callable[..., Any]] = {"exp": np.exp, "log": np.log, "tanh": np.tanh}
LARGEST_ULPS = 2.0  # that backends/cupy/kernels.py promises
CODES = 1 << 32
SLICE, THREADS = 1 << 26, 1 << 18

_DISTANCE = """
union Float { float value; u32 word; };
union Double { double value; u64 word; };
ZS double zs_ulps(float found, double exact) {
  Double top, right; top.word = 0x47f0000000000000ull;  // 2^128, the next number if there were one
  right.value = exact;
  if (found != found || exact != exact) return found != found && exact != exact ? 0.0 : 1e300;
  double y = (double)found, r = exact;
  if (y > top.value || y < -top.value) y = y > 0 ? top.value : -top.value;
  if (r > top.value || r < -top.value) r = r > 0 ? top.value : -top.value;
  right.value = r;
  int exponent = (int)(right.word >> 52 & 0x7ff) - 1023;
  if (exponent < -126) exponent = -126;
  if (exponent > 127) exponent = 127;
  Double scale; scale.word = (u64)(23 - exponent + 1023) << 52;
  double apart = (y - r) * scale.value;
  return apart < 0 ? -apart : apart;
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

_DIFFERENCES = """
union Double { double value; u64 word; };
ZS double exactly(u32 code, int p, int exponent_bits) {
  int top = (1 << exponent_bits) - 1, exponent = (int)(code >> p) & top, bias = top >> 1;
  u64 mantissa = code & ((1u << p) - 1);
  Double x;
  if (exponent == top) x.word = 0x7ff0000000000000ull | mantissa << (52 - p);
  else if (exponent) x.word = (u64)(exponent - bias + 1023) << 52 | mantissa << (52 - p);
  else { x.word = (u64)(1 - bias - p + 1023) << 52; x.value *= (double)mantissa; }
  x.word |= (u64)(code >> 15) << 63;
  return x.value;
}
ZS u32 rounded(double value, int p, int exponent_bits) {
  Double x; x.value = value;
  int top = (1 << exponent_bits) - 1, bias = top >> 1, exponent = (int)(x.word >> 52 & 0x7ff) - 1023;
  u64 sign = x.word >> 63 << 15, infinity = (u64)top << p;
  if (exponent == -1023) return (u32)sign;  // zero; no sum of two is as small as float64's subnormal numbers
  if (exponent == 1024) return (u32)(sign | infinity | (x.word << 12 != 0));
  int above = exponent - (1 - bias), shift = 52 - p - (above < 0 ? above : 0);
  u64 mantissa = (x.word & 0xfffffffffffffull) | 0x10000000000000ull;
  if (shift > 54) return (u32)sign;
  u64 kept = mantissa >> shift, rest = mantissa & ((1ull << shift) - 1), half = 1ull << (shift - 1);
  kept += rest > half || (rest == half && (kept & 1)) ? 1 : 0;
  u64 code = kept + ((u64)(above > 0 ? above : 0) << p);
  return (u32)(sign | (code > infinity ? infinity : code));
}
extern "C" __global__ void zs_differences(const u16* a, const u16* b, const u16* sum, u32* count, u64* example, u64 t,
                                          int p, int exponent_bits, u64 n) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= t) return;
  u32 found = 0, infinity = ((1u << exponent_bits) - 1) << p;
  u64 first = 0;
  for (u64 i = thread; i < n; i += t) {
    u32 right = rounded(exactly(a[i], p, exponent_bits) + exactly(b[i], p, exponent_bits), p, exponent_bits);
    u32 mine = sum[i];
    if (mine == right || ((mine & 0x7fffu) > infinity && (right & 0x7fffu) > infinity)) continue;
    if (!found++) first = (u64)a[i] << 48 | (u64)b[i] << 32 | mine << 16 | right;
  }
  count[thread] = found; example[thread] = first;
}
"""


def distance(kernels: CupyKernels, name: str, x: Any, y: Any, threads: int = THREADS) -> tuple[float, float]:
    """The largest distance of y (n,) from the function of x (n,), in ULP of float32, and an x where it is found."""
    largest, where = kernels.empty(threads, np.float64), kernels.empty(threads, np.uint32)
    launch(_DISTANCE.replace("FUNCTION", f"zs_{name}"), "zs_distance", threads, [x, y, largest, where, threads, x.size])
    found = to_host(largest)
    at = int(found.argmax())
    return float(found[at]), float(to_host(where)[at : at + 1].view(np.float32)[0])


def differences(kernels: CupyKernels, fmt: Format, a: Any, b: Any, total: Any, threads: int = THREADS
                ) -> tuple[int, str]:
    """The number of sums (n,) whose bits are wrong, any NaN being any NaN, and an example."""
    count, example = kernels.empty(threads, np.uint32), kernels.empty(threads, np.uint64)
    codes = [array.view(np.uint16) for array in (a, b, total)]
    launch(_DIFFERENCES, "zs_differences", threads,
           [*codes, count, example, threads, np.int32(fmt.mantissa_bits), np.int32(fmt.exponent_bits), total.size])
    found = to_host(count).astype(np.int64)
    if not found.any():
        return 0, ""
    word = int(to_host(example)[int(found.argmax())])
    left, right, mine, expected = (word >> shift & 0xFFFF for shift in (48, 32, 16, 0))
    return int(found.sum()), f"{left:#06x} + {right:#06x} is {mine:#06x} and should be {expected:#06x}"


def all_arguments(kernels: CupyKernels, name: str, spans: Iterator[tuple[int, int]] | None = None) -> dict[str, Any]:
    """The function of every float32, or of those of some codes, slice by slice: the largest distance, and where."""
    most, argument, seen = 0.0, 0.0, 0
    for first, stop in spans or slices(CODES):
        x = kernels.xp.arange(first, stop, dtype=np.uint32).view(np.float32)
        y = kernels.empty(x.size, np.float32)
        kernels.elementwise(FUNCTIONS[name], x, out=y)
        apart, at = distance(kernels, name, x, y)
        seen += stop - first
        if apart > most:
            most, argument = apart, at
    return {"arguments": seen, "largest_ulps": most, "at": argument.hex()}


def all_pairs(kernels: CupyKernels, name: str, left: Iterator[int] | None = None, at_once: int = SLICE >> 16
              ) -> dict[str, Any]:
    """The sum of every pair of codes, or of some codes with every code: how many are wrong, and an example."""
    fmt, codes, wrong, seen, example = FORMATS[name], np.arange(1 << 16, dtype=np.uint16), 0, 0, ""
    chosen = list(left or range(1 << 16))
    b = kernels.uploaded(np.tile(codes, at_once)).view(fmt.dtype)
    for first in range(0, len(chosen), at_once):
        some = np.array(chosen[first : first + at_once], np.uint16)
        a = kernels.uploaded(np.repeat(some, len(codes))).view(fmt.dtype)
        total = kernels.empty(a.size, fmt.dtype)
        kernels.add_rounded(a, b[: a.size], total)
        count, one = differences(kernels, fmt, a, b[: a.size], total)
        wrong, seen, example = wrong + count, seen + a.size, example or one
    return {"pairs": seen, "wrong": wrong, "example": example}


def slices(count: int) -> Iterator[tuple[int, int]]:
    """All codes, so many at once as fit."""
    for first in range(0, count, SLICE):
        yield first, min(count, first + SLICE)


def judged_function(found: dict[str, Any]) -> str:
    """Wrong beyond the bound that is promised."""
    if found["largest_ulps"] <= LARGEST_ULPS:
        return ""
    return f"{found['largest_ulps']:.4g} ULP from the exact value at {found['at']}, and {LARGEST_ULPS:g} are promised"


def remark_on_function(found: dict[str, Any]) -> str:
    """The largest error."""
    return f"{found['arguments']:,} arguments, at most {found['largest_ulps']:.4f} ULP, at {found['at']}"


def judged_sums(found: dict[str, Any]) -> str:
    """A single wrong bit is wrong."""
    return f"{found['wrong']:,} of {found['pairs']:,} sums are wrong: {found['example']}" if found["wrong"] else ""


def remark_on_sums(found: dict[str, Any]) -> str:
    """The number of pairs."""
    return f"{found['pairs']:,} pairs, every bit right"
