"""A training run as one reads it: a bar while it runs, tables when it is done."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from zerosim.course.training import COMPANION, Comparison, Options, Trained, TrainingStep, is_of_matrices
from zerosim.display.views import RIGHT, Part, TextLine, View, marked_table, parts, plain, words
from zerosim.numerics.units import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class TrainingBar:
    """A progress bar, with loss, tokens per second, loss scale and rank 0's peak bytes of the latest step."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=total, said="")
        self._last = time.perf_counter()
        self._seconds = 0.0  # of a step, a running mean

    def begin(self, what: str) -> None:
        """The steps that follow are those of another run."""
        self._progress.update(self._task, description=what, said="")
        self._last, self._seconds = time.perf_counter(), 0.0

    def heard(self, step: TrainingStep) -> None:
        """One step is done."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._seconds = seconds if not self._seconds else 0.9 * self._seconds + 0.1 * seconds
        rate = step.tokens / max(self._seconds, 1e-9)
        self._progress.update(self._task, advance=1, said=f"loss {step.loss:.3f}  {rate:,.0f} tokens/s  "
                                                          f"scale {step.scale:g}  {step.peak_nbytes / 1e6:,.1f} MB")


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[TrainingBar]:
    """A progress bar of ``total`` steps on a terminal, removed at the end; nothing in a pipe."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
               TextColumn("{task.fields[said]}"), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        yield TrainingBar(progress, total)


def training_view(found: Trained, text_name: str) -> View:
    """A training: its losses, its memory and traffic, and the text that it writes."""
    return View(found.options.model, f" on {' '.join(text_name.splitlines())}: {_headline(found.options)}",
                parts(_training_parts(found)))


def _training_parts(found: Trained) -> Iterator[Part | str]:
    yield ""
    yield marked_table("", RIGHT + "nats per byte", RIGHT + "bits", rows=[
        (what, f"{nats:.4f}", f"{nats / math.log(2):.3f}") for what, nats in (
            ("loss, first step", found.steps[0].loss), ("loss, last step", found.steps[-1].loss),
            ("loss on text held out", found.held_out_loss), ("entropy of single bytes", found.unigram_entropy))])
    yield ""
    fullest = found.fullest_rank
    yield marked_table(f"rank {fullest} holds, bytes", RIGHT + "at rest", RIGHT + "at the peak", rows=[
        *((words(kind), f"{found.resting_nbytes_by_kind.get(kind, 0):,}", f"{nbytes:,}")
          for kind, nbytes in found.peak_nbytes_by_kind.items()),
        ("all", f"{sum(found.resting_nbytes_by_kind.values()):,}", f"{sum(found.peak_nbytes_by_kind.values()):,}")])
    yield ""
    yield marked_table(f"rank {fullest} sends, bytes", RIGHT + "per step", RIGHT + "in all", rows=[
        (purpose, f"{nbytes[fullest] / len(found.steps):,.0f}", f"{nbytes[fullest]:,}")
        for purpose, nbytes in found.sent_nbytes.items()])
    yield ""
    if len(set(found.peak_nbytes)) > 1:
        yield f"Ranks differ: at the peak the emptiest holds {min(found.peak_nbytes):,} bytes."
    yield (f"Steps: {len(found.steps)}, of {found.options.tokens_per_step:,} tokens each; skipped: {found.skipped}; "
           f"loss scale at the end: {found.steps[-1].scale:g}.")
    yield f"SHA-256 of all master weights, the same on every rank: {found.digest[:16]}…"
    if found.options.sample_tokens:
        yield from ("", TextLine("It writes:", indent=0), "")
        yield escape(found.sample)  # brackets that it writes are no markup


def _headline(options: Options) -> str:
    """Parameters, ranks, stage, formats and optimizer, in words."""
    config, optimizer = options.config(), options.build_optimizer()
    updated = f"{options.optimizer.lower()} (lr {options.learning_rate:g}"
    if is_of_matrices(optimizer):
        updated += f"; vectors and embeddings by {COMPANION}"
    return (f"{options.build().parameter_count:,} parameters, {config.layers} blocks of {config.channels} channels, "
            f"ZeRO-{options.stage} on {counted(options.ranks, 'rank')}, layout {options.layout_name}, "
            f"{options.formats}, {updated})")


def require_learned(found: Trained) -> None:
    """Raises ValueError where nothing was learned: the last losses are no finite numbers, or every step was skipped."""
    if found.skipped == len(found.steps):
        raise ValueError(f"all {len(found.steps)} steps were skipped, since some gradient overflowed in each at a loss "
                         f"scale of {found.steps[-1].scale:g}; take a smaller scale, or more steps for it to fall")
    if found.diverged_at is not None:
        raise ValueError(
            f"training has diverged: from step {found.diverged_at} on the loss is no finite number, and "
            f"{found.skipped} of {len(found.steps)} steps were skipped; take a smaller learning rate than "
            f"{found.options.learning_rate:g}, or a format of more range than {found.options.compute}")


def training_as_json(found: Trained) -> dict[str, Any]:
    """All of it as plain data; what is not finite is a text."""
    data: dict[str, Any] = plain(replace(found, last_step=None))  # that is saved, and not printed
    data["options"] |= {"lr": found.options.learning_rate, "layout": found.options.layout_name}
    data["skipped"] = found.skipped
    data["held_out_bits_per_byte"] = plain(found.held_out_loss / math.log(2))
    data["unigram_entropy_bits"] = found.unigram_entropy / math.log(2)
    return data


# -- a comparison: a column for each run ------------------------------------------------------------------------------


def comparison_view(found: Comparison, text_name: str) -> View:
    """Losses, memory and traffic of each run, and which of them ended in the same bits."""
    options = found.runs[0].options
    return View(options.model, f" on {' '.join(text_name.splitlines())}, {counted(options.ranks, 'rank')}, "
                               f"{counted(options.steps, 'step')}, by {found.over}", parts(_comparison_parts(found)))


def _comparison_parts(found: Comparison) -> Iterator[Part | str]:
    options = found.runs[0].options
    yield ""
    yield marked_table("", *(f"{RIGHT}{value}" for value in found.values), rows=_rows(found))
    yield ""
    yield "Losses are in nats per byte. Bytes are those of the rank that holds or sends most, sent ones per step."
    for value, run in zip(found.values, found.runs, strict=True):
        if run.diverged_at is not None:
            yield f"{found.over} {value} diverged: from step {run.diverged_at} on its loss is not finite."
    if all(run.diverged_at is not None for run in found.runs):
        return
    if found.all_same_bits:
        yield f"All {len(found.runs)} runs saw the same losses and ended in the same weights, bit for bit."
        return
    if len(found.same_bits) == len(found.runs):
        yield "No two runs ended in the same weights."
    else:
        groups = "; ".join(", ".join(map(str, values)) for values in found.same_bits)
        yield f"These ended in the same weights, bit for bit: {groups}."
    if found.over == "stage" and options.micro_batches > 1:
        yield "Stages 0 and 1 add up micro-batches before they reduce, stages 2 and 3 reduce each."
    if found.over == "recompute" and "tiled" in found.values:
        yield "Tiled attention adds in another order; all other policies recompute the same bits."


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


def comparison_as_json(found: Comparison) -> dict[str, Any]:
    """All runs as plain data, by the value in which they differ."""
    return {"over": found.over, "same_bits": found.all_same_bits, "same_bits_by_value": found.same_bits,
            "runs": {str(value): training_as_json(run) for value, run in zip(found.values, found.runs, strict=True)}}
