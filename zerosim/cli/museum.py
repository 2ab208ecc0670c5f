"""The command for the museum: the list of bugs, and the story of one."""

from __future__ import annotations

from typing import Annotated

import typer

from zerosim.cli.shell import AsJson, answer, command


@command("museum", "zerosim museum ring_off_by_one")
def museum(
    name: Annotated[str | None, typer.Argument(help="An exhibit; without a name, all are listed.")] = None,
    draw: Annotated[str | None, typer.Option(metavar="FILE.svg", help="Write its picture there, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bugs of real implementations, made again: where they were, what one saw, and the check that finds each."""
    from zerosim.course import museum as offered
    from zerosim.display.drawing import save_as

    if name is None:
        if draw is not None:
            raise ValueError("--draw is about one exhibit; name it: zerosim museum ring_off_by_one --draw ring.svg")
        listed = offered.list()
        answer(as_json, listed.as_json, listed.view)
        return
    story = offered.show(name)
    if draw is not None:
        save_as(draw, "a picture", {".svg": lambda: story.svg().encode()})
    answer(as_json, story.as_json, story.view)
