"""A replayed training step on any machine: bounds, limits, and sums that close."""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.planning.exact import exact_replay
from tests.planning.invariants import check_timeline
from tests.planning.recorded_runs import (
    EVEN,
    FAST,
    MACHINE,
    MICRO_BATCHES,
    OPTIONS,
    ROWS,
    SLOW,
    WIDTHS,
    WORLDS,
    device,
    recorded,
    step,
    synchronous,
    traces,
)
from zerosim.planning.cost import cost
from zerosim.planning.hardware import Network
from zerosim.planning.recording import record
from zerosim.planning.timeline import COMMUNICATION, COMPUTATION, Machine, SlowLink, SlowRank, critical_path, replay
from zerosim.ranks.trace import Compute

STAGES = range(4)
# Two kinds of links, and rank 0 slow in all: what it computes from an instant on, and the link by which it hands on.
MACHINES = st.builds(
    lambda flops, memory, efficiency, factor, instant, nodes, link: Machine(
        device(10.0**flops, 10.0**memory), Network(FAST, SLOW, nodes), "fp16", efficiency,
        [SlowRank(0, factor, instant)], [SlowLink(0, 1, link)]),
    st.integers(7, 11), st.integers(7, 11), st.floats(0.1, 1), st.integers(1, 4), st.floats(0, 1e-4),
    st.integers(1, 4), st.integers(1, 9))
CASES = {"ranks": st.sampled_from(WORLDS[1:]), "stage": st.sampled_from(STAGES), "options": st.sampled_from([*OPTIONS]),
         "machine": MACHINES}


def calls_of(recording):
    """The calls that rank 0 makes, in order."""
    program = recording.program(0)
    return [recording.calls[number] for number in program.first[program.where(2, 3)].tolist()]


def communication_seconds(recording, network):
    """The cost of all collectives of the recording, one after the other."""
    return sum(cost(call.shape.operation, call.shape.algorithm, call.shape.cut, call.shape.wire_itemsize,
                    network).seconds for call in calls_of(recording))


def arithmetic_seconds(trace, machine):
    """The roofline of every row of a trace, added up."""
    flops_per_second = machine.peak_flops_per_second * machine.efficiency
    return sum(max(row.flops / flops_per_second, row.nbytes / machine.device.memory_bytes_per_second)
               for row in trace.rows if isinstance(row, Compute))


# -- bounds and limits --------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("row", "ranks"), covering(itertools.product(STAGES, OPTIONS), WORLDS), ids=str)
def test_a_step_takes_its_arithmetic_and_its_communication_at_least_and_both_at_most(row, ranks):
    stage, options = row
    recording = step(ranks, stage, options)
    found = replay(recording, MACHINE)
    per_rank = [arithmetic_seconds(trace, MACHINE) for trace in traces(ranks, stage, options)]
    arithmetic = max(per_rank)
    assert arithmetic == per_rank[0]
    communication = communication_seconds(recording, MACHINE.network)
    assert found.step_seconds >= max(arithmetic, communication) * (1 - 1e-12)
    assert found.step_seconds <= (arithmetic + communication) * (1 + 1e-12)
    if options == "plain":
        assert found.step_seconds == pytest.approx(arithmetic + communication, rel=1e-12)
    for seconds, usage in zip(per_rank, found.usage, strict=True):
        assert usage.compute_seconds == pytest.approx(seconds, rel=1e-9)
        assert usage.communication_seconds >= communication * (1 - 1e-9)
    for usage in found.usage[:1]:
        assert usage.communication_seconds == pytest.approx(communication, rel=1e-9)


@given(**CASES)
def test_overlap_is_never_slower_than_waiting_at_each_issue(ranks, stage, options, machine):
    recording = step(ranks, stage, options)
    overlapped, waiting = (exact_replay(one, machine) for one in (recording, synchronous(recording)))
    for one, other in zip(overlapped.lanes, waiting.lanes, strict=True):
        assert one.end <= other.end


def test_overlap_and_prefetch_hide_communication_behind_arithmetic():
    plain, both = (replay(step(4, 3, options), MACHINE) for options in ("plain", "both"))
    assert both.step_seconds < plain.step_seconds
    assert plain.usage[0].hidden_seconds == pytest.approx(0, abs=1e-15)
    assert both.usage[0].hidden_seconds > 0
    assert both.exposed_seconds < plain.exposed_seconds


# -- stragglers ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks", WORLDS)
@given(factor=st.integers(1, 5), stage=st.sampled_from(STAGES))
def test_a_straggler_in_a_synchronous_step_delays_all_by_its_own_arithmetic(ranks, factor, stage):
    """Rings of equal chunks end for all so long after the last arrival: the slow rank always comes last."""
    recording = synchronous(step(ranks, stage, widths=EVEN))
    plain, slow = (exact_replay(recording, replace(MACHINE, slow_ranks=[SlowRank(ranks - 1, one)]))
                   for one in (1, factor))
    work = plain.usage[-1].compute_seconds
    (tail,) = {lane.end - max((part.ended for part in lane.parts), default=0) for lane in plain.lanes}
    assert slow.step_seconds == plain.step_seconds + (factor - 1) * work
    if ranks > 1:
        assert slow.lanes[0].end == slow.step_seconds - (factor - 1) * tail
        assert slow.usage[0].waited_seconds == (factor - 1) * (work - tail)
        assert slow.usage[-1].waited_seconds == 0


def test_a_straggler_costs_less_the_later_it_becomes_one():
    ends = [replay(step(4), replace(MACHINE, slow_ranks=[SlowRank(2, 4.0, instant)])).step_seconds
            for instant in (0.0, 1e-5, 1e-4, 1.0)]
    assert ends == sorted(ends, reverse=True)
    assert ends[0] > ends[1] > ends[2] >= ends[3] == replay(step(4), MACHINE).step_seconds


# -- sums that close ----------------------------------------------------------------------------------------------

def overlap_seconds(one, other):
    """The time for which both of two sets of intervals last at once."""
    return sum(max(min(a.end_seconds, b.end_seconds) - max(a.start_seconds, b.start_seconds), 0)
               for a in one for b in other)


@given(**CASES)
def test_sums_close_clocks_agree_and_the_critical_path_is_the_step(ranks, stage, options, machine):
    recording = step(ranks, stage, options)
    check_timeline(replay(recording, machine), exact=False)
    timeline = exact_replay(recording, machine)
    check_timeline(timeline, exact=True)
    for rank, usage in enumerate(timeline.usage):
        computed, communicated = ([event for event in timeline.events(rank) if event.stream == stream]
                                  for stream in (COMPUTATION, COMMUNICATION))
        assert usage.hidden_seconds == overlap_seconds(computed, communicated)


def test_a_rank_that_is_through_before_others_come_has_waited_until_it_was():
    """The root sends to rank 1, and then to rank 2, which comes late; rank 1 waits for neither."""

    def program(rank):
        rank.trace.compute(flops=100_000 * (rank.index == 2))
        rank.broadcast(np.zeros(250, np.float32), algorithm="naive")

    timeline = exact_replay(recorded(3, program), MACHINE)
    message = FAST.alpha + 1000 / FAST.beta
    late = Fraction(100_000, 10**9)
    assert [lane.end for lane in timeline.lanes] == [late + message, message, late + message]
    assert [usage.waited_seconds for usage in timeline.usage] == [late, message, 0]


def test_the_critical_path_goes_through_the_straggler():
    machine = replace(MACHINE, slow_ranks=[SlowRank(2, 50.0)])
    path = critical_path(replay(step(4), machine))
    assert {event.rank for event in path if event.stream == COMPUTATION} == {2}
    fast = critical_path(replay(step(4), replace(MACHINE, network=Network(SLOW), device=device(1e15, 1e15))))
    busy = sum(event.seconds for event in fast if event.stream == COMMUNICATION)
    assert busy > 0.99 * fast[-1].end_seconds


def test_the_critical_path_follows_messages_from_rank_to_rank():
    """A pipeline: each rank computes, then hands on."""

    def program(rank):
        if rank.index:
            rank.recv(np.empty(25, np.float32), rank.index - 1)
        with rank.trace.span(f"stage {rank.index}"):
            rank.trace.compute(flops=1000)
        if rank.index + 1 < rank.size:
            rank.send(np.zeros(25, np.float32), rank.index + 1)

    timeline = exact_replay(recorded(3, program), MACHINE)
    message, work = FAST.alpha + 100 / FAST.beta, Fraction(1, 10**6)
    assert timeline.step_seconds == 3 * work + 2 * message
    assert [(event.from_rank, event.rank, event.name, event.path, event.seconds)
            for event in critical_path(timeline)] == [
        (0, 0, "compute", ("stage 0",), work), (0, 1, "message", (), message), (1, 1, "compute", ("stage 1",), work),
        (1, 2, "message", (), message), (2, 2, "compute", ("stage 2",), work)]


def test_a_rank_may_send_to_itself_at_no_cost():
    def program(rank):
        rank.exchange(np.zeros(3), rank.index, np.empty(3), rank.index)
        rank.trace.compute(flops=1000)

    assert exact_replay(recorded(2, program), MACHINE).step_seconds == Fraction(1, 10**6)


# -- rates --------------------------------------------------------------------------------------------------------

def test_arithmetic_takes_as_long_as_its_flops_at_the_efficiency_or_its_bytes_whichever_is_longer():
    def program(rank):
        rank.trace.compute(flops=4000, nbytes=1000)
        rank.trace.compute(flops=100, nbytes=7000)

    machine = Machine(device(1e9, 2e9), Network(FAST), "fp16", efficiency=0.5)
    assert [float(event.seconds) for event in exact_replay(recorded(1, program), machine).computed(0)] == [
        8e-6, 3.5e-6]


def test_model_flops_utilization_counts_what_the_model_needs_and_not_what_is_computed_again():
    def run(recompute):
        def program(rank):
            model = zs.models.MLP((8,) * 5, seed=1)
            engine = zs.Engine(rank, model, zs.optim.SGD(lr=0.1), stage=2, recompute=recompute)
            engine.step([(np.ones((2, 8)), np.ones((2, 8)))])
        return replay(recorded(2, program), replace(MACHINE, efficiency=0.4))

    plain, again = run("none"), run("segment(2)")
    assert again.flops() > plain.flops() == plain.flops(recomputed=False) == again.flops(recomputed=False)
    for timeline in (plain, again):
        peak = 2 * 1e9 * timeline.step_seconds
        assert timeline.model_flops_utilization() == pytest.approx(plain.flops() / peak)
        assert timeline.model_flops_utilization(12345) == pytest.approx(12345 / peak)
        assert timeline.hardware_flops_utilization() == pytest.approx(timeline.flops() / peak)
    assert again.model_flops_utilization() < plain.model_flops_utilization() <= 0.4
    assert replay(recorded(1, lambda rank: None), MACHINE).model_flops_utilization() == 0


def test_the_flops_of_a_step_are_those_of_its_traces():
    assert replay(step(3, 1), MACHINE).flops() == sum(row.flops for trace in traces(3, 1) for row in trace.rows
                                                      if isinstance(row, Compute))
    products = 3 * sum(2 * ROWS * a * b for a, b in itertools.pairwise(WIDTHS)) - 2 * ROWS * WIDTHS[0] * WIDTHS[1]
    assert 1 < replay(step(3, 1), MACHINE).flops() / (3 * MICRO_BATCHES * products) < 1.2


# -- what cannot be replayed --------------------------------------------------------------------------------------

def test_programs_that_issue_in_different_orders_are_refused_with_who_waits_for_whom():
    def program(rank):
        works = {}
        pairs = [rank.split(0), rank.split(0)]
        for pair in pairs if rank.index == 0 else pairs[::-1]:
            works[pair] = pair.all_reduce(np.ones(4, np.float32), async_op=True)
        for pair in pairs:
            works[pair].wait()

    with pytest.raises(ValueError, match=r"in the order of issue, these wait for each other without end; issue in the "
                       r"same order on all ranks, and record again.\nrank 0: waits for all_reduce \(call 0 of "
                       r"ranks 0, 1; there: 0\)\nrank 1: waits for all_reduce \(call 0 of ranks 0, 1; there: 0\), "
                       r"behind all_reduce \(call 0 of ranks 0, 1; there: 1\)$"):
        replay(recorded(2, program), MACHINE)


def test_a_message_behind_a_collective_that_its_other_end_has_not_issued_is_refused():
    def program(rank):
        if rank.index:
            rank.recv(np.empty(2), 0)
        work = rank.all_reduce(np.ones(4, np.float32), async_op=True)
        if not rank.index:
            rank.send(np.zeros(2), 1)
        work.wait()

    with pytest.raises(ValueError, match=r"rank 0: waits for a message to rank 1, behind all_reduce \(call 0 of ranks "
                       r"0, 1; there: 0\)\nrank 1: waits for a message from rank 0$"):
        replay(recorded(2, program), MACHINE)


def test_a_recording_of_some_ranks_only_is_refused():
    with pytest.raises(ValueError, match=r"rank 0: waits for reduce_scatter \(call 0 of ranks 0, 1, 2; there: 0\)$"):
        replay(record(traces(3, 2, "plain")[:1]), MACHINE)
