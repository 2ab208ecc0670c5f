"""Checks of words: what no text file of the repository names, what the package does not say, and the reading path, the
files that explain ZeRO, in the order in which one reads them.

The package uses the field's words. `tied` weights are not lent, a parameter group is no kin, ranks of a call are its
members; the glossary says what each thing is called.
"""

import re

from tests.architecture.source import ROOT, Source

FORBIDDEN = {
    "an absolute path": re.compile(r"(?<![\w.:/~])/(?:work|home|root|Users)\b"),
    "a package registry's host": re.compile(r"\b(?:pypi|pythonhosted|anaconda|npmjs|debian)\.(?:org|com)\b"),
    "a paper of the workshop": re.compile(
        r"\.\./shared\b|\b(?:SPEC|CONTRACTS|DESIGN|SPEED|BACKENDS|EDGE_CASES)(?:\.md|\s*§|, section)"),
}
HOUSE_WORDS = (
    "absorb", "alike", "borrow", "borrows", "carriage", "carrier", "deaf", "dialect", "doubts", "families", "kin",
    "lender", "lending", "lent", "let_go", "levers", "party", "patience", "pencil", "reckon", "reckoned", "refresh",
    "rooted", "spoiler", "spoilers", "told", "torn", "twin", "upstairs")
HOUSE_WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(HOUSE_WORDS)})(?![a-z])", re.IGNORECASE)
FILES, LINES = 26, 8_500  # of the reading path
STEP = re.compile(r"^\d+\. \[`(zerosim/[\w/]+\.py)`\]\((.+?)\)(.*)$", re.M)


def forbidden_words(source: Source) -> list[str]:
    """The lines of a text that name what the project's files do not name."""
    return [f"{source.path}:{number}: names {what}: {match.group()}"
            for number, line in enumerate(source.text.splitlines(), 1)
            for what, pattern in FORBIDDEN.items() if (match := pattern.search(line))]


def house_words(source: Source) -> list[str]:
    """The lines of a file of the package with a word that the field does not use, names in the code included."""
    return [f"{source.path}:{number}: says {match.group()!r}; the field has a word for it"
            for number, line in enumerate(source.text.splitlines(), 1)
            if (match := HOUSE_WORD.search(line))]


def faults_of_the_path(page: str, files: int = FILES, lines: int = LINES) -> list[str]:
    """The faults of the list: a file that is missing, listed twice or not described; too many files or lines."""
    steps = STEP.findall(page)  # file, link and text of each item
    path = [name for name, *_ in steps]
    there = {name for name in path if (ROOT / name).is_file()}
    found = [f"{name}: no such file" for name in path if name not in there]
    found += [f"{name}: listed twice" for name in there if path.count(name) > 1]
    found += [f"{name}: links to {link} and says{text or ' nothing'}" for name, link, text in steps
              if link != f"../{name}" or not re.fullmatch(r": \S.+", text)]
    total = sum((ROOT / name).read_text(encoding="utf-8").count("\n") for name in there)
    if not 0 < len(path) <= files:
        found.append(f"{len(path)} files; a reading path has between 1 and {files}")
    return found + ([f"{total} lines; a reading path has at most {lines}"] if total > lines else [])
