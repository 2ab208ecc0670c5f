"""All-reduce: every rank gives a whole vector and receives the whole sum; the same bits on every rank.

Legend: n elements, N ranks. ``x`` (n,), ``out`` (n,), which may be the same memory.
Where N is no power of two, doubling and Rabenseifner fold: of the first 2 * (N - 2^m) ranks each even one hands its
vector to the next, sits out, and is sent the result (Thakur, Rabenseifner & Gropp 2005, section 4.5).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from zerosim.ranks.algorithms import all_gather, reduce_scatter
from zerosim.ranks.algorithms.party import Array, Buffer, Exchange, Party, Steps
from zerosim.ranks.algorithms.rooted import broadcast_tree, reduce_naive, tree_sum
from zerosim.ranks.cuts import ceil_cut


def ring(party: Party, x: Array, out: Array) -> Steps:
    """A ring reduce-scatter, then a ring all-gather, in bytes, in steps and bit for bit."""
    own = party.chunk(out, party.index)
    yield from reduce_scatter.ring(party, x, own)
    yield from all_gather.ring(replace(party, in_place=True), own, out)


def tree(party: Party, x: Array, out: Array) -> Steps:
    """A binomial-tree reduce to the root, then a binomial-tree broadcast from it: 2 ceil(log2 N) steps."""
    yield from tree_sum(party, x, out)
    yield from broadcast_tree(party, out, out)


def naive(party: Party, x: Array, out: Array) -> Steps:
    """All send to the root, which adds in rank order and sends the sum back to each: 2(N-1) steps at the root."""
    yield from reduce_naive(party, x, out)
    if party.index == party.root:
        for step in range(1, party.size):
            yield Exchange(out, party.neighbor(step), None, None)
    else:
        yield Exchange(None, None, out, party.root)


def everyone(party: Party, x: Array, out: Array) -> Steps:
    """Every rank sends its whole vector to every other, (N-1)n bytes each, and all add in rank order.

    With ``accumulate="fp32"`` the additions are made in fp32 and rounded once.
    """
    total, *landings = party.buffers
    vectors = {party.index: x}
    for step in range(1, party.size):
        to, source = party.neighbor(step), party.neighbor(-step)
        vectors[source] = landings[step - 1]
        yield Exchange(x, to, vectors[source], source)
    party.copy(vectors[0], total)
    for rank in range(1, party.size):
        party.combine(total, vectors[rank], total)
    party.copy(total, out)


def everyone_buffers(party: Party) -> list[Buffer]:
    """The sum, in the format that accumulates, and the vectors of the N-1 others."""
    n = party.call.length
    return [(n, party.call.accumulate or party.dtype)] + [(n, party.dtype)] * (party.size - 1)


@dataclass(frozen=True, slots=True)
class Fold:
    """How N ranks become 2^m: the first ``pairs`` pairs of neighbors act as one rank each."""

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


def folded(party: Party, out: Array, active_steps: Callable[[Fold, int], Steps]) -> Steps:
    """Hands over before, lets the 2^m active ranks run ``active_steps(fold, virtual)``, and hands back after."""
    fold, landing = Fold.of(party.size), party.buffers[0]
    virtual = fold.virtual(party.index)
    if virtual is None:
        yield Exchange(out, party.index + 1, None, None)
        yield Exchange(None, None, out, party.index + 1)
        return
    if virtual < fold.pairs:
        yield Exchange(None, None, landing, party.index - 1)
        party.combine(landing, out, out)
    yield from active_steps(fold, virtual)
    if virtual < fold.pairs:
        yield Exchange(out, party.index - 1, None, None)


def doubling(party: Party, x: Array, out: Array) -> Steps:
    """log2 N steps: partners at distance 1, 2, 4, ... swap whole vectors and add them (a + b = b + a, same bits)."""
    party.copy_whole(x, out)
    landing = party.buffers[0]

    def active_steps(fold: Fold, virtual: int) -> Steps:
        distance = 1
        while distance < fold.active:
            partner = fold.actual(virtual ^ distance)
            yield Exchange(out, partner, landing, partner)
            party.combine(landing, out, out)
            distance *= 2

    yield from folded(party, out, active_steps)


def rabenseifner(party: Party, x: Array, out: Array) -> Steps:
    """A recursive-halving reduce-scatter, then a recursive-doubling all-gather: 2 log2 N steps, 2n(N-1)/N bytes."""
    party.copy_whole(x, out)

    def active_steps(fold: Fold, virtual: int) -> Steps:
        me = active_party(party, fold, virtual)
        me.buffers = party.buffers[1:]
        own = me.chunk(out, virtual)
        for steps in (reduce_scatter.halving(me, out, own), all_gather.doubling(me, own, out)):
            for e in steps:
                assert e.to is not None
                assert e.source is not None
                yield replace(e, to=fold.actual(e.to), source=fold.actual(e.source))

    yield from folded(party, out, active_steps)


def active_party(party: Party, fold: Fold, virtual: int) -> Party:
    """The rank inside the smaller call of the 2^m active ranks, which cut the vector anew where some sit out."""
    cut = party.call.cut if fold.pairs == 0 else ceil_cut(party.call.length, fold.active)
    inner = replace(party.call, group=tuple(range(fold.active)), cut=cut)
    return Party(inner, virtual, party.kernels, in_place=True)


def rabenseifner_buffers(party: Party) -> list[Buffer]:
    """A whole vector from the neighbor where ranks fold, then what halving needs; nothing for a rank that sits out."""
    fold = Fold.of(party.size)
    virtual = fold.virtual(party.index)
    if virtual is None:
        return [(0, party.dtype)]
    landing = (party.call.length if virtual < fold.pairs else 0, party.dtype)
    return [landing, *reduce_scatter.halving_buffers(active_party(party, fold, virtual))]


def whole_buffer(party: Party) -> list[Buffer]:
    """One whole vector that arrives; nothing for a rank that is alone, or sits out."""
    arrives = party.size > 1 and Fold.of(party.size).virtual(party.index) is not None
    return [(party.call.length if arrives else 0, party.dtype)]
