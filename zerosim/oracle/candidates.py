"""The results that a step could have: exactly, with the bound of what roundings may do, and bit by bit in every order.

A `Recipe` is the way from the recorded gradients to the state after the step; a mistake is a recipe that differs from
the right one in a field. `contains` follows a recipe in float64, `reductions` in the formats of the run, once
for every place where micro-batches are added, averaging rule and order of additions that `zerosim.ranks` has.

Legend: N ranks, k micro-batches, n elements of all parameters, one behind the other.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from zerosim.numerics.checks import unknown_name
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.policy import AVERAGES
from zerosim.numerics.rounding import round_to
from zerosim.oracle.profiles import Slots, UpdateRule, exact, turning_point
from zerosim.oracle.record import Record, StepSettings
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank

ROUNDINGS = 8  # of an update, in ULPs, that `contains` allows: one of each of its operations
CLIP_ROUNDINGS = 64  # of a norm of many elements and its quotient, in half ULPs
NORM_EPSILONS = (0.0, 1e-6)  # zerosim's, and PyTorch's (2.13, clip_grad.py) and DeepSpeed's (0.19.8, stage_1_and_2.py)
Weights = tuple[tuple[float, ...], ...]
OWNED = "ring to the owner"
EACH = "each is reduced"
BACKWARDS = "ring backwards"
EVERY = -1  # in place of a rank


@dataclass(frozen=True, slots=True)
class Recipe:
    """The way from the recorded gradients to the state after a step.

    ``weights`` multiply each rank's micro-batches in the sum, which ``divisor`` divides. ``own``: each rank updates
    what it owns by its own sum. ``norm``: whose norm clips, a name in `NORMS`. ``overflow``: who skips for an inf or
    NaN, a name in `SKIPS`. ``start``: what masters are rounded to first, ``end``: and after the update. ``forgets``:
    state begins as zeros. ``stale``: (rank, owner) pairs, that rank keeps that owner's part from before;
    ``stale_copies``: only in the copy that computes. ``order``: the one order of additions, where it is known.
    """

    update: UpdateRule
    weights: Weights
    divisor: float
    own: bool = False
    norm: str = "mean"
    overflow: str = "all"
    start: str | None = None
    end: str | None = None
    forgets: bool = False
    stale: tuple[tuple[int, int], ...] = ()
    stale_copies: tuple[tuple[int, int], ...] = ()
    order: str | None = None

    @classmethod
    def right(cls, settings: StepSettings) -> "Recipe":
        """The recipe that the settings ask for."""
        s = settings
        weights = [[1.0] * s.micro_batches] * s.ranks
        if s.tokens is not None:
            mean = sum(map(sum, s.tokens)) / (s.ranks * s.micro_batches)
            weights = [[count / mean for count in row] for row in s.tokens]
        update = UpdateRule(s.lr, s.beta1, s.beta2, s.epsilon, s.weight_decay, s.momentum, s.optimizer == "adamw",
                        "m" in s.slots, s.step)
        known = [*orders(s), *[OWNED] * (s.layout != "whole")]
        if s.order is not None and s.ranks > 2 and s.order not in known:
            raise unknown_name(f"{s.ranks} ranks of layout {s.layout} have no order {s.order!r}", s.order, known)
        return cls(update, tuple(map(tuple, weights)), s.mean_divisor, order=s.order if s.ranks > 2 else None)

    def updating(self, **changed: Any) -> "Recipe":
        """The recipe with these settings of its update in place of its own."""
        return replace(self, update=self.update._replace(**changed))

    def of_rank(self, rank: int) -> "Recipe":
        """The recipe of one rank: where each takes its own sum, that of its own micro-batches."""
        return self if not self.own else replace(self, own=False, weights=tuple(
            tuple(one * (r == rank) for one in row) for r, row in enumerate(self.weights)))


# -- From a mean gradient to the state after the step ------------------------------------------------------------------

# By name: of a clipped step, the norm by which gradients are multiplied in place of the mean's, and in which parts.
NORMS: Mapping[str, tuple[Callable[[StepSettings], float], str]] = {
    "mean": (lambda settings: 1.0, "whole"), "sum": (lambda settings: settings.ranks, "whole"),
    "scaled": (lambda settings: settings.loss_scale, "whole"), "shard": (lambda settings: 1.0, "owners"),
    "tensor": (lambda settings: 1.0, "tensors"), "none": (lambda settings: 0.0, "whole")}
SKIPS: Mapping[str, Callable[[np.ndarray, StepSettings], np.ndarray]] = {  # of elements that overflowed
    "all": lambda bad, settings: np.full(len(bad), bad.any()),
    "owner": lambda bad, settings: np.isin(settings.owners(), settings.owners()[bad]),
    "nobody": lambda bad, settings: np.zeros(len(bad), bool)}


def clip_factors(settings: StepSettings, recipe: Recipe, mean: np.ndarray, epsilon: float) -> Any:
    """The factor of clipping of each element, float64: the most norm over the norm plus ``epsilon``, at most 1."""
    if settings.clip_norm is None or recipe.norm == "none":
        return 1.0
    times, part = NORMS[recipe.norm]
    sizes = [here.stop - here.start for _, here in settings.stretches()]
    parts = {"whole": np.zeros(len(mean), int), "tensors": np.repeat(np.arange(len(sizes)), sizes),
             "owners": settings.owners()}[part]
    with np.errstate(all="ignore"):
        norms = np.sqrt(np.bincount(parts, mean.astype(np.float64)**2)) * times(settings)
        return np.minimum(1.0, settings.clip_norm / (norms + epsilon))[parts]


def states_after(record: Record, recipe: Recipe, mean: np.ndarray, factors: Any,
                 updated: Callable[[UpdateRule, Slots, np.ndarray], list[Slots]]) -> Iterator[Slots]:
    """The alternatives of the state after the step on a mean gradient (n,), of ranks that are not stale."""
    before = dict(record.before)
    if recipe.start is not None:
        before["master"] = round_to(before["master"], recipe.start)
    if recipe.forgets:
        before |= {slot: np.zeros_like(x) for slot, x in before.items() if slot != "master"}
    skipped = SKIPS[recipe.overflow](~np.isfinite(mean), record.settings)
    with np.errstate(all="ignore"):
        gradient = (mean * factors).astype(mean.dtype)
    for slots in updated(recipe.update, before, gradient):
        after = {slot: np.where(skipped, record.before[slot], x) for slot, x in slots.items()}
        if recipe.end is not None:
            after["master"] = round_to(after["master"].astype(np.float32), recipe.end)
        yield after


def kept(settings: StepSettings, pairs: tuple[tuple[int, int], ...], rank: int) -> np.ndarray:
    """True where a rank keeps what was before the step, (n,)."""
    owners, stale = settings.owners(), np.zeros(settings.length, bool)
    for of_rank, owner in pairs:
        if of_rank in (rank, EVERY):
            stale |= (owner == EVERY) | (owners == owner)
    return stale


def elsewhere(settings: StepSettings, recipe: Recipe, rank: int) -> np.ndarray:
    """True where a rank says nothing of a recipe, (n,): of shards that are each updated by its owner's gradient, where
    another one is the owner."""
    away: np.ndarray = (settings.owners() != rank) & (recipe.own and settings.layout != "whole")
    return away


# -- Exactly, in float64 -----------------------------------------------------------------------------------------------


def exact_mean(record: Record, weights: Weights, divisor: float) -> tuple[np.ndarray, np.ndarray]:
    """The mean gradient (n,) in float64, and the bound of any order of additions in the formats of the run: N·k
    roundings, and some more, of the sum of its addends' sizes; inf where a sum is beyond the format."""
    s = record.settings
    added_in = s.reduce if s.micro_batches == 1 else record.gradients[0][0].dtype  # of a rank's own
    coarse = min(format_of(s.reduce), format_of(added_in), key=lambda fmt: fmt.mantissa_bits)
    addends, half_ulp = s.ranks * s.micro_batches, 2.0**-(coarse.mantissa_bits + 1)
    with np.errstate(all="ignore"):
        scaled = np.array([weight * g.astype(np.float64) for row, gs in zip(weights, record.gradients, strict=True)
                           for weight, g in zip(row, gs, strict=True) if weight])
        total, sizes = scaled.sum(0), np.abs(scaled).sum(0)
        total[np.abs(total) / s.ranks > format_of(s.reduce).largest] = np.inf
        least = addends * s.ranks * coarse.smallest_subnormal
        return total / divisor, ((addends + 4) * half_ulp * sizes + least) / divisor


def contains(record: Record, recipe: Recipe, rank: int, mean: np.ndarray, bound: np.ndarray) -> bool:
    """True if every element that was found on a rank may be what a recipe comes to, in float64.

    The state is that of the bound's two ends, of the mean, and where it turns between them, and ``ROUNDINGS`` more.
    """
    s, before = record.settings, record.before
    factors = clip_factors(s, recipe, mean, 0.0)
    with np.errstate(all="ignore"):
        if s.clip_norm is not None:
            of_norm = np.linalg.norm(bound) / np.linalg.norm(mean) + max(NORM_EPSILONS) / s.clip_norm
            bound = bound + (CLIP_ROUNDINGS * 2.0**-24 + np.nan_to_num(of_norm)) * np.abs(mean)
        turning = turning_point(recipe.update, before, mean * factors) / factors
        points = [mean - bound, mean, mean + bound, *(np.clip(x, mean - bound, mean + bound) for x in (0.0, turning))]
        ends = [state for x in points for state in
                states_after(record, recipe, x, factors, lambda *of: [exact(*of)])]
        stale = kept(s, recipe.stale, rank)
        for slot, of_ranks in record.after.items():
            values, found = np.array([end[slot] for end in ends]), of_ranks[rank]
            low, high = (np.where(stale, before[slot], end) for end in (values.min(0), values.max(0)))
            size = np.maximum(np.maximum(np.abs(before[slot]), np.maximum(np.abs(low), np.abs(high))),
                              s.lr if slot == "master" else 0)
            slack = np.where(stale, 0, ROUNDINGS * np.spacing(size.astype(np.float32)))
            if not ((found >= low - slack) & (found <= high + slack) | np.isnan(found) & np.isnan(values).any(0)
                    | elsewhere(s, recipe, rank)).all():
                return False
    return True


# -- In the formats of the run, in every order -------------------------------------------------------------------------


class ReductionWay(NamedTuple):
    """One way to reduce: where micro-batches are added, the averaging rule, the order of additions over ranks."""

    micro_batches: str
    average: str
    order: str


def orders(settings: StepSettings) -> dict[str, tuple[int, dict[str, Any]]]:
    """By name of an order: how many ranks may begin the sum of an element, 1 or all; and the options of an all-reduce.

    Which rank begins the sum of an element in a ring depends on the cut, which a bucket of a library moves; so each
    rank may. In the ring backwards, which is gloo's, rank r sends to r-1, as if its number were N-1-r. Two ranks
    have one order, and three have the same rings both ways: a + b is b + a.
    """
    ranks = settings.ranks
    if ranks < 3:
        return {"any": (1, {"algorithm": "ring"})}
    names = ["ring", *(f"hierarchical({each})" for each in range(2, ranks) if ranks % each == 0)]
    found: dict[str, tuple[int, dict[str, Any]]] = {name: (ranks, {"algorithm": name}) for name in names}
    found |= {BACKWARDS: found["ring"]} if ranks > 3 else {}
    found |= {name: (1, {"algorithm": name}) for name in ("naive", "tree", "doubling", "rabenseifner")}
    if settings.reduce != "fp32":
        found |= {"ring, partial sums in fp32": (ranks, {"algorithm": "ring", "wire": "fp32"}),
                  "added in fp32": (1, {"algorithm": "everyone", "accumulate": "fp32"})}
    return found


def reductions(record: Record, weights: Weights, divisor: float) -> dict[ReductionWay, list[np.ndarray]]:
    """By reduction, the alternatives of the mean gradient (n,), fp32; one object of those that give the same bits."""
    s, kernels, in_orders = record.settings, NumpyKernels(), orders(record.settings)
    here = s.owners(), np.arange(s.length)

    def addends_of(rank: int) -> dict[str, list[np.ndarray]]:
        weighted = [_weighted(*pair) for pair in zip(weights[rank], record.gradients[rank], strict=True)]
        return {place: [_cast(x, format_of(s.reduce).dtype, kernels) for x in addends]
                for place, addends in _added(weighted, kernels).items()}

    def program(rank: Rank) -> dict[ReductionWay, list[np.ndarray]]:
        found: dict[ReductionWay, list[np.ndarray]] = {}
        own, opposite = addends_of(rank.index), addends_of(s.ranks - 1 - rank.index)
        sums = {}
        for average, (order, (begins, options)) in product(AVERAGES, in_orders.items()):
            # One all-reduce of all addends. Its chunk r, of the ranks that may begin a sum, begins at rank r.
            addends = np.concatenate([x for xs in (opposite if order == BACKWARDS else own).values() for x in xs])
            splits = tuple(range(0, len(addends) * begins + 1, len(addends))) if begins > 1 else None
            mean = {} if average == AVERAGES[0] else {"op": "mean", "average": average}
            whole = rank.all_reduce(np.tile(addends, begins), splits=splits, **mean, **options)
            sums[average, order] = whole.reshape(begins, -1, s.length)
        if rank.index:  # all have the same
            return found
        lies = {place: slice(*ends) for place, ends in zip(own, pairwise(accumulate(map(len, own.values()), initial=0)),
                                                           strict=True)}
        for place, average, order in product(own, AVERAGES, in_orders):
            rest = divisor if average == AVERAGES[0] else divisor / s.ranks
            means = [_mean(list(part[lies[place]]), rest, np.float32 if place == EACH else None, kernels)
                     for part in sums[average, order]]
            if order == "ring" and s.layout != "whole":
                found[ReductionWay(place, average, OWNED)] = [np.array(means)[here]]
            found[ReductionWay(place, average, order)] = means
        return found

    with np.errstate(all="ignore"):
        found = Cluster(s.ranks).run(program)[0]
    unlike: dict[bytes, list[np.ndarray]] = {}
    return {which: unlike.setdefault(b"".join(x.tobytes() for x in means), means) for which, means in found.items()}


def _added(gradients: list[np.ndarray], kernels: NumpyKernels) -> dict[str, list[np.ndarray]]:
    """By place of the addition, what a rank hands to the reductions of a step."""
    found = {EACH: gradients, f"{EACH}, added as sent": gradients} if len(gradients) > 1 else {}
    for place, dtype in (("added first", gradients[0].dtype), ("added first, in fp32", np.dtype(np.float32))):
        found[place] = [_sum(gradients, dtype, kernels)]
    return found


def _sum(addends: list[np.ndarray], dtype: Any, kernels: NumpyKernels) -> np.ndarray:
    total = addends[0].astype(dtype)
    for x in addends[1:]:
        kernels.add_rounded(total, x.astype(dtype), total)
    return total


def _weighted(weight: float, g: np.ndarray) -> np.ndarray:
    """weight·g in the format of g; 0 of an inf that does not count."""
    if weight in (0, 1):
        return g if weight else np.zeros_like(g)
    return (np.float32(weight) * g.astype(np.float32)).astype(g.dtype)


def _cast(x: np.ndarray, dtype: Any, kernels: NumpyKernels) -> np.ndarray:
    out = np.empty(x.shape, dtype)
    kernels.cast_pack(x, out)
    return out


def _mean(sums: list[np.ndarray], divisor: float, dtype: Any, kernels: NumpyKernels) -> np.ndarray:
    """fp32 of the sums of micro-batches, added in this type, or in their own, and divided."""
    out = np.empty(sums[0].shape, np.float32)
    kernels.gradient_block(_sum(sums, dtype or sums[0].dtype, kernels), divisor, 1.0, out)
    return out
