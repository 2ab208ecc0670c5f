"""Cuts, model states and traffic: the worked example, and what holds for every job.

Published numbers are rows of `zerosim/course/published`, which `test_published` computes.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim import Policy
from zerosim.planning import (
    LAYOUTS,
    STAGES,
    Job,
    ShardedStates,
    ceil_cut,
    clip,
    gathers_by_unit,
    gradient_peak_nbytes,
    padded_unit_lengths,
    region_cuts,
    resting_nbytes,
    sent_nbytes,
    unit_cuts,
    vectors_sent,
)

WORLDS = st.sampled_from([1, 2, 3, 4, 5, 8, 64])
UNITS = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple)


# -- cuts -------------------------------------------------------------------------------------------------------------


def owners(cuts):
    """The owner of each element, cut after cut."""
    return [rank for cut in cuts for rank, n in enumerate(np.diff(cut)) for _ in range(n)]


@given(length=st.integers(0, 500), ranks=WORLDS, ends=st.tuples(st.integers(0, 500), st.integers(0, 500)))
def test_the_ceil_cut_covers_the_vector_with_n_falling_chunks_and_clipped_it_keeps_every_owner(length, ranks, ends):
    cut, (low, high) = ceil_cut(length, ranks), sorted(min(length, end) for end in ends)
    chunks = np.diff(cut).tolist()
    assert (len(cut), cut[0], sum(chunks)) == (ranks + 1, 0, length)
    assert (max(chunks), sorted(chunks, reverse=True)) == (-(-length // ranks), chunks)
    assert owners([clip(cut, low, high)]) == owners([cut])[low:high]


@given(units=UNITS, ranks=WORLDS, layout=st.sampled_from(LAYOUTS))
def test_units_and_regions_name_the_same_owners_who_own_as_much_as_each_other(units, ranks, layout):
    padded, cuts = padded_unit_lengths(units, ranks, layout), unit_cuts(units, ranks, layout)
    by_unit = owners(cuts)
    assert by_unit == owners(region_cuts(units, ranks, layout))
    assert [by_unit.count(rank) for rank in range(ranks)] == [sum(padded) // ranks] * ranks
    assert [cut[-1] for cut in cuts] == list(padded)
    padding = [with_padding - length for with_padding, length in zip(padded, units, strict=True)]
    if layout == "per_unit":
        assert all(0 <= of_unit < ranks for of_unit in padding)
    else:
        assert padding[:-1] == [0] * (len(units) - 1)
        assert 0 <= padding[-1] < ranks
        assert by_unit == sorted(by_unit)  # one stretch for each rank


# -- bytes at rest ----------------------------------------------------------------------------------------------------

WORKED = {stage: Job((2, 2), ranks=2, states=states, layout="contiguous") for stage, states in STAGES.items()}


@st.composite
def jobs(draw):
    """Any job of the four stages whose gradients travel in one format."""
    formats = st.sampled_from([None, "fp32", "fp16", "bf16"])
    policy = Policy(draw(st.sampled_from(["fp32", "fp16", "bf16"])), draw(formats), draw(formats))
    return Job(draw(UNITS), draw(WORLDS), draw(st.sampled_from([*STAGES.values()])), draw(st.sampled_from(LAYOUTS)),
               policy, slots=draw(st.integers(0, 3)), micro_batches=draw(st.integers(1, 4)),
               recompute_units=draw(st.none() | st.integers(1, 4)))


def held(job):
    """Bytes at rest on every rank, which are the same."""
    one, *others = resting_nbytes(job)
    assert others == [one] * (job.ranks - 1)
    return one


@pytest.mark.parametrize(("job", "expected"), [
    (Job((10,), 1, STAGES[0], slots=3), {"parameter": 20, "gradient": 20, "master": 40, "optimizer_state": 120}),
    # With compute in fp32 the parameter is the master, but a cut one is none for a whole optimizer.
    (Job((2, 2), 2, STAGES[3], slots=0, policy=Policy("fp32")), {"parameter": 8, "gradient": 8}),
    (Job((10,), 2, ShardedStates(True, False, False), policy=Policy("fp32")),
     {"parameter": 20, "gradient": 40, "master": 40, "optimizer_state": 80}),
    (WORKED[0], {"parameter": 8, "gradient": 8, "master": 16, "optimizer_state": 32}),
    (WORKED[1], {"parameter": 8, "gradient": 8, "master": 8, "optimizer_state": 16}),
    (WORKED[2], {"parameter": 8, "gradient": 4, "master": 8, "optimizer_state": 16}),
    (WORKED[3], {"parameter": 4, "gradient": 4, "master": 8, "optimizer_state": 16}),
])
def test_a_rank_holds_between_two_steps(job, expected):
    assert held(job) == expected


@given(job=jobs())
def test_what_is_cut_is_held_once_by_all_ranks_together_and_one_rank_holds_as_much_at_every_stage(job):
    alone = [held(replace(job, ranks=1, states=states)) for states in STAGES.values()]
    assert alone == alone[:1] * 4
    whole, states = held(replace(job, unit_lengths=job.padded_lengths, ranks=1)), job.states
    for kind, is_cut in [("parameter", states.parameters_sharded), ("gradient", states.gradients_sharded),
                         ("master", states.optimizer_sharded), ("optimizer_state", states.optimizer_sharded)]:
        assert held(job).get(kind, 0) * job.ranks == whole.get(kind, 0) * (1 if is_cut else job.ranks)


# -- gradients at their fullest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "nbytes"), [
    *zip(WORKED.values(), (8, 12, 8, 8), strict=True),
    (Job((3, 9, 2), 4, STAGES[2]), 2 * (4 + 12 + 4) // 4 + 2 * 12),  # the share and the largest padded unit
    (Job((3, 9, 2), 4, STAGES[1]), 2 * 20 + 2 * 20 // 4),            # all and the reduced share
    (Job((3, 9, 2), 4, STAGES[1], layout="contiguous", policy=Policy("fp16", reduce="fp32")), 2 * 16 + 4 * 16 // 4),
    (Job((8, 8), 2, ShardedStates(False, True, False), policy=Policy("fp16", accumulate="fp32"), micro_batches=3),
     4 * 8 + 4 * 16),
])
def test_gradients_take_at_their_fullest(job, nbytes):
    assert gradient_peak_nbytes(job) == [nbytes] * job.ranks


# -- bytes sent -------------------------------------------------------------------------------------------------------


@given(job=jobs())
def test_the_ranks_together_send_n_minus_1_times_the_limit_and_per_unit_all_the_same(job):
    sent, limit = sent_nbytes(job), vectors_sent(job)
    for purpose, dtype in [("gradients", job.policy.reduce_dtype), ("parameters", job.policy.compute_dtype)]:
        vector = sum(job.padded_lengths) * dtype.itemsize
        assert sum(sent[purpose]) == (job.ranks - 1) * limit[purpose] * vector
    assert job.layout != "per_unit" or all(len(set(nbytes)) == 1 for nbytes in sent.values())
    assert sent_nbytes(replace(job, ranks=1)) == {"gradients": [0], "parameters": [0], "control": [0]}


@pytest.mark.parametrize(("stage", "recompute_units", "nbytes"), [
    (0, None, [8, 8]), (1, None, [8, 8]), (2, None, [8, 8]),
    (3, None, [12, 12]), (3, 1, [12, 12]), (3, 2, [16, 12])])
def test_the_worked_example_sends(stage, recompute_units, nbytes):
    sent = sent_nbytes(replace(WORKED[stage], recompute_units=recompute_units))
    assert [sum(pair) for pair in zip(sent["gradients"], sent["parameters"], strict=True)] == nbytes
    assert sent["control"] == ([0, 0] if stage == 0 else [9, 9])
    normed = sent_nbytes(replace(WORKED[stage], normed_tensors=5))["control"]
    assert normed == ([0, 0] if stage == 0 else [9 + 2 * 5 * 8] * 2)


def test_two_layouts_send_as_much_in_sum_and_not_by_rank_and_padding_is_held_and_sent():
    assert [sent_nbytes(Job((2, 2), 2, STAGES[3], layout, recompute_units=2))["parameters"] for layout in LAYOUTS] == [
        [10, 10], [12, 8]]
    padded = [Job((1, 1, 1), 2, STAGES[3], layout) for layout in LAYOUTS]
    assert [held(job)["parameter"] for job in padded] == [2 * 3, 2 * 2]
    assert [sum(sent_nbytes(job)["gradients"]) for job in padded] == [2 * 6, 2 * 4]


@pytest.mark.parametrize(("policy", "nbytes"), [
    (Policy("fp16"), (16, 8)), (Policy("fp16", reduce="fp32"), (32, 16)), (Policy("fp16", wire="fp32"), (24, 16)),
    (Policy("fp16", accumulate="fp32"), (16, 8)), (Policy("fp32", reduce="bf16"), (16, 8))])
def test_gradients_travel_in_the_reduce_format_and_partial_sums_in_the_wires(policy, nbytes):
    all_reduced, scattered = (sent_nbytes(Job((8,), 2, STAGES[stage], policy=policy)) for stage in (0, 1))
    assert [of["gradients"] for of in (all_reduced, scattered)] == [[each] * 2 for each in nbytes]
    assert scattered["parameters"] == [4 * policy.compute_dtype.itemsize] * 2


def test_cut_gradients_are_gathered_for_a_whole_optimizer():
    job = Job((8, 8), 2, ShardedStates(False, True, False), policy=Policy("fp16", accumulate="fp32"), micro_batches=3)
    assert sent_nbytes(job) == {"gradients": [3 * 16 + 32] * 2, "parameters": [0, 0], "control": [0, 0]}
    assert vectors_sent(job) == {"gradients": 4, "parameters": 0}


@pytest.mark.parametrize(("micro_batches", "vectors"), [
    (1, [2, 2, 2, 3]), (2, [2, 2, 3, 6]), (8, [2, 2, 9, 24])])
def test_many_ranks_send_the_published_limits(micro_batches, vectors):
    jobs = [Job((50, 60, 70), 3, states, micro_batches=micro_batches) for states in STAGES.values()]
    assert [sum(vectors_sent(job).values()) for job in jobs] == vectors


@given(units=st.integers(1, 30), segment=st.none() | st.integers(1, 8))
def test_a_unit_is_gathered_twice_and_once_more_if_it_is_run_again(units, segment):
    again = sum(min(segment, units - start) - 1 for start in range(0, units, segment)) if segment else 0
    assert sum(gathers_by_unit(units, segment)) == 2 * units + again
    assert gathers_by_unit(3, tied=[(2, 0)]) == (4, 2, 2)  # by its user's passes too
    assert gathers_by_unit(units, 1) == gathers_by_unit(units, None) == (2,) * units
