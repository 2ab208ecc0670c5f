"""Tables of facts that lie beside code, each number with its source and date."""

import tomllib
from importlib.resources import files
from typing import Any


def facts(name: str, package: str = "zerosim.planning") -> dict[str, Any]:
    """The tables of a package's TOML file of this name."""
    return tomllib.loads(files(package).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
