"""Memory over time is the ledger at the replay's instants; the Chrome trace is what its format's document asks for."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import zerosim as zs
from tests.planning.recorded_runs import MACHINE, OPTIONS, WORLDS, recorded, step, traces
from zerosim.planning.recording import record
from zerosim.planning.timeline import (
    COMMUNICATION,
    COMPUTATION,
    SlowRank,
    chrome_trace,
    memory,
    nanoseconds,
    replay,
    save_chrome_trace,
)
from zerosim.ranks.trace import Held

# -- memory -------------------------------------------------------------------------------------------------------


def trained(rank):
    engine = zs.Engine(rank, zs.models.MLP((4, 6, 2)), zs.optim.Adam(), stage=3, overlap=True)
    engine.step([(np.ones((2, 4)), np.ones((2, 2)))])
    return engine


@pytest.mark.parametrize("ranks", WORLDS)
def test_memory_over_time_begins_and_ends_where_the_ledger_does_and_peaks_where_it_does(ranks):
    cluster = zs.Cluster(ranks)
    cluster.run(trained)
    for rank, curve in enumerate(memory(replay(record(cluster.trace), MACHINE), rank) for rank in range(ranks)):
        ledger = cluster.memory[rank]
        assert curve.peak_nbytes == ledger.peak_nbytes
        assert {kind: nbytes[-1] for kind, nbytes in curve.nbytes_by_kind.items() if nbytes[-1]} == \
            ledger.now_nbytes_by_kind
        assert {kind: nbytes[0] for kind, nbytes in curve.nbytes_by_kind.items() if nbytes[0]} == {}
        assert np.all(np.diff(curve.seconds) >= 0)


def test_memory_of_a_second_run_begins_with_what_the_first_left():
    cluster = zs.Cluster(2)
    engines = cluster.run(trained)
    resting = cluster.memory[1].now_nbytes_by_kind
    cluster.run(lambda rank: engines[rank.index] and rank.all_reduce(np.ones(50, np.float32)) is None)
    curve = memory(replay(record(cluster.trace), MACHINE), 1)
    assert {kind: nbytes[0] for kind, nbytes in curve.nbytes_by_kind.items() if nbytes[0]} == resting
    assert curve.peak_nbytes > curve.nbytes[0] == sum(resting.values())


def test_memory_changes_when_the_program_comes_to_the_change():
    def program(rank):
        rank.trace.compute(flops=1000)
        held = rank.memory.alloc(10, np.float32, "workspace")
        rank.trace.compute(flops=3000)
        rank.memory.free(held)

    curve = memory(replay(recorded(1, program), MACHINE), 0)
    assert curve.seconds.tolist() == pytest.approx([0, 1e-6, 4e-6])
    assert curve.nbytes.tolist() == [0, 40, 0]
    assert memory(replay(recorded(1, lambda rank: None), MACHINE), 0).peak_nbytes == 0


# -- the Chrome trace ---------------------------------------------------------------------------------------------

def shown(ranks=3, stage=3, options="both"):
    timeline = replay(record(traces(ranks, stage, options)), replace(MACHINE, slow_ranks=[SlowRank(0, 1.7)]))
    return timeline, json.loads(json.dumps(chrome_trace(timeline)))


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_every_entry_has_what_its_phase_needs(ranks, options):
    _, trace = shown(ranks, 3, options)
    assert trace["displayTimeUnit"] == "ms"
    for entry in trace["traceEvents"]:
        assert isinstance(entry["name"], str)
        assert entry["pid"] in range(ranks)
        assert isinstance(entry["tid"], int)
        match entry["ph"]:
            case "X":
                assert all(is_number(entry[key]) and entry[key] >= 0 for key in ("ts", "dur"))
                assert entry["tid"] in (1, 2)
                assert isinstance(entry["args"], dict)
            case "M":
                assert {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
                        "thread_sort_index": "sort_index"}[entry["name"]] in entry["args"]
            case "C":
                assert is_number(entry["ts"])
                assert [is_number(value) for value in entry["args"].values()] == [True]
            case "s" | "f":
                assert is_number(entry["ts"])
                assert isinstance(entry["id"], int)
                assert entry.get("bp") == ("e" if entry["ph"] == "f" else None)
            case phase:
                pytest.fail(f"phase {phase} is none that is written")


def test_every_rank_is_a_named_process_with_two_named_threads():
    _, trace = shown(3)
    names = {(entry["pid"], entry["tid"], entry["name"]): entry["args"].get("name") for entry in trace["traceEvents"]
             if entry["ph"] == "M"}
    for rank in range(3):
        assert names[rank, 0, "process_name"] == f"rank {rank}"
        assert [names[rank, thread, "thread_name"] for thread in (1, 2)] == [COMPUTATION, COMMUNICATION]


@pytest.mark.parametrize("ranks", WORLDS)
def test_slices_of_a_thread_are_nested_or_apart(ranks):
    timeline, trace = shown(ranks)
    threads = defaultdict(list)
    for entry in trace["traceEvents"]:
        if entry["ph"] == "X":
            start = round(entry["ts"] * 1000)
            threads[entry["pid"], entry["tid"]].append((start, start + round(entry["dur"] * 1000)))
    assert max(end for slices in threads.values() for _, end in slices) == nanoseconds(timeline.step_seconds)
    for slices in threads.values():
        assert slices == sorted(slices, key=lambda one: one[0])
        stack = []
        for start, end in slices:  # as a viewer takes them: in the order of the file, where they begin together
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], "one slice begins inside another and ends outside"
            stack.append(end)


def test_slices_are_the_events_the_spans_and_the_waits():
    timeline, trace = shown(3)
    for rank in range(3):
        found = Counter(entry["name"] for entry in trace["traceEvents"] if entry["ph"] == "X" and entry["pid"] == rank)
        expected = Counter(event.name for event in timeline.events(rank))
        expected.update(row.path[-1] for row in traces(3)[rank].rows if type(row).__name__ == "SpanBegin")
        lane = timeline.lanes[rank]
        for (_, code, call), start, end in zip(lane.points, lane.reached, lane.resumed, strict=True):
            operation = timeline.recording.calls[call].shape.operation
            expected.update([f"issue {operation}"] * (code == 3) + [f"wait for {operation}"] * (end > start))
        assert found == expected


def test_arrows_lead_from_slice_to_slice_and_never_backwards():
    _, trace = shown(4)
    slices = defaultdict(list)
    for entry in trace["traceEvents"]:
        if entry["ph"] == "X":
            slices[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    arrows = defaultdict(dict)
    for entry in trace["traceEvents"]:
        if entry["ph"] in "sf":
            assert entry["ph"] not in arrows[entry["id"]]
            assert entry["ph"] == "s" or "s" in arrows[entry["id"]], "the end of an arrow stands before its start"
            arrows[entry["id"]][entry["ph"]] = entry
            assert any(start <= entry["ts"] <= end for start, end in slices[entry["pid"], entry["tid"]])
    assert arrows
    for ends in arrows.values():
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        assert ends["s"]["tid"] != ends["f"]["tid"]
    assert not [entry for entry in shown(4, 3, "plain")[1]["traceEvents"] if entry["ph"] in "sf"]


def test_counters_hold_what_the_ledger_holds():
    timeline, trace = shown(3)
    for rank in range(3):
        last = {}
        for entry in trace["traceEvents"]:
            if entry["ph"] == "C" and entry["pid"] == rank:
                assert last.get(entry["name"], (-1.0, 0))[0] < entry["ts"]
                last[entry["name"]] = entry["ts"], entry["args"]["bytes"]
        total = Counter()
        for row in traces(3)[rank].rows:
            if isinstance(row, Held):
                total[f"held: {row.kind}"] += row.nbytes
        assert {name: nbytes for name, (_, nbytes) in last.items()} == total
    assert memory(timeline, 0).peak_nbytes == max(memory(timeline, rank).peak_nbytes for rank in range(3))


def test_times_are_whole_nanoseconds_written_as_microseconds():
    assert nanoseconds(Fraction(1, 3)) == 333_333_333
    assert nanoseconds(1.5e-9) == 2
    _, trace = shown(2)
    assert all(entry["ts"] == round(entry["ts"], 3) for entry in trace["traceEvents"] if "ts" in entry)


def test_a_file_for_the_viewer_is_written(tmp_path):
    timeline, trace = shown(2)
    path = save_chrome_trace(timeline, tmp_path / "step.json")
    assert json.loads(path.read_text()) == trace
    assert trace["otherData"]["step_seconds"] == timeline.step_seconds
    with pytest.raises(ValueError, match=r"asked to save a timeline as .* but: No such file or directory; name a file"):
        save_chrome_trace(timeline, tmp_path / "no" / "folder.json")


def test_spans_that_are_open_at_the_end_end_there():
    def program(rank):
        with rank.trace.span("outer"), rank.trace.span("inner"):
            rank.trace.compute(flops=1000)

    recording = recorded(1, program)
    cut = recording.program(0).rows(0, 3, {})
    entries = chrome_trace(replay(replace(recording, programs=(cut,)), MACHINE))["traceEvents"]
    assert [(entry["name"], entry["dur"]) for entry in entries if entry["ph"] == "X"] == [
        ("outer", 1.0), ("inner", 1.0), ("compute", 1.0)]


def test_the_span_of_an_event_is_the_rows():
    names = {event.path for event in replay(step(2), MACHINE).events(1)}
    assert ("step", "forward", "layer0") in names
    assert ("step", "backward", "layer2") in names
