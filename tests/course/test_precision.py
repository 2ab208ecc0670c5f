"""The lesson on mixed precision: each gradient is counted once, as exact arithmetic says, what is counted on a text is
what training leaves, and all of it is printed."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.numerics import oracle
from tests.numerics.test_loss_scale import PATTERN, TRACES
from tests.support import assert_refused, printed
from zerosim.course import precision as lesson
from zerosim.models import text as texts

Fates, PrecisionQuestion = lesson.Fates, lesson.PrecisionQuestion
rounded_fates, shipped = lesson.rounded_fates, texts.shipped
SMALL = PrecisionQuestion("fp16", "gpt-nano", 30)
ANY = st.floats(width=32, allow_nan=False)
TINY = st.floats(-(2.0**-10), 2.0**-10, width=32)
# In fp16 2^-25 is a tie that goes to 0, and what lies just below its smallest normal number, 2^-14, is rounded to it.
EDGES = st.sampled_from([2.0**-25, 2.0**-25 * (1 + 2.0**-23), 2.0**-14, 2.0**-14 * (1 - 2.0**-24), 65519.0, 65520.0])


def array(*values):
    return np.array(values, np.float32)


def fate(value, row):
    """The name of a count, from an exact value as rounded by the oracle."""
    if not math.isfinite(value):
        return "not_finite"
    return "lost" if value == 0 else "subnormal" if abs(value) < 2.0**row.emin else "normal"


@given(st.lists(ANY | TINY | EDGES, max_size=12), st.integers(-8, 24), st.sampled_from(oracle.LOW))
def test_every_gradient_is_counted_once_and_as_exact_arithmetic_has_it(values, power, row):
    expected = dict.fromkeys(("zero", "lost", "subnormal", "normal", "not_finite"), 0)
    for value in values:
        with np.errstate(over="ignore"):
            scaled = float(np.float32(value) * np.float32(2.0**power))  # the product is one of fp32
        expected["zero" if value == 0 else fate(oracle.rounded(scaled, row, "nearest"), row)] += 1
    gradients = array(*values)
    found = rounded_fates([gradients[:5].reshape(-1, 1), gradients[5:]], row.name, 2.0**power)
    assert found == Fates(row.name, 2.0**power, len(values), **expected)
    np.testing.assert_array_equal(gradients, array(*values))


def test_what_is_0_in_fp32_is_not_lost_whatever_the_format_found():
    found = lesson.fates([array(0.0, 0.0, 1.0)], [array(0.0, 0.5, 0.0)], "fp32", 1.0)
    assert (found.zero, found.lost) == (2, 1)


@pytest.fixture(scope="module")
def seen():
    return lesson.underflows(SMALL, shipped())


def test_fp16_without_scaling_loses_gradients_on_a_text_and_bf16_none(seen):
    lost = {fates.scale: fates.lost for fates in seen.computed}
    assert lost[1.0] > 20 > 10 * lost[2.0**16]
    wide = lesson.underflows(replace(SMALL, format="bf16", steps=3), shipped())
    assert [fates.lost + fates.subnormal + fates.not_finite for fates in wide.rounded] == [0] * len(lesson.SCALES)
    assert len({replace(fates, scale=1.0) for fates in wide.computed}) == 1
    tiny = texts.Corpus("tiny", np.arange(20, dtype=np.uint8))
    assert_refused(lambda: lesson.underflows(SMALL, tiny), "the text tiny has 20 bytes")


def test_every_gradient_of_the_model_is_counted_in_every_row(seen):
    count = SMALL.build().parameter_count
    for rows, elements in ((seen.rounded, count), (seen.computed, count), (seen.at_output, seen.tokens * 256)):
        assert [fates.scale for fates in rows] == list(lesson.SCALES)
        for fates in rows:
            parts = (fates.zero, fates.lost, fates.subnormal, fates.normal, fates.not_finite)
            assert sum(parts) == fates.elements == elements


def test_the_counts_are_those_of_the_weights_that_training_in_fp32_leaves(seen):
    model, corpus = SMALL.build(), shipped()

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.AdamW(lr=3e-3), stage=3)
        for step in range(SMALL.steps):
            engine.step([corpus.batch(0, step, 0, 4, 8)])
        return {name: engine.state(name)["master"].reshape(shape) for name, shape in model.shapes.items()}

    weights, batch = zs.Cluster(1).run(program)[0], corpus.batch(0, SMALL.steps, 0, 4, 8)
    exact, half = (zs.models.one_pass(model, weights, zs.Policy(fmt), *batch) for fmt in ("fp32", "fp16"))
    assert seen.loss == exact.loss
    lost = {name: int(((half.gradients[name] == 0) & (g != 0)).sum()) for name, g in exact.gradients.items()}
    assert seen.computed[0].lost == sum(lost.values())
    assert [(name, one.lost) for name, one in seen.worst.items()] == sorted(
        ((name, count) for name, count in lost.items() if count), key=lambda pair: (-pair[1], pair[0]))[:4]
    for name, one in seen.worst.items():
        assert (one.elements, one.scale) == (exact.gradients[name].size, 1.0)


def test_the_traces_are_the_published_ones():
    text = {(t.kind, t.hysteresis): " ".join(f"{scale:g}" for scale in t.scales) for t in lesson.traces()}
    assert text == TRACES
    assert list(map(int, lesson.PATTERN)) == PATTERN


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:  # by the 17th step all that happens in 40 has happened
        patch.setattr(lesson, "trials", partial(lesson.trials, steps=17))
        return lesson.precision(PrecisionQuestion("fp16", "gpt-nano", 3), shipped())


def test_every_part_is_printed_in_80_columns(found):
    text, seen = printed(found), found.underflows
    for words in ("gpt-nano on moby_dick", "1. Small gradients in fp16", "subnormal",
                  *(f"{name}: {one.lost:,} of" for name, one in seen.worst.items()), f"{seen.computed[0].subnormal:,}",
                  "2. Dynamic loss scaling", "deepspeed-legacy (2)", "    15  overflow    128             64",
                  "3. Overflow in backward, and in forward", "x 32768", "16 of 17, gave up", "on the way forward",
                  "4. What rests between steps: 24 steps of Adam, lr = 0.0001"):
        assert words in text
