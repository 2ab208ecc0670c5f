"""What things show of themselves, in a notebook and in a terminal: their numbers, escaped, in any state."""

import re
import xml.etree.ElementTree as ET
from html import unescape

import numpy as np
import pytest
from rich.markup import escape
from rich.text import Text

import zerosim as zs
from tests.display.browser import Dom
from tests.support import fresh, printed
from zerosim.course import lost_updates
from zerosim.display import html, objects, render_html, view, views
from zerosim.models import text
from zerosim.ranks import trace
from zerosim.zero import layout


def program(rank, stage=3):
    """A step of an MLP whose layers the ranks do not divide."""
    data = np.random.default_rng(rank.index)
    engine = zs.Engine(rank, zs.models.MLP([4, 7, 4]), zs.optim.Adam(), stage=stage, policy=zs.Policy("bf16"))
    engine.step([(data.normal(size=(4, 4)), data.normal(size=(4, 4)))])
    return engine


@pytest.fixture(scope="module")
def cluster():
    found = zs.Cluster(3, capacity_nbytes=10_000)
    found.run(program)
    return found


@pytest.fixture(scope="module")
def things(cluster):
    """One of each class that has a view, by class, and a lesson, which has headings, notes and markup."""
    engine = cluster.runs[-1].results[0]
    steps = zs.step_through(lambda rank: rank.all_reduce(np.arange(6.0)), ranks=3)
    step = next(steps)
    plan = zs.plan("gpt2", ranks=8, device="h100-80", link="nvlink4")
    over = zs.planning.questions.over_ranks(plan, [4, 8])
    shown = (cluster, cluster.trace, cluster.trace[1], cluster.memory, cluster.memory[2], plan, over, engine.layout,
             engine, step, steps)
    found = {type(thing): thing for thing in shown}
    assert set(found) == set(objects.VIEWS)
    question = lost_updates.LostUpdatesQuestion(weight=65504.0, update=100.0, steps=2)
    return found | {lost_updates.LostUpdates: lost_updates.lost_updates(question)}


@pytest.mark.parametrize("width", [13, 40, 80])
def test_a_terminal_breaks_escapes_of_what_does_not_print_nowhere_but_between_them(width):
    written = "Call me " + text.readable(np.arange(256, dtype=np.uint8)).replace("\n", "") + " 学 習" * 9
    note = views.View("", "", (views.TextLine(escape(written)),))
    lines = [line.strip() for line in printed(note, width).splitlines()]
    assert "".join(lines).replace(" ", "") == written.replace(" ", "")
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if re.search(r"\\(x.?|u.{0,3}|U.{0,7})?$", line)]


def page(text):
    """HTML as a tree, which shows that it is well-formed."""
    return ET.fromstring(f"<html>{text}</html>")


def rows(text, caption):
    """The body of the table of this caption."""
    return Dom(text).rows(caption)


def number(text):
    return int(text.replace(",", ""))


def boxes_of(text, titled):
    """The boxes of drawings whose title has this word."""
    return [box for box in page(text).iter("span") if titled in box.get("title", "")]


def pixels(box, name="width"):
    return float(re.search(rf"\b{name}:(-?[\d.]+)px", box.get("style"))[1])


# -- every view ---------------------------------------------------------------------------------------------------

def test_every_view_is_well_formed_asks_nothing_of_anybody_is_read_in_the_dark_and_changes_nothing(things, cluster):
    before = [(list(trace.rows), memory.now_nbytes, memory.peak_nbytes)
              for trace, memory in zip(cluster.trace, cluster.memory, strict=True)]
    for kind in objects.VIEWS:
        text = things[kind]._repr_html_()
        assert not re.search(r"<script|https?://|url\((?!#)|\bon\w+=|<link|<iframe|@import", text), kind
        assert ".zs { color: inherit;" in text, kind
        assert not re.search(r"background: (?!none)|color: #", text), kind
        assert not re.search("<svg|<img", text), "JupyterLab shows none of a notebook that is not trusted"
        root = page(text)
        assert all(drawing.get("role") == "img" and len(drawing.get("aria-label")) > 20 for drawing in root.iter("div")
                   if drawing.get("class") != "zs" and "height" not in drawing.get("style", ""))
        assert all(table.findtext("caption") for table in root.iter("table")), kind
        assert {cell.get("scope") for cell in root.iter("th")} <= {"col", "row"}, kind
        assert re.fullmatch("<.{1,199}", repr(things[kind])), kind
    assert before == [(list(trace.rows), memory.now_nbytes, memory.peak_nbytes)
                      for trace, memory in zip(cluster.trace, cluster.memory, strict=True)]


@pytest.mark.parametrize("kind", [*objects.VIEWS, lost_updates.LostUpdates], ids=lambda kind: kind.__name__)
def test_text_and_html_have_every_word_and_cell_of_the_view_and_no_markup(kind, things):
    def in_one_line(text):
        return re.sub(r"\s+", " ", text).strip()

    text = in_one_line(printed(things[kind], 400))
    page = in_one_line(unescape(re.sub(r"<[^>]*>", " ", re.sub(r"</?strong>", "", html(things[kind])))))
    parts = view(things[kind]).parts
    for part in parts:
        words = [getattr(part, name, "") for name in ("title", "text", "caption")]
        words += [cell for row in getattr(part, "rows", ()) for cell in row]
        words += [name.removeprefix(views.RIGHT) for name in getattr(part, "columns", ())]
        is_markup = isinstance(part, views.Heading | views.Rule | views.TextLine) or getattr(part, "marked", False)
        for word in (in_one_line(Text.from_markup(word).plain if is_markup else word) for word in words):
            assert word in text
            assert word in page
            assert not re.search(r"\[/|\[red\]", word)
    assert any(isinstance(part, views.Table) and part.rows for part in parts)


def test_bars_have_exact_bytes_and_a_strip_its_bounds(cluster, things):
    def only(kind, thing):
        (found,) = (part for part in view(thing).parts if isinstance(part, kind))
        return found

    bars, plan = only(views.Bars, cluster), things[zs.planning.Plan]
    assert [sum(held.values()) for _, held in bars.bars] == cluster.memory.peak_nbytes
    assert bars.limit_nbytes == 10_000
    strip = only(views.Strip, things[zs.Layout])
    assert strip.lines[0].bounds[-1] == things[zs.Layout].regions[0].bounds[-1]
    assert [sum(held.values()) for _, held in only(views.Bars, plan).bars] == [row.total_nbytes for row in plan.rows]
    assert plan.verdict in html(plan)


@pytest.mark.parametrize("cluster", [zs.Cluster(1), zs.NullCluster(4, representative=2)], ids=["fresh", "one for all"])
def test_a_cluster_shows_itself_before_its_first_run_and_where_one_rank_stands_for_all(cluster):
    for thing in (cluster, cluster.trace, cluster.trace[0], cluster.memory, cluster.memory[0]):
        page(html(thing))
        assert printed(thing)
    assert f"of {cluster.ranks[0].size} rank" in printed(cluster)


def test_names_that_look_like_markup_are_shown_as_they_are():
    def wicked(rank):
        with rank.trace.span("<script>alert(1)</script>[bold]"):
            rank.trace.compute(flops=3)
        rank.memory.hold(np.zeros(4), "input", "<b>")

    cluster = zs.Cluster(2)
    cluster.run(wicked)
    text = html(cluster.trace)
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;[bold]" in text
    assert "<script>alert(1)</script>[bold]" in printed(cluster.trace)
    assert "&lt;b&gt;" in render_html.table_html(views.Table("<i>", ("<b>",), (("<u>",),)))


def test_matplotlib_is_imported_when_something_is_drawn_and_pyplot_never():
    code = ("import sys, zerosim as zs; cluster = zs.Cluster(2); cluster.run(lambda rank: rank.barrier()); "
            "assert 'zerosim.course' not in sys.modules and 'rich' not in sys.modules; "
            "cluster._repr_html_(); cluster.__rich__(); from zerosim.course import figures; "
            "assert 'matplotlib' not in sys.modules; cluster.show_ring(); figures.ring(figures.ring_data(2, 2)).svg(); "
            "assert 'matplotlib' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules")
    assert fresh("-c", code) == ""


# -- the numbers --------------------------------------------------------------------------------------------------

def test_a_cluster_its_traces_and_its_memories_show_what_each_rank_holds_and_sent(cluster):
    sent = cluster.trace.sent_nbytes()
    assert rows(html(cluster), "What each rank holds, and sent in the last run (bytes)") == [
        [str(rank), f"{memory.now_nbytes:,}", f"{memory.peak_nbytes:,}", f"{sent[rank]:,}",
         str(len(cluster.trace[rank].collectives())), "0"] for rank, memory in enumerate(cluster.memory)]
    text = html(cluster.trace)
    assert [number(row[-1]) for row in rows(text, "Bytes sent, by purpose")] == sent
    by_operation = rows(text, "Collectives and messages, by all ranks")
    assert sum(number(row[-1]) for row in by_operation) == sum(sent)
    assert sum(number(row[-2]) for row in by_operation) == sum(len(trace.collectives()) for trace in cluster.trace)
    memory, peak = cluster.memory[1], cluster.memory[1].peak_nbytes_by_kind
    *by_kind, total = rows(html(memory), "By kind (bytes)")
    assert {row[0].replace(" ", "_"): number(row[2]) for row in by_kind} == {
        **dict.fromkeys(memory.now_nbytes_by_kind, 0), **peak}
    assert [row[0] for row in by_kind] == [kind.replace("_", " ") for kind in trace.KINDS if kind in peak]
    assert total == ["all", f"{memory.now_nbytes:,}", f"{memory.peak_nbytes:,}"]


def test_spans_sum_up_by_their_first_two_names_what_was_computed_and_sent():
    def program(rank):
        with rank.trace.span("step"):
            for name, flops in (("forward", 10), ("backward", 200)):
                with rank.trace.span(name):
                    for unit in ("layer0", "layer1"):
                        with rank.trace.span(unit):
                            rank.trace.compute(flops=flops)
                    _ = rank.all_reduce(np.ones(3 if name == "forward" else 6))
        rank.trace.compute(flops=7)

    cluster = zs.Cluster(3)
    cluster.run(program)
    assert rows(html(cluster.trace[1]), "By span, the stretches of the program that it named") == [
        ["step/forward", "20", "32"], ["step/backward", "400", "64"], ["(outside)", "7", "0"]]


@pytest.mark.parametrize("name", ["per_unit", "contiguous", "whole_matrices"])
def test_a_layout_shows_every_element_once_in_the_color_of_its_owner(name):
    def made(rank):
        return zs.Engine(rank, zs.models.MLP([4, 7, 4]), zs.optim.Adam(), stage=2, layout=name).layout

    found = zs.Cluster(3).run(made)[0]
    strip = view(found).parts[0]
    assert [line.bounds[-1] for line in strip.lines] == [region.high - region.low for region in found.regions]
    assert sum(line.valid for line in strip.lines) == found.valid_length
    owned = [0] * 3
    for box in boxes_of(html(found), "rank"):
        rank, low, high = map(int, re.findall(r"\d+", box.get("title")))
        owned[rank] += high - low
    assert owned == [found.shard_length(rank) for rank in range(3)]
    assert (found.length > found.valid_length) == (name != "whole_matrices")  # there is padding to show
    padding = sum(high - low for low, high in (map(int, re.findall(r"\d+", box.get("title"))[1:])
                                               for box in boxes_of(html(found), ", padding")))
    assert padding == found.length - found.valid_length


def test_bars_are_as_long_as_their_bytes_and_padding_is_shown_from_its_first_element_on_in_html_and_in_text():
    colors = {"parameter": "#112233", "gradient": "#445566"}
    half = views.Bars("half", (("three", {"parameter": 2, "gradient": 1}), ("one", {"gradient": 1})), colors, 4)
    strip = views.Strip("cut", (views.Line("all", (0, 2, 4), 3),))
    shown = views.View("", "", (half, strip))
    text, lines = render_html.as_html(shown), printed(shown, 140).splitlines()
    assert {box.get("title"): pixels(box) for box in boxes_of(text, " bytes")} == {
        "three: parameter 2 bytes": 250, "three: gradient 1 bytes": 125, "one: gradient 1 bytes": 125}
    dashed = [box for box in page(text).iter("span") if "dashed" in box.get("style", "")]
    assert [pixels(box, "margin-left") for box in dashed] == [500 - 375, 500 - 125], "the capacity is at 500 of both"
    assert [(box.get("title"), pixels(box)) for box in boxes_of(text, "elements")] == [
        ("rank 0: elements 0 to 2", 250), ("rank 1: elements 2 to 3", 125), ("rank 1: elements 3 to 4, padding", 125)]
    assert [line.count("█") for line in lines if line.strip().startswith(("three", "one"))] == [30, 10]
    assert "  The capacity is 4 bytes." in lines
    (cut,) = [line for line in lines if line.strip().startswith("all")]
    assert cut.split()[-1] == "0" * 20 + "1" * 10 + "░" * 10
    assert page(render_html.as_html(views.View("Nothing", " at all"))).findtext("div/p/strong") == "Nothing"


def test_what_is_long_is_counted_and_not_shown_and_a_layout_of_very_many_ranks_stays_small():
    many = views.Table("many", (">n",), tuple((str(n),) for n in range(100)))
    shown = rows(render_html.table_html(many), "many")
    assert (len(shown), shown[-1]) == (views.MOST_ROWS, ["and 77 more rows"])
    assert len(rows(render_html.table_html(many, all_rows=True), "many")) == 100
    shapes = {f"layer{i}": {f"layer{i}.weight": (512, 7), f"layer{i}.bias": (7,)} for i in range(60)}
    text = html(layout.lay_out("per_unit", shapes, 1024))
    assert len(text) < 1_500_000
    assert "and 1,001 more ranks" in text
    assert "and 56 more" in text


def test_an_engine_shows_its_stage_by_name_or_by_its_placements_and_a_cut_of_each_param_group():
    sharded, replicated = zs.Placement.SHARDED, zs.Placement.REPLICATED
    for stage, name in ((2, "ZeRO-2"), (zs.Stage(replicated, replicated, replicated), "REPLICATED"),
                        (zs.Stage(sharded, sharded, sharded), "ZeRO-3")):
        engine = zs.Cluster(2).run(program, stage)[0]
        assert name in dict(rows(html(engine), "How it trains"))["stage"]

    def grouped(rank):
        return zs.Engine(rank, zs.models.GPT(zs.models.GPTConfig(1, 8, 2, 8, 16)), zs.optim.Adam(), stage=1,
                         groups=[zs.Group("*ln_*", compute="fp32")], policy=zs.Policy("bf16"))

    engine = zs.Cluster(2).run(grouped)[0]
    assert sum(isinstance(part, views.Strip) for part in view(engine).parts) == len(engine.param_groups) == 2
