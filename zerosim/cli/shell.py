"""The shell of all commands: how they are registered, how they fail, and where their text goes."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from inspect import Signature

    from rich.console import Console
    from rich.status import Status

    from zerosim.display.views import View
    from zerosim.models.text import Corpus

LEAST_WIDTH = 40  # columns; some shells say 0
WRONG_INPUT, RUN_FAILED, INTERRUPTED, NOBODY_READS = 2, 3, 130, 1  # exit codes
# All commands, in the order in which one needs them.
GROUPS = {
    "Begin": ("explore", "replay", "puzzles", "museum"),
    "Numbers in 16 bits": ("lost-updates", "precision"),
    "Train": ("train", "compare", "report", "export"),
    "Plan": ("models", "devices", "links", "plan", "tune", "cost"),
    "Your own program, on a laptop, under MPI, on GPUs": ("run", "oracle", "doctor", "gpu-check"),
    "This project": ("figures", "bench"),
}
EXAMPLE = "For example: "
BORDERS = {"greater": "at least", "less": "at most"}
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer has no public name for it


class Commands(TyperGroup):
    """All commands: their list by `GROUPS`, each with an example, and mistakes in one line with exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands' names, in the order of `GROUPS`."""
        grouped = [name for names in GROUPS.values() for name in names if name in self.commands]
        return [*grouped, *(name for name in self.commands if name not in grouped)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the list; the formatter gets nothing."""
        from rich.table import Table
        from rich.text import Text

        to = console()
        to.print(f"{self.help}\n\nzerosim COMMAND --help says what a command takes.", markup=False)
        for group, names in GROUPS.items():
            table = Table.grid(padding=(0, 2, 0, 2))
            table.add_column(width=max(map(len, self.commands)))
            for name in names:
                command = self.commands[name]
                table.add_row(Text(name, "bold cyan"), Text(_words(command.help).split("\n\n")[0]))
                table.add_row("", Text(f"$ {_words(command.epilog).removeprefix(EXAMPLE)}", "dim"))
            to.print(f"\n[bold]{group}[/]", table)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
             standalone_mode: bool = True, windows_expand_args: bool = True, **extra: Any) -> Any:
        """Runs a command; what was typed wrongly is said in one line."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except UsageError as error:
            if not standalone_mode:
                raise
            typer.echo(_in_one_line(error, sys.argv[1:] if args is None else args), err=True)
            code = WRONG_INPUT
        except typer.Abort:
            code = INTERRUPTED
        except OSError as error:
            typer.echo(f"zerosim: what it has to say cannot be written: {error}", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = NOBODY_READS
        return sys.exit(code or 0) if standalone_mode else code


def _words(text: str | None) -> str:
    """The paragraphs of a text, each in one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n"))


def _in_one_line(error: Any, typed: Sequence[str]) -> str:
    """The sentence for what cannot be parsed: a value by its option, and what it should have been."""
    named = error.ctx.command_path if error.ctx else " ".join(["zerosim", *typed[:1]])
    said, option = error.format_message().rstrip("."), getattr(error, "param", None)
    if type(error) is typer.BadParameter and option is not None:
        name = next((one for one in option.opts if any(word.split("=")[0] == one for word in typed)), option.opts[0])
        after = [word.partition("=")[2] if "=" in word else following for word, following in
                 zip(typed, [*typed[1:], ""], strict=True) if word.split("=")[0] == name]
        border = re.search(r"(greater|less) than or equal to (\S+)$", said)
        kind = ("a whole number" if "valid int" in said else "a number" if "number" in said or "float" in said else
                f"{BORDERS[border[1]]} {border[2]}" if border else "")
        if after and kind:
            said = f"{name} takes {kind}, found {after[-1]!r}"
    elif option is not None and said.startswith("Missing option"):
        said = f"{said}, {option.help.rstrip('.')}"
    elif extra := re.search(r"extra argument\S* \(([^\s)]+)", said):
        takes_model = any(one.name == "model" for one in error.ctx.command.params)
        if takes_model and not any(word.startswith("--model") for word in typed):
            said = f"{said}; if that is a model, write --model {extra[1]}"
    return f"{named}: {said}; {named} --help lists what there is"


app = typer.Typer(
    name="zerosim",
    cls=Commands,
    help="ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Options of several commands.
TextFile = Annotated[str | None, typer.Option("--text", help="A UTF-8 text; without it, one that comes along.")]
Capacity = Annotated[str | None, typer.Option(metavar="NBYTES", help="What each rank may hold, as 8MB or 64MiB.")]
OwnHardware = Annotated[str | None, typer.Option("--hardware", metavar="FILE", help="A TOML file of one's own devices "
                                                                                    "and links.")]
Ranks = Annotated[int, typer.Option(help="N, the number of ranks.")]
Nodes = Annotated[int, typer.Option(help="Over how many nodes the ranks are spread.")]
Between = Annotated[str | None, typer.Option(help="The link between nodes; without it, infiniband-ndr.")]
MicroBatches = Annotated[int, typer.Option(help="k, the micro-batches of a step.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens of a sequence; without it, the model's longest, "
                                                         "of plan and tune no more than 4,096.")]
Batch = Annotated[int, typer.Option(help="Sequences of a micro-batch of one rank.")]
OptimizerName = Annotated[str, typer.Option("--optimizer", help="sgd, momentum, adagrad, rmsprop, adam, adamw, lion, "
                                            "adan, lamb, lars, adafactor, muon, shampoo, soap or kfac; of plan and "
                                            "tune adamw8bit too.")]
Reduction = Annotated[str, typer.Option(help="The order in which gradients are added: by rank; or by micro_batch, at "
                                             "stages 2 and 3, which makes all bits the same on any number of ranks.")]
MeshName = Annotated[str, typer.Option("--mesh", help="Nodes and ranks of a node, as 2x4: states are in shards inside "
                                                      "a node and replicated across, unless --zeropp; or none.")]
OFFLOAD = typer.Option(metavar="PLACES", help="What rests off the device: host or disk, all state; or kinds one by "
                                              "one, as optimizer=host+gradients=host; or none.")
AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON instead.")]


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no δ gets a question mark, and no traceback
    gc.freeze()  # what is loaded is no garbage: Python looks through it for cycles no more, nor before it ends
    atexit.register(gc.freeze)
    typed = copy(app)  # typer makes the parsers of all commands of an app, in 0.03 s: it gets the one that was typed
    named = [one for one in app.registered_commands if one.name in sys.argv[1:2]]
    typed.registered_commands = named or app.registered_commands
    try:
        typed()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def command(name: str, example: str = "", **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command, with an example of its use as one types it, and other options of typer's.

    Wrong input ends it with one line and exit code 2, Ctrl-C with 130, and a reader that has gone away (``| head``) in
    silence.
    """

    def register(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def guarded(*args: Any, **options: Any) -> None:
            from zerosim.ranks.errors import DeadlockError, FaultError, OutOfMemoryError

            try:
                body(*args, **options)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except (ValueError, OutOfMemoryError) as error:
                injected = (note for note in getattr(error, "__notes__", ()) if note.startswith("injected: "))
                lines = [" ".join(line.split()) for line in [*str(error).splitlines(), *injected]]
                said = " ".join(line if line.endswith((",", ";", ":", ".")) else f"{line};" for line in lines)
                said = said.removesuffix(";")
                typer.echo(f"zerosim {name}: {_as_typed(said, name, signature(body), options)}", err=True)
                raise typer.Exit(WRONG_INPUT) from None
            except (FaultError, DeadlockError) as error:
                said = " ".join(f"{error}; {'; '.join(getattr(error, '__notes__', ()))}".split())
                typer.echo(f"zerosim {name}: {said}", err=True)
                raise typer.Exit(RUN_FAILED) from None
            except MemoryError as error:
                typer.echo(f"zerosim {name}: this machine has too little memory for it: {error}", err=True)
                raise typer.Exit(WRONG_INPUT) from None
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except BrokenPipeError:
                # Python flushes once more when it exits; what nobody reads must not fail a second time.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(NOBODY_READS) from None

        return app.command(name, epilog=f"{EXAMPLE}{example}", **options)(guarded)

    return register


@functools.cache
def made(commands: typer.Typer) -> Any:
    """The commands as typer makes them of their functions, which takes longer than most errors."""
    return typer.main.get_command(commands)


# A value as an error's text writes it behind ``name=``, if there is one: a text, a number, or a word.
VALUE = r"""'[^']*'|"[^"]*"|-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)|[A-Za-z]\w*(?:[+-]\w+)*|"""


def _as_typed(said: str, command: str, body: Signature, given: Mapping[str, Any]) -> str:
    """An error's text in the words of the shell: options for the arguments of Python, ``--nodes 8`` for ``nodes=8``.

    Where the text names no option, the one that was typed with the value of which it speaks stands before it.
    """
    found = made(app)  # of one command alone it is that
    options = {option.name: option for option in getattr(found, "commands", {command: found})[command].params
               if option.opts[0].startswith("--")}
    options |= {f"{name}{unit}": option for name, option in options.items() for unit in ("_nbytes", "_tokens")}
    names = "|".join(sorted(options, key=len, reverse=True)) or "(?!)"

    def typed(name: str, value: str = "") -> str:
        if value in ("True", "False"):
            return f"{[*(options[name].secondary_opts if value == 'False' else ()), *options[name].opts][0]}"
        word = value.replace(",", "").removesuffix(".0") if value[:1] in "-0123456789" else value.strip("'\"")
        return f"{options[name].opts[0]}{value and ' '}{shlex.quote(word) if value else ''}"

    for pattern in (rf"(?<![\w'\".+-])(?<!\w\()({names})=({VALUE})", rf"^({names})(?= (?:must be|is the|goes with) )",
                    rf"(?<=\bleave )({names})(?= (?:out|as)\b)", rf"(?<![\w'\"./-])(?=[a-z]+_)({names})(?!\w|\.\w)"):
        said = re.sub(pattern, lambda found: typed(*found.groups()), said)
    said = re.sub(r"\bzs\.(plan|tune)\b", r"zerosim \1", said)
    for name, value in given.items() if "--" not in said else ():
        if name in options and value != body.parameters[name].default and (
                (isinstance(value, str) and repr(value) in said) or re.search(
                    rf"\b(?:found|got) {re.escape(str(value))}(?!\w)", said)
                or (isinstance(value, int) and said.startswith((f"{value:,} {name} ", f"{value} {name} ")))):
            return f"{typed(name, str(value))}: {said}"
    return said


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


def answer(as_json: bool, found: Any, **how: Any) -> None:
    """Prints an answer (`zerosim.shown.Answer`): its data as JSON where that was asked for, else its view."""
    reply(as_json, found.as_json, lambda: found.view(**how))


def reply(as_json: bool, data: Callable[[], dict[str, Any]], view: Callable[[], View]) -> None:
    """Prints what a command has found: data as JSON where that was asked for, else a view."""
    if as_json:
        print_json(data())
    else:
        show(view())


def corpus_of(text: str | None) -> Corpus:
    """The text to train on: a file, or the one that comes with the package."""
    from zerosim.models.text import read, shipped

    return shipped() if text is None else read(text)


def capacity_nbytes(capacity: str | None) -> int | None:
    """The bytes of `Capacity`."""
    from zerosim.numerics.units import nbytes_of

    return None if capacity is None else nbytes_of(capacity, "capacity")


def busy(what: str) -> Status:
    """For a ``with`` block that takes seconds: says what is going on, where somebody sits at a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def print_json(data: dict[str, Any]) -> None:
    """The data on standard output; an infinity or NaN in it would be a mistake, since JSON has none."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


@app.callback(invoke_without_command=True)
def about(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop."""
    if version:
        from zerosim import __version__

        typer.echo(f"zerosim {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.get_help()
