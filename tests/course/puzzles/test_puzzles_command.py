"""``zerosim puzzles`` as one types it."""

import json

import pytest

from tests.support import ask
from zerosim.course import puzzles

WRONG, NOT_PASSED = 2, 1


@pytest.fixture
def answers(tmp_path):
    """A file with a right answer, a wrong one and one with a hole."""
    file = tmp_path / "answers.py"
    file.write_text("import zerosim as zs\n\n\ndef right(rank, x):\n    total = rank.all_reduce(x)\n"
                    "    total /= rank.size\n    return total\n\n\ndef wrong(rank, x):\n    return rank.all_reduce(x)\n"
                    "\n\ndef unfilled(rank, x):\n    return zs.puzzles.hole('which collective?')\n")
    return str(file)


def test_without_a_name_all_puzzles_are_listed_in_a_narrow_table():
    done = ask("puzzles")
    assert done.exit_code == 0
    assert all(f"  {name} " in done.stdout and puzzle.title in done.stdout for name, puzzle in puzzles.PUZZLES.items())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_name_prints_the_statement_and_options_print_one_thing_each():
    assert "Chunk c starts on rank\nc+1 and goes once round" in ask("puzzles", "ring").stdout
    assert ask("puzzles", "ring", "--hint", "1").stdout.startswith("Hint 1 of 3: ")
    assert ask("puzzles", "ring", "--stub").stdout.startswith(
        "import numpy as np\n\nimport zerosim as zs\n\n\ndef ring(rank, x):")
    assert ask("puzzles", "ring", "--solution").stdout.startswith("def ring(rank: Rank, x: Array)")


@pytest.mark.parametrize(("function", "code", "said"), [
    ("right", 0, "mean: passed ★★★"), ("wrong", NOT_PASSED, "On N=2 (n=1) rank 0 returned the sum, and not the mean"),
    ("unfilled", NOT_PASSED, "mean: still open\n  A hole is open: which collective?.")])
def test_a_check_runs_a_function_of_a_file_and_ends_with_a_code_for_scripts(answers, function, code, said):
    done = ask("puzzles", "mean", "--check", f"{answers}:{function}")
    assert said in done.stdout
    assert done.exit_code == code


def test_files_of_one_name_in_several_folders_are_each_checked_by_what_stands_in_them(tmp_path):
    for student, body, said in (("ada", "rank.all_reduce(x) / rank.size", "passed"), ("bob", "x", "its own number"),
                                ("eve", "rank.all_reduce(x)", "returned the sum, and not the mean")):
        file = tmp_path / student / "homework.py"
        file.parent.mkdir()
        file.write_text(f"def mean(rank, x):\n    return {body}\n")
        assert said in ask("puzzles", "mean", "--check", f"{file}:mean").stdout


def test_a_stub_from_the_command_line_can_be_checked_as_it_is(tmp_path):
    file = tmp_path / "begun.py"
    file.write_text(ask("puzzles", "zero3", "--stub").stdout)
    done = ask("puzzles", "zero3", "--check", f"{file}:zero3")
    assert "A hole is open: gather this layer's weights." in done.stdout
    assert done.exit_code == NOT_PASSED


def test_json_has_all_that_is_printed(answers):
    assert [one["name"] for one in json.loads(ask("puzzles", "--json").stdout)["puzzles"]] == puzzles.names()
    one = json.loads(ask("puzzles", "ring", "--json").stdout)
    assert one["allowed"] == ["exchange"]
    assert one["sizes"]["4"] == [3, 8, 9]
    assert json.loads(ask("puzzles", "ring", "--hint", "2", "--json").stdout)["hint"] == 2
    found = json.loads(ask("puzzles", "mean", "--check", f"{answers}:wrong", "--json").stdout)
    assert (found["verdict"], found["targets_met"]) == ("refused", [])


@pytest.mark.parametrize(("arguments", "said"), [
    (["rng"], "did you mean 'ring'?"), (["ring", "--hint", "7"], "no hint 7 for 'ring'; there are hints 1 to 3"),
    (["--hint", "1"], "--hint is about one puzzle; name it: zerosim puzzles ring --hint"),
    (["ring", "--hint", "1", "--solution"], "--hint and --solution were given; ask for one thing at a time"),
    (["ring", "--check", "nowhere.py:f"], "no file 'nowhere.py' to take the function 'f' from"),
    (["ring", "--check", "nowhere"], "no program in 'nowhere'; write FILE.py:FUNCTION")])
def test_what_makes_no_sense_is_one_line_and_exit_code_2(arguments, said):
    done = ask("puzzles", *arguments)
    assert done.exit_code == WRONG
    assert said in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(("text", "said"), [
    ("import sys\n\n\ndef mean(rank, x):\n    sys.exit(0)\n",
     "On N=1 (n=1) rank 0 raised SystemExit in line 5 of mean: 0."),
    ("import sys\n\nsys.exit(0)\n", "On N=1 (n=1) rank 0 raised SystemExit in line 3 of <module>: 0."),
    ("def mean(rank, x)\n    return x\n",
     "On N=1 (n=1) rank 0 raised SyntaxError: expected ':' (answered.py, line 1)."),
    ("import nothing_of_the_kind\n", "rank 0 raised ModuleNotFoundError in line 1 of <module>: No module named ")])
def test_a_file_that_exits_or_cannot_be_run_has_not_passed(text, said, tmp_path):
    file = tmp_path / "answered.py"
    file.write_text(text)
    done = ask("puzzles", "mean", "--check", f"{file}:mean")
    assert done.exit_code == NOT_PASSED, done.output
    assert said in done.stdout
