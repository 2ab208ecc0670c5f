"""Checks of words: what no text file of the repository names, and what the package does not say.

The package uses the field's words. `tied` weights are not lent, a parameter group is no kin, ranks of a call are its
members; the glossary says what each thing is called.
"""

import re

from tests.architecture.source import Source

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
# Former public names, which still work with a DeprecationWarning; the words of a file's other lines count.
FORMER_NAMES = {
    "zerosim/cli/predictions.py": ("--dialect", "dialect: Former", "or dialect"),
    "zerosim/connect.py": ("patience_seconds",),
    "zerosim/models/units.py": ("borrows",),
    "zerosim/planning/__init__.py": ("RENAMED = ",),
    "zerosim/planning/plan.py": ("dialect",),
    "zerosim/zero/engine.py": ("RENAMED = ",),
}
HOUSE_WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(HOUSE_WORDS)})(?![a-z])", re.IGNORECASE)


def forbidden_words(source: Source) -> list[str]:
    """The lines of a text that name what the project's files do not name."""
    return [f"{source.path}:{number}: names {what}: {match.group()}"
            for number, line in enumerate(source.text.splitlines(), 1)
            for what, pattern in FORBIDDEN.items() if (match := pattern.search(line))]


def house_words(source: Source) -> list[str]:
    """The lines of a file of the package with a word that the field does not use, names in the code included."""
    former = FORMER_NAMES.get(source.path, ())
    return [f"{source.path}:{number}: says {match.group()!r}; the field has a word for it"
            for number, line in enumerate(source.text.splitlines(), 1)
            if (match := HOUSE_WORD.search(line)) and not any(name in line for name in former)]
