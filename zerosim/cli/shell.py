"""The shell of all commands: how they are registered, how they fail, and where their text goes."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from zerosim.display.views import View
    from zerosim.models.text import Corpus

app = typer.Typer(
    name="zerosim",
    help="ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TextFile = Annotated[str | None, typer.Option("--text", help="A UTF-8 text; without it, one that comes along.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON instead.")]

LEAST_WIDTH = 40  # columns; some shells say 0
WRONG_INPUT, INTERRUPTED, NOBODY_READS = 2, 130, 1  # exit codes


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no δ gets a question mark, and no traceback
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def command(name: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command: wrong input ends it with one line and exit code 2, Ctrl-C with 130, and a reader
    that has gone away (``| head``) in silence."""

    def register(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def guarded(*args: Any, **options: Any) -> None:
            from zerosim.ranks.errors import OutOfMemoryError

            try:
                body(*args, **options)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except (ValueError, OutOfMemoryError) as error:
                typer.echo(f"zerosim {name}: {' '.join(str(error).split())}", err=True)
                raise typer.Exit(WRONG_INPUT) from None
            except MemoryError as error:
                typer.echo(f"zerosim {name}: this machine has too little memory for it: {error}", err=True)
                raise typer.Exit(WRONG_INPUT) from None
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except BrokenPipeError:
                # Python flushes once more when it exits; what nobody reads must not fail a second time.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(NOBODY_READS) from None
            except OSError as error:
                typer.echo(f"zerosim {name}: what it has to say cannot be written: {error}", err=True)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                raise typer.Exit(NOBODY_READS) from None

        return app.command(name, **options)(guarded)

    return register


def console(*, stderr: bool = False) -> Console:
    """The console that text goes to: as wide as the terminal; 80 columns in a pipe, and no color there or
    under NO_COLOR."""
    from rich.console import Console

    found = Console(highlight=False, emoji=False, stderr=stderr)
    found.width = max(found.width, LEAST_WIDTH)
    return found


def show(view: View) -> None:
    """Prints a view."""
    from zerosim.display.render_text import as_text

    console().print(as_text(view))


def answer(as_json: bool, data: Callable[[], dict[str, Any]], view: Callable[[], View]) -> None:
    """Prints what a command has found: its data as JSON where that was asked for, else its view."""
    if as_json:
        print_json(data())
    else:
        show(view())


def corpus_of(text: str | None) -> Corpus:
    """The text to train on: a file, or the one that comes with the package."""
    from zerosim.models.text import read, shipped

    return shipped() if text is None else read(text)


def busy(what: str) -> Status:
    """For a ``with`` block that takes seconds: says what is going on, where somebody sits at a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def print_json(data: dict[str, Any]) -> None:
    """The data on standard output; an infinity or NaN in it would be a mistake, since JSON has none."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop."""
    if version:
        from zerosim import __version__

        typer.echo(f"zerosim {__version__}")
        raise typer.Exit
