"""The command for the puzzles: what they are, hints, and the check of a reader's own file."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerosim.cli.shell import AsJson, answer, busy, command, print_json

if TYPE_CHECKING:
    from zerosim.course.puzzles import Score
    from zerosim.course.puzzles.puzzle import Puzzle

NOT_PASSED = 1  # exit code
MINUTES = 20


@command("puzzles", "zerosim puzzles ring --check ring.py:ring")
def puzzles(
    name: Annotated[str | None, typer.Argument(help="A puzzle; without a name, all are listed.")] = None,
    stub: Annotated[bool, typer.Option("--stub", help="Print only the code from which to begin.")] = False,
    hint: Annotated[int | None, typer.Option(metavar="NUMBER", help="Print a hint, 1 and up.")] = None,
    check: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Run an answer and score it.")] = None,
    solution: Annotated[bool, typer.Option("--solution", help="Print the solution.")] = False,
    grade: Annotated[str | None, typer.Option(metavar="FILE.py", help="Grade its get_ddp, get_sharded_optimizer and "
                                              "get_fsdp.")] = None,
    as_json: AsJson = False,
) -> None:
    """Exercises on ranks: write a ring, write ZeRO's steps, repair a broken one; checked for bits and scored."""
    from zerosim.course import puzzles as offered

    asked = [option for option, given in (("--stub", stub), ("--hint", hint is not None),
                                          ("--check", check is not None), ("--solution", solution)) if given]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} were given; ask for one thing at a time")
    if grade is not None:
        if name is not None or asked:
            raise ValueError("--grade takes a file and nothing else: zerosim puzzles --grade FILE.py")
        scores = _graded(grade)
        _print_scores(scores, {"grades": [score.as_json() for score in scores]}, as_json)
    elif name is None:
        if asked:
            raise ValueError(f"{asked[0]} is about one puzzle; name it: zerosim puzzles ring {asked[0]}")
        _print_all(as_json)
    elif check is not None:
        score = _checked(name, check)
        _print_scores([score], score.as_json(), as_json)
    elif hint is not None:
        _print(name, {"hint": hint, "text": offered.hint(name, hint)}, as_json)
    elif solution:
        _print(name, {"text": offered.solution(name)}, as_json)
    elif stub:
        _print(name, {"text": offered.stub(name)}, as_json)
    elif as_json:
        print_json(_as_json(offered.puzzle_named(name)))
    else:
        typer.echo(offered.show(name))


def _print(name: str, data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"puzzle": name, **data})
    else:
        typer.echo(data["text"].rstrip("\n"))


def _as_json(puzzle: Puzzle) -> dict[str, Any]:
    return {"name": puzzle.name, "title": puzzle.title, "statement": puzzle.statement.strip(),
            "stub": puzzle.stub.strip(), "targets": puzzle.score, "hints": len(puzzle.hints),
            "allowed": sorted({"exchange", *puzzle.allowed}),
            "sizes": {str(ranks): list(lengths) for ranks, lengths in puzzle.sizes.items()}}


def _print_all(as_json: bool) -> None:
    from zerosim.course.puzzles.tasks import PUZZLES
    from zerosim.display.views import TextLine, View, marked_table

    answer(as_json, lambda: {"puzzles": [_as_json(puzzle) for puzzle in PUZZLES.values()]}, lambda: View("", "", (
        marked_table("puzzle", "what to write", ">hints", rows=[
            (puzzle.name, puzzle.title, str(len(puzzle.hints))) for puzzle in PUZZLES.values()]),
        TextLine(""),
        TextLine("zerosim puzzles mean                          states it"),
        TextLine("zerosim puzzles mean --stub > mean.py         is where to begin"),
        TextLine("zerosim puzzles mean --check mean.py:mean     runs it on 1 to 8 ranks"))))


def _checked(name: str, place: str) -> Score:
    from zerosim.course import puzzles as offered
    from zerosim.course.puzzles.integrity import kept_running

    offered.puzzle_named(name)  # a name that there is not is refused before the file is run
    with busy(f"checking {name} on 1 to 8 ranks"), ended_at_last(), kept_running():
        return _judged(name, place, partial(offered.check, name))


def _graded(file: str) -> list[Score]:
    from pathlib import Path

    from zerosim.course.puzzles.grading import GRADERS
    from zerosim.course.puzzles.integrity import kept_running

    if not Path(file).is_file():
        raise ValueError(f"no file {file!r} to grade; the path is taken from {Path.cwd()}")
    try:
        defined = _defined_in(Path(file).read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        why = f"line {error.lineno} is not Python: {error.msg}" if isinstance(error, SyntaxError) else error
        raise ValueError(f"{file} cannot be graded: {why}") from None
    names = [name for name in GRADERS if name in defined]
    if not names:
        raise ValueError(f"{file} defines none of {', '.join(GRADERS)}; write at least one")
    with busy("grading on 1 to 8 ranks"), ended_at_last(), kept_running():
        return [_judged(name, f"{file}:{name}", GRADERS[name]) for name in names]


def _judged(name: str, place: str, judge: Callable[[Any], Score]) -> Score:
    """The score of a file's function; a file that cannot be read to its end within the time of a case is refused."""
    from zerosim.course.puzzles.judging import ended
    from zerosim.course.puzzles.score import REFUSED, Refused, Score
    from zerosim.course.puzzles.watching import limited

    try:
        with limited("reading the file"):
            answer = _loaded(place)
    except Refused as error:
        return Score(name, REFUSED, ended(str(error)))
    return judge(answer)


def _loaded(place: str) -> Any:
    """The function of a file, which may print while it is read, but not on the output of a verdict."""
    from contextlib import redirect_stdout

    from zerosim.course.running import load

    with redirect_stdout(sys.stderr):
        return load(place)


@contextmanager
def ended_at_last() -> Iterator[None]:
    """Ends the process, with code 1 and the place where it was, if the ``with`` block has not ended after MINUTES.

    For what no interrupt ends: an answer that catches every one, or a single operation without end. A check takes
    seconds of the processor.
    """
    if sys.__stderr__ is not None:  # the real one, which has a file's number
        faulthandler.dump_traceback_later(60 * MINUTES, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _defined_in(text: str) -> set[str]:
    """The names that a Python text binds at its top: functions, classes, variables, imports. The text is not run."""
    from symtable import symtable

    symbols = symtable(text, "", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _print_scores(scores: list[Score], data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        typer.echo("\n\n".join(map(repr, scores)))
    if not all(score.passed for score in scores):
        raise typer.Exit(NOT_PASSED)
