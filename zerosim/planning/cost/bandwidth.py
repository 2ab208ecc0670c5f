"""Algorithm bandwidth and bus bandwidth, as nccl-tests define them.

Legend: N ranks, n bytes of the whole vector (for all_gather and reduce_scatter too), t seconds.
Source: nccl-tests, doc/PERFORMANCE.md; for gather, src/gather.cu.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction

# How many vectors every link must carry at the least: with it the bus bandwidth of a perfect algorithm is the link's
# bytes per second, whatever N is. A barrier carries nothing and has none.
BUS_FACTORS: Mapping[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda ranks: Fraction(2 * (ranks - 1), ranks),
    "reduce_scatter": lambda ranks: Fraction(ranks - 1, ranks),
    "all_gather": lambda ranks: Fraction(ranks - 1, ranks),
    "all_to_all": lambda ranks: Fraction(ranks - 1, ranks),
    "gather": lambda ranks: Fraction(ranks - 1, ranks),
    "broadcast": lambda ranks: Fraction(1),
    "reduce": lambda ranks: Fraction(1),
}


def algorithm_bytes_per_second(nbytes: int, seconds: float) -> float | None:
    """n/t; None where it takes no time."""
    return nbytes / seconds if seconds else None


def bus_bytes_per_second(collective: str, ranks: int, nbytes: int, seconds: float) -> float | None:
    """n/t times the collective's factor; None where it takes no time, and for a collective that has no factor.

    >>> bus_bytes_per_second("all_reduce", 8, 8_000, 1.0)
    14000.0
    """
    if not seconds or collective not in BUS_FACTORS:
        return None
    return float(BUS_FACTORS[collective](ranks) * nbytes) / seconds
