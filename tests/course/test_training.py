"""Training runs on text, one or side by side: what they report, that nothing but their options decides what is learned,
whose bits are equal and whose are not, and the figure of a comparison."""

from dataclasses import replace
from functools import cache
from hashlib import sha256

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen
from tests.display import seen
from tests.support import assert_refused, printed
from zerosim.course import training
from zerosim.course.figures import comparison as figure
from zerosim.display import drawing as style
from zerosim.models import text as texts

Options, shipped = training.Options, texts.shipped
TINY = Options(model="gpt-nano", ranks=2, steps=3, batch=2, sample_tokens=4)


@cache
def trained(**changes):
    return training.train(replace(TINY, **changes), shipped())


@cache
def compared(over="stage", values=None, **changes):
    return training.compare(replace(TINY, **{"steps": 2, "sample_tokens": 0, **changes}), shipped(), over, values)


def test_every_step_is_handed_on_as_it_is_recorded_and_a_run_is_the_same_again_and_writes_until_it_diverges():
    steps_seen, found = [], trained()
    again = training.train(TINY, shipped(), steps_seen.append)
    assert tuple(steps_seen) == again.steps == found.steps
    assert [step.number for step in steps_seen] == [1, 2, 3]
    assert (again.digest, again.sample) == (found.digest, found.sample)
    assert found.sample.startswith("Call me ")
    assert len(found.sample) > len("Call me ")
    assert found.sample != trained(seed=1).sample
    diverged = trained(lr=1e30)
    assert (found.diverged_at, diverged.diverged_at, diverged.skipped, diverged.sample) == (None, 2, 2, "Call me ")
    text = printed(training.training_view(replace(found, sample="a [b]c[/b] d"), "[red]x.txt"))
    assert "on [red]x.txt" in text  # as they are
    assert "a [b]c[/b] d" in text


def test_a_steps_loss_is_the_mean_over_all_ranks_and_micro_batches():
    run = trained(micro_batches=3, ranks=3)
    for step, losses in zip(run.steps, run.losses, strict=True):
        assert len(losses) == 9
        # The mean of the ranks' means, in another order of additions than here.
        assert step.loss == pytest.approx(np.mean(losses), abs=1e-12)
        assert step.tokens == 3 * 3 * 2 * 8


def test_memory_at_rest_and_traffic_are_those_of_the_formulas():
    found = trained()
    shard = found.resting_nbytes_by_kind["parameter"] // 2
    assert found.resting_nbytes_by_kind == {"parameter": 2 * shard, "gradient": 2 * shard, "master": 4 * shard,
                                            "optimizer_state": 8 * shard}
    assert found.resting_nbytes == (16 * shard,) * 2
    assert found.sent_nbytes["gradients"] == [3 * 2 * shard] * 2  # three steps, one ring of two ranks
    assert [step.sent_nbytes["gradients"] for step in found.steps] == [2 * shard] * 3
    assert all(sum(step.sent_nbytes[purpose] for step in found.steps) == nbytes[0]
               for purpose, nbytes in found.sent_nbytes.items())


def test_the_peak_is_that_of_the_fullest_step_and_the_least_capacity_that_suffices():
    """Though the sixteen sequences that are held out take more than one that is recomputed block by block."""
    small = {"batch": 1, "recompute": "block"}
    run = trained(**small)
    assert run.peak_nbytes_by_kind in [step.peak_nbytes_by_kind for step in run.steps]
    peak = max(step.peak_nbytes for step in run.steps)
    assert sum(run.peak_nbytes_by_kind.values()) == run.peak_nbytes[0] == peak
    assert trained(**small, capacity_nbytes=peak).peak_nbytes[0] == peak
    assert_refused(lambda: trained(**small, capacity_nbytes=peak - 1), f"left of capacity_nbytes={peak - 1:,}",
                   zs.OutOfMemoryError)


def test_the_digest_and_the_loss_on_text_held_out_are_those_of_the_weights_that_the_engine_shows():
    model = TINY.build()

    def steps(rank):
        engine = zs.Engine(rank, model, TINY.build_optimizer(), **TINY.engine_settings(model))
        for number in (1, 2, 3):
            engine.step(training.batches(TINY, shipped(), number, rank.index))
        return {name: engine.state(name)["master"] for name in model.shapes}

    for masters in zs.Cluster(2).run(steps):
        assert trained().digest == sha256(b"".join(w.tobytes() for w in masters.values())).hexdigest()
    x, target = shipped().held_out(16, model.config.context)
    assert trained().held_out_loss == zs.models.one_pass(model, masters, TINY.policy(), x, target).loss


def test_two_numbers_of_ranks_with_the_same_global_batch_see_the_same_data():
    """The first loss has seen no update: it is the mean over the same sequences, whoever computes it."""
    alone, many = trained(ranks=1, micro_batches=4, steps=1), trained(ranks=4, steps=1)
    assert alone.losses == many.losses
    assert sorted(alone.losses[0]) == sorted(trained(ranks=2, micro_batches=2, steps=1).losses[0])
    assert set(alone.sent_nbytes) == {"gradients", "parameters"} < set(many.sent_nbytes)  # nothing, and control too


@pytest.mark.parametrize("name", sorted(training.OPTIMIZERS))
def test_every_optimizer_trains_with_the_layout_that_suits_it_and_the_same_bits_at_stages_3_and_1(name):
    run, of_stage_1 = (trained(optimizer=name, steps=2, sample_tokens=0, stage=stage) for stage in (3, 1))
    assert (run.skipped, run.diverged_at) == (0, None)
    assert run.digest == of_stage_1.digest


def test_every_optimizer_has_a_learning_rate_of_its_own_which_warms_up():
    offered = {name.lower() for name, kind in vars(zs.optim).items()
               if isinstance(kind, type) and issubclass(kind, zs.optim.Optimizer)}
    assert set(training.OPTIMIZERS) == offered - {"optimizer"}
    assert replace(TINY, optimizer="Lion").build_optimizer() == zs.optim.Lion(lr=0.001)
    assert replace(TINY, optimizer="lion", lr=0.25).build_optimizer().lr == 0.25
    schedule = TINY.engine_settings(TINY.build())["schedule"]
    assert [schedule(step) for step in (1, 10, 20, 21)] == [0.05, 0.5, 1.0, 1.0]


def test_layout_scale_and_groups_are_those_that_suit_the_optimizer_and_the_format_unless_asked_for():
    for changes, layout in (({}, "per_unit"), ({"optimizer": "muon"}, "whole_matrices"),
                            ({"optimizer": "muon", "gather": True}, "per_unit"),
                            ({"optimizer": "muon", "layout": "contiguous"}, "contiguous")):
        assert replace(TINY, **changes).layout_name == layout
    for changes, scale in (({"compute": "fp16"}, 65536), ({"compute": "fp16", "loss_scale": 8}, 8), ({}, 1)):
        assert replace(TINY, **changes).policy().start_scaling().scale == scale
    model = TINY.build()
    [group] = replace(TINY, optimizer="muon").engine_settings(model)["groups"]  # vectors and embeddings
    assert isinstance(group.optimizer, zs.optim.AdamW)
    assert {name for name in model.shapes if not group.matches(name)} == {
        f"block{i}.{part}.weight" for i in (0, 1)
        for part in ("attention.qkv", "attention.projection", "ffn.up", "ffn.down")}
    assert replace(TINY, optimizer="adafactor").engine_settings(model)["groups"] == []


def test_whose_bits_are_equal_is_found_and_said():
    for found, groups, words in [
            (compared(ranks=3), [[0, 1, 2, 3]], ["All 4 runs saw the same losses and ended in the same weights, bit"]),
            (compared(ranks=3, micro_batches=2, steps=1), [[0, 1], [2, 3]],
             ["bit for bit: 0, 1; 2, 3."]),
            (compared("compute", steps=1), [["fp32"], ["bf16"], ["fp16"]], ["No two runs ended in the same weights."]),
            (compared("optimizer", steps=1), [["sgd"], ["adamw"], ["lion"], ["muon"]],
             ["learning rate 0.2 0.002 0.001 0.05", "layout per_unit per_unit per_unit whole_matrices"]),
            (compared("recompute"), [["none", "sub_block", "selective", "block"], ["tiled"]],
             ["bit for bit: none, sub_block, selective, block. In weights that no other run has: tiled."]),
            (compared(values=(0, 3), lr=1e30), [[0, 3]],  # which see the same NaNs
             ["stage 0 diverged: from step 2 on its loss is not finite."])]:
        assert found.same_bits == groups
        said = " ".join(printed(training.comparison_view(found, "a text")).split())
        assert [part for part in words if part not in said] == []


def test_stages_differ_in_memory_and_traffic():
    found = compared(ranks=3)
    peaks = [run.peak_nbytes[0] for run in found.runs]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    sent = [sum(run.sent_nbytes["parameters"]) + sum(run.sent_nbytes["gradients"]) for run in found.runs]
    assert sent[0] == sent[1] == sent[2] < sent[3]


def test_a_mesh_and_zeropps_quantized_parts_change_bits_and_every_part_spares_bytes_between_nodes():
    found = compared("zeropp", ("flat", "hpz", "qwz", "qgz"), ranks=4, mesh="2x2")
    assert found.same_bits == [["flat", "hpz"], ["qwz"], ["qgz"]]
    flat, *less = (sum(run.sent_across_nbytes) for run in found.runs)
    assert 0 < max(less) < flat
    assert f"{flat // 2:,}" in printed(training.comparison_view(found, "x.txt")), "per step, of two"
    found = compared("mesh", ("none", "2x2"), ranks=4)
    assert len(found.same_bits) == 2
    (line,) = (line for line in printed(training.comparison_view(found, "x.txt")).splitlines() if "between" in line)
    assert line.split()[-2:] == ["-", f"{sum(found.runs[1].sent_across_nbytes) // 2:,}"], "without nodes there is none"


def test_bytes_are_those_of_the_fullest_rank_in_the_table_and_in_the_figure():
    """Whole matrices on five ranks: rank 0 owns nothing."""
    found = compared(values=(0, 3), ranks=5, optimizer="muon", steps=1)
    run = found.runs[1]
    assert run.fullest_rank > 0
    assert run.peak_nbytes[0] < max(run.peak_nbytes) == sum(run.peak_nbytes_by_kind.values())
    assert sum(figure.comparison_data(found).peaks[1].values()) == max(run.peak_nbytes)
    text = printed(training.training_view(run, "a text"))
    assert f"rank {run.fullest_rank} holds, bytes" in text
    assert "Ranks differ: at the peak the emptiest holds" in text


def test_the_figure_of_a_comparison_shows_each_run_in_bars_and_words():
    found = compared(ranks=3)
    data = figure.comparison_data(found)
    drawn = figure.comparison(data, style.LIGHT)
    for run in found.runs:
        assert f"{run.peak_nbytes[0]:,} bytes held" in drawn.description
        assert f"last loss {run.steps[-1].loss:.3f} nats" in drawn.description
    lines = drawn.figure.axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines[:4]] == [list(losses) for losses in data.losses]
    assert set(lines[4].get_ydata()) == {shipped().unigram_entropy}
    held = [run.peak_nbytes[0] for run in found.runs]
    sent = [(run.sent_nbytes["parameters"][0] + run.sent_nbytes["gradients"][0]) / 2 for run in found.runs]
    for axes, expected in zip(drawn.figure.axes[1:], (held, sent), strict=True):
        heights = [sum(patch.get_height() for patch in axes.patches
                       if round(patch.get_x() + patch.get_width() / 2) == place) for place in range(4)]
        # Bars are in kB or MB in binary floating point, added up here in another order.
        assert axes.get_ylabel().endswith(style.scale_of(max(expected))[1] + ")")
        assert heights == pytest.approx([nbytes / style.scale_of(max(expected))[0] for nbytes in expected], rel=1e-12)


def test_no_words_of_the_figure_lie_on_others_or_leave_the_page():
    for over in chosen(["recompute"], training.OVER):  # the most runs, and the longest names
        nodes = {"mesh": {"ranks": 4}, "zeropp": {"ranks": 4, "mesh": "2x2"}}.get(over, {})
        seen.assert_readable(figure.comparison(figure.comparison_data(compared(over, **nodes))))


# What is refused: what the command line can ask, in `test_commands`.
def test_what_cannot_be_trained_or_compared_is_refused_before_the_first_run_begins():
    short, runs_begun = texts.Corpus("short", shipped().tokens[:20]), []

    def comparing(over, values, corpus=None, **changes):
        return lambda: training.compare(replace(TINY, **changes), corpus or shipped(), over, values, runs_begun.append)

    for call, text, error in [
            (lambda: Options(batch=1.5), "batch=1.5 must be a whole number, 1 or more", ValueError),
            (lambda: training.require_engine(replace(TINY, optimizer="muon", layout="per_unit")),
             "Muon needs all of .* take layout='whole_matrices', or gather=True", ValueError),
            (comparing("stage", []), "over stage takes two or more that differ, as in 0,1,2,3", ValueError),
            (comparing("stage", None, short), "sequences of 8 need more", ValueError),
            (comparing("optimizer", ["adamw", "muon"], layout="per_unit"), "Muon needs all of", ValueError),
            (comparing("stage", [3, 0], capacity_nbytes=70_000), "^stage 0: rank 0 asked for", zs.OutOfMemoryError)]:
        assert_refused(call, text, error)
    assert runs_begun == []
    comparing("stage", [0, 3], steps=1)()
    assert runs_begun == ["stage 0", "stage 3"]


@pytest.mark.slow
def test_the_demo_learns_more_than_the_frequencies_of_bytes():
    run = training.train(Options(steps=100), shipped())
    assert run.held_out_loss < run.unigram_entropy - 0.4
    assert run.skipped == 0


@pytest.mark.slow
def test_a_llama_of_four_layers_predicts_the_shipped_text_better_than_its_bytes_frequencies():
    found = trained(model="llama-micro", ranks=1, steps=25, batch=4, compute="fp32", sample_tokens=0)
    assert found.options.build().config.layers == 4
    assert found.held_out_loss < found.unigram_entropy - 0.2
