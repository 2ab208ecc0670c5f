"""What all of a rank's groups share: its memory, its trace, its transport, its counters, its open works."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.call import Group
from zerosim.ranks.entry import Transport
from zerosim.ranks.errors import PendingWorkError, RankUseError
from zerosim.ranks.interrupts import guarded
from zerosim.ranks.memory import Memory
from zerosim.ranks.trace import Trace, nothing_follows
from zerosim.ranks.work import Work


@guarded
@dataclass(slots=True)
class RankState:
    """One rank of a cluster, behind the handles that programs see."""

    index: int
    memory: Memory
    kernels: NumpyKernels
    trace: Trace = field(default_factory=Trace)
    transport: Transport | None = None
    calls: Counter[Group] = field(default_factory=Counter)
    pending: list[Work] = field(default_factory=list)
    doubts: list[Callable[[], None]] = field(default_factory=list)  # checks that the end of the program makes

    @property
    def xp(self) -> Any:
        """The array module of what the rank holds."""
        return self.kernels.xp

    def begin(self, transport: Transport) -> None:
        """A run begins: a new trace, fresh counters; memory lives on."""
        self.transport, self.trace = transport, Trace(
            held_at_start=self.memory.now_nbytes_by_kind, after_compute=transport.progress)
        self.memory.trace = self.trace
        self.calls.clear()
        self.pending.clear()
        self.doubts.clear()

    def end(self) -> None:
        """The run is over."""
        self.transport, self.trace.after_compute = None, nothing_follows
        self.pending.clear()
        self.doubts.clear()

    def in_use(self) -> Transport:
        """The transport, if it is this rank's own program that asks.

        Raises RankUseError otherwise.
        """
        if self.transport is None:
            raise RankUseError(f"rank {self.index} is in no run; "
                               "call it inside the program that Cluster.run(program) runs")
        self.transport.check_use(self.index)
        return self.transport

    def check_same_run(self, transport: Transport, title: str) -> None:
        """Raises RankUseError unless it is the program that issued a work, in the same run, that waits for it."""
        if self.in_use() is not transport:
            raise RankUseError(f"rank {self.index} waited for {title}, which was issued in an earlier run and ended "
                               "with it; wait in the run that issues")

    def check_all_waited(self) -> None:
        """Raises PendingWorkError when the program ended with works that nobody waited for, or whose input changed."""
        for check in self.doubts:
            check()
        if self.pending:
            listed = "; ".join(f"{work.title}, issued at {work.where}" for work in self.pending)
            raise PendingWorkError(f"rank {self.index} ended its program with {len(self.pending)} asynchronous "
                                   f"collective(s) that were never waited for: {listed}. Call work.wait() on each")
