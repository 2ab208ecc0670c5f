"""A replay as a view: where each state rests, what happened in order, and the results.

Legend: N ranks; weights are w1 ... w4, in the order of the flat vector.
"""

from collections.abc import Iterable, Iterator, Sequence

from zerosim.course.worked_example import NAMES, UNITS, Example, HopValues, Replay, Replays, StoryStep, decimal, exact
from zerosim.display.style import short
from zerosim.display.views import RIGHT, Part, Rule, Table, TextLine, View, marked_table, parts, words
from zerosim.ranks.trace import KINDS

STATES = ("parameter", "gradient", "master", "m", "v")
MOMENTS = {"start": "start", "backward": "backward", "reduce": "reduced", "update": "updated", "end": "end"}


def lesson(found: Replays, *, hops: bool) -> View:
    """The example, then every stage; where there are several, a last word on what they share."""
    example = found.example
    stages = (_stage(number, of_stage, hops=hops) for number, of_stage in found.stages.items())
    return View("The worked example", f": 4 weights on {example.ranks} ranks, {example.compute}, Adam with learning "
                f"rate {example.learning_rate:g}",
                parts(_header(example), *stages, _comparison(found) if len(found.stages) > 1 else ()))


def _header(example: Example) -> Iterator[str]:
    """The model, the data and the settings, which all stages share."""
    yield "h = w1·x1 + w2·x2   a = relu(h)   y = w3·a + w4   loss = ½(y - t)²"
    yield f"layer1 is w1 w2, layer2 is w3 w4; they begin as {_numbers(example.weights)}"
    for rank in range(example.ranks):
        (x1, x2), target = example.sample(rank)
        yield f"rank {rank} trains on x = ({x1:g}, {x2:g}), t = {target:g}"
    yield f"layout {example.layout}, recompute {example.recompute}"


def _comparison(found: Replays) -> Iterator[Part]:
    """The memory and the traffic of every rank in each stage, and whether all stages end in the same bits."""
    yield Rule("[bold]all stages[/]")
    yield _table("", "stage", "rank", "at rest B", "peak B", "sent B", rows=[
        (str(stage) if rank == 0 else "", str(rank), str(sum(recorder.snapshots["start"].held_nbytes.values())),
         str(sum(of_stage.peak_nbytes_by_kind[rank].values())), str(of_stage.sent_nbytes[rank]))
        for stage, of_stage in found.stages.items() for rank, recorder in enumerate(of_stage.recorders)])
    ends = {(of_stage.whole("master", "end").tobytes(), of_stage.whole("parameter", "end").tobytes())
            for of_stage in found.stages.values()}
    yield TextLine(f"The fp32 masters and the {found.example.compute} copies are " + (
        "the same in every stage, bit for bit." if len(ends) == 1 else "NOT the same in every stage."), 0)


def _stage(number: int, found: Replay, *, hops: bool) -> Iterator[Part | str]:
    """One stage, from where its states rest to the results."""
    stage = found.stage
    yield Rule(f"[bold]stage {number}[/]: parameters {stage.parameters.value}, gradients {stage.gradients.value}, "
               f"optimizer {stage.optimizer.value}")
    yield _resting(found)
    yield _story(found, hops=hops)
    yield from _disagreement(found)
    if found.recorders[0].skipped:
        yield TextLine("Some gradient was inf or NaN: every rank skipped the step, and nothing has changed.", 0)
    yield _results(found)
    yield TextLine(_cast_remark(found), 0)
    yield _memory(found)
    yield TextLine(f"Sent by each rank, parameters and gradients: {_listed(found.sent_nbytes)} bytes", 0)


def _resting(found: Replay) -> Table:
    """State by rank: the weights of which each rank holds that state between steps."""
    return _table("Where each state rests", "rank", *STATES, rows=[
        (str(rank), *(" ".join(NAMES[i] for i in found.held_part(state, "start", rank)) or "-" for state in STATES))
        for rank in range(found.example.ranks)])


# -- what happens -----------------------------------------------------------------------------------------------------


def _story(found: Replay, *, hops: bool) -> Table:
    """Every step, and under it every rank: the values, the bytes sent, the bytes held right after."""
    rows = []
    seen = [0] * found.example.ranks
    for number, step in enumerate(found.steps, 1):
        for rank in range(found.example.ranks):
            first = rank == 0
            rows.append((str(number) if first else "", f"{step.op} {step.unit}" if first else "", str(rank),
                         _values(found, step, rank, seen), str(step.sent_nbytes[rank] or ""),
                         str(sum(step.held_nbytes[rank].values()))))
        if hops and step.call is not None:
            rows += [("", "", "", _hop(made), "", "") for made in found.hops.get(step.call, [])]
    return _table("What happens", "", "event", "rank", "values", "sent B", "holds B", rows=rows)


def _hop(made: HopValues) -> str:
    """One message: who to whom, which chunks, which values."""
    hop = made.hop
    carried = _numbers(made.values) if made.values else "nothing (0 bytes)"
    return f"[dim]hop {hop.step}, {hop.source} → {hop.destination}, chunk {_listed(hop.chunks)}: {carried}[/]"


def _values(found: Replay, step: StoryStep, rank: int, seen: list[int]) -> str:
    """The step in numbers on one rank. ``seen`` counts the passes already shown, by rank."""
    if step.op in ("forward", "recompute", "backward"):
        passed = found.recorders[rank].passes[seen[rank]]
        seen[rank] += 1
        if passed.gradients is not None:
            return f"dy {_numbers(passed.values_in)}: gradients {_numbers(passed.gradients)}"
        return f"{_numbers(passed.values_in)} → {_numbers(passed.values_out)}"
    if step.op == "loss":
        first = next(one for one in found.steps if one.op == "loss")
        return f"loss {found.losses[rank]:g}" if step is first else ""
    if step.op in ("reduce_scatter", "all_reduce"):
        return _owned("sum", _of_unit(step, found.held_part("reduced", "reduce", rank)))
    if step.op == "all_gather":
        last = [one for one in found.steps if one.op == "all_gather"][-1]
        moment = "end" if step is last and found.stage.parameters.value == "replicated" else "start"
        whole = dict(enumerate(exact(found.whole("parameter", moment, rank))))
        return _owned("has", _of_unit(step, whole))
    if step.op == "update":
        return _owned("new", found.held_part("master", "update", rank))
    return words(step.kind or "")


def _of_unit(step: StoryStep, values: dict[int, float]) -> dict[int, float]:
    """The values of the weights that belong to the step's unit."""
    return {i: value for i, value in values.items() if step.unit in ("all", UNITS[i])}


def _owned(word: str, values: dict[int, float]) -> str:
    """``sum w3 -5.5, w4 -10``, or a dash for an empty shard."""
    return f"{word} " + ", ".join(f"{NAMES[i]} {short(value)}" for i, value in values.items()) if values else "-"


def _disagreement(found: Replay) -> Iterator[Part | str]:
    """The copies between the update and the all-gather: only their owners have updated replicated ones."""
    copies = [_decimals(found.whole("parameter", "update", rank)) for rank in range(found.example.ranks)]
    if len(set(map(tuple, copies))) > 1:
        yield ""
        yield TextLine(f"After the update and before the all-gather the {found.example.compute} copies disagree:", 0)
        yield from (f"rank {rank} has {', '.join(copy)}" for rank, copy in enumerate(copies))


# -- what it comes to -------------------------------------------------------------------------------------------------


def _results(found: Replay) -> Table:
    """For each weight the mean gradient, Adam's state, the new master, and what its cast really is."""
    columns = [found.reduced_gradients, *(exact(found.whole(state, "end")) for state in ("m", "v", "master"))]
    rows = zip(NAMES, *(map(short, column) for column in columns), _decimals(found.whole("parameter", "end")),
               strict=True)
    return _table("What it comes to", "", "mean gradient", "m", "v", "fp32 master",
                  f"{found.example.compute} copy, exactly", rows=rows)


def _cast_remark(found: Replay) -> str:
    """One weight whose printed value is not the one that the compute format has; nothing where there is none."""
    for name, value, cast in zip(NAMES, exact(found.whole("master", "end")),
                                 _decimals(found.whole("parameter", "end")), strict=True):
        if short(value) != cast:
            return f"Texts print {short(value)} for {name} throughout; its {found.example.compute} copy is {cast}."
    return ""


def _memory(found: Replay) -> Table:
    """Bytes by kind on every rank: at the moments of the step, and at its peak."""
    rows = []
    for rank, recorder in enumerate(found.recorders):
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
    """``8, 8``, or a word for the whole vector."""
    return ", ".join(map(str, values)) if values else "all"
