"""What ranks in different processes find out from control messages, without any process; and a world of one."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from tests.support import assert_refused
from zerosim.backends.nccl.cluster import NCCLProcessCluster
from zerosim.backends.processes.cluster import SPINS, OwnResult, ProcessBackend
from zerosim.backends.processes.control import (
    Channel,
    Counts,
    Entered,
    Failed,
    Finished,
    Value,
    Waiting,
    count,
    unmet,
    verdict,
)
from zerosim.backends.processes.tcp import TCPChannel
from zerosim.numerics import kernels
from zerosim.ranks import call as calls
from zerosim.ranks import errors, hub, process

GROUP, X = ((0, 1, 2), ()), np.empty(6, np.float32)
DEADLOCK, MISMATCH = zs.DeadlockError, zs.MismatchError
Asked = str | tuple[int | None, int | None]  # a collective, or an exchange: to whom, from whom
History = tuple[Asked | list[Asked], ...]  # what a rank has asked for; in a list what it waits for


def call(number: int, operation: str = "all_reduce") -> errors.MadeCall:
    """A collective of three ranks."""
    made = calls.Call(number, (), GROUP[0], operation, "ring", (6,), X.dtype, (0, 2, 4, 6))
    return errors.MadeCall(made, f"a.py:{1 + (operation != 'all_reduce')} in f")


def part(rank: int, asked: Asked, made: list[errors.MadeCall]) -> calls.Pending:
    """The rank's part; a collective is one more of those that it has made."""
    if isinstance(asked, str):
        made.append(call(len(made), asked))
        return calls.PendingCall(made[-1].call, rank, kernels.NumpyKernels(), X, X)
    to, source = asked
    return calls.PendingExchange(rank, None if to is None else X, to, None if source is None else X, source, GROUP)


def said(rank: int, history: History) -> Waiting | Finished:
    """The last control message of a rank that waits, or has finished."""
    issued: Counts = {}
    made, waiting = list[errors.MadeCall](), list[calls.Pending]()
    for asked in history:
        me = part(rank, asked[0] if isinstance(asked, list) else asked, made)
        count(issued, me)
        waiting += [me] * isinstance(asked, list)
    return Waiting.of(waiting[0], "a.py:1 in f", issued, made) if waiting else Finished(issued, tuple(made))


SUM, OTHER = "all_reduce", "reduce_scatter"
GOING_ON: list[list[History | None]] = [  # of each rank, None where it is at work
    [([SUM],), ([SUM],), None],
    [(*[SUM] * 4, [SUM])] * 3,  # all have issued the call: they are only slow
    [([SUM], SUM), (SUM, [SUM]), (SUM, [SUM])],  # who waits in the next call keeps nobody waiting
    [([(None, 1)],), ((0, None),), ()],  # its message was sent
    [((1, None), [(1, None)]), ((None, 0), (None, 0)), ()],  # its receive was asked for
    [([(1, 2)],), ((0, 0),), ((0, 0),)],  # both halves of an exchange are met
    [(SUM, *[((rank + 1) % 3, (rank - 1) % 3)] * 2) for rank in range(3)]]
STUCK: list[tuple[list[History | None], type[Exception], str]] = [
    ([(SUM, [SUM]), (SUM, [SUM]), (SUM,)], DEADLOCK,
     r"(?s)ranks 0-1: in all_reduce\(call 1, \(6,\), float32\) at a\.py:1 in f, waiting for rank 2.*rank 2: finished"),
    ([([SUM],), None, ([OTHER],)], MISMATCH, r"rank 0 is in all_reduce\(call 0, \(6,\), float32\) at a\.py:1 in f; "
                                             r"rank 2 is in reduce_scatter\(call 0, \(6,\), float32\) at a\.py:2 in"),
    ([([SUM],), ([SUM],), (OTHER,)], MISMATCH, "rank 2 is in reduce_scatter"),
    ([([(None, 1)],), (), ()], DEADLOCK, r"rank 0: in recv\(\(6,\), float32\) from rank 1 at a.py:1"),
    ([((1, None), [(1, None)]), ((None, 0),), ()], DEADLOCK, r"rank 0: in send\(\(6,\), float32\) to rank 1 at a.py:1"),
    ([([(1, 2)],), ((0, 0),), ()], DEADLOCK, "to rank 1 and recv"),
    ([([(1, 2)],), (), ((0, 0),)], DEADLOCK, "to rank 1 and recv"),
    ([((1, None), (1, None)), ((None, 0),), ()], DEADLOCK, "rank 0 has sent 2 to rank 1, which has received 1"),
    ([(SUM,), (SUM,), (SUM, SUM)], DEADLOCK, "rank 0 has entered 1, rank 1 has entered 1, rank 2 has entered 2"),
    ([("reduce",), ("broadcast",), ("reduce",)], MISMATCH, r"ranks \[0, 2\] are in reduce")]


def test_a_verdict_is_found_where_nobody_can_go_on_or_something_is_left_over_and_only_there() -> None:
    def judge(histories: list[History | None]) -> None:
        latest = {rank: said(rank, history) for rank, history in enumerate(histories) if history is not None}
        ended = {rank: message for rank, message in latest.items() if isinstance(message, Finished)}
        found = unmet(ended) if len(ended) == 3 else verdict(latest, 3)
        if found is not None:
            raise found

    for histories in GOING_ON:
        judge(histories)
    for histories, error, text in STUCK:
        assert_refused(partial(judge, histories), text, error)


def backend_of(channel: Any, links: hub.Transport, *, debug: bool = False, timeout_seconds: float = 5.0
               ) -> ProcessBackend:
    """A run on rank 0, which hears by this channel."""
    options = hub.RunOptions(hop_by_hop=True, watch=None, interrupts=process.Interrupts())
    return ProcessBackend(channel, links, options, debug=debug, timeout_seconds=timeout_seconds)


# -- values of all processes -------------------------------------------------------------------------------------------

class Scripted(Channel):
    """The channel of rank 0 of 3, to which the network brings one control message at each look."""

    def __init__(self, *latest: tuple[int, Any]) -> None:
        super().__init__(0, 3)
        self.coming, self.sent = list(latest), list[Any]()

    def send(self, message: Any, to: int | None = None) -> None:
        self.sent.append(message)

    def incoming(self) -> Iterator[tuple[int, Any]]:
        yield from [self.coming.pop(0)] if self.coming else []


def test_what_was_said_before_a_value_is_forgotten_and_what_comes_after_it_is_kept() -> None:
    """A rank that is ahead may be in its next run already, or in the one after."""
    channel = Scripted((1, "old"), (1, Value("b")), (1, "new"), (1, Value("e")), (2, "old"), (2, Value("c")),
                       (2, Value("f")), (1, "newer"))
    assert channel.all_gather("a") == ["a", "b", "c"]
    assert channel.all_gather("d") == ["d", "e", "f"]
    assert channel.sent == [Value("a"), Value("d")]
    assert list(channel.arrived()) == [(1, "newer")]


# -- exceptions -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Frozen(Exception):
    number: int


def test_a_note_of_an_exception_is_made_whatever_its_class_does() -> None:
    huge = 10**5000
    for error, expected in ((Frozen(3), Frozen), (ValueError(huge), ValueError), (ValueError(print), zs.RemoteError),
                            (zs.BackendError("MPI", "is missing"), zs.BackendError)):
        made = Failed.of(error, 1).error(2)
        assert type(made) is expected
        assert made.args == error.args or expected is zs.RemoteError
        assert any("raised by rank 1 of 2" in note for note in getattr(made, "__notes__", ())) or expected is Frozen


def test_a_rank_that_has_finished_hears_of_a_failure_that_comes_while_it_sleeps(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that listens reads the last words, between two turns of the program's thread."""
    failed = replace(Failed.of(LookupError("gone"), 1), drained=True)
    channel = Scripted((2, Finished({}, ())), (1, failed), (2, failed), (1, Value(None)), (2, Value(None)))
    backend = backend_of(channel, hub.Transport())
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: backend._read())
    monkeypatch.setattr("zerosim.backends.processes.cluster.time", clock)
    assert_refused(lambda: list(backend.drive([lambda: None])), "gone", LookupError)


class Device(hub.Transport):
    """A function says whether the device is idle; with a thread that listens, or without."""

    def __init__(self, idle: Callable[[], bool], *, listens: bool = True) -> None:
        self._idle, self.needs_listener, self.errors = idle, listens, (ConnectionError,)

    def idle(self) -> bool:
        return self._idle()

    def over(self) -> list[int]:
        return []


def test_a_run_has_not_ended_well_where_the_device_is_idle_because_the_listener_has_aborted() -> None:
    """That thread reads the last words, and aborts, while the program's thread asks whether the device is idle."""
    failed = replace(Failed.of(LookupError("gone"), 1), drained=True)
    channel = Scripted((1, Finished({}, ())), (2, Finished({}, ())), (1, failed), (2, failed), (1, Value(None)),
                       (2, Value(None)))
    backend = backend_of(channel, Device(lambda: bool(backend._read() or backend._read() or True), listens=False))
    assert_refused(lambda: list(backend.drive([lambda: None])), "gone", LookupError)


def test_a_rank_has_finished_when_its_device_has_and_not_when_its_program_has() -> None:
    """As long as the device waits for another rank, the thread that listens says for what."""
    channel = Scripted(*[(rank, message) for message in (Finished({}, ()), Value(None)) for rank in (1, 2)])
    said_then, alone = list[bool](), list[bool]()

    def idle() -> bool:
        with ThreadPoolExecutor(1) as listener:  # which may not abort now
            taken = listener.submit(lambda: backend.lock.acquire(False) and not backend.lock.release())
        alone.append(not taken.result())
        said_then.append(bool(channel.sent))
        return len(said_then) > 3

    backend = backend_of(channel, Device(idle))
    list(backend.drive([lambda: None]))
    assert said_then[:4] == [False] * 4
    assert all(alone)
    assert channel.sent == [Finished({}, ()), Value(None)]


def test_an_error_of_the_library_while_the_device_waits_is_that_of_the_rank_that_it_is_about() -> None:
    """A rank that fails aborts its communicators, and NCCL may tell the others before the channel does."""
    failed = replace(Failed.of(LookupError("gone"), 1), drained=True)
    channel = Scripted((1, failed), (2, failed), (1, Value(None)), (2, Value(None)))

    def idle() -> bool:
        raise ConnectionError("a peer was aborted")

    assert_refused(lambda: list(backend_of(channel, Device(idle)).drive([lambda: None])), "gone", LookupError)


def test_a_rank_that_waits_for_the_end_of_a_run_says_nothing_that_the_next_run_could_hear() -> None:
    """However long: its last word has been said, and who has ended the run would take a message for one of the next."""
    last_words = [(rank, message) for message in (Finished({}, ()), Value(None)) for rank in (1, 2)]
    channel = Scripted(*[(1, None)] * 2 * SPINS, *last_words)
    list(backend_of(channel, hub.Transport(), timeout_seconds=1e-9).drive([lambda: None]))
    assert channel.sent == [Finished({}, ()), Value(None)]


# -- agreements in debug mode -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("in_order", [False, True])
def test_what_is_agreed_on_first_begins_first_unless_the_links_have_one_order(in_order: bool) -> None:
    """In debug mode rank 2, which is in the first call alone, is late; elsewhere it may have been early."""
    arriving, begun = list[Any](), list[calls.Call]()
    channel: Any = SimpleNamespace(index=0, size=3, send=lambda message, to=None: None,
                                   arrived=lambda: iter([arriving.pop(0) for _ in arriving.copy()]))
    links = hub.Transport()
    links.in_order, links.collective = in_order, lambda parts: iter([begun.append(parts[0].call)] * 9)
    backend = backend_of(channel, links, debug=True)
    of_all = call(0).call
    of_two = of_all._replace(group=(0, 1), communicator=(0, 1), cut=(0, 3, 6))
    for its in (of_all, of_two):
        empty = np.empty(6, np.float32)
        backend.issue(0, calls.PendingCall(its, 0, kernels.NumpyKernels(), empty, empty))
    arriving += [(1, Entered(errors.MadeCall(its, "a.py:1 in f"))) for its in (of_all, of_two)]
    backend.check_use(0)
    assert begun == ([] if in_order else [of_two])
    arriving.append((2, Entered(call(0))))
    backend.check_use(0)
    assert begun == ([of_all, of_two] if in_order else [of_two, of_all])
    assert not backend.announced.calls, "what all have agreed on is forgotten"


# -- a cluster of one process -----------------------------------------------------------------------------------------

@pytest.fixture
def alone(gpus: Any) -> Any:
    """Makes a world of one process, which has the double of a GPU."""
    gpus(1)
    return lambda **options: NCCLProcessCluster(TCPChannel(0, 1, ("", 0), None), local_rank=0, **options)


def test_a_note_that_comes_while_a_program_looks_at_the_last_words_does_not_change_them_under_it() -> None:
    """The thread that listens takes a control message; the program, which asks before every call, has no lock."""
    backend: Any = object.__new__(ProcessBackend)
    backend.endings = {}
    looking = iter(backend.endings.items())
    backend._receive(1, Finished({}))
    assert (list(looking), list(backend.endings)) == ([], [1])


def test_a_run_returns_this_ranks_result_at_its_index_and_gives_back_its_links(alone: Any) -> None:
    cluster = alone()
    assert list(cluster.run(lambda rank, add: rank.index + add, 5)) == [5]
    assert cluster.gather(7) == [7]
    assert (cluster.index, len(cluster.ranks), cluster.world) == (0, 1, "each a process with a GPU, over NCCL")
    assert repr(cluster) == "<NCCLProcessCluster: rank 0 of 1, 1 runs>"
    cluster.close()
    assert not cluster._transport.communicators.made
    results = OwnResult(1, 3, "mine")
    assert (results[1], results[-2], len(results), repr(results)) == ("mine", "mine", 3, "rank 1: 'mine'")


def test_elements_on_the_host_that_do_not_fit_are_a_mismatch_and_not_broadcast(alone: Any) -> None:
    for out in (np.ones(4), np.ones(1, np.int64)):
        said = f"rank 0 sends ((1,), float64) at HERE to rank 0, which expects ({out.shape}, {out.dtype}) at HERE; "
        assert_refused(lambda out=out: alone().run(lambda rank: rank.exchange(np.ones(1), 0, out, 0)),
                       re.escape(said).replace("HERE", r"test_control\.py:\d+ in <lambda>"), zs.MismatchError)


def test_a_ctrl_c_that_came_inside_the_bookkeeping_is_raised_at_the_next_call(alone: Any) -> None:
    """While memory counts it has to wait; without a hub nobody else would ask for it before the end of the run."""
    reached = []

    def program(rank: zs.Rank) -> None:
        rank._state.backend.interrupts.pending = True
        rank.trace.span("one")
        reached.append("before")
        rank.exchange(np.ones(1), 0, np.ones(1), 0)
        reached.append("after")

    with pytest.raises(KeyboardInterrupt) as caught:
        alone().run(program)
    assert reached == ["before"]
    assert caught.value.__notes__ == ["raised by rank 0 of 1"]


@pytest.mark.usefixtures("pythons_own_handler")
@pytest.mark.parametrize("where", ["send", "all_gather"])
def test_a_ctrl_c_after_a_rank_has_said_that_it_has_finished_waits_until_all_have_left_the_run(
        alone: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    cluster = alone()
    ordinary = getattr(cluster._channel, where)

    def interrupted(*args: Any) -> Any:
        monkeypatch.undo()  # once: a second Ctrl-C does not wait
        signal.raise_signal(signal.SIGINT)
        return ordinary(*args)

    monkeypatch.setattr(cluster._channel, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(lambda rank: rank.index)
    assert [*cluster.runs[0].results] == [0], "the others have theirs too"
    assert cluster.run(lambda rank: rank.index + 1)[0] == 1


@pytest.mark.usefixtures("pythons_own_handler")
def test_a_note_that_has_arrived_is_read_though_a_ctrl_c_comes_between(
        alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = alone()

    def arrived() -> Any:
        if not seen:
            signal.raise_signal(signal.SIGINT)
            yield 0, None

    seen: list[Any] = []
    monkeypatch.setattr(cluster._channel, "arrived", arrived)
    ordinary = ProcessBackend._receive
    monkeypatch.setattr(ProcessBackend, "_receive", lambda self, rank, message: (seen.append(message),
                                                                              ordinary(self, rank, message)))
    with pytest.raises(KeyboardInterrupt):
        cluster.run(lambda rank: rank._state.backend.progress())
    assert seen[0] is None


def test_a_run_of_processes_cannot_be_stepped_through_and_its_timeout_is_above_0(alone: Any) -> None:
    assert_refused(lambda: next(alone().events(lambda rank: None)), "the others of this one are in other processes; "
                                                                    r"step through the same program on zs\.Cluster")
    for seconds in (0, -1.0, float("nan")):
        assert_refused(lambda seconds=seconds: alone(timeout_seconds=seconds),
                       "must be above 0: how long a rank waits before it tells the others")
