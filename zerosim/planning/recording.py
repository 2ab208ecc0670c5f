"""A recorded run as plain tables: for each rank a program of rows, and what the rows point to; as JSON and back.

Legend: N ranks, R rows of a program. A row is a code and three whole numbers. `POINTERS` says which of them are numbers
of a table's entries; the others are flops and nbytes of COMPUTE, and nbytes of HELD, negative where bytes go.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zerosim.numerics.checks import checked_count
from zerosim.numerics.files import json_of, write_or_refuse
from zerosim.numerics.places import DIRECTIONS
from zerosim.planning.collectives import CollectiveShape, Ints, levels
from zerosim.ranks.trace import Trace

COMPUTE, HELD, COLLECTIVE, ISSUE, WAIT, MESSAGE, BEGIN, END, TRANSFER, TRANSFER_WAIT = CODES = range(10)
# By code, the tables that the three numbers point into; paths are names of spans, kinds and names are words.
POINTERS: Mapping[int, tuple[str, str, str]] = {
    COMPUTE: ("", "", "path"), HELD: ("", "kind", "name"), COLLECTIVE: ("call", "path", ""),
    ISSUE: ("call", "path", ""), WAIT: ("call", "path", ""), MESSAGE: ("message", "path", ""),
    BEGIN: ("path", "", ""), END: ("path", "", ""), TRANSFER: ("transfer", "path", ""),
    TRANSFER_WAIT: ("transfer", "path", "")}
# Where a rank's program may have to wait for others, or hands something to another stream.
POINTS = (COLLECTIVE, ISSUE, WAIT, MESSAGE, TRANSFER, TRANSFER_WAIT)
# What goes on beside the program from its issue on, and the row that waits for it.
ISSUES_OF_WAITS = {WAIT: ISSUE, TRANSFER_WAIT: TRANSFER}


# -- the tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One collective of a run: its shape, its members' ranks, and which of their calls it is."""

    shape: CollectiveShape
    group: tuple[int, ...]
    communicator: tuple[int, ...]
    number: int
    purpose: str


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A rank's part in an exchange that the program made itself; None for an absent half. ``nbytes`` are sent."""

    destination: int | None
    source: int | None
    nbytes: int
    purpose: str


@dataclass(frozen=True, slots=True)
class RecordedTransfer:
    """Bytes that a rank moves between device, host and disk: which way, of what kind, and which of its transfers.

    Raises ValueError for a direction that is not in `DIRECTIONS`, and for negative bytes.
    """

    direction: str
    kind: str
    nbytes: int
    number: int

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"a transfer goes {', '.join(DIRECTIONS)}, found {self.direction!r}")
        checked_count("nbytes", self.nbytes, 0)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedProgram:
    """The program of one rank, or of several: R rows in columns, (R,) each, and bytes held by kind before the first.

    Programs of equal rows are equal.
    """

    codes: Ints
    first: Ints
    second: Ints
    third: Ints
    held_at_start: Mapping[str, int]

    def __post_init__(self) -> None:
        if len(set(map(len, self.columns))) > 1:
            raise ValueError("a program's columns must be equally long, got {}, {}, {} and {} rows".format(
                *map(len, self.columns)))

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The codes and the three numbers, (R,) each."""
        return self.codes, self.first, self.second, self.third

    def __len__(self) -> int:
        return len(self.codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedProgram) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return *(column.tobytes() for column in self.columns), tuple(sorted(self.held_at_start.items()))

    def where(self, *codes: int) -> Ints:
        """The numbers of the rows of these codes, rising."""
        return np.flatnonzero(np.logical_or.reduce([self.codes == code for code in codes]))

    def rows(self, low: int, high: int, held_at_start: Mapping[str, int]) -> RecordedProgram:
        """The rows from ``low`` to before ``high``."""
        codes, first, second, third = (column[low:high] for column in self.columns)
        return RecordedProgram(codes, first, second, third, held_at_start)


# -- a recording ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of N ranks as data. Ranks that did the same share a program; ``program_of_rank`` says which, (N,).

    Raises ValueError where a row points to nothing, where a rank takes part in a call of which it is no member, waits
    for what it has not issued, or issues the same twice, and for fields that are no texts or no whole numbers.
    """

    programs: tuple[RecordedProgram, ...]
    program_of_rank: tuple[int, ...]
    calls: tuple[RecordedCall, ...]
    messages: tuple[RecordedMessage, ...]
    paths: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]
    transfers: tuple[RecordedTransfer, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.program_of_rank)

    @property
    def row_count(self) -> int:
        """Rows of all ranks together."""
        return sum(len(self.program(rank)) for rank in range(self.ranks))

    def program(self, rank: int) -> RecordedProgram:
        """The program of this rank."""
        return self.programs[self.program_of_rank[rank]]

    def on_ranks(self, ranks: int) -> Recording:
        """The same program on N ranks: where one recorded rank stands for all.

        Raises ValueError where there are several programs, or calls of other groups than all N ranks, or messages.
        """
        everyone = tuple(range(ranks))
        strangers = [call for call in self.calls if call.group != everyone]
        if len(self.programs) != 1 or strangers or self.messages:
            found = (f"{len(self.programs)} different programs" if len(self.programs) != 1 else
                     f"a call of ranks {shown(strangers[0].group)}" if strangers else "messages between single ranks")
            raise ValueError(f"one rank can stand for {ranks} only where all do the same, in collectives of all; found "
                             f"{found}; record every rank")
        return replace(self, program_of_rank=(0,) * ranks)

    def inside(self, span: str) -> Recording:
        """Only the rows inside the one span of this name: of a run of several steps, one.

        Raises ValueError where a rank has no span of this name, or several, or waits inside for what was issued before.
        """
        return replace(self, programs=tuple(_inside(self, program, span) for program in self.programs))


def _inside(recording: Recording, program: RecordedProgram, span: str) -> RecordedProgram:
    begins = [row for row in program.where(BEGIN).tolist() if recording.paths[program.first[row]][-1:] == (span,)]
    if len(begins) != 1:
        names = dict.fromkeys(recording.paths[path][-1] for path in program.first[program.where(BEGIN)].tolist())
        raise ValueError(f"asked for the rows inside the span {span!r}, of which a rank has {len(begins)}; it must "
                         f"have one. Its spans are {', '.join(names) or 'none'}")
    low = begins[0] + 1
    ends = program.where(END)
    high = int(ends[(ends >= low) & (program.first[ends] == program.first[low - 1])][0])
    held = Counter(program.held_at_start)
    for row in program.where(HELD).tolist():
        if row < low:
            held[recording.words[program.second[row]]] += int(program.first[row])
    part = program.rows(low, high, {kind: nbytes for kind, nbytes in held.items() if nbytes})
    for wait, issue in ISSUES_OF_WAITS.items():
        orphans = set(part.first[part.where(wait)].tolist()) - set(part.first[part.where(issue)].tolist())
        if orphans:
            found = _awaited(recording, wait, min(orphans))
            raise ValueError(f"inside the span {span!r} a rank waits for {found} that was issued before it; take a "
                             "span that holds both")
    return part


def _awaited(recording: Recording, wait: int, index: int) -> str:
    """The name of what a row waits for: a collective's operation, or what a transfer carries where."""
    if wait == WAIT:
        return f"the {recording.calls[index].shape.operation} of call {index}"
    return f"the transfer of {recording.transfers[index].kind} {recording.transfers[index].direction}"


def shown(group: tuple[int, ...]) -> str:
    """Ranks in a sentence; of many, the first, the last and how many."""
    return ", ".join(map(str, group)) if len(group) < 9 else f"{group[0]}, {group[1]}, … {group[-1]} ({len(group)})"


def own_messages(recording: Recording) -> Iterator[tuple[int, RecordedMessage]]:
    """The messages that programs send themselves, each with its sender."""
    for rank in range(recording.ranks):
        program = recording.program(rank)
        sent = (recording.messages[index] for index in program.first[program.where(MESSAGE)].tolist())
        yield from ((rank, message) for message in sent if message.destination is not None)


def traffic(recording: Recording) -> Counter[tuple[int, int, str]]:
    """Bytes by sender, receiver and purpose: of every message of every collective, and of the programs' own."""
    rows = [program.first[program.where(COLLECTIVE, ISSUE)] for program in recording.programs]
    made = [recording.calls[index] for index in np.unique(np.concatenate(rows)).tolist()]
    calls = Counter((call.shape, call.group, call.purpose) for call in made)
    found = Counter[tuple[int, int, str]]()
    for (shape, group, purpose), times in calls.items():
        for level in levels(shape):
            messages = zip(level.sources.tolist(), level.destinations.tolist(), level.nbytes.tolist(), strict=True)
            for source, destination, nbytes in messages:
                found[group[source], group[destination], purpose] += times * level.times * nbytes
    for rank, message in own_messages(recording):
        assert message.destination is not None, "it is one that is sent"
        found[rank, message.destination, message.purpose] += message.nbytes
    return found


def links(recording: Recording) -> Counter[tuple[int, int]]:
    """Bytes from rank to rank."""
    found = Counter[tuple[int, int]]()
    for (source, destination, _), nbytes in traffic(recording).items():
        found[source, destination] += nbytes
    return found


def sent_by_rank(recording: Recording) -> list[dict[str, int]]:
    """Bytes that each rank sent, by purpose."""
    found: list[dict[str, int]] = [{} for _ in range(recording.ranks)]
    for (source, _, purpose), nbytes in traffic(recording).items():
        if nbytes:
            found[source][purpose] = found[source].get(purpose, 0) + nbytes
    return found


# -- what must hold of a recording before anything is made of it, whoever wrote its file ------------------------------


def _check(recording: Recording) -> None:
    """Raises ValueError with the first thing that is wrong."""
    used = set(recording.program_of_rank)
    if not used or used != set(range(len(recording.programs))):
        raise ValueError(f"a recording needs ranks, each with one of its {len(recording.programs)} programs, and none "
                         f"that nobody runs; found programs {sorted(used)} in use")
    _check_fields(recording)
    for program in recording.programs:
        _check_pointers(recording, program)
        _check_waits(recording, program)
    _check_members(recording)


def _check_fields(recording: Recording) -> None:
    """Raises ValueError for a field of a table that is not of its kind."""
    shapes = {id(call.shape): call.shape for call in recording.calls}.values()  # of many calls few, and shared
    texts = [*recording.words, *(name for path in recording.paths for name in path),
             *(name for shape in shapes for name in (shape.operation, shape.algorithm)),
             *(call.purpose for call in recording.calls), *(message.purpose for message in recording.messages)]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"a recording's words, paths, purposes and algorithms are texts, found {text!r}")
    for shape in shapes:
        for least, numbers in ((1, (shape.itemsize, shape.wire_itemsize)), (0, (shape.root, *shape.cut))):
            for number in numbers:
                checked_count(f"a number of a recorded {shape.operation}", number, least)
    for message in recording.messages:
        halves = [rank for rank in (message.destination, message.source) if rank is not None]
        for number in (*halves, message.nbytes):
            checked_count("a number of a recorded message", number, 0)


def _check_pointers(recording: Recording, program: RecordedProgram) -> None:
    """Raises ValueError for an unknown code, for a number beyond its table, and for a span without a name."""
    lengths = {"call": len(recording.calls), "message": len(recording.messages), "path": len(recording.paths),
               "kind": len(recording.words), "name": len(recording.words), "transfer": len(recording.transfers)}
    if unknown := set(program.codes.tolist()) - set(CODES):
        row = program.where(*unknown)[0]
        raise ValueError(f"row {row} points to code {program.codes[row]}, of which there are {len(CODES)}")
    for place, column in enumerate((program.first, program.second, program.third)):
        for table in dict.fromkeys(tables[place] for tables in POINTERS.values() if tables[place]):
            rows = program.where(*(code for code, tables in POINTERS.items() if tables[place] == table))
            wrong = rows[(column[rows] < 0) | (column[rows] >= lengths[table])]
            if len(wrong):
                raise ValueError(f"row {wrong[0]} points to {table} {column[wrong[0]]}, of which there are "
                                 f"{lengths[table]}")
    for path in set(program.first[program.where(BEGIN, END)].tolist()):
        if not recording.paths[path]:
            raise ValueError(f"a span begins or ends at path {path}, which is empty; the last word of one is its name")


def _check_waits(recording: Recording, program: RecordedProgram) -> None:
    """Raises ValueError for a wait without an issue before it, and for something that is issued twice."""
    for wait, issue in ISSUES_OF_WAITS.items():
        rows, waited = program.where(wait, issue), dict[int, bool]()  # of what is issued, whether it was waited for
        for row, code, index in zip(rows.tolist(), program.codes[rows].tolist(), program.first[rows].tolist(),
                                    strict=True):
            if code == issue and index in waited:
                raise ValueError(f"row {row} issues {_awaited(recording, wait, index)} a second time")
            if code == wait and waited.get(index, True):
                raise ValueError(f"row {row} waits for {_awaited(recording, wait, index)} that is not issued before "
                                 "it, or that was waited for already")
            waited[index] = code == wait


def _check_members(recording: Recording) -> None:
    """Raises ValueError for a rank that takes part in a call of others, and for a cut that is not its members'."""
    for call in recording.calls:
        cut = call.shape.cut
        if len(cut) != len(call.group) + 1 or cut[0] != 0 or any(map(operator.gt, cut, cut[1:])):
            raise ValueError(f"a recorded {call.shape.operation} of ranks {shown(call.group)} is cut at {cut}; it "
                             f"needs {len(call.group) + 1} rising boundaries from 0 on")
    members = [frozenset(call.group) for call in recording.calls]
    of_program = [set(p.first[p.where(COLLECTIVE, ISSUE, WAIT)].tolist()) for p in recording.programs]
    for rank, program in enumerate(recording.program_of_rank):
        for call in of_program[program]:
            if rank not in members[call]:
                raise ValueError(f"rank {rank} takes part in a {recording.calls[call].shape.operation} of ranks "
                                 f"{shown(recording.calls[call].group)}, and is none of them")


# -- from the traces of a run to tables: rows are known by the names of their classes ----------------------------------


Numbered = TypeVar("Numbered", bound=Hashable)
Numbers = tuple[int, int, int, int]  # code, first, second, third


class Numbering(dict[Numbered, int]):
    """The number of each entry, in the order in which they first come."""

    def __missing__(self, entry: Numbered) -> int:
        self[entry] = len(self)
        return self[entry]


class Recorder:
    """Turns one trace after another into programs that share tables."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.messages: Numbering[RecordedMessage] = Numbering()
        self.transfers: Numbering[RecordedTransfer] = Numbering()
        self.paths: Numbering[tuple[str, ...]] = Numbering()
        self.words: Numbering[str] = Numbering()
        self.path = 0  # of the latest collective: its Issue has none of its own
        self._call_numbers: dict[Hashable, int] = {}
        self._shapes: dict[CollectiveShape, CollectiveShape] = {}
        self._seen: dict[int, tuple[int, Any]] = {}  # by id of a call that lives as long as this

    def program(self, trace: Trace) -> RecordedProgram:
        """The trace's rows as columns; raises ValueError for a row of a class that is not known, and where rows are
        gone."""
        table: list[Numbers] = []
        for row in trace.all_rows():
            read = READ.get(type(row).__name__)
            if read is None:
                raise ValueError(f"a trace has a row of class {type(row).__name__}, and a recording knows "
                                 f"{', '.join(READ)}")
            numbers = read(self, row)
            if numbers is not None:
                table.append(numbers)
        try:
            columns = np.array(table, np.int64).reshape(-1, 4)
        except OverflowError:
            raise ValueError("a row has flops or bytes past 2^63, which a recording cannot hold; note them in several "
                             "rows") from None
        codes, first, second, third = np.ascontiguousarray(columns.T)
        return RecordedProgram(codes, first, second, third, dict(trace.held_at_start))

    def call(self, call: Any) -> int:
        """The number of a call, the same for all ranks that take part in it; ValueError where they disagree."""
        seen = self._seen.get(id(call))
        if seen is None:
            seen = self._seen[id(call)] = self._number(call), call
        return seen[0]

    def _number(self, call: Any) -> int:
        shape = CollectiveShape(call.operation, call.algorithm, tuple(map(int, call.cut)), int(call.dtype.itemsize),
                                int(call.wire_dtype.itemsize), int(call.root))
        shape = self._shapes.setdefault(shape, shape)
        found = RecordedCall(shape, tuple(call.group), tuple(call.communicator), call.number, call.purpose)
        number = self._call_numbers.setdefault((found.group, found.communicator, found.number), len(self.calls))
        if number == len(self.calls):
            self.calls.append(found)
        elif self.calls[number] != found:
            raise ValueError(f"two ranks disagree about call {found.number} of ranks {found.group}: {found.shape} "
                             f"beside {self.calls[number].shape}; record traces of one run")
        return number

    def collective(self, row: Any) -> Numbers | None:
        """The row of a collective; of an asynchronous one it is the Issue that counts, which follows."""
        self.path = self.paths[row.span]
        return None if row.asynchronous else (COLLECTIVE, self.call(row.call), self.path, 0)

    def transfer(self, moved: Any) -> int:
        """The number of a transfer."""
        return self.transfers[RecordedTransfer(moved.direction, moved.kind, int(moved.nbytes), moved.number)]


# What is read of a row, by the name of its class. Waits have no span of their own: an empty path stands for that.
READ: Mapping[str, Callable[[Recorder, Any], Numbers | None]] = {
    "Compute": lambda to, row: (COMPUTE, row.flops, row.nbytes, to.paths[row.span]),
    "Held": lambda to, row: (HELD, row.nbytes, to.words[row.kind], to.words[row.name]),
    "Collective": Recorder.collective,
    "Issue": lambda to, row: (ISSUE, to.call(row.call), to.path, 0),
    "Wait": lambda to, row: (WAIT, to.call(row.call), to.paths[()], 0),
    "Message": lambda to, row: (MESSAGE, to.messages[
        RecordedMessage(row.destination, row.source, row.sent_nbytes, row.purpose)], to.paths[row.span], 0),
    "SpanBegin": lambda to, row: (BEGIN, to.paths[row.path], 0, 0),
    "SpanEnd": lambda to, row: (END, to.paths[row.path], 0, 0),
    "InjectedFault": lambda to, row: None,
    "Transfer": lambda to, row: (TRANSFER, to.transfer(row), to.paths[row.span], 0),
    "TransferWait": lambda to, row: (TRANSFER_WAIT, to.transfer(row.transfer), to.paths[()], 0)}


def record(traces: Iterable[Trace]) -> Recording:
    """The recording of a run, from the traces of its ranks in rank order.

    Raises ValueError for no traces, for rows of unknown classes, and for ranks that disagree about a call.
    """
    recorder, programs = Recorder(), Numbering[RecordedProgram]()
    of_rank = tuple(programs[recorder.program(trace)] for trace in traces)
    return Recording(tuple(programs), of_rank, tuple(recorder.calls), tuple(recorder.messages), tuple(recorder.paths),
                     tuple(recorder.words), tuple(recorder.transfers))


# -- as JSON and back: small enough to keep, readable by any program, checked when it is read -------------------------
# The form: ``{"format": "zerosim recording", "version": 1, "program_of_rank", "programs", "calls", "shapes", "groups",
# "messages", "paths", "words", "transfers"}``. A program's rows are one letter each (see `LETTERS`) and three columns
# of whole numbers. A call is [shape, group, communicator, number, purpose], a message [destination, source, nbytes,
# purpose], a transfer [direction, kind, nbytes, number].


FORMAT, VERSION = "zerosim recording", 1
# Of the codes, in order: compute, held, collective ("gather"), issue, wait, message, begin, end, transfer, its arrival.
LETTERS = "CHGIWMBETA"
COLUMNS = ("first", "second", "third")


def to_plain(recording: Recording) -> dict[str, Any]:
    """The recording as dicts, lists, strings and whole numbers."""
    shapes, groups = Numbering[CollectiveShape](), Numbering[tuple[int, ...]]()
    calls = [[shapes[call.shape], groups[call.group], list(call.communicator), call.number, call.purpose]
             for call in recording.calls]
    return {
        "format": FORMAT, "version": VERSION,
        "program_of_rank": list(recording.program_of_rank),
        "programs": [{"rows": "".join(LETTERS[code] for code in program.codes.tolist()),
                      **{name: getattr(program, name).tolist() for name in COLUMNS},
                      "held_at_start": dict(program.held_at_start)} for program in recording.programs],
        "calls": calls,
        "shapes": [asdict(shape) | {"cut": list(shape.cut)} for shape in shapes],
        "groups": [list(group) for group in groups],
        "messages": [list(astuple(message)) for message in recording.messages],
        "paths": [list(path) for path in recording.paths],
        "words": list(recording.words),
        "transfers": [list(astuple(transfer)) for transfer in recording.transfers],
    }


def from_plain(plain: Any) -> Recording:
    """The recording of which this is the plain form; raises ValueError for anything else, saying what is wrong."""
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise ValueError(f"this is no recording: it lacks \"format\": \"{FORMAT}\"; write one with recording.save()")
    if plain.get("version") != VERSION:
        raise ValueError(f"this recording is of version {plain.get('version')!r}, and version {VERSION} can be read; "
                         "record it again")
    try:
        shapes = [CollectiveShape(**{**shape, "cut": tuple(shape["cut"])}) for shape in plain["shapes"]]
        groups = [tuple(group) for group in plain["groups"]]
        return Recording(
            tuple(_program(program) for program in plain["programs"]),
            tuple(plain["program_of_rank"]),
            tuple(RecordedCall(shapes[shape], groups[group], tuple(communicator), number, purpose)
                  for shape, group, communicator, number, purpose in plain["calls"]),
            tuple(RecordedMessage(*message) for message in plain["messages"]),
            tuple(tuple(path) for path in plain["paths"]), tuple(plain["words"]),
            tuple(RecordedTransfer(*transfer) for transfer in plain["transfers"]))
    except KeyError as error:
        raise ValueError(f"this recording lacks {error}; it is cut short, or not written by save()") from None
    except (TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"this recording cannot be read: {error}; it was changed since save() wrote it") from None


def _program(plain: Any) -> RecordedProgram:
    codes = dict(zip(LETTERS, CODES, strict=True))
    if unknown := set(plain["rows"]) - set(codes):
        raise ValueError(f"this recording has rows {', '.join(sorted(unknown))}, and the letters of rows are {LETTERS}")
    first, second, third = (np.array(plain[name], np.int64) for name in COLUMNS)
    return RecordedProgram(np.array([codes[letter] for letter in plain["rows"]], np.int64), first, second, third,
                           dict(plain["held_at_start"]))


def save(recording: Recording, path: str | Path) -> Path:
    """Writes the recording to a JSON file: all of it, or nothing. ValueError for a path that cannot be written."""
    text = json.dumps(to_plain(recording), separators=(",", ":"))
    return write_or_refuse(Path(path), text.encode("utf-8"), "save a recording as")


def load(path: str | Path) -> Recording:
    """The recording in a JSON file; ValueError for a file that cannot be read, and for what is no recording."""
    try:
        plain = json_of(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the recording {str(path)!r} cannot be read: {error.strerror}; name a file that --save or "
                         "cluster.save() wrote") from None
    except ValueError as error:  # JSON's and UTF-8's
        raise ValueError(f"the recording {str(path)!r} is no JSON: {error}; name a file that --save or cluster.save() "
                         "wrote") from None
    try:
        return from_plain(plain)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None
