"""The command that makes a page of a recorded run."""

from __future__ import annotations

from typing import Annotated

import typer

from zerosim.cli.shell import busy, command


@command("report")
def report(
    recording: Annotated[str, typer.Argument(metavar="RUN.json", help="What cluster.save(), or --save of train or run, "
                                                                      "has written.")],
    out: Annotated[str | None, typer.Option(metavar="FILE", help="The page; without it, RUN.html beside it.")] = None,
    device: Annotated[str | None, typer.Option(help="Replay on h100-80, a100-40, ...; without it and a link, on a "
                                                    "made-up machine that shows a small model well.")] = None,
    link: Annotated[str | None, typer.Option(help="What ranks send through: nvlink4, pcie5, ...")] = None,
    span: Annotated[str | None, typer.Option(help="Only what happened inside the one span of this name.")] = None,
    compute: Annotated[str, typer.Option(help="The format whose peak the device computes at.")] = "bf16",
    efficiency: Annotated[float, typer.Option(help="Share of that peak that products reach.")] = 1.0,
    nodes: Annotated[int, typer.Option(help="Over how many nodes the ranks are spread.")] = 1,
    between: Annotated[str | None, typer.Option(help="The link between nodes; without it, infiniband-ndr.")] = None,
    hardware: Annotated[str | None, typer.Option(metavar="FILE", help="A TOML file of one's own devices and links."
                                                 )] = None,
) -> None:
    """A run as one page of HTML: timeline, memory, messages and tables, without a server or a network."""
    from zerosim.display.report import save_report

    with busy("making the page"):
        path = save_report(recording, out, device=device, link=link, span=span, compute=compute, efficiency=efficiency,
                           nodes=nodes, between=between, hardware=hardware)
    typer.echo(path)
