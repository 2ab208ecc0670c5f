"""Statements that hold of any timeline."""

from itertools import pairwise

from zerosim.planning.timeline import COMMUNICATION, COMPUTATION, Timeline, critical_path


def check_timeline(timeline: Timeline, *, exact: bool) -> None:
    """All of them; those about sums only of exact timelines, whose seconds are fractions."""
    check_clocks(timeline)
    check_critical_path(timeline, exact=exact)
    if exact:
        check_streams(timeline)


def check_streams(timeline: Timeline) -> None:
    """No stream does two things at once, and each rank's sums close."""
    for rank, (lane, usage) in enumerate(zip(timeline.lanes, timeline.usage, strict=True)):
        events = {stream: [event for event in timeline.events(rank) if event.stream == stream]
                  for stream in timeline.streams}
        for of_stream in events.values():
            assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(of_stream))
            assert all(0 <= event.start_seconds <= event.end_seconds for event in of_stream)
        busy = {stream: sum(event.seconds for event in of_stream) for stream, of_stream in events.items()}
        assert usage.idle_seconds == {stream: timeline.step_seconds - seconds for stream, seconds in busy.items()}
        assert usage.compute_seconds == busy.pop(COMPUTATION)
        assert usage.communication_seconds == busy.pop(COMMUNICATION)
        assert usage.offload_seconds == sum(busy.values())
        assert usage.waited_seconds == sum(event.waited_seconds for event in events[COMMUNICATION])
        assert usage.waited_seconds <= usage.communication_seconds
        assert usage.exposed_offload_seconds <= usage.offload_seconds
        assert lane.end == usage.compute_seconds + usage.exposed_seconds + usage.exposed_offload_seconds


def check_critical_path(timeline: Timeline, *, exact: bool) -> None:
    """It is a chain of events, each starting where and when the one before it ends, as long as the step."""
    path = critical_path(timeline)
    if not path:
        assert timeline.step_seconds == 0
        return
    assert path[0].start_seconds == 0
    assert path[-1].end_seconds == timeline.step_seconds
    assert all(one.end_seconds == other.start_seconds for one, other in pairwise(path))
    assert all(one.rank == other.from_rank for one, other in pairwise(path))
    ends = {(event.rank, event.stream, event.end_seconds) for rank in range(timeline.ranks)
            for event in timeline.events(rank)}
    assert all((event.rank, event.stream, event.end_seconds) in ends for event in path)
    if exact:
        assert sum(event.seconds for event in path) == timeline.step_seconds


def check_clocks(timeline: Timeline) -> None:
    """A program's clock moves where it computes or waits, and nowhere else."""
    for rank, lane in enumerate(timeline.lanes):
        clocks, rows = timeline.clocks(rank), [row for row, _, _ in lane.points]
        assert [clocks[row] for row in rows] == lane.reached
        assert [clocks[row + 1] for row in rows] == lane.resumed
        assert clocks[0] == 0
        assert clocks[-1] == lane.end
        idle = set(range(len(clocks) - 1)) - {*rows} - set(timeline.recording.program(rank).where(0).tolist())
        assert all(clocks[row] == clocks[row + 1] for row in idle)
