"""Published against measured: numbers that papers and lessons print, beside what runs of the package come to.

Legend: each row's ratio is the published number over the measured one; 1 where they agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.course.published_runs import Checked, checked
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style
from zerosim.display.style import BLUE, VERMILLION

TITLE = "What is published, and what is measured"
LINE, HEAD, FOOT = 0.345, 1.75, 0.95  # inches: a row, what is above all rows, what is below
LEFT, WIDTH, RIGHT = 6.1, 5.2, 3.7  # words and numbers, the axis, the reasons
SUBJECTS = ("states", "activations", "flops", "collectives")
NAMES = {"states": "model states and traffic", "activations": "activations"}


@dataclass(frozen=True, slots=True)
class PublishedData:
    """Published numbers of some subjects, each checked by a run."""

    checked: tuple[Checked, ...]

    @property
    def agreeing(self) -> dict[str, list[float]]:
        """Published over measured where they agree, by subject."""
        found = {subject: [one.ratio for one in self.checked if one.row.closes and one.row.subject == subject]
                 for subject in SUBJECTS}
        return {subject: ratios for subject, ratios in found.items() if ratios}

    @property
    def differing(self) -> list[Checked]:
        """Numbers that do not agree."""
        return [one for one in self.checked if not one.row.closes]

    @property
    def shown(self) -> list[Checked]:
        """Those of them that have a label; the others are counted alone."""
        return [one for one in self.differing if one.row.label]


def published_data(subjects: Sequence[str] = SUBJECTS) -> PublishedData:
    """Runs, without data, what checks the published numbers of these subjects; ValueError where no run checks any."""
    found = tuple(checked(*subjects))
    if not found:
        raise ValueError(f"no run checks a published number about {', '.join(subjects)}; those that runs check are "
                         f"about {', '.join(SUBJECTS)}")
    return PublishedData(found)


def published(data: PublishedData, style: Style = LIGHT) -> Drawing:
    """One line for each number, on an axis of ratios; above them, as dots alone, those that agree."""
    agreeing, shown = data.agreeing, data.shown
    count = len(agreeing) + len(shown)
    width, height = LEFT + WIDTH + RIGHT, HEAD + LINE * count + FOOT
    with style.figure(width, height) as figure:
        axes = figure.add_axes((LEFT / width, FOOT / height, WIDTH / width, LINE * count / height))
        _axis(axes, count, style)
        for line, (subject, ratios) in enumerate(agreeing.items()):
            axes.plot(ratios, [line] * len(ratios), "o", color=BLUE, markersize=9, alpha=0.6)
            _words(axes, line, NAMES.get(subject, subject), f"{len(ratios)} numbers", "agree", style)
        for line, one in enumerate(shown, len(agreeing)):
            axes.plot((one.ratio, 1), (line, line), color=style.muted, linewidth=1.6, zorder=1)
            axes.plot([1], [line], "o", color=BLUE, markersize=9)
            axes.plot([one.ratio], [line], "D", color=VERMILLION, markersize=5.5)
            _words(axes, line, one.row.label, _values(one), one.row.brief, style)
        y = 1 - (HEAD - 0.22) / height
        for x, text, aligned in ((0.2, "what", "left"), (LEFT - 0.15, "published → measured", "right"),
                                 (LEFT + WIDTH + 0.15, "why", "left")):
            figure.text(x / width, y, text, ha=aligned, va="center", fontsize=12, fontweight="bold")
        figure.text(0.2 / width, 1 - 0.36 / height, TITLE, va="center", fontsize=17, fontweight="bold")
        figure.text(0.2 / width, 1 - 0.92 / height, _subtitle(data), va="center", linespacing=1.45, color=style.muted)
    return Drawing("published", TITLE, _description(data), style, figure)


def _axis(axes: Axes, count: int, style: Style) -> None:
    """A logarithmic axis of ratios with a line at 1; rows from top to bottom."""
    axes.set(xscale="log", xlim=(8e-3, 6e3), ylim=(count - 0.4, -0.6), yticks=[],
             xlabel="published / measured (ratio)")
    axes.set_xticks([0.01, 0.1, 1, 10, 100, 1000], ["1/100", "1/10", "1", "10", "100", "1000"])
    axes.minorticks_off()
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.axvline(1, color=style.ink, linewidth=1.2, zorder=1)


def _words(axes: Axes, line: int, label: str, values: str, brief: str, style: Style) -> None:
    """The words of one line, left and right of the axis."""
    for x, inches, text, aligned, color in (
            (0, -LEFT + 0.2, label, "left", style.ink), (0, -0.15, values, "right", style.ink),
            (1, 0.15, brief, "left", style.muted)):
        axes.annotate(text, (x, line), (72 * inches, 0), xycoords=axes.get_yaxis_transform(),
                      textcoords="offset points", ha=aligned, va="center", fontsize=12, color=color,
                      annotation_clip=False)


def _number(value: float) -> str:
    """Three or four digits."""
    return f"{value:.2e}".replace("e-0", "e-") if value < 1e-3 else f"{value:.4g}"


def _values(one: Checked) -> str:
    """``21.5 → 38.5 GB``"""
    unit = {"times": "", "vectors": "Ψ", "1e9 parameters": "billion"}.get(one.row.unit, one.row.unit)
    return f"{_number(one.row.stated)} → {_number(one.measured)} {unit}".rstrip()


def _subtitle(data: PublishedData) -> str:
    agree = len(data.checked) - len(data.differing)
    left_out = len(data.differing) - len(data.shown)
    but = f", but for {left_out} printed as 0, which has no ratio" if left_out else ""
    return (f"Runs without data check {len(data.checked)} of the published numbers that come with the package. {agree} "
            f"agree, to the last digit or to 0.1%.\nBelow are the others{but}: published (diamond) beside measured "
            "(disk), and why.")


def _description(data: PublishedData) -> str:
    agree = "; ".join(f"{len(ratios)} numbers about {NAMES.get(subject, subject)} agree"
                      for subject, ratios in data.agreeing.items())
    differ = "; ".join(f"{one.row.label}: published {_values(one).replace(' → ', ', measured ')} ({one.row.brief})"
                       for one in data.shown)
    return f"Ratios of published to measured numbers, on a line each. {agree}. Those that differ: {differ}."
