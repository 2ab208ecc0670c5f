"""The site is built strictly, and with formulas that browsers draw themselves."""

import re

import pytest

from tests.architecture.source import ROOT


def test_make_docs_is_strict_and_lets_warnings_be_heard():
    build, = re.findall(r"^\t.*mkdocs build.*$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert "--strict" in build
    assert "--quiet" not in build, "MkDocs counts no warning that it does not print, and --strict counts warnings"


def test_a_formula_becomes_what_browsers_draw_and_a_price_stays():
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed; pip install 'zerosim[docs]'")
    from zerosim_site.formulas import with_formulas

    drawn = with_formulas("chunk $x_{c+1}$ costs $5 and $6")
    assert drawn.startswith("chunk <math ")
    assert "<msub><mi>x</mi>" in drawn
    assert drawn.endswith("</math> costs $5 and $6")
    with pytest.raises(ValueError, match=r"the formula \$a_\{\$ cannot be read"):
        with_formulas("$a_{$")
