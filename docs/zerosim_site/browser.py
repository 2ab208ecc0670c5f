"""JupyterLite beside the site: Python in the page, with zerosim's wheel, the course, and a notebook to begin with.

``python -m zerosim_site.browser SITE`` builds it into ``SITE/browser``. Pyodide, the Python that it loads, and NumPy
come from Pyodide's own host when somebody opens the page, so that this part of the site needs a network.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from zerosim_site.notebook_pages import notebooks
from zerosim_site.page import ROOT

TEXT = ROOT / "docs/browser/zero_in_the_browser.py"
INSTALL = "import piplite\n\nawait piplite.install(\"zerosim\")"  # the first cell of each notebook there


def build(site: Path) -> Path:
    """Builds the folder ``browser`` of a site; returns it. Raises CalledProcessError where a tool fails."""
    work, out = site.resolve().parent / "browser", site.resolve() / "browser"
    shutil.rmtree(work, ignore_errors=True)
    contents, wheels = work / "contents", work / "wheels"
    contents.mkdir(parents=True)
    first = jupytext.read(TEXT)
    jupytext.write(first, contents / f"{TEXT.stem}.ipynb")
    for path in notebooks():
        nbformat.write(in_the_browser(nbformat.read(path, as_version=4), first.metadata), contents / path.name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--wheel-dir", str(wheels), str(ROOT)], check=True)
    wheel, = wheels.glob("*.whl")
    subprocess.run([sys.executable, "-m", "jupyter", "lite", "build", "--contents", str(contents), "--output-dir",
                    str(out), "--piplite-wheels", str(wheel)], check=True, cwd=work)
    return out


def in_the_browser(notebook: Any, metadata: Any) -> Any:
    """A notebook of the course with the cell that installs zerosim there; changed in place."""
    notebook.cells.insert(1, nbformat.v4.new_code_cell(INSTALL))
    notebook.metadata.kernelspec = metadata.kernelspec
    return notebook


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
