"""The face of a package: its public names, each loaded when it is first asked for (Scientific Python's SPEC 1).

A face imports them for type checkers alone, and these imports are its only list: they are read in the package's own
code when somebody asks for the first name. So a program that plans loads no engine, and one that trains no planner.
"""

import dis
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def face(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, for ``__all__``, the names in it, and the package's own modules.

    A name is kept when it has been loaded, as if it had been imported there. No name that a face loads may be that of
    another thing's module in the same package, which Python puts in its place when it imports that module. There is no
    lock: who waited for it while importing, and so holding Python's lock of a module, could wait for ever.
    """
    def load(name: str) -> Any:
        homes = _homes(package)
        if name == "__all__":
            value: Any = sorted(homes)
        elif name in homes or (name.isidentifier() and name[0] != "_" and find_spec(f"{package}.{name}")):
            home = homes.get(name, package)
            found = None if home == package else import_module(home)
            value = getattr(found, name) if hasattr(found, name) else import_module(f"{home}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        vars(sys.modules[package])[name] = value
        return value

    return load, lambda: sorted({*(name for name in vars(sys.modules[package]) if name[:2] == "__"), *_homes(package)})


@cache
def _homes(package: str) -> dict[str, str]:
    """By public name the module from which a package's code imports it; an installed program may lack the source."""
    homes, home = dict[str, str](), ""
    for step in dis.get_instructions(sys.modules[package].__loader__.get_code(package)):  # type: ignore[union-attr]
        if step.opname == "IMPORT_NAME":
            home = step.argval
        elif step.opname == "IMPORT_FROM" and home.startswith("zerosim") and home != __name__:
            homes[step.argval] = home
    return homes
