"""One rank in a replay: its program from point to point, and its communication stream part by part."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerosim.planning.recording.tables import POINTS, Message, Program
from zerosim.planning.timeline.prices import Pace, Seconds

Point = tuple[int, int, int]  # row, code, call or message


@dataclass(slots=True, eq=False)
class Part:
    """One rank's part in a collective (``call``) or in a message, on its communication stream.

    ``issued`` is when its program came to it, at its point number ``point``; ``begun`` when it was first in the stream;
    ``joined`` when the last of those that take part had come too, or this rank was done, if that was sooner; ``ended``
    when this rank was done. Of a message, ``send_end`` and ``receive_end`` say when each half was through, ``receiver``
    and ``sender`` are the other ends. ``number`` counts the parts of the rank's stream.
    """

    rank: int
    point: int
    call: int | None
    message: Message | None
    issued: Seconds
    number: int
    place: int = 0
    begun: Seconds = None
    joined: Seconds = None
    ended: Seconds = None
    send_end: Seconds = None
    receive_end: Seconds = None
    receiver: "Part | None" = None
    sender: "Part | None" = None


@dataclass(slots=True, eq=False)
class Lane:
    """One rank: its points, when its program reached each and went on from each, and its parts in the order of issue.

    ``work`` are the nominal seconds of arithmetic before each point, ``part_at`` the part that it issues or waits for.
    """

    rank: int
    points: Sequence[Point]
    work: Sequence[Seconds]
    pace: Pace
    reached: list[Seconds] = field(default_factory=list)
    resumed: list[Seconds] = field(default_factory=list)
    part_at: list[Part] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    queue: deque[Part] = field(default_factory=deque)
    unwaited: dict[int, Part] = field(default_factory=dict)
    free: Seconds = 0
    end: Seconds = 0

    @property
    def is_done(self) -> bool:
        """True when the program has passed its last point."""
        return len(self.resumed) == len(self.points)

    @property
    def waits_for(self) -> Part | None:
        """What holds the program."""
        return None if self.is_done or len(self.reached) == len(self.resumed) else self.part_at[-1]

    def clock_at(self, work: Seconds) -> Seconds:
        """The program's clock after so much nominal arithmetic, with no point left before it."""
        passed = len(self.resumed)
        if not passed:
            return self.pace.after(0, work)
        return self.pace.after(self.resumed[-1], work - self.work[passed - 1])


def points_of(program: Program) -> list[Point]:
    """Every point of a program, in order."""
    rows = program.where(*POINTS)
    return list(zip(rows.tolist(), program.codes[rows].tolist(), program.first[rows].tolist(), strict=True))
