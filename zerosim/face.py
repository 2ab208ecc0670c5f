"""The face of a package: its public names, each loaded when it is first asked for (Scientific Python's SPEC 1).

A face imports them for type checkers alone, and these imports are its table: they are read in the package's own code
when somebody asks for the first name. So a program that plans loads no engine, and one that trains no planner.
"""

import dis
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def face(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of the package, for the names under its ``if TYPE_CHECKING:`` and its modules.

    A name is kept when it has been loaded, as if it had been imported there. A function must not be called as a module
    of the same package, which Python puts in its place when it imports that. No lock: who waits for one while another
    thread imports, and holds Python's lock of a module, waits for ever.
    """
    homes: dict[str, tuple[str, str]] = {}

    def load(name: str) -> Any:
        module = sys.modules[package]
        if name not in module.__all__ and (not name.isidentifier() or name.startswith("__")
                                           or find_spec(f"{package}.{name}") is None):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not homes:
            homes.update(_homes(package))
        home, attribute = homes.get(name, (package, name))
        found = None if home == package else import_module(home)
        value = getattr(found, attribute) if hasattr(found, attribute) else import_module(f"{home}.{attribute}")
        vars(module)[name] = value
        return value

    def names() -> list[str]:
        module = sys.modules[package]
        return sorted({*vars(module), *module.__all__})

    return load, names


def _homes(package: str) -> dict[str, tuple[str, str]]:
    """By name the module, and what it is called there, from which a package's code imports it for type checkers."""
    spec = find_spec(package)
    assert spec is not None
    code = spec.loader.get_code(package)  # type: ignore[union-attr]  # of a file, says the import that was here first
    homes: dict[str, tuple[str, str]] = {}
    home = attribute = ""
    for step in dis.get_instructions(code):  # not of the source, which an installed program may lack
        match step.opname:
            case "IMPORT_NAME":
                home = step.argval
            case "IMPORT_FROM":
                attribute = step.argval
            case "STORE_NAME" if attribute:
                homes[step.argval], attribute = (home, attribute), ""
    return homes
