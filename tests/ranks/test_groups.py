"""Groups: their members share memory, trace and fate with the whole; what an earlier run has made still serves.

That every collective works inside a group whose order its keys decide, `test_collectives.py` shows; that works of a
group are under way beside others in any order, `test_schedules.py`; that two groups of the same members do not meet,
`test_disagreement.py`.
"""

import numpy as np

import zerosim as zs
from tests.ranks.asking import KINDS


def test_memory_and_trace_are_those_of_the_rank_whose_rows_name_the_group() -> None:
    def program(rank):
        group = rank.split(rank.index // 2)
        held, other = group.memory.alloc(3, np.float32, "gradient"), 1 - group.index
        group.all_reduce(held, out=held, purpose="gradients")
        group.exchange(np.array([rank.index]), other, out := np.empty(1, np.int64), other, purpose="state")
        assert (group.memory, group.trace, group.xp) == (rank.memory, rank.trace, rank.xp)
        return rank.memory.now_nbytes, out.tolist()

    cluster = zs.Cluster(4)
    assert list(cluster.run(program)) == [(12, [1]), (12, [0]), (12, [3]), (12, [2])]
    row, = cluster.trace[3].collectives(purpose="gradients")
    assert (row.call.group, row.call.number, row.call.ranks) == ((2, 3), 0, 2)
    assert {(hop.source, hop.destination) for hop in row.hops()} == {(0, 1), (1, 0)}, "hops name places in the group"
    message, = cluster.trace[3].messages("state")
    assert (message.source, message.destination) == (2, 2), "messages name ranks"
    assert cluster.trace.sent_nbytes("gradients") == [12, 12, 12, 12]
    assert cluster.trace.sent_nbytes("control") == [3 * 16] * 4, "a split is an all-gather of a color and a key"


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


def test_a_barrier_holds_everyone_until_the_last_one_comes_and_that_of_a_group_its_members_only() -> None:
    for kind in KINDS.values():
        turns = []

        def program(rank, turns=turns):
            rank.split(rank.index).barrier()  # nobody else is in it
            for turn in range(3):
                turns.append(turn)
                rank.barrier()

        zs.Cluster(4, **kind).run(program)
        assert turns == sorted(turns)
