"""Puzzle: ZeRO's third stage gathers, uses and frees, and does it again in backward.

Legend: N ranks, L layers of n elements each, k = ⌈n/N⌉.
Source: Rajbhandari et al. 2020 (ZeRO), section 5.3.
"""

import numpy as np

from zerosim.course.puzzles.expected import Array, data, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, held_copy
from zerosim.course.puzzles.tasks.layered import (
    LAYERS,
    ScalingLayer,
    held_shards,
    layer_weights,
    mean_shards,
    refuse_gathered_weights,
)

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
                all (n,), and in rank.memory
        x       (n,) fp32, this rank's input
        ->  the list of this rank's shards of the mean of dw, layer 0 first

The loss is half the square of the last output, so that its gradient dy is that output itself. Backward needs
each layer's input, so forward keeps it; it must not keep gathered weights.
"""

FUNCTION = '''
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
    "rank.all_gather(shard, length=n) gathers. It is a new array in rank.memory, until no name holds it.",
    "dx, dw = layer.backward(w, inputs.pop(), dy); then del w, and dy = dx. A name that you do not delete holds on.",
    "grads[number] = rank.reduce_scatter(dw); del dw; grads[number] /= rank.size.",
)


def case(ranks: int, length: int) -> Case:
    """One forward and backward of four layers on N ranks."""
    weights, inputs = layer_weights("zero3 weights", length), data("zero3", ranks, length)
    right, mistakes = mean_shards([gradients(weights, x) for x in inputs])
    gather, reduction = (traffic(collective, length, ranks) for collective in ("all_gather", "reduce_scatter"))
    chunk = -(-length // ranks)
    peak = 8 * length + LAYERS * chunk
    return Case(
        ranks, f"n={length}, L={LAYERS}",
        lambda rank: (held_shards(rank, weights), ScalingLayer(rank), held_copy(rank, inputs[rank.index])), right,
        4 * peak, [gather, gather, reduction] * LAYERS,
        mistakes=mistakes,
        reasons={"peak_nbytes": "beside the shards eight vectors: x and four activations, one layer's weights, one dx, "
                                "one dw; a name that is not deleted holds on",
                 "sent_nbytes": "two gathers and one reduce-scatter for each layer"},
        look=refuse_gathered_weights,
        shard_nbytes=4 * chunk, scratch_shards=5)


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
    "zero3", "ZeRO-3 gathers, uses and frees", STATEMENT, FUNCTION, HINTS, case,
    allowed=frozenset({"all_gather", "reduce_scatter"}),
    score="peak: the shards and eight vectors (five activations, one layer's weights, dx, dw); bytes and steps: two "
          "gathers and a reduce-scatter for each layer")
