"""The figure of a run's traffic: who sent how many bytes to whom, the ranks on a ring, an arrow for each pair.

Legend: N ranks. Lengths are inches on paper; angles run clockwise from the top.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerosim.display.colors import ink_on, rank_color
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, in_inches
from zerosim.numerics.units import bytes_text, counted
from zerosim.ranks.hub import expand
from zerosim.ranks.trace import Message, Trace

Link = tuple[int, int]  # from rank, to rank

MOST_RANKS = 32
SIDE, TOP, RADIUS, NODE = 8.6, 1.15, 2.85, 0.34
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
    """Reads the traces; every collective is expanded to its messages, those of the same shape once.

    Raises ValueError for more ranks than a page holds, and for traces of fewer ranks than N unless one stands for all.
    """
    if ranks > MOST_RANKS:
        raise ValueError(f"a page holds a ring of {MOST_RANKS} ranks, found {ranks}; cluster.trace.sent_nbytes() "
                         "has the bytes of all of them")
    if len(traces) not in (1, ranks):
        raise ValueError(f"a ring of {ranks} ranks is drawn from all their traces, found {len(traces)}")
    links, times = Counter[Link](), Counter[tuple[object, tuple[int, ...]]]()
    shapes, seen, messages = {}, set(), 0
    for rank, trace in enumerate(traces):
        for row in trace.messages():
            if isinstance(row, Message):
                if row.destination is not None:
                    links[rank, row.destination] += row.sent_nbytes
                    messages += 1
            elif (key := (row.call.key, row.call.number)) not in seen:
                seen.add(key)
                shape = row.call.normalized(), row.call.group
                times[shape] += 1
                shapes[shape] = row
    for shape, row in shapes.items():
        group = row.call.group
        for hop in expand(row.call):
            links[group[hop.source], group[hop.destination]] += times[shape] * hop.nbytes
    others = {link: nbytes for link, nbytes in links.items() if link[0] != link[1]}
    return RingTraffic(ranks, others, len(seen), messages)


def ring_traffic(data: RingTraffic, style: Style = LIGHT) -> Drawing:
    """Ranks on a circle, from rank 0 at the top clockwise; the wider an arrow, the more went over it."""
    from matplotlib.patches import Circle

    height = SIDE + TOP - 0.6
    with style.figure(SIDE, height) as figure:
        axes = in_inches(figure)
        figure.text(0.2 / SIDE, 1 - 0.34 / height, _title(data), va="center", fontsize=17, fontweight="bold")
        figure.text(0.2 / SIDE, 1 - 0.84 / height, _subtitle(data), va="center", color=style.muted, linespacing=1.4)
        for link, nbytes in sorted(data.links.items(), key=lambda item: item[0] in data.around):
            if nbytes:
                _arrow(axes, data, link, style)
        for rank in range(data.ranks):
            x, y = _place(rank, data.ranks, RADIUS)
            axes.add_patch(Circle((x, y), NODE, facecolor=rank_color(rank), edgecolor=style.ink, linewidth=1.2,
                                  zorder=5))
            axes.text(x, y - 0.01, str(rank), ha="center", va="center", fontsize=14, fontweight="bold", zorder=6,
                      color=ink_on(rank_color(rank)))
    return Drawing("ring-traffic", _title(data), _description(data), style, figure)


def _place(rank: float, ranks: int, radius: float) -> tuple[float, float]:
    angle = 2 * math.pi * rank / ranks
    return SIDE / 2 + radius * math.sin(angle), SIDE / 2 - 0.15 + radius * math.cos(angle)


def _arrow(axes: Axes, data: RingTraffic, link: Link, style: Style) -> None:
    """An arc outside the circle for a neighbor, a straight line across for any other; a neighbor's has its bytes."""
    from matplotlib.patches import FancyArrowPatch

    source, destination = link
    neighbors = link in data.around
    width = max(1.2, THICKEST * data.links[link] / max(data.links.values()))
    bulge = math.tan(math.pi / 2 / data.ranks) if neighbors else 0.08  # of a neighbor's: along the circle
    axes.add_patch(FancyArrowPatch(
        _place(source, data.ranks, RADIUS), _place(destination, data.ranks, RADIUS), arrowstyle="-|>",
        connectionstyle=f"arc3,rad={-bulge}", mutation_scale=12 + 1.5 * width, linewidth=width,
        color=rank_color(source),
        shrinkA=NODE * 72, shrinkB=NODE * 72 + 2, alpha=1.0 if neighbors else 0.55, zorder=3 if neighbors else 2))
    if neighbors and data.ranks <= 16:
        x, y = _place(source + 0.5, data.ranks, RADIUS + 0.2)
        side = math.sin(2 * math.pi * (source + 0.5) / data.ranks)
        axes.text(x, y, bytes_text(data.links[link]), ha="left" if side > 0.1 else "right" if side < -0.1 else "center",
                  va="center", zorder=7)


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
