"""What is printed elsewhere about collectives, row by row: the formulas come to the same, or the row says why not."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerosim.planning import ceil_cut, hardware, sent
from zerosim.planning.cost import BUS_FACTORS, algorithm_bytes_per_second, bus_bytes_per_second, cost
from zerosim.planning.hardware import Link, Network

Row = dict[str, Any]
ROWS: list[Row] = tomllib.loads(Path(__file__).with_name("published_collectives.toml").read_text("utf-8"))["row"]
ELEMENTS_PER_RANK = 240  # which 2^m divides wherever some of the ranks sit out
SLOW = Network(Link("one byte a second", 1, 0, "a test", "today"))


def steps(collective: str, algorithm: str, ranks: int) -> float:
    return sent(collective, algorithm, ceil_cut(ELEMENTS_PER_RANK * ranks, ranks), 1).steps


def vectors(collective: str, algorithm: str, ranks: int) -> float:
    """Through the busiest links one after the other, in vectors of n bytes."""
    found = cost(collective, algorithm, ceil_cut(ELEMENTS_PER_RANK * ranks, ranks), 1, SLOW)
    return found.seconds / found.nbytes


def sent_vectors(collective: str, algorithm: str, ranks: int) -> float:
    found = sent(collective, algorithm, ceil_cut(ELEMENTS_PER_RANK * ranks, ranks), 1)
    return max(found.nbytes) / (ELEMENTS_PER_RANK * ranks)


def transfer_milliseconds(collective: str, algorithm: str, ranks: int, nbytes: int, link: str) -> float:
    network = Network(hardware.link(link))
    return 1e3 * cost(collective, algorithm, ceil_cut(nbytes, ranks), 1, network).transfer_seconds


QUANTITIES: dict[str, Callable[..., float | None]] = {
    "steps": steps, "vectors": vectors, "sent vectors": sent_vectors, "transfer milliseconds": transfer_milliseconds,
    "bus factor": lambda collective, ranks: float(BUS_FACTORS[collective](ranks)),
    "algorithm GB/s": lambda nbytes, microseconds: algorithm_bytes_per_second(nbytes, microseconds * 1e-6) / 1e9,
    "bus GB/s": lambda collective, ranks, nbytes, microseconds:
        bus_bytes_per_second(collective, ranks, nbytes, microseconds * 1e-6) / 1e9,
}


def reckoned(row: Row) -> float:
    inputs = dict(row["inputs"])
    return QUANTITIES[inputs.pop("quantity")](**inputs)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_published_number_is_what_the_formulas_come_to(row: Row) -> None:
    assert abs(reckoned(row) - row["expected"]) <= row["tolerance"]


@pytest.mark.parametrize("row", [row for row in ROWS if "printed" in row], ids=lambda row: row["name"])
def test_a_number_that_does_not_close_differs_by_more_than_the_tolerance_and_says_why(row: Row) -> None:
    assert abs(reckoned(row) - row["printed"]) > row["tolerance"]
    assert len(row["why"]) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_has_all_that_makes_it_checkable(row: Row) -> None:
    assert {"name", "source", "inputs", "expected", "tolerance"} <= set(row) <= {
        "name", "source", "inputs", "expected", "tolerance", "printed", "why"}
    assert ("printed" in row) == ("why" in row)
    assert len(row["source"]) > 15


def test_every_row_has_a_name_of_its_own() -> None:
    names = [row["name"] for row in ROWS]
    assert len(set(names)) == len(names)
