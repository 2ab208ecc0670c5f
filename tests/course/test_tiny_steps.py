"""ZeRO in one file, line by line: the recording is of the file as it runs, and the same each time."""

import sys

import ml_dtypes
import numpy as np
import pytest

from zerosim import tiny
from zerosim.course import tiny_steps


@pytest.mark.parametrize("stage", tiny_steps.STAGES, ids=lambda stage: stage.__name__)
def test_a_recorded_step_is_the_files_own_in_every_bit_and_ends_with_what_its_ranks_keep(stage):
    before = sys.gettrace()
    recording, trainers = tiny_steps.recorded(stage)
    assert sys.gettrace() is before
    data = [[[(np.array(x), np.array(target))] for x, target in tiny_steps.DATA]]
    plain = tiny.train(stage, [np.array(matrix, np.float32) for matrix in tiny_steps.MODEL], data, ml_dtypes.bfloat16,
                       tiny_steps.LEARNING_RATE)
    last = list(recording.states.values())[-1]
    for one, other, shown in zip(trainers, plain, last, strict=True):
        assert shown["sent"] == one.rank.sent_nbytes == other.rank.sent_nbytes > 0
        for mine, same, kept in zip(one.parameters, other.parameters, shown["kept"], strict=True):
            for kind in tiny_steps.KEPT:
                assert getattr(mine, kind).tobytes() == getattr(same, kind).tobytes()
                assert kept[kind] == tiny_steps.text_of(getattr(mine, kind))


def test_every_line_that_is_shown_is_one_of_the_file_and_the_stages_differ_where_they_communicate():
    first, again = tiny_steps.page_data(), tiny_steps.page_data()
    assert first == again
    calls = {}
    for name, run in first["runs"].items():
        for _, number, _, function, values in run["lines"]:
            assert first["source"][number - 1].strip()
            assert all(isinstance(value, str) for value in values.values())
            calls.setdefault(name, []).append(function)
    counted = {name: tuple(functions.count(one) for one in ("all_reduce", "reduce_scatter", "all_gather"))
               for name, functions in calls.items()}
    assert len(set(counted.values())) == 3  # stages 1 and 2 make the same calls, at other times
    assert counted["ZeRO1"] == counted["ZeRO2"]
    assert calls["ZeRO1"] != calls["ZeRO2"]
