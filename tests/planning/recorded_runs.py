"""Small runs of the real engine and of programs of their own, recorded; and a made-up machine to replay them on.

A flop takes 1 ns, a message 1 µs and 1 ns for each byte, a transfer to the host or back 2 µs and 2 ns for each byte,
one to the disk or back 5 µs and 5 ns for each byte.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

import zerosim as zs
from tests.ranks.asking import allowed, ask
from zerosim.planning import Device, Link, Machine, Network, Recording, record
from zerosim.planning import recording as recordings
from zerosim.ranks import TransferWait, option_rows

WORLDS = (1, 2, 3, 4, 5, 8)
OPTIONS = {"plain": {}, "overlap": {"overlap": True}, "prefetch": {"prefetch": 2},
          "both": {"overlap": True, "prefetch": 1}}
# Units that no N > 1 divides: padding is not updated, so rank 0 computes most. And, without biases, units of one matrix
# that every N divides: all ranks do the same.
WIDTHS, EVEN = (6, 9, 7, 4), (8, 15, 16)
ROWS, MICRO_BATCHES = 3, 2


def device(flops_per_second: float = 1e9, memory_bytes_per_second: float = 1e9) -> Device:
    return Device("made up", 10**9, 10**9, memory_bytes_per_second, {"fp16": flops_per_second}, "made up", "today")


FAST, SLOW = Link("fast", 1e9, 1e-6, "made up", "today"), Link("slow", 1e8, 1e-5, "made up", "today")
HOST = Link("host", 5e8, 2e-6, "made up", "today")
MACHINE = Machine(device(), Network(FAST), "fp16")
DISK = Link("disk", 2e8, 5e-6, "made up", "today")
WITH_HOST = replace(MACHINE, host_link=HOST, disk_link=DISK)


@cache
def traces(ranks: int, stage: int = 3, options: str = "both", layout: str = "per_unit",
           widths: tuple[int, ...] = WIDTHS, cluster: type[zs.Cluster] = zs.Cluster) -> tuple[zs.ranks.Trace, ...]:
    """The traces of a run of one step, in a span called "step"."""

    def program(rank: zs.Rank) -> None:
        model = zs.models.MLP(widths, bias=widths != EVEN, seed=3)
        engine = zs.Engine(rank, model, zs.optim.Adam(), stage=stage, policy=zs.Policy("fp16"), layout=layout,
                           **OPTIONS[options])
        with rank.trace.span("step"):
            engine.step([tuple(rank.xp.zeros((ROWS, width)) for width in (widths[0], widths[-1]))
                         for _ in range(MICRO_BATCHES)])

    return traces_of(ranks, program, cluster)


@cache
def step(ranks: int, stage: int = 3, options: str = "both", widths: tuple[int, ...] = WIDTHS) -> Recording:
    """The step of that run, recorded."""
    return record(traces(ranks, stage, options, widths=widths)).inside("step")


def traces_of(ranks: int, program: Any, cluster: type[zs.Cluster] = zs.Cluster) -> tuple[zs.ranks.Trace, ...]:
    """The traces of a program of one's own."""
    running = cluster(ranks)
    running.run(program)
    return running.trace


def recorded(ranks: int, program: Any) -> Recording:
    """A program of one's own, recorded."""
    return record(traces_of(ranks, program))


# -- programs as lists of actions ---------------------------------------------------------------------------------


def program_of(*actions: tuple) -> Any:
    """A rank program that does these things, each (name, ...):

    ``("compute", flops, nbytes)``, of all ranks or a list for each; ``((operation, algorithm), elements,
    asynchronous)``; ``("halves", elements)``, an all-reduce of every other rank; ``("barrier",)``; ``("wait",)`` for
    the oldest issue; ``("shift", elements)`` to the right; ``("send", source, destination, bytes)``; ``("to host",
    bytes)`` and ``("to device", bytes)``; ``("arrive",)``, a wait for the oldest of these.
    """

    def program(rank: zs.Rank) -> None:
        half, works, moved = None, [], []
        if any(action[0] == "halves" for action in actions):  # making a group takes a collective of its own
            half = rank.split(rank.index % 2)
        for number, (name, *rest) in enumerate(actions):
            if name == "compute":
                flops, nbytes = (of[rank.index] if isinstance(of, list) else of for of in (*rest, 0)[:2])
                with rank.trace.span(f"action {number}"):
                    rank.trace.compute(flops=flops, nbytes=nbytes)
            elif name == "shift":
                x = np.zeros(rest[0] + rank.index, np.float32)
                out = np.empty(rest[0] + (rank.index - 1) % rank.size, np.float32)
                with rank.trace.span(f"action {number}"):
                    rank.exchange(x, (rank.index + 1) % rank.size, out, (rank.index - 1) % rank.size)
            elif name == "send":
                source, destination = rest[0] % rank.size, rest[1] % rank.size
                if source != destination and rank.index == source:
                    rank.send(np.zeros(rest[2], np.uint8), destination)
                elif source != destination and rank.index == destination:
                    rank.recv(np.empty(rest[2], np.uint8), source)
            elif name == "halves":
                works.append(half.all_reduce(np.ones(rest[0], np.float32), async_op=True))
            elif name == "wait" and works:
                works.pop(0).wait()
            elif name == "barrier":
                rank.barrier()
            elif name in recordings.DIRECTIONS:
                moved.append(option_rows.begin_transfer(rank.trace, name, "gradient", rest[0]))
            elif name == "arrive" and moved:
                rank.trace.add(TransferWait(moved.pop(0)))
            elif isinstance(name, tuple) and allowed(*name, rank.size):
                found = ask(rank, *name, np.ones(rest[0], np.float32), None, async_op=rest[1])
                works += [found] * rest[1]
        while works:
            works.pop(0).wait()

    return program
