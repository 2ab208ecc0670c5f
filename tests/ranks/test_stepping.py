"""Stepping through a run, by hop and by collective: what a step shows of every rank; and leaving it in the midst.

That every collective can be stepped through, with its hops and results, `test_collectives.py` shows, and the doctest
of `step_through` what arrives at each hop.
"""

import gc

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import KINDS, works


def program(rank: zs.Rank, ended: list | None = None) -> np.ndarray:
    try:
        mine = rank.memory.alloc(8, np.int64, "parameter")
        mine[...] = np.arange(8) * 10 ** rank.index
        _ = rank.reduce_scatter(mine)
        return rank.all_reduce(mine)
    finally:
        if ended is not None:
            ended.append(rank.index)


SUM = (np.arange(8) * 1111).tolist()
STEPS = {"hop": 3 * 4 + 6 * 4, "collective": 2}  # of a reduce-scatter and an all-reduce on 4 ranks


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("by", STEPS)
def test_a_kept_step_stays_as_it_was_and_what_is_looked_at_changes_no_memory(by: str, kind: dict) -> None:
    """Kept steps hold copies, and not the ranks' buffers."""
    plain, watched = zs.Cluster(4, **kind), zs.Cluster(4, **kind)
    kept, seen = [], []
    for step in zs.step_through(program, cluster=watched, by=by):
        kept.append(step)
        seen.append([(now.x.copy(), now.out.copy(), len(now.rows)) for now in step.ranks])
    assert len(kept) == STEPS[by]
    watched.run(program)
    for step, looks in zip(kept, seen, strict=True):
        np.testing.assert_equal([(now.x, now.out, len(now.rows)) for now in step.ranks], looks)
    assert [rows for _, _, rows in seen[0]] < [rows for _, _, rows in seen[-1]]
    assert len({id(step.ranks[2].x) for step in kept}) == 1, "one copy of what does not change"
    plain.run(program)
    plain.run(program)
    for cluster in (plain, watched):
        cluster.runs.clear()
    gc.collect()
    assert watched.memory.now_nbytes == plain.memory.now_nbytes
    assert watched.memory.peak_nbytes == plain.memory.peak_nbytes
    assert [trace.rows for trace in watched.trace] == [trace.rows for trace in plain.trace]


def test_what_is_not_written_yet_is_nan_or_a5_and_in_place_what_was_there() -> None:
    for dtype, blank in ((np.float32, np.nan), (np.int32, np.int32(-0x5A5A5A5B))):
        steps = list(zs.step_through(lambda rank, d=dtype: rank.all_gather(np.array([rank.index], d)), ranks=3))
        first = steps[0]  # rank 0's chunk has come to rank 1
        np.testing.assert_array_equal(first.ranks[1].out, np.array([0, 1, blank], dtype))
        np.testing.assert_array_equal(first.ranks[2].out, np.array([blank, blank, 2], dtype))
        assert steps[-1].ranks[2].out.tolist() == [0, 1, 2]

    def in_place(rank):
        whole = np.full(3, float(rank.index))
        rank.all_gather(whole[rank.index:rank.index + 1], out=whole)

    first = next(zs.step_through(in_place, ranks=3))
    assert [now.out.tolist() for now in first.ranks] == [[0.0] * 3, [0.0, 1.0, 1.0], [2.0] * 3]


def test_a_step_says_where_every_program_waits_and_what_it_has_held_and_done() -> None:
    def uneven(rank):
        half = rank.split(rank.index % 2)
        if rank.index == 3:
            return
        held = rank.memory.hold(np.zeros(rank.index + 1), "input")
        if rank.index % 2 == 0:
            _ = half.all_reduce(held[:1])

    steps = list(zs.step_through(uneven, ranks=4))
    assert steps[0].ranks[3].where.startswith("test_stepping.py:")
    for nows in [step.ranks for step in steps if step.call.operation == "all_reduce"]:
        assert [(now.rank, now.place) for now in nows] == [(0, 0), (1, None), (2, 1), (3, None)]
        assert nows[0].where.startswith("test_stepping.py:")
        assert nows[0].where.endswith("in uneven")
        assert nows[1].where == "finished"
        assert nows[1].x is nows[1].out is None
        assert nows[2].nbytes_by_kind["input"] == 24
        assert nows[2].now_nbytes == sum(nows[2].nbytes_by_kind.values()) > 24
        assert nows[0].rows[-1].call.operation == "all_reduce"
        assert len(nows[1].rows) < len(nows[2].rows)
    begun = {next(zs.step_through(lambda rank: rank.exchange(*(None,) * 4) if rank.index else rank.exchange(
        np.zeros(1), 0, np.zeros(1), 0), cluster=zs.Cluster(2, seed=seed))).ranks[1].where for seed in range(9)}
    assert begun == {"finished", "not begun"}  # in rounds, seed 0, all begin before anything arrives


@pytest.mark.parametrize("by", STEPS)
def test_messages_that_a_program_sends_itself_are_steps_without_a_call(by: str) -> None:
    """A ring by hand, of three ranks: each step shows the value that arrived."""
    def ring(rank):
        partial = np.array([10.0 * (rank.index + 1)])
        for _ in range(rank.size - 1):
            arrived = np.empty_like(partial)
            rank.exchange(partial, (rank.index + 1) % rank.size, arrived, (rank.index - 1) % rank.size)
            partial = arrived + 10.0 * (rank.index + 1)
        return partial[0]

    with zs.step_through(ring, ranks=3, by=by) as steps:
        seen = list(steps)
    assert {(step.call, step.hops[0].nbytes) for step in seen} == {(None, 8)}
    assert {(step.hop.source, step.hop.destination) for step in seen} == {(0, 1), (1, 2), (2, 0)}
    assert sorted(step.values[0] for step in seen) == [10.0, 20.0, 30.0, 30.0, 40.0, 50.0]
    assert repr(seen[0]) == "<Step 1: a message, rank 0 to rank 1, 8 bytes>"
    assert list(steps.cluster.runs[-1].results) == [60.0] * 3


def test_steps_say_in_one_line_what_they_are() -> None:
    call = "reduce_scatter(call 0, (8,), int64)"
    with zs.step_through(program, ranks=2) as steps:
        assert repr(next(steps)) == f"<Step 1: hop 0 of {call}, rank 0 to rank 1, 32 bytes>"
        assert repr(steps) == "<Steps by hop of 2 ranks, 1 taken>"
    assert repr(next(zs.step_through(program, ranks=2, by="collective"))) == f"<Step 1: {call}>"
    assert [len(zs.step_through(program, **options).cluster.ranks)
            for options in ({}, {"ranks": 3}, {"ranks": 3, "cluster": zs.Cluster(3)})] == [2, 3, 3]


@pytest.mark.parametrize("leave", ["with", "close", "del", "exception"])
@pytest.mark.parametrize(("by", "taken"), [("hop", 0), ("hop", 1), ("hop", 13), ("hop", STEPS["hop"]),
                                           ("collective", 1), ("collective", 2)])
def test_leaving_half_way_stops_all_ranks_and_leaves_nothing(by: str, taken: int, leave: str) -> None:
    cluster, ended = zs.Cluster(4), []
    steps = zs.step_through(program, ended, cluster=cluster, by=by)
    gc.disable()
    try:
        for _ in range(taken):
            next(steps)
        match leave:
            case "with":
                with steps:
                    pass
            case "exception":
                with pytest.raises(KeyError), steps:
                    raise KeyError
            case "close":
                steps.close()
                steps.close()
        del steps
    finally:
        gc.enable()
    assert sorted(ended) == ([0, 1, 2, 3] if taken else [])
    assert cluster.memory.now_nbytes == [0] * 4
    assert cluster.runs == []
    assert cluster.run(program)[3].tolist() == SUM


def test_a_failure_comes_out_of_the_step_that_meets_it() -> None:
    def failing(rank):
        _ = rank.all_reduce(np.zeros(2))
        if rank.index:
            raise KeyError("after the first collective")
        rank.barrier()

    cluster, taken = zs.Cluster(2), []
    steps = zs.step_through(failing, cluster=cluster)
    with pytest.raises(KeyError, match="after the first") as caught:
        taken.extend(steps)
    assert caught.value.__notes__ == ["raised by rank 1 of 2"]
    assert (len(taken), list(steps)) == (4, [])
    assert works(cluster)


def test_a_cluster_of_one_representative_cannot_be_stepped_into_a_wrong_picture() -> None:
    cluster = zs.NullCluster(4, representative=0)
    assert list(zs.step_through(lambda rank: rank.all_reduce(rank.xp.empty(4, "float32")), cluster=cluster)) == []
    assert len(cluster.runs) == 1
