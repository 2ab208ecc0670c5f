"""Steps are the hops of the longest chain: what is asynchronous lies beside other messages, what blocks does not."""

import numpy as np
import pytest

import zerosim as zs
from zerosim.course.puzzles.expected import in_sequence, ring_wire, steps_in_sequence
from zerosim.course.puzzles.solutions import SOLUTIONS


def with_messages(rank, asynchronous, messages):
    """An all-reduce around a ring, 2(N-1) hops, and so many messages to the next rank, each of one hop."""
    work = rank.all_reduce(np.ones(8), async_op=asynchronous)
    for _ in range(messages):
        rank.exchange(np.ones(2), (rank.index + 1) % rank.size, np.empty(2), (rank.index - 1) % rank.size)
    if asynchronous:
        work.wait()


@pytest.mark.parametrize("messages", [0, 1, 3, 30])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_messages_beside_an_asynchronous_collective_take_no_steps_of_their_own_until_they_are_more(ranks, messages):
    cluster, ring = zs.Cluster(ranks), 2 * (ranks - 1)
    cluster.run(with_messages, True, messages)
    assert steps_in_sequence(cluster.trace) == max(ring, messages)
    cluster.run(with_messages, False, messages)
    assert steps_in_sequence(cluster.trace) == ring + messages


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_collectives_in_sequence_send_and_take_the_sum_of_each(ranks):
    parts = ring_wire("reduce_scatter", 19, ranks), ring_wire("all_gather", 19, ranks)
    both = in_sequence(*parts)
    assert both == tuple(map(sum, zip(*parts, strict=True)))
    assert both.all_nbytes == 2 * (ranks - 1) * 19 * 4


def test_a_forbidden_collective_is_seen_wherever_it_is_called():
    def zero1(rank, weights, gradient, momentum, lr):
        found = SOLUTIONS["zero1"](rank, weights, gradient, momentum, lr)
        rank.broadcast(weights, out=weights)
        return found

    assert zs.puzzles.check("zero1", SOLUTIONS["zero1"]).passed
    said = zs.puzzles.check("zero1", zero1).sentence
    assert "it calls broadcast, but this puzzle is to be solved with exchange, all_gather, all_reduce, " in said
