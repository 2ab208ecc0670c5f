"""What is printed elsewhere about states, activations, shapes and FLOPs: each row is reckoned, or said not to close."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.planning.published_quantities import QUANTITIES

Row = dict[str, Any]
SUBJECTS = ("states", "activations", "shapes", "flops")
FILES = [Path(__file__).with_name(f"published_{subject}.toml") for subject in SUBJECTS]
ROWS: list[Row] = [row for file in FILES for row in tomllib.loads(file.read_text("utf-8"))["row"]]
OPEN = [row for row in ROWS if "printed" in row]


def reckoned(row: Row) -> float:
    inputs = dict(row["inputs"])
    return float(QUANTITIES[inputs.pop("quantity")](**inputs))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_published_number_is_what_the_formulas_come_to(row: Row) -> None:
    assert abs(reckoned(row) - row["expected"]) <= row["tolerance"]


@pytest.mark.parametrize("row", OPEN, ids=lambda row: row["name"])
def test_a_number_that_does_not_close_differs_by_more_than_the_tolerance_and_says_why(row: Row) -> None:
    assert abs(reckoned(row) - row["printed"]) > row["tolerance"]
    assert row["why"]


def test_every_row_names_its_source_and_its_unit_and_no_two_rows_are_one() -> None:
    assert all(row["source"] and {"name", "inputs", "expected", "tolerance", "unit"} <= row.keys() for row in ROWS)
    assert len({(row["name"], row["source"]) for row in ROWS}) == len(ROWS)
    assert {row["inputs"]["quantity"] for row in ROWS} == QUANTITIES.keys()


def test_all_cells_of_zeros_first_table_and_figure_are_there() -> None:
    sources = [row["source"] for row in ROWS]
    assert sources.count("Rajbhandari et al. 2020 (ZeRO), table 1") == 6 * 3 * 3
    assert sources.count("Rajbhandari et al. 2020 (ZeRO), figure 1") == 4
