"""The hierarchical collectives, in two steps, inside the nodes of a mesh and across: ``algorithm="hierarchical(4)"``.

Ranks stand node by node, as a launcher counts them: rank r has the place r mod R in node r // R. Links inside a node
are fast, those between nodes slow. A flat ring sends the whole vector over both. A hierarchical reduce-scatter first
adds up inside each node; what is left to be added across nodes is one R-th of the vector for each rank. An all-gather
goes the same way back. ``hierarchical(4)`` names nodes of 4 ranks.

Legend: n elements; M nodes of R ranks each, N = M·R; rank (m, i) is the one at place i of node m, and owns chunk
m·R + i. Slice i are the chunks of place i in all nodes: n/R elements.
Sources: Zhang et al. 2022 (MiCS, arXiv:2205.00119), sections 3.2 and 3.3; Wang et al. 2023 (ZeRO++, arXiv:2306.10209),
section 3.3, where the chunks are reordered in the same way.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zerosim.ranks.call import Array, Buffer, Cut, Exchanges, PendingCall

OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")


# -- The generators: chunks are packed slice by slice, so that a node's part of the work is a ring over slices ---------


def node_size(operation: str, name: str, ranks: int) -> int:
    """R, which ``hierarchical(R)`` names for N ranks.

    Raises ValueError for a collective that goes no such way, for another form, and for an R that does not divide N.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"{operation} by {name!r}: only {', '.join(OPERATIONS)} go in two steps; take another "
                         "algorithm")
    match = re.fullmatch(r"hierarchical\((\d+)\)", name)
    ranks_per_node = int(match[1]) if match else 0
    if not ranks_per_node:
        raise ValueError(f"{operation} by {name!r}: name the ranks of a node, as hierarchical(4) does")
    if ranks % ranks_per_node:
        raise ValueError(f"{operation} by {name} needs whole nodes of {ranks_per_node} ranks, and this group has "
                         f"{ranks}; take a number that divides it, or ring")
    return ranks_per_node


@dataclass(frozen=True, slots=True)
class InTwoSteps:
    """The collectives, each a generator that one rank runs: a ring inside every node, and a ring across nodes.

    Its fields are those rings, and the buffers of the reduce-scatter's: `ranks.collectives`, which has them and whose
    table has these methods as rows, hands them in.
    """

    reduce_scatter_ring: Callable[[PendingCall, Array, Array], Exchanges]
    all_gather_ring: Callable[[PendingCall, Array, Array], Exchanges]
    ring_buffers: Callable[[PendingCall], list[Buffer]]

    def reduce_scatter(self, me: PendingCall, x: Array, out: Array) -> Exchanges:
        """A ring inside each node over slices, then a ring across nodes over the chunks of a slice: R-1 + M-1 steps.

        Chunk m·R + i is a sum of nodes' sums: inside a node in the order i+1, i+2, ..., i, across in m+1, m+2, ..., m.
        Of n elements a rank sends n(R-1)/R inside its node and n/R·(M-1)/M to others. ``x`` (n,), ``out``
        (len(chunk r),).
        """
        packed = me.buffers[0]
        _pack(me, x, packed)
        yield from self._add_up(me, packed, out)

    def all_gather(self, me: PendingCall, x: Array, out: Array) -> Exchanges:
        """A ring across nodes, then a ring inside each: M-1 + R-1 steps. ``x`` (len(chunk r),), ``out`` (n,)."""
        packed = me.buffers[0]
        inside, across = _parts(me, packed)
        me.copy(x, across.chunk(across.x, across.index))
        yield from self._collect(me, inside, across)
        _unpack(me, packed, out)

    def all_reduce(self, me: PendingCall, x: Array, out: Array) -> Exchanges:
        """The reduce-scatter, then the all-gather, packed once: 2(R-1) + 2(M-1) steps. ``x`` (n,), ``out`` (n,)."""
        packed = me.buffers[0]
        inside, across = _parts(me, packed)
        _pack(me, x, packed)
        yield from self._add_up(me, packed, across.chunk(across.x, across.index))
        yield from self._collect(me, inside, across)
        _unpack(me, packed, out)

    def _add_up(self, me: PendingCall, packed: Array, out: Array) -> Exchanges:
        inside, across = _parts(me, packed)
        inside.buffers, across.buffers = me.buffers[1:3], me.buffers[3:5]
        yield from _inside(me, self.reduce_scatter_ring(inside, packed, across.x))
        yield from _across(me, self.reduce_scatter_ring(across, across.x, out))

    def _collect(self, me: PendingCall, inside: PendingCall, across: PendingCall) -> Exchanges:
        """Both rings of the all-gather, in place: the own chunk lies in the packed vector already."""
        yield from _across(me, self.all_gather_ring(across, across.chunk(across.x, across.index), across.x))
        yield from _inside(me, self.all_gather_ring(inside, across.x, inside.x))

    def buffers(self, me: PendingCall) -> list[Buffer]:
        """The whole vector, slice by slice, and what the two rings receive in turn."""
        inside, across = _parts(me, me.x[:0])
        return [(me.call.length, me.call.dtype), *self.ring_buffers(inside), *self.ring_buffers(across)]


def _node_size(me: PendingCall) -> int:
    return node_size(me.call.operation, me.call.algorithm, me.size)


def _parts(me: PendingCall, packed: Array) -> tuple[PendingCall, PendingCall]:
    """The rank's parts in the ring inside its node, of the packed vector, and in the one across, of its slice."""
    each = _node_size(me)
    node, place = divmod(me.index, each)
    chunks = [[me.length(rank) for rank in range(i, me.size, each)] for i in range(each)]
    slices: Cut = (0, *accumulate(map(sum, chunks)))
    own = packed[slices[place]:slices[place + 1]]
    return (_part(me, place, slices, packed), _part(me, node, (0, *accumulate(chunks[place])), own))


def _part(me: PendingCall, index: int, cut: Cut, x: Array) -> PendingCall:
    call = me.call._replace(group=tuple(range(len(cut) - 1)), cut=cut, algorithm="ring")
    return PendingCall(call, index, me.kernels, x, x)


def _inside(me: PendingCall, steps: Exchanges) -> Exchanges:
    """The exchanges of a ring inside the node, by ranks and chunks of the whole call: a slice has one of each node."""
    each = _node_size(me)
    first = me.index - me.index % each
    return _among(steps, range(first, first + each), [range(i, me.size, each) for i in range(each)])


def _across(me: PendingCall, steps: Exchanges) -> Exchanges:
    """The exchanges of a ring across nodes, by ranks and chunks of the whole call."""
    each = _node_size(me)
    members = range(me.index % each, me.size, each)
    return _among(steps, members, [[member] for member in members])


def _among(steps: Exchanges, members: Sequence[int], chunks: Sequence[Sequence[int]]) -> Exchanges:
    for e in steps:
        assert e.to is not None
        assert e.source is not None
        yield replace(e, to=members[e.to], source=members[e.source],
                      chunks=tuple(chunk for c in e.chunks for chunk in chunks[c]))


def _pack(me: PendingCall, x: Array, packed: Array) -> None:
    """Puts the chunks of a vector slice by slice."""
    for here, there in _places(me):
        me.copy(x[there], packed[here])


def _unpack(me: PendingCall, packed: Array, out: Array) -> None:
    for here, there in _places(me):
        me.copy(packed[here], out[there])


def _places(me: PendingCall) -> Iterable[tuple[slice, slice]]:
    """The place of each chunk in the packed vector, and in the vector."""
    each, at = _node_size(me), 0
    for i in range(each):
        for rank in range(i, me.size, each):
            there = me.bounds(rank)
            yield slice(at, at + there.stop - there.start), there
            at += there.stop - there.start
