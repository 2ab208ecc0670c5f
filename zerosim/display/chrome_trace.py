"""A replay as a file of the Trace Event Format, which Perfetto and Chrome's own viewer open.

A process is a rank, a thread a stream. Slices ("X") are spans and what happens in them; counters ("C") are bytes held
by kind; arrows ("s" to "f") lead from the issue of an asynchronous collective or of a transfer to the thing itself,
and from there to where the program waited for it. Times are whole nanoseconds, written as microseconds: what is
nested stays nested.
Source: "Trace Event Format", a document of Chrome's catapult project; Perfetto's documentation, "Chrome JSON".
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerosim.numerics.files import write_or_refuse
from zerosim.planning.recording import BEGIN, COMPUTE, END, ISSUES_OF_WAITS
from zerosim.planning.streams import COMPUTATION, STREAMS, Lane, StreamPart
from zerosim.planning.timeline import Timeline, TimelineEvent, memory

TraceEntry = dict[str, Any]
THREADS = {stream: number for number, stream in enumerate(STREAMS, 1)}
ISSUES = tuple(ISSUES_OF_WAITS.values())


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a JSON object of the Trace Event Format."""
    entries = [entry for lane in timeline.lanes for entry in _entries(timeline, lane)]
    machine = timeline.machine
    links = {"link": machine.network.inside, "between": machine.network.between, "host_link": machine.host_link}
    return {"displayTimeUnit": "ms", "traceEvents": entries,
            "otherData": {"device": machine.device.name, "format": machine.format, "efficiency": machine.efficiency,
                          **{role: link.name for role, link in links.items() if link is not None},
                          "step_seconds": timeline.step_seconds}}


def save_chrome_trace(timeline: Timeline, path: str | Path) -> Path:
    """Writes the timeline to a JSON file for the viewer: all of it, or nothing. ValueError for a path that cannot be
    written."""
    text = json.dumps(chrome_trace(timeline), separators=(",", ":"))
    return write_or_refuse(Path(path), text.encode("utf-8"), "save a timeline as")


def nanoseconds(seconds: float) -> int:
    """To the nearest whole nanosecond."""
    return round(seconds * 1_000_000_000)


def _entries(timeline: Timeline, lane: Lane) -> Iterator[TraceEntry]:
    """All entries of a rank. A viewer takes those of one instant in the order of the file: what lies around something
    else comes before it, and an arrow's start before its end."""
    yield from _names(lane.rank, timeline.streams)
    program = [*_spans(timeline, lane.rank), *_computed(timeline, lane.rank), *_points(timeline, lane)]
    yield from (entry for _, entry in sorted(program, key=lambda one: one[0]))
    for part in lane.all_parts:
        event = timeline.part_event(part)
        yield _slice(lane.rank, event.stream, event.name, part.begun, part.ended, _details(event))
    yield from _arrows(lane)
    yield from _counters(timeline, lane.rank)


def _names(rank: int, streams: Sequence[str]) -> Iterator[TraceEntry]:
    """The names of a rank and its streams in the viewer, and their order there."""
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    for stream in streams:
        common = {"ph": "M", "pid": rank, "tid": THREADS[stream]}
        yield {**common, "name": "thread_name", "args": {"name": stream}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": THREADS[stream]}}


def _slice(rank: int, stream: str, name: str, start: float, end: float, details: TraceEntry) -> TraceEntry:
    began, ended = nanoseconds(start), nanoseconds(end)
    return {"ph": "X", "pid": rank, "tid": THREADS[stream], "name": name, "cat": stream, "ts": began / 1000,
            "dur": (ended - began) / 1000, "args": details}


def _details(event: TimelineEvent) -> TraceEntry:
    if event.stream == COMPUTATION:
        return {"span": "/".join(event.path), "flops": event.flops, "nbytes": event.nbytes}
    return {"span": "/".join(event.path), "purpose": event.purpose, "nbytes": event.nbytes,
            "waited for others (us)": nanoseconds(event.waited_seconds) / 1000}


def _spans(timeline: Timeline, rank: int) -> Iterator[tuple[int, TraceEntry]]:
    """Named stretches of the program, each with the row where it begins; one that is open at the end ends there."""
    recording, program = timeline.recording, timeline.recording.program(rank)
    clocks, begun, found = timeline.clocks(rank), list[int](), list[tuple[int, int]]()
    for row in program.where(BEGIN, END).tolist():
        if program.codes[row] == BEGIN:
            begun.append(row)
        elif begun:
            found.append((begun.pop(), row))
    for start, end in [*found, *((row, len(program)) for row in begun)]:
        path = recording.paths[program.first[start]]
        yield start, _slice(rank, COMPUTATION, path[-1], clocks[start], clocks[end], {"span": "/".join(path)})


def _computed(timeline: Timeline, rank: int) -> Iterator[tuple[int, TraceEntry]]:
    rows = timeline.recording.program(rank).where(COMPUTE).tolist()
    for row, event in zip(rows, timeline.computed(rank), strict=True):
        yield row, _slice(rank, COMPUTATION, event.name, event.start_seconds, event.end_seconds, _details(event))


def _points(timeline: Timeline, lane: Lane) -> Iterator[tuple[int, TraceEntry]]:
    """The program's points on its own thread: issues, and waits that take time; each with its row."""
    for (row, code, _), part, start, end in zip(lane.points, lane.part_at, lane.reached, lane.resumed, strict=True):
        if code in ISSUES or end > start:
            what = "issue" if code in ISSUES else "wait for"
            yield row, _slice(lane.rank, COMPUTATION, f"{what} {timeline.part_event(part).name}", start, end, {})


def _arrows(lane: Lane) -> Iterator[TraceEntry]:
    """From issues to what was issued, and from there to where the program waited for it."""
    for (_, code, _), part, start, end in zip(lane.points, lane.part_at, lane.reached, lane.resumed, strict=True):
        if code in ISSUES:
            yield from _arrow(part, 0, (COMPUTATION, start), (part.stream, part.begun))
        elif code in ISSUES_OF_WAITS and end > start:
            yield from _arrow(part, 1, (part.stream, part.begun), (COMPUTATION, max(start, part.begun)))


def _arrow(part: StreamPart, which: int, source: tuple[str, float],
           target: tuple[str, float]) -> Iterator[TraceEntry]:
    """An arrow from slice to slice, each a stream and an instant in it. Its id is a number, since Perfetto takes texts
    for hexadecimal; "bp": "e" binds its end to the slice around that instant, not to the next."""
    number = (part.rank << 32) + 2 * part.point + which
    for phase, (stream, seconds) in (("s", source), ("f", target)):
        yield {"ph": phase, "id": number, "pid": part.rank, "tid": THREADS[stream], "name": "asynchronous",
               "cat": "flow", "ts": nanoseconds(seconds) / 1000, **({"bp": "e"} if phase == "f" else {})}


def _counters(timeline: Timeline, rank: int) -> Iterator[TraceEntry]:
    """Bytes held by kind whenever they change; of several changes at one nanosecond, the last."""
    curve = memory(timeline, rank)
    at = [nanoseconds(seconds) for seconds in curve.seconds.tolist()]
    last = [after != now for now, after in zip(at, [*at[1:], -1], strict=True)]
    for kind, column in curve.nbytes_by_kind.items():
        shown: int | None = None
        for now, nbytes, is_last in zip(at, column.tolist(), last, strict=True):
            if is_last and nbytes != shown:
                shown = nbytes
                yield {"ph": "C", "pid": rank, "tid": 0, "name": f"held: {kind}", "ts": now / 1000,
                       "args": {"bytes": nbytes}}
