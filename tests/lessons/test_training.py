"""A training run on text: what it reports, that stages agree in it, and that it learns."""

from dataclasses import replace

import numpy as np
import pytest

from zerosim.lessons.comparing import compare, values_of
from zerosim.lessons.figures.comparison import comparison, comparison_data
from zerosim.lessons.figures.style import DARK, LIGHT
from zerosim.lessons.training import Options, optimizer_named, train, warmed_up
from zerosim.models.text import shipped

TINY = Options(model="gpt-nano", ranks=2, steps=3, batch=2, sample_tokens=4)


@pytest.fixture(scope="module")
def found():
    return train(TINY, shipped())


def test_every_step_is_heard_as_it_is_recorded(found):
    heard = []
    again = train(TINY, shipped(), heard.append)
    assert tuple(heard) == again.steps
    assert [step.number for step in heard] == [1, 2, 3]
    assert again.digest == found.digest


def test_a_steps_loss_is_the_mean_over_all_ranks_and_micro_batches():
    run = train(replace(TINY, micro_batches=3, ranks=3), shipped())
    for step, losses in zip(run.steps, run.losses, strict=True):
        assert len(losses) == 9
        assert step.loss == pytest.approx(np.mean(losses), abs=1e-12)


def test_memory_and_traffic_are_those_of_the_ledger_and_the_trace(found):
    shard = found.resting_nbytes_by_kind["parameter"] // 2
    assert found.resting_nbytes_by_kind == {"parameter": 2 * shard, "gradient": 2 * shard, "master": 4 * shard,
                                            "optimizer_state": 8 * shard}
    assert sum(found.peak_nbytes_by_kind.values()) == found.peak_nbytes[0]
    assert found.sent_nbytes["gradients"] == [3 * 2 * shard] * 2  # three steps, one ring of two ranks


def test_two_numbers_of_ranks_with_the_same_global_batch_see_the_same_data():
    """The first loss has seen no update: it is the mean over the same sequences, whoever computes it."""
    alone = train(replace(TINY, ranks=1, micro_batches=4, steps=1), shipped())
    many = train(replace(TINY, ranks=4, micro_batches=1, steps=1), shipped())
    assert alone.losses == many.losses


def test_the_sample_begins_with_the_prompt_and_is_the_same_again(found):
    assert found.sample.startswith("Call me ")
    assert found.sample == train(TINY, shipped()).sample
    assert found.sample != train(replace(TINY, seed=1), shipped()).sample


def test_the_learning_rate_warms_up():
    assert [warmed_up(step) for step in (1, 10, 20, 21)] == [0.05, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("settings", "text"), [
    ({"steps": 0}, "steps=0 must be a whole number, 1 or more"), ({"ranks": 0}, "ranks=0 must be"),
    ({"model": "gpt-mikro"}, "did you mean 'gpt-micro'"), ({"stage": 4}, "ZeRO has the stages 0, 1, 2, 3, found 4"),
    ({"optimizer": "adamm"}, "no optimizer is called 'adamm'; choose one of .*adamw"),
    ({"lr": 0.0}, "lr=0.0 must be a positive number"), ({"lr": float("nan")}, "lr=nan must be"),
    ({"compute": "fp61"}, "no number format is named 'fp61'"), ({"recompute": "some"}, "recompute='some' names no pol"),
    ({"layout": "units"}, "no layout is called 'units'"),
    ({"loss_scale": "big"}, "loss_scale='big' is neither a positive number nor 'dynamic'"),
    ({"loss_scale": "-1"}, "loss_scale='-1' is neither")])
def test_options_that_cannot_be_are_refused_before_anything_runs(settings, text):
    with pytest.raises(ValueError, match=text):
        Options(**settings)


def test_fp16_is_scaled_dynamically_unless_told_otherwise():
    scales = [replace(TINY, **options).policy().start_scaling().scale
              for options in ({"compute": "fp16"}, {"compute": "fp16", "loss_scale": 8}, {"compute": "bf16"})]
    assert scales == [65536.0, 8.0, 1.0]


def test_optimizers_are_found_by_name_in_any_case():
    assert type(optimizer_named("AdamW", 0.1)).__name__ == "AdamW"
    assert optimizer_named("sgd", 0.5).lr == 0.5


# -- side by side -----------------------------------------------------------------------------------------------------


def test_all_stages_agree_bit_for_bit_and_differ_in_memory_and_traffic():
    both = compare(replace(TINY, ranks=3), shipped(), "stage")
    assert both.all_same_bits
    peaks = [run.peak_nbytes[0] for run in both.runs]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    sent = [sum(run.sent_nbytes["parameters"]) + sum(run.sent_nbytes["gradients"]) for run in both.runs]
    assert sent[0] == sent[1] == sent[2] < sent[3]


def test_accumulation_makes_two_orders_of_the_stages():
    found = compare(replace(TINY, ranks=3, micro_batches=2, compute="bf16"), shipped(), "stage")
    assert not found.all_same_bits
    assert found.digests[0] == found.digests[1] != found.digests[2] == found.digests[3]


def test_formats_and_optimizers_end_in_different_bits():
    assert len(set(compare(TINY, shipped(), "compute").digests)) == 3
    assert len(set(compare(TINY, shipped(), "optimizer", ["sgd", "adam"]).digests)) == 2


def test_comparing_hears_each_run_and_refuses_what_cannot_be_before_the_first():
    heard = []
    compare(replace(TINY, steps=1), shipped(), "stage", [0, 3], heard.append)
    assert heard == ["stage 0", "stage 3"]
    heard.clear()
    with pytest.raises(ValueError, match="no number format is named 'fp61'"):
        compare(TINY, shipped(), "compute", ["fp32", "fp61"], heard.append)
    assert heard == []
    with pytest.raises(ValueError, match=r"asked to compare over 'stages'; .* did you mean 'stage'"):
        compare(TINY, shipped(), "stages")


def test_values_are_read_from_a_text():
    assert values_of("stage", "0, 3") == [0, 3]
    assert values_of("compute", "fp32,bf16") == ["fp32", "bf16"]
    assert values_of("compute", None) is None


@pytest.mark.parametrize("style", [LIGHT, DARK], ids=lambda style: style.name)
def test_the_figure_of_a_comparison_shows_each_run_in_bars_and_words(style):
    both = compare(replace(TINY, ranks=2), shipped(), "stage", [0, 3])
    data = comparison_data(both)
    drawing = comparison(data, style)
    for run in both.runs:
        assert f"{run.peak_nbytes[0]:,} bytes held" in drawing.description
        assert f"last loss {run.steps[-1].loss:.3f} nats" in drawing.description
    lines = drawing.figure.axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines[:2]] == [list(losses) for losses in data.losses]
    heights = [sum(patch.get_height() for patch in drawing.figure.axes[1].patches
                   if round(patch.get_x() + patch.get_width() / 2) == place) for place in (0, 1)]
    assert heights == pytest.approx([run.peak_nbytes[0] / 1e6 for run in both.runs])


@pytest.mark.slow
def test_the_demo_learns_more_than_the_frequencies_of_bytes():
    found = train(Options(steps=100), shipped())
    assert found.held_out_loss < found.unigram_entropy - 0.4
    assert found.skipped == 0
