"""What the rows about collectives name, each reckoned by the planner's own formulas.

Legend: N ranks; a vector is what one rank contributes, n bytes of it.
"""

from collections.abc import Callable

from zerosim.planning import hardware
from zerosim.planning.collectives import sent
from zerosim.planning.cost import BUS_FACTORS, algorithm_bytes_per_second, bus_bytes_per_second, cost
from zerosim.planning.cuts import ceil_cut
from zerosim.planning.hardware import Link, Network

ELEMENTS_PER_RANK = 240  # which 2^m divides wherever some of the ranks sit out
SLOW = Network(Link("one byte a second", 1, 0, "made up, so that seconds are bytes", "today"))


def steps(collective: str, algorithm: str, ranks: int) -> float:
    """Steps, one after the other."""
    return sent(collective, algorithm, ceil_cut(ELEMENTS_PER_RANK * ranks, ranks), 1).steps


def vectors(collective: str, algorithm: str, ranks: int) -> float:
    """Through the busiest links one after the other, in vectors of n bytes."""
    found = cost(collective, algorithm, ceil_cut(ELEMENTS_PER_RANK * ranks, ranks), 1, SLOW)
    return found.seconds / found.nbytes


def sent_vectors(collective: str, algorithm: str, ranks: int) -> float:
    """What the rank that sends most sends, in vectors of n bytes."""
    found = sent(collective, algorithm, ceil_cut(ELEMENTS_PER_RANK * ranks, ranks), 1)
    return max(found.nbytes) / (ELEMENTS_PER_RANK * ranks)


def transfer_milliseconds(collective: str, algorithm: str, ranks: int, nbytes: int, link: str) -> float:
    """Without latency."""
    network = Network(hardware.link(link))
    return 1e3 * cost(collective, algorithm, ceil_cut(nbytes, ranks), 1, network).transfer_seconds


def gigabytes_per_second(bytes_per_second: float | None) -> float | None:
    """10⁹ bytes; None of None, which is the bandwidth of what takes no time."""
    return None if bytes_per_second is None else bytes_per_second / 1e9


COLLECTIVE_QUANTITIES: dict[str, Callable[..., float | None]] = {
    "steps": steps, "vectors through a link": vectors, "sent vectors": sent_vectors,
    "transfer milliseconds": transfer_milliseconds,
    "bus factor": lambda collective, ranks: float(BUS_FACTORS[collective](ranks)),
    "algorithm GB/s": lambda nbytes, microseconds: gigabytes_per_second(
        algorithm_bytes_per_second(nbytes, microseconds * 1e-6)),
    "bus GB/s": lambda collective, ranks, nbytes, microseconds: gigabytes_per_second(
        bus_bytes_per_second(collective, ranks, nbytes, microseconds * 1e-6)),
}
