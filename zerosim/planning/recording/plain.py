"""A recording as JSON and back: small enough to keep, readable by any program, checked when it is read.

The form: ``{"format": "zerosim recording", "version": 1, "program_of_rank", "programs", "calls", "shapes", "groups",
"messages", "paths", "words", "transfers"}``. A program's rows are one letter each (see `LETTERS`) and three columns of
whole numbers. A call is [shape, group, communicator, number, purpose], a message [destination, source, nbytes,
purpose], a transfer [direction, kind, nbytes, number].
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.numerics.files import write_whole
from zerosim.planning.recording.codes import CODES
from zerosim.planning.recording.tables import Call, Message, Program, Recording, Shape, Transfer

FORMAT, VERSION = "zerosim recording", 1
# Of the codes, in order: compute, held, collective ("gather"), issue, wait, message, begin, end, transfer, its arrival.
LETTERS = "CHGIWMBETA"
COLUMNS = ("first", "second", "third")
SHAPE = [item.name for item in fields(Shape)]


def to_plain(recording: Recording) -> dict[str, Any]:
    """The recording as dicts, lists, strings and whole numbers."""
    shapes = {shape: number for number, shape in enumerate(dict.fromkeys(call.shape for call in recording.calls))}
    groups = {group: number for number, group in enumerate(dict.fromkeys(call.group for call in recording.calls))}
    return {
        "format": FORMAT, "version": VERSION,
        "program_of_rank": list(recording.program_of_rank),
        "programs": [_program_to_plain(program) for program in recording.programs],
        "calls": [[shapes[call.shape], groups[call.group], list(call.communicator), call.number, call.purpose]
                  for call in recording.calls],
        "shapes": [{name: getattr(shape, name) for name in SHAPE} | {"cut": list(shape.cut)} for shape in shapes],
        "groups": [list(group) for group in groups],
        "messages": [[m.destination, m.source, m.nbytes, m.purpose] for m in recording.messages],
        "paths": [list(path) for path in recording.paths],
        "words": list(recording.words),
        "transfers": [[one.direction, one.kind, one.nbytes, one.number] for one in recording.transfers],
    }


def from_plain(plain: Any) -> Recording:
    """The recording of which this is the plain form; raises ValueError for anything else, saying what is wrong."""
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise ValueError(f"this is no recording: it lacks \"format\": \"{FORMAT}\"; write one with recording.save()")
    if plain.get("version") != VERSION:
        raise ValueError(f"this recording is of version {plain.get('version')!r}, and version {VERSION} can be read; "
                         "record it again")
    try:
        shapes = [Shape(**{**shape, "cut": tuple(shape["cut"])}) for shape in plain["shapes"]]
        groups = [tuple(group) for group in plain["groups"]]
        return Recording(
            tuple(_program_from_plain(program) for program in plain["programs"]),
            tuple(plain["program_of_rank"]),
            tuple(Call(shapes[shape], groups[group], tuple(communicator), number, purpose)
                  for shape, group, communicator, number, purpose in plain["calls"]),
            tuple(Message(*message) for message in plain["messages"]),
            tuple(tuple(path) for path in plain["paths"]), tuple(plain["words"]),
            tuple(Transfer(*transfer) for transfer in plain["transfers"]))
    except KeyError as error:
        raise ValueError(f"this recording lacks {error}; it is cut short, or not written by save()") from None
    except (TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"this recording cannot be read: {error}; it was changed since save() wrote it") from None


def save(recording: Recording, path: str | Path) -> Path:
    """Writes the recording to a JSON file: all of it, or nothing. ValueError for a path that cannot be written."""
    path, text = Path(path), json.dumps(to_plain(recording), separators=(",", ":"))
    try:
        return write_whole(path, text.encode("utf-8"))
    except OSError as error:
        raise ValueError(f"asked to save a recording as {str(path)!r}, but: {error.strerror}; name a file that can be "
                         "written") from None


def load(path: str | Path) -> Recording:
    """The recording in a JSON file; ValueError for a file that cannot be read, and for what is no recording."""
    try:
        plain = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the recording {str(path)!r} cannot be read: {error.strerror}; name a file that save() wrote"
                         ) from None
    except ValueError as error:
        raise ValueError(f"the recording {str(path)!r} is no JSON: {error}; name a file that save() wrote") from None
    except RecursionError:
        raise ValueError(f"the recording {str(path)!r} is nested deeper than any; name one that save() wrote") from None
    try:
        return from_plain(plain)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def _program_to_plain(program: Program) -> dict[str, Any]:
    return {"rows": "".join(LETTERS[code] for code in program.codes.tolist()),
            **{name: getattr(program, name).tolist() for name in COLUMNS},
            "held_at_start": dict(program.held_at_start)}


def _program_from_plain(plain: Any) -> Program:
    codes = dict(zip(LETTERS, CODES, strict=True))
    unknown = set(plain["rows"]) - set(codes)
    if unknown:
        raise ValueError(f"this recording has rows {', '.join(sorted(unknown))}, and the letters of rows are {LETTERS}")
    first, second, third = (np.array(plain[name], np.int64) for name in COLUMNS)
    return Program(np.array([codes[letter] for letter in plain["rows"]], np.int64), first, second, third,
                   dict(plain["held_at_start"]))
