"""A drawing: a Matplotlib figure with its title and its words, as SVG or PNG, the same bytes every time."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from zerosim.lessons.figures.style import Style
from zerosim.numerics.files import write_whole

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
