"""Checks of every text file of the repository: what must not be named in it."""

import re

FORBIDDEN = {
    "an absolute path": re.compile(r"(?<![\w.:/~])/(?:work|home|root|Users)\b"),
    "a package registry's host": re.compile(r"\b(?:pypi|pythonhosted|anaconda|npmjs|debian)\.(?:org|com)\b"),
    "a paper of the workshop": re.compile(
        r"\.\./shared\b|\b(?:SPEC|CONTRACTS|DESIGN|SPEED|BACKENDS|EDGE_CASES)(?:\.md|\s*§|, section)"),
}


def forbidden_words(path: str, text: str) -> list[str]:
    """The lines of a text that name what the project's files do not name."""
    return [f"{path}:{number}: names {what}: {match.group()}"
            for number, line in enumerate(text.splitlines(), 1)
            for what, pattern in FORBIDDEN.items() if (match := pattern.search(line))]
