"""The judgement of a recorded step: what it matches and at how many ULPs, or its first difference and likely cause.

First every recipe, the right one and those of all hypotheses, is followed in float64: what lies beyond the bound of
roundings cannot be the run. Then what is left is followed in the formats of the run, by every way to reduce and every
profile of an update, and compared bit by bit. The run matches if the right recipe gives its bits; or if it lies within
the bound, and no mistake gives its bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerosim.display.views import TextLine, View, marked_table, plain_record
from zerosim.numerics.rounding import errors_in_ulps, round_to
from zerosim.oracle.candidates import (
    NORM_EPSILONS,
    Recipe,
    ReductionWay,
    clip_factors,
    contains,
    elsewhere,
    exact_mean,
    kept,
    reductions,
    states_after,
)
from zerosim.oracle.hypotheses import HYPOTHESES
from zerosim.oracle.profiles import PROFILES
from zerosim.oracle.record import Record, read
from zerosim.shown import Answer

NUDGES = sorted(range(-4, 5), key=abs)  # ULPs by which a library's norm moves the factor of clipping
REACH = 64  # ULPs: what is farther away is not another rounding's
MOST_SHOWN = 3  # of the recipes of a hypothesis
Way = tuple[str, str, str, str]  # a `ReductionWay`: where micro-batches are added, averaging rule, order; and a profile


class Difference(NamedTuple):
    """One element that differs: where, what was found and expected, and how many ULPs they are apart."""

    rank: int
    what: str
    place: str
    found: float
    expected: float
    ulps: float

    def __str__(self) -> str:
        found, expected = (f"{x:.9g} ({int(np.float32(x).view(np.uint32)):#010x})" for x in (self.found, self.expected))
        return (f"rank {self.rank}, {self.what} of {self.place}: found {found}, expected {expected}, "
                f"{self.ulps:.3g} ULP apart")


class Nearest(NamedTuple):
    """The distance of a recipe's nearest way from the run: elements that differ, the most ULPs, the first of them."""

    elements: int
    ulps: float
    first: Difference | None


@dataclass(frozen=True, slots=True)
class Cause:
    """A hypothesis that explains the run: its name and sentence, ``which`` of its recipes do, and the ways that give
    the run's bits; none where it only lies within the bound of roundings."""

    name: str
    sentence: str
    which: tuple[str, ...]
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        more = [f"{len(self.which) - MOST_SHOWN:,} more"] * (len(self.which) > MOST_SHOWN)
        return f"{self.name}: {self.sentence} ({'; or '.join([*self.which[:MOST_SHOWN], *more])})"


@dataclass(frozen=True, slots=True)
class Judgement(Answer):
    """The verdict on a step, which ``matches`` or not: the ``ways`` that give its bits, and how far the ``nearest`` is.

    ``causes`` are the mistakes that explain a step that does not match; the ``indistinguishable`` ones may be in one
    that does, and do not show there.
    """

    asked: str
    matches: bool
    ways: tuple[Way, ...]
    nearest: Nearest
    causes: tuple[Cause, ...]
    indistinguishable: tuple[Cause, ...]

    def as_json(self) -> dict[str, Any]:
        """All of it; the texts "inf" and "nan" for what is no finite number."""
        first = self.nearest.first
        return plain_record({"asked": self.asked, "matches": self.matches, "ways": self.ways,
                             "elements": self.nearest.elements, "ulps": self.nearest.ulps,
                             "first": None if first is None else first._asdict(),
                             "causes": self.causes, "indistinguishable": self.indistinguishable})

    def view(self) -> View:
        """The verdict, the first difference, its likely cause, and what this step cannot tell."""
        from rich.markup import escape

        ways, lines = self.ways or tuple(way for cause in self.causes for way in cause.ways), []
        if not self.ways:
            lines += [f"Elements that differ from the nearest right result: {self.nearest.elements:,}, by at most "
                      f"{self.nearest.ulps:.3g} ULP.", f"First difference: {self.nearest.first}."]
        if self.matches:
            lines += ["In every bit." if self.ways else "All lie within the bound of roundings of the right result."]
        else:
            lines += [f"Likely cause: {cause}, which gives {'every bit of the run' if cause.ways else 'its values'}."
                      for cause in self.causes] or ["No mistake of the table explains it alone."]
        lines += [f"This step cannot tell it from {cause}." for cause in self.indistinguishable]
        lines += ["This step cannot tell these causes apart; record a later one."] * (len(self.causes) > 1)
        table = marked_table("micro-batches", "average", "order of additions", "update", indent=0, rows=[
            (*way[:3], f"{way[3]} ({PROFILES[way[3]].sentence})") for way in dict.fromkeys(ways)])
        return View("The step matches" if self.matches else "The step does not match", f" what was asked for: "
                    f"{self.asked}.", (*(TextLine(escape(line), 0) for line in lines), *[table] * bool(ways)))


def judge(record: Record | str | Path) -> Judgement:
    """The judgement of a record, or of the folder of one. Raises ValueError as `read` does."""
    record = record if isinstance(record, Record) else read(record)
    s, right, run = record.settings, Recipe.right(record.settings), _Run(record)
    asked = (f"{s.optimizer}, step {s.step}, {s.ranks} ranks, {s.micro_batches} micro-batches, layout {s.layout}")
    ways, nearest = run.compared(right)
    found = []
    for row in HYPOTHESES:
        explained = [(which, run.compared(recipe, ways)[0]) for which, recipe in row.recipes(record, right)
                     if recipe != right and run.contains(recipe)]
        for some in ([pair for pair in explained if pair[1]], [pair for pair in explained if not pair[1]]):
            if some:
                found.append(Cause(row.name, row.sentence, tuple(which for which, _ in some), tuple(
                    dict.fromkeys(way for _, of in some for way in of))))
    with_bits = [cause for cause in found if cause.ways]
    matches = bool(ways) or (run.contains(right) and not with_bits)
    drifted = run.drifted() if matches else ""
    if drifted:
        return Judgement(asked, False, ways, nearest, (Cause(
            "drifted apart", "ranks that were the same before the step are not after it", (drifted,), ways),), ())
    found = with_bits if ways or with_bits else found
    if with_bits and not ways:  # what differs from a right step that does all else as the run does
        nearest = run.compared(right, with_bits[0].ways)[1]
    return Judgement(asked, matches, ways, nearest, () if matches else tuple(found),
                     tuple(found) if matches else ())


class _Run:
    """A record, and the recipes that are compared with it."""

    def __init__(self, record: Record) -> None:
        self.record, s = record, record.settings
        self.means, self.reductions = cache(partial(exact_mean, record)), cache(partial(reductions, record))
        kinds = [*record.after.values(), *[record.weights] * bool(record.weights)]
        self.distinct = list({tuple(of[rank].tobytes() for of in kinds): rank for rank in range(s.ranks)[::-1]}
                             .values())[::-1]  # ranks with the same bits are looked at once

    def drifted(self) -> str:
        """The first element that is not the same on all ranks after the step, or an empty text."""
        slots = {**self.record.after, "weight": self.record.weights}
        for rank, (slot, of) in product(self.distinct[1:], slots.items()):
            for at in np.flatnonzero(of[rank].view(np.uint8) != of[0].view(np.uint8))[:1] if of else ():
                return f"{slot} of {self.record.settings.place(int(at) // of[0].itemsize)} on rank {rank} and rank 0"
        return ""

    def ranks(self, recipe: Recipe) -> Iterable[int]:
        """The ranks to look at: all where the recipe treats them differently."""
        same = not (recipe.own or recipe.stale or recipe.stale_copies)
        return self.distinct if same else range(self.record.settings.ranks)

    def contains(self, recipe: Recipe) -> bool:
        """True if the run may be what the recipe comes to, by the bound of roundings; copies by their bits."""
        return all(not self.copies(recipe, rank).elements and contains(self.record, recipe, rank, *self.means(
            recipe.of_rank(rank).weights, recipe.divisor)) for rank in self.ranks(recipe))

    def copies(self, recipe: Recipe, rank: int) -> Nearest:
        """The distance of a rank's copy to compute with from its master, rounded."""
        if not self.record.weights:
            return Nearest(0, 0.0, None)
        s, found = self.record.settings, self.record.weights[rank]
        expected = round_to(np.where(kept(s, recipe.stale_copies, rank), self.record.before["master"],
                                     self.record.after["master"][rank]), s.compute)
        apart = errors_in_ulps(found, expected.astype(found.dtype))
        at = np.flatnonzero(apart)
        return Nearest(at.size, float(apart.max(initial=0)), None if not at.size else self.difference(
            rank, f"{s.compute} weight", at[0], found, expected, apart))

    def difference(self, rank: int, what: str, at: int, *arrays: np.ndarray) -> Difference:
        """One element of what was found, what was expected, and how far apart they are."""
        return Difference(rank, what, self.record.settings.place(int(at)), *(float(x[at]) for x in arrays))

    def compared(self, recipe: Recipe, only: tuple[Way, ...] = ()) -> tuple[tuple[Way, ...], Nearest]:
        """The ways of a recipe that give the run's bits, and its nearest; ``only``: of these ways, if any."""
        s, found = self.record.settings, []
        nearest = Nearest(s.length * s.ranks + 1, np.inf, None)
        clips = s.clip_norm is not None and recipe.norm != "none"
        reduced, far = self.reductions(recipe.weights, recipe.divisor), set()
        unlike = {id(means): way for way, means in reversed(reduced.items()) if recipe.order in (None, way.order)}
        for clipped in product(NUDGES, NORM_EPSILONS) if clips else [(0, 0.0)]:
            for named in ((*way, profile) for way, profile in product(unlike.values(), PROFILES)):
                if (only and named not in only) or (named, clipped[1]) in far:
                    continue
                distances = [self.nearest(recipe, rank, named, clipped) for rank in self.ranks(recipe)]
                if None not in distances:
                    elements, ulps, firsts = zip(*distances, strict=True)
                    one = Nearest(sum(elements), max(ulps), next((x for x in firsts if x is not None), None))
                    nearest = min(nearest, one, key=lambda near: near[:2])
                    found += [named] if not one.elements else []
                    far |= {(named, clipped[1])} if one.ulps > REACH and not only else set()
            if found or not (only or self.contains(recipe)):
                break
        return tuple(found), nearest

    def nearest(self, recipe: Recipe, rank: int, way: Way, clipped: tuple[int, float]) -> Nearest | None:
        """The distance of a rank from a recipe by one way; None where the profile has no such update."""
        record, s, (nudge, epsilon) = self.record, self.record.settings, clipped
        stale, means = kept(s, recipe.stale, rank), self.reductions(recipe.of_rank(rank).weights, recipe.divisor)
        sums = means[ReductionWay(*way[:3])]
        of_norm, found = sums[0], np.stack([of[rank] for of in record.after.values()])
        sizes = np.stack([np.maximum(np.abs(record.before[slot]), np.float32(s.lr * (slot == "master")))
                          for slot in record.after])
        for _ in range(2 if s.clip_norm is not None else 1):  # which sums a run has is known when some factor is
            factors, best = np.asarray(clip_factors(s, recipe, of_norm, epsilon)).astype(np.float32), None
            factors = np.where(factors < 1, factors * np.float32(1 + nudge * 2.0**-23), factors)
            for mean in sums:
                for state in states_after(record, recipe, mean, factors, PROFILES[way[3]].updated):
                    expected = {slot: np.where(stale, record.before[slot], state[slot]) for slot in record.after}
                    apart = errors_in_ulps(found, np.stack([*expected.values()]), sizes)
                    if best is None:
                        best, first, of_first = apart.max(0), expected, apart
                    of_norm = np.where(apart.max(0) < best, mean, of_norm)
                    best = np.minimum(best, apart.max(0))
        if best is None:
            return None
        best[elsewhere(s, recipe, rank)] = 0
        at, elements = np.flatnonzero(best > REACH), int((best > 0).sum())
        if not elements:
            return self.copies(recipe, rank)
        at = at if at.size else np.flatnonzero(best)  # first what no other order of operations makes
        slot = list(record.after)[int(of_first[:, at[0]].argmax())]
        return Nearest(elements, float(best.max()), self.difference(
            rank, f"{slot} after the step", at[0], record.after[slot][rank], first[slot], best))
