"""Schedules: factors of lr by the step, counted from 1."""

import math

import numpy as np
import pytest

from zerosim.optim import Constant, Warmup, WarmupCosine


@pytest.mark.parametrize(("schedule", "steps", "factors"), [
    (Constant(), (1, 2, 10**6), [1.0, 1.0, 1.0]),
    (Warmup(4), (1, 2, 3, 4, 5, 99), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]), (Warmup(1), (1,), [1.0]),
    (WarmupCosine(2, 6, final=0.1), (1, 2, 4, 6, 9), [0.5, 1.0, 0.55, 0.1, 0.1]),
    (WarmupCosine(0, 10), range(1, 12), [*(0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(1, 11)), 0.0]),
    (WarmupCosine(np.int64(2), 6), (1,), [0.5])], ids=str)
def test_factors_rise_fall_and_stay_as_they_say(schedule, steps, factors):
    assert [schedule(step) for step in steps] == pytest.approx(factors, abs=1e-15)


def test_schedules_are_values():
    assert Warmup(4) == Warmup(4) != Warmup(5)
    with pytest.raises(AttributeError):
        Warmup(4).steps = 5
