"""The graders of a course's three functions: right ones pass bit for bit, and the page about them is true."""

import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT
from tests.course.puzzles.answers import score_of
from tests.support import assert_refused
from zerosim.course import puzzles
from zerosim.course.puzzles import grading, solutions


@pytest.mark.parametrize("name", grading.GRADERS)
def test_a_right_function_equals_the_engine_on_every_world_and_meets_its_bytes(name):
    score = score_of(name, getattr(solutions, name))
    assert score.passed, score
    assert score.stars == "★★★", score
    assert [row.ranks for row in score.rows] == [4, 1, 2, 3, 5, 8]
    assert "Equal to the engine on N = 1, 2, 3, 4, 5, 8, bit for bit, in 3 steps." in repr(score)


def test_a_function_with_a_hole_is_open_and_what_exits_or_is_no_function_is_refused():
    score = grading.grade_ddp(lambda rank, module: puzzles.hole("wrap the module"))
    assert (score.verdict, score.sentence) == ("open", "A hole is open: wrap the module.")
    assert_refused(lambda: grading.grade_fsdp(3), "get_fsdp must be a function, found 3; hand it over without calling")

    def leaves(*given):
        raise SystemExit(0)

    for grade in grading.GRADERS.values():
        assert grade(leaves).sentence.startswith("On N=4 rank 0 raised SystemExit in line ")


def test_a_folder_of_answers_is_graded_by_the_loop_of_the_page_with_the_lines_that_it_shows(tmp_path):
    page = (ROOT / "docs/puzzles_in_class.md").read_text(encoding="utf-8").partition("## A folder of answers")[2]
    loop, shown = (page.split(f"```{kind}\n")[1].partition("```")[0] for kind in ("sh", "text"))
    answers = tmp_path / "answers"
    answers.mkdir()
    right = str(puzzles.solution("ring"))
    (answers / "ada.py").write_text(right, encoding="utf-8")
    (answers / "ben.py").write_text(right.replace("return", "return 2 *"), encoding="utf-8")
    done = subprocess.run(["sh", "-c", loop.replace("zerosim", f"{sys.executable} -m zerosim")], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, encoding="utf-8")
    assert done.stdout == shown
    assert "rank 0" in (answers / "ben.txt").read_text(encoding="utf-8")


def test_the_page_about_grading_runs_as_it_stands():
    page = (ROOT / "docs/puzzles_in_class.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    space = {}
    exec(compile("\n".join(blocks), "page.py", "exec"), space)
    assert space["score"].passed
    assert space["refused"].sentence in " ".join(page.split())
