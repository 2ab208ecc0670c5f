"""One training step over time: what computes, what communicates, and what is held, with and without overlap.

Legend: N ranks. The steps are run without data, recorded, and replayed on a machine of which the picture says the
numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from zerosim.course.measured import take_step
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, look, stack
from zerosim.display.replayed import MACHINE, RankBar, ReplayedRank, replayed_rank
from zerosim.display.style import KIND_COLORS, PHASE_COLORS, PURPOSE_COLORS, ink_on
from zerosim.display.views import words
from zerosim.models.small import MLP
from zerosim.numerics.policy import Policy
from zerosim.numerics.units import counted
from zerosim.optim.elementwise import Adam
from zerosim.planning.recording import record
from zerosim.planning.timeline import COMMUNICATION, COMPUTATION, Machine, replay
from zerosim.ranks.null_cluster import NullCluster
from zerosim.ranks.trace import Traces

TITLE = "One training step, waiting and overlapped"
STEP = "step"  # the span around what is drawn
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "No overlap": {},
    "Reductions overlap": {"overlap": True},
    "Reductions overlap, and each unit is gathered one ahead": {"overlap": True, "prefetch": 1},
})
PURPOSES: Mapping[str, str] = MappingProxyType({
    purpose: PURPOSE_COLORS[purpose] for purpose in ("parameters", "gradients", "control")})
COLORS: Mapping[str, str] = MappingProxyType({**PHASE_COLORS, **PURPOSES})
LANES: Mapping[str, int] = MappingProxyType({COMPUTATION: 1, COMMUNICATION: 0})
BAR_HEIGHT = 0.76
WORDS: Mapping[str, str] = MappingProxyType({
    "parameters": "gather parameters", "gradients": "reduce gradients", "control": "overflow flag and norm"})

@dataclass(frozen=True, slots=True)
class TimelineData:
    """The same step, overlapped in several ways: rank 0 of the replay of each, by title."""

    what: str
    machine: str
    replays: Mapping[str, ReplayedRank]

    @property
    def kinds(self) -> list[str]:
        """The kinds of which anything is held, in the order of the stack."""
        return [kind for kind in KIND_COLORS if any(any(way.nbytes.get(kind, ())) for way in self.replays.values())]

    @property
    def peak_nbytes(self) -> int:
        """The most bytes held at any instant of any way."""
        return max(way.peak_nbytes for way in self.replays.values())


def timeline_data(widths: Sequence[int] = (256,) * 5, rows: int = 128, ranks: int = 4, stage: int = 3,
                  machine: Machine = MACHINE, options: Mapping[str, Mapping[str, Any]] = OPTIONS) -> TimelineData:
    """Runs a step of an MLP with Adam in each way of overlapping, and replays it.

    ``options`` has a panel for each title, with the engine's options: {"In buckets": {"bucket_nbytes": 10_000}}.
    """
    what = (f"an MLP of {len(widths) - 1} layers of {widths[0]} in fp16 with Adam, {rows} samples per rank, "
            f"N = {ranks}, stage {stage}")
    return timeline_of(what, {title: step_traces(widths, rows, ranks, stage, **of)
                              for title, of in options.items()}, machine)


def step_traces(widths: Sequence[int], rows: int, ranks: int, stage: int, **options: Any) -> Traces:
    """The traces of one step of an MLP of these widths in fp16 with Adam, on ``rows`` samples per rank, on N ranks."""
    cluster = NullCluster(ranks)
    take_step(cluster, MLP(widths, bias=False), Adam(), (rows, widths[0]), (rows, widths[-1]), stage=stage,
              policy=Policy("fp16"), **options)
    return cluster.trace


def timeline_of(what: str, runs: Mapping[str, Any], machine: Machine = MACHINE) -> TimelineData:
    """The timelines of any runs, by title: their traces, replayed, of what each did in its span "step".

    In it there are spans of phases (forward, loss, backward, update), in these maybe spans of units. Raises ValueError
    where a run has no such span, or does nothing in it that takes time, and for arithmetic or collectives that belong
    to no phase or purpose in the picture.
    """
    if not runs:
        raise ValueError("a timeline was asked for of no runs; give it the traces of one at least, by title")
    found = {title: replayed_rank(replay(record(traces).inside(STEP), machine), 0) for title, traces in runs.items()}
    for title, way in found.items():
        bars = [*way.computed, *_timed(way)]
        if not bars:
            raise ValueError(f"{title!r} does nothing in its step that takes time, so there is nothing to draw; "
                             "put what it computes and sends into the span")
        for bar in bars:
            if bar.what not in COLORS:
                raise ValueError(f"{title!r} has bars of {bar.what!r}, which have no color here; put arithmetic "
                                 f"into a span named {', '.join(PHASE_COLORS)}, and give collectives a purpose of "
                                 f"{', '.join(PURPOSES)}")
    link = machine.network.inside
    return TimelineData(
        what, f"{machine.peak_flops_per_second * machine.efficiency / 1e12:g} TFLOP/s, memory at "
        f"{machine.device.memory_bytes_per_second / 1e9:g} GB/s, links of {link.bytes_per_second / 1e9:g} GB/s and "
        f"{link.latency_seconds * 1e6:g} µs", found)


def _timed(way: ReplayedRank) -> list[RankBar]:
    """Collectives and messages that take time; on one rank none does."""
    return [bar for bar in way.communicated if bar.end > bar.start]


def timeline(data: TimelineData, style: Style = LIGHT) -> Drawing:
    """For each way of overlapping, rank 0's two streams, and under them what it holds, on one scale of time."""
    width, height = 13.0, 3.35 + 3.1 * len(data.replays)
    words = f"Rank 0 of {data.what}.\nReplayed on devices of {data.machine}."
    with style.figure(width, height, TITLE, words, below=0.84) as figure:
        grid = figure.add_gridspec(len(data.replays), 1, left=1.65 / width, right=1 - 0.3 / width,
                                   top=1 - 1.55 / height, bottom=2.5 / height, hspace=0.36)
        for number, (title, way) in enumerate(data.replays.items()):
            inner = grid[number].subgridspec(2, 1, height_ratios=(1.0, 1.3), hspace=0.12)
            (streams,), (held,) = inner.subplots(squeeze=False)
            _streams(streams, title, way, nothing_won(data, title), style)
            _held(held, way, data.kinds, style)
            held.set_ylim(0, 1.08 * max(1, data.peak_nbytes) / 1e6)
            held.set_yticks([tick for tick in held.get_yticks() if tick <= held.get_ylim()[1]])
            for axes in (streams, held):
                axes.set_xlim(0, max(each.step_microseconds for each in data.replays.values()))
                axes.set_xticks([tick for tick in axes.get_xticks() if tick <= axes.get_xlim()[1]])
                axes.tick_params(axis="x", labelbottom=axes is held and number == len(data.replays) - 1)
        held.set_xlabel("time since the step began (µs)")
        for low, (heading, looks) in zip((1.0, 0.05), _looks(data, style).items(), strict=True):
            figure.key(looks, ncols=6, bbox_to_anchor=(0.5, low / height), title=heading)
    return Drawing("timeline", TITLE, _description(data), style, figure)


def _streams(axes: Axes, title: str, way: ReplayedRank, why: str, style: Style) -> None:
    """The Gantt chart of a rank's streams, the waits of its program hatched."""
    for wait in way.waits:
        axes.barh(LANES[COMPUTATION], wait.end - wait.start, BAR_HEIGHT, wait.start, **_waiting(style))
    for stream, bars in ((COMPUTATION, way.computed), (COMMUNICATION, _timed(way))):
        for bar in bars:
            width, color = bar.end - bar.start, COLORS[bar.what]
            axes.barh(LANES[stream], width, BAR_HEIGHT, bar.start, facecolor=color, edgecolor=style.background,
                      linewidth=0.5)
            if stream == COMPUTATION and bar.name != bar.what and width > 0.012 * way.step_microseconds:
                axes.text((bar.start + bar.end) / 2, LANES[stream], bar.name.removeprefix("layer"), ha="center",
                          va="center", color=ink_on(color), fontsize=11)
    axes.set_ylim(-0.5, 1.5)
    axes.set_yticks(list(LANES.values()), list(LANES))
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{title}: {way.step_microseconds:.0f} µs, of which waiting {way.exposed_microseconds:.0f} µs; "
                   f"at most {way.peak_nbytes / 1e6:.2f} MB held" + (why and f"\n{why}"))


def _held(axes: Axes, way: ReplayedRank, kinds: Sequence[str], style: Style) -> None:
    """Memory held, stacked by kind, from each change to the next."""
    instants, held = way.held([kind for kind in kinds if kind in way.nbytes])
    stack(axes, instants, {kind: [nbytes / 1e6 for nbytes in column] for kind, column in held.items()},
          lambda kind: look(kind, style), corners=True)
    axes.set_ylabel("held (MB)")
    axes.grid(axis="y")


def _waiting(style: Style) -> dict[str, Any]:
    return {"facecolor": "none", "edgecolor": style.muted, "linewidth": 0.5, "hatch": "\\\\\\\\"}


def _looks(data: TimelineData, style: Style) -> dict[str, dict[str, dict[str, Any]]]:
    """The look of everything that is drawn, by its words, in two legends: a color means one thing in each."""
    seen = {bar.what for way in data.replays.values() for bar in (*way.computed, *_timed(way))}
    return {"The two streams": {**{WORDS.get(what, what): {"facecolor": color} for what, color in COLORS.items()
                                   if what in seen}, "waiting": _waiting(style)},
            "Held": {words(kind): look(kind, style) for kind in data.kinds}}


def nothing_won(data: TimelineData, title: str) -> str:
    """A sentence on why a way is no faster than the first, where its gathers come after its reductions; else empty.

    A gather that is asked for while a reduction is under way comes after it, on the one stream; a program that cannot
    compute without what it gathers then waits for both at once, as long as for one after the other.
    """
    first, way = next(iter(data.replays.values())), data.replays[title]
    both = [gather for reduction, gather in pairwise(_timed(way))
            if (reduction.what, gather.what, gather.start) == ("gradients", "parameters", reduction.end)
            and any(wait.start <= reduction.start and gather.end <= wait.end for wait in way.waits)]
    if not both or way.step_microseconds < 0.99 * first.step_microseconds:
        return ""
    return (f"Nothing is won: behind {counted(len(both), 'reduction')} stands the next unit's gather, "
            "and backward waits for both.")


def _description(data: TimelineData) -> str:
    sentences = [f"Gantt charts of rank 0's two streams, compute and communication, over one step of {data.what}, "
                 f"replayed on devices of {data.machine}; under each, the bytes held by kind."]
    for title, way in data.replays.items():
        hidden = way.communication_microseconds - way.exposed_microseconds
        why = nothing_won(data, title)
        sentences.append(f"{title}: the step takes {way.step_microseconds:.1f} µs. {why + ' ' * bool(why)}Of "
                         f"{way.communication_microseconds:.1f} µs of communication {hidden:.1f} are hidden behind "
                         f"arithmetic, and for {way.exposed_microseconds:.1f} the program waits. At most "
                         f"{way.peak_nbytes:,} bytes are held.")
    return " ".join(sentences)
