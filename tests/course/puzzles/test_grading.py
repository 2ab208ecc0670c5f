"""The graders of a course's three functions: right ones pass bit for bit; files are graded; the page is true."""

import pytest

from tests.architecture.source import ROOT
from tests.course.puzzles.answers import score_of
from tests.support import ask, assert_refused
from zerosim.course import puzzles
from zerosim.course.puzzles import grading, solutions


@pytest.mark.parametrize("name", grading.GRADERS)
def test_a_right_function_equals_the_engine_on_every_world_and_meets_its_bytes(name):
    score = score_of(name, getattr(solutions, name))
    assert score.passed, score
    assert score.stars == "★★★", score
    assert [row.ranks for row in score.rows] == [1, 2, 3, 4, 5, 8]
    assert "Equal to the engine on N = 1, 2, 3, 4, 5, 8, bit for bit, in 3 steps." in repr(score)


def test_a_function_with_a_hole_is_open_and_what_exits_or_is_no_function_is_refused():
    score = grading.grade_ddp(lambda rank, module: puzzles.hole("wrap the module"))
    assert (score.verdict, score.sentence) == ("open", "A hole is open: wrap the module.")
    assert_refused(lambda: grading.grade_fsdp(3), "get_fsdp must be a function, found 3; hand it over without calling")

    def leaves(*given):
        raise SystemExit(0)

    for grade in grading.GRADERS.values():
        assert grade(leaves).sentence.startswith("On N=1 rank 0 raised SystemExit in line ")


def test_the_page_about_grading_runs_as_it_stands_and_the_graders_former_name_works():
    page = (ROOT / "docs/puzzles_in_class.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    space = {}
    exec(compile("\n".join(blocks), "page.py", "exec"), space)
    assert space["score"].passed
    assert space["refused"].sentence in " ".join(page.split())
    with pytest.warns(DeprecationWarning, match="now called zs.puzzles.grading"):
        assert puzzles.adapters is grading


@pytest.mark.parametrize(("text", "code", "said"), [
    ("from zerosim.course.puzzles.solutions import get_sharded_optimizer as theirs\n\n"
     "get_sharded_optimizer = theirs\n\n\ndef get_ddp(rank, module):\n    return module\n", 1,
     ["get_ddp: not yet\n  On N=2 after get_ddp rank 1 did not take rank 0's first values",
      "get_sharded_optimizer: passed ★★★"]),
    ("from zerosim.course.puzzles.solutions import ShardedOptimizer as get_sharded_optimizer\n", 0,
     ["get_sharded_optimizer: passed"]),
    ("def get_ddp(rank, module)\n    return module\n", 2,
     ["homework.py cannot be graded: line 1 is not Python: expected ':'"]),
    ("class get_ddp: pass\nraise RuntimeError('at import')\n", 1,
     ["rank 0 raised RuntimeError in line 2 of <module>: at import."]),
    ("", 2, ["defines none of get_ddp, get_sharded_optimizer, get_fsdp; write at least one"])])
def test_a_file_is_graded_from_the_command_line(text, code, said, tmp_path):
    file = tmp_path / "homework.py"
    file.write_text(text)
    done = ask("puzzles", "--grade", str(file))
    assert done.exit_code == code, done.output
    assert all(words in done.output for words in said), done.output
    if code < 2:
        assert '"grades": [' in ask("puzzles", "--grade", str(file), "--json").stdout


def test_what_cannot_be_graded_is_one_line_and_exit_code_2(tmp_path):
    latin = tmp_path / "latin.py"
    latin.write_bytes("# Größe".encode("latin-1"))
    for arguments, said in ((["--grade", "nowhere.py"], "no file 'nowhere.py' to grade"),
                            (["--grade", str(latin)], "latin.py cannot be graded: 'utf-8' codec can't decode byte"),
                            (["ring", "--grade", "x.py"], "--grade takes a file and nothing else")):
        done = ask("puzzles", *arguments)
        assert (done.exit_code, done.output.count("\n")) == (2, 1)
        assert said in done.output
