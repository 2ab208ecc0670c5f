"""Small helpers that tests of several folders use."""

import re
from collections.abc import Callable
from typing import Any


def assert_refused(call: Callable[[], Any], words: str, error: type[Exception] = ValueError) -> None:
    """The call raises this error with text that these words (a pattern) match; a failure names the words."""
    text = None
    try:
        call()
    except error as refused:
        text = str(refused)
    assert text is not None, f"nothing was raised where {error.__name__} was expected: {words}"
    assert re.search(words, text), f"expected {words!r} in: {text}"
