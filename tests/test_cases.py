"""The few cases that are tried instead of a product leave no value out, and all of it is tried when asked for."""

import pytest

from tests import cases
from tests.cases import chosen, covering, few

AXES = ("abcdefg", (1, 2, 3), (False, True))


@pytest.mark.parametrize("turn", range(7))
def test_every_value_of_every_axis_occurs_in_as_few_cases_as_can_be(turn: int) -> None:
    found = few([list(axis) for axis in AXES], turn)
    assert [set(values) for values in zip(*found, strict=True)] == [set(axis) for axis in AXES]
    assert len(found) == len(set(found)) == 7
    assert len({case[1:] for case in found}) == 6  # all pairs of the shorter axes


def test_turns_together_meet_every_combination_of_two_axes() -> None:
    met = {case for turn in range(7) for case in few([list("abcdefg"), [1, 2, 3, 4, 5, 6]], turn)}
    assert len(met) == 42


def test_thorough_means_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "THOROUGH", True)
    assert len(covering(*AXES)) == len(set(covering(*AXES))) == 7 * 3 * 2
    assert chosen("a", "abc") == ["a", "b", "c"]
    monkeypatch.setattr(cases, "THOROUGH", False)
    assert covering(*AXES) == few([list(axis) for axis in AXES])
    assert chosen("a", "abc") == ["a"]
