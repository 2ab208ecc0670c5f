"""The checker of any answer: what it lets pass, leaves behind, measures and shows."""

import json
import re
import tracemalloc

import greenlet
import numpy as np
import pytest

import zerosim as zs
from tests.course.puzzles.answers import answer_of, refusal
from tests.support import assert_refused
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES, compare, solutions, watching

SOLUTIONS = solutions.SOLUTIONS


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


def test_an_array_that_is_held_may_come_from_numpy_and_a_mean_from_any_algorithm():
    held = ('rank.memory.alloc(k, x.dtype, "workspace")', 'rank.memory.hold(np.empty(k, x.dtype), "workspace")')
    assert puzzles.check("ring", answer_of("ring", held)).passed
    for algorithm in ("tree", "doubling", "naive"):
        answer = answer_of("mean", ("all_reduce(x)", f"all_reduce(x, algorithm={algorithm!r})"))
        assert puzzles.check("mean", answer).passed, algorithm


@pytest.mark.parametrize(("name", "change", "lost"), [
    ("zero2", ("        del gradient", "        pass"), "peak_nbytes"),
    ("gather", ("    whole = rank", "    spare = rank.memory.alloc(k, shard.dtype, 'workspace')\n    whole = rank"),
     "peak_nbytes"),
    ("lamb", ("rank.all_gather(partial).reshape(rank.size, 2).sum(axis=0)", "rank.all_reduce(partial)"), "steps"),
    ("overflow", ("np.uint8", "np.float32"), "sent_nbytes")])
def test_an_answer_that_is_right_but_wasteful_passes_and_loses_a_star(name, change, lost):
    score = puzzles.check(name, answer_of(name, change))
    assert score.passed, score
    assert lost not in score.targets_met
    assert score.stars.count("★") == len(score.targets_met) < 3


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


@pytest.mark.parametrize("name", PUZZLES)
def test_every_known_mistake_is_wrong_somewhere_and_is_named_and_every_limit_lies_at_its_target_or_above(name):
    cases = [*PUZZLES[name].cases()]
    for what in cases[-1].mistakes:
        complaints = [compare.complaint(case, case.mistakes[what], PUZZLES[name].returns) for case in cases]
        assert any(complaints), what
        for case, said in zip(cases, complaints, strict=True):
            assert said is None or said[1].startswith(tuple(case.mistakes)), said
    for case in cases:
        assert not any(results is case.expected for results in case.mistakes.values())
        assert all(limit.most is None or limit.most >= getattr(case.target, limit.measure) for limit in case.limits)


def tree(rank):
    SOLUTIONS["broadcast"](rank, np.ones(3, np.float32))


def chain(rank):
    if rank.index:
        rank.recv(np.ones(2), rank.index - 1)
    if rank.index < rank.size - 1:
        rank.send(np.ones(2), rank.index + 1)


def ring_and_tree_without_waiting(rank):
    works = [rank.reduce_scatter(np.ones(8), async_op=True),
             rank.all_reduce(np.ones(8), algorithm="tree", async_op=True)]
    return [work.wait() for work in works]


def test_steps_are_the_hops_of_the_longest_chain():
    for program, ranks, steps in ((tree, 1, 0), (tree, 2, 1), (tree, 3, 2), (tree, 4, 2), (tree, 5, 3), (tree, 9, 4),
                                  (chain, 4, 3), (ring_and_tree_without_waiting, 4, 3 + 4)):
        cluster = zs.Cluster(ranks)
        cluster.run(program)
        assert watching.steps_in_sequence(cluster.trace) == steps, (program, ranks)


def test_what_ranks_could_not_run_in_the_order_of_issue_is_refused():
    def answer(rank, x):
        def message():
            rank.exchange(x, (rank.index + 1) % rank.size, x.copy(), (rank.index - 1) % rank.size)

        if rank.index:
            message()
        work = rank.all_reduce(x, async_op=True)
        if not rank.index:
            message()
        total = work.wait()
        total /= rank.size
        return total

    assert refusal("mean", answer).startswith("On N=2 (n=1) on one communication stream for each rank, in the order")


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
    assert puzzles.show("mean")._repr_html_().startswith("<pre>The mean of one number\n")


def test_a_refusal_shows_its_sentence_and_no_table_with_nothing_unescaped():
    score = puzzles.check("mean", answer_of("mean", "def mean(rank, x):\n    raise ValueError('<b>&')"))
    assert repr(score) == "mean: not yet\n  On N=1 (n=1) rank 0 raised ValueError in line 2 of mean: <b>&."
    assert "<p><strong>mean: not yet</strong></p><p>On N=1 (n=1) rank 0 raised" in score._repr_html_()
    assert "&lt;b&gt;&amp;" in score._repr_html_()
    assert "<table>" not in score._repr_html_()
    assert_refused(lambda: puzzles.hole("add your own copy"), "add your own copy", NotImplementedError)
