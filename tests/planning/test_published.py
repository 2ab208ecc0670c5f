"""What is printed elsewhere, each row with its source: it is computed, or said not to close, and why."""

import tomllib
from dataclasses import fields
from importlib.resources import files

from zerosim.course.published import SUBJECTS, Published, published, quantities

ROWS = published()


def test_a_published_number_is_what_the_formulas_come_to_or_differs_by_more_than_the_tolerance_and_says_why():
    wrong = [row for row in ROWS if abs(row.computed() - row.expected) > row.tolerance]
    assert not wrong, [(row.name, row.computed()) for row in wrong]
    still_open = [row for row in ROWS if not row.closes]
    assert still_open
    for row in still_open:
        assert abs(row.computed() - row.stated) > row.tolerance, row.name
        assert len(row.why) > 20, row.name


def test_every_row_names_its_source_and_a_unit_and_no_two_rows_are_one():
    assert all(len(row.source) > 15 for row in ROWS)
    assert all(row.unit for row in ROWS if row.subject not in ("collectives", "flops") and row.name != (
        "states in mixed precision beside states in fp32"))
    assert len({(row.name, row.source) for row in ROWS}) == len(ROWS) >= 350
    assert {row.quantity for row in ROWS} == quantities.QUANTITIES.keys()
    sources = [row.source for row in ROWS]
    assert sources.count("Rajbhandari et al. 2020 (ZeRO), table 1") == 6 * 3 * 3


def test_a_file_says_no_more_and_no_less_of_a_row_than_a_row_has():
    known = {field.name for field in fields(Published)} - {"subject"}
    for subject in SUBJECTS:
        rows = tomllib.loads(files("zerosim.course.published").joinpath(f"{subject}.toml").read_text("utf-8"))["row"]
        for row in rows:
            assert {"name", "source", "inputs", "expected", "tolerance"} <= set(row) <= known, row
            assert ("printed" in row) == ("why" in row), row
            assert ("label" in row) == ("brief" in row) <= ("why" in row), row
        assert [row["name"] for row in rows] == [row.name for row in published(subject)]
