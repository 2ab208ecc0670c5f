"""JupyterLite beside the site: Python in the page, with zerosim's wheel and one notebook of what runs there.

``python -m zerosim_site.browser SITE`` builds it into ``SITE/browser``. Pyodide, the Python that it loads, and NumPy
come from Pyodide's own host when somebody opens the page, so that this part of the site needs a network.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import jupytext

from zerosim_site.page import ROOT

TEXT = ROOT / "docs/browser/zero_in_the_browser.py"


def build(site: Path) -> Path:
    """Builds the folder ``browser`` of a site; returns it. Raises CalledProcessError where a tool fails."""
    work, out = site.resolve().parent / "browser", site.resolve() / "browser"
    shutil.rmtree(work, ignore_errors=True)
    contents, wheels = work / "contents", work / "wheels"
    contents.mkdir(parents=True)
    jupytext.write(jupytext.read(TEXT), contents / f"{TEXT.stem}.ipynb")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--wheel-dir", str(wheels), str(ROOT)], check=True)
    wheel, = wheels.glob("*.whl")
    subprocess.run([sys.executable, "-m", "jupyter", "lite", "build", "--contents", str(contents), "--output-dir",
                    str(out), "--piplite-wheels", str(wheel)], check=True, cwd=work)
    return out


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
