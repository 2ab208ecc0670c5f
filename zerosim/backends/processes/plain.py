"""Plain data as bytes, and back: what processes tell each other where no launcher vouches for who speaks.

Bytes from elsewhere run nothing: they hold numbers, texts, arrays, what is made of those, and dataclasses and named
tuples of this package, whose fields are filled in without a call. Nothing is imported for them.
"""

import json
import sys
from base64 import b64decode, b64encode
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from zerosim.numerics.arrays import Integers

SCALARS = (bool, int, float, str, type(None))
MANY: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
OURS = "zerosim."
JSON_BITS = 1024  # longer integers travel in another base: Python refuses to write thousands of decimal digits


def to_bytes(value: Any) -> bytes:
    """The value as bytes; ValueError for one that is not plain."""
    try:
        return json.dumps(_plain(value), separators=(",", ":")).encode()
    except RecursionError:
        raise ValueError(f"found a {type(value).__name__} that holds itself, or is nested too deep to travel; send its "
                         "parts one by one") from None


def from_bytes(data: bytes) -> Any:
    """The value again, of the same types; ValueError for bytes that `to_bytes` does not make."""
    try:
        return _value(json.loads(data))
    except (LookupError, TypeError, AttributeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"{len(data)} bytes from another process are no plain data ({error})") from error


def _plain(value: Any) -> Any:
    """The value in JSON's types: a number or a text is itself, all else a list that begins with its kind."""
    if type(value) is int and value.bit_length() > JSON_BITS:
        return ["int", hex(value)]
    if type(value) in SCALARS:
        return value
    if type(value) is bytes:
        return ["bytes", _text(value)]
    if isinstance(value, np.dtype) and (name := _name(value)):
        return ["dtype", name]
    if (type(value) is np.ndarray or isinstance(value, np.generic)) and (name := _name(value.dtype)):
        return ["array" if type(value) is np.ndarray else "number", name, list(value.shape), _text(value.tobytes())]
    if type(value) is dict:
        return ["dict", *[[_plain(key), _plain(its)] for key, its in value.items()]]
    for many, kind in MANY.items():
        if type(value) is kind or (kind is tuple and type(value) is Integers):
            return [many, *map(_plain, value)]
    if type(value).__module__.startswith(OURS) and (names := _fields(type(value))) is not None:
        return ["object", type(value).__module__, type(value).__qualname__,
                *[_plain(getattr(value, name)) for name in names]]
    raise ValueError(f"found {type(value).__name__}, but without MPI processes tell each other plain data alone: None, "
                     "numbers, texts, bytes, NumPy arrays, and lists, tuples, sets and dicts of them; make it one of "
                     "these, or start the job with mpiexec, whose processes may tell each other anything")


def _value(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain
    match kind:
        case "array" | "number":
            name, shape, text = rest
            array = np.frombuffer(b64decode(text), np.dtype(name)).reshape(shape).copy()
            return array if kind == "array" else array[()]
        case "int":
            return int(rest[0], 16)
        case "dtype":
            return np.dtype(*rest)
        case "bytes":
            return b64decode(*rest)
        case "dict":
            return {_value(key): _value(its) for key, its in rest}
        case "object":
            return _object(*rest)
    return MANY[kind](map(_value, rest))


def _object(module: str, name: str, *values: Any) -> Any:
    found = known(module, name) if module.startswith(OURS) else None
    if not isinstance(found, type) or (names := _fields(found)) is None:
        raise ValueError(f"{module}.{name} is no kind of plain data")
    by_name = {name: _value(value) for name, value in zip(names, values, strict=True)}
    if issubclass(found, tuple):
        return tuple.__new__(found, by_name.values())
    made = object.__new__(found)
    for field, value in by_name.items():
        object.__setattr__(made, field, value)
    return made


def _fields(kind: type) -> tuple[str, ...] | None:
    """The names of the fields of a dataclass, or of a named tuple; None for another type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else getattr(kind, "_fields", None)


def known(module: str, name: str) -> Any:
    """The thing of that dotted name in a module that this process has imported already; else None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _name(dtype: np.dtype[Any]) -> str | None:
    """The text of which NumPy makes the type again; None where there is none, or elements are Python's objects."""
    if dtype.hasobject or dtype.names or not dtype.itemsize:
        return None
    return dtype.str if dtype.type.__module__ == "numpy" else dtype.name  # ml_dtypes' names, and not NumPy's codes


def _text(data: bytes) -> str:
    return b64encode(data).decode()
