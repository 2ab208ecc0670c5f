"""A report's numbers are the recording's; its page is whole in a real browser, and harmless whatever was recorded."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import zerosim as zs
from tests.display.browser import Dom, dom_of, needs_browser, open_tab
from tests.support import ask, assert_command_refuses, assert_refused
from zerosim.display import replayed, report
from zerosim.planning import recording, timeline
from zerosim.ranks import trace

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


def ran(program, *given, ranks=3):
    """A cluster that has run a program."""
    cluster = zs.Cluster(ranks)
    cluster.run(program, *given)
    return cluster


def page_of(traces, title="run"):
    return report.explored(recording.record(traces), title).html


def page_of_file(path, span=None):
    return report.explored(recording.load(path), path.stem, span).html


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A cluster that has run, its recording and its page."""
    cluster, folder = ran(step, 3), tmp_path_factory.mktemp("report")
    path = cluster.save(folder / "run.json")
    return cluster, path, report.save_report(path)


# -- the numbers --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 3), (2, 5), (3, 3)])
def test_a_pages_tables_have_the_bytes_of_the_traces_and_the_memories_and_every_collective(ranks, stage):
    cluster = ran(step, stage, ranks=ranks)
    dom = Dom(page_of(cluster.trace))

    def numbers(caption):
        return [[cell.replace(",", "") for cell in row] for row in dom.rows(caption)]

    sent, held = cluster.trace.sent_nbytes(), cluster.memory.peak_nbytes_by_kind
    assert [(int(row[1]), int(row[-4])) for row in numbers("Rank by rank")] == list(
        zip(cluster.memory.peak_nbytes, sent, strict=True))
    assert [(row[1].removesuffix(" *"), row[2], row[3], int(row[7])) for row in numbers("Every collective")] == [
        (row.call.operation, row.call.algorithm, row.purpose, sum(hop.nbytes for hop in row.hops()))
        for row in cluster.trace[0].collectives()]
    assert [sum(map(int, row[1:])) for row in numbers("Bytes from rank")] == sent
    *kinds, total = numbers("Held at each rank")
    assert total == ["all", *map(str, cluster.memory.peak_nbytes)]
    assert {kind.replace(" ", "_"): list(map(int, nbytes)) for kind, *nbytes in kinds} == {
        kind: [of_rank.get(kind, 0) for of_rank in held] for kind in {kind for of_rank in held for kind in of_rank}}
    assert [text for _, text in dom.all("dd")][4] == "1"  # message of the program's own
    assert recording.sent_by_rank(recording.record(cluster.trace)) == [
        {purpose: nbytes for purpose in trace.PURPOSES if (nbytes := traced.sent_nbytes(purpose))}
        for traced in cluster.trace]


def test_a_reports_times_are_those_of_the_replay(saved):
    replay = timeline.replay(recording.load(saved[1]), replayed.MACHINE)
    for row, lane, usage in zip(Dom(saved[2].read_text("utf-8")).rows("Rank by rank"), replay.lanes, replay.usage,
                                strict=True):
        found = replayed.replayed_rank(replay, lane.rank)
        assert found.step_microseconds == pytest.approx(replay.step_seconds * 1e6, rel=1e-12)
        assert row[-3:] == [f"{seconds * 1e6:,.1f}" for seconds in (
            usage.compute_seconds, usage.communication_seconds, usage.exposed_seconds)]
        assert len(found.communicated) == len(lane.streams["communication"])
        assert sum(bar.end - bar.start for bar in found.computed) == pytest.approx(usage.compute_seconds * 1e6)
        assert sum(bar.end - bar.start for bar in found.waits) == pytest.approx(usage.exposed_seconds * 1e6)
        assert found.totals == timeline.memory(replay, lane.rank).nbytes.tolist()


def test_what_a_memory_held_is_told_apart_from_the_last_of_several_changes_at_one_instant():
    held = {"parameter": (0, 50, 50, 50), "gradient": (0, 0, 25, 0)}
    rank = replayed.ReplayedRank((), (), (), (0.0, 2.0, 2.0, 8.0), held, 0.0, 0.0, step_microseconds=10.0)
    assert rank.held(["gradient"]) == ([0, 2, 8, 10], {"gradient": [0, 25, 0, 0]})
    curve = timeline.MemoryCurve(np.zeros(4), {"a": np.array([0, 50, 25, 0]), "b": np.array([0, 0, 25, 0])})
    assert curve.peak_nbytes_by_kind == {"a": 50}


def test_a_skipped_step_is_named_and_a_step_that_counts_is_not(saved):
    def overflows(rank, batches):
        policy = zs.Policy("fp16", loss_scale=zs.numerics.loss_scale.Dynamic("torch", 1.0))
        engine = zs.Engine(rank, zs.models.MLP([4, 4]), zs.optim.Adam(), stage=2, policy=policy)
        for number in range(1, batches + 1):  # of every third batch from the second on one rank's gradient is inf
            size = 1e30 if rank.index == 1 and number % 3 == 2 else 1.0
            engine.step([(np.full((2, 4), size * (1 + rank.index)), np.ones((2, 4)))])

    for batches, words in ((3, "Step 2 was"), (5, "Steps 2, 5 were")):
        page = Dom(page_of(ran(overflows, batches).trace))
        assert f"{words} skipped: a rank saw inf or NaN" in "".join(text for _, text in page.all("p", id="skipped"))
    assert 'id="skipped"' not in saved[2].read_text(encoding="utf-8")


def test_a_star_is_for_collectives_that_were_waited_for_later():
    def program(rank):
        _ = rank.all_reduce(np.ones(5))
        works = [rank.all_gather(np.ones(2), async_op=True), rank.reduce_scatter(np.ones(3), async_op=True)]
        return [work.wait() for work in works]

    text = page_of(ran(program).trace)
    assert re.findall(r"<td>((?:all_reduce|all_gather|reduce_scatter)[ *]*)</td>", text) == [
        "all_reduce", "all_gather *", "reduce_scatter *"]


def test_a_page_asks_nothing_of_anybody_else_names_that_look_like_markup_stay_names_and_no_time_is_no_number(saved):
    text = saved[2].read_text(encoding="utf-8")
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|<link|<iframe|@import|src=|url\(|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text
    text = page_of(ran(wicked).trace, WICKED)
    assert text.count("<script>") == 1
    assert "document.title='struck'" not in text
    for program in (lambda rank: None, lambda rank: rank.memory.alloc(3, np.float32, "input")):
        text = page_of(ran(program).trace)
        assert "0 collectives" in text
        assert not re.search(r"\bnan\b", text)


def wicked(rank):
    with rank.trace.span(WICKED):
        _ = rank.all_reduce(np.ones(4))


# -- files and the command ----------------------------------------------------------------------------------------

def test_a_saved_cluster_is_the_recording_of_its_last_run_and_one_rank_that_stands_for_all_is_saved_as_all(
        saved, tmp_path):
    cluster, path, _ = saved
    assert recording.load(path) == recording.record(cluster.trace)
    assert json.loads(path.read_text())["format"] == "zerosim recording"
    cluster = zs.NullCluster(8, representative=3)
    cluster.run(lambda rank: rank.all_reduce(rank.xp.empty(64, "float32")))
    found = recording.load(cluster.save(tmp_path / "run.json"))
    assert [sum(sent.values()) for sent in recording.sent_by_rank(found)] == cluster.trace.sent_nbytes() * 8


def test_what_cannot_be_saved_is_refused_and_leaves_what_was_there(saved, tmp_path, monkeypatch):
    assert_refused(lambda: zs.Cluster(2).save(tmp_path / "run.json"),
                   "this cluster has run nothing to its end yet, and so has nothing to save; ")
    failed = zs.Cluster(2)
    failed.run(lambda rank: rank.barrier())
    with pytest.raises(ZeroDivisionError):
        failed.run(lambda rank: rank.all_reduce(np.ones(3)) / (1 // 0))
    assert_refused(lambda: failed.save(tmp_path / "run.json"), "this cluster's last run failed or is not over, and "
                   "cluster.trace is what it did until then, while the last of cluster.runs is the one before it")
    kept = recording.record(failed.runs[-1].trace)
    failed.run(lambda rank: rank.barrier())
    assert recording.load(failed.save(tmp_path / "good.json")) == kept
    (tmp_path / "good.json").unlink()
    assert_refused(lambda: saved[0].save(tmp_path / "missing" / "run.json"),
                   r"asked to save a recording as '.*run.json', but: No such file or directory; name a file")
    for place, words in ((tmp_path / "missing" / "run.json", "No such file or directory"),
                         (tmp_path, "Is a directory"), (tmp_path / ("n" * 300), "File name too long")):
        assert_command_refuses(f"but: {words}; name a file that can be written", "run", f"{__file__}:wicked", "--save",
                               str(place))
    monkeypatch.setattr(report, "MOST_MARKS", 100)
    assert_refused(lambda: report.save_report(saved[1], tmp_path / "page.html"),
                   r"rows were recorded, and a page holds 100; take one stretch of the program with --span NAME: ")
    assert list(tmp_path.iterdir()) == []


def command(*arguments):
    return ask(*map(str, arguments))


def test_the_command_writes_the_page_beside_the_recording_or_where_it_is_asked_to(saved, tmp_path):
    run_json = tmp_path / "mine.json"
    run_json.write_bytes(saved[1].read_bytes())
    done = command("report", run_json)
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'mine.html'}\n")
    assert (tmp_path / "mine.html").read_text() == page_of_file(run_json)
    done = command("report", run_json, "--out", tmp_path / "other.html", "--device", "h100-80", "--link", "nvlink4",
                   "--compute", "bf16")
    assert done.exit_code == 0
    assert "h100-80" in (tmp_path / "other.html").read_text(encoding="utf-8")
    assert command("report", run_json, "--span", "step 2").exit_code == 0
    whole, one = (Dom(page).rows("Every collective") for page in (
        page_of_file(run_json), (tmp_path / "mine.html").read_text("utf-8")))
    assert (tmp_path / "mine.html").read_text("utf-8") == page_of_file(run_json, "step 2")
    # A collective of a span has the number that it has in the whole run.
    assert 0 < len(one) < len(whole)
    assert [row[:4] for row in one] == [row[:4] for row in whole if "step 2" in row[4].split("/")]
    found = replayed.machine_of(16, "a100-40", "nvlink3", nodes=2, efficiency=0.5)
    assert (found.device.name, found.network.inside.name, found.efficiency) == ("a100-40", "nvlink3", 0.5)
    assert found.network.between.name == "infiniband-ndr"
    for alone in ({"compute": "fp32"}, {"efficiency": 0.5}, {"nodes": 2}, {"between": "pcie5"}):
        assert_refused(lambda alone=alone: replayed.machine_of(4, None, None, **alone), "go with --device and --link")


BAD = [
    (None, [], "cannot be read: No such file or directory; name a file that --save"),
    (b"\xff\xfe\x00", [], "is no JSON"),
    ("good", ["--device", "h100-80"], "a machine is a device and a link, and only h100-80 was named"),
    ("good", ["--link", "nvlink4"], "only nvlink4 was named"),
    ("good", ["--efficiency", "0.5"], "go with --device and --link"),
    ("good", ["--device", "h999", "--link", "nvlink4"], "h999"),
    ("good", ["--device", "h100-80", "--link", "nvlink4", "--compute", "int3"], "has no rate in int3"),
    ("good", ["--span", "step"], "of which a rank has 0; it must have one. Its spans are step 1"),
    ("good", ["--out", "run.json"], "over the recording"),
    ("good", ["--out", "missing/page.html"], "name a file that can be written"),
]


def test_bad_input_is_one_line_and_nothing_is_written(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content, options, words in BAD:
        Path("run.json").unlink(missing_ok=True)
        if content is not None:
            Path("run.json").write_bytes(saved[1].read_bytes() if content == "good" else content)
        before = sorted(path.name for path in tmp_path.iterdir())
        assert_command_refuses(words, "report", "run.json", *options)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_command_refuses("cannot be read: Is a directory", "report", ".")


def test_what_training_saves_has_the_bytes_of_its_last_step(tmp_path):
    train = ["train", "--model", "gpt-nano", "--ranks", "2", "--steps", "2", "--batch", "1", "--sample", "1", "--json"]
    done = command(*train, "--save", tmp_path / "run.json")
    saved, last = recording.load(tmp_path / "run.json"), json.loads(done.stdout)["steps"][-1]
    held = timeline.memory(timeline.replay(saved, replayed.MACHINE), 0)
    assert held.peak_nbytes_by_kind == last["peak_nbytes_by_kind"]
    assert recording.sent_by_rank(saved)[0] == {
        purpose: nbytes for purpose, nbytes in last["sent_nbytes"].items() if nbytes}


# -- the page in a browser ----------------------------------------------------------------------------------------

WATCH = ("const struck = (text) => { document.documentElement.dataset.errors = text; }; "
         "addEventListener('error', (e) => struck(e.message)); "
         "addEventListener('unhandledrejection', (e) => struck(String(e.reason))); "
         "document.addEventListener('securitypolicyviolation', (e) => struck(e.violatedDirective));")


@needs_browser
def test_in_a_browser_wicked_names_run_nothing(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_of(ran(wicked).trace, WICKED), encoding="utf-8")
    with open_tab() as tab:
        dom = dom_of(tab, path, first=WATCH)
    (root, _), = dom.all("html")
    assert (root["data-ready"], root.get("data-errors")) == ("1", None)
    assert dom.all("title")[0][1] == f"zerosim: {WICKED}"
    assert dom.rows("Every collective")[0][4] == WICKED


INK = Path(__file__).with_name("ink.js").read_text("utf-8")


@needs_browser
@pytest.mark.parametrize(("scheme", "color", "width"), [
    ("light", "rgb(244, 245, 247)", 360), ("dark", "rgb(16, 18, 22)", 1280)])
def test_in_a_browser_all_text_is_read_in_light_and_in_dark_and_no_page_is_wider_than_its_window(
        saved, scheme, color, width):
    with open_tab() as tab:
        tab.resize(width, 900)
        tab.lay_out_for("", scheme)
        (root, _), = dom_of(tab, saved[2], first=INK).all("html")
    assert root["data-page"] == color
    assert float(root["data-worst"]) >= 4.5
    assert int(root["data-wide"]) <= 0
