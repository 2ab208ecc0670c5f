"""Every file of the package keeps every rule; and every rule is shown to catch what it is there to catch."""

import re
from collections.abc import Callable, Iterable

import pytest

from tests.architecture import imports, style
from tests.architecture.source import ROOT, Source, package_sources, project_texts

Check = Callable[[Source], list[str]]
INNER_MODULES = 19  # from which tests import names, most of them of backends; what else they need, packages offer

# By rule: a file under zerosim/, a text in it, and a piece of what is said of its one violation; None for what looks
# like one and is none: rules must not chase people away from plain code.
RULES: dict[Check, list[tuple[str, str, str | None]]] = {
    imports.imports_that_climb: [
        ("numerics/a.py", "from zerosim import ranks", "imports ranks"),
        ("ranks/__init__.py", "from ..zero import Engine", "imports zero"),
        ("ranks/a.py", "if TYPE_CHECKING:\n    from zerosim.backends.mpi import MPI", "imports backends"),
        ("ranks/a.py", "from zerosim.display import html", "imports display"),
        ("optim/a.py", "def f():\n    import zerosim.zero", "imports zero"),
        ("planning/a.py", "def f():\n    from zerosim.course import a", "imports course"),
        ("display/a.py", "from ..course.figures import ring", "imports course"),
        ("course/a.py", "from zerosim import Cluster", "imports __init__"),
        ("tiny.py", "from zerosim.numerics import kernels", "imports numerics"),
        ("attic/a.py", "", "no known floor"),
        ("zero/a.py", "import numpy as np\nfrom zerosim.models import mlp", None),
        ("zero/a.py", "from .layout import cut\nfrom ..optim import sgd", None),
        ("ranks/a.py", "def f():\n    from zerosim.display import html", "imports display"),
        ("shown.py", "from zerosim import display", "imports display"),
        ("shown.py", "def f():\n    from zerosim import display", None),
    ],
    imports.imports_by_name: [
        ("ranks/a.py", "import importlib\nimportlib.import_module('zerosim.course')", "by its name"),
        ("zero/a.py", "x = __import__('zerosim.cli')", "by its name"),
        ("face.py", "import importlib\nimportlib.import_module('zerosim.course')", None),
    ],
    style.stage_comparisons: [
        ("zero/a.py", "if stage == 3: pass", "compares stage"),
        ("zero/a.py", "y = 1 if self.stage in (1, 2) else 2", "self.stage"),
        ("zero/a.py", "y = 2 > row.zero_stage", "compares row.zero_stage"),
        ("zero/a.py", "match stage:\n    case 3: pass", "compares stage"),
        ("zero/a.py", "row = STAGES[stage] if stage is not None else None", None),
        ("zero/a.py", "ok = stage in STAGES or self.stage not in zero.STAGES", None),
    ],
    style.counted_elsewhere: [
        ("ranks/hub.py", "trace.sent_nbytes += 4", "changes sent_nbytes"),
        ("ranks/memory.py", "self._sent['control'] += 4", "changes _sent"),
        ("ranks/trace.py", "rank.memory.now_nbytes -= 4", "changes now_nbytes"),
        ("zero/a.py", "memory.peak_nbytes, x = 0, 1", "changes peak_nbytes"),
        ("ranks/trace.py", "self._sent[0] += n", None),
        ("zero/a.py", "self.present += 1\nsent = 0\nsent += 1", None),
        ("tiny.py", "self.sent_nbytes += 4", None),
        ("ranks/memory.py", "self.now_nbytes += 4", None),
    ],
    style.half_casts_elsewhere: [
        ("zero/a.py", "y = x.astype(np.float16)", "cast_pack"),
        ("zero/a.py", "y = x.astype('<f2', copy=False)", "cast_pack"),
        ("numerics/rounding.py", "y = x.astype(np.float16)", None),
        ("zero/a.py", "y = x.astype(np.int64)", None),
    ],
    style.work_at_import: [
        ("zero/a.py", "cache = {}", "cache is mutable"),
        ("zero/a.py", "seen: list[int] = []", "seen is mutable"),
        ("zero/a.py", "tables = dict(a=1)", "tables is mutable"),
        ("zero/a.py", "np.seterr(all='ignore')", "no work at import"),
        ("zero/a.py", "for name in NAMES:\n    pass", "no work at import"),
        ("zero/a.py", "def f():\n    global count", "global statement"),
        ("zero/a.py", "NAMES = ['a']\n__all__ = ['b']\nT = f(1)", None),
    ],
    style.environment_read_inside: [
        ("ranks/a.py", "n = os.environ['N']", "reads os.environ"),
        ("ranks/a.py", "n = getenv('N')", "reads getenv"),
        ("cli.py", "n = os.environ['N']", None),
    ],
    style.places_outside_a_clone: [
        *[("a.md", f"fine\n{line}\n", "md:2: names ") for line in (
            "cd /" + "work/main", "open('/" + "home/me/x')", "https://" + "pypi" + ".org/simple",
            "see ../" + "shared/x", "as SPEC" + " §4 says", "CONTRACTS" + ".md")],
        *[("a.md", line, None) for line in ("zerosim/workspace", "the root/leaf", "a/work/b", "SPECIAL", "by design")],
    ],
}


@pytest.mark.parametrize("check", RULES, ids=lambda check: check.__name__)
def test_the_rule_is_kept_and_a_violation_of_it_would_be_caught_once_and_named(check: Check) -> None:
    sources = project_texts() if check is style.places_outside_a_clone else package_sources()
    violations = [line for source in sources for line in check(source)]
    assert not violations, "\n" + "\n".join(violations)
    for path, text, said in RULES[check]:
        found = check(Source(f"zerosim/{path}", text))
        assert len(found) == (said is not None), (text, found)
        assert all(line.startswith(f"zerosim/{path}:") and said in line for line in found), (text, found)


# Of rules for all files together: files under zerosim/ with their texts, and a piece of what is said of them, or None.
HALF = {"zero/a.py": "def f():\n    from .b import x", "zero/b.py": ""}
TOGETHER: dict[Callable[[Iterable[Source]], list[str]], list[tuple[dict[str, str], str | None]]] = {
    imports.circle: [
        ({"a.py": "from zerosim.b import x", "b.py": "from zerosim.a import y"}, "zerosim.a"),
        ({"a.py": "from zerosim import b", "b.py": "if TYPE_CHECKING:\n    import zerosim.a"}, "zerosim.b"),
        ({"a.py": "class A:\n    from .b import x", "b.py": "from zerosim.c import x", "c.py": "from zerosim import a"},
         "zerosim.c"),
        ({"a.py": "from .b import x", "b.py": "def f():\n    from .a import y"}, "zerosim.a"),
        ({"a.py": "import zerosim.shown", "shown.py": "class A:\n    def f(self):\n        import zerosim.a"}, None),
        ({"a.py": "import zerosim.shown", "shown.py": "import zerosim.a"}, "zerosim.shown"),
    ],
    imports.halves: [
        (HALF, "zerosim/zero/b.py: is imported by zerosim.zero.a alone"),
        ({**HALF, "zero/c.py": "from .b import y"}, None),
        ({**HALF, "zero/__init__.py": "from zerosim.zero.b import y"}, None),
    ],
    imports.hidden_by_modules: [
        ({"zero/__init__.py": "if TYPE_CHECKING:\n    from zerosim.zero.a import b", "zero/b.py": ""},
         "zerosim/zero/__init__.py:2: zerosim.zero.a.b is hidden"),
        ({"zero/__init__.py": "from zerosim.zero.b import b", "zero/b.py": ""}, None),
        ({"zero/__init__.py": "if TYPE_CHECKING:\n    from zerosim.zero import b", "zero/b.py": ""}, None),
    ],
    style.class_names_used_twice: [
        ({"a.py": "class A: pass\nclass B: pass", "b.py": "\nclass A: pass"},
         "class A stands at zerosim/a.py:1 and zerosim/b.py:2"),
    ],
}


@pytest.mark.parametrize("check", TOGETHER, ids=lambda check: check.__name__)
def test_no_files_break_a_rule_together_and_who_would_is_named(check: Callable[[Iterable[Source]], list[str]]) -> None:
    assert check(package_sources()) == []
    for texts, said in TOGETHER[check]:
        found = check([Source(f"zerosim/{path}", text) for path, text in texts.items()])
        assert len(found) == (said is not None), (texts, found)
        assert all(said in line for line in found), (texts, found)


def test_tests_import_faces_of_packages_and_few_inner_modules() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))]
    inner = {name for text in texts for name in re.findall(r"^\s*from (zerosim\.\w+\.[\w.]+) import", text, re.M)}
    assert 1 < len(inner) <= INNER_MODULES, f"import what the package offers, or do without: {sorted(inner)}"


def test_the_reading_path_is_as_short_as_it_may_be() -> None:
    path = re.findall(r"^\d+\. \[`(zerosim/[\w/]+\.py)`\]", (ROOT / "docs/reading_path.md").read_text("utf-8"), re.M)
    lines = sum((ROOT / name).read_text(encoding="utf-8").count("\n") for name in set(path))
    assert 20 < len(path) == len(set(path)) <= 26, path
    assert 5_000 < lines <= 8_500
