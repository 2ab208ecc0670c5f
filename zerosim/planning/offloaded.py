"""Bytes that one step of a rank moves between its device, its host and its disk (offload), in the engine's order.

Legend: k micro-batches; n elements of the padded vector, s of it a rank's own share (n/N of N ranks; on a mesh n/R of
the R ranks of a node), v of what a rank updates those that are parameters. The rank is the first.
Sources: Ren et al. 2021 (ZeRO-Offload), section 4; Rajbhandari et al. 2021 (ZeRO-Infinity), section 4.
"""

from collections import Counter

from zerosim.numerics.checks import FP32
from zerosim.numerics.places import DEVICE, DIRECTIONS, DISK, FROM_DISK, HOST, TO_DEVICE, TO_DISK, TO_HOST
from zerosim.planning.closed_forms import Job


def moved_nbytes(job: Job, state_nbytes: int | None = None) -> dict[str, int]:
    """Bytes of one step by direction. ``state_nbytes`` are the optimizer's own of a parameter (None: the job's slots).

    >>> from zerosim.options import StepOptions
    >>> from zerosim.planning.closed_forms import STAGES
    >>> moved_nbytes(Job((8,), 2, STAGES[2], options=StepOptions.of(2, offload="optimizer=host+gradients=host")))
    {'to host': 8, 'to device': 8, 'to disk': 0, 'from disk': 0}
    """
    found = Counter[str]()
    if not job.options.offload.is_none:
        _backward(job, found)
        _update(job, job.slots * job.policy.state_dtype.itemsize if state_nbytes is None else state_nbytes, found)
        _parameters(job, found)
    return {way: found[way] for way in DIRECTIONS}


def _backward(job: Job, found: Counter[str]) -> None:
    """Gradients go to where they rest as they are made: sums of shares each micro-batch, or addends but the last's.

    Added by micro-batch, all ranks' addends of a share go there one by one. On a mesh a share of a node's sum comes
    back once a step, for the addition across nodes, and goes again.
    """
    options, policy, k = job.options, job.policy, job.micro_batches
    place = options.offload.gradients
    if place == DEVICE:
        return
    resting, reduced = policy.accumulate_dtype.itemsize, policy.reduce_dtype.itemsize
    arrives = FP32.itemsize if options.parts.gradients else reduced  # sums of what was quantized are fp32
    if job.states.gradients_sharded:
        share = job.held(True)
        times = k * (job.ranks if options.by_micro_batch else 1)  # an addend of each rank, or a sum
        found[TO_HOST] += times * share * arrives
        written, read = times * share * resting, (times - 1) * share * resting
    else:
        whole, taken = sum(job.padded_lengths), job.held(job.reduces_to_shards) * reduced
        made = policy.compute_dtype.itemsize
        tied = sum(job.padded_lengths[owner] for owner in {owner for _, owner in job.tied})  # completed as it rests
        found[TO_HOST] += (k - 1) * (whole * made + tied * (resting - made)) + taken // reduced * arrives
        found[TO_DEVICE] += (k > 1) * whole * resting
        read = (k - 1) * whole * resting
        written = read + taken
    if options.replicas > 1:
        share, rests = job.held(True), job.reduced_dtype.itemsize
        found[TO_DEVICE] += share * rests
        found[TO_HOST] += share * reduced
        written, read = written + share * rests, read + share * rests
        if not job.states.optimizer_sharded:  # shares of the sum become whole again
            found[TO_DEVICE] += share * rests
            found[TO_HOST] += whole * rests
            written, read = written + whole * rests, read + share * rests
    if place == DISK:
        found[TO_DISK] += written
        found[FROM_DISK] += read


def _update(job: Job, slots: int, found: Counter[str]) -> None:
    """Scans, reads and writes of the update, where the optimizer's state rests, and parameters that it has made."""
    places, policy, states = job.options.offload, job.policy, job.states
    valid, held = updated(job), job.held(states.optimizer_sharded)
    passes, writes = (3, 2) if job.normed_tensors else (1, 1)  # those of whole tensors' norms write moments alone once
    gradient = job.reduced_dtype.itemsize
    if places.gradients == DISK:
        found[FROM_DISK] += (2 + passes) * valid * gradient
    computes = DEVICE if places.optimizer == DEVICE else HOST
    if computes != (HOST if places.gradients == DISK else places.gradients):
        found[TO_HOST if computes == HOST else TO_DEVICE] += passes * valid * gradient
    parameter, master = policy.compute_dtype.itemsize, policy.master_dtype.itemsize
    is_master = job.parameter_is_master
    if computes == DEVICE:
        if places.parameters == HOST:
            found[TO_DEVICE] += is_master * passes * valid * parameter
            found[TO_HOST] += valid * parameter
        return
    if places.parameters == DEVICE:
        found[TO_HOST] += is_master * valid * parameter
        found[TO_DEVICE] += valid * parameter
    if places.optimizer != DISK:
        return
    found[FROM_DISK] += passes * valid * slots + (held - valid) * slots
    found[TO_DISK] += writes * valid * slots + (held - valid) * slots
    if not is_master:
        found[FROM_DISK] += passes * valid * master + (held - valid) * master
        found[TO_DISK] += held * master
    if places.parameters == DISK:
        rests = job.held(states.parameters_sharded)
        found[FROM_DISK] += (passes * valid * is_master + rests - valid) * parameter
        found[TO_DISK] += rests * parameter


def _parameters(job: Job, found: Counter[str]) -> None:
    """Parameters come to the device whenever a unit is unsharded, and where they are gathered after the update."""
    place, itemsize, states = job.options.offload.parameters, job.policy.compute_dtype.itemsize, job.states
    if place == DEVICE:
        return
    times = [job.micro_batches * n for n in job.gathers]
    own = [cut[1] for cut in job.unit_cuts] if states.parameters_sharded else job.padded_lengths
    if job.options.parts.hpz:  # then from secondary shards, on the device
        times = [1] * len(times)
    brought = sum(n * length for n, length in zip(times, own, strict=True)) * itemsize
    if states.gathers_after_update:
        brought += job.held(True) * itemsize
        gathered = job.held(False) * itemsize
        found[TO_HOST] += gathered
        found[TO_DISK] += gathered * (place == DISK)
    found[TO_DEVICE] += brought
    found[FROM_DISK] += brought * (place == DISK)


def updated(job: Job) -> int:
    """Elements that the first rank's optimizer updates: padding is not among them."""
    if not job.states.optimizer_sharded:
        return sum(job.unit_lengths)
    lengths = job.unit_lengths if job.layout == "per_unit" else (sum(job.unit_lengths),)
    return sum(min(length, cut[1]) for length, cut in zip(lengths, job.region_cuts, strict=True))
