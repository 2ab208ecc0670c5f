"""How a run of a reader's own program is printed."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from zerosim.course.running.program import RanPart
from zerosim.display.tables import plain_table

SHOWN = 16   # hex digits of a fingerprint
LONGEST = 60  # characters of a result, and fewer where a line is not so long
BESIDE = 56   # columns that the others take


def print_run(console: Console, world: str, parts: Sequence[RanPart]) -> None:
    """A line for each rank."""
    console.print(f"[bold]{len(parts)} rank{'s' * (len(parts) != 1)}[/], {world}\n")
    longest = min(LONGEST, max(SHOWN, console.width - BESIDE))
    rows = ((str(part.rank), f"{part.sent_nbytes:,}", f"{part.peak_nbytes:,}", (part.sha256 or "none")[:SHOWN],
             escape(_one_line(part.result, longest))) for part in parts)
    console.print(plain_table(">rank", ">bytes sent", ">peak bytes", "SHA-256", "result", rows=rows))


def as_json(world: str, parts: Sequence[RanPart], blas: Sequence[Any], blas_threads: int) -> dict[str, Any]:
    """The same as plain data, and the BLAS, and its threads, whose bits these are."""
    return {"world": world, "ranks": len(parts), "blas_threads": blas_threads,
            "blas": [{"name": library.name, "version": library.version, "architecture": library.architecture}
                     for library in blas],
            "rows": [asdict(part) for part in parts]}


def _one_line(text: str, longest: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else line[:longest - 1] + "…"
