"""Solutions of the puzzles about messages and collectives.

Legend: N ranks, n elements, k = ⌈n/N⌉.
"""

import numpy as np

from zerosim.ranks.rank import Rank

Array = np.ndarray


def mean(rank: Rank, x: Array) -> Array:
    """x (1,) -> (1,)."""
    total: Array = rank.all_reduce(x)
    total /= rank.size
    return total


def broadcast(rank: Rank, x: Array) -> Array:
    """x (n,) -> rank 0's x, in place."""
    distance = 1  # the ranks below it have x
    while distance < rank.size:
        if rank.index < distance:
            if rank.index + distance < rank.size:
                rank.send(x, rank.index + distance)
        elif rank.index < 2 * distance:
            rank.recv(x, rank.index - distance)
        distance *= 2
    return x


def ring(rank: Rank, x: Array) -> Array:
    """x (n,) -> chunk r of the sum."""
    n, N = len(x), rank.size
    k = -(-n // N)

    def chunk(c: int) -> slice:
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    landings = [rank.memory.alloc(k, x.dtype, "workspace") for _ in range(2)]  # one leaves while the next comes
    partial = x[chunk(rank.index - 1)]
    for step in range(N - 1):
        own = x[chunk(rank.index - 2 - step)]
        landing = landings[step % 2][:len(own)]
        rank.exchange(partial, (rank.index + 1) % N, landing, (rank.index - 1) % N)
        landing += own
        partial = landing
    return partial


def gather(rank: Rank, shard: Array, n: int) -> Array:
    """shard, chunk r -> (n,)."""
    N, k = rank.size, -(-n // rank.size)

    def chunk(c: int) -> slice:
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    whole = rank.memory.alloc(n, shard.dtype, "gathered_parameter")
    whole[chunk(rank.index)] = shard
    for step in range(N - 1):
        rank.exchange(whole[chunk(rank.index - step)], (rank.index + 1) % N,
                      whole[chunk(rank.index - step - 1)], (rank.index - 1) % N)
    return whole


def all_reduce(rank: Rank, x: Array) -> Array:
    """x (n,) -> the sum (n,)."""
    shard = rank.reduce_scatter(x)
    whole: Array = rank.all_gather(shard, length=len(x))
    return whole
