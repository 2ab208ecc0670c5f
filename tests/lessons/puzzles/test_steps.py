"""Steps are the hops of the longest chain: what is asynchronous lies beside other messages, what blocks does not."""

import numpy as np
import pytest

import zerosim as zs
from zerosim.lessons.puzzles.steps import steps_in_sequence


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
