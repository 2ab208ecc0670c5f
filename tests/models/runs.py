"""A model's units forward and backward without ranks: what is held at any moment, and what was computed, are counted.

Legend: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tests.models.contexts import Recorder, normal, recorded
from tests.ranks.data import FLOATS
from zerosim.models import Context, Model, Recompute

Arrays = dict[str, np.ndarray]


@dataclass
class Run:
    """One model in one format, its weights, and a context that counts."""

    model: Model
    ctx: Context
    w: Arrays
    recorder: Recorder

    def output(self, x: np.ndarray) -> np.ndarray:
        for unit in self.model.units:
            x = unit.forward(self.ctx, self.w, x)[0]
        return x

    def loss(self, x: np.ndarray, target: np.ndarray) -> float:
        return self.model.loss.forward(self.ctx, self.output(x), target)[0]

    def gradients(self, x: np.ndarray, target: np.ndarray, policy: str | Recompute = "none",
                  scale: float = 1.0) -> tuple[float, Arrays]:
        """Forward and backward of the whole model under a recomputation policy; a tied gradient is the sum."""
        policy, losses, sums = Recompute.parse(policy), [], {}

        def turn(y: np.ndarray) -> np.ndarray:
            loss, saved = self.model.loss.forward(self.ctx, y, target)
            losses.append(loss)
            return self.model.loss.backward(self.ctx, saved, scale)

        self.ctx = replace(self.ctx, keep=policy.inside)
        for of_unit in self._through(x, policy, turn):
            for name, gradient in of_unit.items():
                sums[name] = gradient if name not in sums else sums[name] + gradient
        return losses[0], sums

    def _through(self, x: np.ndarray, policy: Recompute, turn: Callable[[np.ndarray], np.ndarray]) -> Iterator[Arrays]:
        """Forward, ``turn`` from output to gradient, and backward under a recomputation policy, as an engine does it;
        each unit's gradients."""
        units = self.model.units
        segments, kept, inputs = policy.segments(len(units)), {}, {}
        for index, unit in enumerate(units):
            if index in [segment.start for segment in segments]:
                inputs[index] = x
            x, of_unit = unit.forward(self.ctx, self.w, x)
            if not segments:
                kept[index] = of_unit
            del of_unit
        dy = turn(x)
        for segment in reversed(segments or [range(len(units))]):
            if segments:
                x = inputs.pop(segment.start)
                for index in segment:
                    x, kept[index] = units[index].forward(self.ctx, self.w, x)
            del x
            for index in reversed(segment):
                dy, gradients = units[index].backward(self.ctx, self.w, kept.pop(index), dy)
                yield gradients


def run_of(model: Model, dtype: str = "fp32", scatter: float = 0.0) -> Run:
    """The model with its first values, in the format of this name; ``scatter`` adds noise to all of them, the biases'
    zeros and the LayerNorms' ones too, which would otherwise test little."""
    ctx, recorder = recorded(dtype)
    ctx = replace(ctx, gradients=lambda unit: {name: ctx.empty(model.shapes[name], "unit_gradient", name=name)
                                               for name in (*unit.shapes, *unit.tied_weights)})
    rng, w = np.random.default_rng(1), {}
    for unit in model.units:
        for name, shape in unit.shapes.items():
            value = unit.initial(name, 0, int(np.prod(shape))).astype(np.float64)
            value = (value + scatter * rng.standard_normal(value.shape)).reshape(shape)
            w[name] = value if dtype == "fp64" else value.astype(np.float32).astype(FLOATS[dtype])
    return Run(model, ctx, w, recorder)


def batch_of(model: Model, batch: int = 2, tokens: int | None = None, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A GPT's tokens and targets (B, T), T that of the context where nothing is said; else values, in float64."""
    units, rng = model.units, np.random.default_rng(seed)
    if not units[0].integer_inputs:
        return normal("fp64", (batch, units[0].inputs), 5), normal("fp64", (batch, units[-1].outputs), 6)
    shape = (batch, tokens or model.config.context)
    return rng.integers(0, model.config.vocabulary, shape), rng.integers(0, model.config.vocabulary, shape)
