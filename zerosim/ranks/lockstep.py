"""Drives the generators of all ranks of one call together, hop by hop, and expands a call without data.

A message moves when both its halves are there: the sender has yielded ``send`` and the receiver ``out``. All messages
that can move in one round make one step.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from zerosim.numerics.null import NullArray
from zerosim.numerics.null_kernels import NullKernels
from zerosim.ranks import direct
from zerosim.ranks.algorithms import ALGORITHMS, NATIVE, Algorithm, Exchange, Party, algorithm_of
from zerosim.ranks.algorithms.party import Array, Steps
from zerosim.ranks.call import Call
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
