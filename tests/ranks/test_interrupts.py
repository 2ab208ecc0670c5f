"""Ctrl-C stops all ranks at once, leaves nothing running, and the cluster works again."""

import gc
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import works
from zerosim.ranks import inspect, process

pytestmark = pytest.mark.usefixtures("pythons_own_handler")

# The ways to run a program to its end.
RUNS: dict[str, Callable[[zs.Cluster, Callable[[zs.Rank], object]], object]] = {
    "run": lambda cluster, program: cluster.run(program),
    "inside another run": lambda cluster, program: zs.Cluster(1).run(lambda rank: cluster.run(program)),
    "by hop": lambda cluster, program: list(zs.step_through(program, cluster=cluster)),
    "by collective": lambda cluster, program: list(zs.step_through(program, cluster=cluster, by="collective")),
}


def handler() -> object:
    return signal.getsignal(signal.SIGINT)


def interrupted(how: str, cluster: zs.Cluster, program: Callable[[zs.Rank], object]) -> None:
    """The run ends by Ctrl-C, leaves nothing, and the cluster works again."""
    with pytest.raises(KeyboardInterrupt):
        RUNS[how](cluster, program)
    assert cluster.memory.now_nbytes == [0] * len(cluster.ranks)
    assert handler() is signal.default_int_handler
    assert works(cluster)


def test_a_real_signal_stops_a_running_cluster_wherever_it_strikes() -> None:
    """In a rank's program, in the hub, in a kernel, or in the callback that notices an array's death, where an
    exception would be printed and lost: at 30 moments, each another one."""
    cluster, stopped = zs.Cluster(3), []

    def endless(rank):
        try:
            rank.barrier()
            if rank.index == 0:
                timer.start()
            for _ in range(100_000):  # a lost signal shall end in a failure, and not never
                _ = rank.all_reduce(np.full(200, rank.index, np.float32), algorithm="tree")
        finally:
            stopped.append(rank.index)

    for attempt in range(30):
        stopped.clear()
        timer = threading.Timer(0.0005 + 0.0002 * attempt, signal.raise_signal, [signal.SIGINT])
        interrupted("run", cluster, endless)
        assert sorted(stopped) == [0, 1, 2]
        cluster.runs.clear()


@pytest.mark.parametrize("how", RUNS)
def test_a_signal_inside_the_bookkeeping_is_raised_when_its_entry_is_whole(how: str, monkeypatch) -> None:
    """What the ranks do next, after the next switch between them, is not done."""
    moved, done = zs.Memory._move, []

    def struck(self, holding, sign):
        if holding.name == "struck" and sign > 0:
            (lambda: signal.raise_signal(signal.SIGINT))()  # what it defines is a part of it
        moved(self, holding, sign)

    def program(rank):
        held = rank.memory.alloc(4, np.float32, "gradient", "struck" if rank.index else "")
        done.append((rank.index, rank.memory.now_nbytes, held.nbytes))
        _ = rank.all_reduce(held)
        done.append("too far")

    monkeypatch.setattr(zs.Memory, "_move", process.guarded(struck))
    interrupted(how, zs.Cluster(2), program)
    assert done == [(0, 16, 16), (1, 16, 16)]


def test_a_signal_while_the_trace_writes_of_an_arrays_death_is_raised_at_the_next_switch_of_ranks() -> None:
    done, strike = [], defaultdict(partial(signal.raise_signal, signal.SIGINT))  # without a frame of its own

    def program(rank):
        held, rows = [rank.memory.alloc(4, np.float32, "gradient")], rank.trace.rows
        rank.trace.rows = SimpleNamespace(append=strike.__getitem__)
        held.clear()
        rank.trace.rows = rows
        done.append(rank.memory.now_nbytes)
        rank.barrier()
        done.append("too far")

    interrupted("run", zs.Cluster(2), program)
    assert done[0] == 0
    assert "too far" not in done


def test_a_signal_inside_a_watcher_of_collections_is_raised_at_the_next_switch_of_ranks() -> None:
    """An exception out of a callback of the garbage collector is printed, and lost."""
    done, cluster = [], zs.Cluster(2)

    def watch(phase, info):
        if phase == "stop" and "struck" not in done:
            done.append("struck")
            (lambda: signal.raise_signal(signal.SIGINT))()  # in a function that it calls

    def program(rank):
        if rank.index == 1:
            gc.collect()
        done.append(rank.index)
        rank.barrier()
        done.append("too far")

    gc.disable()  # no collection but the program's own
    gc.callbacks.append(watch)
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.run(program)
    finally:
        gc.callbacks.remove(watch)
        gc.enable()
    assert done == [0, "struck", 1]


@pytest.mark.parametrize("how", RUNS)
def test_a_signal_that_came_last_is_raised_when_the_run_is_over(how: str) -> None:
    interrupted(how, zs.Cluster(1), process.guarded(lambda rank: signal.raise_signal(signal.SIGINT)))


def test_ctrl_c_while_the_ranks_are_looked_at_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = zs.Cluster(2)
    steps = zs.step_through(lambda rank: rank.all_reduce(np.ones(2)), cluster=cluster)
    monkeypatch.setattr(inspect, "look", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert works(cluster)
    assert list(steps) == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_handler_is_pythons_own_again_after_every_run_and_between_two_steps(fails: bool) -> None:
    seen = []

    def program(rank):
        seen.append(handler())
        zs.Cluster(2).run(lambda inner: seen.append(handler()))  # a run inside a run has the same one
        _ = rank.all_reduce(np.ones(2))
        seen.append(handler())
        if fails:
            raise KeyError

    with pytest.raises(KeyError) if fails else nullcontext():
        zs.Cluster(1).run(program)
    assert handler() is signal.default_int_handler
    assert len(seen) == 4
    assert len(set(map(id, seen))) == 1
    assert seen.pop() is not signal.default_int_handler
    seen.clear()
    with pytest.raises(KeyError) if fails else nullcontext():
        for _ in zs.step_through(program, ranks=2):
            assert handler() is signal.default_int_handler
    assert len(set(map(id, seen))) == 1


def test_a_handler_of_the_callers_own_stays_where_it_is() -> None:
    struck = []

    def own(number, frame):
        struck.append(number)

    signal.signal(signal.SIGINT, own)
    result = zs.Cluster(2).run(lambda rank: signal.raise_signal(signal.SIGINT) or handler())
    assert list(result) == [own, own]
    assert struck == [signal.SIGINT] * 2
