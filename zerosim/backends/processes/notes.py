"""Notes between processes, beside the arrays: who has finished, who waits for whom, and what went wrong.

A note is plain data. Notes of one rank arrive in the order in which it sent them.
"""

import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from zerosim.backends.processes.plain import from_bytes, known, to_bytes
from zerosim.ranks.call import Call, GroupKey, Pending, PendingCall
from zerosim.ranks.errors import (
    DeadlockError,
    MismatchError,
    RankPosition,
    RemoteError,
    add_note,
    deadlock_text,
    left_over_text,
    misfit_text,
    mismatch_text,
    text_of,
)


class Channel(Protocol):
    """Carries notes from every process to every other, without anybody waiting for them."""

    index: int
    size: int

    def post(self, note: Any, to: int | None = None) -> None:
        """Sends a note to one rank, or to all others, and returns at once."""

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """(rank, note) of what has come since the last call."""

    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order; every process calls it."""

    def abort(self) -> None:
        """Ends all processes of the job at once."""

    def close(self) -> None:
        """No note is sent or awaited any more; every process calls it."""


# -- What processes tell each other about a run, beside the arrays ---------------------------------------------------

ELSEWHERE = ", in another process:"  # stands in the note of an exception that came from there
Peer = tuple[GroupKey, int]  # a group, and a rank by its index in the whole cluster
OpenHalves = tuple[tuple[Peer, int], ...]


@dataclass(slots=True)
class IssueCounts:
    """The numbers of collectives of each group, and of messages to and from each rank, that a rank has issued."""

    collectives: dict[GroupKey, int] = field(default_factory=dict)
    sends: dict[Peer, int] = field(default_factory=dict)
    receives: dict[Peer, int] = field(default_factory=dict)

    def count(self, me: Pending) -> None:
        """One more collective, or the halves of one more exchange."""
        if isinstance(me, PendingCall):
            self.collectives[me.call.key] = self.collectives.get(me.call.key, 0) + 1
            return
        for halves, peer in ((self.sends, me.to), (self.receives, me.source)):
            if peer is not None:
                halves[me.key, peer] = halves.get((me.key, peer), 0) + 1

    def open_halves(self, me: Pending) -> tuple[OpenHalves, OpenHalves]:
        """The open send and the open receive of the exchange issued last, each with the message's number."""
        if isinstance(me, PendingCall):
            return (), ()
        to, source = (me.key, me.to or 0), (me.key, me.source or 0)
        return (((to, self.sends[to]),) if me.to_send else (),
                ((source, self.receives[source]),) if me.to_receive else ())


@dataclass(slots=True)
class Waiting:
    """The rank has waited for some time. ``calls`` are its last collectives, done or not.

    ``call`` is None where it waits for a message: then ``sends`` and ``receives`` name the open halves, each the peer
    and the number of the message between the two.
    """

    what: str
    where: str
    issued: IssueCounts
    call: Call | None
    calls: tuple[Call, ...]
    sends: OpenHalves = ()
    receives: OpenHalves = ()

    @classmethod
    def of(cls, me: Pending, where: str, issued: IssueCounts, calls: Iterable[Call]) -> "Waiting":
        """The note of a rank whose program waits now."""
        call = me.call if isinstance(me, PendingCall) else None
        return cls(me.describe(), where, issued, call, tuple(calls), *issued.open_halves(me))


@dataclass(slots=True)
class Going:
    """A note that what the rank had waited for is there."""


@dataclass(slots=True)
class Entered:
    """The rank is about to take part in this collective (sent in debug mode only)."""

    call: Call


@dataclass(slots=True)
class Sending:
    """The rank is about to send a message of this shape and dtype to the reader (sent in debug mode only)."""

    group: GroupKey
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Joining:
    """The rank will help to make this group, whatever else it receives, unless a rank of the group does not come.

    ``invitation`` is what its first rank has to tell the others.
    """

    key: GroupKey
    invitation: bytes


@dataclass(slots=True)
class Finished:
    """The program has returned; ``calls`` are its last collectives. In a run that goes well it is a rank's last word:
    a later one could be read in the next run, and be taken for that one's."""

    issued: IssueCounts
    calls: tuple[Call, ...] = ()


@dataclass(slots=True)
class Stopped:
    """The rank was stopped because another one failed."""


@dataclass(slots=True)
class Drained:
    """After a failure: nothing of this rank's is under way any more."""


@dataclass(slots=True)
class Failed:
    """The program raised: the exception's class and arguments, None where they do not make it, and its traceback."""

    module: str
    name: str
    args: tuple[Any, ...] | None
    summary: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        """The note about an exception."""
        kind, its_text = type(error), text_of(error)
        note = cls(kind.__module__, kind.__qualname__, arguments_of(error), f"{kind.__name__}: {its_text}",
                   "".join(traceback.format_exception(error)))
        try:
            note = from_bytes(to_bytes(note))  # as others will read it
        except ValueError:
            note.args = None
        made = note._made()
        if made is None or type(made) is not kind or text_of(made) != its_text:
            note.args = None
        return note

    def error(self, rank: int, ranks: int) -> BaseException:
        """The exception as other ranks raise it: its own type where that can be, else RemoteError."""
        raised = self._made() or RemoteError(self.summary)
        add_note(raised, f"raised by rank {rank} of {ranks}{ELSEWHERE}\n{self.text}")
        return raised

    def _made(self) -> BaseException | None:
        """The exception, of a class that this process knows."""
        kind = known(self.module, self.name)
        if self.args is None or not isinstance(kind, type) or not issubclass(kind, BaseException):
            return None
        try:
            return kind(*self.args)
        except Exception:  # whatever a class's own way of being made may raise
            return None


def arguments_of(error: BaseException) -> tuple[Any, ...]:
    """The arguments of which its class makes the exception; not always ``args``, as an OSError's leave its file out."""
    try:
        made = error.__reduce__()
    except Exception:  # a class's own way may fail
        return error.args
    if isinstance(made, tuple) and made[0] is type(error) and isinstance(made[1], tuple):
        return made[1]
    return error.args


def raised_elsewhere(error: BaseException) -> bool:
    """True for an exception that another process raised first."""
    return any(ELSEWHERE in note for note in getattr(error, "__notes__", ()))


Ending = Finished | Stopped | Failed
Note = Waiting | Going | Entered | Sending | Joining | Ending | Drained


# -- Why nobody can go on: found from the ranks' notes alone ---------------------------------------------------------
# A note may be old. That does not matter: the first rank to go on after its note would have found what it waited for
# among what the other notes say was issued; if no note is met by the others, nobody can have gone on.


Notes = Mapping[int, Waiting | Finished]


def verdict(notes: Notes, ranks: int) -> MismatchError | DeadlockError | None:
    """The error, or None where somebody may still go on.

    ``notes``: the last one of each rank that waits or has finished; other ranks are at work.
    """
    mismatch = disagreement({rank: note.calls for rank, note in notes.items()})
    if mismatch is not None or len(notes) < ranks:
        return mismatch
    waiting = {rank: note for rank, note in notes.items() if isinstance(note, Waiting)}
    if not waiting or any(can_go_on(rank, note, notes) for rank, note in waiting.items()):
        return None
    return DeadlockError(deadlock_text([_position(rank, notes) for rank in range(ranks)]))


def disagreement(calls: Mapping[int, tuple[Call, ...]]) -> MismatchError | None:
    """MismatchError where two ranks' calls have the same place in the same group and are not equal."""
    places = sorted(_places(calls), key=lambda found: found[0])
    for _, same in groupby(places, key=lambda found: found[0]):
        found = {rank: call for _, rank, call in sorted(same, key=lambda place: place[1])}
        if len(set(found.values())) > 1:
            return MismatchError(mismatch_text(found))
    return None


def _places(calls: Mapping[int, tuple[Call, ...]]) -> Iterator[tuple[tuple[GroupKey, int], int, Call]]:
    for rank, open_calls in calls.items():
        for call in open_calls:
            yield (call.key, call.number), rank, call


def can_go_on(rank: int, note: Waiting, notes: Notes) -> bool:
    """True when what the rank waits for has been issued by those from whom it must come."""
    if note.call is not None:
        return not absent(note.call, notes)
    for (group, peer), number in note.sends:
        if notes[peer].issued.receives.get((group, rank), 0) < number:
            return False
    return all(notes[peer].issued.sends.get((group, rank), 0) >= number for (group, peer), number in note.receives)


def absent(call: Call, notes: Notes) -> list[int]:
    """The ranks of the call's group that have not issued it."""
    return [rank for rank in call.group if notes[rank].issued.collectives.get(call.key, 0) <= call.number]


def unmet(endings: Mapping[int, Finished]) -> MismatchError | DeadlockError | None:
    """The error though every rank's program has returned: calls that differ, or that not all have made.

    A library may take a small message before anybody asks for it; who sends it goes on, and what came is left over.
    """
    mismatch = disagreement({rank: note.calls for rank, note in endings.items()})
    if mismatch is not None:
        return mismatch
    found = [*_messages_left(endings), *_calls_left(endings)]
    return DeadlockError(left_over_text(found)) if found else None


def _messages_left(endings: Mapping[int, Finished]) -> Iterator[str]:
    for rank, note in endings.items():
        for (group, peer), number in note.issued.sends.items():
            received = endings[peer].issued.receives.get((group, rank), 0)
            if received < number:
                yield f"rank {rank} has sent {number} to rank {peer}, which has received {received}"


def _calls_left(endings: Mapping[int, Finished]) -> Iterator[str]:
    for group in dict.fromkeys(group for note in endings.values() for group in note.issued.collectives):
        made = {rank: endings[rank].issued.collectives.get(group, 0) for rank in group[0]}
        if len(set(made.values())) > 1:
            yield (f"of the collectives of the group {list(group[0])}, "
                   + ", ".join(f"rank {rank} has entered {number}" for rank, number in made.items()))


def _position(rank: int, notes: Notes) -> RankPosition:
    note = notes[rank]
    if isinstance(note, Finished):
        return RankPosition(None)
    return RankPosition(note.what, note.where, absent(note.call, notes) if note.call is not None else None)


# -- The debug mode's check before each collective and message: do all who take part mean the same? ------------------
# Without it ranks that call different collectives wait for each other, as MPI programs do, until a verdict is found.


@dataclass(slots=True)
class AnnouncedCalls:
    """The calls that this rank and the others have said that they are about to make."""

    channel: Channel
    calls: defaultdict[tuple[GroupKey, int], dict[int, Call]]
    messages: defaultdict[tuple[GroupKey, int], list[Sending]]

    def __init__(self, channel: Channel) -> None:
        self.channel, self.calls, self.messages = channel, defaultdict(dict), defaultdict(list)

    def announce(self, me: Pending) -> None:
        """Tells those who take part what this rank is about to do."""
        if isinstance(me, PendingCall):
            self.receive(self.channel.index, Entered(me.call))
            for rank in me.call.group:
                if rank != self.channel.index:
                    self.channel.post(Entered(me.call), rank)
        elif me.to is not None and me.send is not None:
            sending = Sending(me.key, me.send.shape, me.send.dtype)
            if me.to == self.channel.index:
                self.receive(me.to, sending)
            else:
                self.channel.post(sending, me.to)

    def receive(self, rank: int, note: Entered | Sending) -> None:
        """Another rank has said what it is about to do."""
        if isinstance(note, Entered):
            self.calls[note.call.key, note.call.number][rank] = note.call
        else:
            self.messages[note.group, rank].append(note)

    def reached(self, me: Pending) -> bool:
        """True when all who take part have said the same; MismatchError when somebody said something else."""
        if isinstance(me, PendingCall):
            said = self.calls[me.call.key, me.call.number]
            mismatch = disagreement({rank: (call,) for rank, call in said.items()})
            if mismatch is not None:
                raise mismatch
            if len(said) < me.call.ranks:
                return False
            del self.calls[me.call.key, me.call.number]
            return True
        if me.source is None or me.out is None:
            return True
        sendings = self.messages[me.key, me.source]
        if not sendings:
            return False
        sending = sendings.pop(0)
        if (sending.shape, sending.dtype) != (me.out.shape, me.out.dtype):
            raise MismatchError(misfit_text(me.source, sending, me.rank, me.out))
        return True
