"""The package as text: what the architecture's checks read. Each file is read and parsed once per session."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT_SUFFIXES = {"", ".css", ".cu", ".h", ".ipynb", ".js", ".json", ".md", ".py", ".svg", ".toml", ".txt", ".yaml",
                 ".yml"}
# What tools leave behind, as .gitignore says; hidden folders too, but for .ci.
LEFT_BEHIND = {"__pycache__", "build", "dist", "mutants"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its path inside the repository, with forward slashes, and its text; what is below is of Python's."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the file."""
        return list(ast.walk(self.tree))

    @cached_property
    def run_at_import(self) -> list[ast.AST]:
        """The nodes outside of functions, those for type checkers included."""
        found, waiting = [], list(ast.iter_child_nodes(self.tree))
        while waiting:
            node = waiting.pop()
            if not isinstance(node, Function):
                found.append(node)
                waiting.extend(ast.iter_child_nodes(node))
        return found

    @property
    def floor(self) -> str:
        """The folder or file right under ``zerosim/``: ``numerics``, ``cli``, ``__init__``."""
        return self.path.split("/")[1].removesuffix(".py")

    @property
    def module(self) -> str:
        """The dotted name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def at(self, node: ast.AST, what: str) -> str:
        """A violation, as one line that an editor can jump to."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


@cache
def package_sources() -> tuple[Source, ...]:
    """Every Python file of the package."""
    return tuple(map(_read, sorted((ROOT / "zerosim").rglob("*.py"))))


def _read(path: Path) -> Source:
    return Source(str(path.relative_to(ROOT).as_posix()), path.read_text(encoding="utf-8"))


def project_texts() -> Iterator[Source]:
    """Every text file of the repository, without git: the tests run from an archive too."""
    return (_read(path) for path in sorted(_files(ROOT)) if path.suffix in TEXT_SUFFIXES)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        hidden = path.name.startswith(".") and path.name not in {".ci", ".gitignore"}
        if hidden or path.name in LEFT_BEHIND or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.is_file():
            yield path
