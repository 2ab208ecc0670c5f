"""The bytes that the engine holds at any moment are the closed forms', and those that NumPy has allocated.

What rests after a step and what was sent is compared with the closed forms wherever bits are: `test_stages_agree.py`.
What comes and goes, and the peak, are compared with a plan's estimate: `tests/course/test_measured.py`.
"""

import tracemalloc

import numpy as np
import pytest

import zerosim as zs
from tests.zero.training import ADAM, BF16, batches, finish
from zerosim.models import GPT, MLP

SQUARE = MLP((8, 8, 8, 8), seed=1)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_what_rests_after_each_backward_and_step_is_what_rested_before_and_goes_with_the_engine(stage):
    cluster = zs.Cluster(3)

    def program(rank):
        engine = zs.Engine(rank, SQUARE, ADAM, stage=stage, policy=BF16, overlap=True, prefetch=1)
        seen = [rank.memory.now_nbytes_by_kind]
        for step in batches(SQUARE, 3, 2, 3):
            for x, t in step[rank.index]:
                tape = engine.forward(x, t)
                engine.backward(tape)
                del tape
                seen.append(rank.memory.now_nbytes_by_kind)
            finish(engine)
            seen.append(rank.memory.now_nbytes_by_kind)
        return seen

    for seen in cluster.run(program):
        assert all({kind: n for kind, n in held.items() if kind != "input"} == seen[0] for held in seen)
    assert cluster.memory.now_nbytes == [0, 0, 0]


def audited():
    """Bytes that NumPy's own allocations hold, by Python's tracer."""
    numpys = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([numpys]).traces)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_an_audit_of_numpys_allocations_finds_what_memory_says_at_rest(stage):
    """A first run fills the kernels' scratch and the model's caches, which are no rank's."""
    model, ranks = MLP((64, 64, 64), seed=1), 3
    data, cluster = batches(model, ranks, 1, 1), zs.Cluster(ranks)

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=BF16)
        engine.step(data[0][rank.index])
        return engine

    cluster.run(lambda rank: program(rank) and None)
    assert cluster.memory.now_nbytes == [0, 0, 0]
    tracemalloc.start()
    try:
        engines = cluster.run(program)
        assert audited() == sum(cluster.memory.now_nbytes) + sum(memory.slack_nbytes for memory in cluster.memory) > 0
        assert len(engines) == ranks
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_of_a_process_have_gathered_weights_in_common_and_each_counts_them(debug):
    """But in debug mode, in which each rank's own are overwritten when it lets go of them."""
    def program(rank):
        engine = zs.Engine(rank, SQUARE, ADAM, stage=3)
        with engine.weights(SQUARE.units[0]) as w:
            (first, *_) = w.values()
            return first.ctypes.data, rank.memory.now_nbytes_by_kind["gathered_parameter"]

    addresses, counted = zip(*zs.Cluster(3, debug=debug).run(program), strict=True)
    assert len(set(addresses)) == (3 if debug else 1)
    assert counted == (72 * 4,) * 3


def test_no_rank_ever_holds_the_whole_model_at_stage_3():
    """Parameters are drawn shard by shard: until training gathers a unit, a rank holds its shard and no more."""
    cluster = zs.Cluster(4)
    engines = cluster.run(lambda rank: zs.Engine(rank, GPT("gpt-nano"), ADAM, stage=3, policy=BF16))
    shard = engines[0].layout.shard_length(0)
    assert cluster.memory.peak_nbytes == cluster.memory.now_nbytes == [16 * shard] * 4
