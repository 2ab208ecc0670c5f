"""A drawing: a Matplotlib figure with its title and its words, as SVG or PNG, the same bytes every time."""

import errno
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from zerosim.lessons.figures.style import Style

if TYPE_CHECKING:
    from zerosim.lessons.figures.picture import Picture

FORMATS = ("svg", "png")
SUFFIXES = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A finished picture. ``description`` says in words what it shows, for those who cannot see it."""

    name: str
    title: str
    description: str
    style: Style
    figure: "Picture"

    def shown(self) -> "Picture":
        """The Matplotlib figure, which now shows itself with this title and these words."""
        self.figure.drawing = self
        return self.figure

    def svg(self) -> str:
        """The picture as SVG, with ``<title>`` and ``<desc>``; no date and no random ids in it."""
        text = self._saved("svg").decode()
        start = text.index("<svg")
        opening, rest = text[start:].split(">", 1)
        ids = [f"{self.name}-title", f"{self.name}-desc"]
        words = (f'\n <title id="{ids[0]}">{escape(self.title)}</title>'
                 f'\n <desc id="{ids[1]}">{escape(self.description)}</desc>')
        return f'{opening} role="img" aria-labelledby="{" ".join(ids)}">{words}{rest}'

    def png(self, dots_per_inch: int = 160) -> bytes:
        """The picture as PNG."""
        return self._saved("png", dots_per_inch)

    def save(self, path: Path | str) -> Path:
        """Writes the picture to a file, in the format that its suffix names: all of it, or nothing.

        Raises ValueError for another suffix than .svg or .png.
        """
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise ValueError(f"asked to save a figure as {path.name!r}; end the name in {' or '.join(SUFFIXES)}")
        content = self.svg().encode() if path.suffix == ".svg" else self.png()
        return write_whole(path, content)

    def _saved(self, format: str, dots_per_inch: int = 160) -> bytes:
        file = io.BytesIO()
        metadata = {"Date": None} if format == "svg" else {"Title": self.title, "Description": self.description}
        with self.style.in_force():
            self.figure.savefig(file, format=format, dpi=dots_per_inch, metadata=metadata)
        return file.getvalue()

    def _repr_svg_(self) -> str:
        """What Jupyter shows."""
        return self.svg()

    def __repr__(self) -> str:
        return f"{self.title}. {self.description}"


def write_whole(path: Path, content: bytes) -> Path:
    """Writes a file so that all of it is there, or nothing; raises OSError where it cannot be written."""
    return made_whole(path, lambda place: place.write_bytes(content))


def made_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Has a file written beside its place, and moves it there when it is whole; of a link, to where it points.

    What is there and is no file, as a pipe or a device, is never replaced, but written into. Raises OSError for a
    folder, and what ``write`` raises.
    """
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        write(path)
        return path
    place = path.resolve()
    unfinished = place.with_name(f".{place.name}.{os.getpid()}")  # in the same folder, so that it can be renamed
    try:
        write(unfinished)
        unfinished.replace(place)
    finally:
        if place.parent.is_dir():
            unfinished.unlink(missing_ok=True)
    return path
