"""A file of programs, as a reader would write one; the tests run it from the command line."""

import socket
import time

import numpy as np

import zerosim as zs


def train(rank, stage=3, compute="bf16", steps=2):
    """Every state of a small GPT after some steps."""
    from tests.ranks.programs import gpt

    return gpt(rank, stage, compute, steps=steps)


def sums(rank):
    """The sum of the ranks' numbers."""
    return rank.all_reduce(np.array([rank.index + 1.0])).tolist()


def stumbles(rank):
    """Rank 1 raises, while the others wait for it."""
    if rank.index == 1:
        raise KeyError("no such thing")
    rank.barrier()


def ends(rank, by):
    """Rank 1 ends the run by what is no error."""
    if rank.index == 1:
        raise {"interrupt": KeyboardInterrupt, "exit": SystemExit(3)}[by]
    rank.barrier()


class Unseen:
    """What cannot be shown."""

    def __repr__(self):
        raise LookupError("nothing to see")


def shows_nothing(rank):
    """Rank 1 returns what cannot be shown, and the others a list that contains itself."""
    endless = []
    endless.append(endless)
    return Unseen() if rank.index == 1 else endless


def misses_a_native_sum(rank):
    """Rank 1 raises, while the others are in a collective of MPI's own that cannot be given up."""
    begun = np.ones(1)
    if rank.index == 1:
        rank.recv(begun, 0)  # from here on rank 0 is in it, however busy the machine is
        raise KeyError("no such thing")
    work = rank.all_reduce(np.ones(4), algorithm="native", async_op=True)
    if rank.index == 0:
        rank.send(begun, 1)
    work.wait()


def computes(rank):
    """Rank 1 raises; the others never come back from what they do."""
    if rank.index == 1:
        raise KeyError("no such thing")
    time.sleep(600)


def waits_forever(rank, address):
    """All ranks go round and round, once they have a line to whoever has started them."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        while True:
            rank.barrier()


if __name__ == "__main__":
    cluster = zs.connect()
    found = cluster.gather(cluster.run(sums)[cluster.index])
    if cluster.index == 0:
        print(found, flush=True)
    cluster.run(stumbles)
