"""Seconds by size: exact break-even sizes, and the latency wall."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.recorded_runs import FAST, SLOW
from zerosim.planning import ALGORITHMS, Link, Network, ceil_cut, collectives, cost

ONE_KIND = Network(Link("α = 1/1000, β = 1000", 1000, 0.001, "a test", "today"))  # αβ is 1 byte
EAGER = Link("a slow link that answers at once", 1e8, 1e-7, "a test", "today")
KEYS = [key for key in ALGORITHMS if key[0] == "all_reduce"]
NETWORKS = st.builds(lambda slow, per_node: Network(FAST, slow, per_node), st.sampled_from([SLOW, EAGER]),
                     st.integers(1, 8))


def test_rabenseifner_is_never_slower_than_the_ring_for_powers_of_two_and_beaten_above_some_size_where_ranks_fold():
    curves = {ranks: [cost.curve("all_reduce", name, ranks, ONE_KIND) for name in ("ring", "rabenseifner")]
              for ranks in (2, 3, 4, 5, 6, 8, 12, 64)}
    assert curves[2][0] == curves[2][1]
    for ranks in (4, 8, 64):
        assert cost.break_even(*curves[ranks]) == ()
        assert all(other.seconds(ranks) < ring.seconds(ranks) for ring, other in [curves[ranks]])
    for ranks in (5, 6, 12):
        (point,) = cost.break_even(*curves[ranks])
        assert (point.faster_below, point.faster_above) == (1, 0)
    assert cost.break_even(*curves[3]) == ()  # on three ranks the ring is faster at every size


@given(ranks=st.integers(1, 16), key=st.sampled_from(list(ALGORITHMS)), network=NETWORKS, times=st.integers(0, 10**7))
def test_a_curve_is_the_cost_of_every_vector_of_equal_chunks(ranks, key, network, times):
    if key in collectives.POWERS_OF_TWO:
        ranks = 1 << (ranks.bit_length() - 1)
    elements = times * (ranks << (ranks.bit_length() - 1))
    exact = cost.cost(*key, ceil_cut(elements, ranks), 1, network).seconds
    assert cost.curve(*key, ranks, network).seconds(elements) == pytest.approx(exact, rel=1e-14, abs=0)


@given(ranks=st.integers(2, 16), one=st.sampled_from(KEYS), other=st.sampled_from(KEYS), network=NETWORKS)
def test_curves_meet_at_a_break_even_and_the_other_is_faster_on_its_other_side(ranks, one, other, network):
    both = cost.curve(*one, ranks, network), cost.curve(*other, ranks, network)
    points = cost.break_even(*both)
    for point in points:
        seconds = [of.at(point.nbytes).seconds(point.nbytes) for of in both]
        assert seconds[0] == seconds[1]
    sizes = [Fraction(0), *(point.nbytes for point in points)]
    assert sizes == sorted(set(sizes))
    middles = [(low + high) / 2 for low, high in zip(sizes, [*sizes[1:], 2 * sizes[-1] + 2], strict=True)]
    faster = []
    for nbytes in middles:
        first, second = (of.at(nbytes).seconds(nbytes) for of in both)
        faster.append(None if first == second else int(second < first))
    assert [(point.faster_below, point.faster_above) for point in points] == list(pairwise(faster))


# -- the wall ---------------------------------------------------------------------------------------------------------


@given(ranks=st.integers(2, 16), key=st.sampled_from(KEYS), network=NETWORKS)
def test_below_the_wall_latency_takes_more_and_above_transfer_does(ranks, key, network):
    of = cost.curve(*key, ranks, network)
    wall = Fraction(cost.latency_wall_nbytes(of))
    for nbytes, more in ((wall * Fraction(99, 100), True), (wall * Fraction(101, 100), False)):
        line = of.at(nbytes)
        assert (line.latency_seconds > line.seconds_per_byte * nbytes) == more


def test_the_rings_latency_wall_is_n_alpha_beta():
    for collective in ("reduce_scatter", "all_gather", "all_reduce"):
        for ranks in (2, 3, 512):
            assert cost.latency_wall_nbytes(cost.curve(collective, "ring", ranks, ONE_KIND)) == ranks
    ndr = Link("NDR", 50e9, 14e-6, "a test", "today")  # 25 MB hit the wall at 36 ranks, 14 GB at 20,000
    assert math.floor(cost.ring_wall_ranks(25_000_000, ndr)) == 35
    assert cost.ring_wall_ranks(14_000_000_000, ndr) == 20_000


def test_without_latency_there_is_no_wall_and_without_bytes_no_end_of_it():
    ideal = Link("ideal", 1e9, 0, "a test", "today")
    assert cost.ring_wall_ranks(1, ideal) == math.inf
    assert cost.latency_wall_nbytes(cost.curve("all_reduce", "ring", 8, Network(ideal))) == 0
    assert cost.latency_wall_nbytes(cost.curve("barrier", "dissemination", 8, ONE_KIND)) == math.inf
    assert cost.curve("all_reduce", "ring", 1, ONE_KIND).seconds(10**12) == 0
