"""One training step in the order in which the engine's program takes it: what is held, sent and computed, and when.

Legend: N ranks, k micro-batches; u elements of one padded unit, c = u/N of it a rank's own chunk.

A collective's buffers are held from its issue to its wait, and both stand in the program, so what is held does not
depend on time. `passing` reads the bytes off it, `clock` the seconds: one walk for both, with the same levers.

- A unit's weights are gathered when it is entered. With prefetch they were issued while an earlier one computed: then
  they land in a buffer of u elements, and are copied at the wait.
- A unit's gradient is reduced when it has gone back. With overlap the reduction is waited for when the next unit has
  gone back: until then its gradient, its landing chunk and two chunks of hops stay.
- Whole gradients are reduced after backward, unit by unit, beside nothing.
- Whole parameters of which each rank has updated its part are gathered in place. With overlap each unit is issued when
  it is updated, landing in u elements beside a copy of the own chunk, and none is waited for before all are updated.

Sources: the engine's own order (`zero/passes`, `lending`, `reduction`, `gradients`, `update`, `refresh`), and what the
ring declares: two chunks of partial sums that arrive in turn, one where N = 2, none where N = 1.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zerosim.numerics.formats import format_of
from zerosim.planning.activations import BETWEEN, FP32_NBYTES, Block, moments
from zerosim.planning.closed_forms import NORM_PARTIAL_NBYTES, OVERFLOW_FLAG_NBYTES, STAGES, TENSOR_NORMS, Job
from zerosim.planning.cuts import checked_count

GATHERED, GRADIENT, BUFFER = "gathered parameters", "gradients", "buffers"


class Held(NamedTuple):
    """So many bytes of a kind come, or go where it is a negative number."""

    kind: str
    nbytes: int


class Issued(NamedTuple):
    """A ring of so many ranks begins to move a vector of so many bytes."""

    operation: str
    unit: int
    nbytes: int
    ranks: int

    @property
    def key(self) -> tuple[str, int]:
        """What names it until its wait."""
        return self.operation, self.unit


class Waited(NamedTuple):
    """The program waits for what was issued."""

    key: tuple[str, int]


class At(NamedTuple):
    """A unit computes (forward, again, backward, update), or is between two computations of which something rests."""

    phase: str
    unit: int


class Reducing(NamedTuple):
    """The reduction that is under way: of which unit, and the bytes of gradient and of buffers that go with its wait.
    """

    unit: int
    gradient: int
    buffers: int


Event = Held | Issued | Waited | At


def micro_batch(job: Job, *, first: bool = True) -> Iterator[Event]:
    """Forward and backward of one micro-batch: of the step's first, whose gradients are set, or of one that adds.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> [event for event in micro_batch(Job((4, 2), 2, STAGES[2])) if isinstance(event, Issued | Waited)]
    [Issued(operation='reduce_scatter', unit=1, nbytes=4, ranks=2), Waited(key=('reduce_scatter', 1)), \
Issued(operation='reduce_scatter', unit=0, nbytes=8, ranks=2), Waited(key=('reduce_scatter', 0))]

    Raises ValueError for a layout other than per_unit, and for states that are no stage's.
    """
    yield from MicroBatch(_checked(job), first).events()


class MicroBatch:
    """The walk of one micro-batch, and what is gathered and under way while it goes."""

    def __init__(self, job: Job, first: bool) -> None:
        self.job, self.first, self.lengths = job, first, job.padded_lengths
        self.written, self.added = job.policy.compute_dtype, job.policy.accumulate_dtype
        self.moving, self.weights = job.policy.reduce_dtype, job.policy.compute_dtype.itemsize
        self.kept = frozenset(job.kept_gathered)
        self.gathered: dict[int, bool] = {}      # by unit: True while its gather is under way
        self.order: list[int] = []               # in which units are asked for, on the way forward or backward
        self.asked = 0                           # how many of them have been
        self.reducing: Reducing | None = None

    def events(self) -> Iterator[Event]:
        """Forward, loss and backward, and what is waited for at the end."""
        count, segment = len(self.lengths), self.job.recompute_units
        self.order, self.asked = [*range(count)], 0
        for unit in range(count):
            yield from self._lent(unit, iter([At("forward", unit), At("forward end", unit)]))
        yield from (At("loss", count - 1), At("loss end", count - 1))
        self.order, self.asked = [*self._backward(segment or count, again=segment is not None)], 0
        for start in reversed(range(0, count, segment or count)):
            run = range(start, min(start + (segment or count), count))
            for unit in run[:-1] if segment else ():
                yield from self._lent(unit, iter([At("again", unit), At("again end", unit)]))
            for unit in reversed(run):
                yield from self._lent(unit, self._back(unit, again=segment is not None and unit == run[-1]))
                yield At("backward end", unit)
        yield from self._reduced()
        yield from self._let_go()

    def _backward(self, segment: int, *, again: bool) -> Iterator[int]:
        """The units as backward asks for them: a segment's first ones, which are run again, then all of it backwards.
        """
        count = len(self.lengths)
        for start in reversed(range(0, count, segment)):
            run = range(start, min(start + segment, count))
            yield from run[:-1] if again else ()
            yield from reversed(run)

    # -- weights ------------------------------------------------------------------------------------------------------

    def _lent(self, unit: int, inside: Iterator[Event]) -> Iterator[Event]:
        """What happens inside, with the unit's weights and those that it borrows."""
        if not self.job.states.parameters_sharded:
            yield from inside
            return
        used = [unit, *dict.fromkeys(owner for borrower, owner in self.job.borrows if borrower == unit)]
        for one in used:
            if one not in self.gathered:
                yield from self._gather(one, ahead=False)
            yield from self._arrived(one)
        self.asked += 1
        for one in self.order[self.asked:self.asked + self.job.prefetch]:
            if one not in self.gathered:
                yield from self._gather(one, ahead=True)
        yield from inside
        for one in used:
            if one not in self.kept:
                yield self._freed(one)

    def _gather(self, unit: int, *, ahead: bool) -> Iterator[Event]:
        nbytes = self.weights * self.lengths[unit]
        yield Held(GATHERED, nbytes)
        if ahead:
            yield Held(BUFFER, nbytes)
        yield Issued("all_gather", unit, nbytes, self.job.ranks)
        if not ahead:
            yield Waited(("all_gather", unit))
        self.gathered[unit] = ahead

    def _arrived(self, unit: int) -> Iterator[Event]:
        if self.gathered[unit]:
            yield Waited(("all_gather", unit))
            yield Held(BUFFER, -self.weights * self.lengths[unit])
            self.gathered[unit] = False

    def _freed(self, unit: int) -> Event:
        del self.gathered[unit]
        return Held(GATHERED, -self.weights * self.lengths[unit])

    def _let_go(self) -> Iterator[Event]:
        for unit in list(self.gathered):
            yield from self._arrived(unit)
            yield self._freed(unit)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _back(self, unit: int, *, again: bool) -> Iterator[Event]:
        """A unit goes back, run again first where only its input was kept, and its gradient is taken up."""
        if again:
            yield from (At("again", unit), At("again end", unit))
        states, length, written, added = self.job.states, self.lengths[unit], self.written, self.added
        at_rest = not states.gradients_sharded and self.first and written == added
        own = 0 if at_rest else length * written.itemsize
        borrowed = [*zip(self.job.borrows, self.job.borrowed_lengths, strict=True)]
        lent = sum(n for (borrower, _), n in borrowed if borrower == unit)
        parts = [n for (_, owner), n in borrowed if owner == unit]  # of borrowers that have gone back
        wide = length * added.itemsize if parts and written != added else 0
        yield Held(GRADIENT, own + lent * written.itemsize)
        yield from (At("backward", unit), At("absorbed", unit))
        if parts:
            yield Held(GRADIENT, wide)
            yield Held(GRADIENT, -sum(parts) * added.itemsize)
        if states.gradients_sharded:
            yield from self._reduce(unit, wide or own, added if wide else written)
        if lent:
            yield Held(GRADIENT, lent * added.itemsize)
        stays = self.reducing.gradient if self.reducing else 0
        yield Held(GRADIENT, stays - (own + wide + lent * written.itemsize))

    def _reduce(self, unit: int, whole: int, dtype: np.dtype[Any]) -> Iterator[Event]:
        """Reduces one unit's gradient of so many bytes, after the one that is under way."""
        moving, length, chunk = self.moving, self.lengths[unit], self.lengths[unit] // self.job.ranks
        packed = 0 if moving == dtype else length * moving.itemsize  # cast into a buffer
        in_place = self.first and moving == self.added and not self.job.overlap
        yield from self._reduced()
        buffers = packed + (0 if in_place else chunk * moving.itemsize) + hops_nbytes(self.job, chunk)
        yield Held(BUFFER, buffers)
        yield Issued("reduce_scatter", unit, length * moving.itemsize, self.job.ranks)
        self.reducing = Reducing(unit, 0 if packed or not self.job.overlap else whole, buffers)
        if not self.job.overlap:
            yield from self._reduced()

    def _reduced(self) -> Iterator[Event]:
        """Waits for the reduction that is under way."""
        if self.reducing is not None:
            yield Waited(("reduce_scatter", self.reducing.unit))
            yield Held(BUFFER, -self.reducing.buffers)
            yield Held(GRADIENT, -self.reducing.gradient)
            self.reducing = None


def hops_nbytes(job: Job, chunk: int) -> int:
    """Bytes of partial sums that a rank receives in turn while it reduces: two chunks, as far as there are messages;
    where the wire has a format of its own, what leaves first is cast into one of them."""
    wire = job.policy.wire
    if wire is not None and format_of(wire).dtype != job.policy.reduce_dtype:
        return chunk * format_of(wire).dtype.itemsize * 2 * (job.ranks > 1)
    return chunk * job.policy.reduce_dtype.itemsize * min(2, job.ranks - 1)


def _checked(job: Job) -> Job:
    """The job; ValueError for one of which not every rank does the same with each unit, or that is no stage."""
    if job.layout != "per_unit" or job.states not in STAGES.values():
        raise ValueError("a program is of ZeRO's stages and of the layout per_unit, in which every rank owns as much "
                         f"of each unit, found {job.layout!r} and {job.states}; for others there are the closed forms")
    return job


def after_backward(job: Job) -> Iterator[Event]:
    """Reduction of whole gradients, the optimizer's update unit by unit, and the refresh of whole parameters.

    Raises ValueError as `micro_batch` does.
    """
    states, policy, lengths = _checked(job).states, job.policy, job.padded_lengths
    reduced = policy.reduce_dtype.itemsize
    taken = 0
    if not states.gradients_sharded:
        new = states.optimizer_sharded or policy.reduce_dtype != policy.accumulate_dtype
        taken = job.held(states.optimizer_sharded) * reduced if new else 0
        yield Held(GRADIENT, taken)
        operation = "reduce_scatter" if states.optimizer_sharded else "all_reduce"
        for unit, length in enumerate(lengths):
            packed = 0 if policy.reduce_dtype == policy.accumulate_dtype else length * reduced
            held = packed + hops_nbytes(job, length // job.ranks)
            yield Held(BUFFER, held)
            yield from (Issued(operation, unit, length * reduced, job.ranks), Waited((operation, unit)))
            yield Held(BUFFER, -held)
    yield At("scan", 0)
    if states.optimizer_sharded:  # what each rank tells all: the flag, the norms
        said = [OVERFLOW_FLAG_NBYTES, NORM_PARTIAL_NBYTES, NORM_PARTIAL_NBYTES * TENSOR_NORMS * job.normed_tensors]
        yield from (Held(BUFFER, sign * nbytes * job.ranks) for nbytes in said for sign in (1, -1))
    yield from _updated(job, taken)


def _updated(job: Job, taken: int) -> Iterator[Event]:
    """Each unit is updated; `taken` bytes of gradients go when all are; then replicas are made equal again."""
    states, lengths, itemsize = job.states, job.padded_lengths, job.policy.compute_dtype.itemsize
    refreshed = states.optimizer_sharded and not states.parameters_sharded
    ahead = refreshed and job.overlap
    for unit, length in enumerate(lengths):
        yield At("update", unit)
        if ahead:
            yield Held(BUFFER, (length + length // job.ranks) * itemsize)
            yield Issued("all_gather", unit, length * itemsize, job.ranks)
    yield Held(GRADIENT, -taken)
    for unit, length in enumerate(lengths if refreshed else ()):
        if not ahead:
            yield Issued("all_gather", unit, length * itemsize, job.ranks)
        yield Waited(("all_gather", unit))
        if ahead:
            yield Held(BUFFER, -(length + length // job.ranks) * itemsize)


# -- What comes and goes in a step beside model states, at its fullest, read off the engine's order to the byte ------
# Legend: B sequences of a micro-batch. Activations and tokens grow with B, all else does not.


TOKEN_NBYTES = 8  # int64, of tokens and of targets, as frameworks index
Place = tuple[str, int]  # a phase and a unit of `program`
START = ("start", 0)
ENDS = {"forward": "forward end", "again": "again end", "loss": "loss end", "absorbed": "absorbed",
        "backward": "backward end"}


@dataclass(frozen=True, slots=True)
class Flow:
    """What flows through the model: blocks, vocabulary and recomputation policy; one sequence of the block counts."""

    block: Block
    blocks: int
    vocabulary: int
    policy: str


class Moment(NamedTuple):
    """Bytes at one moment: gathered, of gradients on their way, of buffers; of each sequence activations and tokens.

    ``place`` is the last computation of the walk before it.
    """

    place: Place
    gathered_nbytes: int
    gradients_nbytes: int
    buffers_nbytes: int
    sequence_nbytes: int

    def nbytes(self, batch: int) -> int:
        """All of it, of so many sequences."""
        return self.fixed_nbytes + batch * self.sequence_nbytes

    @property
    def fixed_nbytes(self) -> int:
        """What does not grow with the batch."""
        return self.gathered_nbytes + self.gradients_nbytes + self.buffers_nbytes


@dataclass(frozen=True, slots=True)
class Passing:
    """The most bytes at one moment: of gathered parameters, of gradients on their way, of collectives' buffers, of the
    latter two together. ``moments`` are those that can be the fullest of all."""

    gathered_nbytes: int
    gradients_nbytes: int
    buffers_nbytes: int
    in_flight_nbytes: int
    moments: tuple[Moment, ...]

    def fullest(self, batch: int) -> Moment:
        """The fullest moment of a step of so many sequences a micro-batch."""
        return max(self.moments, key=lambda moment: moment.nbytes(batch))

    def fullest_nbytes(self, batch: int) -> int:
        """Everything that comes and goes, at that moment."""
        return self.fullest(batch).nbytes(batch)


@lru_cache(maxsize=512)
def passing(job: Job, flow: Flow | None = None) -> Passing:
    """What comes and goes in a step of this job, with the job's levers; without a flow, no activations.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> [passing(Job((400, 600, 200), 2, STAGES[2], overlap=overlap)).in_flight_nbytes for overlap in (False, True)]
    [1800, 3600]
    """
    levels = {} if flow is None else _levels(flow)
    reader, start = _Reader(levels), levels.get(START, 0)
    reader.read(micro_batch(job), start)
    if job.micro_batches > 1:
        reader.read(micro_batch(job, first=False), start)
    reader.read(after_backward(job), 0)
    return reader.found()


class _Reader:
    """Adds up what is held, and remembers the most."""

    def __init__(self, levels: Mapping[Place, int]) -> None:
        self.levels = levels
        self.most = dict.fromkeys((GATHERED, GRADIENT, BUFFER, "in flight"), 0)
        self.most_at: dict[int, Moment] = {}  # by bytes of each sequence

    def read(self, events: Iterable[Event], level: int) -> None:
        """Reads one walk from its start, at which so many bytes of each sequence are held."""
        held, most, total = {GATHERED: 0, GRADIENT: 0, BUFFER: 0}, self.most, 0
        place = START
        for event in events:
            if isinstance(event, At):
                place = event.phase, event.unit
                level = self.levels.get(place, 0)
            elif isinstance(event, Held):
                held[event.kind] += event.nbytes
                total += event.nbytes
                if event.nbytes <= 0:
                    continue
                most[event.kind] = max(most[event.kind], held[event.kind])
                most["in flight"] = max(most["in flight"], held[GRADIENT] + held[BUFFER])
            else:
                continue
            if level not in self.most_at or total > self.most_at[level].fixed_nbytes:
                self.most_at[level] = Moment(place, held[GATHERED], held[GRADIENT], held[BUFFER], level)
        assert not any(held.values()), f"what comes also goes, but {held} stayed"

    def found(self) -> Passing:
        """The most of each, and the moments that none exceeds in both respects."""
        kept: list[Moment] = []
        for _, moment in sorted(self.most_at.items(), reverse=True):
            if not kept or moment.fixed_nbytes > kept[-1].fixed_nbytes:
                kept.append(moment)
        return Passing(self.most[GATHERED], self.most[GRADIENT], self.most[BUFFER], self.most["in flight"], tuple(kept))


@lru_cache(maxsize=512)
def _levels(flow: Flow) -> dict[Place, int]:
    """Bytes of activations, their gradients and tokens of one sequence, at the fullest moment of each place."""
    found: dict[Place, int] = {START: 2 * TOKEN_NBYTES * flow.block.tokens}
    last = flow.blocks + 1
    for moment in moments(flow.block, flow.blocks, flow.vocabulary, flow.policy, between=True):
        phase = "loss" if moment.step == "loss" else moment.phase
        place = (ENDS[phase] if moment.step == BETWEEN else phase, moment.unit)
        gone = place in (("absorbed", 0), ("backward end", 0))  # the first unit has dropped the tokens
        vectors = 2 if phase == "forward" or place == ("loss", last) else 0 if gone else 1
        nbytes = moment.total_nbytes + vectors * TOKEN_NBYTES * flow.block.tokens
        found[place] = max(found.get(place, 0), nbytes)
    return found


# -- What a rank holds beside states and activations: gathered units, logits, and what a runtime takes for itself ----
# Legend: B batch, L tokens, V vocabulary, k blocks of a segment; a unit is what is gathered at a time.


MEGABYTE, GIGABYTE = 10**6, 10**9


def gathered_nbytes(job: Job, prefetch: int = 0) -> int:
    """The most bytes of gathered parameters at one moment of a micro-batch, the same on every rank; 0 if none are cut.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> [gathered_nbytes(Job((4, 6, 2), 2, STAGES[3]), prefetch) for prefetch in range(3)]
    [12, 20, 24]

    Without prefetch it is the largest unit, or a unit and the one that it borrows from; each of `prefetch` units ahead
    is gathered while one computes; units that stay gathered lie there from their first use on.
    Raises ValueError for a prefetch that is negative or not whole.
    """
    ahead = checked_count("prefetch", prefetch, 0)
    if not job.states.parameters_sharded:
        return 0
    return job.policy.compute_dtype.itemsize * max(_gathered_elements(job, ahead))


def _gathered_elements(job: Job, prefetch: int) -> Iterator[int]:
    lengths, kept, held = job.padded_lengths, set(job.kept_gathered), set[int]()
    for order in (range(len(lengths)), [*_backward(len(lengths), job.recompute_units)]):
        ahead = list(order)
        for unit in order:
            used = {unit, *(owner for borrower, owner in job.borrows if borrower == unit)}
            if unit in ahead:  # a unit that was asked for out of turn is not waited for
                del ahead[:ahead.index(unit) + 1]
            held |= used | set(ahead[:prefetch])
            yield sum(lengths[index] for index in held)
            held -= used - kept


def _backward(units: int, segment: int | None) -> Iterator[int]:
    """The units in the order in which backward asks for them: a segment's first ones, then all of it backwards."""
    k = segment or units
    for start in reversed(range(0, units, k)):
        run = range(start, min(start + k, units))
        if segment is not None:
            yield from run[:-1]
        yield from reversed(run)


def bucket_nbytes(job: Job, limit: int | None = None, *, overlap: bool = False) -> int:
    """Bytes of the buffer in which gradients of several units are packed for one reduction, at most `limit`.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> job = Job((400, 600, 200), 2, STAGES[2])
    >>> bucket_nbytes(job), bucket_nbytes(job, 1000), bucket_nbytes(job, 10**6), bucket_nbytes(job, 1000, overlap=True)
    (1200, 1000, 2400, 2000)

    Without a limit a bucket is a unit, or whole gradients as they rest: the largest stretch. With overlap one bucket is
    on its way while the next one fills. It is what a runtime sets aside, as DeepSpeed's reduce_bucket_size (5e8
    elements by default), not the ledger's communication buffer, which holds hops.
    Raises ValueError for a limit below one byte.
    """
    lengths = job.padded_lengths if job.states.gradients_sharded else [cut[-1] for cut in job.region_cuts]
    itemsize = job.policy.reduce_dtype.itemsize
    if limit is None:
        return (1 + overlap) * itemsize * max(lengths)
    return (1 + overlap) * min(checked_count("limit", limit, 1), itemsize * sum(lengths))


def accumulator_nbytes(job: Job) -> int:
    """Bytes of gradients that add up in fp32 beside those that rest: 4 for each element, cut as gradients are.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> [accumulator_nbytes(Job((400, 600), 2, states)) for states in STAGES.values()]
    [4000, 4000, 2000, 2000]

    Some implementations have such a second copy; zerosim's engine adds up in the gradients that rest.
    """
    return FP32_NBYTES * job.held(job.states.gradients_sharded)


def logits_nbytes(block: Block, vocabulary: int, *, fp32_copy: bool = True) -> int:
    """Bytes of the logits (B, L, V), their gradient in the same place, and of what the loss keeps of them.

    >>> logits_nbytes(Block(4, 2048, 4096, 32), 32000), logits_nbytes(Block(4, 2048, 4096, 32), 32000, fp32_copy=False)
    (1572896768, 524320768)

    Of each position the loss keeps a log-sum-exp in fp32. `fp32_copy`: logits in fewer bits are also held in fp32, for
    the softmax, as most frameworks do and Korthikanti et al. 2022, section 4.3, count them (4·BLV).
    Raises ValueError for an empty vocabulary.
    """
    elements = block.positions * checked_count("vocabulary", vocabulary, 1)
    copy = FP32_NBYTES if fp32_copy and block.itemsize < FP32_NBYTES else 0
    return elements * (block.itemsize + copy) + block.positions * FP32_NBYTES


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a runtime takes of a device's memory, between two numbers of bytes, as its source has it."""

    least_nbytes: int
    most_nbytes: int
    source: str

    @property
    def middle_nbytes(self) -> int:
        """Half-way between the two."""
        return (self.least_nbytes + self.most_nbytes) // 2


# Estimates, each for one GPU; a plan names those that it adds, and replaces them by measured ones. The first three are
# an introductory text's to memory-efficient training (2025); none of them is a vendor's specification.
OVERHEADS: Mapping[str, Overhead] = {
    "runtime context": Overhead(200 * MEGABYTE, GIGABYTE, "driver, firmware and kernels of a CUDA process, 200 MB to "
                                "1 GB (2025); nvidia-smi shows it before any tensor"),
    "allocator fragmentation": Overhead(2 * GIGABYTE, 5 * GIGABYTE, "what PyTorch's allocator reserves beyond what is "
                                        "allocated, 2 to 5 GB in long runs of varied shapes (2025)"),
    "communication channels": Overhead(500 * MEGABYTE, GIGABYTE, "NCCL's channels on 8 GPUs at 64 MB each, 0.5 to 1 GB "
                                       "(2025); NCCL's own NCCL_BUFFSIZE is 4 MiB (src/init.cc), sixteen times less"),
    "matmul workspace": Overhead(4 * 2**20, 32 * 2**20, "cuBLAS 12 library documentation, cublasSetWorkspace: 4 MiB, "
                                 "32 MiB on Hopper (2024)"),
}


def overheads_nbytes(nbytes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes that a runtime takes, by name: the least that the sources give, but for those that are given here.

    >>> sum(overhead_nbytes().values()), sum(overhead_nbytes({"allocator fragmentation": 0}).values())
    (2704194304, 704194304)

    Raises ValueError for a name that is not in `OVERHEADS` and for negative bytes.
    """
    if not isinstance(nbytes, Mapping | None):
        raise ValueError(f"overheads are bytes by name, as {{'matmul workspace': 0}}, got {nbytes!r}")
    given = dict(nbytes or {})
    if unknown := given.keys() - OVERHEADS.keys():
        raise ValueError(f"no overhead is called {', '.join(sorted(map(repr, unknown)))}; there are "
                         f"{', '.join(OVERHEADS)}")
    return {name: checked_count(name, given.get(name, overhead.least_nbytes), 0)
            for name, overhead in OVERHEADS.items()}
