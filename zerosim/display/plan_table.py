"""A plan as a table of plain text: its columns, and the lines around them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter, methodcaller
from textwrap import fill
from typing import Any

from zerosim.numerics.places import DISK, HOST
from zerosim.numerics.units import counted, gigabytes, seconds_text
from zerosim.planning.configuration import Plan, PlanConfig
from zerosim.planning.conventions import convention_of
from zerosim.planning.explanation import options_text
from zerosim.planning.plan_row import STATES, TRANSIENT, PlanRow, fused_policy
from zerosim.planning.questions import fewest_loss_chunks, training

# Of each column what it shows of a row, and how.
COLUMNS: Mapping[str, tuple[Callable[[PlanRow], Any], Callable[[Any], str]]] = {
    **{name: (attrgetter(f"{name}_nbytes"), gigabytes) for name in (
        "states", "transient", "overhead", "total", "spare", "host", "disk")},
    **{kind: (methodcaller("nbytes_of", kind), gigabytes) for kind in (*STATES, *TRANSIENT)},
    "sent": (attrgetter("sent_nbytes_per_step"), gigabytes), "compute": (attrgetter("compute_seconds"), seconds_text),
    "exposed": (attrgetter("exposed_communication_seconds"), seconds_text),
    "step": (attrgetter("step_seconds"), seconds_text),
    "tokens/s": (attrgetter("tokens_per_second_per_rank"), "{:,.0f}".format),
    "MFU": (attrgetter("model_flops_utilization"), "{:.2f}".format)}
# Of each part of a row its name, and what makes it less: of other runtimes than zerosim's engine alone, and of all.
LESS = {"states": ("states", "--lora, ", "--offload, or more --ranks at stages 1 to 3"),
        "activations": ("activations", "", "--recompute block, or a smaller --batch or --sequence"),
        "logits": ("logits and their loss, vocabulary x tokens", "--loss-chunks, or ",
                   "a smaller --batch or --sequence"),
        "gathered": ("gathered parameters", "", "--prefetch 0, where the runtime has that, or smaller units"),
        "buckets": ("buckets", "", "--no-overlap, where the runtime has that, or smaller units")}
FEWEST = ("total", "spare", "step")
SUMS = ("states", "transient", "overhead", *FEWEST)
FEW = (*SUMS, "tokens/s")
FEWER = ("states", *TRANSIENT, "overhead", "total", "spare", "sent", "exposed", "step", "tokens/s", "MFU")
ALL = (*STATES, *FEWER[1:])
UNITS = ("GB are 10⁹ bytes of one rank, at the step's fullest moment; the parts add up to the total. Transient is all "
         "that comes and goes: activations, logits, what is gathered, buckets. Tokens/s are of one device.")


def cells(found: Plan, names: Iterable[str] = ALL) -> list[list[str]]:
    """For each row its stage and policy, and the named columns."""
    columns, known = [COLUMNS[name] for name in names], found.config.decoder is not None
    return [[f"{row.stage} {policy_label(row.recompute, row.runtime) if known else 'none'}",
             *(text(of(row)) for of, text in columns)]
            for row in found.rows]


def policy_label(policy: str, runtime: str) -> str:
    """A policy in a row of a table: ``block``, or ``block unfused``; attention is fused unless that is said."""
    named, unfused = fused_policy(policy, runtime)
    return named + " unfused" * unfused


def links_text(config: PlanConfig) -> str:
    """``over nvlink4, infiniband-ndr between 2 nodes``."""
    network = config.network
    nodes = config.ranks // (network.ranks_per_node or config.ranks)
    return f"over {network.inside.name}" + (
        f", {network.between.name} between {nodes} nodes" if network.between else "")


def subject(config: PlanConfig) -> tuple[str, str]:
    """The subject of a plan: the model's name, and the rest of the line."""
    model, size, active = config.model.name, f"{config.model.parameters:,} parameters", config.model.active_parameters
    size += f", {active:,} of them active" * (active < config.model.parameters)
    accounted = config.runtime if config.convention is None else (
        f"{config.runtime}, states as {convention_of(config.convention).name} counts them")
    mesh, zeropp = config.options.mesh, config.options.zeropp
    parts = [*([] if model == size else [size]), f"{counted(config.ranks, 'rank')} of {config.device.name} "
             f"({gigabytes(config.device.usable_nbytes)} GB) {links_text(config)}",
             f"{counted(config.micro_batches, 'micro-batch')} of {counted(config.batch, 'sequence')} of "
             f"{counted(config.sequence, 'token')}", config.policy.compute, options_text(config),
             *([f"{zeropp} on {mesh}" if zeropp else f"sharded inside nodes ({mesh})"] if mesh else []), accounted]
    return model, ": " + ", ".join(parts)


def answers(found: Plan) -> Iterator[str]:
    """Throughput of the fastest row, and what a whole training of the tokens that were asked for takes and costs.

    Before them, whose program runs on a TPU, a sequence that is not as long as the model's longest, and what is in the
    way of a row that would be faster, or of all.
    """
    config, row = found.config, found.fastest
    if config.device.platform == "tpu" and not config.is_engine:
        yield (f"On TPUs run JAX (MaxText) and PyTorch/XLA's SPMD FSDP: bytes and seconds of {config.runtime}'s program"
               " are taken there as an approximation.")
    if config.sequence_by_default and config.sequence < config.longest_sequence:
        yield (f"Sequences of {config.sequence:,} tokens, the default; the model takes {config.longest_sequence:,} "
               "(--sequence).")
    if config.sequence > config.longest_sequence:
        yield (f"Sequences of {config.sequence:,} tokens are longer than the {config.longest_sequence:,} of "
               f"{config.model.name}'s context: its positions are computed, and the program must extend them, as "
               "rope_scaling does.")
    if helpful := fewest_loss_chunks(found):
        chunks, fastest = helpful
        yield (f"Of {found.name_of(fastest)} {gigabytes(fastest.nbytes_of('logits'))} GB are logits and their loss, "
               f"vocabulary x tokens: with --loss-chunks {chunks} it leaves the margin, at "
               f"{seconds_text(fastest.step_seconds)} a step.")
    elif not any(one.has_margin for one in found.rows):
        yield _most_of(found)
    if row is None:
        return
    yield (f"{row.tokens_per_second_per_rank:,.0f} tokens per second and device, {row.tokens_per_second:,.0f} in all; "
           f"MFU {row.model_flops_utilization:.2f}.")
    if whole := training(config, row):
        hours, money = ("" if number is None else f"{number:,.{0 if number >= 100 else 2}f}"  # so that they multiply
                        for number in (whole.device_hours, whole.money))
        yield (f"{whole.tokens:,} tokens are {counted(whole.steps, 'step')}: {whole.days:,.4g} days, {hours} "
               f"device-hours{money and f', {money} at {config.price:g} each'}.")


def _most_of(found: Plan) -> str:
    """The largest part of the row that comes nearest to fitting with the margin, and what makes it less."""
    nearest = found.nearest or found.rows[0]
    parts = {"states": nearest.states_nbytes} | {kind: nearest.nbytes_of(kind) for kind in TRANSIENT}
    kind, nbytes = max(parts.items(), key=itemgetter(1))
    what, of_others, less = LESS[kind]
    if nearest.recompute == "block":
        less = less.removeprefix("--recompute block, or ")
    return (f"Most of what {found.name_of(nearest)} holds, {gigabytes(nbytes)} GB, are {what}: take "
            f"{'' if found.config.is_engine else of_others}{less}.")


def places_text(config: PlanConfig) -> str:
    """Assumptions about host and disk, where something is offloaded: links, bytes per second, and capacity."""
    there = ((HOST, config.host_link), (DISK, config.disk_link))
    parts = [f"{place}: {link.name}, {gigabytes(link.bytes_per_second)} GB a second each way, and "
             f"{gigabytes(config.capacities_nbytes[place])} GB" for place, link in there if link]
    update = ("takes no time" if config.reached is None else
              f"is of {config.reached.host_update:.3g} parameters a second, of all its devices")
    return "; ".join(parts) + f", of each device alone; the host's own update {update}" if parts else ""


def names_for(found: Plan, width: int) -> Sequence[str]:
    """The columns that a line of so many characters holds: all, or not the kinds of states, or the least."""
    several = [_with_places(found, names) for names in (ALL, FEWER, FEW, SUMS, FEWEST)]
    return next((names for names in several if len(_lines(found, names)[0]) <= width), several[-1])


def _with_places(found: Plan, names: Sequence[str]) -> Sequence[str]:
    """The columns, and after what is spare those of host and disk where something rests there."""
    used = [name for name in (HOST, DISK) if any(row.nbytes_of(place=name) for row in found.rows)]
    after = names.index("spare") + 1
    return (*names[:after], *used, *names[after:])


def text_of(found: Plan) -> str:
    """The verdict, what it is a plan of, and a line for each row, columns set to the right; states are not by kind.
    Sentences are broken where the table ends."""
    table = _lines(found, _with_places(found, FEWER))
    verdict, of, units = (fill(text, len(table[0]), break_long_words=False, break_on_hyphens=False) for text in (
        " ".join([found.verdict, *answers(found)]), "".join(subject(found.config)), UNITS))
    return "\n".join([verdict, of, "", *table, "", units])


def _lines(found: Plan, names: Sequence[str]) -> list[str]:
    table = [["", *names], *cells(found, names)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table]
