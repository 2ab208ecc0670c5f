"""The reference: every public name of the package, a page for each floor.

What is public is what ``__all__`` lists. Floors that list nothing are documented module by module.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import zerosim
from zerosim_site import constants
from zerosim_site.page import ROOT, Page, outside_code
from zerosim_site.prose import escaped

SECTION = "Reference"
PACKAGE = "zerosim"
# The pages in reading order, each a floor or a part of one, with modules that are described whole beside what the floor
# exports. Modules from which the README, docs/ or a notebook imports need not be named here: they are found.
FLOORS: dict[str, tuple[str, ...]] = {
    "ranks": (),
    "backends": (),
    "zero": (),
    "models": (),
    "optim": (),
    "planning": (),
    "frameworks": (),
    "numerics": tuple(f"zerosim.numerics.{name}" for name in (
        "formats", "rounding", "policy", "loss_scale", "random", "arrays", "units")),
    "display": (),
    "course": (),
    "course.museum": (),
    "course.puzzles": (),
    "course.figures": (),
    "testing": ("zerosim.testing",),
}
IMPORT = re.compile(r"^\s*from (zerosim[\w.]*) import ([^#\n]+)", re.M)
READ = ("README.md", "docs/*.md", "notebooks/texts/*.py")
TITLES = {"course.museum": "museum", "course.puzzles": "puzzles", "course.figures": "figures"}


@dataclass(frozen=True)
class Name:
    """A public name: how it is written, where it is defined, and the first paragraph of its docstring."""

    written: str
    defined: str
    says: str


def public_names() -> dict[str, Name]:
    """The names that ``zs.`` offers, by name, modules apart, in the order of the alphabet, errors last."""
    found = {name: getattr(zerosim, name) for name in zerosim.__all__}
    return {name: _name(f"zs.{name}", PACKAGE, name, value) for name, value in sorted(found.items(), key=_folded)
            if not isinstance(value, ModuleType)}


def floor_names(floor: str) -> dict[str, Name]:
    """The names that ``zs.`` offers of a floor, and those of the floor's ``__all__``, modules apart."""
    found = _listed(f"{PACKAGE}.{floor}", _title(floor))
    known = {name.defined for name in found.values()}
    return {name: value for name, value in public_names().items()
            if _page_of(value.defined) == floor and value.defined not in known} | found


def _listed(package: str, written: str) -> dict[str, Name]:
    """The names of a package's ``__all__``, modules apart."""
    module = importlib.import_module(package)
    listed = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return {name: _name(f"{written}.{name}", package, name, value)
            for name, value in sorted(listed.items(), key=_folded) if not isinstance(value, ModuleType)}


def floor_modules(floor: str) -> list[str]:
    """The modules that a floor's page shows whole: those that it exports, and those that FLOORS adds."""
    read = [one for one in read_modules() if _page_of(one) == floor]
    return list(dict.fromkeys([*_exported_modules(f"{PACKAGE}.{floor}"), *FLOORS[floor], *read]))


def _exported_modules(package: str) -> list[str]:
    module = importlib.import_module(package)
    return [value.__name__ for name in getattr(module, "__all__", ())
            if isinstance(value := getattr(module, name), ModuleType)]


@cache
def read_modules() -> list[str]:
    """Modules that the README, ``docs/`` and the notebooks import, or from which, and that no ``__all__`` offers."""
    packages = [f"{PACKAGE}.{floor}" for floor in FLOORS]
    packages += [one for package in packages for one in _exported_modules(package)]
    offered = {name.defined for package in packages for name in _listed(package, package).values()}
    offered |= {name.defined for name in public_names().values()}
    values = [_imported(module, name.strip("() "), path) for pattern in READ for path in sorted(ROOT.glob(pattern))
              for module, names in IMPORT.findall(path.read_text(encoding="utf-8")) for name in names.split(",")]
    whole = {value.__name__ for value in values if isinstance(value, ModuleType)} - set(packages)
    return sorted(whole | {str(value.__module__) for value in values if _described(value)
                           and f"{value.__module__}.{value.__qualname__}" not in offered})


def _imported(module: str, name: str, path: Path) -> Any:
    """The object that a text imports. Raises ValueError where the package has no such name."""
    try:
        parent = importlib.import_module(module)
        return getattr(parent, name) if hasattr(parent, name) else importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        raise ValueError(f"{path.relative_to(ROOT)} imports {name} from {module}, which is not there") from error


def _page_of(dotted: str) -> str:
    """The floor that a module or a name lies in, the longest of FLOORS; none for what lies in no floor."""
    inside = [floor for floor in FLOORS if f"{dotted}.".startswith(f"{PACKAGE}.{floor}.")]
    return max(inside, key=len, default="")


def reference_pages() -> list[Page]:
    """The list of what ``zs.`` offers, and a page for each floor."""
    shown: dict[str, str] = {}
    pages = [_floor_page(floor, shown) for floor in FLOORS]
    return [_contents(shown, pages), *pages]


def _contents(shown: dict[str, str], pages: list[Page]) -> Page:
    """The table of what ``zs.`` offers. Names that no floor lists are described here."""
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
        written = inner.removeprefix(f"{PACKAGE}.")
        fresh = [name for name in sorted(_defined_in(inner)) if f"{inner}.{name}" not in shown]
        shown.update({f"{inner}.{name}": uri for name in fresh})
        lines.append(_directive(inner, written, fresh))
        for name in _listed(inner, written).values():
            if name.defined not in shown:
                shown[name.defined] = uri
                lines.append(_entry(name, name.written))
    return Page(f"reference/{uri}", title, "\n\n".join(lines) + "\n", f"reference/{floor}", SECTION)


def _entry(name: Name, heading: str) -> str:
    """One name's documentation; that of a constant is its own text in the source."""
    module, _, last = name.defined.rpartition(".")
    if _described(getattr(importlib.import_module(module), last)):
        return _directive(name.defined, heading)
    return constants.constant(module, last).section(heading)


def _directive(identifier: str, heading: str, members: list[str] | None = None) -> str:
    """The lines that mkdocstrings replaces by the documentation of one object; of a module, with these members."""
    lines = [f"::: {identifier}", "    options:", f'      heading: "{heading}"', f'      toc_label: "{heading}"']
    if members is not None:
        lines += ["      members:" + ("" if members else " []"), *(f"        - {name}" for name in members)]
    return "\n".join(lines)


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
    """True for what mkdocstrings finds: classes and functions, also those that remember their answers."""
    return inspect.isclass(value) or (callable(value) and inspect.isfunction(inspect.unwrap(value)))


def _title(floor: str) -> str:
    return TITLES.get(floor, floor)


def _folded(item: tuple[str, Any]) -> tuple[bool, str]:
    """The order of a page: by name, errors last."""
    name, value = item
    return inspect.isclass(value) and issubclass(value, BaseException), name.casefold()


def _first_paragraph(docstring: str | None) -> str:
    text = inspect.cleandoc(docstring or "").split("\n\n")[0]
    return " ".join(text.split())


def _in_table(text: str) -> str:
    return outside_code(escaped, text).replace("|", "\\|").replace("``", "`")
