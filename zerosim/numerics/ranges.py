"""Ranges of a value's fields, said where the fields stand, as in ``lr: AtLeastZero = 1e-3``, and checked together."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Annotated, Any

from zerosim.numerics.checks import is_count, is_finite_number


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The values that a field may have; ``text`` says it of ``{name}``."""

    text: str
    has: Callable[[Any], bool]

    def __repr__(self) -> str:
        return self.text.replace("{name}", "it")  # in the signatures that help() shows


def require_range(where: str, name: str, value: Any, allowed: Range) -> None:
    """Raises ValueError, by this name, unless the range has the value."""
    if not allowed.has(value):
        raise ValueError(f"{where} was given {name}={value!r}; {allowed.text.format(name=name)}")


def require_ranges(record: Any) -> None:
    """Raises ValueError, by its name, for a field of a dataclass that is not in the range of its annotation.

    Annotations are looked at as they are: the class's file must not make texts of them.
    """
    for field in dataclasses.fields(record):
        for allowed in getattr(field.type, "__metadata__", ()):
            if isinstance(allowed, Range):
                require_range(type(record).__name__, field.name, getattr(record, field.name), allowed)


def one_of(choices: Collection[str]) -> Range:
    """The range of a field that is a name."""
    return Range(f"choose one of {', '.join(choices)}", lambda value: value in choices)


AtLeastZero = Annotated[float, Range("{name} is a finite number, 0 or more",
                                     lambda value: is_finite_number(value) and value >= 0)]
Positive = Annotated[float, Range("{name} is a finite number above 0: something is divided by it",
                                  lambda value: is_finite_number(value) and value > 0)]
Count = Annotated[int, Range("{name} is a whole number, 1 or more", lambda value: is_count(value) and value >= 1)]
CountOrZero = Annotated[int, Range("{name} is a whole number, 0 or more", lambda value: is_count(value) and value >= 0)]
Flag = Annotated[bool, Range("{name} is True or False", lambda value: isinstance(value, bool))]
