"""The levels of each algorithm are the messages that ranks make, and what they add up to is what texts publish."""

import re
from collections import Counter, defaultdict
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.ranks.asking import ROOTED, ROWS, allowed, ask, takes_splits
from tests.ranks.data import normals
from zerosim.planning import ALGORITHMS, ceil_cut, sent
from zerosim.planning.collectives import ROUNDS, checked_vector, in_steps, levels, sent_of, sum_of_levels
from zerosim.planning.cost import longest_by_step
from zerosim.planning.hardware import Link, Network

WORLDS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 16]
BARRIER = ("barrier", "dissemination")
FAST, SLOW = Link("fast", 1e9, 1e-6, "made up", "today"), Link("slow", 1e8, 1e-5, "made up", "today")

Message = tuple[int, int, int, int]  # step, source, destination, bytes


# --- messages -----------------------------------------------------------------------------------------------


def predicted(collective: str, algorithm: str, cut: tuple[int, ...], itemsize: int, root: int) -> Counter[Message]:
    """Every message of the levels, in the step in which it goes."""
    found: Counter[Message] = Counter()
    vector = checked_vector(collective, algorithm, cut, itemsize, root=root)
    for step, level in in_steps(levels(collective, algorithm, vector), vector.ranks):
        for time in range(level.times):
            found.update(zip((step + time).tolist(), level.sources.tolist(), level.destinations.tolist(),
                             level.nbytes.tolist(), strict=True))
    return found


def made(collective: str, algorithm: str, cut: tuple[int, ...], root: int) -> Counter[Message]:
    """Every message of the trace's expansion, of fp32 elements."""
    ranks = len(cut) - 1
    cluster, vectors = zs.Cluster(ranks), normals(ranks, cut[-1])
    splits = cut if takes_splits(collective, algorithm, ranks) else None

    def program(rank: zs.Rank) -> None:
        if collective == "barrier":
            rank.barrier()
        else:
            ask(rank, collective, algorithm, vectors[rank.index], splits, root=root)

    cluster.run(program)
    row = cluster.trace[0].collectives(collective)[0]
    return Counter((hop.step, hop.source, hop.destination, hop.nbytes) for hop in row.hops())


def test_every_algorithm_of_the_ranks_has_levels() -> None:
    assert set(ALGORITHMS) == {*ROWS, BARRIER}


@pytest.mark.parametrize(("ranks", "key"), [(n, key) for n in WORLDS for key in ALGORITHMS if allowed(*key, n)])
def test_levels_are_the_messages_that_ranks_make_in_the_steps_in_which_they_make_them(ranks, key) -> None:
    for length in [0] if key == BARRIER else [0, 1, 2 * ranks + 1, 4 * ranks]:
        for root in {0, ranks - 1} if key[0] in ROOTED else {0}:
            cut = ceil_cut(length, ranks)
            assert predicted(*key, cut, 4, root) == made(*key, cut, root)


@st.composite
def calls(draw: st.DrawFn) -> tuple:
    """A world, an algorithm that it allows, chunks of any length, a root, and ranks in a node."""
    ranks = draw(st.integers(1, 12))
    chunks = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
    key = draw(st.sampled_from([key for key in ROWS if allowed(*key, ranks)]))
    cut = (0, *np.cumsum(chunks).tolist())
    if not takes_splits(*key, ranks):
        cut = ceil_cut(cut[-1], ranks)
    return key, cut, draw(st.integers(0, ranks - 1)) if key[0] in ROOTED else 0, draw(st.integers(1, 5))


@given(calls())
def test_any_cut_and_any_root_make_the_messages_of_the_levels_and_their_sums(drawn) -> None:
    key, cut, root, _ = drawn
    messages, totals = predicted(*key, cut, 4, root), sent(*key, cut, 4, root=root)
    assert messages == made(*key, cut, root)
    for rank in range(len(cut) - 1):
        mine = {message: count for message, count in messages.items() if message[1] == rank}
        assert sum(nbytes * count for (*_, nbytes), count in mine.items()) == totals.nbytes[rank]
        assert sum(mine.values()) == totals.messages[rank]
    assert max((step for step, *_ in messages), default=-1) + 1 == totals.steps


@given(calls())
def test_the_longest_messages_of_a_step_are_found_on_each_kind_of_link(drawn) -> None:
    key, cut, root, per_node = drawn
    ranks, network = len(cut) - 1, Network(FAST, SLOW, per_node)
    steps: dict[int, dict[str, int]] = defaultdict(dict)
    for step, source, destination, nbytes in predicted(*key, cut, 4, root):
        name = network.link(source, destination).name
        steps[step][name] = max(steps[step].get(name, 0), nbytes)
    wanted = Counter((step.get("fast"), step.get("slow")) for step in steps.values())
    assert longest_by_step(levels(*key, checked_vector(*key, cut, 4, root=root)), ranks, network) == wanted


def test_where_ranks_fold_some_swap_while_others_are_handed_a_vector() -> None:
    # Five ranks: 0 hands to 1 while 3 and 4 swap already; so a level of an algorithm is no step of a collective.
    first = {message[1:3] for message in predicted("all_reduce", "doubling", ceil_cut(5, 5), 1, 0) if message[0] == 0}
    assert first == {(0, 1), (3, 4), (4, 3)}


# --- sums ---------------------------------------------------------------------------------------------------


@given(chunks=st.lists(st.integers(0, 9), min_size=1, max_size=9), key=st.sampled_from(list(ROUNDS)))
def test_the_closed_forms_are_the_sums_over_the_levels(chunks: list[int], key: tuple[str, str]) -> None:
    vector = checked_vector(*key, (0, *np.cumsum(chunks).tolist()), 2)
    assert sent_of(*key, vector) == sum_of_levels(levels(*key, vector), vector.ranks)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 9])
@pytest.mark.parametrize(("algorithm", "steps_of_power"), [("doubling", 1), ("rabenseifner", 2)])
def test_other_counts_fold_first_in_two_more_steps(ranks: int, algorithm: str, steps_of_power: int) -> None:
    active = 1 << (ranks.bit_length() - 1)
    folded, whole = ranks - active, 2 * 16 * 9
    row, inner = (sent("all_reduce", algorithm, ceil_cut(16 * 9, n), 2) for n in (ranks, active))
    assert row.steps == steps_of_power * int(log2(active)) + 2 == inner.steps + 2
    # A folded rank sends n in one message, its partner n and one message more than the active ranks do.
    assert row.nbytes[0:2 * folded:2] == (whole,) * folded
    assert row.nbytes[1:2 * folded:2] == tuple(n + whole for n in inner.nbytes[:folded])
    assert row.nbytes[2 * folded:] == inner.nbytes[folded:]
    assert sum(row.messages) == sum(inner.messages) + 2 * folded


@pytest.mark.parametrize("key", [key for key in ALGORITHMS if key[0] in ROOTED])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_another_root_turns_the_ranks_round_and_every_other_rank_sends_or_is_sent_one_vector(key, ranks: int) -> None:
    vector = ceil_cut(60 * ranks, ranks)
    at_zero, total = sent(*key, vector, 2), (ranks - 1) * 120 * (1 if key[0] == "gather" else ranks)
    assert sum(at_zero.nbytes) == total
    for root in range(ranks):
        turned = sent(*key, vector, 2, root=root)
        assert turned.nbytes == tuple(at_zero.nbytes[(rank - root) % ranks] for rank in range(ranks))
        assert turned.steps == (ceil(log2(ranks)) if key[1] == "tree" else ranks - 1)


@pytest.mark.parametrize(("algorithm", "nbytes"), [
    ("ring", (8 - 2, 8 - 1, 8 - 2, 8 - 3)),
    ("doubling", (3 + 5, 2 + 5, 1 + 3, 2 + 3)),
    ("bruck", (3 + 5, 2 + 3, 1 + 3, 2 + 5)),
])
def test_three_all_gathers_of_one_uneven_cut_differ(algorithm: str, nbytes: tuple[int, ...]) -> None:
    assert sent("all_gather", algorithm, (0, 3, 5, 6, 8), 1).nbytes == nbytes


@pytest.mark.parametrize("key", list(ALGORITHMS))
def test_one_rank_sends_nothing_and_an_empty_vector_still_takes_messages(key: tuple[str, str]) -> None:
    alone, empty = sent(*key, (0, 7), 2), sent(*key, (0, 0, 0, 0, 0), 2)
    assert (alone.nbytes, alone.messages, alone.steps) == ((0,), (0,), 0)
    assert empty.nbytes == (0, 0, 0, 0)
    assert empty.messages == sent(*key, ceil_cut(240, 4), 2).messages
    assert sum(empty.messages) >= 3


@pytest.mark.parametrize("key", [key for key in ALGORITHMS if key != BARRIER])
def test_vectors_of_any_length_are_counted_exactly(key: tuple[str, str]) -> None:
    large = sent(*key, ceil_cut(8 * 2**50, 4), 2**40)  # 2^93 bytes
    assert large.nbytes == tuple(2**90 * n for n in sent(*key, ceil_cut(8, 4), 1).nbytes)


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
