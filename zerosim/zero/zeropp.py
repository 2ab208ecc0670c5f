"""ZeRO++: three ways to send less between nodes, of a ZeRO-3 whose states are cut among all ranks.

hpZ keeps, of a unit that has been gathered, a second shard in the compute format, cut among the ranks of a node: until
the weights change it is gathered again inside the node, and only a unit's first gather after an update crosses nodes.
(In the paper every forward does, which is the same where a step has one micro-batch.)
qwZ gathers weights as blockwise quantized integers; every rank computes with what comes back, the owner too. qgZ
replaces the ring of a reduce-scatter by two all-to-alls of quantized gradients, inside nodes and then across, so that a
gradient is quantized twice and not once per hop; whoever receives adds up in fp32, in the order of ranks. Secondary
shards, and what is quantized, are on the device, wherever states rest (offload).

hpZ changes no bit. The other two do: an error is at most that of `numerics.quantization.Blockwise.error_bound`, of each
addend and once more of a node's sum. Blocks begin with each rank's chunk of a bucket, so bits depend on buckets too.

Source: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), sections 3.1 (qwZ), 3.2 (hpZ) and 3.3 (qgZ).
Legend: M nodes of R ranks, N = M·R; rank (m, i) is the one at place i of node m, and owns chunk m·R + i; u elements of
one padded unit.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from zerosim.numerics.policy import AVERAGES, Policy
from zerosim.numerics.quantization import Blockwise, ZeroPlusPlus
from zerosim.ranks.call import Cut
from zerosim.ranks.mesh import Mesh
from zerosim.ranks.rank import Rank
from zerosim.zero.gradients import Reduction
from zerosim.zero.hybrid import neighbors_joined
from zerosim.zero.layout import Bucket, Layout, Parts
from zerosim.zero.param_group import ParamGroup
from zerosim.zero.placements import REPLICATED, SHARDED, Move, Placement, Stage
from zerosim.zero.unshard import UnitGather

BUFFER = "communication_buffer"


def check_parts(asked: ZeroPlusPlus, stage: Stage, policy: Policy) -> None:
    """Raises ValueError for a stage in which something of it would change nothing, and for options of a ring."""
    if stage.parameters is not SHARDED and (asked.hpz or asked.quantized_weights):
        raise ValueError(f"hpZ and qwZ are about the gathers of sharded parameters, and {stage} has none; take "
                         "stage=3, or quantized_gradients alone")
    if asked.quantized_gradients and not (stage.optimizer is SHARDED and stage.gradients is not REPLICATED):
        raise ValueError(f"qgZ reduces gradients to shards, and {stage} needs them whole; take stage 1, 2 or 3")
    if asked.quantized_gradients and (policy.wire is not None or policy.average != AVERAGES[0]):
        raise ValueError(f"wire={policy.wire!r} and average={policy.average!r} are options of a ring of gradients; "
                         "with quantized_gradients owners add in fp32, so leave them out of the policy")


def clear_padding_of(rank: Rank, bucket: Bucket, vector: np.ndarray, owners: Sequence[int]) -> None:
    """Sets the padding in these owners' chunks of a bucket to zero: in debug mode it is NaN, and a block has one scale.
    """
    at = 0
    for owner in owners if rank.memory.debug else ():
        for span, cut in zip(bucket.ranges, bucket.cuts, strict=True):
            low, high = span.start + cut[owner], span.start + cut[owner + 1]
            padding = bucket.layout.padding(low, high)
            vector[at + padding.start - low:at + high - low] = 0
            at += high - low


class ZeroPlusPlusGather(UnitGather):
    """The gathers of hpZ and qwZ: across nodes once after each update, then inside."""

    in_common = False

    def __init__(self, rank: Rank, mesh: Mesh, asked: ZeroPlusPlus) -> None:
        self.mesh, self.asked, self.inside = mesh, asked, mesh.inside(rank)
        self._secondary: dict[tuple[ParamGroup, str], np.ndarray] = {}
        self._layouts: dict[ParamGroup, Layout] = {}  # among the ranks of a node

    def start(self, group: ParamGroup, name: str, whole: np.ndarray, *, async_op: bool) -> Iterator[Move]:
        """Begins to gather one unit (u,): from secondary shards where there are any."""
        span, place = group.layout.units[name], self.inside.index
        inside = self._layouts.setdefault(group, neighbors_joined(group.layout, self.mesh.nodes))
        shard = self._secondary.get((group, name))
        if shard is None:
            yield from self._start_across(group, name, whole, async_op=async_op)
            if self.asked.hpz:
                cut = inside.cut(span.start, span.stop)
                yield Move(whole[cut[place]:cut[place + 1]], partial(self.keep, group, name), async_op=False)
            return
        first = inside.owned(place, span.start, span.stop).start
        for bucket in group.buckets([span], whole.dtype, inside):
            (part,) = bucket.ranges
            own = inside.owned(place, part.start, part.stop)
            elements = shard[own.start - first:own.stop - first]
            yield group.start_bucket(
                bucket, SHARDED, REPLICATED, source=[(slice(0, len(elements)), elements)],
                target=self.target(bucket, span, whole), dtype=whole.dtype, purpose="parameters",
                agreement=f"weights of {name}", rank=self.inside, async_op=async_op)

    def _start_across(self, group: ParamGroup, name: str, whole: np.ndarray, *, async_op: bool) -> Iterator[Move]:
        form, span, rank = self.asked.weights, group.layout.units[name], group.rank.agreeing(f"weights of {name}")
        if form is None:
            yield from super().start(group, name, whole, async_op=async_op)
            return
        for bucket in group.buckets([span], whole.dtype):
            ((_, resting),) = bucket.own_in_shard(rank.index, group.parameter)
            own, ((_, target),) = group.store.read(resting), self.target(bucket, span, whole)
            clear_padding_of(rank, bucket, own, [rank.index])
            sent = rank.memory.alloc(form.nbytes(len(own)), np.uint8, BUFFER, "quantized")
            form.quantize(rank.kernels, own, sent)
            splits = (0, *accumulate(form.nbytes(high - low) for low, high in pairwise(bucket.cut)))
            found = rank.all_gather(sent, splits=splits, async_op=async_op, purpose="parameters",
                                    **group.options.of_collectives)
            yield Move(found, partial(self._dequantize, form, bucket.cut, splits, target), async_op=async_op)

    def _dequantize(self, form: Blockwise, cut: Cut, splits: Cut, target: np.ndarray, arrived: np.ndarray) -> None:
        for (low, high), (first, last) in zip(pairwise(cut), pairwise(splits), strict=True):
            form.dequantize(self.inside.kernels, arrived[first:last], target[low:high])

    def own_parts(self, group: ParamGroup, name: str) -> Iterator[np.ndarray]:
        """None where a secondary shard is there."""
        if (group, name) not in self._secondary:
            yield from super().own_parts(group, name)

    def keep(self, group: ParamGroup, name: str, part: np.ndarray) -> None:
        """Keeps this rank's part (u/R,) of a unit inside its node, as its secondary shard."""
        shard = self.inside.memory.alloc(len(part), part.dtype, "secondary_parameter", name)
        self.inside.kernels.cast_pack(part, shard)
        self._secondary[group, name] = shard

    def weights_change(self) -> None:
        """Drops the secondary shards, which are of weights that change now."""
        for shard in self._secondary.values():
            self.inside.memory.free(shard)
        self._secondary.clear()


class QuantizedReduction(Reduction):
    """qgZ: quantized all-to-all inside nodes, sums, and the same across nodes."""

    bits_depend_on_buckets = True  # a block is of one bucket

    def __init__(self, group: ParamGroup, mesh: Mesh, form: Blockwise) -> None:
        super().__init__(group)
        self.rank, self.mesh, self.form = group.rank, mesh, form
        self.inside, self.across = mesh.inside(group.rank), mesh.across(group.rank)

    def start(self, bucket: Bucket, want: Placement, *, source: Parts, target: Parts, dtype: np.dtype[Any],
              agreement: str, add: bool = False, async_op: bool = False) -> Move:
        """Begins to reduce a bucket's addends to shards: the first of the two all-to-alls. The second, when this is
        waited for, puts the sum of this rank's chunk into ``target``, with ``add`` onto what is there.
        """
        vector, cut = self.group.store.packed(source, bucket.length, dtype), bucket.cut
        _, place = self.mesh.place(self.rank.index)
        clear_padding_of(self.rank, bucket, vector, range(self.rank.size))
        slices = [self.mesh.members_across(i) for i in range(self.mesh.ranks_per_node)]
        splits, sent = self._quantized([vector[cut[owner]:cut[owner + 1]] for owners in slices for owner in owners],
                                       each=self.mesh.nodes)
        found = self.inside.agreeing(agreement).all_to_all(sent, splits=splits, async_op=async_op, purpose="gradients")
        lengths = [cut[owner + 1] - cut[owner] for owner in slices[place]]

        def finish(arrived: np.ndarray) -> None:
            sums = self._sums(arrived, lengths, self.mesh.ranks_per_node)
            of_nodes = [sums[low:high] for low, high in pairwise((0, *accumulate(lengths)))]
            splits, sent = self._quantized(of_nodes, each=1)
            found = self.across.agreeing(agreement).all_to_all(sent, splits=splits, purpose="gradients")
            total = self._sums(found, [cut[self.rank.index + 1] - cut[self.rank.index]], self.mesh.nodes)
            self.group.store.put_parts(target, total, add=add)

        return Move(found, finish, async_op=async_op)

    def _quantized(self, chunks: Sequence[np.ndarray], *, each: int) -> tuple[Cut, np.ndarray]:
        """The chunks as bytes, one after the other, and where every ``each`` of them begin."""
        ends = (0, *accumulate(self.form.nbytes(len(chunk)) for chunk in chunks))
        sent = self.rank.memory.alloc(ends[-1], np.uint8, BUFFER, "quantized")
        for chunk, (low, high) in zip(chunks, pairwise(ends), strict=True):
            self.form.quantize(self.rank.kernels, chunk, sent[low:high])
        return ends[::each], sent

    def _sums(self, arrived: np.ndarray, lengths: Sequence[int], sources: int) -> np.ndarray:
        """The sums, fp32, of what so many ranks sent of chunks of these lengths, added in the order of ranks."""
        total = self.rank.memory.alloc(sum(lengths), np.float32, BUFFER, "sum")
        low = 0
        for source in range(sources):
            at = 0
            for length in lengths:
                high = low + self.form.nbytes(length)
                self.form.dequantize(self.rank.kernels, arrived[low:high], total[at:at + length], add=source > 0)
                low, at = high, at + length
        return total
