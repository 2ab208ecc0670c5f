"""Schedules: factors of lr by the step, counted from 1."""

import math

import numpy as np
import pytest

from zerosim.optim import Constant, Warmup, WarmupCosine


def test_a_constant_is_one():
    assert [Constant()(step) for step in (1, 2, 10**6)] == [1.0, 1.0, 1.0]


def test_a_warmup_rises_by_equal_parts_and_stays():
    assert [Warmup(4)(step) for step in (1, 2, 3, 4, 5, 99)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Warmup(1)(1) == 1.0


def test_a_warm_cosine_rises_falls_and_stays():
    cosine = WarmupCosine(2, 6, final=0.1)
    assert [round(cosine(step), 12) for step in (1, 2, 4, 6, 9)] == [0.5, 1.0, 0.55, 0.1, 0.1]
    falling = [cosine(step) for step in range(2, 8)]
    assert falling == sorted(falling, reverse=True)


def test_a_cosine_without_warmup_is_the_published_one():
    cosine = WarmupCosine(0, 10)
    for step in range(1, 11):
        assert cosine(step) == pytest.approx(0.5 * (1 + math.cos(math.pi * step / 10)), abs=1e-15)
    assert cosine(10) == cosine(11) == 0.0


def test_schedules_are_values():
    assert Warmup(4) == Warmup(4) != Warmup(5)
    assert WarmupCosine(np.int64(2), 6)(1) == 0.5
    with pytest.raises(AttributeError):
        Warmup(4).steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Warmup(0), r"^Warmup was given steps=0; it is a number of steps, 1 or more$"),
    (lambda: Warmup(True), r"^Warmup was given steps=True; it is a number of steps"),
    (lambda: Warmup(2.0), r"^Warmup was given steps=2\.0; it is a number of steps"),
    (lambda: WarmupCosine(-1, 5), r"^WarmupCosine was given warmup=-1; it is a number of steps, 0 or more$"),
    (lambda: WarmupCosine(0, "5"), r"^WarmupCosine was given steps='5'; it is a number of steps, 1 or more$"),
    (lambda: WarmupCosine(5, 5), r"^WarmupCosine was given warmup=5 of steps=5; the cosine needs steps after the"),
    (lambda: WarmupCosine(1, 5, final=-0.1), r"^WarmupCosine was given final=-0\.1; it is a finite factor of lr, 0 or"),
    (lambda: WarmupCosine(1, 5, final=math.nan), r"^WarmupCosine was given final=nan; it is a finite factor of lr")])
def test_schedules_that_cannot_be_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
