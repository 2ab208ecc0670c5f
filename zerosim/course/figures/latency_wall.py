"""The latency wall of a ring: its all-reduce beside others', by the vector's bytes and by the ranks.

Legend: N ranks, n bytes of the vector, α seconds of latency for each message, β bytes per second of a link, one way.
Lines are by formula; marks are runs without data, recorded and replayed message by message on the same links.
Source of the formulas: Thakur, Rabenseifner & Gropp 2005, section 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, log_log, scale_of
from zerosim.display.style import BLUE, GREEN, ORANGE, VERMILLION
from zerosim.planning.cost import curve, latency_wall_nbytes, ring_wall_ranks
from zerosim.planning.hardware import Link, Network, device, link
from zerosim.planning.recording import record
from zerosim.planning.timeline import Machine, replay
from zerosim.ranks.null_cluster import NullCluster
from zerosim.ranks.rank import Rank

TITLE = "The ring's latency wall: where latency takes longer than moving the bytes"
ITEM_NBYTES = 4
ALGORITHMS: Mapping[str, str] = MappingProxyType({
    "ring": "ring", "rabenseifner": "halving and doubling (Rabenseifner)", "doubling": "recursive doubling",
    "tree": "binomial tree"})
COLORS, MARKS = (VERMILLION, BLUE, GREEN, ORANGE), ("o", "s", "^", "D")
BUCKET_NBYTES = 25 * 2**20  # the default bucket_cap_mb of PyTorch's DistributedDataParallel (2.13)
SIZES = tuple(2**power for power in range(12, 33))
WORLDS = tuple(2**power for power in range(1, 13))


@dataclass(frozen=True, slots=True)
class WallPanel:
    """Milliseconds by algorithm, ``lines`` at ``values`` and ``marks`` at ``marked``, some of them.

    ``latency`` and ``transfer`` are the two parts of the ring's; ``wall`` is where they are equal, in the values' unit.
    """

    values: tuple[int, ...]
    marked: tuple[int, ...]
    lines: Mapping[str, tuple[float, ...]]
    marks: Mapping[str, tuple[float, ...]]
    latency: tuple[float, ...]
    transfer: tuple[float, ...]
    wall: float


@dataclass(frozen=True, slots=True)
class LatencyWall:
    """By the vector's bytes on ``ranks``, and by ranks for a vector of ``nbytes``."""

    link: str
    ranks: int
    nbytes: int
    by_nbytes: WallPanel
    by_ranks: WallPanel


def latency_wall_data(wire: Link | str | None = None, ranks: int = 64, nbytes: int = BUCKET_NBYTES,
                      sizes: Sequence[int] = SIZES, worlds: Sequence[int] = WORLDS,
                      most_run: int = 256) -> LatencyWall:
    """Prices all-reduces by formula, and replays runs of them, of at most ``most_run`` ranks; N is a power of two.

    ``wire`` is a link or its name, None InfiniBand NDR. Raises ValueError for no sizes or worlds, and for a world of
    one rank, which sends nothing.
    """
    if not len(sizes) or not len(worlds) or min(ranks, *worlds) < 2:
        raise ValueError(f"a latency wall takes lengths of vectors and worlds of 2 ranks at least, found {len(sizes)} "
                         f"lengths, N = {ranks}, and the worlds {', '.join(map(str, worlds)) or 'none'}")
    wire = wire if isinstance(wire, Link) else link("infiniband-ndr" if wire is None else wire)
    network = Network(wire)
    ring = curve("all_reduce", "ring", ranks, network)
    of_sizes, of_worlds = ([(ranks, size) for size in sizes], [(world, nbytes) for world in worlds])
    return LatencyWall(
        f"{wire.name}: α = {wire.latency_seconds * 1e6:g} µs, β = {wire.bytes_per_second / 1e9:g} GB/s one way", ranks,
        nbytes, _panel(tuple(sizes), of_sizes, of_sizes[::4], network, latency_wall_nbytes(ring)),
        _panel(tuple(worlds), of_worlds, [point for point in of_worlds if point[0] <= most_run], network,
               ring_wall_ranks(nbytes, wire)))


def _panel(values: tuple[int, ...], points: Sequence[tuple[int, int]], run: Sequence[tuple[int, int]],
           network: Network, wall: float) -> WallPanel:
    lines = {name: tuple(1e3 * curve("all_reduce", name, ranks, network).seconds(nbytes) for ranks, nbytes in points)
             for name in ALGORITHMS}
    marks = {name: tuple(1e3 * _replayed(ranks, nbytes, name, network) for ranks, nbytes in run)
             for name in ALGORITHMS}
    rings = [(curve("all_reduce", "ring", ranks, network).at(nbytes), nbytes) for ranks, nbytes in points]
    marked = tuple(values[list(points).index(point)] for point in run)
    return WallPanel(values, marked, MappingProxyType(lines), MappingProxyType(marks),
                     tuple(1e3 * float(line.latency_seconds) for line, _ in rings),
                     tuple(1e3 * float(line.seconds_per_byte * nbytes) for line, nbytes in rings), wall)


def _replayed(ranks: int, nbytes: int, algorithm: str, network: Network) -> float:
    """Seconds of an all-reduce of so many bytes, whole fp32 numbers, run without data and replayed message by message;
    there is no arithmetic in it, so any device will do."""

    def program(rank: Rank) -> None:
        rank.all_reduce(rank.xp.zeros(nbytes // ITEM_NBYTES, "float32"), algorithm=algorithm)

    cluster = NullCluster(ranks)
    cluster.run(program)
    return float(replay(record(cluster.trace), Machine(device("h100-80"), network)).step_seconds)


def latency_wall(data: LatencyWall, style: Style = LIGHT) -> Drawing:
    """Two panels of lines on logarithmic scales, marks on them, and the wall as a line across."""
    height, words = 7.0, (
        f"All-reduce over {data.link}. Lines by formula, marks from replayed runs. Dotted: the two parts of the\n"
        "ring's time, latency 2(N-1)α and transfer 2(N-1)/N·n/β; at the wall, dashed, they are equal.")
    with style.figure(14.0, height, TITLE, words, below=0.86) as figure:
        ((sizes, worlds),) = figure.panels(1, 2, left=0.95, right=0.3, top=1.7, bottom=1.85, wspace=0.18)
        _lines(sizes, data.by_nbytes, ("mostly latency", "mostly transfer"), style)
        log_log(sizes, data.by_nbytes.marked, [_bytes(nbytes) for nbytes in data.by_nbytes.marked], base=2)
        _lines(worlds, data.by_ranks, ("mostly transfer", "mostly latency"), style)
        log_log(worlds, data.by_ranks.values, [f"{ranks:,}" for ranks in data.by_ranks.values], base=2)
        sizes.set_xlabel("the vector's length (bytes)")
        sizes.set_title(f"N = {data.ranks}: the wall is at {_bytes(data.by_nbytes.wall)}", fontsize=13)
        worlds.set_xlabel("N (ranks)")
        worlds.set_title(f"{_bytes(data.nbytes)}: the wall is at N = {data.by_ranks.wall:.3g}", fontsize=13)
        figure.legend(*sizes.get_legend_handles_labels(), ncols=4, bbox_to_anchor=(0.5, 0.35 / height))
        figure.text(0.5, 0.24 / height, "In this model the ring never wins against halving and doubling. In practice "
                    "it does, by pipelines and shared links, which the model lacks.", ha="center", va="center",
                    color=style.muted, fontsize=11)
    return Drawing("latency-wall", TITLE, _description(data), style, figure)


def _lines(axes: Axes, panel: WallPanel, sides: tuple[str, str], style: Style) -> None:
    """The lines with their marks; ``sides`` says what the ring's time is, before the wall and behind it."""
    for (name, words), color, mark in zip(ALGORITHMS.items(), COLORS, MARKS, strict=True):
        axes.plot(panel.values, panel.lines[name], color=color, linewidth=2.0)
        axes.plot(panel.marked, panel.marks[name], color=color, marker=mark, markersize=7, linestyle="", label=words)
    for part in (panel.latency, panel.transfer):
        axes.plot(panel.values, part, color=COLORS[0], linestyle=":", linewidth=1.4, zorder=1)
    axes.axvline(panel.wall, color=style.ink, linestyle="--", linewidth=1.2, zorder=1)
    for words, offset, side in zip(sides, (-6, 6), ("right", "left"), strict=True):
        axes.annotate(words, (panel.wall, 0.97), (offset, 0), xycoords=axes.get_xaxis_transform(), ha=side,
                      va="top", textcoords="offset points", color=style.muted)
    axes.set(yscale="log", ylim=(0.3 * min(map(min, panel.lines.values())), None), ylabel="one all-reduce takes (ms)")
    axes.grid(axis="y")


def _bytes(nbytes: float) -> str:
    """4.1 kB, 26.2 MB."""
    unit, name = scale_of(nbytes)
    return f"{nbytes / unit:.3g} {name}"


def _description(data: LatencyWall) -> str:
    said = []
    for panel, what, at in ((data.by_nbytes, f"on {data.ranks} ranks, by the vector's length", _bytes),
                            (data.by_ranks, f"of {_bytes(data.nbytes)}, by ranks", str)):
        ends = "; ".join(f"{words} from {panel.lines[name][0]:.3g} ms at {at(panel.values[0])} to "
                         f"{panel.lines[name][-1]:,.4g} ms at {at(panel.values[-1])}"
                         for name, words in ALGORITHMS.items())
        said.append(f"An all-reduce {what}: {ends}.")
    return (f"Two panels of lines over {data.link}, with marks from replayed runs on them. {' '.join(said)} The ring's "
            f"latency takes as long as its transfer at {_bytes(data.by_nbytes.wall)} on {data.ranks} ranks, and for "
            f"{_bytes(data.nbytes)} at {data.by_ranks.wall:.4g} ranks.")
