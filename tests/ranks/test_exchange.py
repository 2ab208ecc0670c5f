"""The one primitive, as a program uses it: send to one rank while receiving from one, either half possibly absent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.ranks import oracles
from tests.ranks.asking import KINDS, bits, ceil_cut
from tests.ranks.data import FLOATS, INTEGERS, OTHERS, any_bits, anything, normals
from zerosim.ranks import trace

SEEDS = [0, 1, 2, 3, 4]


def messages(cluster: zs.Cluster) -> list[list[tuple]]:
    """(source, destination, bytes sent) of each rank's messages."""
    return [[(row.source, row.destination, row.sent_nbytes) for row in of_rank.rows if isinstance(row, trace.Message)]
            for of_rank in cluster.trace]


@pytest.mark.parametrize("seed", SEEDS)
def test_send_and_receive_are_the_halves_of_an_exchange(seed: int) -> None:
    def program(rank):
        if rank.index == 0:
            return rank.send(np.arange(3.0), 1, purpose="state")
        out = np.empty(3)
        assert rank.recv(out, 0, purpose="state") is out
        return out.tolist()

    cluster = zs.Cluster(2, seed=seed)
    assert list(cluster.run(program)) == [None, [0, 1, 2]]
    assert messages(cluster) == [[(None, 1, 24)], [(0, None, 0)]]
    assert cluster.trace.sent_nbytes("state") == [24, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_two_halves_may_differ_in_size_type_and_partner(seed: int) -> None:
    """Rank r sends r+1 elements to the right, so each receives one fewer, or, rank 0, one more than it sends."""
    def program(rank):
        left, right = (rank.index - 1) % rank.size, (rank.index + 1) % rank.size
        dtypes = [np.float32, np.int16, np.uint8, np.float64]
        out = np.empty(left + 1, dtypes[left])
        return rank.exchange(np.full(rank.index + 1, 10 * rank.index, dtypes[rank.index]), right, out, left).tolist()

    cluster = zs.Cluster(4, seed=seed)
    assert list(cluster.run(program)) == [[30] * 4, [0], [10, 10], [20, 20, 20]]
    assert messages(cluster) == [[(3, 1, 4)], [(0, 2, 4)], [(1, 3, 3)], [(2, 0, 32)]]


@pytest.mark.parametrize("dtype", [*FLOATS.values(), *INTEGERS.values(), *OTHERS.values()], ids=str)
def test_any_shape_and_type_arrives_as_it_was(dtype: np.dtype) -> None:
    def program(rank, vectors):
        return rank.exchange(vectors[rank.index], 1 - rank.index, np.empty_like(vectors[0]), 1 - rank.index)

    for shape in ((), (4,), (2, 3), (0,), (3, 0)):
        vectors = [vector.reshape(shape) for vector in anything(2, int(np.prod(shape)), dtype)]
        results = zs.Cluster(2).run(program, vectors)
        assert [bits(result) for result in results] == [bits(vectors[1]), bits(vectors[0])]
        assert results[0].shape == shape


def test_an_empty_message_is_sent_and_counted_as_one() -> None:
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: rank.exchange(np.empty(0), 1 - rank.index, np.empty(0), 1 - rank.index))
    assert messages(cluster) == [[(1, 1, 0)], [(0, 0, 0)]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_may_exchange_with_itself(kind: str) -> None:
    def program(rank):
        out = np.empty(2, np.int64)
        rank.exchange(np.array([rank.index, 7]), rank.index, out, rank.index)
        return out.tolist()

    for ranks in (1, 3):
        cluster = zs.Cluster(ranks, **KINDS[kind])
        assert list(cluster.run(program)) == [[index, 7] for index in range(ranks)]
        assert messages(cluster) == [[(index, index, 16)] for index in range(ranks)]


def test_an_exchange_of_nothing_with_nobody_returns() -> None:
    cluster = zs.Cluster(2)
    assert list(cluster.run(lambda rank: rank.exchange(None, None, None, None))) == [None, None]
    assert cluster.trace.sent_nbytes() == [0, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_sent_may_be_changed_as_soon_as_send_returns(seed: int) -> None:
    def program(rank):
        if rank.index == 0:
            x = np.arange(3)
            for _ in range(3):
                rank.send(x, 1)
                x += 100
            return None
        return [rank.recv(np.empty(3, np.int64), 0).tolist() for _ in range(3)]

    assert zs.Cluster(2, seed=seed).run(program)[1] == [[0, 1, 2], [100, 101, 102], [200, 201, 202]]


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_come_from_whom_they_are_asked_from(seed: int) -> None:
    """Rank 0 asks in another order than the others send in; each of them waits for its turn."""
    def program(rank):
        if rank.index:
            return rank.send(np.array([rank.index]), 0)
        return [rank.recv(np.empty(1, np.int64), source).tolist() for source in (2, 1, 3)]

    assert zs.Cluster(4, seed=seed).run(program)[0] == [[2], [1], [3]]


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_and_collectives_may_cross_on_their_ways(seed: int) -> None:
    """A collective that is under way does not stand in the way of messages, nor the reverse."""
    def program(rank):
        work = rank.all_reduce(np.array([rank.index]), async_op=True)
        if rank.index == 2:
            rank.send(np.array([5]), 0)
        got = rank.recv(np.empty(1, np.int64), 2).tolist() if rank.index == 0 else None
        return got, work.wait().tolist()

    assert list(zs.Cluster(3, seed=seed).run(program)) == [([5], [3]), (None, [3]), (None, [3])]


def ring_by_hand(rank: zs.Rank, x: np.ndarray) -> np.ndarray:
    """An all-reduce as one writes it from the primitive alone; x (n,)."""
    ranks, cut = rank.size, ceil_cut(len(x), rank.size)
    total, right, left = x.copy(), (rank.index + 1) % ranks, (rank.index - 1) % ranks

    def chunk(i):
        return total[cut[i % ranks]:cut[i % ranks + 1]]

    for step in range(ranks - 1):
        mine = chunk(rank.index - 2 - step)
        landed = rank.exchange(chunk(rank.index - 1 - step), right, np.empty_like(mine), left)
        mine[...] = oracles.add(landed, mine)
    for step in range(ranks - 1):
        out = np.empty_like(chunk(rank.index - 1 - step))
        chunk(rank.index - 1 - step)[...] = rank.exchange(chunk(rank.index - step), right, out, left)
    return total


@given(ranks=st.integers(1, 6), length=st.integers(0, 20), seed=st.integers(0, 50),
       dtype=st.sampled_from([FLOATS["fp16"], FLOATS["fp32"], INTEGERS["int64"]]))
def test_a_ring_written_by_hand_equals_the_collective_in_bits_and_bytes(ranks, length, seed, dtype) -> None:
    x = any_bits(ranks, length, dtype) if dtype.kind == "i" else normals(ranks, length, dtype)
    cluster = zs.Cluster(ranks, seed=seed)
    by_hand = cluster.run(lambda rank: ring_by_hand(rank, x[rank.index]))
    sent = cluster.trace.sent_nbytes()
    ready_made = cluster.run(lambda rank: rank.all_reduce(x[rank.index]))
    assert [bits(result) for result in by_hand] == [bits(result) for result in ready_made]
    assert sent == cluster.trace.sent_nbytes()
