"""A program without end, for a test that interrupts it: ``python -m tests.ranks.endless``.

It says READY when it runs, and STOPPED for every rank that was stopped; then it shows that the cluster works again.
"""

import signal
import sys

import numpy as np

import zerosim as zs


def endless(rank: zs.Rank, told: list[int]) -> None:
    """Collectives for ever."""
    try:
        for turn in range(sys.maxsize):
            rank.all_reduce(np.full(1000, rank.index, np.float32), algorithm="naive")
            if turn == 3 and rank.index == 0:
                print("READY", flush=True)
    finally:
        told.append(rank.index)


def main() -> int:
    """Runs until it is interrupted; 0 when everything was stopped and works again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell began it in the background
    cluster, told = zs.Cluster(4), []
    try:
        cluster.run(endless, told)
    except KeyboardInterrupt as interrupt:
        print("STOPPED", sorted(told), getattr(interrupt, "__notes__", []), cluster.memory.now_nbytes, flush=True)
        print("AGAIN", cluster.run(lambda rank: rank.all_reduce(np.array([rank.index])))[3].tolist(), flush=True)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
