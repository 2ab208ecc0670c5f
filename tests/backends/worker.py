"""One process of a job that serves the tests: runs programs as it is told, until the tests hang up.

Started as ``mpiexec -n N python -m mpi4py -m tests.backends.worker PORT KEY``, or N times with torchrun's variables.
"""

import os
import select
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Client, Connection
from threading import Event, Thread
from typing import Any

import zerosim as zs
from tests.backends.worlds import Outcome, Task, on_one_card, outcomes_of
from tests.support import ask
from zerosim.backends.cupy.cluster import gpu_of
from zerosim.backends.processes import cluster
from zerosim.backends.processes.cluster import ProcessCluster
from zerosim.backends.processes.control import Failed

MINUTES = 600.0  # instead of seconds, after which a busy machine would be taken for a rank that does not answer


def main(port: str, key: str) -> None:
    """Serves tasks."""
    cluster.CAUSE_SECONDS = cluster.DRAIN_SECONDS = cluster.FAREWELL_SECONDS = MINUTES
    cluster.SPINS = 20  # more ranks than cores: who waits would take time from those who compute
    clusters: dict[Any, ProcessCluster] = {}
    index = int(os.environ["RANK"]) if "RANK" in os.environ else world().rank
    with Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key)) as line, ExitStack() as in_place:
        line.send(index)
        busy = Event()
        Thread(target=end_with_the_tests, args=(line, busy), daemon=True).start()
        while True:
            try:
                task = line.recv()
            except EOFError:
                break
            if isinstance(task, tuple):
                line.send(ask(*(word.replace("{rank}", str(index)) for word in task), columns=200))
                continue
            kind = task.backend, task.on_gpus, task.ranks, *sorted(task.options.items())
            if kind not in clusters:
                clusters[kind] = connected(task, index, in_place)
            busy.set()
            found = outcome(clusters[kind], task)
            busy.clear()
            line.send(found)
        for each in clusters.values():
            each.close()


def end_with_the_tests(line: Connection, busy: Event) -> None:
    """Ends this process when the tests are gone in the midst of a program, whose ranks may wait for ever."""
    gone = select.poll()
    gone.register(line.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
    gone.poll()
    if busy.is_set():
        os._exit(1)


def connected(task: Task, index: int, in_place: ExitStack) -> ProcessCluster:
    """The cluster of the job's first processes, over a communicator of their own; over TCP of all."""
    if task.doubled_gpus and "cupy" not in sys.modules:
        from tests.backends import doubles

        in_place.enter_context(doubles.installed(task.doubled_gpus))
    if task.backend == "mpi":
        from zerosim.backends.mpi import MPICluster

        return MPICluster(first(task.ranks), gpu_of(index, -1) if task.on_gpus else None, **task.options)
    from zerosim.backends.nccl import transport
    from zerosim.backends.nccl.cluster import NCCLProcessCluster

    transport.FAREWELL_SECONDS = MINUTES
    if task.options.get("share_devices"):
        os.environ.update(on_one_card(index))  # NCCL reads it when it is first used
    if "RANK" in os.environ:
        return zs.connect(task.backend, **task.options)
    from zerosim.backends.mpi import MPIChannel

    return NCCLProcessCluster(MPIChannel(first(task.ranks)), local_rank=index, **task.options)


def world() -> Any:
    """All of MPI's processes."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@cache
def first(ranks: int) -> Any:
    """A communicator of the first processes; only they make it."""
    return world().Create_group(world().Get_group().Incl(list(range(ranks))))


def outcome(cluster: ProcessCluster, task: Task) -> Outcome:
    """What came of it here; an exception that cannot travel is told by its type and text."""
    cluster.memory[0].reset_peak()
    (found,) = outcomes_of(cluster, task.program, *task.args)
    cluster.runs.clear()
    if found.error is not None and (told := Failed.of(found.error, cluster.index)).args is None:
        return replace(found, error=zs.RemoteError(told.summary))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
