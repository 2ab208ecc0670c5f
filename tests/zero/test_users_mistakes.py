"""What people do with an engine that would go wrong unseen: told in one sentence, or made right."""

import re
import tracemalloc

import numpy as np
import pytest

import zerosim as zs
from tests.zero.optimizers import OwnSGD, Plain
from tests.zero.training import assert_stages_equal_the_twin, batches, bits, flat_state, train
from tests.zero.units import Borrower, Lender
from zerosim.models import GPT, MLP
from zerosim.models.units import LinearUnit, Model
from zerosim.optim import check_shardable

MODEL = MLP((3, 5, 2), activation="gelu", seed=1)


class Rebinding(Plain):
    """PyTorch's habit: the state is a dictionary to put arrays into."""

    def update(self, ctx, w, g, state, step):
        state["m"] = state["m"] + g
        w -= np.float32(self.lr) * state["m"]


class Adding(Plain):
    def update(self, ctx, w, g, state, step):
        state["extra"] = state.get("extra", 0) + g
        w -= np.float32(self.lr) * state["extra"]


class AnotherW(Plain):
    def slots(self, shape):
        return {}

    def update(self, ctx, w, g, state, step):
        w = w - np.float32(self.lr) * g


class EveryEighth(Plain):
    """Elementwise, but at every eighth step."""

    def update(self, ctx, w, g, state, step):
        w -= np.float32(self.lr) * (g / np.abs(g).sum() if step % 8 == 0 else g)


def run(program, ranks=2):
    return zs.Cluster(ranks).run(program)


@pytest.mark.parametrize(("optimizer", "text"), [
    (Rebinding(), "Rebinding.update replaced the state 'm'"), (Adding(), "Adding.update replaced the state 'extra'")])
def test_a_state_that_would_be_lost_is_an_error_of_the_step(optimizer, text):
    data = batches(MODEL, 2, 1, 2)
    with pytest.raises(ValueError, match=re.escape(text)):
        run(lambda rank: train(rank, MODEL, data, optimizer=optimizer))
    with pytest.raises(ValueError, match=re.escape(text) + r".*write into it: state\['\w+'\]\[\.\.\.\] = "):
        check_shardable(optimizer)


def test_an_update_that_makes_another_w_is_found_to_change_nothing():
    with pytest.raises(ValueError, match=r"AnotherW.update changes nothing in 5 steps; update in place, with w -= "):
        check_shardable(AnotherW())


def test_what_is_done_every_eighth_step_only_is_found():
    found = check_shardable(EveryEighth())
    assert (found.cut, found.is_honest) == ("tensor", False)


def test_a_users_plain_class_made_on_every_rank_is_the_same_optimizer():
    data = batches(MODEL, 2, 1, 2)
    found = run(lambda rank: train(rank, MODEL, data, optimizer=Plain(0.1), stage=2))
    assert bits(found[0]["parameter"]) == bits(found[1]["parameter"])
    with pytest.raises(zs.MismatchError, match=r"Plain\(lr=0.1\).*Plain\(lr=0.2\)"):
        run(lambda rank: train(rank, MODEL, data, optimizer=Plain(0.1 + 0.1 * rank.index), stage=2))


DIFFERING = {
    "optimizer": lambda index: {"optimizer": zs.optim.SGD(lr=0.1 + index)},
    "loss_scale": lambda index: {"policy": zs.Policy(loss_scale=1.0 + index)},
    "clip_norm": lambda index: {"clip_norm": 1.0 + index}, "seed": lambda index: {"seed": index},
    "groups": lambda index: {"groups": [zs.Group("*.bias", lr=0.01 + index)]},
    "master": lambda index: {"policy": zs.Policy("bf16", master=("fp32", "bf16")[index])},
    "schedule": lambda index: {"schedule": lambda step: 1.0 + index},
}


@pytest.mark.parametrize("stage", zs.STAGES)
@pytest.mark.parametrize("setting", DIFFERING)
def test_ranks_whose_settings_differ_are_stopped_before_their_replicas_drift_apart(setting, stage):
    data = batches(MODEL, 2, 1, 2)
    with pytest.raises(zs.MismatchError, match=r"micro-batch \d, loss scale"):
        run(lambda rank: train(rank, MODEL, data, stage=stage, **DIFFERING[setting](rank.index)))


def test_ranks_whose_models_begin_with_other_values_are_stopped():
    models, data = [MLP((3, 5, 2), seed=seed) for seed in (0, 1)], batches(MODEL, 2, 1, 1)
    with pytest.raises(zs.MismatchError, match=r"settings \w{8} \(policy, groups, clip_norm, seed, first values\)"):
        run(lambda rank: train(rank, models[rank.index], data))


def test_global_tokens_need_micro_batches_of_one_length():
    model = GPT("gpt-nano", normalization="global")

    def program(rank):
        tokens = np.random.default_rng(rank.index).integers(0, 17, (2, 2, 8))
        zs.Engine(rank, model, zs.optim.Adam()).step([(tokens[0], tokens[1]), (tokens[0, :1], tokens[1, :1])])

    with pytest.raises(ValueError, match=r"equally many places, found 16 and 8; fill shorter ones up"):
        run(program)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_loop_by_hand_counts_the_tokens_of_each_step_anew(stage):
    """Also where there is nothing to refresh, and refresh() is left out."""
    model = GPT("gpt-nano", normalization="global")
    draw = np.random.default_rng(5)
    data = [[tuple(draw.integers(-1, 17, (2, 8)) if i else draw.integers(0, 17, (2, 8)) for i in range(2))
             for _ in range(3)] for _ in range(2)]

    def by_hand(rank):
        engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.01), stage=stage)
        for x, target in data[rank.index]:
            engine.backward(engine.forward(x, target))
            engine.reduce()
            engine.update()
            if stage in (1, 2):
                engine.all_gather_parameters()
        return flat_state(engine)

    def whole(rank):
        engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.01), stage=stage)
        for batch in data[rank.index]:
            engine.step([batch])
        return flat_state(engine)

    for hand, step in zip(run(by_hand), run(whole), strict=True):
        assert all(bits(hand[name]) == bits(step[name]) for name in step)


def test_a_schedule_that_fails_leaves_the_step_untaken():
    def late(step):
        if step > 1:
            raise KeyError("no such step")
        return 1.0

    def program(rank):
        engine = zs.Engine(rank, MODEL, zs.optim.Adam(), schedule=late, policy=zs.Policy("fp16", loss_scale=8.0))
        data = batches(MODEL, 1, 1, 2)
        engine.step(data[0][0])
        with pytest.raises(KeyError):
            engine.step(data[1][0])
        return engine.steps_taken

    assert run(program, 1)[0] == 1


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_users_own_optimizer_follows_the_schedule_by_reading_its_lr(stage):
    factors, data = {1: 0.5, 2: 2.0}, batches(MODEL, 2, 1, 2)
    own, sgd, constant = (
        run(lambda rank, o=optimizer, s=schedule: train(rank, MODEL, data, stage=stage, optimizer=o, schedule=s))[0]
        for optimizer, schedule in ((OwnSGD(), factors.__getitem__), (zs.optim.SGD(lr=0.1), factors.__getitem__),
                                    (OwnSGD(), None)))
    assert bits(own["parameter"]) == bits(sgd["parameter"])
    assert bits(own["parameter"]) != bits(constant["parameter"])


def test_a_tape_of_other_weights_is_refused():
    """Old activations and new weights make gradients of neither; PyTorch refuses them too."""
    data = batches(MODEL, 1, 1, 1)[0][0]

    def program(rank):
        engine, other = (zs.Engine(rank, MODEL, zs.optim.Adam()) for _ in range(2))
        old, foreign = engine.forward(*data[0]), other.forward(*data[0])
        engine.step(data)
        for tape in (old, foreign):
            with pytest.raises(ValueError, match="made with other weights: before an update, or by another engine"):
                engine.backward(tape)

    run(program, 1)


def test_a_unit_in_the_middle_that_gives_back_no_gradient_is_named():
    units = [LinearUnit("a", 3, 4, first=True), LinearUnit("b", 4, 2, first=True)]
    with pytest.raises(ValueError, match=r"unit 'b' gave back no gradient of its input, which unit 'a' needs"):
        run(lambda rank: train(rank, Model(units), batches(MODEL, 1, 1, 1)), 1)


@pytest.mark.parametrize("optimizer", [zs.optim.Adam(), zs.optim.LAMB()], ids=["Adam", "LAMB"])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_an_update_takes_no_memory_but_the_kernels_declared_scratch(optimizer, state):
    model = MLP((300, 300), seed=1)

    def program(rank):
        engine = zs.Engine(rank, model, optimizer, policy=zs.Policy("bf16", state=state))
        x, target = (np.zeros((2, 300), np.float32) for _ in range(2))
        engine.step([(x, target)])
        engine.backward(engine.forward(x, target))
        engine.reduce()
        tracemalloc.start()
        try:
            engine.update()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return peak, rank.kernels.scratch_nbytes

    peak, scratch = run(program, 1)[0]
    assert peak < 40_000 < scratch, "what the interpreter itself takes for frames and rows of the trace is less"


def test_a_parameter_that_two_units_tie_to_equals_the_twin():
    model = Model([Lender("enc", 3, 5, "relu", first=True), Borrower("dec", "enc", 5), LinearUnit("mid", 3, 5),
                   Borrower("again", "enc", 5), LinearUnit("out", 3, 2)])
    assert_stages_equal_the_twin(model, batches(model, 3, 2, 2), policy=zs.Policy("bf16"))
