"""A rank's memory is its own: what is shared with another rank, or still to appear, is refused."""

import numpy as np
import pytest

import zerosim as zs


@pytest.mark.parametrize("algorithm", ["ring", "tree", "doubling", "naive", "everyone", "rabenseifner"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_that_reduce_into_one_array_are_refused(algorithm, ranks) -> None:
    shared = np.arange(1, 5, dtype=np.float32)
    with pytest.raises(ValueError, match=r"ranks \d and \d handed the same memory .* an array of its own"):
        zs.Cluster(ranks).run(lambda rank: rank.all_reduce(shared, out=shared, algorithm=algorithm))


def test_a_result_over_what_another_rank_reads_is_refused() -> None:
    both = np.zeros(8, np.float32)

    def program(rank):
        x, out = (both[:4], None) if rank.index == 0 else (np.zeros(4, np.float32), both[2:6])
        return rank.all_reduce(x, out=out)

    with pytest.raises(ValueError, match="ranks 0 and 1 handed the same memory"):
        zs.Cluster(3).run(program)


def test_ranks_may_read_one_array_and_write_parts_of_one_that_do_not_touch() -> None:
    data, whole = np.arange(6, dtype=np.float32), np.zeros(6, np.float32)
    found = zs.Cluster(3).run(lambda rank: rank.reduce_scatter(data, out=whole[2 * rank.index:2 * rank.index + 2]))
    assert whole.tolist() == [0, 3, 6, 9, 12, 15]
    assert [of_rank.tolist() for of_rank in found] == [[0, 3], [6, 9], [12, 15]]


@pytest.mark.parametrize("later", [
    lambda rank, out: rank.all_reduce(np.ones(3), out=out), lambda rank, out: rank.all_reduce(out),
    lambda rank, out: rank.all_reduce(np.ones(3), out=out, async_op=True)])
def test_the_out_of_a_pending_work_cannot_be_handed_out_again(later) -> None:
    def program(rank):
        out = np.zeros(3)
        work = rank.all_reduce(np.ones(3), out=out, async_op=True)
        with pytest.raises(zs.PendingWorkError, match=r"the out= of all_reduce.*call work.wait\(\) first"):
            later(rank, out)
        work.wait()
        return rank.all_reduce(out).tolist()

    assert list(zs.Cluster(2).run(program)) == [[4.0] * 3] * 2


@pytest.mark.parametrize("program", [lambda rank: (yield rank.barrier()), None], ids=["generator", "coroutine"])
def test_a_program_that_is_a_generator_or_a_coroutine_is_refused(program) -> None:
    async def coroutine(rank):
        rank.barrier()

    with pytest.raises(ValueError, match="plain blocking code, without yield or async"):
        zs.Cluster(2).run(program or coroutine)


def test_a_program_cannot_pass_for_stopped() -> None:
    def program(rank):
        raise zs.RankStopped

    with pytest.raises(zs.RankStopped) as caught:
        zs.Cluster(2).run(program)
    assert caught.value.__notes__ == ["raised by rank 0 of 2"]


@pytest.mark.parametrize(("call", "text"), [
    (lambda rank: rank.all_reduce(np.zeros(2, ">f4")), "byte order is not this machine's"),
    (lambda rank: rank.all_reduce(np.zeros(2), algorithm=["ring"]), r"no algorithm \['ring'\]"),
    (lambda rank: rank.all_reduce(np.zeros(2), algorithm=None), "no algorithm None"),
    (lambda rank: rank.all_reduce(np.zeros(2, np.float32), wire=3), "no number format is 3"),
    (lambda rank: rank.split(2**63), "color=")])
def test_arguments_of_other_types_are_refused_with_what_to_do(call, text) -> None:
    with pytest.raises(ValueError, match=text):
        zs.Cluster(2).run(call)


@pytest.mark.parametrize("settings", [{"blas_threads": "1"}, {"blas_threads": 0}, {"capacity_nbytes": "1MB"},
                                      {"capacity_nbytes": float("nan")}, {"seed": [1]}], ids=str)
def test_a_cluster_of_other_settings_is_refused(settings) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        zs.Cluster(2, **settings).run(lambda rank: rank.barrier())
