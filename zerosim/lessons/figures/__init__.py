"""Figures drawn from runs: each a pure function of data, in one style, with its text alternative.

``ring_data``, ``memory_data``, ``timeline_data`` run something and return a frozen dataclass; ``ring``, ``memory``,
``timeline`` turn it into a Drawing, and nothing else goes into the picture. ``draw`` writes figures by name, as
``zerosim figures`` does.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from zerosim.lessons.figures.drawing import FORMATS, Drawing
from zerosim.lessons.figures.memory import MemoryData, memory, memory_data
from zerosim.lessons.figures.ring import RingData, ring_data
from zerosim.lessons.figures.ring_sheet import ring
from zerosim.lessons.figures.style import DARK, LIGHT, Style
from zerosim.lessons.figures.timeline import TimelineData, timeline, timeline_data

__all__ = ["DARK", "FIGURES", "FORMATS", "LIGHT", "Drawing", "MemoryData", "RingData", "Style", "TimelineData",
           "draw", "memory", "memory_data", "ring", "ring_data", "timeline", "timeline_data"]

FIGURES: Mapping[str, Callable[[Style], Drawing]] = MappingProxyType({
    "memory": lambda style: memory(memory_data(), style),
    "ring": lambda style: ring(ring_data(), style),
    "timeline": lambda style: timeline(timeline_data(), style),
})


def draw(names: Iterable[str] = (), out: Path | str = "figures", format: str = "svg", dark: bool = False) -> list[Path]:
    """Draws the named figures, or all, into the folder ``out``: ``ring.svg``, or ``ring-dark.svg`` in the dark variant.

    Returns the files' paths. Raises ValueError for a name or format that does not exist, before anything is drawn, and
    for an ``out`` that is no folder or cannot be written.
    """
    chosen = list(names) or list(FIGURES)
    for name in chosen:
        if name not in FIGURES:
            near = get_close_matches(name, FIGURES, 1)
            raise ValueError(f"no figure is called {name!r}; the figures are {', '.join(FIGURES)}"
                             + (f"; did you mean {near[0]!r}?" if near else ""))
    if format not in FORMATS:
        raise ValueError(f"no figure can be saved as {format!r}; choose one of {', '.join(FORMATS)}")
    folder, style = Path(out), DARK if dark else LIGHT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [FIGURES[name](style).save(folder / f"{name}{'-dark' * dark}.{format}") for name in chosen]
    except OSError as error:
        raise ValueError(f"asked to draw into {str(folder)!r}, but: {error.strerror} ({error.filename}); "
                         "name a folder that can be made and written") from error
