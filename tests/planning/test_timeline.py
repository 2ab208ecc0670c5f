"""A replay gives every rank the times that the traces' own rows and the algorithms' own exchanges give it."""

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import chosen, covering
from tests.planning.naive_replay import Naive
from tests.planning.recorded_runs import (
    DISK,
    FAST,
    HOST,
    MACHINE,
    OPTIONS,
    SLOW,
    WITH_HOST,
    WORLDS,
    device,
    program_of,
    recorded,
    step,
    traces,
    traces_of,
)
from tests.ranks import asking
from zerosim.display import chrome_trace
from zerosim.planning import Machine, Network, Slow, ceil_cut, cost, record, replay, streams, timeline
from zerosim.planning import recording as recordings

TO_HOST, *_ = recordings.DIRECTIONS
# Two kinds of links, rank 0 slow in all: what it computes, and the link by which it hands on.
MACHINES = st.builds(
    lambda flops, memory_rate, efficiency, factor, nodes, link: Machine(
        device(10.0**flops, 10.0**memory_rate), Network(FAST, SLOW, nodes), "fp16", efficiency,
        [Slow(0, factor), *[Slow(0, link, to=1)] * bool(nodes)], HOST, DISK),
    st.integers(8, 10), st.integers(8, 10), st.floats(0.1, 1), st.floats(1, 4), st.integers(1, 4), st.integers(1, 9))


def ends(found):
    return [lane.end for lane in found.lanes]


def near(seconds):
    """Equal but for roundings: the oracle has fractions."""
    listed = [*map(float, seconds)] if isinstance(seconds, list) else seconds
    return pytest.approx(listed, rel=1e-12, abs=1e-15)


def slow_machine(ranks):
    """Slow rank, slow link, two nodes: nothing that ranks share."""
    network = Network(FAST, SLOW, max(1, ranks // 2)) if ranks > 1 else Network(FAST)
    slow = [Slow(ranks - 1, 2.5), *[Slow(0, 1.75, to=ranks - 1)] * (ranks > 1)]
    return Machine(device(3e8), network, "fp16", 0.7, slow, HOST, DISK)


# -- what holds of any recording on any machine -----------------------------------------------------------------------


def check(traces, machine):
    """All of it; returns the replay."""
    recording, naive = record(traces), Naive(traces, machine)
    found = replay(recording, machine)
    assert ends(found) == near(naive.ends)
    assert [usage.exposed_seconds for usage in found.usage] == near(naive.waited)
    assert [usage.exposed_offload_seconds for usage in found.usage] == near(naive.waited_for_host)
    assert all(isinstance(end, float | int) for end in ends(found))
    for rank, trace in enumerate(traces):
        check_rank(found, rank, trace)
    check_critical_path(found)
    check_chrome_trace(found, traces)
    again = recordings.from_plain(json.loads(json.dumps(recordings.to_plain(recording))))
    assert again == recording
    assert hash(again) == hash(recording)
    return found


def check_rank(found, rank, trace):
    """A clock moves where the program computes or waits, no stream does two things at once, sums close, events say of
    what row of the trace they are, and its memory is what it held."""
    lane, usage, clocks = found.lanes[rank], found.usage[rank], found.clocks(rank)
    rows = [row for row, _, _ in lane.points]
    assert [clocks[row] for row in rows] == lane.reached
    assert [clocks[row + 1] for row in rows] == lane.resumed
    assert (clocks[0], clocks[-1]) == (0, lane.end)
    idle = set(range(len(clocks) - 1)) - {*rows} - set(found.recording.program(rank).where(0).tolist())
    assert all(clocks[row] == clocks[row + 1] for row in idle)
    events = {stream: [event for event in found.events(rank) if event.stream == stream] for stream in found.streams}
    assert [event.path for event in events[timeline.COMPUTATION]] == [
        row.span for row in trace.rows if type(row).__name__ == "Compute"]
    assert [(event.name, event.path, event.purpose) for event in events[timeline.COMMUNICATION]] == [
        (row.call.operation if hasattr(row, "call") else "message", row.span, row.purpose) for row in trace.messages()]
    for of_stream in events.values():
        assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(of_stream))
        assert all(0 <= event.start_seconds <= event.end_seconds for event in of_stream)
    busy = {stream: sum(event.seconds for event in of_stream) for stream, of_stream in events.items()}
    assert usage.compute_seconds == near(busy.pop(timeline.COMPUTATION))
    assert usage.communication_seconds == near(busy.pop(timeline.COMMUNICATION))
    assert usage.offload_seconds == near(sum(busy.values()))
    assert usage.waited_seconds == near(sum(event.waited_seconds for event in events[timeline.COMMUNICATION]))
    assert all(0 <= event.waited_seconds <= event.seconds for event in events[timeline.COMMUNICATION])
    assert lane.end == near(usage.compute_seconds + usage.exposed_seconds + usage.exposed_offload_seconds)
    curve, held = timeline.memory(found, rank), Counter(trace.held_at_start)
    for place, row in enumerate([row for row in trace.rows if type(row).__name__ == "Held"], start=1):
        held[row.kind] += row.nbytes
        assert {kind: nbytes[place] for kind, nbytes in curve.nbytes_by_kind.items() if nbytes[place]} == +held
        assert curve.seconds[place] >= curve.seconds[place - 1]
    assert curve.nbytes[0] == sum(trace.held_at_start.values())
    assert curve.nbytes[-1] == held.total()


def check_critical_path(found):
    """It is a chain of events, each starting where and when the one before it ends, as long as the step."""
    path = timeline.critical_path(found)
    if not path:
        assert found.step_seconds == 0
        return
    assert (path[0].start_seconds, path[-1].end_seconds) == (0, found.step_seconds)
    assert all(one.end_seconds == other.start_seconds for one, other in pairwise(path))
    assert all(one.rank == other.from_rank for one, other in pairwise(path))
    assert all(event.seconds > 0 for event in path)
    known = {(event.rank, event.stream, event.end_seconds) for rank in range(found.ranks)
             for event in found.events(rank)}
    assert all((event.rank, event.stream, event.end_seconds) in known for event in path)


def check_chrome_trace(found, traces):
    """Slices are nested or apart, and are events, spans and waits; arrows lead from slice to slice, forwards; counters
    add up to what the trace holds."""
    slices, names, counted, entries = defaultdict(list), defaultdict(Counter), defaultdict(dict), defaultdict(list)
    for entry in json.loads(json.dumps(chrome_trace.chrome_trace(found)))["traceEvents"]:
        entries[entry["ph"]].append(entry)
    assert [entry["args"]["name"] for entry in entries.pop("M") if entry["name"] == "thread_name"] == [
        *found.streams] * found.ranks
    for entry in entries.pop("X", []):
        start, duration = round(entry["ts"] * 1000), round(entry["dur"] * 1000)  # whole nanoseconds
        slices[entry["pid"], entry["tid"]].append((start, start + duration))
        names[entry["pid"]][entry["name"]] += 1
    for of_thread in slices.values():
        assert of_thread == sorted(of_thread, key=lambda one: one[0])
        stack = []
        for start, end in of_thread:  # as a viewer takes them: in the order of the file, where they begin together
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or start <= end <= stack[-1], "one slice begins inside another and ends outside"
            stack.append(end)
    arrows, issued = [*zip(entries.pop("s", []), entries.pop("f", []), strict=True)], 0
    for pair in arrows:
        assert (pair[0]["id"], pair[1]["bp"]) == (pair[1]["id"], "e")
        assert pair[0]["ts"] <= pair[1]["ts"]
        assert pair[0]["tid"] != pair[1]["tid"]
        for entry in pair:
            assert any(start <= round(entry["ts"] * 1000) <= end for start, end in slices[entry["pid"], entry["tid"]])
    assert len({start["id"] for start, _ in arrows}) == len(arrows)
    for entry in entries.pop("C", []):
        assert counted[entry["pid"]].get(entry["name"], (-1.0, 0))[0] < entry["ts"]
        counted[entry["pid"]][entry["name"]] = entry["ts"], entry["args"]["bytes"]
    assert not entries
    for rank, lane in enumerate(found.lanes):
        expected = Counter(event.name for event in found.events(rank))
        expected.update(row.path[-1] for row in traces[rank].rows if type(row).__name__ == "SpanBegin")
        for (_, code, _), part, start, end in zip(lane.points, lane.part_at, lane.reached, lane.resumed, strict=True):
            name = found.part_event(part).name
            expected.update([f"issue {name}"] * (code in chrome_trace.ISSUES) + [f"wait for {name}"] * (end > start))
            issued += code in chrome_trace.ISSUES
        assert names[rank] == +expected
        held = {f"held: {kind}": nbytes[-1] for kind, nbytes in timeline.memory(found, rank).nbytes_by_kind.items()}
        assert {name: nbytes for name, (_, nbytes) in counted[rank].items()} == held
    assert issued <= len(arrows) <= 2 * issued


ACTIONS = st.lists(st.one_of(
    st.tuples(st.just("compute"), *(st.lists(st.integers(0, n), min_size=8, max_size=8) for n in (40_000, 6_000))),
    st.tuples(st.sampled_from(asking.ROWS), st.integers(0, 400), st.booleans()),
    st.tuples(st.just("shift"), st.integers(0, 300)),
    st.tuples(st.just("send"), st.integers(0, 7), st.integers(0, 7), st.integers(0, 300)),
    st.tuples(st.just("halves"), st.integers(0, 200)), st.tuples(st.just("wait")), st.tuples(st.just("barrier")),
    st.tuples(st.sampled_from(recordings.DIRECTIONS), st.integers(0, 4_000)), st.tuples(st.just("arrive"))),
    max_size=14)


@example(ranks=4, actions=[("halves", 200)], machine=replace(MACHINE, network=Network(FAST, SLOW, 3)))
@given(ranks=st.sampled_from(WORLDS), actions=ACTIONS, machine=MACHINES)
def test_any_program_is_replayed_as_a_naive_replay_does_it(ranks, actions, machine):
    if ranks == 1:
        machine = replace(machine, slow=machine.slow[:1])
    check(traces_of(ranks, program_of(*actions)), machine)


@pytest.mark.parametrize("ranks", WORLDS)
def test_an_engines_step_is_replayed_so_within_the_bounds_of_its_arithmetic_and_its_communication(ranks):
    """Of what covers stages and options a half in each world; thorough: every stage with every option."""
    cases = covering(range(4), OPTIONS, turn=WORLDS.index(ranks))
    for stage, options, layout in [*((*case, "per_unit") for case in chosen(cases[:2], cases)),
                                   (3, "both", "contiguous")]:
        found = traces(ranks, stage, options, layout, cluster=zs.NullCluster)
        check(found, slow_machine(ranks))
        timed = replay(record(found), MACHINE)
        calls = [call for call in timed.recording.calls if 0 in call.group]
        communication = sum(cost.cost(call.shape.operation, call.shape.algorithm, call.shape.cut,
                                      call.shape.wire_itemsize, MACHINE.network).seconds for call in calls)
        arithmetic = sum(max(row.flops, row.nbytes) for row in found[0].rows if type(row).__name__ == "Compute") / 1e9
        least, most = max(arithmetic, communication), arithmetic + communication
        assert least * (1 - 1e-9) <= timed.step_seconds <= most * (1 + 1e-9), (stage, options, layout)
        if options == "plain":
            assert timed.step_seconds == pytest.approx(most, rel=1e-9), (stage, options, layout)


# -- by hand, in microseconds ----------------------------------------------------------------------------------------

GATHER = (("all_gather", "ring"), 500)  # of two ranks: 1000 bytes from each, 2 µs
# Ranks, what they do; of each rank its end, the time for which it stood still for its host, and waited for other ranks.
BY_HAND = {
    "beside arithmetic what is left of it is exposed": (
        1, [(TO_HOST, 1000), ("compute", 1000), ("arrive",)], [4], [3], [0]),
    "a message of a rank to itself takes no time": (1, [("shift", 100), ("compute", 1000)], [1], [0], [0]),
    "transfers the same way follow each other": (
        1, [(TO_HOST, 1000), (TO_HOST, 1000), ("arrive",), ("arrive",)], [8], [8], [0]),
    "an exchange has waited until the later of two others came": (
        3, [("compute", [0, 7000, 0]), ("shift", 100)], [8.4, 8.404, 8.404], [0] * 3, [7, 0, 7]),
    "transfers and collectives do not hold each other up": (
        2, [(TO_HOST, 1000), (*GATHER, True), ("compute", 500), ("wait",), ("arrive",)], [4, 4], [2, 2], [0, 0]),
    "in a pipeline messages add up": (
        3, [("compute", [1000, 0, 0]), ("send", 0, 1, 100), ("compute", [0, 1000, 0]), ("send", 1, 2, 100)],
        [2.1, 4.2, 4.2], [0, 0, 0], [0, 1, 3.1]),
    "a rank that is through before others come has waited until it was": (
        3, [("compute", [0, 0, 100_000]), (("broadcast", "naive"), 250, False), ("compute", [0, 100_000, 0]),
            (("broadcast", "naive"), 250, False)], [106, 104, 106], [0] * 3, [100, 2, 0]),
    "a ring ends for all after the last arrival": (
        2, [("compute", [7000, 0]), (*GATHER, False)], [9, 9], [0, 0], [0, 7])}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_step_takes_the_microseconds_that_one_computes_by_hand(case):
    ranks, actions, expected, exposed, waited = BY_HAND[case]
    found = check(traces_of(ranks, program_of(*actions)), WITH_HOST)
    assert [end * 1e6 for end in ends(found)] == near(expected)
    assert [usage.exposed_offload_seconds * 1e6 for usage in found.usage] == near(exposed)
    assert [usage.waited_seconds * 1e6 for usage in found.usage] == near(waited)


@given(row=st.sampled_from(asking.ROWS), ranks=st.integers(1, 9), elements=st.integers(0, 99),
       ready=st.lists(st.floats(0, 1e-4), min_size=9, max_size=9))
def test_it_is_its_origins_arrival_that_a_member_of_a_collective_waits_for(row, ranks, elements, ready):
    """Had all others come long before, it would end no sooner."""
    ranks, ready = (ranks if asking.allowed(*row, ranks) else 8), ready[:ranks]
    ready += [0.0] * (ranks - len(ready))
    (call,) = recorded(ranks, program_of((row, elements, False))).calls
    collectives = streams.Collectives(slow_machine(ranks))
    for member, end in enumerate(collectives.ends(call, ready)):
        origin = collectives.origin(call, ready, member)
        alone = [one if place == origin else -1.0 for place, one in enumerate(ready)]
        assert collectives.ends(call, alone)[member] == pytest.approx(end, rel=1e-9)


def test_the_critical_path_follows_messages_from_rank_to_rank_and_goes_through_the_straggler():
    pipeline = program_of(("compute", [1000, 0, 0]), ("send", 0, 1, 100), ("compute", [0, 1000, 0]),
                          ("send", 1, 2, 100), ("compute", [0, 0, 1000]))
    assert [(event.from_rank, event.rank, event.name, event.path, round(event.seconds * 1e6, 9))
            for event in timeline.critical_path(replay(recorded(3, pipeline), MACHINE))] == [
        (0, 0, "compute", ("action 0",), 1), (0, 1, "message", (), 1.1), (1, 1, "compute", ("action 2",), 1),
        (1, 2, "message", (), 1.1), (2, 2, "compute", ("action 4",), 1)]
    # Rank 0 hands on to rank 1, which comes late, while its own neighbor's message is there at once.
    late = program_of(("compute", [0, 5000, 0]), ("shift", 100), ("compute", [9000, 0, 0]))
    assert [(event.from_rank, event.rank, event.name) for event in timeline.critical_path(
        replay(recorded(3, late), MACHINE))] == [(1, 1, "compute"), (1, 0, "message"), (0, 0, "compute")]
    # Rank 1 is not held up by rank 0, which sends early and waits.
    early = program_of(("compute", [0, 5000, 0]), ("send", 0, 1, 100), ("compute", [0, 100, 0]))
    assert [(event.from_rank, event.rank, event.name) for event in timeline.critical_path(
        replay(recorded(3, early), MACHINE))] == [(1, 1, "compute"), (1, 1, "message"), (1, 1, "compute")]
    at_once = replay(recorded(3, lambda rank: rank.all_reduce(np.zeros(3))), MACHINE)
    assert timeline.critical_path(at_once)[-1].rank == 0
    path = timeline.critical_path(replay(step(4), replace(MACHINE, slow=[Slow(2, 50.0)])))
    assert {event.rank for event in path if event.stream == timeline.COMPUTATION} == {2}


def test_what_is_waited_for_before_it_begins_is_replayed_and_shown_too():
    def program(rank):
        works = [rank.all_reduce(np.zeros(9), async_op=True) for _ in range(2)]
        works[1].wait()
        works[0].wait()

    check(traces_of(2, program), MACHINE)


def test_overlap_and_prefetch_hide_communication_behind_arithmetic():
    plain, both = (replay(step(4, 3, options), MACHINE) for options in ("plain", "both"))
    assert both.step_seconds < plain.step_seconds
    hidden = [one.usage[0].communication_seconds - one.usage[0].exposed_seconds for one in (both, plain)]
    assert hidden[0] > hidden[1] == near(0)


# -- collectives in closed form ---------------------------------------------------------------------------------------


@given(operation=st.sampled_from(["reduce_scatter", "all_gather", "all_reduce"]),
       chunks=st.lists(st.integers(0, 50), min_size=2, max_size=8),
       late=st.lists(st.integers(0, 50_000), min_size=8, max_size=8))
def test_a_ring_is_as_slow_as_its_longest_chunk_at_every_hop_and_equal_chunks_end_for_all_after_the_last_arrival(
        operation, chunks, late):
    def ring(chunks, late):
        """When each rank ends a ring of fp32 elements; rank r comes ``late[r]`` flops late."""
        cut = (0, *accumulate(chunks))

        def program(rank):
            rank.trace.compute(flops=late[rank.index])
            asking.ask(rank, operation, "ring", np.zeros(cut[-1], np.float32), cut)

        return ends(replay(recorded(len(chunks), program), MACHINE))

    ranks, hop = len(chunks), FAST.alpha + 4 * max(chunks) / FAST.beta
    expected = float((2 if operation == "all_reduce" else 1) * (ranks - 1) * hop)
    assert max(ring(chunks, [0] * ranks)) == near(expected)
    assert cost.cost(operation, "ring", (0, *accumulate(chunks)), 4, Network(FAST)).seconds == near(expected)
    assert ring([max(chunks)] * ranks, late) == near([max(late[:ranks]) / 1e9 + expected] * ranks)


def test_partial_sums_that_travel_wider_cost_more_on_the_way_there_and_nothing_on_the_way_back():
    found = replay(recorded(3, lambda rank: rank.all_reduce(np.zeros(12, np.float16), wire="fp32")), MACHINE)
    assert found.step_seconds == near(2 * (1e-6 + 4 * 4e-9) + 2 * (1e-6 + 4 * 2e-9))


def test_no_rank_of_any_algorithm_ends_later_than_its_cost_and_on_one_kind_of_link_the_last_ends_then():
    for (operation, algorithm), ranks in itertools.product([*asking.ROWS, ("barrier", "dissemination")], WORLDS):
        if asking.allowed(operation, algorithm, ranks):
            barrier = operation == "barrier"
            cut, row = ceil_cut(0 if barrier else 16 * ranks, ranks), (operation, algorithm)
            recording = recorded(ranks, program_of(("barrier",) if barrier else (row, cut[-1], False)))
            for network in (Network(FAST), Network(FAST, SLOW, max(1, ranks // 2))):
                found = replay(recording, replace(MACHINE, network=network)).step_seconds
                expected = cost.cost(*row, cut, 1 if barrier else 4, network).seconds
                assert found <= expected * (1 + 1e-12), (row, ranks)
                assert network.between or found == pytest.approx(expected, rel=1e-12), (row, ranks)


# -- what a timeline comes to ----------------------------------------------------------------------------------------


def test_memory_changes_when_the_program_comes_to_the_change():
    def program(rank):
        rank.trace.compute(flops=1000)
        held = rank.memory.alloc(10, np.float32, "workspace")
        rank.trace.compute(flops=3000)
        rank.memory.free(held)
        return rank.memory.alloc(5, np.float32, "workspace")

    cluster, kept = zs.Cluster(1), []
    for before in (0, 20):  # the second run begins with what the first has left
        kept.append(cluster.run(program))
        curve = timeline.memory(replay(record(cluster.trace), MACHINE), 0)
        assert curve.seconds.tolist() == near([0, 1e-6, 4e-6, 4e-6])
        assert curve.nbytes.tolist() == [before, before + 40, before, before + 20]
        assert curve.peak_nbytes == before + 40
    assert timeline.memory(replay(recorded(1, lambda rank: None), MACHINE), 0).peak_nbytes == 0


def test_a_file_for_the_viewer_is_written_and_spans_that_are_open_at_the_end_end_there(tmp_path):
    def program(rank):
        with rank.trace.span("outer"):
            for number in (1, 2):
                with rank.trace.span(f"inner {number}"):
                    rank.trace.compute(flops=1000 * number)

    recording = recorded(1, program)
    found = replay(replace(recording, programs=(recording.program(0).rows(0, 6, {}),)), WITH_HOST)
    written = json.loads(found.save_chrome_trace(tmp_path / "step.json").read_text())
    assert written == chrome_trace.chrome_trace(found)
    assert written["otherData"] == {"device": "made up", "format": "fp16", "efficiency": 1.0, "link": "fast",
                                    "host_link": "host", "step_seconds": 3e-6}
    assert [(entry["name"], entry["dur"]) for entry in written["traceEvents"] if entry["ph"] == "X"] == [
        ("outer", 3.0), ("inner 1", 1.0), ("compute", 1.0), ("inner 2", 2.0), ("compute", 2.0)]
    assert chrome_trace.nanoseconds(Fraction(1, 3)) == 333_333_333
    assert chrome_trace.nanoseconds(1.5e-9) == 2
