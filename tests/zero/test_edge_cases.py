"""What goes wrong in sharded training elsewhere, and has no other place here."""

import numpy as np
import pytest

import zerosim as zs
from tests.twin import Twin
from tests.zero.test_groups import assert_equal_to_the_twin
from tests.zero.training import MODELS, batches, bits, flat_state, run, train
from tests.zero.units import gained, odd, tied
from zerosim.models import MLP
from zerosim.zero import SHARDED

ADAM, SGD = zs.optim.Adam(lr=0.01), zs.optim.SGD(lr=0.1)


@pytest.mark.parametrize("layout", ["per_unit", "contiguous"])
def test_parameters_without_dimensions_and_without_elements_equal_the_twin(layout):
    assert_equal_to_the_twin(odd(), layout=layout)


def test_an_empty_parameter_is_held_by_nobody_and_can_be_looked_at():
    found = zs.Cluster(3).run(lambda rank: zs.Engine(rank, odd(), ADAM, stage=3).state("odd.nothing"))
    assert [state["master"].shape for state in found] == [(0, 3)] * 3


def test_lent_weights_share_memory_with_what_rests_where_it_is_whole_and_not_where_it_was_gathered():
    def program(rank, stage):
        engine = zs.Engine(rank, MODELS["odd"](), SGD, stage=stage)
        with engine.weights(engine.model.units[1]) as w:
            return [np.may_share_memory(view, engine.param_group.parameter) for view in w.values()]

    assert zs.Cluster(2).run(program, 0)[0] == [True, True]
    assert zs.Cluster(2).run(program, 3)[0] == [False, False]


def test_every_rank_counts_the_same_steps_also_one_that_owns_nothing():
    model = MODELS["fewer_than_ranks"]()
    data = batches(model, 5, 1, 3)
    data[1][4] = [(np.full((2, 1), 3e38, np.float32), np.zeros((2, 1), np.float32))]  # overflows, on an empty shard

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=3, policy=zs.Policy("bf16"))
        skipped = [engine.step(step[rank.index]).skipped for step in data]
        return engine.steps_taken, skipped, engine.layout.valid(rank.index)[0].count

    found = zs.Cluster(5).run(program)
    assert [(taken, skipped) for taken, skipped, _ in found] == [(2, [False, True, False])] * 5
    assert [count for _, _, count in found] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("stage", zs.STAGES)
def test_two_forwards_before_two_backwards_are_as_good_as_one_after_the_other(stage):
    model, data = MODELS["deep"](), batches(MODELS["deep"](), 3, 2, 1)[0]

    def together(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=zs.Policy("bf16"))
        tapes = [engine.forward(x, t) for x, t in data[rank.index]]
        for tape in tapes:
            engine.backward(tape)
        engine.reduce()
        engine.update()
        engine.all_gather_parameters()
        return flat_state(engine)

    expected = zs.Cluster(3).run(lambda rank: train(rank, model, [data], optimizer=ADAM, stage=stage,
                                                    policy=zs.Policy("bf16")))
    found = zs.Cluster(3).run(together)
    assert [bits(a["master"]) for a in found] == [bits(b["master"]) for b in expected]


def test_a_forward_without_a_backward_changes_nothing():
    model, data = MODELS["deep"](), batches(MODELS["deep"](), 2, 1, 1)[0]

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=3, keep_gathered="all", prefetch=2)
        engine.forward(*data[1 - rank.index][0])  # evaluation on other data
        engine.step(data[rank.index])
        return flat_state(engine)["master"]

    expected = zs.Cluster(2).run(lambda rank: train(rank, model, [data], optimizer=ADAM, stage=3))
    assert [bits(a) for a in zs.Cluster(2).run(program)] == [bits(b["master"]) for b in expected]


@pytest.mark.parametrize("keep", [None, "all"])
def test_evaluating_between_backward_and_update_leaves_no_old_weights_behind(keep):
    """Units that an evaluation left gathered are not those that the next step computes with."""
    model, data = tied(), batches(tied(), 2, 1, 2)

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=3, keep_gathered=keep, prefetch=1)
        for step in data:
            ((x, t),) = step[rank.index]
            engine.backward(engine.forward(x, t))
            engine.forward(x, t)  # an evaluation, which keeps units gathered and never goes back
            engine.reduce()
            engine.update()
            engine.all_gather_parameters()
        return flat_state(engine)["master"], rank.memory.now_nbytes_by_kind

    expected = run(model, data, optimizer=ADAM, stage=3)
    found = zs.Cluster(2).run(program)
    assert [bits(master) for master, _ in found] == [bits(b["master"]) for b in expected]
    assert all("gathered_parameter" not in held for _, held in found)


def test_weights_that_are_lent_outside_a_step_are_freed_on_exit_also_of_units_that_stay_gathered_in_one():
    def program(rank):
        engine = zs.Engine(rank, tied(), ADAM, stage=3, keep_gathered="all", prefetch=2)
        for unit in engine.model.units:
            with engine.weights(unit):
                pass
        return rank.memory.now_nbytes_by_kind

    assert all("gathered_parameter" not in held for held in zs.Cluster(2).run(program))


def test_gradients_of_a_step_do_not_reach_the_next():
    """Without a reset the second step would see the first one's gradient again."""
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 2, 2, 2)
    twin = Twin(model, SGD, 2, zs.Policy(), "per_unit", "reduce_first")
    said = [twin.step(step) for step in data]
    for stage in (2, 3):
        found = run(model, data, optimizer=SGD, stage=stage)
        assert found[0]["norms"] == [step["norm"] for step in said]


@pytest.mark.parametrize("stage", zs.STAGES)
def test_clipping_is_by_the_unscaled_norm(stage):
    """A loss scale that is a power of two moves exponents alone, and the clipped step is the same to the bit."""
    model, data, found = MODELS["odd"](), batches(MODELS["odd"](), 3, 2, 2), []
    for scale in (1.0, 2.0**12):
        policy = zs.Policy(loss_scale=scale)
        found.append(run(model, data, optimizer=ADAM, stage=stage, policy=policy, clip_norm=0.01)[0])
    assert found[0]["norms"] == found[1]["norms"]
    assert bits(found[0]["master"]) == bits(found[1]["master"])


def test_a_scale_that_makes_the_scaled_loss_gradient_infinite_skips_the_step():
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 2, 1, 1)
    found = run(model, data, stage=2, policy=zs.Policy("fp16", loss_scale=2.0**40))
    assert [result["skipped"] for result in found] == [[True], [True]]


def test_a_norm_counts_replicated_and_sharded_elements_once():
    """The norm of stage 0, where every rank holds everything, is that of the shards of stage 3."""
    model, data = gained(), batches(gained(), 4, 1, 1)
    norms = {stage: run(model, data, stage=stage)[0]["norms"]
             for stage in zs.STAGES}
    mean = np.mean([np.concatenate(list(Twin(model, SGD, 1, zs.Policy(), "per_unit", "local_first").gradient(
        *mine[0])[1].values())) for mine in data[0]], axis=0)
    assert len({tuple(norm) for norm in norms.values()}) == 1
    assert norms[0][0] == pytest.approx(float(np.linalg.norm(mean)), rel=1e-6)  # sums of fp32 in another order


@pytest.mark.parametrize("stage", zs.STAGES)
def test_what_rests_after_a_step_is_what_rested_before_it(stage):
    model, data = MLP((8, 8, 8), seed=1), batches(MLP((8, 8, 8), seed=1), 3, 2, 3)

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=zs.Policy("bf16"), overlap=True, prefetch=1)
        seen = [rank.memory.now_nbytes_by_kind]
        for step in data:
            for x, t in step[rank.index]:
                tape = engine.forward(x, t)
                engine.backward(tape)
                del tape
                seen.append(rank.memory.now_nbytes_by_kind)
            engine.reduce()
            engine.update()
            engine.all_gather_parameters()
            seen.append(rank.memory.now_nbytes_by_kind)
        return seen

    for seen in zs.Cluster(3).run(program):
        assert all({kind: n for kind, n in held.items() if kind != "input"} == seen[0] for held in seen)


def test_a_model_without_an_engine_frees_everything():
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: zs.Engine(rank, MODELS["deep"](), ADAM, stage=3, overlap=True, prefetch=1).step(
        batches(MODELS["deep"](), 2, 1, 1)[0][rank.index]) and None)
    assert cluster.memory.now_nbytes == [0, 0]


def test_buckets_are_reduced_in_the_same_order_on_every_rank():
    cluster, model = zs.Cluster(3), MODELS["deep"]()
    cluster.run(lambda rank: train(rank, model, batches(model, 3, 1, 1), stage=3, bucket_nbytes=24))
    orders = [[(row.call.cut, row.span) for row in trace.collectives("reduce_scatter", "gradients")]
              for trace in cluster.trace]
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) > len(model.units)


def test_gradients_can_wait_whole_while_parameters_are_sharded():
    """No reduction before the last micro-batch ("no_sync"): a row of placements, not a mode."""
    model, data = MODELS["deep"](), batches(MODELS["deep"](), 3, 3, 2)
    waiting = zs.Stage(SHARDED, zs.Placement.PARTIAL, SHARDED)
    cluster = zs.Cluster(3)
    found = cluster.run(lambda rank: train(rank, model, data, optimizer=ADAM, stage=waiting))
    expected = run(model, data, optimizer=ADAM, stage=1)
    assert [bits(a["master"]) for a in found] == [bits(b["master"]) for b in expected]
    assert len(cluster.trace[0].collectives("reduce_scatter", "gradients")) == 2 * len(model.units)
