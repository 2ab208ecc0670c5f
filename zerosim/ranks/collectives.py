"""The collectives: each algorithm a generator that one rank runs, the table of them all, and how they run together.

A generator yields exchanges, one after the other, and finds what arrived in the memory that it named. It is handed
``me``, the rank's part in the call: its index, the cut, a few buffers, and arithmetic rounded like the wire's. Whoever
drives the generators, the hub, MPI, NCCL, the planner, moves what they yield. Here are the rings, and all others of
about N steps; those of about log2 N are in `ranks.logarithmic`, and those that go inside nodes and across, a ring each,
in `ranks.hierarchical`.

Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zerosim.numerics.checks import FLOATING, unknown_name
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NullKernels
from zerosim.numerics.null_arrays import NullArray
from zerosim.ranks import fast_ring, hierarchical, logarithmic
from zerosim.ranks.call import (
    Array,
    Buffer,
    Call,
    Exchange,
    Exchanges,
    Hop,
    PendingCall,
    PendingExchange,
    chunk_lengths,
)

# -- Reduce-scatter: every rank gives a whole vector and receives its own chunk of the sum ---------------------------
# Chunk c belongs to rank c: ``x`` (n,), ``out`` (len(chunk r),).
# Source of steps and bytes: Thakur, Rabenseifner & Gropp 2005, section 4.4; Patarasuk & Yuan 2009 (the ring).


def reduce_scatter_ring(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """N-1 steps; chunk c starts on rank c+1 and goes once round, each rank adding its own copy.

    The order of the additions is x[c+1] + x[c+2] + ... + x[c], whatever the schedule: it depends on c alone. One
    addition per hop, rounded to the wire's format, is what hardware that adds in fp32 and rounds does.
    """
    partial, other = me.chunk(x, me.index - 1), 1
    for step in range(me.size - 1):
        sent, arriving = me.neighbor(-1 - step), me.neighbor(-2 - step)
        own = me.chunk(x, arriving)
        landing, partial = me.buffers[other][:len(own)], _on_the_wire(me, partial)
        yield Exchange(partial, me.neighbor(1), landing, me.neighbor(-1), (sent,))
        last = step == me.size - 2 and me.call.wire_dtype == me.call.dtype
        me.combine(landing, own, out if last else landing)
        partial, other = (out if last else landing), 1 - other
    me.copy(partial, out)


def _on_the_wire(me: PendingCall, chunk: Array) -> Array:
    """The first contribution, cast; every later partial sum is in the wire's format already."""
    if chunk.dtype == me.call.wire_dtype:
        return chunk
    cast = me.buffers[0][:len(chunk)]
    me.copy(chunk, cast)
    return cast


def ring_buffers(me: PendingCall) -> list[Buffer]:
    """Two chunks in the wire's format, where partial sums arrive in turn: one leaves while the next comes.

    The first to arrive lies in the second buffer; where the wire has a format of its own, the first to leave is cast
    into the first.
    """
    first, second = _travelling_lengths(me.call.cut, me.index, me.size > 1 and me.call.wire_dtype != me.call.dtype)
    return [(first, me.call.wire_dtype), (second, me.call.wire_dtype)]


@lru_cache(maxsize=4096)
def _travelling_lengths(cut: tuple[int, ...], index: int, casts: bool) -> tuple[int, int]:
    lengths = np.roll(chunk_lengths(cut), -index)[::-1]  # as they leave this rank, first its own
    return int(lengths[0 if casts else 2::2].max(initial=0)), int(lengths[1::2].max(initial=0))


def reduce_scatter_pairwise(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """N-1 steps; at step s each rank sends the chunk of rank r-s to it, and the owner adds what arrives.

    The owner adds x[c+1], x[c+2], ..., x[c], in the ring's order. With ``accumulate="fp32"`` contributions travel
    in 16 bit, the owner adds them in fp32 and rounds once.
    """
    total, landing = me.buffers
    own = me.chunk(x, me.index)
    for step in range(1, me.size):
        to, source = me.neighbor(-step), me.neighbor(step)
        yield Exchange(me.chunk(x, to), to, landing, source, (to,))
        if step == 1:
            me.copy(landing, total)
        else:
            me.combine(total, landing, total)
    if me.size > 1:
        me.combine(total, own, total)
    me.copy(total if me.size > 1 else own, out)


def pairwise_buffers(me: PendingCall) -> list[Buffer]:
    """The sum so far, in the format that accumulates, and one contribution that arrives."""
    length = me.length(me.index) if me.size > 1 else 0
    return [(length, me.call.accumulate or me.call.dtype), (length, me.call.dtype)]


# -- All-gather: every rank gives its chunk and receives the whole vector --------------------------------------------
# Chunk c comes from rank c: ``x`` (len(chunk r),), ``out`` (n,). ``x`` may be the own chunk of ``out`` already, then
# nothing is copied.
# Source of steps and bytes: Thakur, Rabenseifner & Gropp 2005, section 4.1.


def all_gather_ring(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """N-1 steps; every chunk goes once round, and each rank passes on the chunk that came last."""
    me.copy(x, me.chunk(out, me.index))
    for step in range(me.size - 1):
        sent, arriving = me.neighbor(-step), me.neighbor(-1 - step)
        landing = me.chunk(out, arriving)
        yield Exchange(me.chunk(out, sent), me.neighbor(1), landing, me.neighbor(-1), (sent,))


# -- Collectives with a root, and the all-to-all ---------------------------------------------------------------------


def broadcast_naive(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """The root sends to one rank after the other: N-1 steps, (N-1)n bytes from the root."""
    if me.index == me.call.root:
        me.copy(x, out)
        for step in range(1, me.size):
            yield Exchange(out, me.neighbor(step), None, None)
    else:
        yield Exchange(None, None, out, me.call.root)


def reduce_naive(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """All send to the root, which adds in the order root, root+1, ... ``x`` (n,), ``out`` (n,) at the root."""
    if me.index != me.call.root:
        yield Exchange(x, me.call.root, None, None)
        return
    me.copy(x, out)
    for step in range(1, me.size):
        yield Exchange(None, None, me.buffers[0], me.neighbor(step))
        me.combine(out, me.buffers[0], out)


def gather_pairwise(me: PendingCall, x: Array, out: Array | None) -> Exchanges:
    """Every rank sends its chunk to the root, in N-1 steps there. ``x`` (len(chunk r),), ``out`` (n,) at the root."""
    if me.index != me.call.root:
        yield Exchange(x, me.call.root, None, None, (me.index,))
        return
    me.copy(x, me.chunk(out, me.index))
    for step in range(1, me.size):
        source = me.neighbor(step)
        yield Exchange(None, None, me.chunk(out, source), source)


def all_to_all_pairwise(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """N-1 steps; at step s chunk r+s goes to rank r+s. ``x`` (n,), ``out`` (N * len(chunk r),), in order of source."""
    length = len(me.chunk(x, me.index))
    me.copy(me.chunk(x, me.index), out[me.index * length:(me.index + 1) * length])
    for step in range(1, me.size):
        to, source = me.neighbor(step), me.neighbor(-step)
        yield Exchange(me.chunk(x, to), to, out[source * length:(source + 1) * length], source, (to,))


# -- All-reduce: every rank gives a whole vector and receives the whole sum; the same bits on every rank -------------
# ``x`` (n,), ``out`` (n,), which may be the same memory.


def all_reduce_ring(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """A ring reduce-scatter, then a ring all-gather, in bytes, in steps and bit for bit."""
    own = me.chunk(out, me.index)
    yield from reduce_scatter_ring(me, x, own)
    yield from all_gather_ring(me, own, out)


def all_reduce_naive(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """All send to the root, which adds in rank order and sends the sum back to each: 2(N-1) steps at the root."""
    yield from reduce_naive(me, x, out)
    yield from broadcast_naive(me, out, out)


def all_reduce_everyone(me: PendingCall, x: Array, out: Array) -> Exchanges:
    """Every rank sends its whole vector to every other, (N-1)n bytes each, and all add in rank order.

    With ``accumulate="fp32"`` the additions are made in fp32 and rounded once.
    """
    total, *landings = me.buffers
    vectors = {me.index: x}
    for step in range(1, me.size):
        to, source = me.neighbor(step), me.neighbor(-step)
        vectors[source] = landings[step - 1]
        yield Exchange(x, to, vectors[source], source)
    me.copy(vectors[0], total)
    for rank in range(1, me.size):
        me.combine(total, vectors[rank], total)
    me.copy(total, out)


def everyone_buffers(me: PendingCall) -> list[Buffer]:
    """The sum, in the format that accumulates, and the vectors of the N-1 others."""
    n = me.call.length
    return [(n, me.call.accumulate or me.call.dtype)] + [(n, me.call.dtype)] * (me.size - 1)


# -- The one table of collectives, their algorithms and what each of them allows -------------------------------------
# Beside the rows of the table there is ``native``: whatever the library that carries the messages, MPI's or NCCL's,
# does of itself. Its order of additions is the library's, so it promises a bound where the rows promise bits.


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A row: the generator that one rank runs, the buffers it declares, and which options it takes.

    ``power_of_two``: refuses other N. ``folds``: takes any N, but where N is no power of two some ranks sit out.
    ``cuts``: works on the chunks of the cut that it is given, unless ranks sit out. ``wire``: partial sums may travel
    in another format. ``accumulate``: additions may be made in a wider format.
    """

    steps: Callable[..., Exchanges]
    buffers: Callable[[PendingCall], list[Buffer]] = lambda me: []  # none beside ``x`` and ``out``
    power_of_two: bool = False
    folds: bool = False
    cuts: bool = True
    wire: bool = False
    accumulate: bool = False


NATIVE = "native"


def _unknown_steps(me: PendingCall, x: object, out: object) -> Exchanges:
    """Raises ValueError: how a library carries a collective out is not known here."""
    raise ValueError(f"the hops of {me.call.operation} by {NATIVE!r} are its library's own, and nobody here sees "
                     "them; ask for an algorithm of the table to see hops")


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "reduce_scatter": {
        "ring": Algorithm(reduce_scatter_ring, ring_buffers, wire=True),
        "pairwise": Algorithm(reduce_scatter_pairwise, pairwise_buffers, accumulate=True),
        "halving": Algorithm(logarithmic.reduce_scatter_halving, logarithmic.halving_buffers, power_of_two=True),
    },
    "all_gather": {
        "ring": Algorithm(all_gather_ring),
        "doubling": Algorithm(logarithmic.all_gather_doubling, power_of_two=True),
        "bruck": Algorithm(logarithmic.all_gather_bruck, logarithmic.packed_buffer),
    },
    "all_reduce": {
        "ring": Algorithm(all_reduce_ring, ring_buffers, wire=True),
        "doubling": Algorithm(logarithmic.all_reduce_doubling, logarithmic.whole_buffer, folds=True, cuts=False),
        "rabenseifner": Algorithm(logarithmic.all_reduce_rabenseifner, logarithmic.rabenseifner_buffers, folds=True),
        "tree": Algorithm(logarithmic.all_reduce_tree, logarithmic.landing_buffer, cuts=False),
        "naive": Algorithm(all_reduce_naive, logarithmic.landing_buffer, cuts=False),
        "everyone": Algorithm(all_reduce_everyone, everyone_buffers, cuts=False, accumulate=True),
    },
    "broadcast": {"tree": Algorithm(logarithmic.broadcast_tree), "naive": Algorithm(broadcast_naive)},
    "reduce": {
        "tree": Algorithm(logarithmic.reduce_tree, logarithmic.reduce_buffers),
        "naive": Algorithm(reduce_naive, logarithmic.landing_buffer),
    },
    "gather": {"pairwise": Algorithm(gather_pairwise)},
    "all_to_all": {"pairwise": Algorithm(all_to_all_pairwise)},
    "barrier": {"dissemination": Algorithm(logarithmic.barrier_dissemination)},
}

TWO_RINGS = hierarchical.InTwoSteps(reduce_scatter_ring, all_gather_ring, ring_buffers)
HIERARCHICAL = {  # by ``hierarchical(R)``, in nodes of R ranks
    "reduce_scatter": Algorithm(TWO_RINGS.reduce_scatter, TWO_RINGS.buffers),
    "all_gather": Algorithm(TWO_RINGS.all_gather, logarithmic.packed_buffer),
    "all_reduce": Algorithm(TWO_RINGS.all_reduce, TWO_RINGS.buffers),
}


def algorithm_of(operation: str, name: str, ranks: int) -> Algorithm:
    """The row for an operation and an algorithm's name.

    ``native`` has a row that declares nothing. Raises ValueError for an unknown name, or for an N that the algorithm
    does not serve.
    """
    if name == NATIVE:
        return Algorithm(_unknown_steps)
    if str(name).startswith("hierarchical"):
        hierarchical.node_size(operation, name, ranks)  # raises ValueError where there are no such nodes
        return HIERARCHICAL[operation]
    rows = ALGORITHMS[operation]
    if str(name) not in rows:
        raise unknown_name(f"{operation} has no algorithm {name!r}", name, rows)
    row = rows[name]
    if row.power_of_two and ranks & (ranks - 1):
        others = ", ".join(other for other, r in rows.items() if not r.power_of_two)
        raise ValueError(f"{operation} by {name} needs a power of two of ranks, because partners at distance "
                         f"1, 2, 4, ... must all exist; this group has {ranks}. Use {others}.")
    return row


def row_of(call: Call) -> Algorithm:
    """The table's row for a call."""
    return algorithm_of(call.operation, call.algorithm, len(call.group))


# -- Checks of a call's options: what was asked, what was found, what to do ------------------------------------------

def checked_options(call: Call, row: Algorithm, *, library: str | None, wire: str | None,
                    accumulate: str | None) -> Call:
    """The call with its options in full: the default rule of a mean, the dtypes of ``wire=`` and ``accumulate=``.

    Raises ValueError for options that there are not, or that the algorithm cannot honor.
    """
    if call.algorithm == NATIVE and library is None:
        raise ValueError(f"{call.operation} by {NATIVE!r} asks MPI or NCCL for its own, but the ranks of one process "
                         f"have no such library; choose one of {', '.join(ALGORITHMS[call.operation])}, or run the "
                         "program under mpiexec with zs.connect()")
    if "reduce" in call.operation:
        call = call.checked_reduction()
    if wire or accumulate:
        _check_rounding(call, row, wire, accumulate)
        dtypes = [format_of(name).dtype if name else None for name in (wire, accumulate)]
        call = call._replace(wire=None if dtypes[0] == call.dtype else dtypes[0],
                             accumulate=None if dtypes[1] == call.dtype else dtypes[1])
    return call


def _check_rounding(call: Call, row: Algorithm, wire: str | None, accumulate: str | None) -> None:
    if call.dtype not in FLOATING or call.op not in ("sum", "mean"):
        raise ValueError(f"wire= and accumulate= are about rounding sums of floats; found op={call.op!r} of "
                         f"{call.dtype}")
    if wire and not row.wire:
        raise ValueError(f"wire={wire!r} is served by algorithm='ring' of reduce_scatter and all_reduce, where partial "
                         f"sums travel; found {call.operation} by {call.algorithm!r}")
    if accumulate and call.algorithm == NATIVE:
        raise ValueError(f"accumulate={accumulate!r}: in what format {call.operation} by {NATIVE!r} adds is the "
                         "library's choice; leave it out, or use algorithm='pairwise' (reduce_scatter) or 'everyone' "
                         "(all_reduce)")
    if accumulate and not row.accumulate:
        raise ValueError(f"accumulate={accumulate!r} would change nothing in {call.operation} by {call.algorithm!r}: "
                         "it makes one addition per hop, and one addition rounded to the wire's format is the addition "
                         "in fp32, rounded. Use wire='fp32', or algorithm='pairwise' (reduce_scatter) or 'everyone' "
                         "(all_reduce)")


def check_cuts(operation: str, algorithm: str, ranks: int) -> None:
    """Raises ValueError where ``splits=`` would change nothing."""
    row = algorithm_of(operation, algorithm, ranks)
    if not row.cuts:
        raise ValueError(f"splits= would change nothing in {operation} by {algorithm!r}, which cuts nothing; "
                         "leave it out")
    if row.folds and ranks & (ranks - 1):
        raise ValueError(f"splits= would change nothing in {operation} by {algorithm!r} on {ranks} ranks, of which "
                         "only a power of two take chunks, by a cut of their own; leave it out, or take 'ring'")


# -- Lockstep: the ranks of one call that are here, step by step -----------------------------------------------------
# A message moves when all its ends that are here are there: the sender has yielded ``send``, the receiver ``out``. All
# messages that can move in one round make one step.


class Delivery(NamedTuple):
    """A message that can move: the hop, by indices of the group; what is sent, and where it arrives.

    ``sent`` is None where the sender is in another process, ``out`` where the receiver is.
    """

    hop: Hop
    sent: Array | None
    out: Array | None

    @classmethod
    def between(cls, step: int, source: int, destination: int, sender: Exchange | PendingExchange | None,
                receiver: Exchange | PendingExchange | None) -> "Delivery":
        """The message that two ranks' exchanges let move, or one's alone where the other is in another process."""
        sent, out = sender.send if sender else None, receiver.out if receiver else None
        moved = out if sent is None else sent
        assert moved is not None
        if sent is not None and out is not None:
            assert sent.size == out.size
            assert sent.dtype == out.dtype, "a message arrives in the format in which it left"
        return cls(Hop(step, source, destination, sender.chunks if sender else (), moved.nbytes), sent, out)


def steps_of(me: PendingCall) -> Exchanges:
    """The generator of one rank's part in a call."""
    return row_of(me.call).steps(me, me.x, me.out)


def lockstep(steps: Mapping[int, Exchanges]) -> Iterator[list[Delivery]]:
    """The messages of each step, of the ranks whose generators these are, by their indices in the group.

    Who asks for the next step has moved them.
    """
    waiting: dict[int, Exchange | None] = {}  # the exchange that each rank has come to; None at its generator's end
    sends: dict[int, int] = {}  # the halves of these that have not moved yet, with whom
    receives: dict[int, int] = {}
    step, arrived = 0, list(steps)  # at an exchange that is new; of the others nothing can move yet
    while arrived:
        for rank in arrived:
            waiting[rank] = exchange = next(steps[rank], None)
            if exchange is not None and exchange.to is not None:
                sends[rank] = exchange.to
            if exchange is not None and exchange.source is not None:
                receives[rank] = exchange.source
        ends = {(rank, sends[rank]) for rank in arrived if rank in sends}
        ends |= {(receives[rank], rank) for rank in arrived if rank in receives}
        moved = [(source, to) for source, to in sorted(ends) if (source not in steps or sends.get(source) == to)
                 and (to not in steps or receives.get(to) == source)]
        if moved:
            yield [Delivery.between(step, source, to, waiting.get(source), waiting.get(to)) for source, to in moved]
        for source, to in moved:
            sends.pop(source, None)
            receives.pop(to, None)
        arrived = [rank for rank in sorted({end for pair in moved for end in pair} & steps.keys())
                   if rank not in sends and rank not in receives]
        step += 1
    assert not any(waiting.values()), "the algorithm waits for itself"


def expand(call: Call) -> list[Hop]:
    """Every hop of the call, from its own generators, run on arrays without data. Ranks are the group's indices."""
    return list(_expand(call.normalized()))


@lru_cache(maxsize=8)  # few: 512 ranks in a ring make half a million hops
def _expand(call: Call) -> tuple[Hop, ...]:
    return tuple(delivery.hop for step in lockstep_without_data(call) for delivery in step)


def lockstep_without_data(call: Call) -> Iterator[list[Delivery]]:
    """The steps of all ranks of a call, on arrays without data."""
    kernels = NullKernels()
    return lockstep({index: steps_of(without_data(call, index, kernels)) for index in range(call.ranks)})


def sent_by(call: Call, index: int) -> int:
    """The bytes that one rank sends, from its own generator alone, which needs no partner where there is no data.

    What a library's own collective sends is not known; it is counted as the first algorithm of the table would send.
    """
    if call.algorithm == NATIVE:
        call = call._replace(algorithm=next(iter(ALGORITHMS[call.operation])))
    if fast_ring.serves(call):
        return fast_ring.sent_nbytes(call)[index]
    steps = steps_of(without_data(call, index, NullKernels()))
    return sum(exchange.send.nbytes for exchange in steps if exchange.send is not None)


def without_data(call: Call, index: int, kernels: NullKernels) -> PendingCall:
    """One rank's part in the call on arrays without data, of the lengths that the operation has on this rank."""
    n = call.length
    own = call.cut[index + 1] - call.cut[index]
    x, out = {"reduce_scatter": (n, own), "all_gather": (own, n), "gather": (own, n),
              "all_to_all": (n, call.ranks * own)}.get(call.operation, (n, n))
    me = PendingCall(call, index, kernels, NullArray(x, call.dtype), NullArray(out, call.dtype))
    me.buffers = [NullArray(length, dtype) for length, dtype in row_of(call).buffers(me)]
    return me
