"""The README as pages: its first screen is the site's, each section of it a page of the guide."""

import re

from zerosim_site.page import HIDE, ROOT, Page, slug

SECTION = re.compile(r"^## (.+)\n", re.M)
TERM = re.compile(r"^### (.+)$", re.M)
START = "Start"


def readme_pages(readme: str | None = None) -> list[Page]:
    """The home page, with what comes before the first section and with how to start; then the other sections."""
    text = (ROOT / "README.md").read_text(encoding="utf-8") if readme is None else readme
    first, *rest = SECTION.split(text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    home = first + f"## {START}\n" + sections.pop(START)
    return [Page("index.md", "Home", HIDE + home, "README.md", "Home"),
            *(Page(f"guide/{slug(title)}.md", title, f"# {title}\n{body}", "README.md", "Guide")
              for title, body in sections.items())]


def document_pages() -> list[Page]:
    """Each text of ``docs/``: the glossary stands alone, the others are how-tos of the guide."""
    pages = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title, alone = heading(text, path.name), path.stem == "glossary"
        pages.append(Page(path.name, title, HIDE + _indexed(text) if alone else text, f"docs/{path.name}",
                          title if alone else "Guide"))
    return pages


def glossary_terms(glossary: str) -> list[str]:
    """The terms of the glossary, in its order."""
    return TERM.findall(glossary)


def _indexed(glossary: str) -> str:
    """The glossary with all of its terms in the order of the alphabet before its first section."""
    terms = sorted(glossary_terms(glossary), key=str.casefold)
    index = "<br>\n".join(f"[{term}](#{slug(term)})" for term in terms)
    first, section, rest = glossary.partition("\n## ")
    return f'{first}\n<div class="glossary-index" markdown>\n{index}\n</div>\n{section}{rest}'


def changes_page() -> Page:
    """The page of changes."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return Page("changelog.md", "Changes", text, "CHANGELOG.md", "Guide")


def heading(markdown: str, where: str) -> str:
    """The text's first heading; raises ValueError where it has none."""
    found = re.search(r"^# (.+)$", markdown, re.M)
    if found is None:
        raise ValueError(f"{where} has no heading, '# ...'")
    return found[1].strip()
