"""The course's page that moves: every setting of `explored_runs`, and the questions that it answers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerosim.course import explored_runs as runs
from zerosim.course.tiny_steps import page_data
from zerosim.display.explore_page import explored_html, machine_words
from zerosim.display.run_data import deflated
from zerosim.models.llama import Llama
from zerosim.numerics.files import write_or_refuse
from zerosim.zero.placements import STAGES

TITLE = "One training step, on every rank"
TINY = ('<details id="tiny"><summary>ZeRO in one file, line by line: 260 lines of NumPy, what each rank sees at every '
        "line, and what it keeps. Four weights, two ranks.</summary></details>")
LEGEND = "Ψ is the number of parameters, padding included; N ranks, R of a node, M nodes; k micro-batches."


def _choice(name: str, label: str, values: Mapping[Any, str] | Sequence[Any], help: str, **more: Any) -> dict[str, Any]:
    """A setting to choose: values with their words, what it is for; ``initial``, the value to be shown first, and
    ``only``, the value of another setting on which it depends."""
    words = values if isinstance(values, Mapping) else {value: str(value) for value in values}
    return {"name": name, "label": label, "values": [[str(value), text] for value, text in words.items()],
            "help": help} | more


def axes(numbers: Sequence[int] = runs.RANKS) -> list[dict[str, Any]]:
    """The settings that one chooses, in the order of `StepSetting`'s fields; ``numbers`` of ranks there are."""
    return [
        _choice("n", "ranks", numbers, "N, the number of ranks: GPUs, say",
                initial=str(4 if 4 in numbers else numbers[-1])),
        _choice("nodes", "nodes", {runs.ONE_NODE: "1", runs.TWO_NODES: "2", runs.MESH: "2×2 mesh"},
                "Two nodes of two ranks, with a slow link between them "
                f"({runs.BETWEEN.bytes_per_second / 1e9:g} GB/s): in one ring, or as a mesh, which shards inside each "
                "node",
                only=["n", "4"]),
        _choice("stage", "ZeRO stage", list(STAGES), "0: DDP. 1: the optimizer's state is cut among the ranks, 2: "
                "gradients too, 3: weights too", initial="3"),
        _choice("format", "format", runs.FORMATS, "Of weights, activations and gradients; masters and moments are "
                "fp32"),
        _choice("overlap", "overlap", {0: "off", 1: "on"}, "On: a unit's gradients are on their way to be reduced "
                "while backward computes the next unit. Off: each reduction is waited for at once"),
        _choice("prefetch", "prefetch", {0: "off", 1: "1 unit"}, "1 unit: the next unit's weights are gathered while "
                "this one computes, which hides the gather behind arithmetic and holds one more whole unit. Off: they "
                "are gathered when they are needed, and waited for. For stage 3, the one that gathers",
                only=["stage", "3"]),
        _choice("recompute", "recompute", {0: "off", 1: "blocks"}, "Only inputs of units are kept; backward runs their "
                "forward again"),
        _choice("micro", "micro-batches", (1, 2), "k: gradients of so many forward and backward passes are added up "
                "before the update"),
        _choice("offload", "optimizer", {0: "on device", 1: "on host"}, "Where Adam's moments and masters rest; what "
                "the host computes takes no time here"),
        _choice("slow", "last rank", {0: "as fast", 1: "slow"}, f"Slow: it computes {runs.SLOW:g} times as long"),
    ]


QUESTIONS = (
    ("Why does ZeRO-3 send 1.5 times as much?", "#n=4&stage=2&b.stage=3&t=55.361"),
    ("When is memory fullest, and of what?", "#n=4&stage=0&t=7.664"),
    ("What does prefetch hide?", "#n=4&stage=3&overlap=1&b.stage=3&b.prefetch=1&t=14"),
    ("Why is rank 1 waiting?", "#n=4&stage=3&slow=1&t=17&rank=1&pick=wait-1-3"),
    ("What does recomputation save, and cost?", "#n=4&stage=3&b.stage=3&b.recompute=1&t=26"),
    ("What does a mesh keep off the slow link?", "#n=4&nodes=two&stage=3&b.nodes=2x2&b.stage=3&t=20"),
    ("What does it cost to keep Adam on the host?", "#n=4&stage=2&b.stage=2&b.offload=1&t=32"),
)


def page_of(chunks: Sequence[runs.RunChunk]) -> str:
    """The page of these runs."""
    lead = (f"<p>A small Llama ({Llama(runs.MODEL).parameter_count:,} parameters; {runs.SEQUENCES} sequences of "
            f"{runs.MODEL.context} tokens on each rank and micro-batch) is trained for one step under Adam, and "
            "everything that its ranks compute, send and hold was recorded: choose a setting, press play, click on "
            "what you want to know. Bytes are counted in a run; times are its replay on a made-up machine, on which a "
            "small model's arithmetic and messages take about as long as each other.</p>")
    found = {chunk.name: chunk.deflated for chunk in chunks} | {"tiny": deflated(page_data())}
    numbers, machine = sorted({chunk.ranks for chunk in chunks}), machine_words(runs.StepSetting().machine)
    return explored_html(TITLE, found, machine, lead=lead, after=TINY, axes=axes(numbers),
                         questions=QUESTIONS if 4 in numbers else (), legend=LEGEND)


def save_page(path: str | Path, some: Sequence[runs.StepSetting],
              done: Callable[[int], object] = lambda count: None) -> Path:
    """Records the settings and writes the page; ``done`` is called with the number of runs of each part that is ready.

    Raises ValueError for a path that cannot be written.
    """
    chunks = []
    for chunk in runs.chunks_of(some):
        chunks.append(chunk)
        done(chunk.runs)
    return write_or_refuse(Path(path), page_of(chunks).encode(), "write the page")
