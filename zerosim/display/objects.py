"""The views of the library's classes: clusters, memories and traces, layouts and engines, plans, steps of a run.

Legend: N ranks; n elements, of a layout's padded vector or of a collective's whole vector.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.display import style
from zerosim.display.plan_table import ALL, COLUMNS, answers, cells, subject
from zerosim.display.views import MOST_ROWS, Bars, Line, Strip, Table, View, memory_bars, words
from zerosim.numerics.arrays import has_data, is_poisoned
from zerosim.numerics.units import counted
from zerosim.planning.configuration import Plan
from zerosim.planning.questions import OverRanks
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.inspect import Step, Steps
from zerosim.ranks.memory import Memories, Memory
from zerosim.ranks.trace import KINDS, PURPOSES, Collective, Compute, Trace, Traces
from zerosim.zero.engine import Engine
from zerosim.zero.layout import Layout, Region
from zerosim.zero.placements import STAGES


def cluster_view(cluster: Cluster) -> View:
    """Each rank's memory now and at its fullest, and its traffic in the last run."""
    memories, runs = cluster.memory, len(cluster.runs)
    size, here = cluster.ranks[0].size, len(cluster.ranks)
    rest = f", {cluster.world}; {counted(runs, 'run')}"
    names = [f"rank {rank.index}" for rank in cluster.ranks]
    rest += "" if here == size else f"; shown: {', '.join(names)}"
    table = Table("What each rank holds, and sent in the last run (bytes)",
                  ("rank", ">holds now", ">at its peak", ">sent", ">collectives", ">messages of its own"),
                  tuple((name.removeprefix("rank "), f"{memory.now_nbytes:,}", f"{memory.peak_nbytes:,}",
                         *_sent(trace)) for name, memory, trace in zip(names, memories, cluster.trace, strict=True)))
    return View(f"Cluster of {counted(size, 'rank')}", rest, (table, *_peaks(names, memories)))


def _sent(trace: Trace) -> tuple[str, str, str]:
    if trace.dropped:
        return f"{trace.sent_nbytes():,}", "", ""
    rows = list(trace.messages())
    collectives = sum(isinstance(row, Collective) for row in rows)
    return f"{trace.sent_nbytes():,}", f"{collectives:,}", f"{len(rows) - collectives:,}"


def _peaks(names: Sequence[str], memories: Memories) -> Iterable[Bars]:
    peaks = dict(zip(names, memories.peak_nbytes_by_kind, strict=True))
    if any(peaks.values()):
        limits = {memory.capacity_nbytes for memory in memories}
        yield memory_bars("Held at the fullest instant, by kind", peaks, limits.pop() if len(limits) == 1 else None)


# -- memory -----------------------------------------------------------------------------------------------------------

def memory_view(memory: Memory) -> View:
    """One rank's memory now and at its fullest, by kind."""
    now, peak = memory.now_nbytes_by_kind, memory.peak_nbytes_by_kind
    table = Table("By kind (bytes)", ("kind", ">now", ">at the peak"), (
        *((words(kind), f"{now.get(kind, 0):,}", f"{peak.get(kind, 0):,}") for kind in KINDS
          if kind in now or kind in peak),
        ("all", f"{memory.now_nbytes:,}", f"{memory.peak_nbytes:,}")))
    bars = memory_bars("Now, and at the fullest instant", {"now": now, "peak": peak}, memory.capacity_nbytes)
    limit = "no limit" if memory.capacity_nbytes is None else f"a capacity of {memory.capacity_nbytes:,} bytes"
    return View(f"Memory of {memory.owner}", f", with {limit}", (*([bars] if now or peak else []), table))


def memories_view(memories: Memories) -> View:
    """The memory of all ranks."""
    names = [memory.owner for memory in memories]
    table = Table("Bytes", ("rank", ">holds now", ">at its peak"), tuple(
        (memory.owner, f"{memory.now_nbytes:,}", f"{memory.peak_nbytes:,}") for memory in memories))
    return View("Memories", f" of {counted(len(memories), 'rank')}", (*_peaks(names, memories), table))


# -- traces -----------------------------------------------------------------------------------------------------------

def trace_view(trace: Trace) -> View:
    """One rank's traffic by kind of collective, and its arithmetic by span."""
    return View("Trace", f" of {counted(len(trace.rows), 'row')}{_dropped([trace])}, {trace.sent_nbytes():,} bytes "
                "sent", _by_row([trace]))


def traces_view(traces: Traces) -> View:
    """All ranks' traffic by purpose and by kind of collective."""
    purposes = [purpose for purpose in PURPOSES if any(traces.sent_nbytes(purpose))]
    table = Table("Bytes sent, by purpose", ("rank", *(f">{purpose}" for purpose in purposes), ">all"), tuple(
        (str(rank), *(f"{trace.sent_nbytes(purpose):,}" for purpose in purposes), f"{trace.sent_nbytes():,}")
        for rank, trace in enumerate(traces)))
    return View("Traces", f" of {counted(len(traces), 'rank')}{_dropped(traces)}, {sum(traces.sent_nbytes()):,} bytes "
                "sent in all", (table, *_by_row(traces)))


def _dropped(traces: Sequence[Trace]) -> str:
    """The rows that are gone, in words; nothing where none are."""
    dropped = sum(trace.dropped for trace in traces)
    return f" ({counted(dropped, 'row')} dropped before)" if dropped else ""


def _by_row(traces: Sequence[Trace]) -> tuple[Table, ...]:
    """The tables that count rows; none where some are gone."""
    return () if _dropped(traces) else (_operations(traces), *_spans(traces))


def _operations(traces: Sequence[Trace]) -> Table:
    """Collectives and messages by what they do, summed over these ranks."""
    times, sent = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for trace in traces:
        for row in trace.messages():
            key = ((row.call.operation, row.call.algorithm, row.purpose) if isinstance(row, Collective)
                   else ("message", "", row.purpose))
            times[key] += 1
            sent[key] += row.sent_nbytes
    whose = "by this rank" if len(traces) == 1 else "by all ranks"
    return Table(f"Collectives and messages, {whose}", ("operation", "algorithm", "purpose", ">times", ">bytes sent"),
                 tuple((*key, f"{times[key]:,}", f"{sent[key]:,}") for key in times))


def _spans(traces: Sequence[Trace]) -> Iterable[Table]:
    """FLOPs and bytes sent, by the first two names of a span."""
    flops, sent = Counter[str](), Counter[str]()
    for trace in traces:
        for row in trace.all_rows():
            if isinstance(row, Compute):
                flops["/".join(row.span[:2])] += row.flops
        for message in trace.messages():
            sent["/".join(message.span[:2])] += message.sent_nbytes
    if names := dict.fromkeys([*flops, *sent]):
        yield Table("By span, the stretches of the program that it named", ("span", ">FLOPs", ">bytes sent"), tuple(
            (name or "(outside)", f"{flops[name]:,}", f"{sent[name]:,}") for name in names))


# -- layouts and engines ----------------------------------------------------------------------------------------------

MOST_LETTERS = 160  # of what one rank owns


def layout_view(layout: Layout) -> View:
    """Which rank owns which elements: a strip for each region, and what each rank owns by name."""
    padding = layout.length - layout.valid_length
    return View(f"Layout {layout.name}", f": {layout.valid_length:,} parameters and {padding:,} elements of padding, "
                f"cut among {counted(layout.ranks, 'rank')}", (cut_strip(layout), _owners(layout)))


def cut_strip(layout: Layout) -> Strip:
    """The vector, region by region."""
    return Strip("The cut of the vector, by owner (elements; hatched: padding)", tuple(map(_line, layout.regions)))


def _line(region: Region) -> Line:
    return Line(region.name, tuple(bound - region.low for bound in region.bounds), region.valid_high - region.low)


def _owners(layout: Layout) -> Table:
    rows = []
    shown = layout.ranks if layout.ranks <= MOST_ROWS else MOST_ROWS - 1  # of many ranks it takes long to describe all
    for rank in range(shown):
        text = layout.owned_text(rank)
        rows.append((str(rank), f"{layout.shard_length(rank):,}",
                     text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS - 2] + " …"))
    if shown < layout.ranks:
        rows.append((f"and {layout.ranks - shown:,} more ranks", "", ""))
    return Table("What each rank owns", ("rank", ">elements", "of which parameters"), tuple(rows))


def engine_view(engine: Engine) -> View:
    """An engine: how it trains, how its vectors are cut, and what its rank holds."""
    rank, memory = engine.rank, engine.rank.memory
    stages = {stage: f"ZeRO-{number}" for number, stage in STAGES.items()}  # others are shown by their placements
    facts = Table("How it trains", ("what", "value"), (
        ("stage", stages.get(engine.stage, str(engine.stage))), ("parameters rest", engine.stage.parameters.value),
        ("gradients rest", engine.stage.gradients.value), ("optimizer state rests", engine.stage.optimizer.value),
        ("optimizer", type(engine.optimizer).__name__), ("computes in", engine.policy.compute),
        ("reduces in", str(engine.policy.reduce_dtype)), ("recomputes", str(engine.recompute)),
        ("loss scale", f"{engine.loss_scale.scale:g}"), ("steps taken", f"{engine.steps_taken:,}")))
    kinds = {"now": memory.now_nbytes_by_kind, "peak": memory.peak_nbytes_by_kind}
    held = memory_bars(f"What rank {rank.index} holds", kinds, memory.capacity_nbytes)
    strips = (cut_strip(group.layout) for group in engine.param_groups)
    return View("Engine", f" of rank {rank.index} of {rank.size}", (facts, held, *strips))


# -- plans ------------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, str] = MappingProxyType({
    "parameters": style.BLUE, "gradients": style.VERMILLION, "optimizer": style.ORANGE, "activations": style.GREEN,
    "logits": style.LIGHT_GREEN, "gathered": style.SKY_BLUE, "buckets": style.PURPLE, "overhead": style.GRAY})


def plan_view(plan: Plan) -> View:
    """The verdict, bars of bytes beside the capacity, and the rows."""
    bars = Bars(f"What one rank would hold on {plan.config.device.name}",
                tuple((name, row.parts) for name, row in zip(row_names(plan), plan.rows, strict=True)), PARTS,
                plan.rows[0].capacity_nbytes)
    table = Table("Each row, bytes in GB", ("stage and recomputation", *(f">{name}" for name in ALL)),
                  tuple(map(tuple, cells(plan))))
    said = "".join(f" {line}" for line in answers(plan))
    return View(plan.verdict, f"{said} {''.join(subject(plan.config))}.", (bars, table))


def over_ranks_view(over: OverRanks) -> View:
    """The fastest row on each number of ranks."""
    names = ("total", "spare", "exposed", "step", "tokens/s", "MFU")
    lines = [(f"{plan.config.ranks:,}", *(("nothing fits", *[""] * len(names)) if row is None else
                                          (row.title, *(COLUMNS[name][1](COLUMNS[name][0](row)) for name in names))))
             for plan, row in zip(over.plans, over.rows, strict=True)]
    table = Table("The fastest row that fits on each number of ranks; GB of one rank, tokens/s of one device",
                  (">ranks", "stage and recomputation", *(f">{name}" for name in names)), tuple(lines))
    return View(over.plans[0].config.model.name, " over ranks", (table,))


def row_names(plan: Plan) -> list[str]:
    """``ZeRO-2 block``, of each row."""
    return [f"ZeRO-{label.replace(' none', '')}" for label, in cells(plan, [])]


# -- steps of a run: what moved, and every rank as it is then ---------------------------------------------------------

MOST_VALUES = 12  # of an array in a table


def step_view(step: Step) -> View:
    """The message or the collective, the arrays of every rank, and what each holds."""
    what = "a message that the program sent itself" if step.call is None else str(step.call)
    arrays = Table("Every rank, as it is now", ("rank", "brought", "result so far", ">sent by calls that ended (bytes)",
                                                ">bytes held", "its program waits at"),
                   tuple((str(now.rank), values_text(now.x), values_text(now.out), f"{now.sent_nbytes:,}",
                          f"{now.now_nbytes:,}", now.where) for now in step.ranks))
    held = {f"rank {now.rank}": now.nbytes_by_kind for now in step.ranks}
    bars = (memory_bars("Held now, by kind", held),) if any(held.values()) else ()
    return View(f"Step {step.number}", f": {what}", (_moved(step), arrays, *bars))


def _moved(step: Step) -> Table:
    group = range(len(step.ranks)) if step.call is None else step.call.group  # the ranks in the whole cluster
    rows: tuple[tuple[str, ...], ...] = tuple((
        str(hop.step), str(group[hop.source]), str(group[hop.destination]),
        ", ".join(f"c{chunk}" for chunk in hop.chunks) or "all of it", f"{hop.nbytes:,}") for hop in step.hops)
    if step.hop is not None:
        rows = tuple((*row, values_text(step.values)) for row in rows)
    columns = (">hop", ">from rank", ">to rank", "chunks", ">bytes", "values that arrived")
    return Table("What moved", columns[:len(rows[0]) if rows else 5], rows)


def values_text(array: np.ndarray | None) -> str:
    """The first values of an array, without brackets; a word for none, for an empty one and for one without data."""
    if array is None:
        return "takes no part"
    if not has_data(array):
        return f"{array.size:,} values without data"
    if not array.size:
        return "nothing"
    if is_poisoned(array):
        return "not written yet"
    shown = " ".join(style.short(value) for value in array.reshape(-1)[:MOST_VALUES].astype(object).tolist())
    return shown + (f" … ({array.size:,})" if array.size > MOST_VALUES else "")


def steps_view(steps: Steps) -> View:
    """The latest step, after how far the walk has come."""
    rest = f" by {steps.by} through a run of {counted(len(steps.cluster.ranks), 'rank')}: {steps.taken:,} taken"
    return View("Steps", rest, () if steps.last is None else step_view(steps.last).parts)


VIEWS: Mapping[type, Callable[[Any], View]] = MappingProxyType({
    Cluster: cluster_view, Memory: memory_view, Memories: memories_view, Trace: trace_view, Traces: traces_view,
    Layout: layout_view, Engine: engine_view, Plan: plan_view, OverRanks: over_ranks_view,
    Step: step_view, Steps: steps_view})
