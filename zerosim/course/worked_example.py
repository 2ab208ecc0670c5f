"""The worked example: four weights, two training steps, run on the real engine and recorded.

h = w1*x1 + w2*x2; a = relu(h); y = w3*a + w4; loss = (y - t)^2 / 2. In each step rank r trains on its own (x1, x2)
and t. In the first step rank 0's ReLU is dead; in the second both are live, and Adam's moments are no longer 0.
`published_example` is the first step alone, as lessons about ZeRO print it.
Legend: N ranks, P = 4 weights w1 ... w4, in the order of the flat vector.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np

from zerosim.display.style import short, shortest
from zerosim.display.views import RIGHT, Part, Rule, Table, TextLine, View, marked_table, parts, plain_record, words
from zerosim.models.initializers import Initializer
from zerosim.models.layers import Context, Gradients
from zerosim.models.small import four_weights
from zerosim.models.units import Model, Recompute, Unit, Weights
from zerosim.numerics.checks import require_count
from zerosim.numerics.policy import Policy
from zerosim.numerics.units import counted
from zerosim.optim.elementwise import SGD, Adam
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.hub import RunEvent
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import KINDS, Collective, Compute, Held, Row, SpanBegin, Trace
from zerosim.shown import Answer
from zerosim.zero.engine import Engine
from zerosim.zero.placements import STAGES, Placement, Stage, stage_of
from zerosim.zero.skipped import unreported_skips

Sample = tuple[tuple[float, float], float]  # (x1, x2), t
NAMES = ("w1", "w2", "w3", "w4")
UNITS = ("layer1", "layer1", "layer2", "layer2")  # of each weight
FIRST_SAMPLES: tuple[tuple[Sample, Sample], ...] = (  # by step: of rank 0, of rank 1
    (((1.0, 3.0), 5.0), ((2.0, 1.0), 7.0)),
    (((3.0, 1.0), 2.0), ((2.0, 1.0), 3.0)),
)
OPTIMIZERS: dict[str, type[Adam] | type[SGD]] = {"adam": Adam, "sgd": SGD}


def sample_of(rank: int, step: int = 1) -> Sample:
    """The data of a rank that was given none: well-known samples, then small ones that differ on every rank."""
    if step <= len(FIRST_SAMPLES) and rank < 2:
        return FIRST_SAMPLES[step - 1][rank]
    x1, x2 = 1.0 + (rank + step - 1) % 5, 1.0 + 3 * (rank + step - 1) % 7
    return (x1, x2), 5.0 + 2 * (rank % 8)


@dataclass(frozen=True, slots=True)
class Example:
    """Everything that can be changed about the example. ``samples``: one for each rank, in every step the same; None:
    `sample_of` each rank and step.

    Raises ValueError for other than four weights, or other than one sample for each rank, less than one step, and an
    optimizer that is neither adam nor sgd.
    """

    weights: tuple[float, ...] = (2.0, -3.0, 1.0, 0.5)
    samples: tuple[Sample, ...] | None = None
    ranks: int = 2
    steps: int = 2
    optimizer: str = "adam"
    learning_rate: float = 0.1
    compute: str = "fp16"
    layout: str = "per_unit"
    recompute: str = "none"

    def __post_init__(self) -> None:
        if len(self.weights) != len(NAMES):
            raise ValueError(f"the example has four weights {', '.join(NAMES)}, found {len(self.weights)}: "
                             f"{', '.join(f'{weight:g}' for weight in self.weights)}")
        if not all(map(math.isfinite, self.weights)):
            raise ValueError(f"the example's weights must be finite numbers, found {', '.join(map(str, self.weights))}")
        require_count("ranks", self.ranks, 1)
        require_count("steps", self.steps, 1)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"the example's optimizer={self.optimizer!r}; choose one of {', '.join(OPTIMIZERS)}")
        if self.samples is not None and len(self.samples) != self.ranks:
            raise ValueError(f"every rank trains on one sample: found {len(self.samples)} samples for {self.ranks} "
                             "ranks; give as many, separated by semicolons")
        Policy(self.compute)
        Recompute.parse(self.recompute)

    def sample(self, rank: int, step: int = 1) -> Sample:
        """(x1, x2), t of one rank in one step, which are counted from 1."""
        return sample_of(rank, step) if self.samples is None else self.samples[rank]


def published_example(**changes: Any) -> Example:
    """The example as lessons print it: one step, the whole vector cut in one piece for each rank, a not kept.

    ``changes`` are fields of `Example`, which are changed beside that.
    """
    as_printed: dict[str, Any] = {"steps": 1, "layout": "contiguous", "recompute": "segment(2)"}
    return Example(**as_printed | changes)


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


def example_of(weights: str, data: str | None, *, published: bool, **changes: Any) -> Example:
    """The example that the command line asks for; without ``ranks``, one for each sample, or two.

    ``changes`` are fields of `Example`, or None where nothing was asked. Raises ValueError for text that does not
    parse and settings that do not fit together.
    """
    samples = None if data is None else parse_samples(data)
    asked: dict[str, Any] = {} if samples is None else {"ranks": len(samples)}
    asked |= {name: value for name, value in changes.items() if value is not None}
    return (published_example if published else Example)(weights=parse_numbers(weights), samples=samples, **asked)


# -- a step, and what each rank writes down of it --------------------------------------------------------------------


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


STATES = ("parameter", "gradient", "master")  # and the optimizer's own


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


Watched = tuple[Engine, list[UnitPass]]  # one rank's, and the passes through its units since these were last taken


def watched(model: Model) -> tuple[Model, list[UnitPass]]:
    """The model, and the list to which every pass through a unit of it will be added."""
    passes: list[UnitPass] = []
    return Model([WatchedUnit(unit, passes) for unit in model.units], model.loss), passes


def watched_engine(rank: Rank, example: Example, options: Mapping[str, Any]) -> Watched:
    """The rank program that begins a training run, with the engine's options."""
    model, passes = watched(four_weights(example.weights))
    return Engine(rank, model, OPTIMIZERS[example.optimizer](lr=example.learning_rate), **options), passes


def looked_at_step(engine: Engine, passes: list[UnitPass], samples: Mapping[str, Sample]) -> StepRecorder:
    """A step, written out with the engine's pieces, and a look after each of them. ``samples`` has each micro-batch,
    by the name of the moment after its backward."""
    recorder = StepRecorder()
    recorder.look(engine, "start")
    for number, (moment, (x, target)) in enumerate(samples.items(), 1):
        tape = engine.forward(np.array([x]), np.array([[target]]))
        recorder.loss += tape.loss / len(samples)
        engine.backward(tape, last=number == len(samples))
        recorder.look(engine, moment)
    engine.reduce()
    recorder.look(engine, "reduce")
    recorder.skipped = engine.update().skipped
    recorder.look(engine, "update")
    engine.all_gather_parameters()
    recorder.look(engine, "end")
    recorder.passes[:] = passes
    passes.clear()
    return recorder


# -- from the ranks' traces to events: what all ranks did, in order, with the bytes that each sent and holds ----------

SHOWN_FREES = ("gathered_parameter", "unit_gradient")
SHOWN_PURPOSES = ("parameters", "gradients")


@dataclass(frozen=True, slots=True)
class ReplayEvent:
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


def events_of(traces: Sequence[Trace], before: Sequence[dict[str, int]]) -> list[ReplayEvent]:
    """The events of a run whose ranks all did the same things in the same order.

    ``before`` are the bytes by kind that each rank held when it began.
    """
    found = []
    for own in zip(*map(_events_of_rank, traces, before), strict=True):
        assert len({(event.op, event.unit) for event in own}) == 1, "ranks did different things"
        found.append(replace(own[0], sent_nbytes=tuple(event.sent_nbytes[0] for event in own),
                             held_nbytes=tuple(event.held_nbytes[0] for event in own)))
    return found


def _events_of_rank(trace: Trace, before: dict[str, int]) -> list[ReplayEvent]:
    """The events of one rank. Arithmetic of one unit in a row is one event, as of its first row."""
    found: list[ReplayEvent] = []
    held: Counter[str] = Counter(before)
    for row in trace.rows:
        if isinstance(row, Held):
            held[row.kind] += row.nbytes
        event = _event_of(row)
        last = (found[-1].op, found[-1].unit) if found else None
        if event and not (isinstance(row, Compute) and last == (event.op, event.unit)):
            found.append(replace(event, held_nbytes=({kind: nbytes for kind, nbytes in held.items() if nbytes},)))
    return found


def _event_of(row: Row) -> ReplayEvent | None:
    """The event that begins with a row of a trace; None for a row that is not shown."""
    match row:
        case Collective() if row.purpose in SHOWN_PURPOSES:
            return ReplayEvent(row.call.operation, row.span[-1], (row.sent_nbytes,), call=row.call.number)
        case Held() if row.nbytes < 0 and row.kind in SHOWN_FREES:
            return ReplayEvent("free", row.name, kind=row.kind)
        case Compute() if row.span:
            op = "recompute" if "recompute" in row.span else row.span[0]  # or forward, backward, loss
            return ReplayEvent(op, row.span[1] if len(row.span) > 1 else "all")
        case SpanBegin() if row.path == ("update",):
            return ReplayEvent("update", "all")
    return None


# -- a replay: all that one stage shows, as data ----------------------------------------------------------------------
# Lists are per rank where they say so, else over the weights w1 ... w4.


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step of the example under one stage: the events in order, each rank's records, and the results."""

    example: Example
    stage: Stage
    number: int  # from 1
    events: list[ReplayEvent]
    hops: dict[int, list[RunEvent]]  # by call number
    recorders: list[StepRecorder]  # per rank
    sent_nbytes: list[int]  # per rank, parameters and gradients

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the optimizer's state: m and v of Adam, none of SGD."""
        return tuple(name for name in self.recorders[0].snapshots["start"].values if name not in (*STATES, "reduced"))

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
        """The step as plain data; numbers are the shortest decimals that give back the same fp32."""
        return {
            "events": [{"op": event.op, "unit": event.unit, "sent_nbytes": list(event.sent_nbytes)}
                       | ({"kind": event.kind} if event.kind else {}) for event in self.events],
            "losses": self.losses,
            "local_gradients": self.local_gradients,
            "reduced_gradients": self.reduced_gradients,
            **{name: exact(self.whole(name, "end")) for name in (*self.slots, "master")},
            "compute": [decimal(value) for value in self.whole("parameter", "end")],
            "skipped": self.recorders[0].skipped,
            "sent_nbytes": self.sent_nbytes,
        }


@dataclass(frozen=True, slots=True)
class Replay:
    """The example under one stage, step by step, and the bytes that each rank held at its fullest moment."""

    example: Example
    stage: Stage
    steps: list[ReplayedStep]
    peak_nbytes_by_kind: list[dict[str, int]]  # per rank

    def as_json(self) -> dict[str, Any]:
        """The replay as plain data."""
        return {"steps": [step.as_json() for step in self.steps], "peak_nbytes_by_kind": self.peak_nbytes_by_kind}


def replay(example: Example, stage: int | Stage) -> Replay:
    """Trains the example on N ranks, hop by hop, and returns all that happened.

    Raises ValueError for settings that the engine refuses.
    """
    cluster = Cluster(example.ranks)
    engines = list(cluster.run(watched_engine, example, {
        "stage": stage, "policy": Policy(example.compute), "layout": example.layout, "recompute": example.recompute}))
    steps = [_replayed_step(cluster, example, engines, step) for step in range(1, example.steps + 1)]
    return Replay(example, stage_of(stage), steps, cluster.memory.peak_nbytes_by_kind)


def _replayed_step(cluster: Cluster, example: Example, engines: Sequence[Watched], step: int) -> ReplayedStep:
    """The next step of a run, recorded."""
    def program(rank: Rank) -> StepRecorder:
        return looked_at_step(*engines[rank.index], {"backward": example.sample(rank.index, step)})

    hops: defaultdict[int, list[RunEvent]] = defaultdict(list)
    with unreported_skips():
        for event in cluster.events(program, hop_by_hop=True):
            assert event.call is not None, "the example sends no messages beside its collectives"
            hops[event.call.number].append(event)
    recorders = list(cluster.runs[-1].results)
    sent = [sum(trace.sent_nbytes(purpose) for purpose in SHOWN_PURPOSES) for trace in cluster.trace]
    events = events_of(cluster.trace, [recorder.snapshots["start"].held_nbytes for recorder in recorders])
    return ReplayedStep(example, engines[0][0].stage, step, events, dict(hops), recorders, sent)


def stages_named(text: str) -> list[int]:
    """``"2"`` -> [2], ``"all"`` -> every stage; ValueError for any other text."""
    if text == "all":
        return list(STAGES)
    if text not in map(str, STAGES):
        raise ValueError(f"stage={text!r}; choose one of {', '.join(map(str, STAGES))}, or all")
    return [int(text)]


MORE = "More: --stage 1 shows a stage event by event, --mistakes what mistakes change."


@dataclass(frozen=True, slots=True)
class Replays(Answer):
    """The example under several stages, by number."""

    example: Example
    stages: dict[int, Replay]

    def view(self, *, hops: bool = False, full: bool | None = None) -> View:
        """The replays for a terminal or a notebook.

        One stage is shown event by event, several are laid side by side on one screen; ``full`` says otherwise, and
        ``hops`` adds every message of every collective.
        """
        example = self.example
        detailed = full if full is not None else hops or len(self.stages) == 1
        stages = (_stage(number, of_stage, hops=hops) for number, of_stage in self.stages.items()) if detailed else ()
        return View("The worked example", f": 4 weights on {example.ranks} ranks, {counted(example.steps, 'step')}, "
                    f"{example.compute}, {example.optimizer}, lr {example.learning_rate:g}",
                    parts(_header(example), *stages, () if detailed else _outcome(self),
                          _comparison(self) if len(self.stages) > 1 else (),
                          () if detailed else [TextLine(MORE, 0)]))

    def as_json(self) -> dict[str, Any]:
        """All stages, with the settings that they share; what is no finite number is a text."""
        example = self.example
        return plain_record({
            "ranks": example.ranks, "format": example.compute, "optimizer": example.optimizer,
            "layout": example.layout, "recompute": example.recompute,
            "stages": {str(stage): found.as_json() for stage, found in self.stages.items()}})


def replays(example: Example, stages: Iterable[int]) -> Replays:
    """The example under each of the stages."""
    return Replays(example, {stage: replay(example, stage) for stage in stages})


# -- a replay as one reads it: where each state rests, what happened in order, and the results -------------------------

MOMENTS = {"start": "start", "backward": "backward", "reduce": "reduced", "update": "updated", "end": "end"}


def _header(example: Example) -> Iterator[str]:
    """The model, the data and the settings, which all stages share."""
    yield "h = w1·x1 + w2·x2   a = relu(h)   y = w3·a + w4   loss = ½(y - t)²"
    yield f"layer1 is w1 w2, layer2 is w3 w4; they begin as {_numbers(example.weights)}"
    for rank in range(example.ranks):
        samples = [example.sample(rank, step) for step in range(1, example.steps + 1)]
        yield f"rank {rank} trains on " + ", then ".join(
            f"x = ({x1:g}, {x2:g}), t = {target:g}" for (x1, x2), target in dict.fromkeys(samples))
    yield f"layout {example.layout}, recompute {example.recompute}"


def _outcome(found: Replays) -> Iterator[Part]:
    """The weights step by step: one table for all stages where they have the same bits, else one for each."""
    same = len(_ends(found)) == 1
    for number, of_stage in list(found.stages.items())[:1 if same else None]:
        whose = "in every stage" if same else f"in stage {number}"
        yield _results(of_stage.steps, f"What it comes to, {whose}")


def _ends(found: Replays) -> set[tuple[bytes, bytes]]:
    """The masters and the compute copies at the end, as bytes: one of each where all stages agree."""
    return {(last.whole("master", "end").tobytes(), last.whole("parameter", "end").tobytes())
            for last in (of_stage.steps[-1] for of_stage in found.stages.values())}


def _comparison(found: Replays) -> Iterator[Part]:
    """The memory and the traffic of every rank in each stage, and whether all stages end in the same bits."""
    yield _table("All stages, bytes on each rank", "stage", "rank", "at rest B", "peak B", "sent in a step B", rows=[
        (str(number) if rank == 0 else "", str(rank), str(sum(recorder.snapshots["start"].held_nbytes.values())),
         str(sum(of_stage.peak_nbytes_by_kind[rank].values())), str(of_stage.steps[0].sent_nbytes[rank]))
        for number, of_stage in found.stages.items() for rank, recorder in enumerate(of_stage.steps[0].recorders)])
    yield TextLine(f"The fp32 masters and the {found.example.compute} copies are " + (
        "the same in every stage, bit for bit." if len(_ends(found)) == 1 else "NOT the same in every stage."), 0)


def _stage(number: int, found: Replay, *, hops: bool) -> Iterator[Part | str]:
    """One stage, from where its states rest to the results."""
    stage = found.stage
    yield Rule(f"[bold]stage {number}[/]: parameters {stage.parameters.value}, gradients {stage.gradients.value}, "
               f"optimizer {stage.optimizer.value}")
    yield _resting(found.steps[0])
    for step in found.steps:
        yield _happened(step, hops=hops)
        yield from _disagreement(step)
        if step.recorders[0].skipped:
            yield TextLine("Some gradient was inf or NaN: every rank skipped the step, and nothing has changed.", 0)
    yield _results(found.steps, "What it comes to")
    yield _memory(found)
    yield TextLine("Sent by each rank in a step, parameters and gradients: "
                   f"{_listed(found.steps[0].sent_nbytes)} bytes", 0)


def _resting(found: ReplayedStep) -> Table:
    """State by rank: the weights of which each rank holds that state between steps."""
    states = (*STATES, *found.slots)
    return _table("Where each state rests", "rank", *states, rows=[
        (str(rank), *(" ".join(NAMES[i] for i in found.held_part(state, "start", rank)) or "-" for state in states))
        for rank in range(found.example.ranks)])


def _happened(found: ReplayedStep, *, hops: bool) -> Table:
    """Every event, and under it every rank: the values, the bytes sent, the bytes held right after."""
    rows = []
    seen = [0] * found.example.ranks
    for number, event in enumerate(found.events, 1):
        for rank in range(found.example.ranks):
            first = rank == 0
            rows.append((str(number) if first else "", f"{event.op} {event.unit}" if first else "", str(rank),
                         _values(found, event, rank, seen), str(event.sent_nbytes[rank] or ""),
                         str(sum(event.held_nbytes[rank].values()))))
        if hops and event.call is not None:
            rows += [("", "", "", _hop(made), "", "") for made in found.hops.get(event.call, [])]
    caption = "What happens" if found.example.steps == 1 else f"What happens in step {found.number}"
    return _table(caption, "", "event", "rank", "values", "sent B", "holds B", rows=rows)


def _hop(made: RunEvent) -> str:
    """One message: who to whom, which chunks, which values."""
    hop = made.hop
    carried = _numbers(made.values) if made.values.size else "nothing (0 bytes)"
    return f"[dim]hop {hop.step}, {hop.source} → {hop.destination}, chunk {_listed(hop.chunks)}: {carried}[/]"


def _values(found: ReplayedStep, event: ReplayEvent, rank: int, seen: list[int]) -> str:
    """The event in numbers on one rank. ``seen`` counts the passes already shown, by rank."""
    if event.op in ("forward", "recompute", "backward"):
        passed = found.recorders[rank].passes[seen[rank]]
        seen[rank] += 1
        if passed.gradients is not None:
            return f"dy {_numbers(passed.values_in)}: gradients {_numbers(passed.gradients)}"
        return f"{_numbers(passed.values_in)} → {_numbers(passed.values_out)}"
    if event.op == "loss":
        first = next(one for one in found.events if one.op == "loss")
        return f"loss {found.losses[rank]:g}" if event is first else ""
    if event.op in ("reduce_scatter", "all_reduce"):
        return _owned("sum", _of_unit(event, found.held_part("reduced", "reduce", rank)))
    if event.op == "all_gather":
        moment = "end" if "update" in (one.op for one in found.events[:found.events.index(event)]) else "start"
        whole = dict(enumerate(exact(found.whole("parameter", moment, rank))))
        return _owned("has", _of_unit(event, whole))
    if event.op == "update":
        return _owned("new", found.held_part("master", "update", rank))
    return words(event.kind or "")


def _of_unit(event: ReplayEvent, values: dict[int, float]) -> dict[int, float]:
    """The values of the weights that belong to the event's unit."""
    return {i: value for i, value in values.items() if event.unit in ("all", UNITS[i])}


def _owned(word: str, values: dict[int, float]) -> str:
    """``sum w3 -5.5, w4 -10``, or a dash for an empty shard."""
    return f"{word} " + ", ".join(f"{NAMES[i]} {short(value)}" for i, value in values.items()) if values else "-"


def _disagreement(found: ReplayedStep) -> Iterator[Part | str]:
    """The copies between the update and the all-gather: only their owners have updated replicated ones."""
    copies = [_decimals(found.whole("parameter", "update", rank)) for rank in range(found.example.ranks)]
    if len(set(map(tuple, copies))) > 1:
        yield ""
        yield TextLine(f"After the update and before the all-gather the {found.example.compute} copies disagree:", 0)
        yield from (f"rank {rank} has {', '.join(copy)}" for rank, copy in enumerate(copies))


def _results(steps: Sequence[ReplayedStep], caption: str) -> Table:
    """For each step and weight the mean gradient, the optimizer's state, the new master, and its cast in full."""
    rows = []
    for step in steps:
        columns = [step.reduced_gradients, *(exact(step.whole(state, "end")) for state in (*step.slots, "master"))]
        of_weights = zip(NAMES, *(map(short, column) for column in columns), _decimals(step.whole("parameter", "end")),
                         strict=True)
        rows += [(str(step.number) if row[0] == NAMES[0] else "", *row) for row in of_weights]
    return _table(caption, "step", "", "mean gradient", *steps[0].slots, "fp32 master",
                  f"{steps[0].example.compute} copy", rows=rows)


def _memory(found: Replay) -> Table:
    """Bytes by kind on every rank: at the moments of a step, and at its fullest."""
    rows = []
    for rank, recorder in enumerate(found.steps[0].recorders):
        columns = [recorder.snapshots[moment].held_nbytes for moment in MOMENTS] + [found.peak_nbytes_by_kind[rank]]
        for kind in (kind for kind in KINDS if any(kind in column for column in columns)):
            rows.append((str(rank) if kind == KINDS[0] else "", words(kind),
                         *(str(column.get(kind, "")) for column in columns)))
        rows.append(("", "[bold]all[/]", *(f"[bold]{sum(column.values())}[/]" for column in columns)))
    return _table("Bytes held", "rank", "kind", *MOMENTS.values(), "peak", rows=rows)


# -- how it is written ------------------------------------------------------------------------------------------------


def _table(caption: str, *columns: str, rows: Iterable[Sequence[str]]) -> Table:
    """A table at the margin, numbers to the right where a column's name says bytes."""
    names = (RIGHT + name if name.endswith(" B") else name for name in columns)
    return marked_table(*names, rows=rows, caption=caption, indent=0)


def _numbers(values: Iterable[float]) -> str:
    """``1, -2.5``."""
    return ", ".join(short(value) for value in exact(list(values)))


def _decimals(values: Iterable[float]) -> list[str]:
    """Every digit of each value."""
    return [decimal(value) for value in values]


def _listed(values: Sequence[int]) -> str:
    """``8, 8``; "all" where there are none, since a message that names no chunks carries the whole vector."""
    return ", ".join(map(str, values)) if values else "all"


def exact(values: Sequence[float] | np.ndarray) -> list[float]:
    """Python floats whose shortest decimals are those of the fp32 values: 0.03, not 0.029999999329447746."""
    return list(map(shortest, values))


def decimal(value: Any) -> str:
    """Every digit of a binary number: 2.099609375 for the fp16 value that prints as 2.1."""
    return format(Decimal(float(value)).normalize(), "f")
