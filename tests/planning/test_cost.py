"""Seconds of collectives: the published formulas on one kind of link, the slowest hop of each step on two."""

import re
from collections import defaultdict
from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.planning import ceil_cut, sent
from zerosim.planning.collectives import ALGORITHMS, POWERS_OF_TWO, Sent, checked_vector, in_steps, levels
from zerosim.planning.cost import BUS_FACTORS, cost, longest_by_step, longest_messages
from zerosim.planning.hardware import Link, Network, link

WORLDS = [1, 2, 3, 4, 5, 8, 16, 64]
POWERS = [1, 2, 4, 8, 16, 64]
ALPHA, BETA = 3e-6, 7e9
ONE_KIND = Network(Link("made up", BETA, ALPHA, "a test", "today"))
FAST, SLOW = Link("fast", 4e9, 1e-6, "a test", "today"), Link("slow", 5e8, 9e-6, "a test", "today")


def floor_log2(ranks: int) -> int:
    return ranks.bit_length() - 1


# Steps, and vectors that the longest messages of all steps add up to, for equal chunks.
FORMULAS = {
    ("reduce_scatter", "ring"): lambda n: (n - 1, Fraction(n - 1, n)),
    ("reduce_scatter", "pairwise"): lambda n: (n - 1, Fraction(n - 1, n)),
    ("reduce_scatter", "halving"): lambda n: (floor_log2(n), Fraction(n - 1, n)),
    ("all_gather", "ring"): lambda n: (n - 1, Fraction(n - 1, n)),
    ("all_gather", "doubling"): lambda n: (floor_log2(n), Fraction(n - 1, n)),
    ("all_gather", "bruck"): lambda n: (ceil(log2(n)), Fraction(n - 1, n)),
    ("all_reduce", "ring"): lambda n: (2 * (n - 1), Fraction(2 * (n - 1), n)),
    ("all_reduce", "tree"): lambda n: (2 * ceil(log2(n)), 2 * ceil(log2(n))),
    ("all_reduce", "naive"): lambda n: (2 * (n - 1), 2 * (n - 1)),
    ("all_reduce", "everyone"): lambda n: (n - 1, n - 1),
    ("broadcast", "tree"): lambda n: (ceil(log2(n)), ceil(log2(n))),
    ("broadcast", "naive"): lambda n: (n - 1, n - 1),
    ("reduce", "tree"): lambda n: (ceil(log2(n)), ceil(log2(n))),
    ("reduce", "naive"): lambda n: (n - 1, n - 1),
    ("gather", "pairwise"): lambda n: (n - 1, Fraction(n - 1, n)),
    ("all_to_all", "pairwise"): lambda n: (n - 1, Fraction(n - 1, n)),
    ("barrier", "dissemination"): lambda n: (ceil(log2(n)), 0),
}
FOLDS = {
    "doubling": lambda m, folded: (m + 2 * folded, m + 2 * folded),
    "rabenseifner": lambda m, folded: (2 * (m + folded), 2 * Fraction(2**m - 1, 2**m) + 2 * folded),
}


@pytest.mark.parametrize(("key", "ranks"), [(key, n) for key in FORMULAS for n in WORLDS
                                            if n in POWERS or key not in POWERS_OF_TWO])
def test_equal_chunks_take_the_published_seconds(key: tuple[str, str], ranks: int) -> None:
    nbytes = 60 * ranks * 2
    steps, vectors = FORMULAS[key](ranks)
    found = cost(*key, ceil_cut(60 * ranks, ranks), 2, ONE_KIND)
    assert found.latency_seconds == pytest.approx(steps * ALPHA, rel=1e-15)
    assert found.transfer_seconds == pytest.approx(float(vectors * nbytes / Fraction(BETA)), rel=1e-15)
    assert found.seconds == pytest.approx(found.latency_seconds + found.transfer_seconds, rel=1e-15)
    assert (found.steps, found.nbytes) == (steps, nbytes)
    if key[0] != "gather" and key[1] not in ("tree", "naive"):  # all ranks send as much
        assert found.sent == Sent((int(vectors * nbytes),) * ranks, (steps,) * ranks, steps)


@pytest.mark.parametrize("algorithm", FOLDS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_ranks_that_fold_pay_two_more_steps_of_the_whole_vector(algorithm: str, ranks: int) -> None:
    m = floor_log2(ranks)
    steps, vectors = FOLDS[algorithm](m, ranks != 2**m)
    elements = 16 * 15 * ranks  # which the 2^m ranks divide too
    found = cost("all_reduce", algorithm, ceil_cut(elements, ranks), 4, ONE_KIND)
    assert found.steps == steps
    assert found.seconds == pytest.approx(steps * ALPHA + float(vectors) * 4 * elements / BETA, rel=1e-14)
    if ranks == 2**m:
        assert found.sent == Sent((int(vectors * 4 * elements),) * ranks, (steps,) * ranks, steps)


def test_every_algorithm_has_a_formula_here() -> None:
    assert {*FORMULAS, *(("all_reduce", name) for name in FOLDS)} == set(ALGORITHMS)


@given(chunks=st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_a_ring_of_uneven_chunks_goes_at_the_pace_of_the_longest(chunks: list[int]) -> None:
    cut, ranks = (0, *np.cumsum(chunks).tolist()), len(chunks)
    for collective, rounds in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
        seconds = cost(collective, "ring", cut, 2, ONE_KIND).seconds
        wanted = rounds * (ranks - 1) * (ALPHA + 2 * max(chunks) / BETA)
        assert seconds == pytest.approx(wanted, rel=1e-14)


def test_a_vector_that_lies_on_one_rank_goes_round_whole_at_every_step() -> None:
    spread, lumped = (cost("all_gather", "ring", cut, 2, ONE_KIND) for cut in ((0, 8, 16, 24, 32), (0, 0, 32, 32, 32)))
    assert lumped.transfer_seconds == pytest.approx(4 * spread.transfer_seconds)
    assert lumped.latency_seconds == spread.latency_seconds
    # It sends as many bytes in all as a vector that is spread, over links that lie idle in turn.
    assert sum(lumped.sent.nbytes) == sum(spread.sent.nbytes)


@st.composite
def calls(draw: st.DrawFn) -> tuple:
    ranks = draw(st.integers(1, 12))
    keys = [key for key in ALGORITHMS if key not in POWERS_OF_TWO or ranks & (ranks - 1) == 0]
    chunks = draw(st.lists(st.integers(0, 5000), min_size=ranks, max_size=ranks))
    return (draw(st.sampled_from(keys)), (0, *np.cumsum(chunks).tolist()), draw(st.sampled_from([1, 2, 4])),
            draw(st.integers(0, ranks - 1)), draw(st.integers(1, 6)))


@given(calls())
def test_the_slowest_hop_of_each_step_decides(drawn) -> None:
    key, cut, itemsize, root, per_node = drawn
    network, steps = Network(FAST, SLOW, per_node), defaultdict(list)
    for step, level in in_steps(levels(*key, checked_vector(*key, cut, itemsize, root=root)), len(cut) - 1):
        for time in range(level.times):
            for number, source, to, nbytes in zip(step + time, level.sources, level.destinations, level.nbytes,
                                                  strict=True):
                steps[int(number)].append(network.link(int(source), int(to)).seconds(int(nbytes)))
    found = cost(*key, cut, itemsize, network, root=root)
    assert found.seconds == pytest.approx(sum(map(max, steps.values())), rel=1e-12)
    assert found.sent == sent(*key, cut, itemsize, root=root)


@given(calls())
def test_nodes_that_hold_all_ranks_or_equal_links_change_nothing(drawn) -> None:
    key, cut, itemsize, root, per_node = drawn
    flat = cost(*key, cut, itemsize, Network(FAST), root=root)
    assert cost(*key, cut, itemsize, Network(FAST, SLOW, 12), root=root) == flat
    assert cost(*key, cut, itemsize, Network(FAST, FAST, per_node), root=root) == flat
    assert cost(*key, cut, itemsize, Network(SLOW, SLOW, 1), root=root) == cost(
        *key, cut, itemsize, Network(FAST, SLOW, 1), root=root)


@given(calls())
def test_steps_that_are_said_to_be_equal_are(drawn) -> None:
    key, cut, itemsize, root, _ = drawn
    vector = checked_vector(*key, cut, itemsize, root=root)
    by_step = longest_by_step(levels(*key, vector), vector.ranks, Network(FAST))
    assert longest_messages(*key, vector, Network(FAST)) == by_step


def test_a_ring_that_leaves_its_node_goes_at_the_pace_of_the_slow_link() -> None:
    # Each step crosses nodes somewhere, so the fast links wait: two nodes cost as much as eight.
    seconds = {nodes: cost("all_reduce", "ring", ceil_cut(800, 8), 2, Network(FAST, SLOW, 8 // nodes)).seconds
               for nodes in (2, 4, 8)}
    assert len(set(seconds.values())) == 1
    assert seconds[2] == pytest.approx(14 * SLOW.seconds(200))


def test_halving_and_doubling_cross_nodes_in_few_of_their_steps() -> None:
    found = cost("all_reduce", "rabenseifner", ceil_cut(800, 8), 2, Network(FAST, SLOW, 4))
    # n/2 between the nodes, n/4 and n/8 inside, and back.
    assert found.seconds == pytest.approx(2 * (SLOW.seconds(800) + FAST.seconds(400) + FAST.seconds(200)))


# --- bandwidths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "algorithm"), [
    ("all_reduce", "ring"), ("reduce_scatter", "ring"), ("all_gather", "ring"), ("all_to_all", "pairwise"),
    ("gather", "pairwise")])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_without_latency_the_bus_bandwidth_of_a_perfect_algorithm_is_the_links(collective, algorithm, ranks) -> None:
    ideal = Network(Link("ideal", BETA, 0, "a test", "today"))
    found = cost(collective, algorithm, ceil_cut(1000 * ranks, ranks), 2, ideal)
    assert found.bus_bytes_per_second == pytest.approx(BETA, rel=1e-14)
    assert found.algorithm_bytes_per_second == pytest.approx(2000 * ranks / found.seconds)


def test_a_tree_reaches_less_of_the_bus_the_more_ranks_there_are() -> None:
    shares = [cost("all_reduce", "tree", ceil_cut(1 << 30, ranks), 2, ONE_KIND).bus_bytes_per_second / BETA
              for ranks in (2, 4, 8, 64)]
    assert shares == pytest.approx([1 / 2, 3 / 8, 7 / 24, 63 / 384], rel=1e-3)


def test_one_rank_takes_no_time_and_has_no_bandwidth() -> None:
    for key in ALGORITHMS:
        found = cost(*key, (0, 100), 2, ONE_KIND)
        assert (found.seconds, found.algorithm_bytes_per_second, found.bus_bytes_per_second) == (0, None, None)


def test_a_barrier_moves_nothing_and_has_no_bus_bandwidth() -> None:
    found = cost("barrier", "dissemination", (0,) * 9, 1, ONE_KIND)
    assert found.seconds == pytest.approx(3 * ALPHA)
    assert (found.algorithm_bytes_per_second, found.bus_bytes_per_second) == (0, None)
    assert {key[0] for key in ALGORITHMS} - set(BUS_FACTORS) == {"barrier"}


# --- what texts say -----------------------------------------------------------------------------------------


def test_fourteen_gigabytes_on_nvlink_take_54_ms_and_not_the_31_of_a_figure_for_both_ways() -> None:
    found = cost("all_reduce", "ring", ceil_cut(7_000_000_000, 8), 2, Network(link("nvlink4")))
    assert found.transfer_seconds == pytest.approx(54.4e-3, abs=0.05e-3)
    many = cost("all_reduce", "ring", ceil_cut(7_000_000_000, 4096), 2, Network(link("nvlink4")))
    assert many.transfer_seconds == pytest.approx(62.2e-3, abs=0.05e-3)
    both_ways = 2 * 14 / 900
    assert both_ways == pytest.approx(31e-3, abs=0.15e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64, 512])
def test_rabenseifner_is_never_slower_than_the_ring_for_powers_of_two(ranks: int) -> None:
    for elements in (0, ranks, 1000 * ranks, 10**6 * ranks):
        ring, other = (cost("all_reduce", name, ceil_cut(elements, ranks), 2, ONE_KIND).seconds
                       for name in ("ring", "rabenseifner"))
        assert other == ring if ranks == 2 else other < ring


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "text"), [
    (lambda: cost("all_reduce", "quantum", (0, 4), 2, ONE_KIND), "no algorithm 'quantum' for 'all_reduce'; there are "),
    (lambda: cost("all_gather", "doubling", (0, 1, 2, 3), 2, ONE_KIND), "all_gather doubling swaps with partners"),
    (lambda: cost("all_gather", "ring", (0, 1 << 62), 2, ONE_KIND), "a vector of 9223372036854775808 bytes was asked "
     "about; this computes with fewer than 2^62 bytes"),
    (lambda: cost("all_gather", "ring", (0, -1), 2, ONE_KIND), "cut must hold N+1 rising boundaries from 0 on")])
def test_what_cannot_be_priced_is_refused(call, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        call()
