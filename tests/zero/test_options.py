"""Buckets, overlap, prefetch, keeping gathered: what they change is the trace and the memory (bits: the twin's)."""

import math

import pytest

import zerosim as zs
from tests.cases import named
from tests.zero.training import BF16, MODELS, batches, run
from zerosim import planning
from zerosim.planning import cost, hardware, recording, timeline
from zerosim.ranks import trace
from zerosim.zero import PARTIAL, SHARDED, layout_of

DEEP = zs.models.MLP((3, 7, 5, 4, 2), activation="gelu", seed=4)


def traced(ranks=3, model=DEEP, micro_batches=1, **options):
    """The cluster after one step."""
    cluster = zs.Cluster(ranks)
    run(model, batches(model, ranks, micro_batches, 1), cluster, **options)
    return cluster


@pytest.mark.parametrize("bucket_nbytes", [None, 1, 2 * 28, 2 * 42, 2 * 44, 4 * DEEP.parameter_count])
def test_a_bucket_decides_how_many_reductions_there_are_in_one_order_on_every_rank(bucket_nbytes):
    """One element, less than a unit, equal to one (layer1 has 42 with its padding), more, and more than the model."""
    cluster = traced(stage=2, policy=BF16, bucket_nbytes=bucket_nbytes)
    lengths = [lies.stop - lies.start for lies in layout_of(DEEP, 3).units.values()]
    orders = [[(row.call.cut, row.span) for row in of_rank.collectives("reduce_scatter", "gradients")]
              for of_rank in cluster.trace]
    room = sum(lengths) if bucket_nbytes is None else max(1, bucket_nbytes // 2)
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) == (len(lengths) if bucket_nbytes is None else -(-sum(lengths) // room))
    assert all(cut[-1] <= room for cut, _ in orders[0])


def rows_between(of_rank, issued, kinds):
    """The rows between an asynchronous collective's issue and its wait."""
    start, stop = (next(i for i, row in enumerate(of_rank.rows) if isinstance(row, kind) and row.call is issued)
                   for kind in (trace.Issue, trace.Wait))
    return [row for row in of_rank.rows[start:stop] if isinstance(row, kinds)]


def asynchronous(of_rank, operation, purpose, span):
    return [row.call for row in of_rank.collectives(operation, purpose) if row.asynchronous and span in row.span]


def test_overlap_reduces_beside_backward_and_gathers_beside_the_update():
    of_rank = traced(stage=2, overlap=True).trace[0]
    reductions = asynchronous(of_rank, "reduce_scatter", "gradients", "backward")
    assert len(reductions) == 4
    # The first unit's is the last of all.
    assert all(rows_between(of_rank, call, trace.Compute) for call in reductions[:-1])
    first, *_, last = asynchronous(of_rank, "all_gather", "parameters", "update")
    assert last in [row.call for row in rows_between(of_rank, first, trace.Issue)], "the first was still on its way"


@pytest.mark.parametrize(("stage", "operation"), [(0, "all_reduce"), (1, "reduce_scatter")])
def test_whole_gradients_are_reduced_beside_the_last_backward_as_they_become_complete(stage, operation):
    """As DDP's are; the first of two micro-batches reduces nothing."""
    of_rank = traced(stage=stage, micro_batches=2, overlap=True).trace[0]
    reductions = asynchronous(of_rank, operation, "gradients", "backward")
    assert len(reductions) == len(of_rank.collectives(operation, "gradients")) == len(DEEP.units)
    assert all(rows_between(of_rank, call, trace.Compute) for call in reductions[:-1])
    assert rows_between(of_rank, reductions[-1], trace.Compute) == []


def test_where_a_layer_computes_longer_than_it_is_reduced_stage_0_waits_for_the_last_bucket_alone():
    network = planning.Network(hardware.link("nvlink4"))
    machine = timeline.Machine(hardware.device("a100-80"), network, "fp32", efficiency=1e-9)
    cluster = traced(stage=0, micro_batches=2, overlap=True)
    *_, last = asynchronous(cluster.trace[0], "all_reduce", "gradients", "backward")
    seconds = cost.cost("all_reduce", "ring", last.cut, 4, network).seconds
    assert timeline.replay(recording.record(cluster.trace), machine).usage[0].exposed_seconds == pytest.approx(
        seconds, rel=1e-9), "sums of seconds are rounded"


def test_what_is_under_way_lands_in_place_or_as_an_option_in_a_second_copy():
    for stage, options in ((0, {}), (1, {}), (2, {}), (3, {"prefetch": 1})):
        plain, copied = (traced(stage=stage, overlap=True, copy_in_flight=copy, **options) for copy in (False, True))
        buffers = [cluster.memory[0].peak_nbytes_of(["communication_buffer"]) for cluster in (plain, copied)]
        assert buffers[0] < buffers[1], stage
        assert plain.trace[0].sent_nbytes() == copied.trace[0].sent_nbytes()


def test_prefetch_gathers_the_next_unit_while_one_computes_in_both_directions():
    ahead, plain = traced(stage=3, prefetch=1), traced(stage=3)
    for span in ("forward", "backward"):
        calls = asynchronous(ahead.trace[0], "all_gather", "parameters", span)
        assert len(calls) == 3  # all but the first of each direction
        assert all(rows_between(ahead.trace[0], call, trace.Compute) for call in calls)
        assert asynchronous(plain.trace[0], "all_gather", "parameters", span) == []
    now, before = (cluster.memory[0].peak_nbytes_of(["gathered_parameter"]) for cluster in (ahead, plain))
    assert now > before


@pytest.mark.parametrize(("model", "keep", "gathers"), [
    (DEEP, (), 8), (DEEP, None, 8), (DEEP, "all", 4), (DEEP, ("layer1",), 7), (DEEP, "layer3", 7),
    (MODELS["tied"](), (), 8), (MODELS["tied"](), None, 5), (MODELS["tied"](), "all", 3)], ids=named)
def test_units_that_stay_gathered_are_gathered_once_and_held_longer_and_tied_ones_are_reduced_once(
        model, keep, gathers):
    kept, plain = traced(model=model, stage=3, keep_gathered=keep), traced(model=model, stage=3, keep_gathered=())
    assert len(kept.trace[0].collectives("all_gather", "parameters")) == gathers
    assert len(kept.trace[0].collectives("reduce_scatter", "gradients")) == len(model.units)
    now, before = (cluster.memory[0].peak_nbytes_of(["gathered_parameter"]) for cluster in (kept, plain))
    assert (now > before) == (gathers < 8) or keep is None, "the owner of a tied weight is there with its other user"


def test_gradients_can_wait_whole_while_parameters_are_sharded():
    """No reduction before the last micro-batch ("no_sync"): a row of placements, not a mode."""
    cluster = traced(micro_batches=3, stage=zs.Stage(SHARDED, PARTIAL, SHARDED))
    assert len(cluster.trace[0].collectives("reduce_scatter", "gradients")) == len(DEEP.units)


def test_frozen_parameters_have_no_gradient_no_master_and_no_state_and_are_not_reduced():
    model, ranks = MODELS["deep"](), 3
    cluster = zs.Cluster(ranks)
    results = run(model, batches(model, ranks, 1, 1), cluster, stage=2, policy=BF16,
                  groups=(zs.Group("*.weight", frozen=True),))
    trained = sum(-(-shape[0] // ranks) for name, shape in model.shapes.items() if name.endswith("bias"))  # a shard
    held = results[0]["held"]
    assert (held["gradient"], held["master"], held["optimizer_state"]) == (2 * trained, 4 * trained, 8 * trained)
    for purpose in ("gradients", "parameters"):  # the all-gather, of biases alone
        assert cluster.trace[0].sent_nbytes(purpose) == 2 * trained * (ranks - 1)
    units = [sum(math.prod(shape) for shape in unit.shapes.values()) for unit in model.units]
    of_units = cluster.memory[0].peak_nbytes_of(["unit_gradient"])
    assert of_units == 2 * max(units), "a unit's backward has a place for what nobody reads"
