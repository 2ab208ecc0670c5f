"""Faults injected into a run, where a plan names them, and messages with checksums: `Cluster(4, faults=, checksums=)`.

A `FaultPlan`, `zerosim.faults.Plan`, holds faults as texts, "rank=2,step=40,bitflip" or "rank=0,hop=1,chunk=3,lost";
each strikes once, at the first moment that it describes, and is then a row `InjectedFault` of its rank's trace. With a
plan or checksums, every message goes through `FaultyTransport.move`, collectives hop by hop; else none does.

nan, inf: an element that the rank sends, as if its arithmetic had made it so. bitflip: a bit of an element changes on
the way; reordered: the two halves of a message arrive in each other's place; repeated: what the rank sent before on
this link arrives again, in place of the message; lost: it does not arrive. dies: the rank raises RankDied, whatever it
asks for next. slow: the rank takes its turns last, or a link is slow; neither changes a bit, and `Machine.slowed_by`
prices it. disk_full and partial_write: of what the rank writes in the step, the disk takes ``nbytes`` and no more, or
keeps zeros of the next that it says it took.

Legend: N ranks, each named by its index in the cluster. Hops of a collective count from 0, training steps of a run from
1; step 0 is all before the first, or all of a program without an engine.
"""

import errno
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from zerosim.numerics.arrays import as_bytes, copy_elements
from zerosim.numerics.checks import is_floating, unknown_name
from zerosim.numerics.files import WRITER
from zerosim.ranks.call import Array, Call, GroupKey, Hop, Pending, PendingCall
from zerosim.ranks.collectives import ALGORITHMS, Delivery
from zerosim.ranks.errors import FaultError, add_note
from zerosim.ranks.hub import Deliveries, InProcess, RunOptions
from zerosim.ranks.option_rows import InjectedFault
from zerosim.ranks.process import guarded
from zerosim.ranks.rank import RankState
from zerosim.ranks.trace import checked_purpose

CHECKSUM_NBYTES = 4  # CRC-32
MESSAGE = "message"  # the collective of what a program sends itself
COLLECTIVES = (*ALGORITHMS, MESSAGE)
_WHEN = ("rank", "step")
_CALL = (*_WHEN, "collective", "purpose")
_LINK = (*_CALL, "to", "hop", "chunk")
KINDS = {  # by kind: the words that describe it
    "nan": (*_LINK, "element"), "inf": (*_LINK, "element"), "bitflip": (*_LINK, "element", "bit"), "lost": _LINK,
    "repeated": _LINK, "reordered": _LINK, "dies": _CALL, "slow": ("rank", "to", "factor"),
    "disk_full": (*_WHEN, "nbytes"), "partial_write": (*_WHEN, "nbytes")}
OF_SENDER, OF_LINK = ("nan", "inf"), ("bitflip", "repeated", "reordered")


class RankDied(FaultError):
    """A rank died, as the plan asked; ``rank`` is its index, ``step`` the training step."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(f"rank {rank} died in step {step}, as the plan of faults asked; go on from a checkpoint "
                         "without it")
        self.rank, self.step = rank, step


class _LostError(Exception):
    """A message of a collective is lost."""


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

        Raises TypeError for what is no text, ValueError for words that there are not, or that the kind does not take.
        """
        if not isinstance(text, str):
            raise TypeError(f"asked for the fault {text!r}, which is no text; write each as 'rank=2,step=40,bitflip', "
                            "several as faults.Plan(text, text)")
        words = [word.strip() for word in text.split(",")]
        kinds = [word for word in words if "=" not in word]
        given = [word.partition("=")[::2] for word in words if "=" in word]
        names = [name for name, _ in given]
        if len(kinds) != 1 or "rank" not in names:
            raise ValueError(f"the fault {text!r} must name one kind of {', '.join(KINDS)}, and a rank; write it as "
                             "'rank=2,step=40,bitflip'")
        if (kind := kinds[0]) not in KINDS:
            raise unknown_name(f"no fault is called {kind!r}", kind, tuple(KINDS))
        for name, value in given:
            if name not in KINDS[kind] or names.count(name) > 1:
                raise unknown_name(f"the fault {text!r} says {name!r}, which {kind} does not take, or twice", name,
                                   KINDS[kind])
            if name == "purpose":
                checked_purpose(value)
            elif name == "collective" and value not in COLLECTIVES and not value.isdecimal():
                raise unknown_name(f"no collective is called {value!r}", value, COLLECTIVES)
            elif name != "collective" and not value.isdecimal():
                raise ValueError(f"the fault {text!r}: {name}={value!r} must be a whole number, 0 or more")
        return cls(",".join(words), kind, **{name: int(value) if value.isdecimal() else value
                                             for name, value in given})  # type: ignore[arg-type]

    def meets(self, rank: int, step: int, call: Call | None, hop: Hop | None) -> bool:
        """True at what the rank does in a training step: in a call, or (None) outside of one, and with a message."""
        calls: Collection[Any] = (call.operation, call.number) if call else (MESSAGE,)
        asked: list[tuple[Any, Collection[Any]]] = [
            (self.rank, [rank]), (self.step, [step]), (self.purpose, [call and call.purpose]), (self.collective, calls),
            (self.to, [hop and hop.destination]), (self.hop, [hop and hop.step]),
            (self.chunk, hop.chunks if hop else ())]
        return all(one is None or one in found for one, found in asked)

    def changed(self, out: Array, before: Array | None) -> Array | None:
        """The values in place of ``out`` (n,), a copy; None where it cannot strike, or would change no byte.
        ``before`` is the message before on its link."""
        made, bits = out.reshape(-1).copy(), 8 * out.dtype.itemsize
        if self.kind == "repeated":
            made = made if before is None or before.nbytes != made.nbytes else before.view(made.dtype)
        elif self.kind == "reordered":
            made = np.roll(made, len(made) // 2)
        elif self.element >= len(made) or (not is_floating(out.dtype) if self.kind in OF_SENDER else bits > 64):
            return None
        elif self.kind in OF_SENDER:
            made[self.element] = float(self.kind)
        elif (bit := bits - 2 if self.bit is None else self.bit) < bits:
            made.view(f"u{bits // 8}")[self.element] ^= np.array(1 << bit, f"u{bits // 8}")
        else:
            raise ValueError(f"asked to flip bit {bit} of {out.dtype}, whose bits are 0 to {bits - 1}; take one of "
                             "these")
        return None if as_bytes(made).tobytes() == as_bytes(out).tobytes() else made


class FaultPlan:
    """Faults of one cluster, by their texts.

    ``waiting`` are those that have not struck; a run that ends with one raises NotStruckError. ``struck`` are the rows
    of the others.
    """

    def __init__(self, *texts: str) -> None:
        self.faults = tuple(map(Fault.of, texts))
        self.waiting, self.struck = list(self.faults), list[InjectedFault]()

    def rest(self) -> "FaultPlan":
        """The plan of a run that goes on on other ranks: what waits there and what strikes is this one's too."""
        rest = FaultPlan()
        rest.faults, rest.waiting, rest.struck = tuple(self.waiting), self.waiting, self.struck
        return rest


Plan = FaultPlan  # as one calls it: zs.faults.Plan


@guarded
class FaultyTransport(InProcess):
    """Moves messages hop by hop, with the faults of a plan, and with checksums where asked for.

    A checksum is CRC-32 of a message, its link and its number there, so that one that comes twice is found too. It
    travels with the message as 4 bytes more, which are counted.
    """

    def __init__(self, states: Sequence[RankState], faults: FaultPlan | str | None, checksums: bool) -> None:
        self.plan = faults if isinstance(faults, FaultPlan) else FaultPlan(*(() if faults is None else (faults,)))
        self.states, self.checksums = states, checksums
        if len(self.plan.waiting) < len(self.plan.faults):
            raise ValueError(f"a plan of faults was given to a cluster after {len(self.plan.struck)} had struck in "
                             "another, and each strikes once; make a Plan for each cluster")
        for fault in self.plan.waiting:
            if (most := max(fault.rank, fault.to or 0)) >= len(states):
                raise ValueError(f"the fault {fault.text!r} names rank {most}, and the ranks are 0 to "
                                 f"{len(states) - 1}")

    def begin(self, options: RunOptions) -> None:
        super().begin(replace(options, hop_by_hop=True))
        self.failed, self.first = False, len(self.plan.struck)
        self.dead: dict[int, RankDied] = {}
        self.numbers: Counter[tuple[int, ...]] = Counter()  # of messages, by link
        self.latest: dict[tuple[int, ...], Array] = {}  # of them, by link, where one is to come again
        self.written: Counter[tuple[int, int]] = Counter()  # bytes, by rank and training step
        self.late = {fault.rank for fault in self.plan.faults if fault.kind == "slow" and fault.to is None}
        self.repeats = any(fault.kind == "repeated" for fault in self.plan.waiting)

    def strike(self, kinds: Sequence[str], rank: int, call: Call | None = None, hop: Hop | None = None,
               can: Callable[[Fault], bool] = lambda fault: True) -> Fault | None:
        """The first fault of these kinds that is due at what the rank does now, and ``can`` strike: it has struck."""
        trace = self.states[rank].trace
        for fault in self.plan.waiting:
            if fault.kind in kinds and fault.meets(rank, trace.steps_begun, call, hop) and can(fault):
                row = InjectedFault(fault.text, rank, trace.steps_begun, call, hop, hop.nbytes if hop else fault.nbytes)
                self.plan.waiting.remove(fault)
                self.plan.struck.append(row)
                trace.add(row)
                return fault
        return None

    # -- messages -----------------------------------------------------------------------------------------------------

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Deliveries:
        for delivery in step:
            source, to = link = tuple(key[0][place] for place in (delivery.hop.source, delivery.hop.destination))
            hop = replace(delivery.hop, source=source, destination=to)
            out: Any = delivery.out  # in one process both ends of a message are there
            self.numbers[link] += 1
            if self.strike(("lost",), source, call, hop):
                if call:
                    raise _LostError
                yield delivery._replace(out=None)
                continue
            copy_elements(delivery.sent, out)
            self.strike(("slow",), source, call, hop)
            self._change(OF_SENDER, out, call, hop)
            expected, latest = self._checksum(out, link), self.latest.get(link)
            if self.repeats:
                self.latest[link] = out.reshape(-1).copy()
            fault = self._change(OF_LINK, out, call, hop, latest)
            if self.checksums:
                if fault and fault.kind == "repeated":  # its checksum comes again with it
                    expected = self._checksum(out, link, before=1)
                if expected != (found := self._checksum(out, link)):
                    raise ChecksumError(
                        f"{InjectedFault.place(call, hop)}, was sent with the checksum {expected:08x}, and what "
                        f"arrived has {found:08x}: it was changed, repeated or put in another order on its way. "
                        "Nothing of it is used; go on from a checkpoint, and look at that link")
                delivery = delivery._replace(hop=replace(delivery.hop, nbytes=hop.nbytes + CHECKSUM_NBYTES))
            yield delivery

    def _change(self, kinds: Sequence[str], out: Array, call: Call | None, hop: Hop,
                latest: Array | None = None) -> Fault | None:
        def can(fault: Fault) -> bool:
            if (made := fault.changed(out, latest)) is not None:
                out[...] = made.reshape(out.shape)
            return made is not None

        return self.strike(kinds, hop.source, call, hop, can)

    def _checksum(self, out: Array, link: tuple[int, ...], before: int = 0) -> int:
        return crc32(as_bytes(out).data, crc32(f"{link} {self.numbers[link] - before}".encode())) * self.checksums

    def collective(self, parts: Sequence[PendingCall]) -> Deliveries:
        """A call of which a message is lost ends on no rank."""
        with suppress(_LostError):
            yield from super().collective(parts)

    def seen(self, key: GroupKey, delivery: Delivery) -> Array:
        return np.empty(0) if delivery.out is None else super().seen(key, delivery)

    # -- ranks and their files ----------------------------------------------------------------------------------------

    def issued(self, rank: int, me: Pending) -> None:
        call = me.call if isinstance(me, PendingCall) else None
        self.strike(("slow",), rank, call)
        if self.strike(("dies",), rank, call):
            self.dead[rank] = RankDied(rank, self.states[rank].trace.steps_begun)
        if rank in self.dead:  # also where the program has caught it, and asks again
            raise self.dead[rank]
        WRITER.set(partial(self._write, rank))  # in the rank's own context: what it writes from here on

    def _write(self, rank: int, file: Any, block: memoryview) -> int:
        moment = rank, self.states[rank].trace.steps_begun
        before = self.written[moment]
        self.written[moment] += len(block)

        def kept(fault: Fault) -> bytes:
            return bytes(block[:max(0, fault.nbytes - before)])

        if fault := self.strike(("disk_full",), rank, can=lambda fault: kept(fault) != block):
            file.write(kept(fault))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        def written(fault: Fault) -> bytes:
            return kept(fault).ljust(len(block), b"\0")

        if fault := self.strike(("partial_write",), rank, can=lambda fault: written(fault) != block):
            block = memoryview(written(fault))
        return int(file.write(block))

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Says in notes which faults of the plan have struck in the run that fails."""
        self.failed = True
        error = sys.exception()
        assert error is not None, "a run is given up where an exception is handled"
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
