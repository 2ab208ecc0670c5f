"""Placements of state on ranks, and the whole of ZeRO's communication: the change from one placement to another.

Last `Transfers`, by which the engine's parts reach what rests on their rank: on the device, or elsewhere (offload).

Legend: n elements, N ranks.
Source of the stages: Rajbhandari, Rasley, Ruwase & He 2020 (ZeRO), section 5.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from zerosim.numerics.arrays import AnyArray, copy_elements
from zerosim.numerics.checks import is_count
from zerosim.numerics.kernels import do_nothing
from zerosim.numerics.places import DEVICE, NOTHING
from zerosim.numerics.policy import Policy
from zerosim.ranks.call import Cut, checked_cut, checked_output, checked_vector
from zerosim.ranks.rank import Rank
from zerosim.zero.layout import Bucket, Parts


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
                 out: np.ndarray | None = None, async_op: bool = False, copy_in_flight: bool = True,
                 purpose: str = "unspecified") -> Any:
    """Changes the placement of one vector, cut among the ranks by ``cut``; returns it as it then rests on this rank.

    PARTIAL to REPLICATED is an all-reduce, PARTIAL to SHARDED a reduce-scatter, SHARDED to REPLICATED an all-gather,
    REPLICATED to SHARDED a slice (no message, no copy), equal is nothing. ``vector`` is (n,), or the own chunk where
    it is SHARDED; ``async_op`` and ``copy_in_flight`` are those of the rank's collectives. Raises ValueError for what
    would unsum a sum.
    """
    cut = _checked(rank, vector, have, want, cut)
    options: dict[str, Any] = {"splits": cut, "out": out, "async_op": async_op, "copy_in_flight": copy_in_flight,
                               "purpose": purpose}
    match have, want:
        case (Placement.PARTIAL, Placement.REPLICATED):
            return rank.all_reduce(vector, **options, **policy.reduction)
        case (Placement.PARTIAL, Placement.SHARDED):
            return rank.reduce_scatter(vector, **options, **policy.reduction)
        case (Placement.SHARDED, Placement.REPLICATED):
            return rank.all_gather(vector, **options)
        case (Placement.REPLICATED, Placement.SHARDED):
            found = vector[cut[rank.index]:cut[rank.index + 1]]
        case _ if have is want:
            found = vector
        case _:
            raise ValueError(f"asked to make a {have.value} vector partial, but a sum cannot be unsummed; "
                             "keep the addends, or work with the sum")
    if async_op:
        raise ValueError(f"{have.value} to {want.value} sends nothing and is done at once; leave async_op out")
    if out is None:
        return found
    checked_output(out, found.shape, found.dtype)[...] = found
    return out


def _checked(rank: Rank, vector: np.ndarray, have: Placement, want: Placement, cut: Cut) -> Cut:
    """The cut, if it is one of the whole vector, of which ``vector`` is all or the own chunk."""
    check_placement(have)
    check_placement(want)
    checked_vector(vector, "the vector to redistribute", flat=True)
    whole = checked_cut(cut, 0, rank.size, any_length=True)
    expected = whole[rank.index + 1] - whole[rank.index] if have is SHARDED else whole[-1]
    if len(vector) != expected:
        raise ValueError(
            f"a {have.value} vector of {len(vector)} elements does not fit the cut {whole}, by which it has "
            f"{expected} on rank {rank.index}"
        )
    return whole


# -- buckets on their way ----------------------------------------------------------------------------------------------

Settle = Callable[[Any, Any, bool], None]  # what is on the device, where it rests, and whether it is added to that


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """The engine's options of these names, see `Engine`: the most bytes of a bucket, and how it travels."""

    bucket_nbytes: int | None = None
    overlap: bool = False
    copy_in_flight: bool = False
    by_micro_batch: bool = False

    def limit(self, dtype: np.dtype[Any]) -> int | None:
        """The elements that a bucket takes: at least one; None for no limit."""
        return None if self.bucket_nbytes is None else max(1, self.bucket_nbytes // dtype.itemsize)


class Move(Protocol):
    """A vector on its way to its target, until it is waited for or dropped."""

    def wait(self) -> None:
        """Waits, and puts what arrived into the target."""

    def drop(self) -> None:
        """Waits, and drops what arrived."""


def packed(rank: Rank, parts: Parts, length: int, dtype: np.dtype[Any]) -> np.ndarray:
    """The parts as one vector of this format: the only part itself, or a copy in a charged buffer."""
    if len(parts) == 1 and parts[0][1].dtype == dtype:
        return parts[0][1]
    vector = rank.memory.alloc(length, dtype, "communication_buffer", "bucket")
    for here, elements in parts:
        rank.kernels.cast_pack(elements, vector[here])
    return vector


def put(rank: Rank, values: np.ndarray, resting: Any, *, add: bool, settle: Settle | None) -> None:
    """resting = values, with ``add`` resting + values, rounded to its format; ``settle`` does so where that is not on
    the device."""
    if settle is not None:
        settle(values, resting, add)
    elif add:
        rank.kernels.add_rounded(resting, values, resting)
    else:
        rank.kernels.cast_pack(values, resting)


class BucketMove:
    """A bucket on its way from one placement to another; packed where it is in pieces, asynchronous if asked for.

    Collectives on parameters and gradients are called from here alone, but for those on whole tensors and on quantized
    values. ``wait`` puts what arrived into ``target``, with ``add`` onto what is there; before, nothing has to be
    there. Copies and sums are rounded to the target's format, by ``settle`` for a target that is not on the device.
    ``by_micro_batch``, of PARTIAL to SHARDED: the ranks' addends arrive as they are, and their owner adds one after the
    other to the target, in the order of ranks.
    """

    def __init__(self, rank: Rank, bucket: Bucket, have: Placement, want: Placement, *, policy: Policy, source: Parts,
                 target: Parts, dtype: np.dtype[Any], purpose: str, async_op: bool = False,
                 copy_in_flight: bool = False, add: bool = False, by_micro_batch: bool = False,
                 settle: Settle | None = None) -> None:
        self.rank, self.target, self.add, self.async_op, self.settle = rank, target, add, async_op, settle
        self._addends = rank.size if by_micro_batch else 1
        chunk = bucket.cut[rank.index + 1] - bucket.cut[rank.index]
        vector = packed(rank, source, chunk if have is SHARDED else bucket.length, dtype)
        copied = add or settle or by_micro_batch
        self._in_place = not copied and len(target) == 1 and target[0][1].dtype == dtype
        if by_micro_batch:
            self._found = rank.all_to_all(vector, splits=bucket.cut, async_op=async_op, purpose=purpose)
        else:
            self._found = redistribute(rank, vector, have, want, bucket.cut, policy=policy, async_op=async_op,
                                       out=target[0][1] if self._in_place else None, copy_in_flight=copy_in_flight,
                                       purpose=purpose)

    def wait(self) -> None:
        """Waits where there is something to wait for, and unpacks where the bucket did not arrive in place."""
        found = self._found.wait() if self.async_op else self._found
        self._found = None
        if self._in_place:
            return
        for number, addend in enumerate(found.reshape(self._addends, -1)):
            for here, resting in self.target:
                put(self.rank, addend[here], resting, add=self.add or number > 0, settle=self.settle)

    def drop(self) -> None:
        """Waits, and drops what arrived."""
        if self.async_op:
            self._found.wait()


# -- state where it rests ----------------------------------------------------------------------------------------------


class Transfers:
    """Brings one rank's state to where it is computed with, and back: all of it rests on the device, and nothing moves.

    `zero.offload.OffloadTransfers` does the same for state that rests on the host or on disk.
    """

    offload, update_place = NOTHING, DEVICE  # what rests elsewhere, and where the optimizer's update is computed

    def __init__(self, rank: Rank) -> None:
        self.rank, self.memory = rank, rank.memory

    def kernels_at(self, place: str) -> Any:
        """The arithmetic of the device, or of the host."""
        return self.rank.kernels if place == DEVICE else self.rank.kernels.on_host

    def alloc(self, shape: int | tuple[int, ...], dtype: Any, kind: str, name: str) -> Any:
        """A new array for state of a kind, charged where that rests."""
        return self.memory.alloc(shape, dtype, kind, name)

    def fill(self, x: Any, values: Callable[[slice], AnyArray]) -> None:
        """x (n,) becomes what ``values`` gives for each range, rounded once to its type."""
        self.rank.kernels.serving(x).fill(x, values)

    def clear(self, x: Any) -> None:
        """Sets new elements to zero."""
        x[...] = 0

    def writing(self, x: Any) -> AbstractContextManager[Any]:
        """The array itself, to be written to where it rests; or room on the host, whose values go to the disk."""
        return nullcontext(x)

    def place_of(self, x: Any) -> str:
        """The place where an array lies."""
        return DEVICE

    def at(self, place: str, x: Any, *, read: bool = True) -> Any:
        """The elements on the device or the host: ``x`` itself, or a copy, or room for one where ``read`` is False."""
        return x

    def read_in_stretches(self, gradient: Any) -> Iterable[Any]:
        """The values of a gradient, where the host or the device can read them."""
        return [gradient]

    def move(self, source: Any, target: Any, *, wait: bool = True) -> None:
        """target = source, of one shape and type, wherever they lie."""
        copy_elements(source, target)

    def settling(self, kind: str) -> Settle | None:
        """The function that puts values on the device where a kind of state rests, if that is elsewhere."""
        return None

    def staged(self, resting: Mapping[str, Any], place: str, *, read: Collection[str] | None = None,
               written: Collection[str] | None = None) -> AbstractContextManager[dict[str, Any]]:
        """The arrays at the place that computes: themselves, or copies, which go back at the end of the block.

        ``read`` and ``written`` name those whose values are needed, and those that change (None: all).
        """
        return nullcontext(dict(resting))

    def in_stretches(self, resting: Mapping[str, Any], count: int,
                     unchanged: Collection[str] = ()) -> Iterator[tuple[slice, dict[str, Any]]]:
        """The arrays (count,) where the update is computed, as `staged`, stretch by stretch."""
        yield slice(0, count), dict(resting)

    def transaction(self, needed: bool = True) -> AbstractContextManager[None]:
        """Lets all that the block writes to disk take effect at its end, or none of it, where that is ``needed``."""
        return nullcontext()

    # Where nothing moves, nothing is read ahead, under way, or to be waited for.
    read_ahead = read_first = wait = drain = abandon = forget_ahead = staticmethod(do_nothing)
