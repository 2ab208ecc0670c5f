"""The course's page that moves: every setting of `explored_runs`, the questions that it answers, and where it is saved."""

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerosim.course.explored_runs import (
    BETWEEN,
    FORMATS,
    MESH,
    MODEL,
    ONE_NODE,
    RANKS,
    SEQUENCES,
    TWO_NODES,
    Chunk,
    Setting,
    chunks_of,
    settings,
)
from zerosim.course.tiny_steps import page_data
from zerosim.display.explored import explored_html, machine_words
from zerosim.models.llama import Llama
from zerosim.numerics.files import write_or_refuse
from zerosim.zero.placements import STAGES

TITLE = "One training step, on every rank"
TINY = ('<details id="tiny"><summary>ZeRO in one file, line by line: 260 lines of NumPy, what each rank sees at every line, and '
        "what it keeps. Four weights, two ranks.</summary></details>")
LEGEND = "Ψ is the number of parameters, padding included; N ranks, R of a node, M nodes; k micro-batches."


def _switch(name: str, label: str, words: str, help: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "label": label, "values": [["0", "off"], ["1", words]], "help": help, **more}


def axes() -> list[dict[str, Any]]:
    """The settings that one chooses, in the order of `Setting`'s fields: name, label, values with their words, what each
    is for, the place of the first value to be shown, and of which value of another field it depends."""
    return [
        {"name": "n", "label": "ranks", "values": [[str(n), str(n)] for n in RANKS], "initial": RANKS.index(4),
         "help": "N, the number of ranks: GPUs, say"},
        {"name": "nodes", "label": "nodes", "values": [[ONE_NODE, "1"], [TWO_NODES, "2"], [MESH, "2×2 mesh"]],
         "only": ["n", "4"], "help": f"Two nodes of two ranks, with a slow link between them "
         f"({BETWEEN.bytes_per_second / 1e9:g} GB/s): in one ring, or as a mesh, which shards inside each node"},
        {"name": "stage", "label": "ZeRO stage", "values": [[str(stage), str(stage)] for stage in STAGES], "initial": 3,
         "help": "0: DDP. 1: the optimizer's state is cut among the ranks, 2: gradients too, 3: weights too"},
        {"name": "format", "label": "format", "values": [[name, name] for name in FORMATS],
         "help": "Of weights, activations and gradients; masters and moments are fp32"},
        _switch("overlap", "overlap", "on", "Reductions go on beside arithmetic"),
        _switch("prefetch", "prefetch", "1 unit", "The next unit's weights are gathered while this one computes",
                only=["stage", "3"]),
        _switch("recompute", "recompute", "blocks", "Only inputs of units are kept; backward runs their forward again"),
        {"name": "micro", "label": "micro-batches", "values": [["1", "1"], ["2", "2"]],
         "help": "k: gradients of so many forward and backward passes are added up before the update"},
        _switch("offload", "optimizer", "on host", "Adam's moments and the fp32 masters rest on the host")
        | {"values": [["0", "on device"], ["1", "on host"]]},
        _switch("slow", "last rank", "slow", "The last rank computes 1.5 times as long") | {
            "values": [["0", "as fast"], ["1", "slow"]]},
    ]


QUESTIONS = (
    ("Why does ZeRO-3 send 1.5 times as much?", "#n=4&stage=2&b.n=4&b.stage=3&t=0"),
    ("When is memory fullest, and of what?", "#n=4&stage=0&t=29&pick=array-0-3"),
    ("What does prefetch hide?", "#n=4&stage=3&overlap=1&b.n=4&b.stage=3&b.overlap=1&b.prefetch=1&t=20"),
    ("Why is rank 2 waiting?", "#n=4&stage=3&slow=1&t=12&rank=2&pick=wait-2-2"),
    ("What does recomputation save, and cost?", "#n=4&stage=3&b.n=4&b.stage=3&b.recompute=1&t=30"),
    ("What does a mesh keep off the slow link?", "#n=4&nodes=two&stage=3&b.n=4&b.nodes=2x2&b.stage=3&t=20"),
    ("What does it cost to keep Adam on the host?", "#n=4&stage=2&b.n=4&b.stage=2&b.offload=1&t=40"),
)


def page_of(chunks: Sequence[Chunk]) -> str:
    """The page of these runs."""
    lead = (f"<p>A small Llama ({Llama(MODEL).parameter_count:,} parameters; {SEQUENCES} sequences of {MODEL.context} "
            "tokens on each rank and micro-batch) is trained for one step under Adam, and everything that its ranks "
            "compute, send and hold was recorded: choose a setting, press play, click on what you want to know. "
            "Every number is from a run.</p>")
    found = {chunk.name: chunk.deflated for chunk in chunks} | {"tiny": zlib.compress(json.dumps(page_data(), separators=(",", ":")).encode(), 9)}
    return explored_html(TITLE, found, machine_words(Setting().machine), lead=lead,
                         after=TINY, axes=axes(), questions=QUESTIONS, legend=LEGEND)


def save_page(path: str | Path, done: Callable[[int], object] | None = None,
              some: Sequence[Setting] | None = None) -> Path:
    """Records every setting and writes the page; ``done`` is called with the number of runs of each part that is ready.

    Raises ValueError for a path that cannot be written.
    """
    return write_or_refuse(Path(path), page_of(chunks_of(settings() if some is None else some, done)).encode(),
                           "write the page")
