"""A page, and the repository that pages are made from."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^([ ]*)(```+|~~~+)[^\n]*\n.*?^\1\2[ ]*$", re.DOTALL | re.M)
HIDE = "---\nhide: [navigation]\n---\n\n"  # a page that stands alone in its section
CODE = re.compile(r"(`+)(?:(?!\1).)+?\1", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """One page of the site: its place, its title in the navigation, and its Markdown.

    ``uri`` is relative to the site and ends in ``.md``; ``source`` is the file of the repository whose text it shows,
    to which the text's links are relative; ``section`` is where it stands in the navigation, in a ``group`` if it says
    one.
    """

    uri: str
    title: str
    text: str
    source: str
    section: str
    group: str = ""


def outside_code(change: Callable[[str], str], markdown: str) -> str:
    """The text with ``change`` applied to all that stands in no code, neither in a block nor between backticks.

    >>> outside_code(str.upper, "see `this`, or\\n```\\nthat\\n```\\n")
    'SEE `this`, OR\\n```\\nthat\\n```\\n'
    """
    return outside_blocks(lambda text: _outside_spans(change, text), markdown)


def outside_blocks(change: Callable[[str], str], markdown: str) -> str:
    """The text with ``change`` applied to all that stands in no block of code."""
    pieces, at = [], 0
    for block in FENCE.finditer(markdown):
        pieces += [change(markdown[at:block.start()]), block.group()]
        at = block.end()
    return "".join([*pieces, change(markdown[at:])])


def _outside_spans(change: Callable[[str], str], markdown: str) -> str:
    pieces, at = [], 0
    for span in CODE.finditer(markdown):
        pieces += [change(markdown[at:span.start()]), span.group()]
        at = span.end()
    return "".join([*pieces, change(markdown[at:])])


def slug(title: str) -> str:
    """A title as a file's name.

    >>> slug("Train a GPT on a text!")
    'train-a-gpt-on-a-text'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def fenced(text: str, language: str) -> str:
    """The text as a block of code; its fence is longer than any in it.

    >>> print(fenced("1 + 1", "python"))
    ```python
    1 + 1
    ```
    """
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def lists_apart(markdown: str) -> str:
    """The text with an empty line before each list: Markdown's first definition needs one, GitHub's and Jupyter's not.

    >>> lists_apart("such as\\n- one\\n- two\\n")
    'such as\\n\\n- one\\n- two\\n'
    """
    lines: list[str] = []
    for line in markdown.split("\n"):
        above = lines[-1] if lines else ""
        if ITEM.match(line) and above.strip() and not ITEM.match(above) and not above.startswith(" "):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


ITEM = re.compile(r"(?:[-*+]|1[.)])[ ]+\S")
