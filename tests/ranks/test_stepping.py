"""Stepping through a run, hop by hop; and leaving it in the midst."""

import gc
import threading

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import ROWS, allowed, ask
from tests.ranks.data import whole_numbers


def program(rank: zs.Rank, told: list | None = None) -> np.ndarray:
    try:
        mine = rank.memory.alloc(8, np.int64, "parameter")
        mine[...] = np.arange(8) * 10 ** rank.index
        rank.reduce_scatter(mine)
        return rank.all_reduce(mine)
    finally:
        if told is not None:
            told.append(rank.index)


HOPS = 3 * 4 + 6 * 4  # of a reduce-scatter and an all-reduce on 4 ranks


def test_every_hop_of_every_collective_is_shown_in_order() -> None:
    cluster = zs.Cluster(4)
    steps = list(zs.step_through(program, cluster=cluster))
    assert len(steps) == HOPS
    rows = cluster.trace[0].collectives()
    assert [step.hop for step in steps] == [hop for row in rows for hop in row.hops()]
    assert [step.call for step in steps] == [row.call for row in rows for _ in row.hops()]
    assert len(cluster.runs) == 1
    assert cluster.runs[0].results[2].tolist() == (np.arange(8) * 1111).tolist()


def test_a_step_shows_what_arrived_and_keeps_it() -> None:
    """On a ring of three, chunk 0 starts on rank 1 and collects rank 2's part before it comes to rank 0."""
    steps = list(zs.step_through(lambda rank: rank.reduce_scatter(np.full(3, 10.0 ** rank.index)), ranks=3))
    to_rank_0 = [(step.hop.step, step.hop.chunks, step.values.tolist()) for step in steps if step.hop.destination == 0]
    assert to_rank_0 == [(0, (1,), [100.0]), (1, (0,), [110.0])]


def test_events_make_the_ring_s_hops_only_if_asked() -> None:
    cluster = zs.Cluster(3)
    assert list(cluster.events(lambda rank: rank.all_reduce(np.zeros(3)))) == []
    assert len(list(cluster.events(lambda rank: rank.all_reduce(np.zeros(3)), hop_by_hop=True))) == 12
    assert len(list(cluster.events(lambda rank: rank.all_reduce(np.zeros(3), algorithm="naive")))) == 4


@pytest.mark.parametrize("kind", [{}, {"debug": True}, {"seed": 3}], ids=str)
def test_what_is_looked_at_changes_no_ledger(kind: dict) -> None:
    """Kept steps hold copies, and not the ranks' buffers."""
    plain, watched = zs.Cluster(4, **kind), zs.Cluster(4, **kind)
    plain.run(program)
    kept = list(zs.step_through(program, cluster=watched))
    assert len(kept) == HOPS
    assert [trace.rows for trace in watched.trace] == [trace.rows for trace in plain.trace]
    assert watched.memory.peak_nbytes == plain.memory.peak_nbytes
    assert watched.memory.now_nbytes == plain.memory.now_nbytes


@pytest.mark.parametrize("leave", ["with", "close", "del", "exception"])
@pytest.mark.parametrize("taken", [0, 1, 5, 12, 13, 30, HOPS])
def test_leaving_half_way_stops_all_ranks_and_leaves_nothing(taken: int, leave: str) -> None:
    cluster, told = zs.Cluster(4), []
    steps = zs.step_through(program, told, cluster=cluster)
    gc.disable()
    try:
        match leave:
            case "with":
                with steps:
                    for _ in range(taken):
                        next(steps)
            case "exception":
                for _ in range(taken):
                    next(steps)
                with pytest.raises(KeyError), steps:
                    raise KeyError
            case _:
                for _ in range(taken):
                    next(steps)
                if leave == "close":
                    steps.close()
                    steps.close()
        del steps
    finally:
        gc.enable()
    assert sorted(told) == ([0, 1, 2, 3] if taken else [])
    assert cluster.memory.now_nbytes == [0] * 4
    assert cluster.runs == []
    assert cluster.run(program)[3].tolist() == (np.arange(8) * 1111).tolist()


def test_a_run_that_was_stepped_to_its_end_is_a_run() -> None:
    cluster = zs.Cluster(2)
    with zs.step_through(lambda rank: rank.broadcast(np.array([rank.index + 5])), cluster=cluster) as steps:
        assert [step.values.tolist() for step in steps] == [[5]]
        assert list(steps) == []
    assert [result.tolist() for result in cluster.runs[0].results] == [[5], [5]]


def test_a_failure_comes_out_of_the_step_that_meets_it() -> None:
    def failing(rank):
        rank.all_reduce(np.zeros(2))
        if rank.index:
            raise KeyError("after the first collective")
        rank.barrier()

    cluster = zs.Cluster(2)
    with zs.step_through(failing, cluster=cluster) as steps:
        for _ in range(4):
            next(steps)
        with pytest.raises(KeyError, match="after the first") as caught:
            next(steps)
        assert caught.value.__notes__ == ["raised by rank 1 of 2"]
        with pytest.raises(StopIteration):
            next(steps)
    assert cluster.run(lambda rank: rank.index)[1] == 1


def test_a_program_without_collectives_has_no_steps() -> None:
    with zs.step_through(lambda rank: rank.index, ranks=3) as steps:
        assert list(steps) == []


@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_any_collective_may_be_stepped_through(operation: str, algorithm: str) -> None:
    for ranks in [n for n in (1, 2, 3, 4) if allowed(operation, algorithm, n)]:
        vectors, cluster = whole_numbers(ranks, 5), zs.Cluster(ranks)

        def one(rank, vectors=vectors):
            return ask(rank, operation, algorithm, vectors[rank.index], async_op=True).wait() is None

        with zs.step_through(one, cluster=cluster) as steps:
            made = [step.hop for step in steps]
        assert made == cluster.trace[0].collectives()[0].hops()


def test_steps_belong_to_the_thread_that_took_the_first() -> None:
    cluster, caught = zs.Cluster(2), []
    steps = zs.step_through(lambda rank: rank.all_reduce(np.zeros(2)), cluster=cluster)
    next(steps)

    def elsewhere():
        for use in (lambda: next(steps), steps.close):
            try:
                use()
            except zs.RankUseError as error:
                caught.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    text = "this step_through was begun in another thread, where its ranks live; go on and close it there"
    assert caught == [text] * 2
    assert len(list(steps)) == 3
    assert len(cluster.runs) == 1


def test_two_clusters_may_be_stepped_through_by_turns() -> None:
    a, b = (zs.step_through(lambda rank, c=c: rank.all_gather(np.array([c + rank.index])), ranks=3) for c in (0, 10))
    seen = [(x.values.tolist(), y.values.tolist()) for x, y in zip(a, b, strict=True)]
    assert len(seen) == 6
    assert all(y == [x[0] + 10] for x, y in seen)


def test_messages_that_a_program_sends_itself_are_events_without_a_call() -> None:
    """A ring by hand, of three ranks: each step shows the value that arrived."""
    def ring(rank):
        partial = np.array([10.0 * (rank.index + 1)])
        for _ in range(rank.size - 1):
            arrived = np.empty_like(partial)
            rank.exchange(partial, (rank.index + 1) % rank.size, arrived, (rank.index - 1) % rank.size)
            partial = arrived + 10.0 * (rank.index + 1)
        return partial[0]

    with zs.step_through(ring, ranks=3) as steps:
        seen = [
            (event.call, event.hop.source, event.hop.destination, event.hop.nbytes, event.values[0]) for event in steps
        ]
    assert len(seen) == 6
    assert {(call, nbytes) for call, _, _, nbytes, _ in seen} == {(None, 8)}
    assert {(source, destination) for _, source, destination, _, _ in seen} == {(0, 1), (1, 2), (2, 0)}
    assert sorted(value for *_, value in seen) == [10.0, 20.0, 30.0, 30.0, 40.0, 50.0]
    assert list(steps.cluster.runs[-1].results) == [60.0] * 3


def test_a_cluster_of_another_number_of_ranks_than_asked_for_is_refused():
    with pytest.raises(ValueError, match="asked for ranks=5 on a cluster of 3; leave one of the two out"):
        zs.step_through(lambda rank: rank.barrier(), ranks=5, cluster=zs.Cluster(3))
    assert len(zs.step_through(lambda rank: rank.barrier(), ranks=3, cluster=zs.Cluster(3)).cluster.ranks) == 3
    assert len(zs.step_through(lambda rank: rank.barrier()).cluster.ranks) == 2
