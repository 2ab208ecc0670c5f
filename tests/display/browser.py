"""A real browser without a window, where there is one: opens a page and says what became of it."""

import os
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-dev-shm-usage", "--hide-scrollbars")
PATIENCE_SECONDS = 600


def browser() -> str | None:
    """The browser's program, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


needs_browser = pytest.mark.skipif(browser() is None, reason="there is no chromium here to open the page in")


def _run(page: Path, *flags: str) -> bytes:
    program = browser()
    assert program is not None
    with tempfile.TemporaryDirectory() as profile:
        environment = {**os.environ, "HOME": profile}
        done = subprocess.run([program, *FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()],
                              capture_output=True, timeout=PATIENCE_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout


def dom_of(page: Path, *, first: str = "", last: str = "", flags: tuple[str, ...] = ()) -> "Dom":
    """What the page became when its scripts had run; ``first`` and ``last`` are scripts of the test's own."""
    text = page.read_text(encoding="utf-8")
    watched = page.with_name(f"watched-{page.name}")
    text = text.replace("<head>", f"<head><script>{first}</script>", 1)
    watched.write_text(text.replace("</body>", f"<script>{last}</script></body>"), encoding="utf-8")
    return Dom(_run(watched, *flags, "--dump-dom").decode())


class Dom(HTMLParser):
    """Every element with its attributes and the text right inside it."""

    VOID = frozenset({"meta", "img", "input", "br", "link", "line", "rect", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str], list[int]]] = []
        self._open: list[int] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), [], list(self._open)))
        if tag not in self.VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        while self._open and tag not in self.VOID:
            if self.elements[self._open.pop()][0] == tag:
                return

    def handle_data(self, data: str) -> None:
        for number in self._open:
            self.elements[number][2].append(data)

    def all(self, tag: str | None = None, **attributes: str) -> list[tuple[dict[str, str | None], str]]:
        """(attributes, text) of the elements of this tag, class (``class_``) and attributes (``data_x``)."""
        found = []
        for name, given, text, _ in self.elements:
            wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
            classes = (given.get("class") or "").split()
            if tag in (None, name) and all(value in classes if key == "class" else given.get(key) == value
                                           for key, value in wanted.items()):
                found.append((given, "".join(text)))
        return found

    def rows(self, caption: str) -> list[list[str]]:
        """The body of the table whose caption begins like this."""
        for number, (tag, _, text, _) in enumerate(self.elements):
            if tag == "caption" and "".join(text).startswith(caption):
                table = self.elements[number][3][-1]
                return [["".join(cell[2]) for cell in self.elements if cell[3][-1:] == [at] and cell[0] in ("td", "th")]
                        for at, row in enumerate(self.elements)
                        if row[0] == "tr" and table in row[3] and any(self.elements[up][0] == "tbody" for up in row[3])]
        raise AssertionError(f"no table {caption!r}")
