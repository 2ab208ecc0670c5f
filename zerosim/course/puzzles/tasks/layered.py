"""The common part of the puzzles about a backward pass: layers, their gradients, and what each rank owns of them.

Legend: N ranks, L layers of n_l elements, k_l = ⌈n_l/N⌉.
"""

from typing import Any, NamedTuple

from zerosim.course.puzzles.expected import Array, Wire, chunks, data, in_sequence, ring_sum, ring_wire
from zerosim.course.puzzles.puzzle import Backward, Mistake
from zerosim.ranks.rank import Rank


class Layers(NamedTuple):
    """A backward pass on N ranks: ``gradients[rank][layer]`` (n_l,), and ``sums[layer]`` over ranks."""

    lengths: tuple[int, ...]
    gradients: list[list[Array]]
    sums: list[Array]

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.gradients)

    @property
    def shard_lengths(self) -> list[int]:
        """k_l by layer: the longest shard."""
        return [-(-length // self.ranks) for length in self.lengths]

    @property
    def wire(self) -> Wire:
        """A ring reduce-scatter of every layer, one after another."""
        return in_sequence(*(ring_wire("reduce_scatter", length, self.ranks) for length in self.lengths))

    def arguments(self, rank: Rank) -> tuple[Any, ...]:
        """lengths, gradient_of."""
        return list(self.lengths), Backward(rank, self.gradients[rank.index])

    def sharded(self, vectors: list[Array]) -> list[list[Array]]:
        """By rank and layer, the rank's shard of each vector."""
        cut = [chunks(vector, self.ranks) for vector in vectors]
        return [[shards[rank] for shards in cut] for rank in range(self.ranks)]

    @property
    def right(self) -> list[list[Array]]:
        """By rank and layer, the shard of the mean."""
        return self.sharded([total / self.ranks for total in self.sums])

    @property
    def mistakes(self) -> tuple[Mistake, ...]:
        """Known wrong results: without a mean, without a sum, in the wrong order of layers, whole."""
        local = [[chunks(g, self.ranks)[rank] for g in mine] for rank, mine in enumerate(self.gradients)]
        return (Mistake("returned shards of the sums, and not of the means", self.sharded(self.sums)),
                Mistake("returned shards of its own gradients; nothing was added", local),
                Mistake("divided its own gradients; nothing was added",
                        [[one / self.ranks for one in mine] for mine in local]),
                Mistake("returned the layers in the order of backward, the last one first",
                        [mine[::-1] for mine in self.right]),
                Mistake("returned whole gradients, and not its shards",
                        [[total / self.ranks for total in self.sums]] * self.ranks))


def layers(seed: str, ranks: int, length: int) -> Layers:
    """Four layers of about n elements."""
    lengths = (length, length + 2, length, length + 1)
    by_layer = [data(f"{seed} {layer}", ranks, n) for layer, n in enumerate(lengths)]
    return Layers(lengths, [[vectors[rank] for vectors in by_layer] for rank in range(ranks)],
                  [ring_sum(vectors) for vectors in by_layer])
