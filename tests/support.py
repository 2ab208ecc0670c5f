"""Small helpers that tests of several folders use."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

from tests.architecture.source import ROOT

# State on "disk" is thousands of small files: they lie in memory where the system has such a folder.
DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else gettempdir()


def assert_refused(call: Callable[[], Any], words: str, error: type[Exception] = ValueError) -> None:
    """The call raises this error with text that these words (a pattern) match; a failure names the words."""
    text = None
    try:
        call()
    except error as refused:
        text = str(refused)
    assert text is not None, f"nothing was raised where {error.__name__} was expected: {words}"
    assert re.search(words, text), f"expected {words!r} in: {text}"


def fresh(*command: str, folder: Path = ROOT, **variables: str) -> str:
    """The output of a fresh interpreter, with these variables too; warnings are errors, and it is silent otherwise."""
    done = subprocess.run([sys.executable, "-W", "error", *command], cwd=folder, capture_output=True,
                          env={**os.environ, "PYTHONIOENCODING": "utf-8", **variables})
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    return done.stdout.decode()


def literally(text: str) -> str:
    """A pattern for `assert_refused`: this text, of which parts ... may be anything; ^ is its beginning, $ its end."""
    begin, end = "^" if text.startswith("^") else "", "$" if text.endswith("$") else ""
    return begin + ".*".join(map(re.escape, text.removeprefix("^").removesuffix("$").split("..."))) + end


def command_line() -> Any:
    """All commands of ``zerosim``, made once: typer's own runner makes them for each call, longer than most take."""
    from zerosim import cli

    return cli.shell.made(cli.app)


def ask(*arguments: str, columns: int = 80) -> Any:
    """The end of a command of ``zerosim``, run here: its ``exit_code``, ``stdout``, ``stderr``, and ``output`` of both.

    What the command line does not catch is raised.
    """
    from unittest.mock import patch

    out, err, code = StringIO(), StringIO(), 0
    terminal = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    with patch.dict(os.environ, terminal), redirect_stdout(out), redirect_stderr(err):
        try:
            command_line().main(list(arguments), prog_name="zerosim")
        except SystemExit as ended:
            code = ended.code
            if isinstance(code, str):  # as the interpreter does
                print(code, file=sys.stderr)
                code = 1
    stdout, stderr = out.getvalue(), err.getvalue()
    return SimpleNamespace(exit_code=code, stdout=stdout, stderr=stderr, output=stdout + stderr)


def assert_command_refuses(said: str, command: str, *words: str) -> None:
    """``zerosim command ...`` prints nothing, says these words in one line of its own, and ends with exit code 2."""
    done = ask(command, *words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), (words, done.output)
    assert done.stderr.startswith(f"zerosim {command}: "), (words, done.stderr)
    assert said in done.stderr, (said, done.stderr)


def printed(thing: Any, columns: int = 80) -> str:
    """The lines of anything that shows itself, or of a view, in a terminal of so many columns."""
    from rich.console import Console

    from zerosim import display

    console = Console(file=StringIO(), width=columns, highlight=False)
    console.print(display.text(thing) if isinstance(thing, display.View) else thing)
    return console.file.getvalue()


def broken_lines(text: str, columns: int = 80) -> list[str]:
    """The lines that are wider than the terminal, and those that are nothing but the end of a broken cell."""
    from rich.cells import cell_len

    return [line for line in text.splitlines() if cell_len(line) > columns or re.fullmatch(r"\s*[^\s-]{1,3}\s*", line)]
