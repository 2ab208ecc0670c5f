"""The notebook with holes: its cells are the puzzles', it runs as it stands, and filled with solutions it passes."""

import importlib.util
import inspect
import json
from functools import cache

import pytest

from tests.architecture.source import ROOT
from tests.notebooks.cells import cells, committed, displayed_in, executed, printed_in
from zerosim.course import puzzles
from zerosim.course.puzzles.solutions import SOLUTIONS

TEXT = ROOT / "notebooks/puzzles.py"
COPY = TEXT.with_suffix(".ipynb")
SOURCE = TEXT.read_text(encoding="utf-8")
NAMES = puzzles.names()


@cache
def shown():
    """What each code cell shows when it is run now, as it stands."""
    return list(executed(SOURCE))


def stub_of(name):
    """A puzzle's stub without its imports, which the notebook makes once."""
    text = str(puzzles.stub(name))
    return text[text.index("def "):].strip()


def test_every_puzzle_has_a_statement_its_stub_and_a_check_in_order():
    code = [cell.source.strip() for cell in cells(SOURCE) if cell.kind == "code"]
    assert code[1:-1] == [text for name in NAMES for text in (
        f'zs.puzzles.statement("{name}")', stub_of(name), f'zs.puzzles.check("{name}", {name})')]


def test_the_copy_has_the_cells_of_its_text_and_shows_what_they_show_now():
    assert [cell for cell, _ in committed(COPY)] == cells(SOURCE)
    outputs = [outputs for cell, outputs in committed(COPY) if cell.kind == "code"]
    assert [one for cell in outputs for one in cell if one["output_type"] == "error"] == []
    assert [printed_in(cell) for cell in outputs] == [cell.printed for cell in shown()]
    assert [displayed_in(cell).get("text/plain") for cell in outputs] == [
        None if cell.displayed is None else repr(cell.displayed) for cell in shown()]


def test_with_open_holes_every_check_says_so_without_an_error():
    verdicts = [cell.displayed.verdict for cell in shown() if isinstance(cell.displayed, puzzles.Score)]
    assert verdicts == ["open"] * (len(NAMES) - 1) + ["refused"]  # the last one is broken, and has no hole


def test_filled_with_solutions_every_check_passes():
    text = SOURCE
    for name in NAMES:
        assert text.count(stub_of(name)) == 1
        text = text.replace(stub_of(name), inspect.getsource(SOLUTIONS[name]).strip())
    imports = "from zerosim.course.puzzles.solutions import Any, Array, Callable, Rank, Work\n"
    shown = list(executed(text.replace("import zerosim as zs\n", "import zerosim as zs\n" + imports, 1)))
    assert [cell.displayed.stars for cell in shown if isinstance(cell.displayed, puzzles.Score)] == ["★★★"] * len(NAMES)
    assert shown[-1].printed.count("passed   ★★★") == len(NAMES)


def test_the_copy_records_no_times_and_no_versions():
    notebook = json.loads(COPY.read_text(encoding="utf-8"))
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert {json.dumps(cell["metadata"]) for cell in notebook["cells"]} == {"{}"}


@pytest.mark.slow  # a kernel takes long; one is started for the first notebook
def test_jupyter_executes_the_text_into_the_same_file():
    for module in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(module, reason=f"{module} is not installed; pip install 'zerosim[notebook]'")
    spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks/execute.py")
    execute = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execute)
    assert execute.written(TEXT) == COPY.read_text(encoding="utf-8"), "it has changed: read it, then `make notebooks`"
