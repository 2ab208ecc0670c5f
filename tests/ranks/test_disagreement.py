"""Ranks that disagree, and ranks that wait for each other: the text says who, in which call, and where."""

import re
from collections.abc import Callable

import numpy as np
import pytest

import zerosim as zs

KINDS = [{}, {"debug": True}, {"seed": 1}, {"seed": 2, "debug": True}, {"seed": 3}]


def raised(error: type[Exception], program: Callable[[zs.Rank], object], ranks: int, **kind) -> str:
    """The error's text. Afterwards the same cluster works, and holds nothing."""
    cluster = zs.Cluster(ranks, **kind)
    with pytest.raises(error) as caught:
        cluster.run(program)
    assert cluster.memory.now_nbytes == [0] * ranks
    assert cluster.run(lambda rank: rank.all_reduce(np.array([rank.index])))[0].tolist() == [sum(range(ranks))]
    return str(caught.value)


BEGIN = "the ranks of a group must make the same collective calls in the same order, but "
END = ". Look for a branch that depends on the rank, or for shapes, dtypes or options that differ."
MISMATCHES: dict[str, tuple[Callable[[zs.Rank], object], int, str]] = {
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
    "a text to agree on": (
        lambda r: r.agreeing("yes" if r.index else "no").broadcast(np.ones(4)), 2,
        "rank 0 is in broadcast(call 0, (4,), float64, algorithm=tree, no); rank 1 is in broadcast(call 0, (4,), "
        "float64, algorithm=tree, yes)"),
    "another length inside a group": (  # ranks are named by their places in the whole cluster
        lambda r: (group := r.split(0 if r.index % 2 else None)) and group.all_reduce(np.ones(2 + r.index // 3)), 5,
        "rank 1 is in all_reduce(call 0, (2,), float64); rank 3 is in all_reduce(call 0, (3,), float64)"),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_calls_that_differ_are_named_with_their_ranks(kind: dict) -> None:
    for name, (program, ranks, text) in MISMATCHES.items():
        assert raised(zs.MismatchError, program, ranks, **kind) == BEGIN + text + END, name


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
        assert part.startswith("all_reduce(call 0, (4,), float64, ")
        assert value in part


def test_a_message_that_does_not_fit_where_it_arrives_names_both_sides() -> None:
    for kind in KINDS:
        for out in (np.empty(5), np.empty((4, 1)), np.empty(4, np.float32)):
            text = raised(zs.MismatchError, lambda r, out=out: r.recv(out.copy(), 0) if r.index else
                          r.send(np.ones(4), 1), 2, **kind)
            assert text == (f"rank 0 sends ((4,), float64) to rank 1, which expects ({out.shape}, {out.dtype}); both "
                            "sides must name the same shape and dtype")


def both_send(rank: zs.Rank) -> None:
    x = np.full(2, rank.index, np.float32)
    rank.send(x, 1 - rank.index)
    rank.recv(x, 1 - rank.index)


def both_receive(rank: zs.Rank) -> None:
    rank.recv(np.empty(2), 1 - rank.index)


def one_stays_away(rank: zs.Rank) -> None:
    if rank.index != 2:
        rank.all_reduce(np.ones(3))


def elsewhere(rank: zs.Rank) -> None:
    match rank.index:
        case 0:
            rank.exchange(np.ones(2), 1, np.empty(3), 3)
        case 1:
            rank.recv(np.empty(2), 2)
        case 2:
            rank.barrier()


def half_made(rank: zs.Rank) -> None:
    if rank.index == 0:
        rank.exchange(np.ones(2), 1, np.empty(3), 1)
    else:
        rank.recv(np.empty(2), 0)


def issue_and_wait(rank: zs.Rank) -> None:
    if rank.index == 0:
        work = rank.all_gather(np.ones(1), async_op=True)
        work.wait()


def in_two_groups(rank: zs.Rank) -> None:
    group = rank.split(0)
    if rank.index == 0:
        group.send(np.ones(1), 1)
    else:
        rank.recv(np.empty(1), 0)


def in_a_circle(rank: zs.Rank) -> None:
    """Each rank is in two of three pairs, and enters first the one that the next rank enters last."""
    pairs = [rank.split(0 if rank.index in pair else None) for pair in ((0, 1), (1, 2), (2, 0))]
    for pair in (pairs[rank.index], pairs[rank.index - 1]):
        pair.all_reduce(np.ones(1))


def to_itself(rank: zs.Rank) -> None:
    rank.send(np.empty(1), 0)


def an_empty_message(rank: zs.Rank) -> None:
    if rank.index == 0:
        rank.send(np.empty(0), 1)


# The program, its ranks, and who waits for what; the place is that of the program's line.
DEADLOCKS: list[tuple[Callable[[zs.Rank], None], int, list[str]]] = [
    (both_send, 2, ["rank 0: in send((2,), float32) to rank 1 HERE", "rank 1: in send((2,), float32) to rank 0 HERE"]),
    (both_receive, 2, ["rank 0: in recv((2,), float64) from rank 1 HERE",
                       "rank 1: in recv((2,), float64) from rank 0 HERE"]),
    (one_stays_away, 5, ["ranks 0-1: in all_reduce(call 0, (3,), float64) HERE, waiting for rank 2",
                         "rank 2: finished",
                         "ranks 3-4: in all_reduce(call 0, (3,), float64) HERE, waiting for rank 2"]),
    (elsewhere, 4, ["rank 0: in send((2,), float64) to rank 1 and recv((3,), float64) from rank 3 HERE",
                    "rank 1: in recv((2,), float64) from rank 2 HERE",
                    "rank 2: in barrier(call 0, (0,), uint8, algorithm=dissemination) HERE, waiting for ranks "
                    "[0, 1, 3]",
                    "rank 3: finished"]),
    (half_made, 2, ["rank 0: in recv((3,), float64) from rank 1 HERE", "rank 1: finished"]),
    (issue_and_wait, 3, ["rank 0: in all_gather(call 0, (3,), float64) HERE, waiting for ranks [1, 2]",
                         "ranks 1-2: finished"]),
    (in_two_groups, 2, ["rank 0: in send((1,), float64) to rank 1 HERE",
                        "rank 1: in recv((1,), float64) from rank 0 HERE"]),
    (in_a_circle, 3, [f"rank {r}: in all_reduce(call 0, (1,), float64) HERE, waiting for rank {(r + 1) % 3}"
                      for r in range(3)]),
    (to_itself, 1, ["rank 0: in send((1,), float64) to rank 0 HERE"]),
    (an_empty_message, 2, ["rank 0: in send((0,), float64) to rank 1 HERE", "rank 1: finished"]),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ranks_that_wait_for_each_other_are_explained(kind: dict) -> None:
    for program, ranks, lines in DEADLOCKS:
        text = raised(zs.DeadlockError, program, ranks, **kind)
        here = f"at test_disagreement.py:# in {program.__name__}"
        assert re.sub(r"\.py:\d+", ".py:#", text) == "\n".join([
            "no rank can go on:", *(f"  {line.replace('HERE', here)}" for line in lines),
            "Every send needs a receive of the same size that is waiting for it (exchange() does both at once), and "
            "every rank of a group must enter each collective."])


def test_the_line_in_the_source_is_the_one_that_waits() -> None:
    line = both_receive.__code__.co_firstlineno + 1
    said = f"rank 0: in recv((2,), float64) from rank 1 at test_disagreement.py:{line} in both_receive\n"
    assert said in raised(zs.DeadlockError, both_receive, 2)
