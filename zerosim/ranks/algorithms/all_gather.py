"""All-gather: every rank gives its chunk and receives the whole vector.

Legend: n elements, N ranks, chunk c comes from rank c. ``x`` (len(chunk r),), ``out`` (n,). ``x`` may be the own
chunk of ``out`` already, then nothing is copied.
Source of steps and bytes: Thakur, Rabenseifner & Gropp 2005, section 4.1; Bruck et al. 1997.
"""

from zerosim.ranks.algorithms.party import Array, Buffer, Exchange, Party, Steps


def place_own(party: Party, x: Array, out: Array) -> None:
    """Puts the rank's own chunk where it belongs in the whole vector, unless it lies there already."""
    if not party.in_place:
        party.copy(x, party.chunk(out, party.index))


def ring(party: Party, x: Array, out: Array) -> Steps:
    """N-1 steps; every chunk goes once round, and each rank passes on the chunk that came last."""
    place_own(party, x, out)
    for step in range(party.size - 1):
        sent, arriving = party.neighbor(-step), party.neighbor(-1 - step)
        landing = party.chunk(out, arriving)
        yield Exchange(party.chunk(out, sent), party.neighbor(1), landing, party.neighbor(-1), (sent,))


def doubling(party: Party, x: Array, out: Array) -> Steps:
    """log2 N steps, N a power of two: partners at distance 1, 2, 4, ... swap all that they have."""
    place_own(party, x, out)
    count = 1
    while count < party.size:
        partner, low = party.index ^ count, party.index & ~(count - 1)
        other = low ^ count
        yield Exchange(out[party.bounds(low, count)], partner, out[party.bounds(other, count)], partner,
                       tuple(range(low, low + count)))
        count *= 2


def bruck(party: Party, x: Array, out: Array) -> Steps:
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
