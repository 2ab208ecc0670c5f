"""The report of a run: a recording, replayed on a machine as microseconds and bytes, written as one page of HTML.

The page's tables and bars stand in it as they are; its script only walks and zooms, and without it everything is there.
Nothing comes from elsewhere, and the page forbids its browser to ask. Legend: N ranks.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from operator import add
from pathlib import Path

from zerosim.display.render_html import page_html, table_html
from zerosim.display.replayed import RankBar, ReplayedRank, machine_of, replayed_rank
from zerosim.display.style import EVENT_COLORS, KIND_COLORS, PURPOSE_COLORS, event_words
from zerosim.display.views import Table, words
from zerosim.numerics.files import write_or_refuse
from zerosim.numerics.units import bytes_text, counted
from zerosim.planning.collectives import levels
from zerosim.planning.recording import BEGIN, ISSUE, RecordedCall, Recording, load, own_messages, traffic
from zerosim.planning.timeline import Machine, Timeline, replay


def save_report(recorded: str | Path, out: str | Path | None = None, *, device: str | None = None,
                link: str | None = None, span: str | None = None, compute: str = "bf16", efficiency: float = 1.0,
                nodes: int = 1, between: str | None = None, hardware: str | None = None) -> Path:
    """Reads a recording, replays it and writes the page; without ``out``, beside the recording as .html.

    ``span`` takes the rows inside one span alone. Raises ValueError for a file that is no recording, for a machine that
    is not known, for a recording too long for a page, and for a path that cannot be written; then nothing is written.
    """
    recorded, recording = Path(recorded), load(recorded)
    out = recorded.with_suffix(".html") if out is None else Path(out)
    if out.resolve() == recorded.resolve():
        raise ValueError(f"the page was to be written over the recording {str(recorded)!r}; name another file by --out")
    if span is not None:
        recording = recording.inside(span)
    machine = machine_of(recording.ranks, device, link, compute=compute, efficiency=efficiency, nodes=nodes,
                         between=between, hardware=hardware)
    title = recorded.stem + (f", {span}" if span else "")
    return write_or_refuse(out, page(report_data(recording, machine, title)).encode(), "write the page")


# -- the report as data ------------------------------------------------------------------------------------------------

MOST_MARKS = 150_000  # bars and corners that a page can hold and a browser can draw


@dataclass(frozen=True, slots=True)
class CallReport:
    """One collective of a recording, by its number: when it went on, in microseconds, in which span, and the bytes that
    all its ranks sent."""

    number: int
    recorded: RecordedCall
    sent_nbytes: int
    span: str
    start: float
    end: float
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class ReportData:
    """A run: what it was replayed on, its ranks, its collectives, and bytes by sender, receiver and purpose."""

    title: str
    machine: str
    ranks: tuple[ReplayedRank, ...]
    calls: tuple[CallReport, ...]
    traffic: Mapping[tuple[int, int, str], int]
    message_count: int
    skipped: tuple[int, ...] = ()  # numbers of updates, from 1 on, in which a rank saw inf or NaN

    @property
    def step_microseconds(self) -> float:
        """From the common start until the last rank is done."""
        return self.ranks[0].step_microseconds

    @property
    def kinds(self) -> list[str]:
        """The kinds of which any rank held anything, in the order of the stack."""
        held = {kind for rank in self.ranks for kind, column in rank.nbytes.items() if any(column)}
        return [*(kind for kind in KIND_COLORS if kind in held), *sorted(held - set(KIND_COLORS))]

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes from rank to rank."""
        found = Counter[tuple[int, int]]()
        for (source, destination, _), nbytes in self.traffic.items():
            found[source, destination] += nbytes
        return dict(found)

    def sent_nbytes(self, rank: int) -> dict[str, int]:
        """Bytes that one rank sent, by purpose."""
        found = Counter[str]()
        for (source, _, purpose), nbytes in self.traffic.items():
            found[purpose] += nbytes * (source == rank)
        return {purpose: nbytes for purpose, nbytes in found.items() if nbytes}


def report_data(recording: Recording, machine: Machine, title: str) -> ReportData:
    """Replays the recording; ValueError for one that cannot be replayed, and for one too long to be a page."""
    if recording.row_count > MOST_MARKS:
        names = [*dict.fromkeys(path[-1] for path in recording.paths if path)][:8]
        raise ValueError(f"{recording.row_count:,} rows were recorded, and a page holds {MOST_MARKS:,}; take one "
                         "stretch of the program with --span NAME: "
                         f"{', '.join(names) or 'it has none, so record a shorter run'}")
    timeline = replay(recording, machine)
    calls = tuple(_call(timeline, number) for number in timeline.parts_of_call)
    ranks = tuple(replayed_rank(timeline, rank) for rank in range(recording.ranks))
    return ReportData(title, _words(machine), ranks, calls, traffic(recording), len([*own_messages(recording)]),
                      _skipped(recording))


def _skipped(recording: Recording) -> tuple[int, ...]:
    """The updates that were skipped, on every rank at once, by their number."""
    program, updates, found = recording.programs[0], 0, []
    for row in program.where(BEGIN).tolist():
        match recording.paths[program.first[row]]:
            case (*_, "update", "skipped"):
                found.append(updates)
            case (*_, "update"):
                updates += 1
    return tuple(found)


def _words(machine: Machine) -> str:
    device, link = machine.device, machine.network.inside
    rate = machine.peak_flops_per_second * machine.efficiency / 1e12
    return (f"on devices {device.name} ({rate:g} TFLOP/s in {machine.format}, memory at "
            f"{device.memory_bytes_per_second / 1e9:g} GB/s), links {link.name} "
            f"({link.bytes_per_second / 1e9:g} GB/s, {link.latency_seconds * 1e6:g} µs)")


def _call(timeline: Timeline, number: int) -> CallReport:
    call, parts = timeline.recording.calls[number], timeline.parts_of_call[number]
    sent = sum(level.times * int(level.nbytes.sum()) for level in levels(call.shape))
    event, point = timeline.part_event(parts[0]), timeline.lanes[parts[0].rank].points[parts[0].point]
    return CallReport(number, call, sent, "/".join(event.path), float(min(part.begun for part in parts)) * 1e6,
                      float(max(part.ended for part in parts)) * 1e6, point[1] == ISSUE)


# -- the page ----------------------------------------------------------------------------------------------------------

TICKS = 10
WIDTH, HEIGHT = 1000, 200  # of the drawing of a memory, whatever the page makes of it


def page(data: ReportData) -> str:
    """The whole page."""
    sections = [_summary(data), _timeline(data), _memory(data), _messages_section(data), _collectives(data)]
    return page_html(f"zerosim: {data.title}", "report", "".join(sections))


def micro(value: float) -> str:
    """Microseconds as one reads them: four digits."""
    return f"{value:,.0f} µs" if value >= 1000 else f"{value:.4g} µs"


def _summary(data: ReportData) -> str:
    peak = max(rank.peak_nbytes for rank in data.ranks)
    exposed = max(rank.exposed_microseconds for rank in data.ranks)
    facts = {"Ranks": f"{len(data.ranks):,}", "Time": micro(data.step_microseconds),
             "Waiting, at most": micro(exposed), "Collectives": f"{len(data.calls):,}",
             "Messages of the program": f"{data.message_count:,}",
             "Sent by all": bytes_text(sum(data.traffic.values())), "Held, at most": bytes_text(peak)}
    cards = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    sent = [data.sent_nbytes(rank.rank) for rank in data.ranks]
    purposes = [purpose for purpose in PURPOSE_COLORS if any(purpose in of_rank for of_rank in sent)]
    rows = tuple((str(rank.rank), f"{rank.peak_nbytes:,}", *(f"{of_rank.get(p, 0):,}" for p in purposes),
                  f"{sum(of_rank.values()):,}", f"{rank.compute_microseconds:,.1f}",
                  f"{rank.communication_microseconds:,.1f}", f"{rank.exposed_microseconds:,.1f}")
                 for rank, of_rank in zip(data.ranks, sent, strict=True))
    columns = ("rank", ">held, at most", *(f">sent: {p}" for p in purposes), ">sent in all", ">computing",
               ">communicating", ">waiting")
    table = Table("Rank by rank: held and sent (bytes), and how the time went (µs)", columns, rows)
    return (f'<section aria-labelledby="h-sum"><h2 id="h-sum">What it came to</h2><dl>{cards}</dl>'
            f"{_said_of_skipped(data.skipped)}<p>Bytes are as recorded. Times are a replay, no clock was read: "
            f"{escape(data.machine)}.</p>"
            f"{scrolled(table)}</section>\n")


def _said_of_skipped(skipped: Sequence[int]) -> str:
    if not skipped:
        return ""
    steps = f"Step {skipped[0]} was" if len(skipped) == 1 else f"Steps {', '.join(map(str, skipped))} were"
    return (f'<p id="skipped"><strong>{steps} skipped:</strong> a rank saw inf or NaN in its gradients, so no weight '
            "changed.</p>")


def scrolled(table: Table, attributes: Iterable[str] = ()) -> str:
    """A table in a box that scrolls by itself where the page is narrow. ``attributes`` stand in its rows."""
    html = table_html(table, attributes=tuple(attributes), all_rows=True)
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}">{html}</div>'


def _timeline(data: ReportData) -> str:
    lanes = "".join(map(_lanes, data.ranks))
    whats = Counter(bar.what for rank in data.ranks for bar in (*rank.computed, *rank.communicated))
    keys = "".join(f'<li><span class="key {"tall" if what in PURPOSE_COLORS else "low"}" style="background:{color}">'
                   f"</span>{escape(event_words(what))}</li>" for what, color in EVENT_COLORS.items() if whats[what])
    keys += '<li><span class="key wait"></span>waits</li>' if any(rank.waits for rank in data.ranks) else ""
    return (
        '<section aria-labelledby="h-time"><h2 id="h-time">Timeline</h2>'
        '<p>Two lanes for each rank: what it computes, and what it communicates. <span class="script">Tab into the '
        "lanes, then walk with the arrow keys, zoom with + and −, and see all with 0.</span></p>"
        f'<ul class="keys">{keys}</ul><div class="tools script" role="group" aria-label="Zoom">'
        '<button type="button" id="out">−</button><button type="button" id="in">+</button>'
        '<button type="button" id="all">all</button></div>'
        f'<div class="scroll" id="zoomed" tabindex="0" role="region" aria-label="Timeline"><div class="track">{lanes}'
        f"{_axis(data.step_microseconds)}</div></div>"
        '<p id="said" role="status" aria-live="polite" class="script">Point at a bar, or walk to it.</p></section>\n')


def _lanes(rank: ReplayedRank) -> str:
    def bars(found: Iterable[RankBar]) -> str:
        return "".join(_bar(bar, rank.step_microseconds) for bar in found)

    return (f'<div class="rank" data-rank="{rank.rank}"><h3>rank {rank.rank}</h3>'
            f'<div class="lane compute" role="list" aria-label="rank {rank.rank} computes">'
            f"{bars(rank.waits)}{bars(rank.computed)}</div>"
            f'<div class="lane communication" role="list" aria-label="rank {rank.rank} communicates">'
            f"{bars(rank.communicated)}</div></div>")


def _bar(bar: RankBar, total: float) -> str:
    """One bar, in percent of the track; its numbers are in its label and its attributes."""
    scale = 100 / total if total else 0.0
    left, width = bar.start * scale, (bar.end - bar.start) * scale
    words = ", ".join(filter(None, [
        bar.name, bar.what if bar.what not in (bar.name, "waiting") else "", f"in {bar.span}" if bar.span else "",
        f"{bar.start:,.3f} to {bar.end:,.3f} µs", f"{bar.nbytes:,} bytes" if bar.nbytes else "",
        f"{bar.flops:,} FLOPs" if bar.flops else "", f"collective {bar.call}" if bar.call is not None else ""]))
    call = "" if bar.call is None else f' data-call="{bar.call}"'
    kind = "wait" if bar.what == "waiting" else "bar"
    color = "" if kind == "wait" else f";background:{EVENT_COLORS.get(bar.what, PURPOSE_COLORS['unspecified'])}"
    return (f'<div class="{kind}" role="listitem" tabindex="-1"{call} data-start="{bar.start:.3f}" '
            f'data-end="{bar.end:.3f}" style="left:{left:.4f}%;width:{width:.4f}%{color}" aria-label="{escape(words)}">'
            "</div>")


def _axis(total: float) -> str:
    ticks = "".join(f'<span style="left:{100 * at / total:.4g}%">{micro(at)}</span>' for at in round_ticks(total))
    return f'<div class="axis" aria-hidden="true">{ticks}</div>'


def round_ticks(total: float) -> list[float]:
    """From 0 to below ``total``, 5 to 10 multiples of a power of ten, of twice or of five times it; none of nothing."""
    if not total:
        return []
    power = 10.0 ** math.floor(math.log10(total))
    size = next(power * part for part in (0.1, 0.2, 0.5, 1.0) if total <= TICKS * power * part)
    return [at * size for at in range(TICKS) if at * size < total]


def _memory(data: ReportData) -> str:
    top = max(rank.peak_nbytes for rank in data.ranks)
    keys = "".join(f'<li><span class="key tall" style="background:{KIND_COLORS.get(kind, "#888888")}"></span>'
                   f"{escape(words(kind))}</li>" for kind in data.kinds)
    fullest = max(data.ranks, key=lambda rank: rank.peak_nbytes).rank
    curves = "".join(
        f'<details{" open" if rank.rank == fullest else ""}><summary>rank {rank.rank}: at most {rank.peak_nbytes:,} '
        f"bytes</summary>{curve_html(rank, data.kinds, top)}"
        f'<div class="under">{_axis(data.step_microseconds)}</div></details>' for rank in data.ranks)
    rows = tuple((words(kind), *(f"{rank.peak_nbytes_by_kind.get(kind, 0):,}" for rank in data.ranks))
                 for kind in data.kinds)
    total = ("all", *(f"{rank.peak_nbytes:,}" for rank in data.ranks))
    table = Table("Held at each rank's fullest instant (bytes)",
                  ("kind", *(f">rank {rank.rank}" for rank in data.ranks)), (*rows, total))
    return (f'<section aria-labelledby="h-mem"><h2 id="h-mem">Memory over time</h2><ul class="keys">{keys}</ul>'
            f"{curves}<p>Of several changes at one instant the curve shows the last; the numbers know all of them.</p>"
            f"{scrolled(table)}</section>\n")


def curve_html(rank: ReplayedRank, kinds: Sequence[str], top: int) -> str:
    """The areas of one rank, and what half and all of the height stand for; the step is as long as they are wide."""
    if not top:
        return "<p>It held nothing.</p>"
    peak = rank.totals.index(rank.peak_nbytes)
    words = (f"Bytes held by rank {rank.rank} over time, stacked by kind: at most {rank.peak_nbytes:,}, first after "
             f"{rank.microseconds[peak]:,.1f} µs; {rank.totals[-1]:,} at the end.")
    marks = "".join(f'<span style="bottom:{share * 100:g}%">{bytes_text(top * share)}</span>' for share in (0.5, 1))
    return (f'<div class="curve"><div class="scale" aria-hidden="true">{marks}</div>'
            f'<svg role="img" aria-label="{words}" data-rank="{rank.rank}" data-peak="{rank.peak_nbytes}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{_areas(rank, kinds, top)}</svg></div>')


def _areas(rank: ReplayedRank, kinds: Sequence[str], top: int) -> str:
    """From each instant to the next; of several changes at one instant the last is drawn."""
    instants, held = rank.held(kinds)
    low, found = [0] * len(instants), []
    for kind, column in held.items():
        high = list(map(add, low, column))
        if high != low:
            found.append(f'<path fill="{KIND_COLORS.get(kind, "#888888")}" d="{_path(instants, low, high, top)}">'
                         f"<title>{words(kind)}</title></path>")
        low = high
    return "".join(found)


def _path(instants: Sequence[float], low: Sequence[int], high: Sequence[int], top: int) -> str:
    """The outline: along the upper edge to the right, along the lower one back."""
    total, edges = instants[-1] or 1.0, []
    for edge, back in ((high, False), (low, True)):
        corners: list[tuple[float, float]] = []
        for (start, end), nbytes in zip(pairwise(instants), edge, strict=False):
            y = HEIGHT * (1 - nbytes / top)
            if corners and corners[-1][1] == y:
                corners[-1] = (end, y)
            else:
                corners += [(start, y), (end, y)]
        edges.append(corners[::-1] if back else corners)
    points = " ".join(f"{WIDTH * x / total:.2f},{y:.2f}" for x, y in (*edges[0], *edges[1]))
    return f"M{points}Z"


def _messages_section(data: ReportData) -> str:
    everyone, links = range(len(data.ranks)), data.links
    rows = tuple((f"rank {source}", *(f"{links.get((source, to), 0):,}" for to in everyone))
                 for source in everyone)
    table = Table("Bytes from rank (row) to rank (column)", ("from", *(f">to {to}" for to in everyone)), rows)
    return ('<section aria-labelledby="h-links"><h2 id="h-links">Messages</h2><p>Every collective is many messages; '
            f"here are all of them, and the program's own, from whom to whom: {sum(links.values()):,} bytes in all.</p>"
            f"{scrolled(table)}</section>\n")


def _collectives(data: ReportData) -> str:
    columns = (">number", "operation", "algorithm", "for", "span", "ranks", ">vector (bytes)", ">sent by all (bytes)",
               ">from (µs)", ">to (µs)")
    rows, marks = tuple(map(_call_row, data.calls)), (f' data-call="{call.number}"' for call in data.calls)
    return (f'<section aria-labelledby="h-calls"><h2 id="h-calls">Collectives</h2><p>{counted(len(rows), "collective")}'
            ", in the order of the recording; those with a star were issued, and waited for later.</p>"
            f"{scrolled(Table('Every collective', columns, rows), marks)}</section>\n")


def _call_row(call: CallReport) -> tuple[str, ...]:
    group, shape = call.recorded.group, call.recorded.shape
    ranks = ", ".join(map(str, group)) if len(group) < 9 else f"{group[0]} to {group[-1]} ({len(group)})"
    return (str(call.number), shape.operation + " *" * call.asynchronous, shape.algorithm, call.recorded.purpose,
            call.span, ranks, f"{shape.nbytes:,}", f"{call.sent_nbytes:,}", f"{call.start:,.3f}", f"{call.end:,.3f}")
