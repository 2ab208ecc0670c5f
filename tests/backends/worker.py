"""One process of a world of processes: runs programs as it is told, until it is told nothing more.

Started as ``mpiexec -n N python -m mpi4py -m tests.backends.worker HOST PORT KEY``; rank 0 hears from the tests and
tells the others.
"""

import sys
import time
from multiprocessing.connection import Client, Connection
from typing import Any

import zerosim as zs
from tests.backends.worlds import Command, Outcome, Said, Task, notes
from zerosim.backends.processes.notes import Channel, Failed
from zerosim.backends.processes.transport import ProcessCluster


def main(host: str, port: str, key: str, backend: str) -> None:
    """Serves tasks until the tests hang up."""
    clusters: dict[tuple[Any, ...], ProcessCluster] = {}
    first = zs.connect(backend)
    caller = Client((host, int(port)), authkey=bytes.fromhex(key)) if first.index == 0 else None
    while (task := _next_task(first._channel, caller)) is not None:
        if isinstance(task, Command):
            _report(Said.of([word.replace("{rank}", str(first.index)) for word in task.words]), first._channel, caller)
        else:
            options = tuple(sorted(task.options.items()))
            if options not in clusters:
                clusters[options] = zs.connect(backend, **task.options)
            _report(_outcome(clusters[options], task), first._channel, caller)
    for cluster in (*clusters.values(), first):
        cluster.close()


def _next_task(channel: Channel, caller: "Connection | None") -> Task | Command | None:
    """What rank 0 hears, and tells the others; they look for it now and then, and leave the cores to other tests."""
    if caller is None:
        task: Task | Command | None = _notes(channel)[0][1]
        return task
    try:
        task = caller.recv()
    except EOFError:
        task = None
    channel.post(task)
    return task


def _report(found: Outcome | Said, channel: Channel, caller: "Connection | None") -> None:
    """Rank 0 tells the tests what came of it on every rank; the others tell rank 0, and wait for nobody."""
    if caller is None:
        channel.post(found, 0)
        return
    reports = {0: found}
    while len(reports) < channel.size:
        reports.update(_notes(channel))
    caller.send([reports[rank] for rank in range(channel.size)])


def _notes(channel: Channel) -> list[tuple[int, Any]]:
    """(rank, note) of all that has come. Raises the error of a rank that can no longer be reached."""
    nap_seconds = 0.001
    while not (found := list(channel.arrived())):
        time.sleep(nap_seconds)
        nap_seconds = min(1.1 * nap_seconds, 0.1)  # a world that nobody asks for long costs nothing
    for rank, note in found:
        if isinstance(note, Failed):
            raise note.error(rank, channel.size)
    return found


def _outcome(cluster: ProcessCluster, task: Task) -> Outcome:
    cluster.memory[0].reset_peak()
    try:
        result = cluster.run(task.program, *task.args)[cluster.index]
    except Exception as error:
        told = Failed.of(error)
        travels = error if told.pickled else zs.RemoteError(told.summary)
        return Outcome(None, 0, 0, travels, notes(error), cluster.memory.now_nbytes[0])
    outcome = Outcome(result, cluster.trace.sent_nbytes()[0], cluster.memory.peak_nbytes[0], None, (), 0)
    cluster.runs.clear()
    return outcome


if __name__ == "__main__":
    main(*sys.argv[1:])
