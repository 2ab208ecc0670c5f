"""Data as JSON can hold it."""

import math
from typing import Any


def without_infinities(value: Any) -> Any:
    """The same dicts and lists, with the texts "inf", "-inf" and "nan" for what is no finite number."""
    if isinstance(value, dict):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
