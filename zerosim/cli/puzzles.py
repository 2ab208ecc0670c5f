"""The command for the puzzles: what they are, hints, and the check of a reader's own file."""

from __future__ import annotations

import signal
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerosim.cli.shell import AsJson, busy, command, print_json, reply

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from zerosim.course.puzzles import Score
    from zerosim.course.puzzles.puzzle import Puzzle

NOT_PASSED = 1  # exit code
MINUTES = 20.0  # for a check that takes seconds


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

    reply(as_json, lambda: {"puzzles": [_as_json(puzzle) for puzzle in PUZZLES.values()]}, lambda: View("", "", (
        marked_table("puzzle", "what to write", ">hints", rows=[
            (puzzle.name, puzzle.title, str(len(puzzle.hints))) for puzzle in PUZZLES.values()]),
        TextLine(""),
        TextLine("zerosim puzzles mean                          states it"),
        TextLine("zerosim puzzles mean --stub > mean.py         is where to begin"),
        TextLine("zerosim puzzles mean --check mean.py:mean     runs it on 1 to 8 ranks"))))


def _checked(name: str, place: str) -> Score:
    from zerosim.course import puzzles as offered

    offered.puzzle_named(name)  # a name that there is not is refused before the file is run
    with busy(f"checking {name} on 1 to 8 ranks"):
        return _judged_apart(name, place)


def _graded(file: str) -> list[Score]:
    from pathlib import Path

    from zerosim.course.puzzles.grading import GRADERS

    if not Path(file).is_file():
        raise ValueError(f"no file {file!r} to grade; the path is taken from {Path.cwd()}")
    try:
        defined = _defined_in(Path(file).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ValueError(f"{file} cannot be graded: line {error.lineno or 1} is not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # MemoryError: of the parser's own stack
        why = "it is nested too deep for Python" if isinstance(error, MemoryError) else error
        raise ValueError(f"{file} cannot be graded: {why}") from None
    names = [name for name in GRADERS if name in defined]
    if not names:
        raise ValueError(f"{file} defines none of {', '.join(GRADERS)}; write at least one")
    with busy("grading on 1 to 8 ranks"):
        return [_judged_apart(name, f"{file}:{name}") for name in names]


def _judged_apart(name: str, place: str) -> Score:
    """The score of a file's function, from a process of its own, in which the file may do what it likes.

    That process is ended after MINUTES; without a verdict the function is refused. What it raises is raised here.
    """
    from multiprocessing import get_context

    from zerosim.course.puzzles.score import REFUSED, Score

    processes = get_context("spawn")
    here, there = processes.Pipe(duplex=False)
    child = processes.Process(target=_judge, args=(there, name, place), daemon=True)
    child.start()
    there.close()
    try:
        found = here.recv() if here.poll(60 * MINUTES) else f"It has not ended after {MINUTES:g} minutes"
    except EOFError:
        child.join()
        found = f"The process ended with code {child.exitcode} and without a verdict"
    finally:
        child.kill()
        child.join()
    if isinstance(found, Exception):
        raise found
    return found if isinstance(found, Score) else Score(name, REFUSED, f"{found}; let the function return.")


def _judge(verdict: Connection, name: str, place: str) -> None:
    """Sends the score, or a ValueError for what is no function of a file; runs in a process of its own."""
    from zerosim.course import puzzles as offered
    from zerosim.course.puzzles.grading import GRADERS
    from zerosim.course.puzzles.judging import ended
    from zerosim.course.puzzles.score import REFUSED, Refused, Score
    from zerosim.course.puzzles.watching import limited
    from zerosim.course.running import load

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of Ctrl-C the process that waits for this one says enough
    found: Score | ValueError
    try:
        with redirect_stdout(sys.stderr), limited("reading the file"):
            answer = load(place)
        found = GRADERS[name](answer) if name in GRADERS else offered.check(name, answer)
    except Refused as error:
        found = Score(name, REFUSED, ended(str(error)))
    except ValueError as error:
        found = error
    except BaseException as error:  # KeyboardInterrupt too: the terminal's never comes here, so the file raised it
        found = Score(name, REFUSED, f"It was ended by {type(error).__name__}; let the function return.")
    verdict.send(found)


def _defined_in(text: str) -> set[str]:
    """The names that a Python text binds at its top: functions, classes, variables, imports. The text is not run."""
    from symtable import symtable

    symbols = symtable(text, "", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _print_scores(scores: list[Score], data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        typer.echo("\n\n".join(map(str, scores)))
    if not all(score.passed for score in scores):
        raise typer.Exit(NOT_PASSED)
