"""A replayed run as plain data, for pages that move: columns of whole numbers, in which nothing is rounded but the
replay's clock, to nanoseconds.

Words and columns lie in a `Pool` and are named by their places there: ranks that do the same, and runs of one page,
share them. A column of times holds differences, so that what comes at once, or lasts equally long, is the same number
again.

Legend: N ranks; ns nanoseconds; bit r of an addends' mask is set where rank r's vector, or of a gather its shard, is in
a chunk.
"""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from zerosim.display.chrome_trace import nanoseconds
from zerosim.display.replayed import stretches
from zerosim.planning.collectives import levels
from zerosim.planning.recording import BEGIN, HELD, ISSUE, Numbering, RecordedCall, sent_by_rank
from zerosim.planning.streams import Collectives, Lane, StreamPart
from zerosim.planning.timeline import Timeline, TimelineEvent, memory
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.inspect import step_through
from zerosim.ranks.rank import Rank

HeldArrays = Counter[tuple[str, str, int]]  # how many arrays of each kind, name and bytes
MOST_RING_RANKS = 16  # of whose messages a page shows each


@dataclass(slots=True)
class Pool:
    """The words, columns and messages of a page's runs, each once, by their places."""

    words: Numbering[str] = field(default_factory=Numbering)
    columns: Numbering[tuple[int, ...]] = field(default_factory=Numbering)
    messages: Numbering[tuple[Any, ...]] = field(default_factory=Numbering)

    def column(self, numbers: Iterable[int]) -> int:
        """The place of a column."""
        return self.columns[tuple(numbers)]

    def named(self, words: Iterable[str]) -> int:
        """The place of a column of words."""
        return self.column(self.words[word] for word in words)

    def as_json(self) -> dict[str, Any]:
        """The tables in the order of their places."""
        return {"words": [*self.words], "columns": [*self.columns], "messages": [*self.messages]}


def run_data(timeline: Timeline, pool: Pool, held: Sequence[HeldArrays] | None = None) -> dict[str, Any]:
    """The run as data whose numbers lie in the pool: its end in ns, its calls, each rank, and how many share a node.

    ``held`` are the arrays that each rank held at the beginning, where their names are known; else there is one for
    each kind.
    """
    numbers = {call: place for place, call in enumerate(timeline.parts_of_call)}
    if held is None:
        held = [HeldArrays({(kind, "", nbytes): 1 for kind, nbytes in timeline.recording.program(
            rank).held_at_start.items()}) for rank in range(timeline.ranks)]
    ranks = [_rank(timeline, lane, pool, numbers, start) | {"sent": sent} for lane, start, sent in zip(
        timeline.lanes, held, sent_by_rank(timeline.recording), strict=True)]
    return {"end": nanoseconds(timeline.step_seconds), "calls": _calls(timeline, pool), "ranks": ranks,
            "ranks_per_node": timeline.machine.network.ranks_per_node}


def _steps(clocks: Iterable[int]) -> Iterator[int]:
    """From each clock to the next, from 0 on."""
    before = 0
    for clock in clocks:
        yield clock - before
        before = clock


def _apart(clocks: Iterable[tuple[int, int]], pool: Pool) -> list[int]:
    """The columns of the ns from each end to the next start, and from start to end."""
    steps = list(_steps(clock for both in clocks for clock in both))
    return [pool.column(steps[::2]), pool.column(steps[1::2])]


# -- one rank ----------------------------------------------------------------------------------------------------------


def _rank(timeline: Timeline, lane: Lane, pool: Pool, numbers: Mapping[int, int], held: HeldArrays) -> dict[str, Any]:
    """Its arithmetic, its parts in collectives, messages and transfers, its waits, what it held; and their sums."""
    usage = timeline.usage[lane.rank]
    parts = [part for parts in lane.streams.values() for part in parts]
    return {"compute": _computed(timeline.computed(lane.rank), pool),
            "parts": _parts(timeline, parts, pool, numbers),
            "waits": _waits(lane, parts, pool),
            "held": _held(timeline, lane.rank, pool, held),
            "phases": _phases(timeline, lane.rank, pool),
            "waiting": nanoseconds(usage.exposed_seconds),
            "waiting_for_host": nanoseconds(usage.exposed_offload_seconds),
            "peak": memory(timeline, lane.rank).peak_nbytes}


def _computed(events: Sequence[TimelineEvent], pool: Pool) -> list[int]:
    """Stretches of arithmetic in one span that nothing interrupts: the ns before each and in it, span and flops."""
    found = stretches(events)
    clocks = [(nanoseconds(event.start_seconds), nanoseconds(event.end_seconds)) for event in found]
    return [*_apart(clocks, pool), pool.named("/".join(event.path) for event in found),
            pool.column(event.flops for event in found)]


def _phases(timeline: Timeline, rank: int, pool: Pool) -> list[int]:
    """The outermost spans, those of one name in a row as one: the ns from the begin of one to the next, and names."""
    recording, program = timeline.recording, timeline.recording.program(rank)
    clocks, found = timeline.clocks(rank), list[tuple[int, str]]()
    for row in program.where(BEGIN).tolist():
        name, *inside = recording.paths[program.first[row]]
        if not inside and (not found or found[-1][1] != name):
            found.append((nanoseconds(clocks[row]), name))
    return [pool.column(_steps(clock for clock, _ in found)), pool.named(name for _, name in found)]


def _parts(timeline: Timeline, parts: Sequence[StreamPart], pool: Pool, numbers: Mapping[int, int]) -> list[int]:
    """Each part's stream, its call's number (-1: it has none), name, purpose and bytes, the ns from one issue to the
    next, and those from its issue to its begin, to when the last had come, and to its end."""
    events = [timeline.part_event(part) for part in parts]
    clocks = [[nanoseconds(one) for one in (part.issued, part.begun, part.joined, part.ended)] for part in parts]
    return [pool.named(part.stream for part in parts),
            pool.column(-1 if part.call is None else numbers[part.call] for part in parts),
            pool.named(event.name for event in events), pool.named(event.purpose for event in events),
            pool.column(event.nbytes for event in events), pool.column(_steps(issued for issued, *_ in clocks)),
            *(pool.column(of[later] - of[later - 1] for of in clocks) for later in (1, 2, 3))]


def _waits(lane: Lane, parts: Sequence[StreamPart], pool: Pool) -> list[int]:
    """The ns from the end of each wait of the program to the next, in it, and the part that it waits for."""
    places = {id(part): place for place, part in enumerate(parts)}
    rows = [(nanoseconds(start), nanoseconds(end), places[id(part)])
            for start, end, part in zip(lane.reached, lane.resumed, lane.part_at, strict=True)]
    lasting = [row for row in rows if row[1] > row[0]]
    return [*_apart([row[:2] for row in lasting], pool), pool.column(part for *_, part in lasting)]


def _held(timeline: Timeline, rank: int, pool: Pool, start: HeldArrays) -> list[int]:
    """Arrays that enter the memory, and leave it (negative bytes): the ns from one to the next, kind, name and bytes;
    first those that were there."""
    recording, program = timeline.recording, timeline.recording.program(rank)
    rows, clocks = program.where(HELD), timeline.clocks(rank)
    there = [(0, *array) for array, times in start.items() for _ in range(times)]
    columns = (column[rows].tolist() for column in program.columns[1:])
    moved = [(nanoseconds(clocks[row]), recording.words[kind], recording.words[name], nbytes)
             for row, nbytes, kind, name in zip(rows.tolist(), *columns, strict=True)]
    found = [row for row in (*there, *moved) if row[3]]
    return [pool.column(_steps(row[0] for row in found)), pool.named(row[1] for row in found),
            pool.named(row[2] for row in found), pool.column(row[3] for row in found)]


# -- calls, and the messages of each -----------------------------------------------------------------------------------


def _calls(timeline: Timeline, pool: Pool) -> list[int]:
    """Each collective's operation, algorithm, purpose, span, group, bytes of its vector, whether it was issued ahead,
    its messages, which are in the pool, and its number in the recording."""
    rows, priced = [], Collectives(timeline.machine)
    for number, parts in timeline.parts_of_call.items():
        call, lane = timeline.recording.calls[number], timeline.lanes[parts[0].rank]
        rows.append((call, "/".join(timeline.part_event(parts[0]).path), lane.points[parts[0].point][1] == ISSUE,
                     pool.messages[_messages(call, priced)]))
    return [pool.named(call.shape.operation for call, *_ in rows),
            pool.named(call.shape.algorithm for call, *_ in rows),
            pool.named(call.purpose for call, *_ in rows), pool.named(span for _, span, *_ in rows),
            pool.column(pool.column(call.group) for call, *_ in rows),
            pool.column(call.shape.nbytes for call, *_ in rows), pool.column(int(row[2]) for row in rows),
            pool.column(row[3] for row in rows), pool.column(timeline.parts_of_call)]


def _messages(call: RecordedCall, priced: Collectives) -> tuple[Any, ...]:
    """Step by step (source, destination, ns, bytes, chunks, addends of each chunk) of each message, by places in the
    group; without its steps for more ranks than can be looked at."""
    if len(call.group) > MOST_RING_RANKS:
        return ()
    known: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for source, destination, chunks, addends in ring_hops(call.shape.operation, call.shape.algorithm, len(call.group),
                                                          call.shape.root):
        known[source, destination].append((chunks, addends))
    taken, steps = Counter[tuple[int, int]](), []
    by_step = ((level, of_level.nbytes.tolist()) for level, of_level in zip(
        priced.priced(call), levels(call.shape), strict=True) for _ in range(level.times))
    for level, nbytes in by_step:
        step = []
        for (source, destination, seconds), of_message in zip(level.messages, nbytes, strict=True):
            key = source, destination
            chunks, addends = known[key][taken[key]] if taken[key] < len(known[key]) else ((), ())
            taken[key] += 1
            step.append((source, destination, nanoseconds(seconds), of_message, chunks, addends))
        steps.append(tuple(step))
    return tuple(steps)


HopPattern = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # source, destination, chunks, the addends of each


@cache
def ring_hops(operation: str, algorithm: str, ranks: int, root: int = 0) -> tuple[HopPattern, ...]:
    """Every message of a collective of N ranks in its order, from a run of it: which chunks it carries, and whose
    vectors are in each of them.

    Rank r brings 2^r everywhere, so that a value that moves says whose have been added in it. Of an operation that adds
    and gathers nothing the addends are left out.

    >>> for hop in ring_hops("all_gather", "ring", 2):
    ...     print(hop)
    (0, 1, (0,), (1,))
    (1, 0, (1,), (2,))
    """
    program = PROGRAMS.get(operation)
    if program is None or algorithm.startswith("hierarchical"):
        return ()
    found = []
    for call, hop, values in step_through(program, algorithm, root, cluster=Cluster(ranks)):
        assert call is not None, "the program sends nothing of its own"
        addends = tuple(int(value) for value in values.reshape(-1))
        found.append((hop.source, hop.destination, hop.chunks or tuple(range(len(addends))), addends))
    return tuple(found)


def _own(rank: Rank, length: int) -> np.ndarray:
    return np.full(length, 2**rank.index, np.int64)


# One element for each chunk.
PROGRAMS = {
    "reduce_scatter": lambda rank, algorithm, root: rank.reduce_scatter(_own(rank, rank.size), algorithm=algorithm),
    "all_gather": lambda rank, algorithm, root: rank.all_gather(_own(rank, 1), algorithm=algorithm),
    "all_reduce": lambda rank, algorithm, root: rank.all_reduce(_own(rank, rank.size), algorithm=algorithm),
    "broadcast": lambda rank, algorithm, root: rank.broadcast(_own(rank, rank.size), root, algorithm=algorithm),
    "reduce": lambda rank, algorithm, root: rank.reduce(_own(rank, rank.size), root, algorithm=algorithm),
}


def deflated(data: Any) -> bytes:
    """Plain data as the page has it: JSON, deflated."""
    return zlib.compress(json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(), 9)
