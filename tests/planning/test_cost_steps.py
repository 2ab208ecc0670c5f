"""The schedules of pencil and paper are the messages that ranks really make, step by step."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.ranks.asking import ROOTED, ROWS, allowed, ask, takes_splits
from tests.ranks.data import normals
from zerosim.planning import ceil_cut, sent
from zerosim.planning.collectives import ALGORITHMS, asked
from zerosim.planning.cost import LEVELS, levels, longest_by_step, placed
from zerosim.planning.hardware import Link, Network

WORLDS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 16]
BARRIER = ("barrier", "dissemination")
FAST, SLOW = Link("fast", 1e9, 1e-6, "made up", "today"), Link("slow", 1e8, 1e-5, "made up", "today")

Message = tuple[int, int, int, int]  # step, source, destination, bytes


def pencil(collective: str, algorithm: str, cut: tuple[int, ...], itemsize: int, root: int) -> Counter[Message]:
    """Every message of the schedule, in the step in which it goes."""
    found: Counter[Message] = Counter()
    for step, level in placed(levels(collective, algorithm, asked(collective, algorithm, cut, itemsize, root=root)),
                              len(cut) - 1):
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


def test_every_algorithm_of_the_ranks_has_a_schedule() -> None:
    assert set(LEVELS) == set(ALGORITHMS) == {*ROWS, BARRIER}


@pytest.mark.parametrize(("ranks", "key"), [(n, key) for n in WORLDS for key in LEVELS if allowed(*key, n)])
def test_a_schedule_is_the_messages_that_ranks_make_in_the_steps_in_which_they_make_them(ranks, key) -> None:
    for length in [0] if key == BARRIER else [0, 1, 2 * ranks + 1, 4 * ranks]:
        for root in {0, ranks - 1} if key[0] in ROOTED else {0}:
            cut = ceil_cut(length, ranks)
            assert pencil(*key, cut, 4, root) == made(*key, cut, root)


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
def test_any_cut_and_any_root_make_the_messages_of_the_schedule(drawn) -> None:
    key, cut, root, _ = drawn
    assert pencil(*key, cut, 4, root) == made(*key, cut, root)


@given(calls())
def test_a_schedule_sums_to_the_bytes_messages_and_steps_of_the_closed_forms(drawn) -> None:
    key, cut, root, _ = drawn
    wanted, messages = sent(*key, cut, 2, root=root), pencil(*key, cut, 2, root)
    for rank in range(len(cut) - 1):
        mine = {message: count for message, count in messages.items() if message[1] == rank}
        assert sum(nbytes * count for (*_, nbytes), count in mine.items()) == wanted.nbytes[rank]
        assert sum(mine.values()) == wanted.messages[rank]
    assert max((step for step, *_ in messages), default=-1) + 1 == wanted.steps


@given(calls())
def test_the_longest_messages_of_a_step_are_found_on_each_kind_of_link(drawn) -> None:
    key, cut, root, per_node = drawn
    ranks, network = len(cut) - 1, Network(FAST, SLOW, per_node)
    steps: dict[int, dict[str, int]] = defaultdict(dict)
    for step, source, destination, nbytes in pencil(*key, cut, 4, root):
        name = network.link(source, destination).name
        steps[step][name] = max(steps[step].get(name, 0), nbytes)
    wanted = Counter((step.get("fast"), step.get("slow")) for step in steps.values())
    assert longest_by_step(levels(*key, asked(*key, cut, 4, root=root)), ranks, network) == wanted


def test_where_ranks_fold_some_swap_while_others_are_handed_a_vector() -> None:
    # Five ranks: 0 hands to 1 while 3 and 4 swap already; so a level of an algorithm is no step of a collective.
    first = {message[1:3] for message in pencil("all_reduce", "doubling", ceil_cut(5, 5), 1, 0) if message[0] == 0}
    assert first == {(0, 1), (3, 4), (4, 3)}
