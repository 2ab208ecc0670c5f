"""Constants of the package, described by what stands beside them in the source: the comment above, and the text."""

import ast
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from zerosim_site.page import fenced

MOST_LINES = 16


@dataclass(frozen=True)
class Constant:
    """A constant: the module that assigns it, its name, the sentences in the comment above it, and its assignment."""

    module: str
    name: str
    comment: str
    text: str

    @property
    def says(self) -> str:
        """Its description, in a line."""
        value = getattr(importlib.import_module(self.module), self.name)
        if self.comment:
            return self.comment
        if isinstance(value, Mapping):
            return f"A table; its rows are {', '.join(f'`{row!r}`' for row in value)}."
        return f"A constant of `{self.module.removeprefix('zerosim.')}`."

    def section(self, heading: str) -> str:
        """Its part of a page, with an anchor that is its full name."""
        lines = self.text.splitlines()
        shown = lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], "    ..."]
        return "\n\n".join([f"## {heading} {{ #{self.module}.{self.name} .doc-heading }}", self.says,
                            fenced("\n".join(shown), "python")])


@cache
def constant(module: str, name: str) -> Constant:
    """The constant that ``module`` assigns or imports, for type checkers too; ValueError where it does neither."""
    source = inspect.getsource(importlib.import_module(module))
    body = ast.parse(source).body
    for node in [*body, *(inner for block in body if isinstance(block, ast.If) for inner in block.body)]:
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return constant(str(node.module), name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
            lines = source.splitlines()
            comment = _comment_above(lines, node.lineno)
            text = "\n".join(lines[node.lineno - 1:node.end_lineno])
            # A comment that is no sentence heads the columns of a table, and stays with it.
            is_prose = " ".join(comment).endswith(".")
            return Constant(module, name, " ".join(comment) if is_prose else "",
                            text if is_prose else "\n".join([*(f"# {line}" for line in comment), text]))
    raise ValueError(f"{module} neither assigns nor imports {name}")


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def _comment_above(lines: list[str], number: int) -> list[str]:
    """The lines of the comment that ends right above a line, counted from 1."""
    found: list[str] = []
    for line in reversed(lines[:number - 1]):
        if not line.startswith("# ") or line.startswith("# --"):
            break
        found.insert(0, line[2:])
    return found
