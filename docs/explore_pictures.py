"""Takes the pictures of the page that moves, into ``docs/assets``: ``make pictures``, with a Chromium.

Each is what a window of some width shows at an address of the page, light and dark. What moves is the page's own clock,
frame by frame. The report of a newcomer is of the program in ``docs/ten_minutes.md``.
"""

import io
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageColor

from tests.display.browser import Tab, open_tab
from zerosim import Cluster
from zerosim.course import explore
from zerosim.course.explored_runs import RANKS, StepSetting, chunk_of
from zerosim.display.report import save_report
from zerosim.display.style import EVENT_COLORS, KIND_COLORS, RANK_COLORS
from zerosim.planning import recording

ASSETS = Path(__file__).with_name("assets")
WAITS, STEP = "#n=4&stage=3&slow=1&t=17&rank=1&pick=wait-1-3", "#n=4&stage=3&slow=1&t=0"
COMPARED = "#n=4&stage=3&overlap=1&b.stage=3&b.prefetch=1&t=14"
# Of each picture: the window, in CSS pixels, the address, and what is scrolled to.
PICTURES = {"explore-390": ((390, 844), WAITS, ".timeline"), "explore-1280": ((1280, 1010), WAITS, "main"),
            "explore-1920": ((1920, 1080), COMPARED, "main")}
MOVES, WINDOW, SCALE, FRAMES, MILLISECONDS = "explore-moves", (1280, 860), 820 / 1280, 45, 220
NEWCOMER, REPORTED = (1280, 1066, 0.75), "#t=14&theme=light"
COLORS = (*RANK_COLORS, *EVENT_COLORS.values(), *KIND_COLORS.values())
THEMES = {"": "&theme=light", "-dark": "&theme=dark"}
# What is pictured, and one of each number of ranks, so that all can be chosen.
SETTINGS = [*(StepSetting(n, stage=0) for n in RANKS), StepSetting(slow=True), StepSetting(overlap=True),
            StepSetting(overlap=True, prefetch=True)]


def main() -> None:
    """Records the runs, and takes every picture."""
    chunks = [chunk_of(list(group)) for _, group in groupby(SETTINGS, attrgetter("n", "nodes", "stage"))]
    with TemporaryDirectory() as folder, open_tab() as tab:
        page = Path(folder, "page.html")
        page.write_text(explore.page_of(chunks), "utf-8")
        for dark, theme in THEMES.items():
            for name, (window, address, place) in PICTURES.items():
                tab.resize(*window)
                tab.open(page, address + theme)
                tab.evaluate(f"document.querySelector('{place}').scrollIntoView()")
                paletted(painted(tab)).save(ASSETS / f"{name}{dark}.png", optimize=True)
            tab.resize(*WINDOW, SCALE)
            tab.open(page, STEP + theme)
            first, *others = frames(tab)
            first.save(ASSETS / f"{MOVES}{dark}.gif", save_all=True, append_images=others, duration=MILLISECONDS,
                       loop=0)
        tab.resize(*NEWCOMER)
        tab.open(save_report(recorded_of_a_newcomer(Path(folder, "run.json"))), REPORTED)
        paletted(painted(tab)).save(ASSETS / "newcomer_report.png", optimize=True)


def recorded_of_a_newcomer(path: Path) -> Path:
    """The recording that ``docs/ten_minutes.md`` saves: of one step of its program on four ranks."""
    page, names = Path(__file__).with_name("ten_minutes.md").read_text("utf-8"), {}
    exec(page.partition("```python\n# mine.py\n")[2].partition("```")[0], names)
    cluster = Cluster(4)
    cluster.run(names["program"], 1)
    recording.save(recording.record(cluster.trace), path)
    return path


def painted(tab: Tab) -> Image.Image:
    """What the window shows, when all that has changed is painted."""
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => 0)")
    return Image.open(io.BytesIO(tab.png())).convert("RGB")


def paletted(image: Image.Image, like: Image.Image | None = None) -> Image.Image:
    """In 256 colors: those of ranks, kinds and the like, and then those of which it, or another, has most."""
    found = sorted((like or image).getcolors(image.width * image.height) or [], reverse=True)
    colors = np.array([*dict.fromkeys([*map(ImageColor.getrgb, COLORS), *(color for _, color in found)])][:256])
    codes, places = np.unique(np.asarray(image, int) @ (1 << 16, 1 << 8, 1), return_inverse=True)
    there = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1)
    nearest = ((there[:, None] - colors) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    picture = Image.fromarray(nearest[places].reshape(image.height, image.width), "P")
    picture.putpalette(colors.astype(np.uint8).tobytes())
    return picture


def frames(tab: Tab) -> Iterator[Image.Image]:
    """The step from its begin to its end, in the colors of its middle."""
    tab.evaluate("document.querySelectorAll('.lead, .questions').forEach((one) => one.remove())")
    end = tab.evaluate("lastEnd()")
    tab.evaluate(f"setClock({end / 2})")
    middle = painted(tab)
    for number in range(FRAMES):
        tab.evaluate(f"setClock({end * number / (FRAMES - 1)})")
        yield paletted(painted(tab), middle)


if __name__ == "__main__":
    main()
