"""Executes each notebook's text (``NN_name.py``) and writes the executed copy (``NN_name.ipynb``) beside it.

Two executions give the same file: cells are named by their number, and no times are recorded.
Usage: ``python notebooks/execute.py [TEXT ...]``; without arguments, all of them.
"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def executed(text: Path) -> nbformat.NotebookNode:
    """The notebook of one text, run from top to bottom; raises CellExecutionError where a cell fails."""
    notebook = jupytext.read(text)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
    folder = {"metadata": {"path": str(HERE)}}
    return NotebookClient(notebook, timeout=300, record_timing=False, resources=folder).execute()


def main(names: list[str]) -> None:
    """Executes the texts named, or all whose name begins with a digit."""
    for text in [Path(name) for name in names] or sorted(HERE.glob("[0-9]*.py")):
        copy = text.with_suffix(".ipynb")
        nbformat.write(executed(text), copy)
        print(f"{text} -> {copy}")


if __name__ == "__main__":
    main(sys.argv[1:])
