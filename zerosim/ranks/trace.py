"""The trace: one ordered list of what a rank did, from which everything else is drawn, priced or explained.

Each `Rank` writes one per run: its collectives and messages, the arrays that entered and left its memory, arithmetic,
and the named spans of the program. Sent bytes are counted here and nowhere else.

Legend: N ranks of a group. Bytes are those a rank *sends*; each is received once, by another rank.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from zerosim.numerics.checks import is_count, unknown_name
from zerosim.numerics.kernels import do_nothing
from zerosim.ranks.call import Call, Hop
from zerosim.ranks.collectives import expand
from zerosim.ranks.option_rows import InjectedFault, Transfer, TransferWait
from zerosim.ranks.process import guarded
from zerosim.shown import Plotted

PURPOSES = ("parameters", "gradients", "state", "control", "unspecified")
KINDS = ("parameter", "gradient", "master", "optimizer_state", "gathered_parameter", "secondary_parameter",
         "unit_gradient", "activation", "activation_gradient", "checkpointed_input", "communication_buffer",
         "workspace", "input")


def checked_purpose(name: str) -> str:
    """The purpose that a message is counted under. Raises ValueError where there is no such one."""
    if name not in PURPOSES:
        raise unknown_name(f"no purpose {name!r}", name, PURPOSES)
    return name


def checked_kind(name: str) -> str:
    """The kind under which memory is held. Raises ValueError where there is no such one."""
    if name not in KINDS:
        raise ValueError(f"no kind of memory is called {name!r}; the kinds are {', '.join(KINDS)}")
    return name


def checked_kinds(kinds: str | Iterable[str] | None) -> frozenset[str]:
    """The kinds that are asked for: one, some, or (None) all."""
    return frozenset(map(checked_kind, [kinds] if isinstance(kinds, str) else KINDS if kinds is None else kinds))


# No row of a plain step is frozen, though those with a hash never change: frozen, it takes three times as long to make.
@dataclass(slots=True)
class Collective:
    """A rank's part in one collective: the call, and the bytes that this rank sent in it."""

    call: Call
    span: tuple[str, ...]
    asynchronous: bool
    sent_nbytes: int = 0

    @property
    def purpose(self) -> str:
        return self.call.purpose

    def hops(self) -> list[Hop]:
        """Every message of the collective, of all ranks, in the order of the steps (expanded on null arrays)."""
        return expand(self.call)


@dataclass(slots=True)
class Message:
    """A message between two ranks that the program sent itself. ``destination`` is None for a pure receive."""

    destination: int | None
    source: int | None
    purpose: str
    span: tuple[str, ...]
    sent_nbytes: int = 0


@dataclass(slots=True, unsafe_hash=True)
class Issue:
    """An asynchronous collective was issued here."""

    call: Call


@dataclass(slots=True, unsafe_hash=True)
class Wait:
    """The program waited here for the asynchronous collective."""

    call: Call


@dataclass(slots=True, unsafe_hash=True)
class Held:
    """An array entered the memory (``nbytes`` > 0) or left it (``nbytes`` < 0).

    ``number`` tells arrays of one kind and name apart: each that a rank holds has its own, from entry to leave.
    """

    kind: str
    name: str
    nbytes: int
    number: int = field(default=0, compare=False)


@dataclass(slots=True, unsafe_hash=True)
class Compute:
    """Arithmetic: floating-point operations, and bytes read and written."""

    flops: int
    nbytes: int
    span: tuple[str, ...]


@dataclass(slots=True, unsafe_hash=True)
class SpanBegin:
    """A named stretch of the program begins; spans nest."""

    path: tuple[str, ...]


@dataclass(slots=True, unsafe_hash=True)
class SpanEnd:
    """The named stretch ends."""

    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepBegin:
    """The place among all rows at which a training step begins, and what was sent, moved and held until there."""

    place: int
    sent: Counter[tuple[str, str | None]]
    moved: Counter[str]
    held: dict[str, int]


Row = (Collective | Message | Issue | Wait | Held | Compute | Transfer | TransferWait | SpanBegin | SpanEnd
       | InjectedFault)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One array in the memory, as one kind.

    ``born`` and ``died`` are places in ``trace.rows``, ``born_in`` and ``died_in`` the spans that were open there.
    None, and no spans: it was held before the run, or still is after it.
    """

    kind: str
    name: str
    nbytes: int
    born: int | None
    died: int | None = None
    born_in: tuple[str, ...] = ()
    died_in: tuple[str, ...] = ()

    def lives_at(self, row: int) -> bool:
        """True where it is held right after this row of the trace."""
        return (self.born is None or self.born <= row) and (self.died is None or row < self.died)


@dataclass(slots=True, repr=False)
class Trace(Plotted):
    """The ordered rows of one rank in one run; ``held_at_start`` are the bytes that it held by kind when it began.

    ``after_compute`` is called after each piece of arithmetic: it lets messages that are under way go on beside it.
    ``kept_rows`` is `Cluster`'s ``trace_rows``, and ``dropped`` counts the rows that are gone, with it or by `drop`.
    """

    rows: list[Row] = field(default_factory=list)
    path: tuple[str, ...] = ()
    held_at_start: dict[str, int] = field(default_factory=dict)
    after_compute: Callable[[], object] = do_nothing
    moved_nbytes: Counter[str] = field(default_factory=Counter)  # by direction of transfers
    transfer_numbers: Iterator[int] = field(default_factory=count)
    kept_rows: int | None = None
    dropped: int = 0
    steps_begun: int = 0  # of training, in the run; one that goes on from a checkpoint counts those before it too
    _sent: Counter[tuple[str, str | None]] = field(default_factory=Counter)  # by purpose, in all and by name of a span
    _steps: list[StepBegin] = field(default_factory=list)

    @guarded  # an array's death, out of which no exception comes, is a row too
    def add(self, row: Row) -> None:
        """Appends a row; of twice as many as are to be kept the older half goes."""
        self.rows.append(row)
        if self.kept_rows is not None and len(self.rows) >= 2 * self.kept_rows:
            del self.rows[:self.kept_rows]
            self.dropped += self.kept_rows
            self._steps = [step for step in self._steps if step.place >= self.dropped]

    def drop(self) -> None:
        """Drops the rows that there are; bytes sent stay counted."""
        self.dropped += len(self.rows)
        self.rows.clear()
        self._steps.clear()

    def all_rows(self) -> list[Row]:
        """``rows``, where all of them are needed; raises ValueError where some have been dropped."""
        if self.dropped:
            raise ValueError(f"this trace has dropped {self.dropped:,} rows, as trace_rows={self.kept_rows} or drop() "
                             "asked it to, and all are needed here; run fewer steps without it, or read .rows")
        return self.rows

    def sent(self, row: Collective | Message, nbytes: int) -> None:
        """Counts bytes that left this rank. The only place in the package where sent bytes are counted."""
        row.sent_nbytes += nbytes
        for name in (None, *set(row.span)):
            self._sent[row.purpose, name] += nbytes

    def compute(self, *, flops: int = 0, nbytes: int = 0) -> None:
        """Notes arithmetic: floating-point operations, and bytes read and written."""
        self.add(Compute(flops, nbytes, self.path))
        self.after_compute()

    def span(self, name: str) -> "Span":
        """Names the stretch of the program inside the ``with`` block."""
        return Span(self, name)

    def sent_nbytes(self, purpose: str | None = None, span: str | None = None) -> int:
        """Bytes this rank sent: all, or those of one purpose, or inside spans of one name; of dropped rows too.

        Raises ValueError for an unknown purpose.
        """
        purposes = PURPOSES if purpose is None else (checked_purpose(purpose),)
        return sum(self._sent[one, span] for one in purposes)

    def begin_step(self, held: dict[str, int]) -> None:
        """Marks where a training step begins, as an engine does at its first forward; ``held`` are bytes by kind."""
        self.steps_begun += 1
        self._steps.append(StepBegin(self.dropped + len(self.rows), self._sent.copy(), self.moved_nbytes.copy(), held))

    def step(self, number: int) -> "Trace":
        """The trace of one training step: 0 is the first of which there are all rows, -1 the last.

        It goes from the step's first forward to that of the next, or to the end: with the all-gather of parameters, and
        with what a program does between two steps. Raises ValueError for a step that there is not.
        """
        if not is_count(number):
            raise ValueError(f"a step is a whole number, 0 the first and -1 the last, found {number!r}")
        if not -len(self._steps) <= number < len(self._steps):
            raise ValueError(f"asked for step {number} of a trace that has {len(self._steps)}; an engine's first "
                             "forward begins one, and trace_rows= and drop() let steps go with their rows")
        end = StepBegin(self.dropped + len(self.rows), self._sent, self.moved_nbytes, {})
        first, after = [*self._steps, end][number % len(self._steps):][:2]
        return Trace(self.rows[first.place - self.dropped:after.place - self.dropped], held_at_start=first.held,
                     moved_nbytes=after.moved - first.moved, _sent=after.sent - first.sent)

    def messages(self, purpose: str | None = None) -> Iterator[Collective | Message]:
        """The rows that can send: collectives and messages, in order."""
        for row in self.all_rows():
            if isinstance(row, Collective | Message) and purpose in (None, row.purpose):
                yield row

    def collectives(self, operation: str | None = None, purpose: str | None = None) -> list[Collective]:
        """The collectives of this rank, in order; only those of one operation or purpose if asked."""
        return [row for row in self.messages(purpose)
                if isinstance(row, Collective) and operation in (None, row.call.operation)]

    def lifetimes(self, kinds: str | Iterable[str] | None = None) -> list[Lifetime]:
        """The lifetimes of the arrays of these kinds (None: of all), in order of birth.

        Arrays that were held before the run come first, and only those that left the memory in it: of the others a
        trace has no row. One that changes its kind (an activation that becomes a checkpointed input) has a life in
        either. Arrays without elements are left out. Raises ValueError for a kind that there is not.

        >>> import numpy as np, zerosim as zs
        >>> def program(rank):
        ...     kept = rank.memory.alloc(3, np.float32, "activation", "h")
        ...     rank.memory.free(rank.memory.alloc(2, np.float32, "gathered_parameter", "w"))
        ...     return kept
        >>> cluster = zs.Cluster(1)
        >>> h, = cluster.run(program)
        >>> for life in cluster.trace[0].lifetimes():
        ...     print(life.kind, life.name, life.nbytes, life.born, life.died)
        activation h 12 0 None
        gathered_parameter w 8 1 2
        """
        asked, path = checked_kinds(kinds), tuple[str, ...]()  # path: the spans that are open at the row
        living, before, found = dict[tuple[int, str], int](), list[Lifetime](), list[Lifetime]()
        for place, row in enumerate(self.all_rows()):
            if isinstance(row, SpanBegin | SpanEnd):
                path = row.path if isinstance(row, SpanBegin) else row.path[:-1]
            elif isinstance(row, Held) and row.nbytes and row.kind in asked:
                at = living.pop((row.number, row.kind), None)
                if row.nbytes > 0:
                    living[row.number, row.kind] = len(found)
                    found.append(Lifetime(row.kind, row.name, row.nbytes, place, born_in=path))
                elif at is not None:
                    found[at] = replace(found[at], died=place, died_in=path)
                else:
                    before.append(Lifetime(row.kind, row.name, -row.nbytes, None, place, (), path))
        return before + found

    def __repr__(self) -> str:
        dropped = f", {self.dropped:,} dropped before them" if self.dropped else ""
        return f"<Trace of {len(self.rows):,} rows{dropped}, {self.sent_nbytes():,} bytes sent>"


@guarded
@dataclass(slots=True)
class Span:
    """A ``with`` block that is a named stretch of a rank's program."""

    trace: Trace
    name: str

    def __enter__(self) -> None:
        self.trace.path += (self.name,)
        self.trace.add(SpanBegin(self.trace.path))

    def __exit__(self, *raised: object) -> None:
        self.trace.add(SpanEnd(self.trace.path))
        self.trace.path = self.trace.path[:-1]


class Traces(tuple[Trace, ...], Plotted):
    """The traces of all ranks of a run, in rank order."""

    __slots__ = ()

    def sent_nbytes(self, purpose: str | None = None, span: str | None = None) -> list[int]:
        """Bytes sent by each rank, in rank order."""
        return [trace.sent_nbytes(purpose, span) for trace in self]

    def step(self, number: int) -> "Traces":
        """The traces of one training step, as `Trace.step` has each."""
        return Traces(trace.step(number) for trace in self)

    def __repr__(self) -> str:
        return f"<Traces of {len(self)} ranks, bytes sent: {self.sent_nbytes()}>"
