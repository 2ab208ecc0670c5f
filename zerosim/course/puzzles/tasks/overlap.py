"""Puzzle: a reduction travels while the next gradient is computed.

Legend: N ranks, L layers of n_l elements, k_l = ⌈n_l/N⌉.
"""

from zerosim.course.puzzles.puzzle import Case, Puzzle
from zerosim.course.puzzles.tasks.layered import backward_case
from zerosim.ranks.trace import Collective, Compute, Trace, Traces, Wait

STATEMENT = """
As in `zero2`, but nobody stands waiting: while layer 3's gradient travels round the ring, layer 2's is
computed.

    compute   | g3 | g2     | g1     | g0     |
    wire           | rs(g3) | rs(g2) | rs(g1) | rs(g0) |
                   issue    wait     wait     wait     wait

    overlap(rank, lengths, gradient_of):
        lengths, gradient_of  as in zero2
        ->  this rank's shards of the mean gradients, fp32, layer 0 first

rank.reduce_scatter(x, async_op=True) returns a Work at once; work.wait() returns the result, and until then x
must live unchanged. Between the issue of a reduction and its wait the next gradient is to be computed; but
not all of them: at most two whole gradients may be alive.
"""

FUNCTION = '''
def overlap(rank, lengths, gradient_of):
    shards, work = [None] * len(lengths), None
    for layer in reversed(range(len(lengths))):
        gradient = gradient_of(layer)
        if work is not None:
            zs.puzzles.hole("layer + 1 has been travelling meanwhile: wait for it, and take the mean")
        work = zs.puzzles.hole("send this one on its way, without waiting")
        del gradient
    zs.puzzles.hole("one is still travelling")
    return shards
'''

HINTS = (
    "One Work is open at a time: issue it, compute the next gradient, and only then wait for it.",
    "work = rank.reduce_scatter(gradient, async_op=True); later shards[layer + 1] = work.wait().",
    "After the loop: shards[0] = work.wait(), and the division by rank.size for it too.",
)


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


PUZZLE = Puzzle(
    "overlap", "Overlap a reduction with compute", STATEMENT, FUNCTION, HINTS, case,
    allowed=frozenset({"reduce_scatter"}),
    score="peak: the shards, two layers and the ring's buffers; bytes and steps: one reduce-scatter per layer, each "
          "hidden but the last")
