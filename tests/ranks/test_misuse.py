"""A rank belongs to its own program, in its own run and thread; a cluster runs one program at a time."""

import threading

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import ROWS, allowed, ask, works

USES = {
    "a collective": lambda rank: rank.all_reduce(np.ones(2)),
    "an asynchronous one": lambda rank: rank.broadcast(np.ones(2), async_op=True),
    "a barrier": lambda rank: rank.barrier(),
    "a message": lambda rank: rank.send(np.ones(2), 0),
    "a split": lambda rank: rank.split(0),
    **{f"{operation} by {algorithm}": lambda rank, o=operation, a=algorithm: ask(rank, o, a, np.ones(4))
       for operation, algorithm in ROWS if allowed(operation, algorithm, 3)},
}
OUTSIDE = r"^rank (?P<rank>\d) is in no run; call it inside the program that Cluster\.run\(program\) runs$"
OTHERS = (r"(?m)^rank (?P<rank>\d) was used outside its own program \(a program must only use the rank that it was "
          r"handed; reading another rank's memory and trace is fine after the run\)$")
THREAD = (r"^rank (?P<rank>\d) was used in another thread than the one that runs its cluster; keep every call of a "
          r"rank inside the program that it was handed to$")


@pytest.mark.parametrize("use", USES)
def test_a_rank_cannot_be_used_before_between_or_after_runs(use: str) -> None:
    cluster, kept = zs.Cluster(3), []
    for ranks in (cluster.ranks, kept):
        for rank in ranks:
            with pytest.raises(zs.RankUseError, match=OUTSIDE):
                USES[use](rank)
        cluster.run(kept.append)
    assert works(cluster)


@pytest.mark.parametrize("use", USES)
def test_a_program_cannot_use_another_s_rank(use: str) -> None:
    cluster, handed = zs.Cluster(3), {}

    def program(rank):
        handed[rank.index] = rank
        rank.barrier()
        if rank.index == 1:
            USES[use](handed[2])
        rank.barrier()

    with pytest.raises(zs.RankUseError, match=OTHERS) as caught:
        cluster.run(program)
    assert caught.match("rank 2 was used")
    assert caught.value.__notes__ == ["raised by rank 1 of 3"]
    assert works(cluster)


def test_reading_another_rank_s_ledger_and_trace_is_allowed() -> None:
    def program(rank):
        rank.all_reduce(np.ones(3))
        return rank

    ranks = zs.Cluster(2).run(program)
    assert [rank.trace.sent_nbytes() for rank in ranks] == [24, 24]
    assert [rank.memory.now_nbytes for rank in ranks] == [0, 0]


@pytest.mark.parametrize("use", USES)
def test_a_rank_cannot_be_used_in_another_thread(use: str) -> None:
    cluster, caught = zs.Cluster(3), []

    def elsewhere(rank):
        try:
            USES[use](rank)
        except zs.RankUseError as error:
            caught.append(error)

    def program(rank):
        if rank.index == 1:
            thread = threading.Thread(target=elsewhere, args=[rank])
            thread.start()
            thread.join()
        return rank.all_reduce(np.array([rank.index])).tolist()

    assert list(cluster.run(program)) == [[3]] * 3
    assert len(caught) == 1
    with pytest.raises(zs.RankUseError, match=THREAD):
        raise caught[0]


def test_a_work_can_only_be_waited_for_by_its_own_program_in_its_own_run() -> None:
    cluster, works_of = zs.Cluster(2), {}

    def swapped(rank):
        works_of[rank.index] = rank.all_reduce(np.ones(2), async_op=True)
        rank.barrier()
        works_of[1 - rank.index].wait()

    with pytest.raises(zs.RankUseError, match=r"^rank 1 was used outside its own program"):
        cluster.run(swapped)
    with pytest.raises(zs.RankUseError, match=OUTSIDE):
        works_of[0].wait()
    with pytest.raises(zs.PendingWorkError, match="was read before wait"):
        works_of[0].result  # noqa: B018
    text = (r"(?m)^rank 0 waited for all_reduce\(call 0, \(2,\), float64\), which was issued in an earlier run and "
            r"ended with it; wait in the run that issues$")
    with pytest.raises(zs.RankUseError, match=text):
        cluster.run(lambda rank: works_of[rank.index].wait())
    assert works(cluster)


def test_a_result_that_was_waited_for_may_be_read_for_ever() -> None:
    def program(rank):
        work = rank.all_reduce(np.array([rank.index]), async_op=True)
        work.wait()
        return work

    results = zs.Cluster(3).run(program)
    assert [work.result.tolist() for work in results] == [[3]] * 3
    assert results[1].wait() is results[1].result


REENTERED = (r"(?m)^this cluster is running a program already, and was asked by one of its ranks, or in the midst of a "
             r"step_through, to run another; make a second Cluster for nested runs, or wait until the first has ended$")


def test_a_running_cluster_cannot_be_entered_again_by_its_own_program() -> None:
    cluster = zs.Cluster(2)
    with pytest.raises(zs.RankUseError, match=REENTERED) as caught:
        cluster.run(lambda rank: cluster.run(lambda inner: None))
    assert caught.value.__notes__ == ["raised by rank 0 of 2"]
    assert works(cluster)


def test_a_running_cluster_cannot_be_entered_while_it_is_stepped_through() -> None:
    cluster = zs.Cluster(2)
    with zs.step_through(lambda rank: rank.all_reduce(np.ones(2)), cluster=cluster) as steps:
        next(steps)
        with pytest.raises(zs.RankUseError, match=REENTERED):
            cluster.run(lambda rank: None)
        with pytest.raises(zs.RankUseError, match=REENTERED), \
                zs.step_through(lambda rank: None, cluster=cluster) as others:
            next(others)
        assert len(list(steps)) == 3
    assert works(cluster)


def test_a_running_cluster_cannot_be_entered_by_another_thread() -> None:
    cluster, caught = zs.Cluster(2), []

    def elsewhere():
        try:
            cluster.run(lambda rank: None)
        except zs.RankUseError as error:
            caught.append(str(error))

    def program(rank):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    cluster.run(program)
    assert len(caught) == 2
    assert all("was asked by another thread to run another; make a second Cluster" in text for text in caught)
    assert works(cluster)


def test_two_threads_may_run_two_clusters_at_once() -> None:
    results, ready = {}, threading.Barrier(2)

    def elsewhere(name):
        def program(rank):
            if rank.index == 0:
                ready.wait(timeout=600)
            return [rank.all_reduce(np.array([rank.index + name])).tolist() for _ in range(200)][-1]

        results[name] = list(zs.Cluster(3, seed=name).run(program))

    threads = [threading.Thread(target=elsewhere, args=[name]) for name in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [[6]] * 3, 2: [[9]] * 3}


@pytest.mark.parametrize("options", [{}, {"debug": True}, {"seed": 5}], ids=str)
def test_clusters_may_be_nested(options: dict) -> None:
    def inner_program(inner, outer_index):
        return inner.all_gather(np.array([10 * outer_index + inner.index])).tolist()

    def program(rank):
        before = rank.all_reduce(np.array([rank.index])).tolist()
        inside = list(zs.Cluster(2 + rank.index, **options).run(inner_program, rank.index))
        return before, inside, rank.all_reduce(np.array([1])).tolist()

    results = zs.Cluster(3, **options).run(program)
    for index, result in enumerate(results):
        ranks = 2 + index
        assert result == ([3], [[10 * index + inner for inner in range(ranks)]] * ranks, [3])


def test_a_failure_in_a_nested_cluster_is_that_of_the_rank_that_ran_it() -> None:
    def program(rank):
        if rank.index == 1:
            zs.Cluster(2).run(lambda inner: inner.recv(np.empty(1), 1 - inner.index))
        rank.barrier()

    cluster = zs.Cluster(3)
    text = r"rank 0: in recv\(\(1,\), float64\) from rank 1 at test_misuse.py:"
    with pytest.raises(zs.DeadlockError, match=text) as caught:
        cluster.run(program)
    assert caught.value.__notes__ == ["raised by rank 1 of 3"]
    assert works(cluster)


def test_an_inner_program_cannot_use_the_outer_rank() -> None:
    def program(rank):
        return zs.Cluster(2).run(lambda inner: rank.barrier())

    with pytest.raises(zs.RankUseError, match="was used outside its own program") as caught:
        zs.Cluster(2).run(program)
    assert caught.value.__notes__ == ["raised by rank 0 of 2", "raised by rank 0 of 2"]


def test_a_group_of_an_earlier_run_still_serves_and_never_meets_a_new_one() -> None:
    cluster, kept = zs.Cluster(3), {}

    def first(rank):
        kept[rank.index] = rank.split(0 if rank.index < 2 else None)

    def second(rank):
        group = rank.split(0 if rank.index != 1 else None)
        found = [group.all_reduce(np.array([rank.index])).tolist()] if group else []
        return found + ([kept[rank.index].all_reduce(np.array([10 + rank.index])).tolist()] if kept[rank.index] else [])

    cluster.run(first)
    assert list(cluster.run(second)) == [[[2], [21]], [[21]], [[2]]]
