"""Loss scaling through the engine: who skips, what a skipped step changes, where scaling ends, what a scale does."""

import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.numerics.test_loss_scale import PATTERN, TRACES
from tests.support import assert_refused
from tests.zero.training import ADAM, BF16, HUGE, MODELS, assert_runs_equal_the_twin, batches, master_of, outcome
from zerosim.models import MLP, LinearUnit, Model
from zerosim.numerics import loss_scale

ODD = MODELS["odd"]()
OPTIONS = [{}, {"bucket_nbytes": 6}, {"overlap": True, "bucket_nbytes": 10}, {"recompute": "block", "prefetch": 1}]
FP16, EIGHT = zs.Policy("fp16"), zs.Policy("fp16", loss_scale=loss_scale.Dynamic(initial=8.0))
FEWER, ONE = MODELS["fewer_than_ranks"](), MLP((1, 1), bias=False, seed=1)


def patterned(ranks, micro_batches, pattern=PATTERN, model=ODD, culprit=HUGE):
    """Batches of which those steps overflow that the pattern says: in one micro-batch of one rank, each time others."""
    data = batches(model, ranks, micro_batches, len(pattern))
    for step, overflow in enumerate(pattern):
        if overflow:
            data[step][step % ranks][step % micro_batches] = culprit
    return data


def filled(x, target, model=ODD, rows=2):
    """One micro-batch of these two numbers."""
    widths = model.units[0].inputs, model.units[-1].outputs
    return tuple(np.full((rows, width), value, np.float32) for width, value in zip(widths, (x, target), strict=True))


# -- who skips: model, data, the steps that all ranks skip, options ---------------------------------------------------

TO_THE_SUM = filled(2.0**8, -(2.0**7), ONE, rows=1)
OVERFLOWS = {
    **{f"{rule} {hysteresis}, stage {stage}": (ODD, patterned(3, 2), PATTERN, {
        "runs": [(stage, options)], "policy": zs.Policy("fp16", loss_scale=loss_scale.Dynamic(
            rule, initial=256, window=2, hysteresis=hysteresis))})
       for stage, (rule, hysteresis), options in covering(zs.STAGES, TRACES, OPTIONS)},
    "static scale": (ODD, patterned(3, 1, [0, 1, 0]), [0, 1, 0], {"policy": zs.Policy("fp16", loss_scale=8.0)}),
    "bf16 unscaled": (ODD, patterned(3, 1, [0, 1, 0], culprit=filled(3e38, 0)), [0, 1, 0], {"policy": BF16}),
    **{f"rank {rank} of owners of nothing": (
        FEWER, patterned(4, 1, pattern, FEWER, filled(6e4, -6e4, FEWER)), pattern, {
            "runs": [(stage, {})], "policy": EIGHT})
       for stage, rank in covering(zs.STAGES, range(4)) for pattern in [[0] * rank + [1, 0]]},
    "a sum": (ONE, [[[TO_THE_SUM]] * 2], [1], {"policy": FP16}),
    "no addend of it": (ONE, [[[TO_THE_SUM]]], [0], {"policy": FP16}),
    "a quotient by the scale, of a sum that fits": (ODD, [[[filled(1e3, 3e38)]]], [1], {
        "policy": zs.Policy(loss_scale=2.0**-100)}),
    "the scaled gradient of the loss": (ODD, batches(ODD, 2, 1, 1), [1], {
        "policy": zs.Policy("fp16", loss_scale=2.0**40)}),
}


@pytest.mark.filterwarnings("ignore::zerosim.SkippedStepWarning")
@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_anywhere_skips_the_step_of_all_ranks_and_changes_nothing_but_the_scale_as_in_the_twin(name):
    model, data, skipped, options = OVERFLOWS[name]
    twin, said = assert_runs_equal_the_twin(model, data, **options)
    assert [step["skipped"] for step in said] == list(map(bool, skipped))
    assert np.isfinite(twin.master).all()


# -- what is said of a skipped step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", zs.STAGES)
@pytest.mark.parametrize(("policy", "remedy"), [
    (zs.Policy(loss_scale=loss_scale.Static(skips=3)), "Look for inf or NaN in the data and in what the "),
    (zs.Policy("fp16", loss_scale=loss_scale.Static(8.0, skips=3)), "Take loss_scale=zs.numerics.loss_scale.Dyn")])
def test_without_a_dynamic_scale_the_first_skipped_step_is_a_warning_and_several_in_a_row_are_an_error_of_all_ranks(
        stage, policy, remedy):
    """Rank 1 alone has the data that overflow, and rank 0 alone warns; a good step in between begins the row anew."""
    good, bad = batches(ODD, 3, 1, 1)[0], filled(3e38, 0)
    expected = ("skipped on every rank (steps taken: 0), and changed nothing: the gradient of layer0.weight, "
                "layer0.bias, layer1.weight, layer1.bias has inf or NaN, and the loss scale "
                f"{policy.loss_scale.scale:g} stays as it is. {remedy}")

    def program(rank):
        engine, mine = zs.Engine(rank, ODD, ADAM, stage=stage, policy=policy), good[rank.index]
        culprit = [bad] if rank.index == 1 else mine
        before = master_of(engine)
        skipped = [engine.step(step).skipped for step in (culprit, culprit)]
        with pytest.raises(zs.NonFiniteGradients) as caught:
            engine.step(culprit)
        assert f"3 steps in a row were {expected}" in str(caught.value)
        unchanged = master_of(engine) == before
        after = [engine.step(step).skipped for step in (mine, culprit, culprit, mine)]
        return skipped, unchanged, after, engine.steps_taken

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert list(zs.Cluster(3).run(program)) == [([True, True], True, [False, True, True, False], 2)] * 3
    assert [(w.category, w.filename) for w in said] == [(zs.SkippedStepWarning, __file__)]
    assert f"a step was {expected}" in str(said[0].message)
    assert "and 3 in a row are an error." in str(said[0].message)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_in_debug_mode_a_skipped_step_is_an_error_at_once_unless_a_dynamic_scale_learns_from_it(stage):
    """The gradient of one parameter on one rank: the text names that one."""
    data = batches(ODD, 2, 1, 2)

    def program(rank, policy):
        spoiled = [rank.index == 1, False]
        model = Model([LinearUnit("a", 3, 3, first=True), Spoiled("b", 3, 2, spoiled=spoiled)])
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=policy)
        return [engine.step(step[rank.index]).skipped for step in data]

    assert_refused(lambda: zs.Cluster(2, debug=True).run(program, None), "^a step was skipped .*: the gradient of "
                   "b.bias has inf or NaN, and the loss scale 1 stays", zs.NonFiniteGradients)
    dynamic = zs.Policy(loss_scale=loss_scale.Dynamic())
    assert list(zs.Cluster(2, debug=True).run(program, dynamic)) == [[True, False]] * 2


@dataclass(frozen=True, eq=False)
class Spoiled(LinearUnit):
    """Its bias has a gradient of NaN in the steps that are said."""

    spoiled: list = field(default_factory=list)

    def backward(self, ctx, w, kept, dy):
        dx, grads = super().backward(ctx, w, kept, dy)
        if self.spoiled.pop(0):
            grads["b.bias"][...] = np.nan
        return dx, grads


# -- where scaling ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_scaler_that_gives_up_says_so_with_the_rank_changes_nothing_and_the_engine_goes_on(stage):
    good = batches(ODD, 3, 1, 1)[0]
    policy = zs.Policy("fp16", loss_scale=loss_scale.Dynamic("deepspeed", initial=4, window=100))

    def program(rank):
        engine = zs.Engine(rank, ODD, ADAM, stage=stage, policy=policy)
        before, seen, bad = master_of(engine), [], [HUGE] if rank.index == 1 else good[rank.index]
        for _ in range(2):
            seen.append(engine.step(bad).skipped)
        with pytest.raises(loss_scale.LossScaleExhausted,
                           match=r"overflowed at the smallest loss scale, 1: no scale would help"):
            engine.step(bad)
        unchanged = master_of(engine) == before
        result = engine.step(good[rank.index])
        return seen, unchanged, result.skipped, result.scale, master_of(engine) == before

    assert list(zs.Cluster(3).run(program)) == [([True, True], True, False, 1.0, False)] * 3


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_scale_that_has_come_to_0_skips_every_step_and_raises_nothing(stage):
    """torch's scale after 166 overflows in a row from 2^16: 0/0 is NaN, on good data too."""
    data, policy = batches(ODD, 2, 1, 2), zs.Policy("fp16", loss_scale=loss_scale.Dynamic(initial=2.0**16, window=1))

    def program(rank):
        weights_alone = {"layout": "whole_matrices", "groups": [zs.Group("*.bias", optimizer=ADAM)]}
        for optimizer, options in ((ADAM, {}), (zs.optim.KFAC(), weights_alone)):
            engine = zs.Engine(rank, ODD, optimizer, stage=stage, policy=policy, **options)
            for _ in range(166):
                engine.loss_scale.update(True)
            before = master_of(engine)
            results = [engine.step(step[rank.index]) for step in data]
            assert [(result.skipped, result.scale) for result in results] == [(True, 0.0)] * 2
            assert master_of(engine) == before

    zs.Cluster(2).run(program)


# -- what a scale does to bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "compute"), covering(zs.STAGES, ["fp32", "bf16"]))
def test_a_power_of_two_changes_no_bit_where_nothing_under_or_overflows(stage, compute):
    """Not of a clipped step either; and where S·N·k is 2^129, beyond fp32."""
    data = [[[(x / 64, target / 64) for x, target in mine] for mine in step] for step in batches(ODD, 4, 2, 3)]
    plain, scaled, beyond, other = (
        [result | {"scales": ""} for result in outcome(
            ODD, data, stage=stage, policy=zs.Policy(compute, loss_scale=scale), clip_norm=0.01)]
        for scale in (1.0, 2.0**12, 2.0**126, 3.0))
    assert plain == scaled
    assert compute == "bf16" or plain == beyond
    assert plain != other, "3·g is rounded"
