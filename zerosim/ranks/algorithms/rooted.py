"""Collectives with a root, and the all-to-all: broadcast, reduce, gather, all_to_all, barrier.

Legend: n elements, N ranks; v = (r - root) mod N is a rank's place counted from the root.
"""

from zerosim.ranks.algorithms.party import Array, Buffer, Exchange, Party, Steps


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
