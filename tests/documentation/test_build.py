"""The site is built strictly, in continuous integration too, and with formulas that browsers draw themselves."""

import re
import tomllib

import pytest

from tests.architecture.source import ROOT


def recipe(target: str) -> str:
    """The commands of one target of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.M)
    assert found, target
    return found[1]


def test_make_docs_is_strict_and_lets_warnings_be_heard():
    build = next(line for line in recipe("docs").splitlines() if "mkdocs build" in line)
    assert "--strict" in build
    assert "--quiet" not in build, "MkDocs counts no warning that it does not print, and --strict counts warnings"


def test_continuous_integration_builds_the_documentation():
    targets = re.search(r"^for target in (.*); do$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.M)
    assert targets is not None
    assert "docs" in targets[1].split()


def test_what_builds_the_documentation_is_pinned_from_below():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["optional-dependencies"]["docs"]
    assert needed
    assert [one for one in needed if not re.fullmatch(r"[\w.-]+(\[\w+\])?>=[\d.]+", one)] == []


def test_a_formula_becomes_what_browsers_draw_and_a_price_stays():
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed; pip install 'zerosim[docs]'")
    from zerosim_site.formulas import with_formulas

    drawn = with_formulas("chunk $x_{c+1}$ costs $5 and $6")
    assert drawn.startswith("chunk <math ")
    assert "<msub><mi>x</mi>" in drawn
    assert drawn.endswith("</math> costs $5 and $6")
    with pytest.raises(ValueError, match=r"the formula \$a_\{\$ cannot be read"):
        with_formulas("$a_{$")
