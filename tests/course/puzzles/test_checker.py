"""The checker of any answer: what it lets pass, leaves behind, measures and shows."""

import json
import re
import tracemalloc

import greenlet
import numpy as np
import pytest

import zerosim as zs
from tests.course.puzzles.answers import answer_of, refusal
from tests.support import assert_refused, literally
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES, compare, score, solutions, watching

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
    in_a_group = answer_of("mean", ("rank.all_reduce(x)", "rank.new_group(range(rank.size)).all_reduce(x)"))
    assert puzzles.check("mean", in_a_group).passed, "whose messages a silenced rank does not hear either"


WASTEFUL = {  # what it says where a star is lost, by measure, and the change of the solution
    "zero2": ({"peak_nbytes": "holds 196 bytes at its fullest where 156 are enough (unit_gradient 160, workspace"},
              ("        del gradient", "        pass")),
    "gather": ({"peak_nbytes": "receive each chunk where it belongs; a second vector is not needed.$"},
               ("    whole = rank", "    spare = rank.memory.alloc(k, shard.dtype, 'workspace')\n    whole = rank")),
    "lamb": (dict.fromkeys(score.MEASURES, "") | {
        "sent_nbytes": "^On N=4 (n=9, b=3) a rank sends 120 bytes where 48 are enough: two numbers from each rank are"},
        ("    ratio = ", "    rank.all_gather(weights), rank.all_gather(direction)\n    ratio = ")),
    "overflow": ({"peak_nbytes": "", "sent_nbytes": "one flag of one byte from each rank"}, ("np.uint8", "np.float32")),
    "broadcast": ({"sent_nbytes": "^On N=8 (n=5) a rank sends 140 bytes where 60 are enough.$",
                   "steps": "7 steps in sequence where 3 are enough: ranks that have x already could send it on"},
                  """def broadcast(rank, x):
                      for other in range(1, rank.size):
                          if rank.index == 0:
                              rank.send(x, other)
                          elif rank.index == other:
                              rank.recv(x, 0)
                      return x"""),
    "zero1": (dict.fromkeys(score.MEASURES, "") | {
        "sent_nbytes": "36 bytes where 24 are enough: a rank needs the sum of its own shard only, and an all-reduce"},
        ("mean = rank.reduce_scatter(gradient)", "mean = rank.all_reduce(gradient)[own]")),
    "overlap": ({"peak_nbytes": ": more than two whole gradients are alive; wait for one before the next is sent on"},
                ("        if work is not None:\n            shards[layer + 1] = work.wait()\n            "
                 "shards[layer + 1] /= rank.size\n        work = rank", "        work = shards[layer] = rank"),
                ("        shards[0] = work.wait()\n        shards[0] /= rank.size\n",
                 "        shards = [one.wait() for one in shards]\n        for one in shards:\n"
                 "            one /= rank.size\n")),
}


@pytest.mark.parametrize("name", WASTEFUL)
def test_an_answer_that_is_right_but_wasteful_passes_and_loses_the_stars_that_it_is_told(name):
    said, *changes = WASTEFUL[name]
    found = puzzles.check(name, answer_of(name, *changes))
    assert found.passed, found
    lost = [measure for measure in score.MEASURES if measure not in found.targets_met]
    assert set(lost) == set(said), found
    assert found.stars == "★" * (3 - len(lost)) + "☆" * len(lost)
    for measure, sentence in zip(lost, found.wasted, strict=True):
        assert re.search(literally(said[measure]), sentence), sentence
        assert sentence in repr(found)


# -- ZeRO-3's memory is judged by what is there, kind by kind ----------------------------------------------------------

ZERO3 = {  # how many stars, what is told, and the changes of the solution; who holds gathered weights is refused
    "one kept until the next": ("★★★", "", ("        x = layer.forward(w, x)\n        del w",
                                                    "        x = layer.forward(w, x)")),
    "whole gradients kept": ("★★☆", r"unit_gradient \d+.*one layer's weights, one dx, one dw; a name", (
        "    n, inputs = len(x), []\n", "    n, inputs, kept = len(x), [], []\n"), (
        "        del dw\n", "        kept.append(dw)\n")),
    "dx kept": ("★★☆", r"activation_gradient \d+", (
        "    n, inputs = len(x), []\n", "    n, inputs, kept = len(x), [], []\n"),
                ("        del dx\n", "        kept.append(dx)\n")),
    "inputs kept": ("★★☆", r"\(.*activation \d+", ("inputs.pop()", "inputs[number]")),
}


@pytest.mark.parametrize("change", [
    pytest.param(change, marks=pytest.mark.slow) if change in ("dx kept", "inputs kept") else change
    for change in ZERO3])
def test_in_zero_3_waste_that_is_no_gathered_weights_costs_a_star_and_names_none(change):
    stars, said, *changes = ZERO3[change]
    found = puzzles.check("zero3", answer_of("zero3", *changes))
    assert (found.passed, found.stars) == (True, stars), found
    assert re.search(said, " ".join([found.sentence, *found.wasted])), found
    assert "gathered" not in repr(found), found


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
def test_every_known_mistake_is_wrong_somewhere_and_is_named(name):
    cases = [*PUZZLES[name].cases()]
    for what in cases[-1].mistakes:
        found = [compare.wrong_result(case, case.mistakes[what], PUZZLES[name].returns) for case in cases]
        assert any(found), what
        for case, said in zip(cases, found, strict=True):
            assert said is None or said[1].startswith(tuple(case.mistakes)), said
    for case in cases:
        assert not any(results is case.expected for results in case.mistakes.values())
        assert case.reasons.keys() <= set(score.MEASURES)


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

    assert refusal("mean", answer).startswith("On N=4 (n=1) on one communication stream for each rank, in the order")


def test_a_score_shows_measured_values_beside_targets_in_a_terminal_in_a_notebook_and_as_data():
    found = puzzles.check("ring", SOLUTIONS["ring"])
    text, html, data = repr(found), found._repr_html_(), json.loads(json.dumps(found.as_json()))
    assert text.startswith("ring: passed ★★★\n  Right on N = 1, 2, 3, 4, 5, 8 in 13 cases, bit for bit, ")
    assert re.search(r"^  8  n=19 +100 +100 +76 +76 +7 +7$", text, re.M)
    assert html.count("<tr>") == 1 + 13
    assert '<td>n=19</td><td class="n">100</td><td class="n">100</td>' in html
    measures, held = {"peak_nbytes": 100, "sent_nbytes": 76, "steps": 7}, {"workspace": 24, "input": 76}
    assert (data["verdict"], data["targets_met"]) == ("passed", list(measures))
    assert data["rows"][-1] == {"ranks": 8, "title": "n=19", **measures, "target": measures, "held": held}
    assert "within the stated bound" in puzzles.check("mean", SOLUTIONS["mean"]).sentence
    assert puzzles.show("mean")._repr_html_().startswith('<pre style="font-family: monospace">The mean of one number\n')


def test_a_refusal_shows_its_sentence_and_no_table_with_nothing_unescaped():
    found = puzzles.check("mean", answer_of("mean", "def mean(rank, x):\n    raise ValueError('<b>&')"))
    assert repr(found) == "mean: not yet\n  On N=4 (n=1) rank 0 raised ValueError in line 2 of mean: <b>&."
    assert "<p><strong>mean: not yet</strong></p><p>On N=4 (n=1) rank 0 raised" in found._repr_html_()
    assert "&lt;b&gt;&amp;" in found._repr_html_()
    assert "<table>" not in found._repr_html_()
    assert_refused(lambda: puzzles.hole("add your own copy"), "add your own copy", NotImplementedError)
