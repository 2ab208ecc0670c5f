"""Legal orders of turns, drawn or every one: right programs end alike in all, and races are found with their lines."""

import inspect
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.architecture.source import ROOT
from tests.cases import THOROUGH
from tests.support import assert_refused, literally
from zerosim.numerics import arrays
from zerosim.testing import RaceError, explore

Steps = list[tuple[Any, ...]]


def play(rank: zs.Rank, steps: Steps) -> list[np.ndarray]:
    """Plays the steps; waits at the end for what is left, rank 1 in the other direction; returns all results."""
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
            case "group" if rank.index < 2:
                works[number] = rank.new_group([1, 0]).all_reduce(x, async_op=True), x, None
            case "wait" if works:
                results.append(works.pop(sorted(works)[of[0] % len(works)])[0].wait().copy())
            case "all_reduce":
                results.append(rank.all_reduce(x))
            case "exchange":
                results.append(rank.exchange(x, (rank.index + 1) % rank.size, np.zeros_like(x),
                                             (rank.index - 1) % rank.size))
            case "send" | "forward" if rank.index == 0:
                rank.send(x if step == "send" else works[max(works)][2], rank.size - 1)  # the forward
            case "send" | "forward" if rank.index == rank.size - 1:
                results.append(rank.recv(np.zeros_like(x), 0))
            case "write" if rank.index == of[0]:
                works[max(works)][1][-1] += 1  # the write
            case "read" if rank.index == of[0]:
                results.append(works[max(works)][2] + 1)  # the read
            case "leave" if rank.index == of[0]:
                works.pop(max(works))
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
                  st.tuples(st.just("wait"), st.integers(0, 3)),
                  *(st.just((step,)) for step in ("group", "all_reduce", "exchange", "send", "barrier")))
MANY = 4 if THOROUGH else 2


@given(st.integers(2, 4), st.lists(STEPS, max_size=2 * MANY), st.integers(0, 99))
def test_a_right_program_ends_alike_in_all_orders_and_no_race_is_seen(ranks: int, steps: Steps, seed: int) -> None:
    found = explore(play, steps, ranks=ranks, orders=4, seed=seed)
    assert (found.schedules, len(found.outcomes)) == (4, 1)


SAID = {"write": f"wrote to the input (...,) of all_reduce(...)\n  issued at {place('the issue')}\n  written to at "
                 f"{place('the write')}\n  until wait() it is still sent: wait first, or take other memory",
        "read": f"read the result (...,) of all_reduce(...)\n  issued at {place('the issue')}\n  read at "
                f"{place('the read')}\n  until wait() it may have arrived, or not: wait first, or take other memory",
        "leave": f"never waited for all_reduce(...)\n  issued at {place('the issue')}\n  ended at {place('the end')}\n"
                 "  keep what async_op=True returns, and call wait() on it"}
SAID["forward"] = SAID["read"].replace(place("the read"), place("the forward"))


@given(st.integers(2, 3), st.lists(STEPS, max_size=MANY), st.sampled_from(["new", "own", "in place"]), st.sampled_from(
    sorted(SAID)), st.integers(0, 2), st.lists(STEPS, max_size=MANY))
def test_every_planted_race_is_found_on_its_rank_with_both_lines(
        ranks: int, before: Steps, out: str, kind: str, rank: int, after: Steps) -> None:
    assume(kind not in ("read", "forward") or out != "new")
    rank = 0 if kind == "forward" else rank % ranks
    with pytest.raises(RaceError, match=literally(f"race: rank {rank} {SAID[kind]}")) as caught:
        explore(play, [*before, ("issue", out), (kind, rank), *after], ranks=ranks, orders=2)
    assert {found for found, _ in caught.value.exploration.races} == {rank}


# -- every order, and one of those that commute ----------------------------------------------------------------------

def ends_of_all(steps: Steps, ranks: int, at_most: int = 2000) -> tuple[int, int, int] | None:
    """The numbers of ends, of all orders, and of those that stand for all, where they have the same ends; None where
    orders are too many."""
    found = []
    for orders in ("all", "reduced"):
        try:
            found.append(explore(play, steps, ranks=ranks, orders=orders, at_most=at_most))
        except RaceError as error:
            found.append(error.exploration)
    full, reduced = found
    if not full.complete:
        return None
    assert reduced.complete
    assert full.schedules > reduced.schedules
    assert {outcome.fingerprint for outcome in full.outcomes} == {outcome.fingerprint for outcome in reduced.outcomes}
    assert sorted(full.races) == sorted(reduced.races)
    return len(full.outcomes), full.schedules, reduced.schedules


@pytest.mark.parametrize(("ranks", "counts", "steps"), [  # no two of those that stand for all commute
    (2, (1, 56, 4), [("barrier",), ("issue", "in place")]),
    (2, (2, 80, 22), [("issue", "new"), ("send",), ("write", 1)]),
    (2, (2, 92, 8), [("issue", "own"), ("barrier",), ("read", 0)]),
    (3, (2, 204, 4), [("group",), ("write", 0), ("wait", 0)])], ids=str)
def test_one_order_of_those_that_commute_ends_like_all_of_them(
        ranks: int, counts: tuple[int, int, int], steps: Steps, record_property: Callable[[str, int], None]) -> None:
    assert ends_of_all(steps, ranks) == counts
    record_property("schedules explored", sum(counts[1:]))


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(STEPS, max_size=1), st.sampled_from(["own", "in place"]), st.sampled_from(["write", "read", "barrier"]),
       st.integers(0, 1), st.sampled_from(["send", "all_reduce", "issue"]), st.lists(STEPS, max_size=1))
def test_one_order_stands_for_all_of_a_drawn_program_that_may_race(
        before: Steps, out: str, deed: str, rank: int, between: str, after: Steps) -> None:
    assume(ends_of_all([*before, ("issue", out), (between, out), (deed, rank), *after], 2, at_most=1000))


def first_to_append(rank: zs.Rank, log: list[int]) -> int:
    rank.barrier()  # before ranks differ
    log.append(rank.index)
    return log[0]


def test_what_depends_on_the_order_is_said_with_two_schedules_and_the_line_in_which_they_part() -> None:
    with pytest.raises(RaceError) as caught:
        explore(first_to_append, [], orders="all")
    assert str(caught.value) == f"""\
2 ranks, 4 schedules, which stand for all legal orders: 2 different outcomes
the end depends on the order of turns. Two schedules that differ:
  rank 0, rank 1, barrier (call 0), rank 0, rank 1
    returns [0, 0]
  rank 0, rank 1, barrier (call 0), rank 1, rank 0
    returns [1, 1]
they differ first in rank 0, at {place('before ranks differ', first_to_append)}: log differs"""
    with pytest.raises(RaceError, match="20 schedules: 2 different outcomes"):
        explore(first_to_append, [], orders=20)
    assert str(explore(first_to_append, [], orders="reduced")) == (
        "2 ranks, 1 schedule, which stands for all legal orders: one outcome"), "what ranks share is not among turns"


def test_what_cannot_be_explored_is_refused_and_the_program_s_own_error_is_its_own() -> None:
    calls: list[int] = []
    for program, options, error, said in [
            (np.sum, {"orders": "every"}, ValueError, "orders='every' must be 'reduced', 'all' or a number of schedu"),
            (np.sum, {"at_most": 0}, ValueError, "at_most=0 must be a number of schedules, 1 or more"),
            (lambda rank: calls.append(0) or len(calls), {}, ValueError, "^the program does not repeat itself in the "
             "same order: seed what it draws, and hand over what it changes as an argument, of which each run gets a "
             "copy$"),
            (lambda rank: object(), {}, ValueError, "a fingerprint is of arrays"),
            (lambda rank: np.array([{}]), {}, ValueError, "a fingerprint is of arrays"),
            (lambda rank: {}[0], {}, KeyError, "0"),
            (lambda rank: rank.all_reduce(np.ones(2), async_op=True).result, {}, zs.PendingWorkError,
             "all_reduce(...), issued at test_schedules.py:... in <lambda>, was read before wait(), at test_schedule")]:
        assert_refused(lambda: explore(program, **options), literally(said), error)  # noqa: B023  # called at once
    assert_refused(lambda: explore(np.sum, (one for one in ())), "^cannot pickle 'generator' object$", TypeError)
    assert explore(lambda rank: 0, orders=np.int64(3)).schedules == 3, "drawn, where there are two at most"


def any_yet(rank: zs.Rank, kind: str) -> bool:
    flags = np.zeros(rank.size, kind)
    work = rank.all_gather(np.ones(1, kind), out=flags, async_op=True)
    early = bool(flags.any())  # the flags
    work.wait()
    return early


@pytest.mark.parametrize("kind", ["bool", "uint8"])
def test_a_flag_that_is_read_too_early_is_found(kind: str) -> None:
    said = f"rank 0 read the result (2,) of all_gather(...\n  read at {place('the flags', any_yet)}\n"
    with pytest.raises(RaceError, match=f"(?s){literally(said)}"):
        explore(any_yet, kind, orders=1)


def test_the_page_shows_the_report_that_its_program_prints() -> None:
    page = (ROOT / "docs/rank_programs.md").read_text(encoding="utf-8")
    (code, report), = re.findall(r"^```python\n([^`]*explore\([^`]*)^```\n[^`]*`mine\.py`[^`]*^```text\n([^`]*)^```$",
                                 page, re.M)
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "mine.py", "exec"), {})
    assert printed.getvalue() == report


# -- the engine ------------------------------------------------------------------------------------------------------

WAYS: list[tuple[int, dict[str, Any]]] = [
    *((stage, {"overlap": True}) for stage in range(4)), (1, {"overlap": True, "copy_in_flight": True}),
    (3, {"overlap": True, "prefetch": 1}), (3, {"offload": "host"}),
    (2, {"overlap": True, "offload": "disk"}), (3, {"zeropp": "hpz+qwz+qgz", "mesh": (1, 2), "overlap": True})]


def step(rank: zs.Rank, stage: int, options: dict[str, Any]) -> Any:
    data = np.random.default_rng(rank.index)
    engine = zs.Engine(rank, zs.models.MLP([3, 3, 3]), zs.optim.Adam(lr=0.01), stage=stage, **options)
    losses = engine.step(data.normal(size=(2, 3)), data.normal(size=(2, 3))).losses
    return losses, {name: engine.state(name) for name in engine.model.shapes}


def without_held(rows: Any) -> list[list[Any]]:
    """The rows but for memory: where results land at once, no copy of them is held."""
    return [[row for row in its if type(row).__name__ != "Held"] for its in rows]


@pytest.mark.parametrize(("ranks", "stage", "options", "orders"), [
    *((2, *way, 3) for way in WAYS), *(pytest.param(2, *way, "reduced", marks=pytest.mark.slow) for way in WAYS),
    *(pytest.param(3, stage, {"overlap": stage in (0, 3)}, "reduced", marks=pytest.mark.slow) for stage in range(4))],
    ids=str)
def test_an_engine_s_step_has_the_same_bits_and_the_same_trace_in_drawn_orders_and_in_every_one(
        ranks: int, stage: int, options: Any, orders: Any, record_property: Callable[[str, int], None]) -> None:
    found, cluster = explore(step, stage, options, ranks=ranks, orders=orders), zs.Cluster(ranks)
    assert found.complete == (orders == "reduced")
    assert found.outcomes[0].fingerprint == arrays.sha256(list(cluster.run(step, stage, options)))
    assert without_held(found.outcomes[0].rows) == without_held(trace.rows for trace in cluster.trace)
    record_property("schedules explored", found.schedules)


@pytest.mark.parametrize("exhibit", ["overlap_buffer_reused", "bucket_race"])
def test_the_museum_s_races_are_found_as_such(exhibit: str) -> None:
    with zs.museum.exhibit(exhibit), pytest.raises(RaceError, match=r"race: rank.* wrote to the input .*reduce_s"):
        explore(step, 2, {"overlap": True}, orders=1)
