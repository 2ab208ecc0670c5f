"""The page that moves: recorded runs in linked views under one clock, as one file of HTML.

Its parts stand in the folder ``explore``, a file for each story: the data, what is asked and answered, the state of the
page, and each view. They are plain JavaScript, canvas and SVG, without a library: what is drawn is bars, areas and
arrows, and a library would be larger than all of it. The runs come as `run_data`, deflated, and the browser inflates
them when they are looked at.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from zerosim.display.render_html import page_html, shipped
from zerosim.display.style import ARITHMETIC, KIND_COLORS, LIGHT_GREEN, PHASE_COLORS, PURPOSE_COLORS, RANK_COLORS
from zerosim.planning.hardware import Machine

SCRIPTS = ("data", "answers", "state", "timeline", "memory", "ring", "numbers", "formulas", "page", "tiny")


def explored_html(title: str, chunks: Mapping[str, bytes], machine: str, *, lead: str, after: str = "",
                  axes: Sequence[Mapping[str, Any]] = (), questions: Iterable[tuple[str, str]] = (),
                  legend: str = "") -> str:
    """The whole page. ``chunks`` are runs by the name under which the page looks for them, as JSON, deflated; ``lead``
    and ``after`` are HTML above and under the views, ``axes`` the settings to choose from, ``questions`` texts with the
    address of the state that answers each."""
    colors = {"kindColors": {**KIND_COLORS}, "purposes": {**PURPOSE_COLORS},
              "phases": {**PHASE_COLORS, ARITHMETIC: LIGHT_GREEN}, "ranks": RANK_COLORS}
    page = json.dumps({**colors, "axes": axes, "legend": legend}, ensure_ascii=False).replace("<", "\\u003c")
    data = "".join(f'<script type="text/plain" data-chunk="{escape(name)}">{b64encode(deflated).decode()}</script>\n'
                   for name, deflated in chunks.items())
    listed = "".join(f'<li><a href="{escape(address)}">{escape(text)}</a></li>' for text, address in questions)
    body = shipped("explore/page.html").format(
        lead=lead, machine=escape(machine), after=after,
        questions=f'<ul class="questions">{listed}</ul>' if listed else "")
    return page_html(title, [f"explore/{name}.js" for name in SCRIPTS],
                     f'{body}<script type="application/json" id="page">{page}</script>\n{data}')


def machine_words(machine: Machine) -> str:
    """The machine on which a run was replayed, in words."""
    device, network = machine.device, machine.network
    links = [(f"links {network.inside.name}", network.inside)]
    links += [(f"between nodes {network.between.name}", network.between)] if network.between else []
    rate = machine.peak_flops_per_second * machine.efficiency / 1e12
    return (f"devices {device.name} ({rate:g} TFLOP/s in {machine.format}, memory at "
            f"{device.memory_bytes_per_second / 1e9:g} GB/s), " + ", ".join(
                f"{words} ({link.bytes_per_second / 1e9:g} GB/s, {link.latency_seconds * 1e6:g} µs)"
                for words, link in links))
