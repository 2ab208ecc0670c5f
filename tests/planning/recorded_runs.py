"""Small runs of the real engine and of programs of their own, recorded; and a made-up machine to replay them on."""

from dataclasses import replace
from functools import cache

import numpy as np

import zerosim as zs
from zerosim.planning.hardware import Device, Link, Network
from zerosim.planning.recording import COLLECTIVE, ISSUE, WAIT, Recording, record
from zerosim.planning.timeline import Machine
from zerosim.ranks.trace import Traces

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
MACHINE = Machine(device(), Network(FAST), "fp16")


@cache
def traces(ranks: int, stage: int = 3, options: str = "both", layout: str = "per_unit",
           widths: tuple[int, ...] = WIDTHS, cluster: type[zs.Cluster] = zs.Cluster) -> Traces:
    """The traces of a run of one step, in a span called "step"."""

    def program(rank: zs.Rank) -> None:
        model = zs.models.MLP(widths, bias=widths != EVEN, seed=3)
        engine = zs.Engine(rank, model, zs.optim.Adam(), stage=stage, policy=zs.Policy("fp16"), layout=layout,
                           **OPTIONS[options])
        with rank.trace.span("step"):
            engine.step([tuple(rank.xp.zeros((ROWS, width)) for width in (widths[0], widths[-1]))
                         for _ in range(MICRO_BATCHES)])

    running = cluster(ranks)
    running.run(program)
    return running.trace


@cache
def step(ranks: int, stage: int = 3, options: str = "both", widths: tuple[int, ...] = WIDTHS) -> Recording:
    """The step of that run, recorded."""
    return record(traces(ranks, stage, options, widths=widths)).inside("step")


def recorded(ranks: int, program) -> Recording:
    """A program of one's own, recorded."""
    cluster = zs.Cluster(ranks)
    cluster.run(program)
    return record(cluster.trace)


def synchronous(recording: Recording) -> Recording:
    """The same run with every collective waited for where it is issued."""
    programs = []
    for program in recording.programs:
        kept = program.codes != WAIT
        codes = np.where(program.codes == ISSUE, COLLECTIVE, program.codes)
        programs.append(replace(program, codes=codes[kept], first=program.first[kept], second=program.second[kept],
                                third=program.third[kept]))
    return replace(recording, programs=tuple(programs))
