"""What an algorithm sees of the world: its index, the cut, a few buffers, and arithmetic rounded like the wire's.

Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from zerosim.numerics.arrays import spans
from zerosim.numerics.checks import did_you_mean
from zerosim.numerics.kernels import NullKernels, NumpyKernels
from zerosim.ranks.call import Call, ceil_cut, chunk_lengths

Array = Any  # numpy's, or an array without data when a call is only expanded


@dataclass(frozen=True, slots=True)
class Exchange:
    """The one primitive: send to one rank while receiving from one, either half possibly absent.

    ``out`` fixes how many elements arrive. ``chunks`` are the numbers of the chunks that ``send`` carries.
    """

    send: Array | None
    to: int | None
    out: Array | None
    source: int | None
    chunks: tuple[int, ...] = ()


Steps = Generator[Exchange, None, None]
Buffer = tuple[int, np.dtype[Any]]  # elements, dtype


@dataclass(slots=True)
class Party:
    """One rank inside one call. ``in_place``: its input already lies where the algorithm would copy it."""

    call: Call
    index: int
    kernels: NumpyKernels | NullKernels
    buffers: list[Array] = field(default_factory=list)
    in_place: bool = False

    @property
    def size(self) -> int:
        return self.call.ranks

    @property
    def root(self) -> int:
        return self.call.root

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.call.dtype

    @property
    def wire(self) -> np.dtype[Any]:
        return self.call.wire_dtype

    def neighbor(self, distance: int) -> int:
        """The rank ``distance`` places further on the ring."""
        return (self.index + distance) % self.size

    def bounds(self, chunk: int, count: int = 1) -> slice:
        """Where ``count`` consecutive chunks from ``chunk`` on lie in the whole vector."""
        return slice(self.call.cut[chunk], self.call.cut[chunk + count])

    def length(self, chunk: int) -> int:
        """Elements of one chunk; ``chunk`` counts modulo N."""
        low, high = self.call.cut[chunk % self.size:chunk % self.size + 2]
        return high - low

    def chunk(self, vector: Array, chunk: int) -> Array:
        """A view of one chunk of the whole vector; ``chunk`` counts modulo N."""
        return vector[self.bounds(chunk % self.size)]

    def copy(self, source: Array, out: Array) -> None:
        """Copies, casting to the dtype of ``out`` with one rounding; nothing to do when both are the same memory."""
        if source is not out:
            self.kernels.cast_pack(source, out)

    def copy_whole(self, source: Array, out: Array) -> None:
        """Copies the rank's whole vector to where it is worked on, unless it lies there already."""
        if not self.in_place and source is not out:
            self.kernels.cast_pack(source, out)

    def combine(self, a: Array, b: Array, out: Array) -> None:
        """out = a + b rounded once to out's format (or their maximum, minimum); b is cast to that format first."""
        casts = b.dtype != out.dtype and isinstance(out, np.ndarray)
        # A block at a time, since the cast takes memory that no ledger has.
        for here in spans(len(out)) if casts else (slice(None),):
            match self.call.op:
                case "max":
                    self.kernels.maximum_rounded(a[here], b[here], out[here])
                case "min":
                    self.kernels.minimum_rounded(a[here], b[here], out[here])
                case _:
                    self.kernels.add_rounded(a[here], b[here], out[here])


# -- Reduce-scatter: every rank gives a whole vector and receives its own chunk of the sum ---------------------------
# Legend: n elements, N ranks, chunk c belongs to rank c. ``x`` (n,), ``out`` (len(chunk r),).
# Source of steps and bytes: Thakur, Rabenseifner & Gropp 2005, sections 4.2 and 4.5; Patarasuk & Yuan 2009.


def reduce_scatter_ring(party: Party, x: Array, out: Array) -> Steps:
    """N-1 steps; chunk c starts on rank c+1 and goes once round, each rank adding its own copy.

    The order of the additions is x[c+1] + x[c+2] + ... + x[c], whatever the schedule: it depends on c alone. One
    addition per hop, rounded to the wire's format, is what hardware that adds in fp32 and rounds does.
    """
    partial, other = party.chunk(x, party.index - 1), 1
    for step in range(party.size - 1):
        sent, arriving = party.neighbor(-1 - step), party.neighbor(-2 - step)
        own = party.chunk(x, arriving)
        landing, partial = party.buffers[other][:len(own)], _on_the_wire(party, partial)
        yield Exchange(partial, party.neighbor(1), landing, party.neighbor(-1), (sent,))
        last = step == party.size - 2 and party.wire == party.dtype
        party.combine(landing, own, out if last else landing)
        partial, other = (out if last else landing), 1 - other
    party.copy(partial, out)


def _on_the_wire(party: Party, chunk: Array) -> Array:
    """The first contribution, cast; every later partial sum is in the wire's format already."""
    if chunk.dtype == party.wire:
        return chunk
    cast = party.buffers[0][:len(chunk)]
    party.copy(chunk, cast)
    return cast


def ring_buffers(party: Party) -> list[Buffer]:
    """Two chunks in the wire's format, where partial sums arrive in turn: one leaves while the next comes.

    The first to arrive lies in the second buffer; where the wire has a format of its own, the first to leave is cast
    into the first.
    """
    lengths = chunk_lengths(party.call.cut)
    arriving = lengths[(party.index - 2 - np.arange(party.size - 1)) % party.size]
    cast = int(lengths[party.index - 1]) if party.size > 1 and party.wire != party.dtype else 0
    return [(int(arriving[1::2].max(initial=cast)), party.wire), (int(arriving[::2].max(initial=0)), party.wire)]


def reduce_scatter_pairwise(party: Party, x: Array, out: Array) -> Steps:
    """N-1 steps; at step s each rank sends the chunk of rank r-s to it, and the owner adds what arrives.

    The owner adds x[c+1], x[c+2], ..., x[c], in the ring's order. With ``accumulate="fp32"`` contributions travel
    in 16 bit, the owner adds them in fp32 and rounds once.
    """
    total, landing = party.buffers
    own = party.chunk(x, party.index)
    for step in range(1, party.size):
        to, source = party.neighbor(-step), party.neighbor(step)
        yield Exchange(party.chunk(x, to), to, landing, source, (to,))
        if step == 1:
            party.copy(landing, total)
        else:
            party.combine(total, landing, total)
    if party.size > 1:
        party.combine(total, own, total)
    party.copy(total if party.size > 1 else own, out)


def pairwise_buffers(party: Party) -> list[Buffer]:
    """The sum so far, in the format that accumulates, and one contribution that arrives."""
    length = party.length(party.index) if party.size > 1 else 0
    return [(length, party.call.accumulate or party.dtype), (length, party.dtype)]


def reduce_scatter_halving(party: Party, x: Array, out: Array) -> Steps:
    """log2 N steps, N a power of two: each sends the half of its range that the other keeps, and adds what comes."""
    partial, start = x, 0
    for (low, count), landing in zip(kept_ranges(party), party.buffers, strict=True):
        partner = party.index ^ count
        gone = low ^ count
        kept_bounds, gone_bounds = party.bounds(low, count), party.bounds(gone, count)
        kept = partial[kept_bounds.start - start:kept_bounds.stop - start]
        leaving = partial[gone_bounds.start - start:gone_bounds.stop - start]
        yield Exchange(leaving, partner, landing, partner, tuple(range(gone, gone + count)))
        party.combine(landing, kept, landing)
        partial, start = landing, kept_bounds.start
    party.copy(partial, out)


def kept_ranges(party: Party) -> list[tuple[int, int]]:
    """(first chunk, chunks) that this rank keeps at each halving; the last is its own chunk."""
    ranges, count = [], party.size // 2
    while count:
        ranges.append((party.index & ~(count - 1), count))
        count //= 2
    return ranges


def halving_buffers(party: Party) -> list[Buffer]:
    """One buffer for each range kept: n/2, n/4, ... elements."""
    bounds = [party.bounds(low, count) for low, count in kept_ranges(party)]
    return [(b.stop - b.start, np.dtype(party.dtype)) for b in bounds]


# -- All-gather: every rank gives its chunk and receives the whole vector --------------------------------------------
# Legend: n elements, N ranks, chunk c comes from rank c. ``x`` (len(chunk r),), ``out`` (n,). ``x`` may be the own
# chunk of ``out`` already, then nothing is copied.
# Source of steps and bytes: Thakur, Rabenseifner & Gropp 2005, section 4.1; Bruck et al. 1997.


def place_own(party: Party, x: Array, out: Array) -> None:
    """Puts the rank's own chunk where it belongs in the whole vector, unless it lies there already."""
    if not party.in_place:
        party.copy(x, party.chunk(out, party.index))


def all_gather_ring(party: Party, x: Array, out: Array) -> Steps:
    """N-1 steps; every chunk goes once round, and each rank passes on the chunk that came last."""
    place_own(party, x, out)
    for step in range(party.size - 1):
        sent, arriving = party.neighbor(-step), party.neighbor(-1 - step)
        landing = party.chunk(out, arriving)
        yield Exchange(party.chunk(out, sent), party.neighbor(1), landing, party.neighbor(-1), (sent,))


def all_gather_doubling(party: Party, x: Array, out: Array) -> Steps:
    """log2 N steps, N a power of two: partners at distance 1, 2, 4, ... swap all that they have."""
    place_own(party, x, out)
    count = 1
    while count < party.size:
        partner, low = party.index ^ count, party.index & ~(count - 1)
        other = low ^ count
        yield Exchange(out[party.bounds(low, count)], partner, out[party.bounds(other, count)], partner,
                       tuple(range(low, low + count)))
        count *= 2


def all_gather_bruck(party: Party, x: Array, out: Array) -> Steps:
    """ceil(log2 N) steps for any N: chunks r, r+1, ... are collected in rotated order, then turned back."""
    rotated = party.buffers[0]
    order = [party.neighbor(i) for i in range(party.size)]
    ends = [0]
    for chunk in order:
        ends.append(ends[-1] + party.length(chunk))
    party.copy(x, rotated[:ends[1]])
    have = 1
    while have < party.size:
        count = min(have, party.size - have)
        source, to = party.neighbor(have), party.neighbor(-have)
        yield Exchange(rotated[:ends[count]], to, rotated[ends[have]:ends[have + count]], source, tuple(order[:count]))
        have += count
    for i, chunk in enumerate(order):
        party.copy(rotated[ends[i]:ends[i + 1]], party.chunk(out, chunk))


def no_buffers(party: Party) -> list[Buffer]:
    """Nothing beside ``x`` and ``out``."""
    return []


def bruck_buffers(party: Party) -> list[Buffer]:
    """The whole vector, in rotated order."""
    return [(party.call.length, party.dtype)]


# -- Collectives with a root, and the all-to-all: broadcast, reduce, gather, all_to_all, barrier ---------------------
# Legend: n elements, N ranks; v = (r - root) mod N is a rank's place counted from the root.


def broadcast_tree(party: Party, x: Array, out: Array) -> Steps:
    """ceil(log2 N) steps on a binomial tree: who has the vector doubles its number each step. ``x``, ``out`` (n,)."""
    v = party.neighbor(-party.root)
    if v:
        reach = v & -v
        yield Exchange(None, None, out, party.neighbor(-reach))
    else:
        reach = 1 << (party.size - 1).bit_length()
        party.copy_whole(x, out)
    while reach > 1:
        reach //= 2
        if v + reach < party.size:
            yield Exchange(out, party.neighbor(reach), None, None)


def broadcast_naive(party: Party, x: Array, out: Array) -> Steps:
    """The root sends to one rank after the other: N-1 steps, (N-1)n bytes from the root."""
    if party.index == party.root:
        party.copy_whole(x, out)
        for step in range(1, party.size):
            yield Exchange(out, party.neighbor(step), None, None)
    else:
        yield Exchange(None, None, out, party.root)


def reduce_tree(party: Party, x: Array, out: Array) -> Steps:
    """ceil(log2 N) steps on a binomial tree, each rank sending its sum once. ``x`` (n,), ``out`` (n,) at the root."""
    yield from tree_sum(party, x, out if party.index == party.root else party.buffers[1])


def tree_sum(party: Party, x: Array, total: Array) -> Steps:
    """The tree's sum in the root's ``total`` (n,); the other ranks that hear from someone add in theirs."""
    v, partial, landing = party.neighbor(-party.root), x, party.buffers[0]
    if v == 0 or receives_in_reduce(party):
        party.copy_whole(x, total)
        partial = total
    reach = 1
    while reach < party.size:
        if v & reach:
            yield Exchange(partial, party.neighbor(-reach), None, None)
            return
        if v + reach < party.size:
            yield Exchange(None, None, landing, party.neighbor(reach))
            party.combine(total, landing, total)
        reach *= 2


def reduce_naive(party: Party, x: Array, out: Array) -> Steps:
    """All send to the root, which adds in the order root, root+1, ... ``x`` (n,), ``out`` (n,) at the root."""
    if party.index != party.root:
        yield Exchange(x, party.root, None, None)
        return
    party.copy_whole(x, out)
    for step in range(1, party.size):
        yield Exchange(None, None, party.buffers[0], party.neighbor(step))
        party.combine(out, party.buffers[0], out)


def gather_pairwise(party: Party, x: Array, out: Array | None) -> Steps:
    """Every rank sends its chunk to the root, in N-1 steps there. ``x`` (len(chunk r),), ``out`` (n,) at the root."""
    if party.index != party.root:
        yield Exchange(x, party.root, None, None, (party.index,))
        return
    party.copy(x, party.chunk(out, party.index))
    for step in range(1, party.size):
        source = party.neighbor(step)
        yield Exchange(None, None, party.chunk(out, source), source)


def all_to_all_pairwise(party: Party, x: Array, out: Array) -> Steps:
    """N-1 steps; at step s chunk r+s goes to rank r+s. ``x`` (n,), ``out`` (N * len(chunk r),), in order of source."""
    length = len(party.chunk(x, party.index))
    party.copy(party.chunk(x, party.index), out[party.index * length:(party.index + 1) * length])
    for step in range(1, party.size):
        to, source = party.neighbor(step), party.neighbor(-step)
        yield Exchange(party.chunk(x, to), to, out[source * length:(source + 1) * length], source, (to,))


def barrier_dissemination(party: Party, x: Array, out: Array) -> Steps:
    """ceil(log2 N) rounds of empty messages, to r + 1, r + 2, r + 4, ... (Hensgen, Finkel & Manber 1988)."""
    distance = 1
    while distance < party.size:
        yield Exchange(x, party.neighbor(distance), out, party.neighbor(-distance))
        distance *= 2


def reduce_buffers(party: Party) -> list[Buffer]:
    """A whole vector that arrives and, but for the root, one to add it to; nothing where a rank only sends."""
    [(length, dtype)] = landing_buffer(party)
    return [(length, dtype), (0 if party.index == party.root else length, dtype)]


def landing_buffer(party: Party) -> list[Buffer]:
    """A whole vector that arrives; nothing where a rank only sends."""
    return [(party.call.length if receives_in_reduce(party) else 0, party.dtype)]


def receives_in_reduce(party: Party) -> bool:
    """True for the root, and on a tree for every even place that has someone to hear from."""
    v = party.neighbor(-party.root)
    if party.call.algorithm == "naive":
        return v == 0 and party.size > 1
    return v % 2 == 0 and v + 1 < party.size


# -- All-reduce: every rank gives a whole vector and receives the whole sum; the same bits on every rank -------------
# Legend: n elements, N ranks. ``x`` (n,), ``out`` (n,), which may be the same memory.
# Where N is no power of two, doubling and Rabenseifner fold: of the first 2 * (N - 2^m) ranks each even one hands its
# vector to the next, sits out, and is sent the result (Thakur, Rabenseifner & Gropp 2005, section 4.5).


def all_reduce_ring(party: Party, x: Array, out: Array) -> Steps:
    """A ring reduce-scatter, then a ring all-gather, in bytes, in steps and bit for bit."""
    own = party.chunk(out, party.index)
    yield from reduce_scatter_ring(party, x, own)
    yield from all_gather_ring(replace(party, in_place=True), own, out)


def all_reduce_tree(party: Party, x: Array, out: Array) -> Steps:
    """A binomial-tree reduce to the root, then a binomial-tree broadcast from it: 2 ceil(log2 N) steps."""
    yield from tree_sum(party, x, out)
    yield from broadcast_tree(party, out, out)


def all_reduce_naive(party: Party, x: Array, out: Array) -> Steps:
    """All send to the root, which adds in rank order and sends the sum back to each: 2(N-1) steps at the root."""
    yield from reduce_naive(party, x, out)
    if party.index == party.root:
        for step in range(1, party.size):
            yield Exchange(out, party.neighbor(step), None, None)
    else:
        yield Exchange(None, None, out, party.root)


def all_reduce_everyone(party: Party, x: Array, out: Array) -> Steps:
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


def all_reduce_doubling(party: Party, x: Array, out: Array) -> Steps:
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


def all_reduce_rabenseifner(party: Party, x: Array, out: Array) -> Steps:
    """A recursive-halving reduce-scatter, then a recursive-doubling all-gather: 2 log2 N steps, 2n(N-1)/N bytes."""
    party.copy_whole(x, out)

    def active_steps(fold: Fold, virtual: int) -> Steps:
        me = active_party(party, fold, virtual)
        me.buffers = party.buffers[1:]
        own = me.chunk(out, virtual)
        for steps in (reduce_scatter_halving(me, out, own), all_gather_doubling(me, own, out)):
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
    return [landing, *halving_buffers(active_party(party, fold, virtual))]


def whole_buffer(party: Party) -> list[Buffer]:
    """One whole vector that arrives; nothing for a rank that is alone, or sits out."""
    arrives = party.size > 1 and Fold.of(party.size).virtual(party.index) is not None
    return [(party.call.length if arrives else 0, party.dtype)]


# -- The one table of collectives, their algorithms and what each of them allows -------------------------------------
# Beside the rows of the table there is ``native``: whatever the library that carries the messages, MPI's or NCCL's, does
# of itself. Its order of additions is the library's, so it promises a bound where the rows promise bits.


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A row: the generator that one rank runs, the buffers it declares, and which options it takes.

    ``power_of_two``: refuses other N. ``folds``: takes any N, but where N is no power of two some ranks sit out.
    ``cuts``: works on the chunks of the cut that it is given, unless ranks sit out. ``wire``: partial sums may travel
    in another format. ``accumulate``: additions may be made in a wider format.
    """

    steps: Callable[..., Steps]
    buffers: Callable[[Party], list[Buffer]] = no_buffers
    power_of_two: bool = False
    folds: bool = False
    cuts: bool = True
    wire: bool = False
    accumulate: bool = False


NATIVE = "native"


def _not_ours(party: Party, x: object, out: object) -> Steps:
    """Raises ValueError: how a library carries a collective out is not known here."""
    raise ValueError(f"the hops of {party.call.operation} by {NATIVE!r} are its library's own, and nobody here sees "
                     "them; ask for an algorithm of the table to see hops")


_LIBRARYS_OWN = Algorithm(_not_ours)

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "reduce_scatter": {
        "ring": Algorithm(reduce_scatter_ring, ring_buffers, wire=True),
        "pairwise": Algorithm(reduce_scatter_pairwise, pairwise_buffers, accumulate=True),
        "halving": Algorithm(reduce_scatter_halving, halving_buffers, power_of_two=True),
    },
    "all_gather": {
        "ring": Algorithm(all_gather_ring),
        "doubling": Algorithm(all_gather_doubling, power_of_two=True),
        "bruck": Algorithm(all_gather_bruck, bruck_buffers),
    },
    "all_reduce": {
        "ring": Algorithm(all_reduce_ring, ring_buffers, wire=True),
        "doubling": Algorithm(all_reduce_doubling, whole_buffer, folds=True, cuts=False),
        "rabenseifner": Algorithm(all_reduce_rabenseifner, rabenseifner_buffers, folds=True),
        "tree": Algorithm(all_reduce_tree, landing_buffer, cuts=False),
        "naive": Algorithm(all_reduce_naive, landing_buffer, cuts=False),
        "everyone": Algorithm(all_reduce_everyone, everyone_buffers, cuts=False, accumulate=True),
    },
    "broadcast": {"tree": Algorithm(broadcast_tree), "naive": Algorithm(broadcast_naive)},
    "reduce": {
        "tree": Algorithm(reduce_tree, reduce_buffers),
        "naive": Algorithm(reduce_naive, landing_buffer),
    },
    "gather": {"pairwise": Algorithm(gather_pairwise)},
    "all_to_all": {"pairwise": Algorithm(all_to_all_pairwise)},
    "barrier": {"dissemination": Algorithm(barrier_dissemination)},
}


def algorithm_of(operation: str, name: str, ranks: int) -> Algorithm:
    """The row for an operation and an algorithm's name.

    ``native`` has a row that declares nothing. Raises ValueError for an unknown name, or for an N that the algorithm
    does not serve.
    """
    if name == NATIVE:
        return _LIBRARYS_OWN
    rows = ALGORITHMS[operation]
    if str(name) not in rows:
        raise ValueError(f"{operation} has no algorithm {name!r}; choose one of {', '.join(rows)}"
                         f"{did_you_mean(name, rows)}")
    row = rows[name]
    if row.power_of_two and ranks & (ranks - 1):
        others = ", ".join(other for other, r in rows.items() if not r.power_of_two)
        raise ValueError(f"{operation} by {name} needs a power of two of ranks, because partners at distance "
                         f"1, 2, 4, ... must all exist; this group has {ranks}. Use {others}.")
    return row
