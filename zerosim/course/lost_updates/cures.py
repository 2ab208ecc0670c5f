"""The same small update added many times, with each of the known cures, side by side.

Legend: w a weight, δ an update, n updates side by side, s seeds, c steps in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from zerosim.course.lost_updates.one_addition import neighbor_of, shortest, stored
from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to

Method = Literal["nothing", "fp32_master", "fp32_master_copy", "kahan", "kahan_fp32_remainder", "stochastic",
                 "stochastic_update_in_format"]  # fmt: skip
CHUNK = 4096  # steps whose random words are drawn at once


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where w has come after all steps, by one method in one format; means over all seeds where a method has seeds.

    ``share`` is the movement beside the one asked for: 1 is right, 0 all lost. ``moves`` counts the steps that changed
    w. ``remainder`` is what Kahan's method still holds back, and ``remainder_half_gap`` the smallest number that can be
    added to it. ``lowest``, ``highest`` and ``standard_error`` (of the mean result) are over the seeds.
    """

    method: Method
    format: str
    update: float
    result: float
    share: float
    moves: float
    remainder: float | None = None
    remainder_half_gap: float | None = None
    lowest: float | None = None
    highest: float | None = None
    standard_error: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """``steps`` times w + δ, for each of the updates δ."""

    weight: float
    updates: tuple[float, ...]
    steps: int

    def exact(self, update: float) -> float:
        """w + steps·δ of the decimal numbers, as they are written."""
        return float(Fraction(repr(self.weight)) + self.steps * Fraction(repr(update)))

    def share(self, start: float, result: float, update: float) -> float:
        """The movement from ``start``, beside steps·δ."""
        return (result - start) / (self.steps * update)


def all_outcomes(kernels: NumpyKernels, task: Task, formats: Sequence[str], seeds: Sequence[int]) -> Iterator[Outcome]:
    """Every method in every format in which it says something of its own, method by method."""
    low = [name for name in formats if name != "fp32"]
    for name in low:
        yield from plain(kernels, task, name)
    yield from master(kernels, task, low)
    for name in formats:
        yield from kahan(kernels, task, name, name)
    for name in low:
        yield from kahan(kernels, task, name, "fp32")
    rounded = {name: list(stochastic(kernels, task, name, seeds)) for name in formats}
    for method, names in (("stochastic", formats), ("stochastic_update_in_format", low)):
        for name in names:
            yield from (found for found in rounded[name] if found.method == method)


def plain(kernels: NumpyKernels, task: Task, fmt: str, method: Method = "nothing") -> Iterator[Outcome]:
    """w and δ in the format, and no cure."""
    w, delta = _start(kernels, task, fmt), stored(kernels, task.updates, fmt)
    start = w.copy()
    moves = _repeat(task.steps, w, lambda: kernels.add_rounded(w, delta, w))
    yield from _outcomes(method, fmt, task, start, w, moves)


def path(kernels: NumpyKernels, task: Task, fmt: str) -> Array:
    """w before the first step and after each of them, in the format and with no cure: (steps + 1, n), of its dtype."""
    w, delta = _start(kernels, task, fmt), stored(kernels, task.updates, fmt)
    found = np.empty((task.steps + 1, len(w)), w.dtype)
    found[0] = w
    for step in range(1, task.steps + 1):
        kernels.add_rounded(w, delta, w)
        found[step] = w
    return found


def master(kernels: NumpyKernels, task: Task, formats: Sequence[str]) -> Iterator[Outcome]:
    """w and δ in fp32; and the copy of w that each format would compute with."""
    found = list(plain(kernels, task, "fp32", "fp32_master"))
    yield from found
    for name in formats:
        copy = stored(kernels, [float(np.float32(outcome.result)) for outcome in found], name)
        moves = np.array([outcome.moves for outcome in found])
        yield from _outcomes("fp32_master_copy", name, task, _start(kernels, task, name), copy, moves)


def kahan(kernels: NumpyKernels, task: Task, fmt: str, remainder_fmt: str) -> Iterator[Outcome]:
    """Compensated summation: what an addition loses is kept in a remainder r and added the next time.

    y = δ + r; t = w + y; r = y + (w - t); w = t. w and t are in ``fmt``; δ, r and y in ``remainder_fmt``; each
    operation is made in fp32 and rounded once. Kahan 1965, "Further remarks on reducing truncation errors".
    """
    w, delta = _start(kernels, task, fmt), stored(kernels, task.updates, remainder_fmt)
    start, t, minus_t = w.copy(), np.empty_like(w), np.empty_like(w)
    r, y, back = (np.zeros_like(delta) for _ in range(3))

    def step() -> None:
        kernels.add_rounded(delta, r, y)
        _add(kernels, w, y, t)
        np.negative(t, out=minus_t)  # exact
        _add(kernels, w, minus_t, back)
        kernels.add_rounded(y, back, r)
        w[:] = t

    moves = _repeat(task.steps, w, step)
    method: Method = "kahan" if fmt == remainder_fmt else "kahan_fp32_remainder"
    yield from _outcomes(method, fmt, task, start, w, moves, remainders=r)


def stochastic(kernels: NumpyKernels, task: Task, fmt: str, seeds: Sequence[int]) -> Iterator[Outcome]:
    """w + δ rounded up or down by chance, so that it is right on average; δ in fp32, and δ first rounded to ``fmt``.

    The sum is made in float64, which holds it exactly in low precision: in fp32 a small δ would be lost before it is
    rounded. The bits are those of `numerics.random` for (seed, "lost updates", 0, format and update), word by step.
    """
    delta = np.array([stored(kernels, task.updates, name).astype(np.float64) for name in ("fp32", fmt)])  # (2, n)
    start = _start(kernels, task, fmt).astype(np.float64)
    w = np.broadcast_to(start[:, None], (*delta.shape, len(seeds))).copy()  # (2, n, s)
    moves = np.zeros(w.shape, np.int64)
    for words in _words(task, fmt, seeds):
        for bits in words:
            after = round_to(w + delta[:, :, None], fmt, "stochastic", bits=np.stack([bits, bits]))
            moves += after != w
            w = after
    methods: tuple[Method, Method] = ("stochastic", "stochastic_update_in_format")
    for i, method in enumerate(methods):
        for j, update in enumerate(task.updates):
            runs, mean = w[i, j], float(w[i, j].mean())
            with np.errstate(invalid="ignore"):  # runs that overflowed have no spread
                spread = float(runs.std())
            yield Outcome(method, fmt, update, mean, task.share(float(start[j]), mean, update),
                          float(moves[i, j].mean()), lowest=shortest(runs.min()), highest=shortest(runs.max()),
                          standard_error=spread / len(seeds) ** 0.5)  # fmt: skip


def _words(task: Task, fmt: str, seeds: Sequence[int]) -> Iterator[np.ndarray]:
    """The random words of all steps, chunk by chunk: (c, n, s)."""
    for first in range(0, task.steps, CHUNK):
        count = min(CHUNK, task.steps - first)
        yield np.array([[random.bits((seed, "lost updates", 0, f"{fmt} {update!r}"), first, count) for seed in seeds]
                        for update in task.updates]).transpose(2, 0, 1)  # fmt: skip


def _start(kernels: NumpyKernels, task: Task, fmt: str) -> Array:
    return stored(kernels, [task.weight] * len(task.updates), fmt)


def _add(kernels: NumpyKernels, a: Array, b: Array, out: Array) -> None:
    """out = a + b, added in fp32 and rounded once to out's type."""
    if a.dtype == b.dtype == out.dtype:
        kernels.add_rounded(a, b, out)  # the same bits, in a tenth of the time
    else:
        kernels.elementwise(np.add, a, b, out=out)


def _repeat(steps: int, w: Array, step: Callable[[], None]) -> np.ndarray:
    """Makes all steps; how many of them changed w, (n,)."""
    moves, before = np.zeros(len(w), np.int64), w.copy()
    for _ in range(steps):
        step()
        moves += before != w
        before[:] = w
    return moves


def _outcomes(method: Method, fmt: str, task: Task, start: Array, w: Array, moves: np.ndarray,
              remainders: Array | None = None) -> Iterator[Outcome]:  # fmt: skip
    for j, update in enumerate(task.updates):
        result = shortest(w[j])
        share = task.share(float(start[j]), float(w[j]), update)
        held = half_gap = None
        if remainders is not None:
            row = format_of(remainders.dtype)
            held, half_gap = shortest(remainders[j]), neighbor_of(float(remainders[j]), row, upward=update > 0)[1] / 2
        yield Outcome(method, fmt, update, result, share, float(moves[j]), held, half_gap)
