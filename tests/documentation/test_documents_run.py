"""The documents show what the code prints: every module's doctests, the README's example; the code of docs/ runs."""

import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, package_sources
from tests.support import ask, fresh

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
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = EXAMPLE.search(text)
    assert fresh("-c", example["code"]) == example["printed"]
    of_demo, of_compare, _ = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.M)
    assert ends_of_lines_cut(ask("replay").stdout).count(of_demo) == 1
    # Bytes are the same in every step, so that one suffices.
    assert ends_of_lines_cut(ask("compare", "--model", "gpt-nano", "--steps", "1").stdout).count(of_compare) == 1


def ends_of_lines_cut(text: str) -> str:
    return re.sub(r" +$", "", text, flags=re.M)


def test_make_demo_runs_what_the_readme_says_and_says_what_to_type_next() -> None:
    recipe, = re.findall(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert "/zerosim replay\n" in recipe
    assert ". $(BIN)/activate" in recipe
    for typed in re.findall(r"zerosim (?!'|for)((?:--)?\w+)", recipe):
        assert ask(typed, *(["--help"] if not typed.startswith("--") else [])).exit_code == 0


def test_the_newcomers_files_and_commands_print_what_their_page_says(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/ten_minutes.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.DOTALL | re.M))
    assert [*files] == ["mean.py", "mine.py"]
    for name, code in files.items():
        Path(name).write_text(code, encoding="utf-8")
    typed = re.findall(r"^\$ ([^#\n]+?) *(?:#.*)?\n((?:(?!\$|```).*\n)*)", text, re.M)
    printed = {line: ends_of_lines_cut(said) for line, said in typed if said}
    here = [line for line in printed if line.startswith("zerosim ")]
    assert len(here) == 3
    ask(*["run", "mine.py:program", "--ranks", "2", "--with", "steps=1", "--save", "run.json"])
    for line in here:
        assert hashes_masked(ends_of_lines_cut(ask(*line.split()[1:]).stdout)) == hashes_masked(printed[line])
    in_process, by_mpi = (printed[f"{begin}zerosim run mine.py:program{end}"].splitlines()[1:]
                          for begin, end in (("", " --ranks 4"), ("mpiexec -n 4 ", "")))
    assert in_process == by_mpi
    demo, = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.M)
    assert demo in ends_of_lines_cut(ask("replay").stdout)


def hashes_masked(text: str) -> str:
    """A loss' last digit may be another with another BLAS, and with it the hash."""
    return re.sub(r"\b[0-9a-f]{16}  'loss .*", "...", text)


QUESTIONS = re.findall(r"^```text\n\$ zerosim (.+)\n((?:.*\n)+?)```$",
                       (ROOT / "docs/before_you_rent.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize(("typed", "shown"), [pytest.param(*one, marks=[pytest.mark.slow] * (number in range(1, 8)))
                                              for number, one in enumerate(QUESTIONS)])
def test_what_one_asks_before_renting_is_answered_as_the_page_shows(typed: str, shown: str) -> None:
    """What is shown is a part of what is printed, in its order, and no line is broken at 80 columns."""
    printed = ends_of_lines_cut(ask(*shlex.split(typed)).stdout).splitlines()
    lines = shown.splitlines()
    assert len(lines) > 2
    assert max(map(len, printed)) <= 80
    begun = iter(printed)
    assert [line for line in lines if line and line not in begun] == []


WITHOUT_GREENLET = """
import sys
sys.modules.update(dict.fromkeys(("greenlet", "matplotlib", "rich", "typer", "threadpoolctl")))
exec(compile(sys.stdin.read().replace("await piplite", "piplite"), "page", "exec"), {"__name__": "page"})
import zerosim as zs
try:
    zs.Cluster(2).run(lambda rank: rank.index)
except zs.BackendError as error:
    print(error)
"""


@pytest.mark.slow
def test_what_a_page_runs_in_the_browser_runs_without_greenlet_and_a_cluster_says_what_is_missing() -> None:
    code = (ROOT / "docs/browser/zero_in_the_browser.py").read_text(encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", WITHOUT_GREENLET], input=code, capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "ZeRO3: loss" in done.stdout
    assert done.stdout.endswith("zerosim.tiny, formats and plans run in any\n")


# Texts of docs/ whose code another test runs, or compares with what it is copied from.
ELSEWHERE = {
    "ten_minutes.md": "tests/documentation/test_documents_run.py",
    "check_your_own_update.md": "tests/test_testing.py",
    "from_pytorch_and_deepspeed.md": "tests/frameworks/test_bridge.py",
    "puzzles_in_class.md": "tests/course/puzzles/test_grading.py",
    "zero_in_one_file.md": "tests/test_tiny.py",
}
TAKES_SECONDS = {"problem_solutions.md"}
WITH_CODE = sorted(path.name for path in (ROOT / "docs").glob("*.md") if BLOCK.search(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TAKES_SECONDS))
                                  for name in WITH_CODE if name not in ELSEWHERE])
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
