"""Links of the repository's texts become links of the site, or the site is not made."""

import re
from pathlib import Path

import pytest
from zerosim_site.check import faults
from zerosim_site.links import with_site_links
from zerosim_site.page import Page

from tests.architecture.source import ROOT

TARGETS = {"docs/a.md": "a.md", "notebooks/01.ipynb": "notebooks/01.md", "figures/x.svg": "figures/x.svg",
           "figures/x-dark.svg": "figures/x-dark.svg", "figures/y.gif": "figures/y.gif", "figures": "figures/index.md"}


def linked(text: str, uri: str = "guide/here.md", source: str = "README.md") -> str:
    """The text as the page at ``uri`` has it."""
    return with_site_links(Page(uri, "Here", text, source, "Guide"), TARGETS)


@pytest.mark.parametrize(("text", "expected"), [
    ("[a](docs/a.md)", "[a](../a.md)"),
    ("[a](docs/a.md#part)", "[a](../a.md#part)"),
    ("[`all` of them](figures)", "[`all` of them](../figures/index.md)"),
    ("![x](figures/x.svg)", "![x](../figures/x.svg#only-light)\n![x](../figures/x-dark.svg#only-dark)"),
    ("![y](figures/y.gif)", "![y](../figures/y.gif)"),
    ('<picture>\n<source srcset="figures/x-dark.svg">\n<img src="figures/x.svg" alt="An x.">\n</picture>',
     "![An x.](../figures/x.svg#only-light)\n![An x.](../figures/x-dark.svg#only-dark)"),
    ("[web](https://example.org/a) and [part](#part)", "[web](https://example.org/a) and [part](#part)"),
    ("`[a](docs/none.md)`, `x[i](j)`", "`[a](docs/none.md)`, `x[i](j)`"),
    ("```\n[a](docs/none.md)\n```\n", "```\n[a](docs/none.md)\n```\n"),
])
def test_a_link_to_a_file_becomes_a_link_to_its_page(text, expected):
    assert linked(text) == expected


def test_links_are_read_from_where_the_text_lies():
    assert linked("[n](../notebooks/01.ipynb)", "glossary.md", "docs/glossary.md") == "[n](notebooks/01.md)"


NOWHERE = r"README\.md links to .*, which the site does not have"


@pytest.mark.parametrize(("text", "said"), [
    ("[a](docs/gone.md)", NOWHERE), ("![a](figures/gone.svg)", NOWHERE), ("[a](../docs/a.md)", NOWHERE),
    ('<picture><img src="figures/x.svg"></picture>', "without alt")])
def test_a_link_that_leads_nowhere_and_a_picture_without_words_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        linked(text)


# -- the finished site --------------------------------------------------------------------------------------------

GOOD = '<html><link rel="icon" href="logo.svg"><a href="b.html#part">b</a><a href="https://example.org">e</a></html>'


def built(folder: Path, index: str = GOOD) -> Path:
    """A site of two pages."""
    (folder / "logo.svg").write_text("<svg/>", encoding="utf-8")
    (folder / "b.html").write_text('<h2 id="part">Part</h2>', encoding="utf-8")
    (folder / "index.html").write_text(index, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("old", "new", "said"), [
    ("b.html#part", "b.html#gone", "leads to b.html#gone"),
    ("b.html#part", "c.html", "leads to c.html"),
    ("b.html#part", "#gone", "leads to #gone"),
    ('rel="icon" href="logo.svg"', 'rel="stylesheet" href="https://example.org/a.css"', "from another host"),
    ("<html>", '<script src="//example.org/a.js"></script>', "loads //example.org/a.js, from another host"),
    ("<html>", '<img src="gone.png">', "leads to gone.png"),
])
def test_a_fault_of_a_site_is_found(tmp_path, old, new, said):
    assert GOOD.count(old) == 1
    assert faults(built(tmp_path)) == []
    [found] = faults(built(tmp_path, GOOD.replace(old, new)))
    assert said in found


def test_make_docs_is_strict_and_lets_warnings_be_heard():
    build, = re.findall(r"^\t.*mkdocs build.*$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert "--strict" in build
    assert "--quiet" not in build, "MkDocs counts no warning that it does not print, and --strict counts warnings"


def test_a_style_that_loads_from_another_host_and_a_folder_without_a_site_are_faults(tmp_path):
    with pytest.raises(ValueError, match="make docs"):
        faults(tmp_path)
    built(tmp_path).joinpath("a.css").write_text("@import 'https://example.org/f.css';", encoding="utf-8")
    assert ["from another host" in line for line in faults(tmp_path)] == [True]
