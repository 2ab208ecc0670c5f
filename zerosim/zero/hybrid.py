"""Hybrid sharding: states lie in shards inside each node, and every node has them all.

Parameters are gathered inside a node, where links are fast. A gradient is reduced in two steps: reduce-scattered inside
each node, in the order of its ring, micro-batch by micro-batch; then, once a step, the shards of all nodes are
all-reduced across, in the order of that ring. Its second cut is the layout's too, and so bits are equal for all stages,
buckets and overlap; against one flat ring they differ where additions round. A shard that rests on the host or on disk
comes to the device for the second step, bucket by bucket, and goes back (offload).

Sources: Zhang et al. 2022 (MiCS, arXiv:2205.00119), sections 3.2 and 3.4 (the reduction in two hops, the second at the
boundary of accumulation); PyTorch's FSDP calls it HYBRID_SHARD.
Legend: M nodes of R ranks; s elements of a rank's shard, 1/R of the padded vector.
"""

from dataclasses import replace

import numpy as np

from zerosim.ranks.call import ceil_cut
from zerosim.ranks.rank import Rank
from zerosim.zero.gradients import Reduction
from zerosim.zero.layout import Bucket, Layout, Region, UnitShapes, lay_out
from zerosim.zero.param_group import ParamGroup
from zerosim.zero.placements import PARTIAL, REPLICATED, SHARDED, Move, Placement, Stage


def lay_out_inside(name: str, shapes: UnitShapes, ranks: int, nodes: int) -> Layout:
    """The layout of R ranks, each the owner of what M neighbors own in one of M·R ranks: its padding is the same."""
    return neighbors_joined(lay_out(name, shapes, ranks * nodes), nodes)


def neighbors_joined(layout: Layout, nodes: int) -> Layout:
    """The layout in which what every M neighbors own has one owner."""
    regions = tuple(replace(region, bounds=region.bounds[::nodes]) for region in layout.regions)
    return replace(layout, ranks=layout.ranks // nodes, regions=regions)


def lay_out_across(inside: Layout, rank: int, nodes: int) -> Layout:
    """The cut of one rank's shard (s,) among the nodes: each of its stretches once. It has no units, and no padding."""
    regions, low = [], 0
    for region in inside.regions:
        length = region.bounds[rank + 1] - region.bounds[rank]
        bounds = tuple(low + bound for bound in ceil_cut(length, nodes))
        regions.append(Region(region.name, low, low + length, low + length, bounds))
        low += length
    return Layout(inside.name, nodes, (), {}, tuple(regions))


def check_hybrid(stage: Stage) -> None:
    """Raises ValueError for gradients that would be whole inside a node while those of other nodes are to be added."""
    if stage.gradients is REPLICATED:
        raise ValueError(f"on a mesh gradients rest as addends or as shards until nodes add theirs, and {stage} keeps "
                         "them replicated; take PARTIAL or SHARDED gradients, as ZeRO's stages have")


class HybridReduction(Reduction):
    """A reduction in two steps: inside the node, to shards, and then of the shards across nodes, where they rest.

    ``replicas`` is a handle among the ranks that have the same shard. With overlap, stretches leave as soon as the last
    backward has their sum inside the node, one bucket at a time.
    """

    def __init__(self, group: ParamGroup, replicas: Rank) -> None:
        super().__init__(group)
        self.replicas, self.layout = replicas, lay_out_across(group.layout, group.rank.index, replicas.size)
        self._under_way: Move | None = None
        self._has_begun = False

    @property
    def ranks(self) -> int:
        """N = M·R, whose addends are summed."""
        return super().ranks * self.replicas.size

    def first_placement(self, want: Placement) -> Placement:
        """Shards: the sums of nodes are the addends of the second step."""
        return SHARDED

    def bucket_summed(self, sums: np.ndarray, bucket: Bucket, agreement: str) -> None:
        """Begins to add up these stretches of the whole vector, of which the shard ``sums`` (s,) has a part of each,
        after those that are under way."""
        self._wait()
        self._has_begun = True
        own = [self.group.layout.owned(self.group.rank.index, span.start, span.stop) for span in bucket.ranges]
        own = [span for span in own if span.start < span.stop]
        if own:
            self._under_way = self._start_across(sums, self.layout.bucket(*own), agreement, async_op=True)

    def finish(self, sums: np.ndarray, agreement: str) -> None:
        """Leaves the sum over nodes in the shard (s,)."""
        self._wait()
        if not self._has_begun:
            ranges = [slice(region.low, region.high) for region in self.layout.regions if region.low < region.high]
            for bucket in self.group.buckets(ranges, self.group.policy.reduce_dtype, self.layout):
                with self.replicas.trace.span(bucket.region_name):
                    self._start_across(sums, bucket, agreement, async_op=False).wait()

    def abandon(self) -> list[Move]:
        """Forgets the step; returns what is under way, for the caller to drop."""
        move, self._under_way, self._has_begun = self._under_way, None, False
        return [] if move is None else [move]

    def _wait(self) -> None:
        move, self._under_way = self._under_way, None
        if move is not None:
            move.wait()

    def _start_across(self, shard: np.ndarray, bucket: Bucket, agreement: str, *, async_op: bool) -> Move:
        parts = bucket.in_vector(shard)
        return self.group.start_bucket(
            bucket, PARTIAL, REPLICATED, source=parts, target=parts, dtype=self.group.policy.reduce_dtype,
            purpose="gradients", agreement=agreement, rank=self.replicas, async_op=async_op)
