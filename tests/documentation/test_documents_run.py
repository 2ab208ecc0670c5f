"""The documents show what the code prints: every module's doctests, the README's first example."""

import doctest
import importlib
import re

import pytest

from tests.architecture.source import ROOT, package_sources
from tests.support import fresh

EXAMPLE = re.compile(r"^```python\n(?P<code>.*?)^```\n.*?^```text\n(?P<printed>.*?)^```$", re.DOTALL | re.M)
# `python -m zerosim` runs the command line when it is imported.
MODULES = [source.module for source in package_sources() if source.floor != "__main__"]
WITH_EXAMPLES = [source.module for source in package_sources() if ">>> " in source.text]


def test_every_module_can_be_imported_on_any_machine() -> None:
    assert [name for name in MODULES if importlib.import_module(name).__name__ != name] == []


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_doctests_of_a_module_hold(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module), optionflags=doctest.FAIL_FAST)
    assert failed == 0
    assert attempted > 0


def test_the_readme_prints_what_it_says() -> None:
    example = EXAMPLE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert fresh("-c", example["code"]) == example["printed"]


def test_the_map_of_edge_cases_names_files_that_exist() -> None:
    _, _, table = (ROOT / "tests/README.md").read_text(encoding="utf-8").partition("| edge case | where |")
    named = set(re.findall(r"`([\w/]+\.py)`", table))
    assert named
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []
