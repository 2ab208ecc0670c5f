"""Ctrl-C stops all ranks at once, leaves nothing running, and the cluster works again."""

import gc
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import zerosim as zs
from zerosim.ranks.memory import Memory
from zerosim.ranks.process import guarded

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def pythons_own_handler():
    """A process that was begun in the background of a shell ignores Ctrl-C; these tests do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", [{}, {"debug": True}, {"seed": 4}], ids=str)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_interrupt_inside_a_rank_stops_the_others_and_is_raised(failing: int, kind: dict) -> None:
    stopped = []

    def program(rank):
        try:
            for turn in range(100):
                rank.all_reduce(np.ones(3) * rank.index)
                if turn == 5 and rank.index == failing:
                    raise KeyboardInterrupt
        except Exception:
            stopped.append("swallowed")
        finally:
            stopped.append(rank.index)

    cluster = zs.Cluster(3, **kind)
    with pytest.raises(KeyboardInterrupt) as caught:
        cluster.run(program)
    assert caught.value.__notes__ == [f"raised by rank {failing} of 3"]
    assert sorted(stopped) == [0, 1, 2]
    assert cluster.memory.now_nbytes == [0, 0, 0]
    assert cluster.run(lambda rank: rank.all_reduce(np.array([rank.index])))[0].tolist() == [3]


def test_a_real_signal_stops_a_running_cluster_wherever_it_strikes() -> None:
    """In a rank's program, in the hub, in a kernel, or in the callback that notices an array's death, where an
    exception would be printed and lost: at 60 moments, each another one."""
    cluster, stopped = zs.Cluster(3), []

    def endless(rank, seconds):
        timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
        try:
            rank.barrier()
            if rank.index == 0:
                timer.start()
            for _ in range(20_000):  # a lost signal shall end in a failure, and not never
                rank.all_reduce(np.full(200, rank.index, np.float32), algorithm="tree")
        finally:
            stopped.append(rank.index)

    for attempt in range(60):
        stopped.clear()
        with pytest.raises(KeyboardInterrupt):
            cluster.run(endless, 0.0005 + 0.0001 * attempt)
        assert sorted(stopped) == [0, 1, 2]
        assert cluster.memory.now_nbytes == [0, 0, 0]
        assert cluster.run(lambda rank: rank.all_reduce(np.array([rank.index])))[0].tolist() == [3]
        cluster.runs.clear()


def test_a_signal_inside_the_bookkeeping_is_raised_at_the_next_switch_of_ranks(monkeypatch) -> None:
    """The ledger's entry is whole, the array is held; what the rank does next is not done."""
    done, cluster = [], zs.Cluster(2)
    enter = zs.Memory._move

    def strike(memory, holding, sign):
        if holding.name == "strike" and sign > 0:
            # As if Ctrl-C had come between two bytecodes of the ledger's own code.
            signal.getsignal(signal.SIGINT)(signal.SIGINT, enter_frame)
        enter(memory, holding, sign)

    enter_frame = frame_in(zs.Memory)
    monkeypatch.setattr(zs.Memory, "_move", strike)

    def program(rank):
        held = rank.memory.alloc(4, np.float32, "gradient", "strike" if rank.index else "")
        done.append((rank.index, rank.memory.now_nbytes, held.nbytes))
        rank.barrier()
        done.append("too far")

    with pytest.raises(KeyboardInterrupt):
        cluster.run(program)
    assert done == [(0, 16, 16), (1, 16, 16)]
    assert cluster.memory.now_nbytes == [0, 0]


def frame_in(cls: type):
    """A frame whose code lies in the file of this class."""
    class Frame:
        f_code, f_back = cls.alloc.__code__, None
    return Frame


@pytest.mark.parametrize("helper", [False, True], ids=["in the callback", "in a function that it calls"])
def test_a_signal_inside_a_watcher_of_collections_is_raised_at_the_next_switch_of_ranks(helper) -> None:
    """An exception out of a callback of the garbage collector is printed, and lost."""
    done, cluster = [], zs.Cluster(2)

    def strike():
        signal.raise_signal(signal.SIGINT)

    def watch(phase, info):
        if phase == "stop" and "struck" not in done:
            done.append("struck")
            strike() if helper else signal.raise_signal(signal.SIGINT)

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


def test_a_signal_that_came_last_is_raised_when_the_run_is_over(monkeypatch) -> None:
    def program(rank):
        signal.getsignal(signal.SIGINT)(signal.SIGINT, frame_in(zs.Memory))

    cluster = zs.Cluster(1)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(program)
    assert cluster.run(lambda rank: rank.index)[0] == 0


def test_the_handler_is_pythons_own_again_after_every_run() -> None:
    def program(rank, fails):
        seen.append(signal.getsignal(signal.SIGINT))
        zs.Cluster(2).run(lambda inner: seen.append(signal.getsignal(signal.SIGINT)))
        if fails:
            raise KeyError

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for fails in (False, True):
        seen = []
        try:
            zs.Cluster(1).run(program, fails)
        except KeyError:
            assert fails
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert len(seen) == 3
        assert len(set(map(id, seen))) == 1


def test_a_handler_of_the_callers_own_stays_where_it_is() -> None:
    struck = []

    def own(number, frame):
        struck.append(number)

    signal.signal(signal.SIGINT, own)
    try:
        result = zs.Cluster(2).run(lambda rank: signal.raise_signal(signal.SIGINT) or signal.getsignal(signal.SIGINT))
        assert list(result) == [own, own]
        assert struck == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_stepping_leaves_the_handler_alone_between_the_steps() -> None:
    with zs.step_through(lambda rank: rank.all_reduce(np.ones(2)), ranks=2) as steps:
        next(steps)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_has_the_patient_handler_and_gives_it_back() -> None:
    seen = []

    def program(rank):
        seen.append(signal.getsignal(signal.SIGINT))
        rank.all_reduce(np.ones(2))
        seen.append(signal.getsignal(signal.SIGINT))

    for _ in zs.step_through(program, ranks=2):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(seen) == 4
    assert len(set(map(id, seen))) == 1
    assert signal.default_int_handler not in seen


@pytest.mark.parametrize("by", ["hop", "collective"])
@pytest.mark.parametrize("at", [0, 1])
def test_ctrl_c_in_the_midst_of_a_step_ends_the_run_and_leaves_nothing(by, at) -> None:
    def program(rank):
        mine = rank.memory.alloc(4, np.float32, "parameter")
        mine[...] = 1
        for turn in range(2):
            if rank.index == 1 and turn == at:
                signal.raise_signal(signal.SIGINT)
            rank.all_reduce(mine)

    cluster = zs.Cluster(2)
    steps = zs.step_through(program, cluster=cluster, by=by)
    with pytest.raises(KeyboardInterrupt):
        list(steps)
    assert list(steps) == []
    assert cluster.memory.now_nbytes == [0, 0]
    assert cluster.run(lambda rank: rank.index)[1] == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_inside_the_ledger_waits_until_the_step_may_be_left(monkeypatch) -> None:
    """The signal comes in the midst of an entry: the entry is finished, then the step is left."""
    moved = Memory._move

    def struck(self, holding, sign):
        signal.raise_signal(signal.SIGINT) if holding.name == "struck" and sign > 0 else None
        moved(self, holding, sign)

    monkeypatch.setattr(Memory, "_move", guarded(struck))
    cluster, told = zs.Cluster(2), []

    def program(rank):
        rank.memory.alloc(4, np.float32, "parameter", "struck")
        told.append(rank.index)
        rank.all_reduce(np.ones(2))

    with pytest.raises(KeyboardInterrupt):
        list(zs.step_through(program, cluster=cluster))
    assert told == [0]
    assert cluster.memory.now_nbytes == [0, 0]


def test_ctrl_c_ends_a_process_with_every_rank_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-m", "tests.ranks.endless"], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "READY\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    first, second = out.splitlines()
    assert first.startswith("STOPPED [0, 1, 2, 3] ")
    assert first.endswith(" [0, 0, 0, 0]")
    assert (second, err, process.returncode) == ("AGAIN [6]", "", 0)
