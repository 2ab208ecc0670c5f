"""Checks a built site: nothing is loaded from another host, and every link has an end.

MkDocs checks links between texts; this reads the finished pages, whoever wrote the tags: ``python -m
zerosim_site.check FOLDER``.
"""

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href"}
ELSEWHERE = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
NO_FILE = ("mailto:", "data:", "javascript:")
FOREIGN_STYLE = re.compile(r"""(?:url\(|@import)\s*['"]?(?:https?:)?//[^)'"\s]+""")
# Servers show it under any address, so that its links begin at the root.
NOT_FOUND = "404.html"
# The anchors of `zerosim explore`'s page are states of it, which it reads itself.
STATES = "explore.html"
MARKS = ("only-light", "only-dark")  # of a picture, by which it is shown on one kind of page alone


@dataclass
class Read(HTMLParser):
    """Collects what one page loads, where its links lead, and which anchors it has."""

    loaded: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for every opening tag."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag in LOADED and found.get(LOADED[tag]):
            self.loaded.append(found[LOADED[tag]])
        elif tag == "a" and found.get("href"):
            self.links.append(found["href"])


def faults(site: Path) -> list[str]:
    """The faults of a site, one line each; raises ValueError where there is no site."""
    site = site.resolve()
    pages = {path: read(path) for path in sorted(site.rglob("*.html")) if path.name != NOT_FOUND}
    if site / "index.html" not in pages:
        raise ValueError(f"{site} has no index.html; build it first, with make docs")
    found = [f"{path.relative_to(site)} loads {target}, from another host"
             for path, page in pages.items() for target in page.loaded if ELSEWHERE.match(target)]
    found += [f"{path.relative_to(site)} loads {match}, from another host" for path in sorted(site.rglob("*.css"))
              for match in FOREIGN_STYLE.findall(path.read_text(encoding="utf-8"))]
    return found + [f"{path.relative_to(site)} leads to {target}, which is not there"
                    for path, page in pages.items() for target in [*page.loaded, *page.links]
                    if not _leads_somewhere(path, target, pages)]


def read(path: Path) -> Read:
    """One page."""
    page = Read()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _leads_somewhere(path: Path, target: str, pages: dict[Path, Read]) -> bool:
    if ELSEWHERE.match(target) or target.startswith(NO_FILE):
        return True
    place, _, anchor = unquote(target).partition("#")
    wanted = (path.parent / place.partition("?")[0]).resolve() if place else path
    if wanted.name == STATES and "=" in anchor:
        return wanted.is_file()
    page = pages.get(wanted / "index.html" if wanted.is_dir() else wanted)
    return wanted.is_file() and anchor in {"", *MARKS} if page is None else anchor in {"", *page.anchors}


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    sys.exit("\n".join(wrong) if wrong else 0)
