"""Puzzle: a reduction travels while the next gradient is computed.

Legend: N ranks, L layers of n_l elements, k_l = ⌈n_l/N⌉.
"""

from zerosim.course.puzzles.puzzle import Case, read_puzzle
from zerosim.course.puzzles.tasks.layered import backward_case
from zerosim.ranks.trace import Collective, Compute, Trace, Traces, Wait


def case(ranks: int, length: int) -> Case:
    """A backward pass of four layers on N ranks."""
    return backward_case("overlap", ranks, length, alive=2, look=exposed,
                         why="more than two whole gradients are alive; wait for one before the next is sent on its way")


def exposed(traces: Traces) -> str | None:
    """Words for a reduction that nothing was computed beside; None where each but the last is hidden."""
    return next((said for trace in traces if (said := _exposed(trace))), None)


def _exposed(trace: Trace) -> str | None:
    rows = trace.rows
    calls = [(place, row) for place, row in enumerate(rows) if isinstance(row, Collective)]
    for number, (place, row) in enumerate(calls):
        if not row.asynchronous:
            return (f"reduction {number} of {len(calls)} stands and waits: it was called without async_op=True, and "
                    "nothing is computed while it travels")
        wait = next(at for at, other in enumerate(rows) if isinstance(other, Wait) and other.call is row.call)
        hidden = any(isinstance(other, Compute) for other in rows[place:wait])
        if not hidden and number < len(calls) - 1:
            return (f"reduction {number} of {len(calls)} is waited for before anything is computed: issue it, compute "
                    "the next gradient, and only then wait")
    return None


PUZZLE = read_puzzle("overlap", case)
