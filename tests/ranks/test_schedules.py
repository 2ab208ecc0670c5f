"""Legal orders of turns, seeded and every one: right programs end alike in all, and races are found, with their lines.

Legend: a *program* here is a list of steps that every rank plays; ``None`` in place of an array is none.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.support import assert_refused, literally
from zerosim.testing import RaceError, explore

Steps = list[tuple[Any, ...]]


def play(rank: zs.Rank, steps: Steps) -> list[np.ndarray]:
    """Plays the steps; waits at the end for what is left, each rank in an order of its own; returns all results."""
    values = np.random.default_rng(rank.index)
    works, results = {}, []
    for number, (step, *of) in enumerate(steps):
        x = values.normal(size=2 * rank.size).astype(np.float32)
        match step:
            case "issue":
                out = {"new": None, "own": np.zeros_like(x), "in place": x}[of[0]]
                works[number] = rank.all_reduce(x, out=out, async_op=True), x, out  # the issue
            case "gather":
                works[number] = rank.all_gather(x, async_op=True), x, None
            case "wait" if works:
                results.append(works.pop(sorted(works)[of[0] % len(works)])[0].wait().copy())
            case "all_reduce":
                results.append(rank.all_reduce(x))
            case "exchange":
                results.append(rank.exchange(x, (rank.index + 1) % rank.size, np.zeros_like(x), rank.index - 1
                                             if rank.index else rank.size - 1))
            case "send" if rank.index == 0:
                rank.send(x, rank.size - 1)
            case "send" if rank.index == rank.size - 1:
                results.append(rank.recv(np.zeros_like(x), 0).copy())
            case "write" if rank.index == of[0]:
                works[number - 1][1][-1] += 1  # the write
            case "read" if rank.index == of[0]:
                results.append(works[number - 1][2] + 1)  # the read
            case "leave" if rank.index == of[0]:
                works.pop(number - 1)
            case "barrier":
                rank.barrier()
    for number in sorted(works, reverse=rank.index == 1):
        results.append(works[number][0].wait().copy())
    return results  # the end


def place(marker: str, function: Callable[..., Any] = play) -> str:
    """The line of a function that has this comment, as an error names it."""
    lines, first = inspect.getsourcelines(function)
    at = next(number for number, line in enumerate(lines, first) if line.endswith(f"  # {marker}\n"))
    return f"test_schedules.py:{at} in {function.__name__}"


STEPS = st.one_of(st.tuples(st.just("issue"), st.sampled_from(["new", "own", "in place"])), st.just(("gather",)),
                  st.tuples(st.just("wait"), st.integers(0, 3)), st.just(("all_reduce",)), st.just(("exchange",)),
                  st.just(("send",)), st.just(("barrier",)))


@given(st.integers(2, 4), st.lists(STEPS, max_size=8), st.integers(0, 99))
def test_a_right_program_ends_alike_in_all_orders_and_no_race_is_seen(ranks: int, steps: Steps, seed: int) -> None:
    found = explore(play, steps, ranks=ranks, orders=4, seed=seed)
    assert (found.schedules, len(found.outcomes)) == (4, 1)


PLANTED = {"write": ("own", "in place", "new"), "read": ("own", "in place"), "leave": ("own", "in place", "new")}


@given(st.data(), st.integers(2, 3), st.lists(STEPS, max_size=4), st.lists(STEPS, max_size=4))
def test_every_planted_race_is_found_on_its_rank_with_both_lines(data: Any, ranks: int, before: Steps,
                                                                 after: Steps) -> None:
    kind = data.draw(st.sampled_from(sorted(PLANTED)))
    where, rank = data.draw(st.sampled_from(PLANTED[kind])), data.draw(st.integers(0, ranks - 1))
    steps = [*before, ("issue", where), (kind, rank), *after]
    with pytest.raises(RaceError) as caught:
        explore(play, steps, ranks=ranks, orders=2)
    issued, text = place("the issue"), str(caught.value)
    said = {"write": f"wrote to the input ({2 * ranks},) of all_reduce(call ...)\n  issued at {issued}\n  written to at "
                     f"{place('the write')}\n  until wait() it is still sent: wait first, or take other memory",
            "read": f"read the result ({2 * ranks},) of all_reduce(call ...)\n  issued at {issued}\n  read at "
                    f"{place('the read')}\n  until wait() it may have arrived, or not: wait first, or take other memory",
            "leave": f"never waited for all_reduce(call ...)\n  issued at {issued}\n  ended at {place('the end')}\n"
                     "  keep what async_op=True returns, and call wait() on it"}[kind]
    assert re.search(literally(f"race: rank {rank} {said}"), text), text
    others = [other for other in range(ranks) if other != rank and kind in ("write", "leave")]
    assert not any(f"race: rank {other}" in text for other in others), text


# -- every order, and one of those that commute -----------------------------------------------------------------------

def early_read(rank: zs.Rank) -> float:
    out = np.zeros(2)
    work = rank.all_reduce(np.full(2, rank.index + 1.0), out=out, async_op=True)
    rank.barrier()
    found = float(out[0])
    work.wait()
    return found


def written_and_put_back(rank: zs.Rank) -> list[float]:
    x = np.full(2, rank.index + 1.0)
    work = rank.all_reduce(x, async_op=True)
    x[0] += 8 * rank.index
    if rank.index < 2:
        rank.exchange(np.ones(1), 1 - rank.index, np.ones(1), 1 - rank.index)
    x[0] -= 8 * rank.index
    return work.wait().tolist()


def groups(rank: zs.Rank) -> list[float]:
    works = [group.all_reduce(np.full(2, rank.index), async_op=True) for group in (rank.split(rank.index % 2), rank)]
    if rank.index == 2:
        rank.send(np.ones(1), 0)
    elif rank.index == 0:
        rank.recv(np.ones(1), 2)
    return [float(work.wait()[0]) for work in works]


def quick_barriers(rank: zs.Rank) -> None:
    for _ in range(3):
        rank.barrier()


@pytest.mark.parametrize(("program", "ranks"), [(early_read, 2), (written_and_put_back, 2), (quick_barriers, 2),
                                                (quick_barriers, 3), (groups, 3), (early_read, 3)])
def test_one_order_of_those_that_commute_ends_like_all_of_them(program: Any, ranks: int, record_property: Any) -> None:
    """The same ends, from fewer schedules, which stand for exactly as many as there are."""
    found = {}
    for orders in ("reduced", "all"):
        try:
            found[orders] = explore(program, ranks=ranks, orders=orders, at_most=3000)
        except RaceError as error:
            found[orders] = error.exploration
        record_property("schedules explored", found[orders].schedules)
    reduced, full = found["reduced"], found["all"]
    print(program.__name__, ranks, reduced.schedules, full.schedules, full.complete, len(full.outcomes))
    assert reduced.complete
    if full.complete:
        assert reduced.legal == full.legal == full.schedules > reduced.schedules
    assert {outcome.results for outcome in full.outcomes} <= {outcome.results for outcome in reduced.outcomes}
