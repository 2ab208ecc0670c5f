"""Figures of traces: all that ranks did, in their order; and who sent how many bytes to whom, around the ring.

Legend: N ranks, E events of a rank. There is no clock in a trace: planning.timeline replays it on a machine. Lengths of
the ring are inches on paper; its angles run clockwise from the top.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, around, scale_of, stack, within_limits
from zerosim.display.style import EVENT_COLORS, PURPOSE_COLORS, ink_on, phase_of, rank_color
from zerosim.numerics.units import bytes_text, counted
from zerosim.planning.recording import links, own_messages, record
from zerosim.ranks.trace import Collective, Compute, Message, Trace

TITLE = "What the ranks did, in their order"
MOST_LANES = 16


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
    for row in trace.all_rows():
        if isinstance(row, Compute):
            what = phase_of(row.span)
            if not found or found[-1] != (what, 0):
                found.append((what, 0))
        elif isinstance(row, Collective | Message):
            found.append((row.purpose, row.sent_nbytes))
    return found


def trace_order(data: TraceOrder, style: Style = LIGHT) -> Drawing:
    """A lane for each rank; under them, the bytes that the busiest rank has sent by then, stacked by purpose."""
    lanes = len(data.names)
    words = "Tall: a collective or a message; low: a stretch of arithmetic. Each is one event, however long it takes."
    with style.figure(11.0, 5.0 + 0.42 * lanes, TITLE, words) as figure:
        (order,), (sent,) = figure.panels(2, 1, left=1.0, right=0.3, top=1.1, bottom=1.45,
                                          height_ratios=(0.42 * lanes, 2.1), hspace=0.35 / (0.2 + 0.21 * lanes))
        for place, whats in enumerate(data.whats):
            for sends, half in ((True, 0.4), (False, 0.2)):
                here = [at for at, what in enumerate(whats) if (what in PURPOSE_COLORS) is sends]
                order.broken_barh([(at, 1) for at in here], (place - half, 2 * half),
                                  facecolors=[EVENT_COLORS[whats[at]] for at in here], edgecolor=style.background,
                                  linewidth=0.4 if len(whats) < 300 else 0)
        order.set_yticks(range(lanes), data.names)
        order.set_ylim(lanes - 0.5, -0.5)
        order.tick_params(axis="y", length=0)
        order.tick_params(axis="x", labelbottom=False)
        _sent(sent, data)
        for axes in (order, sent):
            axes.set_xlim(0, max(1, *map(len, data.whats)))
        within_limits(sent)
        order.set_xticks(sent.get_xticks())
        seen = {what for whats in data.whats for what in whats}
        figure.key({f"{'sends' if what in PURPOSE_COLORS else 'computes'}: {what}": {"facecolor": color}
                    for what, color in EVENT_COLORS.items() if what in seen}, ncols=5)
    return Drawing("trace-order", TITLE, _order_description(data), style, figure)


def _sent(axes: Axes, data: TraceOrder) -> None:
    curves = data.by_purpose(data.busiest)
    unit, name = scale_of(max(1, sum(curve[-1] for curve in curves.values())))
    top = stack(axes, range(len(data.whats[data.busiest]) + 1), {
        purpose: [nbytes / unit for nbytes in curve] for purpose, curve in curves.items()},
        lambda purpose: {"facecolor": PURPOSE_COLORS[purpose], "linewidth": 0}, slanted=True)
    axes.set(ylim=(0, max(top[-1] * 1.05, 1e-9)), ylabel=f"sent by {data.names[data.busiest]}\nso far ({name})",
             xlabel="what a rank did, in its order (events)")
    axes.grid(axis="y")


def _order_description(data: TraceOrder) -> str:
    ranks = [f"{name}: {len(whats):,} events, {sum(sent):,} bytes sent"
             for name, whats, sent in zip(data.names, data.whats, data.sent_nbytes, strict=True)]
    curves = ", ".join(f"{purpose} {curve[-1]:,}" for purpose, curve in data.by_purpose(data.busiest).items())
    return (f"A lane of events for each rank. {'; '.join(ranks)}. Below, the bytes that {data.names[data.busiest]} "
            f"sent by purpose: {curves or 'none'}.")


# -- the ring: from whom to whom ---------------------------------------------------------------------------------------

Link = tuple[int, int]  # from rank, to rank

MOST_RANKS = 32
SIDE, TOP, RADIUS, NODE = 8.6, 1.15, 2.85, 0.34
MIDDLE = (SIDE / 2, SIDE / 2 - 0.15)
THICKEST = 9.0  # points


@dataclass(frozen=True, slots=True)
class RingTraffic:
    """Bytes by link, of all collectives and messages of a run; ``collectives`` and ``messages`` count them."""

    ranks: int
    links: Mapping[Link, int]
    collectives: int
    messages: int

    @property
    def around(self) -> dict[Link, int]:
        """The links of the ring: from each rank to the next."""
        return {link: nbytes for link, nbytes in self.links.items() if (link[0] + 1) % self.ranks == link[1]}

    @property
    def nbytes(self) -> int:
        """Sent by all ranks together."""
        return sum(self.links.values())


def ring_traffic_data(traces: Sequence[Trace], ranks: int) -> RingTraffic:
    """Reads the traces; every collective is expanded to its messages.

    Raises ValueError for more ranks than a page holds, and for traces of fewer ranks than N unless one stands for all.
    """
    if ranks > MOST_RANKS:
        raise ValueError(f"a page holds a ring of {MOST_RANKS} ranks, found {ranks}; cluster.trace.sent_nbytes() "
                         "has the bytes of all of them")
    if len(traces) not in (1, ranks):
        raise ValueError(f"a ring of {ranks} ranks is drawn from all their traces, found {len(traces)}")
    recording = record(traces) if len(traces) == ranks else record(traces).on_ranks(ranks)
    return RingTraffic(ranks, links(recording), len(recording.calls), len([*own_messages(recording)]))


def ring_traffic(data: RingTraffic, style: Style = LIGHT) -> Drawing:
    """Ranks on a circle, from rank 0 at the top clockwise; the wider an arrow, the more went over it."""
    from matplotlib.patches import Circle

    height = SIDE + TOP - 0.6
    with style.figure(SIDE, height) as figure:
        axes = figure.in_inches()
        figure.text(0.2 / SIDE, 1 - 0.34 / height, _title(data), va="center", fontsize=17, fontweight="bold")
        figure.text(0.2 / SIDE, 1 - 0.84 / height, _subtitle(data), va="center", color=style.muted, linespacing=1.4)
        for link, nbytes in sorted(data.links.items(), key=lambda item: item[0] in data.around):
            if nbytes:
                _arrow(axes, data, link)
        for rank in range(data.ranks):
            x, y, _ = around(rank, data.ranks, RADIUS, MIDDLE)
            axes.add_patch(Circle((x, y), NODE, facecolor=rank_color(rank), edgecolor=style.ink, linewidth=1.2,
                                  zorder=5))
            axes.text(x, y - 0.01, str(rank), ha="center", va="center", fontsize=14, fontweight="bold", zorder=6,
                      color=ink_on(rank_color(rank)))
    return Drawing("ring-traffic", _title(data), _description(data), style, figure)


def _arrow(axes: Axes, data: RingTraffic, link: Link) -> None:
    """An arc outside the circle for a neighbor, a straight line across for any other; a neighbor's has its bytes."""
    from matplotlib.patches import FancyArrowPatch

    source, neighbors = link[0], link in data.around
    width = max(1.2, THICKEST * data.links[link] / max(data.links.values()))
    bulge = math.tan(math.pi / 2 / data.ranks) if neighbors else 0.08  # of a neighbor's: along the circle
    axes.add_patch(FancyArrowPatch(
        *(around(rank, data.ranks, RADIUS, MIDDLE)[:2] for rank in link), arrowstyle="-|>",
        connectionstyle=f"arc3,rad={-bulge}", mutation_scale=12 + 1.5 * width, linewidth=width,
        color=rank_color(source),
        shrinkA=NODE * 72, shrinkB=NODE * 72 + 2, alpha=1.0 if neighbors else 0.55, zorder=3 if neighbors else 2))
    if neighbors and data.ranks <= 16:
        x, y, side = around(source + 0.5, data.ranks, RADIUS + 0.2, MIDDLE)
        axes.text(x, y, bytes_text(data.links[link]), ha=side, va="center", zorder=7)


def _title(data: RingTraffic) -> str:
    return f"Who sent how much to whom: {counted(data.ranks, 'rank')}"


def _subtitle(data: RingTraffic) -> str:
    across = data.nbytes - sum(data.around.values())
    more = f", {bytes_text(across)} of them across" if across else ""
    return (f"{counted(data.collectives, 'collective')} and {counted(data.messages, 'message')} of the program's own: "
            f"{bytes_text(data.nbytes)} in all{more}.\nAn arrow has its sender's color; the wider, the more bytes.")


def _description(data: RingTraffic) -> str:
    links = "; ".join(f"rank {a} to rank {b}: {nbytes:,} bytes"
                      for (a, b), nbytes in sorted(data.links.items()) if nbytes)
    return f"{_subtitle(data)} {links or 'Nothing was sent'}.".replace("\n", " ")
