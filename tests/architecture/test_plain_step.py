"""The plain step: the files that tell it know no option, and the engine names options where it is asked for them alone.

An option is a file beside them that subclasses their parts, and a row in `zerosim/zero/plugs.py`, which chooses.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.imports import imported_modules
from tests.architecture.source import Source, package_sources

PLAIN = ("layout", "placements", "param_group", "unshard", "gradients", "update", "engine")
OPTIONS = {"offload", "offloaded_step", "hybrid", "zeropp", "micro_batch_order", "factors"}
WORDS = re.compile(
    r"\b_?(transfers|settles?|staged|drain|on_host|update_place|read_ahead|forget_ahead|host|disk|HOST|DISK|DEVICE"
    r"|offload\w*|Offload\w*|mesh|Mesh|hybrid|across|replicas|zeropp|ZeroPlusPlus|quantized|by_micro_batch"
    r"|micro_batch_order|copy_in_flight|FactorObserver)\b")


def asked(source: Source) -> set[int]:
    """The lines in which an engine is asked: imports, its class's docstring and its __init__."""
    found: set[int] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) or (
                isinstance(node, ast.FunctionDef) and node.name == "__init__"):
            found |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
        elif isinstance(node, ast.ClassDef) and node.name == "Engine":
            found |= {*range(node.lineno, (node.body[0].end_lineno or 0) + 1)}
    return found


def options_named(source: Source) -> Iterator[str]:
    """The lines that name an option, and the imports of one."""
    left_out = asked(source) if source.path.endswith("/engine.py") else set()
    for number, line in enumerate(source.text.splitlines(), 1):
        if number not in left_out and (match := WORDS.search(line)):
            yield f"{source.path}:{number}: names the option {match.group()!r}"
    for node, name in imported_modules(source, source.nodes):
        if name.startswith("zerosim.zero.") and name.split(".")[2] in OPTIONS:
            yield source.at(node, f"imports the option {name}")


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_step_names_and_imports_no_option(name: str) -> None:
    (source,) = (one for one in package_sources() if one.path == f"zerosim/zero/{name}.py")
    assert list(options_named(source)) == []


def test_an_option_that_enters_the_plain_step_is_named() -> None:
    engine = "class Engine:\n    '''With a mesh.'''\n    def __init__(self, offload):\n        self.offload = offload\n"
    below = "    def step(self):\n        self.drain()\n        from zerosim.zero.zeropp import all\n"
    assert list(options_named(Source("zerosim/zero/engine.py", engine))) == []
    assert len(list(options_named(Source("zerosim/zero/engine.py", engine + below)))) == 2
    assert len(list(options_named(Source("zerosim/zero/update.py", engine)))) == 3


def test_every_option_is_chosen_in_one_place() -> None:
    (plugs,) = (one for one in package_sources() if one.path == "zerosim/zero/plugs.py")
    assert {name.split(".")[2] for _, name in imported_modules(plugs, plugs.nodes)
                       if name.startswith("zerosim.zero.")} >= OPTIONS
