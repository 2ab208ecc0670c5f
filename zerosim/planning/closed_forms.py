"""The closed forms of ZeRO: bytes that one training step holds, sends and moves off the device, exactly.

Legend: N ranks, on M nodes of R each where there is a mesh; k micro-batches a step; Ψ bytes of the flat vector, padding
included: Ψ_g in the format that gradients are reduced in, Ψ_p in that of the parameters; s_r bytes of rank r's chunk of
a cut. Every collective is a ring, but for qgZ's: over any cut reduce-scatter sends Ψ - s_r from rank r, all-gather Ψ -
s_((r+1) mod N).

What is held here is what rests between two steps; what comes and goes depends on an order, that of `step_events`.

Sources: Rajbhandari et al. 2020, "ZeRO", sections 3.1 (the 16 bytes per parameter), 5 (the three stages) and
7 (their traffic); Thakur et al. 2005 and Patarasuk & Yuan 2009 (the rings); Zhang et al. 2022 (MiCS), sections 3.2 and
3.4 (hybrid sharding); Wang et al. 2023 (ZeRO++), section 3.4 (bytes between nodes); Ren et al.
2021 (ZeRO-Offload), section 4; Rajbhandari et al. 2021 (ZeRO-Infinity), section 4 (bytes to host and disk).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.numerics.checks import FP32, checked_count, count_fields
from zerosim.numerics.formats import format_of
from zerosim.numerics.places import DEVICE, DIRECTIONS, DISK, FROM_DISK, HOST, TO_DEVICE, TO_DISK, TO_HOST
from zerosim.numerics.policy import Policy
from zerosim.numerics.quantization import Blockwise
from zerosim.options import PLAIN, StepOptions
from zerosim.planning.cuts import Cut, checked_layout, checked_unit_lengths, padded_unit_lengths, unit_cuts
from zerosim.ranks.mesh import Mesh

MIXED_PRECISION = Policy("fp16")
OVERFLOW_FLAG_NBYTES = 1
NORM_PARTIAL_NBYTES = 8  # a float64 sum of squares
EXACT_PARTIAL_NBYTES = 80  # a sum of squares that nothing rounds
AGREEMENT_NBYTES = 8  # an int64: how long the text of an error is
TENSOR_NORMS = 2  # of each tensor that has its own: LAMB's of weights and update, LARS's of weights and gradient


@dataclass(frozen=True, slots=True)
class ShardedStates:
    """The three model states, each True where it is cut among the ranks; what is not is whole on every rank."""

    parameters_sharded: bool
    gradients_sharded: bool
    optimizer_sharded: bool

    def cuts(self, kind: str) -> bool:
        """True for a kind of memory that is cut: "parameter", "gradient", or one of the optimizer's."""
        return {"parameter": self.parameters_sharded, "gradient": self.gradients_sharded}.get(
            kind, self.optimizer_sharded)

    @property
    def gathers_after_update(self) -> bool:
        """True where each rank updates its part of parameters that are whole on all ranks."""
        return self.optimizer_sharded and not self.parameters_sharded


STAGES: Mapping[int, ShardedStates] = {
    0: ShardedStates(False, False, False),
    1: ShardedStates(False, False, True),
    2: ShardedStates(False, True, True),
    3: ShardedStates(True, True, True),
}


@dataclass(frozen=True)
class Job:
    """One training step on paper.

    `unit_lengths` are the elements of the model's units, padding not included; `slots` the tensors that the
    optimizer keeps for each parameter beside the master (Adam 2, momentum 1, SGD 0); `recompute_units` the
    length of the segments of which only the input is kept (None: everything is kept; 1: each block's input).
    `kept_gathered` are the units that stay gathered from forward to the end of backward, `tied` pairs (unit, owner)
    of units that use another unit's parameters (tied weights), by their places in the model; `tied_lengths` are the
    elements that each of them uses (none said: none counted in gradients). `normed_tensors` are those whose own norms
    the optimizer reads, as LAMB does. `options` are the engine's. Its mesh and parts of ZeRO++ change the bytes sent;
    by micro-batch norms are of exact sums; offload changes what is sent of control; overlap and units ahead, none.
    What comes and goes under all of them is counted by `step_events`.

    Raises ValueError for no units, negative lengths, counts below one, an unknown layout, for a mesh of other ranks,
    and for an order that the engine cannot keep.
    """

    unit_lengths: tuple[int, ...]
    ranks: int
    states: ShardedStates
    layout: str = "per_unit"
    policy: Policy = MIXED_PRECISION
    slots: int = 2
    micro_batches: int = 1
    recompute_units: int | None = None
    kept_gathered: tuple[int, ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    tied_lengths: tuple[int, ...] = ()
    normed_tensors: int = 0
    options: StepOptions = PLAIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit_lengths", checked_unit_lengths(self.unit_lengths))
        count_fields(self, ranks=1, slots=0, micro_batches=1, normed_tensors=0)
        if self.options.mesh:
            Mesh.of(self.options.mesh, self.ranks)
        if self.recompute_units is not None:
            checked_count("recompute_units", self.recompute_units, 1)
        checked_layout(self.layout)
        if self.options.by_micro_batch and (not self.states.gradients_sharded or self.policy.wire):
            raise ValueError("reduction='micro_batch' is of sharded gradients, which travel as they are; take stage 2 "
                             "or 3 without a wire format, or reduction='rank'")
        for name, value in (("kept_gathered", self.kept_gathered), ("tied", map(tuple, self.tied)),
                            ("tied_lengths", self.tied_lengths or (0,) * len(self.tied))):
            object.__setattr__(self, name, tuple(value))  # a job is a key of what is counted of it

    @cached_property
    def shards(self) -> int:
        """The ranks among which states are cut: R, all of them on one node; N with ZeRO++."""
        return self.ranks // self.options.replicas

    @cached_property
    def padded_lengths(self) -> tuple[int, ...]:
        """Elements of each unit with its padding."""
        return padded_unit_lengths(self.unit_lengths, self.ranks, self.layout)

    @property
    def unit_cuts(self) -> list[Cut]:
        """For each unit, who owns what of it."""
        return [cut[::self.options.replicas] for cut in unit_cuts(self.unit_lengths, self.ranks, self.layout)]

    @property
    def gathers(self) -> tuple[int, ...]:
        """The times that each unit's sharded parameters are gathered in one micro-batch.

        >>> [Job((1,) * 5, 1, STAGES[3], recompute_units=k).gathers for k in (None, 1, 2)]
        [(2, 2, 2, 2, 2), (2, 2, 2, 2, 2), (3, 2, 3, 2, 2)]
        >>> [Job((1,) * 3, 1, STAGES[3], kept_gathered=kept, tied=((2, 0),)).gathers for kept in ((), (0,))]
        [(4, 2, 2), (1, 2, 2)]

        Once forward, once backward, and once more for each unit that is run again to find the input of the next
        one in its segment: all but the segment's last, which is run again inside its own backward gather. A unit of
        tied weights is gathered at its users' passes too; one that stays gathered, once.
        """
        count, segment = len(self.unit_lengths), self.recompute_units or 1
        uses = [2 + (unit % segment < segment - 1 and unit < count - 1) for unit in range(count)]
        tied_uses = [(owner, uses[user]) for user, owner in self.tied]
        for owner, times in tied_uses:
            uses[owner] += times
        return tuple(1 if unit in self.kept_gathered else times for unit, times in enumerate(uses))

    @property
    def parameter_is_master(self) -> bool:
        """True where both are in one format, and the rank's parameters cover what it updates."""
        covered = self.states.optimizer_sharded or not self.states.parameters_sharded
        return covered and self.policy.compute_dtype == self.policy.master_dtype

    @property
    def wire_dtype(self) -> np.dtype[Any]:
        """The dtype in which a ring's partial sums travel."""
        return format_of(self.policy.wire).dtype if self.policy.wire else self.policy.reduce_dtype

    @property
    def reduced_dtype(self) -> np.dtype[Any]:
        """The dtype of reduced gradients, which the update reads."""
        return self.policy.accumulate_dtype if self.states.gradients_sharded else self.policy.reduce_dtype

    @property
    def reduces_to_shards(self) -> bool:
        """True where whole gradients are reduce-scattered: shards are updated, or nodes are to add up theirs."""
        return self.states.optimizer_sharded or self.options.replicas > 1

    @property
    def control_nbytes(self) -> tuple[int, ...]:
        """Bytes that each rank gives to the all-gathers before the update, where none has seen the whole gradient: its
        overflow flag, its part of the norm, and of the norms of tensors."""
        if not self.states.optimizer_sharded:
            return ()
        partial = EXACT_PARTIAL_NBYTES if self.options.by_micro_batch else NORM_PARTIAL_NBYTES
        return OVERFLOW_FLAG_NBYTES, partial, partial * TENSOR_NORMS * self.normed_tensors

    def held(self, sharded: bool) -> int:
        """Elements that a rank holds of a state: all of them, or its share; padding makes the shares equal."""
        total = sum(self.padded_lengths)
        return total // self.shards if sharded else total


def resting_nbytes(job: Job) -> list[dict[str, int]]:
    """For each rank, the bytes of model states that it holds between two steps, by kind, but for empty kinds; wherever
    they rest.

    >>> resting_nbytes(Job((2, 2), ranks=2, states=STAGES[2]))[0]
    {'parameter': 8, 'gradient': 4, 'master': 8, 'optimizer_state': 16}

    Where both are in one format, as in fp32, the parameter is the master, if it covers what the rank's optimizer
    updates. `slots` rest in the policy's format of state.
    Source: Rajbhandari et al. 2020, sections 3.1 and 5.
    """
    policy = job.policy
    itemsizes = {"parameter": policy.compute_dtype.itemsize, "gradient": policy.accumulate_dtype.itemsize,
                 "master": 0 if job.parameter_is_master else policy.master_dtype.itemsize,
                 "optimizer_state": job.slots * policy.state_dtype.itemsize}
    nbytes = {kind: each * job.held(job.states.cuts(kind)) for kind, each in itemsizes.items()}
    return [{kind: n for kind, n in nbytes.items() if n} for _ in range(job.ranks)]


def sent_nbytes(job: Job) -> dict[str, list[int]]:
    """Bytes that each rank sends in one step, in rank order, by purpose.

    >>> sent_nbytes(Job((2, 2), 2, STAGES[3], layout="contiguous", recompute_units=2))
    {'gradients': [4, 4], 'parameters': [12, 8], 'control': [9, 9]}

    Source: Rajbhandari et al. 2020, section 7; its 2Ψ and 3Ψ are the limit of many ranks, `vectors_sent`.
    """
    return {purpose: np.sum(parts, axis=0).tolist() for purpose, parts in _traffic(job).items()}


def crossing_nbytes(job: Job) -> dict[str, list[int]]:
    """Bytes that each rank sends to other nodes in one step, in rank order, by purpose.

    A ring over all ranks crosses from the last rank of each node alone. With hybrid sharding only gradients cross, and
    whether all have written their files.

    >>> whole = Job((1 << 20,), 8, STAGES[3], options=StepOptions.of(8, mesh="2x4", zeropp="flat"))
    >>> less = Job((1 << 20,), 8, STAGES[3], options=StepOptions.of(8, mesh="2x4", zeropp="hpz+qwz+qgz"))
    >>> [sum(map(sum, crossing_nbytes(job).values())) // 2**20 for job in (whole, less)]
    [10, 2]

    Source: Wang et al. 2023, section 3.4.
    """
    each = job.ranks // job.options.nodes
    leaves = (np.arange(job.ranks) % each == each - 1) * (job.options.nodes > 1)
    return {purpose: (rings * leaves + across).tolist() for purpose, (rings, _, across) in _traffic(job).items()}


Nbytes = np.ndarray[Any, np.dtype[Any]]  # of each rank, (N,), in Python's integers, which no vector is too long for


def _traffic(job: Job) -> dict[str, tuple[Nbytes, Nbytes, Nbytes]]:
    """By purpose what each rank sends in rings over all ranks, in its node alone, and between nodes alone.

    Gradients are reduce-scattered, cut ones by micro-batch, whole ones once; for a whole optimizer they are gathered
    too. Partial sums travel in the wire's format, sums in that in which they rest. Cut parameters are gathered whenever
    a unit runs, or once, into secondary shards; whole ones once, if each rank has updated a part.
    """
    nothing, options, states, parts = np.zeros(job.ranks, object), job.options, job.states, job.options.parts
    compute, nodes, each = job.policy.compute_dtype.itemsize, options.nodes, job.ranks // options.nodes
    sums, all_gathers = job.micro_batches if states.gradients_sharded else 1, not states.optimizer_sharded
    owned, gathers = _owned(job), [job.micro_batches * n for n in job.gathers]
    gradients = (owned.sum() - owned) * job.wire_dtype.itemsize * sums + _gathered(owned) * (
        job.reduced_dtype.itemsize * all_gathers)
    if not states.parameters_sharded:
        parameters = _gathered(owned) * (compute * states.optimizer_sharded)
    else:
        times = [1] * len(gathers) if parts.hpz else gathers
        parameters = _gathered(_owned(job, times, parts.weights) if parts.weights else _owned(job, times) * compute)
    control = nothing + sum(job.control_nbytes) * (job.shards - 1)  # from each rank to all that have a shard
    files = options.offload  # all ranks agree, on all nodes, that they are written
    agreements = (files.optimizer == DISK) + (files.parameters == DISK and states.gathers_after_update)
    agreed = nothing + agreements * AGREEMENT_NBYTES * (job.ranks - 1)
    if options.replicas > 1:  # once a step shards of gradients are all-reduced across nodes
        chunk = job.held(True) // options.replicas * (options.replicas - 1)
        across = nothing + chunk * (job.wire_dtype.itemsize + job.policy.reduce_dtype.itemsize)
        gradients, parameters = (np.tile(of, options.replicas) for of in (gradients, parameters))
        return {"gradients": (nothing, gradients, across), "parameters": (nothing, parameters, nothing),
                "control": (agreed, control, nothing)}
    found = {"gradients": (gradients, nothing, nothing), "parameters": (parameters, nothing, nothing),
             "control": (control + agreed, nothing, nothing)}
    if parts.gradients:  # two all-to-alls, inside nodes and to other nodes, and no ring
        chunks = _owned(job, [sums] * len(gathers), parts.gradients).reshape(nodes, each)
        of_places = np.tile(chunks.sum(axis=0), nodes)
        found["gradients"] = nothing, chunks.sum() - of_places, of_places - chunks.ravel()
    if parts.hpz and states.parameters_sharded:  # from secondary shards, all but the first time
        secondary = _owned(job, [n - 1 for n in gathers]).reshape(each, nodes).sum(axis=1)
        found["parameters"] = parameters, np.tile(_gathered(secondary), nodes) * compute, nothing
    return found


def _owned(job: Job, times: Iterable[int] | None = None, form: Blockwise | None = None) -> Nbytes:
    """Elements of all units that each rank of a ring owns, each unit counted so often; or their bytes in a format."""
    times_of: Counter[Cut] = Counter()  # a model of many equal units has few cuts
    for cut, count in zip(job.unit_cuts, times or [1] * len(job.unit_lengths), strict=True):
        times_of[cut] += count
    owned = np.zeros(job.shards, object)
    for cut, count in times_of.items():
        lengths = [high - low for low, high in pairwise(cut)]
        owned += np.array([form.nbytes(length) for length in lengths] if form else lengths, object) * count
    return owned


def _gathered(owned: Nbytes) -> Nbytes:
    """Bytes that each rank sends in a ring's all-gather: all but those that the next one owns."""
    sent: Nbytes = owned.sum() - np.roll(owned, -1)
    return sent


def vectors_sent(job: Job) -> dict[str, Fraction]:
    """The vectors Ψ that a rank sends in one step in the limit of many ranks: ZeRO's 2Ψ and 3Ψ, by purpose.

    >>> jobs = [Job((2, 2), 2, states, micro_batches=4) for states in STAGES.values()]
    >>> [int(sum(vectors_sent(job).values())) for job in jobs]
    [2, 2, 5, 12]

    The mean over the ranks is exactly (N-1)/N of `gradients` Ψ_g + `parameters` Ψ_p, for any N, layout and
    padding, where all that is sent of the gradients is in one format; on several nodes, of what is sent inside them.
    Source: Rajbhandari et al. 2020, sections 7.1 and 7.2.
    """
    states, k = job.states, job.micro_batches
    gradients = (k if states.gradients_sharded else 1) + (not states.optimizer_sharded)
    if not states.parameters_sharded:
        return {"gradients": Fraction(gradients), "parameters": Fraction(states.optimizer_sharded)}
    elements = sum(times * n for times, n in zip(job.gathers, job.padded_lengths, strict=True))
    parameters = Fraction(elements, sum(job.padded_lengths) or 1)
    return {"gradients": Fraction(gradients), "parameters": k * parameters}


# -- moved between the device, its host and its disk (offload): by the first rank, in one step ------------------------


ROUTES: Mapping[tuple[str, str], tuple[str, ...]] = {
    (DEVICE, HOST): (TO_HOST,), (DEVICE, DISK): (TO_HOST, TO_DISK), (HOST, DISK): (TO_DISK,),
    (HOST, DEVICE): (TO_DEVICE,), (DISK, DEVICE): (FROM_DISK, TO_DEVICE), (DISK, HOST): (FROM_DISK,)}
Move = tuple[str, str, int]  # from a place to a place, so many bytes


def moved_nbytes(job: Job, state_nbytes: int | None = None, gathered: Job | None = None) -> dict[str, int]:
    """Bytes of one step by direction. ``state_nbytes`` are the optimizer's own of a parameter (None: the job's slots);
    ``gathered`` is the job of parameters with frozen ones, where there are such.

    >>> moved_nbytes(Job((8,), 2, STAGES[2], options=StepOptions.of(2, offload="optimizer=host+gradients=host")))
    {'to host': 8, 'to device': 8, 'to disk': 0, 'from disk': 0}
    """
    state = job.slots * job.policy.state_dtype.itemsize if state_nbytes is None else state_nbytes
    found = Counter[str]()
    for source, target, nbytes in (*_moves_of_gradients(job), *_moves_of_update(job, state),
                                   *_moves_to_compute(gathered or job)):
        for way in ROUTES.get((source, target), ()):
            found[way] += nbytes
    return {way: found[way] for way in DIRECTIONS}


def _moves_of_gradients(job: Job) -> Iterator[Move]:
    """Gradients move to where they rest as they are made: sums of shares each micro-batch, or addends but the last's.

    The host adds. Added by micro-batch, all ranks' addends of a share go there one by one. On a mesh a share of a
    node's sum comes back once a step, for the addition across nodes, and goes again.
    """
    options, policy, k, place = job.options, job.policy, job.micro_batches, job.options.offload.gradients
    if place == DEVICE:
        return
    whole, share, reduced = sum(job.padded_lengths), job.held(True), policy.reduce_dtype.itemsize
    received = FP32.itemsize if options.parts.gradients else reduced  # what was quantized is added up in fp32
    if job.states.gradients_sharded:
        times = k * (job.ranks if options.by_micro_batch else 1)  # an addend of each rank, or a sum
        resting = share * policy.accumulate_dtype.itemsize
        yield from ((DEVICE, HOST, times * share * received), (HOST, place, times * resting),
                    (place, HOST, (times - 1) * resting))
    else:
        made, rests = policy.compute_dtype.itemsize, policy.accumulate_dtype.itemsize
        tied = sum(job.padded_lengths[owner] for owner in {owner for _, owner in job.tied})  # completed as it rests
        sums = job.held(job.reduces_to_shards)
        yield from ((DEVICE, HOST, (k - 1) * (whole * made + tied * (rests - made)) + sums * received),
                    (HOST, place, (k - 1) * whole * rests), (place, HOST, max(0, k - 2) * whole * rests),
                    (place, DEVICE, (k > 1) * whole * rests), (HOST, place, sums * reduced))
    if options.replicas > 1:
        rests = job.reduced_dtype.itemsize
        yield from ((place, DEVICE, share * rests), (DEVICE, HOST, share * reduced), (HOST, place, share * rests))
        if not job.states.optimizer_sharded:  # shares of the sum become whole again
            yield from ((place, DEVICE, share * rests), (DEVICE, place, whole * rests))


def _moves_of_update(job: Job, slots: int) -> Iterator[Move]:
    """Scans, reads and writes of the update, where the optimizer's state rests, and parameters that it has made."""
    places, policy, states = job.options.offload, job.policy, job.states
    computes = DEVICE if places.optimizer == DEVICE else HOST
    valid = sum(job.unit_lengths) if not states.optimizer_sharded else sum(
        min(length, cut[1]) for length, cut in zip(job.unit_lengths, job.unit_cuts, strict=True))  # without padding
    held = job.held(states.optimizer_sharded)
    passes, writes = (3, 2) if job.normed_tensors else (1, 1)  # those of whole tensors' norms write moments alone once
    gradient, parameter = job.reduced_dtype.itemsize, policy.compute_dtype.itemsize
    is_master, padding = job.parameter_is_master, held - valid  # files are written whole
    master = 0 if is_master else policy.master_dtype.itemsize
    scanned = 2 * valid * (places.gradients == DISK)
    yield from ((places.gradients, HOST, scanned * gradient), (places.gradients, computes, passes * valid * gradient))
    yield places.optimizer, computes, (passes * valid + padding) * (slots + master)
    yield computes, places.optimizer, (writes * valid + padding) * slots + held * master
    filled = (job.held(states.parameters_sharded) - valid) * (places.parameters == DISK)
    reads = 1 if places.parameters == DEVICE else passes  # what comes from the device stays until all passes are made
    yield places.parameters, computes, (is_master * reads * valid + filled) * parameter
    yield computes, places.parameters, (valid + filled) * parameter


def _moves_to_compute(job: Job) -> Iterator[Move]:
    """Parameters come to the device whenever a unit is unsharded, and where they are gathered after the update."""
    place, itemsize, states = job.options.offload.parameters, job.policy.compute_dtype.itemsize, job.states
    times = [1 if job.options.parts.hpz else job.micro_batches * n for n in job.gathers]  # from secondary shards, once
    own = [cut[1] for cut in job.unit_cuts] if states.parameters_sharded else job.padded_lengths
    yield place, DEVICE, sum(n * length for n, length in zip(times, own, strict=True)) * itemsize
    if states.gathers_after_update:
        yield from ((place, DEVICE, job.held(True) * itemsize), (DEVICE, place, job.held(False) * itemsize))
