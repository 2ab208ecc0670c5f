"""The checker of any answer: exceptions, exits, shared memory, hidden arrays; steps; and how it shows a score."""

import functools
import json
import re
import tracemalloc

import greenlet
import numpy as np
import pytest

import zerosim as zs
from tests.course.puzzles.answers import changed, refusal, written
from tests.support import assert_refused
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES, compare, expected, solutions, steps, watching

SOLUTIONS = solutions.SOLUTIONS

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


def peeking_on_three_ranks(board, rank, x):
    return SOLUTIONS["ring"](rank, x) if rank.size == 3 else peeking_sum(board, rank, x)


def test_an_answer_that_reads_other_ranks_memory_or_is_right_with_too_few_messages_is_refused():
    assert refusal("ring", functools.partial(peeking_sum, {})) == (
        "On N=3 (n=7) its results are right even when every message arrives as NaN, so it sees other ranks' data where "
        "no message brought them; a rank knows its arguments, and what others send it.")
    assert refusal("ring", functools.partial(peeking_on_three_ranks, {})) == (
        "On N=2 (n=1) the ranks sent 0 bytes in all where 4 have to travel: what one rank knows of another's data must "
        "come in a message.")


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


def endless_list(rank, x):
    found = []
    found.append(found)
    return found


def mute(rank, x):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    raise Mute


FORBIDDEN = ("It uses {}, with which one sees what is not one's own; a rank knows its arguments, and what others send "
             "it.")
TEXTS = [
    ("return rank._state.memory", FORBIDDEN.format("_state")), ("return (lambda: rank._state)()", "It uses _state, "),
    ("return np.lib.stride_tricks.as_strided(x, (100,))", "It uses stride_tricks, with which one sees what is not one"),
    ("return __import__('x').gc.get_objects()", "It uses gc, with which one sees what is not one's own"),
    ("yield x", "On N=1 (n=1) rank 0 raised ValueError: the program made a generator and ran nothing"),
    ("return x[3]", "On N=1 (n=1) rank 0 raised IndexError in line 2 of mean: index 3 is"),
    ("raise KeyError", "On N=1 (n=1) rank 0 raised KeyError in line 2 of mean."),
    ("def inner():\n        return x[3]\n    return inner()", "rank 0 raised IndexError in line 3 of inner: index "),
    ("return nothing", "rank 0 raised NameError in line 2 of mean: name 'nothing' is not"),
    ("raise SystemExit(0)", "On N=1 (n=1) rank 0 raised SystemExit in line 2 of mean"),
    ("raise GeneratorExit", "On N=1 (n=1) rank 0 raised GeneratorExit in line 2 of mean"),
    ("return rank.all_reduce(x[rank.index:])", "On N=2 (n=1) the ranks of a group must make the same collective calls "
     "in the same order, but rank 0 is in"),
    ("return np.float64(x.mean())", "is a float64 where an array of shape (1,) is expected"),
]


def test_what_an_answer_raises_or_asks_for_is_said_in_one_sentence_with_the_rank_and_the_line():
    answers = [(written(f"def mean(rank, x):\n    {text}"), said) for text, said in TEXTS]
    answers += [(lambda rank: 0, "rank 0 raised TypeError: "), (mute, "On N=1 (n=1) rank 0 raised Mute in line "),
                (endless_list, "On N=1 (n=1) rank 0 returned a list that contains itself.")]
    for answer, said in answers:
        assert said in refusal("mean", answer)


def test_a_forbidden_collective_is_seen_wherever_it_is_called():
    def zero1(rank, weights, *given):
        found = SOLUTIONS["zero1"](rank, weights, *given)
        rank.broadcast(weights, out=weights)
        return found

    assert "it calls broadcast, but this puzzle is to be solved with exchange, all_gather, all_reduce, " in refusal(
        "zero1", zero1)


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
    with watching.Audit() as audit:
        zs.Cluster(3).run(program, audit, found)
    at_rest = [found[rank].missed_at_rest_nbytes for rank in range(3)]
    in_between = [found[rank].missed_in_between_nbytes for rank in range(3)]
    assert at_rest == pytest.approx([0, 400_000, 800_000], abs=50_000)
    assert in_between == pytest.approx([0, 4_400_000, 800_000], abs=50_000)


def test_a_silenced_rank_hears_nothing_from_any_operation():
    def program(rank):
        silenced, x = watching.SilencedRank.of(rank), np.ones(rank.size)
        calls = (silenced.all_reduce, silenced.reduce_scatter, silenced.all_gather, silenced.reduce,
                 silenced.all_to_all, silenced.broadcast, silenced.gather)
        heard = [call(x) for call in calls]
        out = np.zeros(1)
        silenced.exchange(np.ones(1), 1 - rank.index, out, 1 - rank.index)
        return [out, silenced.all_reduce(x, async_op=True).wait(), *(one for one in heard if one is not None)]

    for heard in zs.Cluster(2).run(program):
        assert all(np.isnan(one).all() for one in heard)
        assert len(heard) > 6


# -- what an answer may do --------------------------------------------------------------------------------------------


def test_two_halves_that_one_wrote_oneself_solve_all_reduce_too():
    def answer(rank, x):
        return SOLUTIONS["gather"](rank, SOLUTIONS["ring"](rank, x), len(x))

    assert puzzles.check("all_reduce", answer).passed


def test_an_array_that_is_held_may_come_from_numpy_and_a_mean_from_any_algorithm():
    held = ('rank.memory.alloc(k, x.dtype, "workspace")', 'rank.memory.hold(np.empty(k, x.dtype), "workspace")')
    assert puzzles.check("ring", changed("ring", held)).passed
    for algorithm in ("tree", "doubling", "naive"):
        answer = changed("mean", ("all_reduce(x)", f"all_reduce(x, algorithm={algorithm!r})"))
        assert puzzles.check("mean", answer).passed, algorithm


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


# -- a check leaves nothing behind ------------------------------------------------------------------------------------


def test_two_checks_of_one_answer_are_equal_and_tracing_is_as_it_was_before():
    assert puzzles.check("ring", SOLUTIONS["ring"]) == puzzles.check("ring", SOLUTIONS["ring"])
    assert not tracemalloc.is_tracing()
    assert greenlet.gettrace() is None
    tracemalloc.start()
    try:
        assert puzzles.check("gather", SOLUTIONS["gather"]).passed
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


# -- cases and their targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUZZLES)
def test_every_known_mistake_is_wrong_somewhere_and_is_named_and_every_limit_lies_at_its_target_or_above(name):
    cases = PUZZLES[name].cases()
    for number, mistake in enumerate(cases[-1].mistakes):
        complaints = [compare.complaint(case, case.mistakes[number].results, PUZZLES[name].returns) for case in cases]
        assert any(complaints), mistake.what
        for case, said in zip(cases, complaints, strict=True):
            assert said is None or any(said[1].startswith(other.what) for other in case.mistakes), said
    for case in cases:
        assert not any(mistake.results is case.expected for mistake in case.mistakes)
        assert all(limit.most >= getattr(case.target, limit.measure) for limit in case.limits), case


# -- steps ------------------------------------------------------------------------------------------------------------


def steps_of(program, ranks):
    cluster = zs.Cluster(ranks)
    cluster.run(program)
    return steps.steps_in_sequence(cluster.trace)


def pairs(rank):
    rank.exchange(np.ones(2), rank.index ^ 1, np.ones(2), rank.index ^ 1)


def chain(rank):
    if rank.index:
        rank.recv(np.ones(2), rank.index - 1)
    if rank.index < rank.size - 1:
        rank.send(np.ones(2), rank.index + 1)


def two_collectives(rank, asynchronous):
    works = [rank.reduce_scatter(np.ones(8), async_op=asynchronous),
             rank.all_reduce(np.ones(8), algorithm="tree", async_op=asynchronous)]
    return [work.wait() for work in works] if asynchronous else None


def messages_beside_a_ring(rank, asynchronous, messages):
    """An all-reduce around a ring, 2(N-1) hops, and so many messages to the next rank, each of one hop."""
    work = rank.all_reduce(np.ones(8), async_op=asynchronous)
    for _ in range(messages):
        rank.exchange(np.ones(2), (rank.index + 1) % rank.size, np.empty(2), (rank.index - 1) % rank.size)
    if asynchronous:
        work.wait()


def test_steps_are_the_hops_of_the_longest_chain():
    for ranks, depth in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)):
        assert steps_of(lambda rank: SOLUTIONS["broadcast"](rank, np.ones(3, np.float32)), ranks) == depth, ranks
    assert (steps_of(pairs, 4), steps_of(chain, 4)) == (1, 3)
    for asynchronous in (False, True):
        assert steps_of(functools.partial(two_collectives, asynchronous=asynchronous), 4) == 3 + 4
    for ranks in (2, 3, 5):
        for messages in (0, 1, 3, 30):
            ring = 2 * (ranks - 1)
            beside, after = (steps_of(functools.partial(messages_beside_a_ring, asynchronous=asynchronous,
                                                        messages=messages), ranks) for asynchronous in (True, False))
            assert (beside, after) == (max(ring, messages), ring + messages), (ranks, messages)


def test_collectives_in_sequence_send_and_take_the_sum_of_each():
    for ranks in (1, 2, 3, 8):
        parts = [expected.ring_wire(operation, 19, ranks) for operation in ("reduce_scatter", "all_gather")]
        both = expected.in_sequence(*parts)
        assert both == tuple(map(sum, zip(*parts, strict=True)))
        assert both.all_nbytes == 2 * (ranks - 1) * 19 * 4


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_a_score_shows_measured_values_beside_targets_in_a_terminal_in_a_notebook_and_as_data():
    score = puzzles.check("ring", SOLUTIONS["ring"])
    text, html, data = repr(score), score._repr_html_(), json.loads(json.dumps(score.as_json()))
    assert text.startswith("ring: passed ★★★\n  Right on N = 1, 2, 3, 4, 5, 8 in 12 cases, bit for bit, ")
    assert re.search(r"^  8  n=19 +100 +100 +76 +76 +7 +7$", text, re.M)
    assert html.count("<tr>") == 1 + 12
    assert '<td>n=19</td><td class="n">100</td><td class="n">100</td>' in html
    measures = {"peak_nbytes": 100, "sent_nbytes": 76, "steps": 7}
    assert (data["verdict"], data["targets_met"]) == ("passed", list(measures))
    assert data["rows"][-1] == {"ranks": 8, "title": "n=19", **measures, "target": measures}
    assert "within the stated bound" in puzzles.check("mean", SOLUTIONS["mean"]).sentence


def test_a_refusal_shows_its_sentence_and_no_table_with_nothing_unescaped():
    score = puzzles.check("mean", lambda rank, x: None)
    assert repr(score) == ("mean: not yet\n  On N=1 (n=1) rank 0 returned what is wrong: the result is None where an "
                           "array of shape (1,) is expected.")
    assert "<p><strong>mean: not yet</strong></p><p>On N=1 (n=1) rank 0 returned" in score._repr_html_()
    assert "<table>" not in score._repr_html_()
    wild = puzzles.check("mean", written("def mean(rank, x):\n    raise ValueError('<b>&')"))
    assert "&lt;b&gt;&amp;" in wild._repr_html_()
    assert puzzles.show("mean")._repr_html_().startswith("<pre>The mean of one number\n")
    assert_refused(lambda: puzzles.hole("add your own copy"), "add your own copy", NotImplementedError)
