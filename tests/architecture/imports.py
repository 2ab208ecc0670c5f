"""Checks of who imports whom, as functions of one file's text."""

import ast
from collections.abc import Iterator

from tests.architecture.source import Source

# Floor by floor, downwards. `connect` is the edge where a run meets its launcher.
# `zerosim/__init__` and `testing` offer the floors' names to those outside only.
MAY_IMPORT = {
    "tiny": set(),  # ZeRO in one file, which one may copy anywhere
    "shown": set(),
    "numerics": set(),
    "ranks": {"numerics", "shown"},
    "models": {"numerics"},
    "optim": {"numerics"},
    "planning": {"numerics", "shown"},
    "zero": {"numerics", "ranks", "models", "optim", "shown"},
    "testing": {"numerics", "ranks", "models", "optim", "planning", "zero"},
    "connect": {"ranks"},
    # Of the lessons it offers the puzzles, imported when they are asked for: test_import_is_light.py.
    "__init__": {"connect", "numerics", "ranks", "models", "optim", "planning", "zero", "lessons"},
    "lessons": {"numerics", "ranks", "models", "optim", "planning", "zero"},
    "doctor": {"numerics", "ranks", "lessons", "__init__"},
    "cli": {"numerics", "ranks", "models", "optim", "planning", "zero", "lessons", "doctor", "__init__"},
    "__main__": {"cli"},
}
# The one file that reaches for a higher floor, by name and when somebody looks: how the things below look.
REACHES_UP = "zerosim/shown.py"
LEDGER = {"ranks", "models", "zero"}
PENCIL_MEETS_LEDGER = "zerosim/lessons/measured/"


def imported_modules(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Each import statement of a file, wherever it stands, with the absolute name that it asks for."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from zerosim import ranks` names the floor last, `from zerosim.ranks import Rank` does not.
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def imported_floors(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Each import of the package's own floors; `from zerosim import Cluster` asks the facade, `__init__`."""
    for node, name in imported_modules(source):
        top, _, rest = name.partition(".")
        if top == "zerosim":
            floor = rest.partition(".")[0]
            yield node, floor if floor in MAY_IMPORT else "__init__"


def imports_that_climb(source: Source) -> list[str]:
    """Imports of a floor that does not lie below."""
    if source.floor not in MAY_IMPORT:
        return [f"{source.path}:1: stands on no known floor; the floors are {', '.join(MAY_IMPORT)}"]
    allowed = MAY_IMPORT[source.floor] | {source.floor}
    return [source.at(node, f"{source.floor} imports {floor}, which does not lie below it")
            for node, floor in imported_floors(source) if floor not in allowed]


def pencil_beside_ledger(source: Source) -> list[str]:
    """Files that import both what predicts and what is predicted, but for the folder that exists for it."""
    if source.path.startswith(PENCIL_MEETS_LEDGER) or source.floor in {"__init__", "testing"}:
        return []
    floors = {floor: node for node, floor in imported_floors(source)}
    met = sorted(LEDGER & floors.keys())
    if "planning" not in floors or not met:
        return []
    return [source.at(floors["planning"], f"imports planning beside {', '.join(met)}; "
                      f"pencil and ledger meet only in {PENCIL_MEETS_LEDGER} and in tests")]


def imports_by_name(source: Source) -> list[str]:
    """Modules that are fetched by a name in quotes, which no rule of floors sees, outside the one file that may."""
    if source.path == REACHES_UP or source.floor in {"lessons", "doctor", "cli", "__main__"}:
        return []
    names = {"import_module", "__import__"}
    return [source.at(node, "fetches a module by its name in quotes; write an import statement")
            for node in ast.walk(source.tree) if isinstance(node, ast.Call)
            and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in names]
