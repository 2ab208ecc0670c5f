"""Optimizers that need more than their own shard: whole matrices, norms of tensors, factors of inputs."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen, covering
from tests.twin import Rule
from tests.zero.optimizers import Factored, Spectral, Trusting
from tests.zero.training import assert_stages_equal_the_twin, batches, bits, run, train
from zerosim.models import MLP
from zerosim.zero import layout_of

MODEL = MLP((3, 7, 5, 2), activation="gelu", seed=4)


def assert_equal_to_the_twin(optimizer, *, few=(3,), ranks=(1, 3, 4, 9), policy=None, **options):
    for n in chosen(few, ranks):
        assert_stages_equal_the_twin(MODEL, batches(MODEL, n, 2, 3), optimizer, policy=policy or zs.Policy("bf16"),
                                     clip_norm=0.5, **options)


def test_a_matrix_optimizer_on_whole_matrices_equals_the_twin():
    assert_equal_to_the_twin(Spectral(), layout="whole_matrices", few=(1, 9))


@pytest.mark.parametrize("layout", ["per_unit", "contiguous"])
def test_a_matrix_optimizer_that_gathers_equals_the_twin(layout):
    assert_equal_to_the_twin(Spectral(), layout=layout, gather=True)


def test_gathering_pays_in_the_ledger_and_whole_matrices_do_not():
    sent = {}
    for layout, gather in (("whole_matrices", False), ("whole_matrices", True), ("per_unit", True)):
        cluster = zs.Cluster(4)
        engines = cluster.run(lambda rank, o={"layout": layout, "gather": gather}: _stepped(rank, **o))
        sent[layout, gather] = sum(cluster.trace.sent_nbytes("state"))
        assert len(engines) == 4
    assert sent["whole_matrices", False] == sent["whole_matrices", True] == 0
    matrices = 3 * 7 + 7 * 5 + 5 * 2
    assert sent["per_unit", True] == (4 + 4 + 2) * matrices * 3  # w and m in fp32 and g in bf16, each a ring


def _stepped(rank, **options):
    engine = zs.Engine(rank, MODEL, Spectral(), stage=1, policy=zs.Policy("bf16"), **options)
    engine.step(batches(MODEL, 4, 1, 1)[0][rank.index])
    return engine


def test_state_of_another_shape_is_kept_by_the_owner_alone_or_by_all_who_compute():
    for layout, gather, expected in (("whole_matrices", False, 3 + 7 + 5), ("per_unit", True, (3 + 7 + 5) * 2)):
        cluster = zs.Cluster(2)
        engines = cluster.run(lambda rank, o={"layout": layout, "gather": gather}: zs.Engine(
            rank, MODEL, Spectral(), stage=2, **o))
        rows = [slot.size for engine in engines
                for (_, name), slot in engine.param_group.own_slots.items() if name == "rows"]
        assert sum(rows) == expected


@pytest.mark.parametrize("layout", ["per_unit", "contiguous", "whole_matrices"])
def test_an_optimizer_of_tensor_norms_equals_the_twin(layout):
    assert_equal_to_the_twin(Trusting(), layout=layout)


def test_tensor_norms_send_sixteen_bytes_per_tensor_and_only_where_state_is_sharded():
    control = {}
    for stage in zs.STAGES:
        cluster = zs.Cluster(3)
        cluster.run(lambda rank, s=stage: train(rank, MODEL, batches(MODEL, 3, 1, 1), optimizer=Trusting(), stage=s))
        control[stage] = cluster.trace[0].sent_nbytes("control")
    assert control == {0: 0, 1: 2 * (9 + 16 * 6), 2: 2 * (9 + 16 * 6), 3: 2 * (9 + 16 * 6)}


def test_different_optimizers_in_one_model_equal_the_twin():
    rules = {name: Rule(zs.optim.Adam(lr=0.01), "bf16") for name in MODEL.shapes if "bias" in name}
    rules["layer1.weight"] = Rule(Trusting(), "bf16")
    assert_equal_to_the_twin(Spectral(), layout="whole_matrices", rules=rules, groups=[
        zs.Group("*.bias", optimizer=zs.optim.Adam(lr=0.01)), zs.Group("layer1.weight", optimizer=Trusting())])


@pytest.mark.parametrize(("policy", "optimizer"), covering(
    [zs.Policy("bf16", master="bf16"), zs.Policy("fp16", state="fp16"),
     zs.Policy("bf16", master="bf16", state="bf16"), zs.Policy("bf16", master="fp16", state="bf16")],
    [zs.optim.Adam(lr=0.01), Spectral(), Trusting()]), ids=str)
def test_master_and_state_in_16_bit_equal_the_twin(optimizer, policy):
    assert_equal_to_the_twin(optimizer, layout="whole_matrices", policy=policy, ranks=(1, 3))


def test_without_a_master_copy_a_rank_holds_less_and_computes_other_bits():
    data, held, found = batches(MODEL, 2, 1, 3), {}, {}
    for master in ("fp32", "bf16"):
        cluster, policy = zs.Cluster(2), zs.Policy("bf16", master=master)
        engines = cluster.run(lambda rank, p=policy: zs.Engine(rank, MODEL, zs.optim.Adam(lr=0.01), policy=p))
        held[master] = cluster.memory[0].now_nbytes_by_kind
        found[master] = run(MODEL, data, policy=policy)[0]["parameter"]
        assert len(engines) == 2
    assert "master" in held["fp32"]
    assert "master" not in held["bf16"]
    assert bits(found["fp32"]) != bits(found["bf16"])


def test_factors_reach_the_optimizer_as_means_over_ranks_and_micro_batches():
    seen = {}

    class Watching(Factored):
        def update(self, ctx, w, g, state, step):
            seen[w.shape] = [factor.copy() for factor in ctx.factors]

    model = MLP((3, 2), bias=False, seed=1)
    data = batches(model, 3, 2, 1, rows=4)
    for stage in zs.STAGES:
        run(model, data, optimizer=Watching(), stage=stage, layout="whole_matrices", policy=zs.Policy(loss_scale=8.0))
        inputs, outputs = seen.pop((3, 2))
        pairs = [pair for of_rank in data[0] for pair in of_rank]
        w = model.units[0].initial("layer0.weight", 0, 6).reshape(3, 2)
        np.testing.assert_allclose(inputs, np.mean([x.T @ x / 4 for x, _ in pairs], 0), rtol=1e-5)  # fp32 sums
        errors = [x @ w - t for x, t in pairs]  # the gradient of a row's own loss
        np.testing.assert_allclose(outputs, np.mean([e.T @ e / 4 for e in errors], 0), rtol=1e-5)


def test_whole_matrices_cut_on_borders_and_nowhere_else():
    for ranks in (1, 2, 3, 5, 9):
        layout = layout_of(MODEL, ranks, "whole_matrices")
        borders = {0, *(entry.high for entry in layout.entries)}
        assert set(layout.regions[0].bounds) <= borders
        assert layout.length == layout.valid_length == MODEL.parameter_count
        assert sum(layout.shard_length(rank) for rank in range(ranks)) == layout.length
        owned = [piece.entry.name for rank in range(ranks) for piece in layout.parameter_pieces(rank)]
        assert owned == list(MODEL.shapes)
