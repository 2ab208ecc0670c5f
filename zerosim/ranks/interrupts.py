"""Ctrl-C in the midst of a run: raised at once in programs and arithmetic, a moment later inside the bookkeeping.

Python runs a signal's handler between any two bytecodes. Inside a ledger's entry the exception would leave half an
entry, and inside the callback that notices an array's death, or a collection of garbage, nobody could catch it: Python
prints it and goes on. Where a group of NCCL's calls begins or ends it would leave the group open, which swallows all
later calls.
"""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

GUARDED = frozenset(
    str(Path(__file__).parent / name)
    for name in ("memory.py", "hub.py", "carriage.py", "cluster.py", "state.py", "threads.py", "nccl/adapter.py")
)
# Helpers' own frames are part of whoever called them; "<string>" is the code that a dataclass makes.
TRANSPARENT = ("<string>", "contextlib.py", "collections/__init__.py", "threadpoolctl.py")


class Interrupts:
    """A handler of SIGINT that remembers what came inside the bookkeeping; the hub asks after every switch of ranks."""

    def __init__(self) -> None:
        self.pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.endswith(TRANSPARENT):
            frame = frame.f_back
        if frame is not None and (_in_a_collection(frame)
                                  or (not self.pending and frame.f_code.co_filename in GUARDED)):
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
