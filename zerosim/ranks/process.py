"""The process in which a run happens, and what must hold there: Ctrl-C, the threads, the frames of an error.

A run that ends by an error leaves nothing behind: Ctrl-C waits while a memory or a trace is being written, and no frame
of the error keeps arrays. A run gives the same bits everywhere: BLAS gets one thread.
"""

import gc
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from zerosim.numerics.checks import is_count
from zerosim.ranks.errors import RankUseError

# -- Ctrl-C in the midst of a run: raised at once in programs and arithmetic, a moment later inside the bookkeeping ---
# Python runs a signal's handler between any two bytecodes. Inside an entry of the memory the exception would leave half
# an entry, and inside the callback that notices an array's death, or a collection of garbage, nobody could catch it:
# Python prints it and goes on. Where a group of NCCL's calls begins or ends it would leave the group open, which
# swallows all later calls.


Guarded = TypeVar("Guarded", bound=Callable[..., Any])

GUARDED: set[CodeType] = set()
# Helpers' own frames are part of whoever called them; "<string>" is the code that a dataclass makes.
TRANSPARENT = ("<string>", "contextlib.py", "collections/__init__.py", "threadpoolctl.py", "threading.py",
               "concurrent/futures/thread.py", "concurrent/futures/_base.py")


def guarded(thing: Guarded) -> Guarded:
    """Marks a function, or all methods of a class, as bookkeeping in which Ctrl-C waits until it is done.

    Write it above all other decorators. A subclass marks its own methods itself.
    """
    for function in vars(thing).values() if isinstance(thing, type) else [thing]:
        _guard(function)
    return thing


def _guard(function: Any) -> None:
    if isinstance(function, property):
        for part in (function.fget, function.fset, function.fdel):
            _guard(part)
        return
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    codes = [getattr(function, "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):  # functions that it defines are among its constants
            GUARDED.add(code)
            codes.extend(code.co_consts)


class Interrupts:
    """A handler of SIGINT that remembers what came inside the bookkeeping; the hub asks after every switch of ranks."""

    def __init__(self) -> None:
        self.pending = False
        self.held = 0

    def __enter__(self) -> None:
        """Inside, a Ctrl-C waits; a second one does not."""
        self.held += 1

    def __exit__(self, *raised: object) -> None:
        self.held -= 1

    def __call__(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.endswith(TRANSPARENT):
            frame = frame.f_back
        if frame is not None and (_in_a_collection(frame)
                                  or (not self.pending and (self.held or frame.f_code in GUARDED))):
            self.pending = True
            return
        self.pending = False
        raise KeyboardInterrupt

    def raise_pending(self) -> None:
        """Raises the KeyboardInterrupt that had to wait, if there is one and it need not wait any more."""
        if self.pending and not self.held:
            self.pending = False
            raise KeyboardInterrupt


def _in_a_collection(frame: FrameType | None) -> bool:
    """True where a callback of the garbage collector is running, out of which no exception comes."""
    watchers = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None and frame.f_code not in watchers:
        frame = frame.f_back
    return frame is not None


@contextmanager
def patient_interrupts(interrupts: Interrupts | None = None) -> Iterator[Interrupts]:
    """Handles SIGINT inside the ``with`` block where Python's own handler would; a run inside a run shares one.

    A run that stops and goes on brings the ``interrupts`` that its hub asks.
    """
    interrupts, current = interrupts or Interrupts(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
    elif isinstance(current, Interrupts):
        yield current
    elif current is not signal.default_int_handler:
        yield interrupts
    else:
        signal.signal(signal.SIGINT, interrupts)
        try:
            yield interrupts
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.raise_pending()


# -- Frames: an error that is still looked at keeps no arrays ---------------------------------------------------------
# A traceback keeps frames, and a frame its variables. `frame.clear` empties those, but not what the frame's function
# closed over: a comprehension (a function of its own before CPython 3.12), a generator expression or a nested function
# keeps the cells of the variables that it shares with the function around it. Where nobody but such frames holds the
# function and the cell, the cell is emptied too.


Raised = TypeVar("Raised", bound=BaseException)


def clear_frames(error: BaseException, until: BaseException | None = None) -> None:
    """Empties the frames of an error, and of the errors that led to it, as far as ``until``, whose frames stay.

    A frame that still runs stays, too.
    """
    functions = [function for raised in _behind(error, until) for function in _functions_of(raised)]
    for raised in _behind(error, until):
        traceback.clear_frames(raised.__traceback__)
    _empty([function.__closure__ or () for function in _orphans(functions)])


def forget_frames(error: Raised) -> Raised:
    """The error without any frames: one that is kept, and may be raised later, keeps neither arrays nor itself."""
    for raised in _behind(error):
        raised.__traceback__ = None
    return error


def _behind(error: BaseException, until: BaseException | None = None) -> Iterator[BaseException]:
    """The error and what it was raised from or during, each once, ``until`` one that is left out."""
    raised: BaseException | None = error
    seen = {id(until)}
    while raised is not None and id(raised) not in seen:
        seen.add(id(raised))
        yield raised
        raised = raised.__cause__ or raised.__context__


def _functions_of(error: BaseException) -> Iterator[FunctionType]:
    """The function of each frame of an error; a frame that still runs does not say which it is."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for held in gc.get_referents(frame):
            if isinstance(held, FunctionType) and held.__code__ is frame.f_code:
                yield held
                break


def _orphans(functions: list[FunctionType]) -> list[FunctionType]:
    """Each function that nobody holds but as many frames as it stands here for, once."""
    frames = Counter(map(id, functions))
    # Each frame's reference, and this list's for it; the comprehension's variable, and getrefcount's argument.
    held = {id(f): f for f in functions if sys.getrefcount(f) <= 2 * frames[id(f)] + 2}
    return list(held.values())


def _empty(closures: list[tuple[CellType, ...]]) -> None:
    """Empties the cells that nothing holds but these closures."""
    holders = Counter(id(cell) for closure in closures for cell in closure)
    for closure in closures:
        for cell in closure:
            if sys.getrefcount(cell) <= holders[id(cell)] + 2:  # the loop's variable, and getrefcount's argument
                with suppress(ValueError):  # it is empty already
                    del cell.cell_contents


# -- Threads: BLAS gets one ------------------------------------------------------------------------------------------
# The number of BLAS threads changes the bits of larger products, and launchers bind cores.

@guarded
@cache
def controller() -> Any:
    """The thread pools of the libraries that are loaded (found once, which takes milliseconds)."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@guarded
@dataclass(eq=False)
class _BlasLimit:
    """One ``blas_limited_to`` that has been entered, in any thread."""

    thread: int
    blas_threads: int
    before: list[int]  # what it found, by library


INSIDE: list[_BlasLimit] = []  # in the order of their entries: BLAS has one number of threads for the whole process
INSIDE_LOCK = threading.Lock()


@guarded
@contextmanager
def blas_limited_to(blas_threads: int) -> Iterator[None]:
    """Limits BLAS to this many threads inside the ``with`` block, until the last of all threads has left it.

    Raises ValueError for fewer than one thread, RankUseError where another thread is inside with another limit.
    """
    if not is_count(blas_threads) or blas_threads < 1:
        raise ValueError(f"blas_threads={blas_threads!r}, but arithmetic needs a whole number of threads, at least one")
    libraries = [library for library in controller().lib_controllers if library.user_api == "blas"]
    with INSIDE_LOCK:
        here = threading.get_ident()
        others = {other.blas_threads for other in INSIDE if other.thread != here} - {blas_threads}
        if others:
            raise RankUseError(
                f"a cluster with blas_threads={blas_threads} was asked to run while one with "
                f"blas_threads={min(others)} runs in another thread, and BLAS has one limit for all threads, which "
                "bits depend on; give both the same, or run one after the other")
        limit = _BlasLimit(here, blas_threads, [library.get_num_threads() for library in libraries])
        INSIDE.append(limit)
        _set_threads(libraries, [blas_threads] * len(libraries))
    try:
        yield
    finally:
        with INSIDE_LOCK:
            place = INSIDE.index(limit)
            del INSIDE[place]
            if place < len(INSIDE):  # who came after it and is still inside sets what the caller found, later
                INSIDE[place].before = limit.before
            else:
                _set_threads(libraries, limit.before)


@guarded
def _set_threads(libraries: list[Any], counts: list[int]) -> None:
    for library, count in zip(libraries, counts, strict=True):
        # From threadpoolctl 3.8 on, the thread that set OpenBLAS first is the only one that may, until it is released.
        release = getattr(library, "clear_controlling_thread", lambda force: None)
        release(force=True)
        library.set_num_threads(count)
        release(force=True)
