"""How colors look to whom, and what a drawing shows: the instruments of the tests of figures."""

import io
import re
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgba
from matplotlib.legend import Legend
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from zerosim.course import figures

# Linear RGB as people with full color vision see it, and as those without one kind of cone do.
# Source: Machado, Oliveira & Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency".
VISIONS = {
    "full": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def lab(color: str, vision: str) -> np.ndarray:
    """CIELAB of ``#RRGGBB`` as it is seen, (3,)."""
    c = np.array([int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(VISIONS[vision] @ linear, 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(one: str, other: str, vision: str) -> float:
    """CIE76 difference of two colors; about 2 is just noticeable side by side, 10 is plain at a glance."""
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


@cache
def data_of(name: str) -> Any:
    """The data of a committed figure, measured once in all tests."""
    return figures.FIGURES[name].make_data()


def texts(drawing: figures.Drawing) -> list[Text]:
    """The visible texts of a drawing."""
    return [text for text in drawing.figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def boxes(drawing: figures.Drawing) -> list[tuple[str, Bbox]]:
    """Every text of a drawing and where it lies, in pixels, shrunk by half a pixel on each side."""
    with drawing.style.in_force():
        canvas = FigureCanvasAgg(drawing.figure)
        drawing.figure.draw_without_rendering()
        renderer = canvas.get_renderer()
        return [(text.get_text(), Text.get_window_extent(text, renderer).padded(-0.5)) for text in texts(drawing)]


def misplaced(drawing: figures.Drawing) -> list[str]:
    """The pairs of texts that lie on each other, and the texts that leave the page."""
    found, page = boxes(drawing), drawing.figure.bbox
    corners = np.array([box.extents for _, box in found]).reshape(-1, 4)
    # Two boxes overlap where each begins, in x and in y, before the other ends.
    before = (corners[:, None, :2] <= corners[None, :, 2:]).all(axis=2)
    pairs = np.argwhere(np.triu(before & before.T, 1))
    return [f"{found[one][0]!r} and {found[other][0]!r} lie on each other" for one, other in pairs] + [
        f"{text!r} leaves the page" for text, box in found
        if box.x0 < page.x0 or box.y0 < page.y0 or box.x1 > page.x1 or box.y1 > page.y1]


def assert_readable(drawing: figures.Drawing) -> None:
    """No words lie on others or leave the page, and none are smaller than 11 points: a footnote's size on a slide."""
    assert misplaced(drawing) == []
    assert min(text.get_fontsize() for text in texts(drawing)) >= 11


def repeated_in_a_legend(drawing: figures.Drawing) -> list[tuple[str, str]]:
    """Pairs of entries of one legend that have the same color; what has none, as hatching alone, is left out."""
    legends = [legend for page in (drawing.figure, *drawing.figure.axes) for legend in page.findobj(Legend)]
    found = set()
    for legend in legends:
        handles = zip(legend.get_texts(), legend.legend_handles, strict=True)
        looks = [(text.get_text(), handle.get_facecolor() if isinstance(handle, Patch) else handle.get_color())
                 for text, handle in handles]
        entries = [(text, to_hex(color)) for text, color in looks if to_rgba(color)[3]]
        found |= {(one, other) for (one, color), (other, same) in combinations(entries, 2) if color == same}
    return sorted(found)


def drawn_by(svg: str) -> str:
    """The version of Matplotlib that wrote an SVG."""
    match = re.search(r"Matplotlib v([\w.+]+?), ", svg)
    assert match, "the SVG does not say which Matplotlib drew it"
    return match[1]


def pixels_of(png: bytes) -> tuple[str, np.ndarray]:
    """The versions that drew a picture of a notebook, and its pixels (height, width, 3)."""
    with Image.open(io.BytesIO(png)) as image:
        return image.info["Software"], np.asarray(image.convert("RGB")).astype(int)


def shows_the_same(name: str, one: bytes, other: bytes) -> bool:
    """The same pixels; of curves of losses all but one in a hundred, which lie on the edges of lines."""
    both = [pixels_of(png)[1] for png in (one, other)]
    if both[0].shape != both[1].shape:
        return False
    differ = (abs(both[0] - both[1]) > 16).any(axis=2).mean()
    return bool(differ <= (0.01 if name in OF_TRAININGS else 0.0))


IDS = re.compile(r"\b[a-z]?[0-9a-f]{10}\b")
NUMBERS = re.compile(r"(?<![#\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?")


def _with_numbered_ids(svg: str) -> str:
    """Ids are made of shapes and colors; here they are numbered in their order."""
    names: dict[str, str] = {}
    return IDS.sub(lambda found: names.setdefault(found[0], f"id{len(names)}"), svg)


def without_colors(svg: str) -> str:
    """An SVG's shapes and words alone."""
    return _with_numbered_ids(re.sub(r"#[0-9a-f]{6}\b|; fill: #[0-9a-f]{6}(?=\")", "", svg))


# Its curves are losses, which BLAS adds in another order on another processor; all others are compared byte for byte.
OF_TRAININGS = ("adam-states", "format-losses", "stages")


def is_committed(drawing: figures.Drawing, committed: str) -> bool:
    """The same bytes; of curves of losses the same picture."""
    return (same_picture if drawing.name in OF_TRAININGS else str.__eq__)(committed, drawing.svg())


def same_picture(one: str, other: str) -> bool:
    """The same words, colors and shapes, with coordinates equal to a hundredth of a point."""
    both = [_with_numbered_ids(svg) for svg in (one, other)]
    coordinates = [[float(number) for tag in re.findall("<[^>]*>", svg) for number in NUMBERS.findall(tag)]
                   for svg in both]
    rest = [re.sub("<[^>]*>", lambda tag: NUMBERS.sub("0", tag[0]), svg) for svg in both]
    return rest[0] == rest[1] and np.allclose(*coordinates, rtol=0, atol=0.01)
