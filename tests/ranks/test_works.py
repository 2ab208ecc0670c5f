"""Asynchronous collectives: what may be seen when, and that no schedule decides anything."""

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import KINDS, assert_ends, bits
from tests.ranks.data import FLOATS, INTEGERS, OTHERS, whole_numbers
from tests.support import assert_refused
from zerosim.numerics import arrays

CLUSTERS = [*KINDS.values(), *({"seed": seed} for seed in range(1, 12))]


def test_a_work_has_no_result_before_its_wait_and_the_same_one_ever_after() -> None:
    """Whatever has been computed."""
    text = (r"^the result of all_reduce\(call 0, \(4,\), float32, op=max\), issued at test_works\.py:\d+ in program, "
            r"was read before wait\(\), at test_works\.py:\d+ in <lambda>; call work\.wait\(\) first, which also "
            r"returns it$")
    title = "<Work all_reduce(call 0, (4,), float32, op=max), "

    def program(rank):
        work = rank.all_reduce(np.full(4, rank.index, np.float32), op="max", async_op=True)
        rank.barrier()  # by which the hub has carried it out
        assert not work.waited
        assert repr(work) == f"{title}pending>"
        assert rank.memory.now_nbytes_by_kind.keys() == {"communication_buffer"}
        assert_refused(lambda: work.result, text, zs.PendingWorkError)
        assert work.wait() is work.wait() is work.result
        assert work.waited
        assert rank.memory.now_nbytes_by_kind == {"workspace": 16}
        assert repr(work) == f"{title}done>"
        return work

    for options in CLUSTERS:
        works = zs.Cluster(3, **options).run(program)
        assert [work.result.tolist() for work in works] == [[2.0] * 4] * 3  # after the run too
        assert works[1].wait() is works[1].result


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_out_shows_a_signal_until_the_rank_s_own_wait(options: dict, in_place: bool) -> None:
    for dtype in [*FLOATS.values(), *INTEGERS.values(), *OTHERS.values()]:
        vectors = [(vector % 8).astype(dtype) for vector in whole_numbers(3, 9)]
        operation = "all_reduce" if dtype.kind not in "cb" else "broadcast"

        def program(rank, dtype=dtype, vectors=vectors, operation=operation):
            x = vectors[rank.index].copy()
            out = x if in_place else np.zeros(9, dtype)
            work = getattr(rank, operation)(x, out=out, async_op=True)
            seen = [arrays.is_poisoned(out)]
            for turn in range(rank.size):  # one rank after another waits; the others still see nothing
                if turn == rank.index:
                    assert work.wait() is out
                    assert not arrays.is_poisoned(out)
                rank.barrier()
                seen += [arrays.is_poisoned(out)] if turn < rank.index else []
            return seen, bits(out)

        results = zs.Cluster(3, **options).run(program)
        assert [seen for seen, _ in results] == [[True] * (1 + index) for index in range(3)], dtype
        assert len({out for _, out in results}) == 1, dtype


CHANGED = (r"^the input of all_reduce\(call 0, \(\d,\), float32.*\), issued at test_works\.py:\d+ in program, was "
           r"changed before wait\(\); it is still read until then: wait first, or hand over a copy")


@pytest.mark.parametrize("executed", [False, True], ids=["before it is executed", "after it was executed"])
@pytest.mark.parametrize("mean", [{}, {"op": "mean", "average": "divide_then_sum"},
                                  {"op": "mean", "average": "premultiply"}], ids=str)
def test_changing_the_input_before_wait_raises_on_every_schedule_as_often_as_one_waits(mean, executed) -> None:
    def program(rank):
        x = np.full(4, 3 * rank.index, np.float32)
        work = rank.all_reduce(x, async_op=True, **mean)
        if executed:
            rank.barrier()
        x[2] += rank.index == 1
        if rank.index == 1:
            for _ in range(2):
                assert_refused(work.wait, CHANGED, zs.PendingWorkError)
            if not fatal:
                x[2] = 3  # put back as it was, which nobody can notice
        result = work.wait()
        x[...] = 7  # from here on it is the program's own
        return result.tolist()

    for options in CLUSTERS:
        cluster, fatal = zs.Cluster(3, **options), True
        assert_ends(cluster, program, zs.PendingWorkError, CHANGED, "raised by rank 1 of 3")
        fatal = False
        assert list(cluster.run(program)) == [[9.0 / (3 if mean else 1)] * 4] * 3


def test_works_that_nobody_waited_for_are_an_error_that_lists_them() -> None:
    def program(rank):
        works = [rank.all_reduce(np.full(2, rank.index), async_op=True), rank.all_gather(np.zeros(1), async_op=True)]
        _ = rank.all_reduce(np.full(2, rank.index))
        works[0].wait()
        if rank.index != 1:
            works[1].wait()
        else:
            rank.broadcast(np.zeros(3), async_op=True)
            del works

    where = r"issued at test_works\.py:\d+ in program"
    said = (r"^rank 1 ended its program with 2 asynchronous collective\(s\) that were never waited for: "
            rf"all_gather\(call 1, \(1,\) -> \(2,\), float64\), {where}; "
            rf"broadcast\(call 3, \(3,\), float64, algorithm=tree\), {where}\. Call work\.wait\(\) on each$")
    for options in CLUSTERS:
        assert_ends(zs.Cluster(2, **options), program, zs.PendingWorkError, said)


def test_the_out_of_a_pending_work_cannot_be_handed_out_again() -> None:
    def program(rank):
        out = np.zeros(3)
        work = rank.all_reduce(np.ones(3), out=out, async_op=True)
        for x, options in ((np.ones(3), {"out": out}), (out, {}), (np.ones(3), {"out": out, "async_op": True})):
            with pytest.raises(zs.PendingWorkError, match=r"given, at test_works\.py:\d+ in program, the out= of all_.*"
                                                          r"issued at test_works\.py:\d+ in program, .*wait\(\) first"):
                rank.all_reduce(x, **options)
        work.wait()
        return rank.all_reduce(out).tolist()

    assert list(zs.Cluster(2).run(program)) == [[4.0] * 3] * 2
