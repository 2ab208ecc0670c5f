"""The replayed ring is what formulas say: exact closed forms for equal and uneven chunks, stragglers, slow links."""

from fractions import Fraction
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.planning.exact import exact_replay
from tests.planning.recorded_runs import FAST, MACHINE, SLOW, WORLDS, device, recorded
from tests.ranks.asking import ROWS, allowed, ask, takes_splits
from zerosim.planning import ceil_cut
from zerosim.planning.collectives import ALGORITHMS
from zerosim.planning.cost import cost, curve
from zerosim.planning.cuts import chunk_lengths
from zerosim.planning.hardware import Network
from zerosim.planning.machine import Prices
from zerosim.planning.recording import Shape, record
from zerosim.planning.streams import by_message, by_step, origins_by_message, origins_by_step, schedule, steps_of
from zerosim.planning.timeline import Machine, SlowLink, SlowRank, replay

RINGS = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2}  # times N-1 steps
ALPHA, BETA = FAST.alpha, FAST.beta
OPERATION = st.sampled_from([*RINGS])
RANKS = st.sampled_from([ranks for ranks in WORLDS if ranks > 1])
CUTS = st.lists(st.integers(0, 50), min_size=2, max_size=9).map(lambda chunks: (0, *accumulate(chunks)))


def ring(operation, cut, machine=MACHINE, late=None, **options):
    """When each rank ends a ring of fp32 elements, exactly; rank r comes ``late[r]`` flops late."""
    ranks = len(cut) - 1

    def program(rank):
        rank.trace.compute(flops=late[rank.index] if late else 0)
        ask(rank, operation, "ring", np.zeros(cut[-1], np.float32), cut, **options)

    timeline = exact_replay(recorded(ranks, program), machine)
    return [lane.end for lane in timeline.lanes]


@given(operation=OPERATION, ranks=RANKS, chunk=st.integers(0, 1000))
def test_equal_chunks_end_on_all_ranks_after_as_many_equal_hops(operation, ranks, chunk):
    cut = ceil_cut(ranks * chunk, ranks)
    expected = RINGS[operation] * (ranks - 1) * (ALPHA + 4 * chunk / BETA)
    assert ring(operation, cut) == [expected] * ranks
    assert curve(operation, "ring", ranks, Network(FAST)).at(0).seconds(Fraction(4 * ranks * chunk)) == expected


@given(operation=OPERATION, cut=CUTS)
def test_an_uneven_ring_is_as_slow_as_its_longest_chunk_at_every_hop(operation, cut):
    """That chunk goes round in one chain of hops, and no hop takes longer; also where one rank owns the whole unit."""
    ranks = len(cut) - 1
    longest = 4 * max(chunk_lengths(cut))
    expected = RINGS[operation] * (ranks - 1) * (ALPHA + longest / BETA)
    assert max(ring(operation, cut)) == expected
    assert float(expected) == cost(operation, "ring", cut, 4, Network(FAST)).seconds


@given(operation=OPERATION, ranks=RANKS, owner=st.integers(0, 7), long=st.integers(0, 90), short=st.integers(0, 90))
def test_with_one_long_chunk_each_rank_ends_by_its_place_before_the_owner(operation, ranks, owner, long, short):
    """k places before the last rank that the long chunk reaches, floor(k/2) of the chain's hops are of short chunks."""
    owner, short, long = owner % ranks, *sorted((short, long))
    cut = (0, *accumulate(long if rank == owner else short for rank in range(ranks)))
    hops = RINGS[operation] * (ranks - 1)
    last = owner if operation == "reduce_scatter" else owner - 1
    for rank, end in enumerate(ring(operation, cut)):
        spared = (last - rank) % ranks // 2
        assert end == hops * ALPHA + 4 * (spared * short + (hops - spared) * long) / BETA


@given(operation=OPERATION, late=st.lists(st.integers(0, 50_000), min_size=2, max_size=8), chunk=st.integers(0, 300))
def test_a_ring_of_equal_chunks_ends_for_all_so_long_after_the_last_arrival(operation, late, chunk):
    ranks = len(late)
    expected = Fraction(max(late), 10**9) + RINGS[operation] * (ranks - 1) * (ALPHA + 4 * chunk / BETA)
    assert ring(operation, ceil_cut(ranks * chunk, ranks), late=late) == [expected] * ranks


@given(operation=OPERATION, ranks=RANKS, chunk=st.integers(0, 300), link=st.integers(0, 7), factor=st.integers(2, 9))
def test_one_slow_link_slows_every_hop_of_the_ring(operation, ranks, chunk, link, factor):
    slow = SlowLink(link % ranks, (link + 1) % ranks, factor)
    machine = Machine(device(), Network(FAST), "fp16", slow_links=[slow])
    expected = RINGS[operation] * (ranks - 1) * factor * (ALPHA + 4 * chunk / BETA)
    assert max(ring(operation, ceil_cut(ranks * chunk, ranks), machine)) == expected


@given(operation=OPERATION, nodes=st.integers(2, 4), per_node=st.integers(1, 4), chunk=st.integers(0, 300))
def test_a_ring_over_nodes_is_as_slow_as_a_ring_of_links_between_them(operation, nodes, per_node, chunk):
    ranks = nodes * per_node
    machine = Machine(device(), Network(FAST, SLOW, per_node), "fp16")
    expected = RINGS[operation] * (ranks - 1) * (SLOW.alpha + 4 * chunk / SLOW.beta)
    assert max(ring(operation, ceil_cut(ranks * chunk, ranks), machine)) == expected


def test_partial_sums_that_travel_wider_cost_more_on_the_way_there_and_nothing_on_the_way_back():
    def program(rank):
        rank.all_reduce(np.zeros(12, np.float16), wire="fp32")

    end = exact_replay(recorded(3, program), MACHINE).step_seconds
    assert end == 2 * (ALPHA + 4 * 4 / BETA) + 2 * (ALPHA + 4 * 2 / BETA)


# -- every algorithm ----------------------------------------------------------------------------------------------

EVERY = [*ROWS, ("barrier", "dissemination")]


def asking(operation, algorithm, length, rank):
    """A program of one collective of so many fp32 elements."""
    if operation == "barrier":
        rank.barrier()
    else:
        ask(rank, operation, algorithm, np.zeros(length, np.float32))


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_no_rank_of_any_algorithm_ends_later_than_its_cost_and_on_one_kind_of_link_the_last_ends_then(operation,
                                                                                                    algorithm):
    for ranks in (ranks for ranks in WORLDS if allowed(operation, algorithm, ranks)):
        cut = ceil_cut(0 if operation == "barrier" else 16 * ranks, ranks)

        recording = recorded(ranks, partial(asking, operation, algorithm, cut[-1]))
        nodes = Machine(device(), Network(FAST, SLOW, max(1, ranks // 2)), "fp16")
        itemsize = 1 if operation == "barrier" else 4
        for machine in (MACHINE, nodes):
            found = replay(recording, machine).step_seconds
            expected = cost(operation, algorithm, cut, itemsize, machine.network).seconds
            assert found <= expected * (1 + 1e-12)
            if machine is MACHINE:
                assert found == pytest.approx(expected, rel=1e-12)


@given(row=st.sampled_from(EVERY), cut=st.lists(st.integers(0, 9), min_size=1, max_size=40), data=st.data())
def test_all_messages_of_a_step_at_once_give_the_bits_of_one_after_the_other(row, cut, data):
    cut = (0, *accumulate(cut))
    ranks = len(cut) - 1
    if not allowed(*row, ranks):
        ranks = 1 << (ranks.bit_length() - 1)
        cut = cut[:ranks + 1]
    cut = cut if takes_splits(*row, ranks) else ceil_cut(cut[-1] if row[0] != "barrier" else 0, ranks)
    network = Network(FAST, SLOW, data.draw(st.integers(1, ranks)))
    prices = Prices(Machine(device(), network, "fp16"))

    def program(rank):
        if row[0] == "barrier":
            rank.barrier()
        else:
            ask(rank, *row, np.zeros(cut[-1], np.float32), cut if takes_splits(*row, ranks) else None)

    (call,) = recorded(ranks, program).calls
    ready = data.draw(st.lists(st.floats(-1e-3, 0), min_size=ranks, max_size=ranks))
    steps = steps_of(call, prices)
    ends = by_step(ready, steps)
    assert ends == by_message(ready, steps)
    # It is its origin's arrival that a member waits for: had all others come long before, it would end no sooner.
    for origins in (origins_by_message, origins_by_step):
        for member, origin in enumerate(origins(ready, steps)):
            alone = [one if place == origin else -1.0 for place, one in enumerate(ready)]
            assert by_step(alone, steps)[member] == ends[member]


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_a_recordings_shape_gives_the_messages_of_the_traces_own_expansion(operation, algorithm):
    for ranks in (ranks for ranks in WORLDS if allowed(operation, algorithm, ranks)):
        cluster = zs.Cluster(ranks)
        cluster.run(partial(asking, operation, algorithm, 2 * ranks + 1))
        (row,) = cluster.trace[0].collectives(operation)
        (call,) = record(cluster.trace).calls
        found = [message for level in schedule(call.shape) for _ in range(level.times)
                 for message in zip(level.sources.tolist(), level.destinations.tolist(), level.nbytes.tolist(),
                                    strict=True)]
        assert sorted(found) == sorted((hop.source, hop.destination, hop.nbytes) for hop in row.hops())


def test_every_collective_of_the_ranks_is_known():
    assert set(EVERY) == set(ALGORITHMS)


def test_a_calls_messages_are_shown_with_their_times():
    cut = (0, 3, 5)
    recording = recorded(2, lambda rank: ask(rank, "all_reduce", "ring", np.zeros(5, np.float32), cut))
    timeline = exact_replay(recording, MACHINE)
    hops = [(hop.source, hop.destination, hop.start_seconds, hop.end_seconds) for hop in timeline.hops(0)]
    long, short = ALPHA + 12 / BETA, ALPHA + 8 / BETA
    # Rank 1 sends rank 0's long chunk first, rank 0 the short one; then each passes on what it has.
    assert hops == [(0, 1, 0, short), (1, 0, 0, long), (0, 1, long, 2 * long), (1, 0, long, long + short)]


def test_a_shape_knows_its_bytes():
    assert Shape("all_reduce", "ring", (0, 3, 5), 2, 4).nbytes == 10


def test_a_straggler_that_gets_slow_half_way_delays_all_from_there():
    """Two equal stretches of arithmetic with a ring after each; rank 1 becomes slow in the midst of the second."""

    def program(rank):
        for _ in range(2):
            rank.trace.compute(flops=10_000)
            rank.all_reduce(np.zeros(8, np.float32))

    hop = ALPHA + 8 / BETA
    stretch, both = Fraction(10_000, 10**9), 6 * hop
    instant = float(stretch + both + stretch / 4)
    machine = Machine(device(), Network(FAST), "fp16", slow_ranks=[SlowRank(1, 3, instant)])
    expected = Fraction(instant) + 3 * (2 * stretch + both - Fraction(instant)) + both
    assert {lane.end for lane in exact_replay(recorded(4, program), machine).lanes} == {expected}
