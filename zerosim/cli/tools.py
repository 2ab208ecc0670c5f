"""Commands about the project itself, and about what is brought to it: figures, this machine, a recorded step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from zerosim.cli.shell import AsJson, answer, busy, command

LACKING = 1  # exit code


@command("figures", "zerosim figures ring --format gif --out drawn")
def figures(
    names: Annotated[list[str] | None, typer.Argument(help="The figures; without names, all.", metavar="NAME")] = None,
    out: Annotated[str, typer.Option(help="The folder to draw into.")] = "figures",
    format: Annotated[str, typer.Option(help="svg or png; gif, for those that move.")] = "svg",
    dark: Annotated[bool, typer.Option("--dark", help="Draw the dark variant, NAME-dark.")] = False,
) -> None:
    """Draws the project's figures anew, each from a run."""
    from zerosim.course.figures import draw

    with busy("drawing"):
        paths = draw(names or (), out, format, dark)
    for path in paths:
        typer.echo(path)


@command("doctor", "zerosim doctor --require mpi")
def doctor(
    as_json: AsJson = False,
    require: Annotated[str, typer.Option(metavar="NAMES", help="Backends that must be usable: in-process, mpi, nccl, "
                                                               "with commas between; if one is not, exit code 1."
                                         )] = "",
) -> None:
    """Versions, BLAS and its threads, and which backends can be used here, and why not."""
    from zerosim.doctor import examine, lacking, requirable

    required = requirable([name.strip() for name in require.split(",") if name.strip()])
    found = examine()
    answer(as_json, found)
    for backend in (missing := lacking(found, required)):
        typer.echo(f"{backend.name} is required here and cannot be used: {backend.reason}", err=True)
    if missing:
        raise typer.Exit(LACKING)


@command("oracle", "zerosim oracle run")
def oracle(
    record: Annotated[str, typer.Argument(help="The folder of a step that zerosim.frameworks.hooks recorded.",
                                          metavar="RUN")],
    as_json: AsJson = False,
) -> None:
    """Judges a recorded step of a real run: what it matches, or why not; exit code 1 if it does not match."""
    from zerosim.oracle import judge

    with busy("judging"):
        found = judge(record)
    answer(as_json, found)
    if not found.matches:
        raise typer.Exit(LACKING)


@command("gpu-check", "python -m zerosim gpu-check --only kernels")
def gpu_check(
    only: Annotated[str, typer.Option(metavar="PARTS", help="The parts to run, with commas between: kernels, "
                                                            "exhaustive, sanitizer, speed, mpi, nccl, training, "
                                                            "cards, failures; without it, all.")] = "",
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="The time of each part, at most 600.")] = 600.0,
    out: Annotated[str, typer.Option(help="The folder of the reports, a file for each part.")] = "gpu_check",
    page: Annotated[bool, typer.Option("--page", help="Run nothing; print what is in the folder as Markdown.")] = False,
) -> None:
    """Checks everything that only a machine with NVIDIA GPUs can show, part by part, from a checkout of the project."""
    checkout, folder = Path(__file__).resolve().parent.parent.parent, Path(out).absolute()
    if not (checkout / "benchmarks" / "gpu_check").is_dir():
        raise ValueError(f"the checks are the project's tests and benchmarks, and there are none in {checkout}; take a "
                         "checkout of the project, and run python -m zerosim gpu-check in it, with the Python that has "
                         "CuPy")
    sys.path.insert(0, str(checkout))
    from benchmarks.gpu_check import main, report

    if page:
        if only:
            raise ValueError(f"--page prints all parts that are in the folder, and --only {only} chooses what to run; "
                             "leave one of them out")
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder} to make a page of; zerosim gpu-check writes one, or --out "
                             "names another")
        typer.echo(report.page(folder), nl=False)
        return
    names = [name.strip() for name in only.split(",") if name.strip()]
    raise typer.Exit(main(names or [only] * bool(only), budget, folder))  # a comma alone does not ask for all
