"""Optimizers that need more than their shard: gathered tensors, factors of inputs, and what they cost."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.zero.training import ADAM, BF16, MODELS, Kept, batches, outcome
from zerosim.models import MLP, CrossEntropy, LinearUnit, Model, first_weights
from zerosim.ranks import Compute

MODEL = MLP((5, 7, 3), activation="gelu", seed=2)
WIDE = MODELS["wide"]()
ON_BIASES = [zs.Group("*.bias", optimizer=ADAM)]
KFAC = {"optimizer": zs.optim.KFAC(), "layout": "whole_matrices", "groups": ON_BIASES}


def stepped(rank, model, data, *, optimizer, **options):
    engine = zs.Engine(rank, model, optimizer, **options)
    engine.step(data[0][rank.index])
    return engine


# -- whole matrices ---------------------------------------------------------------------------------------------------


def test_gathering_pays_in_bytes_sent_and_whole_matrices_do_not():
    matrices, left = 3 * 7 + 7 * 5 + 5 * 2, 3 * 3 + 7 * 7 + 5 * 5
    for layout, gather, sent, kept in (("whole_matrices", False, 0, 1), ("whole_matrices", True, 0, 1),
                                       ("per_unit", True, (4 + 4 + 4 + 2) * matrices * 3, 4)):
        cluster = zs.Cluster(4)
        engines = cluster.run(lambda rank, layout=layout, gather=gather: stepped(
            rank, WIDE, batches(WIDE, 4, 1, 1), optimizer=zs.optim.SOAP(), stage=1, policy=BF16, layout=layout,
            gather=gather))
        assert sum(cluster.trace.sent_nbytes("state")) == sent  # w, m and v in fp32 and g in bf16, each a ring
        assert [memory.host.peak_nbytes for memory in cluster.memory] == [0] * 4  # it is updated on the device
        found = [slot.size for engine in engines
                 for (_, name), slot in engine.param_group.own_slots.items() if name == "left"]
        # State of another shape is kept by the owner alone, or by all who own elements, and so compute.
        assert (sum(found) == left) if kept == 1 else (left < sum(found) <= kept * left), layout


@pytest.mark.parametrize(("stage", "optimizer", "layer0"), [
    (1, ADAM, ADAM), (1, zs.optim.Muon(), ADAM), (2, zs.optim.LAMB(lr=0.01), zs.optim.SGD(lr=0.1)),
    (0, ADAM, zs.optim.SGD(lr=0.1)), (3, ADAM, zs.optim.SGD(lr=0.1))], ids=str)
def test_a_rank_is_charged_for_what_each_parameters_own_optimizer_keeps(stage, optimizer, layer0):
    cluster, groups = zs.Cluster(3), [zs.Group("layer0.*", optimizer=layer0)]
    engines = cluster.run(lambda rank: zs.Engine(
        rank, MODEL, optimizer, stage=stage, layout="whole_matrices", policy=BF16, groups=groups))
    kept = sum(zs.optim.state_nbytes(layer0 if name.startswith("layer0") else optimizer, shape)
               for name, shape in MODEL.shapes.items())
    assert len(engines) == 3
    state = [memory.now_nbytes_by_kind.get("optimizer_state", 0) for memory in cluster.memory]
    assert sum(state) == kept * (3 if stage == 0 else 1)


@pytest.mark.parametrize("optimizer", [ADAM, zs.optim.Muon(), zs.optim.Shampoo()], ids=lambda one: type(one).__name__)
def test_an_update_costs_the_reads_and_writes_of_its_state_and_of_tensors_that_each_owner_gathers_whole(optimizer):
    """Gradients in bf16 are read, masters and state in fp32 read and written, and the own part is cast to bf16; what
    else is noted has operations, products of matrices."""
    cost = {name: (int(np.prod(shape)), zs.optim.state_nbytes(optimizer, shape))
            for name, shape in MODEL.shapes.items()}
    for ranks, options in ((1, {}), (2, {"stage": 1, "gather": True})):
        cluster = zs.Cluster(ranks)
        cluster.run(lambda rank, options=options, ranks=ranks: stepped(
            rank, MODEL, batches(MODEL, ranks, 1, 1), optimizer=optimizer, policy=BF16, **options) and None)
        updates = [row.nbytes for of_rank in cluster.trace for row in of_rank.rows
                   if isinstance(row, Compute) and row.span[:1] == ("update",) and row.flops == 0]
        owners = {name: ranks if name.endswith("weight") and optimizer is not ADAM else 1 for name in cost}
        scans = 2 * 2 * MODEL.parameter_count  # for an overflow, and for the norm
        assert sum(updates) == scans + sum(owners[name] * (2 * (4 * n + state) + 2 * n) + (4 + 2) * n
                                           for name, (n, state) in cost.items())


# -- factors of inputs and output gradients: the engine's own, and so without a twin ----------------------------------


def test_kfac_on_weights_and_adam_on_biases_trains_agrees_over_stages_and_leaves_nothing():
    data, found = batches(MODEL, 3, 2, 4), []
    for stage in zs.STAGES:
        results = outcome(MODEL, data, stage=stage, **KFAC)
        assert len({result["master"] for result in results}) == 1
        found.append(results[0]["master"])
    assert found[0] == found[1] != found[2] == found[3]  # two orders of adding micro-batches

    kept = Kept(MODEL, data, stage=2, **KFAC)
    before = kept.cluster.memory.now_nbytes
    kept.step(0)
    assert kept.cluster.memory.now_nbytes == before


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**-70, 2.0**40, 2.0**66, 2.0**120])
def test_kfac_sees_the_same_factors_at_any_loss_scale(scale):
    """The square of S leaves fp32's range at both ends; a power of two cancels exactly."""
    one, other = (outcome(MODEL, batches(MODEL, 2, 2, 2), policy=zs.Policy(loss_scale=loss_scale), **KFAC)[0]
                  for loss_scale in (1.0, scale))
    assert one["master"] == other["master"]
    assert other["skipped"] == "[False, False]"


@pytest.mark.parametrize(("stage", "normalization"), covering(zs.STAGES, ["own", "global"]))
def test_factors_are_means_over_ranks_micro_batches_and_rows_also_where_targets_are_ignored_and_paid_for(
        stage, normalization):
    """KFAC's slots after its first step are the factors themselves, of the gradients of each row's own loss."""
    model, cluster = Model((LinearUnit("only", 3, 4),), loss=CrossEntropy(normalization)), zs.Cluster(3)
    inputs = [[x for x, _ in of_rank] for of_rank in batches(MLP((3, 4)), 3, 2, 1, rows=8)[0]]
    targets = [[np.where(np.arange(8) < valid, np.arange(8) % 4, -1) for valid in of_rank]
               for of_rank in ((8, 5), (1, 8), (3, 2))]
    data = [[list(zip(*of_rank, strict=True)) for of_rank in zip(inputs, targets, strict=True)]]
    engines = cluster.run(lambda rank: stepped(
        rank, model, data, stage=stage, policy=zs.Policy(loss_scale=8.0), **KFAC))
    slots = next(engine.param_group.own_slots for engine in engines if engine.param_group.own_slots)
    w, b = first_weights(model).values()
    expected = {"inputs": [], "outputs": []}
    for x, target in (pair for of_rank in data[0] for pair in of_rank):
        logits = np.exp(x.astype(np.float64) @ w + b)
        of_rows = (logits / logits.sum(axis=1, keepdims=True) - np.eye(4)[target]) * (target >= 0)[:, None]
        expected["inputs"].append(x.T @ x / 8)
        expected["outputs"].append(of_rows.T @ of_rows / 8)
    for name, found in expected.items():
        np.testing.assert_allclose(slots["only.weight", name], np.mean(found, 0), rtol=1e-5, atol=1e-7)
    assert sum(cluster.trace.sent_nbytes("state")) == 2 * (3 - 1) * 4 * (3 * 3 + 4 * 4)
