"""What processes tell each other about a run, beside the arrays."""

import pickle
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerosim.ranks.call import Call, Group
from zerosim.ranks.entry import CollectiveEntry, Entry
from zerosim.ranks.errors import RemoteError
from zerosim.ranks.explain import where_called

ELSEWHERE = ", in another process:"  # stands in the note of an exception that came from there
Peer = tuple[Group, int]  # a group, and a rank by its index in the whole cluster
OpenHalves = tuple[tuple[Peer, int], ...]


@dataclass(slots=True)
class Issued:
    """How many collectives of each group, and messages to and from each rank, a rank has issued so far."""

    collectives: dict[Group, int] = field(default_factory=dict)
    sends: dict[Peer, int] = field(default_factory=dict)
    receives: dict[Peer, int] = field(default_factory=dict)

    def count(self, entry: Entry) -> None:
        """One more collective, or the halves of one more exchange."""
        if isinstance(entry, CollectiveEntry):
            self.collectives[entry.call.key] = self.collectives.get(entry.call.key, 0) + 1
            return
        for halves, peer in ((self.sends, entry.to), (self.receives, entry.source)):
            if peer is not None:
                halves[entry.key, peer] = halves.get((entry.key, peer), 0) + 1

    def open_halves(self, entry: Entry) -> tuple[OpenHalves, OpenHalves]:
        """The open send and the open receive of the exchange issued last, each with the message's number."""
        if isinstance(entry, CollectiveEntry):
            return (), ()
        to, source = (entry.key, entry.to or 0), (entry.key, entry.source or 0)
        return (((to, self.sends[to]),) if entry.to_send else (),
                ((source, self.receives[source]),) if entry.to_receive else ())


@dataclass(slots=True)
class Waiting:
    """The rank has waited for some time. ``calls`` are its last collectives, done or not.

    ``call`` is None where it waits for a message: then ``sends`` and ``receives`` name the open halves, each the peer
    and the number of the message between the two.
    """

    what: str
    where: str
    issued: Issued
    call: Call | None
    calls: tuple[Call, ...]
    sends: OpenHalves = ()
    receives: OpenHalves = ()

    @classmethod
    def of(cls, entry: Entry, issued: Issued, calls: Iterable[Call]) -> "Waiting":
        """The note of a rank whose program waits for the entry now."""
        call = entry.call if isinstance(entry, CollectiveEntry) else None
        return cls(entry.describe(), where_called(), issued, call, tuple(calls), *issued.open_halves(entry))


@dataclass(slots=True)
class Going:
    """What the rank had waited for is there."""


@dataclass(slots=True)
class Entered:
    """The rank is about to take part in this collective (told in debug mode only)."""

    call: Call


@dataclass(slots=True)
class Sending:
    """The rank is about to send a message of this shape and dtype to the reader (told in debug mode only)."""

    group: Group
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Joining:
    """The rank will help to make this group, whatever else it hears, unless a rank of the group does not come."""

    key: Group


@dataclass(slots=True)
class Finished:
    """The program has returned; ``calls`` are its last collectives. In a run that goes well it is a rank's last word:
    a later one could be read in the next run, and be taken for that one's."""

    issued: Issued
    calls: tuple[Call, ...] = ()


@dataclass(slots=True)
class Stopped:
    """The rank was stopped because another one failed."""


@dataclass(slots=True)
class Settled:
    """After a failure: nothing of this rank's is under way any more."""


@dataclass(slots=True)
class Failed:
    """The program raised: the exception, pickled where that works, and its traceback as text."""

    pickled: bytes | None
    summary: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        """The note about an exception."""
        text = "".join(traceback.format_exception(error))
        return cls(_pickled(error), f"{type(error).__name__}: {error}", text)

    def error(self, rank: int, ranks: int) -> BaseException:
        """The exception as other ranks raise it: its own type where that can be, else RemoteError."""
        raised: BaseException
        try:
            raised = pickle.loads(self.pickled) if self.pickled else RemoteError(self.summary)
        except Exception:  # an exception whose class is not to be had here, or that is made in a way of its own
            raised = RemoteError(self.summary)
        raised.add_note(f"raised by rank {rank} of {ranks}{ELSEWHERE}\n{self.text}")
        return raised


def raised_elsewhere(error: BaseException) -> bool:
    """True for an exception that another process raised first."""
    return any(ELSEWHERE in note for note in getattr(error, "__notes__", ()))


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes; None where it cannot be made again from them."""
    try:
        pickled = pickle.dumps(error)
        same = type(pickle.loads(pickled)) is type(error)
    except Exception:  # whatever a class's own way of pickling may raise
        return None
    return pickled if same else None


Ending = Finished | Stopped | Failed
Note = Waiting | Going | Entered | Sending | Joining | Ending | Settled
