"""What each algorithm sends: the published rows for equal chunks, the exact sums for any."""

import re
from fractions import Fraction
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.planning import ALGORITHMS, ceil_cut, chunk_lengths, sent
from zerosim.planning.collectives import POWERS_OF_TWO

WORLDS = [*range(1, 10), 16, 64]
POWERS = [1, 2, 4, 8, 16, 64]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, ...]:
    """Even, uneven and empty chunks: N+1 rising boundaries from 0 on."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    return (0, *(sum(lengths[:i + 1]) for i in range(len(lengths))))


def equal(ranks: int) -> tuple[int, ...]:
    """A cut of 60 N elements into equal chunks."""
    return ceil_cut(60 * ranks, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(("collective", "algorithm", "vectors", "steps"), [
    ("reduce_scatter", "ring", lambda n: Fraction(n - 1, n), lambda n: n - 1),
    ("reduce_scatter", "pairwise", lambda n: Fraction(n - 1, n), lambda n: n - 1),
    ("all_gather", "ring", lambda n: Fraction(n - 1, n), lambda n: n - 1),
    ("all_gather", "bruck", lambda n: Fraction(n - 1, n), lambda n: ceil(log2(n))),
    ("all_to_all", "pairwise", lambda n: Fraction(n - 1, n), lambda n: n - 1),
    ("all_reduce", "ring", lambda n: 2 * Fraction(n - 1, n), lambda n: 2 * (n - 1)),
    ("all_reduce", "everyone", lambda n: n - 1, lambda n: n - 1),
    ("barrier", "dissemination", lambda n: 0, lambda n: ceil(log2(n))),
])
def test_equal_chunks_send_the_published_share(ranks, collective, algorithm, vectors, steps) -> None:
    row = sent(collective, algorithm, equal(ranks), 2)
    assert row.nbytes == (vectors(ranks) * 120 * ranks,) * ranks
    assert row.messages == (steps(ranks),) * ranks
    assert row.steps == steps(ranks)


@pytest.mark.parametrize("ranks", POWERS)
@pytest.mark.parametrize(("collective", "algorithm", "vectors", "steps"), [
    ("reduce_scatter", "halving", lambda n: Fraction(n - 1, n), log2),
    ("all_gather", "doubling", lambda n: Fraction(n - 1, n), log2),
    ("all_reduce", "doubling", log2, log2),
    ("all_reduce", "rabenseifner", lambda n: 2 * Fraction(n - 1, n), lambda n: 2 * log2(n)),
])
def test_powers_of_two_take_log2_steps(ranks, collective, algorithm, vectors, steps) -> None:
    row = sent(collective, algorithm, equal(ranks), 2)
    assert row.nbytes == (vectors(ranks) * 120 * ranks,) * ranks
    assert row.messages == (steps(ranks),) * ranks
    assert row.steps == steps(ranks)


@pytest.mark.parametrize("ranks", [n for n in WORLDS if n not in POWERS])
@pytest.mark.parametrize(("algorithm", "steps_of_power"), [("doubling", 1), ("rabenseifner", 2)])
def test_other_counts_fold_first_in_two_more_steps(ranks: int, algorithm: str, steps_of_power: int) -> None:
    active = 1 << (ranks.bit_length() - 1)
    folded, whole = ranks - active, 2 * 16 * 9
    row = sent("all_reduce", algorithm, ceil_cut(16 * 9, ranks), 2)
    inner = sent("all_reduce", algorithm, ceil_cut(16 * 9, active), 2)
    assert row.steps == steps_of_power * int(log2(active)) + 2 == inner.steps + 2
    # A folded rank sends n in one message, its partner n and one message more than the active ranks do.
    assert row.nbytes[0:2 * folded:2] == (whole,) * folded
    assert row.messages[0:2 * folded:2] == (1,) * folded
    assert row.nbytes[1:2 * folded:2] == tuple(n + whole for n in inner.nbytes[:folded])
    assert row.nbytes[2 * folded:] == inner.nbytes[folded:]
    assert sum(row.nbytes) == sum(inner.nbytes) + 2 * folded * whole
    assert sum(row.messages) == sum(inner.messages) + 2 * folded


@pytest.mark.parametrize("ranks", WORLDS)
def test_rooted_rows_burden_the_root(ranks: int) -> None:
    whole, others = 120 * ranks, ranks - 1
    cut = equal(ranks)
    rows = {key: sent(*key, cut, 2) for key in ALGORITHMS if key not in POWERS_OF_TWO}
    assert rows["all_reduce", "naive"].nbytes == (others * whole, *[whole] * others)
    assert rows["all_reduce", "naive"].steps == 2 * others
    assert rows["broadcast", "naive"].nbytes == (others * whole, *[0] * others)
    assert rows["reduce", "naive"].nbytes == (0, *[whole] * others)
    assert rows["gather", "pairwise"].nbytes == (0, *[120] * others)
    assert rows["broadcast", "tree"].nbytes[0] == ceil(log2(ranks)) * whole
    assert rows["broadcast", "tree"].steps == rows["reduce", "tree"].steps == ceil(log2(ranks))
    assert rows["all_reduce", "tree"].steps == 2 * ceil(log2(ranks))
    # Every edge of the tree is used once each way.
    assert sum(rows["broadcast", "tree"].nbytes) == sum(rows["reduce", "tree"].nbytes) == others * whole
    assert sum(rows["all_reduce", "tree"].nbytes) == 2 * others * whole


@pytest.mark.parametrize(("ranks", "messages"), [
    (1, (0,)), (2, (1, 0)), (3, (2, 0, 0)), (4, (2, 0, 1, 0)), (5, (3, 0, 1, 0, 0)), (6, (3, 0, 1, 0, 1, 0)),
    (8, (3, 0, 1, 0, 2, 0, 1, 0))])
def test_the_broadcast_tree_has_these_numbers_of_children(ranks: int, messages: tuple[int, ...]) -> None:
    assert sent("broadcast", "tree", equal(ranks), 1).messages == messages


@pytest.mark.parametrize("key", [key for key in ALGORITHMS if key[0] in {"broadcast", "reduce", "gather"}])
@pytest.mark.parametrize("root", range(5))
def test_another_root_turns_the_ranks_round(key: tuple[str, str], root: int) -> None:
    at_zero, turned = sent(*key, equal(5), 2), sent(*key, equal(5), 2, root=root)
    assert turned.messages == tuple(at_zero.messages[(rank - root) % 5] for rank in range(5))
    assert turned.nbytes == tuple(at_zero.nbytes[(rank - root) % 5] for rank in range(5))


@given(cut=cuts(), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_any_cut_sends_n_minus_1_vectors_in_all(cut: tuple[int, ...], itemsize: int) -> None:
    once = (len(cut) - 2) * cut[-1] * itemsize
    for key in [("reduce_scatter", "ring"), ("reduce_scatter", "pairwise"), ("all_gather", "ring"),
                ("all_gather", "bruck"), ("all_to_all", "pairwise"),
                ("broadcast", "naive"), ("broadcast", "tree"), ("reduce", "naive"), ("reduce", "tree")]:
        assert sum(sent(*key, cut, itemsize).nbytes) == once
    for key in [("all_reduce", "ring"), ("all_reduce", "tree"), ("all_reduce", "naive")]:
        assert sum(sent(*key, cut, itemsize).nbytes) == 2 * once


@given(cut=cuts())
def test_a_ring_keeps_back_one_chunk_exactly(cut: tuple[int, ...]) -> None:
    own = chunk_lengths(cut)
    neighbors = (*own[1:], own[0])
    assert sent("reduce_scatter", "ring", cut, 2).nbytes == tuple(2 * (cut[-1] - length) for length in own)
    assert sent("all_gather", "ring", cut, 2).nbytes == tuple(2 * (cut[-1] - length) for length in neighbors)
    assert sent("all_reduce", "ring", cut, 2).nbytes == tuple(
        2 * (2 * cut[-1] - a - b) for a, b in zip(own, neighbors, strict=True))


@pytest.mark.parametrize(("algorithm", "nbytes"), [
    ("ring", (8 - 2, 8 - 1, 8 - 2, 8 - 3)),
    ("doubling", (3 + 5, 2 + 5, 1 + 3, 2 + 3)),
    ("bruck", (3 + 5, 2 + 3, 1 + 3, 2 + 5)),
])
def test_three_all_gathers_of_one_uneven_cut_differ(algorithm: str, nbytes: tuple[int, ...]) -> None:
    assert sent("all_gather", algorithm, (0, 3, 5, 6, 8), 1).nbytes == nbytes


@pytest.mark.parametrize("key", list(ALGORITHMS))
def test_one_rank_sends_nothing_in_no_steps(key: tuple[str, str]) -> None:
    row = sent(*key, (0, 7), 2)
    assert (row.nbytes, row.messages, row.steps) == ((0,), (0,), 0)


@pytest.mark.parametrize("key", list(ALGORITHMS))
def test_an_empty_vector_still_takes_messages(key: tuple[str, str]) -> None:
    row = sent(*key, (0, 0, 0, 0, 0), 2)
    assert row.nbytes == (0, 0, 0, 0)
    assert row.messages == sent(*key, equal(4), 2).messages
    assert sum(row.messages) >= 3


@pytest.mark.parametrize(("call", "text"), [
    (lambda: sent("all_reduce", "quantum", (0, 4), 2), "no algorithm 'quantum' for 'all_reduce'; there are "),
    (lambda: sent("reduce_scatter", "halving", (0, 1, 2, 3), 2), "reduce_scatter halving swaps with partners "
     "at distances 1, 2, 4, ... and needs a power of two, got 3 ranks; take ring"),
    (lambda: sent("all_gather", "ring", (0, 3, 2), 2),
     "cut must hold N+1 rising boundaries from 0 on, got (0, 3, 2); e.g. (0, 4, 8)"),
    (lambda: sent("all_gather", "ring", (), 2), "cut must hold N+1 rising boundaries from 0 on, got ();"),
    (lambda: sent("broadcast", "tree", (0, 3, 4), 2, root=2), "root=2 is no rank; the ranks are 0 to 1"),
    (lambda: sent("broadcast", "tree", (0, 3, 4), 0), "itemsize must be at least 1, got 0"),
])
def test_bad_input_is_refused_with_what_was_asked_and_what_to_do(call, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        call()
