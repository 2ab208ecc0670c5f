"""Docstrings of plain prose say the same when Markdown has drawn them, and formulas are drawn by browsers."""

import doctest
import inspect

import pytest
from zerosim_site import page, prose
from zerosim_site.page import lists_apart
from zerosim_site.prose import as_markdown


@pytest.mark.parametrize("module", [page, prose], ids=lambda module: module.__name__)
def test_the_examples_of_the_sites_own_code_hold(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(("text", "markdown"), [
    ("a*b*c, x[i][j] and 2 < 3", r"a\*b\*c, x\[i\]\[j\] and 2 &lt; 3"),
    ("it says *what* and ``code[0] * 2``", "it says *what* and ``code[0] * 2``"),
    ("Σ|x|, *args and **options", r"Σ|x|, \*args and \*\*options"),
    ("# is no heading", r"\# is no heading"),
    ("costs $5 and ~3", r"costs \$5 and \~3"),
    ("takes\n- one\n- two", "takes\n\n- one\n- two"),
    ("So:\n\n>>> 1 + 1\n2\n>>> [3]\n[3]\n\nAnd on.",
     "So:\n\n```pycon\n>>> 1 + 1\n2\n>>> [3]\n[3]\n```\n\nAnd on."),
    ("torch      grows on the W-th step\ndeepspeed  grows on the W+1-th",
     "```text\ntorch      grows on the W-th step\ndeepspeed  grows on the W+1-th\n```"),
    ("It is\n\n    a -> b\n      -> c\n\nso.", "It is\n\n```text\na -> b\n  -> c\n```\n\nso."),
])
def test_signs_stay_signs_and_doctests_tables_and_pictures_become_blocks(text, markdown):
    assert as_markdown(text) == markdown


def test_a_wrapped_line_that_begins_with_a_sign_is_no_list():
    assert lists_apart("the value of a\n  - b") == "the value of a\n  - b"


def test_no_docstring_of_the_reference_loses_a_letter():
    import zerosim

    docstrings = [inspect.getdoc(value) or "" for name in zerosim.__all__ if callable(value := getattr(zerosim, name))]
    assert len(docstrings) > 20
    for text in docstrings:
        letters = [sign for sign in text if sign.isalnum()]
        drawn = as_markdown(text).replace("&lt;", "<").replace("```pycon", "").replace("```text", "")
        assert [sign for sign in drawn if sign.isalnum()] == letters


def test_a_formula_becomes_what_browsers_draw_and_a_price_stays():
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed; pip install 'zerosim[docs]'")
    from zerosim_site.formulas import with_formulas

    drawn = with_formulas("chunk $x_{c+1}$ costs $5 and $6")
    assert drawn.startswith("chunk <math ")
    assert "<msub><mi>x</mi>" in drawn
    assert drawn.endswith("</math> costs $5 and $6")
    with pytest.raises(ValueError, match=r"the formula \$a_\{\$ cannot be read"):
        with_formulas("$a_{$")
