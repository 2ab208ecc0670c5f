"""The command for the museum: the list of bugs, and the story of one."""

from __future__ import annotations

from typing import Annotated

import typer

from zerosim.cli.shell import AsJson, answer, command


@command("museum", "zerosim museum ring_off_by_one")
def museum(
    name: Annotated[str | None, typer.Argument(help="An exhibit; without a name, all are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bugs of real implementations, made again: where they were, what one saw, and the check that finds each."""
    from zerosim.course import museum as offered

    shown = offered.list() if name is None else offered.show(name)
    answer(as_json, shown.as_json, shown.view)
