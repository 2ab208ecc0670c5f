"""Same program, same bits, same trace; and nothing that surrounds a run changes them."""

import contextvars
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import zerosim as zs
from tests.ranks import programs
from tests.ranks.asking import in_another_thread
from tests.ranks.data import FLOATS, any_bits
from tests.support import fresh
from zerosim.numerics import arrays


def program(rank: zs.Rank) -> list[str]:
    """Some of all that ranks do; what the memory says comes last."""
    return list(map(arrays.sha256, [
        programs.every_collective(rank, "fp16", (13,)), programs.options_of_reductions(rank, "fp16"),
        programs.messages(rank), programs.groups(rank), programs.works(rank), programs.counted(rank)]))


def told(cluster: zs.Cluster) -> tuple[list, list, list]:
    """All that one run says of itself: results, rows, peaks."""
    return list(cluster.run(program)), [trace.rows for trace in cluster.trace], cluster.memory.peak_nbytes


def test_the_same_program_gives_the_same_bits_and_the_same_trace_whatever_the_schedule() -> None:
    """On another cluster, and on the same one once more: nothing is left over from the first run."""
    plain = told(zs.Cluster(4))
    for seed in (0, 5):
        cluster = zs.Cluster(4, seed=seed)
        assert told(cluster) == told(cluster) == plain, seed
    first, second = (told(zs.Cluster(4, seed=seed, debug=True)) for seed in (0, 12))
    assert first == second
    for mine, its in zip(first[0], plain[0], strict=True):
        assert mine[:-1] == its[:-1], "debug mode holds more, and computes the same"


def test_a_seed_really_tries_other_orders() -> None:
    """Of ranks that wait, and of one that has just issued something: else these tests would prove nothing."""
    def order_of(seed: int) -> tuple[int, ...]:
        def program(rank):
            rank.barrier()
            order.append(rank.index)
            work = rank.all_reduce(np.ones(1), async_op=True)
            order.append(rank.index)
            work.wait()

        order: list[int] = []
        zs.Cluster(4, seed=seed).run(program)
        return tuple(order)

    plain, *others = map(order_of, range(12))
    assert plain == (0, 0, 1, 1, 2, 2, 3, 3)
    assert len(set(others)) > 6
    assert {order[0] == order[1] for order in others} == {False, True}, "who has issued may have to wait for its turn"


def test_another_process_with_another_hash_seed_gives_the_same_bits_and_rows() -> None:
    """No order depends on a set or on an address."""
    seed = next(seed for seed in "12" if os.environ.get("PYTHONHASHSEED") != seed)
    prints = ("import zerosim as zs; from tests.ranks.test_determinism import told; "
              "print(hash('order')); print(told(zs.Cluster(5)))")
    its_hash, found = fresh("-c", prints, PYTHONHASHSEED=seed).splitlines()
    assert int(its_hash) != hash("order")
    assert found == str(told(zs.Cluster(5)))


WHO = contextvars.ContextVar("WHO", default="nobody")


def test_a_rank_sees_the_caller_s_context_and_what_it_changes_is_its_own() -> None:
    """Context variables, and NumPy's error state, which is one of them."""
    def program(rank):
        before = WHO.get(), np.geterr()["over"]
        WHO.set(f"rank {rank.index}")
        with np.errstate(over="raise" if rank.index else "call"):
            rank.barrier()
            inside = WHO.get(), np.geterr()["over"]
            rank.barrier()
        return before, inside

    def caller():
        WHO.set("the caller")
        with np.errstate(over="print"):
            return list(zs.Cluster(2).run(program)), WHO.get(), np.geterr()["over"]

    before = "the caller", "print"
    assert contextvars.copy_context().run(caller) == (
        [(before, ("rank 0", "call")), (before, ("rank 1", "raise"))], *before)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_a_user_s_error_state_changes_no_bit_and_raises_nothing(dtype: np.dtype) -> None:
    """Overflow, underflow, inf - inf and NaN of every kind are results here, and no one's errors."""
    for ranks, options in ((1, {}), (3, {"debug": True}), (4, {})):
        def found(ranks=ranks, options=options) -> list[str]:
            x = any_bits(ranks, 300, dtype)
            return [arrays.sha256(result) for result in zs.Cluster(ranks, **options).run(
                lambda rank: [*programs.reductions(rank, x[rank.index]), rank.all_gather(x[rank.index])])]

        quiet = found()
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert found() == quiet


# -- threads of BLAS --------------------------------------------------------------------------------------------------

def blas_threads_now() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("threads", [1, 2])
def test_blas_has_the_threads_that_the_cluster_asks_for(threads: int) -> None:
    before = blas_threads_now()
    inside = zs.Cluster(2, blas_threads=threads).run(lambda rank: blas_threads_now())
    assert list(inside) == [{threads}] * 2
    assert blas_threads_now() == before
    with pytest.raises(KeyError):
        zs.Cluster(1, blas_threads=threads).run(lambda rank: {}[0])
    assert blas_threads_now() == before


def test_the_limit_of_blas_holds_until_the_last_of_two_clusters_in_two_threads_has_ended() -> None:
    """One with another limit is refused beside them."""
    with threadpool_limits(2, "blas"):
        started, first_ended = threading.Event(), threading.Event()
        seen = []

        def outlasts(rank: zs.Rank) -> None:
            started.set()
            assert first_ended.wait(600)
            seen.append(blas_threads_now())

        def begins_first(rank: zs.Rank) -> Callable[[], Any]:
            assert list(zs.Cluster(1, blas_threads=3).run(lambda rank: blas_threads_now())) == [{3}], "nested, it may"
            with pytest.raises(zs.RankUseError, match="blas_threads=3 was asked to run while one with blas_threads=1 "
                                                      "runs in another thread, and BLAS has one limit"):
                in_another_thread(lambda: zs.Cluster(1, blas_threads=3).run(lambda rank: None))()
            result = in_another_thread(lambda: zs.Cluster(1).run(outlasts))
            assert started.wait(600)
            return result

        result = zs.Cluster(1).run(begins_first)[0]
        seen.append(blas_threads_now())
        first_ended.set()
        result()
        assert seen == [{1}, {1}], "what the first changed stays changed for the second"
        assert blas_threads_now() == {2}
