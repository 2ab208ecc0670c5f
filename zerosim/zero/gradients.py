"""Gradients reduced unit by unit as backward goes: collected into buckets, and added up over micro-batches.

Legend: n elements of a bucket; N ranks, k micro-batches. A bucket is cut by owner, so that neither bits nor bytes
depend on it. Asynchronous, one bucket is under way while backward fills the next.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zerosim.models.units import Model, Unit
from zerosim.numerics.arrays import is_same_memory, may_share_memory
from zerosim.numerics.loss_scale import LossScaler
from zerosim.optim.base import Optimizer
from zerosim.zero.buckets import Bucket, Move, Parts, buckets, limit_of, of_shard, of_whole
from zerosim.zero.param_group import Reduced, Settings, States, clear_padding
from zerosim.zero.placements import PARTIAL, SHARDED, Placement
from zerosim.zero.update import Update


@dataclass(frozen=True, slots=True)
class Source:
    """A stretch of the vector, and this rank's addends of it (stop - start,)."""

    lies: slice
    elements: np.ndarray


@dataclass(frozen=True, slots=True)
class Agreement:
    """What would make replicas drift apart unseen, were it not the same on all ranks."""

    optimizer: Optimizer
    loss_scale: LossScaler
    update: Update
    settings: str

    def at(self, micro_batch: int) -> str:
        """The text that is compared when a gradient is reduced."""
        factor = self.update.lr_factor(self.update.steps_taken + 1)
        scheduled = "" if factor is None else f", lr times {factor:g}"
        return (f"micro-batch {micro_batch}, loss scale {self.loss_scale.scale:g}, {self.optimizer}{scheduled}, "
                f"{self.settings}")


def digest_of(model: Model, settings: Mapping[str, Settings], others: object) -> str:
    """What else must be the same, as a checksum: the policy and the optimizer of each parameter, the first 16 of its
    first values, and ``others``."""
    first = [unit.initial(name, 0, min(16, math.prod(shape))).tobytes()
             for unit in model.units for name, shape in unit.shapes.items()]
    told = repr((sorted(settings.items()), others)).encode()
    return f"settings {zlib.crc32(b''.join([told, *first])):08x} (policy, groups, clip_norm, seed, first values)"


class Reduction:
    """The gradients of one kin of parameters, where they do not rest partial."""

    def __init__(self, states: States, *, bucket_nbytes: int | None, overlap: bool, agreement: Agreement) -> None:
        self.states, self.overlap, self.agreement = states, overlap, agreement
        self.limit = limit_of(bucket_nbytes, states.policy.reduce_dtype.itemsize)
        self._sources: list[Source] = []
        self._under_way: list[Move] = []

    def add(self, lies: slice, whole: np.ndarray, micro_batch: int) -> None:
        """Takes a stretch of a micro-batch's gradient; reduces it at once, or when its bucket is full.

        Backward comes from the end of the vector, and so buckets are filled from there. The first micro-batch of a
        step, number 0, sets what rests; later ones add to it.
        """
        high = lies.stop
        while self.limit is not None and high > lies.start:
            room = self.limit - sum(len(source.elements) for source in self._sources)
            low = max(lies.start, high - room)
            self._sources.append(Source(slice(low, high), whole[low - lies.start:high - lies.start]))
            if high - low == room:
                self.flush(micro_batch)
            high = low
        if self.limit is None:
            self._sources.append(Source(lies, whole))
            self.flush(micro_batch)

    def flush(self, micro_batch: int) -> None:
        """Reduces what has been collected."""
        if not self._sources:
            return
        sources = sorted(self._sources, key=lambda source: source.lies.start)
        self._sources = []
        self.finish()
        states, bucket = self.states, Bucket(self.states.layout, tuple(source.lies for source in sources))
        resting = (of_shard(bucket, states.rank.index, states.gradient) if states.stage.gradients is SHARDED
                   else of_whole(bucket, states.gradient))
        self._under_way.append(Move(
            states, bucket, PARTIAL, states.stage.gradients, source=_parts(bucket, sources), target=resting,
            dtype=states.policy.reduce_dtype, purpose="gradients", agreement=self.agreement.at(micro_batch),
            async_op=self.overlap, store=partial(_add, states.rank.kernels) if micro_batch else None))
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        """Waits for the bucket that is under way, and adds it to what rests."""
        while self._under_way:
            self._under_way.pop().finish()

    def forget(self) -> None:
        """Drops what was collected and what is under way."""
        self._sources = []
        while self._under_way:
            self._under_way.pop().drop()


def _add(kernels: Any, resting: np.ndarray, arrived: np.ndarray) -> None:
    """An addition of a later micro-batch, rounded to the resting format."""
    kernels.add_rounded(resting, arrived, resting)


def _parts(bucket: Bucket, sources: list[Source]) -> Parts:
    """The parts of the bucket's vector in the sources, which are in rising order."""
    if not bucket.is_packed:
        return [(slice(0, bucket.length), sources[0].elements)]
    starts, parts = [source.lies.start for source in sources], []
    for here, lies in bucket.parts():
        source = sources[int(np.searchsorted(starts, lies.start, "right")) - 1]
        parts.append((here, source.elements[lies.start - source.lies.start:lies.stop - source.lies.start]))
    return parts


# ----------------------------------------------------------------------------------------------------
# Gradients from a unit's backward to the optimizer: where they are written, added up over micro-batches, and reduced
# Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches.
# Kept PARTIAL, the addends of all micro-batches are summed first and reduced once; kept SHARDED or REPLICATED, each
# unit's gradient of each micro-batch is reduced as backward goes, then added. At k > 1 the two orders differ in bits.


class Gradients:
    """One step's gradients of one rank, of one kin of trained parameters."""

    def __init__(self, states: States, *, bucket_nbytes: int | None, overlap: bool, agreement: Agreement) -> None:
        self.states, self.rank, self.policy, self.layout = states, states.rank, states.policy, states.layout
        self.placement, self.bucket_nbytes = states.stage.gradients, bucket_nbytes
        self.agreement = agreement
        self.micro_batch = 0
        self._reduction = Reduction(states, bucket_nbytes=bucket_nbytes, overlap=overlap, agreement=agreement)

    # -- during backward ----------------------------------------------------------------------------------------------

    def place(self, unit: str) -> np.ndarray:
        """Where a unit's backward writes (u,), in the compute dtype: where it rests, or new memory."""
        lies = self.layout.units[unit]
        if self._writes_at_rest:
            return self.states.gradient[lies]
        whole = self.rank.memory.alloc(lies.stop - lies.start, self.policy.compute_dtype, "unit_gradient", unit)
        padding = self.layout.padding(lies.start, lies.stop)
        if not self.rank.memory.debug:
            whole[padding.start - lies.start:] = 0
        return whole

    @property
    def _writes_at_rest(self) -> bool:
        """True where the first micro-batch's local gradient is what rests, format and all."""
        same_format = self.policy.accumulate_dtype == self.policy.compute_dtype
        return self.placement is PARTIAL and self.micro_batch == 0 and same_format

    def absorb(self, unit: str, whole: np.ndarray) -> None:
        """Takes a unit's gradient (u,): adds it to what rests, reduced first where it does not rest partial."""
        lies = self.layout.units[unit]
        if self.placement is not PARTIAL:
            self._reduction.add(lies, whole, self.micro_batch)
            return
        resting = self.states.gradient[lies]
        if self.micro_batch > 0:
            self.rank.kernels.add_rounded(resting, whole, resting)
        elif not may_share_memory(whole, resting):
            self.rank.kernels.cast_pack(whole, resting)

    def end_of_backward(self) -> None:
        """Reduces what waits in a bucket that is not full: no bucket has two micro-batches in it."""
        self._reduction.flush(self.micro_batch)
        self._reduction.finish()
        self.micro_batch += 1

    def reset(self) -> None:
        """Forgets this step's gradients: the next micro-batch is the first."""
        self.micro_batch = 0
        self._reduction.forget()

    # -- after backward -----------------------------------------------------------------------------------------------

    def reduce(self, scale: float, token_share: float) -> None:
        """Leaves the sum over ranks, as the optimizer needs it, in ``states.reduced``: at rest, or a new array.

        It is to be divided by S·N·k, and by the share of places that have a token.
        """
        divisor = self.policy.divisor(self.rank.size, self.micro_batch, scale) * token_share
        have, want = self.placement, self.states.stage.optimizer
        if have is want or (have is not PARTIAL and want is SHARDED):
            # The same, or the optimizer reads its slices of the replicated sum.
            self.states.reduced = Reduced(self.states.gradient, have, divisor)
            return
        out, dtype = self._target(want), self._moving_dtype
        ranges = [slice(region.low, region.high) for region in self.layout.regions]
        for bucket in buckets(self.layout, ranges, limit_of(self.bucket_nbytes, dtype.itemsize)):
            with self.rank.trace.span(self.layout.region_at(bucket.ranges[0].start).name):
                Move(self.states, bucket, have, want, source=self._parts(bucket, self.states.gradient, have),
                     target=self._parts(bucket, out, want), dtype=dtype, purpose="gradients",
                     agreement=self.agreement.at(self.micro_batch)).finish()
        self.states.reduced = Reduced(out, want, divisor)

    def _parts(self, bucket: Bucket, array: np.ndarray, placement: Placement) -> Parts:
        return of_shard(bucket, self.rank.index, array) if placement is SHARDED else of_whole(bucket, array)

    @property
    def _moving_dtype(self) -> np.dtype:
        """Addends travel in the reduce format, sums in that in which they rest."""
        return self.policy.reduce_dtype if self.placement is PARTIAL else self.states.gradient.dtype

    def _target(self, want: Placement) -> np.ndarray:
        """In place where an all-reduce can be; else a new array in the format that arrives."""
        dtype = self._moving_dtype
        if self.placement is PARTIAL and want is not SHARDED and dtype == self.states.gradient.dtype:
            return self.states.gradient
        out = self.rank.memory.alloc(self.states.length(want), dtype, "gradient", "reduced gradient")
        clear_padding(out, self.layout, want, self.rank)
        return out


# -- What a unit's backward wrote, sorted by kin: checked, completed with borrowers' parts, and handed on ------------
# Legend: u elements of one padded unit.
# A parameter that another unit borrows (tied weights) is complete only after its own unit's backward, which is its last
# user: the borrower's part is added first, its own second, in the accumulate format, and the sum is reduced once.


class Accumulator:
    """One step's gradients of one rank."""

    def __init__(self, families: Sequence[States], *, bucket_nbytes: int | None, overlap: bool,
                 agreement: Agreement) -> None:
        self.families, self.rank = families, families[0].rank
        self.trained = {states: Gradients(states, bucket_nbytes=bucket_nbytes, overlap=overlap, agreement=agreement)
                        for states in families if not states.frozen}
        self.micro_batch = 0
        self._lent: dict[str, dict[States, np.ndarray]] = {}  # by unit: the vectors of which it was lent views
        self._borrowed: dict[str, np.ndarray] = {}            # by parameter: what its borrowers wrote, added up

    def views(self, unit: Unit) -> dict[str, np.ndarray]:
        """Where the unit writes its gradients, by name: views of one vector (u,) per kin; new memory for borrowed ones.

        A frozen parameter has a place too, which nobody reads.
        """
        lent = self._lent[unit.name] = {states: self._place(states, unit.name) for states in self.families
                                        if unit.name in states.layout.units}
        views = {name: view for states, whole in lent.items()
                 for name, view in states.layout.unit_views(unit.name, whole).items()}
        for name in unit.tied_weights:
            states = self._family_of(name)
            views[name] = self.rank.memory.alloc(states.layout.by_name[name].shape, states.policy.compute_dtype,
                                                 "unit_gradient", f"{unit.name} {name}")
        return views

    def _place(self, states: States, unit: str) -> np.ndarray:
        if states in self.trained:
            return self.trained[states].place(unit)
        lies = states.layout.units[unit]
        return self.rank.memory.alloc(lies.stop - lies.start, states.policy.compute_dtype, "unit_gradient", unit)

    def _family_of(self, name: str) -> States:
        return next(states for states in self.families if name in states.layout.by_name)

    def absorb(self, unit: Unit, gradients: Mapping[str, np.ndarray | None]) -> None:
        """Takes the gradients that a unit's backward returned; None for a parameter that was not used, as zeros.

        Raises ValueError unless there is one of the right shape for each parameter, own or borrowed.
        """
        if unit.name not in self._lent:
            self.views(unit)
        lent = self._lent.pop(unit.name)
        own = {name: view for states, whole in lent.items()
               for name, view in states.layout.unit_views(unit.name, whole).items()}
        self._check(unit, gradients)
        for name, view in own.items():
            self._write(gradients[name], view)
        for states, whole in lent.items():
            if states in self.trained:
                self.trained[states].absorb(unit.name, self._completed(states, unit.name, whole))
        for name in unit.tied_weights:
            self._note_borrower(name, gradients[name])

    def _check(self, unit: Unit, gradients: Mapping[str, np.ndarray | None]) -> None:
        wanted = dict(unit.shapes) | {name: self._family_of(name).layout.by_name[name].shape
                                      for name in unit.tied_weights}
        found = {name: wanted.get(name) if gradient is None else gradient.shape for name, gradient in gradients.items()}
        if found != wanted:
            raise ValueError(
                f"the backward of unit {unit.name!r} returned gradients of the shapes {found}; its parameters "
                f"have {wanted}, so return one of that shape for each, or None for one that was not used"
            )

    def _write(self, gradient: np.ndarray | None, place: np.ndarray) -> None:
        if gradient is None:
            place[...] = 0
        elif not is_same_memory(gradient, place):
            self.rank.kernels.cast_pack(gradient, place)

    def _note_borrower(self, name: str, gradient: np.ndarray | None) -> None:
        """Keeps a borrower's part until the parameter's own unit has gone back."""
        states = self._family_of(name)
        if gradient is None or states.frozen:
            return
        part = self.rank.memory.alloc(gradient.size, states.policy.accumulate_dtype, "unit_gradient", name)
        self.rank.kernels.cast_pack(gradient.reshape(-1), part)
        if name in self._borrowed:
            self.rank.kernels.add_rounded(self._borrowed[name], part, part)
        self._borrowed[name] = part

    def _completed(self, states: States, unit: str, whole: np.ndarray) -> np.ndarray:
        """The unit's gradient with its borrowers' parts: theirs first, its own second, in the accumulate format."""
        borrowed = [entry for entry in states.layout.unit_entries(unit) if entry.name in self._borrowed]
        if borrowed and whole.dtype != states.policy.accumulate_dtype:
            sums = self.rank.memory.alloc(len(whole), states.policy.accumulate_dtype, "unit_gradient", unit)
            self.rank.kernels.cast_pack(whole, sums)
            whole = sums
        start = states.layout.units[unit].start
        for entry in borrowed:
            own = whole[entry.low - start:entry.high - start]
            self.rank.kernels.add_rounded(self._borrowed.pop(entry.name), own, own)
        return whole

    def end_of_backward(self) -> None:
        """Closes a micro-batch: what waits in buckets is reduced."""
        for gradients in self.trained.values():
            gradients.end_of_backward()
        self.micro_batch += 1

    def reduce(self, scale: float, token_share: float) -> None:
        """Leaves every kin's sum over ranks where the optimizer finds it."""
        for gradients in self.trained.values():
            gradients.reduce(scale, token_share)

    def reset(self) -> None:
        """Forgets this step's gradients: the next micro-batch is the first."""
        self.micro_batch = 0
        self._lent.clear()
        self._borrowed.clear()
        for gradients in self.trained.values():
            gradients.reset()
