"""Faults injected into a run, where a plan names them, and messages with checksums: `Cluster(4, faults=, checksums=)`.

A `FaultPlan`, `zerosim.faults.Plan`, holds faults as texts, "rank=2,step=40,bitflip" or "rank=0,hop=1,chunk=3,lost";
each strikes once, at the first moment that it describes, and is then a row `Struck` of its rank's trace. All that a run
sends goes through `FaultyTransport.move`, collectives hop by hop; without a plan and checksums there is none.

nan, inf: an element that the rank sends, as if its arithmetic had made it so. bitflip: a bit of an element changes on
the way; reordered: the two halves of a message arrive in each other's place; repeated: what the rank sent before on
this link arrives again, in place of the message; lost: it does not arrive. dies: the rank raises RankDied, whatever it
asks for next. slow: the rank takes its turns last, or a link is slow; neither changes a bit, and `Machine.slowed_by`
prices it. disk_full and torn_write: of what the rank writes in the step, the disk takes ``nbytes`` and no more, or
keeps zeros of the next that it says it took.

Legend: N ranks. A rank is its index in the cluster, a hop's step counts from 0 in its collective; a training step from
1 in the run: 0 is before the first, and in a program without an engine.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from zerosim.numerics.arrays import as_bytes, copy_elements
from zerosim.numerics.checks import is_floating, unknown_name
from zerosim.numerics.files import WRITER
from zerosim.ranks.call import Array, Call, GroupKey, Hop, Pending, PendingCall, PendingExchange
from zerosim.ranks.collectives import ALGORITHMS, Delivery
from zerosim.ranks.errors import add_note
from zerosim.ranks.hub import Deliveries, InProcess, RunOptions
from zerosim.ranks.process import guarded
from zerosim.ranks.rank import RankState
from zerosim.ranks.trace import Struck, checked_purpose

CHECKSUM_NBYTES = 4  # CRC-32
MESSAGE = "message"  # the collective of what a program sends itself
COLLECTIVES = (*ALGORITHMS, MESSAGE)
_WHEN = ("rank", "step")
_CALL = (*_WHEN, "collective", "purpose")
_LINK = (*_CALL, "to", "hop", "chunk")
KINDS = {  # by kind: the words that describe it
    "nan": (*_LINK, "element"), "inf": (*_LINK, "element"), "bitflip": (*_LINK, "element", "bit"), "lost": _LINK,
    "repeated": _LINK, "reordered": _LINK, "dies": _CALL, "slow": ("rank", "to", "factor"),
    "disk_full": (*_WHEN, "nbytes"), "torn_write": (*_WHEN, "nbytes")}
OF_SENDER, OF_LINK = ("nan", "inf"), ("bitflip", "repeated", "reordered")
OF_DISK = ("disk_full", "torn_write")


class FaultError(RuntimeError):
    """A run ended by a fault that was injected and found."""


class RankDied(FaultError):
    """A rank died, as the plan asked; ``rank`` is its index, ``step`` the training step."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(f"rank {rank} died in step {step}, as the plan of faults asked; go on from a checkpoint "
                         "without it")
        self.rank, self.step = rank, step


class ChecksumError(FaultError):
    """A message did not arrive as it was sent; the text says which."""


class NotStruckError(ValueError):
    """A run ended, and a fault of its plan had nowhere to strike: it has shown nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, and when it strikes; None means any. ``collective`` is an operation, a call's number, or
    "message"; ``bit`` counts from 0, the lowest, and None is the highest of the exponent."""

    text: str
    kind: str
    rank: int
    step: int | None = None
    collective: str | int | None = None
    purpose: str | None = None
    to: int | None = None
    hop: int | None = None
    chunk: int | None = None
    element: int = 0
    bit: int | None = None
    factor: int = 2
    nbytes: int = 0

    @classmethod
    def of(cls, text: str) -> "Fault":
        """The fault of a text: words between commas, one of which is its kind, the others name=value.

        >>> Fault.of("rank=2, step=40, bitflip, bit=14").bit
        14

        Raises ValueError for words that there are not, or that the kind does not take.
        """
        words = [word.strip() for word in text.split(",")]
        kinds, given = [word for word in words if "=" not in word], dict[str, Any]()
        if len(kinds) != 1 or not any(word.startswith("rank=") for word in words):
            raise ValueError(f"the fault {text!r} must name one kind of {', '.join(KINDS)}, and a rank; write it as "
                             "'rank=2,step=40,bitflip'")
        if (kind := kinds[0]) not in KINDS:
            raise unknown_name(f"no fault is called {kind!r}", kind, tuple(KINDS))
        for name, _, value in (word.partition("=") for word in words if "=" in word):
            if name not in KINDS[kind] or name in given:
                raise unknown_name(f"the fault {text!r} says {name!r}, which {kind} does not take, or twice", name,
                                   KINDS[kind])
            if name == "collective" and value not in COLLECTIVES and not value.isdecimal():
                raise unknown_name(f"no collective is called {value!r}", value, COLLECTIVES)
            if name not in ("collective", "purpose") and not value.isdecimal():
                raise ValueError(f"the fault {text!r}: {name}={value!r} must be a whole number, 0 or more")
            given[name] = int(value) if value.isdecimal() else value
        checked_purpose(given.get("purpose", "unspecified"))
        return cls(",".join(words), kind, **given)

    def meets(self, rank: int, step: int, call: Call | None, hop: Hop | None) -> bool:
        """True at what the rank does in a training step: in a call, or (None) outside of one, and with a message."""
        asked: list[tuple[Any, Any]] = [
            (self.rank, {rank}), (self.step, {step}), (self.purpose, {call and call.purpose}),
            (self.collective, {call.operation, call.number} if call else {MESSAGE})]
        asked += [(self.to, {hop.destination}), (self.hop, {hop.step}), (self.chunk, hop.chunks)] if hop else []
        return all(one is None or one in found for one, found in asked)

    def changed(self, out: Array, before: Array | None) -> Array | None:
        """What arrives in place of ``out`` (n,), a copy; None where it cannot strike, or would change no byte."""
        made, itemsize = out.reshape(-1).copy(), out.dtype.itemsize
        if self.kind == "repeated":
            made = made if before is None or before.nbytes != made.nbytes else before.view(made.dtype)
        elif self.kind == "reordered":
            made = np.roll(made, len(made) // 2)
        elif self.element >= len(made) or (not is_floating(out.dtype) if self.kind in OF_SENDER else itemsize > 8):
            return None
        elif self.kind == "bitflip":
            bit = 8 * itemsize - 2 if self.bit is None else self.bit
            if bit >= 8 * itemsize:
                raise ValueError(f"asked to flip bit {bit} of {out.dtype}, whose bits are 0 to {8 * itemsize - 1}; "
                                 "take one of these")
            made.view(f"u{itemsize}")[self.element] ^= np.array(1 << bit, f"u{itemsize}")
        else:
            made[self.element] = float(self.kind)
        return None if as_bytes(made).tobytes() == as_bytes(out).tobytes() else made


class FaultPlan:
    """Faults of one run, by their texts; of a run that goes on on other ranks, those that have not struck yet.

    ``waiting`` are those that have not struck; a run that ends with one raises NotStruckError. ``struck`` are the rows
    of the others.
    """

    def __init__(self, *texts: str) -> None:
        self.faults = tuple(map(Fault.of, texts))
        self.waiting, self.struck = list(self.faults), list[Struck]()


Plan = FaultPlan  # as one calls it: zs.faults.Plan


@guarded
class FaultyTransport(InProcess):
    """Moves messages hop by hop, with the faults of a plan, and with checksums where asked for.

    A checksum is CRC-32 of a message, its link and its number there, so that one that comes twice is found too. It
    travels with the message as 4 bytes more, which are counted.
    """

    def __init__(self, states: Sequence[RankState], plan: FaultPlan, checksums: bool) -> None:
        self.states, self.plan, self.checksums = states, plan, checksums
        for fault in plan.waiting:
            if (most := max(fault.rank, fault.to or 0)) >= len(states):
                raise ValueError(f"the fault {fault.text!r} names rank {most}, and the ranks are 0 to "
                                 f"{len(states) - 1}")

    def begin(self, options: RunOptions) -> None:
        super().begin(replace(options, hop_by_hop=True))
        self.failed, self.lost, self.first = False, 0, len(self.plan.struck)
        self.dead: dict[int, RankDied] = {}
        self.numbers: Counter[tuple[int, ...]] = Counter()  # of messages, by link
        self.latest: dict[tuple[int, ...], tuple[Array, int]] = {}  # of them, by link: the latest, and its checksum
        self.written: Counter[Fault] = Counter()
        self.late = {fault.rank for fault in self.plan.faults if fault.kind == "slow" and fault.to is None}
        self.files, self.repeats = (any(fault.kind in kinds for fault in self.plan.waiting)
                                    for kinds in (OF_DISK, ("repeated",)))

    def due(self, kinds: Sequence[str], rank: int, call: Call | None = None, hop: Hop | None = None) -> list[Fault]:
        """The faults of these kinds that have not struck, and may at what the rank does now."""
        step = self.states[rank].trace.steps_begun
        return [fault for fault in self.plan.waiting if fault.kind in kinds and fault.meets(rank, step, call, hop)]

    def strike(self, fault: Fault, call: Call | None = None, hop: Hop | None = None, nbytes: int = 0) -> None:
        """The fault has struck."""
        trace = self.states[fault.rank].trace
        row = Struck(fault.text, fault.rank, trace.steps_begun, call, hop, nbytes)
        self.plan.waiting.remove(fault)
        self.plan.struck.append(row)
        trace.add(row)

    # -- messages -----------------------------------------------------------------------------------------------------

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Deliveries:
        for delivery in step:
            source, to = link = tuple(key[0][place] for place in (delivery.hop.source, delivery.hop.destination))
            hop = replace(delivery.hop, source=source, destination=to)
            sent: Any = delivery.sent  # in one process both ends of a message are there
            out: Any = delivery.out
            self.numbers[link] += 1
            if self._strike_first(("lost",), call, hop):
                self.lost += 1
                yield delivery._replace(out=None)
                continue
            copy_elements(sent, out)
            self._strike_first(("slow",), call, hop)
            self._strike_first(OF_SENDER, call, hop, out)
            expected = self._checksum(out, link)
            latest = self.latest.get(link, (None, 0))
            if self.repeats:
                self.latest[link] = sent.reshape(-1).copy(), expected
            repeated = self._strike_first(OF_LINK, call, hop, out, latest[0]) == "repeated"
            if self.checksums:
                self._check(latest[1] if repeated else expected, self._checksum(out, link), call, hop)
                delivery = delivery._replace(hop=replace(delivery.hop, nbytes=hop.nbytes + CHECKSUM_NBYTES))
            yield delivery

    def _strike_first(self, kinds: Sequence[str], call: Call | None, hop: Hop, out: Array | None = None,
                      latest: Array | None = None) -> str:
        """Lets the first fault of these kinds that can strike a message do so; its kind, or nothing. ``latest`` is the
        message before on the link."""
        for fault in self.due(kinds, hop.source, call, hop):
            if out is not None:
                if (made := fault.changed(out, latest)) is None:
                    continue
                out[...] = made.reshape(out.shape)
            self.strike(fault, call, hop, hop.nbytes)
            return fault.kind
        return ""

    def _checksum(self, out: Array, link: tuple[int, ...]) -> int:
        return crc32(as_bytes(out).data, crc32(f"{link} {self.numbers[link]}".encode())) if self.checksums else 0

    def _check(self, expected: int, found: int, call: Call | None, hop: Hop) -> None:
        if expected != found:
            raise ChecksumError(
                f"{Struck.place(call, hop)}, was sent with the checksum {expected:08x}, and what arrived has "
                f"{found:08x}: it was changed, repeated or put in another order on its way. Nothing of it is used; go "
                "on from a checkpoint, and look at that link")

    def collective(self, parts: Sequence[PendingCall]) -> Deliveries:
        """A call of which a message is lost ends on no rank."""
        lost = self.lost
        for delivery in super().collective(parts):
            yield delivery
            if self.lost > lost:
                return

    def message(self, key: GroupKey, step: Sequence[Delivery], ends: Mapping[int, PendingExchange]) -> Deliveries:
        for delivery in super().message(key, step, ends):
            if delivery is not None and self.checksums:
                ends[delivery.hop.source].count(CHECKSUM_NBYTES)
            yield delivery

    def seen(self, key: GroupKey, delivery: Delivery) -> Array:
        return np.empty(0) if delivery.out is None else super().seen(key, delivery)

    # -- ranks --------------------------------------------------------------------------------------------------------

    def issued(self, rank: int, me: Pending) -> None:
        call = me.call if isinstance(me, PendingCall) else None
        for fault in self.due(("dies", "slow"), rank, call):
            if fault.to is None:  # else a link is slow
                self.strike(fault, call)
            if fault.kind == "dies":
                self.dead[rank] = RankDied(rank, self.states[rank].trace.steps_begun)
        if rank in self.dead:  # also where the program has caught it, and asks again
            raise self.dead[rank]
        if self.files:  # in the rank's own context: what it writes from here on
            WRITER.set(partial(self._writer, rank))

    # -- files --------------------------------------------------------------------------------------------------------

    def _writer(self, rank: int, file: Any) -> Callable[[memoryview], int]:
        def write(block: memoryview) -> int:
            for fault in self.due(OF_DISK, rank)[:1]:
                room = max(0, fault.nbytes - self.written[fault])
                self.written[fault] += len(block)
                kept = bytes(block[:room])
                if fault.kind == "disk_full" and room < len(block):
                    file.write(kept)
                    self.strike(fault, nbytes=fault.nbytes)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if fault.kind == "torn_write" and (torn := kept.ljust(len(block), b"\0")) != block:
                    self.strike(fault, nbytes=fault.nbytes)
                    block = memoryview(torn)
            return int(file.write(block))

        return write

    # -- ends ---------------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Says in notes which faults of the plan have struck in the run that failed."""
        self.failed = True
        for row in self.plan.struck[self.first:]:
            add_note(error, f"injected: {row}")

    def close(self) -> None:
        """Raises NotStruckError where a run has come to its end without a fault that it was to have, and RankDied where
        a dead rank's program has caught that it is, and returned."""
        if self.failed:
            return
        for died in self.dead.values():
            raise died
        if self.plan.waiting:
            raise NotStruckError(f"the run has ended, and {' and '.join(repr(one.text) for one in self.plan.waiting)} "
                                 "never struck: no step, collective, hop or chunk was so, or no byte would have "
                                 "changed; name one that the trace has, or leave it out")


def transport_of(states: Sequence[RankState], faults: FaultPlan | str | None, *, checksums: bool) -> InProcess:
    """What moves messages in one process: plain, or with faults and checksums. Raises ValueError as `Fault.of` does."""
    if faults is None and not checksums:
        return InProcess()
    plan = faults if isinstance(faults, FaultPlan) else FaultPlan() if faults is None else FaultPlan(faults)
    return FaultyTransport(states, plan, checksums)
