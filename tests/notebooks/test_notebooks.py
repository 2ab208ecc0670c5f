"""Every notebook runs from top to bottom, and its executed copy is what it does today."""

import ast
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from tests.architecture.source import ROOT
from tests.backends.worlds import mpi_missing
from tests.cases import THOROUGH, chosen
from tests.display.seen import data_of, pixels_of, shows_the_same
from tests.notebooks.cells import Shown, cells, changed, committed, displayed_in, executed, picture_in, printed_in
from zerosim.course import figures, puzzles
from zerosim.course.puzzles import solutions
from zerosim.display import drawing

FOLDER = ROOT / "notebooks"
OF_TEXTS = FOLDER / "texts"
TEXTS = sorted(OF_TEXTS.glob("[0-9]*.py"))
FIRST, PUZZLES = OF_TEXTS / "01_the_worked_example.py", OF_TEXTS / "puzzles.py"


def copy_of(text: Path) -> Path:
    """The executed copy of a text."""
    return FOLDER / f"{text.stem}.ipynb"


EVERY = pytest.mark.parametrize("text", [*TEXTS, PUZZLES], ids=lambda text: text.stem)
REVEALED = re.compile(r"^ *predictions\.reveal\((\d+), ", re.M)
FOLDED = re.compile(r"^<details><summary>Answers? to questions? (\d)(?: and (\d))?</summary>\n\n(?:.+\n)+</details>$",
                    re.M)
PROMPT = "{}. type your prediction above, and run its cell and this one again\n"
NUMBERED = pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)


# A daily run draws no figure of a long training, and a proof that goes through many worlds goes through one; of these
# notebooks a loop is shorter too. A changed cell and the next one, which may print what it found, show a part of what
# their copies show. A thorough run does all.
LONG_TRAININGS = re.compile(r"^zs\.draw\.(?:adam_states|loss_scale|stages)\(.*\)$", re.M)
WORLDS = re.compile(r"^(for (?:ranks|count) in) \(1, 2, 3, (?:4, 5, 8|4, 6|5)\):$", re.M)
SHORTER = {
    "02": ('for name in ("fp16", "bf16"):\n    for keep_master in (True, False):\n        losses, _,',
           'for name in ("bf16",):\n    for keep_master in (False,):\n        losses, _,'),
    "05": ('for rule in ("sum_then_divide", "divide_then_sum", "split")', 'for rule in ("split",)'),
    "09": ("for ranks in (1, 2, 3, 4, 5, 8):\n", "for ranks in (8,):\n"),
    "12": ("zs.optim.Adam(), zs.optim.Lion(), LAMB, zs.optim.LARS(), zs.optim.Adafactor(),\n"
           "    zs.optim.Muon(), zs.optim.Shampoo(), zs.optim.SOAP(), zs.optim.KFAC())]", "LAMB, zs.optim.Muon())]"),
    "17": ("rows = []\nfor bit in names:\n", "rows = []\nfor bit in [15]:\n"),
    "20": ("zs.Cluster(8) for way in WAYS}", "zs.Cluster(8) for way in WAYS[::5]}"),
}


def as_run(text: Path) -> str:
    """A notebook's text as it is run here."""
    if THOROUGH:
        return text.read_text(encoding="utf-8")
    loops = [SHORTER[text.stem[:2]]] if text.stem[:2] in SHORTER else []
    *before, mark, proof = changed(text, *loops).rpartition("\n# %%\n")
    return LONG_TRAININGS.sub("None", "".join([*before, mark, WORLDS.sub(r"\1 (3,):", proof)]))


def is_part(now: str | None, then: str | None) -> bool:
    """True where each line, or row of a table, stands in what was shown then, in its order; nothing only in nothing."""
    rows = [[" ".join(row.split()) for row in re.split(r"\n|(?<=</tr>)|(?=<tr>)", shown) if row]
            for shown in (now or "", then or "")]
    rest = iter(rows[1])
    return bool(rows[0]) == bool(rows[1]) and all(row in rest for row in rows[0])


@contextmanager
def data_of_figures_measured_once() -> Iterator[None]:
    """What a cell asks of a committed figure's data, without changes, has been or will be measured for its own test."""
    measured = figures.Figure.data

    def data(figure: figures.Figure, *given: Any, **named: Any) -> Any:
        defaults = {name: one.default for name, one in inspect.signature(figure.make_data).parameters.items()}
        is_committed = not given and all(value == defaults[name] for name, value in named.items())
        return data_of(figure.name) if is_committed else measured(figure, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures.Figure, "data", data)
        yield


@cache
def shown(text: Path) -> list[Shown]:
    """What each code cell of a notebook shows when it is run now."""
    with data_of_figures_measured_once():
        return list(executed(as_run(text)))


def skip_if_drawn_elsewhere(png: bytes) -> None:
    """Another version may place an edge elsewhere, or pack the same pixels into other bytes."""
    there, here = pixels_of(png)[0], drawing.drawn_with()
    if there != here:
        pytest.skip(f"the picture was drawn with {there}, here is {here}")


def skip_without_processes(text: Path) -> None:
    """The notebook about processes says so where there are none, and its copy has them."""
    reason = mpi_missing()
    if text.stem.startswith("15_") and reason is not None:
        pytest.skip(f"MPI: {reason}")


def test_every_text_has_its_copy_and_every_copy_its_text():
    assert sorted(FOLDER.glob("*.ipynb")) == [copy_of(text) for text in (*TEXTS, PUZZLES)]


@EVERY
def test_a_copy_has_the_cells_of_its_text_and_records_no_times_and_no_versions(text):
    notebook = json.loads(copy_of(text).read_text(encoding="utf-8"))
    assert [cell for cell, _ in committed(copy_of(text))] == cells(text.read_text(encoding="utf-8"))
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    folded = [cell["id"] for before, cell in pairwise(code)
              if REVEALED.search("".join(before["source"])) and not REVEALED.search("".join(cell["source"]))
              and picture_in(cell["outputs"]) is None]
    for cell in notebook["cells"]:
        assert cell["metadata"] == ({"jupyter": {"outputs_hidden": True}} if cell["id"] in folded else {})
        if cell["id"] in folded and printed_in(cell["outputs"]):
            assert printed_in(cell["outputs"]).startswith("measured:\n"), "JupyterLab shows the first line of the fold"
    assert [cell["id"] for cell in notebook["cells"]] == [f"cell-{i:02d}" for i in range(len(notebook["cells"]))]


@EVERY
def test_no_line_of_code_is_longer_than_jupyterlab_shows_on_a_small_laptop(text):
    """107 letters at a width of 1280 pixels, as `test_jupyterlab.py` sees in a browser."""
    lines = [line for cell in cells(text.read_text(encoding="utf-8")) if cell.kind == "code"
             for line in cell.source.splitlines()]
    assert [line for line in lines if len(line) > 107] == []


@EVERY
def test_a_copy_shows_what_the_cells_show_now(text):
    skip_without_processes(text)
    outputs = [outputs for cell, outputs in committed(copy_of(text)) if cell.kind == "code"]
    assert [one for cell in outputs for one in cell if one["output_type"] == "error"] == []
    sources = [[cell.source for cell in cells(whole) if cell.kind == "code"]
               for whole in (text.read_text(encoding="utf-8"), as_run(text))]
    before = False
    for source, ran, then, now in zip(*sources, outputs, shown(text), strict=True):
        both = [(now.printed, printed_in(then))]
        for kind, method in (("text/plain", "__repr__"), ("text/html", "_repr_html_")):
            has = now.displayed is not None and hasattr(now.displayed, method)
            both.append((getattr(now.displayed, method)() if has else None, displayed_in(then).get(kind)))
        shorter = ran != source
        if not LONG_TRAININGS.fullmatch(source) or THOROUGH:
            assert [pair for pair in both if not (is_part(*pair) if shorter or before else pair[0] == pair[1])] == []
        before = shorter


@pytest.mark.parametrize("text", chosen(TEXTS[1::4], TEXTS), ids=lambda text: text.stem)
def test_a_copys_pictures_are_those_that_the_cells_draw_now(text):
    pictures = 0
    for (_, outputs), cell in zip([both for both in committed(copy_of(text)) if both[0].kind == "code"],
                                  shown(text), strict=True):
        then = picture_in(outputs)
        assert (then is not None) == hasattr(cell.displayed, "_repr_png_")
        if then is not None:
            skip_if_drawn_elsewhere(then[0])
            now = cell.displayed._repr_png_()
            assert shows_the_same(name_of(cell.displayed), then[0], now[0])
            assert then[1] == now[1]
            pictures += 1
    assert pictures >= 1, "a notebook has a picture"


def name_of(displayed: Any) -> str:
    """The name of a drawing, of a plot's, or of the first picture of some knobs."""
    return getattr(displayed, "drawing", getattr(displayed, "first", displayed)).name


@NUMBERED
def test_a_notebook_asks_first_and_proves_last(text):
    found = cells(text.read_text(encoding="utf-8"))
    words = "\n".join(cell.source for cell in found if cell.kind == "markdown")
    assert words.index("## Predict first") < words.index("## Try it") < words.index("## Proof")
    assert found[-1].kind == "code"
    assert "tobytes() ==" in found[-1].source


@pytest.mark.parametrize("text", TEXTS[17:], ids=lambda text: text.stem)
def test_a_lesson_of_what_an_option_does_has_at_most_250_lines_of_text_and_code(text):
    found = cells(text.read_text(encoding="utf-8"))
    assert sum(len(cell.source.splitlines()) for cell in found) <= 250


@NUMBERED
def test_every_question_has_a_place_for_its_answer_and_later_a_measurement_and_a_folded_answer(text):
    found = cells(text.read_text(encoding="utf-8"))
    at = next(number for number, cell in enumerate(found) if "## Predict first" in cell.source)
    questions = re.findall(r"^(\d)\. ", found[at].source.partition("## Predict first")[2], re.M)
    assert len(questions) >= 3
    assert re.findall(r"^    (\d): \.\.\.,  # ", found[at + 1].source, re.M) == questions
    code, words = ("\n".join(cell.source for cell in found[at + 2:] if cell.kind == kind)
                   for kind in ("code", "markdown"))
    assert sorted(REVEALED.findall(code)) == questions
    assert {number for numbers in FOLDED.findall(words) for number in numbers if number} == set(questions)
    assert words.count("<details>") == words.count("</details>") == len(FOLDED.findall(words))


@NUMBERED
def test_no_answer_is_in_the_text_and_none_shows_in_the_cell_that_measures_until_one_is_typed(text):
    skip_without_processes(text)
    code = [cell.source for cell in cells(text.read_text(encoding="utf-8")) if cell.kind == "code"]
    for source, seen in zip(code, shown(text), strict=True):
        asked = REVEALED.findall(source)
        measured = [call.args[1] for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call)
                    and ast.unparse(call.func) == "predictions.reveal"]
        assert len(measured) == len(asked)
        assert all(any(isinstance(part, ast.Name) for part in ast.walk(one)) for one in measured)
        if asked:
            assert (seen.printed, seen.displayed) == ("".join(map(PROMPT.format, asked)), None)


def test_typed_answers_are_held_against_what_is_measured():
    printed = [cell.printed for cell in executed(changed(
        OF_TEXTS / "04_rings.py", ("1: ...,", "1: [2050, 2050, 2048],"), ("2: ...,", '2: "yes",'),
        ("3: ...,", "3: 1.5,")).rpartition("\n# %%\n")[0])]  # the proof asks nothing
    assert ("1. you predicted [2,050, 2,050, 2,048]; measured [2,050, 2,048, 2,048]: 2 of 3 right\n"
            "2. you predicted yes; measured yes: right\n") in printed
    assert ("3. you predicted 1.5, and the answer is a list of 2: a number, a number: type that above, and run its "
            "cell and this one again\n") in printed


# A kernel for each notebook takes long; the cells themselves are run by the tests above.
@pytest.mark.slow
@EVERY
def test_jupyter_executes_the_text_into_the_same_file(text):
    skip_without_processes(text)
    for module in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(module, reason=f"{module} is not installed; pip install 'zerosim[notebook]'")
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    execute = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execute)
    copy = copy_of(text)
    for picture in filter(None, (picture_in(outputs) for _, outputs in committed(copy))):
        skip_if_drawn_elsewhere(picture[0])
    then, now = json.loads(copy.read_text(encoding="utf-8")), json.loads(execute.written(text))
    # Curves of trainings, whose products another processor adds in another order, may differ as their figures may.
    for one, other in zip(then["cells"], now["cells"], strict=True):
        drawn = re.match(r"zs\.draw\.(\w+)\(", "".join(one["source"]))
        both = [picture_in(cell.get("outputs", [])) for cell in (one, other)]
        if drawn and all(both) and shows_the_same(drawn[1].replace("_", "-"), both[0][0], both[1][0]):
            other["outputs"] = one["outputs"]
    assert now == then, "it has changed: read it, then `make notebooks`"


# -- what readers are told to try ---------------------------------------------------------------------------------

def first(*changes: tuple[str, str]) -> list[Shown]:
    """The first notebook, run with its text changed."""
    return list(executed(changed(FIRST, *changes)))


@pytest.mark.parametrize("weights", ["(0.1, 0.3, 0.7, 0.2)", "(-1.5, 0.25, 3e-5, 1000)", "(2, -0.5, 1, 0.5)"])
def test_the_proof_holds_for_other_weights_and_data(weights):
    found = first(("(2, -3, 1, 0.5)\n", weights + "\n"), ("((2, 1), 7)", "((0.2, -1.1), 7.3)"))
    assert "the same bits" in found[-1].printed


def test_at_a_small_learning_rate_one_weight_moves_in_fp16_as_the_reader_is_told():
    found = first(("LEARNING_RATE = 0.1", "LEARNING_RATE = 3e-4"))
    by_rank = next(table for table in (repr(cell.displayed) for cell in found) if "after the all-gather" in table)
    first_step = [line.split() for line in by_rank.splitlines()[1:3]]
    assert [line[2:4] for line in first_step] == [["2.0003", "-2.9997"], ["1.0003", "0.5003"]]
    assert [line[-4:] for line in first_step] == [["2.0", "-3.0", "1.0", "0.5005"]] * 2


def test_who_forgets_to_divide_has_other_moments_and_the_same_weights_after_both_steps_of_adam_as_the_reader_is_told():
    namespace = {}
    list(executed(FIRST.read_text(encoding="utf-8"), namespace))
    for update, hides in ((namespace["adam"], True), (namespace["sgd"], False)):
        mean, total = (zs.Cluster(2).run(namespace["train_by_hand"], update, divisor)[0] for divisor in (2, 1))
        for one, other in zip(mean, total, strict=True):
            assert (one["master"].tobytes() == other["master"].tobytes()) is hides
            assert one["g"].tobytes() != other["g"].tobytes()
            assert not hides or one["m"].tobytes() != other["m"].tobytes()


def test_who_forgets_to_divide_by_the_scale_has_huge_moments_and_almost_the_same_weights():
    text, _, _ = changed(OF_TEXTS / "03_mixed_precision_and_loss_scaling.py").partition("cluster = zs.Cluster(3)")
    code = "\n".join(line for line in text.splitlines() if line != "zs.draw.mixed_precision()")
    found = []
    for source in (code, code.replace("np.float32(scale * rank.size)", "np.float32(rank.size)")):
        namespace = {}
        exec(source, namespace)
        found.append(zs.Cluster(3).run(namespace["train_by_hand"])[0][1])
    right, wrong = found
    assert np.abs(wrong["m"]).max() > 10_000 * np.abs(right["m"]).max()
    assert 0 < np.abs(wrong["master"] - right["master"]).max() < 0.001 < 1 < np.abs(right["master"]).max()


def test_the_notebook_about_processes_runs_without_them_and_says_so(monkeypatch):
    monkeypatch.setattr("zerosim.course.running.LAUNCHERS", ("no-such-launcher",))
    text = OF_TEXTS / "15_from_laptop_to_gpus.py"
    printed = [cell.printed for cell in executed(text.read_text(encoding="utf-8"))]
    assert any(found.startswith("processes over MPI cannot be had") for found in printed)
    assert "on threads the bits of the package's all-reduce" in printed[-1]
    assert "over MPI" not in printed[-1]


def test_the_puzzles_notebook_has_of_every_puzzle_a_statement_its_stub_and_a_check_in_order():
    code = [cell.source.strip() for cell in cells(PUZZLES.read_text(encoding="utf-8")) if cell.kind == "code"]
    assert code[1:-1] == [text for name, puzzle in puzzles.PUZZLES.items() for text in (
        f'zs.puzzles.statement("{name}")', puzzle.function.strip(), f'zs.puzzles.check("{name}", {name})')]


def test_with_open_holes_every_check_says_so_and_a_solution_in_the_place_of_its_stub_passes():
    imports = "import zerosim as zs\nfrom zerosim.course.puzzles.solutions import Any, Array, Rank\n"
    shown = list(executed(changed(PUZZLES, ("import zerosim as zs\n", imports), *(
        (puzzles.PUZZLES[name].function.strip(), inspect.getsource(solutions.SOLUTIONS[name]).strip())
        for name in ("mean", "repair")))))
    found = [one.displayed for one in shown if isinstance(one.displayed, puzzles.Score)]
    assert {score.verdict for score in found[1:-4]} == {"open"}
    assert [score.stars for score in (found[0], found[-4])] == ["★★★", "★★★"]
    assert {score.verdict for score in found[-3:]} == {"refused"}  # with their bugs
    assert shown[-1].printed.count("passed   ★★★") == 2
