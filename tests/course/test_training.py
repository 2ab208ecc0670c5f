"""A training run on text: what it reports, that nothing but its options decides what it learns, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

import zerosim as zs
from zerosim import optim
from zerosim.course.training import (
    LEARNING_RATES,
    Options,
    batches,
    digest,
    known_optimizers,
    optimizer_named,
    require_engine,
    train,
)
from zerosim.models.text import shipped

TINY = Options(model="gpt-nano", ranks=2, steps=3, batch=2, sample_tokens=4)


@pytest.fixture(scope="module")
def found():
    return train(TINY, shipped())


# -- what it reports --------------------------------------------------------------------------------------------------


def test_every_step_is_heard_as_it_is_recorded(found):
    heard = []
    again = train(TINY, shipped(), heard.append)
    assert tuple(heard) == again.steps == found.steps
    assert [step.number for step in heard] == [1, 2, 3]
    assert again.digest == found.digest


def test_a_steps_loss_is_the_mean_over_all_ranks_and_micro_batches():
    run = train(replace(TINY, micro_batches=3, ranks=3), shipped())
    for step, losses in zip(run.steps, run.losses, strict=True):
        assert len(losses) == 9
        # The mean of the ranks' means, in another order of additions than here.
        assert step.loss == pytest.approx(np.mean(losses), abs=1e-12)
        assert step.tokens == 3 * 3 * 2 * 8


def test_memory_at_rest_and_traffic_are_those_of_the_formulas(found):
    shard = found.resting_nbytes_by_kind["parameter"] // 2
    assert found.resting_nbytes_by_kind == {"parameter": 2 * shard, "gradient": 2 * shard, "master": 4 * shard,
                                            "optimizer_state": 8 * shard}
    assert found.resting_nbytes == (16 * shard,) * 2
    assert found.sent_nbytes["gradients"] == [3 * 2 * shard] * 2  # three steps, one ring of two ranks
    assert [step.sent_nbytes["gradients"] for step in found.steps] == [2 * shard] * 3
    assert all(sum(step.sent_nbytes[purpose] for step in found.steps) == nbytes[0]
               for purpose, nbytes in found.sent_nbytes.items())


def test_the_peak_is_that_of_the_fullest_step_and_not_of_what_looks_at_the_model_afterwards():
    run = train(replace(TINY, batch=1, recompute="block"), shipped())
    assert run.peak_nbytes_by_kind in [step.peak_nbytes_by_kind for step in run.steps]
    assert sum(run.peak_nbytes_by_kind.values()) == max(step.peak_nbytes for step in run.steps) == run.peak_nbytes[0]


def test_a_capacity_of_exactly_the_peak_suffices_and_one_byte_less_does_not():
    """Though the sixteen sequences that are held out take more than one that is recomputed block by block."""
    options = replace(TINY, batch=1, recompute="block")
    peak = max(train(options, shipped()).peak_nbytes)
    assert train(replace(options, capacity_nbytes=peak), shipped()).peak_nbytes[0] == peak
    with pytest.raises(zs.OutOfMemoryError, match=f"left of capacity_nbytes={peak - 1:,}"):
        train(replace(options, capacity_nbytes=peak - 1), shipped())


def test_the_digest_is_that_of_the_bits_that_the_engine_shows():
    def two_steps(rank):
        model = TINY.build()
        engine = zs.Engine(rank, model, TINY.build_optimizer(), **TINY.engine_settings(model))
        for number in (1, 2, 3):
            engine.step(batches(TINY, model.config.context, shipped(), number, rank.index))
        return digest(engine)

    assert list(zs.Cluster(2).run(two_steps)) == [train(TINY, shipped()).digest] * 2


def test_the_sample_begins_with_the_prompt_and_is_the_same_again(found):
    assert found.sample.startswith("Call me ")
    assert len(found.sample) > len("Call me ")
    assert found.sample == train(TINY, shipped()).sample
    assert found.sample != train(replace(TINY, seed=1), shipped()).sample


def test_a_run_whose_weights_are_no_numbers_says_from_which_step_on_and_writes_nothing():
    run = train(replace(TINY, lr=1e30), shipped())
    assert run.diverged_at == 2
    assert run.skipped == 2
    assert run.sample == "Call me "
    assert train(TINY, shipped()).diverged_at is None


# -- what decides -----------------------------------------------------------------------------------------------------


def test_two_numbers_of_ranks_with_the_same_global_batch_see_the_same_data():
    """The first loss has seen no update: it is the mean over the same sequences, whoever computes it."""
    alone = train(replace(TINY, ranks=1, micro_batches=4, steps=1), shipped())
    many = train(replace(TINY, ranks=4, micro_batches=1, steps=1), shipped())
    assert alone.losses == many.losses


@pytest.mark.parametrize("name", sorted(known_optimizers()))
def test_every_optimizer_trains_under_stage_3_with_the_layout_that_suits_it(name):
    options = replace(TINY, optimizer=name, steps=2, sample_tokens=0)
    run = train(options, shipped())
    assert (run.skipped, run.diverged_at) == (0, None)
    assert run.digest == train(replace(options, stage=1), shipped()).digest
    assert run.digest != train(replace(options, lr=options.learning_rate / 2), shipped()).digest


def test_matrix_optimizers_leave_vectors_and_embeddings_to_adamw():
    model = TINY.build()
    [group] = replace(TINY, optimizer="muon").engine_settings(model)["groups"]
    assert isinstance(group.optimizer, optim.AdamW)
    left = {name for name in model.shapes if not group.matches(name)}
    assert left == {f"block{i}.{part}.weight" for i in (0, 1)
                    for part in ("attention.qkv", "attention.projection", "ffn.up", "ffn.down")}
    assert replace(TINY, optimizer="adafactor").engine_settings(model)["groups"] == []


@pytest.mark.parametrize(("settings", "layout"), [
    ({}, "per_unit"), ({"optimizer": "muon"}, "whole_matrices"), ({"optimizer": "muon", "gather": True}, "per_unit"),
    ({"optimizer": "muon", "layout": "contiguous"}, "contiguous")], ids=str)
def test_the_layout_is_the_one_asked_for_or_what_the_optimizer_can_be_cut_by(settings, layout):
    assert replace(TINY, **settings).layout_name == layout


def test_every_optimizer_has_a_learning_rate_of_its_own():
    assert set(LEARNING_RATES) == set(known_optimizers())
    assert replace(TINY, optimizer="Lion").build_optimizer().lr == LEARNING_RATES["lion"]
    assert replace(TINY, optimizer="lion", lr=0.25).build_optimizer().lr == 0.25


def test_optimizers_are_found_by_name_in_any_case():
    assert type(optimizer_named("AdamW", 0.1)).__name__ == "AdamW"
    assert optimizer_named("sgd", 0.5).lr == 0.5


def test_the_learning_rate_warms_up():
    assert [TINY.schedule()(step) for step in (1, 10, 20, 21)] == [0.05, 0.5, 1.0, 1.0]


def test_fp16_is_scaled_dynamically_unless_told_otherwise():
    scales = [replace(TINY, **options).policy().start_scaling().scale
              for options in ({"compute": "fp16"}, {"compute": "fp16", "loss_scale": 8}, {"compute": "bf16"})]
    assert scales == [65536.0, 8.0, 1.0]


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "text"), [
    ({"steps": 0}, "steps=0 must be a whole number, 1 or more"), ({"ranks": 0}, "ranks=0 must be"),
    ({"sample_tokens": -1}, "sample_tokens=-1 must be a whole number, 0 or more"),
    ({"batch": 1.5}, "batch=1.5 must be a whole number, 1 or more"),
    ({"model": "gpt-nano", "ranks": 7000}, "ranks=7,000: gpt-nano has 6,960 parameters, and no layout has one for each "
                                           "rank; take fewer ranks, or a larger model"),
    ({"ranks": 1025}, "ranks=1,025: all of them train in this process, one after the other; take at most 1,024"),
    ({"model": "gpt-mikro"}, "did you mean 'gpt-micro'"), ({"stage": 4}, "ZeRO has the stages 0, 1, 2, 3, found 4"),
    ({"optimizer": "adamm"}, "no optimizer is called 'adamm'; choose one of .*adamw.*; did you mean 'adam'"),
    ({"lr": 0.0}, "lr=0.0 must be a positive number"), ({"lr": float("nan")}, "lr=nan must be"),
    ({"compute": "fp61"}, "no number format is named 'fp61'"), ({"recompute": "some"}, "recompute='some' names no pol"),
    ({"layout": "units"}, "no layout is called 'units'"),
    ({"loss_scale": "big"}, "loss_scale='big' is neither a positive number nor 'dynamic'"),
    ({"loss_scale": "-1"}, "loss_scale='-1' is neither")], ids=str)
def test_options_that_cannot_be_are_refused_before_anything_runs(settings, text):
    with pytest.raises(ValueError, match=text):
        Options(**settings)


def test_what_only_an_engine_knows_is_refused_without_a_step():
    with pytest.raises(ValueError, match=r"Muon needs all of .* take layout='whole_matrices', or gather=True"):
        require_engine(replace(TINY, optimizer="muon", layout="per_unit"))
    with pytest.raises(zs.OutOfMemoryError, match="left of capacity_nbytes=1,000"):
        require_engine(replace(TINY, capacity_nbytes=1000))
    require_engine(TINY)


@pytest.mark.slow
def test_the_demo_learns_more_than_the_frequencies_of_bytes():
    run = train(Options(steps=100), shipped())
    assert run.held_out_loss < run.unigram_entropy - 0.4
    assert run.skipped == 0
