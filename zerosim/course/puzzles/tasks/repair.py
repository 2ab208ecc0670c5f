"""Puzzle: a broken program, with three mistakes in it.

Legend: N ranks, L layers of n elements each, k = ⌈n/N⌉.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import chunks, data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, held_copy
from zerosim.course.puzzles.tasks.layered import (
    LAYERS,
    ScalingLayer,
    held_shards,
    layer_weights,
    refuse_gathered_weights,
)
from zerosim.ranks.rank import Rank

STATEMENT = """
This program runs, on any number of ranks, and nobody complains. It goes forward through four layers whose
weights lie in shards, and reduces a gradient round a ring. Three things are wrong with it:

    forward    gather, use, free?            a rank holds more than it should
    ring       chunk c: c+1, c+2, ..., c?    others add in another order
    gradient   the mean?

    repair(rank, shards, layer, x, gradient):
        shards  a list of L arrays, this rank's chunk of each layer's weights
                (n,), cut by ceil(n/N)
        layer   layer.forward(w, x) -> y (n,)
        x, gradient  (n,) fp32, this rank's
        ->  (y, mean): the last output (n,), and this rank's chunk of the
            gradient's mean over ranks

Each mistake that you repair uncovers the next one. x and the gradient are read-only.
"""

FUNCTION = '''
def repair(rank, shards, layer, x, gradient):
    n, N = len(x), rank.size
    weights = [rank.all_gather(shard, length=n) for shard in shards]
    for w in weights:
        x = layer.forward(w, x)

    k = -(-n // N)

    def chunk(c):
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    landings = [rank.memory.alloc(k, np.float32, "workspace") for _ in range(2)]
    partial = gradient[chunk(rank.index + 1)]
    for step in range(N - 1):
        own = gradient[chunk(rank.index + 2 + step)]
        landing = landings[step % 2][:len(own)]
        rank.exchange(partial, (rank.index - 1) % N, landing, (rank.index + 1) % N)
        landing += own
        partial = landing
    return x, partial
'''

HINTS = (
    "There are three mistakes: a sum in place of a mean, a ring that goes the other way, which shows in bits from N = "
    "3 on, and something that stays in memory. The checker names one after the other.",
    "A list of gathered weights keeps all of them. Gather inside the loop, and let go before the next turn.",
    "The ring goes to the right: send to (index + 1) % N, receive from (index - 1) % N, begin with chunk index - 1, "
    "and count down. rank.reduce_scatter(gradient) does the same.",
    "mean /= N changes the array that you received into; at N = 1 that is the gradient itself, which is read-only: "
    "copy it into a landing first.",
)


def case(ranks: int, length: int) -> Case:
    """Four layers forward and one gradient on N ranks."""
    weights = layer_weights("repair weights", length)
    xs, gradients = data("repair x", ranks, length), data("repair", ranks, length)
    ys = [x.copy() for x in xs]
    for y in ys:
        for w in weights:
            np.multiply(w, y, out=y)

    def arguments(rank: Rank) -> tuple[Any, ...]:
        return (held_shards(rank, weights), ScalingLayer(rank), held_copy(rank, xs[rank.index]),
                held_copy(rank, gradients[rank.index], "gradient"))

    total = ring_sum(gradients)
    left = chunks(ring_sum(gradients, -1), ranks)
    chunk = -(-length // ranks)
    peak = 5 * length + LAYERS * chunk
    return Case(
        ranks, f"n={length}, L={LAYERS}", arguments,
        [(y, mean) for y, mean in zip(ys, chunks(total / ranks, ranks), strict=True)],
        4 * peak, [*[traffic("all_gather", length, ranks)] * LAYERS, traffic("reduce_scatter", length, ranks)],
        mistakes={"returned the sum of the gradients, and not their mean":
                      list(zip(ys, chunks(total, ranks), strict=True)),
                  "let the gradients go round the ring the other way":
                      [(y, one / ranks) for y, one in zip(ys, left, strict=True)],
                  "let the gradients go round the ring the other way, and returned their sum, not their mean":
                      list(zip(ys, left, strict=True))},
        reasons={"peak_nbytes": "the shards, x, the gradient, two activations and one layer's weights are all at once",
                 "sent_nbytes": "one gather for each layer, and one reduce-scatter"},
        look=refuse_gathered_weights,
        shard_nbytes=4 * chunk, scratch_shards=5)


PUZZLE = Puzzle(
    "repair", "Repair a broken program", STATEMENT, FUNCTION, HINTS, case,
    allowed=frozenset({"all_gather", "reduce_scatter"}),
    returns=("y", "mean"),
    score="peak: the shards and five vectors (x, the gradient, two activations, one layer's weights); bytes and steps: "
          "a gather for each layer and one reduce-scatter")
