"""The report of a run: a recording, replayed on a machine as microseconds and bytes, as one page of HTML.

Its views are those of `explore_page`, with one run in them; the tables under them stand in the page as they are, and
need no script. Nothing comes from elsewhere, and the page forbids its browser to ask. Legend: N ranks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from zerosim.display.explore_page import explored_html, machine_words
from zerosim.display.render_html import as_html, table_html
from zerosim.display.replayed import machine_of
from zerosim.display.run_data import Pool, deflated, run_data
from zerosim.display.saving import recording_of
from zerosim.display.style import KIND_COLORS, PURPOSE_COLORS
from zerosim.display.views import Table, View, memory_bars, words
from zerosim.numerics.files import write_or_refuse
from zerosim.numerics.units import bytes_text, counted
from zerosim.planning.collectives import levels
from zerosim.planning.recording import BEGIN, ISSUE, Recording, links, load, own_messages, sent_by_rank
from zerosim.planning.timeline import Timeline, memory, replay

FRAME_HEIGHT = 900
MOST_MARKS = 150_000  # bars and corners that a page can hold and a browser can draw


def save_report(recorded: str | Path, out: str | Path | None = None, **options: Any) -> Path:
    """Reads a recording, replays it and writes the page; without ``out``, beside the recording as .html.

    ``options`` are those of `explore`. Raises ValueError for a file that is no recording, for a machine that is not
    known, for a recording too long for a page, and for a path that cannot be written; then nothing is written.
    """
    recorded, recording = Path(recorded), load(recorded)
    out = recorded.with_suffix(".html") if out is None else Path(out)
    if out.resolve() == recorded.resolve():
        raise ValueError(f"the page was to be written over the recording {str(recorded)!r}; name another file by --out")
    return explored(recording, recorded.stem, **options).save(out)


def explore(cluster: Any, *, device: str | None = None, link: str | None = None, span: str | None = None,
            compute: str = "bf16", efficiency: float = 1.0, nodes: int = 1, between: str | None = None,
            hardware: str | None = None) -> "ExploredRun":
    """The last run of a cluster in views that move: a timeline, memory and a ring under one clock.

    ``span`` takes the rows inside one span alone. The run is replayed on the machine that `zerosim report` takes by
    these options. Raises ValueError as `Cluster.save` and `save_report` do.
    """
    return explored(recording_of(cluster), "the last run", span, device=device, link=link, compute=compute,
                    efficiency=efficiency, nodes=nodes, between=between, hardware=hardware)


@dataclass(frozen=True, slots=True)
class ExploredRun:
    """A run in the views of `zerosim explore`: Jupyter shows it in its cell, and ``save`` writes it as a page.

    Where scripts may not run, as in JupyterLab when it does not trust a notebook, Jupyter shows the run's tables alone.
    """

    html: str
    tables: View

    def save(self, path: str | Path) -> Path:
        """Writes the page; raises ValueError for a path that cannot be written."""
        return write_or_refuse(Path(path), self.html.encode(), "write the page")

    def _repr_html_(self) -> str:
        """The page in a frame of its own. A reader that strips the frame keeps what stands in it: the tables."""
        return (f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" title="{escape(self.tables.title)}" '
                f'style="width:100%;height:{FRAME_HEIGHT}px;border:0">{as_html(self.tables)}</iframe>')

    def __repr__(self) -> str:
        return f"<ExploredRun of {len(self.html):,} characters: in a notebook it shows itself; save(path) writes it>"


def explored(recording: Recording, title: str, span: str | None = None, **named: Any) -> ExploredRun:
    """The page and the tables of a recording, or of what is inside one span, replayed on a machine that is named as for
    `machine_of`; ValueError for one that cannot be replayed, and for one too long to be a page."""
    if span is not None:
        recording, title = recording.inside(span), f"{title}, {span}"
    machine = machine_of(recording.ranks, **named)
    if recording.row_count > MOST_MARKS:
        names = [*dict.fromkeys(path[-1] for path in recording.paths if path)][:8]
        raise ValueError(f"{recording.row_count:,} rows were recorded, and a page holds {MOST_MARKS:,}; take one "
                         "stretch of the program with --span NAME: "
                         f"{', '.join(names) or 'it has none, so record a shorter run'}")
    timeline, pool = replay(recording, machine), Pool()
    run = run_data(timeline, pool) | {"formulas": []}
    return ExploredRun(
        explored_html(f"zerosim: {title}", {"run": deflated(pool.as_json() | {"runs": {"run": run}})},
                      machine_words(machine), lead="<p>A recorded run. Click on anything to ask what it is.</p>",
                      after="".join(_sections(timeline))),
        View(f"A run of {counted(recording.ranks, 'rank')}", f": {title}",
             (_rank_by_rank(timeline), memory_bars("Held at each rank's fullest instant, by kind", _peaks(timeline)),
              _links(recording), *([_moved(timeline)] if recording.transfers else []), _collectives(timeline))))


# -- the tables, and the sections of the page in which they stand ------------------------------------------------------


def _sections(timeline: Timeline) -> Iterator[str]:
    recording = timeline.recording
    all_links, peaks = links(recording), [sum(held.values()) for held in _peaks(timeline).values()]
    facts = {"Ranks": f"{timeline.ranks:,}", "Time": micro(timeline.step_seconds),
             "Waiting, at most": micro(timeline.exposed_seconds), "Collectives": f"{len(timeline.parts_of_call):,}",
             "Messages of the program": f"{len([*own_messages(recording)]):,}",
             "Sent by all": bytes_text(all_links.total()), "Held, at most": bytes_text(max(peaks))}
    cards = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    yield _section("What it came to", f"<dl>{cards}</dl>{_skipped(recording)}<p>Bytes are as "
                   "recorded. Times are a replay, no clock was read: on "
                   f"{escape(machine_words(timeline.machine))}.</p>",
                   _rank_by_rank(timeline))
    yield _section("Memory at its fullest", "<p>Of several changes at one instant the last holds on; a fuller "
                   "moment between them is a thin bar in the curve above.</p>", _memory(timeline))
    yield _section("Messages", "<p>Every collective is many messages; here are all of them, and the program's own, "
                   f"from whom to whom: {all_links.total():,} bytes in all.</p>", _links(recording))
    if recording.transfers:
        yield _section("Offload", "<p>Every transfer between a rank's device, its host and its disk, by kind and way."
                       "</p>", _moved(timeline))
    calls = counted(len(timeline.parts_of_call), "collective")
    yield _section("Collectives", f"<p>{calls}, in the order of the recording; those with a star were issued, and "
                   "waited for later.</p>", _collectives(timeline))


def _section(title: str, html: str, table: Table) -> str:
    """A heading, what stands above the table, and the table in a box that scrolls by itself where the page is narrow.
    """
    return (f'<section aria-label="{title}"><h2>{title}</h2>{html}<div class="scroll" tabindex="0" role="region" '
            f'aria-label="{escape(table.caption)}">{table_html(table, all_rows=True)}</div></section>\n')


def micro(seconds: float) -> str:
    """Microseconds as one reads them: four digits."""
    value = seconds * 1e6
    return f"{value:,.0f} µs" if value >= 1000 else f"{value:.4g} µs"


def _peaks(timeline: Timeline) -> dict[str, dict[str, int]]:
    """Bytes by kind at each rank's fullest instant, by the rank's name."""
    return {f"rank {rank}": memory(timeline, rank).peak_nbytes_by_kind for rank in range(timeline.ranks)}


def _rank_by_rank(timeline: Timeline) -> Table:
    sent, peaks = sent_by_rank(timeline.recording), _peaks(timeline).values()
    purposes = [purpose for purpose in PURPOSE_COLORS if any(purpose in of_rank for of_rank in sent)]
    rows = tuple((str(rank), f"{sum(held.values()):,}", *(f"{of_rank.get(p, 0):,}" for p in purposes),
                  f"{sum(of_rank.values()):,}", *(f"{seconds * 1e6:,.1f}" for seconds in (
                      usage.compute_seconds, usage.communication_seconds, usage.exposed_seconds)))
                 for rank, (held, of_rank, usage) in enumerate(zip(peaks, sent, timeline.usage, strict=True)))
    return Table("Rank by rank: held and sent (bytes), and how the time went (µs)",
                 ("rank", ">held, at most", *(f">sent: {p}" for p in purposes), ">sent in all", ">computing",
                  ">communicating", ">waiting"), rows)


def _memory(timeline: Timeline) -> Table:
    peaks = _peaks(timeline)
    held = {kind for of_rank in peaks.values() for kind in of_rank}
    rows = {words(kind): [of_rank.get(kind, 0) for of_rank in peaks.values()]
            for kind in (*KIND_COLORS, *sorted(held - {*KIND_COLORS})) if kind in held}
    return _numbers("Held at each rank's fullest instant (bytes)", ("kind", *peaks), rows | {
        "all": [sum(of_rank.values()) for of_rank in peaks.values()]})


def _numbers(caption: str, columns: Sequence[str], rows: Mapping[str, Iterable[int]]) -> Table:
    return Table(caption, (columns[0], *(f">{name}" for name in columns[1:])), tuple(
        (name, *(f"{number:,}" for number in numbers)) for name, numbers in rows.items()))


def _links(recording: Recording) -> Table:
    everyone, sent = range(recording.ranks), links(recording)
    return _numbers("Bytes from rank (row) to rank (column)", ("from", *(f"to {to}" for to in everyone)), {
        f"rank {source}": [sent[source, to] for to in everyone] for source in everyone})


def _moved(timeline: Timeline) -> Table:
    moved: dict[str, Counter[int]] = defaultdict(Counter)
    for lane in timeline.lanes:
        for event in (timeline.part_event(part) for part in lane.all_parts if part.transfer is not None):
            moved[words(event.name)][lane.rank] += event.nbytes
    everyone = range(timeline.ranks)
    return _numbers("Moved to the host and back (bytes)", ("kind", *(f"rank {rank}" for rank in everyone)), {
        name: [of_kind[rank] for rank in everyone] for name, of_kind in moved.items()})


def _collectives(timeline: Timeline) -> Table:
    columns = (">number", "operation", "algorithm", "for", "span", "ranks", ">vector (bytes)", ">sent by all (bytes)",
               ">from (µs)", ">to (µs)")
    return Table("Every collective", columns, tuple(_call_row(timeline, number) for number in timeline.parts_of_call))


def _call_row(timeline: Timeline, number: int) -> tuple[str, ...]:
    """A collective by its number in the recording."""
    call, parts = timeline.recording.calls[number], timeline.parts_of_call[number]
    group, shape, point = call.group, call.shape, timeline.lanes[parts[0].rank].points[parts[0].point]
    ranks = ", ".join(map(str, group)) if len(group) < 9 else f"{group[0]} to {group[-1]} ({len(group)})"
    sent = sum(level.times * int(level.nbytes.sum()) for level in levels(shape))
    clocks = min(part.begun for part in parts), max(part.ended for part in parts)
    return (str(number), shape.operation + " *" * (point[1] == ISSUE), shape.algorithm, call.purpose,
            "/".join(timeline.part_event(parts[0]).path), ranks, f"{shape.nbytes:,}", f"{sent:,}",
            *(f"{clock * 1e6:,.3f}" for clock in clocks))


def _skipped(recording: Recording) -> str:
    """A sentence on the updates that were skipped, on every rank at once, by their number; empty where none was."""
    program, updates, skipped = recording.programs[0], 0, list[int]()
    for row in program.where(BEGIN).tolist():
        match recording.paths[program.first[row]]:
            case (*_, "update", "skipped"):
                skipped.append(updates)
            case (*_, "update"):
                updates += 1
    if not skipped:
        return ""
    steps = f"Step {skipped[0]} was" if len(skipped) == 1 else f"Steps {', '.join(map(str, skipped))} were"
    return (f'<p id="skipped"><strong>{steps} skipped:</strong> a rank saw inf or NaN in its gradients, so no weight '
            "changed.</p>")
