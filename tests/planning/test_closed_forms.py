"""Cuts, model states and traffic: what holds for every job, and states that no engine has.

That they are what engines hold and send, every run of `tests/zero` asserts that is compared to the twin; published
numbers are rows of `zerosim/course/published`, which `test_published` computes.
"""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zerosim import Policy
from zerosim.planning import (
    STAGES,
    Job,
    ShardedStates,
    ceil_cut,
    cuts,
    resting_nbytes,
    sent_nbytes,
    vectors_sent,
)

WORLDS = st.sampled_from([1, 2, 3, 4, 5, 8, 64])
UNITS = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple)


# -- cuts -------------------------------------------------------------------------------------------------------------


def owners(several):
    """The owner of each element, cut after cut."""
    return [rank for cut in several for rank, n in enumerate(np.diff(cut)) for _ in range(n)]


@given(length=st.integers(0, 500), ranks=WORLDS, ends=st.tuples(st.integers(0, 500), st.integers(0, 500)))
def test_the_ceil_cut_covers_the_vector_with_n_falling_chunks_and_clipped_it_keeps_every_owner(length, ranks, ends):
    cut, (low, high) = ceil_cut(length, ranks), sorted(min(length, end) for end in ends)
    chunks = np.diff(cut).tolist()
    assert (len(cut), cut[0], sum(chunks)) == (ranks + 1, 0, length)
    assert (max(chunks), sorted(chunks, reverse=True)) == (-(-length // ranks), chunks)
    assert owners([cuts.clip(cut, low, high)]) == owners([cut])[low:high]


@given(units=UNITS, ranks=WORLDS, layout=st.sampled_from(cuts.LAYOUTS))
def test_units_name_owners_who_own_as_much_as_each_other(units, ranks, layout):
    padded, of_units = cuts.padded_unit_lengths(units, ranks, layout), cuts.unit_cuts(units, ranks, layout)
    by_unit = owners(of_units)
    assert [by_unit.count(rank) for rank in range(ranks)] == [sum(padded) // ranks] * ranks
    assert [cut[-1] for cut in of_units] == list(padded)
    padding = [with_padding - length for with_padding, length in zip(padded, units, strict=True)]
    if layout == "per_unit":
        assert all(0 <= of_unit < ranks for of_unit in padding)
    else:
        assert padding[:-1] == [0] * (len(units) - 1)
        assert 0 <= padding[-1] < ranks
        assert by_unit == sorted(by_unit)  # one stretch for each rank


# -- bytes at rest ----------------------------------------------------------------------------------------------------

@st.composite
def jobs(draw):
    """Any job of the four stages whose gradients travel in one format."""
    formats = st.sampled_from([None, "fp32", "fp16", "bf16"])
    policy = Policy(draw(st.sampled_from(["fp32", "fp16", "bf16"])), draw(formats), draw(formats))
    return Job(draw(UNITS), draw(WORLDS), draw(st.sampled_from([*STAGES.values()])),
               draw(st.sampled_from(cuts.LAYOUTS)), policy, slots=draw(st.integers(0, 3)),
               micro_batches=draw(st.integers(1, 4)), recompute_units=draw(st.none() | st.integers(1, 4)))


def held(job):
    """Bytes at rest on every rank, which are the same."""
    one, *others = resting_nbytes(job)
    assert others == [one] * (job.ranks - 1)
    return one


@given(job=jobs())
def test_what_is_cut_is_held_once_by_all_ranks_together_and_one_rank_holds_as_much_at_every_stage(job):
    alone = [held(replace(job, ranks=1, states=states)) for states in STAGES.values()]
    assert alone == alone[:1] * 4
    whole, states = held(replace(job, unit_lengths=job.padded_lengths, ranks=1)), job.states
    for kind, is_cut in [("parameter", states.parameters_sharded), ("gradient", states.gradients_sharded),
                         ("master", states.optimizer_sharded), ("optimizer_state", states.optimizer_sharded)]:
        assert held(job).get(kind, 0) * job.ranks == whole.get(kind, 0) * (1 if is_cut else job.ranks)


# -- bytes sent -------------------------------------------------------------------------------------------------------


@given(job=jobs())
def test_the_ranks_together_send_n_minus_1_times_the_limit_and_per_unit_all_the_same(job):
    sent, limit = sent_nbytes(job), vectors_sent(job)
    for purpose, dtype in [("gradients", job.policy.reduce_dtype), ("parameters", job.policy.compute_dtype)]:
        vector = sum(job.padded_lengths) * dtype.itemsize
        assert sum(sent[purpose]) == (job.ranks - 1) * limit[purpose] * vector
    assert job.layout != "per_unit" or all(len(set(nbytes)) == 1 for nbytes in sent.values())
    assert sent_nbytes(replace(job, ranks=1)) == {"gradients": [0], "parameters": [0], "control": [0]}


def test_partial_sums_travel_in_the_wires_format_and_sums_in_that_which_reduces():
    jobs = [Job((8,), 2, STAGES[stage], policy=Policy("fp16", wire="fp32")) for stage in (0, 1)]
    assert [sent_nbytes(job)["gradients"] for job in jobs] == [[24, 24], [16, 16]]


def test_states_that_are_no_stages_are_held_and_sent_too():
    """A cut parameter is no master for a whole optimizer, and for it cut gradients are gathered."""
    cut_parameters = Job((10,), 2, ShardedStates(True, False, False), policy=Policy("fp32"))
    assert held(cut_parameters) == {"parameter": 20, "gradient": 40, "master": 40, "optimizer_state": 80}
    job = Job((8, 8), 2, ShardedStates(False, True, False), policy=Policy("fp16", accumulate="fp32"), micro_batches=3)
    assert sent_nbytes(job) == {"gradients": [3 * 16 + 32] * 2, "parameters": [0, 0], "control": [0, 0]}
    assert vectors_sent(job) == {"gradients": 4, "parameters": 0}


@given(units=st.integers(1, 30), segment=st.none() | st.integers(1, 8))
def test_a_unit_is_gathered_twice_and_once_more_if_it_is_run_again(units, segment):
    again = sum(min(segment, units - start) - 1 for start in range(0, units, segment)) if segment else 0
    gathers = Job((1,) * units, 1, STAGES[3], recompute_units=segment).gathers
    assert sum(gathers) == 2 * units + again
    assert gathers == (2,) * units or (segment or 1) > 1
