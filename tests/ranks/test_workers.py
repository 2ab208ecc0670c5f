"""Threads change nothing that a run leaves: results, traces, memories, errors; and what they compute is computed there.

With threads each handful of elements is worth one here.
"""

import os
import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import chosen
from tests.ranks.asking import bits
from tests.ranks.programs import every_collective, groups, messages
from tests.support import assert_refused
from zerosim.ranks import hub, workers


@pytest.fixture(autouse=True)
def any_work_is_worth_a_thread(monkeypatch) -> None:
    monkeypatch.setattr(hub, "WORTH_A_THREAD", 0)


def left_by(program: Any, ranks: int, count: int) -> tuple[Any, ...]:
    """All that a run leaves; of one that fails, the error: ranks after the first that fails may have got further."""
    cluster = zs.Cluster(ranks, workers=count)
    try:
        found = [[bits(np.asarray(x)) for x in result] for result in cluster.run(program)]
    except Exception as error:
        return repr(error), getattr(error, "__notes__", None), cluster.memory.now_nbytes
    return found, [list(trace.all_rows()) for trace in cluster.trace], cluster.memory.peak_nbytes


PROGRAMS = {"collectives": lambda rank: every_collective(rank, "fp32", [50, 5000]), "groups": groups,
            "messages": messages, "an error": lambda rank: 1 // (rank.index // 2),
            "a deadlock": lambda rank: rank.index or rank.barrier()}


@given(st.sampled_from(sorted(PROGRAMS)), st.integers(1, 5), st.lists(st.integers(0, 3000), min_size=1, max_size=4),
       st.integers(2, 4))
def test_threads_leave_what_one_leaves(name: str, ranks: int, lengths: list[int], count: int) -> None:
    """Each rank computes before and after the program, as much as it has to."""
    def program(rank: zs.Rank) -> list[Any]:
        def work() -> Any:
            kept = rank.memory.alloc(lengths[rank.index % len(lengths)], np.float32, "activation", "work")
            kept[:] = rank.index
            rank.trace.compute(flops=len(kept))
            return kept

        before = rank.compute(work, operations=1)
        found = PROGRAMS[name](rank)
        del before
        return [*(found if isinstance(found, list) else []), rank.compute(work, operations=1)]

    assert left_by(program, ranks, count) == left_by(program, ranks, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rank_lets_go_is_gone_while_the_thread_that_computed_it_still_says_that_it_has_ended(
        fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the thread's pace would decide when a memory account gets the bytes back."""
    let_go = threading.Event()
    for end in (Future.set_result, Future.set_exception):
        monkeypatch.setattr(Future, end.__name__, lambda *ended, end=end: (end(*ended), let_go.wait(60)))

    def work(rank: zs.Rank) -> Any:
        kept = rank.memory.alloc(4, np.float32, "activation", "work")
        if fails:
            raise ArithmeticError
        return kept

    def program(rank: zs.Rank) -> int:
        with suppress(ArithmeticError):
            rank.compute(partial(work, rank), operations=1)
        held = rank.memory.now_nbytes
        let_go.set()
        return held

    assert list(zs.Cluster(1, workers=2).run(program)) == [0]


def test_work_of_two_ranks_is_under_way_at_once_and_ranks_go_on_in_the_order_in_which_they_began() -> None:
    here, both, order, threads = threading.get_ident(), threading.Barrier(2), [], []

    def program(rank: zs.Rank) -> None:
        def work() -> None:
            both.wait(60)
            threads.append(threading.get_ident())

        rank.compute(work, operations=1)
        order.append(rank.index)

    zs.Cluster(2, workers=2).run(program)
    assert (order, len({here, *threads})) == ([0, 1], 3)


def test_of_two_ranks_that_fail_the_first_in_its_round_has_failed_whichever_is_sooner() -> None:
    sooner = threading.Event()

    def program(rank: zs.Rank) -> None:
        def work() -> None:
            _kept = rank.memory.alloc(4, np.float32, "activation", "work")
            if rank.index == 0:
                assert sooner.wait(60)
            sooner.set()
            raise KeyError(rank.index)

        rank.compute(work, operations=1)

    cluster = zs.Cluster(3, workers=3)
    for _ in range(3):
        sooner.clear()
        with pytest.raises(KeyError, match="0") as caught:
            cluster.run(program)
        assert caught.value.__notes__ == ["raised by rank 0 of 3"]
        del caught
        assert cluster.memory.now_nbytes == [0, 0, 0]


@pytest.mark.usefixtures("pythons_own_handler")
@pytest.mark.parametrize("count", [1, 3])
def test_ctrl_c_while_ranks_compute_ends_the_run_and_leaves_no_byte_and_no_thread(count: int) -> None:
    cluster, others = zs.Cluster(4, workers=count), threading.active_count()
    for stroke in range(0, 60, chosen([3], [1])[0]):  # on each rank, all along the run
        def program(rank: zs.Rank, stroke: int = stroke) -> None:
            for turn in range(20):
                def work(turn: int = turn) -> Any:
                    if 4 * turn + rank.index == stroke:
                        os.kill(os.getpid(), signal.SIGINT)  # which Python takes in its main thread, a little later
                    return [rank.memory.alloc(1000, np.float32, "activation", "work") for _ in range(5)]

                held = rank.compute(work, operations=1)
                rank.all_reduce(held[0])

        with pytest.raises(KeyboardInterrupt):
            cluster.run(program)
        assert (cluster.memory.now_nbytes, threading.active_count()) == ([0] * 4, others)


@pytest.mark.parametrize("count", [1, 2])
def test_work_sees_the_settings_of_its_program_and_may_not_use_a_rank(count: int) -> None:
    def program(rank: zs.Rank) -> float:
        with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
            rank.compute(lambda: np.ones(2) / np.zeros(2), operations=1)
        with pytest.raises(zs.RankUseError, match=r"inside the work of compute.*communicate before it, or after it"):
            rank.compute(lambda: rank.barrier(), operations=1)
        for operations in (-1, float("nan"), None, "8"):
            assert_refused(lambda given=operations: rank.compute(list, operations=given),
                           rf"compute was given operations={operations!r}; say roughly how many the work")
        rank.compute(lambda: np.seterr(divide="raise"), operations=1)
        assert np.geterr()["divide"] == "warn"  # what it sets ends with it
        return float(rank.all_reduce(np.ones(1))[0])

    assert list(zs.Cluster(2, workers=count).run(program)) == [2, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_that_the_program_catches_keeps_no_array_and_a_rank_that_is_stopped_may_still_compute(count) -> None:
    left = []

    def program(rank: zs.Rank) -> None:
        def step() -> None:
            kept = rank.memory.alloc(1000, np.float32, "activation")
            rank.compute(lambda: kept[0] / 0 and 1 // 0, operations=1)

        for _ in range(3):
            with pytest.raises(ZeroDivisionError), np.errstate(all="ignore"):
                step()
            assert rank.memory.now_nbytes == 0
        try:
            rank.barrier()
            if rank.index == 1:
                raise KeyError("stops the others")
            rank.barrier()
        finally:
            left.append(rank.compute(lambda: rank.index, operations=1))

    with pytest.raises(KeyError) as caught:
        zs.Cluster(3, workers=count).run(program)
    assert (left, caught.value.__notes__) == ([1, 0, 2], ["raised by rank 1 of 3"])


def test_a_program_that_goes_on_after_the_main_thread_begins_no_thread(monkeypatch) -> None:
    monkeypatch.setattr(threading, "main_thread", threading.Thread)  # one that does not run
    monkeypatch.setattr(hub, "Workers", None)
    assert list(zs.Cluster(2, workers=2).run(lambda rank: rank.compute(lambda: rank.index, operations=1))) == [0, 1]


def test_workers_are_the_cores_unless_one_at_a_time_is_what_is_looked_at() -> None:
    assert zs.Cluster(64).workers == min(64, workers.cores())
    assert zs.Cluster(1).workers == 1
    assert {zs.Cluster(4, **alone).workers for alone in ({"debug": True}, {"seed": 3}, {"blas_threads": 2})} == {1}
    assert_refused(lambda: zs.Cluster(2, workers=0), "workers=0 .* a number of threads")
