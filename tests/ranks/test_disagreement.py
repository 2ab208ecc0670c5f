"""Ranks that disagree, and ranks that wait for each other: the text says who, in which call, and where.

How two calls or messages differ, in every world, `tests/backends/test_failures.py` has.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import KINDS, assert_ends

by_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def another_root(rank: zs.Rank) -> None:
    _ = rank.broadcast(np.ones(4), rank.index % 3)


def within_a_group(rank: zs.Rank) -> None:
    group = rank.split(0 if rank.index % 2 else None)
    if group is not None:
        _ = group.all_reduce(np.ones(2 + rank.index // 3))


def another_line(rank: zs.Rank) -> None:
    if rank.index:
        _ = rank.all_gather(np.ones(4))
        return
    _ = rank.all_gather(np.ones(3), length=7)


def a_work_on_the_way(rank: zs.Rank) -> None:
    works = [rank.all_reduce(np.ones(2 + rank.index), async_op=True)]
    rank.barrier()
    works[0].wait()


# The program, its ranks, and who asks for what; @n stands for the n-th line of the program.
MISMATCHES: list[tuple[Callable[[zs.Rank], None], int, str]] = [
    (another_root, 4, "ranks [0, 3] are in broadcast(call 0, (4,), float64, algorithm=tree) @1; rank 1 is in "
                      "broadcast(call 0, (4,), float64, algorithm=tree, root=1) @1; rank 2 is in broadcast(call 0, "
                      "(4,), float64, algorithm=tree, root=2) @1. Look "),
    (within_a_group, 5, "rank 1 is in all_reduce(call 0, (2,), float64) @3; rank 3 is in all_reduce(call 0, (3,), "
                        "float64) @3. Look "),
    (another_line, 3, "rank 0 is in all_gather(call 0, up to (3,) -> (7,), float64) @4; ranks [1, 2] are in "
                      "all_gather(call 0, (4,) -> (12,), float64) @2. Look "),
    (a_work_on_the_way, 2, "rank 0 is in all_reduce(call 0, (2,), float64) @1; rank 1 is in all_reduce(call 0, (3,), "
                           "float64) @1. Look "),
]


@by_kind
def test_of_ranks_that_disagree_each_call_is_named_with_its_ranks_and_its_line(kind: dict) -> None:
    for program, ranks, said in MISMATCHES:
        first = program.__code__.co_firstlineno
        lines = re.sub(r"@(\d)", lambda found, name=program.__name__, first=first:
                       f"at test_disagreement.py:{first + int(found[1])} in {name}", said)
        assert lines in str(assert_ends(zs.Cluster(ranks, **kind), program, zs.MismatchError)), program.__name__


def both_send(rank: zs.Rank) -> None:
    x = np.full(2, rank.index, np.float32)
    rank.send(x, 1 - rank.index)
    rank.recv(x, 1 - rank.index)


def one_stays_away(rank: zs.Rank) -> None:
    if rank.index != 2:
        _ = rank.all_reduce(np.ones(3))


def elsewhere(rank: zs.Rank) -> None:
    match rank.index:
        case 0:
            rank.exchange(np.ones(2), 1, np.empty(3), 3)
        case 1:
            rank.recv(np.empty(2), 2)
        case 2:
            rank.barrier()


def half_made(rank: zs.Rank) -> None:
    if rank.index == 0:
        rank.exchange(np.ones(0), 1, np.empty(3), 1)
    else:
        rank.recv(np.empty(0), 0)


def in_two_groups(rank: zs.Rank) -> None:
    group = rank.split(0)
    if rank.index == 0:
        group.send(np.ones(1), 1)
    else:
        rank.recv(np.empty(1), 0)


def in_two_groups_of_the_same_members(rank: zs.Rank) -> None:
    pairs = rank.split(0), rank.split(0)
    _ = pairs[rank.index].all_reduce(np.ones(1))


def in_a_circle(rank: zs.Rank) -> None:
    """Each rank is in two of three pairs, and enters first the one that the next rank enters last."""
    pairs = [rank.split(0 if rank.index in pair else None) for pair in ((0, 1), (1, 2), (2, 0))]
    for pair in (pairs[rank.index], pairs[rank.index - 1]):
        _ = pair.all_reduce(np.ones(1))


# The program, its ranks, and who waits for what; the place is that of the program's line.
DEADLOCKS: list[tuple[Callable[[zs.Rank], None], int, list[str]]] = [
    (both_send, 2, ["rank 0: in send((2,), float32) to rank 1 HERE", "rank 1: in send((2,), float32) to rank 0 HERE"]),
    (one_stays_away, 5, ["ranks 0-1: in all_reduce(call 0, (3,), float64) HERE, waiting for rank 2",
                         "rank 2: finished",
                         "ranks 3-4: in all_reduce(call 0, (3,), float64) HERE, waiting for rank 2"]),
    (elsewhere, 4, ["rank 0: in send((2,), float64) to rank 1 and recv((3,), float64) from rank 3 HERE",
                    "rank 1: in recv((2,), float64) from rank 2 HERE",
                    "rank 2: in barrier(call 0, (0,), uint8, algorithm=dissemination) HERE, waiting for ranks "
                    "[0, 1, 3]",
                    "rank 3: finished"]),
    (half_made, 2, ["rank 0: in recv((3,), float64) from rank 1 HERE", "rank 1: finished"]),
    (in_two_groups, 2, ["rank 0: in send((1,), float64) to rank 1 HERE",
                        "rank 1: in recv((1,), float64) from rank 0 HERE"]),
    (in_two_groups_of_the_same_members, 2, [
        f"rank {r}: in all_reduce(call 0, (1,), float64) HERE, waiting for rank {1 - r}" for r in range(2)]),
    (in_a_circle, 3, [f"rank {r}: in all_reduce(call 0, (1,), float64) HERE, waiting for rank {(r + 1) % 3}"
                      for r in range(3)]),
]


@by_kind
def test_ranks_that_wait_for_each_other_are_explained(kind: dict) -> None:
    for program, ranks, lines in DEADLOCKS:
        text = str(assert_ends(zs.Cluster(ranks, **kind), program, zs.DeadlockError))
        file, first = program.__code__.co_filename.split("/")[-1], program.__code__.co_firstlineno
        here = f"at {file}:# in {program.__name__}"
        assert re.sub(r"\.py:\d+", ".py:#", text) == "\n".join([
            "no rank can go on:", *(f"  {line.replace('HERE', here)}" for line in lines),
            "Every send needs a receive of the same size that is waiting for it (exchange() does both at once), and "
            "every rank of a group must enter each collective."])
        if program is both_send:
            assert f"{file}:{first + 2} in" in text, "the line in the source is the one that waits"
