"""From the ranks' traces to one story: what all ranks did, in order, with the bytes each sent and holds.

Legend: N ranks.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerosim.ranks.trace import Collective, Compute, Held, Row, SpanBegin, Trace

TOLD_FREES = ("gathered_parameter", "unit_gradient")
TOLD_PURPOSES = ("parameters", "gradients")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that every rank did: ``op`` on ``unit``.

    ``sent_nbytes`` and ``held_nbytes`` (by kind, right after it) are per rank; ``kind`` says what a "free" freed;
    ``call`` is the number of a collective; ``row`` is where it stands in each rank's trace.
    """

    op: str
    unit: str
    sent_nbytes: tuple[int, ...]
    held_nbytes: tuple[dict[str, int], ...]
    kind: str | None
    call: int | None
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A step as one rank's trace shows it."""

    op: str
    unit: str
    sent_nbytes: int
    held_nbytes: dict[str, int]
    kind: str | None
    call: int | None
    row: int


def steps(traces: Sequence[Trace]) -> list[Step]:
    """The story of a run whose ranks all did the same things in the same order."""
    told = []
    for marks in zip(*(_marks(trace) for trace in traces), strict=True):
        first = marks[0]
        assert all((mark.op, mark.unit) == (first.op, first.unit) for mark in marks)
        told.append(Step(first.op, first.unit, tuple(m.sent_nbytes for m in marks), tuple(m.held_nbytes for m in marks),
                         first.kind, first.call, tuple(m.row for m in marks)))
    return told


def _marks(trace: Trace) -> list[Mark]:
    """The rows of one trace that belong in the story; computing rows of one unit in a row are one step."""
    marks: list[Mark] = []
    held: Counter[str] = Counter()
    for index, row in enumerate(trace.rows):
        if isinstance(row, Held):
            held[row.kind] += row.nbytes
        for op, unit, nbytes, kind, call in _told(row):
            again = bool(marks) and isinstance(row, Compute) and (marks[-1].op, marks[-1].unit) == (op, unit)
            if not again:
                marks.append(Mark(op, unit, nbytes, {k: n for k, n in held.items() if n}, kind, call, index))
    return marks


def _told(row: Row) -> Iterator[tuple[str, str, int, str | None, int | None]]:
    match row:
        case Collective() if row.purpose in TOLD_PURPOSES:
            yield row.call.operation, row.span[-1], row.sent_nbytes, None, row.call.number
        case Held() if row.nbytes < 0 and row.kind in TOLD_FREES:
            yield "free", row.name, 0, row.kind, None
        case Compute() if row.span:
            yield _computing(row.span), row.span[1] if len(row.span) > 1 else "all", 0, None, None
        case SpanBegin() if row.path == ("update",):
            yield "update", "all", 0, None, None


def _computing(span: tuple[str, ...]) -> str:
    """forward, backward, recompute or loss."""
    return "recompute" if "recompute" in span else span[0]
