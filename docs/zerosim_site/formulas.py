"""Formulas between dollars, as MathML: browsers draw it themselves, so that no script and no font is needed."""

import re

from latex2mathml.converter import convert

FORMULA = re.compile(r"(?<![\\$])(\$\$?)(?=\S)([^$]+?)(?<=\S)\1(?!\$)")


def with_formulas(markdown: str) -> str:
    """The text with ``$...$`` and ``$$...$$`` drawn; a price, ``$5 and $6``, is none.

    Raises ValueError for a formula that cannot be read.
    """
    return FORMULA.sub(_drawn, markdown)


def _drawn(formula: re.Match[str]) -> str:
    try:
        drawn: str = convert(formula[2], display="block" if formula[1] == "$$" else "inline")
    except Exception as error:
        raise ValueError(f"the formula {formula.group()} cannot be read: {error!r}") from error
    # A span of its own: one that is wider than a phone scrolls in it.
    return f'<span class="formula">{drawn}</span>' if formula[1] == "$$" else drawn
