"""A cluster of which one rank runs in this process: the same program, the others elsewhere.

Legend: N ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, overload

from zerosim.ranks.cluster import Cluster, Results
from zerosim.ranks.interrupts import Interrupts
from zerosim.ranks.lockstep import Watch
from zerosim.ranks.processes.carrier import Carrier
from zerosim.ranks.processes.mail import Mail
from zerosim.ranks.processes.transport import ProcessTransport

PATIENCE_SECONDS = 5.0


class OwnResult(Results):
    """What the program returned on this process' rank, at that rank's index; the others' are in other processes."""

    def __init__(self, index: int, ranks: int, value: Any) -> None:
        super().__init__((value,))
        self._index, self._ranks = index, ranks

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if index not in (self._index, self._index - self._ranks):
            self._elsewhere(index)
        return self._values[0]

    def __iter__(self) -> Iterator[Any]:
        # A sequence's own way stops at the first IndexError, and would seem to have gone through all results.
        for index in range(self._ranks):
            if index != self._index:
                self._elsewhere(index)
        return iter(self._values)

    def __len__(self) -> int:
        return self._ranks

    def __repr__(self) -> str:
        return f"rank {self._index}: {self._values[0]!r}"

    def _elsewhere(self, index: object) -> NoReturn:
        asked = f"rank {index}" if isinstance(index, int) and -self._ranks <= index < self._ranks else repr(index)
        raise IndexError(f"results[{index!r}] asks for the result of {asked}, but this process ran rank {self._index} "
                         f"of {self._ranks} and has its result alone: results[{self._index}]. "
                         "cluster.gather(value) gives every process the values of all")


class ProcessCluster(Cluster):
    """N processes, each of which runs one rank: ``ranks``, ``trace`` and ``memory`` have this process' alone.

    Every process makes the cluster and calls ``run`` with the same program. ``debug=True`` also checks before each
    collective and each message that all who take part mean the same call, shape and dtype. Ranks that have waited for
    ``patience_seconds`` tell each other for what, so that a deadlock is explained.
    """

    def __init__(self, mail: Mail, *, capacity_nbytes: int | None, debug: bool, blas_threads: int,
                 patience_seconds: float) -> None:
        if not patience_seconds > 0:
            raise ValueError(f"patience_seconds={patience_seconds!r} must be above 0: how long a rank waits before it "
                             "tells the others for what")
        self._mail, self.patience_seconds = mail, patience_seconds
        super().__init__(mail.size, capacity_nbytes=capacity_nbytes, debug=debug, blas_threads=blas_threads)

    @property
    def index(self) -> int:
        """The index of the rank that this process runs."""
        return self._mail.index

    @property
    def world(self) -> str:
        """Where the ranks are, in words."""
        return f"each a process, over {self._carrier().library}"

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order, on each of them; any picklable values. Every process calls it."""
        return self._mail.everyone(value)

    def close(self) -> None:
        """Gives back what the library keeps for this cluster; it runs nothing afterwards. Every process calls it."""
        self._mail.close()

    def _carrier(self) -> Carrier:
        raise NotImplementedError

    def _present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return (self._mail.index,)

    def _driver(self, *, hop_by_hop: bool, watch: Watch | None, interrupts: Interrupts) -> ProcessTransport:
        if watch:
            raise ValueError("stepping through a run shows all ranks between two hops, but the others of this one are "
                             "in other processes; step through the same program on zs.Cluster(ranks)")
        return ProcessTransport(self._mail, self._carrier(), interrupts, debug=self.debug,
                                patience_seconds=self.patience_seconds)

    def _results(self, values: Sequence[Any]) -> Results:
        return OwnResult(self.index, self._mail.size, values[0])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.index} of {self._mail.size}, {len(self.runs)} runs>"
