"""Published against measured: numbers that papers and lessons print, beside what runs of the package come to.

Legend: each row's ratio is the published number over the measured one; 1 where they agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.course.published_runs import Settled, settled
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style
from zerosim.display.style import BLUE, VERMILLION

TITLE = "What is published, and what is measured"
LINE, HEAD, FOOT = 0.345, 1.75, 0.95  # inches: a row, what is above all rows, what is below
LEFT, WIDTH, RIGHT = 6.1, 5.2, 3.7  # words and numbers, the axis, the reasons
SUBJECTS = ("states", "activations", "flops", "collectives")
NAMES = {"states": "model states and traffic", "activations": "activations"}


@dataclass(frozen=True, slots=True)
class Agreeing:
    """Numbers of one subject that agree with what is measured: published over measured, for each."""

    subject: str
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Differing:
    """A number that does not: both values in the unit, and what is wrong in a few words."""

    label: str
    brief: str
    unit: str
    published: float
    measured: float

    @property
    def ratio(self) -> float:
        """Published over measured."""
        return self.published / self.measured


@dataclass(frozen=True, slots=True)
class PublishedData:
    """Ratios that agree, by subject, and rows that do not and have a label; ``unlabeled`` counts those without one."""

    agreeing: tuple[Agreeing, ...]
    differing: tuple[Differing, ...]
    unlabeled: int


def published_data(subjects: Sequence[str] = SUBJECTS) -> PublishedData:
    """Runs, without data, what settles the published numbers of these subjects; ValueError where no run settles any."""
    found = list(settled(*subjects))
    if not found:
        raise ValueError(f"no run settles a published number about {', '.join(subjects)}; those that runs settle are "
                         f"about {', '.join(SUBJECTS)}")
    agreeing = {subject: tuple(one.row.stated / one.measured for one in found
                               if one.row.closes and one.row.subject == subject) for subject in subjects}
    differing = [one for one in found if not one.row.closes]
    return PublishedData(tuple(Agreeing(subject, ratios) for subject, ratios in agreeing.items() if ratios),
                         tuple(_differing(one) for one in differing if one.row.label),
                         sum(not one.row.label for one in differing))


def _differing(one: Settled) -> Differing:
    return Differing(one.row.label, one.row.brief, one.row.unit, one.row.stated, one.measured)


def published(data: PublishedData, style: Style = LIGHT) -> Drawing:
    """One line for each number, on an axis of ratios; above them, as dots alone, those that agree."""
    count = len(data.agreeing) + len(data.differing)
    width, height = LEFT + WIDTH + RIGHT, HEAD + LINE * count + FOOT
    with style.figure(width, height) as figure:
        axes = figure.add_axes((LEFT / width, FOOT / height, WIDTH / width, LINE * count / height))
        _axis(axes, count, style)
        for line, group in enumerate(data.agreeing):
            axes.plot(group.ratios, [line] * len(group.ratios), "o", color=BLUE, markersize=9, alpha=0.6)
            _words(axes, line, NAMES.get(group.subject, group.subject), f"{len(group.ratios)} numbers", "agree", style)
        for line, row in enumerate(data.differing, len(data.agreeing)):
            axes.plot((row.ratio, 1), (line, line), color=style.muted, linewidth=1.6, zorder=1)
            axes.plot([1], [line], "o", color=BLUE, markersize=9)
            axes.plot([row.ratio], [line], "D", color=VERMILLION, markersize=5.5)
            _words(axes, line, row.label, _values(row), row.brief, style)
        y = 1 - (HEAD - 0.22) / height
        for x, text, aligned in ((0.2, "what", "left"), (LEFT - 0.15, "published → measured", "right"),
                                 (LEFT + WIDTH + 0.15, "why", "left")):
            figure.text(x / width, y, text, ha=aligned, va="center", fontsize=12, fontweight="bold")
        figure.text(0.2 / width, 1 - 0.36 / height, TITLE, va="center", fontsize=17, fontweight="bold")
        figure.text(0.2 / width, 1 - 0.92 / height, _subtitle(data), va="center", linespacing=1.45, color=style.muted)
    return Drawing("published", TITLE, _description(data), style, figure)


def _axis(axes: Axes, count: int, style: Style) -> None:
    """A logarithmic axis of ratios with a line at 1; rows from top to bottom."""
    axes.set_xscale("log")
    axes.set_xlim(8e-3, 6e3)
    axes.set_xticks([0.01, 0.1, 1, 10, 100, 1000], ["1/100", "1/10", "1", "10", "100", "1000"])
    axes.minorticks_off()
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.axvline(1, color=style.ink, linewidth=1.2, zorder=1)
    axes.set_xlabel("published / measured (ratio)")


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


def _values(row: Differing) -> str:
    """``21.5 → 38.5 GB``"""
    unit = {"times": "", "vectors": "Ψ", "1e9 parameters": "billion"}.get(row.unit, row.unit)
    return f"{_number(row.published)} → {_number(row.measured)} {unit}".rstrip()


def _subtitle(data: PublishedData) -> str:
    agree, shown = sum(len(group.ratios) for group in data.agreeing), len(data.differing)
    differ = shown + data.unlabeled
    which = f"{shown} of the {differ}" if data.unlabeled else f"the {differ}"
    return (f"Runs without data settle {agree + differ} of the published numbers that come with the package. {agree} "
            f"agree, to the last digit or to 0.1%.\nBelow are {which} that do not: published (diamond) beside measured "
            "(disk), and why.")


def _description(data: PublishedData) -> str:
    agree = "; ".join(f"{len(group.ratios)} numbers about {NAMES.get(group.subject, group.subject)} agree"
                      for group in data.agreeing)
    differ = "; ".join(f"{row.label}: published {_values(row).replace(' → ', ', measured ')} ({row.brief})"
                       for row in data.differing)
    return f"Ratios of published to measured numbers, on a line each. {agree}. Those that differ: {differ}."
