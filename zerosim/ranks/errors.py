"""Errors between ranks: the exceptions, and the sentences in them that say who, where and what to do."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dis import get_instructions
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from zerosim.ranks.call import Call


class MismatchError(ValueError):
    """Ranks of one group called different collectives, or a message did not fit where it arrived."""


class DeadlockError(RuntimeError):
    """No rank can go on; the text says who waits for whom, and where in the source."""


class PendingWorkError(RuntimeError):
    """An asynchronous collective was used wrongly: read before ``wait()``, its input changed, or never waited for."""


class OutOfMemoryError(MemoryError):
    """A rank asked for more bytes than its capacity leaves; the text lists what it holds by kind."""


class FaultError(RuntimeError):
    """A run ended by a fault that was injected and found."""


class RankUseError(RuntimeError):
    """A rank was used outside its own running program: in another thread, another rank's program, or no run."""


class AsymmetryError(ValueError):
    """One rank was to stand for all of them in something that not every rank would do in the same way."""


class BackendError(RuntimeError):
    """A world of ranks that cannot be had here; the text says what is missing and how to get it."""

    def __init__(self, backend: str, text: str) -> None:
        super().__init__(text)
        self.backend = backend

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.backend, str(self))


class RemoteError(RuntimeError):
    """A rank in another process raised an exception that cannot be made again in this one; the text says which."""


class RankStopped(BaseException):
    """Unwinds a rank because another one failed; a BaseException, so that ``except Exception`` lets it pass."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, unless its class refuses whatever is set, as a frozen dataclass does."""
    with suppress(Exception):
        error.add_note(note)


def text_of(error: BaseException, way: Callable[[object], str] = str) -> str:
    """The exception as text; a class may fail to make its own."""
    try:
        return way(error)
    except Exception:  # whatever it may raise
        return f"<{type(error).__name__}, whose {way.__name__}() failed>"


# -- Sentences: who is in which call, who waits for whom, and where in the source ------------------------------------

PACKAGE = str(Path(__file__).parent.parent) + os.sep


def place_of(frame: FrameType | None) -> str:
    """``file:line in function`` of the innermost frame outside the package; or of the innermost one there is."""
    outer = frame
    while outer is not None and outer.f_code.co_filename.startswith(PACKAGE):
        outer = outer.f_back
    found = outer or frame
    if found is None:
        return "an unknown place"
    return f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno} in {found.f_code.co_name}"


def place_of_call() -> str:
    """The place in the user's program that called into the package."""
    return place_of(sys._getframe(1))


def refuse_dropped(call: Call, methods: str) -> None:
    """Raises ValueError where a statement of the user's program makes a call and nothing else: its result is lost.

    ``methods`` is the file of what is called. A result that goes anywhere, into a name, a return or a sum, is not lost.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename == methods and frame.f_back is not None:
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(PACKAGE) and _is_statement(frame.f_code, frame.f_lasti):
        x = f"rank.{call.operation}"
        way = f", or {x}(x, out=x)" * (call.operation in IN_PLACE)
        raise ValueError(f"the result of {call}, at {place_of(frame)}, was dropped: {call.operation} returns it in a "
                         f"new array, and its input stays as it is; write x = {x}(x){way}. Only debug mode looks for "
                         "this, and a name or an underscore keeps it")


IN_PLACE = ("all_reduce", "broadcast", "reduce")  # whose result may be where the input is


@lru_cache(maxsize=1024)
def _is_statement(code: CodeType, call: int) -> bool:
    """True where the value of the call at this place of the bytecode is taken off the stack, and that is all."""
    after = next((step.opname for step in get_instructions(code) if step.offset > call), "")
    return after == "POP_TOP"


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call, and the line of the program that made it."""

    call: Call
    where: str


def mismatch_text(made: Mapping[int, MadeCall]) -> str:
    """Names every group of ranks that made the same call in the same line. ``made``: by rank, in rank order."""
    show = str if len({str(one.call) for one in made.values()}) > 1 else Call.in_full
    groups: dict[str, list[int]] = {}
    for rank, one in made.items():
        groups.setdefault(f"{show(one.call)} at {one.where}", []).append(rank)
    said = "; ".join(f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {text}"
                     for text, ranks in groups.items())
    return (f"the ranks of a group must make the same collective calls in the same order, but {said}. "
            "Look for a branch that depends on the rank, or for shapes, dtypes or options that differ.")


class RankPosition(NamedTuple):
    """A rank in ``what`` at ``where``, waiting for the ranks ``missing`` if it is a collective's."""

    what: str | None  # None: it has finished
    where: str = ""
    missing: list[int] | None = None

    def __str__(self) -> str:
        if self.what is None:
            return "finished"
        for_whom = "" if self.missing is None else f", waiting for {ranks_text(self.missing)}"
        return f"in {self.what} at {self.where}{for_whom}"


def message_mismatch_text(sender: int, send: Any, receiver: int, out: Any, sent_at: str, expected_at: str) -> str:
    """The text about a message that does not fit where it arrives; ``send`` and ``out`` have its shape and dtype."""
    return (f"rank {sender} sends ({send.shape}, {send.dtype}) at {sent_at} to rank {receiver}, which expects "
            f"({out.shape}, {out.dtype}) at {expected_at}; both sides must name the same shape and dtype")


def deadlock_text(positions: Sequence[RankPosition]) -> str:
    """The text of a deadlock: who waits for whom; ``positions`` in rank order."""
    lines = []
    for text, members in groupby(enumerate(positions), key=lambda item: str(item[1])):
        ranks = [rank for rank, _ in members]
        lines.append(f"  rank {ranks[0]}: {text}" if len(ranks) == 1 else f"  ranks {ranks[0]}-{ranks[-1]}: {text}")
    return ("no rank can go on:\n" + "\n".join(lines) + "\nEvery send needs a receive of the same size that is waiting "
            "for it (exchange() does both at once), and every rank of a group must enter each collective.")


def left_over_text(found: Iterable[str]) -> str:
    """The text about messages that were sent and never received, though every rank's program has returned."""
    lines = "\n".join(f"  {text}" for text in found)
    return (f"all ranks have finished, but not all messages have arrived:\n{lines}\nThe library took them only because "
            "they are small; larger ones would wait for ever. Every send needs a receive, and every rank of a group "
            "must enter each collective.")


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks [1, 2]``."""
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
