"""Bytes, messages and steps: what the trace says, what pencil and paper say, and what was really sent are one."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import chosen
from tests.ranks.asking import KINDS, ROOTED, ROWS, WORLDS, allowed, ask, ceil_cut, cuts_of, takes_splits
from tests.ranks.data import FLOATS, normals, whole_numbers
from zerosim.planning.collectives import ALGORITHMS as PENCIL
from zerosim.planning.collectives import Sent
from zerosim.planning.collectives import sent as pencil_sent
from zerosim.ranks import Hop

BARRIER = ("barrier", "dissemination")


def summed(hops: list[Hop], ranks: int) -> Sent:
    """Bytes and messages by rank, and steps, of a list of messages."""
    nbytes, messages = [0] * ranks, [0] * ranks
    for hop in hops:
        nbytes[hop.source] += hop.nbytes
        messages[hop.source] += 1
    return Sent(tuple(nbytes), tuple(messages), max((hop.step for hop in hops), default=-1) + 1)


def check(cluster: zs.Cluster, operation: str, algorithm: str, cases: list[tuple], dtype: np.dtype) -> None:
    """One run of many calls: its trace and its expansion against pencil."""
    ranks, vectors = len(cluster.ranks), {}
    for length, _, _ in cases:
        vectors[length] = whole_numbers(ranks, length, dtype)
    cluster.run(lambda rank: [ask(rank, operation, algorithm, vectors[length][rank.index], cut, root=root) is None
                              for length, cut, root in cases])
    rows = [trace.collectives(operation) for trace in cluster.trace]
    for position, (length, cut, root) in enumerate(cases):
        pencil = pencil_sent(operation, algorithm, cut or ceil_cut(length, ranks), dtype.itemsize, root=root)
        assert tuple(of_rank[position].sent_nbytes for of_rank in rows) == pencil.nbytes
        assert summed(rows[0][position].hops(), ranks) == pencil
        assert rows[-1][position].hops() == rows[0][position].hops()
    assert all(len(of_rank) == len(cases) for of_rank in rows)


def test_pencil_and_package_know_the_same_rows() -> None:
    assert set(PENCIL) == {*ROWS, BARRIER}


@pytest.mark.parametrize("kind", ["plain", "debug"])
@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_every_rank_sends_the_bytes_messages_and_steps_of_pencil(operation, algorithm, kind) -> None:
    for ranks in [n for n in WORLDS if allowed(operation, algorithm, n)]:
        roots = range(ranks) if operation in ROOTED else [0]
        lengths = chosen([0, 2 * ranks + 1], [0, 1, ranks, 2 * ranks + 1, 3 * ranks + 1])
        cases = [(length, cut, root) for length in lengths for root in roots
                 for cut in (None, *(cuts_of(length, ranks) if takes_splits(operation, algorithm, ranks) else ()))]
        check(zs.Cluster(ranks, **KINDS[kind]), operation, algorithm, cases, np.dtype(np.int32))


@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_other_worlds_send_what_pencil_says(operation: str, algorithm: str) -> None:
    for ranks in [n for n in (6, 7, 9, 16, 64) if allowed(operation, algorithm, n)]:
        lengths = [0, ranks - 1, 2 * ranks + 3] if ranks < 64 else [65]
        check(zs.Cluster(ranks), operation, algorithm, [(length, None, 0) for length in lengths], np.dtype(np.uint8))


@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_bytes_are_those_of_the_type(operation: str, algorithm: str) -> None:
    for dtype in FLOATS.values():
        check(zs.Cluster(4), operation, algorithm, [(9, None, 0)], dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_a_barrier_sends_empty_messages_that_are_counted(ranks: int, kind: str) -> None:
    cluster = zs.Cluster(ranks, **KINDS[kind])
    cluster.run(lambda rank: rank.barrier())
    row = cluster.trace[0].collectives("barrier")[0]
    assert summed(row.hops(), ranks) == pencil_sent(*BARRIER, (0,) * (ranks + 1), 1)
    assert (row.purpose, cluster.trace.sent_nbytes()) == ("control", [0] * ranks)
    assert (len(row.hops()) > 0) == (ranks > 1)


def made_hops(cluster: zs.Cluster, program) -> dict[int, list[Hop]]:
    """The messages really made, by call number."""
    made = defaultdict(list)
    for event in cluster.events(program, hop_by_hop=True):
        made[event.call.number].append(event.hop)
    return made


@st.composite
def collective_calls(draw: st.DrawFn) -> tuple:
    """A world, some rows that it allows, a cut, roots, and a schedule."""
    ranks = draw(st.integers(1, 9))
    chunks = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    cut = (0, *np.cumsum(chunks).tolist())
    rows = draw(st.lists(st.sampled_from([row for row in ROWS if allowed(*row, ranks)]), min_size=1, max_size=4))
    roots = [draw(st.integers(0, ranks - 1)) if operation in ROOTED else 0 for operation, _ in rows]
    return ranks, cut, list(zip(rows, roots, strict=True)), draw(st.integers(0, 30)), draw(st.booleans())


@given(collective_calls())
def test_a_collective_expands_to_the_hops_that_are_made(drawn) -> None:
    ranks, cut, rows, seed, debug = drawn
    vectors, cluster = normals(ranks, cut[-1]), zs.Cluster(ranks, seed=seed, debug=debug)

    def program(rank: zs.Rank) -> None:
        for (operation, algorithm), root in rows:
            ask(rank, operation, algorithm, vectors[rank.index],
                cut if takes_splits(operation, algorithm, ranks) else None, root=root)

    made = made_hops(cluster, program)
    for trace in cluster.trace:
        for row in trace.collectives():
            assert row.hops() == made.get(row.call.number, [])
    sent = [sum(hop.nbytes for hops in made.values() for hop in hops if hop.source == r) for r in range(ranks)]
    assert cluster.trace.sent_nbytes() == sent


@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_hops_carry_the_chunks_that_they_name(operation: str, algorithm: str) -> None:
    """Where a message names chunks, its bytes are those of these chunks of the cut."""
    cut, ranks = (0, 3, 4, 4, 9), 4
    vectors, cluster = whole_numbers(ranks, 9), zs.Cluster(ranks)
    splits = cut if takes_splits(operation, algorithm, ranks) else None
    cluster.run(lambda rank: ask(rank, operation, algorithm, vectors[rank.index], splits) is None)
    hops, named = cluster.trace[0].collectives()[0].hops(), 0
    for hop in hops:
        if hop.chunks:
            assert hop.nbytes == 8 * sum(cut[chunk + 1] - cut[chunk] for chunk in hop.chunks)
            named += 1
        else:
            assert hop.nbytes == 8 * 9
    assert (named == len(hops)) == (splits is not None)


def test_a_ring_all_reduce_uses_n_links_and_no_others() -> None:
    for ranks in (2, 3, 4, 8, 16):
        cluster = zs.Cluster(ranks)
        cluster.run(lambda rank: rank.all_reduce(np.arange(3 * rank.size) + rank.index))
        hops = cluster.trace[0].collectives()[0].hops()
        assert len(hops) == 2 * ranks * (ranks - 1)
        assert {(hop.source, hop.destination) for hop in hops} == {(r, (r + 1) % ranks) for r in range(ranks)}


@pytest.mark.parametrize("kind", ["plain", "debug"])
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_fp32_partial_sums_double_the_bytes_of_the_reducing_half(operation: str, kind: str) -> None:
    for ranks in WORLDS:
        vectors, cluster = normals(ranks, 2 * ranks + 1, np.float16), zs.Cluster(ranks, **KINDS[kind])
        cluster.run(lambda rank, v=vectors: ask(rank, operation, "ring", v[rank.index], wire="fp32") is None)
        cut = ceil_cut(2 * ranks + 1, ranks)
        halves = [pencil_sent("reduce_scatter", "ring", cut, 4)]
        halves += [pencil_sent("all_gather", "ring", cut, 2)] if operation == "all_reduce" else []
        wanted = [sum(nbytes) for nbytes in zip(*(half.nbytes for half in halves), strict=True)]
        assert cluster.trace.sent_nbytes() == wanted
        hops = cluster.trace[0].collectives()[0].hops()
        assert [sum(hop.nbytes for hop in hops if hop.source == r) for r in range(ranks)] == wanted


@pytest.mark.parametrize(("operation", "algorithm"), [("reduce_scatter", "pairwise"), ("all_reduce", "everyone")])
def test_adding_in_fp32_at_the_owner_sends_no_more(operation: str, algorithm: str) -> None:
    sent = []
    for accumulate in (None, "fp32"):
        cluster = zs.Cluster(5)
        cluster.run(lambda rank, a=accumulate: ask(rank, operation, algorithm, normals(5, 7, np.float16)[rank.index],
                                                   accumulate=a) is None)
        sent.append(cluster.trace.sent_nbytes())
    assert sent[0] == sent[1]
    assert sum(sent[0]) > 0
