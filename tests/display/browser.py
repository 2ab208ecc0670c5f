"""A real browser without a window, where there is one: opens a page and says what became of it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, BinaryIO
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


class Tab:
    """A page that stays open and is asked: messages of the DevTools protocol, each ended by a zero byte.

    Source: https://chromedevtools.github.io/devtools-protocol/
    """

    def __init__(self, to_browser: BinaryIO, from_browser: BinaryIO) -> None:
        self._to, self._from, self._number, self._session = to_browser, from_browser, 0, {}
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            letters = bytearray()
            while (letter := self._from.read(1)) != b"\0":
                assert letter, "the browser has ended"
                letters += letter
            answer = json.loads(letters)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """A window of so many CSS pixels, each so many of its pictures'."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=False)

    def lay_out_for(self, medium: str) -> None:
        """As on paper for "print", as in the window for ""."""
        self._ask("Emulation.setEmulatedMedia", media=medium)

    def go(self, url: str) -> None:
        """Opens a page, and does not wait for it."""
        self._ask("Page.navigate", url=url)

    def open(self, page: Path, address: str = "") -> None:
        """Opens a page of `explore`, and waits until its run is drawn."""
        self.go("about:blank")  # else another address of the same page would not load it anew
        self.go(page.resolve().as_uri() + address)
        self.evaluate("""new Promise((done) => { const look = () => document.documentElement?.dataset.ready ? done()
            : setTimeout(look, 20); look(); })""")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, of a promise what it is kept by."""
        answer = self._ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def png(self) -> bytes:
        """What the window shows."""
        return b64decode(self._ask("Page.captureScreenshot", format="png")["data"])


@contextmanager
def open_tab() -> Iterator[Tab]:
    """A browser with one page, over a pipe: what it reads is its file 3, what it writes is its file 4."""
    program = browser()
    assert program is not None
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The pipes get the numbers that the browser knows in a process of their own, since these may be taken here.
        start = (f"import os, sys; os.dup2({read_there}, 3); os.dup2({write_there}, 4); "
                 "os.execv(sys.argv[1], sys.argv[1:])")
        process = subprocess.Popen([sys.executable, "-c", start, program, *FLAGS, f"--user-data-dir={profile}",
                                    "--remote-debugging-pipe"], pass_fds=(read_there, write_there),
                                   stderr=subprocess.DEVNULL, env={**os.environ, "HOME": profile})
        os.close(read_there)
        os.close(write_there)
        try:
            with open(write_here, "wb") as to_browser, open(read_here, "rb") as from_browser:
                yield Tab(to_browser, from_browser)
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


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
        return [["".join(cell.itertext()) for cell in row] for row in table.findall("tbody/*")]
