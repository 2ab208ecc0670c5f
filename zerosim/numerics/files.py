"""Files that are whole or not there, what JSON holds: nothing twice, and all in its form; and tables beside code."""

import errno
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.resources import files
from pathlib import Path
from stat import S_ISREG
from typing import Any

from zerosim.numerics.checks import is_count, is_finite_number

UNFINISHED = ".unfinished"
MOST_LEVELS = 100
# The way in which bytes reach an open file: its own, or in some context one that fails (`ranks.faults`).
WRITER: ContextVar[Callable[[Any, memoryview], int]] = ContextVar("WRITER", default=lambda file, part: file.write(part))


def facts(package: str | None, name: str) -> dict[str, Any]:
    """The tables of facts in a package's TOML file of this name, each with its source and date."""
    return tomllib.loads(files(package or "").joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def json_of(text: str) -> Any:
    """The value of a JSON text; ValueError for what is none, for a key that an object has twice, and for more than
    MOST_LEVELS of lists and objects in each other, which Python cannot print."""
    said = f"it is nested more than {MOST_LEVELS} levels deep"
    try:
        found = json.loads(text, object_pairs_hook=without_repeats)
    except RecursionError:
        raise ValueError(said) from None
    level = [found]
    for _ in range(MOST_LEVELS):
        level = [inner for outer in level if isinstance(outer, dict | list)
                 for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, dict | list)]
    if level:
        raise ValueError(said)
    return found


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object, for its reader's ``object_pairs_hook``; ValueError for a key that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


ANY = "*"  # of a form, in the place of keys: any others


def misfit(value: Any, form: Any, where: str) -> str:
    """The first part of what JSON holds that has not the form, and what is to be there; nothing where all have it.

    A form is a type (int: a count of 0 or more, float: a finite number, object: anything), None, a tuple of forms of
    which one is enough, a list of the form of all items, or a dict of forms by key, all of which are to be there.

    >>> misfit({"sizes": [3, -1]}, {"sizes": [int]}, "file"), misfit({"a": 1}, {ANY: (str, None)}, "file")
    ('file.sizes[1] is -1, and is to be a count', 'file.a is 1, and is to be a text or null')
    """
    if isinstance(form, dict) and isinstance(value, dict):
        missing, others = form.keys() - value.keys() - {ANY}, value.keys() - form.keys()
        if missing or (others and ANY not in form):
            return f"{where} {'lacks' if missing else 'should not have'} {', '.join(sorted(missing or others))}"
        parts = ((value[key], form.get(key, form.get(ANY)), f"{where}.{key}") for key in value)
        return next(filter(None, (misfit(*part) for part in parts)), "")
    if isinstance(form, list) and isinstance(value, list | tuple):
        items = ((one, form[0], f"{where}[{number}]") for number, one in enumerate(value))
        return next(filter(None, (misfit(*item) for item in items)), "")
    forms = form if isinstance(form, tuple) else (form,)
    if any(one is object or (value is None if one is None else is_count(value) and value >= 0 if one is int
                             else is_finite_number(value) if one is float
                             else isinstance(one, type) and isinstance(value, one)) for one in forms):
        return ""
    said = {int: "a count", float: "a number", str: "a text", None: "null"}
    wanted = " or ".join(said[one] if not isinstance(one, dict | list) else f"a {type(one).__name__}" for one in forms)
    return f"{where} is {str(value)[:40]}, and is to be {wanted}"


def write_whole(path: Path, content: bytes) -> Path:
    """Writes a file so that all of it is there, or what was there before; of a link, the file to which it points.

    What is there and is no file, as a pipe or a device, is never replaced, but written into. Raises OSError for a
    folder, and for what cannot be written.
    """
    if _is_special(path):
        path.write_bytes(content)
    else:
        _replace(path.resolve(), [content], sync=False)
    return path


def _is_special(path: Path) -> bool:
    """True for what is there and is no file, as a pipe; raises OSError for a folder."""
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with suppress(FileNotFoundError):
        return not S_ISREG(path.stat().st_mode)
    return False


def require_writable(path: str | Path, asked: str) -> None:
    """Raises ValueError where `write_or_refuse` would, before there is anything to write."""
    path = Path(path)
    try:
        if not _is_special(path):
            unfinished = _unfinished(path.resolve())
            unfinished.touch()
            unfinished.unlink()
    except OSError as error:
        raise refusal(path, asked, error) from None


def write_or_refuse(path: Path, content: bytes, asked: str) -> Path:
    """Writes a file as `write_whole` does; ValueError, which says what was ``asked``, where that cannot be."""
    try:
        return write_whole(path, content)
    except OSError as error:
        raise refusal(path, asked, error) from None


def refusal(path: Path, asked: str, error: OSError) -> ValueError:
    """The refusal of a file that cannot be written: what was asked, what was found, what to do."""
    return ValueError(f"asked to {asked} {str(path)!r}, but: {error.strerror}; name a file that can be written")


def write_durably(path: Path, parts: Iterable[Any]) -> None:
    """Writes a file of bytes so that after a crash, of the machine too, all of it is there, or what was there before.

    Raises OSError, with the file's name, for what cannot be written; then nothing of it stays, or, where only its
    folder could not be brought to the disk, the whole new file.
    """
    _replace(path, parts, sync=True)


def _unfinished(place: Path) -> Path:
    return place.with_name(f".{place.name}.{os.getpid()}{UNFINISHED}")


def _replace(place: Path, parts: Iterable[Any], *, sync: bool) -> None:
    """Writes a file beside its place, under a name of this process, and renames it; with ``sync`` it and then its name
    are brought to the disk."""
    unfinished = _unfinished(place)
    try:
        with unfinished.open("wb", buffering=0) as file:  # so that an error comes where it belongs
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[WRITER.get()(file, left):]
            if sync:
                os.fsync(file.fileno())
        unfinished.replace(place)
        if sync and os.name == "posix":  # elsewhere a folder cannot be opened
            folder = os.open(place.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:  # of a disk that is full it says no name
        raise OSError(error.errno, error.strerror, str(place)) from error
    finally:
        with suppress(OSError):  # as of a folder that there is not, which the first line has said
            unfinished.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps every other one who asks for it, in any process, out of a folder; where the system has no locks, nobody.

    Ends with the process, however that ends. Raises ValueError where another one is inside.
    """
    if os.name != "posix":  # elsewhere a folder cannot be opened
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being written to by another run, or another group of this one; name a "
                             "folder for each") from None
        except OSError:  # a network's file system may have no locks
            pass
        yield
    finally:
        os.close(handle)
