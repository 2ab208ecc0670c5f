"""What the checker sees in any answer: holes, exceptions, shared memory, hidden arrays; and how it shows them."""

import functools
import json
import re

import numpy as np
import pytest

import zerosim as zs
from tests.course.puzzles.answers import changed, refusal, written
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES, checker
from zerosim.course.puzzles.checker import Audit
from zerosim.course.puzzles.expected import steps_in_sequence
from zerosim.course.puzzles.solutions import SOLUTIONS

# -- what an answer may not do ----------------------------------------------------------------------------------------


def peeking_sum(board, rank, x):
    """The right chunk, from what all ranks have written on one board; the barrier is an exchange."""
    board[rank.size, len(x), rank.index] = x.copy()
    n, N, k = len(x), rank.size, -(-len(x) // rank.size)
    for _ in range(N - 1):
        rank.exchange(np.empty(0, x.dtype), (rank.index + 1) % N, np.empty(0, x.dtype), (rank.index - 1) % N)
    own = slice(min(n, rank.index * k), min(n, (rank.index + 1) * k))
    total = board[N, n, (rank.index + 1) % N][own].copy()
    for step in range(2, N + 1):
        total += board[N, n, (rank.index + step) % N][own]
    return total


def test_an_answer_that_reads_other_ranks_memory_is_refused():
    said = refusal("ring", functools.partial(peeking_sum, {}))
    assert said == ("On N=3 (n=7) its results are right even when every message arrives as NaN, so it sees other "
                    "ranks' data where no message brought them; a rank knows its arguments, and what others send it.")


def test_an_answer_that_is_right_with_too_few_messages_is_refused():
    def answer(board, rank, x):
        if rank.size != 3:
            return peeking_sum(board, rank, x)
        return SOLUTIONS["ring"](rank, x)

    said = refusal("ring", functools.partial(answer, {}))
    assert said == ("On N=2 (n=1) the ranks sent 0 bytes in all where 4 have to travel: what one rank knows of "
                    "another's data must come in a message.")


def test_an_answer_that_depends_on_the_order_in_which_ranks_run_is_refused():
    seen = []

    def answer(rank, x):
        seen.append(rank.index)
        result = SOLUTIONS["all_reduce"](rank, x)
        in_order = seen[-rank.size:] == sorted(seen[-rank.size:])
        return result if in_order else result + 1

    said = refusal("all_reduce", answer)
    assert said.startswith("In another order of the ranks, which is as good, it fails, as if they shared something "
                           "that is no message: On N=")


def test_an_answer_that_reads_memory_before_it_is_written_is_refused():
    def answer(rank, x):
        found = SOLUTIONS["all_reduce"](rank, x)
        fresh = rank.memory.alloc(len(x), np.float32, "workspace")
        if not rank.memory.debug:
            fresh[...] = 0  # as it often is by chance
        return found + fresh

    said = refusal("all_reduce", answer)
    assert said.startswith("With NaN in new and in freed memory it fails, as if it read what was not written: On N=3 ")


@pytest.mark.parametrize("body", [
    "rank._state.memory", "np.lib.stride_tricks.as_strided(x, (100,))", "__import__('x').gc.get_objects()",
    "(lambda: rank._state)()"])
def test_back_doors_are_refused_by_name_before_anything_runs(body):
    said = refusal("mean", written(f"def mean(rank, x):\n    return {body}"))
    assert re.match(r"It uses \w+, with which one sees what is not one's own; a rank knows its arguments, and ", said)


def test_a_program_that_yields_is_refused_as_a_generator():
    said = refusal("mean", written("def mean(rank, x):\n    yield x"))
    assert said.startswith("On N=1 (n=1) rank 0 raised ValueError: the program made a generator and ran nothing")


@pytest.mark.parametrize(("text", "said"), [
    ("def mean(rank, x):\n    return x[3]", "On N=1 (n=1) rank 0 raised IndexError in line 2 of mean: index 3 is"),
    ("def mean(rank):\n    return 0", "On N=1 (n=1) rank 0 raised TypeError: mean() takes 1 positional argument but"),
    ("def mean(rank, x):\n    raise KeyError", "On N=1 (n=1) rank 0 raised KeyError in line 2 of mean."),
    ("def mean(rank, x):\n    return nothing", "rank 0 raised NameError in line 2 of mean: name 'nothing' is not"),
    ("def mean(rank, x):\n    return rank.all_reduce(x[rank.index:])", "On N=2 (n=1) the ranks of a group must make "
     "the same collective calls in the same order, but rank 0 is in"),
    ("def mean(rank, x):\n    return np.float64(x.mean())", "is a float64 where an array of shape (1,) is expected"),
])
def test_what_an_answer_raises_is_said_with_the_rank_and_the_line(text, said):
    assert said in refusal("mean", written(text))


def test_an_interrupt_passes_through_a_check():
    def answer(rank, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        puzzles.check("mean", answer)


@pytest.mark.parametrize(("change", "nbytes"), [
    (("    return partial", "    rest = np.ones(4 * n)\n    del rest\n    return partial"), "8,3"),
    (("    return partial", "    rank.kept = np.ones(n, np.float32)\n    return partial"), "1,0"),
    (("        landing += own", "        landing += own.copy()\n        rank.kept = own.copy()"), "2")])
def test_an_array_that_the_ledger_does_not_know_is_refused_also_one_that_lives_for_a_moment(change, nbytes):
    said = refusal("ring", changed("ring", change))
    assert re.match(rf"On N=4 \(n=262144\) rank \d holds about {nbytes}[\d,]* bytes that its ledger does not know: "
                    r"take arrays from rank.memory.alloc\(shape, dtype, kind\), or charge them with "
                    r"rank.memory.hold\(array, kind\), and write into them with out=\.$", said), said


def test_an_audit_counts_for_each_rank_what_it_made_and_its_ledger_missed():
    def program(rank, audit, found):
        audit.enter(rank.memory)
        known = rank.memory.alloc(100_000, np.float32, "workspace")
        hidden = np.ones(100_000 * rank.index, np.float32)
        rank.barrier()
        brief = np.ones(1_000_000, np.float32) if rank.index == 1 else None
        del brief
        audit.look()
        found[rank.index] = next(one for one in audit.ranks.values() if one.memory is rank.memory)
        return known, hidden

    found = {}
    with Audit() as audit:
        zs.Cluster(3).run(program, audit, found)
    at_rest = [found[rank].missed_at_rest_nbytes for rank in range(3)]
    in_between = [found[rank].missed_in_between_nbytes for rank in range(3)]
    assert at_rest == pytest.approx([0, 400_000, 800_000], abs=50_000)
    assert in_between == pytest.approx([0, 4_400_000, 800_000], abs=50_000)


# -- what an answer may do --------------------------------------------------------------------------------------------


def test_two_halves_that_one_wrote_oneself_solve_all_reduce_too():
    def answer(rank, x):
        return SOLUTIONS["gather"](rank, SOLUTIONS["ring"](rank, x), len(x))

    score = puzzles.check("all_reduce", answer)
    assert score.passed, score


def test_an_array_that_is_held_may_come_from_numpy():
    score = puzzles.check("ring", changed("ring", (
        'rank.memory.alloc(k, x.dtype, "workspace")', 'rank.memory.hold(np.empty(k, x.dtype), "workspace")')))
    assert score.passed, score


@pytest.mark.parametrize(("name", "change", "lost"), [
    ("zero2", ("        del gradient", "        pass"), "peak_nbytes"),
    ("gather", ("    whole = rank", "    spare = rank.memory.alloc(k, shard.dtype, 'workspace')\n    whole = rank"),
     "peak_nbytes"),
    ("overlap", ("        if work is not None:\n            shards[layer + 1] = work.wait()\n            "
                 "shards[layer + 1] /= rank.size\n        work = rank.reduce_scatter(gradient, async_op=True)\n",
                 "        before, work = work, rank.reduce_scatter(gradient, async_op=True)\n"
                 "        if before is not None:\n            shards[layer + 1] = before.wait()\n"
                 "            shards[layer + 1] /= rank.size\n"), "peak_nbytes"),
    ("lamb", ("rank.all_gather(partial).reshape(rank.size, 2).sum(axis=0)", "rank.all_reduce(partial)"), "steps"),
    ("overflow", ("np.uint8", "np.float32"), "sent_nbytes")])
def test_an_answer_that_is_right_but_wasteful_passes_and_loses_a_star(name, change, lost):
    score = puzzles.check(name, changed(name, change))
    assert score.passed, score
    assert lost not in score.targets_met
    assert score.stars.count("★") == len(score.targets_met) < 3


def test_a_mean_by_any_algorithm_is_within_the_bound():
    for algorithm in ("ring", "tree", "doubling", "naive"):
        score = puzzles.check("mean", changed("mean", ("all_reduce(x)", f"all_reduce(x, algorithm={algorithm!r})")))
        assert score.passed, score


# -- a check leaves nothing behind ------------------------------------------------------------------------------------


def test_two_checks_of_one_answer_are_equal_and_no_tracing_is_left_on():
    import tracemalloc

    import greenlet

    assert puzzles.check("ring", SOLUTIONS["ring"]) == puzzles.check("ring", SOLUTIONS["ring"])
    assert not tracemalloc.is_tracing()
    assert greenlet.gettrace() is None


def test_a_check_while_python_traces_already_lets_it_trace_on():
    import tracemalloc

    tracemalloc.start()
    try:
        assert puzzles.check("gather", SOLUTIONS["gather"]).passed
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


# -- cases and their targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PUZZLES))
def test_every_known_mistake_differs_from_the_right_answer_somewhere(name):
    cases = PUZZLES[name].cases()
    for number, mistake in enumerate(cases[-1].mistakes):
        found = [checker.complaint(case, case.mistakes[number].results, PUZZLES[name].returns) for case in cases]
        assert any(found), mistake.what


@pytest.mark.parametrize("name", list(PUZZLES))
def test_a_mistake_is_named_as_itself_where_it_alone_is_made(name):
    for case in PUZZLES[name].cases():
        for mistake in case.mistakes:
            said = checker.complaint(case, mistake.results, PUZZLES[name].returns)
            assert said is None or any(said[1].startswith(other.what) for other in case.mistakes), said


def test_a_limit_lies_at_its_target_or_above():
    for puzzle in PUZZLES.values():
        for case in puzzle.cases():
            assert all(limit.most >= getattr(case.target, limit.measure) for limit in case.limits), (puzzle.name, case)


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_steps_follow_a_tree_of_messages(ranks, steps):
    cluster = zs.Cluster(ranks)
    cluster.run(lambda rank: SOLUTIONS["broadcast"](rank, np.ones(3, np.float32)))
    assert steps_in_sequence(cluster.trace) == steps


def test_steps_of_messages_side_by_side_count_once_and_one_after_another_twice():
    def pairs(rank):
        rank.exchange(np.ones(2), rank.index ^ 1, np.ones(2), rank.index ^ 1)

    def chain(rank):
        if rank.index:
            rank.recv(np.ones(2), rank.index - 1)
        if rank.index < rank.size - 1:
            rank.send(np.ones(2), rank.index + 1)

    for program, steps in ((pairs, 1), (chain, 3)):
        cluster = zs.Cluster(4)
        cluster.run(program)
        assert steps_in_sequence(cluster.trace) == steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_of_collectives_are_those_of_their_hops_one_after_another(asynchronous):
    def program(rank):
        first = rank.reduce_scatter(np.ones(8), async_op=asynchronous)
        second = rank.all_reduce(np.ones(8), algorithm="tree", async_op=asynchronous)
        return [work.wait() for work in (first, second)] if asynchronous else None

    cluster = zs.Cluster(4)
    cluster.run(program)
    assert steps_in_sequence(cluster.trace) == 3 + 4


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_a_score_shows_a_table_with_measured_values_beside_targets():
    text = repr(puzzles.check("ring", SOLUTIONS["ring"]))
    assert text.startswith("ring: passed ★★★\n  Right on N = 1, 2, 3, 4, 5, 8 in 12 cases, bit for bit, ")
    assert re.search(r"^  8  n=19 +100 +100 +76 +76 +7 +7$", text, re.M)


def test_a_refusal_shows_its_sentence_and_no_table():
    score = puzzles.check("mean", lambda rank, x: None)
    assert repr(score) == ("mean: not yet\n  On N=1 (n=1) rank 0 returned what is wrong: the result is None where an "
                           "array of shape (1,) is expected.")
    assert score._repr_html_().startswith("<p><b>mean: not yet</b><br>On N=1 (n=1) rank 0")
    assert "<table>" not in score._repr_html_()
    assert "within the stated bound" in puzzles.check("mean", SOLUTIONS["mean"]).sentence


def test_a_score_shows_itself_in_a_notebook_with_nothing_unescaped():
    html = puzzles.check("ring", SOLUTIONS["ring"])._repr_html_()
    assert html.count("<tr>") == 1 + 12
    assert "<td>n=19</td><td>100</td><td>100</td>" in html
    wild = puzzles.check("mean", written("def mean(rank, x):\n    raise ValueError('<b>&')"))
    assert "&lt;b&gt;&amp;" in wild._repr_html_()
    assert puzzles.show("mean")._repr_html_().startswith("<pre>The mean of one number\n")


def test_a_score_is_plain_data_too():
    data = json.loads(json.dumps(puzzles.check("ring", SOLUTIONS["ring"]).as_json()))
    assert data["verdict"] == "passed"
    assert data["targets_met"] == ["peak_nbytes", "sent_nbytes", "steps"]
    assert data["rows"][-1] == {"ranks": 8, "title": "n=19", "peak_nbytes": 100, "sent_nbytes": 76, "steps": 7,
                                "target": {"peak_nbytes": 100, "sent_nbytes": 76, "steps": 7}}


def test_a_hole_raises_where_it_is_run_alone():
    with pytest.raises(NotImplementedError, match="add your own copy"):
        zs.puzzles.hole("add your own copy")
