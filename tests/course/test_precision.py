"""The lesson on mixed precision: what is counted on a text, and that its words say only what the numbers show."""

import json
import re
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

import zerosim as zs
from zerosim import display
from zerosim.course.precision import (
    PATTERN,
    SCALES,
    Precision,
    PrecisionQuestion,
    Underflows,
    precision,
    traces,
    underflows,
)
from zerosim.course.precision_runs import SCALINGS
from zerosim.course.precision_view import histogram, scale_text
from zerosim.models.text import Corpus, shipped
from zerosim.models.units import one_pass
from zerosim.numerics.formats import format_of

SMALL = PrecisionQuestion("fp16", "gpt-nano", 30)
FEW = PrecisionQuestion("fp16", "gpt-nano", 3)


def printed(found: Precision, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(display.text(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def seen() -> Underflows:
    return underflows(SMALL, shipped())


@pytest.fixture(scope="module")
def found() -> Precision:
    return precision(FEW, shipped())


@pytest.fixture(scope="module")
def lesson(found) -> str:
    return printed(found)


# --- gradients of a text ------------------------------------------------------------------------------------


def test_fp16_without_scaling_loses_gradients_on_a_text_and_with_scaling_next_to_none(seen):
    lost = {fates.scale: fates.lost for fates in seen.computed}
    assert lost[1.0] > 20 > 10 * lost[2.0**16]


def test_every_gradient_of_the_model_is_counted_in_every_row(seen):
    count = SMALL.build().parameter_count
    for fates in (*seen.rounded, *seen.computed):
        assert fates.elements == count
    for fates in (*seen.rounded, *seen.computed, *seen.at_output):
        parts = (fates.zero, fates.lost, fates.subnormal, fates.normal, fates.not_finite)
        assert sum(parts) == fates.elements
    assert {fates.elements for fates in seen.at_output} == {seen.tokens * 256}
    assert sum(binade.elements for binade in seen.binades) == count - seen.rounded[0].zero
    assert [fates.scale for fates in seen.computed] == list(SCALES)


def test_what_is_rounded_alone_follows_from_the_histogram(seen):
    """At S = 1 fp16 loses what lies below 2^-25, and 2^-25 itself; what lies just below 2^-14 is rounded up to it."""
    below = sum(binade.elements for binade in seen.binades if binade.exponent < -25)
    assert seen.rounded[0].lost == below
    above = sum(binade.elements for binade in seen.binades if binade.exponent >= -14)
    assert above <= seen.rounded[0].normal <= above + 3


def test_the_counts_are_those_of_the_weights_that_training_in_fp32_leaves(seen):
    model, corpus = SMALL.build(), shipped()

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.AdamW(lr=3e-3), stage=3)
        for step in range(SMALL.steps):
            engine.step([corpus.batch(0, step, 0, 4, 8)])
        return {name: engine.state(name)["master"].reshape(shape) for name, shape in model.shapes.items()}

    weights, batch = zs.Cluster(1).run(program)[0], corpus.batch(0, SMALL.steps, 0, 4, 8)
    exact, half = (one_pass(model, weights, zs.Policy(fmt), *batch) for fmt in ("fp32", "fp16"))
    assert seen.loss == exact.loss
    lost = {name: int(((half.gradients[name] == 0) & (g != 0)).sum()) for name, g in exact.gradients.items()}
    assert seen.computed[0].lost == sum(lost.values())
    assert [(t.name, t.lost) for t in seen.worst] == sorted(
        ((name, count) for name, count in lost.items() if count), key=lambda pair: (-pair[1], pair[0]))[:4]


def test_bf16_underflows_nowhere_and_is_the_same_with_every_scale():
    seen = underflows(replace(SMALL, format="bf16"), shipped())
    assert [fates.lost + fates.subnormal + fates.not_finite for fates in seen.rounded] == [0] * len(SCALES)
    assert len({replace(fates, scale=1.0) for fates in seen.computed}) == 1


def test_a_text_too_short_is_refused():
    with pytest.raises(ValueError, match="the text tiny has 20 bytes"):
        underflows(SMALL, Corpus("tiny", np.arange(20, dtype=np.uint8)))


@pytest.mark.parametrize(("settings", "text"), [
    ({"format": "fp61"}, "no number format is named 'fp61'"), ({"model": "gpt-5"}, "the presets are gpt-nano"),
    ({"steps": 0}, "steps=0 must be a whole number, 1 or more"), ({"steps": 1.5}, "steps=1.5 must be")], ids=str)
def test_a_question_that_makes_no_sense_is_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        PrecisionQuestion(**settings)


def test_few_steps_on_the_text_are_still_one_round_of_the_small_networks_data():
    assert [PrecisionQuestion(steps=steps).resting_steps for steps in (1, 2, 3, 50)] == [20, 20, 24, 400]


# --- the other parts ----------------------------------------------------------------------------------------


def test_the_traces_are_the_published_ones():
    text = {(t.kind, t.hysteresis): " ".join(f"{scale:g}" for scale in t.scales) for t in traces()}
    assert text == {
        ("torch", 1): "256 512 512 1024 1024 512 256 256 512 512 1024 512 512 256 128",
        ("deepspeed", 1): "256 256 512 512 1024 512 256 256 256 512 512 256 256 128 64",
        ("deepspeed", 2): "256 256 512 512 1024 1024 512 512 512 1024 1024 1024 1024 512 256",
        ("deepspeed-legacy", 2): "256 512 512 1024 1024 1024 512 512 1024 1024 2048 2048 2048 1024 512"}
    assert "".join(str(int(overflow)) for overflow in PATTERN) == "000001100001011"


def test_json_has_every_part_and_no_number_that_json_has_not(found):
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert data.keys() == {"question", "underflows", "pattern", "traces", "trials", "largest", "rested"}
    assert data["question"] == {"format": "fp16", "model": "gpt-nano", "steps": 3}
    assert {trial["last_loss"] for trial in data["trials"] if trial["unit"] != 1 and trial["format"] == "fp16"} <= {
        "nan", "inf"}
    assert len(data["trials"]) == 2 * (len(SCALINGS) + 2)


# --- the words ----------------------------------------------------------------------------------------------


def test_every_part_is_printed(found, lesson):
    seen = found.underflows
    for words in ("gpt-nano on moby_dick", "1. Small gradients in fp16", "becomes 0", "subnormal",
                  f"Without scaling {seen.computed[0].lost:,} of 6,960 gradients", f"{seen.computed[0].subnormal:,}",
                  "2. Dynamic loss scaling", "deepspeed-legacy (2)", "    15  overflow    128             64",
                  "3. Overflow in backward, and in forward", "x 32768", "16 of 17, gave up", "bf16 and fp32 come to",
                  "4. What rests between steps: 24 steps of Adam, lr = 0.0001", "m and v in fp16", "experiment"):
        assert words in lesson


def test_the_lesson_fits_80_columns_and_breaks_no_line(found, lesson):
    wide = printed(found, width=200).splitlines()
    assert max(map(len, lesson.splitlines())) <= 80
    assert [line.rstrip() for line in lesson.splitlines()] == [line.rstrip() for line in wide]


def test_the_longest_names_and_largest_counts_fit_too(found):
    """The widest format, with the counts of the model that the command takes unless told otherwise."""
    large = {"elements": 834304, "lost": 573506, "subnormal": 583258, "not_finite": 177073}
    seen = found.underflows
    wide = replace(seen, rounded=tuple(replace(fates, **large) for fates in seen.rounded),
                   computed=tuple(replace(fates, **large) for fates in seen.computed))
    rested = [replace(run, compute="fp8_e5m2", last_loss=3.5e16) if run.compute == "fp16" else run
              for run in found.rested]
    rested[3] = replace(rested[3], state="fp8_e5m2")
    text = printed(replace(found, underflows=wide, rested=tuple(rested)))
    assert max(map(len, text.splitlines())) <= 80
    assert [line for line in text.splitlines() if re.fullmatch(r"\s*\S{1,3}\s*", line)] == []  # a cell that broke


def test_the_histogram_counts_every_gradient_and_its_lines_follow_one_another(found):
    row = format_of("fp16")
    lines = list(histogram(found, row))
    assert sum(int(line[2].replace(",", "")) for line in lines) == sum(b.elements for b in found.underflows.binades)
    borders = [(line[0], line[1]) for line in lines]
    assert all(low == high for (low, _), (_, high) in pairwise(borders))
    assert "2^-14" in {low for low, _ in borders}
    assert {line[4] for line in lines if line[0] in ("2^-14", "2^-10")} == {""}
    assert [line[4] for line in lines if line[1] == "2^-14"] == ["subnormal"]
    assert [line[4] for line in lines if line[0] == "2^-25"] == ["subnormal"]
    assert [line[4] for line in lines if line[1] == "2^-25"] == ["[red]becomes 0[/]"]
    assert max(len(line[3]) for line in lines) == 28


def test_remarks_that_the_numbers_do_not_bear_out_are_not_made(found):
    text = printed(precision(PrecisionQuestion("bf16", "gpt-nano", 1), shipped()))
    for remark in ("Without scaling", "is too much", "overflow in backward", "gives up", "m and v in", "qkv"):
        assert remark not in text
    seen = found.underflows
    none = replace(seen, computed=tuple(replace(fates, lost=0, not_finite=0) for fates in seen.computed), worst=())
    text = printed(replace(found, underflows=none))
    assert "Nothing becomes 0 without scaling: fp16 reaches down far enough" in text
    assert "is too much" not in text


def test_zeros_that_no_scale_changes_are_not_called_underflow(found):
    seen = found.underflows
    same = replace(seen, rounded=tuple(replace(fates, lost=0) for fates in seen.rounded),
                   computed=tuple(replace(fates, lost=3) for fates in seen.computed))
    said = printed(replace(found, underflows=same))
    assert "3 come out as 0 with every S: sums that cancel, and no underflow." in said


def test_queries_and_keys_are_named_where_all_of_them_are_lost(found):
    tensor = replace(found.underflows.worst[0], name="block0.attention.qkv.weight", elements=300, lost=199)
    said = {lost: "Two thirds of a qkv weight are queries and keys" in printed(replace(
        found, underflows=replace(found.underflows, worst=(replace(tensor, lost=lost),)))) for lost in (150, 199)}
    assert said == {150: False, 199: True}


def test_scales_are_written_shortly():
    assert [scale_text(scale) for scale in (1.0, 256.0, 2.0**16, 2.0**-4, 3.0, 1000.0)] == [
        "1", "256", "2^16", "2^-4", "3", "1000"]


@pytest.mark.slow  # the question as the command asks it
def test_fp16_without_scaling_loses_all_gradients_of_queries_and_keys_of_a_gpt_on_the_shipped_text():
    seen = underflows(PrecisionQuestion(), shipped())
    assert seen.computed[0].lost_share > 0.05
    assert seen.computed[2].lost < 20
    assert (seen.computed[2].scale, seen.computed[2].not_finite) == (2.0**16, 0)
    worst = seen.worst[0]
    assert "qkv" in worst.name
    assert worst.lost == pytest.approx(worst.elements * 2 / 3, rel=0.01)
