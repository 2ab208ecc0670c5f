"""The gallery: each committed figure, light and dark, with what it shows in words."""

from html import unescape
from pathlib import Path

from zerosim_site.notebook_pages import described
from zerosim_site.page import HIDE, ROOT, Page

FOLDER = "figures"


def figure_names() -> list[str]:
    """The figures of the folder, each once."""
    return sorted(path.stem for path in (ROOT / FOLDER).glob("*.svg") if not path.stem.endswith("-dark"))


def figures_page() -> Page:
    """All figures on one page."""
    lines = [HIDE, "# Figures", "Each is drawn from a run, or from the package's formulas, by `zerosim figures`; the "
             "tests make its data another way. The words under a picture are its text alternative, and say the same."]
    for name in figure_names():
        title, words = map(unescape, described((ROOT / FOLDER / f"{name}.svg").read_text(encoding="utf-8")))
        title = title.translate(str.maketrans("[]", "()"))
        lines += [f"## {title} {{ #{name} }}", f"![{title}]({name}.svg)", *_moving(name),
                  f'??? note "In words"\n\n    {words}', f"Drawn by `zerosim figures {name}`."]
    return Page(f"{FOLDER}/index.md", "Figures", "\n\n".join(lines) + "\n", f"{FOLDER}/index.md", "Figures")


def _moving(name: str) -> list[str]:
    folder = ROOT / FOLDER
    links = {f"{name}.html": "step through it", f"{name}.gif": "GIF"}
    found = [f"[{words}]({file})" for file, words in links.items() if (folder / file).exists()]
    return [f"It moves: {', '.join(found)}."] if found else []


def beside() -> list[Path]:
    """The files that the figures' links lead to."""
    return [path for path in sorted((ROOT / FOLDER).iterdir()) if path.suffix in {".svg", ".gif", ".html"}]
