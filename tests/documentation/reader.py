"""Readers of the project's documents for their tests, without the code that makes the site."""

import importlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.architecture.source import ROOT

DEFINED = re.compile(r"(?<![*\w`])(\*{1,2})(?=[^\s*])([^*\n]+?)(?<=\S)\1(?![*\w])")
TERM = re.compile(r"[a-z][a-z0-9-]{3,}(?: [a-z][a-z-]+){0,2}")
IMPORT = re.compile(r"^\s*from (zerosim[\w.]*) import (.+)$", re.M)


def notebook_files() -> list[Path]:
    """The executed notebooks."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def words_of(notebook: Path) -> str:
    """The text of a notebook's cells of prose."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def plain(text: str) -> str:
    """The text for comparison: small letters, one space between words, no hyphens and no marks."""
    return " ".join(re.sub(r"[-_*`\s]+", " ", text.casefold()).split())


def defined_in(notebook: Path) -> set[str]:
    """The terms that a notebook sets in italics or bold: one to three words in small letters."""
    lines = " ".join(words_of(notebook).split())
    return {match[2].strip(" .,:;") for match in DEFINED.finditer(lines) if TERM.fullmatch(match[2].strip(" .,:;"))}


def forms(term: str) -> set[str]:
    """A term as it may stand in a sentence: singular, plural, or with a verb's ending."""
    word = plain(term)
    endings = (("s$", ""), ("$", "s"), ("$", "es"), ("ies$", "y"), ("y$", "ies"), ("trix$", "trices"),
               ("e$", "ing"), ("$", "ing"))
    return {word, *(re.sub(old, new, word, count=1) for old, new in endings)}


def is_entry(term: str, entries: Iterable[str]) -> bool:
    """True for an entry of the glossary, or a part of one: ``probabilities`` of "attention probabilities"."""
    words = [set(form.split()) for form in forms(term)]
    return any(one <= set(form.split()) for entry in entries for form in forms(entry) for one in words)


def public(package: str) -> Iterator[tuple[str, Any]]:
    """The names of a package's ``__all__``, with what they are; modules apart."""
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            yield name, value


def is_described(name: str, value: Any, documented: set[str]) -> bool:
    """True where one of the reference's names that end in this one is this object; a module, by what it holds."""
    if isinstance(value, ModuleType):
        return any(one.startswith(f"{value.__name__}.") for one in documented)
    return any(resolved(one) is value for one in documented if one.rpartition(".")[2] == name)


def resolved(dotted: str) -> Any:
    """The object of a full name, such as ``zerosim.ranks.cluster.Cluster``; what is imported hides modules."""
    module, _, name = dotted.rpartition(".")
    parent = importlib.import_module(module)
    return getattr(parent, name) if hasattr(parent, name) else importlib.import_module(dotted)


def imported_by_readers() -> set[tuple[str, str]]:
    """(module, name) of all that the README, docs/ and the notebooks import from the package's floors."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks/texts").glob("*.py")]
    found = [pair for path in texts for pair in IMPORT.findall(path.read_text(encoding="utf-8"))]
    return {(module, name.strip()) for module, names in found
            for name in names.partition("#")[0].strip("()").split(",") if name.strip()}
