"""What moves arrays between processes: a carrier takes a rank's part in a call and says when it is done.

A carrier of MPI makes each hop as a pair of non-blocking messages, and goes on whenever it is asked to; one of NCCL
puts all hops on a stream and is done at once, since what reads the result waits for the stream.
"""

from typing import Protocol

from zerosim.ranks.call import Group
from zerosim.ranks.entry import Entry


class Course(Protocol):
    """An entry on its way."""

    def advance(self) -> bool:
        """Goes on as far as it can without waiting; True if it came any further."""

    def wait(self) -> None:
        """Called once, when the program waits for a course that is done: what it reads next must be there."""

    def drop(self) -> None:
        """The run has failed: gives up what has not moved yet."""


class Carrier(Protocol):
    """Moves arrays between this process' rank and the others."""

    library: str
    in_order: bool  # whether ranks that begin the same entries in different orders would wait for each other for ever

    def begin(self, entry: Entry) -> Course:
        """Takes the entry and returns at once."""

    def join(self, parent: Group, key: Group) -> None:
        """The ranks of ``key``, all of the group ``parent``, are a group of their own from here on."""

    def idle(self) -> bool:
        """When all ranks' programs have returned: True when all that they asked for is done; raises what went wrong."""

    def drain(self) -> bool:
        """After a failure: takes and forgets what still arrives; True when nothing of this rank's is under way."""

    def settle(self) -> None:
        """After a failure, when ``drain()`` was true on every rank: takes what came last, and closes."""

    def close(self) -> None:
        """The run is over on every rank, and nothing is under way."""
