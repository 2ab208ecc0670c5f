"""Seconds by size: exact break-even sizes, and the latency wall."""

import math
from fractions import Fraction
from itertools import pairwise
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.planning import ceil_cut
from zerosim.planning.collectives import ALGORITHMS, POWERS_OF_TWO
from zerosim.planning.cost import BreakEven, break_even, cost, curve, latency_wall_nbytes, ring_wall_ranks
from zerosim.planning.hardware import Link, Network

UNIT = Link("α = 1/1000, β = 1000", 1000, 0.001, "a test", "today")  # αβ is 1 byte
ONE_KIND = Network(UNIT)
FAST, SLOW = Link("fast", 4e9, 1e-6, "a test", "today"), Link("slow", 5e8, 9e-6, "a test", "today")
EAGER = Link("a slow link that answers at once", 5e8, 1e-7, "a test", "today")


def between(one: str, other: str, ranks: int, network: Network = ONE_KIND) -> tuple[BreakEven, ...]:
    return break_even(*(curve("all_reduce", name, ranks, network) for name in (one, other)))


@pytest.mark.parametrize(("ranks", "wanted"), [(4, 8), (8, 8.8), (64, 29.8), (512, 144.6)])
def test_ring_and_doubling_break_even_where_the_formula_says(ranks: int, wanted: float) -> None:
    point, = between("ring", "doubling", ranks)
    steps, vectors = 2 * (ranks - 1), Fraction(2 * (ranks - 1), ranks)
    assert point.nbytes == (steps - int(log2(ranks))) / (int(log2(ranks)) - vectors)
    assert float(point.nbytes) == pytest.approx(wanted, abs=0.05)
    assert (point.faster_below, point.faster_above) == (1, 0)


@pytest.mark.parametrize(("ranks", "wanted"), [(4, 0.8), (8, 1.88), (64, 11.4), (512, 62.7)])
def test_ring_and_tree_break_even_where_the_formula_says(ranks: int, wanted: float) -> None:
    point, = between("ring", "tree", ranks)
    assert float(point.nbytes) == pytest.approx(wanted, abs=0.05)
    assert (point.faster_below, point.faster_above) == (1, 0)


def test_break_even_sizes_grow_with_latency_and_with_rate() -> None:
    nvlink = Network(Link("x", 450e9, 3.4e-6, "a test", "today"))
    assert [point.nbytes for point in between("ring", "doubling", 4, nvlink)] == [8 * 1_530_000]


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_rabenseifner_and_the_ring_never_break_even_for_powers_of_two(ranks: int) -> None:
    assert between("ring", "rabenseifner", ranks) == ()


def test_equal_curves_have_no_break_even() -> None:
    assert between("ring", "rabenseifner", 2) == ()
    assert curve("all_reduce", "ring", 2, ONE_KIND) == curve("all_reduce", "rabenseifner", 2, ONE_KIND)


@pytest.mark.parametrize("ranks", [5, 6, 7, 12])
def test_the_ring_beats_rabenseifner_above_some_size_where_ranks_fold(ranks: int) -> None:
    point, = between("ring", "rabenseifner", ranks)
    assert (point.faster_below, point.faster_above) == (1, 0)


def test_on_three_ranks_the_ring_beats_rabenseifner_at_every_size() -> None:
    ring, folded = (curve("all_reduce", name, 3, ONE_KIND) for name in ("ring", "rabenseifner"))
    assert break_even(ring, folded) == ()
    assert ring.lines[0].latency_seconds == folded.lines[0].latency_seconds
    assert ring.lines[0].seconds_per_byte < folded.lines[0].seconds_per_byte


KEYS = [key for key in ALGORITHMS if key[0] == "all_reduce"]
NETWORKS = st.builds(lambda slow, per_node: Network(FAST, slow, per_node), st.sampled_from([SLOW, EAGER]),
                     st.integers(1, 8))


@given(ranks=st.integers(1, 16), key=st.sampled_from(list(ALGORITHMS)), network=NETWORKS, times=st.integers(0, 10**7))
def test_a_curve_is_the_cost_of_every_vector_of_equal_chunks(ranks, key, network, times) -> None:
    if key in POWERS_OF_TWO:
        ranks = 1 << (ranks.bit_length() - 1)
    elements = times * (ranks << (ranks.bit_length() - 1))
    exact = cost(*key, ceil_cut(elements, ranks), 1, network).seconds
    assert curve(*key, ranks, network).seconds(elements) == pytest.approx(exact, rel=1e-14, abs=0)


@given(ranks=st.integers(2, 16), one=st.sampled_from(KEYS), other=st.sampled_from(KEYS), network=NETWORKS)
def test_curves_meet_at_a_break_even_and_the_other_is_faster_on_its_other_side(ranks, one, other, network) -> None:
    both = curve(*one, ranks, network), curve(*other, ranks, network)
    points, past = break_even(*both), Fraction(0)
    for point in points:
        assert point.nbytes > past
        seconds = [of.at(point.nbytes).seconds(point.nbytes) for of in both]
        assert seconds[0] == seconds[1]
        past = point.nbytes
    sizes = [Fraction(0), *(point.nbytes for point in points)]
    middles = [(low + high) / 2 for low, high in zip(sizes, [*sizes[1:], 2 * sizes[-1] + 2], strict=True)]
    faster = []
    for nbytes in middles:
        first, second = (of.at(nbytes).seconds(nbytes) for of in both)
        faster.append(None if first == second else int(second < first))
    assert [(point.faster_below, point.faster_above) for point in points] == list(pairwise(faster))


def test_a_curve_bends_where_another_link_becomes_the_slower_one() -> None:
    # Inside nodes messages start late and go fast, between them they start early and go slowly.
    bent = curve("all_reduce", "ring", 4, Network(FAST, EAGER, 2))
    assert len(bent.lines) == 2
    bend = bent.lines[1].from_nbytes
    assert FAST.alpha + bend / 4 / FAST.beta == EAGER.alpha + bend / 4 / EAGER.beta
    assert len(curve("all_reduce", "ring", 4, Network(FAST, SLOW, 2)).lines) == 1


# --- the wall -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "all_reduce"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_the_rings_latency_wall_is_n_alpha_beta(collective: str, ranks: int) -> None:
    assert latency_wall_nbytes(curve(collective, "ring", ranks, ONE_KIND)) == ranks
    elements = 20 * ranks  # 20 ranks' worth of αβ, and 1 byte each
    at_20 = cost(collective, "ring", ceil_cut(elements, ranks), 1, ONE_KIND)
    assert at_20.transfer_seconds == pytest.approx(20 * at_20.latency_seconds)


@given(ranks=st.integers(2, 16), key=st.sampled_from(KEYS), network=NETWORKS)
def test_below_the_wall_latency_takes_more_and_above_transfer_does(ranks, key, network) -> None:
    of = curve(*key, ranks, network)
    wall = Fraction(latency_wall_nbytes(of))
    for nbytes, more in ((wall * Fraction(99, 100), True), (wall * Fraction(101, 100), False)):
        line = of.at(nbytes)
        assert (line.latency_seconds > line.seconds_per_byte * nbytes) == more


def test_25_megabytes_on_infiniband_hit_the_wall_at_36_ranks_and_14_gigabytes_at_20000() -> None:
    ndr = Link("NDR", 50e9, 14e-6, "a test", "today")
    assert math.floor(ring_wall_ranks(25_000_000, ndr)) == 35
    assert ring_wall_ranks(14_000_000_000, ndr) == 20_000
    assert latency_wall_nbytes(curve("all_reduce", "ring", 36, Network(ndr))) > 25e6


def test_without_latency_there_is_no_wall_and_without_bytes_no_end_of_it() -> None:
    ideal = Link("ideal", 1e9, 0, "a test", "today")
    assert ring_wall_ranks(1, ideal) == math.inf
    assert latency_wall_nbytes(curve("all_reduce", "ring", 8, Network(ideal))) == 0
    assert latency_wall_nbytes(curve("barrier", "dissemination", 8, ONE_KIND)) == math.inf


def test_one_rank_needs_no_seconds_for_any_size() -> None:
    assert curve("all_reduce", "ring", 1, ONE_KIND).seconds(10**12) == 0
