"""A recording holds what a trace says, survives JSON, and refuses what it cannot mean."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.planning.exact import exact_replay
from tests.planning.recorded_runs import EVEN, MACHINE, OPTIONS, WORLDS, recorded, step, traces
from zerosim.planning.recording import Recording, from_plain, load, record, save, to_plain
from zerosim.planning.timeline import replay
from zerosim.ranks.cluster import NullCluster
from zerosim.ranks.trace import Collective, Compute, Held, Issue, Message, SpanBegin, SpanEnd, Trace, Wait


def spelled_rows(recording: Recording, rank: int) -> list[tuple]:
    """The rows of a rank, spelled out."""
    program, calls, messages = recording.program(rank), recording.calls, recording.messages
    paths, words = recording.paths, recording.words
    spell = (lambda a, b, c: ("compute", a, b, paths[c]), lambda a, b, c: ("held", words[b], words[c], a),
             lambda a, b, c: ("collective", calls[a].shape.operation, calls[a].number, paths[b]),
             lambda a, b, c: ("issue", calls[a].shape.operation, calls[a].number, paths[b]),
             lambda a, b, c: ("wait", calls[a].shape.operation, calls[a].number),
             lambda a, b, c: ("message", messages[a].destination, messages[a].source, messages[a].nbytes, paths[b]),
             lambda a, b, c: ("begin", paths[a]), lambda a, b, c: ("end", paths[a]))
    columns = (program.codes.tolist(), program.first.tolist(), program.second.tolist(), program.third.tolist())
    return [spell[code](*row) for code, *row in zip(*columns, strict=True)]


def spelled(trace: Trace) -> list[tuple]:
    """The rows of a trace, spelled out in the same way."""
    found, span = [], ()
    for row in trace.rows:
        match row:
            case Compute():
                found.append(("compute", row.flops, row.nbytes, row.span))
            case Held():
                found.append(("held", row.kind, row.name, row.nbytes))
            case Collective():
                span = row.span
                if not row.asynchronous:
                    found.append(("collective", row.call.operation, row.call.number, row.span))
            case Issue():
                found.append(("issue", row.call.operation, row.call.number, span))
            case Wait():
                found.append(("wait", row.call.operation, row.call.number))
            case Message():
                found.append(("message", row.destination, row.source, row.sent_nbytes, row.span))
            case SpanBegin() | SpanEnd():
                found.append(("begin" if isinstance(row, SpanBegin) else "end", row.path))
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
def test_a_recording_tells_the_rows_of_the_trace_in_their_order(ranks):
    for stage, options in covering(range(4), OPTIONS, turn=WORLDS.index(ranks)):
        found = traces(ranks, stage, options)
        recording = record(found)
        assert [spelled_rows(recording, rank) for rank in range(ranks)] == [spelled(trace) for trace in found]
    cluster = zs.Cluster(ranks)
    cluster.run(odd_program)
    recording = record(cluster.trace)
    assert [spelled_rows(recording, rank) for rank in range(ranks)] == [spelled(trace) for trace in cluster.trace]
    assert len(recording.programs) == ranks


def test_a_trace_knows_what_was_held_before_it():
    cluster = zs.Cluster(2)
    cluster.run(odd_program)
    assert [trace.held_at_start for trace in cluster.trace] == [{}, {}]
    cluster.run(odd_program)
    assert [trace.held_at_start for trace in cluster.trace] == [{"workspace": 40}] * 2
    assert [dict(record(cluster.trace).program(rank).held_at_start) for rank in range(2)] == [{"workspace": 40}] * 2


# -- JSON ---------------------------------------------------------------------------------------------------------

@given(ranks=st.sampled_from(WORLDS), stage=st.integers(0, 3), options=st.sampled_from([*OPTIONS]))
def test_json_gives_the_same_recording_back_and_the_same_times(ranks, stage, options):
    recording = record(traces(ranks, stage, options))
    again = from_plain(json.loads(json.dumps(to_plain(recording))))
    assert again == recording
    assert hash(again) == hash(recording)
    assert replay(again, MACHINE).step_seconds == replay(recording, MACHINE).step_seconds


def test_a_saved_recording_is_loaded_and_replayed(tmp_path):
    recording = recorded(3, odd_program)
    path = save(recording, tmp_path / "run.json")
    assert load(str(path)) == recording
    assert load(path) != step(3)
    assert exact_replay(load(path), MACHINE).step_seconds == exact_replay(recording, MACHINE).step_seconds


def test_equal_programs_are_written_once():
    two, eight = (step(ranks, widths=EVEN) for ranks in (2, 8))
    assert len(two.programs) == len(eight.programs) == 1
    assert len(json.dumps(to_plain(eight))) < 1.2 * len(json.dumps(to_plain(two)))


@pytest.mark.parametrize(("change", "message"), [
    ({"format": "other"}, "this is no recording: it lacks \"format\": \"zerosim recording\""),
    ({"version": 2}, "this recording is of version 2, and version 1 can be read"),
    ({"calls": None}, "this recording cannot be read: .* it was changed since"),
    ({"words": []}, r"row 0 points to kind 0, of which there are 0"),
    ({"calls": []}, r"row \d+ points to call 0, of which there are 0"),
    ({"shapes": []}, "this recording cannot be read: list index out of range"),
    ({"paths": []}, r"row \d+ points to path \d+, of which there are 0"),
    ({"program_of_rank": [0, 1]}, r"each with one of its 1 programs, .*; found programs \[0, 1\] in use"),
    ({"program_of_rank": []}, "a recording needs ranks"),
    ({"program_of_rank": [0] * 4}, "rank 3 takes part in a reduce_scatter of ranks 0, 1, 2, and is none of them"),
])
def test_a_changed_recording_is_refused_and_the_change_named(change, message):
    plain = to_plain(record(traces(3, 2, "plain", widths=EVEN))) | change
    with pytest.raises(ValueError, match=message):
        from_plain(plain)


@pytest.mark.parametrize(("change", "message"), [
    ({"rows": "CHX"}, "this recording has rows X, and the letters of rows are CHGIWMBE"),
    ({"rows": "C"}, "a program's columns must be equally long, got 1, "),
    ({"first": ["a"]}, "invalid literal"),
    ({"first": [2**63]}, "this recording cannot be read"),
])
def test_a_changed_program_is_refused(change, message):
    plain = to_plain(recorded(2, odd_program))
    plain["programs"][0] |= change
    with pytest.raises(ValueError, match=message):
        from_plain(plain)


def issue_and_wait(rank):
    rank.all_gather(np.zeros(2), async_op=True).wait()
    rank.exchange(np.zeros(1), (rank.index + 1) % rank.size, np.zeros(1), (rank.index - 1) % rank.size)


@pytest.mark.parametrize(("table", "change", "message"), [
    ("shapes", {"root": None}, "a number of a recorded all_gather must be a whole number, got None"),
    ("shapes", {"itemsize": 10**400}, "a number of a recorded all_gather must be below 2\\^62, got a number of 1329 b"),
    ("shapes", {"algorithm": []}, r"words, paths, purposes and algorithms are texts, found \[\]"),
    ("messages", {0: -1}, "a number of a recorded message must be at least 0, got -1"),
    ("messages", {1: "x"}, "a number of a recorded message must be a whole number, got 'x'"),
    ("messages", {3: 7}, "words, paths, purposes and algorithms are texts, found 7"),
])
def test_a_field_that_is_not_of_its_kind_is_refused_when_it_is_read(table, change, message):
    plain = to_plain(recorded(2, issue_and_wait))
    for key, value in change.items():
        plain[table][0][key] = value
    with pytest.raises(ValueError, match=message):
        from_plain(plain)


def test_a_wait_for_what_was_not_issued_is_refused_when_it_is_read():
    plain = to_plain(recorded(2, issue_and_wait))
    program = plain["programs"][0]
    program["rows"] = program["rows"].replace("I", "G")
    with pytest.raises(ValueError, match=r"row \d+ waits for the all_gather of call 0 that is not issued before"):
        from_plain(plain)


def test_a_message_to_a_rank_that_was_not_recorded_is_waited_for_and_not_an_index_error():
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: rank.exchange(np.zeros(1), 1 - rank.index, np.zeros(1), 1 - rank.index))
    with pytest.raises(ValueError, match="rank 0: waits for a message to rank 1 and from rank 1"):
        replay(record(cluster.trace[:1]), MACHINE)


def test_a_recording_that_is_cut_short_is_refused():
    for key in set(to_plain(step(2))) - {"format", "version"}:
        plain = to_plain(step(2))
        del plain[key]
        with pytest.raises(ValueError, match=f"this recording lacks '{key}'; it is cut short"):
            from_plain(plain)


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file or directory; name a file that save"):
        load(tmp_path / "nothing.json")
    (tmp_path / "text").write_text("no json")
    with pytest.raises(ValueError, match="is no JSON: Expecting value"):
        load(tmp_path / "text")
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ValueError, match="this is no recording"):
        load(tmp_path / "list")
    with pytest.raises(ValueError, match=r"asked to save a recording as .* but: No such file or directory"):
        save(step(2), tmp_path / "no" / "folder")


# -- parts of it --------------------------------------------------------------------------------------------------

def test_inside_a_span_stand_its_rows_and_what_was_held_before_it():
    whole, part = record(traces(3)), step(3)
    rows = spelled_rows(whole, 0)
    low, high = rows.index(("begin", ("step",))), rows.index(("end", ("step",)))
    assert spelled_rows(part, 0) == rows[low + 1:high]
    held = {}
    for row in rows[:low]:
        if row[0] == "held":
            held[row[1]] = held.get(row[1], 0) + row[3]
    assert dict(part.program(0).held_at_start) == {kind: nbytes for kind, nbytes in held.items() if nbytes}
    assert "parameter" in held


def test_a_span_that_is_not_there_once_is_refused():
    with pytest.raises(ValueError, match=r"inside the span 'stride', of which a rank has 0; it must have one. Its "
                                         r"spans are step, forward, "):
        record(traces(2)).inside("stride")
    with pytest.raises(ValueError, match="inside the span 'forward', of which a rank has 6;"):
        record(traces(2)).inside("forward")


def test_a_span_that_waits_for_what_was_issued_before_is_refused():
    def program(rank):
        work = rank.all_reduce(np.ones(3), async_op=True)
        with rank.trace.span("late"):
            work.wait()

    with pytest.raises(ValueError, match="inside the span 'late' a rank waits for the all_reduce of call 0"):
        recorded(2, program).inside("late")


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", WORLDS)
def test_one_rank_without_data_is_recorded_for_all_as_all_with_data_are(ranks, stage):
    everyone = record(traces(ranks, stage, widths=EVEN))
    alone = record(traces(ranks, stage, widths=EVEN, cluster=partial(NullCluster, representative=ranks - 1)))
    assert alone.ranks == 1
    assert alone.on_ranks(ranks) == everyone


def test_one_rank_cannot_stand_for_others_that_do_something_else():
    with pytest.raises(ValueError, match="one rank can stand for 4 only where all do the same, in collectives of all; "
                                         "found a call of ranks 0, 1, 2; record every rank"):
        record(traces(3)[:1]).on_ranks(4)
    with pytest.raises(ValueError, match="found 3 different programs; record every rank"):
        recorded(3, odd_program).on_ranks(3)
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: rank.exchange(np.ones(1), 1 - rank.index, np.empty(1), 1 - rank.index))
    with pytest.raises(ValueError, match="found messages between single ranks; record every rank"):
        record(cluster.trace[:1]).on_ranks(2)


# -- traces that cannot be recorded -------------------------------------------------------------------------------

class Unknown:
    """A row that no trace has."""


def test_rows_of_unknown_classes_are_refused():
    with pytest.raises(ValueError, match="a trace has a row of class Unknown, and a recording knows Compute, Held, Co"):
        record([Trace([Unknown()])])


def test_no_traces_and_numbers_past_64_bits_are_refused():
    with pytest.raises(ValueError, match="a recording needs ranks"):
        record([])
    with pytest.raises(ValueError, match=r"flops or bytes past 2\^63"):
        record([Trace([Compute(2**63, 0, ())])])


def test_traces_of_two_runs_are_refused():
    found = [replace(trace) for trace in (traces(2, 1, "plain")[0], traces(2, 3, "plain")[1])]
    with pytest.raises(ValueError, match=r"two ranks disagree about call 0 of ranks .*; record traces of one run"):
        record(found)
