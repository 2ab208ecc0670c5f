"""The documents show what the code prints: every module's doctests, the README's example; the code of docs/ runs."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, package_sources
from tests.support import fresh

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.M)
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


# Texts of docs/ whose code another test runs, or compares with what it is copied from.
ELSEWHERE = {
    "check_your_own_update.md": "tests/test_testing.py",
    "puzzles_in_class.md": "tests/course/puzzles/test_grading.py",
    "zero_in_one_file.md": "tests/test_tiny.py",
}
WITH_CODE = sorted(path.name for path in (ROOT / "docs").glob("*.md") if BLOCK.search(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", [name for name in WITH_CODE if name not in ELSEWHERE])
def test_the_code_of_a_page_runs_from_top_to_bottom(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "".join(BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8")))
    exec(compile(code, f"docs/{name}", "exec"), {"__name__": "page"})


def test_pages_whose_code_is_run_elsewhere_have_code_and_are_named_there() -> None:
    assert ELSEWHERE.keys() <= set(WITH_CODE)
    assert [name for name, test in ELSEWHERE.items() if name not in (ROOT / test).read_text(encoding="utf-8")] == []


def test_the_map_of_edge_cases_names_files_that_exist() -> None:
    _, _, table = (ROOT / "tests/README.md").read_text(encoding="utf-8").partition("| edge case | where |")
    named = set(re.findall(r"`([\w/]+\.py)`", table))
    assert named
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []
