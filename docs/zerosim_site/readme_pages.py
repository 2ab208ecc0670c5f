"""The README and the texts of ``docs/`` as pages: the README comes first, ``docs/README.md`` lists the others."""

import re

from zerosim_site.page import HIDE, ROOT, Page, slug

TERM = re.compile(r"^### (.+)$", re.M)
GROUP = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.M)
ITEM = re.compile(r"^- \[(.+)\]\(([^()\s]+)\): \S", re.M)
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
# What `zerosim explore` makes; the Makefile puts it beside the pages.
LIVE = ('<iframe class="explore" src="assets/explore.html" title="One training step, on every rank"></iframe>\n\n'
        '<a href="assets/explore.html">The same in a window of its own</a>')
GUIDE, GLOSSARY = "Guide", "Glossary"


def home_page() -> Page:
    """The README, with the page itself in the place of its moving picture."""
    text = PICTURE.sub(LIVE, (ROOT / "README.md").read_text(encoding="utf-8"), count=1)
    return Page("index.md", "Home", HIDE + text, "README.md", "Home")


def document_pages(index: str | None = None) -> list[Page]:
    """The texts of ``docs/`` in the order and the groups of their list, docs/README.md, which comes first.

    The glossary stands alone. Raises ValueError for a text that the list lacks, or names twice or by another title.
    """
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8") if index is None else index
    pages, left = [Page("guide/index.md", heading(text, "docs/README.md"), text, "docs/README.md", GUIDE)], _documents()
    for group, items in GROUP.findall(text):
        for title, name in ITEM.findall(items):
            if name not in left:
                raise ValueError(f"docs/README.md lists {name}, which there is not, or twice")
            pages.append(_document(name, left.pop(name), group))
            if pages[-1].title != title:
                raise ValueError(f"docs/README.md calls {name} {title!r}; its heading is {pages[-1].title!r}")
    if left:
        raise ValueError(f"docs/README.md does not list {', '.join(left)}; add '- [its heading](its file): one line'")
    return pages


def _documents() -> dict[str, str]:
    """The texts that the list has to have, by their place as seen from ``docs/``."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    del texts["README.md"]
    return texts | {"../CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")}


def _document(name: str, text: str, group: str) -> Page:
    if name == "glossary.md":
        return Page(name, GLOSSARY, HIDE + _indexed(text), "docs/glossary.md", GLOSSARY)
    source = name.removeprefix("../") if name.startswith("../") else f"docs/{name}"
    return Page(name.removeprefix("../").lower(), heading(text, source), text, source, GUIDE, group)


def glossary_terms(glossary: str) -> list[str]:
    """The terms of the glossary, in its order."""
    return TERM.findall(glossary)


def _indexed(glossary: str) -> str:
    """The glossary with all of its terms in the order of the alphabet before its first section."""
    terms = sorted(glossary_terms(glossary), key=str.casefold)
    index = "<br>\n".join(f"[{term}](#{slug(term)})" for term in terms)
    first, section, rest = glossary.partition("\n## ")
    return f'{first}\n<div class="glossary-index" markdown>\n{index}\n</div>\n{section}{rest}'


def heading(markdown: str, where: str) -> str:
    """The text's first heading; raises ValueError where it has none."""
    found = re.search(r"^# (.+)$", markdown, re.M)
    if found is None:
        raise ValueError(f"{where} has no heading, '# ...'")
    return found[1].strip()
