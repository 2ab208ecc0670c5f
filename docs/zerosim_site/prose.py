"""Docstrings of plain prose as Markdown that says the same: doctests and tables become blocks, signs stay signs."""

import re

from zerosim_site.page import lists_apart, outside_code

COLUMNS = re.compile(r"\S {2,}\S")
EMPHASIS = re.compile(r"(?<![\w*])\*(?=[A-Za-z])([^*\n]+?)(?<=[\w.])\*(?![\w*])")
SIGNS = str.maketrans({"*": "\\*", "[": "\\[", "]": "\\]", "<": "&lt;", "$": "\\$", "~": "\\~"})
KEPT = "\x02"


def as_markdown(docstring: str) -> str:
    """The docstring with its doctests, diagrams and tables as blocks of code, and its prose escaped.

    >>> as_markdown("Adds a*b*c to x[i].\\n\\n>>> f(1)\\n2")
    'Adds a\\\\*b\\\\*c to x\\\\[i\\\\].\\n\\n```pycon\\n>>> f(1)\\n2\\n```'
    """
    return "\n\n".join(_block(block) for block in re.split(r"\n[ ]*\n", docstring.strip("\n")))


def _block(block: str) -> str:
    lines = block.split("\n")
    at = next((number for number, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
    if at is not None:
        before = [_block("\n".join(lines[:at]))] if at else []
        return "\n\n".join([*before, "```pycon\n" + _unindented(lines[at:]) + "\n```"])
    if lines[0].startswith("    "):
        return "```text\n" + _unindented(lines) + "\n```"
    if len(lines) > 1 and sum(bool(COLUMNS.search(line)) for line in lines) > 1:
        return "```text\n" + block + "\n```"
    return lists_apart(outside_code(escaped, block))


def _unindented(lines: list[str]) -> str:
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "\n".join(line[margin:] for line in lines)


def escaped(prose: str) -> str:
    """The prose with every sign as it is, but for *emphasis*, and for lists, whose items begin a line."""
    marked = EMPHASIS.sub(rf"{KEPT}\1{KEPT}", prose)
    return re.sub(r"^#", r"\\#", marked.translate(SIGNS), flags=re.M).replace(KEPT, "*")
