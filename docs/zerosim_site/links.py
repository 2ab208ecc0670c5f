"""Links of the repository's texts, turned into links of the site; pictures into pairs for light and dark."""

import posixpath
import re
from collections.abc import Mapping

from zerosim_site.page import Page, outside_blocks

SPAN = r"(?P<{0}>`+)(?:(?!(?P={0})).)+?(?P={0})"
TEXT = rf"!?\[(?:{SPAN.format('inner')}|[^\[\]`]|\[[^\[\]`]*\])*\]"
# Code is passed over as a whole, so that what looks like a link in it is left alone; a link's text may hold code.
LINK = re.compile(rf"{SPAN.format('outer')}|(?P<text>{TEXT})\((?P<target>[^()\s]+)\)", re.DOTALL)
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
ATTRIBUTE = r'\b{}="([^"]*)"'
ELSEWHERE = ("https:", "http:", "mailto:", "#")


def with_site_links(page: Page, targets: Mapping[str, str]) -> str:
    """The page's Markdown with every link to a file of the repository turned into one to its page or copy.

    ``targets`` maps files of the repository to places in the site. Raises ValueError for a link to a file that the
    site does not have.
    """
    def change(markdown: str) -> str:
        return LINK.sub(lambda link: _changed(link, page, targets), PICTURE.sub(_plain_picture, markdown))

    return outside_blocks(change, page.text)


def _plain_picture(picture: re.Match[str]) -> str:
    """``<picture>`` as a Markdown image of its light variant."""
    def attribute(name: str) -> str:
        found = re.findall(ATTRIBUTE.format(name), picture.group())
        if not found:
            raise ValueError(f"a picture without {name}: {picture.group()}")
        return str(found[-1])

    return f"![{attribute('alt')}]({attribute('src')})"


def _changed(link: re.Match[str], page: Page, targets: Mapping[str, str]) -> str:
    text, target = link["text"], link["target"]
    if target is None or target.startswith(ELSEWHERE):
        return link.group()
    path, hash_, anchor = target.partition("#")
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(page.source), path))
    if wanted not in targets:
        raise ValueError(f"{page.source} links to {target}, which the site does not have; it has the "
                         "README, docs/, notebooks/, figures/, CHANGELOG.md and the code to which they link")
    place = relative(targets[wanted], page)
    if not text.startswith("!"):
        return f"{text}({place}{hash_}{anchor})"
    stem, dot, ending = wanted.rpartition(".")
    dark = f"{stem}-dark{dot}{ending}"
    if dark not in targets:
        return f"{text}({place})"
    return f"{text}({place}#only-light)\n{text}({relative(targets[dark], page)}#only-dark)"


def relative(target: str, page: Page) -> str:
    """The way from a page to a place of the site."""
    return posixpath.relpath(target, posixpath.dirname(page.uri) or ".")
