"""``algorithm="native"``: the library's own collectives. Where they only move they give the same bits; where they add,
a bound, since the order of additions is the library's.
"""

import numpy as np
import pytest

import zerosim as zs
from tests.backends import programs
from tests.backends.worlds import World
from zerosim.numerics.arrays import sha256
from zerosim.testing import ulps_apart

MOVES = ("all_gather", "broadcast", "gather", "all_to_all")
SUMS = ("reduce_scatter", "all_reduce", "reduce")


@pytest.mark.parametrize("operation", MOVES)
@pytest.mark.parametrize("format", programs.FORMATS)
def test_what_only_moves_has_the_same_bits(library: World, operation: str, format: str) -> None:
    found, wanted = beside_ours(library, operation, format)
    for (now, later), ours in zip(found, wanted, strict=True):
        assert sha256(now) == sha256(later) == sha256(ours)


@pytest.mark.parametrize("operation", SUMS)
@pytest.mark.parametrize("format", programs.FORMATS)
def test_a_sum_of_n_terms_is_within_n_minus_1_roundings_of_the_sum_of_magnitudes(library: World, operation: str,
                                                                               format: str) -> None:
    """Higham 2002, section 4.2: |result - sum| <= γ Σ|x|, γ = (N-1)u/(1 - (N-1)u), in any order of additions.

    Below the smallest normal number an addition is exact, so that no other term is needed.
    """
    outcomes = library.run(programs.native, operation, format)
    xs = np.stack([outcome.result[1].astype(np.float64) for outcome in outcomes])
    u = 2.0**-53 if format == "fp64" else 2.0**-(zs.FORMATS[format].mantissa_bits + 1)
    rounds = (library.ranks - 1) * u
    bound = rounds / (1 - rounds) * np.abs(xs).sum(axis=0)
    for rank, outcome in enumerate(outcomes):
        for result in outcome.result[0]:
            if result is not None:
                own = part(operation, rank, library.ranks, xs.shape[1])
                assert (np.abs(result.astype(np.float64) - xs.sum(axis=0)[own]) <= bound[own]).all()


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_of_floats_have_the_same_bits_as_ours(library: World, op: str) -> None:
    found, wanted = beside_ours(library, "all_reduce", "bf16", op)
    for (now, _), ours in zip(found, wanted, strict=True):
        assert sha256(now) == sha256(ours)


def test_at_three_ranks_and_more_the_library_adds_in_another_order_than_the_ring(library: World) -> None:
    """By how many units in the last place is worth knowing, and printed with -s."""
    found, wanted = beside_ours(library, "all_reduce", "bf16", "sum", 4000)
    apart = max(int(ulps_apart(now, ours).max()) for (now, _), ours in zip(found, wanted, strict=True))
    print(f"{library.name}: all_reduce of bf16 is at most {apart} ulp from the ring")
    assert (apart > 0) == (library.ranks > 2)


def test_native_where_no_library_is_says_where_there_is_one() -> None:
    with pytest.raises(ValueError, match="asks MPI or NCCL for its own, but the ranks of one process have no such "
                                         "library; choose one of ring, doubling"):
        zs.Cluster(3).run(lambda rank: rank.all_reduce(np.ones(4, np.float32), algorithm="native"))


def part(operation: str, rank: int, ranks: int, length: int) -> slice:
    """Which elements of the whole vector a rank receives."""
    chunk = -(-length // ranks)
    return slice(rank * chunk, min(length, (rank + 1) * chunk)) if operation == "reduce_scatter" else slice(None)


def beside_ours(library: World, *args):
    """Every rank's (result, result of a work) by the library, and the result by the table's first algorithm."""
    outcomes = library.run(programs.native, *args)
    wanted = zs.Cluster(library.ranks).run(programs.ours, *args)
    return [outcome.result[0] for outcome in outcomes], list(wanted)
