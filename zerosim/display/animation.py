"""An animation: drawings that follow each other, as a GIF or as a page of HTML that one steps through by hand.

The page never plays by itself; without its script it shows every picture, one under the other.
"""

import html
import io
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

from zerosim.display.drawing import Drawing, Style, save_as

ANIMATION_FORMATS = ("gif", "html")
COLORS, DOTS_PER_INCH = 128, 90  # of a GIF
LAST = 3  # times as long as the others the last frame stays

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0; background: {page}; color: {ink}; font: 16px/1.5 system-ui, sans-serif; }}
main {{ max-width: 900px; margin: 0 auto; padding: 12px; }}
img {{ width: 100%; height: auto; display: block; }}
img[hidden] {{ display: none; }}
.tools {{ display: flex; gap: 8px; align-items: center; flex-wrap: wrap; }}
button {{ min-width: 44px; min-height: 40px; font: inherit; color: inherit; background: transparent;
  border: 1px solid {muted}; border-radius: 4px; cursor: pointer; }}
input {{ flex: 1; min-width: 160px; }}
</style>
</head>
<body>
<main>
<h1 style="font-size:1.2rem">{title}</h1>
<div class="tools" id="tools" hidden>
<button type="button" id="back" aria-label="one back">◀</button>
<button type="button" id="play">play</button>
<button type="button" id="on" aria-label="one on">▶</button>
<input type="range" id="at" min="0" max="{last}" value="0" aria-label="picture"><output id="said" for="at"></output>
</div>
{images}
</main>
<script>
"use strict";
(() => {{
  const images = [...document.querySelectorAll("img")];
  const at = document.getElementById("at");
  const play = document.getElementById("play");
  let timer = null;
  function show(number) {{
    const now = (number + images.length) % images.length;
    images.forEach((image, index) => {{ image.hidden = index !== now; }});
    at.value = now;
    document.getElementById("said").textContent = `${{now + 1}} of ${{images.length}}`;
  }}
  function stop() {{ clearInterval(timer); timer = null; play.textContent = "play"; }}
  document.getElementById("back").addEventListener("click", () => {{ stop(); show(Number(at.value) - 1); }});
  document.getElementById("on").addEventListener("click", () => {{ stop(); show(Number(at.value) + 1); }});
  at.addEventListener("input", () => {{ stop(); show(Number(at.value)); }});
  play.addEventListener("click", () => {{
    if (timer !== null) {{ stop(); return; }}
    play.textContent = "stop";
    timer = setInterval(() => show(Number(at.value) + 1), {milliseconds});
  }});
  document.getElementById("tools").hidden = false;
  show(0);
  document.documentElement.dataset.ready = String(images.length);
}})();
</script>
</body>
</html>
"""


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

    def html(self) -> str:
        """The frames as one page: buttons, a slider, and each picture with its words."""
        images = "\n".join(
            f'<img alt="{html.escape(frame.description, quote=True)}" '
            f'src="data:image/svg+xml;base64,{b64encode(frame.svg().encode()).decode()}">' for frame in self.frames)
        return PAGE.format(title=html.escape(self.title), page=self.style.background, ink=self.style.ink,
                           muted=self.style.muted, last=len(self.frames) - 1, images=images,
                           milliseconds=round(1000 * self.seconds))

    def save(self, path: Path | str) -> Path:
        """Writes a .gif or .html file: all of it, or nothing. Raises ValueError for another suffix."""
        return save_as(path, "an animation", {".gif": self.gif, ".html": lambda: self.html().encode()})

    def _repr_html_(self) -> str:
        """The animation as Jupyter shows it: the GIF, with the words of all frames."""
        words = html.escape(" ".join(frame.description for frame in self.frames), quote=True)
        image = b64encode(self.gif()).decode()
        return f'<img style="max-width:100%" alt="{words}" src="data:image/gif;base64,{image}">'

    def __repr__(self) -> str:
        return f"{self.title}. {len(self.frames)} frames."
