"""Ranks on stacks that wait for promises, as in a browser, do what they do on greenlets.

The promises are a double, played by greenlets; Pyodide's own were tried in Chromium by hand (see docs/install.md).
"""

import sys
from collections import deque

import numpy as np
import pytest
from greenlet import getcurrent, greenlet

import zerosim as zs
from tests.ranks import programs
from tests.ranks.asking import KINDS
from tests.ranks.test_determinism import told
from zerosim.numerics import arrays
from zerosim.ranks import stacks as of_ranks
from zerosim.ranks.stacks import Greenlets, SuspendedStacks


class Promise:
    """A promise with what resolves it."""

    def __init__(self, browser):
        self.browser, self.is_done, self.waiter = browser, False, None

    @property
    def promise(self):
        return self

    def resolve(self):
        self.is_done = True
        if self.waiter is not None:
            self.browser.ready.append(self.waiter)


class Browser:
    """The event loop: a stack that waits gives way to who began it, or else to the next whose promise was resolved."""

    def __init__(self):
        self.ready, self.beginners, self.waits = deque(), {}, 0

    def promise(self):
        return Promise(self)

    def wait(self, promise):
        self.waits += 1
        if not promise.is_done:
            promise.waiter = getcurrent()
            self._next().switch()
        assert promise.is_done

    def begin(self, body):
        def run():
            body()
            getcurrent().parent = self._next()

        stack = greenlet(run)
        self.beginners[stack] = getcurrent()
        stack.switch()

    def _next(self):
        return self.beginners.pop(getcurrent(), None) or self.ready.popleft()

    def stacks(self):
        return SuspendedStacks(self.wait, self.promise, self.begin)


def nested(rank):
    inner = zs.Cluster(2).run(lambda one: one.all_reduce(np.full(2, one.index + 1.0, np.float32)).tolist())
    return rank.all_reduce(np.full(2, float(rank.index), np.float32)).tolist(), list(inner)


def stepped():
    """The lines at which ranks wait, message by message, of a look that ends half-way."""
    found = []
    with zs.step_through(lambda rank: rank.all_reduce(np.full(3, rank.index, np.float32)), ranks=3) as steps:
        for step, _ in zip(steps, range(4), strict=False):
            found.append([(one.out.tolist() if one.out is not None else None, one.where) for one in step.ranks])
    return found


def outcome(run):
    """What a run returns, or the text of what it raises."""
    try:
        return repr(run())
    except (programs.Boom, zs.DeadlockError, zs.MismatchError) as error:
        return f"{type(error).__name__}: {error}"


RUNS = {
    **{kind: lambda options=options: told(zs.Cluster(3, **options)) for kind, options in KINDS.items()},
    "training": lambda: arrays.sha256(list(zs.Cluster(3).run(programs.gpt, 3, "bf16", "overlapping"))),
    **{program.__name__: lambda program=program, args=args: list(zs.Cluster(3).run(program, *args))
       for program, *args in ((nested,), (programs.fails, 1, "work"), (programs.disagrees, "another shape"),
                              (programs.everyone_receives,))},
    "stepped": stepped,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_on_either_kind_of_stacks_a_run_has_the_same_results_and_says_the_same(run, monkeypatch):
    expected = outcome(run)
    monkeypatch.setattr("zerosim.ranks.hub.stacks", (browser := Browser()).stacks)
    assert outcome(run) == expected
    assert browser.waits > 0
    assert not browser.ready
    assert not browser.beginners


def test_a_python_without_either_is_refused_with_what_is_missing(monkeypatch):
    assert isinstance(of_ranks.stacks(), Greenlets)
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(zs.BackendError, match=r"this Python has none: pip install greenlet\. In a browser they"):
        zs.Cluster(2).run(nested)
