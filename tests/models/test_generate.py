"""Writing with a model: what is drawn is a function of seed, place and logits alone."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from tests.models.runs import batch_of, run_of
from zerosim.models import GPT, PRESETS, generate, logits_of


def always(*shares: float):
    """Logits that give these shares to the tokens, whatever came before."""
    return lambda tokens: np.broadcast_to(np.log(shares), (*tokens.shape, len(shares)))


def test_the_tokens_are_drawn_with_the_models_shares_or_colder_or_hotter_ones() -> None:
    shares = np.array([0.5, 0.2, 0.3])
    for temperature, wanted in ((1, shares), (0.5, shares**2 / (shares**2).sum()), (1e9, [1 / 3] * 3)):
        written = generate(always(*shares), [0], 4000, context=8, temperature=temperature)[1:]
        # A share's own deviation is at most 0.5/√4000 = 0.008.
        assert np.abs(np.bincount(written, minlength=3) / 4000 - wanted).max() < 0.03


def test_temperature_0_takes_the_likeliest_and_of_equals_the_first() -> None:
    assert generate(always(0.2, 0.4, 0.4), [0], 3, context=8, temperature=0).tolist() == [0, 1, 1, 1]


@pytest.mark.filterwarnings("error")
def test_a_temperature_near_0_neither_overflows_nor_divides_by_0() -> None:
    assert generate(always(0.4, 0.6), [0], 3, context=8, temperature=1e-300).tolist() == [0, 1, 1, 1]


def test_the_same_seed_writes_the_same_and_a_longer_text_begins_like_a_shorter() -> None:
    logits = always(*[0.1] * 10)
    text = generate(logits, [3], 50, context=8, seed=1)
    assert text.tolist() == generate(logits, [3], 50, context=8, seed=1).tolist()
    assert text[:21].tolist() == generate(logits, [3], 20, context=8, seed=1).tolist()
    assert text.tolist() != generate(logits, [3], 50, context=8, seed=2).tolist()


def test_no_more_tokens_are_shown_than_the_context_has_places() -> None:
    shown = []

    def logits(tokens: np.ndarray) -> np.ndarray:
        shown.append(tokens.tolist())
        return np.eye(9)[(tokens + 1) % 9] * 100

    generate(logits, [0, 1], 4, context=3)
    assert shown == [[[0, 1]], [[0, 1, 2]], [[1, 2, 3]], [[2, 3, 4]]]


def test_a_models_logits_are_those_of_its_own_units_without_dropout() -> None:
    run = run_of(GPT(replace(PRESETS["gpt-nano"], dropout=0.5)), scatter=0.2)
    plain, asked = run_of(GPT("gpt-nano"), scatter=0.2), []
    tokens, _ = batch_of(run.model, batch=1, tokens=4)
    found = logits_of(run.ctx, run.model, lambda unit: asked.append(unit) or nullcontext(run.w), tokens)
    assert (found == plain.output(tokens)).all()
    assert (found != run.output(tokens)).any()
    assert asked == list(run.model.units)
