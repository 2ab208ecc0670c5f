"""Stacks that the ranks of one process take turns on: greenlets; in a browser, stacks that WebAssembly suspends.

The hub asks for `current()`, and makes a `new(body)` for each rank. What it needs of one is greenlet's: `switch`,
`throw`, `parent`, `dead`, `gr_frame`, and that one is true from its first switch until its end. Pyodide, Python in a
browser, has no greenlets, and blocks by ``run_sync`` instead, where the browser has JavaScript Promise Integration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from zerosim.ranks.errors import BackendError

MISSING = ("ranks of one process take turns as greenlets, and this Python has none: pip install greenlet. In a browser "
           "they need JavaScript Promise Integration, as of Chrome 137 and later; zerosim.tiny, formats and plans "
           "run in any")


def stacks() -> Greenlets | SuspendedStacks:
    """The stacks of this Python; raises BackendError where it has none."""
    try:
        return Greenlets()
    except ImportError:
        try:
            from pyodide.code import run_js
            from pyodide.ffi import can_run_sync, run_sync
        except ImportError:
            raise BackendError("in-process", MISSING) from None
        if not can_run_sync():
            raise BackendError("in-process", MISSING) from None
        return SuspendedStacks(run_sync, *run_js(PROMISES))


class Greenlets:
    """Greenlets; made when a program first runs, since importing zerosim loads arithmetic alone."""

    def __init__(self) -> None:
        """Raises ImportError where there are none."""
        import greenlet

        self.current, self._greenlet = greenlet.getcurrent, greenlet.greenlet

    def new(self, body: Callable[[], None]) -> Any:
        """A greenlet with a copy of the context's variables."""
        from contextvars import copy_context

        made = self._greenlet(body)
        made.gr_context = copy_context()
        return made


# In JavaScript: a promise with what resolves it, and a call of a Python function on a stack of its own, which returns
# when that first waits or ends.
PROMISES = """[() => { const made = {}; made.promise = new Promise(done => { made.resolve = done; }); return made; },
               body => { body.callPromising().catch(error => console.error(error)); }]"""


class SuspendedStacks:
    """Stacks of their own, all but one of which wait for a promise. They share the context's variables."""

    def __init__(self, wait: Callable[[Any], Any], promise: Callable[[], Any], begin: Callable[[Any], Any]) -> None:
        self.wait, self.promise, self.begin = wait, promise, begin
        self.running = SuspendedStack(self, None)

    def current(self) -> SuspendedStack:
        """The stack that runs now, as far as these know: the first one is whose hub it is."""
        return self.running

    def new(self, body: Callable[[], None]) -> SuspendedStack:
        """A stack for ``body``."""
        return SuspendedStack(self, body)


class SuspendedStack:
    """One stack; ``body`` None is that of the caller, which runs already."""

    def __init__(self, stacks: SuspendedStacks, body: Callable[[], None] | None) -> None:
        self.stacks, self.body = stacks, body
        self.parent: SuspendedStack | None = None
        self.dead = False
        self.gr_frame: FrameType | None = None  # where it waits
        self._awaited: Any = None  # what resumes it: a promise and its resolve
        self._thrown: type[BaseException] | None = None

    def __bool__(self) -> bool:
        return self._awaited is not None and not self.dead

    def switch(self) -> None:
        """Goes on with this stack; returns when another one switches back to the caller's, and raises what it threw."""
        stacks = self.stacks
        me = stacks.running
        me._awaited, me.gr_frame = stacks.promise(), sys._getframe(1)
        self._resume()
        stacks.wait(me._awaited.promise)
        me.gr_frame, thrown, me._thrown = None, me._thrown, None
        if thrown is not None:
            raise thrown

    def throw(self, error: type[BaseException]) -> None:
        """Goes on with this stack, in which ``error`` is raised where it waits."""
        self._thrown = error
        self.switch()

    def _resume(self) -> None:
        self.stacks.running = self
        if self._awaited is not None:
            self._awaited.resolve()
        else:
            self._awaited = self  # it has begun
            self.stacks.begin(self._run)

    def _run(self) -> None:
        assert self.body is not None
        try:
            self.body()
        finally:
            self.dead = True
            assert self.parent is not None
            self.parent._resume()
