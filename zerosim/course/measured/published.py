"""Published numbers, beside pencil and runs without data."""

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.course.measured.published_runs import measured_quantity
from zerosim.course.published import Published, published
from zerosim.planning.hardware import link


@dataclass(frozen=True, slots=True)
class Settled:
    """A published number, what pencil and paper come to, and what a run measures, all in the row's unit."""

    row: Published
    pencil: float
    ledger: float


def settled(*subjects: str) -> Iterator[Settled]:
    """The published numbers of these subjects, or of all, that a run of the package can settle; in the files' order.

    >>> next(one for one in settled("states") if not one.row.closes).row.why
    '4P + 12P/N, which the same text has, is 28 + 10.5; nothing in it comes to 21.5'
    """
    for row in published(*subjects):
        inputs = dict(row.inputs)
        if "link" in inputs:  # a transfer's seconds are its bytes over the link's rate
            inputs["bytes_per_second"] = link(inputs.pop("link")).bytes_per_second
        ledger = measured_quantity(**inputs)
        if ledger is not None:
            yield Settled(row, row.computed(), ledger)
