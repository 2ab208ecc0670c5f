"""The README's reading path: the files that explain ZeRO, in the order in which one reads them."""

import re

from tests.architecture.source import ROOT

FILES, LINES = 26, 8_500
STEP = re.compile(r"^\d+\. \[`(zerosim/[\w/]+\.py)`\]\((.+?)\)(.*)$", re.M)


def faults_of_the_path(readme: str, files: int = FILES, lines: int = LINES) -> list[str]:
    """The faults of the list: a file that is missing, listed twice or not described; too many files or lines."""
    _, _, section = readme.partition("\n## The reading path\n")
    steps = STEP.findall(section.partition("\n## ")[0])  # file, link and text of each item
    path = [name for name, *_ in steps]
    there = {name for name in path if (ROOT / name).is_file()}
    found = [f"{name}: no such file" for name in path if name not in there]
    found += [f"{name}: listed twice" for name in there if path.count(name) > 1]
    found += [f"{name}: links to {link} and says{text or ' nothing'}" for name, link, text in steps
              if link != name or not re.fullmatch(r": \S.+", text)]
    total = sum((ROOT / name).read_text(encoding="utf-8").count("\n") for name in there)
    if not 0 < len(path) <= files:
        found.append(f"{len(path)} files; a reading path has between 1 and {files}")
    return found + ([f"{total} lines; a reading path has at most {lines}"] if total > lines else [])
