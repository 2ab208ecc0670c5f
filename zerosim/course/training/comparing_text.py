"""A comparison as one reads it: a column for each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerosim.course.training.comparing import Comparison
from zerosim.course.training.run import Trained
from zerosim.course.training.text import as_json as training_as_json
from zerosim.display.tables import RIGHT, note, plain_table, title
from zerosim.numerics.units import counted

if TYPE_CHECKING:
    from rich.console import Console


def print_comparison(console: Console, found: Comparison, text_name: str) -> None:
    """Losses, memory and traffic of each run, and which of them ended in the same bits."""
    options = found.runs[0].options
    title(console, options.model, f" on {text_name}, {counted(options.ranks, 'rank')}, "
                                  f"{counted(options.steps, 'step')}, by {found.over}")
    console.print(plain_table("", *(f"{RIGHT}{value}" for value in found.values), rows=_rows(found)))
    console.print()
    note(console, "Losses are in nats per byte. Bytes are those of the rank that holds or sends most, sent ones per "
                  "step.")
    for value, run in zip(found.values, found.runs, strict=True):
        if run.diverged_at is not None:
            note(console, f"{found.over} {value} diverged: from step {run.diverged_at} on its loss is not finite.")
    if all(run.diverged_at is not None for run in found.runs):
        return
    if found.all_same_bits:
        note(console, f"All {len(found.runs)} runs saw the same losses and ended in the same weights, bit for bit.")
        return
    if len(found.same_bits) == len(found.runs):
        note(console, "No two runs ended in the same weights.")
    else:
        groups = "; ".join(", ".join(map(str, values)) for values in found.same_bits)
        note(console, f"These ended in the same weights, bit for bit: {groups}.")
    if found.over == "stage" and options.micro_batches > 1:
        note(console, "Stages 0 and 1 add up micro-batches before they reduce, stages 2 and 3 reduce each.")
    if found.over == "recompute" and "tiled" in found.values:
        note(console, "Tiled attention adds in another order; all other policies recompute the same bits.")


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    runs = found.runs
    purposes = dict.fromkeys(purpose for run in runs for purpose in run.sent_nbytes)
    chosen = [("learning rate", *(f"{run.options.learning_rate:g}" for run in runs)),
              ("layout", *(run.options.layout_name for run in runs))]
    return [
        *(row for row in chosen if len(set(row[1:])) > 1),
        ("loss, first step", *(f"{run.steps[0].loss:.4f}" for run in runs)),
        ("loss, last step", *(f"{run.steps[-1].loss:.4f}" for run in runs)),
        ("loss, held out", *(f"{run.held_out_loss:.4f}" for run in runs)),
        ("steps skipped", *(str(run.skipped) for run in runs)),
        ("at rest, bytes", *(f"{max(run.resting_nbytes):,}" for run in runs)),
        ("at the peak, bytes", *(f"{max(run.peak_nbytes):,}" for run in runs)),
        *((f"sent, {purpose}", *(f"{_per_step(run, purpose):,}" for run in runs)) for purpose in purposes),
        ("masters, SHA-256", *(run.digest[:8] for run in runs))]


def _per_step(run: Trained, purpose: str) -> int:
    return max(run.sent_nbytes.get(purpose, [0])) // len(run.steps)


def as_json(found: Comparison) -> dict[str, Any]:
    """All runs as plain data, by the value in which they differ."""
    return {"over": found.over, "same_bits": found.all_same_bits, "same_bits_by_value": found.same_bits,
            "runs": {str(value): training_as_json(run) for value, run in zip(found.values, found.runs, strict=True)}}
