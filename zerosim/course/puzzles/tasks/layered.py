"""The common parts of the puzzles about layers: backward passes and layers to call, weights in shards, mean gradients.

Legend: N ranks, L layers of n_l elements, k_l = ⌈n_l/N⌉; chunk c of n is elements min(n, c·k) to min(n, (c+1)·k).
"""

from collections.abc import Callable, Sequence

import numpy as np

from zerosim.course.puzzles.expected import Array, chunk_slices, chunks, data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Mistakes, held_copy
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Held, Traces

LAYERS = 4


class Backward:
    """A backward pass to be called layer by layer: ``gradient_of(layer)`` computes and charges a layer's gradient.

    It goes from the last layer to the first, each once; ValueError otherwise. ``gradients[layer]`` are (n_l,).
    """

    def __init__(self, rank: Rank, gradients: Sequence[Array]) -> None:
        self._rank, self._gradients, self._next = rank, gradients, len(gradients) - 1

    def __call__(self, layer: int) -> Array:
        """The gradient of a layer's weights, (n_l,)."""
        if layer != self._next:
            raise ValueError(f"backward was asked for layer {layer} where layer {self._next} is next: it goes from the "
                             "last layer to the first, each once")
        self._next -= 1
        gradient = self._gradients[layer]
        self._rank.trace.compute(flops=4 * gradient.size, nbytes=3 * gradient.nbytes)
        return held_copy(self._rank, gradient, "unit_gradient", f"layer {layer}")


class ScalingLayer:
    """A layer of the simplest kind, y = w·x by element; what it makes is charged. Arrays are (n,)."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def forward(self, w: Array, x: Array) -> Array:
        """y = w·x."""
        return self._product(w, x, "activation")

    def backward(self, w: Array, x: Array, dy: Array) -> tuple[Array, Array]:
        """(dx, dw) = (w·dy, x·dy)."""
        return self._product(w, dy, "activation_gradient"), self._product(x, dy, "unit_gradient")

    def _product(self, a: Array, b: Array, kind: str) -> Array:
        out = self._rank.memory.alloc(a.shape, a.dtype, kind)
        self._rank.trace.compute(flops=a.size, nbytes=3 * a.nbytes)
        np.multiply(a, b, out=out)
        return out


def layer_weights(seed: str, length: int) -> list[Array]:
    """The weights (n,) of four layers."""
    return [data(f"{seed} {layer}", 1, length)[0] for layer in range(LAYERS)]


def held_shards(rank: Rank, weights: Sequence[Array]) -> list[Array]:
    """This rank's chunk of every layer's weights."""
    return [held_copy(rank, w[chunk_slices(len(w), rank.size)[rank.index]], "parameter", f"layer {layer}")
            for layer, w in enumerate(weights)]


def mean_shards(gradients: Sequence[Sequence[Array]]) -> tuple[list[list[Array]], Mistakes]:
    """The shards of the mean of ``gradients[rank][layer]`` over ranks, by rank and layer, and known wrong results."""
    ranks = len(gradients)
    sums = [ring_sum(of_layer) for of_layer in zip(*gradients, strict=True)]
    means = [total / ranks for total in sums]

    def sharded(vectors: Sequence[Array]) -> list[list[Array]]:
        cut = [chunks(vector, ranks) for vector in vectors]
        return [[shards[rank] for shards in cut] for rank in range(ranks)]

    right, local = sharded(means), [sharded(mine)[rank] for rank, mine in enumerate(gradients)]
    return right, {
        "returned shards of the sums, and not of the means": sharded(sums),
        "returned shards of its own gradients; nothing was added": local,
        "divided its own gradients; nothing was added": [[one / ranks for one in mine] for mine in local],
        "returned the layers in the order of backward, the last one first": [mine[::-1] for mine in right],
        "returned whole gradients, and not its shards": [means] * ranks}


def refuse_more_than_two(traces: Traces, is_counted: Callable[[Held], bool], what: str, instead: str) -> str | None:
    """The words for a rank that held more than two such arrays at one moment of a run: what it kept, not what it freed.
    """
    for rank, trace in enumerate(traces):
        alive, most = set[int](), 0
        for row in trace.rows:
            if isinstance(row, Held) and is_counted(row):
                (alive.add if row.nbytes > 0 else alive.discard)(row.number)
                most = max(most, len(alive))
        if most > 2:
            return f"rank {rank} holds {what.format(most)} at one moment, where one is enough: {instead}"
    return None


def refuse_gathered_weights(traces: Traces) -> str | None:
    """The words for a rank that keeps gathered weights."""
    return refuse_more_than_two(
        traces, lambda row: row.name == "all_gather", "{} gathered arrays of weights",
        "let each layer's go (del w) as soon as it is used, and gather it again when it is needed")


def refuse_whole_gradients(traces: Traces) -> str | None:
    """The words for a rank that keeps the whole gradients of layers."""
    return refuse_more_than_two(
        traces, lambda row: row.kind == "unit_gradient", "the whole gradients of {} layers",
        "reduce each layer's as soon as it is there, and let it go")


def backward_case(seed: str, ranks: int, length: int, *, alive: int, why: str,
                  look: Callable[[Traces], str | None] = lambda traces: None) -> Case:
    """A backward pass of four layers of about n elements on N ranks.

    So many whole gradients may be alive, each on its way through two buffers; ``why`` is said where more are.
    """
    lengths = (length, length + 2, length, length + 1)
    by_layer = [data(f"{seed} {layer}", ranks, n) for layer, n in enumerate(lengths)]
    gradients = list(zip(*by_layer, strict=True))
    right, mistakes = mean_shards(gradients)
    shards = [-(-n // ranks) for n in lengths]
    buffers = min(ranks - 1, 2) * max(shards)
    return Case(
        ranks, f"n={', '.join(map(str, lengths))}",
        lambda rank: (list(lengths), Backward(rank, gradients[rank.index])), right,
        4 * (sum(shards) + alive * max(lengths) + buffers), [traffic("reduce_scatter", n, ranks) for n in lengths],
        mistakes=mistakes,
        reasons={"sent_nbytes": "a rank needs the sum of its own shard only", "peak_nbytes": why},
        look=look, shard_nbytes=4 * max(shards), scratch_shards=5)
