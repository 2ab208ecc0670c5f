"""``algorithm="native"``: the library's own collectives. Where they only move they give the same bits; where they add,
a bound, since the order of additions is the library's.
"""

from itertools import product

import numpy as np
import pytest

import zerosim as zs
from tests.backends.test_one_suite import formats
from tests.backends.worlds import MPI, World
from tests.cases import THOROUGH, chosen
from tests.ranks import programs
from tests.ranks.data import FLOATS
from zerosim.numerics import arrays
from zerosim.testing import ulps_apart

MOVES = ("all_gather", "broadcast", "gather", "all_to_all")
SUMS = ("reduce_scatter", "all_reduce", "reduce")


def matters(world: World) -> bool:
    """Three ranks cut unevenly and add in two orders, as four do."""
    return THOROUGH or world is not MPI[3]


def asked(world: World, operation: str, format: str, op: str = "sum", lengths=None):
    """For each length, what every rank brought and found: by the library twice, and by ours."""
    lengths = lengths or (0, 37, 4 * world.ranks)  # in uneven chunks, and in equal ones
    outcomes = world.run(programs.native, operation, format, op, lengths)
    return zip(*(outcome.result for outcome in outcomes), strict=True)


@pytest.mark.parametrize("operation", chosen([*MOVES, *SUMS][1::2], [*MOVES, *SUMS]))
def test_what_only_moves_and_sums_of_integers_have_the_same_bits(library: World, operation: str) -> None:
    moved = chosen(("fp64", "fp32", "bf16", "fp8_e5m2"), FLOATS)  # elements of 8, 4, 2 and 1 bytes
    for format, op in product(moved, ["sum"]) if operation in MOVES else product(["int64"], ["sum", "max", "min"]):
        for ranks in asked(library, operation, format, op):
            for _, now, later, ours in ranks:
                assert arrays.sha256(now) == arrays.sha256(later) == arrays.sha256(ours), (format, op)


@pytest.mark.parametrize("operation", chosen(list(SUMS)[::2], SUMS))
def test_a_sum_of_n_terms_is_within_n_minus_1_roundings_of_the_sum_of_magnitudes(library: World,
                                                                               operation: str) -> None:
    """Higham 2002, section 4.2: |result - sum| <= γ Σ|x|, γ = (N-1)u/(1 - (N-1)u), in any order of additions; a mean's
    quotient is rounded once more.

    Below the smallest normal number an addition is exact, so that no other term is needed.
    """
    for format, op in product(formats(library), ("sum", "mean")):
        if library.library == "NCCL" and format.startswith("fp8"):
            continue  # which it does not add
        u = 2.0**-53 if format == "fp64" else 2.0**-(zs.FORMATS[format].mantissa_bits + 1)
        rounds, divisor = (library.ranks - 1) * u, library.ranks if op == "mean" else 1
        for ranks in asked(library, operation, format, op):
            xs = np.stack([x for x, *_ in ranks]).astype(np.float64) / divisor
            bound = (rounds / (1 - rounds) + (u if op == "mean" else 0)) * np.abs(xs).sum(axis=0)
            for rank, (_, now, later, _) in enumerate(ranks):
                assert arrays.sha256(now) == arrays.sha256(later)
                if now is not None:
                    own = part(operation, rank, library.ranks, xs.shape[1])
                    assert (np.abs(now.astype(np.float64) - xs.sum(axis=0)[own]) <= bound[own]).all(), (format, op)


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_have_the_same_bits_as_ours_nan_and_signed_zeros_included(mpi: World, op: str) -> None:
    """NCCL's own need not pass a NaN on."""
    for format in ("bf16", "fp32", "int32"):
        for ranks in asked(mpi, "all_reduce", format, op):
            for _, now, later, ours in ranks:
                assert arrays.sha256(now) == arrays.sha256(later) == arrays.sha256(ours), format


def test_at_three_ranks_and_more_the_library_adds_in_another_order_than_the_ring(mpi: World) -> None:
    """By how many units in the last place is worth knowing, and printed with -s."""
    (ranks,) = asked(mpi, "all_reduce", "bf16", "sum", (4000,))
    apart = max(int(ulps_apart(now, ours).max()) for _, now, _, ours in ranks)
    print(f"{mpi.name}: all_reduce of bf16 is at most {apart} ulp from the ring")
    assert (apart > 0) == (mpi.ranks > 2)


def part(operation: str, rank: int, ranks: int, length: int) -> slice:
    """Which elements of the whole vector a rank receives."""
    chunk = -(-length // ranks)
    return slice(rank * chunk, min(length, (rank + 1) * chunk)) if operation == "reduce_scatter" else slice(None)
