"""The worked example: four weights, one training step, run on the real engine while somebody takes notes.

h = w1*x1 + w2*x2; a = relu(h); y = w3*a + w4; loss = (y - t)^2 / 2. Rank r trains on its own (x1, x2) and t.
Legend: N ranks, P = 4 weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerosim.models.layers import Context, Gradients
from zerosim.models.small import four_weights
from zerosim.models.units import Initializer, Model, Recompute, Unit, Weights
from zerosim.numerics.policy import Policy
from zerosim.optim.elementwise import Adam
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine
from zerosim.zero.placements import SHARDED, Placement, Stage

Sample = tuple[tuple[float, float], float]  # (x1, x2), t
NAMES = ("w1", "w2", "w3", "w4")
FIRST_SAMPLES: tuple[Sample, ...] = (((1.0, 3.0), 5.0), ((2.0, 1.0), 7.0))


def sample_of(rank: int) -> Sample:
    """The data of a rank that was given none: two well-known samples, then small ones that differ on every rank."""
    if rank < len(FIRST_SAMPLES):
        return FIRST_SAMPLES[rank]
    return (1.0 + rank % 5, 1.0 + 3 * rank % 7), 5.0 + 2 * (rank % 8)


@dataclass(frozen=True, slots=True)
class Example:
    """Everything that can be changed about the example. ``samples`` None: `sample_of` each rank.

    Raises ValueError for other than four weights, or other than one sample for each rank.
    """

    weights: tuple[float, ...] = (2.0, -3.0, 1.0, 0.5)
    samples: tuple[Sample, ...] | None = None
    ranks: int = 2
    learning_rate: float = 0.1
    compute: str = "fp16"
    layout: str = "contiguous"
    recompute: str = "segment(2)"

    def __post_init__(self) -> None:
        if len(self.weights) != len(NAMES):
            raise ValueError(
                f"the example has four weights {', '.join(NAMES)}, found {len(self.weights)}: {self.weights}"
            )
        if not all(map(math.isfinite, self.weights)):
            raise ValueError(f"the example's weights must be finite numbers, found {self.weights}")
        if self.ranks < 1:
            raise ValueError(f"the example needs at least one rank, found ranks={self.ranks}")
        if self.samples is not None and len(self.samples) != self.ranks:
            raise ValueError(
                f"every rank trains on one sample: found {len(self.samples)} samples for {self.ranks} ranks; "
                "give as many, separated by semicolons"
            )
        Policy(self.compute)
        Recompute.parse(self.recompute)

    def sample(self, rank: int) -> Sample:
        """(x1, x2), t of one rank."""
        return sample_of(rank) if self.samples is None else self.samples[rank]


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of a unit, forward or backward: what came in, what went out, the gradients that it wrote."""

    unit: str
    values_in: np.ndarray
    values_out: np.ndarray | None
    gradients: np.ndarray | None = None


class Watched(Unit):
    """A unit that computes as it did before, and writes down what passes through."""

    def __init__(self, unit: Unit, passes: list[Pass]) -> None:
        self.unit, self.passes, self.name = unit, passes, unit.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The watched unit's."""
        return self.unit.shapes

    def initializer(self, name: str) -> Initializer:
        """The watched unit's."""
        return self.unit.initializer(name)

    def forward(self, ctx: Context, w: Weights, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """The watched unit's forward, written down."""
        y, kept = self.unit.forward(ctx, w, x)
        self.passes.append(Pass(self.name, x.ravel().copy(), y.ravel().copy()))
        return y, kept

    def backward(self, ctx: Context, w: Weights, kept: Any, dy: np.ndarray) -> tuple[np.ndarray | None, Gradients]:
        """The watched unit's backward, written down."""
        seen = dy.ravel().copy()
        dx, grads = self.unit.backward(ctx, w, kept, dy)
        written = np.concatenate([grads[name].ravel() for name in self.shapes])
        self.passes.append(Pass(self.name, seen, None if dx is None else dx.ravel().copy(), written))
        return dx, grads


@dataclass(frozen=True, slots=True)
class Resting:
    """A copy of one array at rest on one rank, and its placement."""

    placement: Placement
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank at one moment: its arrays, the bytes that it holds by kind, and how far its trace has come."""

    moment: str
    arrays: dict[str, Resting]
    held_nbytes: dict[str, int]
    rows: int


@dataclass(slots=True)
class Witness:
    """What one rank brings back from the step."""

    passes: list[Pass] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    loss: float = 0.0
    skipped: bool = False
    divisor: float = 1.0

    def look(self, engine: Engine, moment: str) -> None:
        """Takes a snapshot, on paper of its own: nothing of it is charged to the rank."""
        group, stage = engine.param_group, engine.stage
        arrays = {"parameter": Resting(stage.parameters, group.parameter.copy()),
                  "gradient": Resting(stage.gradients, group.gradient.copy()),
                  "master": Resting(group.master_placement, group.master.copy())}
        arrays |= {name: Resting(stage.optimizer, slot.copy()) for name, slot in group.slots.items()}
        if group.reduced is not None:
            arrays["reduced"] = Resting(group.reduced.placement, group.reduced.gradient.copy())
            self.divisor = group.reduced.divisor
        memory = engine.rank.memory
        self.snapshots.append(Snapshot(moment, arrays, memory.now_nbytes_by_kind, len(engine.rank.trace.rows)))

    def snapshot(self, moment: str) -> Snapshot:
        """The snapshot of a moment."""
        return next(shot for shot in self.snapshots if shot.moment == moment)


def one_step(rank: Rank, example: Example, stage: int | Stage) -> Witness:
    """The rank program: one training step, written out with the engine's pieces, and a look after each of them."""
    witness = Witness()
    model = four_weights(example.weights)
    watched = Model([Watched(unit, witness.passes) for unit in model.units], model.loss)
    engine = Engine(rank, watched, Adam(lr=example.learning_rate), stage=stage, policy=Policy(example.compute),
                    layout=example.layout, recompute=example.recompute)
    witness.look(engine, "start")
    x, target = example.sample(rank.index)
    tape = engine.forward(np.array([x]), np.array([[target]]))
    witness.loss = tape.loss
    engine.backward(tape)
    witness.look(engine, "backward")
    engine.reduce()
    witness.look(engine, "reduce")
    witness.skipped = engine.update().skipped
    witness.look(engine, "update")
    engine.all_gather_parameters()
    witness.look(engine, "refresh")
    return witness


def parse_numbers(text: str) -> tuple[float, ...]:
    """``"1,2.5"`` -> (1.0, 2.5); ValueError for anything else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"asked for numbers separated by commas, found {text!r}; write for example 1,0.5") from None


def parse_samples(text: str) -> tuple[Sample, ...]:
    """``"1,3:5; 2,1:7"`` -> one (x1, x2), t for each rank; ValueError for anything else."""
    samples: list[Sample] = []
    for part in text.split(";"):
        inputs, colon, target = part.partition(":")
        x = parse_numbers(inputs)
        if not colon or len(x) != 2:
            raise ValueError(f"a sample is x1,x2:t, found {part.strip()!r}; write for example '1,3:5; 2,1:7'")
        samples.append(((x[0], x[1]), parse_numbers(target)[0]))
    return tuple(samples)


def example_of(weights: str, data: str | None, ranks: int | None, learning_rate: float, compute: str, layout: str,
               recompute: str) -> Example:
    """The example that the command line asks for; without ``ranks``, one for each sample, or two.

    Raises ValueError for text that does not parse and settings that do not fit together.
    """
    samples = None if data is None else parse_samples(data)
    if ranks is None:
        ranks = 2 if samples is None else len(samples)
    return Example(parse_numbers(weights), samples, ranks, learning_rate, compute, layout, recompute)


def is_sharded(resting: Resting) -> bool:
    """True when a rank has its own pieces only."""
    return resting.placement is SHARDED


def exact(values: Sequence[float] | np.ndarray) -> list[float]:
    """Python floats whose shortest decimals are those of the fp32 values: 0.03, not 0.029999999329447746."""
    return [float(str(np.float32(value))) for value in values]
