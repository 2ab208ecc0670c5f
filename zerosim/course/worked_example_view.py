"""A replay as a view: where each state rests, what happened in order, and what every number came to.

Legend: N ranks; weights are w1 ... w4, in the order of the flat vector.
"""

from collections.abc import Iterable, Iterator, Sequence

from zerosim.course.worked_example import NAMES, Example, HopValues, Replay, Step, decimal, exact
from zerosim.display.numbers import short
from zerosim.display.views import RIGHT, Note, Part, Rule, Table, View, marked_table
from zerosim.ranks.trace import KINDS

STATES = ("parameter", "gradient", "master", "m", "v")
MOMENTS = {"start": "start", "backward": "backward", "reduce": "reduced", "update": "updated", "end": "end"}


def replays_view(example: Example, found: dict[int, Replay], *, hops: bool) -> View:
    """The example, then every stage; where there are several, a last word on what they share."""
    parts = [part for stage, of_stage in found.items() for part in stage_parts(stage, of_stage, hops=hops)]
    if len(found) > 1:
        parts += [Rule("[bold]all stages[/]"), comparison_table(found), Note(
            f"The fp32 masters and the {example.compute} copies are "
            + ("the same in every stage, bit for bit." if same_bits(found) else "NOT the same in every stage."), 0)]
    return View("The worked example", f": 4 weights on {example.ranks} ranks, {example.compute}, "
                f"Adam with learning rate {example.learning_rate:g}", (*map(Note, header(example)), *parts))


def comparison_table(found: dict[int, Replay]) -> Table:
    """The memory and the traffic of every rank in each stage."""
    rows = []
    for stage, of_stage in found.items():
        for rank, recorder in enumerate(of_stage.recorders):
            rows.append((str(stage) if rank == 0 else "", str(rank),
                          str(sum(recorder.snapshot("start").held_nbytes.values())),
                          str(sum(of_stage.peak_nbytes_by_kind[rank].values())), str(of_stage.sent_nbytes[rank])))
    return table("", "stage", "rank", "at rest B", "peak B", "sent B", rows=rows)


def same_bits(found: dict[int, Replay]) -> bool:
    """True when all stages end in the same bits."""
    ends = {(of_stage.whole("master", "end").tobytes(), of_stage.whole("parameter", "end").tobytes())
            for of_stage in found.values()}
    return len(ends) == 1


def header(example: Example) -> Iterator[str]:
    """The model, the data and the settings, which all stages share."""
    yield "h = w1·x1 + w2·x2   a = relu(h)   y = w3·a + w4   loss = ½(y - t)²"
    yield f"layer1 is w1 w2, layer2 is w3 w4; they begin as {numbers(example.weights)}"
    for rank in range(example.ranks):
        (x1, x2), target = example.sample(rank)
        yield f"rank {rank} trains on x = ({x1:g}, {x2:g}), t = {target:g}"
    yield f"layout {example.layout}, recompute {example.recompute}"


def stage_parts(number: int, found: Replay, *, hops: bool) -> Iterator[Part]:
    """One stage, from where its states rest to what they came to."""
    yield Rule(f"[bold]stage {number}[/]: {stage_text(found)}")
    yield resting_table(found)
    yield story_table(found, hops=hops)
    yield from disagreement(found)
    if found.recorders[0].skipped:
        yield Note("Some gradient was inf or NaN: every rank skipped the step, and nothing has changed.", 0)
    yield results_table(found)
    yield Note(cast_remark(found), 0)
    yield memory_table(found)
    yield Note(f"Sent by each rank, parameters and gradients: {listed(found.sent_nbytes)} bytes", 0)


def stage_text(found: Replay) -> str:
    """``parameters replicated, gradients partial, optimizer sharded``."""
    stage = found.stage
    return (f"parameters {stage.parameters.value}, gradients {stage.gradients.value}, "
            f"optimizer {stage.optimizer.value}")


def resting_table(found: Replay) -> Table:
    """State by rank: the weights of which each rank holds that state between steps."""
    rows = []
    for rank in range(found.example.ranks):
        cells = [" ".join(NAMES[i] for i in found.held_part(state, "start", rank)) or "-" for state in STATES]
        rows.append((str(rank), *cells))
    return table("Where each state rests", "rank", *STATES, rows=rows)


def story_table(found: Replay, *, hops: bool) -> Table:
    """Every step, and under it every rank: the values, the bytes sent, the bytes held right after."""
    rows = []
    seen = [0] * found.example.ranks
    for number, step in enumerate(found.steps, 1):
        for rank in range(found.example.ranks):
            first = rank == 0
            rows.append((str(number) if first else "", f"{step.op} {step.unit}" if first else "", str(rank),
                          values_text(found, step, rank, seen), str(step.sent_nbytes[rank] or ""),
                          str(sum(step.held_nbytes[rank].values()))))
        if hops and step.call is not None:
            for made in found.hops.get(step.call, []):
                rows.append(("", "", "", hop_text(made), "", ""))
    return table("What happens", "", "event", "rank", "values", "sent B", "holds B", rows=rows)


def hop_text(made: HopValues) -> str:
    """One message: who to whom, which chunks, which values."""
    hop = made.hop
    carried = numbers(made.values) if made.values else "nothing (0 bytes)"
    return f"[dim]hop {hop.step}, {hop.source} → {hop.destination}, chunk {listed(hop.chunks)}: {carried}[/]"


def values_text(found: Replay, step: Step, rank: int, seen: list[int]) -> str:
    """The step in numbers on one rank. ``seen`` counts the passes already shown, by rank."""
    recorder = found.recorders[rank]
    if step.op in ("forward", "recompute", "backward"):
        passed = recorder.passes[seen[rank]]
        seen[rank] += 1
        if passed.gradients is not None:
            return f"dy {numbers(passed.values_in)}: gradients {numbers(passed.gradients)}"
        return f"{numbers(passed.values_in)} → {numbers(passed.values_out if passed.values_out is not None else ())}"
    if step.op == "loss":
        return f"loss {found.losses[rank]:g}" if not _is_later_loss(found, step) else ""
    if step.op in ("reduce_scatter", "all_reduce"):
        return owned_text("sum", of_unit(found, step, found.held_part("reduced", "reduce", rank)))
    if step.op == "all_gather":
        moment = "end" if step is last_gather(found) and found.stage.parameters.value == "replicated" else "start"
        whole = dict(enumerate(exact(found.whole("parameter", moment, rank))))
        return owned_text("has", of_unit(found, step, whole))
    if step.op == "update":
        return owned_text("new", found.held_part("master", "update", rank))
    return step.kind.replace("_", " ") if step.kind else ""


def _is_later_loss(found: Replay, step: Step) -> bool:
    return next(s for s in found.steps if s.op == "loss") is not step


def last_gather(found: Replay) -> Step | None:
    """The gather that ends the step, where there is one."""
    gathers = [step for step in found.steps if step.op == "all_gather"]
    return gathers[-1] if gathers else None


def of_unit(found: Replay, step: Step, values: dict[int, float]) -> dict[int, float]:
    """The values of the weights that belong to the step's unit."""
    if step.unit == "all":
        return values
    names = [entry.unit for entry in found.layout.entries for _ in range(entry.high - entry.low)]
    return {i: value for i, value in values.items() if names[i] == step.unit}


def owned_text(word: str, values: dict[int, float]) -> str:
    """``sum w3 -5.5, w4 -10``, or a dash for an empty shard."""
    return f"{word} " + ", ".join(f"{NAMES[i]} {short(value)}" for i, value in values.items()) if values else "-"


def disagreement(found: Replay) -> Iterator[Note]:
    """The copies between the update and the all-gather: only their owners have updated replicated ones."""
    copies = [decimals(found.whole("parameter", "update", rank)) for rank in range(found.example.ranks)]
    if len({tuple(copy) for copy in copies}) == 1:
        return
    yield Note("")
    yield Note(f"After the update and before the all-gather the {found.example.compute} copies disagree:", 0)
    for rank, copy in enumerate(copies):
        yield Note(f"rank {rank} has {', '.join(copy)}")


def results_table(found: Replay) -> Table:
    """For each weight the mean gradient, Adam's state, the new master, and what its cast really is."""
    low = found.example.compute
    rows = []
    columns = [found.reduced_gradients, exact(found.whole("m", "end")), exact(found.whole("v", "end")),
               exact(found.whole("master", "end"))]
    casts = decimals(found.whole("parameter", "end"))
    for i, name in enumerate(NAMES):
        rows.append((name, *(short(column[i]) for column in columns), casts[i]))
    return table("What it comes to", "", "mean gradient", "m", "v", "fp32 master", f"{low} copy, exactly", rows=rows)


def memory_table(found: Replay) -> Table:
    """Bytes by kind on every rank: at the moments of the step, and at its peak."""
    rows = []
    for rank, recorder in enumerate(found.recorders):
        columns = [recorder.snapshot(moment).held_nbytes for moment in MOMENTS] + [found.peak_nbytes_by_kind[rank]]
        for kind in (kind for kind in KINDS if any(kind in column for column in columns)):
            rows.append((str(rank) if kind == KINDS[0] else "", kind.replace("_", " "),
                          *(str(column.get(kind, "")) for column in columns)))
        rows.append(("", "[bold]all[/]", *(f"[bold]{sum(column.values())}[/]" for column in columns)))
    return table("Bytes held", "rank", "kind", *MOMENTS.values(), "peak", rows=rows)


def table(caption: str, *columns: str, rows: Iterable[Sequence[str]]) -> Table:
    """A table at the margin, numbers to the right where a column's name says bytes."""
    names = (RIGHT + name if name.endswith(" B") else name for name in columns)
    return marked_table(*names, rows=rows, caption=caption, indent=0)


def numbers(values: Iterable[float]) -> str:
    """``1, -2.5``."""
    return ", ".join(short(value) for value in exact(list(values)))


def decimals(values: Iterable[float]) -> list[str]:
    """Every digit of each value."""
    return [decimal(value) for value in values]


def listed(values: Sequence[int]) -> str:
    """``8, 8``, or a word for the whole vector."""
    return ", ".join(map(str, values)) if values else "all"


def cast_remark(found: Replay) -> str:
    """One weight whose printed value is not the one that the compute format has; nothing where there is none."""
    for name, value, cast in zip(NAMES, exact(found.whole("master", "end")),
                                 decimals(found.whole("parameter", "end")), strict=True):
        if short(value) != cast:
            return f"Texts print {short(value)} for {name} throughout; its {found.example.compute} copy is {cast}."
    return ""
