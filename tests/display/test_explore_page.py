"""The page that moves, in a real browser: its numbers are the traces', its keys and its address do what they say."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import zerosim as zs
from tests.display.browser import Dom, dom_of, needs_browser, open_tab
from tests.support import ask, assert_command_refuses
from zerosim.course import explore, explored_runs, tiny_steps
from zerosim.display import chrome_trace, replayed, report
from zerosim.planning import timeline

StepSetting = explored_runs.StepSetting
WATCH = ("<head><script>window.struck = []; addEventListener('error', (e) => struck.push(e.message)); "
         "addEventListener('unhandledrejection', (e) => struck.push(String(e.reason)));</script>")
SOME = [StepSetting(2, stage=0), StepSetting(2, stage=3, overlap=True, prefetch=True, micro=2),
        StepSetting(2, stage=3, overlap=True, prefetch=True, micro=2, slow=True), StepSetting(2, stage=3)]


def saved_page(path, some):
    """The page of a few runs, which are made sooner here than processes are begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 1)
        return explore.save_page(path, some)


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    path = saved_page(tmp_path_factory.mktemp("page") / "page.html", SOME)
    path.write_text(path.read_text("utf-8").replace("<head>", WATCH, 1), "utf-8")
    with open_tab() as opened:
        opened.resize(1280, 900)
        opened.open(path)
        yield opened
        assert opened.evaluate("window.struck") == []


def address_of(setting, clock=0):
    values = {"n": setting.n, "stage": setting.stage, "overlap": int(setting.overlap),
              "prefetch": int(setting.prefetch), "micro": setting.micro, "slow": int(setting.slow), "t": clock}
    return "#" + "&".join(f"{name}={value}" for name, value in values.items())


def shown(tab, setting, clock=0):
    """Shows a setting, as its address says."""
    tab.evaluate(f"(async () => {{ history.replaceState(null, '', '{address_of(setting, clock)}'); readAddress(); "
                 "await show(); })()")


def press(tab, *keys):
    for key in keys:
        tab.evaluate(f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))")


@needs_browser
@pytest.mark.parametrize("setting", SOME, ids=str)
def test_numbers_shown_are_those_of_the_traces_and_of_the_replay(tab, setting):
    step = explored_runs.recorded_step(setting)
    replay = timeline.replay(step.recording, setting.machine)
    shown(tab, setting, replay.step_seconds * 1e6 + 1)
    cells = tab.evaluate("[...document.querySelectorAll('.held tfoot tr:last-child td')].map((one) => one.textContent)")
    assert [int(cell.replace(",", "")) for cell in cells] == step.peak_nbytes
    sent = tab.evaluate("""['gradients', 'parameters'].map((purpose) =>
        [...document.querySelectorAll(`tr[data-purpose=${purpose}] td.n`)].map((one) => one.textContent))""")
    for purpose, (says, recorded, now) in zip(("gradients", "parameters"), sent, strict=True):
        nbytes = f"{step.traces[0].sent_nbytes(purpose):,}"
        assert (says, recorded, now) == (nbytes, f"{nbytes} ✓", nbytes)
    assert "≠" not in tab.evaluate("document.querySelector('.formulas').textContent")
    found = tab.evaluate("""shown.a.ranks.map((rank) => ({
        waited: rank.waits.reduce((sum, one) => sum + one.end - one.start, 0), waiting: rank.waiting,
        held: Math.max(...rank.instants.map((one) => one.held)), rests: stackAt(rank, 0).length}))""")
    for rank, usage in zip(found, replay.usage, strict=True):
        assert rank["waiting"] == chrome_trace.nanoseconds(usage.exposed_seconds)
        assert rank["waited"] == pytest.approx(rank["waiting"], abs=20)
    # The last message of every collective ends when the replay says that the collective does.
    late = tab.evaluate("""Math.max(0, ...shown.a.calls.flatMap((call) => call.parts.map((part, place) => Math.abs(
        part.ended - Math.max(part.begun, ...hopsOf(call).filter((hop) => [hop.source, hop.destination].includes(place))
            .map((hop) => hop.end))))))""")
    assert late <= 20
    masks = tab.evaluate("""shown.a.calls.map((call) => [call.operation, boardOf(call, shown.a.end)])""")
    assert masks
    for operation, board in masks:
        assert board == ([[1, 2], [1, 2]] if operation == "all_gather" else
                         [[3, 1], [2, 3]] if operation == "reduce_scatter" else [[3, 3], [3, 3]])


@needs_browser
def test_a_click_says_why_a_rank_waits_and_what_a_byte_is(tab):
    setting = SOME[2]
    replay = timeline.replay(explored_runs.recorded_step(setting).recording, setting.machine)
    shown(tab, setting)
    lane = replay.lanes[0]
    part = next(part for part, before, after in zip(lane.part_at, lane.reached, lane.resumed, strict=True)
                if after > before and replay.parts_of_call[part.call][1].begun > part.begun)
    place = tab.evaluate(f"""shown.a.ranks[0].waits.findIndex((wait) => wait.part.call && wait.part.ended
        === {chrome_trace.nanoseconds(part.ended)})""")
    tab.evaluate(f"pick('a', shown.a.ranks[0].waits[{place}])")
    said = tab.evaluate("document.getElementById('answer').textContent")
    begun = replay.parts_of_call[part.call][1].begun
    assert said.startswith("Rank 0 waits ")
    assert f"The last to arrive is rank 1, at {begun * 1e6:.2f} µs" in said
    tab.evaluate("pick('a', shown.a.ranks[1].arrays.find((one) => one.kind === 'gathered_parameter'))")
    said = tab.evaluate("document.getElementById('answer').textContent")
    assert said.startswith("4,096 bytes on rank 1: gathered parameter, embed. That is whole weights of one unit")


@needs_browser
def test_keys_alone_step_ask_compare_and_every_state_has_its_address(tab):
    shown(tab, SOME[3])
    instants = tab.evaluate("allInstants()")
    press(tab, "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert tab.evaluate("state.clock") == instants[2]
    press(tab, "End")
    assert tab.evaluate("state.clock") == instants[-1]
    press(tab, "p", "r", "w", "b", "c")
    tab.evaluate("show()")
    tab.evaluate("document.querySelector('input[name=\"b.stage\"][value=\"0\"]').click()")
    tab.evaluate("show()")
    press(tab, "Home", "ArrowRight", "b")
    tab.evaluate("new Promise((done) => setTimeout(done, 200))")
    address = tab.evaluate("location.hash")
    assert address.startswith("#n=2&stage=3&b.stage=0&t=")
    assert "pick=array-1-" in address
    before = tab.evaluate("JSON.stringify([state.sides, state.clock, state.rank, state.pick, state.compare])")
    tab.evaluate("(async () => { readAddress(); await show(); })()")
    assert tab.evaluate("JSON.stringify([state.sides, state.clock, state.rank, state.pick, state.compare])") == before
    both = tab.evaluate("[...document.querySelectorAll('.timeline small')].map((one) => one.textContent)")
    assert len(set(both)) == 2
    press(tab, "+", "+", "0", " ")
    assert tab.evaluate("state.playing && state.window === null")
    press(tab, " ", "Escape", "c")
    tab.evaluate("show()")
    assert tab.evaluate("[state.playing, state.pick, state.compare]") == [False, None, False]


@needs_browser
def test_a_comparison_says_what_all_ranks_send_what_crosses_nodes_and_what_one_rank_holds(tmp_path):
    both = [StepSetting(4, nodes) for nodes in (explored_runs.TWO_NODES, explored_runs.MESH)]
    steps = [explored_runs.recorded_step(setting) for setting in both]
    sent = [sum(trace.sent_nbytes() for trace in step.traces) for step in steps]
    across = [sum(hop.nbytes for rank, trace in enumerate(step.traces) for row in trace.collectives()
                  for hop in row.hops() if row.call.group[hop.source] == rank
                  and rank // 2 != row.call.group[hop.destination] // 2) for step in steps]
    assert 0 < across[1] < across[0] < sent[0]
    with open_tab() as tab:
        question = dict(explore.QUESTIONS)["What does a mesh keep off the slow link?"]
        tab.open(saved_page(tmp_path / "page.html", both), question)
        said = tab.evaluate("document.getElementById('difference').textContent")
        for (a, b), words in ((sent, "its ranks together send"), (across, "of it across nodes")):
            assert f"; {words} {b:,} bytes, A {a:,} bytes (×{b / a:.2f})" in said
        assert f"fullest {steps[1].peak_nbytes[0]:,} bytes, A {steps[0].peak_nbytes[0]:,} bytes" in said
        tab.evaluate("new Promise((done) => setTimeout(done, 200))")
        assert tab.evaluate("location.hash") == question  # nothing of it had to be changed


@needs_browser
def test_any_address_shows_something_and_a_run_that_cannot_be_read_says_so(tab):
    for address in ("rank=-5", "rank=1.5", "n=7&stage=x", "t=1e99", "t=-5", "pick=array-0-0-constructor",
                    "pick=array-9-999", "b.stage=9", "line=constructor.3", "%E0%A4%A"):
        tab.evaluate(f"""(async () => {{ history.replaceState(null, "", "#n=2&stage=0&{address}"); readAddress();
            await show(); }})()""")
        assert tab.evaluate("answer.textContent && document.querySelector('.formulas table').textContent"), address
    said = tab.evaluate("""(async () => { runs.clear(); inflated.clear();
        const { DecompressionStream: had } = window; delete window.DecompressionStream;
        await show().catch(() => 0); const said = answer.textContent;
        window.DecompressionStream = had; runs.clear(); inflated.clear(); await show(); return said; })()""")
    assert said.startswith("The runs in this page cannot be read here (")


@needs_browser
def test_the_one_file_is_walked_line_by_line_with_keys_of_its_own_and_an_address(tab):
    shown(tab, SOME[0])
    tab.evaluate("""(async () => { document.getElementById("tiny").open = true;
        while (!document.querySelector(".tiny output")?.textContent) await new Promise((next) => setTimeout(next, 5));
        })()""")
    lines = tiny_steps.page_data()["runs"]["ZeRO3"]["lines"]
    for key, row in (("ArrowRight", 1), ("m", next(i for i, (rank, *_) in enumerate(lines) if rank == 1))):
        tab.evaluate(f"document.querySelector('.tiny').dispatchEvent(new KeyboardEvent('keydown', "
                     f"{{key: {key!r}, bubbles: true}}))")
        rank, number, _, function, values = lines[row]
        seen = tab.evaluate("""[document.querySelector(".sees h4").textContent,
            document.querySelector(".source .now").textContent,
            [...document.querySelectorAll(".sees table")][0].textContent, addressOf(), state.clock]""")
        assert seen[0] == f"Rank {rank} is about to run line {number}, in {function}"
        assert seen[1] == tiny_steps.page_data()["source"][number - 1]
        assert all(name + value in seen[2] for name, value in values.items())
        assert seen[3].endswith(f"&line=ZeRO3.{row + 1}")
        assert seen[4] == 0  # the page's own clock stood still
    tab.evaluate("document.querySelector('.tiny select').value = 'DDP'; "
                 "document.querySelector('.tiny select').dispatchEvent(new Event('change')); "
                 "document.querySelector('.tiny input').value = 9999; "
                 "document.querySelector('.tiny input').dispatchEvent(new Event('input'))")
    kept = tab.evaluate("document.querySelector('.sees').textContent")
    _, trainers = tiny_steps.recorded(tiny_steps.STAGES[0])
    assert all(tiny_steps.text_of(p.master) in kept for one in trainers for p in one.parameters)


@needs_browser
def test_pointing_at_something_lights_up_what_belongs_to_it_in_all_views(tab):
    shown(tab, SOME[3], 30)
    lit = """new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(
        [...document.querySelectorAll('tr.lit')].map((row) => [row.closest('.panel').className.split(' ')[1],
        row.dataset.kind ?? row.dataset.purpose])))))"""
    tab.evaluate("document.querySelector('.held tr[data-kind=master]').dispatchEvent("
                 "new PointerEvent('pointerover', {bubbles: true}))")
    assert sorted(tab.evaluate(lit)) == [["formulas", "master"], ["memory", "master"], *[["numbers", "master"]] * 2]
    tab.evaluate("setLink(linkOf(shown.a.ranks[0].parts.find((part) => part.purpose === 'gradients')))")
    assert tab.evaluate(lit) == [["formulas", "gradients"]]
    assert tab.evaluate("shown.a.ranks.map((rank) => rank.parts.filter((part) => isLit(part)).length)") == [1, 1]
    arrays = tab.evaluate("shown.a.ranks[0].arrays.filter((array) => isLit(array)).map((array) => array.kind)")
    assert arrays == ["unit_gradient"]
    tab.evaluate("setLink(null)")


class Frame(HTMLParser):
    """The page inside a notebook's output."""

    def handle_starttag(self, tag, attrs):
        if tag == "iframe":
            self.found = dict(attrs)


@needs_browser
def test_a_readers_own_run_shows_itself_in_a_notebook_in_the_same_views_and_without_scripts_as_tables(tmp_path):
    def program(rank):
        rank.barrier()
        with rank.trace.span("sum"):
            return rank.all_reduce(np.full(6, rank.index, np.float32))

    cluster = zs.Cluster(3)
    cluster.run(program)
    found = zs.explore(cluster, span="sum")
    html = found._repr_html_()
    frame = Frame()
    frame.feed(html)
    assert frame.found["sandbox"] == "allow-scripts"
    assert frame.found["srcdoc"] == found.html == found.save(tmp_path / "run.html").read_text("utf-8")
    tables = Dom(html.partition("</style>")[2].removesuffix("</iframe>"))
    assert [row[:2] for row in tables.rows("Every collective")] == [["1", "all_reduce"]]  # of the span alone
    with open_tab() as tab:
        dom = dom_of(tab, tmp_path / "run.html")
    assert dom.all("html")[0][0]["data-ready"] == "1"
    assert dom.rows("Rank by rank")[0][-4] == "32"
    assert dom.rows("Every collective")[0][0] == "1"
    assert "all-reduce" in dom.all("div", class_="ring")[0][1]


def test_the_command_records_the_ranks_that_it_is_asked_for_and_refuses_others(tmp_path, monkeypatch):
    monkeypatch.setattr(explored_runs, "settings", lambda: [StepSetting(1, stage=0), StepSetting(2, stage=0)])
    done = ask("explore", "--ranks", "1", "--out", str(tmp_path / "page.html"))
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'page.html'}\n")
    text = (tmp_path / "page.html").read_text("utf-8")
    axes = json.loads(text.partition('id="page">')[2].partition("</script>")[0])["axes"]
    assert axes[0]["values"] == [["1", "1"]]
    assert_command_refuses("asked for '5' ranks; the page has 1, 2, 3, 4, 8", "explore", "--ranks", "5")
    monkeypatch.setattr(explored_runs, "settings", lambda: 1 / 0)  # it is said before anything is run
    for place in (tmp_path / "missing" / "page.html", tmp_path):
        assert_command_refuses("asked to write the page", "explore", "--out", str(place))


def test_the_machine_of_a_run_of_ones_own_is_the_reports():
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: rank.barrier())
    assert "h100-80" in zs.explore(cluster, device="h100-80", link="nvlink4").html
    with pytest.raises(ValueError, match="has run nothing to its end yet"):
        report.explore(zs.Cluster(2))


def rooted(rank):
    """Rank 0 computes, and all wait for what it sends; then what all send to rank 1 waits for rank 3."""
    rank.memory.free(rank.memory.alloc(1000, np.float32, "workspace", "scratch"))
    x = rank.memory.alloc(256, np.float32, "input", "x")
    with rank.trace.span("forward"):
        rank.trace.compute(flops=5_000_000 * (rank.index == 0))
    _ = rank.broadcast(x, 0)
    with rank.trace.span("backward"):
        rank.trace.compute(flops=5_000_000 * (rank.index == 3))
    return rank.reduce(x, 1)


@needs_browser
def test_who_waits_for_a_root_or_is_one_is_told_why_and_a_peak_between_two_changes_is_seen_and_clicked(tmp_path):
    cluster = zs.Cluster(4)
    cluster.run(rooted)
    lanes = timeline.replay(zs.planning.record(cluster.trace), replayed.MACHINE).lanes
    with open_tab() as tab:
        tab.resize(1280, 900)
        tab.open(zs.explore(cluster).save(tmp_path / "run.html"))
        said = tab.evaluate(
            "shown.a.ranks.map((rank) => rank.waits.map((wait) => whyWaiting(shown.a, wait).join(' ')))")
        begun = f"{lanes[0].streams['communication'][0].begun * 1e6:.2f} µs"
        assert (f"are for rank 0, the root, which comes only at {begun}, after forward: until then it has sent "
                "nothing.") in said[2][0]
        assert "are for rank 2, which until" in said[3][0]
        assert "has not got its own from rank 0, the root." in said[3][0]
        assert said[0][0].endswith("are for 2 messages to rank 2, to rank 1.")
        assert "It is the root." in said[1][1]
        assert "after backward: until then it has sent nothing, and until" in said[1][1]
        # 4,000 bytes are there for no time at all: the peak, whose bar is clicked.
        assert tab.evaluate("shown.a.ranks[0].instants[0].top.held") == 4000 == cluster.memory[0].peak_nbytes
        tab.evaluate("""(() => { const memory = of('a', Memory); const box = memory.canvas.getBoundingClientRect();
            const at = { clientX: box.left + GUTTER + 1, clientY: box.top + memory.top + memory.rankHeight - 6
                - memory.tall(3000), bubbles: true };
            memory.holder.setPointerCapture = () => 0;
            for (const name of ['pointerdown', 'pointerup'])
                memory.holder.dispatchEvent(new PointerEvent(name, at)); })()""")
        assert tab.evaluate("answer.textContent").startswith("4,000 bytes on rank 0: workspace, scratch.")
        assert tab.evaluate("document.querySelector('.held tfoot td').textContent") == "4,000"


@needs_browser
def test_the_bar_lies_over_no_line_switches_are_explained_and_what_a_rank_lacks_or_has_on_its_host_is_said(tmp_path):
    setting = StepSetting(3, stage=1, offload=True)
    step = explored_runs.recorded_step(setting)
    with open_tab() as tab:
        tab.open(saved_page(tmp_path / "page.html", [setting]), "#n=3&stage=1&offload=1")
        for width in (320, 390, 700):
            tab.resize(width, 640)
            room = tab.evaluate("""new Promise((done) => setTimeout(() => { scrollTo(0, 1e6); done(
                document.getElementById("transport").getBoundingClientRect().top
                - document.querySelector("main").lastElementChild.getBoundingClientRect().bottom); }, 100))""")
            assert room >= 0, width
            hidden = tab.evaluate("""[...document.querySelectorAll('main :is(button, summary, [tabindex="0"])')].filter(
                (one) => { one.focus(); const { top, bottom } = one.getBoundingClientRect();
                    const bar = document.getElementById("transport").getBoundingClientRect();
                    return !one.closest("#transport") && bottom > bar.top && bottom - top < bar.top; }).length""")
            assert hidden == 0, width  # of what the Tab key comes to
        assert "Rank 2 owns none of the four weights" in tab.evaluate("document.querySelector('.numbers').textContent")
        assert "backward computes the next unit" in tab.evaluate("document.querySelector('.switches').textContent")
        measured = tab.evaluate("['master', 'optimizer_state'].map((kind) => document.querySelector("
                                "`.formulas tr[data-kind=${kind}] [data-measured]`).textContent)")
        assert measured == [f"on the host: {step.on_host[0][kind]:,} ✓" for kind in ("master", "optimizer_state")]


def test_a_report_counts_what_was_moved_to_the_host_by_kind():
    def program(rank):
        engine = zs.Engine(rank, zs.models.MLP([4, 4]), zs.optim.Adam(), policy="bf16", offload="optimizer=host")
        engine.step(np.ones((2, 4)), np.ones((2, 4)))

    cluster = zs.Cluster(2)
    cluster.run(program)
    moved = [[row for row in trace.rows if type(row).__name__ == "Transfer"] for trace in cluster.trace]
    tables = {part.caption: part for part in zs.explore(cluster).tables.parts}
    rows = tables["Moved to the host and back (bytes)"].rows
    assert {row[0] for row in rows} == {"gradient to host", "parameter to device"}
    for rank, rows_of_rank in enumerate(moved):
        assert sum(int(row[1 + rank].replace(",", "")) for row in rows) == sum(row.nbytes for row in rows_of_rank)


def hybrid(rank):
    """A step of two micro-batches on two nodes of four, Adam on the host, units gathered ahead."""
    config = zs.models.llama.LlamaConfig(layers=1, channels=16, heads=2, context=8, vocabulary=32)
    engine = zs.Engine(rank, zs.models.llama.Llama(config), zs.optim.AdamW(), stage=3, policy="bf16", mesh="2x4",
                       offload="optimizer=host", overlap=True, prefetch=1, recompute="block")
    tokens = np.random.default_rng(rank.index).integers(0, 32, (2, 2, 9))
    engine.step([(batch[:, :-1], batch[:, 1:]) for batch in tokens])


@needs_browser
def test_a_run_of_eight_ranks_on_a_mesh_is_read_on_a_phone_and_on_paper_and_every_click_on_it_is_answered(tmp_path):
    cluster = zs.Cluster(8)
    cluster.run(hybrid)
    path = zs.explore(cluster).save(tmp_path / "run.html")
    path.write_text(path.read_text("utf-8").replace("<head>", WATCH, 1), "utf-8")
    with open_tab() as tab:
        tab.open(path)
        for width, medium in ((390, ""), (718, "print")):
            tab.resize(width, 844)
            tab.lay_out_for(medium)
            tab.evaluate("new Promise((done) => setTimeout(done, 100))")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, medium
        said = tab.evaluate("""shown.a.ranks.flatMap((rank) => [...rank.computed, ...rank.parts, ...rank.waits,
            ...rank.arrays].map((one) => ANSWERS[one.what](shown.a, one).join(" ")))""")
        assert len(said) > 1000
        assert not [text for text in said if re.search(r"undefined|NaN|(?<!\w)-\d", text)]
        # In the ring a group of four has four chunks, each with its name, whatever the number of ranks.
        tab.evaluate("setClock(shown.a.calls[0].parts[0].ended - 1)")
        assert tab.evaluate("document.querySelectorAll('.ring .node:first-of-type .chunk').length") == 4
        assert tab.evaluate("window.struck") == []
