"""Checks of who imports whom, as functions of one file's text; circles, of all files'."""

import ast
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from tests.architecture.source import Source

# Floor by floor, downwards. `testing` and `__init__` offer the floors' names to those outside;
# `connect` is the edge where a run meets its launcher, and with `__init__` the only door to the backends.
MAY_IMPORT = {
    "tiny": set(),  # ZeRO in one file, which one may copy anywhere
    "shown": set(),
    "face": set(),
    "numerics": set(),
    "ranks": {"numerics", "shown", "face"},
    "models": {"numerics", "face"},
    "optim": {"numerics", "face"},
    "options": {"numerics", "ranks"},  # of a step: what an engine takes and a plan counts
    "zero": {"numerics", "ranks", "models", "optim", "options", "shown", "face"},
    "planning": {"numerics", "ranks", "models", "optim", "options", "shown", "face"},
    "frameworks": {"numerics", "ranks", "models", "optim", "options", "zero", "planning", "oracle"},
    "backends": {"numerics", "ranks"},
    "connect": {"ranks", "backends"},
    "testing": {"numerics", "ranks", "models", "optim", "zero"},
    "display": {"numerics", "ranks", "models", "optim", "zero", "planning"},
    "oracle": {"numerics", "ranks", "optim", "display", "shown"},
    "course": {"tiny", "numerics", "ranks", "models", "optim", "options", "zero", "planning", "connect", "testing",
               "display", "shown"},
    "__init__": {"numerics", "ranks", "models", "optim", "options", "zero", "planning", "frameworks", "connect",
                 "backends", "course", "testing", "oracle", "display", "face"},
    "doctor": {"numerics", "ranks", "connect", "display", "shown", "__init__"},
    "cli": {"numerics", "ranks", "models", "optim", "zero", "planning", "frameworks", "connect", "display", "course",
            "doctor", "oracle", "__init__"},
    "__main__": {"cli"},
}
# Through here, inside functions, a thing asks for its display when somebody looks: the one import that goes upwards.
DOOR = "zerosim/shown.py"
PLUGS = "zerosim.zero.plugs"  # the one place that knows the options of a step
# The file that fetches a module by a name in quotes, when somebody asks for it. A test of what
# `import zerosim` loads holds that backends and puzzles are loaded in no other way.
BY_NAME = "zerosim/face.py"
# Imported by one module, and each a thought of its own; `picture` alone imports Matplotlib at its top, to have a class.
THOUGHTS = {"zerosim/display/chrome_trace.py", "zerosim/display/memory_plots.py", "zerosim/display/picture.py",
            "zerosim/display/plots.py", "zerosim/display/report.py", "zerosim/display/trace_plots.py",
            "zerosim/ranks/fast_ring.py", "zerosim/ranks/stacks.py", "zerosim/tiny.py", "zerosim/zero/gradients.py",
            "zerosim/zero/whole_tensors.py"}


def imported_modules(source: Source, nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.stmt, str]]:
    """Each import statement among a file's nodes, with the absolute name that it asks for."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from zerosim import ranks` names the floor last, `from zerosim.ranks import Rank` does not.
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def imports_that_climb(source: Source) -> list[str]:
    """Imports of a floor that does not lie below, inside functions too; the door's alone are none."""
    if source.floor not in MAY_IMPORT:
        return [f"{source.path}:1: stands on no known floor; the floors are {', '.join(MAY_IMPORT)}"]
    allowed, found = MAY_IMPORT[source.floor] | {source.floor}, []
    for node, name in imported_modules(source, _nodes_but_the_door(source)):
        top, _, rest = name.partition(".")
        first = rest.partition(".")[0]
        floor = first if first in MAY_IMPORT else "__init__"  # `from zerosim import Cluster` asks the facade
        if top == "zerosim" and floor not in allowed:
            found.append(source.at(node, f"{source.floor} imports {floor}, which does not lie below it"))
    return found


def imports_by_name(source: Source) -> list[str]:
    """Modules that are fetched by a name in quotes, which no rule of floors sees."""
    names = {"import_module", "__import__"}
    return [source.at(node, "fetches a module by its name in quotes; write an import statement")
            for node in source.nodes if isinstance(node, ast.Call) and source.path != BY_NAME
            and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in names]


def circle(sources: Iterable[Source]) -> list[str]:
    """One circle of imports as a line, its first module again at the end; none where there is none.

    Imports for type checkers and those inside functions count, for a reader follows them too; the door's do not.
    """
    try:
        TopologicalSorter(_graph(sources, _nodes_but_the_door)).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def halves(sources: Iterable[Source]) -> list[str]:
    """Modules that one other module alone imports, and no package offers: the second half of that one.

    A backend, a lesson and a command may be imported by one, and an option by the file that chooses among them.
    """
    sources = list(sources)
    importers: dict[str, set[str]] = {}
    for module, imported in _graph(sources, lambda source: source.nodes).items():
        for name in imported:
            importers.setdefault(name, set()).add(module)
    packages = {source.module for source in sources if source.path.endswith("__init__.py")}
    return [f"{source.path}: is imported by {', '.join(importers[source.module])} alone" for source in sources
            if len(importers.get(source.module, ())) == 1 and not importers[source.module] & packages
            and source.module not in packages and source.path not in THOUGHTS
            and source.floor not in {"backends", "course", "cli"}
            and importers[source.module] != {PLUGS}]


def hidden_by_modules(sources: Iterable[Source]) -> list[str]:
    """Names that a face loads later, and that other modules of its package have, which Python would put there."""
    sources = list(sources)
    modules = {source.module for source in sources}
    return [source.at(node, f"{name} is hidden by the module of its name; rename one, or import it at once")
            for source in sources if source.path.endswith("/__init__.py")
            for node, name in imported_modules(source, source.nodes) if node.col_offset
            and f"{source.module}.{name.rpartition('.')[2]}" in modules - {name}]


def _nodes_but_the_door(source: Source) -> list[ast.AST]:
    """The nodes of a file; of `DOOR` those alone that are not inside functions."""
    return source.run_at_import if source.path == DOOR else source.nodes


def _graph(sources: Iterable[Source], nodes: Callable[[Source], Iterable[ast.AST]]) -> dict[str, set[str]]:
    """The modules of the package that each of them imports, in these nodes."""
    sources = list(sources)
    modules = {source.module for source in sources}
    return {source.module: {_module(name, modules) for _, name in imported_modules(source, nodes(source))}
            - {source.module, ""} for source in sources}


def _module(name: str, modules: set[str]) -> str:
    """The module that holds a dotted name."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name
