"""Lost updates: the small changes that a number format does not see, what helps, and what does not.

Everything is run with the package's own arithmetic; nothing is recited. Each of four sections computes its records, and
shows them under the run. The formats' ranges, and the weights at which fp32 itself loses the popular example's update,
are in notebook 2. Legend: w a weight, δ (delta) the update that is added to it, n updates side by side, s seeds,
c steps in a chunk; g a gradient, lr the learning rate, m and v Adam's averages of g and g². A *gap* is the distance
between two neighboring numbers of a format.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

import numpy as np

from zerosim.display.style import fitted, percent, rough, short, shortest
from zerosim.display.views import Heading, Part, View, marked_table, parts
from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.formats import FORMATS, Format, format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to, spacing
from zerosim.optim import SGD, Adam, Optimizer, Stepper
from zerosim.shown import Answer

# The numbers of a popular example: so small an update that its readers are advised to keep their weights in fp32.
POPULAR_LR = 0.001
POPULAR_GRADIENT = 0.00001
POPULAR_UPDATE = POPULAR_LR * POPULAR_GRADIENT
FIRST_GRADIENTS = (1.0, 1e-2, POPULAR_GRADIENT, 1e-8)
MOMENT_GRADIENT = 1e-3
MOMENT_STEPS = (1, 10, 100, 1000, 2000)
SEEDS = tuple(range(256))


@dataclass(frozen=True, slots=True)
class LostUpdatesQuestion:
    """A question: is w + δ lost in a format, and where does w come in so many steps?

    Raises ValueError for an unknown format, for a weight that is not finite or too large for the format, for an update
    that is 0 or not finite, and for fewer than one step.
    """

    format: str = "fp16"
    weight: float = 1.0
    update: float = 1e-5
    steps: int = 10_000

    def __post_init__(self) -> None:
        row = format_of(self.format)
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight must be a finite number, found {self.weight}")
        if not (math.isfinite(self.update) and self.update):
            raise ValueError(f"the update must be a finite number other than 0, found {self.update}")
        if self.steps < 1:
            raise ValueError(f"the update is added at least once, found steps={self.steps}")
        if not fits(row.name, self.weight):
            raise ValueError(f"{row.name} has no number as large as the weight {self.weight:g}: its largest is "
                             f"{row.largest:g}; take a smaller weight, or a format that reaches further")

    @property
    def updates(self) -> tuple[float, ...]:
        """The update asked for, and beside it that of the popular example."""
        return tuple(dict.fromkeys((self.update, POPULAR_UPDATE)))

    @property
    def formats(self) -> list[str]:
        """The format asked for, then the three in which models are trained; without those too small for the weight."""
        return [name for name in dict.fromkeys((self.format, "fp16", "bf16", "fp32")) if fits(name, self.weight)]


def fits(fmt: str, weight: float) -> bool:
    """True when a format has a finite number for the weight."""
    return math.isfinite(float(round_to(float(weight), fmt)))


@dataclass(frozen=True, slots=True)
class LostUpdates(Answer):
    """All answers. ``exact`` is w + steps·δ for each of ``updates``; ``seeds`` are those of stochastic
    rounding."""

    question: LostUpdatesQuestion
    additions: tuple[Addition, ...]
    updates: tuple[float, ...]
    exact: tuple[float, ...]
    seeds: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    first_steps: tuple[FirstStep, ...]
    thresholds: tuple[Threshold, ...]
    moments: tuple[Moments, ...]

    def view(self) -> View:
        """The four sections, for a terminal or a notebook."""
        return View("Lost updates", ": a small number is added to a larger one, and nothing changes.\n"
                    "A format has only so many numbers. A sum that falls between two of them becomes\n"
                    "the nearer one; halfway, the one whose last bit is 0 (the even one).",
                    parts(_addition(self), _cures(self), _sizes(self), _moments(self)))

    def outcome(self, method: Method, fmt: str, update: float) -> Outcome:
        """The outcome of one method in one format with one update."""
        return next(found for found in self.outcomes
                    if (found.method, found.format, found.update) == (method, fmt, update))


def lost_updates(question: LostUpdatesQuestion, *, seeds: tuple[int, ...] = SEEDS) -> LostUpdates:
    """Runs everything that the question needs: a few seconds for 10,000 steps."""
    task = Task(question.weight, question.updates, question.steps)
    fitting = [name for name in FORMATS if fits(name, question.weight)]
    low = [name for name in question.formats if name != "fp32"]
    return LostUpdates(
        question,
        tuple(add_once(name, question.weight, question.update) for name in FORMATS),
        task.updates,
        tuple(map(task.exact, task.updates)),
        seeds,
        tuple(all_outcomes(task, question.formats, seeds)),
        tuple(first_steps(question.format, question.weight, POPULAR_LR, FIRST_GRADIENTS)),
        tuple(adam_threshold(name, direction, question.weight) for name in fitting for direction in DIRECTIONS),
        tuple(row for name in ("fp32", *low) for row in moments(name, Adam(), MOMENT_GRADIENT, MOMENT_STEPS)))


# -- 1: one addition in one format, what becomes of it, and why -------------------------------------------------------

Why = Literal["kept", "below_half_gap", "tie_to_even", "update_rounds_to_zero", "overflows", "weight_too_large"]
VERDICTS: dict[Why, str] = {
    "kept": "kept",
    "below_half_gap": "[red]lost[/]: below half gap",
    "tie_to_even": "[red]lost[/]: tie, w is even",
    "update_rounds_to_zero": "[red]lost[/]: δ becomes 0",
    "overflows": "overflows",
    "weight_too_large": "w is too large",
}


@dataclass(frozen=True, slots=True)
class Addition:
    """w + δ in one format: ``lost`` is what the arithmetic did, ``why`` what the rule says about it.

    ``weight`` and ``update`` are w and δ as the format stores them, and ``moved`` is result - weight, exactly.
    ``neighbor`` is the next number on δ's side, infinite beyond the largest, and ``half_gap`` half the way to it.
    """

    format: str
    weight: float
    update: float
    neighbor: float
    half_gap: float
    weight_is_even: bool
    result: float
    moved: float
    lost: bool
    why: Why


def add_once(fmt: Format | str, weight: float, update: float) -> Addition:
    """w + δ, both stored in the format first, made by the kernels and explained by the rule.

    The rule: δ is lost if it is smaller than half the gap from w to its neighbor on δ's side; or just as large while
    w's last bit is 0, since ties go to the even neighbor. Below a power of two the gap is half of that above.
    """
    fmt = format_of(fmt)
    w, delta = stored([weight], fmt), stored([update], fmt)
    total = np.empty_like(w)
    NumpyKernels().add_rounded(w, delta, total)
    before, moved_by, after = (float(x[0]) for x in (w, delta, total))
    if not math.isfinite(before):
        return Addition(fmt.name, before, shortest(moved_by), math.nan, math.nan, False, math.nan, 0.0, True,
                        "weight_too_large")
    neighbor, gap = neighbor_of(before, fmt, upward=update > 0)
    even = abs(Fraction(before)) / Fraction(float(spacing(before, fmt))) % 2 == 0
    # A neighbor beyond the largest number has no value of its own, but the gap to it counts all the same.
    return Addition(fmt.name, shortest(before), shortest(moved_by), shortest(neighbor), gap / 2, even, shortest(after),
                    after - before, after == before, _why(moved_by, gap / 2, even, after))


def stored(values: Sequence[float], fmt: Format | str) -> Array:
    """The values (n,) as a format stores them: in its own array type, rounded once, to nearest even."""
    row = np.empty(len(values), format_of(fmt).dtype)
    NumpyKernels().cast_pack(np.array(values, np.float64), row)
    return row


def neighbor_of(number: float, fmt: Format, *, upward: bool) -> tuple[float, float]:
    """The next number of the format, and the gap to it. Beyond the largest number: infinity, and the last gap."""
    magnitude = abs(number)
    if number == 0.0 or (number > 0) == upward:
        gap = float(spacing(magnitude, fmt))
        beyond = magnitude + gap if magnitude + gap <= fmt.largest else math.inf
    else:
        beyond = float(round_to(np.nextafter(magnitude, 0.0), fmt, "toward_zero"))
        gap = magnitude - beyond
    return math.copysign(beyond, number) if number else (beyond if upward else -beyond), gap


def _why(update: float, half_gap: float, even: bool, result: float) -> Why:
    if update == 0:
        return "update_rounds_to_zero"
    if abs(update) < half_gap:
        return "below_half_gap"
    if abs(update) == half_gap and even:
        return "tie_to_even"
    return "kept" if math.isfinite(result) else "overflows"


def _addition(found: LostUpdates) -> Iterator[Part | str]:
    """w + δ in all formats, and why it is lost."""
    question = found.question
    yield Heading(1, f"One addition: {short(question.weight)} "
                     f"{'-' if question.update < 0 else '+'} {short(abs(question.update))}")
    yield marked_table("format", ">w", ">δ", ">half gap", ">w + δ", "w moves by",
                       rows=map(_addition_row, found.additions))
    yield "w and δ as each format stores them. The half gap is that on δ's side of w."


def _addition_row(a: Addition) -> tuple[str, ...]:
    if a.why == "weight_too_large":
        return a.format, "-", "-", "-", "-", VERDICTS[a.why]
    verdict = f"kept: {rough(a.moved, 5)}" if a.why == "kept" else VERDICTS[a.why]
    return a.format, fitted(a.weight), rough(a.update + 0.0, 4), rough(a.half_gap), fitted(a.result), verdict


# -- 2: the same small update added many times, with each of the known cures ------------------------------------------

Method = Literal["nothing", "fp32_master", "fp32_master_copy", "kahan", "kahan_fp32_remainder", "stochastic",
                 "stochastic_update_in_format"]
METHODS: dict[Method, str] = {
    "nothing": "no cure",
    "fp32_master": "fp32 master weight",
    "fp32_master_copy": "  its copy in the format",
    "kahan": "Kahan, all in the format",
    "kahan_fp32_remainder": "Kahan, remainder in fp32",
    "stochastic": "stochastic rounding",
    "stochastic_update_in_format": "  δ first in the format",
}
CHUNK = 4096  # steps whose random words are drawn at once


@dataclass(frozen=True, slots=True)
class Task:
    """``steps`` times w + δ, for each of the updates δ."""

    weight: float
    updates: tuple[float, ...]
    steps: int

    def start(self, fmt: str) -> Array:
        """w as the format stores it, once for each update (n,)."""
        return stored([self.weight] * len(self.updates), fmt)

    def exact(self, update: float) -> float:
        """w + steps·δ of the decimal numbers, as they are written."""
        return float(Fraction(repr(self.weight)) + self.steps * Fraction(repr(update)))

    def share(self, start: float, result: float, update: float) -> float:
        """The movement from ``start``, beside steps·δ."""
        return (result - start) / (self.steps * update)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of w after all steps, by one method in one format; means over all seeds where a method has seeds.

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


def all_outcomes(task: Task, formats: Sequence[str], seeds: Sequence[int]) -> Iterator[Outcome]:
    """Every method in every format in which it says something of its own, method by method."""
    low = [name for name in formats if name != "fp32"]
    for name in low:
        yield from uncured(task, name)
    yield from master(task, low)
    for name in formats:
        yield from kahan(task, name, name)
    for name in low:
        yield from kahan(task, name, "fp32")
    rounded = {name: list(stochastic(task, name, seeds)) for name in formats}
    for method, names in (("stochastic", formats), ("stochastic_update_in_format", low)):
        for name in names:
            yield from (found for found in rounded[name] if found.method == method)


def path_of(task: Task, fmt: str) -> Array:
    """w before the first step and after each of them, in the format and with no cure: (steps + 1, n), of its dtype."""
    w, delta, kernels = task.start(fmt), stored(task.updates, fmt), NumpyKernels()
    found = np.empty((task.steps + 1, len(w)), w.dtype)
    found[0] = w
    for step in range(1, task.steps + 1):
        kernels.add_rounded(w, delta, w)
        found[step] = w
    return found


def uncured(task: Task, fmt: str, method: Method = "nothing") -> Iterator[Outcome]:
    """w and δ in the format, and no cure."""
    path = path_of(task, fmt)
    yield from _outcomes(method, fmt, task, path[-1], np.count_nonzero(path[1:] != path[:-1], axis=0))


def master(task: Task, formats: Sequence[str]) -> Iterator[Outcome]:
    """w and δ in fp32; and the copy of w that each format would compute with."""
    found = list(uncured(task, "fp32", "fp32_master"))
    yield from found
    for name in formats:
        copy = stored([float(np.float32(outcome.result)) for outcome in found], name)
        yield from _outcomes("fp32_master_copy", name, task, copy, np.array([outcome.moves for outcome in found]))


def kahan(task: Task, fmt: str, remainder_fmt: str) -> Iterator[Outcome]:
    """Compensated summation: what an addition loses is kept in a remainder r and added the next time.

    y = δ + r; t = w + y; r = y + (w - t); w = t. w and t are in ``fmt``; δ, r and y in ``remainder_fmt``; each
    operation is made in fp32 and rounded once. Kahan 1965, "Further remarks on reducing truncation errors".
    """
    w, delta, kernels = task.start(fmt), stored(task.updates, remainder_fmt), NumpyKernels()
    t, minus_t = np.empty_like(w), np.empty_like(w)
    r, y, back = (np.zeros_like(delta) for _ in range(3))
    moves = np.zeros(len(w), np.int64)

    def add(a: Array, b: Array, out: Array) -> None:
        """out = a + b, added in fp32 and rounded once to out's type."""
        if a.dtype == b.dtype == out.dtype:
            kernels.add_rounded(a, b, out)  # the same bits, in less time
        else:
            kernels.cast_pack(a.astype(np.float32) + b.astype(np.float32), out)

    with np.errstate(all="ignore"):  # infinities and NaN are results
        for _ in range(task.steps):
            add(delta, r, y)
            add(w, y, t)
            np.negative(t, out=minus_t)  # exact
            add(w, minus_t, back)
            add(y, back, r)
            moves += t != w
            w[:] = t
    method: Method = "kahan" if fmt == remainder_fmt else "kahan_fp32_remainder"
    yield from _outcomes(method, fmt, task, w, moves, remainders=r)


def stochastic(task: Task, fmt: str, seeds: Sequence[int]) -> Iterator[Outcome]:
    """w + δ rounded up or down by chance, so that it is right on average; δ in fp32, and δ first rounded to ``fmt``.

    The sum is made in float64, which holds it exactly in low precision: in fp32 a small δ would be lost before it is
    rounded. The bits are those of `numerics.random` for (seed, "lost updates", 0, format and update), word by step.
    """
    delta = np.array([stored(task.updates, name).astype(np.float64) for name in ("fp32", fmt)])  # (2, n)
    start = task.start(fmt).astype(np.float64)
    w = np.broadcast_to(start[:, None], (*delta.shape, len(seeds))).copy()  # (2, n, s)
    moves = np.zeros(w.shape, np.int64)
    for words in _words(task, fmt, seeds):
        for bits in np.stack([words, words], axis=1):
            after = round_to(w + delta[:, :, None], fmt, "stochastic", bits=bits)
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
                          standard_error=spread / len(seeds) ** 0.5)


def _words(task: Task, fmt: str, seeds: Sequence[int]) -> Iterator[np.ndarray]:
    """The random words of all steps, chunk by chunk: (c, n, s)."""
    for first in range(0, task.steps, CHUNK):
        count = min(CHUNK, task.steps - first)
        yield np.array([[random.bits((seed, "lost updates", 0, f"{fmt} {update!r}"), first, count) for seed in seeds]
                        for update in task.updates]).transpose(2, 0, 1)


def _outcomes(method: Method, fmt: str, task: Task, w: Array, moves: np.ndarray,
              remainders: Array | None = None) -> Iterator[Outcome]:
    """An outcome for each update, by where w, the moves and the remainders (n,) have come."""
    for j, (update, start) in enumerate(zip(task.updates, task.start(fmt), strict=True)):
        held = half_gap = None
        if remainders is not None:
            row = format_of(remainders.dtype)
            held, half_gap = shortest(remainders[j]), neighbor_of(float(remainders[j]), row, upward=update > 0)[1] / 2
        yield Outcome(method, fmt, update, shortest(w[j]), task.share(float(start), float(w[j]), update),
                      float(moves[j]), held, half_gap)


def _cures(found: LostUpdates) -> Iterator[Part | str]:
    """The ends of w after all steps, by every method in every format."""
    question = found.question
    yield Heading(2, f"The cures: w = {short(question.weight)}, and δ is added {question.steps:,} times")
    columns = [name for update in found.updates for name in (f">δ = {fitted(update, 7)}", ">arrived")]
    exact = [cell for value in found.exact for cell in (fitted(value), "100 %")]
    rows, last = [("exact", "", *exact)], None
    for method, fmt in dict.fromkeys((outcome.method, outcome.format) for outcome in found.outcomes):
        cells = [cell for update in found.updates for cell in _outcome_cells(found, method, fmt, update)]
        rows.append((METHODS[method] if method != last else "", fmt, *cells))
        last = method
    yield marked_table("", "", *columns, rows=rows)
    yield "Arrived: how far w has moved, beside how far it should have moved."
    if any(outcome.share == 0 and _waits(outcome) for outcome in found.outcomes):
        yield "* Nothing is lost: w moves as soon as Kahan's remainder reaches half a gap."
    yield f"Stochastic rounding: the mean of {len(found.seeds)} seeds, and its uncertainty."


def _outcome_cells(found: LostUpdates, method: Method, fmt: str, update: float) -> tuple[str, str]:
    outcome = found.outcome(method, fmt, update)
    if outcome.share == 0:
        return fitted(outcome.result), "0 %" + "*" * _waits(outcome)
    if not math.isfinite(outcome.share):
        return rough(outcome.result), "-"
    if outcome.standard_error is None:
        return fitted(outcome.result), percent(outcome.share)
    error = outcome.standard_error / abs(update * found.question.steps)
    share = f"{100 * outcome.share:.0f}±{100 * error:.0f} %" if error < 9.5 else "noise"
    return fitted(round(outcome.result, 7), 9), share


def _waits(outcome: Outcome) -> bool:
    """True when w has not moved only because Kahan's remainder is below half a gap, but still grows."""
    return bool(outcome.remainder) and (outcome.remainder_half_gap or 0.0) <= abs(outcome.update)


# -- 3: how large an update is, SGD's beside Adam's, and the smallest learning rates that are not lost ----------------

Direction = Literal["down", "up"]
DIRECTIONS: tuple[Direction, ...] = ("down", "up")


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first updates of SGD and Adam, in fp32, and what w becomes of them in ``format``."""

    format: str
    gradient: float
    sgd_update: float
    sgd_result: float
    sgd_lost: bool
    adam_update: float
    adam_result: float
    adam_lost: bool


@dataclass(frozen=True, slots=True)
class Threshold:
    """The largest learning rate at which Adam's first step leaves w where it is, in one format and direction."""

    format: str
    direction: Direction
    lost_up_to: float


def first_update(optimizer: Optimizer, gradient: float) -> float:
    """The optimizer's first update of a weight, in fp32: its own step, made on a weight of 0."""
    stepper = Stepper(optimizer, np.zeros(1, np.float32))
    stepper.step(np.array([gradient]))
    return -float(stepper.weights[0])


def first_steps(fmt: str, weight: float, lr: float, gradients: Sequence[float]) -> Iterator[FirstStep]:
    """SGD's update is lr·g. Adam's is lr·g/(|g| + ε), which is lr whatever |g|, as long as |g| is larger than ε."""
    for gradient in gradients:
        sgd, adam = (first_update(optimizer, gradient) for optimizer in (SGD(lr), Adam(lr)))
        with_sgd, with_adam = (add_once(fmt, weight, -update) for update in (sgd, adam))
        yield FirstStep(fmt, gradient, shortest(sgd), with_sgd.result, with_sgd.lost,
                        shortest(adam), with_adam.result, with_adam.lost)


@cache
def adam_threshold(fmt: str, direction: Direction, weight: float) -> Threshold:
    """The largest learning rate that is lost, downwards (g = 1) or upwards (-1), by bisection over steps of Adam."""
    gradient = 1.0 if direction == "down" else -1.0

    def lost(lr: float) -> bool:
        return add_once(fmt, weight, -first_update(Adam(lr), gradient)).lost

    return Threshold(fmt, direction, last_that(lost, up_to=FORMATS["fp32"].largest))


def last_that(holds: Callable[[float], bool], *, up_to: float) -> float:
    """The largest float64 x in [0, up_to) for which ``holds(x)``, which is true from 0 on and false at the end.

    Found by bisection over the bits, whose order is that of the positive numbers: 63 questions at most.
    """
    numbers = range(int(np.float64(up_to).view(np.int64)))
    return _from_bits(bisect_left(numbers, True, key=lambda bits: not holds(_from_bits(bits))) - 1)


def _from_bits(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


def _sizes(found: LostUpdates) -> Iterator[Part | str]:
    """SGD's update beside Adam's, and the learning rates below which Adam's is lost."""
    fmt, weight = found.question.format, rough(found.question.weight, 6)
    yield Heading(3, f"SGD's update depends on g. Adam's does not. (lr = {POPULAR_LR:g}, w = {weight})")
    yield marked_table(">g", ">SGD: lr·g", f"w in {fmt}", ">Adam", f"w in {fmt}", rows=(
        (rough(s.gradient), rough(s.sgd_update), _verdict(s.sgd_lost, fitted(s.sgd_result)), rough(s.adam_update),
         _verdict(s.adam_lost, fitted(s.adam_result))) for s in found.first_steps))
    yield f"Adam's first update is lr·g/(|g| + ε), with ε = {Adam().epsilon:g}."
    yield "The largest lr at which it is lost:"
    limits = {(t.format, t.direction): rough(t.lost_up_to) for t in found.thresholds}
    yield marked_table("format", ">lr, downwards", ">lr, upwards", rows=(
        (name, limits[name, "down"], limits[name, "up"]) for name in dict.fromkeys(name for name, _ in limits)))


def _verdict(lost: bool, otherwise: str) -> str:
    return "[red]lost[/]" if lost else otherwise


# -- 4: Adam's moments m and v kept in few bits: an average that forgets slowly loses its small additions too ---------


@dataclass(frozen=True, slots=True)
class Moments:
    """m and v after t steps, kept in one format; the shares are of what they would be without rounding.

    ``update`` is what Adam would subtract from the weight, as a multiple of the learning rate: it should be 1.
    """

    format: str
    step: int
    m: float
    v: float
    m_share: float
    v_share: float
    update: float


def moments(fmt: str, adam: Adam, gradient: float, steps: Sequence[int]) -> Iterator[Moments]:
    """The package's Adam with a constant gradient: its m and v at the given steps, rounded to ``fmt`` after every step.

    The update is (m/correction1) / (√(v/correction2) + ε) of m and v as they are stored, in fp32: Adam's at a learning
    rate of 1.
    """
    stepper, g = Stepper(adam, np.zeros(1, np.float32)), np.array([gradient])
    for step in range(1, max(steps) + 1):
        stepper.step(g)
        for average in stepper.state.values():
            average[:] = round_to(average, fmt)
        if step in steps:
            m, v = (stepper.state[name][0] for name in ("m", "v"))
            corrections = 1.0 - adam.beta1**step, 1.0 - adam.beta2**step
            update = (m / corrections[0]) / (np.sqrt(v / corrections[1]) + adam.epsilon)
            yield Moments(fmt, step, shortest(m), shortest(v), float(m) / (corrections[0] * gradient),
                          float(v) / (corrections[1] * gradient**2), shortest(update))


def standing_ratios(fmt: Format | str, v: float, beta2: float) -> tuple[float, float]:
    """The g²/v between which v, a number of the format, is rounded to itself when Adam moves it.

    v moves by (1-β2)·(g² - v), and stands still where that is less than half the gap on its side; a first ratio below 0
    says that no g makes it smaller.
    """
    down, up = (neighbor_of(v, format_of(fmt), upward=upward)[1] / 2 / ((1.0 - beta2) * v) for upward in (False, True))
    return 1.0 - down, 1.0 + up


def _moments(found: LostUpdates) -> Iterator[Part | str]:
    """Adam's averages in few bits, for a gradient that never changes."""
    yield Heading(4, f"Adam's m and v in few bits, with g = {MOMENT_GRADIENT:g} in every step")
    at = {(row.format, row.step): row for row in found.moments}
    formats, steps = list(dict.fromkeys(fmt for fmt, _ in at)), list(dict.fromkeys(step for _, step in at))
    columns = [name for fmt in formats for name in (f">{fmt}: v", ">update")]
    yield marked_table(">step", *columns, rows=[
        (f"{step:,}", *(cell for fmt in formats for cell in (percent(at[fmt, step].v_share),
                                                             rough(at[fmt, step].update) + " lr")))
        for step in steps])
    yield "v beside what it would be without rounding. The update should always be 1 lr."
