"""What a collective sends, with pencil and paper: bytes and messages of every rank, and steps.

Legend: N ranks, n bytes of the whole vector, s_r bytes of rank r's chunk, 2^m the largest power of two up to
N. An empty message is a message. Steps are those of the longest chain: a rank sends and receives one message
at a time.

Sources: Thakur, Rabenseifner & Gropp 2005, sections 3 and 4 (the algorithms, and 4.5 for the fold of N - 2^m
ranks); Patarasuk & Yuan 2009 (the ring, and 2(N-1)/N n as the least that any all-reduce can send).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from zerosim.planning.cuts import Cut, ceil_cut, checked_count


@dataclass(frozen=True, slots=True)
class Sent:
    """What one collective sends: `nbytes` and `messages` by rank, and the `steps` that it takes."""

    nbytes: tuple[int, ...]
    messages: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One collective: who owns what (N+1 boundaries), bytes of an element, the root if there is one."""

    cut: Cut
    itemsize: int
    root: int = 0

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.cut) - 1

    @property
    def whole(self) -> int:
        """n, the bytes of the whole vector."""
        return self.cut[-1] * self.itemsize

    def nbytes(self, chunk: int, count: int = 1) -> int:
        """Bytes of `count` consecutive chunks, N at most; chunks are counted round the ring."""
        first = chunk % self.ranks
        turns, last = divmod(first + count, self.ranks)
        return (self.cut[last] + turns * self.cut[-1] - self.cut[first]) * self.itemsize


def sent(collective: str, algorithm: str, cut: Cut, itemsize: int, *, root: int = 0) -> Sent:
    """What each rank sends in one collective of a vector that is cut among the ranks like this.

    >>> sent("all_gather", "ring", (0, 2, 4, 5, 5), 2)
    Sent(nbytes=(6, 8, 10, 6), messages=(3, 3, 3, 3), steps=3)

    Raises ValueError for an algorithm that the collective does not have or that this N does not allow, for
    boundaries that do not rise from 0, and for a root that is no rank.
    """
    ask = asked(collective, algorithm, cut, itemsize, root=root)
    return ALGORITHMS[collective, algorithm](ask)


def asked(collective: str, algorithm: str, cut: Cut, itemsize: int, *, root: int = 0) -> Ask:
    """What is asked for, once it is known to make sense; raises ValueError as `sent` does."""
    ask = Ask(tuple(cut), checked_count("itemsize", itemsize, 1), root)
    if ask.ranks < 1 or ask.cut[0] != 0 or any(low > high for low, high in pairwise(ask.cut)):
        raise ValueError("cut must hold N+1 rising boundaries from 0 on, "
                         f"got {ask.cut}; e.g. {ceil_cut(8, 2)}")
    if not 0 <= root < ask.ranks:
        raise ValueError(f"root={root} is no rank; the ranks are 0 to {ask.ranks - 1}")
    if (collective, algorithm) not in ALGORITHMS:
        known = ", ".join(" ".join(pair) for pair in ALGORITHMS)
        raise ValueError(f"no algorithm {algorithm!r} for {collective!r}; there are {known}")
    if (collective, algorithm) in POWERS_OF_TWO and ask.ranks & (ask.ranks - 1):
        raise ValueError(f"{collective} {algorithm} swaps with partners at distances 1, 2, 4, ... and needs "
                         f"a power of two, got {ask.ranks} ranks; take ring")
    return ask


def _by_rank(ask: Ask, nbytes: Callable[[int], int], messages: int, steps: int) -> Sent:
    return Sent(tuple(map(nbytes, range(ask.ranks))), (messages,) * ask.ranks, steps)


def _all_but_own(ask: Ask) -> Sent:
    """N-1 messages: every chunk leaves once, but for the one that stays. Ring and pairwise."""
    return _by_rank(ask, lambda r: ask.whole - ask.nbytes(r), ask.ranks - 1, ask.ranks - 1)


def _ring_all_gather(ask: Ask) -> Sent:
    """N-1 messages: a rank passes on every chunk but the last to arrive, its right neighbor's."""
    return _by_rank(ask, lambda r: ask.whole - ask.nbytes(r + 1), ask.ranks - 1, ask.ranks - 1)


def _halving(ask: Ask) -> Sent:
    """log2 N messages of n/2, n/4, ...: all but its own chunk."""
    steps = _log2_floor(ask.ranks)
    return _by_rank(ask, lambda r: ask.whole - ask.nbytes(r), steps, steps)


def _doubling_all_gather(ask: Ask) -> Sent:
    """log2 N messages: at distance d a rank sends the d chunks that its block has by then."""
    steps = _log2_floor(ask.ranks)
    return _by_rank(ask, lambda r: sum(ask.nbytes(r >> j << j, 1 << j) for j in range(steps)), steps, steps)


def _bruck(ask: Ask) -> Sent:
    """ceil(log2 N) messages: at distance d a rank sends its first d chunks, or as many as are missing."""
    steps = _log2_ceil(ask.ranks)
    counts = [min(1 << j, ask.ranks - (1 << j)) for j in range(steps)]
    return _by_rank(ask, lambda r: sum(ask.nbytes(r, count) for count in counts), steps, steps)


def _ring_all_reduce(ask: Ask) -> Sent:
    return _after(_all_but_own(ask), _ring_all_gather(ask))


def _after(*parts: Sent) -> Sent:
    """One collective after another."""
    return Sent(tuple(map(sum, zip(*(part.nbytes for part in parts), strict=True))),
                tuple(map(sum, zip(*(part.messages for part in parts), strict=True))),
                sum(part.steps for part in parts))


def _fold(ask: Ask, active: Sent) -> Sent:
    """Of the first 2(N - 2^m) ranks each even one hands n to the next, and is handed n at the end."""
    pairs = ask.ranks - len(active.nbytes)
    nbytes, messages = list(active.nbytes[pairs:]), list(active.messages[pairs:])
    for pair in reversed(range(pairs)):
        nbytes[:0] = (ask.whole, active.nbytes[pair] + ask.whole)
        messages[:0] = (1, active.messages[pair] + 1)
    return Sent(tuple(nbytes), tuple(messages), active.steps + (2 if pairs else 0))


def among_active(ask: Ask) -> Ask:
    """The same vector among the 2^m active ranks, which take the ceil cut where some sit out."""
    active = 1 << _log2_floor(ask.ranks)
    return ask if active == ask.ranks else Ask(ceil_cut(ask.cut[-1], active), ask.itemsize)


def _doubling_all_reduce(ask: Ask) -> Sent:
    """log2 N messages of n, on the 2^m active ranks."""
    steps = _log2_floor(ask.ranks)
    return _fold(ask, Sent((steps * ask.whole,) * (1 << steps), (steps,) * (1 << steps), steps))


def _rabenseifner(ask: Ask) -> Sent:
    """Halving, then doubling, on the 2^m active ranks."""
    inner = among_active(ask)
    return _fold(ask, _after(_halving(inner), _doubling_all_gather(inner)))


def _naive_broadcast(ask: Ask) -> Sent:
    """The root sends n to each of the others, one after another."""
    return _from_places(ask, (ask.ranks - 1, *[0] * (ask.ranks - 1)), ask.ranks - 1)


def _naive_reduce(ask: Ask) -> Sent:
    """Each of the others sends n to the root, which takes one after another."""
    return _from_places(ask, (0, *[1] * (ask.ranks - 1)), ask.ranks - 1)


def _tree_broadcast(ask: Ask) -> Sent:
    """A binomial tree: place v sends on to v + 1, v + 2, v + 4, ... as far as below its own lowest bit."""
    children = [_children(place, ask.ranks) for place in range(ask.ranks)]
    return _from_places(ask, children, _log2_ceil(ask.ranks))


def _tree_reduce(ask: Ask) -> Sent:
    """The same tree upwards: every place but the root sends n once."""
    return _from_places(ask, (0, *[1] * (ask.ranks - 1)), _log2_ceil(ask.ranks))


def _children(place: int, ranks: int) -> int:
    reachable = (ranks - 1 - place).bit_length()
    return min(reachable, (place & -place).bit_length() - 1) if place else reachable


def _from_places(ask: Ask, messages: Iterable[int], steps: int) -> Sent:
    """Messages of n each, counted by place: place v is rank (root + v) mod N."""
    by_place = tuple(messages)
    by_rank = tuple(by_place[(rank - ask.root) % ask.ranks] for rank in range(ask.ranks))
    return Sent(tuple(count * ask.whole for count in by_rank), by_rank, steps)


def _gather(ask: Ask) -> Sent:
    """Each of the others sends its chunk to the root, which takes one after another."""
    messages = _naive_reduce(ask).messages
    nbytes = tuple(ask.nbytes(rank) * count for rank, count in enumerate(messages))
    return Sent(nbytes, messages, ask.ranks - 1)


def _everyone(ask: Ask) -> Sent:
    """Every rank sends n to every other."""
    others = ask.ranks - 1
    return _by_rank(ask, lambda _: others * ask.whole, others, others)


def _barrier(ask: Ask) -> Sent:
    """ceil(log2 N) empty messages, to the ranks 1, 2, 4, ... further on (Hensgen, Finkel & Manber 1988)."""
    steps = _log2_ceil(ask.ranks)
    return _by_rank(ask, lambda _: 0, steps, steps)


def _log2_floor(ranks: int) -> int:
    return ranks.bit_length() - 1


def _log2_ceil(ranks: int) -> int:
    return (ranks - 1).bit_length()


ALGORITHMS: Mapping[tuple[str, str], Callable[[Ask], Sent]] = {
    ("reduce_scatter", "ring"): _all_but_own,
    ("reduce_scatter", "pairwise"): _all_but_own,
    ("reduce_scatter", "halving"): _halving,
    ("all_gather", "ring"): _ring_all_gather,
    ("all_gather", "doubling"): _doubling_all_gather,
    ("all_gather", "bruck"): _bruck,
    ("all_reduce", "ring"): _ring_all_reduce,
    ("all_reduce", "doubling"): _doubling_all_reduce,
    ("all_reduce", "rabenseifner"): _rabenseifner,
    ("all_reduce", "tree"): lambda ask: _after(_tree_reduce(ask), _tree_broadcast(ask)),
    ("all_reduce", "naive"): lambda ask: _after(_naive_reduce(ask), _naive_broadcast(ask)),
    ("all_reduce", "everyone"): _everyone,
    ("broadcast", "tree"): _tree_broadcast,
    ("broadcast", "naive"): _naive_broadcast,
    ("reduce", "tree"): _tree_reduce,
    ("reduce", "naive"): _naive_reduce,
    ("gather", "pairwise"): _gather,
    ("all_to_all", "pairwise"): _all_but_own,
    ("barrier", "dissemination"): _barrier,
}
# These swap halves with partners at distances 1, 2, 4, ... and have no fold.
POWERS_OF_TWO = frozenset({("reduce_scatter", "halving"), ("all_gather", "doubling")})
