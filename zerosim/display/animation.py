"""An animation: drawings that follow each other, as a GIF."""

import io
from base64 import b64encode
from dataclasses import dataclass
from html import escape
from pathlib import Path

from zerosim.display.drawing import Drawing, Style, save_as

COLORS, DOTS_PER_INCH = 128, 90  # of a GIF
LAST = 3  # times as long as the others the last frame stays


@dataclass(frozen=True, slots=True)
class Animation:
    """Drawings of one size, each shown for so many seconds."""

    name: str
    title: str
    frames: tuple[Drawing, ...]
    seconds: float
    style: Style

    def gif(self) -> bytes:
        """The frames as a GIF that plays for ever; the last one stays longer."""
        from PIL import Image

        images = [Image.open(io.BytesIO(frame.png(DOTS_PER_INCH))).convert("RGB") for frame in self.frames]
        together = Image.new("RGB", (images[0].width, sum(image.height for image in images)))
        for number, image in enumerate(images):
            together.paste(image, (0, number * image.height))
        palette = together.quantize(COLORS, dither=Image.Dither.NONE)
        reduced = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
        file, milliseconds = io.BytesIO(), round(1000 * self.seconds)
        reduced[0].save(file, format="GIF", save_all=True, append_images=reduced[1:], loop=0, optimize=False,
                        duration=[milliseconds] * (len(reduced) - 1) + [LAST * milliseconds],
                        comment=self.title.encode())
        return file.getvalue()

    def save(self, path: Path | str) -> Path:
        """Writes a .gif file: all of it, or nothing. Raises ValueError for another suffix."""
        return save_as(path, "an animation", {".gif": self.gif})

    def _repr_html_(self) -> str:
        """The animation as Jupyter shows it: the GIF, with the words of all frames."""
        data, words = b64encode(self.gif()).decode(), escape(" ".join(frame.description for frame in self.frames))
        return f'<img style="max-width:100%" alt="{words}" src="data:image/gif;base64,{data}">'

    def __repr__(self) -> str:
        return f"{self.title}. {len(self.frames)} frames."
