"""What a page draws is what the report's data say: curves, bars, stars, and messages between the right ranks."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import zerosim as zs
from zerosim.course.figures.timeline import MACHINE
from zerosim.display.report import RankReport, curve_html, page, report_data
from zerosim.display.traffic_plots import ring_traffic_data
from zerosim.planning.recording import record


def test_the_messages_of_split_groups_are_between_ranks_of_the_whole_cluster():
    def program(rank):
        rank.split(rank.index % 2).all_reduce(np.ones(5))
        if rank.index == 4:
            rank.send(np.ones(3), 1)
        elif rank.index == 1:
            rank.recv(np.empty(3), 4)

    cluster = zs.Cluster(5)
    cluster.run(program)
    found = report_data(record(cluster.trace), MACHINE, "split")
    assert found.links == ring_traffic_data(cluster.trace, 5).links
    assert found.links[4, 1] == 24
    assert [sum(rank.sent_nbytes.values()) for rank in found.ranks] == cluster.trace.sent_nbytes()
    assert [sum(nbytes for (source, _), nbytes in found.links.items() if source == rank) for rank in range(5)
            ] == cluster.trace.sent_nbytes()


def test_a_memory_curve_is_as_high_as_its_bytes_from_one_change_to_the_next():
    held = {"parameter": (0, 50, 50, 50), "gradient": (0, 0, 25, 0)}
    rank = RankReport(0, (), (), (), (0.0, 2.0, 5.0, 8.0), held, {}, 0.0, 0.0, 0.0)
    tree = ET.fromstring(curve_html(rank, list(held), 10.0, 100).replace("&nbsp;", " "))
    paths = {path.findtext("title"): [tuple(map(float, point.split(","))) for point in path.get("d")[1:-1].split()]
             for path in tree.iter("path")}
    assert paths["parameter"] == [(0, 200), (200, 200), (200, 100), (1000, 100), (1000, 200), (0, 200)]
    upper = [(0, 200), (200, 200), (200, 100), (500, 100), (500, 50), (800, 50), (800, 100), (1000, 100)]
    assert paths["gradient"] == [*upper, (1000, 100), (200, 100), (200, 200), (0, 200)]
    assert "at most 75, first after 5.0 µs; 50 at the end" in tree.find("svg").get("aria-label")


def test_every_bar_begins_and_ends_where_its_times_say():
    def program(rank):
        rank.trace.compute(flops=1_000_000)
        rank.all_reduce(np.ones(1000))
        rank.trace.compute(flops=3_000_000 * (1 + rank.index))

    cluster = zs.Cluster(3)
    cluster.run(program)
    found = report_data(record(cluster.trace), MACHINE, "bars")
    bars = re.findall(r'data-start="([\d.]+)" data-end="([\d.]+)" style="left:([\d.]+)%;width:([\d.]+)%', page(found))
    assert len(bars) == sum(len(rank.computed) + len(rank.communicated) + len(rank.waits) for rank in found.ranks)
    for start, end, left, width in (map(float, bar) for bar in bars):
        assert left == pytest.approx(100 * start / found.step_microseconds, abs=0.01)
        assert left + width == pytest.approx(100 * end / found.step_microseconds, abs=0.01)
    assert {end > start for start, end, *_ in (map(float, bar) for bar in bars)} == {True}


def test_a_star_is_for_collectives_that_were_issued_and_waited_for_later():
    def program(rank):
        rank.all_reduce(np.ones(5))
        works = [rank.all_gather(np.ones(2), async_op=True), rank.reduce_scatter(np.ones(3), async_op=True)]
        rank.broadcast(np.ones(2))
        return [work.wait() for work in works]

    cluster = zs.Cluster(3)
    cluster.run(program)
    found = report_data(record(cluster.trace), MACHINE, "stars")
    assert {call.operation: call.asynchronous for call in found.calls} == {
        "all_reduce": False, "all_gather": True, "reduce_scatter": True, "broadcast": False}
    shown = re.findall(r"<td>((?:all_reduce|all_gather|reduce_scatter|broadcast)[ *]*)</td>", page(found))
    assert sorted(shown) == ["all_gather *", "all_reduce", "broadcast", "reduce_scatter *"]


def test_the_fullest_rank_is_the_one_whose_memory_is_open():
    cluster = zs.Cluster(3)
    cluster.run(lambda rank: rank.memory.alloc(100 - (rank.index - 1)**2, np.float32, "workspace"))
    text = page(report_data(record(cluster.trace), MACHINE, "open"))
    assert re.findall(r"<details open><summary>rank (\d)", text) == ["1"]
