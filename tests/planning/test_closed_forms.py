"""Model states and traffic: the published numbers, the worked example, and what holds for every job."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.numerics.policy import Policy
from zerosim.planning import (
    LAYOUTS,
    STAGES,
    Job,
    ShardedStates,
    gathers_by_unit,
    gradient_peak_nbytes,
    resting_nbytes,
    sent_nbytes,
    vectors_sent,
)

WORKED = {stage: Job((2, 2), ranks=2, states=states, layout="contiguous") for stage, states in STAGES.items()}


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any job of the four stages whose gradients travel in one format."""
    formats = st.sampled_from([None, "fp32", "fp16", "bf16"])
    policy = Policy(draw(st.sampled_from(["fp32", "fp16", "bf16"])), draw(formats), draw(formats))
    return Job(tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))),
               ranks=draw(st.sampled_from([1, 2, 3, 4, 5, 8, 64])),
               states=draw(st.sampled_from([*STAGES.values()])),
               layout=draw(st.sampled_from(LAYOUTS)), policy=policy, slots=draw(st.integers(0, 3)),
               micro_batches=draw(st.integers(1, 4)), recompute_units=draw(st.none() | st.integers(1, 4)))


def total_resting(parameters: int, ranks: int, stage: int) -> int:
    (each,) = {sum(rank.values()) for rank in resting_nbytes(Job((parameters,), ranks, STAGES[stage]))}
    return each


@pytest.mark.parametrize(("parameters", "ranks", "gigabytes"), [
    (7_500_000_000, 64, (120, 31.4, 16.6, 1.9)),   # Rajbhandari et al. 2020, figure 1
    (7_000_000_000, 8, (112, 38.5, 26.25, 14)),    # not the 21.5 and 15.75 GB that are also in print
    (175_000_000_000, 1, (2800, 2800, 2800, 2800)),
])
def test_published_bytes_per_rank_come_out(parameters: int, ranks: int, gigabytes: tuple[float, ...]) -> None:
    for stage, published in enumerate(gigabytes):
        digits = len(str(published).partition(".")[2])
        assert round(total_resting(parameters, ranks, stage) / 1e9, digits) == published


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_adam_in_mixed_precision_takes_the_bytes_of_zeros_table(ranks: int) -> None:
    p = 960 * ranks
    assert total_resting(p, ranks, 0) == 16 * p
    assert total_resting(p, ranks, 1) == 4 * p + 12 * p // ranks
    assert total_resting(p, ranks, 2) == 2 * p + 14 * p // ranks
    assert total_resting(p, ranks, 3) == 16 * p // ranks


@pytest.mark.parametrize(("slots", "nbytes"), [(0, 8), (1, 12), (2, 16), (3, 20)])
def test_each_slot_of_the_optimizer_takes_four_bytes(slots: int, nbytes: int) -> None:
    assert sum(resting_nbytes(Job((10,), 1, STAGES[0], slots=slots))[0].values()) == 10 * nbytes


def test_a_state_that_takes_no_bytes_is_left_out() -> None:
    job = Job((2, 2), 2, STAGES[3], slots=0, policy=Policy("fp32"))
    assert resting_nbytes(job) == [{"parameter": 8, "gradient": 8}] * 2


def test_with_compute_in_fp32_the_parameter_is_the_master() -> None:
    for states in STAGES.values():
        (held,) = resting_nbytes(Job((10,), 1, states, policy=Policy("fp32")))
        assert held == {"parameter": 40, "gradient": 40, "optimizer_state": 80}


def test_a_cut_fp32_parameter_is_no_master_for_a_whole_optimizer() -> None:
    held = resting_nbytes(Job((10,), 2, ShardedStates(True, False, False), policy=Policy("fp32")))[0]
    assert held == {"parameter": 20, "gradient": 40, "master": 40, "optimizer_state": 80}


def test_gradients_rest_in_the_format_that_accumulates() -> None:
    for policy, nbytes in [(Policy("fp16", accumulate="fp32"), 40), (Policy("fp16", reduce="fp32"), 20)]:
        assert resting_nbytes(Job((10,), 1, STAGES[0], policy=policy))[0]["gradient"] == nbytes


@pytest.mark.parametrize(("policy", "nbytes"), [
    (Policy("fp16"), (16, 8)), (Policy("fp16", reduce="fp32"), (32, 16)), (Policy("fp16", wire="fp32"), (24, 16)),
    (Policy("fp16", accumulate="fp32"), (16, 8)), (Policy("fp32", reduce="bf16"), (16, 8))])
def test_gradients_travel_in_the_reduce_format_and_partial_sums_in_the_wires(
        policy: Policy, nbytes: tuple[int, int]) -> None:
    all_reduced, scattered = (sent_nbytes(Job((8,), 2, STAGES[stage], policy=policy)) for stage in (0, 1))
    assert all_reduced["gradients"] == [nbytes[0]] * 2
    assert scattered["gradients"] == [nbytes[1]] * 2
    assert scattered["parameters"] == [4 * policy.compute_dtype.itemsize] * 2


def test_cut_gradients_are_gathered_for_a_whole_optimizer() -> None:
    job = Job((8, 8), 2, ShardedStates(False, True, False), policy=Policy("fp16", accumulate="fp32"), micro_batches=3)
    assert sent_nbytes(job) == {"gradients": [3 * 16 + 32] * 2, "parameters": [0, 0], "control": [0, 0]}
    assert vectors_sent(job) == {"gradients": 4, "parameters": 0}
    assert gradient_peak_nbytes(job) == [4 * 8 + 4 * 16] * 2


def test_padding_is_held_and_sent() -> None:
    per_unit = Job((1, 1, 1), ranks=2, states=STAGES[3])
    contiguous = Job((1, 1, 1), ranks=2, states=STAGES[3], layout="contiguous")
    assert resting_nbytes(per_unit)[0]["parameter"] == 2 * 3
    assert resting_nbytes(contiguous)[0]["parameter"] == 2 * 2
    assert sum(sent_nbytes(per_unit)["gradients"]) == 2 * 6
    assert sum(sent_nbytes(contiguous)["gradients"]) == 2 * 4


@pytest.mark.parametrize(("stage", "kinds"), [
    (0, {"parameter": 8, "gradient": 8, "master": 16, "optimizer_state": 32}),
    (1, {"parameter": 8, "gradient": 8, "master": 8, "optimizer_state": 16}),
    (2, {"parameter": 8, "gradient": 4, "master": 8, "optimizer_state": 16}),
    (3, {"parameter": 4, "gradient": 4, "master": 8, "optimizer_state": 16}),
])
def test_the_worked_example_holds(stage: int, kinds: dict[str, int]) -> None:
    assert resting_nbytes(WORKED[stage]) == [kinds, kinds]


@pytest.mark.parametrize(("stage", "recompute_units", "nbytes"), [
    (0, None, [8, 8]), (1, None, [8, 8]), (2, None, [8, 8]),
    (3, None, [12, 12]), (3, 1, [12, 12]), (3, 2, [16, 12])])
def test_the_worked_example_sends(stage: int, recompute_units: int | None, nbytes: list[int]) -> None:
    job = Job((2, 2), 2, STAGES[stage], layout="contiguous", recompute_units=recompute_units)
    sent = sent_nbytes(job)
    assert [sum(pair) for pair in zip(sent["gradients"], sent["parameters"], strict=True)] == nbytes
    assert sent["control"] == ([0, 0] if stage == 0 else [9, 9])


@pytest.mark.parametrize(("stage", "nbytes"), [(0, 8), (1, 12), (2, 8), (3, 8)])
def test_the_gradients_of_the_worked_example_peak_at(stage: int, nbytes: int) -> None:
    assert gradient_peak_nbytes(WORKED[stage]) == [nbytes, nbytes]


def test_cut_gradients_peak_at_the_share_and_the_largest_padded_unit() -> None:
    assert gradient_peak_nbytes(Job((3, 9, 2), 4, STAGES[2])) == [2 * (4 + 12 + 4) // 4 + 2 * 12] * 4


def test_whole_gradients_of_a_cut_optimizer_peak_at_all_and_the_reduced_share() -> None:
    assert gradient_peak_nbytes(Job((3, 9, 2), 4, STAGES[1])) == [2 * 20 + 2 * 20 // 4] * 4
    wide = Job((3, 9, 2), 4, STAGES[1], layout="contiguous", policy=Policy("fp16", reduce="fp32"))
    assert gradient_peak_nbytes(wide) == [2 * 16 + 4 * 16 // 4] * 4


def test_a_whole_unit_waits_where_it_must_be_added_or_cast() -> None:
    for stage in (0, 1):
        again = Job((3, 9, 2), 4, STAGES[stage], micro_batches=2)
        assert gradient_peak_nbytes(again) == [2 * 20 + 2 * 12] * 4
        cast = Job((3, 9, 2), 4, STAGES[stage], policy=Policy("fp16", reduce="fp32", accumulate="fp32"))
        assert gradient_peak_nbytes(cast) == [4 * 20 + max(2 * 12, stage * 4 * 5)] * 4


@given(sizes=st.lists(st.integers(1, 30), min_size=3, max_size=8), ranks=st.sampled_from([2, 3, 4, 8]))
def test_cutting_gradients_lowers_their_peak_for_equal_units(sizes: list[int], ranks: int) -> None:
    units = (max(sizes),) * len(sizes)
    cut, whole = (gradient_peak_nbytes(Job(units, ranks, STAGES[stage]))[0] for stage in (2, 1))
    assert cut < whole


@pytest.mark.parametrize(("micro_batches", "vectors"), [
    (1, (2, 2, 2, 3)), (2, (2, 2, 3, 6)), (8, (2, 2, 9, 24))])
def test_many_ranks_send_the_published_limits(micro_batches: int, vectors: tuple[int, ...]) -> None:
    jobs = [Job((5, 6, 7), 3, states, micro_batches=micro_batches) for states in STAGES.values()]
    assert tuple(sum(vectors_sent(job).values()) for job in jobs) == vectors


def test_at_two_ranks_two_vectors_are_one_and_three_are_one_and_a_half() -> None:
    for stage, mean in enumerate([1, 1, 1, Fraction(3, 2)]):
        sent = sent_nbytes(Job((100, 60), 2, STAGES[stage]))
        assert sent["gradients"][0] + sent["parameters"][0] == mean * 2 * 160


@given(job=jobs())
def test_the_ranks_together_send_n_minus_1_times_the_limit(job: Job) -> None:
    sent, limit = sent_nbytes(job), vectors_sent(job)
    for purpose, dtype in [("gradients", job.policy.reduce_dtype), ("parameters", job.policy.compute_dtype)]:
        vector = sum(job.padded_lengths) * dtype.itemsize
        assert sum(sent[purpose]) == (job.ranks - 1) * limit[purpose] * vector


@given(job=jobs())
def test_per_unit_every_rank_sends_the_same(job: Job) -> None:
    if job.layout == "per_unit":
        assert all(len(set(nbytes)) == 1 for nbytes in sent_nbytes(job).values())


@given(job=jobs())
def test_one_rank_sends_nothing_and_holds_the_same_at_every_stage(job: Job) -> None:
    nothing = {"gradients": [0], "parameters": [0], "control": [0]}
    alone = [replace(job, ranks=1, states=states) for states in STAGES.values()]
    assert [sent_nbytes(stage) for stage in alone] == [nothing] * 4
    assert [resting_nbytes(stage) for stage in alone] == [resting_nbytes(alone[0])] * 4


@given(job=jobs())
def test_what_is_cut_is_held_once_by_all_ranks_together(job: Job) -> None:
    (alone,) = resting_nbytes(replace(job, unit_lengths=job.padded_lengths, ranks=1, states=STAGES[0]))
    states = job.states
    for kind, is_cut in [("parameter", states.parameters_sharded), ("gradient", states.gradients_sharded),
                         ("master", states.optimizer_sharded), ("optimizer_state", states.optimizer_sharded)]:
        together = sum(rank.get(kind, 0) for rank in resting_nbytes(job))
        assert together == alone.get(kind, 0) * (1 if is_cut else job.ranks)


@given(units=st.integers(1, 30), segment=st.none() | st.integers(1, 8))
def test_a_unit_is_gathered_twice_and_once_more_if_it_is_run_again(units: int, segment: int | None) -> None:
    segments = [min(segment, units - start) for start in range(0, units, segment)] if segment else []
    assert sum(gathers_by_unit(units, segment)) == 2 * units + sum(length - 1 for length in segments)


def test_recomputing_single_blocks_gathers_no_more() -> None:
    assert gathers_by_unit(7, 1) == gathers_by_unit(7, None) == (2,) * 7


def test_two_layouts_send_as_much_in_sum_and_not_by_rank() -> None:
    jobs_of = [Job((2, 2), 2, STAGES[3], layout=layout, recompute_units=2) for layout in LAYOUTS]
    assert [sent_nbytes(job)["parameters"] for job in jobs_of] == [[10, 10], [12, 8]]


@pytest.mark.parametrize(("change", "text"), [
    ({"ranks": 0}, "ranks must be at least 1, got 0"),
    ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
    ({"slots": -1}, "slots must be at least 0, got -1"),
    ({"recompute_units": 0}, "recompute_units must be at least 1, got 0"),
    ({"unit_lengths": (3, -4)}, "unit_lengths[1] must be at least 0, got -4"),
    ({"unit_lengths": (7.5e9,)}, "unit_lengths[0] must be a whole number, got 7500000000.0; "
                                 "write unit_lengths[0]=int(...)"),
    ({"unit_lengths": ()}, "unit_lengths is empty; a model has at least one unit, e.g. unit_lengths=(1000,)"),
    ({"layout": "contigous"}, "no layout is called 'contigous'; the layouts are per_unit, contiguous"
                              "; did you mean 'contiguous'?"),
])
def test_a_job_that_cannot_be_is_refused_with_the_reason(change: dict[str, object], text: str) -> None:
    arguments = {"unit_lengths": (2, 2), "ranks": 2, "states": STAGES[1], **change}
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Job(**arguments)
