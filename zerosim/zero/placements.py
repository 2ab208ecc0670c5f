"""Placements of state on ranks, and the whole of ZeRO's communication: the change from one placement to another.

Then what all parts of a step share: the `Store`, which makes the vectors that rest on a rank and gives and takes their
values, and a `Move`, a bucket of such vectors on its way from one placement to another.

Legend: n elements, N ranks.
Source of the stages: Rajbhandari, Rasley, Ruwase & He 2020 (ZeRO), section 5.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from zerosim.numerics.arrays import AnyArray, copy_elements
from zerosim.numerics.checks import is_count
from zerosim.numerics.policy import Policy
from zerosim.ranks.call import Cut, checked_cut, checked_output, checked_vector
from zerosim.ranks.rank import Rank
from zerosim.zero.layout import Parts


class Placement(Enum):
    """A way in which one vector rests on N ranks."""

    REPLICATED = "replicated"  # every rank has all of it, the same bits
    PARTIAL = "partial"        # every rank has an addend of all of it; the vector is their sum
    SHARDED = "sharded"        # every rank has its own chunk


REPLICATED, PARTIAL, SHARDED = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED


def check_placement(placement: object) -> None:
    """Raises ValueError for what is no Placement."""
    if not isinstance(placement, Placement):
        raise ValueError(f"{placement!r} is no placement; take zs.Placement.REPLICATED, PARTIAL or SHARDED")


@dataclass(frozen=True, slots=True)
class Stage:
    """Placements of parameters, gradients (between micro-batches) and optimizer state: a row of ZeRO's table.

    Raises ValueError for parameters or optimizer state that would be PARTIAL: they are no sums.
    """

    parameters: Placement
    gradients: Placement
    optimizer: Placement

    def __post_init__(self) -> None:
        for placement in (self.parameters, self.gradients, self.optimizer):
            check_placement(placement)
        if PARTIAL in (self.parameters, self.optimizer):
            raise ValueError(
                "only gradients can be partial, because only they are sums over ranks; place parameters and "
                f"optimizer state replicated or sharded, found {self}"
            )

    def __str__(self) -> str:
        return f"Stage({self.parameters.name}, {self.gradients.name}, {self.optimizer.name})"


#               parameters  gradients  optimizer
STAGES = {0: Stage(REPLICATED, PARTIAL, REPLICATED),
          1: Stage(REPLICATED, PARTIAL, SHARDED),
          2: Stage(REPLICATED, SHARDED, SHARDED),
          3: Stage(SHARDED, SHARDED, SHARDED)}


def stage_of(stage: int | Stage) -> Stage:
    """The row for a stage's number, or the row itself; ValueError for any other."""
    if isinstance(stage, Stage):
        return stage
    if not is_count(stage) or stage not in STAGES:
        raise ValueError(
            f"ZeRO has the stages {', '.join(map(str, STAGES))}, found {stage!r}; for another combination pass "
            "Stage(parameters, gradients, optimizer) with placements"
        )
    return STAGES[stage]


# -- from one placement to another -------------------------------------------------------------------------------------


def redistribute(rank: Rank, vector: np.ndarray, have: Placement, want: Placement, cut: Cut, *, policy: Policy,
                 out: np.ndarray | None = None, async_op: bool = False, **others: Any) -> Any:
    """Changes the placement of one vector, cut among the ranks by ``cut``; returns it as it then rests on this rank.

    PARTIAL to REPLICATED is an all-reduce, PARTIAL to SHARDED a reduce-scatter, SHARDED to REPLICATED an all-gather,
    REPLICATED to SHARDED a slice (no message, no copy), equal is nothing. ``vector`` is (n,), or the own chunk where
    it is SHARDED; ``async_op`` and others are options of the rank's collectives. Raises ValueError for a sum that is to
    become PARTIAL.
    """
    options: dict[str, Any] = {"splits": cut, "out": out, "async_op": async_op, **others}
    match have, want:
        case (Placement.PARTIAL, Placement.REPLICATED):
            return rank.all_reduce(vector, **options, **policy.reduction)
        case (Placement.PARTIAL, Placement.SHARDED):
            return rank.reduce_scatter(vector, **options, **policy.reduction)
        case (Placement.SHARDED, Placement.REPLICATED):
            return rank.all_gather(vector, **options)
    check_placement(have)
    check_placement(want)
    if want is PARTIAL is not have:
        raise ValueError(f"asked to make a {have.value} vector partial, but a sum cannot be unsummed; "
                         "keep the addends, or work with the sum")
    cut = checked_cut(cut, 0, rank.size, any_length=True)
    own = slice(cut[rank.index], cut[rank.index + 1])
    expected = own.stop - own.start if have is SHARDED else cut[-1]
    if len(checked_vector(vector, "the vector to redistribute", flat=True)) != expected:
        raise ValueError(
            f"a {have.value} vector of {len(vector)} elements does not fit the cut {cut}, by which it has "
            f"{expected} on rank {rank.index}"
        )
    found = vector if have is want else vector[own]
    if async_op:
        raise ValueError(f"{have.value} to {want.value} sends nothing and is done at once; leave async_op out")
    if out is None:
        return found
    checked_output(out, found.shape, found.dtype)[...] = found
    return out


# -- state where it rests on a rank ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workplace:
    """The arithmetic of a place, its memory, and the note of what is computed there."""

    kernels: Any
    memory: Any
    note: Callable[..., None]


class Store:
    """One rank's state between its uses, in arrays of its device, with which the parts of a step compute as they are.

    An option's store may keep some of it elsewhere; the parts of a step do not see which they have. ``device`` is
    where forward, backward and collectives compute, ``workplace`` where the optimizer does.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank, self.memory = rank, rank.memory
        self.device = self.workplace = Workplace(rank.kernels, rank.memory, partial(_note, rank))

    # -- vectors ------------------------------------------------------------------------------------------------------

    def alloc(self, shape: int | tuple[int, ...], dtype: Any, kind: str, name: str) -> Any:
        """A new vector, or array, for state of a kind, charged where that rests."""
        return self.memory.alloc(shape, dtype, kind, name)

    def fill(self, x: Any, values: Callable[[slice], AnyArray]) -> None:
        """x (n,) becomes what ``values`` gives for each range, rounded once to its type."""
        for here in self.stretches(len(x)):
            with self.writing(x[here]) as room:
                self.rank.kernels.serving(room).fill(room, lambda span, first=here.start: values(
                    slice(first + span.start, first + span.stop)))

    def clear(self, x: Any) -> None:
        """Sets new elements to zero."""
        x[...] = 0

    def writing(self, x: Any) -> AbstractContextManager[Any]:
        """Room for new values of x, which rest there at the end of the block."""
        return nullcontext(x)

    def is_array(self, x: Any) -> bool:
        """True for state that rests in an array of the device, which a collective can fill."""
        return True

    # -- values -------------------------------------------------------------------------------------------------------

    def read(self, x: Any, at: Workplace | None = None) -> Any:
        """The values where they are computed with: on the device, or at another place."""
        return x

    def saved(self, x: Any) -> Any:
        """The values as a file takes them."""
        return x

    def stretches(self, count: int, *vectors: Any) -> Iterable[slice]:
        """The ranges in which so many elements of these vectors come to where they are computed with: one."""
        return [slice(0, count)]

    def read_stretches(self, x: Any) -> Iterable[Any]:
        """The values of a gradient (n,) where they are computed with, one part after the other: here one."""
        return [x]

    def put(self, values: Any, x: Any, *, add: bool = False) -> None:
        """x = values of the device, with ``add`` x + values, rounded to the format of x."""
        if add:
            self.rank.kernels.add_rounded(x, values, x)
        else:
            self.rank.kernels.cast_pack(values, x)

    def move(self, values: Any, x: Any) -> None:
        """x = values of the device, of the same type."""
        copy_elements(values, x)

    def packed(self, parts: Parts, length: int, dtype: np.dtype[Any]) -> np.ndarray:
        """The parts as one vector of this format: the only part itself, or a copy in a charged buffer."""
        values = [(here, self.read(part)) for here, part in parts]
        if len(values) == 1 and values[0][1].dtype == dtype:
            only: np.ndarray = values[0][1]
            return only
        vector = self.memory.alloc(length, dtype, "communication_buffer", "bucket")
        for here, elements in values:
            self.rank.kernels.cast_pack(elements, vector[here])
        return vector

    def put_parts(self, target: Parts, found: np.ndarray, *, add: bool = False) -> None:
        """Puts a bucket that has arrived into the parts of its target, with ``add`` onto what is there."""
        for here, resting in target:
            self.put(found[here], resting, add=add)

    def finish(self) -> None:
        """Waits until state that is moved beside the step has arrived; here none is."""

    def abandon(self) -> None:
        """Forgets what is moved beside the step; here nothing is."""

    # -- updates ------------------------------------------------------------------------------------------------------

    def updating(self, resting: Mapping[str, Any], count: int,
                 unchanged: Collection[str] = ()) -> Iterator[tuple[slice, dict[str, Any]]]:
        """The vectors (count,) at the workplace, stretch by stretch; those not ``unchanged`` are put back each time."""
        for here in self.stretches(count, *resting.values()):
            with self.arrays_at({name: x[here] for name, x in resting.items()}, self.workplace,
                              written=resting.keys() - unchanged) as arrays:
                yield here, arrays

    def arrays_at(self, resting: Mapping[str, Any], at: Workplace, *, read: Collection[str] | None = None,
                written: Collection[str] | None = None) -> AbstractContextManager[dict[str, Any]]:
        """The arrays at a workplace, for a block at whose end they are put back where they rest.

        ``read`` and ``written`` name those whose values are needed, and those that change (None: all).
        """
        return nullcontext(dict(resting))

    def note(self, kind: str, nbytes: int) -> None:
        """Notes the memory traffic of arithmetic on state of a kind, where that is the device's."""
        self.device.note(nbytes=nbytes)


def _note(rank: Rank, *, flops: int = 0, nbytes: int = 0) -> None:
    """Notes what the device computed in the trace of the run under way: an engine may live through several runs."""
    rank.trace.compute(flops=flops, nbytes=nbytes)


# -- buckets on their way ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """The most bytes of a bucket (None: a unit), whether it travels beside other work, and further options of its
    collectives."""

    bucket_nbytes: int | None = None
    overlap: bool = False
    of_collectives: Mapping[str, Any] = field(default_factory=dict)

    def limit(self, dtype: np.dtype[Any]) -> int | None:
        """The elements that a bucket takes: at least one; None for no limit."""
        return None if self.bucket_nbytes is None else max(1, self.bucket_nbytes // dtype.itemsize)


class Move:
    """A bucket on its way, and what is done with it when it has arrived, as ``put``.

    ``found`` is a Work if ``async_op``, else what has arrived.
    """

    def __init__(self, found: Any, put: Callable[[np.ndarray], object], *, async_op: bool) -> None:
        self._found, self._put, self._async_op = found, put, async_op

    def wait(self) -> None:
        """Waits where there is something to wait for, and puts what arrived into its target."""
        found, self._found = self._found.wait() if self._async_op else self._found, None
        self._put(found)

    def drop(self) -> None:
        """Waits, and drops what arrived."""
        if self._async_op:
            self._found.wait()
