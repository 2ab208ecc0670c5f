"""The notebook with holes: its cells are the puzzles', it runs as it stands, and a solution in it passes."""

import inspect

from tests.architecture.source import ROOT
from tests.notebooks.cells import cells, executed
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES, solutions

SOURCE = (ROOT / "notebooks/puzzles.py").read_text(encoding="utf-8")


def scores(text):
    """Of each puzzle the stars of its check, and the last cell's words."""
    shown = list(executed(text))
    return [one.displayed for one in shown if isinstance(one.displayed, puzzles.Score)], shown[-1].printed


def test_every_puzzle_has_a_statement_its_stub_and_a_check_in_order():
    code = [cell.source.strip() for cell in cells(SOURCE) if cell.kind == "code"]
    assert code[1:-1] == [text for name in puzzles.names() for text in (
        f'zs.puzzles.statement("{name}")', PUZZLES[name].function.strip(), f'zs.puzzles.check("{name}", {name})')]


def test_with_open_holes_every_check_says_so_and_a_solution_in_the_place_of_its_stub_passes():
    names, text = puzzles.names(), SOURCE
    for name in ("mean", "repair"):
        text = text.replace(PUZZLES[name].function.strip(), inspect.getsource(solutions.SOLUTIONS[name]).strip())
    imports = "from zerosim.course.puzzles.solutions import Any, Array, Rank\n"
    found, summary = scores(text.replace("import zerosim as zs\n", "import zerosim as zs\n" + imports, 1))
    assert [score.stars for score in found] == [
        "★★★" if name in ("mean", "repair") else "☆☆☆" for name in names]
    assert {score.verdict for score in found[1:-1]} == {"open"}
    assert summary.count("passed   ★★★") == 2
