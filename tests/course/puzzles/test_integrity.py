"""An answer that changes the checker, looks behind its rank by way of others, or prints verdicts, fools nobody."""

import builtins
import json

import numpy as np
import pytest

from tests.course.puzzles.answers import refusal
from tests.support import ask
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES, checker, compare, grading, solutions
from zerosim.ranks import Cluster


def replaces(change):
    """An answer that is wrong, and whose first deed is to change something."""
    def answer(rank, x):
        change()
        return rank.all_reduce(x)

    return answer


def always_right():
    compare.wrong_result.__code__ = (lambda case, found, names: None).__code__


def nothing_is_wrong():
    checker.wrong_result = lambda *given: None


def all_is_finite():
    np.isfinite = lambda x: True


def another_puzzle():
    PUZZLES["mean"] = PUZZLES["ring"]


def any_run_is_good():
    Cluster.run = lambda self, program, *args: None


def no_difference():
    builtins.zip = lambda *given, **options: []


def nothing_can_be_put_back():
    builtins.isinstance = builtins.setattr = lambda *given: True
    no_difference()


def no_difference_in_one_place():
    compare.zip = lambda *given, **options: []


CHANGES = {"zerosim.course.puzzles.compare.wrong_result": always_right,
           "zerosim.course.puzzles.checker.wrong_result": nothing_is_wrong,
           "numpy.isfinite": all_is_finite, "builtins.zip": no_difference,
           "builtins.isinstance": nothing_can_be_put_back,
           "zerosim.course.puzzles.compare.zip": no_difference_in_one_place,
           "zerosim.ranks.cluster.Cluster.run": any_run_is_good}


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_answer_replaces_is_put_back_and_named(name):
    before = compare.wrong_result.__code__, checker.wrong_result, np.isfinite, zip, setattr, Cluster.run
    for score in (puzzles.check("mean", replaces(CHANGES[name])), grading.grade_ddp(replaces(CHANGES[name]))):
        assert score.sentence == (f"It replaced {name}; an answer may use the package and NumPy, and leaves them as "
                                  "they are.")
        assert not score.passed
        assert (compare.wrong_result.__code__, checker.wrong_result, np.isfinite, zip, setattr, Cluster.run) == before
    assert puzzles.check("mean", solutions.mean).passed


def test_a_table_of_puzzles_cannot_be_changed():
    assert refusal("mean", replaces(another_puzzle)).startswith("On N=4 (n=1) rank 0 raised TypeError in line ")


def test_what_is_printed_stands_in_the_score_apart_and_only_its_beginning(capsys):
    def answer(rank, x):
        print("mean: passed ★★★\n" * 1000)
        return x

    score = puzzles.check("mean", answer)
    assert capsys.readouterr().out == ""
    assert len(score.printed) == 1000
    assert repr(score).startswith("mean: not yet\n  On N=4 (n=1) rank 0 returned its own number: ")
    assert "\n  It printed:\n      mean: passed ★★★\n" in repr(score)
    assert puzzles.check("mean", solutions.mean).printed == ""


def test_the_verdict_of_the_command_is_all_of_its_output_whatever_a_file_prints(tmp_path):
    file = tmp_path / "answer.py"
    file.write_text('print(\'{"verdict": "passed"}\')\n\n\ndef mean(rank, x):\n    print(\'{"verdict": "passed"}\')\n'
                    "    return x\n")
    done = ask("puzzles", "mean", "--check", f"{file}:mean", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["verdict"] == "refused"
    assert json.loads(done.stdout)["printed"].startswith('{"verdict": "passed"}\n')
