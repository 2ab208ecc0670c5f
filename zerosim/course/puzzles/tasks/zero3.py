"""Puzzle: ZeRO's third stage gathers, uses and frees, and does it again in backward.

Legend: N ranks, L layers of n elements each, k = ⌈n/N⌉.
Source: Rajbhandari et al. 2020 (ZeRO), section 5.3.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import Array, chunks, data, in_sequence, ring_sum, ring_wire
from zerosim.course.puzzles.puzzle import Case, Limit, Mistake, Puzzle, ScalingLayer, held_copy
from zerosim.ranks.rank import Rank

LAYERS = 4

STATEMENT = """
ZeRO-3: a rank rests with a shard of every layer's weights, and nothing more. A layer is gathered when it is
needed, used, and freed at once; in backward it is gathered again:

    forward    gather w0    x1 = f(w0, x0)          free w0
               gather w1    x2 = f(w1, x1)          free w1   ...
    backward   gather w3    dx, dw = b(w3, x3, dy)  free w3   reduce-scatter dw
               gather w2    ...

    zero3(rank, shards, layer, x):
        shards  a list of L arrays, this rank's chunk of each layer's weights
                (n,), cut by ceil(n/N), fp32
        layer   layer.forward(w, x) -> y;  layer.backward(w, x, dy) -> (dx, dw);
                all (n,), and in the ledger
        x       (n,) fp32, this rank's input
        ->  the list of this rank's shards of the mean of dw, layer 0 first

The loss is half the square of the last output, so that its gradient dy is that output itself. Backward needs
each layer's input, so forward keeps it; it must not keep gathered weights. Allowed: exchange, all_gather,
reduce_scatter.
"""

STUB = '''
import zerosim as zs


def zero3(rank, shards, layer, x):
    n, inputs = len(x), []
    for shard in shards:
        w = zs.puzzles.hole("gather this layer's weights")
        inputs.append(x)
        x = layer.forward(w, x)
        zs.puzzles.hole("let the gathered weights go")
    dy, grads = x, [None] * len(shards)
    del x
    for number in reversed(range(len(shards))):
        zs.puzzles.hole("gather the weights again; backward; let them go")
        zs.puzzles.hole("reduce dw, and keep your shard of the mean")
    return grads
'''

HINTS = (
    "rank.all_gather(shard, length=n) gathers. It is a new array in the ledger, until no name holds it.",
    "dx, dw = layer.backward(w, inputs.pop(), dy); then del w, and dy = dx. A name that you do not delete holds on.",
    "grads[number] = rank.reduce_scatter(dw); del dw; grads[number] /= rank.size.",
)


def case(ranks: int, length: int) -> Case:
    """One forward and backward of four layers on N ranks."""
    weights = [data(f"zero3 weights {layer}", 1, length)[0] for layer in range(LAYERS)]
    inputs = data("zero3", ranks, length)
    cut = [chunks(w, ranks) for w in weights]

    def arguments(rank: Rank) -> tuple[Any, ...]:
        mine = [held_copy(rank, shards[rank.index], "parameter", f"layer {layer}") for layer, shards in enumerate(cut)]
        return mine, ScalingLayer(rank), held_copy(rank, inputs[rank.index])

    local = [gradients(weights, x) for x in inputs]
    sums = [ring_sum([mine[layer] for mine in local]) for layer in range(LAYERS)]
    right = sharded([total / ranks for total in sums], ranks)
    gather, chunk = ring_wire("all_gather", length, ranks), -(-length // ranks)
    wire = in_sequence(*[gather, gather, ring_wire("reduce_scatter", length, ranks)] * LAYERS)
    peak = 8 * length + LAYERS * chunk
    return Case(
        ranks, f"n={length}, L={LAYERS}", arguments, right, 4 * peak, wire,
        mistakes=(Mistake("returned shards of the sums, and not of the means", sharded(sums, ranks)),
                  Mistake("returned shards of its own gradients; nothing was added",
                          [[chunks(g, ranks)[rank] for g in mine] for rank, mine in enumerate(local)]),
                  Mistake("returned the layers in the order of backward, the last one first",
                          [mine[::-1] for mine in right]),
                  Mistake("returned whole gradients, and not its shards", [[total / ranks for total in sums]] * ranks)),
        limits=(Limit("peak_nbytes", 4 * (peak + 2 * length), "gathered weights stay; free each layer's as soon as it "
                      "is used, and gather it again in backward"),
                Limit("sent_nbytes", wire.most_nbytes, "two gathers and one reduce-scatter for each layer")),
        shard_nbytes=4 * chunk, scratch_shards=5)


def sharded(vectors: list[Array], ranks: int) -> list[list[Array]]:
    """By rank and layer, the rank's shard of each vector."""
    return [[chunks(vector, ranks)[rank] for vector in vectors] for rank in range(ranks)]


def gradients(weights: list[Array], x: Array) -> list[Array]:
    """The gradient of each layer's weights on one rank: y = w·x, loss ½·Σ y²."""
    inputs = [x]
    for w in weights:
        inputs.append(np.multiply(w, inputs[-1]))
    dy, found = inputs[-1], []
    for w, kept in zip(weights[::-1], inputs[-2::-1], strict=True):
        found.append(np.multiply(kept, dy))
        dy = np.multiply(w, dy)
    return found[::-1]


PUZZLE = Puzzle(
    "zero3", "ZeRO-3 gathers, uses and frees", STATEMENT, STUB, HINTS, case,
    allowed=frozenset({"all_gather", "reduce_scatter"}),
    score="peak: the shards and eight vectors (five activations, one layer's weights, dx, dw); bytes and steps: two "
          "gathers and a reduce-scatter for each layer")
