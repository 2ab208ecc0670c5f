"""A recording holds what a trace says, survives JSON, and stands for other ranks and for a part of itself."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.planning.exact import exact_replay
from tests.planning.recorded_runs import EVEN, MACHINE, OPTIONS, WORLDS, recorded, step, traces, traces_of
from zerosim.planning import Recording, record
from zerosim.planning import recording as recordings


def spelled_rows(recording: Recording, rank: int) -> list[tuple]:
    """The rows of a rank, spelled out."""
    program, calls, messages = recording.program(rank), recording.calls, recording.messages
    paths, words = recording.paths, recording.words
    spell = (lambda a, b, c: ("Compute", a, b, paths[c]), lambda a, b, c: ("Held", words[b], words[c], a),
             lambda a, b, c: ("Collective", calls[a].shape.operation, calls[a].number, paths[b]),
             lambda a, b, c: ("Issue", calls[a].shape.operation, calls[a].number, paths[b]),
             lambda a, b, c: ("Wait", calls[a].shape.operation, calls[a].number),
             lambda a, b, c: ("Message", messages[a].destination, messages[a].source, messages[a].nbytes, paths[b]),
             lambda a, b, c: ("SpanBegin", paths[a]), lambda a, b, c: ("SpanEnd", paths[a]))
    return [spell[code](*row) for code, *row in zip(*(column.tolist() for column in program.columns), strict=True)]


def spelled(trace: zs.ranks.Trace) -> list[tuple]:
    """The rows of a trace, spelled out in the same way."""
    found, span = [], ()
    for row in trace.rows:
        match name := type(row).__name__:
            case "Compute":
                found.append((name, row.flops, row.nbytes, row.span))
            case "Held":
                found.append((name, row.kind, row.name, row.nbytes))
            case "Collective":
                span = row.span
                if not row.asynchronous:
                    found.append((name, row.call.operation, row.call.number, span))
            case "Issue" | "Wait":
                found.append((name, row.call.operation, row.call.number, *[span] * (name == "Issue")))
            case "Message":
                found.append((name, row.destination, row.source, row.sent_nbytes, row.span))
            case _:
                found.append((name, row.path))
    return found


def odd_program(rank):
    """Messages, groups, arrays that are held before the run and after."""
    half = rank.split(rank.index % 2)
    with rank.trace.span("messages"):
        rank.exchange(np.zeros(rank.index + 1), (rank.index + 1) % rank.size,
                      np.empty((rank.index - 1) % rank.size + 1), (rank.index - 1) % rank.size)
    work = half.all_reduce(np.ones(5, np.float32), async_op=True)
    rank.trace.compute(flops=10 * rank.index, nbytes=3)
    work.wait()
    return rank.memory.alloc(10, np.float32, "workspace", "kept")


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_recording_has_the_rows_of_the_trace_in_their_order(ranks):
    runs = [traces(ranks, *case) for case in covering(range(4), OPTIONS, turn=WORLDS.index(ranks))]
    runs.append(traces_of(ranks, odd_program))
    for found in runs:
        recording = record(found)
        assert [spelled_rows(recording, rank) for rank in range(ranks)] == [spelled(trace) for trace in found]
    assert len(recording.programs) == ranks


def test_a_recording_of_a_second_run_begins_with_what_the_first_has_left():
    cluster = zs.Cluster(2)
    for held in ({}, {"workspace": 40}):
        cluster.run(odd_program)
        assert [dict(record(cluster.trace).program(rank).held_at_start) for rank in range(2)] == [held] * 2


def test_a_saved_recording_is_loaded_and_replayed(tmp_path):
    recording = recorded(3, odd_program)
    path = recordings.save(recording, tmp_path / "run.json")
    assert recordings.load(str(path)) == recording
    assert recordings.load(path) != step(3)
    assert hash(recordings.load(path)) == hash(recording)
    assert exact_replay(recordings.load(path), MACHINE).step_seconds == exact_replay(recording, MACHINE).step_seconds


def test_equal_programs_are_written_once():
    two, eight = (step(ranks, widths=EVEN) for ranks in (2, 8))
    assert len(two.programs) == len(eight.programs) == 1
    assert len(json.dumps(recordings.to_plain(eight))) < 1.2 * len(json.dumps(recordings.to_plain(two)))


def test_inside_a_span_stand_its_rows_and_what_was_held_before_it():
    whole, part = record(traces(3)), step(3)
    rows = spelled_rows(whole, 0)
    low, high = rows.index(("SpanBegin", ("step",))), rows.index(("SpanEnd", ("step",)))
    assert spelled_rows(part, 0) == rows[low + 1:high]
    held = Counter()
    for _, kind, _, nbytes in (row for row in rows[:low] if row[0] == "Held"):
        held[kind] += nbytes
    assert dict(part.program(0).held_at_start) == {kind: nbytes for kind, nbytes in held.items() if nbytes}
    assert "parameter" in held

    def program(rank):
        kept = [rank.memory.alloc(10, np.float32, "workspace")]
        with rank.trace.span("later"):
            kept.append(rank.memory.alloc(20, np.float32, "workspace"))
        return kept

    assert dict(recorded(1, program).inside("later").program(0).held_at_start) == {"workspace": 40}


@pytest.mark.parametrize("ranks", WORLDS)
def test_one_rank_without_data_is_recorded_for_all_as_all_with_data_are(ranks):
    for stage in range(4):
        everyone = record(traces(ranks, stage, widths=EVEN))
        alone = record(traces(ranks, stage, widths=EVEN, cluster=partial(zs.NullCluster, representative=ranks - 1)))
        assert alone.ranks == 1
        assert alone.on_ranks(ranks) == everyone
        assert alone != replace(alone, words=tuple(word + " " for word in alone.words))
