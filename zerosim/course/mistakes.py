"""Common mistakes in the worked example's training step, and which of its numbers each of them changes.

The step is written by hand on the rank API, so that one line of it can be got wrong; as it is it has the bits of the
engine with its own layout. A mistake is a patch of it, in ``mistakes.toml``. One step of Adam from moments of 0 moves
every weight by the learning rate, whatever the size of its gradient, and a constant factor in all gradients never
changes Adam's weights, but for epsilon: so there is a second step, SGD beside Adam, and moments and gradients are
compared, too.
Legend: N ranks, P = 4 weights w1 ... w4, in the order of the flat vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.course.patches import Patch
from zerosim.course.worked_example import OPTIMIZERS, Example, Sample, exact
from zerosim.display.views import TextLine, View, marked_table, parts
from zerosim.numerics.policy import Policy
from zerosim.planning.facts import facts
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.shown import Answer

LAYERS = (slice(0, 2), slice(2, 4))  # of the flat vector
NONE = "none"
# What each is, in words, and its patch.
MISTAKES: Mapping[str, Mapping[str, str]] = MappingProxyType(facts("mistakes", __package__))
NUMBERS = ("gradient", "m", "v", "master", "weights")  # that a step shows


def gradient(weights: np.ndarray, sample: Sample) -> np.ndarray:
    """d loss / d weights (4,) at weights (4,), both in the compute format: a layer adds in fp32 and rounds once."""
    dtype, (x, t) = weights.dtype.type, sample
    (w1, w2, w3, w4), (x1, x2) = weights.astype(np.float32), np.array(x, dtype).astype(np.float32)
    h = np.float32(dtype(w1 * x1 + w2 * x2))
    a = max(h, np.float32(0))
    dy = np.float32(dtype(np.float32(dtype(w3 * a + w4)) - np.float32(t)))
    dh = np.float32(dtype(w3 * dy)) if h > 0 else np.float32(0)
    found: np.ndarray = np.array([x1 * dh, x2 * dh, a * dy, dy], np.float32).astype(dtype)
    found += dtype(0)  # sums over a batch begin at 0, so none is -0
    return found


def train(rank: Rank, example: Example) -> list[dict[str, np.ndarray]]:
    """The rank program: the example at ZeRO-1; each rank owns 1/N of each layer.

    Returns for each step what this rank has of NUMBERS: its shards one behind the other, and the weights (4,).
    """
    weights = np.array(example.weights, Policy(example.compute).compute_dtype)
    width = -(-2 // rank.size)  # of a shard of a layer; the last ranks' are short, or empty
    own = [np.arange(4)[layer][rank.index * width:(rank.index + 1) * width] for layer in LAYERS]
    master = [np.array(example.weights, np.float32)[places] for places in own]
    m, v = ([np.zeros_like(shard) for shard in master] for _ in range(2))
    shown = []
    for step in range(1, example.steps + 1):
        local = gradient(weights, example.sample(rank.index, step))
        g = [rank.reduce_scatter(local[layer]).astype(np.float32) / np.float32(rank.size) for layer in LAYERS]
        for at, places in enumerate(own):
            update(example, master[at], m[at], v[at], g[at], step)
            weights[places] = master[at].astype(weights.dtype)
        for layer, places in zip(LAYERS, own, strict=True):
            weights[layer] = rank.all_gather(weights[places], length=2)
        shards = {"gradient": g, "m": m, "v": v, "master": master}
        shown.append({name: np.concatenate(of_layers) for name, of_layers in shards.items()}
                     | {"weights": weights.copy()})
    return shown


def update(example: Example, w: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, step: int) -> None:
    """One update of fp32 weights (n,) in place, by Adam (Kingma & Ba 2015, algorithm 1) or by SGD."""
    if example.optimizer == "sgd":
        w -= np.float32(example.learning_rate) * g
        return
    m[:] = 0.9 * m + (1 - 0.9) * g
    v[:] = 0.999 * v + (1 - 0.999) * (g * g)
    w -= example.learning_rate * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


@dataclass(frozen=True, slots=True)
class Mistakes(Answer):
    """For each mistake and optimizer the steps in which a number is different from that without the mistake."""

    example: Example
    changed: dict[str, dict[str, dict[str, list[int]]]]  # mistake, optimizer, name in NUMBERS -> steps
    weights: dict[str, dict[str, list[list[float]]]]  # mistake or none, optimizer -> rank 0's masters' copies by step

    def as_json(self) -> dict[str, Any]:
        """The steps in which numbers change, and rank 0's weights after each step."""
        return {"changed": self.changed, "weights": self.weights}

    def view(self) -> View:
        """A table of mistakes."""
        example = self.example

        def steps(mistake: str, optimizer: str, name: str) -> str:
            return " ".join(map(str, self.changed[mistake][optimizer][name])) or "-"

        sentences = {mistake: row["says"] for mistake, row in MISTAKES.items()}
        table = marked_table("mistake", "gradient", "m", "v", "weights", "weights, sgd", rows=[
            (sentence, *(steps(mistake, "adam", name) for name in ("gradient", "m", "v", "weights")),
             steps(mistake, "sgd", "weights")) for mistake, sentence in sentences.items()],
            caption="The steps in which a number is not what it should be, with Adam and with SGD", indent=0)
        unseen = [sentence for mistake, sentence in sentences.items() if not self.changed[mistake]["adam"]["weights"]]
        return View("Common mistakes", f" in {example.steps} steps of the worked example on {example.ranks} ranks",
                    parts([table], [TextLine(f"Adam's weights do not show that {', or that '.join(unseen)}.", 0)]
                          if unseen else ()))


def mistakes_in(example: Example) -> Mistakes:
    """Trains the example with each of the mistakes and without, by Adam and by SGD, and compares the numbers' bits."""
    changed: dict[str, dict[str, dict[str, list[int]]]] = {mistake: {} for mistake in MISTAKES}
    weights: dict[str, dict[str, list[list[float]]]] = {mistake: {} for mistake in (NONE, *MISTAKES)}
    for optimizer in OPTIMIZERS:
        asked = replace(example, optimizer=optimizer)
        right = Cluster(example.ranks).run(train, asked)
        weights[NONE][optimizer] = [exact(step["weights"]) for step in right[0]]
        for mistake, row in MISTAKES.items():
            with Patch(f"{__name__}.{row['of']}", row["old"], row["new"]).applied():
                wrong = Cluster(example.ranks).run(train, asked)
            weights[mistake][optimizer] = [exact(step["weights"]) for step in wrong[0]]
            changed[mistake][optimizer] = {name: [
                step for step in range(1, example.steps + 1)
                if any(one[step - 1][name].tobytes() != other[step - 1][name].tobytes()
                       for one, other in zip(right, wrong, strict=True))] for name in NUMBERS}
    return Mistakes(example, changed, weights)
