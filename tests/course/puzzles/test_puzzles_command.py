"""``zerosim puzzles`` as one types it."""

import json
import multiprocessing
import subprocess
import sys

import pytest

from tests.support import ask
from zerosim.cli import puzzles as puzzles_command
from zerosim.course import puzzles

PASSED, NOT_PASSED, WRONG = 0, 1, 2

ANSWERS = """
import zerosim as zs


def right(rank, x):
    total = rank.all_reduce(x)
    total /= rank.size
    return total


def wrong(rank, x):
    return rank.all_reduce(x)


def unfilled(rank, x):
    return zs.puzzles.hole('which collective?')
"""


@pytest.fixture(autouse=True, scope="module")
def processes_begin_with_the_package_imported():
    """Forked from one that has it, not spawned: what the command does in its process is the same, in less time."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["zerosim.cli.puzzles", "zerosim.course.puzzles.grading", "zerosim.course.running"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: forked)
        yield


@pytest.fixture
def about(tmp_path):
    """Asks about a file of this text, which the arguments call FILE."""
    def ask_about(text, *arguments, file="answers.py"):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return ask("puzzles", *(argument.replace("FILE", str(path)) for argument in arguments))
    return ask_about


def test_without_a_name_all_puzzles_are_listed_in_a_narrow_table():
    done = ask("puzzles")
    assert done.exit_code == PASSED
    assert all(f"  {name} " in done.stdout and puzzle.title in done.stdout for name, puzzle in puzzles.PUZZLES.items())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_name_prints_the_statement_and_options_print_one_thing_each():
    asked = ask("puzzles", "ring").stdout
    assert "Chunk c starts on rank\nc+1 and goes once round" in asked
    assert "Allowed:\n    rank.exchange(send, to, out, source)  array send goes to rank `to`, while\n" in asked
    assert ask("puzzles", "ring", "--hint", "1").stdout.startswith("Hint 1 of 3: ")
    assert ask("puzzles", "ring", "--stub").stdout.startswith(
        "import numpy as np\n\nimport zerosim as zs\n\n\ndef ring(rank, x):")
    assert "\ndef ring(rank: Rank, x: Array)" in ask("puzzles", "ring", "--solution").stdout


CHECK, GRADE = ("mean", "--check", "FILE:mean"), ("--grade", "FILE")
UNJUDGED = "The process ended with code 0 and without a verdict; let the function return."
FIRST = "On N=4 (n=1) rank 0 raised "


@pytest.mark.parametrize(("text", "arguments", "code", "said"), [
    (ANSWERS, ("mean", "--check", "FILE:right"), PASSED, "mean: passed ★★★"),
    (ANSWERS, ("mean", "--check", "FILE:wrong"), NOT_PASSED, "On N=4 (n=1) rank 0 returned the sum, and not the mean"),
    (ANSWERS, ("mean", "--check", "FILE:unfilled"), NOT_PASSED,
     "mean: still open\n  A hole is open: which collective?\n"),
    ("import sys\nsys.exit(0)", CHECK, NOT_PASSED, FIRST + "SystemExit in line 2 of <module>: 0."),
    ("import os\nos._exit(0)", CHECK, NOT_PASSED, UNJUDGED),
    ("import os\n\n\ndef mean(rank, x):\n    getattr(os, '_ex' + 'it')(0)", CHECK, NOT_PASSED, UNJUDGED),
    ("def mean(rank, x)\n    pass", CHECK, NOT_PASSED, FIRST + "SyntaxError: expected ':' (answers.py, line 1)."),
    ("from zerosim.course.puzzles.solutions import get_sharded_optimizer as theirs\n"
     "get_sharded_optimizer = theirs\n\n\ndef get_ddp(rank, module):\n    return module", GRADE, NOT_PASSED,
     "get_ddp: not yet\n  On N=4 after get_ddp rank 1 did not take rank 0's first values"),
    ("from zerosim.course.puzzles.solutions import ShardedOptimizer as get_sharded_optimizer", GRADE, PASSED,
     "get_sharded_optimizer: passed ★★★"),
    ("class get_ddp: pass\nraise RuntimeError('at import')", GRADE, NOT_PASSED,
     "rank 0 raised RuntimeError in line 2 of <module>: at import."),
    ("def get_ddp(rank, module)\n    pass", GRADE, WRONG, "cannot be graded: line 1 is not Python: expected ':'"),
    ("# Größe".encode("latin-1"), GRADE, WRONG, "answers.py cannot be graded: 'utf-8' codec can't decode byte"),
    ("", GRADE, WRONG, "defines none of get_ddp, get_sharded_optimizer, get_fsdp; write at least one"),
    ("", ("--grade", "nowhere.py"), WRONG, "no file 'nowhere.py' to grade"),
    ("", ("ring", *GRADE), WRONG, "--grade takes a file and nothing else"),
    ("", ("rng",), WRONG, "did you mean 'ring'?"),
    ("", ("--hint", "1"), WRONG, "--hint is about one puzzle; name it: zerosim puzzles ring --hint"),
    ("", ("ring", "--hint", "1", "--solution"), WRONG, "--hint and --solution were given; ask for one thing"),
    ("", ("ring", "--check", "nowhere.py:f"), WRONG, "no file 'nowhere.py' to take the function 'f' from"),
    ("", ("ring", "--check", "nowhere"), WRONG, "no program in 'nowhere'; write FILE.py:FUNCTION")])
def test_a_file_is_checked_or_graded_with_a_code_for_scripts_and_what_makes_no_sense_is_one_line(
        about, text, arguments, code, said):
    done = about(text, *arguments)
    assert done.exit_code == code, done.output
    assert said in done.output
    if code == WRONG:
        assert done.output.count("\n") == 1
    elif arguments == GRADE:
        assert '"grades": [' in about(text, *GRADE, "--json").stdout


def test_a_file_that_asks_to_end_the_process_with_0_when_it_ends_anyway_ends_it_with_1(tmp_path):
    (tmp_path / "answer.py").write_text("import atexit, os\n\n\natexit.register(lambda: os._exit(0))\n\n\n"
                                        "def mean(rank, x):\n    return x\n")
    done = subprocess.run([sys.executable, "-m", "zerosim", "puzzles", "mean", "--check", "answer.py:mean"],
                          cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "returned its own number" in done.stdout) == (NOT_PASSED, True), done.stderr


def test_a_file_that_nothing_interrupts_ends_with_its_process_and_is_refused(about, monkeypatch):
    monkeypatch.setattr(puzzles_command, "MINUTES", 0.01)
    done = about("mean = None\nwhile True:\n    try:\n        while True:\n            pass\n"
                 "    except BaseException:\n        continue\n", *CHECK)
    assert done.exit_code == NOT_PASSED
    assert "It has not ended after 0.01 minutes; let the function return." in done.stdout


def test_files_of_one_name_in_several_folders_are_each_checked_by_what_stands_in_them(about):
    for student, body, said in (("ada", "rank.all_reduce(x) / rank.size", "passed"), ("bob", "x", "its own number"),
                                ("eve", "rank.all_reduce(x)", "returned the sum, and not the mean")):
        assert said in about(f"def mean(rank, x):\n    return {body}\n", *CHECK, file=f"{student}/homework.py").stdout


def test_a_stub_from_the_command_line_can_be_checked_as_it_is(about):
    done = about(ask("puzzles", "zero3", "--stub").stdout, "zero3", "--check", "FILE:zero3")
    assert "A hole is open: gather this layer's weights." in done.stdout
    assert done.exit_code == NOT_PASSED


def test_json_has_all_that_is_printed(about):
    assert [one["name"] for one in json.loads(ask("puzzles", "--json").stdout)["puzzles"]] == puzzles.names()
    one = json.loads(ask("puzzles", "ring", "--json").stdout)
    assert one["allowed"] == ["exchange"]
    assert one["sizes"]["4"] == [4, 3, 8, 9]
    assert json.loads(ask("puzzles", "ring", "--hint", "2", "--json").stdout)["hint"] == 2
    found = json.loads(about(ANSWERS, "mean", "--check", "FILE:wrong", "--json").stdout)
    assert (found["verdict"], found["targets_met"]) == ("refused", [])
