"""Replays the worked example under a stage and gathers everything that it shows, as data.

Legend: N ranks, P = 4 weights; lists are per rank where they say so, else over the weights w1 ... w4.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from zerosim.course.worked_example import events
from zerosim.course.worked_example.events import Step
from zerosim.course.worked_example.example import Example, Resting, Witness, exact, is_sharded, one_step
from zerosim.display.tables import without_infinities
from zerosim.models.small import four_weights
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.trace import Hop
from zerosim.zero.layout import Layout, layout_of
from zerosim.zero.placements import STAGES, Stage, stage_of


@dataclass(frozen=True, slots=True)
class HopValues:
    """A message and the values that arrived with it."""

    hop: Hop
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """One step of the example under one stage: the story, what each rank saw, and what it came to."""

    example: Example
    stage: Stage
    layout: Layout
    steps: list[Step]
    hops: dict[int, list[HopValues]]  # by call number
    witnesses: list[Witness]          # per rank
    sent_nbytes: list[int]            # per rank, parameters and gradients
    peak_nbytes_by_kind: list[dict[str, int]]

    @property
    def losses(self) -> list[float]:
        """The loss of each rank."""
        return exact([witness.loss for witness in self.witnesses])

    @property
    def local_gradients(self) -> list[list[float]]:
        """The gradient of each rank's own sample, before any reduction."""
        return [exact(local_gradient(witness)) for witness in self.witnesses]

    @property
    def reduced_gradients(self) -> list[float]:
        """The mean over ranks: the sum in the compute format, cast to fp32, divided there."""
        total = self.whole("reduced", "reduce")
        return exact(total.astype(np.float32) / np.float32(self.witnesses[0].divisor))

    def whole(self, name: str, moment: str, rank: int = 0) -> np.ndarray:
        """The four values of one state at one moment: put together from all ranks where sharded, else ``rank``'s."""
        resting = [witness.snapshot(moment).arrays[name] for witness in self.witnesses]
        if not is_sharded(resting[0]):
            return without_padding(self.layout, resting[rank].values)
        vector = np.zeros(self.layout.length, resting[0].values.dtype)
        for owner, mine in enumerate(resting):
            for piece in self.layout.valid(owner):
                vector[piece.vector] = mine.values[piece.shard]
        return without_padding(self.layout, vector)

    def held_part(self, name: str, moment: str, rank: int) -> dict[int, float]:
        """Weight number -> value, for what one rank holds of a state."""
        resting: Resting = self.witnesses[rank].snapshot(moment).arrays[name]
        if not is_sharded(resting):
            return dict(enumerate(exact(without_padding(self.layout, resting.values))))
        index = {at: i for i, at in enumerate(positions(self.layout))}
        return {index[at]: exact([resting.values[lies]])[0] for piece in self.layout.valid(rank)
                for at, lies in zip(range(piece.vector.start, piece.vector.stop),
                                    range(piece.shard.start, piece.shard.stop), strict=True)}

    def as_json(self) -> dict[str, Any]:
        """The replay as plain data; numbers are the shortest decimals that give back the same fp32."""
        return {
            "events": [step_as_json(step) for step in self.steps],
            "losses": self.losses,
            "local_gradients": self.local_gradients,
            "reduced_gradients": self.reduced_gradients,
            "m": exact(self.whole("m", "refresh")),
            "v": exact(self.whole("v", "refresh")),
            "master": exact(self.whole("master", "refresh")),
            "compute": [decimal(value) for value in self.whole("parameter", "refresh")],
            "skipped": self.witnesses[0].skipped,
            "peak_nbytes_by_kind": self.peak_nbytes_by_kind,
            "sent_nbytes": self.sent_nbytes,
        }


def replay(example: Example, stage: int | Stage, *, cluster: Cluster | None = None) -> Replay:
    """Runs the example's training step on N ranks, hop by hop, and returns all that happened.

    Raises ValueError for settings that the engine refuses.
    """
    cluster = cluster or Cluster(example.ranks)
    hops: defaultdict[int, list[HopValues]] = defaultdict(list)
    for event in cluster.events(one_step, example, stage, hop_by_hop=True):
        assert event.call is not None, "the example sends no messages beside its collectives"
        hops[event.call.number].append(HopValues(event.hop, tuple(exact(event.values.astype(np.float32)))))
    sent = [sum(trace.sent_nbytes(purpose) for purpose in events.TOLD_PURPOSES) for trace in cluster.trace]
    return Replay(example, stage_of(stage), layout_of(four_weights(), example.ranks, example.layout),
                  events.steps(cluster.trace), dict(hops), list(cluster.runs[-1].results), sent,
                  cluster.memory.peak_nbytes_by_kind)


def stages_named(text: str) -> list[int]:
    """``"2"`` -> [2], ``"all"`` -> every stage; ValueError for any other text."""
    if text == "all":
        return list(STAGES)
    if text not in map(str, STAGES):
        raise ValueError(f"stage={text!r}; choose one of {', '.join(map(str, STAGES))}, or all")
    return [int(text)]


def replays(example: Example, stages: Iterable[int]) -> dict[int, Replay]:
    """The example under each of the stages."""
    return {stage: replay(example, stage) for stage in stages}


def replays_as_json(example: Example, replays: dict[int, Replay]) -> dict[str, Any]:
    """All stages asked for, with the settings that they share; what is no finite number is a text."""
    whole: dict[str, Any] = without_infinities({
        "ranks": example.ranks, "format": example.compute, "layout": example.layout, "recompute": example.recompute,
        "stages": {str(stage): found.as_json() for stage, found in replays.items()}})
    return whole


def step_as_json(step: Step) -> dict[str, Any]:
    """One event; what was freed is named, and nothing is said of bytes that cannot be sent."""
    freed = {"kind": step.kind} if step.kind else {}
    return {"op": step.op, "unit": step.unit, "sent_nbytes": list(step.sent_nbytes)} | freed


def local_gradient(witness: Witness) -> np.ndarray:
    """The four gradients that a rank's backward wrote, in the order of the weights."""
    written = [seen.gradients for seen in reversed(witness.passes) if seen.gradients is not None]
    return np.concatenate(written)


def positions(layout: Layout) -> list[int]:
    """Where each weight lies in the padded vector."""
    return [at for entry in layout.entries for at in range(entry.low, entry.high)]


def without_padding(layout: Layout, vector: np.ndarray) -> np.ndarray:
    """The weights of a padded vector, in order."""
    return vector[positions(layout)]


def decimal(value: Any) -> str:
    """Every digit of a binary number: 2.099609375 for the fp16 value that prints as 2.1."""
    return format(Decimal(float(value)).normalize(), "f")
