"""The reference: every public name of the package, a page for each floor.

What is public is what ``__all__`` lists. Floors that list nothing are documented module by module.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import zerosim
from zerosim_site import constants
from zerosim_site.page import Page

SECTION = "Reference"
PACKAGE = "zerosim"
# Where users import from, and where the reference says what is there, in reading order. `all` of numerics: its floor
# exports nothing, its modules do. Beside a floor, modules whose names one needs and which it does not export.
FLOORS: dict[str, tuple[str, ...]] = {
    "ranks": (),
    "zero": (),
    "models": ("zerosim.models.text", "zerosim.models.generate"),
    "optim": (),
    "planning": (),
    "numerics": ("zerosim.numerics.*",),
    "lessons.puzzles": ("zerosim.lessons.puzzles.adapters",),
    "lessons.figures": (),
    "testing": ("zerosim.testing",),
}
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
    return list(dict.fromkeys([*exported, *added]))


def documented() -> set[str]:
    """Every name that the reference has, by where it is defined: ``zerosim.ranks.cluster.Cluster``."""
    found = {name.defined for name in public_names().values()}
    for floor in FLOORS:
        found |= {name.defined for name in floor_names(floor).values()}
        for module in floor_modules(floor):
            found |= {module, *(f"{module}.{name}" for name in _defined_in(module))}
    return found


def reference_pages() -> list[Page]:
    """The list of what ``zs.`` offers, and a page for each floor."""
    shown: dict[str, str] = {}
    pages = [_floor_page(floor, shown) for floor in FLOORS]
    return [_contents(shown), *pages]


def _contents(shown: dict[str, str]) -> Page:
    """What ``zs.`` offers. Names that no floor lists are described here."""
    names = public_names()
    lines = ["# Reference", "After `import zerosim as zs`, everything below is there. The floors have more names, on "
             "their own pages: " + ", ".join(f"[{_title(floor)}]({floor.replace('.', '_')}.md)" for floor in FLOORS) + ".",
             "\n".join(["| name | what it is |", "|---|---|",
                        *(f"| [`{name.written}`]({shown.get(name.defined, '')}#{name.defined}) | {_in_table(name.says)} |" for name in names.values())])]
    for name in names.values():
        if name.defined not in shown:
            lines.append(_entry(name, name.written))
    return Page("reference/index.md", SECTION, "\n\n".join(lines) + "\n", "reference/index.md", SECTION)


def _floor_page(floor: str, shown: dict[str, str]) -> Page:
    module = importlib.import_module(f"{PACKAGE}.{floor}")
    title, uri, of_zs = _title(floor), f"{floor.replace('.', '_')}.md", {name.defined: name.written for name in public_names().values()}
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
