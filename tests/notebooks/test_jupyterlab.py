"""A clone's notebooks in a real JupyterLab, as `make notebook` starts it, which has never seen and does not trust them:
what a reader sees there."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source import ROOT
from tests.display.browser import Tab, needs_browser, open_tab
from tests.notebooks.cells import committed

pytestmark = [pytest.mark.slow, needs_browser, pytest.mark.skipif(
    find_spec("jupyterlab") is None, reason="jupyterlab is not installed; pip install 'zerosim[notebook]'")]
COPIES = sorted((ROOT / "notebooks").glob("*.ipynb"))
PATIENCE_SECONDS = 120  # after which what is there is judged
WIDTH = 1280  # of a small laptop's screen, in CSS pixels
HEIGHT = 40_000  # so that JupyterLab, which draws what is in sight, draws all

# What a notebook's page shows, once its kernel, every cell and every picture is there. An output that is wider than its
# place has something to scroll, as tables alone may; a line of code is cut where its editor has.
SEEN = Path(__file__).with_name("seen.js").read_text("utf-8")


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """A JupyterLab of its own on this folder's notebooks, that knows nothing of its user: its address."""
    home = folder / "home"
    home.mkdir()
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")},
                   "HOME": str(home), "JUPYTER_PLATFORM_DIRS": "0"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0",
               f"--config={ROOT / 'notebooks/lab_config.py'}",
               f"--ServerApp.root_dir={folder / 'notebooks'}", "--IdentityProvider.token=", "--ServerApp.password="]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        yield _address(process, home, folder / "log")
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def _address(process: "subprocess.Popen[bytes]", home: Path, log: Path) -> str:
    """The address that the server has written down, once it answers there."""
    while process.poll() is None:
        for found in home.rglob("jpserver-*.json"):
            url = str(json.loads(found.read_text())["url"])
            with urllib.request.urlopen(f"{url}api/status"):
                return url
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])


def seen(tab: Tab, url: str, cells: int, pictures: int) -> Any:
    """What the page shows when all of its cells and pictures are there, or when they have not come in long."""
    tab.go(url)
    until, found = time.monotonic() + PATIENCE_SECONDS, {}
    while time.monotonic() < until:
        found = tab.evaluate(SEEN)
        if (found["cells"], len(found["images"]), found["ready"]) == (cells, pictures, True):
            return found
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tab, str]]:
    folder = tmp_path_factory.mktemp("clone")
    (folder / "notebooks").mkdir()
    for copy in COPIES:
        shutil.copy(copy, folder / "notebooks")
    with jupyterlab(folder) as address, open_tab() as tab:
        tab.resize(WIDTH, HEIGHT)
        yield tab, address


@pytest.mark.parametrize("copy", COPIES, ids=lambda copy: copy.stem)
def test_a_fresh_jupyterlab_draws_every_figure_within_its_cell_cuts_no_line_of_code_and_has_nothing_to_save(copy, lab):
    tab, address = lab
    pictures = sum("image/png" in one.get("data", {}) for _, outputs in committed(copy) for one in outputs)
    # A workspace of its own: another would bring back the notebooks that were open in it.
    url = f"{address}lab/workspaces/{copy.stem}/tree/{copy.name}"
    found = seen(tab, url, len(committed(copy)), pictures)
    assert (found["cells"], len(found["images"])) == (len(committed(copy)), pictures)
    for natural, width, place in found["images"]:
        assert natural > 0, "a picture is there and cannot be drawn"
        assert 100 < width <= place, "a picture is wider than its cell"
    assert found["wide"] == []
    assert found["cut"] == []
    assert found["unsaved"] == 0
