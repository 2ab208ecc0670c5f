"""The invariants: few checks, each of which finds many bugs.

A check takes what was observed of a training, and raises AssertionError, with what differs first and by how much, where
it does not hold. Those that need a second run make it by `observe`, of the package as it is then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from types import MappingProxyType

import numpy as np

from zerosim.course.museum.runs import OPTIMIZERS, SPOILED_STEP, Observed, observe, one_device
from zerosim.numerics.policy import Policy
from zerosim.planning.closed_forms import STAGES, Job, resting_nbytes, sent_nbytes
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.testing import assert_same_bits


def equals_one_device(seen: Observed) -> None:
    """After every step each rank has, bit for bit, the weights of one device that is fed with all ranks' gradients."""
    nothing_under_way_is_written(seen)
    _same_weights(seen, [one_device(seen.setting)] * seen.setting.ranks)


def replicas_agree(seen: Observed) -> None:
    """After every step all ranks have the same weights, bit for bit."""
    _same_weights(seen, seen.weights[:1] * seen.setting.ranks, ", expected as on rank 0")


def all_skip_or_none(seen: Observed) -> None:
    """A step is skipped by all ranks or by none."""
    for step, results in enumerate(zip(*seen.results, strict=True), 1):
        if len({result.skipped for result in results}) > 1:
            raise AssertionError(f"step {step}: " + ", ".join(
                f"rank {rank} {'skipped' if result.skipped else 'took'} it" for rank, result in enumerate(results)))


def skipped_step_changes_nothing(seen: Observed) -> None:
    """A step whose gradient has inf or NaN changes no weight on any rank, and is reported."""
    for rank, mine in enumerate(seen.weights):
        assert_same_bits(mine[SPOILED_STEP + 1], mine[SPOILED_STEP], f"weights of rank {rank} after the skipped step")
    if not seen.warned:
        raise AssertionError(f"step {SPOILED_STEP + 1} was skipped on every rank, and nothing was reported")


def padding_is_never_read(seen: Observed) -> None:
    """Padding full of NaN changes no weight."""  # which debug fills, in the run seen or the other
    other = observe(replace(seen.setting, debug=not seen.setting.debug))
    _same_weights(seen, other.weights, ", with NaN in the padding")


def same_bits_in_any_order(seen: Observed) -> None:
    """Ranks that run in another legal order come to the same weights, bit for bit."""
    for seed in (1, 2):
        _same_weights(observe(seen.setting, seed=seed), seen.weights, f", when ranks run in the order of seed {seed}")


def nothing_under_way_is_written(seen: Observed) -> None:
    """Memory that a collective is reading stays as it is until its wait, whose own check ends the training else."""
    if seen.error:
        raise AssertionError(f"the training ended with {seen.error}")


def sends_what_is_planned(seen: Observed) -> None:
    """Gradients cost each rank the bytes of the closed form, in as few collectives as the bucket's size allows."""
    job, steps = _job(seen), seen.setting.steps
    buckets = -(-sum(job.padded_lengths) // (seen.setting.options["bucket_nbytes"] // job.wire_dtype.itemsize))
    for what, found, planned in (
            ("bytes", seen.gradient_nbytes, [steps * nbytes for nbytes in sent_nbytes(job)["gradients"]]),
            ("collectives", seen.collectives, [steps * buckets] * job.ranks)):
        if found != planned:
            raise AssertionError(f"{what} of gradients of each rank: found {found}, planned {planned}, "
                                 f"{max(found) / max(planned):.2f} times as many")


def memory_is_sharded(seen: Observed) -> None:
    """At rest each rank holds the bytes of the closed form: 1/N of what its stage cuts."""
    planned = [sum(kinds.values()) for kinds in resting_nbytes(_job(seen))]
    if seen.resting != planned:
        raise AssertionError(f"bytes at rest on each rank: found {seen.resting}, planned {planned}")


def reload_is_the_identity(seen: Observed) -> None:
    """A checkpoint that other ranks load has the masters and moments that were saved, bit for bit."""
    if not seen.loaded:
        raise ValueError("nothing was loaded; observe a setting with reload_ranks, as Setting(reload_ranks=3)")
    for rank, found in enumerate(seen.loaded):
        assert_same_bits(found, seen.saved[0], f"masters and moments that rank {rank} loaded")


def all_reduce_is_gather_of_scatter(seen: Observed) -> None:
    """An all-reduce gives, bit for bit, the all-gather of a reduce-scatter, on any number of ranks up to the run's."""
    for ranks in range(1, seen.setting.ranks + 1):
        for rank, (found, expected) in enumerate(Cluster(ranks, debug=True).run(_reduced_twice)):
            assert_same_bits(found, expected, f"all-reduce on rank {rank} of {ranks}")


def _same_weights(seen: Observed, expected: Sequence[Sequence[np.ndarray]], where: str = "") -> None:
    for rank, (mine, other) in enumerate(zip(seen.weights, expected, strict=True)):
        for step, (found, right) in enumerate(zip(mine, other, strict=True)):
            assert_same_bits(found, right, f"weights of rank {rank} after step {step}{where}")


def _reduced_twice(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank.index).standard_normal(12, np.float32)
    return rank.all_reduce(x), rank.all_gather(rank.reduce_scatter(x), length=12)


def _job(seen: Observed) -> Job:
    setting = seen.setting
    return Job(tuple(unit.parameter_count for unit in setting.model.units), setting.ranks, STAGES[setting.stage],
               layout=setting.options.get("layout", "per_unit"), policy=Policy("fp32"),
               slots=len(OPTIMIZERS[setting.optimizer].slots((1,))))


def _of_a_whole_run(check: Callable[[Observed], None]) -> Callable[[Observed], None]:
    @wraps(check)
    def checked(seen: Observed) -> None:
        try:
            check(seen)
        except Exception as found:
            if isinstance(found, AssertionError) or not seen.error:
                raise
        nothing_under_way_is_written(seen)  # no run passes that an error has ended
    return checked


INVARIANTS: Mapping[str, Callable[[Observed], None]] = MappingProxyType({one.__name__: _of_a_whole_run(one) for one in (
    equals_one_device, replicas_agree, all_skip_or_none, skipped_step_changes_nothing, padding_is_never_read,
    same_bits_in_any_order, nothing_under_way_is_written, sends_what_is_planned, memory_is_sharded,
    reload_is_the_identity, all_reduce_is_gather_of_scatter)})
