"""The levels of each algorithm are the messages that ranks make; their sums and their seconds are published."""

from collections import Counter, defaultdict
from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import chosen
from tests.planning.naive_replay import link_of, of_a_card
from tests.planning.recorded_runs import FAST, SLOW, program_of, traces_of
from tests.ranks import asking
from tests.ranks.data import normals
from zerosim.planning import ALGORITHMS, Link, Network, ceil_cut, collectives, cost, sent

WORLDS = chosen([1, 2, 3, 4, 5, 8, 11], [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])
BARRIER = ("barrier", "dissemination")
ALPHA, BETA = 3e-6, 7e9
ONE_KIND = Network(Link("made up", BETA, ALPHA, "a test", "today"))


def predicted(collective, algorithm, cut, itemsize, root):
    """Every message of the levels, (step in which it goes, source, destination, bytes)."""
    found, step = Counter(), 0
    shape = collectives.CollectiveShape(collective, algorithm, cut, itemsize, itemsize, root)
    for level in collectives.levels(collectives.checked_shape(shape)):
        for step in range(step, step + level.times):  # noqa: B020, the last is where the next level begins
            found.update(zip([step] * len(level.sources), level.sources.tolist(), level.destinations.tolist(),
                             level.nbytes.tolist(), strict=True))
        step += 1
    return found


def made(collective, algorithm, cut, root):
    """Every message of the trace's expansion, of fp32 elements."""
    ranks = len(cut) - 1
    splits = cut if asking.takes_splits(collective, algorithm, ranks) else None
    vectors = normals(ranks, cut[-1])

    def program(rank: zs.Rank) -> None:
        asking.ask(rank, collective, algorithm, vectors[rank.index], splits, root=root)

    found = traces_of(ranks, program_of(("barrier",)) if collective == "barrier" else program)
    row = found[0].collectives(collective)[0]
    return Counter((hop.step, hop.source, hop.destination, hop.nbytes) for hop in row.hops())


@st.composite
def calls(draw, most=6):
    """An algorithm, a cut that its world allows, chunks of any length, a root, and ranks in a node."""
    ranks = draw(st.integers(1, 12))
    chunks = draw(st.lists(st.integers(0, most), min_size=ranks, max_size=ranks))
    key = draw(st.sampled_from([key for key in ALGORITHMS if asking.allowed(*key, ranks)]))
    cut = (0, *np.cumsum(chunks).tolist())
    if key == BARRIER or not asking.takes_splits(*key, ranks):
        cut = ceil_cut(0 if key == BARRIER else cut[-1], ranks)
    return key, cut, draw(st.integers(0, ranks - 1)) if key[0] in asking.ROOTED else 0, draw(st.integers(1, 6))


# -- messages, and their sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", WORLDS)
def test_levels_are_the_messages_that_ranks_make_in_the_steps_in_which_they_make_them_and_their_sums(ranks):
    for key in (key for key in ALGORITHMS if asking.allowed(*key, ranks)):
        cuts = [ceil_cut(0 if key == BARRIER else length, ranks) for length in (0, 1, 2 * ranks + 1, 4 * ranks)]
        if key != BARRIER and asking.takes_splits(*key, ranks):
            cuts += asking.cuts_of(13, ranks)
        for cut in dict.fromkeys(cuts):
            for root in {0, ranks - 1} if key[0] in asking.ROOTED else {0}:
                messages, totals = predicted(*key, cut, 4, root), sent(*key, cut, 4, root=root)
                assert messages == made(*key, cut, root), (key, cut, root)
                nbytes, counts = Counter(), Counter()
                for (_, source, _, each), count in messages.items():
                    nbytes[source] += each * count
                    counts[source] += count
                assert totals.nbytes == tuple(nbytes[rank] for rank in range(ranks)), (key, cut, root)
                assert totals.messages == tuple(counts[rank] for rank in range(ranks)), (key, cut, root)
                assert totals.steps == max((step for step, *_ in messages), default=-1) + 1, (key, cut, root)


@pytest.mark.parametrize("key", [("reduce_scatter", "ring"), ("all_reduce", "ring")])
@pytest.mark.parametrize("wire", [1, 2, 8])
def test_partial_sums_in_a_format_of_the_wires_own_are_counted_and_priced_in_it(key, wire):
    for cut in ((0, 4, 8, 12), (0, 1, 1, 13), (0, 0, 5), (0, 2**59, 2**60)):
        shape = collectives.checked_shape(collectives.CollectiveShape(*key, cut, 4, wire))
        nbytes, longest = [0] * shape.ranks, Counter()
        for level in collectives.levels(shape):
            for source, each in zip(level.sources.tolist(), level.nbytes.tolist(), strict=True):
                nbytes[source] += level.times * each
            longest[((FAST, int(level.nbytes.max())),)] += level.times
        assert collectives.sent_of(shape).nbytes == tuple(nbytes), cut
        assert cost.longest_messages(shape, Network(FAST)) == longest, cut


def test_the_bytes_of_the_longest_vectors_are_counted_exactly():
    for key in ALGORITHMS:
        few = sent(*key, ceil_cut(8, 4), 1).nbytes
        assert sent(*key, ceil_cut(8 * 2**50, 4), 2**40).nbytes == tuple(2**90 * n for n in few)  # 2^93 bytes
        assert sent(*key, tuple(2**62 * n for n in range(0, 9, 2)), 1).nbytes == tuple(2**62 * n for n in few)


# -- seconds ----------------------------------------------------------------------------------------------------------


def swaps(n):
    """Steps of halving and doubling: the floor of log2."""
    return n.bit_length() - 1


def trees(n):
    return ceil(log2(n))


# Steps, and vectors that the longest messages of all steps add up to, for equal chunks. Ranks that fold, where N is no
# power of two, pay two more steps of the whole vector.
FORMULAS = {
    **dict.fromkeys([("reduce_scatter", "ring"), ("reduce_scatter", "pairwise"), ("all_gather", "ring"),
                     ("gather", "pairwise"), ("all_to_all", "pairwise")], lambda n: (n - 1, Fraction(n - 1, n))),
    **dict.fromkeys([("reduce_scatter", "halving"), ("all_gather", "doubling")],
                    lambda n: (swaps(n), Fraction(n - 1, n))),
    ("all_gather", "bruck"): lambda n: (trees(n), Fraction(n - 1, n)),
    ("all_reduce", "ring"): lambda n: (2 * (n - 1), Fraction(2 * (n - 1), n)),
    ("all_reduce", "tree"): lambda n: (2 * trees(n), 2 * trees(n)),
    ("all_reduce", "naive"): lambda n: (2 * (n - 1), 2 * (n - 1)),
    ("all_reduce", "everyone"): lambda n: (n - 1, n - 1),
    **dict.fromkeys([("broadcast", "tree"), ("reduce", "tree")], lambda n: (trees(n), trees(n))),
    **dict.fromkeys([("broadcast", "naive"), ("reduce", "naive")], lambda n: (n - 1, n - 1)),
    BARRIER: lambda n: (trees(n), 0),
    ("all_reduce", "doubling"): lambda n: (swaps(n) + 2 * (n & (n - 1) != 0),) * 2,
    ("all_reduce", "rabenseifner"): lambda n: (
        2 * (swaps(n) + (n & (n - 1) != 0)), 2 * (1 - Fraction(1, 2 ** swaps(n))) + 2 * (n & (n - 1) != 0)),
}


@pytest.mark.parametrize("key", ALGORITHMS)
def test_equal_chunks_take_the_published_steps_and_seconds(key):
    for ranks in (ranks for ranks in [*WORLDS, 64] if asking.allowed(*key, ranks)):
        elements = 240 * ranks  # which the 2^m ranks that are left where some fold divide too
        (steps, vectors), found = FORMULAS[key](ranks), cost.cost(*key, ceil_cut(elements, ranks), 2, ONE_KIND)
        assert (found.sent.steps, found.nbytes) == (steps, 2 * elements), ranks
        assert found.latency_seconds == pytest.approx(steps * ALPHA, rel=1e-15), ranks
        assert found.transfer_seconds == pytest.approx(float(vectors * 2 * elements / Fraction(BETA)), rel=1e-14)
        assert found.seconds == pytest.approx(found.latency_seconds + found.transfer_seconds, rel=1e-15)
        folds = key[1] in ("doubling", "rabenseifner") and ranks & (ranks - 1)
        if key[0] != "gather" and key[1] not in ("tree", "naive") and not folds:  # all ranks send as much
            alike = (int(vectors * 2 * elements),) * ranks, (steps,) * ranks, steps
            assert found.sent == collectives.Sent(*alike), ranks


@given(calls(most=5000), st.sampled_from([1, 2, 4]))
def test_the_slowest_hop_of_each_step_decides_on_one_kind_of_link_or_two(drawn, itemsize):
    key, cut, root, per_node = drawn
    for network in (Network(FAST), Network(FAST, SLOW, per_node), Network(SLOW, FAST, per_node)):
        steps = defaultdict(list)
        for step, *message in predicted(*key, cut, itemsize, root):
            steps[step].append(message)
        seconds = []
        for messages in steps.values():
            parts = of_a_card([one[:2] for one in messages], range(len(cut) - 1), network.ranks_per_node)
            seconds.append(max(link_of(network, source, to).seconds(float(nbytes * part))
                               for (source, to, nbytes), part in zip(messages, parts, strict=True)))
        found = cost.cost(*key, cut, itemsize, network, root=root)
        assert found.seconds == pytest.approx(sum(seconds), rel=1e-12)
        assert found.sent == sent(*key, cut, itemsize, root=root)
    flat = cost.cost(*key, cut, itemsize, Network(FAST), root=root)
    assert cost.cost(*key, cut, itemsize, Network(FAST, SLOW, 12), root=root) == flat
    assert cost.cost(*key, cut, itemsize, Network(FAST, FAST, 1), root=root) == flat
    assert cost.cost(*key, cut, itemsize, Network(FAST, FAST, per_node), root=root).seconds <= flat.seconds


def test_a_ring_over_nodes_is_as_fast_as_all_of_a_nodes_cards_and_an_all_to_all_as_each_ranks_own():
    """16 ranks of NVLink with a card each of 50 GB/s: 400 GB/s leave a node, near NVLink's 450."""
    nbytes, alpha = 16 * 10**9, 14e-6
    nvlink, infiniband = (zs.planning.hardware.link(name) for name in ("nvlink4", "infiniband-ndr"))
    cut, network = ceil_cut(nbytes, 16), Network(nvlink, infiniband, 8)
    assert cost.cost("all_gather", "ring", cut, 1, network).seconds == pytest.approx(15 * (alpha + 1e9 / 400e9))
    far = cost.cost("all_to_all", "pairwise", cut, 1, network).seconds  # half of what a rank sends leaves its node
    assert far == pytest.approx(15 * alpha + nbytes / 2 / 50e9)
    across = cost.cost("all_reduce", "ring", (0, nbytes, 2 * nbytes), 1, Network(infiniband)).seconds
    assert across == pytest.approx(2 * (alpha + nbytes / 50e9))


def test_without_latency_a_perfect_algorithms_bus_bandwidth_is_the_links_a_tree_reaches_less_and_one_rank_has_none():
    ideal = Network(Link("ideal", BETA, 0, "a test", "today"))
    for key in (("all_reduce", "ring"), ("reduce_scatter", "ring"), ("all_to_all", "pairwise"), ("gather", "pairwise")):
        for ranks in (2, 3, 64):
            found = cost.cost(*key, ceil_cut(1000 * ranks, ranks), 2, ideal)
            assert found.bus_bytes_per_second == pytest.approx(BETA, rel=1e-14)
            assert found.algorithm_bytes_per_second == pytest.approx(2000 * ranks / found.seconds)
    shares = [cost.cost("all_reduce", "tree", ceil_cut(1 << 30, ranks), 2, ONE_KIND).bus_bytes_per_second / BETA
              for ranks in (2, 4, 8, 64)]
    assert shares == pytest.approx([1 / 2, 3 / 8, 7 / 24, 63 / 384], rel=1e-3)
    for key in ALGORITHMS:
        found = cost.cost(*key, (0, 100), 2, ONE_KIND)
        assert (found.seconds, found.algorithm_bytes_per_second, found.bus_bytes_per_second) == (0, None, None)
    found = cost.cost(*BARRIER, (0,) * 9, 1, ONE_KIND)  # which moves nothing
    assert (found.algorithm_bytes_per_second, found.bus_bytes_per_second) == (0, None)
    assert {key[0] for key in ALGORITHMS} - set(cost.BUS_FACTORS) == {"barrier"}
    assert collectives.POWERS_OF_TWO == asking.POWERS_ONLY
