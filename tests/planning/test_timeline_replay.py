"""A replay gives every rank the times that the traces' own rows and the algorithms' own generators give it."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.planning.exact import exact_replay
from tests.planning.naive_replay import Naive
from tests.planning.recorded_runs import FAST, MACHINE, OPTIONS, SLOW, WORLDS, device, step, traces
from tests.ranks.asking import ROWS, allowed, ask
from zerosim.planning.hardware import Network
from zerosim.planning.recording import record
from zerosim.planning.timeline import Machine, SlowLink, SlowRank, replay

UNIT = 2.0**-53  # the relative error of one float64 operation


def ends(timeline):
    return [lane.end for lane in timeline.lanes]


def machine(ranks, draw=None):
    """Slow rank, slow link, two nodes: nothing that ranks share."""
    network = Network(FAST, SLOW, max(1, ranks // 2)) if ranks > 1 else Network(FAST)
    slow_links = [SlowLink(0, ranks - 1, 1.75)] if ranks > 1 else []
    return Machine(device(3e8), network, "fp16", 0.7, [SlowRank(ranks - 1, 2.5, 2e-5)], slow_links)


@pytest.mark.parametrize(("row", "ranks"), covering(itertools.product(range(4), OPTIONS), WORLDS), ids=str)
def test_an_engines_step_ends_on_every_rank_when_a_naive_replay_says(row, ranks):
    stage, options = row
    for where in (MACHINE, machine(ranks)):
        found = traces(ranks, stage, options)
        exact, fast = exact_replay(record(found), where), replay(record(found), where)
        naive = Naive(found, where, seed=stage)
        assert ends(exact) == naive.run()
        assert [usage.exposed_seconds for usage in exact.usage] == [row.waited for row in naive.ranks]
        operations = 4 * max(map(len, record(found).programs)) * ranks
        assert ends(fast) == pytest.approx([float(end) for end in ends(exact)], rel=operations * UNIT, abs=0)


def test_the_contiguous_layouts_uneven_cuts_are_replayed_too():
    for ranks in (3, 4):
        found = traces(ranks, 3, "both", "contiguous")
        assert ends(exact_replay(record(found), machine(ranks))) == Naive(found, machine(ranks)).run()


ACTIONS = st.lists(st.one_of(
    st.tuples(st.just("compute"), st.lists(st.integers(0, 40_000), min_size=8, max_size=8)),
    st.tuples(st.sampled_from([row for row in ROWS if row[0] != "barrier"]), st.integers(0, 400), st.booleans()),
    st.tuples(st.just("shift"), st.integers(0, 300)),
    st.tuples(st.just("pair"), st.integers(0, 7), st.integers(0, 7), st.integers(0, 300)),
    st.tuples(st.just("wait")), st.tuples(st.just("barrier")), st.tuples(st.just("halves"), st.integers(0, 200)),
), max_size=12)


def program_of(actions):
    """A rank program that does these things; collectives of all ranks and of halves, messages, waits in order."""

    def program(rank):
        half, works = rank.split(rank.index % 2), []
        for name, *rest in actions:
            if name == "compute":
                rank.trace.compute(flops=rest[0][rank.index % 8], nbytes=7 * rest[0][-1 - rank.index % 8])
            elif name == "shift":
                x = np.zeros(rest[0] + rank.index, np.float32)
                out = np.empty(rest[0] + (rank.index - 1) % rank.size, np.float32)
                rank.exchange(x, (rank.index + 1) % rank.size, out, (rank.index - 1) % rank.size)
            elif name == "pair":
                source, destination = rest[0] % rank.size, rest[1] % rank.size
                if source != destination and rank.index == source:
                    rank.send(np.zeros(rest[2], np.uint8), destination)
                elif source != destination and rank.index == destination:
                    rank.recv(np.empty(rest[2], np.uint8), source)
            elif name == "halves":
                works.append(half.all_reduce(np.ones(rest[0], np.float32), async_op=True))
            elif name == "wait":
                if works:
                    works.pop(0).wait()
            elif name == "barrier":
                rank.barrier()
            elif allowed(*name, rank.size):
                found = ask(rank, *name, np.ones(rest[0], np.float32), None, async_op=rest[1])
                works += [found] * rest[1]
        while works:
            works.pop(0).wait()

    return program


@given(ranks=st.sampled_from(WORLDS), actions=ACTIONS, seed=st.integers(0, 9))
def test_any_program_is_replayed_as_a_naive_replay_does_it(ranks, actions, seed):
    cluster = zs.Cluster(ranks)
    cluster.run(program_of(actions))
    where = machine(ranks)
    exact, fast = ((exact_replay if exact else replay)(record(cluster.trace), where) for exact in (True, False))
    assert ends(exact) == Naive(cluster.trace, where, seed).run()
    assert ends(fast) == pytest.approx([float(end) for end in ends(exact)], rel=1e-12, abs=0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_replay_depends_on_the_recording_and_on_nothing_else(seed):
    where, recording = machine(4), step(4)
    once, again = (replay(recording, where) for _ in range(2))
    assert ends(once) == ends(again)
    assert [once.events(rank) for rank in range(4)] == [again.events(rank) for rank in range(4)]

    def program(rank):
        works = [rank.all_reduce(np.ones(9, np.float32), async_op=True) for _ in range(3)]
        rank.trace.compute(flops=1000 * rank.index)
        for work in works:
            work.wait()

    clusters = [zs.Cluster(4, seed=schedule) for schedule in (0, seed)]
    for cluster in clusters:
        cluster.run(program)
    assert record(clusters[0].trace) == record(clusters[1].trace)


def test_exact_seconds_are_fractions_and_others_floats():
    exact, fast = exact_replay(step(3), MACHINE), replay(step(3), MACHINE)
    assert isinstance(exact.step_seconds, Fraction)
    assert isinstance(fast.step_seconds, float)
    assert all(isinstance(end, float) for end in ends(fast))
    assert all(isinstance(event.end_seconds, float) for event in fast.events(0))
