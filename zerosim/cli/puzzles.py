"""The command for the puzzles: what they are, hints, and the check of a reader's own file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerosim.cli.shell import AsJson, busy, command, print_json, show

if TYPE_CHECKING:
    from zerosim.course.puzzles.puzzle import Puzzle

NOT_PASSED = 1  # exit code


@command("puzzles")
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
    from zerosim.course.puzzles import puzzle_named

    asked = [option for option, given in (("--stub", stub), ("--hint", hint is not None),
                                          ("--check", check is not None), ("--solution", solution)) if given]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} were given; ask for one thing at a time")
    if grade is not None:
        if name is not None or asked:
            raise ValueError("--grade takes a file and nothing else: zerosim puzzles --grade FILE.py")
        _grade(grade, as_json)
    elif name is None:
        if asked:
            raise ValueError(f"{asked[0]} is about one puzzle; name it: zerosim puzzles ring {asked[0]}")
        _print_all(as_json)
    elif check is not None:
        _check(name, check, as_json)
    elif hint is not None:
        _print(name, {"hint": hint, "text": offered.hint(name, hint)}, as_json)
    elif solution:
        _print(name, {"text": offered.solution(name)}, as_json)
    elif stub:
        _print(name, {"text": offered.stub(name)}, as_json)
    elif as_json:
        print_json(_as_json(puzzle_named(name)))
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
    from zerosim.course.puzzles import PUZZLES
    from zerosim.display.views import TextLine, View, marked_table

    if as_json:
        print_json({"puzzles": [_as_json(puzzle) for puzzle in PUZZLES.values()]})
        return
    show(View("", "", (
        marked_table("puzzle", "what to write", ">hints", rows=[
            (puzzle.name, puzzle.title, str(len(puzzle.hints))) for puzzle in PUZZLES.values()]),
        TextLine(""),
        TextLine("zerosim puzzles mean                          states it"),
        TextLine("zerosim puzzles mean --stub > mean.py         is where to begin"),
        TextLine("zerosim puzzles mean --check mean.py:mean     runs it on 1 to 8 ranks"))))


def _check(name: str, place: str, as_json: bool) -> None:
    from zerosim.course.puzzles import puzzle_named
    from zerosim.course.puzzles.checker import check_answer
    from zerosim.course.running import load

    puzzle = puzzle_named(name)
    answer = load(place)
    with busy(f"checking {name} on 1 to 8 ranks"):
        score = check_answer(puzzle, answer)
    if as_json:
        print_json(score.as_json())
    else:
        typer.echo(repr(score))
    if not score.passed:
        raise typer.Exit(NOT_PASSED)


def _grade(file: str, as_json: bool) -> None:
    from pathlib import Path

    from zerosim.course.puzzles.adapters import GRADERS
    from zerosim.course.running import load

    if not Path(file).is_file():
        raise ValueError(f"no file {file!r} to grade; the path is taken from {Path.cwd()}")
    try:
        there = defined_in(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be graded: {error}") from None
    names = [name for name in GRADERS if name in there]
    if not names:
        raise ValueError(f"{file} defines none of {', '.join(GRADERS)}; write at least one")
    with busy("grading on 1 to 8 ranks"):
        scores = [GRADERS[name](load(f"{file}:{name}")) for name in names]
    if as_json:
        print_json({"grades": [score.as_json() for score in scores]})
    else:
        typer.echo("\n\n".join(map(repr, scores)))
    if not all(score.passed for score in scores):
        raise typer.Exit(NOT_PASSED)


def defined_in(text: str) -> set[str]:
    """The names that stand at the top of a Python text: functions, classes, variables, and what is imported by name.

    Raises ValueError for what is no Python.
    """
    import ast

    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno} is not Python: {error.msg}") from None
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found
