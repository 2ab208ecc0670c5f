"""A plan as the command shows it: the verdict on top, a row for each stage and policy, formulas and measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from zerosim.display.plan_table import UNITS, answers, cells, names_for, places_text, subject
from zerosim.display.style import percent
from zerosim.display.views import RIGHT, Part, TextLine, View, marked_table, parts
from zerosim.models.units import TILED, Recompute
from zerosim.numerics.units import bytes_text, counted, gigabytes
from zerosim.optim.base import Optimizer
from zerosim.planning import questions
from zerosim.planning.configuration import UTILIZATION, Plan, PlanConfig
from zerosim.planning.conventions import is_cut_anywhere
from zerosim.planning.explanation import explained, options_text
from zerosim.planning.plan_row import PlanRow
from zerosim.planning.runtimes import DEEPSPEED, FSDP2, MEGATRON_CORE

if TYPE_CHECKING:
    from zerosim.course.measured import Compared

    Measured = Mapping[PlanRow, Sequence[Compared]]

INDENT = 4  # columns of a terminal beside those of a table


def plan_view(found: Plan, columns: int, *, explain: bool = False, measured: Measured | None = None,
              notes: Iterable[str] = (), beside: Plan | None = None) -> View:
    """The plan for a terminal of so many columns; another one beside it, notes on what was asked, below the remarks;
    each number's formula, and what runs measure, where asked for."""
    explanations = [_explanation(found, row) for row in found.rows] if explain else []
    measurements = [_measurement(row, lines) for row, lines in (measured or {}).items()]
    return View(found.verdict, "", parts(map(escape, answers(found)), _largest_and_fewest(found), _rows(found, columns),
                                         _beside(found, beside), _remarks(found), map(escape, notes), *explanations,
                                         *measurements))


def _rows(found: Plan, columns: int) -> Iterator[Part | str]:
    """The subject of the plan, and the rows in gigabytes and seconds."""
    model, rest = map(escape, subject(found.config))
    yield from ("", TextLine(f"[bold]{model}[/]{rest}", indent=0), "")
    names = names_for(found, columns - INDENT)
    spare = names.index("spare") + 1
    lines = [[*line[:spare], f"[{'green' if row.has_margin else 'yellow' if row.fits else 'red'}]{line[spare]}[/]",
              *line[spare + 1:]] for row, line in zip(found.rows, cells(found, names), strict=True)]
    yield marked_table("", *(RIGHT + name for name in names), rows=lines)
    yield ""


def _beside(found: Plan, other: Plan | None) -> Iterator[Part | str]:
    """The fastest rows of two plans side by side."""
    if other is None:
        return
    lines = questions.compared(found, other)
    if not lines:
        yield f"Nothing is side by side: {escape(other.verdict)}"
        return
    assert found.fastest is not None
    assert other.fastest is not None
    yield TextLine("[bold cyan]side by side[/], each with the fastest row that fits", indent=0)
    titles = [(escape(plan.name_of(row)), escape("".join(subject(plan.config))))
              for plan, row in ((found, found.fastest), (other, other.fastest))]
    yield marked_table("", RIGHT + "A", RIGHT + "B", RIGHT + "B/A", rows=[
        (name, f"{one:,.4g}", f"{two:,.4g}", f"{two / one:.2f}" if one else "") for name, one, two in lines])
    yield from (f"{letter} is {name} of {of}." for letter, (name, of) in zip("AB", titles, strict=True))


def _remarks(found: Plan) -> Iterator[str]:
    """The units, what the numbers rest on, and what is left out of them."""
    config = found.config
    margin = (f"A margin of {percent(config.margin)} of the device, {gigabytes(config.margin_nbytes)} GB, is" if
              config.margin else "No margin was asked for, which is")
    yield f"{UNITS} {margin} for the allocator's fragments, and for peaks that no account has."
    yield from _rests_on(config)
    if not config.has_units:
        yield "Activations and what is gathered are not in the total: name a model, or the largest layer."
    if isinstance(config.optimizer, Optimizer) and not is_cut_anywhere(config.optimizer):
        yield (f"What {config.optimizer_name} works in while it updates whole tensors is not in the total"
               + (": --measure shows it, where the engine runs it." if config.is_engine else "."))
        if config.optimizer.product_flops((1, 1)) is None:
            yield (f"Roots and eigenvectors of matrices, which {config.optimizer_name} makes in its update, are not in "
                   "the seconds: time some steps of it on your device.")
        if config.optimizer_name == "Adafactor" and config.runtime == FSDP2 and {2, 3} & {*config.stages}:
            yield "PyTorch 2.13's own Adafactor refuses fully_shard's shards; the state is of one that takes them."
    if config.host_link:
        yield (f"Offload: {config.options.offload}; {escape(places_text(config))}. What is moved counts as beside "
               "nothing.")
    if (least := found.least_sent) is not None:
        yield f"Least traffic of what fits: {found.name_of(least)}, {bytes_text(least.sent_nbytes_per_step)} per step."
    yield ("Tensor, pipeline, sequence and expert parallelism and inference are not planned here: ask Megatron Core or "
           "torchtitan, and an inference engine such as vLLM.")


def _held_to(config: PlanConfig) -> str:
    """The steps that the seconds were compared with, all in docs/plan.md."""
    if not config.options.offload.is_none:
        return ", and no more than a hint: the published steps with offload took twice as long"
    if config.runtime == DEEPSPEED:
        return " in FSDP2's order: the published steps of today's DeepSpeed took a third to a half longer"
    return ", held to published step times"


def _rests_on(config: PlanConfig) -> Iterator[str]:
    """The sources of bytes and seconds."""
    if (of := config.decoder) is not None and of.windowed and of.window < config.sequence:
        yield f"In {of.windowed} of {of.blocks} blocks attention has a window of {of.window:,} tokens: " + (
            "its kernel computes what is in it." if config.runtime == MEGATRON_CORE else
            "it counts as the whole square." if config.is_engine else
            "SDPA is handed a mask, which it keeps, and computes the whole square.")
    if not config.is_engine:
        yield (f"Bytes are those of {config.runtime}, by an account whose rows --explain lists with their sources; "
               f"seconds are estimates with {options_text(config)}{_held_to(config)}.")
        experts = None if config.decoder is None else config.decoder.experts
        if experts is not None and config.ranks > experts.count:
            yield (f"Experts are one tensor of {experts.count}, which fully_shard cuts by expert: on more ranks each "
                   "shard is padded to one, and the total shows it. Shard inside nodes (--mesh), or by experts.")
        return
    share = percent(config.utilization or UTILIZATION)
    yield (f"Bytes and seconds are those of zerosim's engine with {options_text(config)}; arithmetic is taken to reach "
           f"{share} of the dense peak, or what memory allows. Its layers make norms and gates again in backward, and "
           "keep less than PyTorch's: plan those with --runtime fsdp2.")
    if config.decoder is not None and any(Recompute.parse(policy).inside != TILED for policy in config.policies):
        yield "Attention holds its probabilities where a row says so, as a fused one does not."


def _largest_and_fewest(found: Plan) -> Iterator[str]:
    """The answers to the inverse questions, each with the margin."""
    config, dividing, shared = found.config, "", ""
    if (sequences := config.global_batch) is not None:
        shared = f"share {counted(sequences, 'sequence')} equally"
        dividing = f", of those that divide the {sequences // config.ranks:,} of each rank" * (sequences > config.ranks)
    if config.decoder is not None:
        batch, tokens = questions.largest_batch(config), questions.largest_sequence(config)
        beyond = f", beyond the model's {config.longest_sequence:,}" * (tokens > config.longest_sequence)
        yield (f"Largest micro-batch: {counted(batch, 'sequence')}{dividing}. Longest sequence in micro-batches of "
               f"{config.batch}: {counted(tokens, 'token')}{beyond}." if batch else "Not even one sequence fits.")
    ranks, most = questions.fewest_ranks(config), questions.largest_model(config)
    inside = {None: "", True: "; sharded inside nodes alone (--mesh) it fits too", False:
              "; sharded inside nodes alone (--mesh) it does not"}[questions.fits_inside_nodes(config)]
    if ranks is None:
        yield (f"No number of ranks{shared and f' that can {shared}'} makes it fit: what is not in shards, as "
               "activations and gathered units, does not shrink.")
    else:
        yield (f"Fewest ranks on which it fits{shared and f' and which {shared}'}: {ranks:,}, sharded over all of "
               f"them{inside}.")
    if most is not None:
        yield "Largest model" + (" by its states alone" if config.decoder is None else " of such blocks") + (
            f": {most.parameters / 1e9:,.4g} billion parameters"
            f"{', or more' * (most.transformer is not None and most.transformer.blocks == questions.MOST_BLOCKS)}.")


def _explanation(found: Plan, row: PlanRow) -> tuple[Part | str, ...]:
    """Every number of a row with its formula."""
    return ("", TextLine(f"[bold cyan]{row.title}[/]", indent=0), "",
            marked_table("", "", RIGHT, rows=[tuple(map(escape, line)) for line in explained(found.config, row)]))


def _measurement(row: PlanRow, lines: Sequence[Compared]) -> tuple[Part | str, ...]:
    """The estimate beside the measurement in a run without data, and the difference by name."""
    heading = f"[bold cyan]{row.title}[/], estimated, and measured on rank 0 of a run without data, in bytes"
    return ("", TextLine(heading, indent=0),
            marked_table("", RIGHT + "estimated", RIGHT + "measured", RIGHT + "difference", rows=[
                (line.name, f"{line.estimated_nbytes:,}", f"{line.measured_nbytes:,}",
                 f"{line.difference_nbytes:+,}" if line.difference_nbytes else "0") for line in lines]))


def as_json(found: Plan, measured: Measured | None = None, beside: Plan | None = None) -> dict[str, Any]:
    """The plan as plain data, its explanation with it, and the measurements and the other plan where they were asked
    for."""
    data = found.as_dict()
    whole = questions.training(found.config, found.fastest) if found.fastest else None
    data |= {"training": whole and asdict(whole), "beside": beside and {
        "plan": beside.as_dict(), "compared": [{"what": name, "here": one, "there": other}
                                               for name, one, other in questions.compared(found, beside)]}}
    for row, line in zip(found.rows, data["rows"], strict=True):
        line["explained"] = [{"what": what, "formula": formula, "value": value}
                             for what, formula, value in explained(found.config, row)]
        if measured:
            line["measured"] = [{"what": one.name, "estimated_nbytes": one.estimated_nbytes,
                                 "measured_nbytes": one.measured_nbytes, "difference_nbytes": one.difference_nbytes}
                                for one in measured[row]]
    return data
