"""All pages and files of the site, and its navigation."""

import re
import tomllib
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from zerosim_site import figure_pages, notebook_pages
from zerosim_site.command_pages import commands_page
from zerosim_site.links import with_site_links
from zerosim_site.notebook_pages import Draw
from zerosim_site.page import ROOT, Page
from zerosim_site.readme_pages import document_pages, home_page
from zerosim_site.reference_pages import reference_pages

SECTIONS = ("Home", "Guide", "Notebooks", "Figures", "Command line", "Reference", "Glossary")
BESIDE = ("LICENSE",)
ASSETS = ROOT / "docs/assets"
PLACEHOLDER = "OWNER"  # in the texts, for the account that hosts the repository
CODE = re.compile(r"\]\((?:\.\./)?(zerosim/[\w/]+\.py)\)")  # a link of the README or docs/ to a file of the package


def pages(draw: Draw) -> list[Page]:
    """Every page, with links as the repository has them; ``draw`` makes formulas visible."""
    return [home_page(), *document_pages(), *notebook_pages.notebook_pages(draw),
            figure_pages.figures_page(), commands_page(), *reference_pages()]


def copies() -> dict[str, Path]:
    """Files that are copied as they are, by their place in the site."""
    texts = [path for path in notebook_pages.notebooks() for path in (path, notebook_pages.text_of(path))]
    prose = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    code = [ROOT / name for text in prose for name in CODE.findall(text.read_text(encoding="utf-8"))]
    found = {str(path.relative_to(ROOT).as_posix()): path for path in [*figure_pages.beside(), *texts, *code]}
    return found | {name: ROOT / name for name in BESIDE} | {f"assets/{path.name}": path for path in ASSETS.iterdir()}


def drawn() -> dict[str, bytes]:
    """The notebooks' pictures, by their place in the site."""
    return {place: data for path in notebook_pages.notebooks() for place, data in notebook_pages.pictures(path).items()}


def finished(draw: Draw, owner: str) -> list[Page]:
    """Every page with its links turned into the site's, and the owner in addresses. Raises ValueError for a link that
    leads nowhere."""
    found = pages(draw)
    targets = targets_of(found)
    return [replace(page, text=with_site_links(page, targets).replace(PLACEHOLDER, owner)) for page in found]


def owner() -> str:
    """The account in the repository's address, the one place where it is set."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    found = re.fullmatch(r"https://[^/]+/([^/]+)/[^/]+/?", address)
    if found is None:
        raise ValueError(f"Repository in pyproject.toml is {address!r}; write it as https://github.com/OWNER/zerosim")
    return found[1]


def targets_of(found: list[Page]) -> dict[str, str]:
    """The place in the site of each file of the repository: a notebook is its page, unless its copy is asked for."""
    places = {place: place for place in [*copies(), *drawn()]}
    made = {page.source: page.uri for page in found}
    by_page = {page.uri: page.uri for page in found}
    assets = {f"docs/assets/{path.name}": f"assets/{path.name}" for path in ASSETS.iterdir()}
    return {**places, **by_page, **made, **assets, "docs": "guide/index.md", "figures": "figures/index.md",
            "notebooks": "notebooks/index.md"}


def navigation(found: list[Page]) -> list[dict[str, Any]]:
    """The navigation, section by section. Raises ValueError for a page whose section there is not."""
    strays = [page.uri for page in found if page.section not in SECTIONS]
    if strays:
        raise ValueError(f"pages of no section: {', '.join(strays)}; the sections are {', '.join(SECTIONS)}")
    nav: list[dict[str, Any]] = []
    for section in SECTIONS:
        members = [page for page in found if page.section == section]
        alone = len(members) == 1
        nav.append({section: members[0].uri if alone else _entries(members)})
    return nav


def _entries(members: list[Page]) -> list[Any]:
    """The entries of a section; neighbors of one group stand under its name."""
    entries: list[Any] = []
    for group, together in groupby(members, lambda page: page.group):
        listed = [_entry(page) for page in together]
        entries += [{group: listed}] if group else listed
    return entries


def _entry(page: Page) -> str | dict[str, str]:
    return page.uri if page.uri.endswith("/index.md") else {page.title: page.uri}
