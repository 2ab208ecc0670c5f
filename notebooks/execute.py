"""Executes each notebook's text (``texts/NN_name.py``) and writes the executed copy (``NN_name.ipynb``) here.

Two executions give the same file: cells are named by their number; no times, no versions of Python and no accidents of
how output arrived in pieces are recorded.
Of the puzzles' text the cells are written too: statement, function and check stand in the package alone.
Usage: ``python notebooks/execute.py [TEXT ...]``; without arguments, all of them.
"""

import sys
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

import zerosim as zs

HERE = Path(__file__).parent
TEXTS = HERE / "texts"
REVEALS = "predictions.reveal("
FOLDED = {"jupyter": {"outputs_hidden": True}}
METADATA = {
    "jupytext": {"formats": "ipynb,texts//py:percent"},
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(text: Path) -> nbformat.NotebookNode:
    """The notebook of one text, run from top to bottom; raises CellExecutionError where a cell fails."""
    notebook = jupytext.read(text)
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell["metadata"] = f"cell-{number:02d}", nbformat.NotebookNode()
    folder = {"metadata": {"path": str(HERE)}}
    # A kernel sends what a cell prints in pieces, as they come; the pieces are put together.
    client = NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True, resources=folder)
    notebook = client.execute()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        output.get("data", {}).pop(zs.draw.WIDGET, None)  # it names a model of a kernel that is gone
    # What was measured stands after the cell that reveals it; JupyterLab folds it until the reader runs it.
    for before, cell in pairwise(cell for cell in notebook.cells if cell.cell_type == "code"):
        shows = any("image/png" in output.get("data", {}) for output in cell.outputs)
        if REVEALS in before.source and REVEALS not in cell.source and not shows:
            cell["metadata"] = nbformat.from_dict(FOLDED)
    notebook.metadata = nbformat.from_dict(METADATA)
    nbformat.validate(notebook)
    return notebook


def written(text: Path) -> str:
    """The executed copy of one text, as the file has it."""
    return nbformat.writes(executed(text)) + "\n"


def with_puzzles(text: str) -> str:
    """The text of the puzzles' notebook, in which every puzzle has its three cells, as the package has them."""
    begin, end = text.index('# %%\nzs.puzzles.statement("'), text.index("# %% [markdown]\n# ## All of them")
    cells = [f'# %%\nzs.puzzles.statement("{name}")\n\n\n# %%\ndef {zs.puzzles.stub(name).partition("def ")[2]}\n\n'
             f'# %%\nzs.puzzles.check("{name}", {name})\n\n' for name in zs.puzzles.names()]
    return text[:begin] + "".join(cells) + text[end:]


def main(names: list[str]) -> None:
    """Executes the texts named, or all whose name begins with a digit, and the puzzles."""
    for text in [Path(name) for name in names] or [*sorted(TEXTS.glob("[0-9]*.py")), TEXTS / "puzzles.py"]:
        if text.name == "puzzles.py":
            text.write_text(with_puzzles(text.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
        copy = HERE / f"{text.stem}.ipynb"
        copy.write_text(written(text), encoding="utf-8", newline="\n")
        print(f"{text} -> {copy}")


if __name__ == "__main__":
    main(sys.argv[1:])
