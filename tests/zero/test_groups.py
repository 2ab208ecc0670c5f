"""Parameter groups, frozen, tied, unused and fp32 parameters: each stage equals the twin, and the ledger shows them."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen
from tests.twin import Rule, Twin
from tests.zero.training import MODELS, assert_stages_equal_the_twin, batches, bits, run, train
from tests.zero.units import gained, tied

ADAM, SGD = zs.optim.Adam(lr=0.01), zs.optim.SGD(lr=0.1)


def assert_equal_to_the_twin(model, rules=None, *, compute="bf16", **options):
    """Two steps of two micro-batches under every stage."""
    for ranks in chosen((3,), (1, 4, 3)):
        assert_stages_equal_the_twin(model, batches(model, ranks, 2, 2), ADAM, rules=rules, policy=zs.Policy(compute),
                                     **options)


# -- hyperparameters and optimizers by name ---------------------------------------------------------------------------


def test_groups_replace_hyperparameters_and_optimizers_and_the_first_match_decides():
    model = MODELS["odd"]()
    groups = (zs.Group("*.bias", lr=0.5), zs.Group("layer1.*", optimizer=zs.optim.Adam(lr=0.2, beta1=0.5)))
    rules = {name: Rule(zs.optim.Adam(lr=0.5), "bf16") for name in ("layer0.bias", "layer1.bias")}
    rules["layer1.weight"] = Rule(zs.optim.Adam(lr=0.2, beta1=0.5), "bf16")
    assert_equal_to_the_twin(model, rules, groups=groups)


def test_parameters_of_optimizers_with_other_state_keep_their_own():
    """Adam has two slots, SGD none: what a rank holds of state is 8 bytes for each element that Adam updates."""
    model, groups = MODELS["odd"](), (zs.Group("layer0.*", optimizer=SGD),)
    assert_equal_to_the_twin(model, {name: Rule(SGD, "bf16") for name in ("layer0.weight", "layer0.bias")},
                             groups=groups)
    for stage, ranks in ((0, 3), (3, 3)):
        cluster = zs.Cluster(ranks)
        engines = cluster.run(lambda rank, s=stage: zs.Engine(rank, model, ADAM, stage=s, groups=groups))
        state = [memory.now_nbytes_by_kind["optimizer_state"] for memory in cluster.memory]
        assert len(engines) == ranks
        assert sum(state) == 8 * 12 * (ranks if stage == 0 else 1)  # layer1: 5·2 + 2


def test_a_schedule_multiplies_every_lr_and_does_not_advance_on_a_skipped_step():
    model, factors = MODELS["odd"](), {1: 1.0, 2: 0.25, 3: 0.125}
    data = batches(model, 3, 1, 4)
    overflowing = (np.full((2, 3), 3e38, np.float32), np.zeros((2, 2), np.float32))
    data[1][2] = [overflowing]  # on one rank alone, in the second step
    twin, said = assert_stages_equal_the_twin(model, data, ADAM, policy=zs.Policy("bf16"), schedule=factors.__getitem__)
    assert [step["skipped"] for step in said] == [False, True, False, False]
    constant = run(model, data, optimizer=ADAM, policy=zs.Policy("bf16"))
    assert bits(constant[0]["master"]) != bits(twin.master)


# -- frozen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["per_unit", "contiguous"])
def test_frozen_parameters_stay_and_the_others_equal_the_twin(layout):
    """Only biases are trained (BitFit)."""
    model = MODELS["deep"]()
    weights = [name for name in model.shapes if name.endswith("weight")]
    assert_equal_to_the_twin(model, {name: Rule(None, "bf16") for name in weights}, layout=layout,
                             groups=(zs.Group("*.weight", frozen=True),))


def test_frozen_parameters_have_no_gradient_no_master_and_no_state_and_are_not_reduced():
    model, ranks = MODELS["deep"](), 3
    groups, cluster = (zs.Group("*.weight", frozen=True),), zs.Cluster(ranks)

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=2, policy=zs.Policy("bf16"), groups=groups)
        engine.step(batches(model, ranks, 1, 1)[0][rank.index])
        return engine

    engines = cluster.run(program)
    trained = sum(-(-shape[0] // ranks) for name, shape in model.shapes.items() if name.endswith("bias"))  # a shard
    held = cluster.memory[0].now_nbytes_by_kind
    assert (held["gradient"], held["master"], held["optimizer_state"]) == (2 * trained, 4 * trained, 8 * trained)
    assert cluster.trace[0].sent_nbytes("gradients") == 2 * trained * (ranks - 1)
    assert cluster.trace[0].sent_nbytes("parameters") == 2 * trained * (ranks - 1)  # the all-gather, of biases alone
    with pytest.raises(ValueError, match="this engine has 2 param groups, each with arrays and a layout"):
        _ = engines[0].layout


# -- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_parameter_in_fp32_beside_16_bit_ones_equals_the_twin(compute):
    assert_equal_to_the_twin(gained(), {"scale.gain": Rule(ADAM, "fp32")}, compute=compute,
                             groups=(zs.Group("scale.*", compute="fp32"),))


def test_a_parameter_in_fp32_is_its_own_master_and_does_change_bits():
    model, data, policy = gained(), batches(gained(), 2, 1, 2), zs.Policy("bf16")
    cluster = zs.Cluster(2)
    engines = cluster.run(lambda rank: zs.Engine(rank, model, ADAM, policy=policy, groups=[
        zs.Group("scale.*", compute="fp32")]))
    assert len(engines) == 2
    rest = 6 * 3 + 2 + 5 * 2 + 2  # padding to a multiple of 2 included: 20 + 12
    assert cluster.memory[0].now_nbytes_by_kind["parameter"] == 2 * rest + 4 * 6
    assert cluster.memory[0].now_nbytes_by_kind["master"] == 4 * rest
    mixed, plain = (run(model, data, policy=policy, groups=groups)[0]["master"]
                    for groups in ((zs.Group("scale.*", compute="fp32"),), ()))
    assert bits(mixed) != bits(plain)


# -- tied and unused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["per_unit", "contiguous"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_tied_weight_equals_the_twin(compute, layout):
    assert_equal_to_the_twin(tied(), compute=compute, layout=layout)


@pytest.mark.parametrize("keep", [(), None, "all"])
def test_a_tied_unit_is_gathered_at_each_use_or_kept_and_reduced_once(keep):
    model, ranks = tied(), 3
    cluster = zs.Cluster(ranks)
    cluster.run(lambda rank: train(rank, model, batches(model, ranks, 1, 1), stage=3, keep_gathered=keep))
    gathers = [row.call.agreement for row in cluster.trace[0].collectives("all_gather", "parameters")]
    assert gathers.count("weights of enc") == {(): 4, None: 1, "all": 1}[keep]
    assert len(cluster.trace[0].collectives("reduce_scatter", "gradients")) == 3


def test_options_change_no_bit_of_a_tied_model():
    model = tied()
    data = batches(model, 3, 2, 2)
    runs = [run(model, data, stage=3, policy=zs.Policy("bf16"), **options)[0]
            for options in ({}, {"prefetch": 2, "overlap": True, "bucket_nbytes": 20}, {"keep_gathered": ()},
                      {"recompute": "block"}, {"recompute": "segment(2)"})]
    assert len({bits(run["master"]) for run in runs}) == 1


def test_an_unused_parameter_has_a_gradient_of_zeros_and_does_not_hang():
    model = gained(used=False)
    assert_equal_to_the_twin(model)
    found = zs.Cluster(3).run(lambda rank: train(rank, model, batches(model, 3, 1, 2), optimizer=SGD, stage=3))
    first = model.units[1].initial("scale.gain", 0, 5)
    assert bits(found[0]["master"][20:25]) == bits(first)


def test_a_parameter_that_only_some_ranks_use_is_averaged_over_all():
    """Rank 0 alone uses the gain: its gradient is divided by N all the same."""
    data = batches(gained(), 3, 1, 1)
    found = zs.Cluster(3).run(lambda rank: train(rank, gained(used=rank.index == 0), data, optimizer=SGD, stage=2))
    twin = Twin(gained(), SGD, 1, zs.Policy(), "per_unit", "local_first")
    first = twin.weights["scale.gain"].copy()
    _, gradient = twin.gradient(*data[0][0][0])
    expected = first - np.float32(0.1) * (gradient["scale.gain"] / np.float32(3))
    assert [bits(result["master"][20:25]) for result in found] == [bits(expected)] * 3
