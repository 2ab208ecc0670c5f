"""An answer that never ends is interrupted, as by Ctrl-C, and refused."""

import _thread
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from zerosim.lessons.puzzles.puzzle import Refused

SECONDS = 60.0  # a case takes a fraction of one


@contextmanager
def limited(where: str, seconds: float | None = None) -> Iterator[None]:
    """Raises Refused where the ``with`` block has not ended after ``seconds`` (SECONDS where none are given).

    Only the main thread can be interrupted, and only where Ctrl-C is not ignored; elsewhere the block runs on.
    """
    limit = SECONDS if seconds is None else seconds
    alarm = _Alarm()
    timer = threading.Timer(limit, alarm.ring)
    timer.daemon = True
    try:
        try:
            if threading.current_thread() is threading.main_thread():
                timer.start()
            yield
        finally:
            timer.cancel()
            alarm.put_off()
    except KeyboardInterrupt as error:
        if alarm.has_rung:
            raise Refused(f"On {where} it has not ended after {limit:g} seconds; "
                          "look for a loop that never ends") from error
        raise


class _Alarm:
    """Interrupts the main thread once, unless it has been put off: never after the block that it watches."""

    def __init__(self) -> None:
        self.has_rung = False
        self._off = False
        self._lock = threading.Lock()

    def ring(self) -> None:
        with self._lock:
            if not self._off:
                self.has_rung = True
                _thread.interrupt_main()

    def put_off(self) -> None:
        with self._lock:
            self._off = True
