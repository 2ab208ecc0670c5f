"""A report's numbers are the recording's; its page is whole in a real browser, and harmless whatever was recorded."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import zerosim as zs
from tests.cases import covering
from tests.display.browser import browser, dom_of, screenshot
from zerosim.cli import app
from zerosim.course.figures.timeline import MACHINE
from zerosim.display.report import machine_of, page, report_data, save_report
from zerosim.planning.recording import load, record
from zerosim.planning.timeline import memory, replay

needs_browser = pytest.mark.skipif(browser() is None, reason="there is no chromium here to open the page in")
WICKED = "</script><script>document.title='struck'</script>\"'&<b>"


def step(rank, stage, overlap=True):
    data = np.random.default_rng(rank.index)
    engine = zs.Engine(rank, zs.models.MLP([24, 24, 24, 24]), zs.optim.Adam(), stage=stage, policy=zs.Policy("bf16"),
                       overlap=overlap, prefetch=1 if stage == 3 else 0)
    for number in (1, 2):
        with rank.trace.span(f"step {number}"):
            engine.step([(data.normal(size=(8, 24)), data.normal(size=(8, 24)))])
    if rank.index == 0:
        rank.send(np.ones(3), 1)
    elif rank.index == 1:
        rank.recv(np.empty(3), 0)
    return engine


def run(ranks=3, stage=3) -> zs.Cluster:
    cluster = zs.Cluster(ranks)
    cluster.run(step, stage)
    return cluster


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[zs.Cluster, Path, Path]:
    """A cluster that has run, its recording and its page."""
    cluster, folder = run(), tmp_path_factory.mktemp("report")
    recording = cluster.save(folder / "run.json")
    return cluster, recording, save_report(recording)


# -- the numbers --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("stage", "ranks"), covering([0, 1, 2, 3], [2, 3, 5]))
def test_a_reports_bytes_are_those_of_the_traces_and_the_ledgers(ranks, stage):
    cluster = run(ranks, stage)
    found = report_data(record(cluster.trace), MACHINE, "run")
    assert [sum(rank.sent_nbytes.values()) for rank in found.ranks] == cluster.trace.sent_nbytes()
    for rank in found.ranks:
        for purpose, nbytes in rank.sent_nbytes.items():
            assert nbytes == cluster.trace[rank.rank].sent_nbytes(purpose)
    assert [rank.peak_nbytes for rank in found.ranks] == cluster.memory.peak_nbytes
    assert [rank.peak_nbytes_by_kind for rank in found.ranks] == cluster.memory.peak_nbytes_by_kind
    assert found.sent_nbytes == sum(cluster.trace.sent_nbytes())
    assert len(found.calls) == len(cluster.trace[0].collectives())
    assert [call.sent_nbytes for call in found.calls] == [
        sum(hop.nbytes for hop in row.hops()) for row in cluster.trace[0].collectives()]
    assert found.message_count == 1


def test_a_reports_times_are_those_of_the_replay(saved):
    recording = load(saved[1])
    timeline, found = replay(recording, MACHINE), report_data(recording, MACHINE, "run")
    assert found.step_microseconds == pytest.approx(timeline.step_seconds * 1e6, rel=1e-12)
    for rank, lane, usage in zip(found.ranks, timeline.lanes, timeline.usage, strict=True):
        assert len(rank.communicated) == len(lane.parts)
        assert sum(bar.end - bar.start for bar in rank.computed) == pytest.approx(usage.compute_seconds * 1e6)
        assert sum(bar.end - bar.start for bar in rank.waits) == pytest.approx(usage.exposed_seconds * 1e6)
        assert sum(bar.flops for bar in rank.computed) == sum(event.flops for event in timeline.computed(rank.rank))
        curve = memory(timeline, rank.rank)
        assert rank.totals == curve.nbytes.tolist()


def test_one_span_can_be_taken_alone(saved, tmp_path):
    whole, one = (report_data(found, MACHINE, "") for found in (load(saved[1]), load(saved[1]).inside("step 2")))
    assert 0 < len(one.calls) < len(whole.calls)
    out = save_report(saved[1], tmp_path / "one.html", span="step 2")
    assert out.read_text(encoding="utf-8").count('<tr data-call="') == len(one.calls)


def test_a_run_that_takes_no_time_and_one_that_did_nothing_have_pages():
    for program in (lambda rank: None, lambda rank: rank.memory.alloc(3, np.float32, "input")):
        cluster = zs.Cluster(2)
        cluster.run(program)
        text = page(report_data(record(cluster.trace), MACHINE, "nothing"))
        assert "0 collectives" in text
        assert not re.search(r"\bnan\b", text)


def test_a_run_too_long_for_a_page_names_the_spans_that_would_do(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("zerosim.display.report.MOST_MARKS", 100)
    with pytest.raises(ValueError, match=r"rows were recorded, and a page holds 100; take one stretch of the program "
                                         r"with --span NAME: step 1, forward, layer0"):
        save_report(saved[1], tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


# -- the file of a run --------------------------------------------------------------------------------------------

def test_a_saved_cluster_is_the_recording_of_its_last_run(saved):
    cluster, path, _ = saved
    assert load(path) == record(cluster.trace)
    assert json.loads(path.read_text())["format"] == "zerosim recording"


def test_one_rank_that_stands_for_all_is_saved_as_all(tmp_path):
    cluster = zs.NullCluster(8, representative=3)
    cluster.run(lambda rank: rank.all_reduce(rank.xp.empty(64, "float32")))
    recording = load(cluster.save(tmp_path / "run.json"))
    assert recording.ranks == 8
    found = report_data(recording, MACHINE, "")
    assert [sum(rank.sent_nbytes.values()) for rank in found.ranks] == cluster.trace.sent_nbytes() * 8


def test_a_cluster_that_ran_nothing_and_a_path_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(ValueError, match="this cluster has run nothing to its end yet, and so has nothing to save; "):
        zs.Cluster(2).save(tmp_path / "run.json")
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: rank.barrier())
    with pytest.raises(ValueError, match=r"asked to save a recording as '.*run.json', but its folder is not there"):
        cluster.save(tmp_path / "missing" / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: rank.barrier())
    path = cluster.save(tmp_path / "run.json")
    before = path.read_bytes()
    monkeypatch.setattr("zerosim.planning.recording.to_plain", lambda recording: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cluster.save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


# -- the command --------------------------------------------------------------------------------------------------

def command(*arguments: str):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_the_page_beside_the_recording_or_where_it_is_asked_to(saved, tmp_path):
    run_json = tmp_path / "mine.json"
    run_json.write_bytes(saved[1].read_bytes())
    done = command(run_json)
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'mine.html'}\n")
    done = command(run_json, "--out", tmp_path / "other.html", "--device", "h100-80", "--link", "nvlink4", "--compute",
                   "bf16")
    assert done.exit_code == 0
    assert "h100-80" in (tmp_path / "other.html").read_text(encoding="utf-8")
    assert (tmp_path / "mine.html").read_text() == page(report_data(load(run_json), MACHINE, "mine"))


BAD = [
    (None, [], "cannot be read: No such file or directory; name a file that save"),
    (b"", [], "is no JSON"), (b"\xff\xfe\x00", [], "is no JSON"), (b"{]", [], "is no JSON"),
    (b"[" * 100_000, [], "(is nested deeper than any|is no JSON)"),
    (b"[1, 2]", [], "this is no recording: it lacks \"format\""), (b"{}", [], "this is no recording"),
    (b'{"format": "zerosim recording", "version": 99}', [], "this recording is of version 99, and version 1 can be"),
    (b'{"format": "zerosim recording", "version": 1}', [], "this recording lacks"),
    ("good", ["--device", "h100-80"], "a machine is a device and a link, and only h100-80 was named"),
    ("good", ["--link", "nvlink4"], "only nvlink4 was named"),
    ("good", ["--nodes", "2"], "go with --device and --link"),
    ("good", ["--device", "h999", "--link", "nvlink4"], "h999"),
    ("good", ["--device", "h100-80", "--link", "nvlink4", "--compute", "int3"], "has no rate in int3"),
    ("good", ["--device", "h100-80", "--link", "nvlink4", "--efficiency", "2"], "efficiency must be a share"),
    ("good", ["--span", "step"], "of which a rank has 0; it must have one. Its spans are step 1"),
    ("good", ["--out", "run.json"], "over the recording"),
    ("good", ["--out", "missing/page.html"], "name a file that can be written"),
    ("good", ["--out", "."], "name a file that can be written"),
]


@pytest.mark.parametrize(("content", "options", "words"), BAD)
def test_bad_input_is_one_line_and_nothing_is_written(content, options, words, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("run.json").write_bytes(saved[1].read_bytes() if content == "good" else content)
    before = sorted(path.name for path in tmp_path.iterdir())
    done = command("run.json", *options)
    assert done.exit_code == 2
    assert re.search(words, done.stderr), done.stderr
    assert done.stderr.startswith("zerosim report: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_other_commands_save_what_the_report_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("import numpy as np\n\ndef main(rank):\n    return rank.all_reduce(np.ones(4))[0]\n")
    done = CliRunner().invoke(app, ["run", "program.py:main", "--ranks", "3", "--save", "run.json"])
    assert done.exit_code == 0, done.output
    assert load("run.json").ranks == 3
    assert command("run.json").exit_code == 0
    done = CliRunner().invoke(app, ["train", "--model", "gpt-nano", "--ranks", "2", "--steps", "2", "--batch", "1",
                                    "--sample", "1", "--save", "step.json"])
    assert done.exit_code == 0, done.output
    step = load("step.json")
    assert step.ranks == 2
    found = report_data(step, MACHINE, "")
    one = CliRunner().invoke(app, ["train", "--model", "gpt-nano", "--ranks", "2", "--steps", "2", "--batch", "1",
                                   "--sample", "1", "--json"])
    told = json.loads(one.stdout)
    last = told["steps"][-1]
    assert found.ranks[0].peak_nbytes_by_kind == last["peak_nbytes_by_kind"]
    assert {purpose: nbytes for purpose, nbytes in last["sent_nbytes"].items() if nbytes} == found.ranks[0].sent_nbytes
    for arguments in (["train", "--steps", "1"], ["run", "program.py:main"]):
        refused = CliRunner().invoke(app, [*arguments, "--save", "missing/run.json"])
        assert refused.exit_code == 2
        assert "its folder is not there" in refused.stderr


def test_machines_by_name_are_those_of_the_tables():
    assert machine_of(4, None, None) is MACHINE
    found = machine_of(16, "a100-40", "nvlink3", nodes=2, efficiency=0.5)
    assert (found.device.name, found.network.inside.name, found.efficiency) == ("a100-40", "nvlink3", 0.5)
    assert found.network.between.name == "infiniband-ndr"


# -- the page -----------------------------------------------------------------------------------------------------

def test_a_page_asks_nothing_of_anybody_else(saved):
    text = saved[2].read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|<link|<iframe|@import|src=|url\(", text)
    assert "default-src 'none'" in text


def test_names_that_look_like_markup_stay_names(tmp_path):
    def wicked(rank):
        with rank.trace.span(WICKED):
            rank.all_reduce(np.ones(4))

    cluster = zs.Cluster(2)
    cluster.run(wicked)
    text = page(report_data(record(cluster.trace), MACHINE, WICKED))
    assert text.count("<script>") == 1
    assert "document.title='struck'" not in text


WATCH = ("window.struck = []; window.addEventListener('error', (e) => window.struck.push(e.message)); "
         "document.addEventListener('securitypolicyviolation', (e) => window.struck.push(e.violatedDirective));")
TELL = "document.documentElement.dataset.errors = window.struck.join('; ');"


@needs_browser
def test_in_a_browser_the_script_runs_without_errors_and_every_lane_and_collective_is_there(saved):
    cluster, recording, path = saved
    dom = dom_of(path, first=WATCH, last=TELL)
    found = report_data(load(recording), MACHINE, "run")
    (root, _), = dom.all("html")
    assert root["data-errors"] == ""
    assert int(root["data-ready"]) == len(dom.all(role="listitem")) > 0
    assert [given["data-rank"] for given, _ in dom.all("div", class_="rank")] == ["0", "1", "2"]
    for call in found.calls:
        bars = [given for given, _ in dom.all("div", class_="bar", data_call=str(call.number))]
        assert len(bars) == len(call.group)
        assert min(float(bar["data-start"]) for bar in bars) == pytest.approx(call.start, abs=1e-3)
        assert max(float(bar["data-end"]) for bar in bars) == pytest.approx(call.end, abs=1e-3)
    assert [int(given["data-peak"]) for given, _ in dom.all("svg")] == cluster.memory.peak_nbytes


@needs_browser
def test_in_a_browser_the_tables_have_the_recordings_numbers(saved):
    cluster, _, path = saved
    dom = dom_of(path)
    number = [[cell.replace(",", "") for cell in row] for row in dom.rows("Rank by rank")]
    assert [int(row[1]) for row in number] == cluster.memory.peak_nbytes
    assert [int(row[-4]) for row in number] == cluster.trace.sent_nbytes()
    calls = dom.rows("Every collective")
    rows = cluster.trace[0].collectives()
    assert [(row[1].removesuffix(" *"), row[2], row[3]) for row in calls] == [
        (row.call.operation, row.call.algorithm, row.purpose) for row in rows]
    assert [int(row[7].replace(",", "")) for row in calls] == [sum(hop.nbytes for hop in row.hops()) for row in rows]
    links = dom.rows("Bytes from rank")
    assert [sum(int(cell.replace(",", "")) for cell in row[1:]) for row in links] == cluster.trace.sent_nbytes()
    by_kind = {row[0]: [int(cell.replace(",", "")) for cell in row[1:]] for row in dom.rows("Held at each rank")}
    for kind, nbytes in by_kind.items():
        if kind != "all":
            assert nbytes == [held.get(kind.replace(" ", "_"), 0) for held in cluster.memory.peak_nbytes_by_kind]


KEYS = """
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const seen = [];
const here = () => { const bar = document.activeElement;
  seen.push([bar.parentElement.getAttribute("aria-label"), bar.dataset.start, bar.tabIndex].join("|")); };
document.querySelector('[role=listitem][tabindex="0"]').focus(); here();
for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowUp", "End", "Home"]) {
  press(key); here();
}
press("+"); press("+");
const root = document.documentElement;
root.dataset.zoom = getComputedStyle(root).getPropertyValue("--zoom");
press("0");
root.dataset.back = getComputedStyle(root).getPropertyValue("--zoom");
root.dataset.seen = seen.join("\\n");
root.dataset.said = document.getElementById("said").textContent;
root.dataset.tabs = document.querySelectorAll('[role=listitem][tabindex="0"]').length;
"""


@needs_browser
def test_in_a_browser_the_arrow_keys_walk_from_bar_to_bar_and_plus_zooms(saved):
    (root, _), = dom_of(saved[2], first=WATCH, last=KEYS + TELL).all("html")
    assert root["data-errors"] == ""
    seen = [line.split("|") for line in root["data-seen"].split("\n")]
    lanes = [lane for lane, _, _ in seen]
    starts = [float(start) for _, start, _ in seen]
    assert {tab for *_, tab in seen} == {"0"}
    assert lanes == [*["rank 0 computes"] * 4, "rank 0 communicates", "rank 1 computes", *["rank 0 communicates"] * 3]
    assert starts[0] < starts[1] < starts[2]
    assert starts[3] == starts[1]
    assert starts[-1] == min(starts)
    assert starts[-2] == max(starts)
    assert (root["data-zoom"], root["data-back"], root["data-tabs"]) == ("4", "1", "1")
    assert root["data-said"].startswith("rank 0 communicates: ")


@needs_browser
def test_in_a_browser_a_chosen_collective_is_marked_on_all_ranks_and_in_the_table(saved):
    last = ("document.querySelector('.communication .bar[data-call=\"2\"]').click(); "
            "document.documentElement.dataset.same = document.querySelectorAll('.same').length;")
    (root, _), = dom_of(saved[2], last=last).all("html")
    assert root["data-same"] == "4"  # three ranks, and a row


@needs_browser
def test_in_a_browser_wicked_names_run_nothing(tmp_path):
    def wicked(rank):
        with rank.trace.span(WICKED):
            rank.all_reduce(np.ones(4))

    cluster = zs.Cluster(2)
    cluster.run(wicked)
    path = tmp_path / "page.html"
    path.write_text(page(report_data(record(cluster.trace), MACHINE, WICKED)), encoding="utf-8")
    dom = dom_of(path, first=WATCH, last=TELL)
    (root, _), = dom.all("html")
    assert root["data-errors"] == ""
    assert dom.all("title")[0][1] == f"zerosim: {WICKED}"
    assert dom.rows("Every collective")[0][4] == WICKED


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_in_a_browser_the_page_is_never_wider_than_its_window(saved, width):
    last = "document.documentElement.dataset.wide = document.documentElement.scrollWidth - innerWidth;"
    (root, _), = dom_of(saved[2], last=last, flags=(f"--window-size={width},900",)).all("html")
    assert int(root["data-wide"]) <= 0


INK = """
const ratio = (a, b) => { const lum = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map((v) => Number(v) / 255)
  .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const [low, high] = [lum(a), lum(b)].sort((x, y) => x - y); return (high + 0.05) / (low + 0.05); };
const page = getComputedStyle(document.body).backgroundColor;
const worst = Math.min(...[...document.querySelectorAll("h1,p,td,th,dt,dd,summary,button,.axis span,.scale span")]
  .map((one) => ratio(getComputedStyle(one).color, page)));
document.documentElement.dataset.page = page;
document.documentElement.dataset.worst = worst;
"""


@needs_browser
@pytest.mark.parametrize(("dark", "color"), [(1, "rgb(255, 255, 255)"), (0, "rgb(22, 24, 29)")])
def test_in_a_browser_all_text_is_read_in_light_and_in_dark(saved, dark, color):
    (root, _), = dom_of(saved[2], last=INK, flags=(f"--blink-settings=preferredColorScheme={dark}",)).all("html")
    assert root["data-page"] == color
    assert float(root["data-worst"]) >= 4.5


@needs_browser
def test_in_a_browser_the_page_shows_something(saved, tmp_path):
    from PIL import Image

    picture = Image.open(screenshot(saved[2], tmp_path / "page.png", 1000, 1400)).convert("RGB")
    colors = {color for _, color in picture.getcolors(1_000_000)}
    assert {(0, 114, 178), (213, 94, 0), (0, 158, 115)} <= colors  # what sends parameters, gradients; what computes
