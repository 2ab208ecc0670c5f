"""Every file of the package keeps every rule; and every rule is shown to catch what it is there to catch."""

from collections.abc import Callable

import pytest

from tests.architecture import imports, style
from tests.architecture.source import Source, package_sources, project_texts
from tests.architecture.words import forbidden_words

Check = Callable[[Source], list[str]]

CHECKS: list[Check] = [
    imports.imports_that_climb,
    imports.pencil_beside_ledger,
    imports.imports_by_name,
    style.long_files_and_functions,
    style.stage_comparisons,
    style.sent_counted_elsewhere,
    style.held_counted_elsewhere,
    style.half_casts_elsewhere,
    style.work_at_import,
    style.environment_read_inside,
    style.missing_docstrings,
]
LONG_FUNCTION = "def f():\n" + "    pass\n" * 39

# check, path, a text that breaks the rule, a piece of what is said about it
VIOLATIONS: list[tuple[Check, str, str, str]] = [
    (imports.imports_that_climb, "zerosim/numerics/a.py", "import zerosim.ranks", "imports ranks"),
    (imports.imports_that_climb, "zerosim/numerics/a.py", "from zerosim import ranks", "imports ranks"),
    (imports.imports_that_climb, "zerosim/ranks/a.py", "from ..zero.engine import Engine", "imports zero"),
    (imports.imports_that_climb, "zerosim/ranks/__init__.py", "from ..zero import Engine", "imports zero"),
    (imports.imports_that_climb, "zerosim/models/a.py", "from zerosim.optim import Adam", "imports optim"),
    (imports.imports_that_climb, "zerosim/optim/a.py", "def f():\n    import zerosim.zero", "imports zero"),
    (imports.imports_that_climb, "zerosim/zero/a.py", "from zerosim.planning import Job", "imports planning"),
    (imports.imports_that_climb, "zerosim/planning/a.py", "from zerosim.ranks import Hub", "imports ranks"),
    (imports.imports_that_climb, "zerosim/testing/a.py", "import zerosim.course", "imports lessons"),
    (imports.imports_that_climb, "zerosim/lessons/a.py", "from zerosim import Cluster", "imports __init__"),
    (imports.imports_that_climb, "zerosim/attic/a.py", "", "no known floor"),
    (imports.imports_that_climb, "zerosim/tiny.py", "from zerosim.numerics import kernels", "imports numerics"),
    (imports.pencil_beside_ledger, "zerosim/lessons/plan.py",
     "from zerosim.planning import Job\nfrom zerosim.zero import Engine", "beside zero"),
    (imports.pencil_beside_ledger, "zerosim/cli.py", "from zerosim import planning, ranks", "beside ranks"),
    (imports.imports_by_name, "zerosim/ranks/a.py", "import importlib\nimportlib.import_module('zerosim.course')",
     "by its name"),
    (imports.imports_by_name, "zerosim/zero/a.py", "x = __import__('zerosim.cli')", "by its name"),
    (style.long_files_and_functions, "zerosim/a.py", "x = 1\n" * 300, "300 lines"),
    (style.long_files_and_functions, "zerosim/a.py", LONG_FUNCTION, "f has 40 lines"),
    (style.stage_comparisons, "zerosim/zero/a.py", "if stage == 3: pass", "compares stage"),
    (style.stage_comparisons, "zerosim/zero/a.py", "y = 1 if self.stage in (1, 2) else 2", "self.stage"),
    (style.stage_comparisons, "zerosim/zero/a.py", "y = 2 > row.zero_stage", "compares row.zero_stage"),
    (style.stage_comparisons, "zerosim/zero/a.py", "match stage:\n    case 3: pass", "compares stage"),
    (style.sent_counted_elsewhere, "zerosim/ranks/hub.py", "trace.sent_nbytes += 4", "changes sent_nbytes"),
    (style.sent_counted_elsewhere, "zerosim/ranks/hub.py", "self._sent['control'] += 4", "changes _sent"),
    (style.sent_counted_elsewhere, "zerosim/ranks/trace.py",
     "class Trace:\n    def other(self):\n        self._sent[0] += 4", "changes _sent"),
    (style.held_counted_elsewhere, "zerosim/zero/a.py", "rank.memory.now_nbytes -= 4", "changes now_nbytes"),
    (style.held_counted_elsewhere, "zerosim/zero/a.py", "memory.peak_nbytes = 0", "changes peak_nbytes"),
    (style.half_casts_elsewhere, "zerosim/zero/a.py", "y = x.astype(np.float16)", "cast_pack"),
    (style.half_casts_elsewhere, "zerosim/zero/a.py", "y = x.astype('<f2', copy=False)", "cast_pack"),
    (style.work_at_import, "zerosim/zero/a.py", "cache = {}", "cache is mutable"),
    (style.work_at_import, "zerosim/zero/a.py", "seen: list[int] = []", "seen is mutable"),
    (style.work_at_import, "zerosim/zero/a.py", "tables = dict(a=1)", "tables is mutable"),
    (style.work_at_import, "zerosim/zero/a.py", "np.seterr(all='ignore')", "no work at import"),
    (style.work_at_import, "zerosim/zero/a.py", "for name in NAMES:\n    pass", "no work at import"),
    (style.work_at_import, "zerosim/zero/a.py", "def f():\n    global count", "global statement"),
    (style.environment_read_inside, "zerosim/ranks/a.py", "n = os.environ['N']", "reads os.environ"),
    (style.environment_read_inside, "zerosim/ranks/a.py", "n = getenv('N')", "reads getenv"),
    (style.missing_docstrings, "zerosim/zero/a.py", "x = 1", "the module has no docstring"),
    (style.missing_docstrings, "zerosim/zero/a.py", '"""M."""\ndef f(): pass', "f has no docstring"),
    (style.missing_docstrings, "zerosim/zero/a.py",
     '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        x = 1\n        return x', "A.f has no"),
]
# What looks like a violation and is none: the rules must not chase people away from plain code.
INNOCENT: list[tuple[Check, str, str]] = [
    (imports.imports_that_climb, "zerosim/zero/a.py", "import numpy as np\nfrom zerosim.models import mlp"),
    (imports.imports_that_climb, "zerosim/zero/a.py", "from .layout import cut\nfrom ..optim import sgd"),
    (imports.pencil_beside_ledger, "zerosim/lessons/measured/a.py",
     "from zerosim import planning\nfrom zerosim.zero import Engine"),
    (imports.pencil_beside_ledger, "zerosim/lessons/plan.py", "from zerosim import planning"),
    (imports.imports_by_name, "zerosim/shown.py", "import importlib\nimportlib.import_module('zerosim.course')"),
    (style.long_files_and_functions, "zerosim/a.py", LONG_FUNCTION.removesuffix("    pass\n")),
    (style.stage_comparisons, "zerosim/zero/a.py", "row = STAGES[stage] if stage is not None else None"),
    (style.stage_comparisons, "zerosim/zero/a.py", "ok = stage in STAGES or self.stage not in zero.STAGES"),
    (style.sent_counted_elsewhere, "zerosim/ranks/trace.py",
     "class Trace:\n    def sent(self, n):\n        self._sent[0] += n"),
    (style.sent_counted_elsewhere, "zerosim/zero/a.py", "self.present += 1\nsent = 0\nsent += 1"),
    (style.sent_counted_elsewhere, "zerosim/tiny.py", "self.sent_nbytes += 4"),
    (style.held_counted_elsewhere, "zerosim/ranks/memory.py", "self.now_nbytes += 4"),
    (style.half_casts_elsewhere, "zerosim/numerics/rounding.py", "y = x.astype(np.float16)"),
    (style.half_casts_elsewhere, "zerosim/zero/a.py", "y = x.astype(np.int64)"),
    (style.work_at_import, "zerosim/zero/a.py", "NAMES = ['a']\n__all__ = ['b']\nT = f(1)"),
    (style.environment_read_inside, "zerosim/cli.py", "n = os.environ['N']"),
    (style.missing_docstrings, "zerosim/zero/a.py", '"""M."""\ndef _f(): pass\nclass _A:\n    pass'),
    (style.missing_docstrings, "zerosim/zero/a.py", '"""M."""\nclass A:\n  """A."""\n  def f(self): pass'),
]


def named(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("check", CHECKS, ids=named)
def test_the_package_keeps_the_rule(check: Check) -> None:
    violations = [line for source in package_sources() for line in check(source)]
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(("check", "path", "text", "said"), VIOLATIONS, ids=named)
def test_a_violation_is_caught_once_and_named(check: Check, path: str, text: str, said: str) -> None:
    violations = check(Source(path, text))
    assert len(violations) == 1
    assert violations[0].startswith(f"{path}:")
    assert said in violations[0]


@pytest.mark.parametrize(("check", "path", "text"), INNOCENT, ids=named)
def test_plain_code_is_let_through(check: Check, path: str, text: str) -> None:
    assert check(Source(path, text)) == []


def test_every_rule_has_a_violation_that_it_catches() -> None:
    assert {check for check, *_ in VIOLATIONS} == set(CHECKS)


def test_no_file_names_what_the_project_does_not_name() -> None:
    violations = [line for path, text in project_texts() for line in forbidden_words(path, text)]
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize("line", [
    "cd /" + "work/main", "open('/" + "home/me/x')", "https://" + "pypi" + ".org/simple",
    "see ../" + "shared/x", "as SPEC" + " §4 says", "CONTRACTS" + ".md"])
def test_a_forbidden_word_is_caught(line: str) -> None:
    assert len(forbidden_words("a.md", f"fine\n{line}\n")) == 1
    assert forbidden_words("a.md", f"fine\n{line}\n")[0].startswith("a.md:2: names ")


@pytest.mark.parametrize("line", ["zerosim/workspace", "the root/leaf", "a/work/b", "SPECIAL", "by design"])
def test_an_ordinary_word_is_let_through(line: str) -> None:
    assert forbidden_words("a.md", line) == []


def test_the_largest_files_and_functions_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    sources = package_sources()
    by_file = sorted(((source.text.count("\n"), source.path) for source in sources), reverse=True)
    by_function = sorted(((style.line_count(node), f"{source.path}:{node.lineno} {node.name}")
                          for source in sources for node in style.functions(source)), reverse=True)
    with capsys.disabled():
        print("\nlines  the largest files and functions")
        for lines, name in by_file[:5] + by_function[:5]:
            print(f"{lines:5}  {name}")
    assert by_file
    assert by_function
