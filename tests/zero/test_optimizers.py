"""Every optimizer of the package under every stage: the twin's bits, or a refusal that says what to do."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen
from tests.twin import Rule
from tests.zero.test_gpt import token_batches
from tests.zero.training import assert_stages_equal_the_twin, batches, bits, run
from zerosim.models import GPT, MLP
from zerosim.models.losses import CrossEntropy
from zerosim.models.units import LinearUnit, Model

MODEL = MLP((5, 7, 3), activation="gelu", seed=2)
ELEMENTWISE = [zs.optim.SGD(lr=0.1), zs.optim.Momentum(lr=0.1), zs.optim.AdaGrad(), zs.optim.RMSprop(), zs.optim.Adam(),
               zs.optim.AdamW(), zs.optim.Lion(), zs.optim.Adan(), zs.optim.LAMB(), zs.optim.LARS()]
MATRIX = [zs.optim.Muon(), zs.optim.Shampoo(), zs.optim.SOAP(every=2), zs.optim.Adafactor()]
BF16 = zs.Policy("bf16")


def named(optimizer):
    return type(optimizer).__name__


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=named)
def test_elementwise_optimizers_equal_the_twin_under_every_stage(optimizer):
    for ranks in chosen((1, 4) if ELEMENTWISE.index(optimizer) % 2 else (3,), (1, 3, 4)):
        assert_stages_equal_the_twin(MODEL, batches(MODEL, ranks, 2, 2), optimizer, policy=BF16)


@pytest.mark.parametrize(("layout", "gather"), [("whole_matrices", False), ("per_unit", True)])
@pytest.mark.parametrize("optimizer", MATRIX, ids=named)
def test_matrix_optimizers_equal_the_twin_on_whole_matrices_or_gathered(optimizer, layout, gather):
    for ranks in chosen((3,), (1, 3)):
        assert_stages_equal_the_twin(MODEL, batches(MODEL, ranks, 2, 3), optimizer, policy=BF16, layout=layout,
                                     gather=gather)


@pytest.mark.parametrize("optimizer", MATRIX, ids=named)
def test_matrix_optimizers_are_refused_where_a_matrix_would_lie_on_several_ranks(optimizer):
    for stage in (1, 2, 3):
        with pytest.raises(
            ValueError, match=r"needs all of layer0.weight \(5, 7\).*layout='whole_matrices', or gather=True"
        ):
            zs.Cluster(3).run(lambda rank, s=stage: zs.Engine(rank, MODEL, optimizer, stage=s) and None)


def test_kfac_on_weights_and_adam_on_biases_trains_and_agrees_over_stages():
    """The factors come from the engine: there is no twin of them, but all stages see the same."""
    groups, ranks = [zs.Group("*.bias", optimizer=zs.optim.Adam(lr=0.01))], 3
    data, found = batches(MODEL, ranks, 2, 4), []
    for stage in zs.STAGES:
        results = run(MODEL, data, optimizer=zs.optim.KFAC(), stage=stage, layout="whole_matrices", groups=groups)
        assert len({bits(result["master"]) for result in results}) == 1
        found.append(bits(results[0]["master"]))
    assert found[0] == found[1] != found[2] == found[3]  # two orders of adding micro-batches


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**-70, 2.0**40, 2.0**66, 2.0**120])
def test_kfac_sees_the_same_factors_at_any_loss_scale(scale):
    """The square of S leaves fp32's range at both ends; a power of two cancels exactly."""
    groups, found = [zs.Group("*.bias", optimizer=zs.optim.Adam(lr=0.01))], []
    for loss_scale in (1.0, scale):
        found.append(run(MODEL, batches(MODEL, 2, 2, 2), optimizer=zs.optim.KFAC(), layout="whole_matrices",
                         groups=groups, policy=zs.Policy(loss_scale=loss_scale))[0])
    assert bits(found[0]["master"]) == bits(found[1]["master"])
    assert found[1]["skipped"] == [False, False]


@pytest.mark.parametrize("normalization", ["own", "global"])
@pytest.mark.parametrize("valid", [8, 5, 1])
def test_kfacs_output_factor_is_the_mean_over_rows_also_where_targets_are_ignored(normalization, valid):
    model = Model((LinearUnit("only", 3, 4),), loss=CrossEntropy(normalization))
    x, target = batches(MLP((3, 4)), 1, 1, 1, rows=8)[0][0][0][0], np.arange(8) % 4
    target[valid:] = -1

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.KFAC(), layout="whole_matrices", policy=zs.Policy(loss_scale=8.0),
                           groups=[zs.Group("*.bias", optimizer=zs.optim.SGD(lr=0.1))])
        w, b = (engine.state(name)["parameter"].copy() for name in model.shapes)
        engine.step([(x, target)])
        return w, b, engine.param_group.own_slots

    w, b, slots = zs.Cluster(1).run(program)[0]
    logits = np.exp(x.astype(np.float64) @ w + b)
    of_rows = (logits / logits.sum(axis=1, keepdims=True) - np.eye(4)[target]) * (target >= 0)[:, None]
    np.testing.assert_allclose(slots["only.weight", "outputs"], of_rows.T @ of_rows / 8, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(slots["only.weight", "inputs"], x.T @ x / 8, rtol=1e-5, atol=1e-7)


def test_factors_are_gone_after_the_step():
    groups = [zs.Group("*.bias", optimizer=zs.optim.Adam(lr=0.01))]

    def program(rank):
        engine = zs.Engine(rank, MODEL, zs.optim.KFAC(), stage=2, layout="whole_matrices", groups=groups)
        before = rank.memory.now_nbytes
        engine.step(batches(MODEL, 2, 2, 1)[0][rank.index])
        return rank.memory.now_nbytes - before

    assert list(zs.Cluster(2).run(program)) == [0, 0]


def test_kfac_pays_for_its_factors_in_the_trace():
    groups, ranks = [zs.Group("*.bias", optimizer=zs.optim.Adam(lr=0.01))], 2
    cluster = zs.Cluster(ranks)
    cluster.run(lambda rank: zs.Engine(rank, MODEL, zs.optim.KFAC(), layout="whole_matrices", groups=groups).step(
        batches(MODEL, ranks, 1, 1)[0][rank.index]) and None)
    elements = 5 * 5 + 7 * 7 + 7 * 7 + 3 * 3
    assert sum(cluster.trace.sent_nbytes("state")) == 2 * (ranks - 1) * 4 * elements


def test_muon_on_a_gpts_matrices_and_adamw_on_the_rest_equals_the_twin():
    model, adamw = GPT("gpt-nano"), zs.optim.AdamW(lr=0.01)
    patterns = ("wte", "wpe", "*ln_*", "*.bias")
    names = [name for name in model.shapes if name in ("wte", "wpe") or "ln_" in name or name.endswith(".bias")]
    assert_stages_equal_the_twin(model, token_batches(model, 3, 1, 2), zs.optim.Muon(), policy=BF16,
                                 layout="whole_matrices", rules={name: Rule(adamw, "bf16") for name in names},
                                 groups=[zs.Group(*patterns, optimizer=adamw)])


@pytest.mark.parametrize("optimizer", [zs.optim.Adam(lr=0.01), zs.optim.Muon(), zs.optim.LAMB(lr=0.01)], ids=named)
def test_the_ledger_charges_what_an_optimizer_keeps(optimizer):
    cluster = zs.Cluster(2)
    engines = cluster.run(lambda rank: zs.Engine(rank, MODEL, optimizer, stage=1, layout="whole_matrices",
                                                 policy=zs.Policy("bf16")))
    kept = sum(
        int(np.prod(slot.shape)) * 4 for shape in MODEL.shapes.values() for slot in optimizer.slots(shape).values()
    )
    assert len(engines) == 2
    assert sum(memory.now_nbytes_by_kind.get("optimizer_state", 0) for memory in cluster.memory) == kept
