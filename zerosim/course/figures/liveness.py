"""Lifetimes of gradients in stages 1 and 2: what one rank holds of them over a step, by kind.

Legend: N ranks, P parameters. The steps are run, recorded, and replayed on the timeline's machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from zerosim.course.figures.timeline import STEP, Replayed, replayed, step_traces
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, heading, look, stack, within_limits
from zerosim.display.report import MACHINE
from zerosim.display.style import PHASE_COLORS
from zerosim.planning.recording import record
from zerosim.planning.timeline import COMPUTATION, replay

TITLE = "How long gradients live: stage 1 keeps all of them, stage 2 its share"
GRADIENT_KINDS = ("gradient", "unit_gradient", "communication_buffer")
NAMES: Mapping[str, str] = MappingProxyType({
    "gradient": "gradients that rest, and their reduced sum", "unit_gradient": "one unit's whole gradient",
    "communication_buffer": "buffers of the reduction"})


@dataclass(frozen=True, slots=True)
class Life:
    """One stage: bytes per parameter of each kind from each instant on, and (phase, from, to) of the step's phases."""

    stage: int
    microseconds: tuple[float, ...]
    held: Mapping[str, tuple[float, ...]]
    phases: tuple[tuple[str, float, float], ...]
    step_microseconds: float

    @property
    def totals(self) -> list[float]:
        """Of all kinds together."""
        return list(map(sum, zip(*self.held.values(), strict=True)))


@dataclass(frozen=True, slots=True)
class Liveness:
    """The same step under several stages."""

    what: str
    lives: tuple[Life, ...]


def liveness_data(stages: Sequence[int] = (1, 2), widths: Sequence[int] = (256,) * 9, rows: int = 128,
                  ranks: int = 4) -> Liveness:
    """Runs a step of an MLP with Adam in fp16 under each stage, and replays it."""
    parameters = sum(a * b for a, b in pairwise(widths))
    lives = []
    for stage in stages:
        traces = step_traces(widths, rows, ranks=ranks, stage=stage, compute="fp16", options={})
        lives.append(_life(stage, replayed("", replay(record(traces).inside(STEP), MACHINE)), parameters))
    return Liveness(f"an MLP of {len(widths) - 1} layers in fp16 with Adam, {parameters:,} parameters, N = {ranks}",
                    tuple(lives))


def _life(stage: int, found: Replayed, parameters: int) -> Life:
    nothing = (0,) * len(found.microseconds)
    held = {kind: tuple(nbytes / parameters for nbytes in found.nbytes.get(kind, nothing)) for kind in GRADIENT_KINDS}
    phases: dict[str, tuple[float, float]] = {}
    for what, _, start, end in found.bars[COMPUTATION]:
        if what in ("forward", "backward", "update"):
            low, high = phases.get(what, (start, end))
            phases[what] = min(low, start), max(high, end)
    return Life(stage, found.microseconds, held, tuple((what, *ends) for what, ends in phases.items()),
                found.step_microseconds)


def liveness(data: Liveness, style: Style = LIGHT) -> Drawing:
    """Stacked areas over time, a panel for each stage, the phases as bars above them."""
    from matplotlib.patches import Patch

    width, height = 12.0, 2.7 + 2.6 * len(data.lives)
    with style.figure(width, height) as figure:
        panels = figure.subplots(len(data.lives), 1, sharex=True, squeeze=False, gridspec_kw={
            "left": 1.1 / width, "right": 1 - 0.3 / width, "top": 1 - 1.5 / height, "bottom": 1.45 / height,
            "hspace": 0.28})[:, 0]
        top = 1.22 * max(max(life.totals) for life in data.lives)
        for axes, life in zip(panels, data.lives, strict=True):
            _panel(axes, life, top, style)
        panels[-1].set_xlabel("time since the step began (µs)")
        heading(figure, TITLE, f"Rank 0 of {data.what}; the ledger, replayed. Hatched: lives only "
                "inside a step.", style)
        figure.legend([Patch(**look(kind, style)) for kind in GRADIENT_KINDS],
                      [NAMES[kind] for kind in GRADIENT_KINDS], loc="lower center", ncols=3, columnspacing=1.6)
    return Drawing("liveness", TITLE, _description(data), style, figure)


def _panel(axes: Axes, life: Life, top: float, style: Style) -> None:
    ends = (*life.microseconds[1:], life.step_microseconds)
    shown = [at for at, (now, end) in enumerate(zip(life.microseconds, ends, strict=True)) if end > now]
    times = [life.microseconds[at] for at in shown] + [life.step_microseconds]
    at_ends = [*shown, shown[-1]]
    stack(axes, times, {kind: [column[at] for at in at_ends] for kind, column in life.held.items()},
          lambda kind: look(kind, style))
    for phase, start, end in life.phases:
        axes.broken_barh([(start, end - start)], (top * 0.93, top * 0.05), facecolor=PHASE_COLORS[phase])
        axes.text((start + end) / 2, top * 0.915, phase, ha="center", va="top", fontsize=11)
    axes.set_ylim(0, top)
    axes.set_xlim(0, life.step_microseconds)
    within_limits(axes)
    axes.grid(axis="y")
    axes.set_ylabel("gradients held\n(bytes per parameter)")
    axes.set_title(f"Stage {life.stage}: at most {max(life.totals):.3g}, {life.totals[-1]:.3g} at the end", loc="left",
                   fontweight="bold", fontsize=12)


def _description(data: Liveness) -> str:
    said = [f"Stage {life.stage} holds at most {max(life.totals):.3g} bytes of gradients per parameter, "
            f"{life.totals[0]:.3g} when the step begins and {life.totals[-1]:.3g} at its end, over "
            f"{life.step_microseconds:.0f} µs: " + ", ".join(f"{NAMES[kind]} at most {max(column):.3g}"
                                                             for kind, column in life.held.items()) + "."
            for life in data.lives]
    return f"Stacked areas of bytes of gradients over one step on rank 0 of {data.what}. " + " ".join(said)
