"""What the engine holds and sends equals pencil and paper, to the byte."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.zero.training import MODELS, batches
from tests.zero.units import tied
from zerosim.models import MLP
from zerosim.models.units import Recompute
from zerosim.planning import closed_forms as pencil

WORLDS = (1, 2, 3, 4, 5, 8)
GRADIENTS = ("gradient", "unit_gradient")
STATE_KINDS = ("parameter", "gradient", "master", "optimizer_state")


def steps(rank, model, data, **options):
    """Takes the steps and returns the engine, so that what it holds at rest stays held."""
    engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.01), **options)
    for step in data:
        engine.step(step[rank.index])
    return engine


def job_of(model, ranks, stage, policy, layout, micro_batches, recompute_units=None):
    return pencil.Job(tuple(unit.parameter_count for unit in model.units), ranks, pencil.STAGES[stage], layout=layout,
                      policy=policy, slots=2, micro_batches=micro_batches, recompute_units=recompute_units)


def assert_ledgers_equal_pencil(model, ranks, stage, policy, layout, micro_batches, recompute="none",
                                 debug=False):
    """One step; resting bytes by kind, peak of gradients, bytes sent by purpose, and the number of gathers."""
    cluster = zs.Cluster(ranks, debug=debug)
    cluster.run(lambda rank: steps(rank, model, batches(model, ranks, micro_batches, 1), stage=stage, policy=policy,
                                   layout=layout, recompute=recompute))
    units = Recompute.parse(recompute).units_per_segment
    job = job_of(model, ranks, stage, policy, layout, micro_batches, units)
    assert [memory.now_nbytes_by_kind for memory in cluster.memory] == pencil.resting_nbytes(job)
    sent = pencil.sent_nbytes(job)
    assert {purpose: cluster.trace.sent_nbytes(purpose) for purpose in sent} == sent
    assert cluster.trace.sent_nbytes() == [sum(of_rank) for of_rank in zip(*sent.values(), strict=True)]
    assert [memory.peak_nbytes_of(GRADIENTS) for memory in cluster.memory] == pencil.gradient_peak_nbytes(job)
    if pencil.STAGES[stage].parameters_sharded:
        gathers = micro_batches * sum(pencil.gathers_by_unit(len(model.units), units))
        assert len(cluster.trace[0].collectives("all_gather", "parameters")) == gathers
    return cluster


@pytest.mark.parametrize("layout", ["per_unit", "contiguous"])
@pytest.mark.parametrize("stage", zs.STAGES)
def test_every_stage_holds_and_sends_what_the_closed_forms_say(stage, layout):
    for ranks, compute, name, micro_batches in covering(
            WORLDS, ("fp32", "fp16"), ("odd", "fewer_than_ranks"), (1, 3), turn=stage):
        assert_ledgers_equal_pencil(MODELS[name](), ranks, stage, zs.Policy(compute), layout, micro_batches)


@pytest.mark.parametrize(
    "policy",
    [
        zs.Policy("bf16", accumulate="fp32"),
        zs.Policy("bf16", reduce="fp32"),
        zs.Policy("fp16", wire="fp32"),
        zs.Policy("fp8_e5m2", reduce="bf16", accumulate="fp32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", zs.STAGES)
def test_mixed_formats_hold_and_send_what_the_closed_forms_say(stage, policy):
    for ranks, micro_batches in covering((1, 3, 4), (1, 2), turn=stage):
        assert_ledgers_equal_pencil(MODELS["deep"](), ranks, stage, policy, "per_unit", micro_batches)


@pytest.mark.parametrize("recompute", ["none", "block", "segment(2)", "segment(3)"])
@pytest.mark.parametrize("layout", ["per_unit", "contiguous"])
def test_recomputation_costs_the_gathers_that_the_closed_forms_say(recompute, layout):
    model = MLP((3, 4, 4, 4, 4, 2), seed=1)
    for stage, ranks in covering((2, 3), (2, 3)):
        assert_ledgers_equal_pencil(model, ranks, stage, zs.Policy("fp16"), layout, 2, recompute)


@given(
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    ranks=st.integers(1, 9),
    stage=st.sampled_from([0, 1, 2, 3]),
    micro_batches=st.integers(1, 3),
    layout=st.sampled_from(["per_unit", "contiguous"]),
    compute=st.sampled_from(["fp32", "fp16", "bf16"]),
    debug=st.booleans(),
)
def test_any_model_holds_and_sends_what_the_closed_forms_say(
    widths, ranks, stage, micro_batches, layout, compute, debug):
    """In debug mode the bytes are those of the hops really made; else the ring's, by its closed form."""
    model = MLP(widths, seed=1)
    assert_ledgers_equal_pencil(model, ranks, stage, zs.Policy(compute), layout, micro_batches, debug=debug)


@pytest.mark.parametrize("recompute", ["none", "block", "segment(2)"])
@pytest.mark.parametrize(("keep", "kept"), [((), ()), (None, (0,)), ("all", (0, 1, 2)), (("out",), (2,))])
def test_tied_and_kept_units_cost_the_gathers_that_the_closed_forms_say(keep, kept, recompute):
    model, ranks, policy = tied(), 3, zs.Policy("fp16")
    cluster = zs.Cluster(ranks)
    cluster.run(lambda rank: steps(rank, model, batches(model, ranks, 2, 1), stage=3, policy=policy,
                                   keep_gathered=keep, recompute=recompute) and None)
    job = job_of(model, ranks, 3, policy, "per_unit", 2, Recompute.parse(recompute).units_per_segment)
    job = replace(job, kept_gathered=kept, tied=((1, 0),))
    for purpose in ("gradients", "parameters"):
        assert cluster.trace.sent_nbytes(purpose) == pencil.sent_nbytes(job)[purpose]
    assert len(cluster.trace[0].collectives("all_gather", "parameters")) == 2 * sum(job.gathers)


def test_stage_2_never_holds_all_gradients_and_peaks_lower_than_stage_1():
    model, peaks = MLP((8, 8, 8, 8), seed=1), {}
    for stage in (1, 2):
        cluster = assert_ledgers_equal_pencil(model, 4, stage, zs.Policy("fp16"), "per_unit", 1)
        peaks[stage] = cluster.memory[0].peak_nbytes_of(GRADIENTS)
    whole = 2 * model.parameter_count
    assert peaks[2] < whole < peaks[1]


def test_stage_3_frees_every_gathered_unit_before_the_next_is_gathered():
    model = MLP((8, 8, 8, 8), seed=1)
    cluster = assert_ledgers_equal_pencil(model, 4, 3, zs.Policy("fp16"), "per_unit", 1)
    largest = max(unit.parameter_count for unit in model.units)
    assert [memory.peak_nbytes_of(["gathered_parameter"]) for memory in cluster.memory] == [2 * largest] * 4


def audited(domain=np.lib.tracemalloc_domain):
    """Bytes that NumPy's own allocations hold and held at most, by Python's tracer."""
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, domain)])
    return sum(trace.size for trace in snapshot.traces)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_an_audit_of_numpys_allocations_finds_what_the_ledger_says_at_rest(stage):
    """A first run fills the kernels' scratch and the model's caches, which are no rank's."""
    model, ranks = MLP((64, 64, 64), seed=1), 3
    data, cluster = batches(model, ranks, 1, 2), zs.Cluster(ranks)

    def program(rank):
        return steps(rank, model, data, stage=stage, policy=zs.Policy("bf16"))

    cluster.run(lambda rank: program(rank) and None)
    assert cluster.memory.now_nbytes == [0, 0, 0]
    tracemalloc.start()
    try:
        engines = cluster.run(program)
        assert audited() == sum(cluster.memory.now_nbytes) + sum(memory.slack_nbytes for memory in cluster.memory) > 0
        assert len(engines) == ranks
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stage", zs.STAGES)
def test_the_bytes_after_many_steps_are_those_after_one(stage):
    model, seen = MODELS["odd"](), []
    for count in (1, 5):
        cluster = zs.Cluster(3)
        cluster.run(lambda rank, count=count: steps(rank, model, batches(model, 3, 2, count), stage=stage))
        seen.append((cluster.memory.now_nbytes, cluster.memory.peak_nbytes))
    assert seen[0] == seen[1]


def test_a_capacity_one_byte_short_runs_out_and_one_that_fits_does_not():
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 3, 1, 1)
    roomy = zs.Cluster(3)
    roomy.run(lambda rank: steps(rank, model, data, stage=3) and None)
    need = max(roomy.memory.peak_nbytes)
    fits, short = zs.Cluster(3, capacity_nbytes=need), zs.Cluster(3, capacity_nbytes=need - 1)
    fits.run(lambda rank: steps(rank, model, data, stage=3) and None)
    for _ in range(2):
        with pytest.raises(
            zs.OutOfMemoryError, match=r"rank \d asked for .* left of capacity_nbytes=.* it holds .*parameter"
        ):
            short.run(lambda rank: steps(rank, model, data, stage=3) and None)
        assert short.memory.now_nbytes == [0, 0, 0]
