"""The engine used in other ways than by step alone: loops by hand, failures, debug mode, engines that live on."""

import cProfile
import itertools
import pstats
import re
import tracemalloc
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest

import zerosim as zs
from tests.cases import THOROUGH, chosen, covering, named
from tests.support import assert_refused
from tests.zero.training import (
    ADAM,
    BF16,
    MODELS,
    ODD,
    SGD,
    Kept,
    alone,
    batches,
    bits,
    ctrl_c_before,
    finish,
    master_of,
    masters,
    run,
)
from tests.zero.units import tied
from zerosim.models import GPT, MLP
from zerosim.numerics import kernels
from zerosim.ranks import RankUseError, trace

WIDE = MODELS["wide"]()
FACTORED = {"optimizer": zs.optim.KFAC(), "layout": "whole_matrices", "groups": [zs.Group("*.bias", optimizer=ADAM)]}
X, T = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32)


# -- loops by hand ----------------------------------------------------------------------------------------------------


def forwards_before_backwards_and_an_evaluation_before_the_update(engine, mine, other):
    """The evaluation keeps units gathered, and never goes back: the next step must not compute with them."""
    for tape in [engine.forward(x, target) for x, target in mine]:
        engine.backward(tape)
    engine.forward(*other[0])
    engine.reduce()
    engine.update()
    if engine.stage in (zs.STAGES[1], zs.STAGES[2]):
        assert_refused(lambda: engine.forward(*other[0]), "ranks have not yet; call all_gather_parameters.* first")
    engine.all_gather_parameters()


def a_step_behind_an_evaluation_and_steps_that_were_abandoned(engine, mine, other):
    """After forward, after backward, and after reduce."""
    for done in range(3):
        tape = engine.forward(*other[0])
        if done:
            engine.backward(tape)
        if done == 2:
            engine.reduce()
        engine.abandon()
    engine.forward(*other[0])
    engine.step(mine)


def a_step_behind_a_backward_that_was_broken_off(engine, mine, other):
    """Between units, of which some share a weight; where it is caught, nothing may be made of the half."""
    engine.backward(engine.forward(*other[0]))
    tape = engine.forward(*other[1])
    tape.saved[0] = ()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        engine.backward(tape, last=True)
    for further in (lambda: engine.backward(engine.forward(*other[0])), engine.reduce, lambda: engine.save("nowhere")):
        assert_refused(further, r"a backward of this step was broken off.* drop them by abandon\(\)")
    engine.abandon()
    engine.step(mine)


@pytest.mark.parametrize(("stage", "loop", "model", "options"), [(*way, *what) for *way, what in covering(zs.STAGES, [
    forwards_before_backwards_and_an_evaluation_before_the_update,
    a_step_behind_an_evaluation_and_steps_that_were_abandoned, a_step_behind_a_backward_that_was_broken_off], [
        (tied(), {"keep_gathered": "all", "prefetch": 2}), (tied(), {"policy": BF16}),
        (GPT("gpt-nano", normalization="global"), {}), (ODD, FACTORED)], count=8)], ids=named)
def test_a_loop_by_hand_is_the_step_and_leaves_nothing_gathered(stage, loop, model, options):
    data = batches(model, 2, 2, 2)

    def by_hand(rank):
        engine = zs.Engine(rank, model, stage=stage, **{"optimizer": ADAM} | options)
        for step in data:
            loop(engine, step[rank.index], step[1 - rank.index])
        return master_of(engine), rank.memory.now_nbytes_by_kind

    found = zs.Cluster(2).run(by_hand)
    assert [master for master, _ in found] == masters(model, data, stage=stage, **options)
    assert not any("gathered_parameter" in held for _, held in found)


@pytest.mark.parametrize("stage", chosen([0, 3], zs.STAGES))
def test_a_step_that_raised_or_was_abandoned_has_the_same_dropout_when_taken_again_and_a_skipped_one_has_not(stage):
    model = MODELS["dropout"]()
    data = batches(model, 2, 2, 2)

    def disturbed(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage)
        for step in data:
            mine = step[rank.index]
            engine.backward(engine.forward(*mine[1]))
            engine.abandon()
            unknown = [*mine, (mine[0][0] + 99, mine[0][1])]
            assert_refused(lambda engine=engine, unknown=unknown: engine.step(unknown), "tokens from")
            engine.step(mine)
        return master_of(engine)

    assert list(zs.Cluster(2).run(disturbed)) == masters(model, data, stage=stage)
    overflows = zs.Policy("fp16", loss_scale=zs.numerics.loss_scale.Dynamic("torch", initial=2.0**100))
    for result in run(model, [data[0]] * 2, stage=stage, policy=overflows):
        assert result["skipped"] == [True, True]
        assert result["losses"][0] != result["losses"][1], "of the same weights and data"


@pytest.mark.parametrize(("stage", "mesh"), [*((stage, None) for stage in zs.STAGES), (0, (2, 2)), (2, (2, 2))])
def test_beside_a_backward_that_is_said_to_be_the_last_gradients_are_reduced_at_every_stage(stage, mesh):
    """With overlap; where nobody says it, those that rest partial wait for reduce(). The bits are those of the step, in
    whichever steps it is said, and on a mesh, where they are reduced across all the same."""
    model, options, beside = tied(), {"stage": stage, "overlap": True, "mesh": mesh}, {}
    data = batches(model, 4 if mesh else 2, 2, 2)

    def by_hand(rank, says):
        engine = zs.Engine(rank, model, ADAM, **options)
        for step, said in zip(data, says, strict=True):
            for j, (x, target) in enumerate(step[rank.index]):
                engine.backward(engine.forward(x, target), last=said and j == 1)
            finish(engine)
        return master_of(engine)

    expected = masters(model, data, **options)
    for says in ((False, False), (True, True), (True, False)):
        cluster = zs.Cluster(len(data[0]))
        assert list(cluster.run(by_hand, says)) == expected
        beside[says] = sum(row.asynchronous for row in cluster.trace[0].collectives(purpose="gradients"))
    never, always, _ = beside.values()
    assert always > 0
    assert (never == 0) == (stage < 2)


def test_a_rank_that_overlaps_and_one_that_does_not_still_agree_on_what_they_reduce():
    """The option is each rank's own affair: no collective differs."""
    kept = Kept(WIDE, batches(WIDE, 2, 1, 2), stage=2, of_rank=lambda index: {"overlap": index == 0})
    kept.step(0, 1)
    assert kept.masters == masters(WIDE, kept.data, stage=2)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_state_shows_the_mean_gradient_between_reduce_and_update_only(stage):
    model = ODD
    data, name = batches(model, 3, 1, 1)[0], next(iter(model.shapes))

    def program(rank):
        engine = zs.Engine(rank, model, SGD, stage=stage)
        seen = [engine.state(name)]
        engine.backward(engine.forward(*data[rank.index][0]))
        engine.reduce()
        seen.append(engine.state(name))
        engine.update()
        engine.all_gather_parameters()
        return [*seen, engine.state(name)]

    for first, before, after in zs.Cluster(3).run(program):
        assert first["gradient"] is after["gradient"] is None
        assert bits(after["master"]) == bits(before["master"] - np.float32(0.1) * before["gradient"])


@pytest.mark.parametrize("stage", zs.STAGES)
def test_weights_that_an_engine_gave_out_are_first_values_of_another_of_any_ranks_stage_and_format(stage):
    """SGD has no state but the weights: the next step is that of the engine that goes on."""
    model, data, frozen = WIDE, batches(WIDE, 3, 1, 3), [zs.Group("layer1.*", frozen=True)]

    def program(rank, weights=None, steps=slice(None), **options):
        engine = zs.Engine(rank, model, SGD, weights=weights, **options)
        for step in data[steps]:
            engine.step(*step[rank.index][0])
        for only in ("master", ["master"], iter(["master"])):
            assert engine.state("layer0.weight", only).keys() == {"master"}
        return {name: engine.state(name, only=["master"])["master"] for name in model.shapes}

    whole = zs.Cluster(3).run(program)[0]
    two = zs.Cluster(3).run(lambda rank: program(rank, steps=slice(2), stage=3 - stage))[0]
    again = zs.Cluster(3).run(lambda rank: program(rank, two, slice(2, 3), stage=stage))[2]
    assert {name: bits(w) for name, w in again.items()} == {name: bits(w) for name, w in whole.items()}
    assert bits(whole["layer0.weight"]) != bits(two["layer0.weight"])
    for given, policy in ((np.float64, "bf16"), (zs.format_of("bf16").dtype, "fp32"), (np.float16, "fp16")):
        weights = {name: np.asfortranarray(w.astype(given)) for name, w in two.items()}
        at_rest = zs.Cluster(2).run(lambda rank, weights=weights, policy=policy: program(
            rank, weights, slice(0), stage=stage, policy=policy, groups=frozen))[1]
        for name, w in at_rest.items():
            rested = weights[name].astype(np.float32)
            kept = rested.astype(zs.format_of(policy).dtype) if name.startswith("layer1") else rested
            assert bits(w) == bits(kept), (name, given)


def test_one_micro_batch_needs_no_list_and_several_may_come_from_a_generator():
    def program(rank):
        first, second = (zs.Engine(rank, ODD, SGD) for _ in range(2))
        return first.step(X, T) == second.step([(X, T)])

    assert alone(program)
    assert len(alone(lambda rank: zs.Engine(rank, ODD, SGD).step((X, T) for _ in range(3)).losses)) == 3


def test_weights_are_views_of_what_rests_where_it_is_whole_and_are_freed_where_they_were_gathered():
    def program(rank, stage):
        engine = zs.Engine(rank, tied(), SGD, stage=stage, keep_gathered="all", prefetch=2)
        seen = []
        for unit in engine.model.units:
            with engine.weights(unit) as w:
                seen += [np.may_share_memory(view, engine.param_group.parameter) for view in w.values()]
        return set(seen), "gathered_parameter" in rank.memory.now_nbytes_by_kind

    assert zs.Cluster(2).run(program, 0)[0] == ({True}, False)
    assert zs.Cluster(2).run(program, 3)[0] == ({False}, False)


# -- failures ---------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """What a rank fails with."""


def kept_engines(optimizer=ADAM, **options):
    """Engines after one step on a model whose units share a weight."""
    kept = Kept(tied(), batches(tied(), 2, 2, 2), optimizer, **options)
    kept.step(0)
    return kept


@pytest.mark.parametrize(("options", "struck"), list(itertools.product(
    [{"stage": 0}, {"stage": 1, "policy": BF16}, {"stage": 2, "overlap": True},
     {"stage": 3, "overlap": True, "prefetch": 1, "policy": BF16}],
    [(zs.Rank, "_collective", 1 if THOROUGH else 2), (kernels.NumpyKernels, "matmul", 7),
     (type(ADAM), "update", 1)])), ids=str)
def test_kept_engines_repeat_a_failed_step_as_if_it_had_not_begun_or_say_that_it_is_half_done(
        options, struck, monkeypatch, tmp_path):
    """A rank fails at every other of its collectives in turn (thorough: at each), or at a product of forward or
    backward, also between units that share a weight; or a rank fails at an update. Half done are steps that fail at
    one, or with collectives after the first: these engines go no further, and a checkpoint makes them whole."""
    kept, (of, name, stride) = kept_engines(**options), struck
    kept.all(lambda engine: engine.save(tmp_path))
    real, expected, refused = getattr(of, name), kept.step(1), []
    for failing in itertools.count(1, stride):
        kept.all(lambda engine: engine.load(tmp_path))
        calls = itertools.count(1)

        def fails(owner, *args, calls=calls, failing=failing, **others):
            if getattr(owner, "index", 1) == 1 and next(calls) == failing:
                raise Broken
            return real(owner, *args, **others)

        resting = kept.cluster.memory.now_nbytes
        with monkeypatch.context() as patch:
            patch.setattr(of, name, fails)
            try:
                kept.step(1)
                break
            except Broken:
                assert kept.cluster.memory.now_nbytes == resting
        try:
            again = kept.step(1)
        except ValueError as error:
            refused.append(re.search("of step 2 was broken off|the other ranks have not yet", str(error)))
            if of is type(ADAM):
                for further in (zs.Engine.all_gather_parameters, lambda engine: engine.save(tmp_path),
                                lambda engine: engine.load_weights(tmp_path)):
                    assert_refused(lambda further=further: kept.all(further),
                                   "update of step 2 was broken off.* make a new engine|not yet; call")
            kept.all(lambda engine: engine.load(tmp_path))
            assert kept.step(1) == expected
        else:
            assert again == expected
            assert not refused
    assert failing > 2
    assert all(refused)
    assert bool(refused) == (of is type(ADAM) or (options["stage"] in (1, 2) and of is zs.Rank))


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"stage": 1, "overlap": True, "policy": BF16}, {"stage": 3, "prefetch": 1}], ids=["1", "3"])
@pytest.mark.parametrize("struck", [0, 1])
def test_ctrl_c_before_any_line_of_a_step_leaves_engines_that_repeat_it_or_refuse(options, struck):
    """Each line of the folder is struck once, about the middle of the times that it runs."""
    expected, times, odd = kept_engines(**options).step(1), Counter(), []

    def step(kept, counts, at):
        kept.all(lambda engine: stepped(kept, engine, at, counts))

    def stepped(kept, engine, at, counts):
        with ctrl_c_before(at, "/zerosim/zero/", counts) if engine.rank.index == struck else nullcontext():
            engine.step(kept.data[1][engine.rank.index])

    step(kept_engines(**options), times, None)
    assert len(times) > 300
    for (name, line), count in times.items():
        kept = kept_engines(**options)
        with pytest.raises(KeyboardInterrupt):
            step(kept, Counter(), (name, line, 1 + count // 2))
        try:
            found = kept.step(1)
        except (ValueError, zs.MismatchError, RankUseError) as error:
            good = re.search("was broken off|have not yet|step 2, micro|in an earlier run", str(error))
        else:
            good = found == expected or {engine.steps_taken for engine in kept.engines} == {3}
        odd += [] if good else [(name, line)]
    assert odd == []


@pytest.mark.parametrize("stage", zs.STAGES)
def test_ranks_that_have_taken_different_numbers_of_steps_are_stopped(stage):
    kept = kept_engines(stage=stage)
    with pytest.raises(zs.MismatchError, match=r"step 1, micro-batch(.|\n)*step 2, micro-batch"):
        kept.cluster.run(lambda rank: (kept.engines[1] if rank.index else kept.make(rank)).step(kept.data[1][0]))


def test_a_schedule_that_fails_leaves_the_step_untaken():
    def program(rank):
        engine = zs.Engine(rank, ODD, ADAM, schedule={1: 1.0}.__getitem__)
        engine.step([(X, T)])
        with pytest.raises(KeyError):
            engine.step([(X, T)])
        return engine.steps_taken

    assert alone(program) == 1


# -- debug mode and padding ------------------------------------------------------------------------------------------


def test_weights_read_after_their_block_and_padding_are_nan_in_debug_mode():
    model = MODELS["fewer_than_ranks"]()  # 2 parameters on 5 ranks: three ranks own padding alone

    def program(rank):
        engine = zs.Engine(rank, model, SGD, stage=3)
        with engine.weights(model.units[0]) as w:
            inside = w["layer0.weight"].copy()
        whole = zs.Engine(rank, model, SGD, stage=0)
        return inside, w["layer0.weight"], whole.param_group.parameter[whole.layout.padding(0, 5)].copy()

    for debug in (False, True):
        for inside, late, padding in zs.Cluster(5, debug=debug).run(program):
            assert np.isfinite(inside).all()
            assert np.isnan(late).all() or not debug
            assert padding.size == 3
            assert (np.isnan(padding) if debug else padding == 0).all()


@pytest.mark.parametrize("policy", [zs.Policy("fp32"), zs.Policy("bf16", accumulate="fp32")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", zs.STAGES)
def test_zeros_travel_as_padding_of_gradients_whatever_the_memory_held_before(stage, policy, monkeypatch):
    model, data, ranks = ODD, batches(ODD, 3, 2, 1), 3
    dirty = kernels.NumpyKernels().empty

    def of_nan(shape, dtype):
        array = dirty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    def program(rank):
        engine = zs.Engine(rank, model, SGD, stage=stage, policy=policy)
        for x, target in data[0][rank.index]:
            engine.backward(engine.forward(x, target))
        engine.reduce()
        resting = [engine.param_group.gradient, engine.param_group.reduced.gradient]
        return [np.isnan(array.astype(np.float32)).sum() for array in resting if array is not None]

    monkeypatch.setattr(kernels.NumpyKernels, "empty", staticmethod(of_nan))
    assert all(not any(found) and found for found in zs.Cluster(ranks).run(program))


# -- engines and optimizers that live on ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", zs.STAGES)
def test_an_engine_lives_on_in_the_next_run_and_writes_its_arithmetic_into_that_runs_trace(stage):
    kept = Kept(ODD, batches(ODD, 3, 1, 2), stage=stage)
    kept.step(0, 1)
    computed = [[[row for row in of_rank.rows if isinstance(row, trace.Compute)] for of_rank in run.trace]
                for run in kept.cluster.runs[1:]]
    assert computed[0] == computed[1], "the same step again"
    assert sum(row.flops for row in computed[0][0]) > 0
    assert kept.masters == masters(ODD, kept.data, stage=stage)


def test_an_update_of_matrices_is_noted_in_a_later_run_as_in_the_one_that_made_the_engine():
    def make(rank):
        return zs.Engine(rank, MLP((6, 4, 2)), zs.optim.Muon(lr=0.1), groups=[
            zs.Group("*.bias", optimizer=zs.optim.SGD(lr=0.1))])

    def flops(rank, engine):
        engine.step(np.ones((2, 6)), np.ones((2, 2)))
        return sum(row.flops for row in rank.trace.rows if isinstance(row, trace.Compute))

    cluster = zs.Cluster(1)
    expected, (engine,) = cluster.run(lambda rank: flops(rank, make(rank))), cluster.run(make)
    assert [*cluster.run(flops, engine)] == [*expected]


@pytest.mark.parametrize("optimizer", [zs.optim.Adam(), zs.optim.LAMB()], ids=["Adam", "LAMB"])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_an_update_takes_no_memory_but_the_kernels_declared_scratch(optimizer, state):
    def program(rank):
        engine = zs.Engine(rank, MLP((300, 300), seed=1), optimizer, policy=zs.Policy("bf16", state=state))
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

    peak, scratch = alone(program)
    assert peak < 40_000 < scratch, "what the interpreter itself takes for frames and rows of the trace is less"


@pytest.mark.filterwarnings("ignore::zerosim.SkippedStepWarning")
def test_a_skipped_step_sends_no_parameters():
    data = batches(ODD, 2, 1, 1)
    data[0][1][0] = (X, np.full((2, 2), np.inf, np.float32))
    for stage in (1, 2):
        cluster = zs.Cluster(2)
        assert run(ODD, data, cluster, stage=stage)[0]["skipped"] == [True]
        assert cluster.trace.sent_nbytes("parameters") == [0, 0]


def test_a_rank_makes_no_more_calls_in_a_step_of_many_ranks_than_in_one_of_few() -> None:
    """All ranks' calls are made in one process: work of each that grew with their number would grow with its square."""
    def program(rank: zs.Rank) -> None:
        data = np.random.default_rng(rank.index)
        engine = zs.Engine(rank, zs.models.MLP((8, 16, 4)), zs.optim.Adam(lr=0.01), stage=3)
        engine.step([(data.normal(size=(2, 8)), data.normal(size=(2, 4)))])

    calls = {}
    for ranks in (2, 4, 32):  # the first imports
        cluster = zs.Cluster(ranks)
        with cProfile.Profile() as profile:
            cluster.run(program)
        calls[ranks] = pstats.Stats(profile).total_calls / ranks
    assert calls[32] <= calls[4]
