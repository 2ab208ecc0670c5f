"""Small helpers that tests of several folders use."""

import re
from collections.abc import Callable
from io import StringIO
from typing import Any


def assert_refused(call: Callable[[], Any], words: str, error: type[Exception] = ValueError) -> None:
    """The call raises this error with text that these words (a pattern) match; a failure names the words."""
    text = None
    try:
        call()
    except error as refused:
        text = str(refused)
    assert text is not None, f"nothing was raised where {error.__name__} was expected: {words}"
    assert re.search(words, text), f"expected {words!r} in: {text}"


def ask(*arguments: str, columns: int = 80) -> Any:
    """The end of a command of ``zerosim``: its exit code, its standard output and its standard error."""
    from typer.testing import CliRunner

    from zerosim.cli import app

    return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"})


def printed(thing: Any, columns: int = 80) -> str:
    """The lines of anything that shows itself, or of a view, in a terminal of so many columns."""
    from rich.console import Console

    from zerosim import display
    from zerosim.display.terminal import as_text

    console = Console(file=StringIO(), width=columns, highlight=False)
    console.print(as_text(thing) if isinstance(thing, display.View) else thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def broken_lines(text: str, columns: int = 80) -> list[str]:
    """The lines that are wider than the terminal, and those that are nothing but the end of a broken cell."""
    from rich.cells import cell_len

    return [line for line in text.splitlines() if cell_len(line) > columns or re.fullmatch(r"\s*[^\s-]{1,3}\s*", line)]
