"""Writes ``docs/museum.md`` and its pictures in ``docs/assets``: ``python docs/museum_page.py``."""

import re
from collections.abc import Iterable
from pathlib import Path

from zerosim.course import museum
from zerosim.course.museum import INVARIANTS, Story

DOCS = Path(__file__).parent
SHORT = re.compile(r";|(?<=Error):")  # ends what an invariant says first
HEAD = """# A museum of bugs

Silent bugs of real implementations of ZeRO, each made again as a patch of a few lines on zerosim's own functions.
Nothing is patched outside a block like this one, and in it only what the thread calls that opened it:

```python
import zerosim as zs

with zs.museum.exhibit("boundary_micro_batch") as exhibit:
    seen = zs.museum.observe(exhibit.setting)  # two steps of a small MLP, watched
    try:
        zs.museum.INVARIANTS["equals_one_device"](seen)
    except AssertionError as error:
        print(str(error).partition(";")[0])
```

```text
weights of rank 0 after step 1: 18 of 23 elements differ
```

`zerosim museum` lists them, `zerosim museum boundary_micro_batch` tells one. The bars are of the run as it should be,
and with the bug. Twenty-five bugs, and a few checks that find all of them:

| invariant | what holds | bugs |
|---|---|---|
"""


def page(stories: Iterable[Story]) -> str:
    """The page of these stories."""
    stories = list(stories)
    found_by = [story.exhibit.invariant for story in stories]
    rows = [f"| `{name}` | {one_line(check.__doc__)} | {found_by.count(name)} |" for name, check in INVARIANTS.items()]
    return HEAD + "\n".join([*rows, *map(section, stories)]) + "\n"


def section(story: Story) -> str:
    """One exhibit: where it was, what one saw, the picture, the patch, and what finds it."""
    one = story.exhibit
    links = [f"[{label(link)}]({link})" for link in one.threads]
    where = "; ".join(filter(None, (one.project, one.versions, one.date, ", ".join(links))))
    parts = [f"## {one.title}", f"`{one.name}`: {where}.", f"{one_line(one.seen)} {one_line(one.unread)}".strip(),
             f"![{one.title}: healthy beside the bug.](assets/museum_{one.name}.svg)", f"Here: {one_line(one.here)}",
             "```diff\n" + "\n".join(line for patch in one.patches for line in (patch.of, *patch.lines)) + "\n```",
             f"Found by `{one.invariant}`: {one_line(SHORT.split(story.message)[0])}."]
    return "\n" + "\n\n".join(parts)


def one_line(text: str | None) -> str:
    """The text in one line."""
    return " ".join((text or "").split())


def label(link: str) -> str:
    """``#7807`` of an issue or a pull request, else the file's name."""
    kind, last = link.split("/")[-2:]
    return f"#{last}" if kind in ("issues", "pull") else last


if __name__ == "__main__":
    told = [museum.show(name) for name in museum.names()]
    (DOCS / "museum.md").write_text(page(told), encoding="utf-8")
    for story in told:
        (DOCS / f"assets/museum_{story.exhibit.name}.svg").write_text(story.svg(), encoding="utf-8")
