"""Adam's averages m and v at rest in fewer bits: one weight's v, and the losses of a small training beside fp32's.

Every update is computed in fp32; what m and v are stored as afterwards, and come back as, is their *rest*.
Legend: n elements, R rests; B batch, I and O the inputs and outputs of a linear unit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.course.lost_updates import standing_ratios
from zerosim.course.precision_runs import format_run_network, samples
from zerosim.display.drawing import LIGHT, Drawing, Style, within_limits
from zerosim.display.style import BROWN, FORMAT_COLORS, ORANGE, PURPLE
from zerosim.models.passes import first_weights
from zerosim.numerics import random
from zerosim.numerics.arrays import Array, spans
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.quantization import Blockwise
from zerosim.numerics.rounding import round_to
from zerosim.optim import Adam, UpdateContext

TITLE = "Adam's m and v in fewer bits"
KERNELS, INT8 = NumpyKernels(), Blockwise("int8", block=256)
EXPLODED = 100.0  # times the first loss: there a training ends
WINDOW = 50  # steps whose mean loss is a point of a curve


def _linear(name: str, x: Array, step: int) -> Array:
    packed, back = np.empty(INT8.nbytes(len(x)), np.uint8), np.empty_like(x)
    INT8.quantize(KERNELS, x, packed)
    INT8.dequantize(KERNELS, packed, back)
    return back


def _dynamic(name: str, x: Array, step: int) -> Array:
    """Each block's elements as the nearest of DYNAMIC's multiples of the block's largest magnitude."""
    numbers, back = DYNAMIC[name], np.empty_like(x)
    for here in spans(len(x), INT8.block):
        largest = np.abs(x[here]).max()
        back[here] = largest * numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, x[here] / (largest or 1))]
    return back


def _dynamic_numbers(signed: bool) -> Array:
    """The 256 numbers of the dynamic data type (Dettmers et al. 2022, section 2.2, and their code): 0, 1, and the
    middles of 2^i equal parts of each decade from 1e-6·[0.1, 1] to [0.1, 1], of both signs, or twice as many."""
    edges = [np.linspace(0.1, 1, (1 if signed else 2) * 2**i + 1) for i in range(7)]
    decades = np.concatenate([10.0 ** (i - 6) * (edge[1:] + edge[:-1]) / 2 for i, edge in enumerate(edges)])
    return np.sort(np.concatenate([[0, 1], decades, -decades if signed else []])).astype(np.float32)


DYNAMIC = {"m": _dynamic_numbers(signed=True), "v": _dynamic_numbers(signed=False)}
RESTS: Mapping[str, Callable[[str, Array, int], Array]] = MappingProxyType({  # name, x (n,), step -> x that comes back
    "fp32": lambda name, x, step: x,
    "bf16": lambda name, x, step: round_to(x, "bf16"),
    "fp16": lambda name, x, step: round_to(x, "fp16"),
    "bf16, stochastic": lambda name, x, step: round_to(
        x, "bf16", "stochastic", bits=random.bits((0, "adam states", step, name), 0, len(x))),
    "8 bits, linear": _linear,
    "8 bits, dynamic": _dynamic,
})
LOOKS: Mapping[str, tuple[float, dict[str, Any]]] = MappingProxyType({  # by rest: bytes of m and v per parameter
    "fp32": (8, {"color": FORMAT_COLORS["fp32"], "linewidth": 6.0}),
    "bf16": (4, {"color": FORMAT_COLORS["bf16"]}),
    "fp16": (4, {"color": FORMAT_COLORS["fp16"], "linestyle": "--"}),
    "bf16, stochastic": (4, {"color": ORANGE}),
    "8 bits, linear": (2 * INT8.nbytes(256) / 256, {"color": BROWN, "linestyle": "--"}),
    "8 bits, dynamic": (2 * INT8.nbytes(256) / 256, {"color": PURPLE}),
})


@dataclass(frozen=True, slots=True)
class AdamStates:
    """``v`` by rest, of one weight whose g is 1 and then 0.1, so many steps each; ``losses`` by lr and seed, and rest,
    up to the one that was EXPLODED times the first, or NaN."""

    v: Mapping[str, Sequence[float]]
    losses: Mapping[tuple[float, int], Mapping[str, Sequence[float]]]

    def curve(self, condition: tuple[float, int], rest: str) -> list[float]:
        """Mean losses of WINDOW steps each, beside fp32's; empty where one of the two exploded."""
        found, exact = (np.array(self.losses[condition][name]) for name in (rest, "fp32"))
        whole = len(exact) // WINDOW * WINDOW * (_goes_on(found) and _goes_on(exact))
        beside: list[float] = np.divide(*(x[:whole].reshape(-1, WINDOW).mean(1) for x in (found, exact))).tolist()
        return beside

    def exploded(self, condition: tuple[float, int]) -> list[str]:
        """The trainings that exploded, and when."""
        return [f"{rest} explodes at step {len(losses)}" for rest, losses in self.losses[condition].items()
                if not _goes_on(losses)]


def _goes_on(losses: Sequence[float] | Array) -> bool:
    return losses[-1] <= EXPLODED * losses[0]


def adam_states_data(steps: int = 1500, conditions: Sequence[tuple[float, int]] = ((3e-4, 0), (1e-3, 1))) -> AdamStates:
    """Trains under each condition, an lr and a seed, with every rest; ValueError for fewer steps than WINDOW."""
    if steps < WINDOW:
        raise ValueError(f"losses of Adam's states are means of {WINDOW} steps; take so many or more, found {steps}")
    return AdamStates(v_of([rest for rest in RESTS if not rest.startswith("8")], [1.0] * steps + [0.1] * steps),
                      {condition: losses_of([*RESTS], *condition, steps) for condition in conditions})


def _update(rests: Sequence[str], adam: Adam, w: Array, g: Array, state: Mapping[str, Array], step: int,
            kept: Sequence[str] = ("m", "v")) -> None:
    """A step of R rests at once: all arrays (R, n); those of the state that are kept rest in their bits."""
    flat = {name: x.reshape(-1) for name, x in state.items()}
    adam.update(UpdateContext(KERNELS), w.reshape(-1), g.reshape(-1), flat, step)
    for name in kept:
        for row, rest in zip(state[name], rests, strict=True):
            row[:] = RESTS[rest](name, row, step)


def v_of(rests: Sequence[str], gradients: Sequence[float]) -> dict[str, list[float]]:
    """v of one weight after each step, by rest."""
    (w, m, v), adam, found = np.zeros((3, len(rests), 1), np.float32), Adam(), []
    for step, g in enumerate(gradients, 1):
        _update(rests, adam, w, np.full_like(w, g), {"m": m, "v": v}, step, kept=("v",))
        found.append(v[:, 0].tolist())
    return dict(zip(rests, map(list, zip(*found, strict=True)), strict=True))


@np.errstate(all="ignore")  # inf and NaN are what some come to
def losses_of(rests: Sequence[str], lr: float, seed: int, steps: int) -> dict[str, list[float]]:
    """Trains a small network by Adam on plain arrays, once with each rest, with the data of this seed, up to a loss
    EXPLODED times the first, or NaN.

    All R trainings that go on take a step together, with weights (R, I, O). Gradients are rounded from fp64 to fp32, so
    that a processor's order of additions changes no curve.
    """
    first = first_weights(format_run_network()).values()
    ends = np.cumsum([x.size for x in first])[:-1]
    w = np.tile(np.concatenate([x.ravel() for x in first]), (len(rests), 1))
    m, v = np.zeros((2, *w.shape), np.float32)
    adam, found, going = Adam(lr), {rest: list[float]() for rest in rests}, [*rests]
    for step in range(steps):
        weights = [part.reshape(-1, *x.shape)
                   for x, part in zip(first, np.split(w.astype(np.float64), ends, axis=1), strict=True)]
        losses, gradients = _pass(weights, *samples(step, seed))
        g = np.concatenate([x.reshape(len(going), -1) for x in gradients], axis=1).astype(np.float32)
        _update(going, adam, w, g, {"m": m, "v": v}, step + 1)
        for rest, loss in zip(going, losses.tolist(), strict=True):
            found[rest].append(loss)
        on = [_goes_on(found[rest]) for rest in going]
        if not any(on):
            break
        if not all(on):
            going, w, m, v = list(compress(going, on)), w[on], m[on], v[on]
    return found


def _pass(weights: Sequence[Array], x: Array, target: Array) -> tuple[Array, list[Array]]:
    """Forward and backward of linear units with ReLU between them, in fp64: weights (R, I, O), x (B, I), target (B, O)
    -> the losses (R,), each the mean over the batch of half the squared error, and the gradients of the weights."""
    inputs, y = list[Array](), x.astype(np.float64)
    for w in weights:
        inputs.append(y if not inputs else np.maximum(y, 0, out=y))
        y = inputs[-1] @ w
    dy, gradients = y - target, list[Array]()
    losses = 0.5 * np.square(dy).reshape(len(dy), -1).sum(axis=1) / len(x)
    dy /= len(x)
    for w, a in zip(reversed(weights), reversed(inputs), strict=True):
        gradients.insert(0, a.swapaxes(-1, -2) @ dy)
        dy = (dy @ w.swapaxes(-1, -2)) * (a > 0)
    return losses, gradients


def adam_states(data: AdamStates, style: Style = LIGHT) -> Drawing:
    """One weight's v, and for each condition the losses beside fp32's; a training that exploded has no curve."""
    least, most = (standing_ratios("bf16", v, Adam().beta2)[1] for v in (2 - 2.0**-7, 1.0))
    words = (f"Left: in bf16 v stands still while g² is less than {least:.1f} to {most:.1f} times v, however small g² "
             "is.\nRight: a small network's losses. In the legend: bytes of m and v for each parameter.")
    with style.figure(14, 7, TITLE, words, below=0.88) as figure:
        panels = figure.panels(1, 1 + len(data.losses), left=1.05, right=0.3, top=1.8, bottom=1.75, wspace=0.3)[0]
        for rest, v in data.v.items():
            panels[0].plot(range(1, len(v) + 1), v, **{"linewidth": 2.2} | LOOKS[rest][1])
        panels[0].set(title="v, while g is 1, then 0.1", ylabel="v", yscale="log", ylim=(data.v["fp32"][0], 2))
        for axes, condition in zip(panels[1:], data.losses, strict=True):
            for rest, (nbytes, looks) in LOOKS.items():
                curve = data.curve(condition, rest)
                axes.plot([WINDOW * place for place in range(1, len(curve) + 1)], curve,
                          label=f"{rest}: {nbytes:.3g} B", **{"linewidth": 2.2} | looks)
            axes.set(title="lr = {:g}, seed {}".format(*condition), ylabel="loss beside fp32's (ratio)", ymargin=0.3)
            axes.text(0.03, 0.03, "\n".join(data.exploded(condition)), transform=axes.transAxes)
        for axes in panels:
            axes.set_xlabel("step of the training (steps)")
            axes.grid()
            within_limits(axes)
        figure.legend(*panels[1].get_legend_handles_labels(), ncols=3, handlelength=3.2)
    half = len(data.v["fp32"]) // 2
    ends = "; ".join(f"{rest} {v[half - 1]:.2g}, then {v[-1]:.2g}" for rest, v in data.v.items())
    said = [f"With lr = {condition[0]:g}, seed {condition[1]}, the last losses beside fp32's: " + "; ".join(
        [f"{rest} {data.curve(condition, rest)[-1]:.2f}" for rest in RESTS if data.curve(condition, rest)]
        + data.exploded(condition)) + "." for condition in data.losses]
    return Drawing("adam-states", TITLE, f"Lines by step. v of one weight, whose g is 1 for {half:,} steps and 0.1 for "
                   f"as many, is at the end of each half: {ends}. {' '.join(said)}", style, figure)
