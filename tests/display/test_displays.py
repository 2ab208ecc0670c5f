"""What things show of themselves, in a notebook and in a terminal: their numbers, escaped, in any state."""

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

import zerosim as zs
from tests.architecture.source import ROOT
from zerosim.display import html, view
from zerosim.display.notebook import as_html, table_html
from zerosim.display.objects import VIEWS
from zerosim.display.terminal import as_text
from zerosim.display.views import MOST_ROWS, Bars, Line, Strip, Table, View
from zerosim.planning.plan import Plan
from zerosim.ranks.trace import KINDS
from zerosim.zero.layout import lay_out


def program(rank, stage=3):
    """A step of an MLP whose layers the ranks do not divide."""
    data = np.random.default_rng(rank.index)
    engine = zs.Engine(rank, zs.models.MLP([4, 7, 4]), zs.optim.Adam(), stage=stage, policy=zs.Policy("bf16"))
    engine.step([(data.normal(size=(4, 4)), data.normal(size=(4, 4)))])
    return engine


@pytest.fixture(scope="module")
def cluster() -> zs.Cluster:
    found = zs.Cluster(3, capacity_nbytes=10_000)
    found.run(program)
    return found


@pytest.fixture(scope="module")
def things(cluster) -> dict:
    engine = cluster.runs[-1].results[0]
    steps = zs.step_through(lambda rank: rank.all_reduce(np.arange(6.0)), ranks=3)
    step = next(steps)
    plan = zs.plan("gpt2", ranks=8, device="h100-80", link="nvlink4")
    shown = (cluster, cluster.trace, cluster.trace[1], cluster.memory, cluster.memory[2], plan, engine.layout, engine,
             step, steps)
    return {type(thing): thing for thing in shown}


def page(text: str) -> ET.Element:
    """HTML as a tree, which shows that it is well-formed."""
    return ET.fromstring(f"<html>{text}</html>")


def rows(text: str, caption: str) -> list[list[str]]:
    """The body of the table of this caption."""
    for table in page(text).iter("table"):
        if table.findtext("caption") == caption:
            return [["".join(cell.itertext()) for cell in row] for row in table.find("tbody")]
    raise AssertionError(f"no table {caption!r}")


def printed(thing) -> str:
    file = io.StringIO()
    Console(file=file, width=140, highlight=False).print(thing)
    return file.getvalue()


def test_every_class_that_has_a_look_is_looked_at_here(things):
    assert set(things) == set(VIEWS)


def test_every_look_is_well_formed_and_asks_nothing_of_anybody_else(things):
    for thing in things.values():
        text = thing._repr_html_()
        page(text)
        assert not re.search(r"<script|https?://|url\((?!#)|\bon\w+=|<link|<iframe|@import", text), type(thing)


def test_every_drawing_has_a_text_alternative_and_every_table_a_caption_and_scopes(things):
    for thing in things.values():
        root = page(thing._repr_html_())
        for drawing in root.iter("svg"):
            assert drawing.get("role") == "img"
            assert len(drawing.get("aria-label")) > 20
        for table in root.iter("table"):
            assert table.findtext("caption")
            assert {cell.get("scope") for cell in table.iter("th")} <= {"col", "row"}


def test_text_takes_the_ink_of_the_page_so_that_it_is_read_in_light_and_dark(things):
    for thing in things.values():
        text = thing._repr_html_()
        assert "currentColor" in text
        assert not re.search(r"background: (?!none)|color: #", text)


def test_a_terminal_shows_the_same_tables_as_a_notebook(things):
    for thing in things.values():
        lines = printed(thing)
        for part in view(thing).parts:
            assert part.caption in lines
            if isinstance(part, Table):
                for row in part.rows[:3]:
                    assert row[0] in lines


def test_a_cluster_shows_what_each_rank_holds_and_sent(cluster):
    shown = rows(html(cluster), "What each rank holds, and sent in the last run (bytes)")
    assert shown == [[str(rank), f"{memory.now_nbytes:,}", f"{memory.peak_nbytes:,}", f"{trace.sent_nbytes():,}",
                      str(len(trace.collectives())), "0"]
                     for rank, (memory, trace) in enumerate(zip(cluster.memory, cluster.trace, strict=True))]


def test_a_memory_shows_its_kinds_and_bars_of_their_lengths(cluster):
    memory = cluster.memory[1]
    shown = rows(html(memory), "By kind (bytes)")
    peak = memory.peak_nbytes_by_kind
    assert {row[0].replace(" ", "_"): int(row[2].replace(",", "")) for row in shown if row[0] != "all"} == {
        **dict.fromkeys(memory.now_nbytes_by_kind, 0), **peak}
    assert [row[0] for row in shown] == [kind.replace("_", " ") for kind in KINDS if kind in peak] + ["all"]
    assert shown[-1] == ["all", f"{memory.now_nbytes:,}", f"{memory.peak_nbytes:,}"]
    bars = [rect for rect in page(html(memory)).iter("rect") if rect.find("title") is not None]
    per_pixel = {int(re.search(r"([\d,]+) bytes", bar.findtext("title"))[1].replace(",", "")) / float(bar.get("width"))
                 for bar in bars if float(bar.get("width")) > 2}
    assert max(per_pixel) / min(per_pixel) < 1.02


def test_traces_show_what_was_sent_by_purpose_and_by_operation(cluster):
    text = html(cluster.trace)
    by_rank = rows(text, "Bytes sent, by purpose")
    assert [int(row[-1].replace(",", "")) for row in by_rank] == cluster.trace.sent_nbytes()
    by_operation = rows(text, "Collectives and messages, by all ranks")
    assert sum(int(row[-1].replace(",", "")) for row in by_operation) == sum(cluster.trace.sent_nbytes())
    assert sum(int(row[-2].replace(",", "")) for row in by_operation) == sum(
        len(trace.collectives()) for trace in cluster.trace)


@pytest.mark.parametrize("layout", ["per_unit", "contiguous", "whole_matrices"])
def test_a_layout_shows_every_element_once_in_the_color_of_its_owner(layout):
    def made(rank):
        return zs.Engine(rank, zs.models.MLP([4, 7, 4]), zs.optim.Adam(), stage=2, layout=layout).layout

    found = zs.Cluster(3).run(made)[0]
    strip = view(found).parts[0]
    assert [line.bounds[-1] for line in strip.lines] == [region.high - region.low for region in found.regions]
    assert sum(line.valid for line in strip.lines) == found.valid_length
    cells = [rect for rect in page(html(found)).iter("rect") if "rank" in (rect.findtext("title") or "")]
    owned = [0] * 3
    for cell in cells:
        rank, low, high = map(int, re.findall(r"\d+", cell.findtext("title")))
        owned[rank] += high - low
    assert owned == [found.shard_length(rank) for rank in range(3)]
    assert (found.length > found.valid_length) == (layout != "whole_matrices")  # there is padding to show
    hatched = [rect for rect in page(html(found)).iter("rect") if "url(#" in rect.get("fill")]
    assert len(hatched) == sum(line.valid < line.bounds[-1] for line in strip.lines)


def test_spans_sum_up_by_their_first_two_names_what_was_computed_and_sent():
    def program(rank):
        with rank.trace.span("step"):
            for name, flops in (("forward", 10), ("backward", 200)):
                with rank.trace.span(name):
                    for unit in ("layer0", "layer1"):
                        with rank.trace.span(unit):
                            rank.trace.compute(flops=flops)
                    rank.all_reduce(np.ones(3 if name == "forward" else 6))
        rank.trace.compute(flops=7)

    cluster = zs.Cluster(3)
    cluster.run(program)
    assert rows(html(cluster.trace[1]), "By span, the stretches of the program that it named") == [
        ["step/forward", "20", "32"], ["step/backward", "400", "64"], ["(outside)", "7", "0"]]


HALF = Bars("half", (("three", {"parameter": 2, "gradient": 1}), ("one", {"gradient": 1})),
            {"parameter": "#112233", "gradient": "#445566"}, limit_nbytes=4)


def test_bars_are_as_long_as_their_bytes_beside_the_capacity_in_html_and_in_text():
    tree = page(as_html(View("", "", (HALF,))))
    widths = {rect.findtext("title"): float(rect.get("width")) for rect in tree.iter("rect") if len(rect)}
    assert widths == {"three: parameter 2 bytes": 250, "three: gradient 1 bytes": 125, "one: gradient 1 bytes": 125}
    assert [float(line.get("x1")) for line in tree.iter("line") if line.get("stroke-dasharray")] == [620]
    text = printed(as_text(View("", "", (HALF,)))).splitlines()
    assert [line.count("█") for line in text if line.strip().startswith(("three", "one"))] == [30, 10]
    assert "  The capacity is 4 bytes." in text


def test_padding_is_shown_from_its_first_element_on():
    strip = Strip("cut", (Line("all", (0, 2, 4), 3),))
    tree = page(as_html(View("", "", (strip,))))
    (hatched,) = [rect for rect in tree.iter("rect") if "url(#" in rect.get("fill")]
    assert (float(hatched.get("x")), float(hatched.get("width"))) == (120 + 375, 125)
    (line,) = [line for line in printed(as_text(View("", "", (strip,)))).splitlines() if line.strip().startswith("all")]
    assert line.split()[-1] == "0" * 20 + "1" * 10 + "░" * 10


def test_a_layout_of_very_many_ranks_is_shown_at_once_and_small():
    shapes = {f"layer{i}": {f"layer{i}.weight": (512, 7), f"layer{i}.bias": (7,)} for i in range(60)}
    found = lay_out("per_unit", shapes, 1024)
    text = html(found)
    assert len(text) < 1_500_000
    assert "and 1,001 more ranks" in text
    assert "and 56 more" in text
    assert "rank 0" in str(found)


def test_an_engine_shows_its_stage_by_name_or_by_its_placements():
    sharded, replicated = zs.Placement.SHARDED, zs.Placement.REPLICATED
    for stage, name in ((2, "ZeRO-2"), (zs.Stage(replicated, replicated, replicated), "REPLICATED"),
                        (zs.Stage(sharded, sharded, sharded), "ZeRO-3")):
        engine = zs.Cluster(2).run(program, stage)[0]
        assert name in dict(rows(html(engine), "How it trains"))["stage"]


def test_an_engine_of_several_kin_shows_a_cut_of_each():
    def grouped(rank):
        return zs.Engine(rank, zs.models.MLP([4, 7, 4]), zs.optim.Adam(), stage=1,
                         groups=[zs.Group("*.bias", compute="fp32")], policy=zs.Policy("bf16"))

    engine = zs.Cluster(2).run(grouped)[0]
    assert html(engine).count("The cut of the vector") >= len(engine.param_groups) > 1


def test_a_plan_shows_its_rows_whose_parts_add_up(things):
    plan = things[Plan]
    bars = next(part for part in view(plan).parts if isinstance(part, Bars))
    assert [sum(held.values()) for _, held in bars.bars] == [row.total_nbytes for row in plan.rows]
    assert plan.verdict in html(plan)


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
    assert "&lt;b&gt;" in table_html(Table("<i>", ("<b>",), (("<u>",),)))


@pytest.mark.parametrize("made", [lambda: zs.Cluster(1), lambda: zs.NullCluster(4, representative=2)],
                         ids=["fresh", "representative"])
def test_a_cluster_shows_itself_before_its_first_run_and_where_one_rank_stands_for_all(made):
    cluster = made()
    for thing in (cluster, cluster.trace, cluster.trace[0], cluster.memory, cluster.memory[0]):
        page(html(thing))
        assert printed(thing)
    assert f"of {cluster.ranks[0].size} rank" in printed(cluster)


def test_what_is_long_is_counted_and_not_shown():
    shown = rows(table_html(Table("many", (">n",), tuple((str(n),) for n in range(100)))), "many")
    assert len(shown) == MOST_ROWS
    assert shown[-1] == ["and 77 more rows"]
    whole = table_html(Table("many", (">n",), tuple((str(n),) for n in range(100))), all_rows=True)
    assert len(rows(whole, "many")) == 100


def test_a_repr_is_one_short_line(things):
    for thing in things.values():
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 200
        assert repr(thing).startswith("<")


def test_a_view_without_parts_is_a_sentence():
    assert page(as_html(View("Nothing", " at all"))).findtext("div/p/strong") == "Nothing"


def test_looking_changes_nothing(cluster):
    before = [(list(trace.rows), memory.now_nbytes, memory.peak_nbytes)
              for trace, memory in zip(cluster.trace, cluster.memory, strict=True)]
    for thing in (cluster, cluster.trace, cluster.memory, cluster.runs[-1].results[1]):
        html(thing)
        printed(thing)
    assert before == [(list(trace.rows), memory.now_nbytes, memory.peak_nbytes)
                      for trace, memory in zip(cluster.trace, cluster.memory, strict=True)]


def test_html_and_text_load_no_matplotlib():
    code = ("import sys, zerosim as zs; cluster = zs.Cluster(2); cluster.run(lambda rank: rank.barrier()); "
            "assert 'zerosim.course' not in sys.modules and 'rich' not in sys.modules; "
            "cluster._repr_html_(); cluster.__rich__(); assert 'matplotlib' not in sys.modules; "
            "cluster.show_ring(); assert 'matplotlib' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules")
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)
