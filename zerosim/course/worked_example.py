"""The worked example: four weights, one training step, run on the real engine and recorded.

h = w1*x1 + w2*x2; a = relu(h); y = w3*a + w4; loss = (y - t)^2 / 2. Rank r trains on its own (x1, x2) and t.
Legend: N ranks, P = 4 weights.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np

from zerosim.display.style import shortest
from zerosim.display.views import View, plain
from zerosim.models.layers import Context, Gradients
from zerosim.models.small import four_weights
from zerosim.models.units import Initializer, Model, Recompute, Unit, Weights
from zerosim.numerics.policy import Policy
from zerosim.optim.elementwise import Adam
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Collective, Compute, Held, Hop, Row, SpanBegin, Trace
from zerosim.shown import Shown
from zerosim.zero.engine import Engine
from zerosim.zero.placements import STAGES, Placement, Stage, stage_of

Sample = tuple[tuple[float, float], float]  # (x1, x2), t
NAMES = ("w1", "w2", "w3", "w4")
UNITS = ("layer1", "layer1", "layer2", "layer2")  # of each weight
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


# -- the step, and what each rank writes down of it ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitPass:
    """One run of a unit, forward or backward: what came in, what went out if anything, the gradients that it wrote."""

    values_in: np.ndarray
    values_out: np.ndarray
    gradients: np.ndarray | None = None


class WatchedUnit(Unit):
    """A unit that computes as it did before, and writes down what passes through."""

    def __init__(self, unit: Unit, passes: list[UnitPass]) -> None:
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
        self.passes.append(UnitPass(x.ravel().copy(), y.ravel().copy()))
        return y, kept

    def backward(self, ctx: Context, w: Weights, kept: Any, dy: np.ndarray) -> tuple[np.ndarray | None, Gradients]:
        """The watched unit's backward, written down."""
        seen = dy.ravel().copy()
        dx, grads = self.unit.backward(ctx, w, kept, dy)
        written = np.concatenate([grads[name].ravel() for name in self.shapes])
        self.passes.append(UnitPass(seen, np.empty(0) if dx is None else dx.ravel().copy(), written))
        return dx, grads


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """One rank at one moment: of each state the values that it holds, by weight number, and its bytes by kind."""

    values: dict[str, dict[int, Any]]
    held_nbytes: dict[str, int]


@dataclass(slots=True)
class StepRecorder:
    """The records of one rank, which it brings back from the step: the passes in order, and snapshots by moment."""

    passes: list[UnitPass] = field(default_factory=list)
    snapshots: dict[str, StepSnapshot] = field(default_factory=dict)
    loss: float = 0.0
    skipped: bool = False
    divisor: float = 1.0

    def look(self, engine: Engine, moment: str) -> None:
        """Takes a snapshot; its copies are not charged to the rank."""
        group, stage = engine.param_group, engine.stage
        places = chain.from_iterable(_range(piece.vector) for piece in group.layout.valid_regions())
        number_at = {place: number for number, place in enumerate(places)}

        def held(array: np.ndarray, placement: Placement) -> dict[int, Any]:
            return {number_at[place]: array[at] for piece in group.regions_held(placement)
                    for place, at in zip(_range(piece.vector), _range(piece.shard), strict=True)}

        values = {"parameter": held(group.parameter, stage.parameters),
                  "gradient": held(group.gradient, stage.gradients),
                  "master": held(group.master, group.master_placement)}
        values |= {name: held(slot, stage.optimizer) for name, slot in group.slots.items()}
        if group.reduced is not None:
            values["reduced"] = held(group.reduced.gradient, group.reduced.placement)
            self.divisor = group.reduced.divisor
        self.snapshots[moment] = StepSnapshot(values, engine.rank.memory.now_nbytes_by_kind)


def _range(span: slice) -> range:
    return range(span.start, span.stop)


def one_step(rank: Rank, example: Example, stage: int | Stage) -> StepRecorder:
    """The rank program: one training step, written out with the engine's pieces, and a look after each of them."""
    recorder = StepRecorder()
    model = four_weights(example.weights)
    watched = Model([WatchedUnit(unit, recorder.passes) for unit in model.units], model.loss)
    engine = Engine(rank, watched, Adam(lr=example.learning_rate), stage=stage, policy=Policy(example.compute),
                    layout=example.layout, recompute=example.recompute)
    recorder.look(engine, "start")
    x, target = example.sample(rank.index)
    tape = engine.forward(np.array([x]), np.array([[target]]))
    recorder.loss = tape.loss
    engine.backward(tape)
    recorder.look(engine, "backward")
    engine.reduce()
    recorder.look(engine, "reduce")
    recorder.skipped = engine.update().skipped
    recorder.look(engine, "update")
    engine.all_gather_parameters()
    recorder.look(engine, "end")
    return recorder


# -- from the ranks' traces to one story: what all ranks did, in order, with the bytes that each sent and holds --------

SHOWN_FREES = ("gathered_parameter", "unit_gradient")
SHOWN_PURPOSES = ("parameters", "gradients")


@dataclass(frozen=True, slots=True)
class StoryStep:
    """One thing that every rank did: ``op`` on ``unit``.

    ``sent_nbytes`` and ``held_nbytes`` (by kind, right after it) are per rank; ``kind`` says what a "free" freed;
    ``call`` is the number of a collective.
    """

    op: str
    unit: str
    sent_nbytes: tuple[int, ...] = (0,)
    held_nbytes: tuple[dict[str, int], ...] = ()
    kind: str | None = None
    call: int | None = None


def story(traces: Sequence[Trace]) -> list[StoryStep]:
    """The story of a run whose ranks all did the same things in the same order."""
    found = []
    for own in zip(*map(_own_story, traces), strict=True):
        assert len({(step.op, step.unit) for step in own}) == 1, "ranks did different things"
        found.append(replace(own[0], sent_nbytes=tuple(step.sent_nbytes[0] for step in own),
                             held_nbytes=tuple(step.held_nbytes[0] for step in own)))
    return found


def _own_story(trace: Trace) -> list[StoryStep]:
    """The story of one rank. Of the arithmetic of one unit in a row the first is the step."""
    found: list[StoryStep] = []
    held: Counter[str] = Counter()
    for row in trace.rows:
        if isinstance(row, Held):
            held[row.kind] += row.nbytes
        step = _step_of(row)
        again = step and found and isinstance(row, Compute) and (found[-1].op, found[-1].unit) == (step.op, step.unit)
        if step and not again:
            found.append(replace(step, held_nbytes=({kind: nbytes for kind, nbytes in held.items() if nbytes},)))
    return found


def _step_of(row: Row) -> StoryStep | None:
    """The step that begins with a row of a trace; None for a row that the story leaves out."""
    match row:
        case Collective() if row.purpose in SHOWN_PURPOSES:
            return StoryStep(row.call.operation, row.span[-1], (row.sent_nbytes,), call=row.call.number)
        case Held() if row.nbytes < 0 and row.kind in SHOWN_FREES:
            return StoryStep("free", row.name, kind=row.kind)
        case Compute() if row.span:
            return StoryStep(_computing(row.span), row.span[1] if len(row.span) > 1 else "all")
        case SpanBegin() if row.path == ("update",):
            return StoryStep("update", "all")
    return None


def _computing(span: tuple[str, ...]) -> str:
    """forward, backward, recompute or loss."""
    return "recompute" if "recompute" in span else span[0]


# -- a replay: all that one stage shows, as data ----------------------------------------------------------------------
# Lists are per rank where they say so, else over the weights w1 ... w4.


@dataclass(frozen=True, slots=True)
class HopValues:
    """A message and the values that arrived with it."""

    hop: Hop
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """One step of the example under one stage: the events in order, each rank's records, and the results."""

    example: Example
    stage: Stage
    steps: list[StoryStep]
    hops: dict[int, list[HopValues]]  # by call number
    recorders: list[StepRecorder]  # per rank
    sent_nbytes: list[int]  # per rank, parameters and gradients
    peak_nbytes_by_kind: list[dict[str, int]]

    @property
    def losses(self) -> list[float]:
        """The loss of each rank."""
        return exact([recorder.loss for recorder in self.recorders])

    @property
    def local_gradients(self) -> list[list[float]]:
        """The gradient of each rank's own sample, before any reduction: what its backward wrote, last unit first."""
        return [exact(np.concatenate([seen.gradients for seen in reversed(recorder.passes)
                                      if seen.gradients is not None])) for recorder in self.recorders]

    @property
    def reduced_gradients(self) -> list[float]:
        """The mean over ranks: the sum in the compute format, cast to fp32, divided there."""
        total = self.whole("reduced", "reduce")
        return exact(total.astype(np.float32) / np.float32(self.recorders[0].divisor))

    def whole(self, name: str, moment: str, rank: int = 0) -> np.ndarray:
        """The four values of one state at one moment: put together from all ranks where sharded, else ``rank``'s."""
        held: dict[int, Any] = {}
        for recorder in (*self.recorders, self.recorders[rank]):
            held |= recorder.snapshots[moment].values[name]
        return np.array([held[number] for number in range(len(NAMES))])

    def held_part(self, name: str, moment: str, rank: int) -> dict[int, float]:
        """Weight number -> value, for what one rank holds of a state."""
        held = self.recorders[rank].snapshots[moment].values[name]
        return dict(zip(held, exact(list(held.values())), strict=True))

    def as_json(self) -> dict[str, Any]:
        """The replay as plain data; numbers are the shortest decimals that give back the same fp32."""
        return {
            "events": [{"op": step.op, "unit": step.unit, "sent_nbytes": list(step.sent_nbytes)}
                       | ({"kind": step.kind} if step.kind else {}) for step in self.steps],
            "losses": self.losses,
            "local_gradients": self.local_gradients,
            "reduced_gradients": self.reduced_gradients,
            "m": exact(self.whole("m", "end")),
            "v": exact(self.whole("v", "end")),
            "master": exact(self.whole("master", "end")),
            "compute": [decimal(value) for value in self.whole("parameter", "end")],
            "skipped": self.recorders[0].skipped,
            "peak_nbytes_by_kind": self.peak_nbytes_by_kind,
            "sent_nbytes": self.sent_nbytes,
        }


def replay(example: Example, stage: int | Stage) -> Replay:
    """Runs the example's training step on N ranks, hop by hop, and returns all that happened.

    Raises ValueError for settings that the engine refuses.
    """
    cluster = Cluster(example.ranks)
    hops: defaultdict[int, list[HopValues]] = defaultdict(list)
    for event in cluster.events(one_step, example, stage, hop_by_hop=True):
        assert event.call is not None, "the example sends no messages beside its collectives"
        hops[event.call.number].append(HopValues(event.hop, tuple(exact(event.values.astype(np.float32)))))
    sent = [sum(trace.sent_nbytes(purpose) for purpose in SHOWN_PURPOSES) for trace in cluster.trace]
    return Replay(example, stage_of(stage), story(cluster.trace), dict(hops), list(cluster.runs[-1].results), sent,
                  cluster.memory.peak_nbytes_by_kind)


def stages_named(text: str) -> list[int]:
    """``"2"`` -> [2], ``"all"`` -> every stage; ValueError for any other text."""
    if text == "all":
        return list(STAGES)
    if text not in map(str, STAGES):
        raise ValueError(f"stage={text!r}; choose one of {', '.join(map(str, STAGES))}, or all")
    return [int(text)]


@dataclass(frozen=True, slots=True)
class Replays(Shown):
    """The example under several stages, by number."""

    example: Example
    stages: dict[int, Replay]

    def view(self, *, hops: bool = False) -> View:
        """Every stage for a terminal or a notebook, with every message of every collective where ``hops``."""
        from zerosim.course.worked_example_view import lesson

        return lesson(self, hops=hops)

    def as_json(self) -> dict[str, Any]:
        """All stages, with the settings that they share; what is no finite number is a text."""
        example = self.example
        data: dict[str, Any] = plain({
            "ranks": example.ranks, "format": example.compute, "layout": example.layout,
            "recompute": example.recompute,
            "stages": {str(stage): found.as_json() for stage, found in self.stages.items()}})
        return data


def replays(example: Example, stages: Iterable[int]) -> Replays:
    """The example under each of the stages."""
    return Replays(example, {stage: replay(example, stage) for stage in stages})


def exact(values: Sequence[float] | np.ndarray) -> list[float]:
    """Python floats whose shortest decimals are those of the fp32 values: 0.03, not 0.029999999329447746."""
    return list(map(shortest, values))


def decimal(value: Any) -> str:
    """Every digit of a binary number: 2.099609375 for the fp16 value that prints as 2.1."""
    return format(Decimal(float(value)).normalize(), "f")
