"""For checking one's own code: hypothesis strategies, a single-device reference, equality of bits, gradients, memory,
and other orders of ranks (`explore`).

Legend: N ranks, n elements.
"""

from __future__ import annotations

import math
import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zerosim.models.layers import Context
from zerosim.models.passes import first_weights
from zerosim.models.small import MLP
from zerosim.models.units import Model, Unit
from zerosim.numerics.checks import check_array, is_count
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.kernels import NumpyKernels, do_nothing
from zerosim.numerics.policy import Policy
from zerosim.numerics.rounding import errors_in_ulps
from zerosim.optim.base import Optimizer
from zerosim.optim.stepper import Stepper
from zerosim.ranks.call import checked_cut
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.errors import PACKAGE
from zerosim.ranks.memory import Memory
from zerosim.ranks.races import RaceError as RaceError  # offered here
from zerosim.ranks.races import explore as explore
from zerosim.ranks.rank import Rank

if TYPE_CHECKING:
    from hypothesis import strategies as st
else:
    class LazyStrategies:
        """Hypothesis's strategies, imported when one is asked for: bits and gradients are compared without them."""

        def __getattr__(self, name: str) -> Any:
            try:
                from hypothesis import strategies
            except ImportError as error:  # pragma: no cover - the tests themselves need hypothesis
                raise ImportError("zerosim.testing draws test cases with hypothesis, which is not installed; "
                                  "pip install 'zerosim[test]'") from error
            return getattr(strategies, name)

    st = LazyStrategies()

AWKWARD = (0.0, -0.0, 1.0, -1.0, 1e-8, -3e-5, 6e-8, 0.1, 1 / 3, 300.0, -2049.0)


# -- Drawn test cases --------------------------------------------------------------------------------------------------


def worlds(largest: int = 9) -> st.SearchStrategy[int]:
    """Numbers of ranks, 1 included: never test with 2 alone, where every order of additions is the same."""
    return st.integers(1, largest)


def vectors(length: int, format: str = "fp32") -> st.SearchStrategy[np.ndarray]:
    """Arrays (n,) in a format: normal values of many magnitudes, strewn with zeros of both signs and tiny numbers.

    A counterexample shrinks towards ones, zeros, and a few other numbers where these do not show the mistake.
    """
    return _codes().map(lambda codes: _vector(codes, length, 0, format=format))


def gradients(ranks: int, length: int, format: str = "fp32") -> st.SearchStrategy[list[np.ndarray]]:
    """One vector (n,) for each rank, different on every rank: equal data could not show a missing average.

    They shrink towards 1 on rank 0, 2 on rank 1, and so on.
    """
    return _codes().map(lambda codes: [_vector(codes, length, rank, rank, format) for rank in range(ranks)])


@dataclass(frozen=True, eq=False)
class DrawnRun:
    """Weights (n,) in fp32, and gradients[step][rank] (n,), for a program of N ranks."""

    weights: np.ndarray
    gradients: list[list[np.ndarray]]

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.gradients[0])

    def __str__(self) -> str:
        sizes = ((self.ranks, "rank"), (len(self.weights), "element"), (len(self.gradients), "step"))
        return ", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in sizes)

    def __repr__(self) -> str:
        return f"weights: {self.weights.tolist()}" + "".join(
            f"\ngradients of step {step}: " + ", ".join(f"rank {rank} {g.tolist()}" for rank, g in enumerate(of_all))
            for step, of_all in enumerate(self.gradients, 1))


def cases(ranks: Sequence[int] = (1, 2, 3, 4), most_elements: int = 12, most_steps: int = 3,
          format: str = "fp32") -> st.SearchStrategy[DrawnRun]:
    """Weights and gradients of one to ``most_steps`` steps, on one of these numbers of ranks.

    A counterexample shrinks to few steps, ranks and elements, of which any may go, and to plain values.
    """
    most = max(ranks)
    rows = 1 + min(most, 8) * min(most_steps, 4)

    def case(steps: list[int], numbers: list[int], elements: list[bytes]) -> DrawnRun:
        codes = np.frombuffer(b"".join(elements), np.uint8).reshape(-1, rows).T
        return DrawnRun(_vector(codes, len(elements), 0), [[
            _vector(codes, len(elements), 1 + step + number * most_steps, rank, format)
            for rank, number in enumerate(numbers)] for step in steps])

    def some(of: int, counts: Sequence[int]) -> st.SearchStrategy[list[int]]:
        return st.sampled_from(sorted(counts)).flatmap(
            lambda count: st.lists(st.sampled_from(range(of)), min_size=count, max_size=count, unique=True))

    elements = st.integers(0, 7).flatmap(lambda drawn: st.lists(  # seldom none
        st.binary(min_size=rows, max_size=rows), min_size=min(drawn, most_elements, 1), max_size=most_elements))
    return st.builds(case, some(most_steps, range(1, most_steps + 1)), some(most, ranks), elements)


def splits(length: int, ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Any N+1 rising boundaries from 0 to n: uneven chunks and empty ones."""
    inner = st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1)
    return inner.map(lambda bounds: (0, *sorted(bounds), length))


def formats() -> st.SearchStrategy[str]:
    """Names of number formats in which training makes sense: 16 bit and 32."""
    return st.sampled_from([name for name, row in FORMATS.items() if row.bits >= 16])


def ulps_apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The number of steps from one number of the format to the next between two arrays' elements; (n,) int64.

    Floats of 8 to 32 bits, of one dtype and shape; +0 and -0 are 0 apart. Raises ValueError for other arrays, or a NaN.

    >>> ulps_apart(np.float32([1, 0.0]), np.float32([1 + 2**-22, -0.0])).tolist()
    [2, 0]
    """
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype not in {fmt.dtype for fmt in FORMATS.values()}:
        raise ValueError(f"ulps_apart takes two arrays of one of the formats and of one shape, found "
                         f"{a.dtype} {a.shape} and {b.dtype} {b.shape}")
    if np.isnan(a.astype(np.float64)).any() or np.isnan(b.astype(np.float64)).any():
        raise ValueError("ulps_apart found a NaN, which lies nowhere among the numbers")
    distance: np.ndarray = np.abs(_place(a) - _place(b))
    return distance


def _place(x: np.ndarray) -> np.ndarray:
    """Each number's place in the order of all numbers of its format, 0 for both zeros."""
    bits = x.view(f"u{x.dtype.itemsize}").astype(np.int64)
    sign = np.int64(1) << (8 * x.dtype.itemsize - 1)
    return np.where(bits & sign, -(bits & ~sign), bits)


def policies() -> st.SearchStrategy[Policy]:
    """Precision policies of any combination of formats."""
    return st.builds(Policy, formats(), reduce=st.none() | formats(), accumulate=st.none() | formats())


def models() -> st.SearchStrategy[Model]:
    """Small MLPs of odd widths, some with fewer parameters than ranks."""
    widths = st.lists(st.integers(1, 6), min_size=2, max_size=4)
    return st.builds(lambda widths, activation, seed: MLP(widths, activation=activation, seed=seed), widths,
                     st.sampled_from(["relu", "gelu"]), st.integers(0, 99))


def batches(model: Model, ranks: int, micro_batches: int = 1, rows: int = 2) -> st.SearchStrategy[list[Any]]:
    """batches[rank][j] = (x (rows, I), target (rows, O)) for an MLP, different everywhere."""
    first, last = model.shapes[next(iter(model.shapes))], model.units[-1].shapes
    outputs = next(iter(last.values()))[-1]

    def build(codes: np.ndarray) -> list[Any]:
        arrays = [_vector(codes, rows * width, number, number, spread="normal").reshape(rows, width)
                  for number, width in enumerate([first[0], outputs] * (ranks * micro_batches))]
        pairs = list(zip(arrays[::2], arrays[1::2], strict=True))
        return [pairs[rank * micro_batches:(rank + 1) * micro_batches] for rank in range(ranks)]

    return _codes().map(build)


# A value is drawn as a code of 8 bits, and such codes shrink one by one. There is a row of them for each of the first
# arrays, a column for each of its first elements; what lies beyond has the same codes. So no draw is of another size
# for other ranks or elements, where hypothesis would begin anew with its values.
ROWS, COLUMNS = 8, 8
PLAIN = (0.0, -1.0, 0.5, 2.0, 3.0, -0.0, 0.25)  # of codes 1, 2, ...; large codes have a value for each place


def _codes() -> st.SearchStrategy[np.ndarray]:
    return st.binary(min_size=ROWS * COLUMNS, max_size=ROWS * COLUMNS).map(
        lambda drawn: np.frombuffer(drawn, np.uint8).reshape(ROWS, COLUMNS))


def _vector(codes: np.ndarray, length: int, row: int, plainest: int = 0, format: str = "fp32",
            spread: Literal["wide", "normal"] = "wide") -> np.ndarray:
    """The vector (n,) of a row of codes: ``plainest`` + 1 where the code is 0."""
    values, place = _values(spread), np.arange(length)
    code = codes[row % len(codes), place % codes.shape[1]].astype(np.int64) if length else place
    known = np.array([plainest + 1.0, *PLAIN, *(AWKWARD * 4 if spread == "wide" else ())])
    with np.errstate(all="ignore"):
        return np.where(code < len(known), known[np.minimum(code, len(known) - 1)],
                        values[(code * 257 + row * 1009 + place * 4001) % len(values)]).astype(format_of(format).dtype)


@cache
def _values(spread: Literal["wide", "normal"]) -> np.ndarray:
    """Random numbers (65536,), of many magnitudes or of one."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1 << 16)
    return values * 10.0 ** rng.integers(-6, 2, len(values)) if spread == "wide" else values


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: str = "arrays") -> None:
    """Passes when dtype, shape and every bit agree; -0.0 is not 0.0, and a NaN equals one of the same bits.

    Raises AssertionError as `assert_agrees` does.
    """
    assert_agrees(found, expected, what)


def assert_agrees(found: np.ndarray, expected: np.ndarray, what: str = "arrays", *, ulps: float = 0,
                  scale: float = 0.0) -> None:
    """Passes when every bit agrees, or no element is more than so many ``ulps`` from the one that is expected.

    An ULP is the step to the next number of the format. Numbers smaller than ``scale`` have the ULP of that number:
    where large numbers cancel, what is left has their errors. Raises AssertionError that says how many elements differ,
    which is the first and which the farthest, by how many ULPs, and what both arrays have there; ValueError for what is
    no array, whose bits nobody knows.
    """
    differing, apart = _differing(found, expected, what, ulps, scale)
    if not differing.size:
        return
    said = f"{what}: {differing.size} of {found.size} elements differ; first {_shown(found, expected, differing[0])}"
    if apart is not None:
        farthest = int(np.argmax(apart))
        said += f"; farthest, by {apart[farthest]:.3g} ULP, {_shown(found, expected, differing[farthest])}"
        if not ulps:
            said += (". Another order of operations differs by some ULPs and is no mistake: where yours is another, "
                     "say by how many, as assert_agrees(..., ulps=2)")
    raise AssertionError(said)


def _differing(found: np.ndarray, expected: np.ndarray, what: str, ulps: float,
               scale: float) -> tuple[np.ndarray, np.ndarray | None]:
    """The numbers of the elements whose bits differ (k,), in C order, and by how many ULPs (k,), if of a format: none
    where all are within ``ulps``. Raises as `assert_agrees` for another type or shape."""
    given: dict[str, Any] = {"found": found, "expected": expected}
    for name, value in given.items():
        if not isinstance(value, np.generic):  # an element of an array has its bits too
            check_array("assert_agrees", name, value)
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise AssertionError(f"{what}: found {found.dtype} of shape {found.shape}, "
                             f"expected {expected.dtype} of shape {expected.shape}")
    differing = np.flatnonzero(_bits(found) != _bits(expected))
    if not differing.size or found.dtype not in {fmt.dtype for fmt in FORMATS.values()}:
        return differing, None
    apart = errors_in_ulps(found.reshape(-1)[differing], expected.reshape(-1)[differing], scale)
    return (differing[:0] if ulps and apart.max() <= ulps else differing), apart


def _bits(x: np.ndarray) -> np.ndarray:
    bits: np.ndarray = np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")
    return bits


def _shown(found: np.ndarray, expected: np.ndarray, at: int) -> str:
    place = at if found.ndim == 1 else tuple(map(int, np.unravel_index(at, found.shape)))
    return (f"at {place}: found {found.reshape(-1)[at]!r} ({_bits(found)[at]:#x}), expected "
            f"{expected.reshape(-1)[at]!r} ({_bits(expected)[at]:#x})")


Update = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


@dataclass
class SingleDevice:
    """A reference: one device, fed with the mean of N ranks' gradients.

    ``update`` is an optimizer of zerosim's or anybody's function of weights, mean gradient and the number of the step,
    from 1, that returns the new weights; between steps they stay in the type that it returns. ``mean`` is "ring", or
    anybody's function of a list of N gradients. In the order of a ring an element that rank c owns is the sum
    g[c+1] + g[c+2] + ... + g[c], each addition rounded to the gradients' format, then cast to fp32 and divided by N.
    ``weights`` may have any shape; ``splits`` (None: the ceil cut) counts their elements in C order, as a flat vector
    has them. Keep its ``splits`` equal to yours.
    """

    update: Optimizer | Update
    weights: np.ndarray
    ranks: int
    splits: Sequence[int] | None = None
    mean: Literal["ring"] | Callable[[Sequence[np.ndarray]], np.ndarray] = "ring"
    steps_taken: int = 0
    stepper: Stepper | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a mean needs the gradients of at least one rank, found ranks={self.ranks}")
        if self.mean != "ring" and not callable(self.mean):
            raise ValueError(f"mean={self.mean!r} must be 'ring', or a function of the list of all ranks' gradients")
        if self.mean != "ring" and self.splits is not None:
            raise ValueError("splits= say which rank begins a ring's sum, and mean= adds in an order of its own; leave "
                             "one of the two out")
        if isinstance(self.update, Optimizer):
            self.weights = np.array(self.weights, np.float32)
            self.stepper = Stepper(self.update, self.weights)
        elif isinstance(self.update, type) or not isinstance(self.update, Callable):  # type: ignore[arg-type]
            raise ValueError("a reference updates by an optimizer with its settings, or by a function of weights, mean "
                             f"gradient and the step's number, found {self.update!r}; write zs.optim.Adam(lr=...)")

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The optimizer's state by name; a function has its own."""
        return {} if self.stepper is None else self.stepper.state

    def step(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """One step on the gradients of N ranks, of the weights' shape; returns the new weights, fp32.

        Raises ValueError for another number of gradients than ranks, and for new weights of another shape.
        """
        shape, found = self.weights.shape, [(np.shape(g), np.asarray(g).dtype) for g in gradients]
        if len(found) != self.ranks or len(set(found)) != 1 or found[0][0] != shape:
            raise ValueError(
                f"asked for one gradient from each of {self.ranks} ranks, of shape {shape} and "
                f"one dtype, found {len(found)}: {', '.join(f'{shape} {dtype}' for shape, dtype in found)}"
            )
        mean = self._ring_mean(gradients) if self.mean == "ring" else self.mean(gradients)
        self.steps_taken += 1
        if self.stepper is not None:
            self.stepper.step(mean)
        elif not isinstance(self.update, Optimizer):
            updated = self.update(self.weights.copy(), mean, self.steps_taken)
            if np.shape(updated) != shape:
                raise ValueError(f"the reference returned {type(updated).__name__} of shape {np.shape(updated)}, and "
                                 f"the weights have {shape}; return the new weights")
            self.weights = np.asarray(updated)
        return self.weights.astype(np.float32)

    def _ring_mean(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """The sum in the order of a ring, divided by N, fp32 of the gradients' shape."""
        kernels, flat = NumpyKernels(), [np.ravel(one) for one in gradients]
        total, mean = np.empty_like(flat[0]), np.empty(np.shape(gradients[0]), np.float32)
        cut = checked_cut(self.splits, len(total), self.ranks)
        for c in range(self.ranks):
            own = slice(cut[c], cut[c + 1])
            partial = flat[(c + 1) % self.ranks][own].copy()
            for step in range(2, self.ranks + 1):
                kernels.add_rounded(partial, flat[(c + step) % self.ranks][own], partial)
            total[own] = partial
        kernels.gradient_block(total, self.ranks, 1.0, mean.reshape(-1))
        return mean


# -- A sharded run beside one device -----------------------------------------------------------------------------------

MOST_ROWS, MOST_COLUMNS, MOST_RANGES = 6, 8, 3  # of a report's table, and of one of its cells
Program = Callable[[Rank, np.ndarray, list[np.ndarray]], Iterable[np.ndarray]]


def assert_runs_agree(found: Sequence[Sequence[np.ndarray]], expected: Sequence[np.ndarray], what: str = "the run", *,
                      ulps: float = 0, scale: float = 0.0) -> None:
    """Passes when the weights found[rank][step] agree, on every rank and after every step, with expected[step].

    ``ulps`` and ``scale`` are those of `assert_agrees`. Raises AssertionError with the step, rank and element of the
    first difference, its bits, and a table of which elements differ on which ranks from step to step.
    """
    differing: dict[tuple[int, int], np.ndarray] = {}
    first = ""
    for step, right in enumerate(expected):
        for rank, of_rank in enumerate(found):
            if len(of_rank) != len(expected):
                raise AssertionError(f"{what}: rank {rank} has the weights after {len(of_rank)} steps, expected after "
                                     f"{len(expected)}; return, or yield, the weights after each step")
            which, apart = _differing(of_rank[step], right, f"{what}, step {step + 1}, rank {rank}", ulps, scale)
            if which.size:
                differing[step, rank] = which
                first = first or (f"first at step {step + 1}, rank {rank}, element "
                                  f"{_shown(of_rank[step], right, which[0]).removeprefix('at ')}"
                                  + ("" if apart is None else f", {apart[0]:.3g} ULP apart"))
    if differing:
        raise AssertionError("\n".join([f"{what}: the weights differ from step {min(differing)[0] + 1} on", first,
                                        "the elements that differ:", *_table(differing, len(expected))]))


def check_sharded(program: Program, reference: Optimizer | Callable[[], Update], *,
                  ranks: int | Sequence[int] = (1, 2, 3, 4), most_elements: int = 12, most_steps: int = 3,
                  format: str = "fp32", splits: Callable[[int, int], Sequence[int]] | None = None,
                  mean: Literal["ring"] | Callable[[Sequence[np.ndarray]], np.ndarray] = "ring", ulps: float = 0,
                  scale: float = 0.0, examples: int | None = None) -> None:
    """Runs a sharded training step on drawn weights and gradients, for each of many numbers of ranks, elements and
    steps, and compares all weights after every step with those of one device.

    ``program(rank, weights, gradients)`` has copies of the first weights (n,) and of this rank's gradients (n,), one a
    step, and yields (or returns in a list) all n weights after each step. ``reference`` is an optimizer, or what makes
    an update of anybody's, as `SingleDevice` takes it: one for each case. ``splits(length, ranks)`` is the cut, where
    it is another than the ceil cut. ``examples`` cases are drawn, or as many as hypothesis's setting max_examples says.

    Raises AssertionError with the smallest case that was found, of the fewest steps, ranks and elements, and the
    report of `assert_runs_agree`; what the program raises comes through, with its case as a note.
    """
    __tracebackhide__ = True
    from hypothesis import HealthCheck, Phase, given, settings

    numbers = sorted({ranks} if isinstance(ranks, int) else set(ranks))
    if not numbers or not all(is_count(number) and number > 0 for number in numbers):
        raise ValueError(f"check_sharded runs on numbers of ranks, 1 or more, found ranks={ranks!r}; pass some, as "
                         "(1, 2, 3, 4)")
    name = getattr(program, "__name__", repr(program))

    def device_of(weights: np.ndarray, ranks: int) -> SingleDevice:
        makes_one = not isinstance(reference, Optimizer | type) and callable(reference)  # what is neither is refused
        update: Any = reference() if makes_one else reference  # type: ignore[operator]
        return SingleDevice(update, weights, ranks, None if splits is None else splits(len(weights), ranks), mean)

    def compare(case: DrawnRun) -> None:
        device = device_of(case.weights, case.ranks)
        expected = [device.step(of_all).copy() for of_all in case.gradients]
        try:
            found = Cluster(case.ranks).run(lambda rank: [np.array(after) for after in islice(program(
                rank, case.weights.copy(), [g[rank.index].copy() for g in case.gradients]), len(expected) + 1)])
        except Exception as error:
            error.add_note(f"{name} on {case}\n{case!r}")
            raise
        try:
            assert_runs_agree(found, expected, f"{name} on {case}", ulps=ulps, scale=scale)
        except AssertionError as error:
            raise _Differs(f"{error}\n{case!r}") from None

    device_of(np.zeros(1, np.float32), numbers[0])
    check = given(cases(numbers, most_elements, most_steps, format))(compare)
    options: dict[str, Any] = {} if examples is None else {"max_examples": examples}
    try:
        settings(deadline=None, database=None, phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
                 suppress_health_check=[*HealthCheck], **options)(check)()
    except _Differs as error:
        raise AssertionError(str(error)) from None


class _Differs(AssertionError):
    """A difference that `check_sharded` has found, which an assertion of the program's is not."""


def _table(differing: Mapping[tuple[int, int], np.ndarray], steps: int) -> list[str]:
    """Lines of steps by ranks: which elements differ, from the first step that has some on."""
    ranks = sorted({rank for _, rank in differing})
    rows = [["step", *(f"rank {rank}" for rank in ranks[:MOST_COLUMNS])]]
    first = min(differing)[0]
    rows += [[str(step + 1), *(_ranges(differing.get((step, rank), np.empty(0, int))) for rank in ranks[:MOST_COLUMNS])]
             for step in range(first, min(steps, first + MOST_ROWS))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = [f"{count} more {noun}" for count, noun in (
        (steps - first - MOST_ROWS, "steps"), (len(ranks) - MOST_COLUMNS, "ranks that differ")) if count > 0]
    return [*lines, *more]


def _ranges(elements: np.ndarray) -> str:
    """Rising numbers in short: 0-2, 5; a dash for none."""
    parts = np.split(elements, np.flatnonzero(np.diff(elements) != 1) + 1) if elements.size else []
    shown = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts]
    return ", ".join(shown[:MOST_RANGES]) + f", ... ({elements.size})" * (len(shown) > MOST_RANGES) or "-"


# -- Gradients ---------------------------------------------------------------------------------------------------------

# Relative to a weight of 1 or more. At a kink, as a ReLU's, the slope changes within a large step; the next is smaller.
STEPS = (1e-4, 1e-5, 1e-6)
# A forward rounds its result by some dozens of float64's roundings; four of them are divided by the step.
ROUNDINGS = 100


@dataclass(frozen=True, slots=True)
class ComparedGradient:
    """One element of a gradient, as backward returned it and as central differences give it; ``bound`` is the most by
    which they may differ."""

    name: str
    index: tuple[int, ...]
    found: float
    expected: float
    bound: float

    @property
    def error(self) -> float:
        """The distance beside the bound: more than 1 is wrong; NaN is inf."""
        distance = abs(self.found - self.expected) / self.bound
        return math.inf if math.isnan(distance) else distance

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return (f"the gradient of {self.name}{place} is {self.found:.12g} where central differences give "
                f"{self.expected:.12g}, with a bound of {self.bound:.1e}")


def check_gradients(checked: Model | Unit, x: np.ndarray, target: np.ndarray | None = None, *,
                    weights: Mapping[str, np.ndarray] | None = None, elements: int | None = 64,
                    seed: int = 0) -> ComparedGradient:
    """Compares backward with central differences of forward, in float64; returns the element with the largest error.

    Of a Model, the gradient of its loss by each parameter; of a Unit, that of Σ c·y, with random c, by each parameter
    and by its input. ``weights`` are by name, the first values if none are given: where all of a parameter is 0, some
    mistakes cannot show. ``elements`` of each array are tried, drawn by ``seed`` (None: all), and each takes four
    forwards or more. The difference quotient (8(f(w+h) - f(w-h)) - f(w+2h) + f(w-2h))/12h errs by h⁴ times a fifth
    derivative, and by the roundings of f, from which the bound is made.

    Raises AssertionError that names the parameter, the index, both values and the bound; also for a gradient that is
    missing or of another shape, and where forward writes to its input or its weights. Between forward and backward the
    weights are overwritten with NaN, as ZeRO-3 frees them: a unit that saves them has NaN for a gradient.
    """
    of = _Differentiated(checked, x, target, weights, seed)
    found = of.gradients()
    worst: ComparedGradient | None = None
    for number, (name, array) in enumerate(of.arrays.items()):
        gradient = found.get(name)
        if gradient is not None and gradient.shape != array.shape:
            raise AssertionError(f"{of.where}: the gradient of {name} has the shape {gradient.shape}, and {name} "
                                 f"{array.shape}; backward returns one of the same shape")
        gradient = np.zeros(array.shape) if gradient is None else gradient.astype(np.float64)
        tried = np.arange(array.size)
        if elements is not None and elements < array.size:
            tried = np.sort(np.random.default_rng([seed, number]).choice(array.size, elements, replace=False))
        compared = [of.compared(name, int(place), float(gradient.reshape(-1)[place])) for place in tried]
        wrong = [one for one in compared if one.error > 1]
        if wrong:
            nan = ("; a gradient that is not written is NaN, and so are weights between forward and backward, so look "
                   "for one, or a view of one, among what forward saves") if math.isnan(wrong[0].found) else ""
            raise AssertionError(f"{of.where}: {wrong[0]}; {len(wrong)} of the {len(compared)} elements that were "
                                 f"tried are wrong{nan}")
        worst = max([worst, *compared] if worst else compared, key=lambda one: one.error, default=None)
    if worst is None:
        raise ValueError(f"{of.where}: there is no gradient to check, since no parameter and no input has an element")
    return worst


def _of(unit: Unit, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of a unit's parameters, and of those that it ties to."""
    return {name: weights[name] for name in (*unit.shapes, *unit.tied_weights)}


class _Differentiated:
    """A function of weights and inputs whose gradient is checked: a model's loss, or Σ c·y of a unit."""

    def __init__(self, checked: Model | Unit, x: np.ndarray, target: np.ndarray | None,
                 weights: Mapping[str, np.ndarray] | None, seed: int) -> None:
        if not isinstance(checked, Model | Unit):
            raise ValueError(f"check_gradients takes a Model or a Unit, found {type(checked).__name__}; make a Unit of "
                             "a function of your own")
        if (target is None) == isinstance(checked, Model):
            raise ValueError("check_gradients takes x and a target for a model, whose loss compares them, and x alone "
                             f"for a unit; found {'no target' if target is None else 'a target'}")
        self.units = checked.units if isinstance(checked, Model) else (checked,)
        self.loss = checked.loss if isinstance(checked, Model) else None
        self.where = "the model" if isinstance(checked, Model) else f"unit {checked.name!r}"
        self.seed = seed
        if target is not None:
            check_array("check_gradients", "target", target)
        self.target = target if target is None or target.dtype.kind in "iu" else target.astype(np.float64)
        if weights is None:
            weights = first_weights(checked if isinstance(checked, Model) else Model([checked]))
        names = [name for unit in self.units for name in (*unit.shapes, *unit.tied_weights)]
        missing = [name for name in names if name not in weights]
        if missing:
            raise ValueError(f"check_gradients was given no weights for {', '.join(missing)}; hand over all by name")
        self.weights = {name: np.array(w, np.float64) for name, w in weights.items()}
        self.x = np.array(x) if self.units[0].integer_inputs else np.array(x, np.float64)
        for name, array in {"x": self.x, **self.weights}.items():
            if not np.all(np.isfinite(array)):
                raise ValueError(f"check_gradients was given inf or NaN in {name}, where there is no gradient; take "
                                 "finite numbers")
        inputs = {} if self.units[0].integer_inputs or isinstance(checked, Model) else {"the input": self.x}
        self.arrays = {name: self.weights[name] for name in names} | inputs
        self.context = replace(Context.standalone(Policy("fp64")), gradients=lambda unit: {
            name: np.full_like(w, np.nan) for name, w in _of(unit, self.weights).items()})
        self.scale = 0.0

    def value(self) -> tuple[float, float]:
        """The function at the weights and the input that are here now, and the magnitudes of what it adds up, which its
        bound is measured by."""
        y = self.x
        for unit in self.units:
            y, _ = unit.forward(self.context, _of(unit, self.weights), y)
        if self.loss is None or self.target is None:
            terms = y * self._coefficients(y.shape)
            return float(np.sum(terms)), float(np.sum(np.abs(terms)))
        loss = self.loss.forward(self.context, y, self.target)[0]
        return loss, abs(loss)

    def gradients(self) -> dict[str, np.ndarray | None]:
        """The gradients that backward returns, by name, and what their bound is measured by."""
        at_first = {name: array.copy() for name, array in (*self.weights.items(), ("x", self.x))}
        y, saved, tape = self.x, None, []
        for unit in self.units:
            w = {name: array.copy() for name, array in _of(unit, self.weights).items()}
            y, saved = unit.forward(self.context, w, y)
            tape.append(saved)
            for name, array in w.items():
                if not np.array_equal(array, at_first[name]):
                    raise AssertionError(f"{self.where}: the forward of {unit.name!r} writes to its weight {name}")
                array.fill(np.nan)
        if not np.array_equal(self.x, at_first["x"]):
            raise AssertionError(f"{self.where}: the forward of {self.units[0].name!r} writes to its input, which the "
                                 "unit before may have saved")
        dy: np.ndarray | None
        if self.loss is None or self.target is None:
            dy = self._coefficients(y.shape)
            self.scale = float(np.sum(np.abs(y * dy)))
        else:
            loss, saved = self.loss.forward(self.context, y, self.target)
            dy = self.loss.backward(self.context, saved, 1.0)
            self.scale = abs(loss) + float(np.sum(np.abs(y * dy)))
        found: dict[str, np.ndarray | None] = {}
        for unit, saved in zip(reversed(self.units), reversed(tape), strict=True):
            if dy is None:
                raise AssertionError(f"{self.where}: {unit.name!r} needs the gradient of its output, and the unit "
                                     "after it has returned none; only the first unit may leave its input's out")
            dy, found_here = unit.backward(self.context, _of(unit, self.weights), saved, dy)
            of_unit: Mapping[str, np.ndarray | None] = found_here
            if wrong := sorted(of_unit.keys() ^ {*unit.shapes, *unit.tied_weights}):
                raise AssertionError(f"{self.where}: the backward of {unit.name!r} returns gradients by name, one for "
                                     "each parameter, None for one that was not used; missing or unknown: "
                                     f"{', '.join(wrong)}")
            for name, gradient in of_unit.items():
                before = found.get(name)
                found[name] = gradient if before is None else before if gradient is None else before + gradient
        if dy is None:
            self.arrays.pop("the input", None)  # a first unit's
        return found | {"the input": dy}

    def compared(self, name: str, place: int, found: float) -> ComparedGradient:
        """One element beside difference quotients with smaller and smaller steps, until they agree."""
        row = self.arrays[name].reshape(-1)
        index = tuple(map(int, np.unravel_index(place, self.arrays[name].shape)))
        first: ComparedGradient | None = None
        for step in STEPS:
            h, kept = step * max(1.0, abs(row[place])), row[place]
            values, scale = [], max(self.scale, float(np.finfo(np.float64).tiny))
            for shift in (h, -h, 2 * h, -2 * h):
                row[place] = kept + shift
                value, magnitude = self.value()
                values.append(value)
                scale = max(scale, magnitude)
            row[place] = kept
            expected = (8 * (values[0] - values[1]) - values[2] + values[3]) / (12 * h)
            bound = float(ROUNDINGS * np.finfo(np.float64).eps * scale / h)
            result = ComparedGradient(name, index, found, expected, bound)
            if result.error <= 1:
                return result
            first = first or result
        assert first is not None
        return first

    def _coefficients(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([self.seed, 1]).standard_normal(shape)


# -- Memory ------------------------------------------------------------------------------------------------------------


def check_memory(checked: Model | Unit, x: np.ndarray, target: np.ndarray | None = None, *,
                 policy: Policy | str = "fp32", keep: str = "all") -> None:
    """Looks for arrays that a layer makes by itself, as ``x @ w`` does: no rank's memory has them, and so peaks and
    plans are too small by their bytes.

    A forward and a backward are run, and at each line of a program of one's own Python's tracemalloc says which arrays
    there are that such a line has made; those that live within one line go unseen. Of a Unit, the gradient of its
    output is all ones. ``keep`` is what units keep of their inside, as `Recompute` names it.

    Raises AssertionError that names the bytes, the unit and pass in which they were most, and the lines that made them.
    """
    if not isinstance(checked, Model | Unit):
        raise ValueError(f"check_memory takes a Model or a Unit, found {type(checked).__name__}; make a Unit of a "
                         "function of your own")
    check_array("check_memory", "x", x)
    if target is not None:
        check_array("check_memory", "target", target)
        target = target.astype(np.float32) if target.dtype == np.float64 else target  # as an engine rounds it
    audit = _Audit(checked, Policy.of(policy), keep)
    audit.run(x, target)
    if audit.most_nbytes:
        made = ", ".join(f"{place} makes {nbytes:,} of them" for place, nbytes in audit.lines)
        raise AssertionError(f"peaks are too small by {audit.most_nbytes:,} bytes in {audit.where}, of arrays that no "
                             f"memory counts: {made}. Make arrays by ctx.empty(shape), and let ctx.kernels, or NumPy "
                             "by out=, write to them")


class _Audit:
    """A pass whose context allocates from a memory, and the most bytes of other arrays that it ever held: in what, and
    the lines that made them."""

    def __init__(self, checked: Model | Unit, policy: Policy, keep: str) -> None:
        self.model, kernels = checked if isinstance(checked, Model) else None, NumpyKernels()
        self.units = checked.units if isinstance(checked, Model) else (checked,)
        self.memory = Memory("the audit", kernels, None, debug=False)
        self.context = Context(np, policy, kernels, self.memory, do_nothing, self._fresh, keep=keep)
        first = first_weights(self.model or Model([*self.units]))
        self.weights = {name: self.context.cast(w) for name, w in first.items()}
        self.most_nbytes, self.where, self.phase = 0, "", ""
        self.lines: list[tuple[str, int]] = []

    def run(self, x: np.ndarray, target: np.ndarray | None) -> None:
        """Forward and backward, unit by unit."""
        y, tape = x if self.units[0].integer_inputs else self.context.cast(x), []
        with self._watching():
            for unit in self.units:
                self.phase = f"the forward of {unit.name!r}"
                y, saved = unit.forward(self.context, _of(unit, self.weights), y)
                tape.append(saved)
            dy: np.ndarray | None
            if self.model is None or target is None:
                dy = self.context.empty(y.shape)
                dy[...] = 1
            else:
                self.phase = "the loss"
                _, saved = self.model.loss.forward(self.context, y, target)
                dy = self.model.loss.backward(self.context, saved, 1.0)
            for unit in reversed(self.units):
                assert dy is not None, "only the first unit leaves the gradient of its input out"
                self.phase = f"the backward of {unit.name!r}"
                dy, _ = unit.backward(self.context, _of(unit, self.weights), tape.pop(), dy)
                self._look()

    def _fresh(self, unit: Unit) -> dict[str, np.ndarray]:
        return {name: self.memory.alloc(w.shape, w.dtype, "unit_gradient")
                for name, w in _of(unit, self.weights).items()}

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Looks at each line that is neither the package's nor of a library."""
        def at_each_line(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename.startswith((PACKAGE, *LIBRARIES)):
                return None
            self._look()
            return at_each_line

        was_tracing, before = tracemalloc.is_tracing(), sys.gettrace()
        tracemalloc.start(FRAMES)
        sys.settrace(at_each_line)
        try:
            yield
        finally:
            sys.settrace(before)
            if not was_tracing:
                tracemalloc.stop()

    def _look(self) -> None:
        """Adds up the arrays that there are by the line that made them, unless that is the package's."""
        lines: Counter[str] = Counter()
        for trace in tracemalloc.take_snapshot().filter_traces([
                tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]).traces:
            frame = next((frame for frame in reversed(trace.traceback) if frame.filename.startswith(PACKAGE)
                          or not frame.filename.startswith(LIBRARIES)), None)
            if frame is not None and not frame.filename.startswith(PACKAGE):
                lines[f"{Path(frame.filename).name}:{frame.lineno}"] += trace.size
        if lines.total() > self.most_nbytes:
            self.most_nbytes, self.where, self.lines = lines.total(), self.phase, lines.most_common(3)


FRAMES = 8  # of a library's own below the line that asks for an array, at most
LIBRARIES = (str(Path(os.__file__).parent) + os.sep, str(Path(np.__file__).parent) + os.sep, "<")
