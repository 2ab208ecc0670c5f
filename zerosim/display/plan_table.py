"""A plan as a table of plain text: its columns, and the lines around them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

from zerosim.numerics.places import DISK, HOST
from zerosim.numerics.units import counted, gigabytes, seconds_text
from zerosim.planning.explanation import options_text
from zerosim.planning.plan_config import Plan, PlanConfig
from zerosim.planning.plan_row import fused_policy

# Of each column the field of a row, and the text of its value.
COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    **{kind: (f"{kind}_nbytes", gigabytes) for kind in (
        "parameters", "gradients", "optimizer", "states", "activations", "gathered", "buckets", "transient", "overhead",
        "total", "spare")},
    "sent": ("sent_nbytes_per_step", gigabytes), "compute": ("compute_seconds", seconds_text),
    "exposed": ("exposed_communication_seconds", seconds_text), "step": ("step_seconds", seconds_text),
    "MFU": ("model_flops_utilization", "{:.2f}".format)}
KINDS = ("parameters", "gradients", "optimizer")  # of states, which are their sum
FEWER = tuple(name for name in COLUMNS if name not in KINDS)
FEW = ("states", "transient", "overhead", "total", "spare", "sent", "step")
FEWEST = tuple(name for name in FEW if name != "sent")
UNITS = ("GB are 10⁹ bytes of one rank. The total is states, transient (all that comes and goes, at the step's fullest "
         "moment) and overhead.")
PARTS = ("Activations, gathered and buckets (gradients in flight and collectives' buffers) are each at their own "
         "fullest; MFU is model FLOPs utilization.")
# Hidden states that a Llama-3-8B block keeps for backward, in PyTorch and here: measured, and `activations.kept`, by
# benchmarks/torch_saved_tensors.py, with torch 2.13 (2026-11).
PYTORCH_KEEPS, KEPT_HERE = 26.0, 15.0


def cells(found: Plan, names: Iterable[str] = COLUMNS) -> list[list[str]]:
    """For each row its stage and policy, and the named columns."""
    columns, known = [COLUMNS[name] for name in names], found.config.decoder is not None
    return [[f"{row.stage} {policy_label(row.recompute) if known else 'none'}",
             *(text(getattr(row, field)) for field, text in columns)]
            for row in found.rows]


def policy_label(policy: str) -> str:
    """A policy in a row of a table: ``block``, or ``block unfused``; attention is fused unless that is said."""
    named, unfused = fused_policy(policy)
    return named + " unfused" * unfused


def links_text(config: PlanConfig) -> str:
    """``over nvlink4, infiniband-ndr between 2 nodes``."""
    network = config.network
    nodes = config.ranks // (network.ranks_per_node or config.ranks)
    return f"over {network.inside.name}" + (
        f", {network.between.name} between {nodes} nodes" if network.between else "")


def subject(config: PlanConfig, convention: str) -> tuple[str, str]:
    """The subject of a plan: the model's name, and the rest of the line."""
    model, size = config.model.name, f"{config.model.parameters:,} parameters"
    parts = [*([] if model == size else [size]), f"{counted(config.ranks, 'rank')} of {config.device.name} "
             f"{links_text(config)}",
             f"{counted(config.micro_batches, 'micro-batch')} of {counted(config.batch, 'sequence')} of "
             f"{counted(config.sequence, 'token')}", config.policy.compute, options_text(config),
             *([_on_nodes(config)] if config.options.mesh else []), f"accounted as {convention}"]
    return model, ": " + ", ".join(parts)


def _on_nodes(config: PlanConfig) -> str:
    mesh, zeropp = config.options.mesh, config.options.zeropp
    return f"{zeropp} on {mesh}" if zeropp else f"sharded inside nodes ({mesh})"


def places_text(config: PlanConfig) -> str:
    """Assumptions about host and disk, where something is offloaded: links, bytes per second, and capacity."""
    there = ((HOST, config.host_link), (DISK, config.disk_link))
    parts = [f"{place}: {link.name}, {gigabytes(link.bytes_per_second)} GB a second each way, and "
             f"{gigabytes(config.capacities_nbytes[place])} GB" for place, link in there if link]
    return "; ".join(parts) + ", of each device alone; the host's own update takes no time" if parts else ""


def names_for(found: Plan, width: int) -> Sequence[str]:
    """The columns that a line of so many characters holds: all, or not the kinds of states, or the least."""
    return next((names for names in (tuple(COLUMNS), FEWER, FEW) if len(_lines(found, names)[0]) <= width), FEWEST)


def text_of(found: Plan) -> str:
    """The verdict, what it is a plan of, and a line for each row, columns set to the right; states are not by kind.
    Sentences are broken where the table ends."""
    table = _lines(found, FEWER)
    verdict, of, units = (fill(text, len(table[0]), break_long_words=False, break_on_hyphens=False) for text in (
        found.verdict, "".join(subject(found.config, found.rows[0].convention)), f"{UNITS} {PARTS}"))
    return "\n".join([verdict, of, "", *table, "", units])


def _lines(found: Plan, names: Sequence[str]) -> list[str]:
    table = [["", *names], *cells(found, names)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table]
