"""For checking one's own sharded code: hypothesis strategies, a single-device reference, and equality of bits.

Legend: N ranks, n elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerosim.models.small import MLP
from zerosim.models.units import Model
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer, UpdateContext
from zerosim.optim.tensor_norms import with_norms
from zerosim.ranks.call import checked_cut
from zerosim.zero.pieces import upcast

try:
    from hypothesis import strategies as st
except ImportError as error:  # pragma: no cover - the tests themselves need hypothesis
    raise ImportError("zerosim.testing makes test cases with hypothesis, which is not installed; "
                      "pip install 'zerosim[test]'") from error

AWKWARD = (0.0, -0.0, 1.0, -1.0, 1e-8, -3e-5, 6e-8, 0.1, 1 / 3, 300.0, -2049.0)


def worlds(largest: int = 9) -> st.SearchStrategy[int]:
    """Numbers of ranks, 1 included: never test with 2 alone, where every order of additions is the same."""
    return st.integers(1, largest)


def vectors(length: int, format: str = "fp32") -> st.SearchStrategy[np.ndarray]:
    """Arrays (n,) in a format: normal values of many magnitudes, strewn with zeros of both signs and tiny numbers."""
    return st.builds(_vector, st.just(length), st.just(format), st.integers(0, 2**32 - 1))


def gradients(ranks: int, length: int, format: str = "fp32") -> st.SearchStrategy[list[np.ndarray]]:
    """One vector (n,) for each rank, different on every rank: equal data could not show a missing average."""
    return st.builds(
        lambda seed: [_vector(length, format, seed + rank) for rank in range(ranks)], st.integers(0, 2**32 - 1)
    )


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

    def build(seed: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        outputs = next(iter(last.values()))[-1]
        return [[(rng.standard_normal((rows, first[0]), np.float32), rng.standard_normal((rows, outputs), np.float32))
                 for _ in range(micro_batches)] for _ in range(ranks)]

    return st.builds(build, st.integers(0, 2**32 - 1))


def _vector(length: int, format: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(length) * 10.0 ** rng.integers(-6, 2, length)
    chosen = rng.random(length) < 0.2
    values[chosen] = rng.choice(AWKWARD, int(chosen.sum()))
    with np.errstate(all="ignore"):
        return values.astype(format_of(format).dtype)


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: str = "arrays") -> None:
    """Passes when dtype, shape and every bit agree; -0.0 is not 0.0, and a NaN equals one of the same bits.

    Raises AssertionError that names the first element that differs and how many do.
    """
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise AssertionError(f"{what}: found {found.dtype} of shape {found.shape}, "
                             f"expected {expected.dtype} of shape {expected.shape}")
    unsigned = np.dtype(f"u{found.dtype.itemsize}")
    a, b = (np.ascontiguousarray(x).reshape(-1).view(unsigned) for x in (found, expected))
    differing = np.flatnonzero(a != b)
    if differing.size:
        at = int(differing[0])
        raise AssertionError(
            f"{what}: {differing.size} of {a.size} elements differ; first at {at}: found "
            f"{found.reshape(-1)[at]!r} ({a[at]:#x}), expected {expected.reshape(-1)[at]!r} ({b[at]:#x})"
        )


@dataclass
class SingleDevice:
    """The optimizer on one device, fed with the mean of N ranks' gradients added in the order of a ring.

    ``weights`` may have any shape; ``splits`` (None: the ceil cut) counts their elements in C order, as a flat vector
    has them. An element that rank c owns is the sum g[c+1] + g[c+2] + ... + g[c], each addition rounded to the
    gradients' format, then cast to fp32 and divided by N. Keep its ``splits`` equal to yours.
    """

    optimizer: Optimizer
    weights: np.ndarray
    ranks: int
    splits: Sequence[int] | None = None
    steps_taken: int = 0
    state: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a mean needs the gradients of at least one rank, found ranks={self.ranks}")
        self.weights = np.array(self.weights, np.float32)
        self.state = {name: np.zeros(slot.shape, format_of(slot.format).dtype)
                      for name, slot in self.optimizer.slots(self.weights.shape).items()}

    def step(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """One step on the gradients of N ranks, of the weights' shape; returns the new weights, fp32.

        Raises ValueError for another number of gradients than ranks.
        """
        found = [(np.shape(g), np.asarray(g).dtype) for g in gradients]
        if len(found) != self.ranks or len(set(found)) != 1 or found[0][0] != self.weights.shape:
            raise ValueError(
                f"asked for one gradient from each of {self.ranks} ranks, of shape {self.weights.shape} and "
                f"one dtype, found {len(found)}: {', '.join(f'{shape} {dtype}' for shape, dtype in found)}"
            )
        kernels, w, g, at_rest = NumpyKernels(), self.weights, np.empty_like(self.weights), self.state
        total = self._ring_sum(kernels, [np.ravel(one) for one in gradients])
        kernels.gradient_block(total, self.ranks, 1.0, g.reshape(-1))
        if self.optimizer.cut_of(w.shape) == "anywhere":  # such optimizers take flat arrays
            w, g, at_rest = w.reshape(-1), g.reshape(-1), {name: slot.reshape(-1) for name, slot in at_rest.items()}
        self.steps_taken += 1
        with upcast(kernels, lambda _, shape: kernels.empty(shape, np.float32), at_rest) as state:
            ctx = with_norms(self.optimizer, UpdateContext(kernels), w, g, state, self.steps_taken)
            self.optimizer.update(ctx, w, g, state, self.steps_taken)
        return self.weights.copy()

    def _ring_sum(self, kernels: NumpyKernels, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """The sum (n,) of flat gradients (n,)."""
        total = np.empty_like(gradients[0])
        cut = checked_cut(self.splits, len(total), self.ranks)
        for c in range(self.ranks):
            own = slice(cut[c], cut[c + 1])
            partial = gradients[(c + 1) % self.ranks][own].copy()
            for step in range(2, self.ranks + 1):
                kernels.add_rounded(partial, gradients[(c + step) % self.ranks][own], partial)
            total[own] = partial
        return total
