"""One training step over time: what computes, what communicates, and what is held, with and without overlap.

Legend: N ranks. The steps are run without data, recorded, and replayed on a machine of which the picture says the
numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zerosim.course.measured import run
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, heading, look
from zerosim.display.report import MACHINE
from zerosim.display.style import KIND_COLORS, PHASE_COLORS, PURPOSE_COLORS, ink_on
from zerosim.display.views import words
from zerosim.models.small import MLP
from zerosim.numerics.policy import Policy
from zerosim.optim.elementwise import Adam
from zerosim.planning.recording import record
from zerosim.planning.timeline import COMMUNICATION, COMPUTATION, Machine, Timeline, memory, replay
from zerosim.ranks.cluster import NullCluster
from zerosim.ranks.trace import Traces

TITLE = "One training step, waiting and overlapped"
STEP = "step"  # the span around what is drawn
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "No overlap": {},
    "Reductions overlap": {"overlap": True},
    "Reductions overlap, and each unit is gathered one ahead": {"overlap": True, "prefetch": 1},
})
PHASES = PHASE_COLORS
PURPOSES: Mapping[str, str] = MappingProxyType({
    purpose: PURPOSE_COLORS[purpose] for purpose in ("parameters", "gradients", "control")})
LANES: Mapping[str, int] = MappingProxyType({COMPUTATION: 1, COMMUNICATION: 0})
BAR_HEIGHT = 0.76
WORDS: Mapping[str, str] = MappingProxyType({
    "parameters": "gather parameters", "gradients": "reduce gradients", "control": "overflow flag and norm"})

Bar = tuple[str, str, float, float]  # what it is, the unit in whose span, from and to, in microseconds


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step on rank 0: bars by stream, waits, what is held by kind at each change, and the sums of it.

    Microseconds and bytes. A bar is (what, unit, start, end).
    """

    title: str
    bars: Mapping[str, tuple[Bar, ...]]
    waits: tuple[tuple[float, float], ...]
    microseconds: tuple[float, ...]
    nbytes: Mapping[str, tuple[int, ...]]
    step_microseconds: float
    exposed_microseconds: float
    communication_microseconds: float


@dataclass(frozen=True, slots=True)
class TimelineData:
    """The same step, overlapped in several ways."""

    what: str
    machine: str
    replays: tuple[Replayed, ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds of which anything is held, in the order of the stack."""
        return [kind for kind in KIND_COLORS if any(any(r.nbytes.get(kind, ())) for r in self.replays)]


def timeline_data(widths: Sequence[int] = (256,) * 5, rows: int = 128, ranks: int = 4, stage: int = 3,
                  machine: Machine = MACHINE, options: Mapping[str, Mapping[str, Any]] = OPTIONS) -> TimelineData:
    """Runs a step of an MLP with Adam in each way of overlapping, and replays it.

    ``options`` has a panel for each title, with the engine's options: {"In buckets": {"bucket_nbytes": 10_000}}.
    """
    what = (f"an MLP of {len(widths) - 1} layers of {widths[0]} in fp16 with Adam, {rows} samples per rank, "
            f"N = {ranks}, stage {stage}")
    return timeline_of(what, {title: step_traces(widths, rows, ranks=ranks, stage=stage, compute="fp16", options=of)
                              for title, of in options.items()}, machine)


def step_traces(widths: Sequence[int], rows: int, *, ranks: int, stage: int, compute: str,
                options: Mapping[str, Any]) -> Traces:
    """The traces of one step of an MLP of these widths with Adam, on ``rows`` samples per rank, on N ranks."""
    cluster = NullCluster(ranks)
    run(cluster, MLP(widths, bias=False), Adam(), (rows, widths[0]), (rows, widths[-1]), stage=stage,
        policy=Policy(compute), **options)
    return cluster.trace


def timeline_of(what: str, runs: Mapping[str, Any], machine: Machine = MACHINE) -> TimelineData:
    """The timelines of any runs, by title: their traces, replayed, of what each did in its span "step".

    In it there are spans of phases (forward, loss, backward, update), in these maybe spans of units. Raises ValueError
    where a run has no such span, or does nothing in it that takes time, and for arithmetic or collectives that belong
    to no phase or purpose in the picture.
    """
    if not runs:
        raise ValueError("a timeline was asked for of no runs; give it the traces of one at least, by title")
    found = tuple(replayed(title, replay(record(traces).inside(STEP), machine)) for title, traces in runs.items())
    for one in found:
        if not any(one.bars.values()):
            raise ValueError(f"{one.title!r} does nothing in its step that takes time, so there is nothing to draw; "
                             "put what it computes and sends into the span")
        for what_it_is in (bar[0] for bars in one.bars.values() for bar in bars):
            if what_it_is not in PHASES and what_it_is not in PURPOSES:
                raise ValueError(f"{one.title!r} has bars of {what_it_is!r}, which have no color here; put arithmetic "
                                 f"into a span named {', '.join(PHASES)}, and give collectives a purpose of "
                                 f"{', '.join(PURPOSES)}")
    link = machine.network.inside
    return TimelineData(
        what, f"{machine.peak_flops_per_second * machine.efficiency / 1e12:g} TFLOP/s, memory at "
        f"{machine.device.memory_bytes_per_second / 1e9:g} GB/s, links of {link.bytes_per_second / 1e9:g} GB/s and "
        f"{link.latency_seconds * 1e6:g} µs", found)


def replayed(title: str, timeline: Timeline) -> Replayed:
    """Reads rank 0 of a replay."""
    bars: dict[str, list[Bar]] = {COMPUTATION: [], COMMUNICATION: []}
    for event in timeline.events(0):
        if event.seconds:
            phase, unit = "".join(event.path[1:2]), "".join(event.path[2:])  # the first is the step's own span
            _add(bars[event.stream], (event.purpose or phase, unit, event.start_seconds * 1e6, event.end_seconds * 1e6))
    lane, curve, usage = timeline.lanes[0], memory(timeline, 0), timeline.usage[0]
    waits = tuple((start * 1e6, end * 1e6) for start, end in zip(lane.reached, lane.resumed, strict=True)
                  if end > start)
    return Replayed(title, {stream: tuple(found) for stream, found in bars.items()}, waits,
                    tuple((curve.seconds * 1e6).tolist()),
                    {kind: tuple(nbytes.tolist()) for kind, nbytes in curve.nbytes_by_kind.items()},
                    timeline.step_seconds * 1e6, usage.exposed_seconds * 1e6, usage.communication_seconds * 1e6)


def _add(bars: list[Bar], bar: Bar) -> None:
    """Appends a bar, or lengthens the last one where arithmetic goes on; collectives are bars of their own."""
    if bars and bars[-1][:2] == bar[:2] and bars[-1][3] == bar[2] and bar[0] in PHASES:
        bar = (*bar[:2], bars.pop()[2], bar[3])
    bars.append(bar)


def timeline(data: TimelineData, style: Style = LIGHT) -> Drawing:
    """For each way of overlapping, rank 0's two streams, and under them what it holds, on one scale of time."""
    width, height = 13.0, 2.6 + 3.1 * len(data.replays)
    with style.figure(width, height) as figure:
        grid = figure.add_gridspec(len(data.replays), 1, left=1.65 / width, right=1 - 0.3 / width,
                                   top=1 - 1.55 / height, bottom=1.85 / height, hspace=0.3)
        for number, replayed in enumerate(data.replays):
            inner = grid[number].subgridspec(2, 1, height_ratios=(1.0, 1.3), hspace=0.12)
            (streams,), (held,) = inner.subplots(squeeze=False)
            _streams(streams, replayed, style)
            _held(held, replayed, data.kinds, style)
            held.set_ylim(0, 1.08 * max(1, *map(_peak, data.replays)) / 1e6)
            held.set_yticks([tick for tick in held.get_yticks() if tick <= held.get_ylim()[1]])
            for axes in (streams, held):
                axes.set_xlim(0, max(r.step_microseconds for r in data.replays))
                axes.set_xticks([tick for tick in axes.get_xticks() if tick <= axes.get_xlim()[1]])
                axes.tick_params(axis="x", labelbottom=axes is held and number == len(data.replays) - 1)
        held.set_xlabel("time since the step began (µs)")
        heading(figure, TITLE, f"Rank 0 of {data.what}.\nReplayed on devices of {data.machine}.", style,
                below=0.84)
        figure.legend(*_legend(data, style), loc="lower center", ncols=5, bbox_to_anchor=(0.5, 0.0), columnspacing=1.6)
    return Drawing("timeline", TITLE, _description(data), style, figure)


def _streams(axes: Axes, replayed: Replayed, style: Style) -> None:
    """The Gantt chart of a rank's streams, the waits of its program hatched."""
    for start, end in replayed.waits:
        axes.barh(LANES[COMPUTATION], end - start, BAR_HEIGHT, start, **_waiting(style))
    for stream, bars in replayed.bars.items():
        for what, unit, start, end in bars:
            color = _color(what)
            axes.barh(LANES[stream], end - start, BAR_HEIGHT, start, facecolor=color, edgecolor=style.background,
                      linewidth=0.5)
            if stream == COMPUTATION and end - start > 0.012 * replayed.step_microseconds:
                axes.text((start + end) / 2, LANES[stream], unit.removeprefix("layer"), ha="center", va="center",
                          color=ink_on(color), fontsize=11)
    axes.set_ylim(-0.5, 1.5)
    axes.set_yticks(list(LANES.values()), list(LANES))
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{replayed.title}: {replayed.step_microseconds:.0f} µs, of which waiting "
                   f"{replayed.exposed_microseconds:.0f} µs; at most {_peak(replayed) / 1e6:.2f} MB held",
                   loc="left", fontsize=12, fontweight="bold")


def _held(axes: Axes, replayed: Replayed, kinds: Sequence[str], style: Style) -> None:
    """Memory held, stacked by kind, from each change to the next."""
    ends = (*replayed.microseconds[1:], replayed.step_microseconds)
    shown = [at for at, (now, end) in enumerate(zip(replayed.microseconds, ends, strict=True)) if end > now]
    times = [replayed.microseconds[at] for at in shown] + [replayed.step_microseconds]
    low = [0.0] * len(times)
    for kind in (kind for kind in kinds if kind in replayed.nbytes):
        held = [replayed.nbytes[kind][at] / 1e6 for at in shown]
        high = [a + b for a, b in zip(low, [*held, held[-1]], strict=True)]
        corners = [at for at in range(len(times)) if at in (0, len(times) - 1)
                   or (low[at], high[at]) != (low[at - 1], high[at - 1])]
        x, y1, y2 = ([column[at] for at in corners] for column in (times, low, high))
        axes.fill_between(x, y1, y2, step="post", **look(kind, style))
        low = high
    axes.set_ylabel("held (MB)")
    axes.grid(axis="y")


def _peak(replayed: Replayed) -> int:
    """The most bytes held at any instant."""
    return max(map(sum, zip(*replayed.nbytes.values(), strict=True)), default=0)


def _color(what: str) -> str:
    return PHASES.get(what) or PURPOSES[what]


def _waiting(style: Style) -> dict[str, Any]:
    return {"facecolor": "none", "edgecolor": style.muted, "linewidth": 0.5, "hatch": "\\\\\\\\"}


def _legend(data: TimelineData, style: Style) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    whats = [what for what in (*PHASES, *PURPOSES)
             if any(bar[0] == what for r in data.replays for bars in r.bars.values() for bar in bars)]
    patches = [Patch(facecolor=_color(what)) for what in whats] + [Patch(**_waiting(style))]
    return (patches + [Patch(**look(kind, style)) for kind in data.kinds],
            [WORDS.get(what, what) for what in whats] + ["waiting"]
            + [f"held: {words(kind)}" for kind in data.kinds])


def _description(data: TimelineData) -> str:
    """The time, the waits and the memory of each way of overlapping."""
    sentences = [f"Gantt charts of rank 0's two streams, compute and communication, over one step of {data.what}, "
                 f"replayed on devices of {data.machine}; under each, the bytes held by kind."]
    for r in data.replays:
        hidden = r.communication_microseconds - r.exposed_microseconds
        sentences.append(f"{r.title}: the step takes {r.step_microseconds:.1f} µs. Of "
                         f"{r.communication_microseconds:.1f} µs of communication {hidden:.1f} are hidden behind "
                         f"arithmetic, and for {r.exposed_microseconds:.1f} the program waits. At most {_peak(r):,} "
                         "bytes are held.")
    return " ".join(sentences)
