"""A replay gives every rank the times that the traces' own rows and the algorithms' own exchanges give it."""

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.planning.exact import ExactPrices, exact_replay
from tests.planning.naive_replay import Naive
from tests.planning.recorded_runs import (
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
    synchronous,
    traces,
    traces_of,
)
from tests.ranks import asking
from zerosim.planning import (
    Machine,
    Network,
    SlowLink,
    SlowRank,
    ceil_cut,
    cost,
    record,
    replay,
    streams,
    timeline,
)
from zerosim.planning import recording as recordings

TO_HOST, TO_DEVICE = recordings.OFFLOAD
MICROSECOND = Fraction(1, 10**6)
# Two kinds of links, rank 0 slow in all: what it computes from an instant on, and the link by which it hands on.
MACHINES = st.builds(
    lambda flops, memory_rate, efficiency, factor, instant, nodes, link: Machine(
        device(10.0**flops, 10.0**memory_rate), Network(FAST, SLOW, nodes), "fp16", efficiency,
        [SlowRank(0, factor, instant)], [SlowLink(0, 1, link)] if nodes else [], HOST),
    st.integers(8, 10), st.integers(8, 10), st.floats(0.1, 1), st.floats(1, 4), st.floats(0, 1e-4), st.integers(1, 4),
    st.integers(1, 9))


def ends(found):
    return [lane.end for lane in found.lanes]


def slow_machine(ranks):
    """Slow rank, slow link, two nodes: nothing that ranks share."""
    network = Network(FAST, SLOW, max(1, ranks // 2)) if ranks > 1 else Network(FAST)
    slow_links = [SlowLink(0, ranks - 1, 1.75)] if ranks > 1 else []
    return Machine(device(3e8), network, "fp16", 0.7, [SlowRank(ranks - 1, 2.5, 2e-5)], slow_links, HOST)


# -- what holds of any recording on any machine -----------------------------------------------------------------------


def check(traces, machine, seed=0):
    """All of it; returns the replay in fractions."""
    recording = record(traces)
    exact, fast, naive = exact_replay(recording, machine), replay(recording, machine), Naive(traces, machine, seed)
    assert ends(exact) == naive.run()
    assert [(usage.exposed_seconds, usage.exposed_offload_seconds) for usage in exact.usage] == [
        (rank.waited, rank.waited_for_host) for rank in naive.ranks]
    assert ends(fast) == pytest.approx([float(end) for end in ends(exact)], rel=1e-12, abs=1e-18)
    assert all(isinstance(end, float | int) for end in ends(fast))
    for found in (exact, fast):
        check_clocks(found)
        check_critical_path(found, exact=found is exact)
    check_streams(exact, traces)
    assert exact.flops() == sum(row.flops for trace in traces for row in trace.rows if type(row).__name__ == "Compute")
    check_chrome_trace(fast, traces)
    again = recordings.from_plain(json.loads(json.dumps(recordings.to_plain(recording))))
    assert again == recording
    assert hash(again) == hash(recording)
    return exact


def check_clocks(found):
    """A program's clock moves where it computes or waits, and nowhere else."""
    for rank, lane in enumerate(found.lanes):
        clocks, rows = found.clocks(rank), [row for row, _, _ in lane.points]
        assert [clocks[row] for row in rows] == lane.reached
        assert [clocks[row + 1] for row in rows] == lane.resumed
        assert (clocks[0], clocks[-1]) == (0, lane.end)
        idle = set(range(len(clocks) - 1)) - {*rows} - set(found.recording.program(rank).where(0).tolist())
        assert all(clocks[row] == clocks[row + 1] for row in idle)


def check_streams(found, traces):
    """No stream does two things at once, each rank's sums close, and events say of what row of the trace they are."""
    for rank, (lane, usage) in enumerate(zip(found.lanes, found.usage, strict=True)):
        events = {stream: [event for event in found.events(rank) if event.stream == stream]
                  for stream in found.streams}
        assert [event.path for event in events[timeline.COMPUTATION]] == [
            row.span for row in traces[rank].rows if type(row).__name__ == "Compute"]
        assert [(event.name, event.path, event.purpose) for event in events[timeline.COMMUNICATION]] == [
            (row.call.operation if hasattr(row, "call") else "message", row.span, row.purpose)
            for row in traces[rank].messages()]
        for of_stream in events.values():
            assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(of_stream))
            assert all(0 <= event.start_seconds <= event.end_seconds for event in of_stream)
        busy = {stream: sum(event.seconds for event in of_stream) for stream, of_stream in events.items()}
        assert usage.idle_seconds == {stream: found.step_seconds - seconds for stream, seconds in busy.items()}
        assert usage.compute_seconds == busy.pop(timeline.COMPUTATION)
        assert usage.communication_seconds == busy.pop(timeline.COMMUNICATION)
        assert usage.offload_seconds == sum(busy.values())
        assert usage.waited_seconds == sum(event.waited_seconds for event in events[timeline.COMMUNICATION])
        assert usage.waited_seconds <= usage.communication_seconds
        assert usage.exposed_offload_seconds <= usage.offload_seconds
        assert lane.end == usage.compute_seconds + usage.exposed_seconds + usage.exposed_offload_seconds


def check_critical_path(found, *, exact):
    """It is a chain of events, each starting where and when the one before it ends, as long as the step."""
    path = timeline.critical_path(found)
    if not path:
        assert found.step_seconds == 0
        return
    assert (path[0].start_seconds, path[-1].end_seconds) == (0, found.step_seconds)
    assert all(one.end_seconds == other.start_seconds for one, other in pairwise(path))
    assert all(one.rank == other.from_rank for one, other in pairwise(path))
    known = {(event.rank, event.stream, event.end_seconds) for rank in range(found.ranks)
             for event in found.events(rank)}
    assert all((event.rank, event.stream, event.end_seconds) in known for event in path)
    if exact:
        assert sum(event.seconds for event in path) == found.step_seconds
        prices, sizes = ExactPrices(found.machine), {message.nbytes for message in found.recording.messages}
        for event in path:  # a message is entered on the rank for which its other end has waited
            ends = event.from_rank, event.rank
            assert event.name != "message" or ends[0] == ends[1] or event.seconds in {
                prices.message(*pair, nbytes) for pair in (ends, ends[::-1]) for nbytes in sizes}


def check_chrome_trace(found, traces):
    """Slices are nested or apart, and are events, spans and waits; arrows lead from slice to slice, forwards; counters
    add up to what the trace holds."""
    entries = json.loads(json.dumps(timeline.chrome_trace(found)))["traceEvents"]
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in entries if one["name"] == "thread_name"}
    assert [*threads.values()] == [*found.streams] * found.ranks
    slices, arrows, counted, names = defaultdict(list), defaultdict(dict), defaultdict(dict), defaultdict(Counter)
    for entry in entries:
        match entry["ph"]:
            case "X":
                start = round(entry["ts"] * 1000)
                assert entry["ts"] == round(entry["ts"], 3)
                assert entry["dur"] >= 0
                slices[entry["pid"], entry["tid"]].append((start, start + round(entry["dur"] * 1000)))
                names[entry["pid"]][entry["name"]] += 1
            case "s" | "f":
                assert (entry["ph"] == "s") == (not arrows[entry["id"]]), "the end of an arrow stands before its start"
                assert entry.get("bp") == ("e" if entry["ph"] == "f" else None)
                arrows[entry["id"]][entry["ph"]] = entry
            case "C":
                assert counted[entry["pid"]].get(entry["name"], (-1.0, 0))[0] < entry["ts"]
                counted[entry["pid"]][entry["name"]] = entry["ts"], entry["args"]["bytes"]
            case phase:
                assert phase == "M"
                assert entry["pid"] in range(found.ranks)
    for of_thread in slices.values():
        assert of_thread == sorted(of_thread, key=lambda one: one[0])
        stack = []
        for start, end in of_thread:  # as a viewer takes them: in the order of the file, where they begin together
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], "one slice begins inside another and ends outside"
            stack.append(end)
    for pair in arrows.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert pair["s"]["tid"] != pair["f"]["tid"]
        for entry in pair.values():
            assert any(start <= round(entry["ts"] * 1000) <= end for start, end in slices[entry["pid"], entry["tid"]])
    for rank, lane in enumerate(found.lanes):
        expected = Counter(event.name for event in found.events(rank))
        expected.update(row.path[-1] for row in traces[rank].rows if type(row).__name__ == "SpanBegin")
        issued = 0
        for (_, code, _), part, start, end in zip(lane.points, lane.part_at, lane.reached, lane.resumed, strict=True):
            name = found.part_event(part).name
            expected.update([f"issue {name}"] * (code in (3, 8)) + [f"wait for {name}"] * (end > start))
            issued += code in (3, 8)
        assert names[rank] == +expected
        assert issued <= sum(pair["s"]["pid"] == rank for pair in arrows.values()) <= 2 * issued
        held = Counter()
        for row in traces[rank].rows:
            if type(row).__name__ == "Held":
                held[f"held: {row.kind}"] += row.nbytes
        assert {name: nbytes for name, (_, nbytes) in counted[rank].items()} == held


ACTIONS = st.lists(st.one_of(
    st.tuples(st.just("compute"), *(st.lists(st.integers(0, n), min_size=8, max_size=8) for n in (40_000, 6_000))),
    st.tuples(st.sampled_from(asking.ROWS), st.integers(0, 400), st.booleans()),
    st.tuples(st.just("shift"), st.integers(0, 300)),
    st.tuples(st.just("send"), st.integers(0, 7), st.integers(0, 7), st.integers(0, 300)),
    st.tuples(st.just("halves"), st.integers(0, 200)), st.tuples(st.just("wait")), st.tuples(st.just("barrier")),
    st.tuples(st.sampled_from(recordings.OFFLOAD), st.integers(0, 4_000)), st.tuples(st.just("arrive"))), max_size=14)


@given(ranks=st.sampled_from(WORLDS), actions=ACTIONS, machine=MACHINES, seed=st.integers(0, 9),
       few=st.sampled_from((1, streams.FEW_MEMBERS)))
def test_any_program_is_replayed_as_a_naive_replay_does_it(ranks, actions, machine, seed, few):
    if ranks == 1:
        machine = replace(machine, slow_links=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "FEW_MEMBERS", few)
        check(traces_of(ranks, program_of(*actions)), machine, seed)


@pytest.mark.parametrize("ranks", WORLDS)
def test_an_engines_step_is_replayed_so_within_the_bounds_of_its_arithmetic_and_its_communication(ranks):
    cases = covering(range(4), OPTIONS, turn=WORLDS.index(ranks))
    for stage, options, layout in [*((*case, "per_unit") for case in cases), (3, "both", "contiguous")]:
        found = traces(ranks, stage, options, layout)
        check(found, slow_machine(ranks), seed=stage)
        exact = exact_replay(record(found), MACHINE)
        calls = [call for call in exact.recording.calls if 0 in call.group]
        communication = sum(cost.cost(call.shape.operation, call.shape.algorithm, call.shape.cut,
                                      call.shape.wire_itemsize, MACHINE.network).seconds for call in calls)
        arithmetic = sum(max(row.flops, row.nbytes) for row in found[0].rows if type(row).__name__ == "Compute") / 1e9
        least, most = max(arithmetic, communication), arithmetic + communication
        assert least * (1 - 1e-9) <= exact.step_seconds <= most * (1 + 1e-9), (stage, options, layout)
        if options == "plain":
            assert float(exact.step_seconds) == pytest.approx(most, rel=1e-9), (stage, options, layout)
        waiting = exact_replay(synchronous(exact.recording), MACHINE)
        assert all(one <= other for one, other in zip(ends(exact), ends(waiting), strict=True)), "overlap is slower"


# -- by hand, in microseconds ----------------------------------------------------------------------------------------

GATHER = (("all_gather", "ring"), 500)  # of two ranks: 1000 bytes from each, 2 µs
# Ranks, what they do; of each rank its end, the time for which it stood still for its host, and waited for other ranks.
BY_HAND = {
    "a transfer takes its latency and its bytes": (1, [(TO_HOST, 1000), ("arrive",)], [4], [4], [0]),
    "beside arithmetic what is left of it is exposed": (
        1, [(TO_HOST, 1000), ("compute", 1000), ("arrive",)], [4], [3], [0]),
    "transfers of one way wait for each other": (
        1, [(TO_HOST, 1000), (TO_HOST, 1000), ("arrive",), ("arrive",)], [8], [8], [0]),
    "one that nobody waits for lengthens no step": (1, [(TO_DEVICE, 10**6), ("compute", 1000)], [1], [0], [0]),
    "a message of a rank to itself takes no time": (1, [("shift", 100), ("compute", 1000)], [1], [0], [0]),
    "transfers and collectives do not hold each other up": (
        2, [(TO_HOST, 1000), (*GATHER, True), ("compute", 500), ("wait",), ("arrive",)], [4, 4], [2, 2], [0, 0]),
    "in a pipeline messages add up": (
        3, [("compute", [1000, 0, 0]), ("send", 0, 1, 100), ("compute", [0, 1000, 0]), ("send", 1, 2, 100)],
        [2.1, 4.2, 4.2], [0, 0, 0], [0, 1, 3.1]),
    "a rank that is through before others come has waited until it was": (
        3, [("compute", [0, 0, 100_000]), (("broadcast", "naive"), 250, False)], [102, 2, 102], [0] * 3, [100, 2, 0]),
    "a ring ends for all after the last arrival": (
        2, [("compute", [7000, 0]), (*GATHER, False)], [9, 9], [0, 0], [0, 7])}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_step_takes_the_microseconds_that_one_computes_by_hand(case):
    ranks, actions, expected, exposed, waited = BY_HAND[case]
    exact = check(traces_of(ranks, program_of(*actions)), WITH_HOST)
    assert [float(end / MICROSECOND) for end in ends(exact)] == expected
    assert [usage.exposed_offload_seconds / MICROSECOND for usage in exact.usage] == exposed
    assert [float(usage.waited_seconds / MICROSECOND) for usage in exact.usage] == waited


@given(row=st.sampled_from(asking.ROWS), ranks=st.integers(1, 9), elements=st.integers(0, 99),
       ready=st.lists(st.floats(0, 1e-4), min_size=9, max_size=9))
def test_it_is_its_origins_arrival_that_a_member_of_a_collective_waits_for(row, ranks, elements, ready):
    """Had all others come long before, it would end no sooner."""
    ranks, ready = (ranks if asking.allowed(*row, ranks) else 8), ready[:ranks]
    ready += [0.0] * (ranks - len(ready))
    (call,) = recorded(ranks, program_of((row, elements, False))).calls
    collectives = streams.Collectives(streams.Prices(slow_machine(ranks)))
    for member, end in enumerate(collectives.ends(call, ready)):
        origin = collectives.origin(call, ready, member)
        alone = [one if place == origin else -1.0 for place, one in enumerate(ready)]
        assert collectives.ends(call, alone)[member] == pytest.approx(end, rel=1e-9)


@given(row=st.sampled_from(asking.ROWS), ranks=st.integers(2, 9), elements=st.integers(0, 99),
       ready=st.lists(st.floats(-1e-4, 0), min_size=9, max_size=9))
def test_all_messages_of_a_step_at_once_take_as_long_as_one_after_the_other_to_the_last_bit(
        row, ranks, elements, ready):
    ranks = ranks if asking.allowed(*row, ranks) else 8
    (call,) = recorded(ranks, program_of((row, elements, False))).calls
    priced = streams.Collectives(streams.Prices(slow_machine(ranks))).priced(call)
    assert streams.meet_at_once(ready[:ranks], priced) == streams.meet(ready[:ranks], priced)


def test_the_critical_path_follows_messages_from_rank_to_rank_and_goes_through_the_straggler():
    pipeline = program_of(("compute", [1000, 0, 0]), ("send", 0, 1, 100), ("compute", [0, 1000, 0]),
                          ("send", 1, 2, 100), ("compute", [0, 0, 1000]))
    assert [(event.from_rank, event.rank, event.name, event.path, float(event.seconds / MICROSECOND))
            for event in timeline.critical_path(exact_replay(recorded(3, pipeline), MACHINE))] == [
        (0, 0, "compute", ("action 0",), 1), (0, 1, "message", (), 1.1), (1, 1, "compute", ("action 2",), 1),
        (1, 2, "message", (), 1.1), (2, 2, "compute", ("action 4",), 1)]
    # Rank 0 hands on to rank 1, which comes late, while its own neighbor's message is there at once.
    late = program_of(("compute", [0, 5000, 0]), ("shift", 100), ("compute", [9000, 0, 0]))
    assert [(event.from_rank, event.rank, event.name) for event in timeline.critical_path(
        exact_replay(recorded(3, late), MACHINE))] == [(1, 1, "compute"), (1, 0, "message"), (0, 0, "compute")]
    path = timeline.critical_path(replay(step(4), replace(MACHINE, slow_ranks=[SlowRank(2, 50.0)])))
    assert {event.rank for event in path if event.stream == timeline.COMPUTATION} == {2}


def test_overlap_and_prefetch_hide_communication_behind_arithmetic():
    plain, both = (replay(step(4, 3, options), MACHINE) for options in ("plain", "both"))
    assert both.step_seconds < plain.step_seconds
    assert plain.usage[0].hidden_seconds == pytest.approx(0, abs=1e-15)
    assert both.usage[0].hidden_seconds > 0
    assert both.exposed_seconds < plain.exposed_seconds


# -- rings in closed form ---------------------------------------------------------------------------------------------


RINGS = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2}  # times N-1 steps


def ring(operation, chunks, machine=MACHINE, late=None):
    """When each rank ends a ring of fp32 elements, exactly; rank r comes ``late[r]`` flops late."""
    cut = (0, *accumulate(chunks))

    def program(rank):
        rank.trace.compute(flops=late[rank.index] if late else 0)
        asking.ask(rank, operation, "ring", np.zeros(cut[-1], np.float32), cut)

    return ends(exact_replay(recorded(len(chunks), program), machine))


def hops(operation, ranks, elements, link=FAST):
    """A ring of equal chunks: so many hops, one after the other."""
    return RINGS[operation] * (ranks - 1) * (link.alpha + 4 * elements / link.beta)


@given(operation=st.sampled_from([*RINGS]), chunks=st.lists(st.integers(0, 50), min_size=2, max_size=8),
       late=st.lists(st.integers(0, 50_000), min_size=8, max_size=8))
def test_a_ring_is_as_slow_as_its_longest_chunk_at_every_hop_and_equal_chunks_end_for_all_after_the_last_arrival(
        operation, chunks, late):
    ranks, longest, last = len(chunks), max(chunks), Fraction(max(late[:len(chunks)]), 10**9)
    expected = hops(operation, ranks, longest)
    assert max(ring(operation, chunks)) == expected
    assert float(expected) == cost.cost(operation, "ring", (0, *accumulate(chunks)), 4, Network(FAST)).seconds
    assert ring(operation, [longest] * ranks, late=late) == [last + expected] * ranks
    assert cost.curve(operation, "ring", ranks, Network(FAST)).at(0).seconds(Fraction(4 * ranks * longest)) == expected


def test_partial_sums_that_travel_wider_cost_more_on_the_way_there_and_nothing_on_the_way_back():
    exact = exact_replay(recorded(3, lambda rank: rank.all_reduce(np.zeros(12, np.float16), wire="fp32")), MACHINE)
    assert exact.step_seconds == 2 * (FAST.alpha + 4 * 4 / FAST.beta) + 2 * (FAST.alpha + 4 * 2 / FAST.beta)


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


def test_a_calls_messages_are_shown_with_their_times():
    recording = recorded(2, lambda rank: asking.ask(rank, "all_reduce", "ring", np.zeros(5, np.float32), (0, 3, 5)))
    found = [(hop.source, hop.destination, hop.start_seconds, hop.end_seconds)
             for hop in exact_replay(recording, MACHINE).hops(0)]
    long, short = FAST.alpha + 12 / FAST.beta, FAST.alpha + 8 / FAST.beta
    # Rank 1 sends rank 0's long chunk first, rank 0 the short one; then each passes on what it has.
    assert found == [(0, 1, 0, short), (1, 0, 0, long), (0, 1, long, 2 * long), (1, 0, long, long + short)]
    assert recording.calls[0].shape.nbytes == 20


# -- what a timeline comes to ----------------------------------------------------------------------------------------


def test_model_flops_utilization_counts_what_the_model_needs_and_not_what_is_computed_again():
    def run(recompute):
        def program(rank):
            engine = zs.Engine(rank, zs.models.MLP((8,) * 5, seed=1), zs.optim.SGD(lr=0.1), stage=2,
                               recompute=recompute)
            engine.step([(np.ones((2, 8)), np.ones((2, 8)))])
        return replay(recorded(2, program), replace(MACHINE, efficiency=0.4))

    plain, again = run("none"), run("segment(2)")
    assert again.flops() > plain.flops() == plain.flops(recomputed=False) == again.flops(recomputed=False)
    for found in (plain, again):
        peak = 2 * 1e9 * found.step_seconds
        assert found.model_flops_utilization() == pytest.approx(plain.flops() / peak)
        assert found.model_flops_utilization(12345) == pytest.approx(12345 / peak)
        assert found.hardware_flops_utilization() == pytest.approx(found.flops() / peak)
    assert again.model_flops_utilization() < plain.model_flops_utilization() <= 0.4
    assert replay(recorded(1, lambda rank: None), MACHINE).model_flops_utilization() == 0


def test_memory_over_time_begins_and_ends_where_the_memory_does_and_peaks_where_it_does():
    for ranks in WORLDS:
        cluster, before = zs.Cluster(ranks), [{}] * ranks

        def trained(rank):
            engine = zs.Engine(rank, zs.models.MLP((4, 6, 2)), zs.optim.Adam(), stage=3, overlap=True)
            engine.step([(np.ones((2, 4)), np.ones((2, 2)))])
            return engine

        kept = []
        for _ in range(2):  # the second run begins with what the first has left
            kept.append(cluster.run(trained))
            found = replay(record(cluster.trace), MACHINE)
            for rank, curve in enumerate(timeline.memory(found, rank) for rank in range(ranks)):
                memory, kinds, program = cluster.memory[rank], curve.nbytes_by_kind, found.recording.program(rank)
                assert [found.recording.words[name] for name in program.third[program.where(recordings.HELD)]] == [
                    row.name for row in cluster.trace[rank].rows if type(row).__name__ == "Held"]
                assert {kind: nbytes[0] for kind, nbytes in kinds.items() if nbytes[0]} == before[rank]
                assert {kind: nbytes[-1] for kind, nbytes in kinds.items() if nbytes[-1]} == memory.now_nbytes_by_kind
                assert curve.peak_nbytes == memory.peak_nbytes
                assert np.all(np.diff(curve.seconds) >= 0)
            before = cluster.memory.now_nbytes_by_kind


def test_memory_changes_when_the_program_comes_to_the_change():
    def program(rank):
        rank.trace.compute(flops=1000)
        held = rank.memory.alloc(10, np.float32, "workspace")
        rank.trace.compute(flops=3000)
        rank.memory.free(held)

    curve = timeline.memory(replay(recorded(1, program), MACHINE), 0)
    assert curve.seconds.tolist() == pytest.approx([0, 1e-6, 4e-6])
    assert curve.nbytes.tolist() == [0, 40, 0]
    assert timeline.memory(replay(recorded(1, lambda rank: None), MACHINE), 0).peak_nbytes == 0


def test_a_file_for_the_viewer_is_written_and_spans_that_are_open_at_the_end_end_there(tmp_path):
    def program(rank):
        with rank.trace.span("outer"), rank.trace.span("inner"):
            rank.trace.compute(flops=1000)

    recording = recorded(1, program)
    found = replay(replace(recording, programs=(recording.program(0).rows(0, 3, {}),)), WITH_HOST)
    written = json.loads(timeline.save_chrome_trace(found, tmp_path / "step.json").read_text())
    assert written == timeline.chrome_trace(found)
    assert written["otherData"] == {"device": "made up", "format": "fp16", "efficiency": 1.0, "link": "fast",
                                    "host_link": "host", "step_seconds": 1e-6}
    assert [(entry["name"], entry["dur"]) for entry in written["traceEvents"] if entry["ph"] == "X"] == [
        ("outer", 1.0), ("inner", 1.0), ("compute", 1.0)]
    assert timeline.nanoseconds(Fraction(1, 3)) == 333_333_333
    assert timeline.nanoseconds(1.5e-9) == 2


def test_the_engine_records_no_transfers_yet():
    """When it does, README and the docstrings that say so must change."""
    rows = {type(row).__name__ for row in traces(2)[0].rows}
    assert rows.isdisjoint({"Transfer", "TransferWait"})
