"""What ranks in different processes find out from each other's notes, without any process."""

import pickle
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

import zerosim as zs
from zerosim.backends.processes.notes import (
    AnnouncedCalls,
    Entered,
    Failed,
    Finished,
    IssueCounts,
    Waiting,
    raised_elsewhere,
    unmet,
    verdict,
)
from zerosim.backends.processes.transport import ProcessBackend
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.call import Call, PendingCall
from zerosim.ranks.process import Interrupts

GROUP = (0, 1, 2), ()


def call(number: int, operation: str = "all_reduce", length: int = 6) -> Call:
    """A collective of three ranks."""
    return Call(number, (), GROUP[0], operation, "ring", (length,), np.dtype(np.float32), (0, 2, 4, length))


def in_call(number: int, *, issued: int | None = None, operation: str = "all_reduce") -> Waiting:
    """The note of a rank that waits in a collective, after ``issued`` of them."""
    its = call(number, operation)
    return Waiting(str(its), "a.py:1 in f", IssueCounts({GROUP: number + 1 if issued is None else issued}), its, (its,))


def in_message(issued: IssueCounts, *, to: int | None = None, source: int | None = None) -> Waiting:
    """The note of a rank that waits in its last exchange."""
    sends = (((GROUP, to), issued.sends[GROUP, to]),) if to is not None else ()
    receives = (((GROUP, source), issued.receives[GROUP, source]),) if source is not None else ()
    return Waiting("a message", "a.py:2 in f", issued, None, (), sends, receives)


def test_while_one_rank_is_at_work_there_is_no_deadlock() -> None:
    assert verdict({0: in_call(0), 1: in_call(0)}, 3) is None


def test_when_all_have_issued_the_call_they_are_only_slow() -> None:
    assert verdict({rank: in_call(4) for rank in range(3)}, 3) is None


def test_a_rank_that_issued_the_call_and_waits_in_the_next_one_keeps_nobody_waiting() -> None:
    assert verdict({0: in_call(0, issued=2), 1: in_call(1), 2: in_call(1)}, 3) is None


def test_a_finished_rank_that_never_came_is_a_deadlock() -> None:
    error = verdict({0: in_call(1), 1: in_call(1), 2: Finished(IssueCounts({GROUP: 1}))}, 3)
    assert isinstance(error, zs.DeadlockError)
    assert "ranks 0-1: in all_reduce(call 1, (6,), float32) at a.py:1 in f, waiting for rank 2" in str(error)
    assert "rank 2: finished" in str(error)


def test_two_calls_of_one_number_are_a_mismatch_even_while_others_are_at_work() -> None:
    error = verdict({0: in_call(0), 2: in_call(0, operation="reduce_scatter")}, 3)
    assert isinstance(error, zs.MismatchError)
    assert "rank 0 is in all_reduce(call 0" in str(error)
    assert "rank 2 is in reduce_scatter(call 0" in str(error)


def test_a_call_that_is_done_where_another_was_meant_is_a_mismatch_too() -> None:
    done = call(0, "reduce_scatter")
    error = verdict({0: in_call(0), 1: in_call(0), 2: Finished(IssueCounts({GROUP: 1}), (done,))}, 3)
    assert isinstance(error, zs.MismatchError)


@pytest.mark.parametrize(("its", "stuck"), [(1, False), (0, True)])
def test_a_receive_is_stuck_unless_its_message_was_sent(its: int, stuck: bool) -> None:
    receiver = in_message(IssueCounts(receives={(GROUP, 1): 1}), source=1)
    sender = Finished(IssueCounts(sends={(GROUP, 0): its}))
    assert (verdict({0: receiver, 1: sender, 2: Finished(IssueCounts())}, 3) is not None) == stuck


@pytest.mark.parametrize(("its", "stuck"), [(2, False), (1, True)])
def test_a_send_is_stuck_unless_its_receive_was_asked_for(its: int, stuck: bool) -> None:
    sender = in_message(IssueCounts(sends={(GROUP, 1): 2}), to=1)
    receiver = Finished(IssueCounts(receives={(GROUP, 0): its}))
    assert (verdict({0: sender, 1: receiver, 2: Finished(IssueCounts())}, 3) is not None) == stuck


def test_an_exchange_with_one_open_half_of_two_waits_for_that_half() -> None:
    issued = IssueCounts(sends={(GROUP, 1): 1}, receives={(GROUP, 2): 1})
    there = Finished(IssueCounts(sends={(GROUP, 0): 1}, receives={(GROUP, 0): 1}))
    absent = Finished(IssueCounts())
    assert verdict({0: in_message(issued, to=1, source=2), 1: there, 2: there}, 3) is None
    assert verdict({0: in_message(issued, to=1, source=2), 1: there, 2: absent}, 3) is not None
    assert verdict({0: in_message(issued, to=1, source=2), 1: absent, 2: there}, 3) is not None


def test_what_was_sent_and_never_received_is_told_when_all_have_finished() -> None:
    sender, receiver = Finished(IssueCounts(sends={(GROUP, 1): 2})), Finished(IssueCounts(receives={(GROUP, 0): 1}))
    error = unmet({0: sender, 1: receiver, 2: Finished(IssueCounts())})
    assert isinstance(error, zs.DeadlockError)
    assert "rank 0 has sent 2 to rank 1, which has received 1" in str(error)


def test_a_collective_that_not_all_have_entered_is_told_when_all_have_finished() -> None:
    error = unmet({rank: Finished(IssueCounts({GROUP: 1 + (rank == 2)})) for rank in range(3)})
    assert isinstance(error, zs.DeadlockError)
    assert "rank 0 has entered 1, rank 1 has entered 1, rank 2 has entered 2" in str(error)


def test_last_calls_that_differ_are_a_mismatch_even_when_all_have_finished() -> None:
    endings = {rank: Finished(IssueCounts({GROUP: 1}), (call(0, ["reduce", "broadcast"][rank == 1]),))
               for rank in range(3)}
    assert isinstance(unmet(endings), zs.MismatchError)


def test_ranks_that_have_met_in_everything_have_nothing_left_over() -> None:
    issued = [IssueCounts({GROUP: 1}, sends={(GROUP, (rank + 1) % 3): 2}, receives={(GROUP, (rank - 1) % 3): 2})
              for rank in range(3)]
    assert unmet({rank: Finished(issued[rank], (call(0),)) for rank in range(3)}) is None


class Letters:
    """A channel that keeps what is posted."""

    index, size = 0, 3

    def __init__(self) -> None:
        self.posted: deque = deque()

    def post(self, note, to=None) -> None:
        self.posted.append((note, to))


def part(its: Call) -> PendingCall:
    """This rank's part in a call."""
    empty = np.empty(6, np.float32)
    return PendingCall(its, 0, NumpyKernels(), empty, empty)


def test_an_agreement_waits_for_all_members_and_names_who_says_otherwise() -> None:
    channel = Letters()
    agreement = AnnouncedCalls(channel)
    agreement.announce(part(call(0)))
    assert [to for _, to in channel.posted] == [1, 2]
    agreement.receive(1, Entered(call(0)))
    assert not agreement.reached(part(call(0)))
    agreement.receive(2, Entered(call(0, length=7)))
    with pytest.raises(zs.MismatchError, match=r"rank 2 is in all_reduce\(call 0, \(7,\)"):
        agreement.reached(part(call(0)))


def test_an_agreement_that_was_reached_is_forgotten() -> None:
    agreement = AnnouncedCalls(Letters())
    agreement.announce(part(call(0)))
    for rank in (1, 2):
        agreement.receive(rank, Entered(call(0)))
    assert agreement.reached(part(call(0)))
    assert not agreement.calls


def test_a_failure_travels_with_its_type_notes_and_traceback() -> None:
    try:
        raise zs.OutOfMemoryError("too much")
    except zs.OutOfMemoryError as error:
        told = pickle.loads(pickle.dumps(Failed.of(error))).error(2, 5)
    assert type(told) is zs.OutOfMemoryError
    assert str(told) == "too much"
    assert raised_elsewhere(told)
    assert not raised_elsewhere(zs.OutOfMemoryError("here"))
    assert told.__notes__[0].startswith("raised by rank 2 of 5, in another process:\nTraceback")
    assert "test_verdicts.py" in told.__notes__[0]


def test_an_exception_of_a_class_that_is_not_importable_becomes_a_remote_error() -> None:
    class Local(Exception):
        pass

    told = Failed.of(Local("mine")).error(0, 2)
    assert type(told) is zs.RemoteError
    assert str(told) == "Local: mine"


class Arriving:
    """A channel of rank 0 of three, in which lies what a test puts there."""

    index, size = 0, 3

    def __init__(self) -> None:
        self.notes: list[tuple[int, Entered]] = []

    def post(self, note: object, to: int | None = None) -> None:
        """Nobody reads it."""

    def arrived(self) -> list[tuple[int, Entered]]:
        notes, self.notes = self.notes, []
        return notes


class Begun:
    """Links that note what it was given, in order."""

    library = "nothing"

    def __init__(self, in_order: bool) -> None:
        self.in_order, self.calls = in_order, list[Call]()

    def begin(self, me: PendingCall) -> "Begun":
        self.calls.append(me.call)
        return self

    def advance(self) -> bool:
        return False


@pytest.mark.parametrize("in_order", [False, True])
def test_what_is_agreed_on_first_begins_first_unless_the_links_have_one_order(in_order: bool) -> None:
    """In debug mode rank 2, which is in the first call alone, is late; elsewhere it may have been early."""
    channel, links = Arriving(), Begun(in_order)
    backend = ProcessBackend(channel, links, Interrupts(), debug=True,  # type: ignore[arg-type]
                                 timeout_seconds=5.0)
    of_all, of_two = call(0), replace(call(0), group=(0, 1), communicator=(0, 1), cut=(0, 3, 6))
    for its in (of_all, of_two):
        backend.issue(0, part(its))
    channel.notes = [(1, Entered(of_all)), (1, Entered(of_two))]
    backend.check_use(0)
    assert links.calls == ([] if in_order else [of_two])
    channel.notes = [(2, Entered(of_all))]
    backend.check_use(0)
    assert links.calls == ([of_all, of_two] if in_order else [of_two, of_all])
