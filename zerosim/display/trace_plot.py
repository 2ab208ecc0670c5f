"""The figure of a trace: all that ranks did, in their order, with the bytes sent by then.

Legend: N ranks, E events of a rank. There is no clock in it: planning.timeline replays the same trace on a machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from zerosim.display.colors import GREEN, PHASE_COLORS, PURPOSE_COLORS
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, heading, scale_of, within_limits
from zerosim.ranks.trace import Collective, Compute, Message, Trace

TITLE = "What the ranks did, in their order"
MOST_LANES = 16
ARITHMETIC = "other arithmetic"  # outside the spans that have a color


@dataclass(frozen=True, slots=True)
class TraceOrder:
    """Per rank E events, each a phase of arithmetic or the purpose of what was sent, and the bytes sent in each."""

    whats: tuple[tuple[str, ...], ...]
    sent_nbytes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @property
    def busiest(self) -> int:
        """The place of the rank that sent most."""
        return max(range(len(self.names)), key=lambda place: sum(self.sent_nbytes[place]))

    def by_purpose(self, place: int) -> Mapping[str, list[int]]:
        """Bytes sent until after each event, (E + 1,) of each purpose for which the rank sent any."""
        events = list(zip(self.whats[place], self.sent_nbytes[place], strict=True))
        return {purpose: [0, *accumulate(nbytes * (what == purpose) for what, nbytes in events)]
                for purpose in PURPOSE_COLORS if any(what == purpose and nbytes for what, nbytes in events)}


def trace_order_data(traces: Sequence[Trace]) -> TraceOrder:
    """Reads the traces of ranks, in rank order; arithmetic of one phase that nothing interrupts is one event.

    A trace does not know whose it is: one alone is of "this rank". Of more than 16 ranks the first are read.
    Raises ValueError where no rank did anything.
    """
    read = [_events(trace) for trace in traces[:MOST_LANES]]
    if not any(read):
        raise ValueError("the trace has neither arithmetic nor messages, so there is nothing to draw; run a program "
                         "first")
    return TraceOrder(tuple(tuple(what for what, _ in events) for events in read),
                      tuple(tuple(nbytes for _, nbytes in events) for events in read),
                      ("this rank",) if len(read) == 1 else tuple(f"rank {place}" for place in range(len(read))))


def _events(trace: Trace) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for row in trace.rows:
        if isinstance(row, Compute):
            what = next((name for name in row.span if name in PHASE_COLORS), ARITHMETIC)
            if not found or found[-1] != (what, 0):
                found.append((what, 0))
        elif isinstance(row, Collective | Message):
            found.append((row.purpose, row.sent_nbytes))
    return found


def color_of(what: str) -> str:
    """Of a phase, or a purpose."""
    return PHASE_COLORS.get(what) or PURPOSE_COLORS.get(what) or GREEN


def trace_order(data: TraceOrder, style: Style = LIGHT) -> Drawing:
    """A lane for each rank; under them, the bytes that the busiest rank has sent by then, stacked by purpose."""
    lanes = len(data.names)
    width, height = 11.0, 5.0 + 0.42 * lanes
    with style.figure(width, height) as figure:
        grid = figure.add_gridspec(2, 1, height_ratios=(0.42 * lanes, 2.1), left=1.0 / width, right=1 - 0.3 / width,
                                   top=1 - 1.1 / height, bottom=1.45 / height, hspace=0.35 / (0.2 + 0.21 * lanes))
        order, sent = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        for place, whats in enumerate(data.whats):
            for sends, half in ((True, 0.4), (False, 0.2)):
                here = [at for at, what in enumerate(whats) if (what in PURPOSE_COLORS) is sends]
                order.broken_barh([(at, 1) for at in here], (place - half, 2 * half),
                                  facecolors=[color_of(whats[at]) for at in here], edgecolor=style.background,
                                  linewidth=0.4 if len(whats) < 300 else 0)
        order.set_yticks(range(lanes), data.names)
        order.set_ylim(lanes - 0.5, -0.5)
        order.tick_params(axis="y", length=0)
        order.tick_params(axis="x", labelbottom=False)
        _sent(sent, data, style)
        for axes in (order, sent):
            axes.set_xlim(0, max(1, *map(len, data.whats)))
        within_limits(sent)
        order.set_xticks(sent.get_xticks())
        heading(figure, TITLE, "Tall: a collective or a message; low: a stretch of "
                "arithmetic. Each is one event, however long it takes.", style)
        figure.legend(*_legend(data), loc="lower center", ncols=5, columnspacing=1.6)
    return Drawing("trace-order", TITLE, _order_description(data), style, figure)


def _sent(axes: Axes, data: TraceOrder, style: Style) -> None:
    curves = data.by_purpose(data.busiest)
    unit, name = scale_of(max(1, sum(curve[-1] for curve in curves.values())))
    low = [0.0] * (len(data.whats[data.busiest]) + 1)
    for purpose, curve in curves.items():
        high = [a + nbytes / unit for a, nbytes in zip(low, curve, strict=True)]
        axes.fill_between(range(len(low)), low, high, step="post", facecolor=PURPOSE_COLORS[purpose], linewidth=0)
        low = high
    axes.set_ylim(0, max(low[-1] * 1.05, 1e-9))
    axes.set_ylabel(f"sent by {data.names[data.busiest]}\nso far ({name})")
    axes.set_xlabel("what a rank did, in its order (events)")
    axes.grid(axis="y")


def _legend(data: TraceOrder) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    seen = {what for whats in data.whats for what in whats}
    names = [what for what in (*PHASE_COLORS, ARITHMETIC, *PURPOSE_COLORS) if what in seen]
    return ([Patch(facecolor=color_of(name)) for name in names],
            [f"sends: {name}" if name in PURPOSE_COLORS else f"computes: {name}" for name in names])


def _order_description(data: TraceOrder) -> str:
    ranks = [f"{name}: {len(whats):,} events, {sum(sent):,} bytes sent"
             for name, whats, sent in zip(data.names, data.whats, data.sent_nbytes, strict=True)]
    curves = ", ".join(f"{purpose} {curve[-1]:,}" for purpose, curve in data.by_purpose(data.busiest).items())
    return (f"A lane of events for each rank. {'; '.join(ranks)}. Below, the bytes that {data.names[data.busiest]} "
            f"sent by purpose: {curves or 'none'}.")
