"""Commands about a reader's own program: its run, here or on what a launcher has started, and the page of a run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerosim.cli.shell import (
    WRONG_INPUT,
    AsJson,
    Between,
    Capacity,
    Nodes,
    OwnHardware,
    busy,
    capacity_nbytes,
    command,
    console,
    reply,
)
from zerosim.connect import MPIEXEC_COUNTS

if TYPE_CHECKING:
    from zerosim.ranks.cluster import Cluster


# What a launcher of MPI says to each process that it starts: Open MPI, those like MPICH, those that speak PMIx, PALS.
MPI_VARIABLES = (*MPIEXEC_COUNTS, "PMIX_RANK", "PALS_RANKID")
FAILED = 1  # exit code


@command("run", "mpiexec -n 4 zerosim run train.py:program")
def run(
    program: Annotated[str, typer.Argument(help="FILE.py:FUNCTION; the function is called with its rank.")],
    ranks: Annotated[int | None, typer.Option(help="N, in one process; a launcher says it otherwise.")] = None,
    backend: Annotated[str, typer.Option(help="in-process, cupy, mpi or nccl; auto takes mpi where mpiexec or srun has "
                                              "started this process, else in-process.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda: what has a process' arrays, with mpi or nccl; cuda:1 "
                                                    "for the GPU of that number.")] = None,
    given: Annotated[list[str] | None, typer.Option("--with", metavar="NAME=VALUE",
                                                    help="An argument of the function.")] = None,
    capacity: Capacity = None,
    debug: Annotated[bool, typer.Option("--debug", help="NaN in new and freed memory; ranks check what they call."
                                        )] = False,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Record the run in this JSON file, for the command "
                                                                  "report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Runs a rank program on N ranks in this process, or as one rank under mpiexec."""
    from zerosim.ranks.errors import BackendError

    try:
        cluster = _world(backend, device, ranks, capacity_nbytes(capacity), debug)
    except BackendError as error:
        raise ValueError(str(error)) from error
    _run(cluster, _agreed(cluster, lambda: _body(program, given or (), save)), save, as_json)


def _body(program: str, given: Sequence[str], save: str | None) -> Callable[..., Any]:
    """The function that was asked for, with its arguments. Raises ValueError for what cannot be had."""
    from zerosim.course.running import load, settings, with_settings
    from zerosim.numerics.files import require_writable

    if save is not None:
        require_writable(save, "save a recording as")
    return with_settings(load(program), settings(given))


def _agreed(cluster: Any, find: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """The result of ``find()``. Where it raises in one process of many all of them end, and the first such says why: a
    file may be on some machines of a job and not on others."""
    from zerosim.display.saving import is_one_of_many
    from zerosim.ranks.errors import ranks_text

    if not is_one_of_many(cluster):
        return find()
    body: Callable[..., Any] | None = None
    text: str | None = None
    try:
        body = find()
    except Exception as error:  # whatever it is, the others wait to hear of it
        text = str(error)
    texts = cluster.gather(text)
    failed = [rank for rank, said in enumerate(texts) if said is not None]
    if body is not None and not failed:
        return body
    if cluster.ranks[0].index == failed[0]:
        where = "" if len(failed) == len(texts) else f"{ranks_text(failed)} of {len(texts)}: "
        raise ValueError(f"{where}{text}")
    raise typer.Exit(WRONG_INPUT)


def _world(backend: str, device: str | None, ranks: int | None, most_nbytes: int | None, debug: bool) -> Cluster:
    import zerosim as zs
    from zerosim.connect import SRUN_COUNT, launched, started_together

    job, together = launched(), started_together(os.environ)
    by_srun = job is None and together is not None and together[0] == SRUN_COUNT
    by_mpi = by_srun or any(name in os.environ for name in MPI_VARIABLES)
    found = ("mpi" if by_mpi else "in-process") if backend == "auto" else backend
    if backend == "auto" and not by_mpi and job is not None and job.ranks > 1:
        raise ValueError(f"this process was started as rank {job.rank} of {job.ranks} (RANK and WORLD_SIZE), by what "
                         "is no MPI; say --backend nccl, or --backend in-process to run all ranks in this process")
    alone = not by_mpi and job is None
    here: dict[str, Callable[..., Cluster]] = {"in-process": zs.Cluster, "cupy": zs.CuPyCluster}
    if alone:
        here["nccl"] = zs.NCCLCluster
    if found in here:
        if device is not None:
            raise ValueError(f"--device {device} is for ranks that are processes, with mpi or nccl; with {found} all "
                             "ranks are in this one: leave it out")
        return here[found](2 if ranks is None else ranks, capacity_nbytes=most_nbytes, debug=debug)
    if ranks is not None:
        raise ValueError(f"--ranks {ranks} is for ranks in one process; with {found} the launcher says how many there "
                         f"are: mpiexec -n {ranks} zerosim run ...")
    return zs.connect(found, device=device, capacity_nbytes=most_nbytes, debug=debug)


def _run(cluster: Cluster, body: Callable[..., Any], save: str | None, as_json: bool) -> None:
    from zerosim.connect import raised_elsewhere
    from zerosim.course.running import as_json as plain
    from zerosim.course.running import run as run_program
    from zerosim.course.running import run_view
    from zerosim.doctor import blas_libraries

    try:
        parts = run_program(cluster, body)
    except Exception as error:
        if not raised_elsewhere(error):  # the process whose rank raised it says so
            traceback.print_exception(error)
        raise typer.Exit(FAILED) from None
    except (KeyboardInterrupt, SystemExit) as error:
        if not raised_elsewhere(error):
            said = " ".join([type(error).__name__, *map(str, error.args)])
            typer.echo(", ".join([f"zerosim run: ended by {said}", *getattr(error, "__notes__", ())[:1]]), err=True)
        raise
    if save is not None:
        cluster.save(save)
    if cluster.ranks[0].index:
        return
    reply(as_json, lambda: plain(cluster.world, parts, blas_libraries(), cluster.blas_threads),
          lambda: run_view(cluster.world, parts, console().width))


@command("report", "zerosim train --save run.json && zerosim report run.json")
def report(
    recording: Annotated[str, typer.Argument(metavar="RUN.json", help="What cluster.save(), or --save of train or run, "
                                                                      "has written.")],
    out: Annotated[str | None, typer.Option(metavar="FILE", help="The page; without it, RUN.html beside it.")] = None,
    device: Annotated[str | None, typer.Option(help="Replay on h100, ..., as zerosim devices lists them; without it "
                                                    "and a link, on a made-up machine that shows a small model well."
                                               )] = None,
    link: Annotated[str | None, typer.Option(help="What ranks send through, as zerosim links lists them.")] = None,
    span: Annotated[str | None, typer.Option(help="Only what happened inside the one span of this name.")] = None,
    compute: Annotated[str, typer.Option(help="The format whose peak the device computes at: fp32, tf32, bf16, fp16 or "
                                              "fp8.")] = "bf16",
    efficiency: Annotated[float, typer.Option(help="Share of that peak that products reach.")] = 1.0,
    nodes: Nodes = 1, between: Between = None, hardware: OwnHardware = None,
) -> None:
    """A run as one page of HTML: timeline, memory, messages and tables, without a server or a network."""
    from zerosim.display.report import save_report

    with busy("making the page"):
        path = save_report(recording, out, device=device, link=link, span=span, compute=compute, efficiency=efficiency,
                           nodes=nodes, between=between, hardware=hardware)
    typer.echo(path)
