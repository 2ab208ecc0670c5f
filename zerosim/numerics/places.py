"""The places where state rests between its uses: on the device, in the memory of its host, or on disk (offload)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLACES = DEVICE, HOST, DISK = ("device", "host", "disk")
KINDS = ("optimizer", "gradients", "parameters")  # of state: in this order they leave the device
DIRECTIONS = TO_HOST, TO_DEVICE, TO_DISK, FROM_DISK = ("to host", "to device", "to disk", "from disk")  # of transfers


@dataclass(frozen=True, slots=True)
class Offload:
    """The places of optimizer state (masters too), gradients and parameters: "device", "host" or "disk".

    ``directory`` is where files lie on disk (None: the current one). They have no names there, and are gone with the
    engine. ``delayed_update`` lets forward and backward of a step compute with the parameters of the step before the
    last, so that the host's update can go on beside them: it changes bits. ``open_file`` makes a file of so many bytes
    in a directory, instead of `zerosim.zero.ScratchFile`.
    Raises ValueError for unknown places, and for options that would change nothing.
    Sources: Ren et al. 2021 (ZeRO-Offload, arXiv:2101.06840), sections 4 and 5.2; Rajbhandari et al. 2021
    (ZeRO-Infinity, arXiv:2104.07857), section 5.
    """

    optimizer: str = DEVICE
    gradients: str = DEVICE
    parameters: str = DEVICE
    directory: str | Path | None = None
    delayed_update: bool = False
    open_file: Callable[[Path, int], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in KINDS:
            if getattr(self, name) not in PLACES:
                raise ValueError(f"Offload({name}={getattr(self, name)!r}): state rests on one of {', '.join(PLACES)}")
        if not isinstance(self.directory, str | Path | None):
            raise ValueError(f"Offload(directory={self.directory!r}) must be a folder's path, as a text")
        if self.directory is not None and not self.uses_disk:
            raise ValueError(f"Offload(directory={str(self.directory)!r}) was asked for, and nothing rests on disk; "
                             "place something there, or leave the directory out")
        if not isinstance(self.delayed_update, bool):
            raise ValueError(f"Offload(delayed_update={self.delayed_update!r}) must be True or False")
        if self.delayed_update and self.optimizer == DEVICE:
            raise ValueError("a delayed update is one that the host makes beside the device's work, and the optimizer "
                             "rests on the device; place it on the host or on disk, or leave delayed_update out")
        if self.uses_disk and self.optimizer != DISK:
            raise ValueError(f"{self}, and the optimizer's state on the {self.optimizer}: where the disk failed in the "
                             "middle of an update, some of that would be new and some old, and no step could follow; "
                             "place the optimizer on disk too")

    def place_of(self, kind: str) -> str:
        """The place of a kind of memory: "parameter", "gradient", or one of the optimizer's."""
        return {"parameter": self.parameters, "gradient": self.gradients}.get(kind, self.optimizer)

    @property
    def uses_disk(self) -> bool:
        """True where something rests on disk."""
        return DISK in (self.optimizer, self.gradients, self.parameters)

    @property
    def is_none(self) -> bool:
        """True where everything rests on the device."""
        return {self.optimizer, self.gradients, self.parameters} == {DEVICE}

    @property
    def text(self) -> str:
        """The places as `offload_of` reads them: "none", "host", "disk", or "optimizer=host+gradients=host"."""
        placed = {name: place for name in KINDS if (place := getattr(self, name)) != DEVICE}
        everything = len(placed) == len(KINDS) and len({*placed.values()}) == 1
        return self.parameters if everything else "+".join(map("=".join, placed.items())) or "none"

    def __str__(self) -> str:
        places = {HOST: "the host", DISK: "disk"}
        placed = [f"all state on {places[self.text]}"] if self.text in places else [
            f"{name} on {places[place]}" for name in KINDS if (place := getattr(self, name)) != DEVICE]
        return ", ".join(placed + ["delayed update"] * self.delayed_update) or "nothing"


NOTHING = Offload()


def offload_of(asked: object) -> Offload:
    """The places that an option asks for: None or "none", "host" or "disk" for everything, or kinds one by one.

    >>> offload_of("optimizer=disk+gradients=host")
    Offload(optimizer='disk', gradients='host', parameters='device', directory=None, delayed_update=False)

    An Offload is itself. Raises ValueError for anything else.
    """
    if isinstance(asked, Offload):
        return asked
    if asked is None or (isinstance(asked, str) and asked == "none"):
        return NOTHING
    if isinstance(asked, str) and asked in (HOST, DISK):
        return Offload(asked, asked, asked)
    pairs: list[Any] = [part.strip().split("=") for part in asked.split("+")] if isinstance(asked, str) else []
    known = all(len(pair) == 2 and pair[0] in KINDS and pair[1] in PLACES for pair in pairs)
    if pairs and known and len(dict(pairs)) == len(pairs):
        return Offload(**dict(pairs))
    raise ValueError(f"offload={asked!r} must be 'host' or 'disk', which place all state there, 'none', kinds one by "
                     f"one of {', '.join(KINDS)}, as 'optimizer=host+gradients=host'")
