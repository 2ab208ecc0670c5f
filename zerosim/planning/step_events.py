"""One training step as a stream of events, in the engine's order; `step_folds` reads memory and seconds off it.

Legend: N ranks, k micro-batches; u elements of one padded unit, c = u/N of it a rank's own chunk; B sequences of a
micro-batch. Activations and tokens grow with B, all else does not.

The order is that of `zerosim.zero`, and stands here a second time so that a plan takes milliseconds. A collective's
buffers are held from its issue to its wait, and both are events, so what is held does not depend on time.

- A unit's weights are gathered when it is entered. With prefetch they were issued while an earlier one computed.
- A unit's gradient is reduced when it has gone back. With overlap the reduction is waited for when the next unit has
  gone back: until then its gradient, two chunks of hops, and where it is to be added its sum stay.
- Whole gradients are reduced after backward, unit by unit, beside nothing; with overlap in the step's last backward, as
  above.
- On a mesh these rings are of a node's ranks, whole gradients are reduced to shards, and shards are all-reduced across
  nodes: after backward, unit by unit, beside nothing; with overlap in the step's last backward, one after the other,
  each as soon as the unit's ring inside nodes has been waited for.
- Whole parameters of which each rank has updated its part are gathered in place. With overlap each unit is issued when
  it is updated, or where the host updates when all are, and none is waited for before all are updated.
- What rests off the device (offload) comes there when it is needed, in memory of its own: parameters unit by unit, the
  addends of gradients with the last backward; sums of gradients leave it as they are made.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from zerosim.numerics.places import DEVICE, DISK
from zerosim.numerics.quantization import Blockwise
from zerosim.planning.closed_forms import AGREEMENT_NBYTES, STAGES, Job
from zerosim.planning.step_activations import Place, passes

ALL, INSIDE, ACROSS = "all", "inside", "across"
GATHERED, SECONDARY, GRADIENT, BUFFER = "gathered parameters", "secondary parameters", "gradients", "buffers"
HELD = (GATHERED, SECONDARY, GRADIENT, BUFFER)
TOKEN_NBYTES = 8  # int64, of tokens and of targets, as frameworks index


class HeldBytes(NamedTuple):
    """So many bytes of a kind come, or go where it is a negative number."""

    kind: str
    nbytes: int


class CollectiveIssue(NamedTuple):
    """A ring, or an all-to-all, of so many ranks begins to move a vector of so many bytes: inside nodes, across them,
    or over all ranks."""

    operation: str
    unit: int
    nbytes: int
    ranks: int
    where: str = ALL

    @property
    def key(self) -> tuple[str, int]:
        """Its name until its wait."""
        return self.operation, self.unit


class CollectiveWait(NamedTuple):
    """The program waits for what was issued."""

    key: tuple[str, int]


class At(NamedTuple):
    """A unit computes (forward, again, backward, update), or is between two computations of which something rests."""

    phase: str
    unit: int


StepEvent = HeldBytes | CollectiveIssue | CollectiveWait | At
START, AFTER_BACKWARD = At("start", 0), At("after backward", 0)


class Reducing(NamedTuple):
    """The reduction that is under way: its name, and the bytes of gradient and of buffers that go with its wait."""

    key: tuple[str, int]
    gradient_nbytes: int
    buffer_nbytes: int


def step_events(job: Job) -> Iterator[StepEvent]:
    """The whole step: k micro-batches, and what follows them.

    Raises ValueError for a layout other than per_unit, and for states that are no stage's.
    """
    return chain(*(micro_batch(job, number) for number in range(job.micro_batches)), after_backward(job))


@lru_cache(maxsize=64)  # plans of other batches and sequences have the same events
def micro_batch(job: Job, number: int = 0) -> tuple[StepEvent, ...]:
    """Forward and backward of the step's micro-batch of this number: 0 sets gradients, the others add to them.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> [event[:4] for event in micro_batch(Job((4, 2), 2, STAGES[2]))
    ...  if isinstance(event, CollectiveIssue | CollectiveWait)]
    [('reduce_scatter', 1, 4, 2), (('reduce_scatter', 1),), ('reduce_scatter', 0, 8, 2), (('reduce_scatter', 0),)]

    Raises ValueError as `step_events` does.
    """
    return tuple(MicroBatchWalk(_checked(job), number).events())


class MicroBatchWalk:
    """The walk of one micro-batch, with the units that are gathered and the reduction under way while it goes."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.options, self.first, self.last = job, job.options, number == 0, number == job.micro_batches - 1
        self.lengths = job.padded_lengths
        self.written, self.added = job.policy.compute_dtype, job.policy.accumulate_dtype
        self.reduced, self.itemsize = job.policy.reduce_dtype, job.policy.compute_dtype.itemsize
        self.parameters_off_device = self.options.offload.parameters != DEVICE
        self.gradients_off_device = self.options.offload.gradients != DEVICE
        self.kept_gathered = frozenset(job.kept_gathered)
        self.gathered: dict[int, bool] = {}      # by unit: True while its gather is under way
        self.zeropp = self.options.parts
        self.secondary = set(range(len(self.lengths))) if self.zeropp.hpz and number else set[int]()
        self.gather_buffers: dict[int, int] = {}       # by unit: buffers of the gather that is under way
        self.reducing: Reducing | None = None
        self.across: Reducing | None = None

    def events(self) -> Iterator[StepEvent]:
        """Forward, loss and backward, and what is waited for at the end."""
        last = len(self.lengths) - 1
        forward, backward = passes(len(self.lengths), self.job.recompute_units)
        yield START
        yield from self._pass(forward)
        yield from (At("loss", last), At("loss end", last))
        yield from self._pass(backward)
        yield from self._reduced()
        yield from self._reduced_across()
        for unit in list(self.gathered):
            yield from self._wait_for(unit)
            yield self._reshard(unit)

    def _pass(self, places: Sequence[Place]) -> Iterator[StepEvent]:
        """The places in their order, with their units' weights: gathered once for what a unit does without a break.

        Units ahead are those of the visits that follow.
        """
        visits = [(unit, [phase for phase, _ in visit]) for unit, visit in groupby(places, key=itemgetter(1))]
        for index, (unit, phases) in enumerate(visits):
            ahead = [after for after, _ in visits[index + 1:index + 1 + self.options.prefetch]]
            inside = [self._back(unit) if phase == "backward" else iter([At(phase, unit), At(f"{phase} end", unit)])
                      for phase in phases]
            yield from self._unsharded(unit, ahead, chain(*inside))
            if phases[-1] == "backward":
                yield At("backward end", unit)

    # -- weights ------------------------------------------------------------------------------------------------------

    def _unsharded(self, unit: int, ahead: Sequence[int], inside: Iterator[StepEvent]) -> Iterator[StepEvent]:
        """The events inside, with the weights of the unit and those that it uses of tied units."""
        if not (self.job.states.parameters_sharded or self.parameters_off_device):
            yield from inside
            return
        used = [unit, *dict.fromkeys(owner for user, owner in self.job.tied if user == unit)]
        for one in used:
            yield from self._gather(one)
            yield from self._wait_for(one)
        for one in ahead:
            yield from self._gather(one)
        yield from inside
        for one in used:
            if one not in self.kept_gathered:
                yield self._reshard(one)

    def _gather(self, unit: int) -> Iterator[StepEvent]:
        """Begins to gather a unit, unless that is done or under way."""
        nbytes, form, job = self.itemsize * self.lengths[unit], self.zeropp.weights, self.job
        if unit in self.gathered:
            return
        yield HeldBytes(GATHERED, nbytes)
        self.gathered[unit] = True
        if not job.states.parameters_sharded:
            pass  # it comes from where it rests
        elif unit in self.secondary:
            yield CollectiveIssue("all_gather", unit, nbytes, job.ranks // self.options.nodes, INSIDE)
        else:
            quantized = 0 if form is None else form.nbytes(self.lengths[unit] // job.ranks)
            fetched = nbytes // job.shards * self.parameters_off_device  # the rank's own chunk, from where it rests
            until_quantized = 0 if form is None else fetched
            self.gather_buffers[unit] = quantized * (1 + job.ranks) + fetched - until_quantized  # sent, and received
            yield HeldBytes(BUFFER, self.gather_buffers[unit] + until_quantized)
            yield ring("all_gather", unit, nbytes if form is None else quantized * job.ranks, job)
            if until_quantized:
                yield HeldBytes(BUFFER, -until_quantized)

    def _wait_for(self, unit: int) -> Iterator[StepEvent]:
        """Waits for a gather; the first one leaves a secondary shard."""
        if self.gathered[unit] and self.job.states.parameters_sharded:
            yield CollectiveWait(("all_gather", unit))
            yield HeldBytes(BUFFER, -self.gather_buffers.pop(unit, 0))
            if self.zeropp.hpz and unit not in self.secondary:
                self.secondary.add(unit)
                yield HeldBytes(SECONDARY, secondary_nbytes(self.job, unit))
        self.gathered[unit] = False

    def _reshard(self, unit: int) -> StepEvent:
        del self.gathered[unit]
        return HeldBytes(GATHERED, -self.itemsize * self.lengths[unit])


    # -- gradients ----------------------------------------------------------------------------------------------------

    def _back(self, unit: int) -> Iterator[StepEvent]:
        """A unit goes back, and its gradient is accumulated; where others use its weights, theirs is added first."""
        states, length, written, added = self.job.states, self.lengths[unit], self.written, self.added
        at_rest = not states.gradients_sharded and self.first and written == added and not self.gradients_off_device
        gradient = 0 if at_rest else length * written.itemsize
        tied = [*zip(self.job.tied, self.job.tied_lengths, strict=True)]
        tied_elements = sum(n for (user, _), n in tied if user == unit)  # of weights that are another unit's
        users = [n for (_, owner), n in tied if owner == unit]           # elements that its users have written
        wide_sum = length * added.itemsize if users and written != added else 0
        whole, dtype = (wide_sum, added) if wide_sum else (gradient, written)
        yield HeldBytes(GRADIENT, gradient + tied_elements * written.itemsize)
        yield from (At("backward", unit), At("accumulated", unit))
        if users:
            yield HeldBytes(GRADIENT, wide_sum)
            yield HeldBytes(GRADIENT, -sum(users) * added.itemsize)
        if states.gradients_sharded:
            yield from self._reduce(unit, whole, dtype)
        elif self.last and self.gradients_off_device:
            yield from self._reduce_addends(unit, whole, dtype, wide_sum)
        elif self.last and self.options.overlap:
            yield from self._reduce_resting(unit)
        if tied_elements:
            yield HeldBytes(GRADIENT, tied_elements * added.itemsize)
        in_flight = self.reducing.gradient_nbytes if self.reducing else 0
        yield HeldBytes(GRADIENT, in_flight - (gradient + wide_sum + tied_elements * written.itemsize))

    def _reduce(self, unit: int, whole: int, dtype: np.dtype[Any]) -> Iterator[StepEvent]:
        """Reduces one unit's gradient of so many bytes."""
        if self.zeropp.gradients is not None:
            yield from self._exchange(unit, dtype, self.zeropp.gradients)
            return
        length, chunk = self.lengths[unit], self.lengths[unit] // self.job.shards
        cast = 0 if self.reduced == dtype else length * self.reduced.itemsize
        in_place = self.first and self.reduced == self.added and not self.gradients_off_device
        received = (0 if in_place else chunk * self.reduced.itemsize) + hops_nbytes(self.job, chunk, self.job.shards)
        operation = "reduce_scatter"
        if self.options.by_micro_batch:  # all addends of the rank's own chunk
            received, operation = length * self.reduced.itemsize, "all_to_all"
        yield from self._begin(ring(operation, unit, length * self.reduced.itemsize, self.job), cast + received,
                               0 if cast or not self.options.overlap else whole)

    def _begin(self, issue: CollectiveIssue, buffers: int, gradient: int = 0, addends: int = 0) -> Iterator[StepEvent]:
        """Begins a reduction after the one that is under way; with overlap it goes on. Bytes of gradient and of
        buffers, and of addends that are in one, go when it is waited for."""
        yield from self._reduced()
        yield from (HeldBytes(BUFFER, buffers), issue)
        self.reducing = Reducing(issue.key, gradient, buffers + addends)
        if not self.options.overlap:
            yield from self._reduced()

    def _reduce_addends(self, unit: int, whole: int, dtype: np.dtype[Any], wide_sum: int) -> Iterator[StepEvent]:
        """Reduces the step's gradient of one unit, whose last addend of so many bytes is on the device, to which the
        others come; the sum leaves it."""
        reduced, added, length, job = self.reduced, self.added, self.lengths[unit], self.job
        others = 0 if self.first and dtype == added else length * added.itemsize  # the sum of all addends
        yield HeldBytes(BUFFER, others)
        freed = wide_sum * (others > 0)  # where a tied unit's own sum has been added to that of earlier micro-batches
        yield HeldBytes(GRADIENT, -freed)
        cast = 0 if reduced == (added if others else dtype) else length * reduced.itemsize
        chunk, operation = length // job.shards, whole_reduction(job)
        received = chunk if operation == "reduce_scatter" else length
        sends_source = not cast and self.options.overlap  # which is held until the wait
        yield from self._begin(ring(operation, unit, length * reduced.itemsize, job),
                               cast + hops_nbytes(job, chunk, job.shards) + received * reduced.itemsize,
                               whole * (sends_source and not others), others * sends_source)
        yield HeldBytes(BUFFER, -others * (not sends_source))
        yield HeldBytes(GRADIENT, freed)

    def _exchange(self, unit: int, dtype: np.dtype[Any], form: Blockwise) -> Iterator[StepEvent]:
        """Begins to reduce one unit's gradient by two all-to-alls, of which the second follows when the first is
        waited for."""
        job, length = self.job, self.lengths[unit]
        nbytes = form.nbytes(length // job.ranks) * job.ranks
        cast = 0 if self.reduced == dtype else length * self.reduced.itemsize
        yield from self._reduced()
        yield HeldBytes(BUFFER, cast + 2 * nbytes)  # sent, and received
        yield CollectiveIssue("all_to_all", unit, nbytes, job.ranks // self.options.nodes, INSIDE)
        in_flight = nbytes * (1 + self.options.overlap)
        yield HeldBytes(BUFFER, in_flight - cast - 2 * nbytes)
        self.reducing = Reducing(("all_to_all", unit), 0, in_flight)
        if not self.options.overlap:
            yield from self._reduced()

    def _exchanged(self, unit: int, held: int, form: Blockwise) -> Iterator[StepEvent]:
        """Waits for the first all-to-all, adds up in fp32, and does the same across nodes."""
        ranks, nodes, length = self.job.ranks, self.options.nodes, self.lengths[unit]
        chunk = form.nbytes(length // ranks)
        yield CollectiveWait(("all_to_all", unit))
        yield HeldBytes(BUFFER, chunk * ranks - held)
        sums = 4 * (length * nodes // ranks) + 2 * chunk * nodes + 4 * (length // ranks)
        yield from at_once(CollectiveIssue("all_to_all", unit, chunk * nodes, nodes, ACROSS), sums)
        yield HeldBytes(BUFFER, -chunk * ranks)

    def _reduce_resting(self, unit: int) -> Iterator[StepEvent]:
        """Reduces the step's gradient of one unit, where it rests."""
        if unit == len(self.lengths) - 1:  # which goes back first
            yield HeldBytes(GRADIENT, sum_nbytes(self.job))
        yield from self._begin(*resting_issue(self.job, unit))

    def _reduced(self) -> Iterator[StepEvent]:
        """Waits for the reduction that is under way; nodes then begin to add up what they have of the step."""
        if self.reducing is not None:
            (_, unit), reducing, self.reducing = self.reducing.key, self.reducing, None
            if self.zeropp.gradients is not None:
                yield from self._exchanged(unit, reducing.buffer_nbytes, self.zeropp.gradients)
                return
            yield CollectiveWait(reducing.key)
            yield HeldBytes(BUFFER, -reducing.buffer_nbytes)
            yield HeldBytes(GRADIENT, -reducing.gradient_nbytes)
            if self.options.replicas > 1 and self.last and self.options.overlap:
                yield from self._reduced_across()
                buffers, freed, issue = across_issue(self.job, unit)
                yield from (HeldBytes(BUFFER, buffers + freed), issue, HeldBytes(BUFFER, -freed))
                self.across = Reducing(issue.key, 0, buffers)

    def _reduced_across(self) -> Iterator[StepEvent]:
        """Waits for the nodes."""
        if self.across is not None:
            yield CollectiveWait(self.across.key)
            yield HeldBytes(BUFFER, -self.across.buffer_nbytes)
            self.across = None


def secondary_nbytes(job: Job, unit: int) -> int:
    """Bytes of a rank's secondary shard of a unit."""
    return job.padded_lengths[unit] * job.options.nodes // job.ranks * job.policy.compute_dtype.itemsize


def ring(operation: str, unit: int, nbytes: int, job: Job) -> CollectiveIssue:
    """A collective of the ranks that have a shard each: a ring, or addends to their owners."""
    return CollectiveIssue(operation, unit, nbytes, job.shards, INSIDE if job.options.replicas > 1 else ALL)


def at_once(issue: CollectiveIssue, buffers: int) -> tuple[StepEvent, ...]:
    """A collective beside nothing, with bytes of buffers that come for it and go."""
    return HeldBytes(BUFFER, buffers), issue, CollectiveWait(issue.key), HeldBytes(BUFFER, -buffers)


def resting_issue(job: Job, unit: int) -> tuple[CollectiveIssue, int]:
    """The reduction of a unit's whole gradient, where it rests, and bytes of its buffers: a cast, and hops."""
    length, reduced = job.padded_lengths[unit], job.policy.reduce_dtype
    cast = 0 if reduced == job.policy.accumulate_dtype else length * reduced.itemsize
    return (ring(whole_reduction(job), unit, length * reduced.itemsize, job),
            cast + hops_nbytes(job, length // job.shards, job.shards))


def across_issue(job: Job, unit: int) -> tuple[int, int, CollectiveIssue]:
    """The all-reduce of a unit's shards across nodes: bytes of its buffers, of what more there is before, the call.

    Shards are added up where they rest, if that is on the device and in the format in which they travel. Else they are
    cast into a buffer, and come back in another; and what rests elsewhere comes to the device first.
    """
    shard, reduced, nodes = job.padded_lengths[unit] // job.shards, job.policy.reduce_dtype, job.options.replicas
    off_device, cast = job.options.offload.gradients != DEVICE, job.reduced_dtype != reduced
    fetched = shard * job.reduced_dtype.itemsize * off_device
    buffers = shard * reduced.itemsize * (cast + (cast or off_device)) + hops_nbytes(job, shard // nodes, nodes)
    freed = max(0, fetched + shard * reduced.itemsize - buffers) * cast  # when it is cast, before the other buffers
    return (buffers + fetched * (not cast), freed,
            CollectiveIssue("all_reduce", unit, shard * reduced.itemsize, nodes, ACROSS))


def hops_nbytes(job: Job, chunk: int, ranks: int) -> int:
    """Bytes of partial sums that a rank receives in turn while it reduces: two chunks, one where two ranks make the
    ring, none where one does; where the wire has a format of its own, what leaves first is cast into one of them."""
    chunks = min(2, ranks - 1) if job.wire_dtype == job.policy.reduce_dtype else 2 * (ranks > 1)
    return chunk * job.wire_dtype.itemsize * chunks


def whole_reduction(job: Job) -> str:
    """The collective that reduces whole gradients: to shards, where nodes are to add up theirs."""
    return "reduce_scatter" if job.reduces_to_shards else "all_reduce"


def sum_nbytes(job: Job) -> int:
    """Bytes of a rank's sum of whole gradients over the ranks of a ring, where it does not replace the addends."""
    new = job.reduces_to_shards or job.policy.reduce_dtype != job.policy.accumulate_dtype
    return job.held(job.reduces_to_shards) * job.policy.reduce_dtype.itemsize if new else 0


def _checked(job: Job) -> Job:
    """The job; ValueError for one of which not every rank does the same with each unit, or that is no stage."""
    if job.layout != "per_unit" or job.states not in STAGES.values():
        raise ValueError("a step's events are of ZeRO's stages and of the layout per_unit, in which every rank owns as "
                         f"much of each unit, found {job.layout!r} and {job.states}; for others there are the closed "
                         "forms")
    if job.options.parts.gradients and not job.states.gradients_sharded:
        raise ValueError("a step's events with quantized gradients are of those that rest sharded; take stage 2 or 3")
    return job


def after_backward(job: Job) -> Iterator[StepEvent]:
    """Reduction of whole gradients, the optimizer's update unit by unit, and the all-gather of whole parameters.

    Raises ValueError as `step_events` does.
    """
    states, policy, lengths = _checked(job).states, job.policy, job.padded_lengths
    reduced = policy.reduce_dtype.itemsize
    yield AFTER_BACKWARD
    off_device = job.options.offload.gradients != DEVICE
    held = 0 if states.gradients_sharded or off_device else sum_nbytes(job)
    if not (states.gradients_sharded or job.options.overlap or off_device):
        yield HeldBytes(GRADIENT, held)
        for unit in range(len(lengths)):
            yield from at_once(*resting_issue(job, unit))
    if job.options.replicas > 1:
        if not job.options.overlap:
            for unit in range(len(lengths)):
                buffers, freed, issue = across_issue(job, unit)
                yield from at_once(issue, buffers + freed)
        if not (states.gradients_sharded or states.optimizer_sharded):
            in_place = policy.reduce_dtype == policy.accumulate_dtype or off_device
            whole = 0 if in_place else job.held(False) * reduced
            yield HeldBytes(GRADIENT, whole)
            for unit, length in enumerate(lengths):
                yield from at_once(ring("all_gather", unit, length * reduced, job),
                                   (length + length // job.shards) * reduced * off_device)
            yield HeldBytes(GRADIENT, -held)
            held = whole
    if job.options.parts.hpz:
        yield HeldBytes(SECONDARY, -sum(secondary_nbytes(job, unit) for unit in range(len(lengths))))
    yield At("scan", 0)
    for nbytes in filter(None, job.control_nbytes):
        yield from at_once(ring("all_gather", 0, nbytes * job.shards, job), nbytes * job.shards)
    yield from _updated(job, held)


def _updated(job: Job, held: int) -> Iterator[StepEvent]:
    """Each unit is updated; the bytes of gradients that are `held` go when all are; then replicas are made equal."""
    lengths, itemsize = job.padded_lengths, job.policy.compute_dtype.itemsize
    gathered, places = job.states.gathers_after_update, job.options.offload
    off_device = places.parameters != DEVICE  # each unit comes to the device then, and goes again
    ahead = gathered and job.options.overlap and not off_device
    agreement = at_once(CollectiveIssue("all_gather", 0, AGREEMENT_NBYTES * job.ranks, job.ranks),
                        AGREEMENT_NBYTES * job.ranks)  # that files are written
    for unit, length in enumerate(lengths):
        yield At("update", unit)
        if ahead and places.optimizer == DEVICE:
            yield ring("all_gather", unit, length * itemsize, job)
    yield from agreement if places.optimizer == DISK else ()
    for unit, length in enumerate(lengths if ahead and places.optimizer != DEVICE else ()):
        yield ring("all_gather", unit, length * itemsize, job)
    yield HeldBytes(GRADIENT, -held)
    for unit, length in enumerate(lengths if gathered else ()):
        buffers = (length + length // job.shards) * itemsize * off_device
        yield HeldBytes(BUFFER, buffers)
        if not ahead:
            yield ring("all_gather", unit, length * itemsize, job)
        yield CollectiveWait(("all_gather", unit))
        yield HeldBytes(BUFFER, -buffers)
    yield from agreement if gathered and places.parameters == DISK else ()
