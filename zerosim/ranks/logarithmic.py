"""The algorithms of few steps, about log2 N: trees, halving and doubling, and what swaps more than one chunk at once.

Each is a generator that one rank runs, as those of `ranks.collectives` are, whose table has them all.

Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].
Sources of steps and bytes: Thakur, Rabenseifner & Gropp 2005, sections 4.1 to 4.5; Bruck et al. 1997; Hensgen, Finkel
& Manber 1988.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from zerosim.ranks.call import Array, Buffer, Exchange, Exchanges, PendingCall, ceil_cut

# -- Reduce-scatter and all-gather: chunk c belongs to rank c --------------------------------------------------------


def reduce_scatter_halving(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """log2 N steps, N a power of two: each sends the half of its range that the other keeps, and adds what comes."""
    partial, start = x, 0
    for (low, count), landing in zip(kept_ranges(me), me.buffers, strict=True):
        partner = me.index ^ count
        sent = low ^ count
        kept_bounds, sent_bounds = me.bounds(low, count), me.bounds(sent, count)
        kept = partial[kept_bounds.start - start:kept_bounds.stop - start]
        leaving = partial[sent_bounds.start - start:sent_bounds.stop - start]
        yield Exchange(leaving, partner, landing, partner, tuple(range(sent, sent + count)))
        me.combine(landing, kept, landing)
        partial, start = landing, kept_bounds.start
    me.copy(partial, out)


def kept_ranges(me: PendingCall) -> list[tuple[int, int]]:
    """(first chunk, chunks) that this rank keeps at each halving; the last is its own chunk."""
    ranges, count = [], me.size // 2
    while count:
        ranges.append((me.index & ~(count - 1), count))
        count //= 2
    return ranges


def halving_buffers(me: PendingCall) -> list[Buffer]:
    """One buffer for each range kept: n/2, n/4, ... elements."""
    bounds = [me.bounds(low, count) for low, count in kept_ranges(me)]
    return [(b.stop - b.start, np.dtype(me.call.dtype)) for b in bounds]


def all_gather_doubling(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """log2 N steps, N a power of two: partners at distance 1, 2, 4, ... swap all that they have."""
    me.copy(x, me.chunk(out, me.index))
    count = 1
    while count < me.size:
        partner, low = me.index ^ count, me.index & ~(count - 1)
        other = low ^ count
        yield Exchange(out[me.bounds(low, count)], partner, out[me.bounds(other, count)], partner,
                       tuple(range(low, low + count)))
        count *= 2


def all_gather_bruck(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """ceil(log2 N) steps for any N: chunks r, r+1, ... are collected in rotated order, then turned back."""
    rotated = me.buffers[0]
    order = [me.neighbor(i) for i in range(me.size)]
    ends = [0]
    for chunk in order:
        ends.append(ends[-1] + me.length(chunk))
    me.copy(x, rotated[:ends[1]])
    have = 1
    while have < me.size:
        count = min(have, me.size - have)
        source, to = me.neighbor(have), me.neighbor(-have)
        yield Exchange(rotated[:ends[count]], to, rotated[ends[have]:ends[have + count]], source, tuple(order[:count]))
        have += count
    for i, chunk in enumerate(order):
        me.copy(rotated[ends[i]:ends[i + 1]], me.chunk(out, chunk))


def packed_buffer(me: PendingCall) -> list[Buffer]:
    """The whole vector, its chunks in another order."""
    return [(me.call.length, me.call.dtype)]


# -- Binomial trees: broadcast, reduce, and the two as an all-reduce; and the barrier --------------------------------
# v = (r - root) mod N is a rank's place counted from the root.


def broadcast_tree(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """ceil(log2 N) steps on a binomial tree: who has the vector doubles its number each step. ``x``, ``out`` (n,)."""
    v = me.neighbor(-me.call.root)
    if v:
        reach = v & -v
        yield Exchange(None, None, out, me.neighbor(-reach))
    else:
        reach = 1 << (me.size - 1).bit_length()
        me.copy(x, out)
    while reach > 1:
        reach //= 2
        if v + reach < me.size:
            yield Exchange(out, me.neighbor(reach), None, None)


def reduce_tree(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """ceil(log2 N) steps on a binomial tree, each rank sending its sum once. ``x`` (n,), ``out`` (n,) at the root."""
    yield from tree_sum(me, x, out if me.index == me.call.root else me.buffers[1])


def tree_sum(me: PendingCall, x: Array, total: Array) -> Exchanges:
    """The tree's sum in the root's ``total`` (n,); the other ranks that receive from someone add in theirs."""
    v, partial, landing = me.neighbor(-me.call.root), x, me.buffers[0]
    if v == 0 or receives_in_reduce(me):
        me.copy(x, total)
        partial = total
    reach = 1
    while reach < me.size:
        if v & reach:
            yield Exchange(partial, me.neighbor(-reach), None, None)
            return
        if v + reach < me.size:
            yield Exchange(None, None, landing, me.neighbor(reach))
            me.combine(total, landing, total)
        reach *= 2


def all_reduce_tree(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """A binomial-tree reduce to the root, then a binomial-tree broadcast from it: 2 ceil(log2 N) steps."""
    yield from tree_sum(me, x, out)
    yield from broadcast_tree(me, out, out)


def reduce_buffers(me: PendingCall) -> list[Buffer]:
    """A whole vector that arrives and, but for the root, one to add it to; nothing where a rank only sends."""
    [(length, dtype)] = landing_buffer(me)
    return [(length, dtype), (0 if me.index == me.call.root else length, dtype)]


def landing_buffer(me: PendingCall) -> list[Buffer]:
    """A whole vector that arrives; nothing where a rank only sends."""
    return [(me.call.length if receives_in_reduce(me) else 0, me.call.dtype)]


def receives_in_reduce(me: PendingCall) -> bool:
    """True for the root, and on a tree for every even place that has someone to receive from."""
    v = me.neighbor(-me.call.root)
    if me.call.algorithm == "naive":
        return v == 0 and me.size > 1
    return v % 2 == 0 and v + 1 < me.size


def barrier_dissemination(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """ceil(log2 N) rounds of empty messages, to r + 1, r + 2, r + 4, ... (Hensgen, Finkel & Manber 1988)."""
    distance = 1
    while distance < me.size:
        yield Exchange(x, me.neighbor(distance), out, me.neighbor(-distance))
        distance *= 2


# -- All-reduce among 2^m active ranks: ``x`` (n,), ``out`` (n,), which may be the same memory -----------------------
# Where N is no power of two, ranks fold: of the first 2 * (N - 2^m) each even one hands its vector to the next, sits
# out, and is sent the result (Thakur, Rabenseifner & Gropp 2005, section 4.5).


@dataclass(frozen=True, slots=True)
class Fold:
    """N ranks as 2^m: the first ``pairs`` pairs of neighbors act as one rank each."""

    active: int
    pairs: int

    @classmethod
    def of(cls, ranks: int) -> "Fold":
        """The fold of N ranks; no pairs where N is a power of two."""
        active = 1 << (ranks.bit_length() - 1)
        return cls(active, ranks - active)

    def virtual(self, rank: int) -> int | None:
        """The rank's index among the active ones; None for one that sits out."""
        if rank < 2 * self.pairs:
            return rank // 2 if rank % 2 else None
        return rank - self.pairs

    def actual(self, virtual: int) -> int:
        """The rank that acts under this index."""
        return 2 * virtual + 1 if virtual < self.pairs else virtual + self.pairs


def folded(me: PendingCall, out: Array, active_steps: Callable[[Fold, int], Exchanges]) -> Exchanges:
    """Hands over before, lets the 2^m active ranks run ``active_steps(fold, virtual)``, and hands back after."""
    fold, landing = Fold.of(me.size), me.buffers[0]
    virtual = fold.virtual(me.index)
    if virtual is None:
        yield Exchange(out, me.index + 1, None, None)
        yield Exchange(None, None, out, me.index + 1)
        return
    if virtual < fold.pairs:
        yield Exchange(None, None, landing, me.index - 1)
        me.combine(landing, out, out)
    yield from active_steps(fold, virtual)
    if virtual < fold.pairs:
        yield Exchange(out, me.index - 1, None, None)


def all_reduce_doubling(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """log2 N steps: partners at distance 1, 2, 4, ... swap whole vectors and add them (a + b = b + a, same bits)."""
    me.copy(x, out)
    landing = me.buffers[0]

    def active_steps(fold: Fold, virtual: int) -> Exchanges:
        distance = 1
        while distance < fold.active:
            partner = fold.actual(virtual ^ distance)
            yield Exchange(out, partner, landing, partner)
            me.combine(landing, out, out)
            distance *= 2

    yield from folded(me, out, active_steps)


def all_reduce_rabenseifner(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """A recursive-halving reduce-scatter, then a recursive-doubling all-gather: 2 log2 N steps, 2n(N-1)/N bytes."""
    me.copy(x, out)

    def active_steps(fold: Fold, virtual: int) -> Exchanges:
        active = as_active(me, fold, virtual)
        active.buffers = me.buffers[1:]
        own = active.chunk(out, virtual)
        for steps in (reduce_scatter_halving(active, out, own), all_gather_doubling(active, own, out)):
            for e in steps:
                assert e.to is not None
                assert e.source is not None
                yield replace(e, to=fold.actual(e.to), source=fold.actual(e.source))

    yield from folded(me, out, active_steps)


def as_active(me: PendingCall, fold: Fold, virtual: int) -> PendingCall:
    """The rank inside the smaller call of the 2^m active ranks, which cut the vector anew where some sit out."""
    cut = me.call.cut if fold.pairs == 0 else ceil_cut(me.call.length, fold.active)
    inner = me.call._replace(group=tuple(range(fold.active)), cut=cut)
    return PendingCall(inner, virtual, me.kernels, me.x, me.out)


def rabenseifner_buffers(me: PendingCall) -> list[Buffer]:
    """A whole vector from the neighbor where ranks fold, then what halving needs; nothing for a rank that sits out."""
    fold = Fold.of(me.size)
    virtual = fold.virtual(me.index)
    if virtual is None:
        return [(0, me.call.dtype)]
    landing = (me.call.length if virtual < fold.pairs else 0, me.call.dtype)
    return [landing, *halving_buffers(as_active(me, fold, virtual))]


def whole_buffer(me: PendingCall) -> list[Buffer]:
    """One whole vector that arrives; nothing for a rank that is alone, or sits out."""
    arrives = me.size > 1 and Fold.of(me.size).virtual(me.index) is not None
    return [(me.call.length if arrives else 0, me.call.dtype)]
