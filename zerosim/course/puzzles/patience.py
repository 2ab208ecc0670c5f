"""An answer that never ends is interrupted, as by Ctrl-C, and refused."""

import _thread
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from zerosim.course.puzzles.puzzle import Refused

SECONDS = 60.0  # a case takes a fraction of one


@contextmanager
def limited(where: str, seconds: float | None = None) -> Iterator[None]:
    """Raises Refused where the ``with`` block has not ended after ``seconds`` (SECONDS where none are given).

    Only the main thread can be interrupted, and only where Ctrl-C is not ignored; elsewhere the block runs on.
    """
    limit = SECONDS if seconds is None else seconds
    alarm = _Alarm(limit)
    said = f"On {where} it has not ended after {limit:g} seconds; look for a loop that never ends"
    try:
        try:
            if threading.current_thread() is threading.main_thread():
                alarm.start()
            yield
        finally:
            alarm.put_off()
    except KeyboardInterrupt as error:
        alarm.put_off()  # once more: the interrupt may have come before the first one was done
        if alarm.has_rung:
            raise Refused(said) from error
        raise
    if alarm.has_rung:  # and somebody caught the interrupt
        raise Refused(said)


class _Alarm(threading.Thread):
    """Interrupts the main thread until it is put off, and never after the block that it watches.

    Once is not enough: an answer may catch the first interrupt, in one rank, and go on in another.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(daemon=True)
        self.has_rung = False
        self._seconds = seconds
        self._off = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        while not self._off.wait(self._seconds):
            with self._lock:
                if not self._off.is_set():
                    self.has_rung = True
                    _thread.interrupt_main()

    def put_off(self) -> None:
        with self._lock:
            self._off.set()
