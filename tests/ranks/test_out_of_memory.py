"""A capacity is exact to the byte: who asks for more is told what is held, and nothing has changed afterwards."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.ranks.asking import KINDS, ROWS, WORLDS, allowed, ask
from tests.ranks.data import whole_numbers


def test_the_text_says_what_was_asked_what_is_left_and_what_is_held_by_kind() -> None:
    def program(rank):
        held = [rank.memory.alloc(1000, np.float32, "parameter"), rank.memory.alloc(500, np.float16, "gradient"),
                rank.memory.alloc((10, 10), np.float64, "parameter")]
        if rank.index == 1:
            rank.memory.alloc(3000, np.float32, "optimizer_state", "momentum")
        return held

    with pytest.raises(zs.OutOfMemoryError) as caught:
        zs.Cluster(2, capacity_nbytes=10_000).run(program)
    assert str(caught.value) == (
        "rank 1 asked for 12,000 bytes (optimizer_state momentum) and has 4,200 left of capacity_nbytes=10,000; "
        "it holds 5,800: parameter 4,800, gradient 1,000. Shard more, keep less, let go of earlier results "
        "(cluster.runs.clear()), or raise the capacity.")
    assert issubclass(zs.OutOfMemoryError, MemoryError)


def test_who_holds_nothing_is_told_so() -> None:
    text = r"asked for 8 bytes \(input\) and has 7 left .* it holds 0: nothing\. "
    with pytest.raises(zs.OutOfMemoryError, match=text):
        zs.Cluster(1, capacity_nbytes=7).run(lambda rank: rank.memory.hold(np.ones(1), "input"))


@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_a_collective_fits_in_what_it_charges_and_no_less(operation, algorithm) -> None:
    """At one byte less a rank that charges the most runs out, and all that had been taken is given back."""
    worlds = [n for n in WORLDS if allowed(operation, algorithm, n)]
    for ranks, kind, asynchronous in covering(worlds, ("plain", "debug"), (False, True)):
        vectors = whole_numbers(ranks, 3 * ranks + 2)

        def program(rank, vectors=vectors, asynchronous=asynchronous):
            answer = ask(rank, operation, algorithm, vectors[rank.index], async_op=asynchronous)
            if asynchronous:
                answer.wait()
            return rank.index

        roomy = zs.Cluster(ranks, **KINDS[kind])
        roomy.run(program)
        assert roomy.memory.now_nbytes == [0] * ranks
        need = max(roomy.memory.peak_nbytes)
        fits, short = (zs.Cluster(ranks, capacity_nbytes=n, **KINDS[kind]) for n in (need, need - 1))
        assert list(fits.run(program)) == list(range(ranks))
        for _ in range(2):
            with pytest.raises(zs.OutOfMemoryError, match=r"^rank \d asked for .* left of capacity_nbytes="):
                short.run(program)
            assert short.memory.now_nbytes == [0] * ranks
        assert list(short.run(lambda rank: rank.index)) == list(range(ranks))


def test_after_running_out_the_same_run_works_once_less_is_held() -> None:
    cluster = zs.Cluster(3, capacity_nbytes=4 * 100 + 8 * 100)
    ballast = cluster.run(lambda rank: rank.memory.alloc(1, np.uint8, "activation") if rank.index == 2 else None)

    def program(rank):
        big = rank.memory.alloc(100, np.float64, "parameter")
        small = rank.memory.alloc(100, np.float32, "gradient")
        return big.nbytes + small.nbytes

    with pytest.raises(zs.OutOfMemoryError, match=r"rank 2 asked for 400 bytes \(gradient\) and has 399 left .* "
                       "it holds 801: parameter 800, activation 1"):
        cluster.run(program)
    assert cluster.memory.now_nbytes == [0, 0, 1]
    cluster.memory[2].free(ballast[2])
    assert list(cluster.run(program)) == [1200] * 3
    assert cluster.memory.peak_nbytes == [1200] * 3


def test_a_program_may_catch_it_and_ask_for_less() -> None:
    def program(rank):
        for count in (1000, 100, 10):
            try:
                out = rank.memory.alloc(count, np.float32, "workspace")
            except zs.OutOfMemoryError:
                continue
            return rank.all_reduce(np.full(len(out), rank.index, np.float32), out=out).tolist()

    results = zs.Cluster(3, capacity_nbytes=4 * (100 + 34 + 34)).run(program)
    assert list(results) == [[3.0] * 100] * 3


def test_a_collective_that_runs_out_takes_no_call_number() -> None:
    """The rank that catches it may go on with the others, at the same call."""
    def program(rank):
        if rank.index == 1:
            with pytest.raises(zs.OutOfMemoryError):
                rank.all_reduce(np.zeros(1000))
        return rank.all_reduce(np.array([rank.index]), op="max").tolist()

    cluster = zs.Cluster(3, capacity_nbytes=100)
    assert list(cluster.run(program)) == [[2]] * 3
    assert [len(trace.collectives()) for trace in cluster.trace] == [1, 1, 1]


def test_capacity_zero_leaves_room_for_what_takes_nothing() -> None:
    cluster = zs.Cluster(2, capacity_nbytes=0)
    cluster.run(lambda rank: rank.barrier())
    assert cluster.run(lambda rank: rank.all_reduce(np.zeros((0, 3))).shape)[0] == (0, 3)
    assert cluster.run(lambda rank: rank.memory.alloc((4, 0), np.float64, "input").shape)[1] == (4, 0)


def test_results_of_earlier_runs_stay_held_as_long_as_the_cluster_keeps_them() -> None:
    cluster = zs.Cluster(2, capacity_nbytes=900)
    cluster.run(lambda rank: rank.all_reduce(np.zeros(60)))
    assert cluster.memory.now_nbytes == [480, 480]
    with pytest.raises(zs.OutOfMemoryError, match="it holds 480: workspace 480"):
        cluster.run(lambda rank: rank.all_reduce(np.zeros(60)))
    cluster.runs.clear()
    assert cluster.memory.now_nbytes == [0, 0]
