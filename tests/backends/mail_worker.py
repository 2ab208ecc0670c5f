"""What ranks with a TCPMail do, and a process that does it: ``python -m tests.backends.mail_worker SCENARIO``.

What the process finds it prints as one line of JSON.
"""

import json
import os
import sys
import time
from typing import Any

from zerosim.backends.processes.notes import Failed, Settled
from zerosim.backends.processes.tcp import TCPMail, job_of
from zerosim.ranks.errors import RemoteError


def heard(mail: TCPMail, count: int, seconds: float = 600.0) -> list[Any]:
    """So many notes, in order of arrival."""
    found: list[Any] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += mail.arrived()
        time.sleep(0.001)
    return found


def notes(mail: TCPMail) -> Any:
    """Everyone tells everyone 100 things, and rank r tells rank r+1 one thing more."""
    for number in range(100):
        mail.post((mail.index, number))
    mail.post("to you alone", (mail.index + 1) % mail.size)
    found = heard(mail, 100 * (mail.size - 1) + (mail.size > 1))
    by_rank = {rank: [note for source, note in found if source == rank] for rank in range(mail.size)}
    values = [mail.everyone([mail.index] * 3), mail.everyone(b"x" * 2_000_000 * mail.index)]
    mail.close()
    return {"in order": all([n for n in said if n != "to you alone"] == [(rank, i) for i in range(100)]
                            for rank, said in by_rank.items() if rank != mail.index),
            "alone": [rank for rank, said in by_rank.items() if "to you alone" in said],
            "values": values[0], "lengths": [len(value) for value in values[1]]}


def dies(mail: TCPMail) -> Any:
    """All tell each other something; then the last rank is killed, and the others wait for its value."""
    told = mail.everyone([mail.index] * 3)
    if mail.index == mail.size - 1:
        os.kill(os.getpid(), 9)
    (source, note), (_, last) = heard(mail, 2)
    assert isinstance(note, Failed)
    assert isinstance(last, Settled)
    try:
        mail.everyone(None)
    except RemoteError as error:
        return [told, source, note.summary, str(error)]
    return None


def aborts(mail: TCPMail) -> Any:
    """Rank 1 ends the job, while the others wait for something that will not come."""
    if mail.index == 1:
        heard(mail, mail.size - 1)
        mail.abort()
    mail.post("ready", 1)
    return mail.everyone(None)


def main(scenario: str) -> None:
    """Prints what came of it."""
    job = job_of(os.environ)
    assert job is not None
    print(json.dumps(globals()[scenario](TCPMail(job.rank, job.ranks, job.address, job.key))))


if __name__ == "__main__":
    main(*sys.argv[1:])
