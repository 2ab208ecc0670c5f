"""Bytes that one step of a rank moves between its device, its host and its disk (offload), in the engine's order.

Legend: N ranks, k micro-batches; n elements of the padded vector, s = n/N of it a rank's own share, v of what a rank
updates those that are parameters. The rank is the first, whose share has no padding.
Sources: Ren et al. 2021 (ZeRO-Offload), section 4; Rajbhandari et al. 2021 (ZeRO-Infinity), section 4.
"""

from collections import Counter

from zerosim.numerics.places import DEVICE, DIRECTIONS, DISK, FROM_DISK, HOST, TO_DEVICE, TO_DISK, TO_HOST
from zerosim.planning.closed_forms import Job


def moved_nbytes(job: Job, state_nbytes: int | None = None) -> dict[str, int]:
    """Bytes of one step by direction. ``state_nbytes`` are the optimizer's own of a parameter (None: the job's slots).

    >>> from zerosim.numerics.places import Offload
    >>> from zerosim.planning.closed_forms import STAGES
    >>> moved_nbytes(Job((8,), 2, STAGES[2], offload=Offload("host", "host")))
    {'to host': 8, 'to device': 8, 'to disk': 0, 'from disk': 0}
    """
    found = Counter[str]()
    if not job.offload.is_none:
        _backward(job, found)
        _update(job, job.slots * job.policy.state_dtype.itemsize if state_nbytes is None else state_nbytes, found)
        _parameters(job, found)
    return {way: found[way] for way in DIRECTIONS}


def _backward(job: Job, found: Counter[str]) -> None:
    """Gradients go to where they rest as they are made: sums of shares each micro-batch, or addends but the last's."""
    place, policy, k = job.offload.gradients, job.policy, job.micro_batches
    if place == DEVICE:
        return
    resting, reduced = policy.accumulate_dtype.itemsize, policy.reduce_dtype.itemsize
    if job.states.gradients_sharded:
        share = job.held(True)
        found[TO_HOST] += k * share * reduced
        written, read = k * share * resting, (k - 1) * share * resting
    else:
        whole, taken = sum(job.padded_lengths), job.held(job.states.optimizer_sharded) * reduced
        made = policy.compute_dtype.itemsize
        tied = sum(job.padded_lengths[owner] for owner in {owner for _, owner in job.tied})  # completed as it rests
        found[TO_HOST] += (k - 1) * (whole * made + tied * (resting - made)) + taken
        found[TO_DEVICE] += (k > 1) * whole * resting
        same = not job.states.optimizer_sharded and reduced == resting  # in place
        written = (k - 1) * whole * resting + (job.held(False) * resting if same else taken)
        read = max(0, k - 2) * whole * resting + (k > 1) * whole * resting
    if place == DISK:
        found[TO_DISK] += written
        found[FROM_DISK] += read


def _update(job: Job, slots: int, found: Counter[str]) -> None:
    """Scans, reads and writes of the update, where the optimizer's state rests, and parameters that it has made."""
    places, policy, states = job.offload, job.policy, job.states
    valid, held = updated(job), job.held(states.optimizer_sharded)
    passes, writes = (3, 2) if job.normed_tensors else (1, 1)  # those of whole tensors' norms write moments alone once
    gradient = (policy.accumulate_dtype if states.gradients_sharded else policy.reduce_dtype).itemsize
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
    place, itemsize, states = job.offload.parameters, job.policy.compute_dtype.itemsize, job.states
    if place == DEVICE:
        return
    own = job.ranks if states.parameters_sharded else 1
    brought = sum(times * length // own for times, length in zip(job.gathers, job.padded_lengths, strict=True))
    brought *= job.micro_batches * itemsize
    if states.optimizer_sharded and not states.parameters_sharded:
        brought += job.held(True) * itemsize
        gathered = job.held(False) * itemsize
        found[TO_HOST] += gathered
        found[TO_DISK] += gathered * (place == DISK)
    found[TO_DEVICE] += brought
    found[FROM_DISK] += brought * (place == DISK)


def updated(job: Job) -> int:
    """Elements that the first rank's optimizer updates: padding is not among them."""
    return job.held(True) if job.states.optimizer_sharded else sum(job.unit_lengths)
