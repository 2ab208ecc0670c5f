"""A real browser without a window, where there is one: opens a page and says what became of it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
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


class Browser:
    """A browser that is asked over a pipe: messages of the DevTools protocol, each ended by a zero byte.

    What it reads is its file 3, and what it writes its file 4. Source: https://chromedevtools.github.io/devtools-protocol/
    """

    def __init__(self, program: str) -> None:
        (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
        self._profile, self._number = tempfile.TemporaryDirectory(ignore_cleanup_errors=True), 0
        # The pipes get the numbers that the browser knows in a process of their own, since these may be taken here.
        start = (f"import os, sys; os.dup2({read_there}, 3); os.dup2({write_there}, 4); "
                 "os.execv(sys.argv[1], sys.argv[1:])")
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, program, *FLAGS, f"--user-data-dir={self._profile.name}",
             "--remote-debugging-pipe"], pass_fds=(read_there, write_there), stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._profile.name})
        os.close(read_there)
        os.close(write_there)
        self._to, self._from = os.fdopen(write_here, "wb"), os.fdopen(read_here, "rb")

    def ask(self, method: str, session: Mapping[str, str] = {}, **parameters: Any) -> dict[str, Any]:
        """The answer to one message, of a tab's session or of the browser's own."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **session}
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

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait(PATIENCE_SECONDS)
        self._to.close()
        self._from.close()
        self._profile.cleanup()


@cache
def started() -> Browser:
    """The one browser of all tests of this process; see `browser_is_closed` in conftest.py."""
    program = browser()
    assert program is not None
    return Browser(program)


class Tab:
    """A page that stays open and is asked; what its pages leave behind, no other tab finds."""

    def __init__(self, browser: Browser) -> None:
        self._browser, self._session = browser, {}
        self.context = self._ask("Target.createBrowserContext")
        target = self._ask("Target.createTarget", url="about:blank", **self.context)["targetId"]
        self._session = {"sessionId": self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """A window of so many CSS pixels, each so many of its pictures'."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=False)

    def lay_out_for(self, medium: str, scheme: str = "light") -> None:
        """As on paper for "print", as in the window for ""; for who wants it "light" or "dark"."""
        self._ask("Emulation.setEmulatedMedia", media=medium,
                  features=[{"name": "prefers-color-scheme", "value": scheme}])

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
    """A page of its own in the one browser."""
    tab = Tab(started())
    yield tab
    started().ask("Target.disposeBrowserContext", **tab.context)


def dom_of(tab: Tab, page: Path, *, first: str = "") -> "Dom":
    """What a page of `explore` became when its run was drawn; ``first`` is a script of the test's own."""
    watched = page.with_name(f"watched-{page.name}")
    text = page.read_text(encoding="utf-8")
    watched.write_text(text.replace("<head>", f"<head><script>{first}</script>", 1), encoding="utf-8")
    tab.open(watched)
    return Dom(tab.evaluate("document.documentElement.outerHTML"))


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
