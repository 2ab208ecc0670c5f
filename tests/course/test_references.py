"""Every citation resolves to authors, a year, a title and a link, and every link of that kind is a reference's."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.architecture.source import ROOT
from zerosim.course import references as lesson
from zerosim.course.published import published

PEOPLE = r"[A-Z][\w'’-]*[a-z]"
CITATION = re.compile(rf"\b((?:Van )?{PEOPLE}(?:,\s+{PEOPLE})*(?:,?\s+(?:&|and)\s+(?:Van )?{PEOPLE}|\s+et al\.)?"
                      r"\s+(?:19|20)\d\d)\b(?![-\d])")
PAPER = re.compile(r"(?:arxiv\.org/abs/|arXiv:)(\d{4}\.\d{5})|doi\.org/(\S+?)[)>\s]")
NO_CITATION = re.compile(r"(?:Between|January|February|March|April|May|June|July|August|September|October|November|"
                         r"December) \d+")
WITHOUT_LINK = {"A note on mixed-precision training"}  # none is known


def texts() -> list[Path]:
    """The package's code, tables and pages, and the notebooks' texts."""
    return [path for folder, endings in (("zerosim", ("py", "toml")), ("docs", ("md",)), ("notebooks/texts", ("py",)))
            for ending in endings for path in sorted((ROOT / folder).rglob(f"*.{ending}"))
            if path.stem != "references"] + [ROOT / "README.md"]


def citations(text: str) -> list[str]:
    """What looks like authors and a year; a citation may go on in the next line."""
    return [found for found in CITATION.findall(re.sub(r"\s*\n[\s#*]*", " ", text)) if not NO_CITATION.fullmatch(found)]


def papers(text: str) -> set[str]:
    return {arxiv or doi for arxiv, doi in PAPER.findall(text)}


def test_a_reference_says_who_when_what_and_where():
    for one in lesson.references():
        assert one.title, one
        assert one.authors, one
        assert 1950 < one.year < 2030, one
        if one.title in WITHOUT_LINK:
            assert len(one.where) > 100, f"{one.title} has no link; say how one recognizes it"
        else:
            assert urlsplit(one.link).scheme == "https", one
            assert "." in urlsplit(one.link).netloc, one
    assert len({(one.authors, one.year, one.title) for one in lesson.references()}) == len(lesson.references())
    links = [one.link for one in lesson.references() if one.link]
    assert len(set(links)) == len(links)


def test_every_published_number_names_a_reference():
    for row in published():
        assert lesson.cited_by(row.source), row.name


def test_every_citation_is_a_references_and_every_reference_is_cited():
    cited: set[lesson.Reference] = set()
    for path in texts():
        text = path.read_text(encoding="utf-8")
        for citation in citations(text):
            cited.update(lesson.cited_by(citation))
        cited.update(one for one in lesson.references()
                     if (one.link and one.link in text) or any(words in text for words in one.cited))
    assert len(cited) > 70
    cited.update(one for row in published() for one in lesson.cited_by(row.source))
    assert [one.title for one in lesson.references() if one not in cited] == []


def test_every_paper_that_is_linked_is_a_references():
    known = papers(lesson.page() + "\n")
    assert len(known) > 50
    for path in texts():
        assert papers(path.read_text(encoding="utf-8")) <= known, path


@pytest.mark.parametrize("text", sorted((ROOT / "notebooks/texts").glob("[0-9]*.py")), ids=lambda text: text.stem)
def test_every_notebook_links_what_it_rests_on_and_says_who_and_when(text):
    words = text.read_text(encoding="utf-8")
    assert [one for one in lesson.references() if one.link and one.link in words] != []
    assert citations(words) != []


def test_a_citation_without_a_reference_is_refused():
    assert citations("as in Nobody et al. 2019 and, by Some-One & Else\n# 2021, said") == [
        "Nobody et al. 2019", "Some-One & Else 2021"]
    with pytest.raises(ValueError, match=r"'Nobody et al. 2019' cites a text that .* does not have; give it a row"):
        lesson.cited_by("Nobody et al. 2019")
    with pytest.raises(ValueError, match="does not have"):
        lesson.cited_by("Rajbhandari et al. 2019, section 5")


def test_the_page_of_references_is_written_from_the_table():
    assert (ROOT / "docs/references.md").read_text(encoding="utf-8") == lesson.page(), (
        "run python -m zerosim.course.references > docs/references.md")
