"""Asynchronous collectives: what may be seen when, and that no schedule decides anything."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import chosen
from tests.ranks.asking import KINDS, ROWS, allowed, ask, bits, ceil_cut, expected, same
from tests.ranks.data import FLOATS, INTEGERS, OTHERS, normals, whole_numbers

SEEDS = range(21)
CLUSTERS = [*KINDS.values(), *({"seed": seed} for seed in SEEDS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_wait_returns_what_the_synchronous_call_returns(operation: str, algorithm: str, kind: str) -> None:
    for ranks in [n for n in (1, 2, 3, 4, 8) if allowed(operation, algorithm, n)]:
        vectors = whole_numbers(ranks, 2 * ranks + 1)

        def program(rank, vectors=vectors):
            work = ask(rank, operation, algorithm, vectors[rank.index], async_op=True)
            assert isinstance(work, zs.Work)
            assert not work.waited
            first = work.wait()
            assert work.waited
            assert work.wait() is first is work.result
            return first

        results = zs.Cluster(ranks, **KINDS[kind]).run(program)
        wanted = expected(operation, vectors, ceil_cut(2 * ranks + 1, ranks))
        assert all(same(found, right) for found, right in zip(results, wanted, strict=True))


@pytest.mark.parametrize("options", CLUSTERS, ids=str)
def test_reading_a_result_before_wait_raises_whatever_has_been_computed(options: dict) -> None:
    text = (r"^the result of all_reduce\(call 0, \(4,\), float32\), issued at test_works\.py:\d+ in program, was read "
            r"before wait\(\); call work\.wait\(\) first, which also returns it$")

    def program(rank):
        work = rank.all_reduce(np.full(4, rank.index, np.float32), async_op=True)
        for _ in range(2):
            with pytest.raises(zs.PendingWorkError, match=text):
                work.result  # noqa: B018
            rank.barrier()  # by then the hub has carried it out
        return work.wait()

    assert [result.tolist() for result in zs.Cluster(3, **options).run(program)] == [[3.0] * 4] * 3


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS.values(), *INTEGERS.values(), OTHERS["complex64"]], ids=str)
def test_out_shows_a_signal_until_the_rank_s_own_wait(dtype: np.dtype, in_place: bool) -> None:
    vectors = [(vector % 8).astype(dtype) for vector in whole_numbers(3, 9)]
    operation = "all_reduce" if dtype.kind != "c" else "broadcast"

    def shows_the_signal(out: np.ndarray) -> bool:
        if dtype.kind in "iu":
            return out.tobytes() == b"\xa5" * out.nbytes
        return bool(np.isnan(out).all())

    def program(rank):
        x = vectors[rank.index].copy()
        out = x if in_place else np.zeros(9, dtype)
        work = getattr(rank, operation)(x, out=out, async_op=True)
        seen = [shows_the_signal(out)]
        for turn in range(rank.size):  # one rank after another waits; the others still see nothing
            if turn == rank.index:
                assert work.wait() is out
                assert not shows_the_signal(out)
            rank.barrier()
            seen += [shows_the_signal(out)] if turn < rank.index else []
        return seen, out

    for options in chosen([*KINDS.values(), {"seed": 3}], CLUSTERS):
        results = zs.Cluster(3, **options).run(program)
        assert all(all(seen) and len(seen) == 1 + index for index, (seen, _) in enumerate(results))
        assert len({bits(out) for _, out in results}) == 1


def test_a_bool_output_shows_bytes_that_no_bool_has() -> None:
    def program(rank):
        out = np.zeros(3, bool)
        work = rank.broadcast(np.array([True, False, rank.index > 0]), out=out, async_op=True)
        seen = out.tobytes()
        work.wait()
        return seen, out.tolist()

    assert list(zs.Cluster(2).run(program)) == [(b"\xa5" * 3, [True, False, False])] * 2


CHANGED = (r"^the input of all_reduce\(call 0, \(\d,\), float32.*\), issued at test_works\.py:\d+ in program, was "
           r"changed before wait\(\); it is only borrowed until then: wait first, or hand over a copy")


@pytest.mark.parametrize("executed", [False, True], ids=["before it is executed", "after it was executed"])
@pytest.mark.parametrize("options", CLUSTERS, ids=str)
def test_changing_the_input_before_wait_raises_on_every_schedule(options: dict, executed: bool) -> None:
    def program(rank):
        x = np.full(4, rank.index, np.float32)
        work = rank.all_reduce(x, async_op=True)
        if executed:
            rank.barrier()
        if rank.index == 1:
            x[2] = 5
        return work.wait()

    cluster = zs.Cluster(3, **options)
    with pytest.raises(zs.PendingWorkError, match=CHANGED) as raised:
        cluster.run(program)
    assert raised.value.__notes__ == ["raised by rank 1 of 3"]
    assert cluster.memory.now_nbytes == [0, 0, 0]


@pytest.mark.parametrize("debug", [False, True])
def test_a_work_whose_input_was_changed_raises_again_and_counts_as_pending(debug: bool) -> None:
    def program(rank):
        x = np.ones(4, np.float32)
        work = rank.all_reduce(x, async_op=True)
        x[0] = 2
        for _ in range(2):
            with pytest.raises(zs.PendingWorkError, match=CHANGED):
                work.wait()
        x[0] = 1  # put back as it was, which nobody can notice
        return work.wait()

    assert zs.Cluster(2, debug=debug).run(program)[0].tolist() == [2.0] * 4


def test_the_same_bytes_written_again_and_a_change_after_wait_are_allowed() -> None:
    def program(rank):
        x = np.full(3, rank.index, np.float32)
        work = rank.all_reduce(x, async_op=True)
        x[...] = rank.index
        result = work.wait()
        x[...] = 7
        return result

    assert zs.Cluster(3).run(program)[0].tolist() == [3.0] * 3


@pytest.mark.parametrize("rule", ["divide_then_sum", "premultiply"])
def test_a_mean_that_scales_its_input_notices_a_change_of_it_too(rule: str) -> None:
    def program(rank):
        x = np.full(3, rank.index, np.float32)
        work = rank.all_reduce(x, op="mean", average=rule, async_op=True)
        x[0] += 1
        work.wait()

    with pytest.raises(zs.PendingWorkError, match=CHANGED):
        zs.Cluster(3).run(program)


@pytest.mark.parametrize("options", CLUSTERS, ids=str)
def test_works_that_nobody_waited_for_are_an_error_that_lists_them(options: dict) -> None:
    def program(rank):
        works = [rank.all_reduce(np.full(2, rank.index), async_op=True), rank.all_gather(np.zeros(1), async_op=True)]
        rank.all_reduce(np.full(2, rank.index))
        works[0].wait()
        if rank.index != 1:
            works[1].wait()
        else:
            rank.broadcast(np.zeros(3), async_op=True)
            del works

    cluster = zs.Cluster(2, **options)
    where = r"issued at test_works\.py:\d+ in program"
    with pytest.raises(zs.PendingWorkError) as raised:
        cluster.run(program)
    assert re.fullmatch(r"rank 1 ended its program with 2 asynchronous collective\(s\) that were never waited for: "
                        rf"all_gather\(call 1, \(2,\), float64\), {where}; broadcast\(call 3, \(3,\), float64, "
                        rf"algorithm=tree\), {where}\. Call work\.wait\(\) on each", str(raised.value))
    assert cluster.run(lambda rank: rank.all_reduce(np.array([rank.index])))[0].tolist() == [1]


def test_a_rank_that_raises_is_not_blamed_for_its_pending_works() -> None:
    def program(rank):
        rank.all_reduce(np.full(2, rank.index), async_op=True)
        if rank.index:
            raise KeyError("its own")
        rank.barrier()

    with pytest.raises(KeyError, match="its own"):
        zs.Cluster(2).run(program)


@pytest.mark.parametrize("options", CLUSTERS, ids=str)
def test_works_in_flight_may_be_waited_for_in_any_order_on_any_rank(options: dict) -> None:
    wide, narrow = normals(4, 10, np.float32), normals(4, 10, np.float16)

    def issue(rank, **how):
        return [rank.all_reduce(wide[rank.index], **how), rank.reduce_scatter(narrow[rank.index], **how),
                rank.broadcast(narrow[rank.index], 2, **how), rank.all_to_all(wide[rank.index], **how)]

    def program(rank):
        works = issue(rank, async_op=True)
        order = np.random.default_rng(rank.index).permutation(len(works))
        found = {int(position): works[position].wait() for position in order}
        return [bits(found[position]) for position in range(len(works))]

    plain = zs.Cluster(4).run(lambda rank: [bits(result) for result in issue(rank)])
    assert list(zs.Cluster(4, **options).run(program)) == list(plain)


@st.composite
def scripts(draw: st.DrawFn) -> tuple:
    """A world, collectives that all ranks issue in one order, and for each rank where it waits for which."""
    ranks, count = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    served = [row for row in ROWS if allowed(*row, ranks)]
    rows = [draw(st.sampled_from(served)) for _ in range(count)]
    modes = [draw(st.sampled_from(["sync", "async", "async out", "async in place"])) for _ in rows]
    waits = [[draw(st.integers(i, count - 1)) for i in range(count)] for _ in range(ranks)]
    return ranks, list(zip(rows, modes, strict=True)), waits


@given(script=scripts(), seeds=st.lists(st.integers(1, 1000), min_size=2, max_size=4), debug=st.booleans())
def test_nothing_depends_on_the_schedule(script, seeds: list[int], debug: bool) -> None:
    """Results in bits, every row of the trace with its place, and the ledger's peak: the same under every seed."""
    ranks, calls, waits = script
    vectors = normals(ranks, 7)
    wanted = [expected(row[0], vectors, ceil_cut(7, ranks)) for row, _ in calls]

    def program(rank):
        found, open_works = {}, {}
        for position, ((operation, algorithm), mode) in enumerate(calls):
            options = {"async_op": mode != "sync"}
            x, right = vectors[rank.index].copy(), wanted[position][rank.index]
            if mode == "async out" and right is not None:
                options["out"] = np.empty_like(right)
            elif mode == "async in place" and right is not None and operation in ("all_reduce", "broadcast", "reduce"):
                options["out"] = x
            answer = ask(rank, operation, algorithm, x, **options)
            (found if mode == "sync" else open_works)[position] = answer
            for issued in list(open_works):
                if waits[rank.index][issued] == position:
                    found[issued] = open_works.pop(issued).wait()
        return [None if found[i] is None else bits(found[i]) for i in range(len(calls))]

    clusters = [zs.Cluster(ranks, seed=seed, debug=debug) for seed in (0, *seeds)]
    results = [list(cluster.run(program)) for cluster in clusters]
    assert results == [results[0]] * len(results)
    for cluster in clusters[1:]:
        assert [trace.rows for trace in cluster.trace] == [trace.rows for trace in clusters[0].trace]
        assert cluster.memory.peak_nbytes == clusters[0].memory.peak_nbytes
        assert cluster.memory.now_nbytes == [0] * ranks


def test_a_work_shows_in_its_text_what_it_is_and_whether_it_is_done() -> None:
    def program(rank):
        work = rank.all_reduce(np.zeros(2), op="max", async_op=True)
        before = repr(work)
        work.wait()
        return before, repr(work)

    assert zs.Cluster(2).run(program)[1] == ("<Work all_reduce(call 0, (2,), float64, op=max), pending>",
                                             "<Work all_reduce(call 0, (2,), float64, op=max), done>")
