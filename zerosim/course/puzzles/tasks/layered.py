"""The puzzles about layers: ZeRO's stages 2 and 3, a hidden reduction, a broken program; first their common parts.

Legend: N ranks, L layers of n_l elements, k_l = ⌈n_l/N⌉; chunk c of n is elements min(n, c·k) to min(n, (c+1)·k).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import Array, chunk_slices, chunks, data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Mistakes, held_copy
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Collective, Compute, Held, Traces, Wait

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


def zero2(ranks: int, length: int) -> Case:
    """A backward pass of four layers on N ranks, which reduces on the way and keeps only shards.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5.2.
    """
    return backward_case("zero2", ranks, length, alive=1, why="one layer's whole gradient is alive at a time",
                         look=refuse_whole_gradients)


def zero3(ranks: int, length: int) -> Case:
    """One forward and backward of four layers on N ranks: gather, use and free, and again in backward.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5.3.
    """
    weights, inputs = layer_weights("zero3 weights", length), data("zero3", ranks, length)
    right, mistakes = mean_shards([scaling_gradients(weights, x) for x in inputs])
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


def scaling_gradients(weights: list[Array], x: Array) -> list[Array]:
    """The gradient of each layer's weights on one rank: y = w·x, loss ½·Σ y²."""
    inputs = [x]
    for w in weights:
        inputs.append(np.multiply(w, inputs[-1]))
    dy, found = inputs[-1], []
    for w, kept in zip(weights[::-1], inputs[-2::-1], strict=True):
        found.append(np.multiply(kept, dy))
        dy = np.multiply(w, dy)
    return found[::-1]


def overlap(ranks: int, length: int) -> Case:
    """A backward pass of four layers on N ranks: a reduction travels while the next gradient is computed."""
    return backward_case("overlap", ranks, length, alive=2, look=exposed,
                         why="more than two whole gradients are alive; wait for one before the next is sent on its way")


def exposed(traces: Traces) -> str | None:
    """Words for a reduction that nothing was computed beside; None where each but the last is hidden."""
    for rows in (trace.rows for trace in traces):
        calls = [(place, row) for place, row in enumerate(rows) if isinstance(row, Collective)]
        for number, (place, row) in enumerate(calls):
            if not row.asynchronous:
                return (f"reduction {number} of {len(calls)} stands and waits: it was called without async_op=True, "
                        "and nothing is computed while it travels")
            wait = next(at for at, other in enumerate(rows) if isinstance(other, Wait) and other.call is row.call)
            hidden = any(isinstance(other, Compute) for other in rows[place:wait])
            if not hidden and number < len(calls) - 1:
                return (f"reduction {number} of {len(calls)} is waited for before anything is computed: issue it, "
                        "compute the next gradient, and only then wait")
    return None


def repair(ranks: int, length: int) -> Case:
    """Four layers forward and one gradient on N ranks: a broken program, with three mistakes in it."""
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
