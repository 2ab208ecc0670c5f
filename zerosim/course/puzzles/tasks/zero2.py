"""Puzzle: ZeRO's second stage reduces while backward goes, and keeps only shards.

Legend: N ranks, L layers of n_l elements, k_l = ⌈n_l/N⌉.
Source: Rajbhandari et al. 2020 (ZeRO), section 5.2.
"""

from zerosim.course.puzzles.puzzle import Case, Puzzle
from zerosim.course.puzzles.tasks.layered import backward_case, refuse_whole_gradients

STATEMENT = """
ZeRO-2: backward computes gradients layer by layer, from the last to the first. As soon as a layer's gradient
is there, it is reduced, each rank keeps its shard of the mean, and the whole gradient is let go before the
next one is computed. At no time does a rank hold the gradients of the whole model:

    layer 3   [g g g g g]  reduce-scatter ->  [s]     and the g are freed
    layer 2   [g g g g g]  reduce-scatter ->  [s]
    ...                              at the end: one shard of every layer

    zero2(rank, lengths, gradient_of):
        lengths  [n_0, n_1, ...]
        gradient_of(layer)  ->  (n_l,) fp32, in rank.memory
        ->  the list of this rank's shards of the mean gradients, fp32, layer 0
            first; each is its chunk of the cut by ceil(n_l/N)

gradient_of must be called from the last layer to the first, each once. What it returns is yours: `del` the
name, or rank.memory.free() it. A rank may hold its shards and two layers at most; one for the star.
"""

FUNCTION = '''
def zero2(rank, lengths, gradient_of):
    shards = [None] * len(lengths)
    for layer in reversed(range(len(lengths))):
        gradient = gradient_of(layer)
        shards[layer] = zs.puzzles.hole("your shard of the sum over ranks")
        zs.puzzles.hole("the mean")
        zs.puzzles.hole("let the whole gradient go, before the next one is computed")
    return shards
'''

HINTS = (
    "A name holds its array until it is given another one, and that happens after the next gradient has been computed.",
    "shards[layer] = rank.reduce_scatter(gradient); shards[layer] /= rank.size.",
    "`del gradient` as the loop's last line: then one layer is alive at a time.",
)


def case(ranks: int, length: int) -> Case:
    """A backward pass of four layers on N ranks."""
    return backward_case("zero2", ranks, length, alive=1, why="one layer's whole gradient is alive at a time",
                         look=refuse_whole_gradients)


PUZZLE = Puzzle(
    "zero2", "ZeRO-2 reduces as backward goes", STATEMENT, FUNCTION, HINTS, case,
    allowed=frozenset({"reduce_scatter", "all_reduce"}),
    score="peak: the shards, the largest layer and the ring's buffers; bytes and steps: one reduce-scatter per layer")
