"""The reference: every public name of the package, a page for each floor.

What is public is what ``__all__`` lists. Floors that list nothing are documented module by module.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import zerosim
from zerosim_site import constants
from zerosim_site.page import ROOT, Page

SECTION = "Reference"
PACKAGE = "zerosim"
# The pages in reading order, each a floor or a part of one, with modules that are described whole beside what the floor
# exports. Modules from which the README, docs/ or a notebook imports need not be named here: they are found.
FLOORS: dict[str, tuple[str, ...]] = {
    "ranks": (),
    "zero": (),
    "models": (),
    "optim": (),
    "planning": (),
    "numerics": ("zerosim.numerics.*",),
    "lessons": (),
    "lessons.puzzles": (),
    "lessons.figures": (),
    "testing": ("zerosim.testing",),
}
IMPORT = re.compile(r"^\s*from (zerosim[\w.]*) import ([^#\n]+)", re.M)
READ = ("README.md", "docs/*.md", "notebooks/*.py")
TITLES = {"lessons.puzzles": "puzzles", "lessons.figures": "figures"}
# How arrays are added and rounded on one device or another is nothing that users call.
INNER = ("cupy_", "kernels")


@dataclass(frozen=True)
class Name:
    """A public name: how it is written, where it is defined, and the first paragraph of its docstring."""

    written: str
    defined: str
    says: str


def public_names() -> dict[str, Name]:
    """What ``zs.`` offers, by name, modules apart, in the order of the alphabet, errors last."""
    found = {name: getattr(zerosim, name) for name in zerosim.__all__}
    return {name: _name(f"zs.{name}", PACKAGE, name, value) for name, value in sorted(found.items(), key=_folded)
            if not isinstance(value, ModuleType)}


def floor_names(floor: str) -> dict[str, Name]:
    """What a floor's ``__all__`` lists, by name, modules apart."""
    module = importlib.import_module(f"{PACKAGE}.{floor}")
    listed = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return {name: _name(f"{floor}.{name}", module.__name__, name, value)
            for name, value in sorted(listed.items(), key=_folded) if not isinstance(value, ModuleType)}


def floor_modules(floor: str) -> list[str]:
    """The modules that a floor's page shows whole: those that it exports, and those that FLOORS adds."""
    module = importlib.import_module(f"{PACKAGE}.{floor}")
    exported = [value.__name__ for name in getattr(module, "__all__", ())
                if isinstance(value := getattr(module, name), ModuleType)]
    added = [one for pattern in FLOORS[floor] for one in _matching(pattern)]
    read = [one for one in read_modules() if _page_of(one) == floor]
    return list(dict.fromkeys([*exported, *added, *read]))


@cache
def read_modules() -> list[str]:
    """Modules that define what the README, ``docs/`` and the notebooks import, and that no ``__all__`` offers."""
    offered = {name.defined for floor in FLOORS for name in floor_names(floor).values()}
    offered |= {name.defined for name in public_names().values()}
    texts = [path.read_text(encoding="utf-8") for pattern in READ for path in sorted(ROOT.glob(pattern))]
    found = {(module, name.strip("() ")) for text in texts for module, names in IMPORT.findall(text)
             for name in names.split(",")}
    values = {(module, name): getattr(importlib.import_module(module), name, None) for module, name in found}
    return sorted({value.__module__ for value in values.values() if _described(value)
                   and f"{value.__module__}.{value.__qualname__}" not in offered})


def _page_of(module: str) -> str:
    """The page on which a module is described: the longest of FLOORS that it lies in."""
    inside = [floor for floor in FLOORS if f"{module}.".startswith(f"{PACKAGE}.{floor}.")]
    return max(inside, key=len)


def reference_pages() -> list[Page]:
    """The list of what ``zs.`` offers, and a page for each floor."""
    shown: dict[str, str] = {}
    pages = [_floor_page(floor, shown) for floor in FLOORS]
    return [_contents(shown, pages), *pages]


def _contents(shown: dict[str, str], pages: list[Page]) -> Page:
    """What ``zs.`` offers. Names that no floor lists are described here."""
    names, floors = public_names(), ", ".join(f"[{page.title}]({page.uri.partition('/')[2]})" for page in pages)
    rows = [f"| [`{name.written}`]({shown.get(name.defined, '')}#{name.defined}) | {_in_table(name.says)} |"
            for name in names.values()]
    lines = ["# Reference", "After `import zerosim as zs`, everything below is there. The floors have more names, on "
             f"their own pages: {floors}.", "\n".join(["| name | what it is |", "|---|---|", *rows])]
    for name in names.values():
        if name.defined not in shown:
            lines.append(_entry(name, name.written))
    return Page("reference/index.md", SECTION, "\n\n".join(lines) + "\n", "reference/index.md", SECTION)


def _floor_page(floor: str, shown: dict[str, str]) -> Page:
    module = importlib.import_module(f"{PACKAGE}.{floor}")
    title, uri = _title(floor), f"{floor.replace('.', '_')}.md"
    of_zs = {name.defined: name.written for name in public_names().values()}
    lines = [f"# {title}", _first_paragraph(module.__doc__)]
    for name in floor_names(floor).values():
        if name.defined not in shown:
            shown[name.defined] = uri
            lines.append(_entry(name, of_zs.get(name.defined, name.written)))
    for inner in floor_modules(floor):
        listed = sorted(_defined_in(inner))
        fresh = [name for name in listed if f"{inner}.{name}" not in shown]
        shown.update({f"{inner}.{name}": uri for name in fresh})
        lines.append(_directive(inner, inner.removeprefix(f"{PACKAGE}."), fresh))
    return Page(f"reference/{uri}", title, "\n\n".join(lines) + "\n", f"reference/{floor}", SECTION)


def _entry(name: Name, heading: str) -> str:
    """One name's documentation; that of a constant is its own text in the source."""
    module, _, last = name.defined.rpartition(".")
    if _described(getattr(importlib.import_module(module), last)):
        return _directive(name.defined, heading)
    return constants.constant(module, last).section(heading)


def _directive(identifier: str, heading: str, members: list[str] | None = None) -> str:
    """What mkdocstrings replaces by the documentation of one object; of a module, with these members."""
    lines = [f"::: {identifier}", "    options:", f'      heading: "{heading}"', f'      toc_label: "{heading}"']
    if members is not None:
        lines += ["      members:" + ("" if members else " []"), *(f"        - {name}" for name in members)]
    return "\n".join(lines)


def _matching(pattern: str) -> Iterator[str]:
    package, _, last = pattern.rpartition(".")
    if last != "*":
        yield pattern
        return
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        short = found.name.rpartition(".")[2]
        if not short.startswith(INNER[0]) and not short.endswith(INNER[1]):
            yield found.name


def _defined_in(module: str) -> Iterator[str]:
    """The public functions and classes that a module defines itself."""
    for name, value in vars(importlib.import_module(module)).items():
        if not name.startswith("_") and _described(value) and value.__module__ == module:
            yield name


def _name(written: str, package: str, name: str, value: Any) -> Name:
    if _described(value):
        return Name(written, f"{value.__module__}.{value.__qualname__}", _first_paragraph(value.__doc__))
    constant = constants.constant(package, name)
    return Name(written, f"{constant.module}.{name}", constant.says)


def _described(value: Any) -> bool:
    """Whether mkdocstrings finds it: functions and classes have docstrings."""
    return inspect.isclass(value) or inspect.isfunction(value)


def _title(floor: str) -> str:
    return TITLES.get(floor, floor)


def _folded(item: tuple[str, Any]) -> tuple[bool, str]:
    """The order of a page: by name, errors last."""
    name, value = item
    return inspect.isclass(value) and issubclass(value, Exception), name.casefold()


def _first_paragraph(docstring: str | None) -> str:
    text = inspect.cleandoc(docstring or "").split("\n\n")[0]
    return " ".join(text.split())


def _in_table(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").replace("``", "`")
