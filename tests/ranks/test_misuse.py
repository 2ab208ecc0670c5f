"""A rank belongs to its own program, in its own run and thread, and its memory to it alone; a cluster runs one program
at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import zerosim as zs
from tests.ranks.asking import assert_ends, in_another_thread, works
from tests.support import assert_refused

USES: dict[str, Callable[[zs.Rank], Any]] = {
    "a collective": lambda rank: rank.all_reduce(np.ones(4)),
    "an asynchronous one": lambda rank: rank.broadcast(np.ones(2), async_op=True),
    "a barrier": lambda rank: rank.barrier(),
    "a message": lambda rank: rank.send(np.ones(2), 0),
    "a split": lambda rank: rank.split(0),
}
OUTSIDE = r"^rank \d is in no run; call it inside the program that Cluster\.run\(program\) runs$"
OTHERS = (r"(?m)^rank 2 was used outside its own program \(a program must only use the rank that it was handed; "
          r"reading another rank's memory and trace is fine after the run\)$")
THREAD = (r"^rank 1 was used in another thread than the one that runs its cluster; keep every call of a rank inside "
          r"the program that it was handed to$")


@pytest.mark.parametrize("use", USES)
def test_a_rank_is_used_by_its_own_program_in_its_own_run_and_thread_alone(use: str) -> None:
    cluster, handed = zs.Cluster(3), {}

    def anothers(rank):
        handed[rank.index] = rank
        rank.barrier()
        if rank.index == 1:
            USES[use](handed[2])
        rank.barrier()

    def threaded(rank):
        if rank.index == 1:
            assert_refused(lambda: in_another_thread(lambda: USES[use](rank))(), THREAD, zs.RankUseError)
        return rank.all_reduce(np.array([rank.index])).tolist()

    for rank in cluster.ranks:
        with pytest.raises(zs.RankUseError, match=OUTSIDE):
            USES[use](rank)
    assert_ends(cluster, anothers, zs.RankUseError, OTHERS, "raised by rank 1 of 3")
    for rank in handed.values():
        with pytest.raises(zs.RankUseError, match=OUTSIDE):
            USES[use](rank)
    assert list(cluster.run(threaded)) == [[3]] * 3


def test_a_work_can_only_be_waited_for_by_its_own_program_in_its_own_run() -> None:
    cluster, works_of = zs.Cluster(2), {}

    def swapped(rank):
        works_of[rank.index] = rank.all_reduce(np.ones(2), async_op=True)
        rank.barrier()
        works_of[1 - rank.index].wait()

    assert_refused(lambda: cluster.run(swapped), r"^rank 1 was used outside its own program", zs.RankUseError)
    assert_refused(works_of[0].wait, OUTSIDE, zs.RankUseError)
    assert_refused(lambda: works_of[0].result, "was read before wait", zs.PendingWorkError)
    text = (r"(?m)^rank 0 waited for all_reduce\(call 0, \(2,\), float64\), which was issued in an earlier run and "
            r"ended with it; wait in the run that issues$")
    assert_ends(cluster, lambda rank: works_of[rank.index].wait(), zs.RankUseError, text)


# -- clusters ---------------------------------------------------------------------------------------------------------

REENTERED = (r"(?m)^this cluster is running a program already, and was asked {} to run another; make a second Cluster "
             r"for nested runs, or wait until the first has ended$")
INSIDE = REENTERED.format("by one of its ranks, or in the midst of a step_through,")


def test_a_running_cluster_cannot_be_entered_again() -> None:
    """Not by its own program, not while it is stepped through, not by another thread, nor are its steps taken there."""
    cluster = zs.Cluster(2)
    assert_ends(cluster, lambda rank: cluster.run(lambda inner: None), zs.RankUseError, INSIDE, "raised by rank 0 of 2")
    with zs.step_through(lambda rank: rank.all_reduce(np.ones(2)), cluster=cluster) as steps:
        next(steps)
        for other in (lambda: cluster.run(lambda rank: None), lambda: next(zs.step_through(print, cluster=cluster))):
            with pytest.raises(zs.RankUseError, match=INSIDE):
                other()
        for use in (lambda: next(steps), steps.close):
            with pytest.raises(zs.RankUseError, match="this step_through was begun in another thread, where its ranks "
                                                      "live; go on and close it there"):
                in_another_thread(use)()
        assert len(list(steps)) == 3

    def threaded(rank):
        with pytest.raises(zs.RankUseError, match=REENTERED.format("by another thread")):
            in_another_thread(lambda: cluster.run(lambda inner: None))()

    cluster.run(threaded)
    assert works(cluster)


def test_a_failure_in_a_nested_cluster_is_that_of_the_rank_that_ran_it() -> None:
    def program(rank):
        if rank.index == 1:
            zs.Cluster(2).run(lambda inner: rank.barrier())
        rank.barrier()

    assert_ends(zs.Cluster(3), program, zs.RankUseError, "rank 1 was used outside its own program",
                "raised by rank 0 of 2", "raised by rank 1 of 3")


# -- memory that ranks share ------------------------------------------------------------------------------------------

LENGTH = 4
PLACES = st.integers(0, 24)


@given(st.lists(st.tuples(PLACES, PLACES).filter(lambda place: not 0 < abs(place[0] - place[1]) < LENGTH), min_size=2,
                max_size=5))
@example([(0, 8), (16, 2)])  # rank 1 writes what rank 0 reads, from where it has begun to
@example([(2, 8), (16, 0)])
@example([(0, 8), (0, 0)])  # rank 1 writes what both read
@example([(8, 16), (24, 4), (0, 20)])  # one ends where the next begins
def test_a_result_over_what_another_rank_reads_or_writes_is_refused_and_nothing_else(places: list) -> None:
    """Each rank reads and writes a part of one array; they may read the same, and write what no other touches."""
    memory = np.arange(30.0)

    def part(first: int) -> np.ndarray:
        return memory[first:first + LENGTH]

    def program(rank: zs.Rank) -> None:
        x, out = places[rank.index]
        rank.all_reduce(part(x), out=part(out))

    conflict = any(abs(mine[1] - place) < LENGTH for rank, mine in enumerate(places)
                   for other, its in enumerate(places) if rank != other for place in its)
    wanted = sum(part(x).copy() for x, _ in places)
    if conflict:
        with pytest.raises(ValueError, match=r"ranks \d and \d handed the same memory .* an array of its own"):
            zs.Cluster(len(places)).run(program)
    else:
        zs.Cluster(len(places)).run(program)
        assert all((part(out) == wanted).all() for _, out in places)


def test_a_result_over_what_another_rank_reads_behind_its_own_result_is_refused() -> None:
    memory = np.arange(16.0)

    def program(rank: zs.Rank) -> None:
        rank.reduce_scatter(memory[8 * rank.index:8 * rank.index + 8], out=memory[4 * rank.index:4 * rank.index + 4])

    assert_ends(zs.Cluster(2), program, ValueError, "ranks 0 and 1 handed the same memory")


def test_one_result_of_all_ranks_is_refused_unless_it_is_the_one_that_they_have_in_common() -> None:
    result = np.empty(4)

    def program(rank: zs.Rank, given: bool) -> None:
        room = rank.alloc_in_common(4, np.float64, "workspace")
        rank.all_gather(np.ones(2), out=result if given else room)
        assert (room == 1).all()

    zs.Cluster(2).run(program, False)
    assert_ends(zs.Cluster(2), partial(program, given=True), ValueError, "ranks 0 and 1 handed the same memory")


def a_statement(rank: zs.Rank, x: np.ndarray) -> None:
    rank.all_reduce(x, op="mean")


def over_lines_on_the_root(rank: zs.Rank, x: np.ndarray) -> None:
    if rank.index >= 0:
        (rank
         .reduce(
             x, 1))


def a_broadcast_of_a_group(rank: zs.Rank, x: np.ndarray) -> None:
    group = rank.new_group([1, 0])
    for _ in range(2):
        group.broadcast(x, root=1)


def a_shard(rank: zs.Rank, x: np.ndarray) -> None:
    try:
        rank.reduce_scatter(x)
    finally:
        x[:] = 0


@pytest.mark.parametrize(("program", "text"), [
    (a_statement, r"the result of all_reduce\(call 0, \(4,\), float64, op=mean\), at test_misuse\.py:\d+ in a_statement"
                  r", was dropped: all_reduce returns it in a new array, and its input stays as it is; write "
                  r"x = rank\.all_reduce\(x\), or rank\.all_reduce\(x, out=x\)\."),
    (over_lines_on_the_root, r"reduce\(.* was dropped: .* or rank\.reduce\(x, out=x\)\."),
    (a_broadcast_of_a_group, r"broadcast\(.* was dropped: .*, or rank\.broadcast\(x, out=x\)\."),
    (a_shard, r"reduce_scatter\(.* was dropped: .*; write x = rank\.reduce_scatter\(x\)\."),
], ids=lambda value: getattr(value, "__name__", ""))
def test_in_debug_mode_a_result_that_a_statement_drops_is_an_error_and_otherwise_as_before(program, text) -> None:
    run = partial(zs.Cluster.run, program=lambda rank: program(rank, np.ones(4)))
    assert_refused(lambda: run(zs.Cluster(2, debug=True)), text)
    assert list(run(zs.Cluster(2))) == [None, None]


def test_a_result_that_goes_anywhere_is_none_that_was_dropped() -> None:
    def passed_on(rank: zs.Rank, x: np.ndarray) -> np.ndarray:
        return rank.all_reduce(x)

    def program(rank: zs.Rank) -> Any:
        x = np.ones(2)
        _ = rank.all_reduce(x)
        rank.all_reduce(x, out=x)
        rank.all_reduce(x, async_op=True).wait()
        if rank.index == 0:
            rank.reduce(x, 1)  # the root alone has a result
        else:
            _ = rank.reduce(x, 1)
        rank.barrier()
        assert rank.all_reduce(x).sum() > max(rank.all_gather(x)[0] for _ in range(2))
        passed_on(rank, x)  # that a function of one's own returns it is all that can be seen
        return float(rank.all_reduce(x)[0]), rank.broadcast(x)

    assert zs.Cluster(2, debug=True).run(program)[0][0] == 4
