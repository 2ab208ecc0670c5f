"""Ctrl-C in the midst of a run: raised at once in programs and arithmetic, a moment later inside the bookkeeping.

Python runs a signal's handler between any two bytecodes. Inside a ledger's entry the exception would leave half an
entry, and inside the callback that notices an array's death, or a collection of garbage, nobody could catch it: Python
prints it and goes on. Where a group of NCCL's calls begins or ends it would leave the group open, which swallows all
later calls.
"""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

Guarded = TypeVar("Guarded", bound=Callable[..., Any])

GUARDED: set[CodeType] = set()
# Helpers' own frames are part of whoever called them; "<string>" is the code that a dataclass makes.
TRANSPARENT = ("<string>", "contextlib.py", "collections/__init__.py", "threadpoolctl.py")


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

    def __call__(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.endswith(TRANSPARENT):
            frame = frame.f_back
        if frame is not None and (_in_a_collection(frame)
                                  or (not self.pending and frame.f_code in GUARDED)):
            self.pending = True
            return
        self.pending = False
        raise KeyboardInterrupt

    def raise_pending(self) -> None:
        """Raises the KeyboardInterrupt that had to wait, if there is one."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


def _in_a_collection(frame: FrameType | None) -> bool:
    """Whether a callback of the garbage collector is running, out of which no exception comes."""
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
