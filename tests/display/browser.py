"""A real browser without a window, where there is one: opens a page and says what became of it."""

import os
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

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
    """A page, or a piece of one, as a tree of elements."""

    VOID = frozenset({"meta", "img", "input", "br", "link", "line", "rect", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.builder = ElementTree.TreeBuilder()
        self.feed(f"<page>{text}</page>")
        self.root = self.builder.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in self.VOID:
            self.builder.end(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        self.builder.data(data)

    def all(self, tag: str | None = None, **attributes: str) -> list[tuple[dict[str, str], str]]:
        """(attributes, text) of the elements of this tag, class (``class_``) and attributes (``data_x``)."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [(one.attrib, "".join(one.itertext())) for one in self.root.iter(tag) if all(
            value in one.get(name, "").split() if name == "class" else one.get(name) == value
            for name, value in wanted.items())]

    def rows(self, caption: str) -> list[list[str]]:
        """The body of the table whose caption begins like this."""
        table = next(one for one in self.root.iter("table") if one.findtext("caption", "").startswith(caption))
        return [["".join(cell.itertext()) for cell in row] for row in table.find("tbody") or ()]
