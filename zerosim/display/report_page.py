"""The page of a report: HTML around tables and bars that stand in it as they are; its script only walks and zooms.

Without the script everything is there. Nothing comes from elsewhere, and the page forbids its browser to ask.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise

from zerosim.display.colors import KIND_COLORS, PHASE_COLORS, PURPOSE_COLORS
from zerosim.display.notebook import table_html
from zerosim.display.report_data import ARITHMETIC, CallReport, RankBar, RankReport, ReportData
from zerosim.display.views import Table
from zerosim.numerics.units import bytes_text, counted

COLORS = {**PHASE_COLORS, ARITHMETIC: "#009E73", **PURPOSE_COLORS}
FORBIDS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
TICKS = 10
WIDTH, HEIGHT = 1000, 200  # of the drawing of a memory, whatever the page makes of it


def page(data: ReportData) -> str:
    """The whole page."""
    own = files("zerosim.display")
    css, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    sections = "".join([_summary(data), _timeline(data), _memory(data), _messages_section(data), _collectives(data)])
    title = escape(f"zerosim: {data.title}")
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{FORBIDS}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{sections}"
            f"</main>\n<script>\n{script}</script>\n</body>\n</html>\n")


def micro(value: float) -> str:
    """Microseconds as one reads them: four digits."""
    return f"{value:,.0f} µs" if value >= 1000 else f"{value:.4g} µs"


def _summary(data: ReportData) -> str:
    peak = max(rank.peak_nbytes for rank in data.ranks)
    exposed = max(rank.exposed_microseconds for rank in data.ranks)
    facts = {"Ranks": f"{len(data.ranks):,}", "Time": micro(data.step_microseconds),
             "Waiting, at most": micro(exposed), "Collectives": f"{len(data.calls):,}",
             "Messages of the program": f"{data.message_count:,}", "Sent by all": bytes_text(data.sent_nbytes),
             "Held, at most": bytes_text(peak)}
    cards = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    purposes = [purpose for purpose in PURPOSE_COLORS if any(rank.sent_nbytes.get(purpose) for rank in data.ranks)]
    rows = tuple((str(rank.rank), f"{rank.peak_nbytes:,}", *(f"{rank.sent_nbytes.get(p, 0):,}" for p in purposes),
                  f"{sum(rank.sent_nbytes.values()):,}", f"{rank.compute_microseconds:,.1f}",
                  f"{rank.communication_microseconds:,.1f}", f"{rank.exposed_microseconds:,.1f}")
                 for rank in data.ranks)
    columns = ("rank", ">held, at most", *(f">sent: {p}" for p in purposes), ">sent in all", ">computing",
               ">communicating", ">waiting")
    table = Table("Rank by rank: held and sent (bytes), and how the time went (µs)", columns, rows)
    return (f'<section aria-labelledby="h-sum"><h2 id="h-sum">What it came to</h2><dl>{cards}</dl>'
            f"<p>Bytes are as recorded. Times are a replay, no clock was read: {escape(data.machine)}.</p>"
            f"{scrolled(table)}</section>\n")


def scrolled(table: Table, attributes: Iterable[str] = ()) -> str:
    """A table in a box that scrolls by itself where the page is narrow. ``attributes`` stand in its rows."""
    html = table_html(table, attributes=tuple(attributes), all_rows=True)
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}">{html}</div>'


def _timeline(data: ReportData) -> str:
    lanes = "".join(_lanes(rank, data.step_microseconds) for rank in data.ranks)
    whats = Counter(bar.what for rank in data.ranks for bar in (*rank.computed, *rank.communicated))
    keys = "".join(f'<li><span class="key {"tall" if what in PURPOSE_COLORS else "low"}" style="background:{color}">'
                   f"</span>{'sends: ' if what in PURPOSE_COLORS else 'computes: '}{escape(what)}</li>"
                   for what, color in COLORS.items() if whats[what])
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


def _lanes(rank: RankReport, total: float) -> str:
    def bars(found: Iterable[RankBar]) -> str:
        return "".join(_bar(bar, total) for bar in found)

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
    color = "" if kind == "wait" else f";background:{COLORS.get(bar.what, PURPOSE_COLORS['unspecified'])}"
    return (f'<div class="{kind}" role="listitem" tabindex="-1"{call} data-start="{bar.start:.3f}" '
            f'data-end="{bar.end:.3f}" style="left:{left:.4f}%;width:{width:.4f}%{color}" aria-label="{escape(words)}">'
            "</div>")


def _axis(total: float) -> str:
    ticks = "".join(f'<span style="left:{100 * at / TICKS:g}%">{micro(total * at / TICKS)}</span>'
                    for at in range(TICKS)) if total else ""
    return f'<div class="axis" aria-hidden="true">{ticks}</div>'


def _memory(data: ReportData) -> str:
    top = max(rank.peak_nbytes for rank in data.ranks)
    keys = "".join(f'<li><span class="key tall" style="background:{KIND_COLORS.get(kind, "#888888")}"></span>'
                   f"{escape(kind.replace('_', ' '))}</li>" for kind in data.kinds)
    fullest = max(data.ranks, key=lambda rank: rank.peak_nbytes).rank
    curves = "".join(
        f'<details{" open" if rank.rank == fullest else ""}><summary>rank {rank.rank}: at most {rank.peak_nbytes:,} '
        f"bytes</summary>{curve_html(rank, data.kinds, data.step_microseconds, top)}"
        f'<div class="under">{_axis(data.step_microseconds)}</div></details>' for rank in data.ranks)
    rows = tuple((kind.replace("_", " "), *(f"{rank.peak_nbytes_by_kind.get(kind, 0):,}" for rank in data.ranks))
                 for kind in data.kinds)
    total = ("all", *(f"{rank.peak_nbytes:,}" for rank in data.ranks))
    table = Table("Held at each rank's fullest instant (bytes)",
                  ("kind", *(f">rank {rank.rank}" for rank in data.ranks)), (*rows, total))
    return (f'<section aria-labelledby="h-mem"><h2 id="h-mem">Memory over time</h2><ul class="keys">{keys}</ul>'
            f"{curves}<p>Of several changes at one instant the curve shows the last; the numbers know all of them.</p>"
            f"{scrolled(table)}</section>\n")


def curve_html(rank: RankReport, kinds: Sequence[str], total: float, top: int) -> str:
    """The areas of one rank, and what half and all of the height stand for; ``total`` microseconds are its width."""
    if not top:
        return "<p>It held nothing.</p>"
    peak = rank.totals.index(rank.peak_nbytes)
    words = (f"Bytes held by rank {rank.rank} over time, stacked by kind: at most {rank.peak_nbytes:,}, first after "
             f"{rank.microseconds[peak]:,.1f} µs; {rank.totals[-1]:,} at the end.")
    marks = "".join(f'<span style="bottom:{share * 100:g}%">{bytes_text(top * share)}</span>' for share in (0.5, 1))
    return (f'<div class="curve"><div class="scale" aria-hidden="true">{marks}</div>'
            f'<svg role="img" aria-label="{words}" data-rank="{rank.rank}" data-peak="{rank.peak_nbytes}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{_areas(rank, kinds, total, top)}</svg></div>')


def _areas(rank: RankReport, kinds: Sequence[str], total: float, top: int) -> str:
    """From each instant to the next; of several changes at one instant the last is drawn."""
    seconds = [*rank.microseconds, total]
    shown = [at for at, (now, after) in enumerate(pairwise(seconds)) if after > now]
    low = [0] * len(shown)
    found = []
    for kind in kinds:
        column = rank.nbytes.get(kind)
        if column is None:
            continue
        high = [below + column[at] for below, at in zip(low, shown, strict=True)]
        if any(a != b for a, b in zip(low, high, strict=True)):
            found.append(f'<path fill="{KIND_COLORS.get(kind, "#888888")}" d="{_path(seconds, shown, low, high, top)}">'
                         f"<title>{kind.replace('_', ' ')}</title></path>")
        low = high
    return "".join(found)


def _path(seconds: Sequence[float], shown: Sequence[int], low: Sequence[int], high: Sequence[int], top: int) -> str:
    """The outline: along the upper edge to the right, along the lower one back."""
    total = seconds[-1] or 1.0
    ends = [seconds[at] for at in shown[1:]] + [total]
    edges = []
    for edge, back in ((high, False), (low, True)):
        corners: list[tuple[float, float]] = []
        for at, end, nbytes in zip(shown, ends, edge, strict=True):
            y = HEIGHT * (1 - nbytes / top)
            if corners and corners[-1][1] == y:
                corners[-1] = (end, y)
            else:
                corners += [(seconds[at], y), (end, y)]
        edges.append(corners[::-1] if back else corners)
    points = " ".join(f"{WIDTH * x / total:.2f},{y:.2f}" for x, y in (*edges[0], *edges[1]))
    return f"M{points}Z"


def _messages_section(data: ReportData) -> str:
    everyone = range(len(data.ranks))
    rows = tuple((f"rank {source}", *(f"{data.links.get((source, to), 0):,}" for to in everyone))
                 for source in everyone)
    table = Table("Bytes from rank (row) to rank (column)", ("from", *(f">to {to}" for to in everyone)), rows)
    return ('<section aria-labelledby="h-links"><h2 id="h-links">Messages</h2><p>Every collective is many messages; '
            f"here are all of them, and the program's own, from whom to whom: {data.sent_nbytes:,} bytes in all.</p>"
            f"{scrolled(table)}</section>\n")


def _collectives(data: ReportData) -> str:
    columns = (">number", "operation", "algorithm", "for", "span", "ranks", ">vector (bytes)", ">sent by all (bytes)",
               ">from (µs)", ">to (µs)")
    rows, marks = tuple(map(_call_row, data.calls)), (f' data-call="{call.number}"' for call in data.calls)
    return (f'<section aria-labelledby="h-calls"><h2 id="h-calls">Collectives</h2><p>{counted(len(rows), "collective")}'
            ", in the order of the recording; those with a star were issued, and waited for later.</p>"
            f"{scrolled(Table('Every collective', columns, rows), marks)}</section>\n")


def _call_row(call: CallReport) -> tuple[str, ...]:
    group = call.group
    ranks = ", ".join(map(str, group)) if len(group) < 9 else f"{group[0]} to {group[-1]} ({len(group)})"
    return (str(call.number), call.operation + " *" * call.asynchronous, call.algorithm, call.purpose, call.span, ranks,
            f"{call.nbytes:,}", f"{call.sent_nbytes:,}", f"{call.start:,.3f}", f"{call.end:,.3f}")
