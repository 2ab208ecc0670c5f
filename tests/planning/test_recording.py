"""A recording holds what a trace says, survives JSON, and stands for other ranks and for a part of itself."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

import zerosim as zs
from tests.planning.recorded_runs import EVEN, MACHINE, WORLDS, step, traces
from zerosim.planning import record, replay
from zerosim.planning import recording as recordings


def test_a_saved_recording_is_loaded_and_replayed(tmp_path):
    recording = step(3)
    path = recordings.save(recording, tmp_path / "run.json")
    assert recordings.load(str(path)) == recording != step(2)
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
