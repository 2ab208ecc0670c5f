"""Reduce-scatter: every rank gives a whole vector and receives its own chunk of the sum.

Legend: n elements, N ranks, chunk c belongs to rank c. ``x`` (n,), ``out`` (len(chunk r),).
Source of steps and bytes: Thakur, Rabenseifner & Gropp 2005, sections 4.2 and 4.5; Patarasuk & Yuan 2009.
"""

import numpy as np

from zerosim.ranks.algorithms.party import Array, Buffer, Exchange, Party, Steps
from zerosim.ranks.cuts import chunk_lengths


def ring(party: Party, x: Array, out: Array) -> Steps:
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


def pairwise(party: Party, x: Array, out: Array) -> Steps:
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


def halving(party: Party, x: Array, out: Array) -> Steps:
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
