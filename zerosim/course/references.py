"""Every text that the package, its documentation and its notebooks cite: authors, year, title, link.

The rows stand in ``references.toml``. What is cited begins with the first author's surname and the year, as in
``Rajbhandari et al. 2020 (ZeRO), section 5.1``, or with words that a row gives itself, as in ``nccl-tests, Summary``.
``python -m zerosim.course.references`` prints docs/references.md.
"""

import re
import sys
from dataclasses import dataclass
from functools import cache

from zerosim.planning.facts import facts

NAMES = re.compile(r"(?P<names>\w[^\d;]*?)\s+(?P<year>(?:19|20)\d\d)\b")

HEAD = """# References

Everything that the package, these pages and the notebooks cite. A citation elsewhere gives the first author, the year
and the place: *Rajbhandari et al. 2020, section 5.1* is section 5.1 of the text of that name and year below. Where a
text is cited by other words, they stand in brackets. `python -m zerosim.course.references` prints this page.
"""


@dataclass(frozen=True, slots=True)
class Reference:
    """One text. ``authors`` are separated by commas; ``cited``: the words by which it is cited, beside its first author
    and year; ``where`` says where it appeared, or how it is recognized where no ``link`` (https) is known."""

    authors: str
    year: int
    title: str
    link: str
    cited: tuple[str, ...] = ()
    where: str = ""

    @property
    def surname(self) -> str:
        """The first author's."""
        return self.authors.split(",")[0].removesuffix(" and others").split()[-1]

    def markdown(self) -> str:
        """The text in one line of Markdown."""
        title = f"[{self.title}]({self.link})" if self.link else f"*{self.title}*"
        words = f" [{'; '.join(word.strip(', ') for word in self.cited)}]" if self.cited else ""
        return f"{self.authors} {self.year}. {title}." + (f" {self.where[0].upper()}{self.where[1:]}." if self.where
                                                         else "") + words


@cache
def references() -> tuple[Reference, ...]:
    """All of them, in the order of the page: papers by their authors, then documentation, code and lessons."""
    rows = facts("references", "zerosim.course")["reference"]
    return tuple(Reference(**{**row, "cited": tuple(row.get("cited", ()))}) for row in rows)


def cited_by(citation: str) -> tuple[Reference, ...]:
    """The references that a citation may mean: one, or several whose first author and year are the same.

    Raises ValueError where there is none.

    >>> [found.title for found in cited_by("Zhang et al. 2022, table 1")]
    ['OPT: Open Pre-trained Transformer Language Models', 'MiCS: Near-linear Scaling for Training Gigantic Model on \
Public Cloud']
    """
    found = [one for one in references() if any(citation.startswith(words) for words in one.cited)]
    if not found and (named := NAMES.match(citation)):
        first = re.split(r",| et al| and | & ", named["names"])[0].split()[-1]
        found = [one for one in references() if (one.surname, one.year) == (first, int(named["year"]))]
    if not found:
        raise ValueError(f"{citation!r} cites a text that zerosim/course/references.toml does not have; give it a row "
                         "with authors, year, title and link, or cite it as its row says")
    return tuple(found)


def page() -> str:
    """docs/references.md."""
    return HEAD + "\n" + "\n".join(f"- {one.markdown()}" for one in references()) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
