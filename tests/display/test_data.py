"""What is shown as text and as HTML is also there as data, and JSON can hold it."""

import json
import re
from html import unescape

import numpy as np
import pytest
from rich.console import Console

import zerosim as zs
from zerosim import display
from zerosim.course import lost_updates as lesson


def shown():
    """Things with tables, bars, strips, headings and notes."""
    cluster = zs.Cluster(3)
    cluster.run(lambda rank: rank.all_reduce(np.ones(7, np.float32)))
    layout = zs.layout_of(zs.models.MLP([3, 4, 2]), 3)
    return [cluster, cluster.memory, cluster.trace, layout, zs.plan("gpt2"),
            lesson.lost_updates(lesson.LostUpdatesQuestion(weight=65504.0, update=100.0, steps=2))]


@pytest.mark.parametrize("number", range(6))
def test_data_has_every_word_and_cell_that_text_and_html_have_and_no_markup(number):
    thing = shown()[number]
    data = json.loads(json.dumps(display.data(thing), allow_nan=False))
    console = Console(width=400, record=True)
    with console.capture() as capture:
        console.print(display.text(thing))
    text = re.sub(r"\s+", " ", capture.get())
    bare = re.sub(r"<[^>]*>", " ", re.sub(r"</?strong>", "", display.html(thing)))
    html = re.sub(r"\s+", " ", unescape(bare))
    for part in data["parts"]:
        words = [part[name] for name in ("heading", "text") if name in part]
        words += [cell for row in part.get("rows", []) for cell in row] + part.get("columns", [])
        for word in (re.sub(r"\s+", " ", word).strip() for word in words):
            assert word in text
            assert word in html
            assert not re.search(r"\[/|\[red\]", word)
    assert {name for part in data["parts"] for name in part} >= {"columns", "rows"}


def test_bars_are_exact_bytes_and_a_strip_has_its_bounds():
    cluster, *_, layout, _, _ = shown()
    (bars,) = (part for part in display.data(cluster)["parts"] if "bars" in part)
    assert {name: sum(held.values()) for name, held in bars["nbytes"].items()} == {
        f"rank {rank}": nbytes for rank, nbytes in enumerate(cluster.memory.peak_nbytes)}
    (strip,) = (part for part in display.data(layout)["parts"] if "strip" in part)
    assert strip["lines"][0]["bounds"][-1] == layout.regions[0].bounds[-1]
