"""What ranks with a TCPChannel do, and a process that does it: ``python -m tests.backends.channel_worker SCENARIO``.

What the process finds it prints as one line of JSON.
"""

import json
import os
import sys
import time
from typing import Any

import zerosim as zs
from zerosim.backends.processes.notes import Drained, Failed
from zerosim.backends.processes.tcp import TCPChannel, job_of


def heard(channel: TCPChannel, count: int, seconds: float = 600.0) -> list[Any]:
    """So many notes, in order of arrival."""
    found: list[Any] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += channel.arrived()
        time.sleep(0.001)
    return found


def notes(channel: TCPChannel) -> Any:
    """Everyone tells everyone 100 things, and rank r tells rank r+1 one thing more."""
    for number in range(100):
        channel.post((channel.index, number))
    channel.post("to you alone", (channel.index + 1) % channel.size)
    found = heard(channel, 100 * (channel.size - 1) + (channel.size > 1))
    by_rank = {rank: [note for source, note in found if source == rank] for rank in range(channel.size)}
    values = [channel.everyone([channel.index] * 3), channel.everyone(b"x" * 2_000_000 * channel.index)]
    channel.close()
    return {"in order": all([n for n in said if n != "to you alone"] == [(rank, i) for i in range(100)]
                            for rank, said in by_rank.items() if rank != channel.index),
            "alone": [rank for rank, said in by_rank.items() if "to you alone" in said],
            "values": values[0], "lengths": [len(value) for value in values[1]]}


def dies(channel: TCPChannel) -> Any:
    """All tell each other something; then the last rank is killed, and the others wait for its value."""
    told = channel.everyone([channel.index] * 3)
    if channel.index == channel.size - 1:
        os.kill(os.getpid(), 9)
    (source, note), (_, last) = heard(channel, 2)
    assert isinstance(note, Failed)
    assert isinstance(last, Drained)
    try:
        channel.everyone(None)
    except zs.RemoteError as error:
        return [told, source, note.summary, str(error)]
    return None


def aborts(channel: TCPChannel) -> Any:
    """Rank 1 ends the job, while the others wait for something that will not come."""
    if channel.index == 1:
        heard(channel, channel.size - 1)
        channel.abort()
    channel.post("ready", 1)
    return channel.everyone(None)


def main(scenario: str) -> None:
    """Prints what came of it."""
    job = job_of(os.environ)
    assert job is not None
    print(json.dumps(globals()[scenario](TCPChannel(job.rank, job.ranks, job.address, job.key))))


if __name__ == "__main__":
    main(*sys.argv[1:])
