"""Groups: split by color, ordered by key, nested; their members share memory, trace and fate with the whole."""

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import KINDS, ROWS, allowed, ask, ceil_cut, expected, same
from tests.ranks.data import whole_numbers
from zerosim.ranks.trace import Message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_every_collective_works_inside_groups_that_run_side_by_side(operation: str, algorithm: str, kind: str) -> None:
    members = [[0, 2, 4, 6], [1, 3, 5]]
    vectors = {(color, place): vector for color, group in enumerate(members)
               for place, vector in enumerate(whole_numbers(len(group), 9, seed=color))}

    def program(rank):
        group = rank.split(rank.index % 2)
        if not allowed(operation, algorithm, group.size):
            return None
        return ask(group, operation, algorithm, vectors[rank.index % 2, group.index], root=1 % group.size)

    results = zs.Cluster(7, **KINDS[kind]).run(program)
    for color, group in enumerate(members):
        if allowed(operation, algorithm, len(group)):
            data = [vectors[color, place] for place in range(len(group))]
            wanted = expected(operation, data, ceil_cut(9, len(group)), 1)
            assert all(same(results[r], right) for r, right in zip(group, wanted, strict=True))


def test_ranks_of_a_group_are_ordered_by_key_and_then_by_index() -> None:
    keys = [5, -1, 5, 0, -1]

    def program(rank):
        group = rank.split(3, key=keys[rank.index])
        return group.index, group.size, group.group, repr(group)

    order = (1, 4, 3, 0, 2)
    assert list(zs.Cluster(5).run(program)) == [
        (order.index(r), 5, order, f"<Rank {order.index(r)} of 5>") for r in range(5)]


def test_who_gives_no_color_joins_no_group_but_takes_part_in_the_split() -> None:
    def program(rank):
        group = rank.split(None if rank.index == 1 else 0)
        return None if group is None else group.all_gather(np.array([rank.index])).tolist()

    assert list(zs.Cluster(3).run(program)) == [[0, 2], None, [0, 2]]
    assert list(zs.Cluster(2).run(lambda rank: rank.split(None))) == [None, None]


def test_a_split_is_an_all_gather_of_16_bytes_counted_as_control() -> None:
    for ranks in (1, 2, 5):
        cluster = zs.Cluster(ranks)
        cluster.run(lambda rank: rank.split(rank.index) and None)
        assert cluster.trace.sent_nbytes("control") == cluster.trace.sent_nbytes() == [16 * (ranks - 1)] * ranks
        assert cluster.memory.now_nbytes == [0] * ranks


def test_memory_and_trace_are_those_of_the_rank() -> None:
    def program(rank):
        group = rank.split(rank.index // 2)
        held = group.memory.alloc(3, np.float32, "gradient")
        group.all_reduce(held, out=held, purpose="gradients")
        return group.memory is rank.memory, group.trace is rank.trace, rank.memory.now_nbytes, rank.xp is group.xp

    cluster = zs.Cluster(4)
    assert list(cluster.run(program)) == [(True, True, 12, True)] * 4
    row = cluster.trace[3].collectives(purpose="gradients")[0]
    assert (row.call.group, row.call.number, row.call.ranks) == ((2, 3), 0, 2)
    # Hops speak of places in the group.
    assert {(hop.source, hop.destination) for hop in row.hops()} == {(0, 1), (1, 0)}
    assert cluster.trace.sent_nbytes("gradients") == [12, 12, 12, 12]


@pytest.mark.parametrize("seed", range(6))
def test_groups_nest_into_a_mesh(seed: int) -> None:
    """2 x 3 ranks: rows, columns, and a group inside a row."""
    def program(rank):
        row, column = rank.split(rank.index // 3), rank.split(rank.index % 3)
        pair = row.split(0 if row.index < 2 else None)
        mine = np.array([10 ** rank.index])
        found = [row.all_reduce(mine)[0], column.all_reduce(mine)[0]]
        return [*found, pair.all_reduce(mine)[0] if pair else None]

    rows, columns, pairs = [111, 111000], [1001, 10010, 100100], [11, 11000]
    assert list(zs.Cluster(6, seed=seed).run(program)) == [
        [rows[r // 3], columns[r % 3], pairs[r // 3] if r % 3 < 2 else None] for r in range(6)]


def test_two_groups_of_the_same_members_do_not_meet() -> None:
    """Rank 0 waits in the first group for what rank 1 does first in the second: a deadlock, and no wrong sum."""
    def program(rank):
        a, b = rank.split(0), rank.split(0)
        for group in (a, b) if rank.index else (b, a):
            group.all_reduce(np.ones(1))

    with pytest.raises(zs.DeadlockError, match=r"rank 0: in all_reduce\(call 0, \(1,\), float64\)"):
        zs.Cluster(2).run(program)


def test_works_of_several_groups_may_be_in_flight_at_once() -> None:
    def program(rank):
        a, b = rank.split(0), rank.split(rank.index % 2)
        works = [a.all_reduce(np.array([rank.index]), async_op=True), b.all_reduce(np.array([1]), async_op=True),
                 rank.all_reduce(np.array([100]), async_op=True)]
        return [int(work.wait()[0]) for work in (works[::-1] if rank.index else works)]

    for seed in range(5):
        results = zs.Cluster(3, seed=seed).run(program)
        assert list(results) == [[3, 2, 300], [300, 1, 3], [300, 2, 3]]


def test_messages_inside_a_group_name_places_and_the_trace_names_ranks() -> None:
    def program(rank):
        group = rank.split(0 if rank.index else None)
        if group is not None:
            out = np.empty(1, np.int64)
            return group.exchange(np.array([rank.index]), 1 - group.index, out, 1 - group.index).tolist()
        return None

    cluster = zs.Cluster(3)
    assert list(cluster.run(program)) == [None, [2], [1]]
    rows = [row for trace in cluster.trace for row in trace.rows if isinstance(row, Message)]
    assert [(row.source, row.destination) for row in rows] == [(2, 2), (1, 1)]


def test_a_barrier_holds_everyone_until_the_last_one_comes() -> None:
    for kind in KINDS.values():
        told = []

        def program(rank, told=told):
            for turn in range(3):
                told.append(turn)
                rank.barrier()

        zs.Cluster(4, **kind).run(program)
        assert told == sorted(told)


def test_a_barrier_of_a_group_holds_its_members_only() -> None:
    def program(rank):
        group = rank.split(rank.index)
        group.barrier()
        if rank.index == 1:
            rank.send(np.ones(1), 0)
        else:
            rank.recv(np.empty(1), 1)
        return True

    assert list(zs.Cluster(2).run(program)) == [True, True]
