"""Commands that predict, with pencil and paper: nothing is run."""

from __future__ import annotations

from typing import Annotated

import typer

from zerosim.cli.shell import AsJson, command, console, print_json


@command("cost")
def cost(
    nbytes: Annotated[str, typer.Option(help="n, bytes of the whole vector, as in 14e9.")],
    ranks: Annotated[int, typer.Option(help="N, the number of ranks.")],
    link: Annotated[str, typer.Option(help="What ranks send through: nvlink4, pcie5, infiniband-ndr, ...")],
    collective: Annotated[str, typer.Option(help="all_reduce, reduce_scatter, all_gather, ...")] = "all_reduce",
    algorithm: Annotated[str | None, typer.Option(help="ring, tree, doubling, ...; without it, the usual one.")] = None,
    nodes: Annotated[int, typer.Option(help="Over how many nodes the ranks are spread.")] = 1,
    between: Annotated[str | None, typer.Option(help="The link between nodes; without it, infiniband-ndr.")] = None,
    itemsize: Annotated[int, typer.Option(help="Bytes of an element; chunks are whole elements.")] = 1,
    hardware: Annotated[str | None, typer.Option(metavar="FILE", help="A TOML file with links of your own.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a collective costs: steps, bytes, seconds, bandwidths, and where other algorithms are faster."""
    from zerosim.lessons.collective_costs import Question, collective_cost, nbytes_of
    from zerosim.lessons.collective_costs import as_json as plain

    found = collective_cost(Question(nbytes_of(nbytes), ranks, link, collective, algorithm, nodes, between, itemsize,
                                     hardware))
    if as_json:
        print_json(plain(found))
        return
    from zerosim.lessons.collective_costs_text import print_answer

    print_answer(console(), found)
