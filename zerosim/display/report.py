"""The report of a run: a recording, replayed on a machine as microseconds and bytes, as one page of HTML.

Its views are those of `explored`, with one run in them; the tables under them stand in the page as they are, and need
no script. Nothing comes from elsewhere, and the page forbids its browser to ask. Legend: N ranks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from zerosim.display.explored import explored_html, machine_words
from zerosim.display.render_html import as_html, table_html
from zerosim.display.replayed import ReplayedRank, machine_of, replayed_rank
from zerosim.display.run_data import Pool, deflated, run_data
from zerosim.display.saving import recording_of
from zerosim.display.style import KIND_COLORS, PURPOSE_COLORS
from zerosim.display.views import Table, View, words
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


FRAME_HEIGHT = 900


def explore(cluster: Any, *, device: str | None = None, link: str | None = None, span: str | None = None,
            compute: str = "bf16", efficiency: float = 1.0, nodes: int = 1, between: str | None = None,
            hardware: str | None = None) -> ExploredRun:
    """The last run of a cluster in views that move: a timeline, memory and a ring under one clock.

    It is replayed on the machine that `zerosim report` takes by these options. Raises ValueError as `Cluster.save` and
    `save_report` do.
    """
    from zerosim.display.objects import cluster_view

    recording = recording_of(cluster)
    if span is not None:
        recording = recording.inside(span)
    machine = machine_of(recording.ranks, device, link, compute=compute, efficiency=efficiency, nodes=nodes,
                         between=between, hardware=hardware)
    title = f"the last run, {span}" if span else "the last run"
    return ExploredRun(page(report_data(recording, machine, title)), cluster_view(cluster))


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
    """A run: what it was replayed on, its ranks, its collectives, and bytes by sender, receiver and purpose; and all of
    it as `run_data`, deflated, for the views that move."""

    title: str
    machine: str
    ranks: tuple[ReplayedRank, ...]
    calls: tuple[CallReport, ...]
    traffic: Mapping[tuple[int, int, str], int]
    message_count: int
    deflated: bytes
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
    return ReportData(title, machine_words(machine), ranks, calls, traffic(recording),
                      len([*own_messages(recording)]), _deflated(timeline), _skipped(recording))


def _deflated(timeline: Timeline) -> bytes:
    """The run as the page's only chunk."""
    pool = Pool()
    run = run_data(timeline, pool) | {"formulas": []}
    return deflated(pool.as_json() | {"runs": {"run": run}})


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


def _call(timeline: Timeline, number: int) -> CallReport:
    call, parts = timeline.recording.calls[number], timeline.parts_of_call[number]
    sent = sum(level.times * int(level.nbytes.sum()) for level in levels(call.shape))
    event, point = timeline.part_event(parts[0]), timeline.lanes[parts[0].rank].points[parts[0].point]
    return CallReport(number, call, sent, "/".join(event.path), float(min(part.begun for part in parts)) * 1e6,
                      float(max(part.ended for part in parts)) * 1e6, point[1] == ISSUE)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(data: ReportData) -> str:
    """The whole page: the views that move, and under them the numbers in tables."""
    tables = "".join([_summary(data), _memory(data), _messages_section(data), _collectives(data)])
    return explored_html(f"zerosim: {data.title}", {"run": data.deflated}, data.machine,
                         lead="<p>A recorded run. Click on anything to ask what it is.</p>", after=tables)


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
            f"{_said_of_skipped(data.skipped)}<p>Bytes are as recorded. Times are a replay, no clock was read: on "
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


def _memory(data: ReportData) -> str:
    rows = tuple((words(kind), *(f"{rank.peak_nbytes_by_kind.get(kind, 0):,}" for rank in data.ranks))
                 for kind in data.kinds)
    total = ("all", *(f"{rank.peak_nbytes:,}" for rank in data.ranks))
    table = Table("Held at each rank's fullest instant (bytes)",
                  ("kind", *(f">rank {rank.rank}" for rank in data.ranks)), (*rows, total))
    return ('<section aria-labelledby="h-mem"><h2 id="h-mem">Memory at its fullest</h2><p>Of several changes at one '
            "instant the curve above shows the last; the numbers know all of them.</p>"
            f"{scrolled(table)}</section>\n")


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
