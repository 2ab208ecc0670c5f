"""The machine on which a recording is replayed, what of it is slow, and its prices of rows and messages in seconds.

Legend: R rows, α seconds of latency, β bytes per second.

A device computes for max(flops / flops per second, nbytes / memory bytes per second); a message takes α + n/β, and so
does a transfer between a device and its host, on the link between the two.
Sources: Williams, Waterman & Patterson 2009 (the roofline); Hockney 1994 (the message).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.planning.cuts import checked_count
from zerosim.planning.hardware import Device, Link, Network, positive
from zerosim.planning.recording import COMPUTE, RecordedProgram

Seconds = Any  # float; a reference in fractions goes through the same code
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A straggler: from an instant on, all that the rank computes takes ``factor`` times as long."""

    rank: int
    factor: float
    from_seconds: float = 0.0

    def __post_init__(self) -> None:
        checked_count("rank", self.rank, 0)
        where = f"the slow rank {self.rank}"
        positive(where, "factor", self.factor)
        positive(where, "from_seconds", self.from_seconds, or_zero=True)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link, one way, on which every message takes ``factor`` times as long."""

    source: int
    destination: int
    factor: float

    def __post_init__(self) -> None:
        for key in ("source", "destination"):
            checked_count(key, getattr(self, key), 0)
        positive(f"the slow link from {self.source} to {self.destination}", "factor", self.factor)


@dataclass(frozen=True, slots=True)
class Machine:
    """N equal devices on a network.

    Arithmetic runs at ``efficiency`` times the device's dense peak in ``format``, or as fast as memory brings its
    operands, whichever is slower (Williams, Waterman & Patterson 2009, the roofline). An efficiency of 1 gives a bound:
    no program is faster. Each device has a ``host_link`` of its own, full duplex, as pcie5: what other devices move,
    and what the host's memory allows, is not in it. Raises ValueError for a format that the device lacks, an efficiency
    outside (0, 1], and a rank or a link that is slow twice.
    """

    device: Device
    network: Network
    format: str = "bf16"
    efficiency: float = 1.0
    slow_ranks: Sequence[SlowRank] = ()
    slow_links: Sequence[SlowLink] = ()
    host_link: Link | None = None

    def __post_init__(self) -> None:
        self.device.flops_per_second_in(self.format)
        if positive("the machine", "efficiency", self.efficiency) > 1:
            raise ValueError(f"the machine: efficiency must be a share of the peak, above 0 and at most 1, got "
                             f"{self.efficiency!r}")
        for kind in ("slow_ranks", "slow_links"):
            object.__setattr__(self, kind, tuple(getattr(self, kind)))
        _check_once("rank", [slow.rank for slow in self.slow_ranks])
        _check_once("link", [(slow.source, slow.destination) for slow in self.slow_links])

    @property
    def peak_flops_per_second(self) -> float:
        """The dense peak of one device in the machine's format."""
        return self.device.flops_per_second_in(self.format)

    @property
    def link_to_host(self) -> Link:
        """The host link; raises ValueError where the machine has none."""
        if self.host_link is None:
            raise ValueError("something is moved to a host or back, and the machine has no link to one; name it, as "
                             "host_link=link(\"pcie5\")")
        return self.host_link

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError for slow ranks and links that a run of N ranks does not have."""
        for slow in self.slow_ranks:
            if slow.rank >= ranks:
                raise ValueError(f"rank {slow.rank} is to be slow, but the run has {ranks} ranks, numbered from 0")
        for link in self.slow_links:
            if max(link.source, link.destination) >= ranks:
                raise ValueError(f"the link from {link.source} to {link.destination} is to be slow, but the run has "
                                 f"{ranks} ranks, numbered from 0")


def _check_once(what: str, found: list[Any]) -> None:
    for one in found:
        if found.count(one) > 1:
            raise ValueError(f"the {what} {one} is slow twice; give it one factor")


# -- prices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of one rank: ``factor`` times slower than nominal from an instant on."""

    factor: Seconds
    from_seconds: Seconds

    def after(self, clock: Any, work: Any) -> Any:
        """The clock when so much work is done that is begun at ``clock``; scalars, or arrays, elementwise."""
        if self.factor == 1:
            return clock + work
        left = self.from_seconds - clock
        fast = np.clip(left, 0, work) if isinstance(work, np.ndarray) else min(max(left, 0), work)
        return (clock + fast) + self.factor * (work - fast)


class Prices:
    """A machine's prices, in float64."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._slow_links = {(slow.source, slow.destination): slow.factor for slow in machine.slow_links}
        self._paces = {slow.rank: Pace(slow.factor, slow.from_seconds) for slow in machine.slow_ranks}

    def work(self, program: RecordedProgram) -> Array:
        """Nominal seconds of arithmetic before each row and after the last, (R + 1,), rising from 0."""
        machine, seconds = self.machine, np.zeros(len(program) + 1)
        rows = program.where(COMPUTE)
        np.maximum(program.first[rows] / (machine.peak_flops_per_second * machine.efficiency),
                   program.second[rows] / machine.device.memory_bytes_per_second, out=(cost := np.empty(len(rows))))
        seconds[rows + 1] = cost
        return np.cumsum(seconds, out=seconds)

    def message(self, source: int, destination: int, nbytes: int) -> Seconds:
        """Seconds of one message; 0 from a rank to itself, which leaves no device."""
        if source == destination:
            return 0
        return self.messages(*(np.array([number]) for number in (source, destination, nbytes))).tolist()[0]

    def messages(self, sources: Array, destinations: Array, nbytes: Array) -> Array:
        """Seconds of each message, (messages,), between ranks of two different devices."""
        network = self.machine.network
        seconds: Array = network.inside.seconds(nbytes)
        if network.between is not None:
            seconds = np.where(network.crosses(sources, destinations), network.between.seconds(nbytes), seconds)
        for (source, destination), factor in self._slow_links.items():
            seconds[(sources == source) & (destinations == destination)] *= factor
        return seconds

    def transfer(self, nbytes: int) -> float:
        """Seconds of one transfer between a device and its host, either way."""
        seconds: float = self.machine.link_to_host.seconds(nbytes)
        return seconds

    def pace(self, rank: int) -> Pace:
        """The pace at which a rank computes."""
        return self._paces.get(rank, Pace(1, 0))
