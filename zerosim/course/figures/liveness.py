"""Lifetimes of gradients in stages 1 and 2: what one rank holds of them over a step, by kind.

Legend: N ranks, P parameters. The steps are run, recorded, and replayed on the timeline's machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from zerosim.course.figures.timeline import STEP, step_traces
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, look, stack, within_limits
from zerosim.display.replayed import MACHINE, ReplayedRank, replayed_rank
from zerosim.display.style import PHASE_COLORS
from zerosim.planning.recording import record
from zerosim.planning.timeline import replay

TITLE = "How long gradients live: stage 1 keeps all of them, stage 2 its share"
NAMES: Mapping[str, str] = MappingProxyType({
    "gradient": "gradients that rest, and their reduced sum", "unit_gradient": "one unit's whole gradient",
    "communication_buffer": "buffers of the reduction"})
GRADIENT_KINDS = tuple(NAMES)


@dataclass(frozen=True, slots=True)
class Liveness:
    """The same step of a model of P parameters: rank 0 of the replay under each stage."""

    what: str
    parameters: int
    lives: Mapping[int, ReplayedRank]

    def held(self, stage: int) -> list[float]:
        """Bytes of gradients of all kinds per parameter, from each change on."""
        life = self.lives[stage]
        columns = [life.nbytes[kind] for kind in GRADIENT_KINDS if kind in life.nbytes]
        return [sum(of_kinds) / self.parameters for of_kinds in zip(*columns, strict=True)]


def liveness_data(stages: Sequence[int] = (1, 2), widths: Sequence[int] = (256,) * 9, rows: int = 128,
                  ranks: int = 4) -> Liveness:
    """Runs a step of an MLP with Adam in fp16 under each stage, and replays it."""
    parameters, lives = sum(a * b for a, b in pairwise(widths)), {}
    for stage in stages:
        traces = step_traces(widths, rows, ranks, stage)
        lives[stage] = replayed_rank(replay(record(traces).inside(STEP), MACHINE), 0)
    return Liveness(f"an MLP of {len(widths) - 1} layers in fp16 with Adam, {parameters:,} parameters, N = {ranks}",
                    parameters, lives)


def liveness(data: Liveness, style: Style = LIGHT) -> Drawing:
    """Stacked areas over time, a panel for each stage, the phases as bars above them."""
    rows, words = len(data.lives), f"Rank 0 of {data.what}; its memory, replayed. Hatched: lives only inside a step."
    with style.figure(12.0, 2.7 + 2.6 * rows, TITLE, words) as figure:
        panels = figure.panels(rows, 1, left=1.1, right=0.3, top=1.5, bottom=1.45, hspace=0.28, sharex=True)[:, 0]
        top = 1.22 * max(max(data.held(stage)) for stage in data.lives)
        for axes, stage in zip(panels, data.lives, strict=True):
            _panel(axes, data, stage, top, style)
        panels[-1].set_xlabel("time since the step began (µs)")
        figure.key({name: look(kind, style) for kind, name in NAMES.items()}, ncols=3)
    return Drawing("liveness", TITLE, _description(data), style, figure)


def _panel(axes: Axes, data: Liveness, stage: int, top: float, style: Style) -> None:
    life, totals = data.lives[stage], data.held(stage)
    instants, held = life.held(GRADIENT_KINDS)
    stack(axes, instants, {kind: [nbytes / data.parameters for nbytes in column] for kind, column in held.items()},
          lambda kind: look(kind, style))
    for phase in ("forward", "backward", "update"):
        bars = [bar for bar in life.computed if bar.what == phase]
        start, end = bars[0].start, bars[-1].end
        axes.broken_barh([(start, end - start)], (top * 0.93, top * 0.05), facecolor=PHASE_COLORS[phase])
        axes.text((start + end) / 2, top * 0.915, phase, ha="center", va="top", fontsize=11)
    axes.set(ylim=(0, top), xlim=(0, life.step_microseconds), ylabel="gradients held\n(bytes per parameter)",
             title=f"Stage {stage}: at most {max(totals):.3g}, {totals[-1]:.3g} at the end")
    within_limits(axes)
    axes.grid(axis="y")


def _description(data: Liveness) -> str:
    said = []
    for stage, life in data.lives.items():
        totals = data.held(stage)
        kinds = ", ".join(f"{words} at most {max(life.nbytes.get(kind, (0,))) / data.parameters:.3g}"
                          for kind, words in NAMES.items())
        said.append(f"Stage {stage} holds at most {max(totals):.3g} bytes of gradients per parameter, {totals[0]:.3g} "
                    f"when the step begins and {totals[-1]:.3g} at its end, over {life.step_microseconds:.0f} µs: "
                    f"{kinds}.")
    return f"Stacked areas of bytes of gradients over one step on rank 0 of {data.what}. " + " ".join(said)
