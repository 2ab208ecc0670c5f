"""Transfers between devices and hosts in a replay: recordings made by hand, since the engine has no offload yet.

A flop takes 1 ns; a transfer 2 µs and 2 ns for each byte; a message 1 µs and 1 ns for each byte.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.planning.exact import exact_replay
from tests.planning.invariants import check_timeline
from tests.planning.recorded_runs import MACHINE, recorded
from zerosim.planning.hardware import Link, link
from zerosim.planning.recording import OFFLOAD, from_plain, to_plain
from zerosim.planning.recording import Transfer as Moved
from zerosim.planning.streams import STREAMS
from zerosim.planning.timeline import COMMUNICATION, COMPUTATION, SlowRank, chrome_trace, critical_path, replay

TO_HOST, TO_DEVICE = OFFLOAD
HOST = Link("host", 5e8, 2e-6, "made up", "today")
WITH_HOST = replace(MACHINE, host_link=HOST)
MICROSECOND = Fraction(1, 10**6)


@dataclass
class Transfer:
    """A row of a trace: something goes to the host or comes from it, beside the program."""

    transfer: Moved
    span: tuple[str, ...]


@dataclass
class TransferWait:
    """A row of a trace: the program goes on when the transfer is through."""

    transfer: Moved


def move(rank, direction, nbytes, kind="gradient"):
    """Notes a transfer in the rank's trace; returns what to wait for."""
    number = sum(isinstance(row, Transfer) for row in rank.trace.rows)
    moved = Moved(direction, kind, nbytes, number)
    rank.trace.rows.append(Transfer(moved, rank.trace.path))
    return moved


def arrive(rank, moved):
    """Notes that the rank's program waits for it."""
    rank.trace.rows.append(TransferWait(moved))


def microseconds(program, ranks=1, machine=WITH_HOST):
    """The timeline of a program that is made by hand, exactly; and its step in microseconds."""
    timeline = exact_replay(recorded(ranks, program), machine)
    return timeline, timeline.step_seconds / MICROSECOND


# -- single steps, computed by hand -----------------------------------------------------------------------------------


def test_a_transfer_that_is_waited_for_at_once_takes_its_latency_and_its_bytes():
    timeline, step = microseconds(lambda rank: arrive(rank, move(rank, TO_HOST, 1000)))
    assert step == 4
    (usage,) = timeline.usage
    assert (usage.offload_seconds, usage.exposed_offload_seconds) == (4 * MICROSECOND, 4 * MICROSECOND)
    assert (usage.compute_seconds, usage.communication_seconds, usage.exposed_seconds) == (0, 0, 0)


def test_a_transfer_goes_on_beside_arithmetic_and_what_is_left_of_it_is_exposed():
    def program(rank, flops):
        moved = move(rank, TO_HOST, 1000)
        rank.trace.compute(flops=flops)
        arrive(rank, moved)

    for flops, step, exposed in ((1000, 4, 3), (4000, 4, 0), (9000, 9, 0)):
        timeline, found = microseconds(lambda rank, flops=flops: program(rank, flops))
        assert (found, timeline.exposed_offload_seconds / MICROSECOND) == (step, exposed)
        assert timeline.usage[0].idle_seconds[TO_HOST] / MICROSECOND == step - 4


def test_transfers_of_one_way_wait_for_each_other_and_of_both_ways_do_not():
    def program(rank, second):
        moved = move(rank, TO_HOST, 1000), move(rank, second, 1000)
        for one in moved:
            arrive(rank, one)

    assert microseconds(lambda rank: program(rank, TO_HOST))[1] == 8
    assert microseconds(lambda rank: program(rank, TO_DEVICE))[1] == 4


def test_transfers_and_collectives_do_not_hold_each_other_up():
    def program(rank):
        moved = move(rank, TO_HOST, 1000)
        work = rank.all_gather(np.zeros(1000, np.uint8), length=2000, async_op=True)
        rank.trace.compute(flops=500)
        work.wait()
        arrive(rank, moved)

    timeline, step = microseconds(program, ranks=2)
    assert step == 4
    for usage in timeline.usage:
        assert usage.communication_seconds == 2 * MICROSECOND
        assert usage.exposed_seconds == Fraction(3, 2) * MICROSECOND
        assert usage.exposed_offload_seconds == 2 * MICROSECOND
        assert usage.compute_seconds == MICROSECOND / 2


def test_a_transfer_that_nobody_waits_for_lengthens_no_step():
    def program(rank):
        move(rank, TO_DEVICE, 10**6)
        rank.trace.compute(flops=1000)

    assert microseconds(program)[1] == 1


def test_a_rank_that_waits_for_its_host_is_waited_for_in_the_next_collective():
    def program(rank):
        if rank.index == 1:
            arrive(rank, move(rank, TO_DEVICE, 1000, "parameter"))
        rank.all_gather(np.zeros(1000, np.uint8), length=2000)

    timeline, step = microseconds(program, ranks=2)
    assert step == 4 + 2
    assert timeline.usage[0].waited_seconds == 4 * MICROSECOND
    assert [(event.stream, event.rank, event.name) for event in critical_path(timeline)] == [
        (TO_DEVICE, 1, "parameter to device"), (COMMUNICATION, 0, "all_gather")]


# -- what must hold of any program ------------------------------------------------------------------------------------

ACTIONS = st.lists(st.one_of(st.tuples(st.just("compute"), st.integers(0, 9_000)),
                             st.tuples(st.sampled_from(OFFLOAD), st.integers(0, 4_000)),
                             st.tuples(st.just("wait"), st.integers(0, 3)),
                             st.tuples(st.just("reduce"), st.integers(0, 2_000))), max_size=14)


def program_of(actions):
    """A program that does these things on every rank; "wait" is for one of what is on its way, if anything is."""

    def program(rank):
        on_the_way = []
        for name, number in actions:
            if name == "compute":
                rank.trace.compute(flops=number * (1 + rank.index))
            elif name == "reduce":
                rank.all_reduce(np.zeros(number, np.uint8))
            elif name == "wait" and on_the_way:
                arrive(rank, on_the_way.pop(number % len(on_the_way)))
            elif name in OFFLOAD:
                on_the_way.append(move(rank, name, number))

    return program


def step_of_one_rank(actions, link):
    """The end of one rank's program, by a walk over the actions with one clock for each stream."""
    clock, free, on_the_way = Fraction(0), dict.fromkeys(OFFLOAD, Fraction(0)), []
    for name, number in actions:
        if name == "compute":
            clock += Fraction(number, 10**9)
        elif name == "wait" and on_the_way:
            clock = max(clock, on_the_way.pop(number % len(on_the_way)))
        elif name in OFFLOAD:
            free[name] = max(clock, free[name]) + link.alpha + number / link.beta
            on_the_way.append(free[name])
    return clock


@given(actions=ACTIONS)
def test_one_ranks_step_is_that_of_a_walk_with_one_clock_for_each_stream(actions):
    recording, expected = recorded(1, program_of(actions)), step_of_one_rank(actions, HOST)
    if recording.transfers:
        assert exact_replay(recording, WITH_HOST).step_seconds == expected
    assert float(replay(recording, WITH_HOST).step_seconds) == pytest.approx(float(expected), rel=1e-12, abs=1e-18)


@given(actions=ACTIONS, ranks=st.integers(1, 4))
def test_sums_close_clocks_agree_and_the_critical_path_is_the_step(actions, ranks):
    machine = replace(WITH_HOST, slow_ranks=[SlowRank(0, 3)])
    recording = recorded(ranks, program_of(actions))
    check_timeline(exact_replay(recording, machine), exact=True)
    check_timeline(replay(recording, machine), exact=False)


@given(actions=ACTIONS, ranks=st.integers(1, 3))
def test_a_faster_host_link_is_never_slower(actions, ranks):
    recording = recorded(ranks, program_of(actions))
    slow, fast = (exact_replay(recording, replace(MACHINE, host_link=link(name))) for name in ("pcie3", "pcie5"))
    assert fast.step_seconds <= slow.step_seconds


# -- recordings and views ---------------------------------------------------------------------------------------------


def offloaded(rank):
    """An update on the host of what two layers have computed."""
    with rank.trace.span("step"):
        with rank.trace.span("backward"):
            rank.trace.compute(flops=3000)
            down = move(rank, TO_HOST, 500)
            rank.trace.compute(flops=1000)
        with rank.trace.span("update"):
            arrive(rank, down)
            arrive(rank, move(rank, TO_DEVICE, 500, "parameter"))


def test_transfers_survive_json_and_one_rank_stands_for_many():
    recording = recorded(1, offloaded)
    assert from_plain(to_plain(recording)) == recording
    assert recording.transfers == (Moved(TO_HOST, "gradient", 500, 0), Moved(TO_DEVICE, "parameter", 500, 1))
    assert recording != replace(recording, transfers=tuple(replace(one, nbytes=1) for one in recording.transfers))
    many = replay(recording.inside("step").on_ranks(1000), WITH_HOST)
    assert many.step_seconds == replay(recording, WITH_HOST).step_seconds == pytest.approx(9e-6)


def test_the_viewer_shows_each_way_as_a_thread_with_arrows_and_none_where_nothing_is_moved():
    timeline, _ = microseconds(offloaded)
    entries = chrome_trace(timeline)["traceEvents"]
    assert chrome_trace(timeline)["otherData"]["host_link"] == "host"
    threads = {entry["args"]["name"]: entry["tid"] for entry in entries if entry["name"] == "thread_name"}
    assert threads == {stream: number for number, stream in enumerate(STREAMS, 1)}
    shown = {(entry["tid"], entry["name"]): (entry["ts"], entry["dur"]) for entry in entries if entry["ph"] == "X"}
    assert shown[threads[TO_HOST], "gradient to host"] == (3.0, 3.0)
    assert shown[threads[TO_DEVICE], "parameter to device"] == (6.0, 3.0)
    assert shown[threads[COMPUTATION], "wait for gradient to host"] == (4.0, 2.0)
    arrows = [(entry["ph"], entry["id"], entry["tid"]) for entry in entries if entry["ph"] in "sf"]
    assert len(arrows) == len(set(arrows)) == 8
    plain, _ = microseconds(lambda rank: rank.trace.compute(flops=1), machine=MACHINE)
    assert plain.streams == (COMPUTATION, COMMUNICATION)
    names = [entry["args"]["name"] for entry in chrome_trace(plain)["traceEvents"] if entry["name"] == "thread_name"]
    assert names == [COMPUTATION, COMMUNICATION]


def test_a_machine_without_a_link_to_a_host_replays_no_transfer():
    with pytest.raises(ValueError, match="moved to a host or back, and the machine has no link to one; name it, as "):
        replay(recorded(1, offloaded), MACHINE)


def test_waits_without_an_issue_and_second_issues_are_refused():
    moved = Moved(TO_HOST, "gradient", 500, 0)

    def twice(rank):
        rank.trace.rows += [Transfer(moved, ()), Transfer(moved, ())]

    with pytest.raises(ValueError, match="row 0 waits for the transfer of gradient to host that is not issued"):
        recorded(1, lambda rank: arrive(rank, moved))
    with pytest.raises(ValueError, match="row 1 issues the transfer of gradient to host a second time"):
        recorded(1, twice)
    with pytest.raises(ValueError, match="inside the span 'update' a rank waits for the transfer of gradient to host"):
        recorded(1, offloaded).inside("update")


def test_a_wait_for_a_collective_that_is_not_issued_is_refused():
    def program(rank):
        rank.all_reduce(np.zeros(3), async_op=True).wait()

    recording = recorded(2, program)
    one, other = recording.programs
    issue_and_wait = np.flatnonzero(np.isin(one.codes, (3, 4)))
    turned = np.arange(len(one))
    turned[issue_and_wait] = issue_and_wait[::-1]
    changed = replace(one, codes=one.codes[turned], first=one.first[turned], second=one.second[turned])
    with pytest.raises(ValueError, match="waits for the all_reduce of call 0 that is not issued before it"):
        replace(recording, programs=(changed, other))


@pytest.mark.parametrize(("row", "message"), [
    (("sideways", "gradient", 5, 0), "a transfer goes 'to host' or 'to device', found 'sideways'"),
    ((TO_HOST, "gradient", -5, 0), "nbytes must be at least 0, got -5")])
def test_transfers_that_mean_nothing_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        Moved(*row)
    plain = to_plain(recorded(1, offloaded)) | {"transfers": [list(row), list(row)]}
    with pytest.raises(ValueError, match=message):
        from_plain(plain)


def test_a_row_that_points_to_no_transfer_is_refused():
    with pytest.raises(ValueError, match="points to transfer 1, of which there are 1"):
        replace(recorded(1, offloaded), transfers=(Moved(TO_HOST, "gradient", 5, 0),))


def test_the_engine_records_no_transfers_yet():
    """When it does, README and the docstrings that say so must change."""
    cluster = zs.Cluster(1)
    cluster.run(lambda rank: zs.Engine(rank, zs.models.MLP((2, 2)), zs.optim.Adam()).step(
        [(np.ones((1, 2)), np.ones((1, 2)))]))
    assert {type(row).__name__ for row in cluster.trace[0].rows}.isdisjoint({"Transfer", "TransferWait"})
