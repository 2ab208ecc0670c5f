"""A recording holds what a trace says, survives JSON, and stands for other ranks and for a part of itself."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import zerosim as zs
from tests.planning.recorded_runs import EVEN, MACHINE, WORLDS, recorded, step, traces
from zerosim.planning import record, replay
from zerosim.planning import recording as recordings


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
    assert replay(recordings.load(path), MACHINE).step_seconds == replay(recording, MACHINE).step_seconds


def test_equal_programs_are_written_once():
    two, eight = (step(ranks, widths=EVEN) for ranks in (2, 8))
    assert len(two.programs) == len(eight.programs) == 1
    assert len(json.dumps(recordings.to_plain(eight))) < 1.2 * len(json.dumps(recordings.to_plain(two)))


def test_inside_a_span_stand_its_rows_and_what_was_held_before_it():
    whole, part = record(traces(3)), step(3).program(0)
    rows = whole.program(0)
    low, high = (row for row in rows.where(recordings.BEGIN, recordings.END).tolist()
                 if whole.paths[rows.first[row]] == ("step",))
    assert part == rows.rows(low + 1, high, part.held_at_start)
    held = Counter()
    for row in traces(3)[0].rows[:low]:
        if type(row).__name__ == "Held":
            held[row.kind] += row.nbytes
    assert dict(part.held_at_start) == +held
    assert "parameter" in held


@pytest.mark.parametrize("ranks", WORLDS)
def test_one_rank_without_data_is_recorded_for_all_as_all_with_data_are(ranks):
    for stage in range(4):
        everyone = record(traces(ranks, stage, widths=EVEN))
        alone = record(traces(ranks, stage, widths=EVEN, cluster=partial(zs.NullCluster, representative=ranks - 1)))
        assert alone.ranks == 1
        assert alone.on_ranks(ranks) == everyone
        assert alone != replace(alone, words=tuple(word + " " for word in alone.words))
