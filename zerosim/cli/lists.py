"""Commands that list what can be named: models, devices, links, and the museum's exhibits, each with its story."""

from __future__ import annotations

from typing import Annotated

import typer

from zerosim.cli.shell import AsJson, OwnHardware, answer, command


@command("models", "zerosim models")
def models(as_json: AsJson = False) -> None:
    """Lists the models that can be trained or planned, with their exact numbers of parameters."""
    from zerosim.course import catalog

    answer(as_json, catalog.models())


@command("devices", "zerosim devices")
def devices(hardware: OwnHardware = None, as_json: AsJson = False) -> None:
    """Lists the devices: memory, bandwidth, arithmetic, the links to each other and to the host."""
    from zerosim.course import catalog

    answer(as_json, catalog.devices(hardware))


@command("links", "zerosim links")
def links(hardware: OwnHardware = None, as_json: AsJson = False) -> None:
    """Lists the links: bandwidth one way, and latency."""
    from zerosim.course import catalog

    answer(as_json, catalog.links(hardware))


@command("museum", "zerosim museum ring_off_by_one")
def museum(
    name: Annotated[str | None, typer.Argument(help="An exhibit; without a name, all are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bugs of real implementations, made again: where they were, what one saw, and the check that finds each."""
    from zerosim.course import museum as offered

    answer(as_json, offered.list() if name is None else offered.show(name))
