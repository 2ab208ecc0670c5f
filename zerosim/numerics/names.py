"""What is said of a name that there is not: the nearest that there is."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[str], *, most: int = 1, likeness: float = 0.6) -> str:
    """``; did you mean 'ring'?``, the end of an error's text: the nearest known names, or nothing where none is near.

    ``likeness`` runs from 0 (any) to 1 (equal), as in Python's difflib.

    >>> did_you_mean("rings", ["ring", "tree"]), did_you_mean("star", ["ring"])
    ("; did you mean 'ring'?", '')
    """
    near = get_close_matches(str(name), list(known), most, likeness)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
