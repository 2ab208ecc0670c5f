"""Small helpers that tests of several folders use."""

import re
from collections.abc import Callable
from typing import Any

import pytest


def assert_refused(call: Callable[[], Any], words: str, error: type[Exception] = ValueError) -> None:
    """The call raises this error with text that these words (a pattern) match; a failure names the words."""
    try:
        found = call()
    except error as refused:
        assert re.search(words, str(refused)), f"expected {words!r} in: {refused}"
    else:
        pytest.fail(f"expected {error.__name__} with {words!r}, and nothing was raised: {found!r}")
