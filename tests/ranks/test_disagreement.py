"""Ranks that disagree, and ranks that wait for each other: the text says who, in which call, and where."""

import re

import numpy as np
import pytest

import zerosim as zs

SEEDS = [0, 1, 2, 3]


def raised(error: type[Exception], program, ranks: int, *, seed: int = 0, debug: bool = False) -> str:
    """The error's text. Afterwards the same cluster works, and holds nothing."""
    cluster = zs.Cluster(ranks, seed=seed, debug=debug)
    with pytest.raises(error) as caught:
        cluster.run(program)
    assert cluster.memory.now_nbytes == [0] * ranks
    assert cluster.run(lambda rank: rank.all_reduce(np.array([rank.index])))[0].tolist() == [sum(range(ranks))]
    return str(caught.value)


BEGIN = "the ranks of a group must make the same collective calls in the same order, but "
END = ". Look for a branch that depends on the rank, or for shapes, dtypes or options that differ."
MISMATCHES = {
    "another collective": (
        lambda r: r.barrier() if r.index == 2 else r.all_reduce(np.ones(4)), 4,
        "ranks [0, 1, 3] are in all_reduce(call 0, (4,), float64); rank 2 is in barrier(call 0, (0,), uint8, "
        "algorithm=dissemination)"),
    "another shape": (
        lambda r: r.all_reduce(np.ones(4 + r.index % 2)), 4,
        "ranks [0, 2] are in all_reduce(call 0, (4,), float64); ranks [1, 3] are in all_reduce(call 0, (5,), "
        "float64)"),
    "the same size in another shape": (
        lambda r: r.all_reduce(np.ones((2, 3) if r.index else (3, 2))), 2,
        "rank 0 is in all_reduce(call 0, (3, 2), float64); rank 1 is in all_reduce(call 0, (2, 3), float64)"),
    "another type": (
        lambda r: r.reduce_scatter(np.ones(4, np.float32 if r.index else np.float16)), 2,
        "rank 0 is in reduce_scatter(call 0, (4,), float16); rank 1 is in reduce_scatter(call 0, (4,), float32)"),
    "another op": (
        lambda r: r.all_reduce(np.ones(4), op="max" if r.index else "sum"), 2,
        "rank 0 is in all_reduce(call 0, (4,), float64); rank 1 is in all_reduce(call 0, (4,), float64, op=max)"),
    "another algorithm": (
        lambda r: r.all_reduce(np.ones(4), algorithm="tree" if r.index else "ring"), 2,
        "rank 0 is in all_reduce(call 0, (4,), float64); rank 1 is in all_reduce(call 0, (4,), float64, "
        "algorithm=tree)"),
    "another root": (
        lambda r: r.broadcast(np.ones(4), r.index), 3,
        "rank 0 is in broadcast(call 0, (4,), float64, algorithm=tree); rank 1 is in broadcast(call 0, (4,), "
        "float64, algorithm=tree, root=1); rank 2 is in broadcast(call 0, (4,), float64, algorithm=tree, root=2)"),
    "another wire": (
        lambda r: r.all_reduce(np.ones(4, np.float16), wire="fp32" if r.index else None), 2,
        "rank 0 is in all_reduce(call 0, (4,), float16); rank 1 is in all_reduce(call 0, (4,), float16, "
        "wire=float32)"),
    "another place in the program": (
        lambda r: [r.all_reduce(np.ones(2)), r.all_gather(np.ones(1)) if r.index else r.all_reduce(np.ones(2))], 2,
        "rank 0 is in all_reduce(call 1, (2,), float64); rank 1 is in all_gather(call 1, (2,), float64)"),
    "a chunk of another length": (
        lambda r: r.all_gather(np.ones(2 + r.index)), 2,
        "rank 0 is in all_gather(call 0, (4,), float64); rank 1 is in all_gather(call 0, (6,), float64)"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_calls_that_differ_are_named_with_their_ranks(name: str, debug: bool, seed: int) -> None:
    program, ranks, text = MISMATCHES[name]
    assert raised(zs.MismatchError, program, ranks, seed=seed, debug=debug) == BEGIN + text + END


@pytest.mark.parametrize(("options", "shown"), [
    (lambda r: {"average": "split" if r.index else "divide_then_sum", "op": "mean"},
     ("average=divide_then_sum", "average=split")),
    (lambda r: {"splits": (0, 1, 4) if r.index else (0, 3, 4)}, ("splits=(0, 3, 4)", "splits=(0, 1, 4)")),
    (lambda r: {"purpose": "state" if r.index else "control"}, ("purpose=control", "purpose=state"))])
def test_what_the_short_form_leaves_out_is_shown_where_it_is_the_difference(options, shown: tuple[str, str]) -> None:
    text = raised(zs.MismatchError, lambda r: r.all_reduce(np.ones(4), **options(r)), 2)
    parts = re.fullmatch(re.escape(BEGIN) + "rank 0 is in (.*); rank 1 is in (.*)" + re.escape(END), text)
    assert parts is not None
    for part, value in zip(parts.groups(), shown, strict=True):
        assert f"all_reduce(call 0, (4,), float64, op={'mean' if 'average' in value else 'sum'}, " in part
        assert value in part


def test_a_mismatch_is_an_error_of_the_caller_s() -> None:
    assert issubclass(zs.MismatchError, ValueError)


def test_ranks_of_a_split_group_are_named_by_their_places_in_the_whole_cluster() -> None:
    def program(rank):
        group = rank.split(rank.index % 2)
        group.all_reduce(np.ones(2 + rank.index // 3))

    text = raised(zs.MismatchError, program, 5)
    said = "rank 1 is in all_reduce(call 0, (2,), float64); rank 3 is in all_reduce(call 0, (3,), float64)"
    assert text == BEGIN + said + END


MESSAGE = (r"rank 0 sends \(\(4,\), float64\) to rank 1, which expects \(\((5|4)(, 1)?,?\), float(64|32)\); "
           r"both sides must name the same shape and dtype")


@pytest.mark.parametrize("out", [np.empty(5), np.empty((4, 1)), np.empty(4, np.float32)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_that_does_not_fit_where_it_arrives_names_both_sides(out: np.ndarray, seed: int) -> None:
    text = raised(zs.MismatchError, lambda r: r.recv(out.copy(), 0) if r.index else r.send(np.ones(4), 1), 2, seed=seed)
    assert re.fullmatch(MESSAGE, text)


FIRST = "no rank can go on:\n"
LAST = ("\nEvery send needs a receive of the same size that is waiting for it (exchange() does both at once), and "
        "every rank of a group must enter each collective.")
HERE = "at test_disagreement.py:# in"


def deadlocked(program, ranks: int, **options) -> list[str]:
    """One line for each rank, or row of ranks, that waits in the same place; line numbers as #."""
    text = raised(zs.DeadlockError, program, ranks, **options)
    assert text.startswith(FIRST)
    assert text.endswith(LAST)
    return re.sub(r"\.py:\d+", ".py:#", text[len(FIRST):-len(LAST)]).split("\n")


def both_send(rank):
    x = np.full(2, rank.index, np.float32)
    rank.send(x, 1 - rank.index)
    rank.recv(x, 1 - rank.index)


def both_receive(rank):
    rank.recv(np.empty(2), 1 - rank.index)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_ranks_that_both_send_first_are_explained(seed: int) -> None:
    assert deadlocked(both_send, 2, seed=seed) == [
        f"  rank 0: in send((2,), float32) to rank 1 {HERE} both_send",
        f"  rank 1: in send((2,), float32) to rank 0 {HERE} both_send"]


def test_the_line_in_the_source_is_the_one_that_waits() -> None:
    with pytest.raises(zs.DeadlockError) as caught:
        zs.Cluster(2).run(both_receive)
    line = both_receive.__code__.co_firstlineno + 1
    said = f"rank 0: in recv((2,), float64) from rank 1 at test_disagreement.py:{line} in both_receive\n"
    assert said in str(caught.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_collective_that_one_rank_never_enters_is_explained(seed: int) -> None:
    def program(rank):
        if rank.index != 2:
            rank.all_reduce(np.ones(3))

    assert deadlocked(program, 5, seed=seed) == [
        f"  ranks 0-1: in all_reduce(call 0, (3,), float64) {HERE} program, waiting for rank 2",
        "  rank 2: finished",
        f"  ranks 3-4: in all_reduce(call 0, (3,), float64) {HERE} program, waiting for rank 2"]


def test_a_message_to_a_rank_that_has_finished_or_is_elsewhere_is_explained() -> None:
    def program(rank):
        match rank.index:
            case 0:
                rank.exchange(np.ones(2), 1, np.empty(3), 3)
            case 1:
                rank.recv(np.empty(2), 2)
            case 2:
                rank.barrier()

    assert deadlocked(program, 4) == [
        f"  rank 0: in send((2,), float64) to rank 1 and recv((3,), float64) from rank 3 {HERE} program",
        f"  rank 1: in recv((2,), float64) from rank 2 {HERE} program",
        f"  rank 2: in barrier(call 0, (0,), uint8, algorithm=dissemination) {HERE} program, waiting for ranks "
        "[0, 1, 3]",
        "  rank 3: finished"]


def test_the_half_of_an_exchange_that_was_made_is_not_named() -> None:
    def program(rank):
        if rank.index == 0:
            rank.exchange(np.ones(2), 1, np.empty(3), 1)
        else:
            rank.recv(np.empty(2), 0)

    assert deadlocked(program, 2) == [
        f"  rank 0: in recv((3,), float64) from rank 1 {HERE} program", "  rank 1: finished"]


def test_a_wait_that_nobody_answers_is_explained_where_it_stands() -> None:
    def issue_and_wait(rank):
        if rank.index == 0:
            work = rank.all_gather(np.ones(1), async_op=True)
            work.wait()

    assert deadlocked(issue_and_wait, 3) == [
        f"  rank 0: in all_gather(call 0, (3,), float64) {HERE} issue_and_wait, waiting for ranks [1, 2]",
        "  ranks 1-2: finished"]


def test_messages_inside_different_groups_do_not_meet() -> None:
    def program(rank):
        group = rank.split(0)
        if rank.index == 0:
            group.send(np.ones(1), 1)
        else:
            rank.recv(np.empty(1), 0)

    assert deadlocked(program, 2) == [f"  rank 0: in send((1,), float64) to rank 1 {HERE} program",
                                      f"  rank 1: in recv((1,), float64) from rank 0 {HERE} program"]


def test_three_groups_entered_in_a_circle_are_explained() -> None:
    def program(rank):
        """Each rank is in two of three pairs, and enters first the one that the next rank enters last."""
        pairs = [rank.split(0 if rank.index in pair else None) for pair in ((0, 1), (1, 2), (2, 0))]
        for pair in (pairs[rank.index], pairs[rank.index - 1]):
            pair.all_reduce(np.ones(1))

    said = f"in all_reduce(call 0, (1,), float64) {HERE} program, waiting for rank"
    assert deadlocked(program, 3) == [f"  rank 0: {said} 1", f"  rank 1: {said} 2", f"  rank 2: {said} 0"]
