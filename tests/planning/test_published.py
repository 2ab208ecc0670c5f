"""What is printed elsewhere, each row with its source: it is computed, or said not to close, and why."""

import re
import tomllib
from dataclasses import fields
from importlib.resources import files

import pytest

from zerosim.course.published import SUBJECTS, Published, published
from zerosim.course.published.quantities import QUANTITIES

ROWS = published()
OPEN = [row for row in ROWS if not row.closes]
STATS = "nothing published about 'stats' is kept; the subjects are states, activations, shapes, flops, collectives"
NAMED = {"ids": lambda row: row.name}


@pytest.mark.parametrize("row", ROWS, **NAMED)
def test_a_published_number_is_what_the_formulas_come_to(row: Published) -> None:
    assert abs(row.computed() - row.expected) <= row.tolerance


@pytest.mark.parametrize("row", OPEN, **NAMED)
def test_a_number_that_does_not_close_differs_by_more_than_the_tolerance_and_says_why(row: Published) -> None:
    assert abs(row.computed() - row.stated) > row.tolerance
    assert len(row.why) > 20


def test_every_row_names_its_source_and_a_unit_and_no_two_rows_are_one() -> None:
    assert all(len(row.source) > 15 for row in ROWS)
    assert all(row.unit for row in ROWS if row.subject not in ("collectives", "flops") and row.name != (
        "states in mixed precision beside states in fp32"))
    assert len({(row.name, row.source) for row in ROWS}) == len(ROWS) >= 350
    assert {row.quantity for row in ROWS} == QUANTITIES.keys()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_file_says_no_more_and_no_less_of_a_row_than_a_row_has(subject: str) -> None:
    rows = tomllib.loads(files("zerosim.course.published").joinpath(f"{subject}.toml").read_text("utf-8"))["row"]
    known = {field.name for field in fields(Published)} - {"subject"}
    for row in rows:
        assert {"name", "source", "inputs", "expected", "tolerance"} <= set(row) <= known
        assert ("printed" in row) == ("why" in row)
        assert ("label" in row) == ("brief" in row) <= ("why" in row)
    assert [row["name"] for row in rows] == [row.name for row in published(subject)]


def test_all_cells_of_zeros_first_table_and_figure_are_there() -> None:
    sources = [row.source for row in ROWS]
    assert sources.count("Rajbhandari et al. 2020 (ZeRO), table 1") == 6 * 3 * 3
    assert sources.count("Rajbhandari et al. 2020 (ZeRO), figure 1") == 4


def test_a_subject_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(STATS)}"):
        published("stats")
