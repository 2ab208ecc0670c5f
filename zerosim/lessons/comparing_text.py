"""A comparison as one reads it: a column for each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerosim.lessons.comparing import Comparison
from zerosim.lessons.tables import RIGHT, note, plain_table
from zerosim.lessons.training import Trained
from zerosim.lessons.training_text import as_json as training_as_json

if TYPE_CHECKING:
    from rich.console import Console


def print_comparison(console: Console, found: Comparison, text_name: str) -> None:
    """Losses, memory and traffic of each run, and which of them ended in the same bits."""
    options = found.runs[0].options
    console.print(f"[bold]{options.model}[/] on {text_name}, {options.ranks} ranks, {options.steps} steps, "
                  f"by {found.over}\n", highlight=False)
    rows = [
        ("loss, first step", *(f"{run.steps[0].loss:.4f}" for run in found.runs)),
        ("loss, last step", *(f"{run.steps[-1].loss:.4f}" for run in found.runs)),
        ("loss, held out", *(f"{run.held_out_loss:.4f}" for run in found.runs)),
        ("steps skipped", *(str(run.skipped) for run in found.runs)),
        ("at rest, bytes", *(f"{sum(run.resting_nbytes_by_kind.values()):,}" for run in found.runs)),
        ("at the peak, bytes", *(f"{max(run.peak_nbytes):,}" for run in found.runs)),
        *((f"sent {purpose}", *(f"{_per_step(run, purpose):,}" for run in found.runs))
          for purpose in found.runs[0].sent_nbytes),
        ("masters, SHA-256", *(run.digest[:8] for run in found.runs))]
    console.print(plain_table("", *(f"{RIGHT}{value}" for value in found.values), rows=rows))
    console.print()
    note(console, "Bytes are those of one rank; sent ones per step.")
    if found.all_same_bits:
        note(console, f"All {len(found.runs)} runs saw the same losses and ended in the same weights, bit for bit.")
    else:
        groups = "; ".join(", ".join(map(str, values)) for values in found.same_bits)
        note(console, f"These ended in the same weights, bit for bit: {groups}.")
        if found.over == "stage" and options.micro_batches > 1:
            note(console, "Stages 0 and 1 add up micro-batches before they reduce, stages 2 and 3 reduce each.")


def _per_step(run: Trained, purpose: str) -> int:
    return max(run.sent_nbytes[purpose]) // len(run.steps)


def as_json(found: Comparison) -> dict[str, Any]:
    """All runs as plain data, by the value in which they differ."""
    return {"over": found.over, "same_bits": found.all_same_bits,
            "runs": {str(value): training_as_json(run) for value, run in zip(found.values, found.runs, strict=True)}}
