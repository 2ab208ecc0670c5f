"""Control messages between processes, beside the arrays: who has finished, who waits for whom, and what went wrong.

A control message is plain data; here it is just a message. Those of one rank arrive in the order in which it sent them.
"""

import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from zerosim.backends.processes.plain import from_bytes, known, to_bytes
from zerosim.ranks.call import GroupKey, Pending, PendingCall, PendingExchange
from zerosim.ranks.errors import (
    DeadlockError,
    MadeCall,
    MismatchError,
    RankPosition,
    RemoteError,
    add_note,
    deadlock_text,
    left_over_text,
    message_mismatch_text,
    mismatch_text,
    place_of_call,
    ranks_text,
    text_of,
)
from zerosim.ranks.hub import POLL_SECONDS


@dataclass(frozen=True, slots=True)
class Value:
    """A process' own in what all processes gather."""

    value: Any


class Channel:
    """Carries messages from every process to every other, without anybody waiting for them but in ``all_gather``."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.lost: set[int] = set()  # processes that have ended without a word
        self._unread: list[deque[Any]] = [deque() for _ in range(size)]  # by rank

    def send(self, message: Any, to: int | None = None) -> None:
        """Sends a control message to one rank, or to all others, and returns at once."""
        raise NotImplementedError

    def incoming(self) -> Iterator[tuple[int, Any]]:
        """(rank, message) of what the network has brought since the last call."""
        raise NotImplementedError

    def abort(self) -> None:
        """Ends all processes of the job at once."""
        raise NotImplementedError

    def close(self) -> None:
        """No message is sent or awaited any more; every process calls it."""
        raise NotImplementedError

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """(rank, message) of what has come since the last call; what follows a value waits until that is gathered."""
        for rank, unread in self._fetched():
            while unread and not isinstance(unread[0], Value):
                yield rank, unread.popleft()

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order; every process calls it, between runs or at the end of one.

        Messages that a process sent before its value are forgotten: the run that they are about is over. Raises
        RemoteError where a process has gone without giving its value.
        """
        self.send(Value(value))
        values = {self.index: value}
        while len(values) < self.size:
            lost = self.lost.copy()  # their last words are read below
            for rank, unread in self._fetched():
                while unread and rank not in values:
                    message = unread.popleft()
                    if isinstance(message, Value):
                        values[rank] = message.value
            missing = sorted(lost - values.keys())
            if missing:
                raise RemoteError(lost_text(missing, self.size))
            time.sleep(POLL_SECONDS)
        return [values[rank] for rank in range(self.size)]

    def _fetched(self) -> Iterator[tuple[int, deque[Any]]]:
        for rank, message in self.incoming():
            self._unread[rank].append(message)
        return enumerate(self._unread)


def lost_text(ranks: list[int], size: int) -> str:
    """The text of an error about processes that have ended without a word."""
    whose = "its process has" if len(ranks) == 1 else "their processes have"
    return f"{ranks_text(ranks)} of {size} can no longer be reached: {whose} ended, or the network between us has"


# -- What processes tell each other about a run, beside the arrays ---------------------------------------------------

ELSEWHERE = ", in another process:"  # stands in the note of an exception that came from there
COLLECTIVE, SEND, RECEIVE = "collective", "send", "receive"
Counted = tuple[GroupKey, str, int | None]  # collectives of a group; or messages in it, to or from that rank
Counts = dict[Counted, int]


def open_halves(me: PendingExchange) -> Iterator[tuple[int, str, str]]:
    """(the other rank, what this rank does, what that one must do) of each half that has not moved yet."""
    if me.to is not None and me.to_send:
        yield me.to, SEND, RECEIVE
    if me.source is not None and me.to_receive:
        yield me.source, RECEIVE, SEND


def count(issued: Counts, me: Pending) -> None:
    """One more collective, or the halves of one more exchange."""
    kinds: list[Counted] = ([(me.call.key, COLLECTIVE, None)] if isinstance(me, PendingCall) else
                            [(me.key, mine, peer) for peer, mine, _ in open_halves(me)])
    for kind in kinds:
        issued[kind] = issued.get(kind, 0) + 1


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rank has waited for some time. ``calls`` are its last collectives, done or not, and ``issued`` counts all.

    ``needs``: (rank, what that one must have issued, how often), until this rank can go on.
    """

    what: str
    where: str
    issued: Counts
    calls: tuple[MadeCall, ...]
    needs: tuple[tuple[int, Counted, int], ...]

    @classmethod
    def of(cls, me: Pending, where: str, issued: Counts, calls: Iterable[MadeCall]) -> "Waiting":
        """The control message of a rank whose program waits now."""
        needs: list[tuple[int, Counted, int]]
        if isinstance(me, PendingCall):
            needs = [(rank, (me.call.key, COLLECTIVE, None), me.call.number + 1) for rank in me.call.group]
        else:
            needs = [(peer, (me.key, its, me.rank), issued[me.key, mine, peer]) for peer, mine, its in open_halves(me)]
        return cls(me.describe(), where, issued, tuple(calls), tuple(needs))


@dataclass(frozen=True, slots=True)
class Entered:
    """The rank is about to take part in this collective (sent in debug mode only)."""

    made: MadeCall


@dataclass(frozen=True, slots=True)
class Sending:
    """The rank is about to send a message of this shape and dtype to the reader (sent in debug mode only)."""

    group: GroupKey
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    where: str


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a message on the host, where a library moves those of devices alone; ``number`` is the call's."""

    group: GroupKey
    number: int | None
    elements: np.ndarray
    where: str


@dataclass(frozen=True, slots=True)
class Joining:
    """The rank will help to make this group, whatever else it receives, unless a rank of the group does not come; or,
    said once more, has made it. ``group_id`` is what its first rank has to tell the others.
    """

    key: GroupKey
    group_id: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """The program has returned, and its device is idle where a thread listens; ``calls`` are its last collectives."""

    issued: Counts
    calls: tuple[MadeCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The program raised, or was stopped because that of ``rank`` did: the exception's class and arguments, None where
    they do not make it, and its traceback. ``drained``: nothing of the sender's is under way any more.
    """

    rank: int
    module: str
    name: str
    args: tuple[Any, ...] | None
    summary: str
    text: str
    drained: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failed":
        """The control message about an exception that this rank raised first."""
        kind, its_text = type(error), text_of(error)
        message = cls(rank, kind.__module__, kind.__qualname__, arguments_of(error), f"{kind.__name__}: {its_text}",
                   "".join(traceback.format_exception(error)))
        try:
            made = from_bytes(to_bytes(message))._made()  # as others will
        except ValueError:
            made = None
        return message if type(made) is kind and text_of(made) == its_text else replace(message, args=None)

    def error(self, ranks: int) -> BaseException:
        """The exception as other ranks raise it: its own type where that can be, else RemoteError."""
        raised = self._made() or RemoteError(self.summary)
        add_note(raised, f"raised by rank {self.rank} of {ranks}{ELSEWHERE}\n{self.text}")
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


Ending = Finished | Failed
Control = Waiting | None | Entered | Sending | Elements | Joining | Ending  # None: the rank waits no more


# -- Why nobody can go on: found from the ranks' messages alone ------------------------------------------------------
# A message may be outdated: its rank has gone on since. The verdict is right all the same. Of the ranks that have gone
# on since their messages, take the one that did so first. What it waited for had been issued by ranks that had not gone
# on yet, so their messages count it. Where the other messages lack something that each waiting rank needs, nobody has.


Latest = Mapping[int, Waiting | Finished]


def verdict(latest: Latest, ranks: int) -> MismatchError | DeadlockError | None:
    """The error, or None where somebody may still go on.

    ``latest``: the last message of each rank that waits or has finished; other ranks are at work.
    """
    mismatch = disagreement({rank: message.calls for rank, message in latest.items()})
    if mismatch is not None or len(latest) < ranks:
        return mismatch
    waiting = [message for message in latest.values() if isinstance(message, Waiting)]
    if not waiting or not all(absent(message, latest) for message in waiting):
        return None
    return DeadlockError(deadlock_text([_position(latest[rank], latest) for rank in range(ranks)]))


def disagreement(calls: Mapping[int, tuple[MadeCall, ...]]) -> MismatchError | None:
    """MismatchError where two ranks' calls have the same place in the same group and are not equal."""
    def number_of(made: tuple[int, MadeCall]) -> tuple[GroupKey, int]:
        return made[1].call.key, made[1].call.number

    ordered = sorted(((rank, one) for rank in sorted(calls) for one in calls[rank]), key=number_of)
    for _, same in groupby(ordered, number_of):
        found = dict(same)
        if len({one.call for one in found.values()}) > 1:
            return MismatchError(mismatch_text(found))
    return None


def check_message_fits(sender: int, sent: Any, sent_at: str, receiver: int, out: Any) -> None:
    """Raises MismatchError for a message that does not fit where the receiver's program waits for it."""
    if (sent.shape, sent.dtype) != (out.shape, out.dtype):
        raise MismatchError(message_mismatch_text(sender, sent, receiver, out, sent_at, place_of_call()))


def absent(message: Waiting, latest: Latest) -> list[int]:
    """The ranks that have not issued what the waiting one needs of them."""
    return [rank for rank, kind, number in message.needs if latest[rank].issued.get(kind, 0) < number]


def _position(message: Waiting | Finished, latest: Latest) -> RankPosition:
    if isinstance(message, Finished):
        return RankPosition(None)
    in_a_collective = any(kind == COLLECTIVE for _, (_, kind, _), _ in message.needs)
    return RankPosition(message.what, message.where, absent(message, latest) if in_a_collective else None)


def unmet(endings: Mapping[int, Finished]) -> MismatchError | DeadlockError | None:
    """The error though every rank's program has returned: calls that differ, or that not all have made.

    A library may take a small message before anybody asks for it; who sends it goes on, and what came is left over.
    """
    mismatch = disagreement({rank: message.calls for rank, message in endings.items()})
    if mismatch is not None:
        return mismatch
    found = [*_messages_left(endings), *_calls_left(endings)]
    return DeadlockError(left_over_text(found)) if found else None


def _messages_left(endings: Mapping[int, Finished]) -> Iterator[str]:
    for rank, message in endings.items():
        for (group, kind, peer), number in message.issued.items():
            if kind == SEND and peer is not None:
                received = endings[peer].issued.get((group, RECEIVE, rank), 0)
                if received < number:
                    yield f"rank {rank} has sent {number} to rank {peer}, which has received {received}"


def _calls_left(endings: Mapping[int, Finished]) -> Iterator[str]:
    for called in dict.fromkeys(
            each for message in endings.values() for each in message.issued if each[1] == COLLECTIVE):
        group = called[0][0]
        made = {rank: endings[rank].issued.get(called, 0) for rank in group}
        if len(set(made.values())) > 1:
            yield (f"of the collectives of the group {list(group)}, "
                   + ", ".join(f"rank {rank} has entered {number}" for rank, number in made.items()))


# -- The debug mode's check before each collective and message: do all who take part mean the same? ------------------
# Without it ranks that call different collectives wait for each other, as MPI programs do, until a verdict is found.


@dataclass(slots=True)
class AnnouncedCalls:
    """The calls that this rank and the others have said that they are about to make."""

    calls: defaultdict[tuple[GroupKey, int], dict[int, MadeCall]] = field(default_factory=lambda: defaultdict(dict))
    messages: defaultdict[tuple[GroupKey, int], list[Sending]] = field(default_factory=lambda: defaultdict(list))

    def announce(self, me: Pending, say: Callable[[Entered | Sending, int], None]) -> None:
        """Tells those who take part, this rank too, what it is about to do."""
        if isinstance(me, PendingCall):
            made = MadeCall(me.call, me.where or place_of_call())
            for rank in me.call.group:
                say(Entered(made), rank)
        elif me.to is not None and me.send is not None:
            say(Sending(me.key, me.send.shape, me.send.dtype, place_of_call()), me.to)

    def receive(self, rank: int, message: Entered | Sending) -> None:
        """Another rank has said what it is about to do."""
        if isinstance(message, Entered):
            self.calls[message.made.call.key, message.made.call.number][rank] = message.made
        else:
            self.messages[message.group, rank].append(message)

    def reached(self, me: Pending) -> bool:
        """True when all who take part have said the same; MismatchError when somebody said something else."""
        if isinstance(me, PendingCall):
            said = self.calls[me.call.key, me.call.number]
            mismatch = disagreement({rank: (made,) for rank, made in said.items()})
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
        check_message_fits(me.source, sending, sending.where, me.rank, me.out)
        return True
