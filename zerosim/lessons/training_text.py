"""A training run as one reads it: a bar while it runs, a table when it is done."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zerosim.lessons.tables import RIGHT, note, plain_table
from zerosim.lessons.training import Heard, Options, Step, Trained

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress(console: Console, options: Options) -> Iterator[Heard]:
    """A progress bar on a terminal: loss, tokens per second, loss scale and what rank 0 holds; nothing in a pipe."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("training", total=options.steps, said="")
        begun = time.perf_counter()

        def heard(step: Step) -> None:
            rate = step.number * options.tokens_per_step / max(time.perf_counter() - begun, 1e-9)
            bar.update(task, advance=1, said=f"loss {step.loss:.3f}  {rate:,.0f} tokens/s  scale {step.scale:g}  "
                                             f"{step.held_nbytes:,} bytes")

        yield heard


def print_training(console: Console, found: Trained, text_name: str) -> None:
    """What was trained, how far it came, what it held and sent, and what it writes."""
    options, config = found.options, found.options.config()
    console.print(
        f"[bold]{options.model}[/] on {text_name}: {options.build().parameter_count:,} parameters, "
        f"{config.layers} blocks of {config.channels} channels, ZeRO-{options.stage} on {options.ranks} ranks, "
        f"{options.compute}, {options.optimizer}\n",
        highlight=False,
    )
    console.print(plain_table("", RIGHT + "nats per byte", rows=[
        ("loss, first step", f"{found.steps[0].loss:.4f}"),
        ("loss, last step", f"{found.steps[-1].loss:.4f}"),
        ("loss on text held out", f"{found.held_out_loss:.4f}"),
        ("entropy of single bytes", f"{found.unigram_entropy:.4f}")]))
    console.print()
    console.print(plain_table("rank 0 holds, bytes", RIGHT + "at rest", RIGHT + "at the peak", rows=[
        *((kind.replace("_", " "), f"{found.resting_nbytes_by_kind.get(kind, 0):,}", f"{nbytes:,}")
          for kind, nbytes in found.peak_nbytes_by_kind.items()),
        ("all", f"{sum(found.resting_nbytes_by_kind.values()):,}", f"{sum(found.peak_nbytes_by_kind.values()):,}")]))
    console.print()
    console.print(plain_table("sent by rank 0 per step, bytes", RIGHT + "", rows=[
        (purpose, f"{nbytes[0] / len(found.steps):,.0f}") for purpose, nbytes in found.sent_nbytes.items()]))
    note(console, f"Steps: {len(found.steps)}, of {options.tokens_per_step:,} tokens each; skipped: {found.skipped}.")
    note(console, f"SHA-256 of all master weights: {found.digest[:16]}…")
    console.print("\nIt writes:\n")
    note(console, found.sample)


def as_json(found: Trained) -> dict[str, object]:
    """All of it as plain data; what is not finite is a text."""
    from dataclasses import asdict

    from zerosim.lessons.plain import without_infinities

    plain = asdict(found)
    plain["skipped"] = found.skipped
    plain["bits_per_byte"] = found.held_out_loss / math.log(2)
    data: dict[str, object] = without_infinities(plain)
    return data
