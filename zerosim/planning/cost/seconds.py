"""What a collective costs on a network: steps, bytes, and seconds by the α-β model.

Legend: N ranks, n bytes of the whole vector, α seconds of latency for each message, β bytes per second one way.

The model: a message of n bytes takes α + n/β; links are full duplex; a rank sends one message and receives one at a
time; a step ends with its slowest message, and then the next begins. For a ring on one kind of link that is what it
takes however ranks run ahead, since its longest chunk goes at every step, one hop after the other. Elsewhere, with
uneven chunks or two kinds of link, a rank that does not wait for the end of a step may end sooner, never later.

The model knows nothing of pipelines inside a message, nor of links that messages share, by which rings win in practice:
in it Rabenseifner's algorithm is never slower than the ring where N is a power of two.

Sources: Hockney 1994 (α + n/β); Thakur, Rabenseifner & Gropp 2005, section 3 (the model, and the algorithms' costs).
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from zerosim.planning.collectives import ALGORITHMS, Ask, Sent, asked
from zerosim.planning.cost.bandwidth import algorithm_bytes_per_second, bus_bytes_per_second
from zerosim.planning.cost.schedule import levels
from zerosim.planning.cost.steps import Longest, longest_by_step
from zerosim.planning.cuts import Cut
from zerosim.planning.hardware import Link, Network

LARGEST_NBYTES = 1 << 62  # beyond, bytes no longer fit the arrays in which a schedule is written
# Here every step has messages of the same lengths, on other links: all chunks, or as many whole vectors.
STEPS_ALIKE = frozenset({("reduce_scatter", "ring"), ("reduce_scatter", "pairwise"), ("all_gather", "ring"),
                         ("all_reduce", "ring"), ("all_reduce", "everyone"), ("all_to_all", "pairwise")})


@dataclass(frozen=True, slots=True)
class Cost:
    """One collective's price: what each rank sends, and the seconds, of which so much is latency.

    `nbytes` is the whole vector, n; for all_gather and reduce_scatter too.
    """

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    sent: Sent
    seconds: float
    latency_seconds: float
    transfer_seconds: float

    @property
    def steps(self) -> int:
        """Steps of the longest chain."""
        return self.sent.steps

    @property
    def algorithm_bytes_per_second(self) -> float | None:
        """The algorithm bandwidth of nccl-tests; None where it takes no time."""
        return algorithm_bytes_per_second(self.nbytes, self.seconds)

    @property
    def bus_bytes_per_second(self) -> float | None:
        """The bus bandwidth of nccl-tests; None where it takes no time, and for a barrier."""
        return bus_bytes_per_second(self.collective, self.ranks, self.nbytes, self.seconds)


def cost(collective: str, algorithm: str, cut: Cut, itemsize: int, network: Network, *, root: int = 0) -> Cost:
    """What one collective of a vector costs that is cut among the ranks like this.

    >>> from zerosim.planning import ceil_cut
    >>> from zerosim.planning.hardware import link
    >>> ring = cost("all_reduce", "ring", ceil_cut(7_000_000_000, 8), 2, Network(link("nvlink4")))
    >>> ring.steps, set(ring.sent.nbytes), round(ring.transfer_seconds, 4), round(ring.latency_seconds * 1e6, 1)
    (14, {24500000000}, 0.0544, 47.6)

    Raises ValueError as `collectives.sent` does, and for vectors of 2^62 bytes or more.
    """
    ask = asked(collective, algorithm, cut, itemsize, root=root)
    if ask.whole >= LARGEST_NBYTES:
        raise ValueError(f"a vector of {ask.whole} bytes was asked about; this reckons with fewer than 2^62 bytes")
    latency, transfer = Fraction(0), Fraction(0)
    for longest, times in longest_messages(collective, algorithm, ask, network).items():
        alpha, seconds = slowest(longest, network)
        latency, transfer = latency + times * alpha, transfer + times * seconds
    return Cost(collective, algorithm, ask.ranks, ask.whole, ALGORITHMS[collective, algorithm](ask),
                float(latency + transfer), float(latency), float(transfer))


def longest_messages(collective: str, algorithm: str, ask: Ask, network: Network) -> Counter[Longest]:
    """How many steps of a collective have which longest messages, inside nodes and between them."""
    if network.between is None and (collective, algorithm) in STEPS_ALIKE and ask.ranks > 1:
        first = next(levels(collective, algorithm, ask))  # one step tells all: N-1 of N messages each need not be made
        return Counter({(int(first.nbytes.max()), None): ALGORITHMS[collective, algorithm](ask).steps})
    return longest_by_step(levels(collective, algorithm, ask), ask.ranks, network)


def slowest(longest: Longest, network: Network) -> tuple[Fraction, Fraction]:
    """(α, n/β) of the slowest message of a step."""
    messages = [(link.alpha, nbytes / link.beta) for nbytes, link in by_link(longest, network)]
    return max(messages, key=lambda message: message[0] + message[1])


def by_link(longest: Longest, network: Network) -> list[tuple[int, Link]]:
    """The longest messages of a step, each with its link."""
    pairs = zip(longest, (network.inside, network.between), strict=True)
    return [(nbytes, link) for nbytes, link in pairs if nbytes is not None and link is not None]
