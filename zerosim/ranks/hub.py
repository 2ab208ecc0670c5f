"""Drives the generators of all ranks of one call together, hop by hop, and expands a call without data.

A message moves when both its halves are there: the sender has yielded ``send`` and the receiver ``out``. All messages
that can move in one round make one step.
"""

import contextvars
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol

from greenlet import getcurrent, greenlet

from zerosim.numerics.arrays import NullArray, copy_elements, poison
from zerosim.numerics.checks import is_count
from zerosim.numerics.kernels import NullKernels, NumpyKernels
from zerosim.ranks import fast_ring as direct
from zerosim.ranks.call import Call, CollectiveEntry, Entry, ExchangeEntry, Group
from zerosim.ranks.checks import private_memory
from zerosim.ranks.collectives import ALGORITHMS, NATIVE, Algorithm, Array, Exchange, Party, Steps, algorithm_of
from zerosim.ranks.errors import (
    DeadlockError,
    Interrupts,
    MismatchError,
    RankStopped,
    RankUseError,
    clear_frames,
    guarded,
)
from zerosim.ranks.trace import Hop

Watch = Literal["hop", "collective"]  # what a run stops after


class Seat:
    """One rank's generator in the lockstep: the exchange that it waits for, and with whom halves are still open."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.open: Exchange | None = None
        self.to: int | None = None
        self.source: int | None = None

    def advance(self) -> None:
        """Runs the generator to its next exchange; ``open`` is None when it has none left."""
        self.open = next(self.steps, None)
        if self.open is not None:
            self.to, self.source = self.open.to, self.open.source

    @property
    def settled(self) -> bool:
        return self.to is None and self.source is None


class Event(NamedTuple):
    """A hop that has just been made: its call, the hop, and a copy of the values that arrived.

    ``call`` is None for a message that the program sent itself.
    """

    call: Call | None
    hop: Hop
    values: Array


class Ended(NamedTuple):
    """A collective that has just been carried out, before any of its ranks goes on."""

    call: Call


class Move(NamedTuple):
    """A message of which both halves are there, with what carries it from ``sent`` to ``out``."""

    hop: Hop
    sent: Array
    out: Array
    receiver: Party


def steps_of(party: Party, x: Array, out: Array) -> Steps:
    """The generator of one rank's part in a call."""
    return row_of(party.call).steps(party, x, out)


def copied(moves: Sequence[Move]) -> Iterator[tuple[Hop, Array]]:
    """Copies each message to where it arrives, one after the other."""
    for move in moves:
        move.receiver.kernels.cast_pack(move.sent, move.out)
        yield move.hop, move.out


def lockstep(parties: Sequence[Party], arrays: Sequence[tuple[Array, Array]], *,
             begin: Callable[[Party, Array, Array], Steps] = steps_of,
             carry: Callable[[Sequence[Move]], Iterator[tuple[Hop, Array]]] = copied,
             ) -> Generator[tuple[Hop, Array], None, None]:
    """Runs the call of all ``parties`` on their (x, out) arrays; yields every hop made, with a view of what arrived.

    ``begin`` makes one rank's generator; ``carry`` makes the hops of one step, and yields them.
    """
    call = parties[0].call
    seats = [Seat(begin(party, x, out)) for party, (x, out) in zip(parties, arrays, strict=True)]
    for seat in seats:
        seat.advance()
    step = 0
    while any(seat.open is not None for seat in seats):
        moves = _possible_moves(seats, parties, step)
        assert moves, f"the algorithm {call.algorithm} of {call.operation} waits for itself"
        yield from carry(moves)
        for move in moves:
            seats[move.hop.source].to = seats[move.hop.destination].source = None
        for seat in seats:
            if seat.open is not None and seat.settled:
                seat.advance()
        step += 1


def _possible_moves(seats: list[Seat], parties: Sequence[Party], step: int) -> list[Move]:
    """Every message of which both halves are there."""
    return [_move(seat.open, seats[seat.to].open, step, source, seat.to, parties[seat.to])
            for source, seat in enumerate(seats) if seat.to is not None and seats[seat.to].source == source]


def _move(sender: Exchange | None, taker: Exchange | None, step: int, source: int, destination: int,
          receiver: Party) -> Move:
    assert sender is not None
    assert taker is not None
    sent, out = sender.send, taker.out
    assert sent is not None
    assert out is not None
    assert len(sent) == len(out)
    assert sent.dtype == out.dtype, "a message arrives in the format in which it left"
    return Move(Hop(step, source, destination, sender.chunks, sent.nbytes), sent, out, receiver)


def row_of(call: Call) -> Algorithm:
    """The table's row for a call."""
    return algorithm_of(call.operation, call.algorithm, call.ranks)


def expand(call: Call) -> list[Hop]:
    """Every hop of the call, from its own generators, run on arrays without data. Ranks are the group's indices."""
    return list(_expand(anywhere(call)))


def anywhere(call: Call) -> Call:
    """The call without what tells it apart from others of the same hops: the n-th of a loop makes the first one's."""
    return replace(call, number=0, communicator=(), group=tuple(range(call.ranks)), purpose="unspecified", agreement="")


@lru_cache(maxsize=8)  # few: 512 ranks in a ring make half a million hops
def _expand(call: Call) -> tuple[Hop, ...]:
    kernels = NullKernels()
    parties = [null_party(call, index, kernels) for index in range(call.ranks)]
    return tuple(hop for hop, _ in lockstep(parties, [null_arrays(party) for party in parties]))


def sent_by(call: Call, index: int) -> int:
    """The bytes that one rank sends, from its own generator alone, which needs no partner where there is no data.

    What a library's own collective sends is not known; it is counted as the first algorithm of the table would send.
    """
    if call.algorithm == NATIVE:
        call = replace(call, algorithm=next(iter(ALGORITHMS[call.operation])))
    if direct.serves(call):
        return direct.sent_nbytes(call, index)
    party = null_party(call, index, NullKernels())
    steps = row_of(call).steps(party, *null_arrays(party))
    return sum(exchange.send.nbytes for exchange in steps if exchange.send is not None)


def null_party(call: Call, index: int, kernels: NullKernels) -> Party:
    """One rank inside the call, its buffers without data."""
    party = Party(call, index, kernels)
    party.buffers = [NullArray((length,), dtype) for length, dtype in row_of(call).buffers(party)]
    return party


def null_arrays(party: Party) -> tuple[Any, Any]:
    """(x, out) without data, of the lengths that the operation has on this rank."""
    n = party.call.length
    own = len(range(*party.bounds(party.index).indices(n)))
    x, out = {"reduce_scatter": (n, own), "all_gather": (own, n), "gather": (own, n),
              "all_to_all": (n, party.size * own)}.get(party.call.operation, (n, n))
    return NullArray((x,), party.dtype), NullArray((out,), party.dtype)


# -- What carries out the collectives and messages of ranks that share a process. The hub decides when ---------------
# ``InProcess`` computes with NumPy in the hub's own thread, and what it carries is there at once. NCCL's carriage puts
# everything on streams of GPUs, and lets a rank's own stream wait for it.


@guarded
class Carriage(Protocol):
    """Moves the arrays of all ranks of one hub; ranks are named by their index in the whole cluster."""

    @property
    def library(self) -> str | None:
        """Whose own collectives ``algorithm="native"`` asks for; None where there is no library."""

    def resume(self, rank: int) -> None:
        """The hub is about to let this rank's program go on."""

    def issued(self, rank: int, entry: Entry) -> None:
        """The rank's program has issued the entry: what it reads has been written, or is about to be."""

    def collective(self, entries: Sequence[CollectiveEntry]) -> Generator[Event, None, list[int]]:
        """Carries one call out for all ranks of its group; returns the bytes that each sent. Yields what is watched."""

    def message(self, sender: ExchangeEntry, receiver: ExchangeEntry) -> None:
        """Moves the elements of ``sender.send`` to ``receiver.out``, which have one shape and dtype.

        It is called by the program that issued one of the two, and last.
        """

    def arrived(self, rank: int, entry: Entry) -> None:
        """The rank's program goes on with an entry that is done: what it reads next must be there."""

    def join(self, parent: Group, key: Group) -> None:
        """One of the ranks of ``key``, all of the group ``parent``, has heard that they are a group of their own."""

    def settle(self) -> None:
        """All programs have returned: waits until all that they asked for is done."""

    def give_up(self) -> None:
        """The run has failed: ends what is under way, before the ranks are unwound."""

    def close(self) -> None:
        """The run is over, and no rank runs any more."""


@guarded
class InProcess:
    """Additions by the ranks' own kernels: all ranks in lockstep, or directly where no one watches the hops."""

    library = None

    def __init__(self, kernels: NumpyKernels, *, hop_by_hop: bool, watch: Watch | None, interrupts: Interrupts) -> None:
        self.kernels, self.hop_by_hop, self.watch, self.interrupts = kernels, hop_by_hop, watch, interrupts

    def resume(self, rank: int) -> None:
        """Nothing belongs to the thread that would be another rank's."""

    def issued(self, rank: int, entry: Entry) -> None:
        """What the entry reads is there."""

    def collective(self, entries: Sequence[CollectiveEntry]) -> Generator[Event, None, list[int]]:
        """The call's own hops; a ring, where nobody watches, without them."""
        call, kernels = entries[0].call, self.kernels.serving(entries[0].x)
        if not self.hop_by_hop and direct.serves(call):
            direct.run(call, kernels, entries)
            return [direct.sent_nbytes(call, entry.index) for entry in entries]
        sent = [0] * len(entries)
        parties = [Party(call, e.index, kernels, e.buffers, e.in_place) for e in entries]
        if self.watch == "hop":  # who looks between two hops sees what is not written yet
            for entry in entries:
                if not entry.in_place:
                    poison(entry.out)
        for hop, values in lockstep(parties, [(e.x, e.out) for e in entries]):
            sent[hop.source] += hop.nbytes
            self.interrupts.raise_pending()
            if self.watch == "hop":  # a copy, since who keeps a view keeps a buffer in the ledger
                yield Event(call, hop, values.copy())
        return sent

    def message(self, sender: ExchangeEntry, receiver: ExchangeEntry) -> None:
        """A copy."""
        copy_elements(sender.send, receiver.out)

    def arrived(self, rank: int, entry: Entry) -> None:
        """What is done is there."""

    def join(self, parent: Group, key: Group) -> None:
        """Nothing to do: entries name their group."""

    def settle(self) -> None:
        """All is done when it is asked for."""

    def give_up(self) -> None:
        """Nothing is under way between two hops."""

    def close(self) -> None:
        """Nothing to give back."""


# -- Turns the state of a run into sentences: who is in which call, who waits for whom, and where in the source ------

PACKAGE = str(Path(__file__).parent.parent) + os.sep


def place_of(frame: FrameType | None) -> str:
    """``file:line in function`` of the innermost frame outside the package; or of the innermost one there is."""
    outer = frame
    while outer is not None and outer.f_code.co_filename.startswith(PACKAGE):
        outer = outer.f_back
    found = outer or frame
    if found is None:
        return "an unknown place"
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}"


def place_of_call() -> str:
    """The place in the user's program that called into the package."""
    return place_of(sys._getframe(1))


def mismatch_text(calls: Mapping[int, Call]) -> str:
    """Names every group of ranks that made the same call. ``calls``: rank -> its call, in rank order."""
    show = str if len({str(call) for call in calls.values()}) > 1 else Call.in_full
    groups: dict[str, list[int]] = {}
    for rank, call in calls.items():
        groups.setdefault(show(call), []).append(rank)
    said = "; ".join(f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {text}"
                     for text, ranks in groups.items())
    return (f"the ranks of a group must make the same collective calls in the same order, but {said}. "
            "Look for a branch that depends on the rank, or for shapes, dtypes or options that differ.")


class State(NamedTuple):
    """Where a rank is: in ``what`` at ``where``, waiting for the ranks ``missing`` if it is a collective's."""

    what: str | None  # None: it has finished
    where: str = ""
    missing: list[int] | None = None

    def __str__(self) -> str:
        if self.what is None:
            return "finished"
        for_whom = "" if self.missing is None else f", waiting for {ranks_text(self.missing)}"
        return f"in {self.what} at {self.where}{for_whom}"


class Shaped(Protocol):
    """What has a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def misfit(sender: int, send: Shaped, receiver: int, out: Shaped) -> str:
    """A message that does not fit where it arrives."""
    return (f"rank {sender} sends ({send.shape}, {send.dtype}) to rank {receiver}, which expects ({out.shape}, "
            f"{out.dtype}); both sides must name the same shape and dtype")


def deadlock_text(states: Sequence[State]) -> str:
    """Who waits for whom; ``states`` in rank order."""
    lines = []
    for text, members in groupby(enumerate(states), key=lambda item: str(item[1])):
        ranks = [rank for rank, _ in members]
        lines.append(f"  rank {ranks[0]}: {text}" if len(ranks) == 1 else f"  ranks {ranks[0]}-{ranks[-1]}: {text}")
    return ("no rank can go on:\n" + "\n".join(lines) + "\nEvery send needs a receive of the same size that is waiting "
            "for it (exchange() does both at once), and every rank of a group must enter each collective.")


def left_over(found: Iterable[str]) -> str:
    """What was sent and never received, though every rank's program has returned."""
    lines = "\n".join(f"  {text}" for text in found)
    return (f"all ranks have finished, but not all messages have arrived:\n{lines}\nThe library took them only because "
            "they are small; larger ones would wait for ever. Every send needs a receive, and every rank of a group "
            "must enter each collective.")


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks [1, 2]``."""
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


# -- Threads: a rank belongs to one, and BLAS gets one ---------------------------------------------------------------
# The number of BLAS threads changes the bits of larger products, and launchers bind cores.


@guarded
def check_thread(thread: int, rank: int) -> None:
    """Raises RankUseError unless the caller is in ``thread``, the one that runs the rank's cluster."""
    if threading.get_ident() != thread:
        raise RankUseError(f"rank {rank} was used in another thread than the one that runs its cluster; "
                           "keep every call of a rank inside the program that it was handed to")


@guarded
@cache
def controller() -> Any:
    """The thread pools of the libraries that are loaded (found once; looking takes milliseconds)."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@guarded
class _Limits:
    """Who is inside ``blas_limited_to``, in any thread: BLAS has one number of threads for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: list[tuple[int, int]] = []  # the thread that entered, and its limit
        self._before: list[list[int]] = []  # what each found, by library

    def enter(self, blas_threads: int) -> None:
        """Raises RankUseError where another thread is inside with another limit."""
        with self._lock:
            here = threading.get_ident()
            others = {limit for thread, limit in self._inside if thread != here} - {blas_threads}
            if others:
                raise RankUseError(
                    f"a cluster with blas_threads={blas_threads} was asked to run while one with "
                    f"blas_threads={min(others)} runs in another thread, and BLAS has one limit for all threads, which "
                    "bits depend on; give both the same, or run one after the other")
            libraries = _blas_libraries()
            self._before.append([library.get_num_threads() for library in libraries])
            self._inside.append((here, blas_threads))
            _set_threads(libraries, [blas_threads] * len(libraries))

    def leave(self) -> None:
        """Sets what the caller found; or who came after it and is still inside does that later."""
        with self._lock:
            here = threading.get_ident()
            place = max(i for i, (thread, _) in enumerate(self._inside) if thread == here)
            del self._inside[place]
            before = self._before.pop(place)
            if place < len(self._before):
                self._before[place] = before
            else:
                _set_threads(_blas_libraries(), before)


@guarded
def _blas_libraries() -> list[Any]:
    return [library for library in controller().lib_controllers if library.user_api == "blas"]


@guarded
def _set_threads(libraries: list[Any], counts: list[int]) -> None:
    for library, count in zip(libraries, counts, strict=True):
        # From threadpoolctl 3.8 on, the thread that set OpenBLAS first is the only one that may, until it lets go.
        let_go = getattr(library, "clear_controlling_thread", lambda force: None)
        let_go(force=True)
        library.set_num_threads(count)
        let_go(force=True)


_limits = _Limits()


@guarded
@contextmanager
def blas_limited_to(blas_threads: int) -> Iterator[None]:
    """Limits BLAS to this many threads inside the ``with`` block, until the last of all threads has left it.

    Raises ValueError for fewer than one thread, RankUseError where another thread is inside with another limit.
    """
    if not is_count(blas_threads) or blas_threads < 1:
        raise ValueError(f"blas_threads={blas_threads!r}, but arithmetic needs a whole number of threads, at least one")
    _limits.enter(blas_threads)
    try:
        yield
    finally:
        _limits.leave()


# -- The hub: runs the ranks of a cluster as greenlets, exactly one at a time, the next one chosen by a rule ---------
# A rank parks when it waits for an entry that is not done. The hub carries out a collective when all of its group have
# issued it and agree, and moves a message when both its halves are there. Same program, same order, same bits.


MISSING = object()


@guarded
class Hub:
    """One run of one program on N ranks, in the thread that drives it."""

    knows_the_others = True

    def __init__(self, size: int, carriage: Carriage, *, seed: int, watch: Watch | None,
                 interrupts: Interrupts) -> None:
        self.carriage, self.watch, self.interrupts = carriage, watch, interrupts
        self.chance = random.Random(seed) if seed else None
        self.thread = threading.get_ident()
        self.greenlets: list[greenlet] = []
        self.results: list[Any] = [MISSING] * size
        self.waiting: list[Entry | None] = [None] * size
        self.ready: deque[int] = deque(range(size))
        self.incomplete: dict[tuple[Group, int], dict[int, CollectiveEntry]] = {}
        self.complete: deque[list[CollectiveEntry]] = deque()
        self.mailbox: dict[int, ExchangeEntry] = {}
        self.messages: deque[Event] = deque()
        self.under_way: list[CollectiveEntry] = []  # the collective that is being carried out: for who looks
        self.failure: tuple[int, BaseException] | None = None
        self.aftermath: list[tuple[int, BaseException]] = []
        self.stopping = False

    # -- called by ranks, inside their greenlets ------------------------------------------------------------------

    @property
    def library(self) -> str | None:
        """Whose own collectives ``native`` asks for."""
        return self.carriage.library

    def progress(self) -> bool:
        """Nothing goes on while a rank runs: others take their turns when it waits."""
        return False

    def check_use(self, rank: int) -> None:
        """Raises RankUseError unless the caller is rank ``rank``'s own program, in this hub's thread."""
        check_thread(self.thread, rank)
        if getcurrent() is not self.greenlets[rank]:
            raise RankUseError(f"rank {rank} was used outside its own program (a program must only use the rank that "
                               "it was handed; reading another rank's memory and trace is fine after the run)")

    def issue(self, rank: int, entry: Entry) -> None:
        """Takes an entry; a collective becomes due when all of its group have issued it."""
        if self.stopping:
            raise RankStopped
        self.carriage.issued(rank, entry)
        if isinstance(entry, ExchangeEntry):
            self.mailbox[rank] = entry
            self._move_messages(entry)
        else:
            call = entry.call
            key = call.key, call.number
            group = self.incomplete.setdefault(key, {})
            group[entry.index] = entry
            if len(group) == call.ranks:
                del self.incomplete[key]
                self.complete.append([group[i] for i in range(call.ranks)])
        if self.chance is not None and self.chance.random() < 0.5:
            self.ready.append(rank)
            self._park()

    def join(self, parent: Group, key: Group) -> None:
        """The carriage may have to prepare the group."""
        self.carriage.join(parent, key)

    def wait(self, rank: int, entry: Entry) -> None:
        """Parks the rank until its entry is done."""
        while not entry.done:
            self.waiting[rank] = entry
            self._park()
        self.carriage.arrived(rank, entry)

    def _park(self) -> None:
        if self.stopping:
            raise RankStopped
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()
        if self.stopping:
            raise RankStopped

    # -- the loop -------------------------------------------------------------------------------------------------

    def drive(self, programs: list[Callable[[], Any]]) -> Generator[Event | Ended, None, None]:
        """Runs the programs to their end; a watched hub yields every message, and every hop made hop by hop, or every
        collective when it has ended.

        Raises what a rank raised, MismatchError or DeadlockError; whatever happens, no rank is left running.
        """
        self.greenlets = [self._greenlet(rank, program) for rank, program in enumerate(programs)]
        try:
            while self.ready or self.complete:
                self.interrupts.raise_pending()
                if self.complete and self._carries_out_now():
                    yield from self._carry_out(self.complete.popleft())
                else:
                    self._resume(self._next_ready())
                    while self.messages:
                        yield self.messages.popleft()
            if not all(g.dead for g in self.greenlets):
                raise DeadlockError(self._explain_deadlock())
            self.carriage.settle()
        except BaseException:
            self.carriage.give_up()
            raise
        finally:
            self._unwind()
            self.carriage.close()

    def _greenlet(self, rank: int, program: Callable[[], Any]) -> greenlet:
        def body() -> None:
            try:
                self.results[rank] = program()
            except RankStopped as error:
                if not self.stopping:  # the program's own, which stops nobody
                    self._failed(rank, error)
            except StopIteration as error:  # which a generator, as the hub's loop is one, must not let through
                self._failed(rank, RuntimeError("the program let a StopIteration out; catch it where next() is called"),
                             error)
            except BaseException as error:  # whatever it is, _resume raises it again
                self._failed(rank, error)

        g = greenlet(body)
        g.gr_context = contextvars.copy_context()
        return g

    def _failed(self, rank: int, error: BaseException, cause: BaseException | None = None) -> None:
        error.__cause__ = cause or error.__cause__
        if self.stopping:
            self.aftermath.append((rank, error))
        else:
            self.failure = (rank, error)

    def _carries_out_now(self) -> bool:
        """Always, unless a seeded schedule lets ready ranks run first."""
        return self.chance is None or not self.ready or self.chance.random() < 0.5

    def _next_ready(self) -> int:
        if self.chance is not None:
            self.ready.rotate(self.chance.randrange(len(self.ready)))
        return self.ready.popleft()

    def _resume(self, rank: int) -> None:
        if threading.get_ident() != self.thread:
            raise RankUseError("a run can only be continued in the thread that started it; step through it there")
        g = self.greenlets[rank]
        g.parent = getcurrent()
        self.carriage.resume(rank)
        g.switch()
        if self.failure is not None:
            raise self.failure[1]

    def _wake(self, rank: int, entry: Entry) -> None:
        if entry.done and self.waiting[rank] is entry:
            self.waiting[rank] = None
            self.ready.append(rank)

    # -- collectives and messages ---------------------------------------------------------------------------------

    def _carry_out(self, entries: list[CollectiveEntry]) -> Generator[Event | Ended, None, None]:
        call, self.under_way = entries[0].call, entries
        if any(entry.call != call for entry in entries):
            raise MismatchError(mismatch_text({call.group[e.index]: e.call for e in entries}))
        private_memory(entries)
        sent = yield from self.carriage.collective(entries)
        for entry, nbytes in zip(entries, sent, strict=True):
            entry.finish(nbytes)
            self._wake(call.group[entry.index], entry)
        if self.watch == "collective":
            yield Ended(call)
        self.under_way = []

    def _move_messages(self, entry: ExchangeEntry) -> None:
        """Moves what the new entry makes possible: its send to a rank that receives from it, and the reverse."""
        for source, destination in dict.fromkeys([(entry.me, entry.to), (entry.source, entry.me)]):
            if source is None or destination is None:
                continue
            sender, receiver = self.mailbox.get(source), self.mailbox.get(destination)
            if (sender and receiver and sender.to_send and sender.to == destination and receiver.to_receive
                    and receiver.source == source and sender.key == receiver.key):
                self._move(sender, receiver)

    def _move(self, sender: ExchangeEntry, receiver: ExchangeEntry) -> None:
        send, out = sender.send, receiver.out
        assert send is not None
        assert out is not None
        if send.shape != out.shape or send.dtype != out.dtype:
            raise MismatchError(misfit(sender.me, send, receiver.me, out))
        self.carriage.message(sender, receiver)
        sender.to_send = receiver.to_receive = False
        sender.count(send.nbytes)
        if self.watch:
            self.messages.append(Event(None, Hop(0, sender.me, receiver.me, (), send.nbytes), out.copy()))
        for entry in (sender, receiver):
            if entry.done:
                self.mailbox.pop(entry.me, None)
                self._wake(entry.me, entry)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _explain_deadlock(self) -> str:
        return deadlock_text([self._state(rank, entry) for rank, entry in enumerate(self.waiting)])

    def _state(self, rank: int, entry: Entry | None) -> State:
        if entry is None:
            return State(None)
        missing = self._absent(entry.call) if isinstance(entry, CollectiveEntry) else None
        return State(entry.describe(), place_of(self._frame(rank)), missing)

    def _absent(self, call: Call) -> list[int]:
        """The ranks of the call's group that have not issued it."""
        there = self.incomplete[call.key, call.number]
        return [rank for i, rank in enumerate(call.group) if i not in there]

    def _frame(self, rank: int) -> FrameType | None:
        frame: FrameType | None = self.greenlets[rank].gr_frame
        return frame

    def _unwind(self) -> None:
        """Stops every rank that still runs; its ``finally`` blocks run, and any further call stops it again."""
        self.stopping = True
        for rank, g in enumerate(self.greenlets if threading.get_ident() == self.thread else ()):
            if g:  # begun and not ended: one that has not begun has nothing to unwind, and would raise out of here
                g.parent = getcurrent()
                self.carriage.resume(rank)
                g.throw(RankStopped)
        self.incomplete.clear()
        self.complete.clear()
        self.ready.clear()
        self.mailbox.clear()
        self.under_way = []
        self.waiting = [None] * len(self.waiting)

    def let_go(self, error: BaseException) -> None:
        """After a failure: names the ranks in notes, and clears what the error's frames would keep in the ledgers."""
        if self.failure is not None and self.failure[1] is error:
            error.add_note(f"raised by rank {self.failure[0]} of {len(self.results)}")
        for rank, later in self.aftermath:
            error.add_note(f"rank {rank} raised {later!r} when it was stopped")
        # A rank's own error has only that rank's errors behind it; the hub's may have the caller's.
        clear_frames(error, chain=self.failure is not None)
        self.results.clear()
        self.aftermath.clear()
        self.failure = None
