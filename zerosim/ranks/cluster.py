"""A cluster of N ranks in this process, and the runs of programs on it.

`Cluster.run` gives each rank's program to a backend, the hub, and drives it to its end under one BLAS thread. Where
arrays have no data (`NullCluster`), one rank may stand for all, and a backend without partners serves it.

Legend: N ranks.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

from zerosim.numerics.arrays import Integers
from zerosim.numerics.checks import is_count, require_count
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.call import Backend
from zerosim.ranks.errors import RankUseError
from zerosim.ranks.faults import FaultPlan, FaultyTransport
from zerosim.ranks.hub import Hub, InProcess, RunEvent, RunOptions, Transport, Watch
from zerosim.ranks.memory import Memories, Memory
from zerosim.ranks.process import Interrupts, blas_limited_to, guarded, patient_interrupts
from zerosim.ranks.rank import Rank, RankState
from zerosim.ranks.schedules import Seeded
from zerosim.ranks.trace import Traces
from zerosim.ranks.workers import cores
from zerosim.shown import ShownRuns

RankProgram = Callable[..., Any]


@guarded
class Results(Sequence[Any]):
    """The results of the program, in rank order."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return "\n".join(f"rank {index}: {value!r}" for index, value in enumerate(self._values))


@guarded
@dataclass(frozen=True, slots=True)
class Run:
    """One finished run: its results and its trace, both in rank order."""

    results: Results
    trace: Traces


class Processor:
    """The place of arrays, and the arithmetic on them: of NumPy's, in the memory of this process."""

    def kernels(self, count: int) -> list[NumpyKernels]:
        """The arithmetic of so many ranks; ranks of one processor share it, whose room is each thread's own."""
        return [NumpyKernels()] * count

    def scope(self) -> AbstractContextManager[Any]:
        """Ends what ranks have selected on their devices with the ``with`` block; here they have none."""
        return nullcontext()


# -- The cluster -----------------------------------------------------------------------------------------------------

Events = Generator[RunEvent, None, None]


@guarded
class Cluster(ShownRuns):
    """N ranks in this process, whose programs run one at a time: same program, same bits, same trace.

    ``capacity_nbytes`` is what each rank may hold (None: no limit). ``debug`` fills new, freed and padding memory with
    NaN, carries out every collective hop by hop, and refuses a result that is dropped. ``seed`` 0 runs ranks in their
    order; any other seed tries another legal order, which must change no result. Ranks, their memory and what it holds
    live as long as the cluster, and so do the results of its ``runs``: ``runs.clear()`` lets them go. ``trace_rows``
    bounds the trace of a long run: each rank keeps at least so many of its latest rows, and less than twice as many
    (None: all); what needs all of them, as a recording does, raises ValueError then, and bytes sent and held stay
    exact. ``faults``, a `zerosim.faults.Plan` or the text of one fault, injects them; ``checksums`` finds messages that
    do not arrive as they were sent, for 4 bytes each. ``workers`` threads compute what ranks hand to `Rank.compute`, as
    an engine does, and large collectives; by default one for each core, and one in debug mode and with several
    ``blas_threads``. A run that is stepped through, and one under another seed, computes on one whatever is asked.
    Their number changes no bit, no trace and no account. A program that catches
    BaseException and goes on without end cannot be stopped.
    """

    representative: int | None = None  # the one rank that runs and stands for all, where that is so
    _where = ""  # what the cluster adds when it names itself

    def __init__(self, ranks: int, *, capacity_nbytes: int | None = None, debug: bool = False, seed: int = 0,
                 blas_threads: int = 1, trace_rows: int | None = None, faults: FaultPlan | str | None = None,
                 checksums: bool = False, workers: int | None = None, processor: Processor | None = None,
                 transport: Transport | None = None) -> None:
        """``processor`` has the arrays of all ranks that run here, ``transport`` moves them to other ranks."""
        if not is_count(ranks) or ranks < 1:
            raise ValueError(f"a cluster needs at least one rank, found ranks={ranks!r}; pass a whole number from 1 on")
        require_count("capacity_nbytes", capacity_nbytes, 0, "a number of bytes", none="for no limit")
        if not is_count(seed):
            raise ValueError(f"seed={seed!r} must be a whole number; 0 runs the ranks in their order")
        require_count("trace_rows", trace_rows, 1, "a number of rows", none="to keep all")
        require_count("workers", workers, 1, "a number of threads", none="for one for each core that may be used")
        alone = debug or seed or blas_threads != 1 or processor or transport
        self.workers = workers or (1 if alone else min(ranks, cores()))
        self.debug, self.seed, self.blas_threads = debug, seed, blas_threads
        self._processor = processor or Processor()
        group = Integers(range(ranks))
        present = self._present(group)
        kernels = self._processor.kernels(len(present))
        self.kernels = kernels[0]
        self.states = [RankState(index, Memory(f"rank {index}", its, capacity_nbytes, debug), its, trace_rows)
                       for index, its in zip(present, kernels, strict=True)]
        self._transport = transport or (InProcess() if faults is None and not checksums else
                                        FaultyTransport(self.states, faults, checksums))
        self.ranks = [Rank(state, group) for state in self.states]
        self.runs: list[Run] = []
        self.backend: Backend | None = None  # of the run under way
        self._running: int | None = None

    def _present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that run here."""
        return group

    def _backend(self, options: RunOptions) -> Backend:
        """The way between the ranks in one run."""
        return Hub(len(self.ranks), self._transport, options, Seeded(self.seed) if self.seed else None)

    def _results(self, values: Sequence[Any]) -> Results:
        return Results(values)

    def device_scope(self) -> AbstractContextManager[Any]:
        """Ends what ranks have selected on their devices with the ``with`` block."""
        return self._processor.scope()

    @property
    def world(self) -> str:
        """The place of the ranks, in words."""
        return self._transport.world

    # -- runs ---------------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Traces:
        """The traces of the last run, in rank order, of one that failed too; ``runs`` are those that came to their end.
        """
        return Traces(state.trace for state in self.states)

    @property
    def memory(self) -> Memories:
        """The memories of all ranks, in rank order."""
        return Memories(state.memory for state in self.states)

    def run(self, program: RankProgram, *args: Any) -> Results:
        """Runs ``program(rank, *args)`` on every rank and returns what each returned.

        An exception of a rank stops all others and comes out with the rank named in a note; MismatchError and
        DeadlockError say who was where. After any of them the cluster works again.
        """
        with patient_interrupts() as interrupts:
            for _ in self.drive(program, args, interrupts=interrupts):
                pass
        return self.runs[-1].results

    def events(self, program: RankProgram, *args: Any, hop_by_hop: bool = False) -> Events:
        """Like ``run``, but yields a RunEvent after every hop made; ``hop_by_hop`` makes those of the ring too."""
        return self.drive(program, args, hop_by_hop=hop_by_hop, watch="hop")

    def drive(self, program: RankProgram, args: tuple[Any, ...], *, hop_by_hop: bool = False,
              watch: Watch | None = None, interrupts: Interrupts | None = None) -> Events:
        """The events of a run, which goes on when the next one is asked for; see `run`, `events`, `step_through`."""
        if not callable(program):
            raise ValueError(f"run() takes a function of a rank, found {program!r}; "
                             "write run(program), not run(program())")
        self._enter()
        backend: Backend | None = None
        handled: BaseException | None = None  # not this run's, and so left as it is
        try:
            options = RunOptions(hop_by_hop or self.debug, watch, interrupts or Interrupts(),
                                 1 if watch else self.workers)
            self.backend = backend = self._backend(options)
            for state in self.states:
                state.begin(backend)
            programs = [functools.partial(_body, rank, program, args) for rank in self.ranks]
            with closing(backend.drive(programs)) as steps:
                while True:
                    handled = sys.exc_info()[1]  # by whoever asks for the next event
                    if (event := self._next(steps)) is None:
                        break
                    try:
                        yield event
                    except BaseException as theirs:  # closed, perhaps while they handle an error, or thrown into
                        handled = theirs
                        raise
            self.runs.append(Run(self._results(backend.results), self.trace))
        except BaseException as error:
            if backend is not None:
                backend.release(error, handled)
            raise
        finally:
            for state in self.states:
                state.end()
            self._running = self.backend = handled = None

    def _next(self, steps: Events) -> RunEvent | None:
        """Runs on to the next event; the caller's own BLAS threads are limited only meanwhile."""
        with blas_limited_to(self.blas_threads), self.device_scope():
            return next(steps, None)

    def _enter(self) -> None:
        if self._running is not None:
            here = ("by one of its ranks, or in the midst of a step_through," if self._running == threading.get_ident()
                    else "by another thread")
            raise RankUseError(f"this cluster is running a program already, and was asked {here} to run another; "
                               "make a second Cluster for nested runs, or wait until the first has ended")
        self._running = threading.get_ident()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.ranks[0].size} ranks{self._where}, {len(self.runs)} runs>"


@guarded
def _body(rank: Rank, program: RankProgram, args: tuple[Any, ...]) -> Any:
    result = program(rank, *args)
    if inspect.isgenerator(result) or inspect.iscoroutine(result):
        result.close()
        raise ValueError(
            f"the program made a {type(result).__name__} and ran nothing; a rank program is plain blocking "
            "code, without yield or async"
        )
    rank._state.check_all_waited()
    return result
