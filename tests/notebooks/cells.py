"""A notebook without Jupyter: the cells of a percent text, executed one after the other in this process."""

import ast
import contextlib
import io
import json
import re
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MARK = re.compile(r"^# %%(?P<markdown> \[markdown\])?\s*$", re.M)


class Cell(NamedTuple):
    """One cell: ``markdown`` or ``code``, and its text."""

    kind: str
    source: str


class Shown(NamedTuple):
    """What a code cell printed, and the value that its last line displays (None: none)."""

    printed: str
    displayed: Any = None


def cells(text: str) -> list[Cell]:
    """The cells of a percent text; what stands before the first mark is Jupytext's header."""
    marks = list(MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    found = []
    for mark, end in zip(marks, ends, strict=True):
        body = text[mark.end():end].strip("\n")
        if mark["markdown"]:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.split("\n")]
            found.append(Cell("markdown", "\n".join(lines)))
        else:
            found.append(Cell("code", body))
    return found


def changed(text: Path, *changes: tuple[str, str]) -> str:
    """A notebook's text, changed; what a change replaces must occur exactly once."""
    found = text.read_text(encoding="utf-8")
    for old, new in changes:
        assert found.count(old) == 1, f"{found.count(old)} times in {text.name}: {old}"
        found = found.replace(old, new)
    return found


def executed(text: str, namespace: dict[str, Any] | None = None) -> Iterator[Shown]:
    """Runs the code cells in one namespace (None: a new one), and yields what each shows."""
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    for number, cell in enumerate(cells(text)):
        if cell.kind == "code":
            yield _run(cell.source, f"cell {number}", namespace)


def _run(source: str, name: str, namespace: dict[str, Any]) -> Shown:
    body = ast.parse(source, name).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), name, "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace) if last else None
    return Shown(printed.getvalue(), value)


def committed(copy: Path) -> list[tuple[Cell, list[dict[str, Any]]]]:
    """The cells of an executed copy, each with its outputs."""
    notebook = json.loads(copy.read_text(encoding="utf-8"))
    return [(Cell(cell["cell_type"], "".join(cell["source"])), cell.get("outputs", [])) for cell in notebook["cells"]]


def printed_in(outputs: list[dict[str, Any]]) -> str:
    """What the outputs of a committed cell say on standard output."""
    return "".join("".join(one["text"]) for one in outputs if one.get("name") == "stdout")


def displayed_in(outputs: list[dict[str, Any]]) -> dict[str, str]:
    """The value that a committed cell displays, by MIME type."""
    found = [one["data"] for one in outputs if one["output_type"] == "execute_result"]
    return {kind: "".join(value) for data in found for kind, value in data.items()}


def picture_in(outputs: list[dict[str, Any]]) -> tuple[bytes, dict[str, Any]] | None:
    """The PNG that a committed cell displays, and what is said of it; None where it displays none."""
    for one in outputs:
        if "image/png" in one.get("data", {}):
            return b64decode("".join(one["data"]["image/png"])), one["metadata"]["image/png"]
    return None


def needed_by_proof(text: str) -> tuple[ast.Module, str]:
    """What a notebook's last cell needs of the other cells, and the last cell.

    Kept are imports, definitions and assignments of names that are used there, or in anything kept, calls of methods of
    such names, and loops that fill them (``name[key] = ...``). Other loops only show.
    """
    *before, proof = [cell.source for cell in cells(text) if cell.kind == "code"]
    statements = [statement for cell in before for statement in ast.parse(cell).body]
    used, known, kept = _names(ast.parse(proof)), set(), []
    while used != known:
        known = used
        kept = [statement for statement in statements if _makes(statement) & known]
        used = known.union(*map(_names, kept))
    return ast.Module(kept, []), proof


def _names(node: ast.AST, stored: bool = False) -> set[str]:
    """The names in a piece of code, or only those that it binds."""
    return {one.id for one in ast.walk(node)
            if isinstance(one, ast.Name) and (not stored or isinstance(one.ctx, ast.Store))}


def _makes(statement: ast.stmt) -> set[str]:
    """The names that a statement binds, or whose value it may change."""
    match statement:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(name.asname or name.name).partition(".")[0] for name in names}
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):  # and not the names of a comprehension
            return {name for target in targets for name in _names(target, stored=True)}
        case ast.Try():
            return _names(statement, stored=True)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return {name}
    return {one.value.id for one in ast.walk(statement) if isinstance(one, ast.Subscript | ast.Attribute)
            and isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name)}
