"""One training step for the timeline's picture: run without data, once for each way of overlapping.

Legend: N ranks. What is drawn of it, and on which machine, is the timeline's matter; here it is only run.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zerosim.models.small import MLP
from zerosim.numerics.policy import Policy
from zerosim.optim.elementwise import Adam
from zerosim.ranks.cluster import NullCluster
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Traces
from zerosim.zero.engine import Engine

STEP = "step"  # the span around what is drawn
LEVERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "No overlap": {},
    "Reductions overlap": {"overlap": True},
    "Reductions overlap, and each unit is gathered one ahead": {"overlap": True, "prefetch": 1},
})


def step_traces(widths: Sequence[int], rows: int, *, ranks: int, stage: int, compute: str,
                levers: Mapping[str, Any]) -> Traces:
    """The traces of one step of an MLP of these widths with Adam, on ``rows`` samples per rank, on N ranks."""

    def program(rank: Rank) -> Engine:
        engine = Engine(rank, MLP(widths, bias=False), Adam(), stage=stage, policy=Policy(compute), **levers)
        batch = rank.xp.zeros((rows, widths[0]), "float32"), rank.xp.zeros((rows, widths[-1]), "float32")
        with rank.trace.span(STEP):
            engine.step([batch])
        return engine

    cluster = NullCluster(ranks)
    cluster.run(program)
    return cluster.trace
