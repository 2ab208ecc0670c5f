"""Every layer as one row: what goes in, its two functions, what it means, what it saves.

Legend: B batch, T tokens, C channels, H heads, V vocabulary, M rows, I inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.models import meaning
from tests.models.contexts import normal
from tests.ranks.data import FLOATS
from zerosim.models import Context, layers, llama
from zerosim.numerics import random

Arrays = dict[str, np.ndarray]
TOKENS = np.array([[4, 0, 4, 1], [1, 1, 2, 0]])  # no token names row 3


@dataclass(frozen=True)
class Layer:
    """``forward(ctx, arrays)`` -> (y, saved); ``backward(ctx, arrays, saved, dy)`` -> gradients, by array;
    ``paper(arrays)`` -> y in float64, as its paper has it.

    ``shapes`` are those of the arrays, x first, and ``large`` those of a case in which statistics make sense;
    ``beside`` gives the bytes that forward charges beside y, of arrays in fp16. ``rounds_inside``: what is multiplied a
    second time is rounded before.
    """

    shapes: dict[str, tuple[int, ...]]
    forward: Callable[[Context, Arrays], tuple[np.ndarray, Any]]
    backward: Callable[[Context, Arrays, Any, np.ndarray], Arrays]
    paper: Callable[[Arrays], np.ndarray]
    large: dict[str, tuple[int, ...]]
    beside: Callable[[Arrays], int] = lambda arrays: 0
    takes_out: bool = False
    rounds_inside: bool = False

    def arrays(self, name: str, *, large: bool = False, seed: int = 0) -> Arrays:
        """Normal values in this format."""
        shapes = self.large if large else self.shapes
        return {key: normal(name, shape, seed + number) for number, (key, shape) in enumerate(shapes.items())}


def _spare(ctx: Context, arrays: Arrays, *names: str) -> list[np.ndarray]:
    """Arrays into which gradients of these are written."""
    return [ctx.kernels.empty(arrays[name].shape, arrays[name].dtype) for name in names]


def _linear(shapes: dict[str, tuple[int, ...]], large: dict[str, tuple[int, ...]]) -> Layer:
    def backward(ctx: Context, a: Arrays, saved: Any, dy: np.ndarray) -> Arrays:
        found = dict(zip([n for n in a if n != "x"], _spare(ctx, a, *(n for n in a if n != "x")), strict=True))
        return {"x": layers.linear_backward(ctx, a["w"], saved, dy, found["w"], found.get("b"))} | found

    return Layer(shapes, lambda ctx, a, **out: layers.linear_forward(ctx, a["x"], a["w"], a.get("b"), **out), backward,
                 lambda a: a["x"] @ a["w"] + a.get("b", 0), large, takes_out=True)


def _norm(paper: Callable[..., np.ndarray], shape: tuple[int, ...], large: tuple[int, ...], *names: str) -> Layer:
    def backward(ctx: Context, a: Arrays, saved: Any, dy: np.ndarray) -> Arrays:
        found = dict(zip(names, _spare(ctx, a, *names), strict=True))
        return {"x": layers.norm_backward(ctx, a["w"], saved, dy, *found.values())} | found

    return Layer({"x": shape} | dict.fromkeys(names, shape[-1:]),
                 lambda ctx, a, **out: layers.norm_forward(ctx, *a.values(), **out), backward,
                 lambda a: paper(*a.values(), 1e-5), {"x": large} | dict.fromkeys(names, large[-1:]),
                 lambda a: len(names) * 4 * a["x"].size // a["w"].size, takes_out=True)


def _embedding_backward(ctx: Context, a: Arrays, saved: Any, dy: np.ndarray) -> Arrays:
    (dw,) = _spare(ctx, a, "w")
    layers.embedding_backward(ctx, saved, dy, dw)
    return {"w": dw}


def _elementwise(name: str, paper: Callable[[np.ndarray], np.ndarray], beside: Callable[[Arrays], int],
                 **options: Any) -> Layer:
    forward, backward = getattr(layers, f"{name}_forward"), getattr(layers, f"{name}_backward")
    return Layer({"x": (5, 7)}, lambda ctx, a, **out: forward(ctx, a["x"], **out, **options),
                 lambda ctx, a, saved, dy: {"x": backward(ctx, saved, dy, **options)}, lambda a: paper(a["x"]),
                 {"x": (70001,)}, beside, takes_out=True)


def _attention(keep: str, beside: Callable[[Arrays], int], heads: int = 3, shared: int | None = None) -> Layer:
    def paper(a: Arrays) -> np.ndarray:
        keys = shared or heads
        of_all = meaning.heads_of(a["x"], 36 // (heads + 2 * keys))
        return meaning.attention(of_all[:heads], of_all[heads:-keys], of_all[-keys:])

    def forward(ctx: Context, a: Arrays) -> tuple[np.ndarray, Any]:
        return layers.attention_forward(replace(ctx, keep=keep), a["x"], heads, shared)

    return Layer({"x": (2, 7, 36)}, forward,
                 lambda ctx, a, saved, dy: {"x": layers.attention_backward(ctx, saved, dy)}, paper,
                 {"x": (1, 150, 36)}, beside, rounds_inside=True)


def _dropped(x: np.ndarray) -> np.ndarray:
    words = random.bits((0, "dropout of micro-batch 0", 0, "here"), 0, x.size).reshape(x.shape)
    return np.where(words < 2**30, 0, x / 0.75)


LAYERS: dict[str, Layer] = {
    "linear": _linear({"x": (3, 4), "w": (4, 5), "b": (5,)}, {"x": (64, 64), "w": (64, 16), "b": (16,)}),
    "linear without bias": _linear({"x": (3, 4), "w": (4, 5)}, {"x": (64, 64), "w": (64, 16)}),
    "embedding": Layer({"w": (5, 3)}, lambda ctx, a: layers.embedding_forward(ctx, TOKENS, a["w"]), _embedding_backward,
                       lambda a: a["w"][TOKENS], {"w": (5, 300)}),
    "layernorm": _norm(meaning.layernorm, (2, 3, 5), (300, 64), "w", "b"),
    "relu": _elementwise("relu", meaning.relu, lambda a: -(-a["x"].size // 8)),
    "gelu": _elementwise("gelu", meaning.gelu, lambda a: 0),
    "exact gelu": _elementwise("gelu", meaning.exact_gelu, lambda a: 0, exact=True),
    "dropout": Layer({"x": (5, 7)}, lambda ctx, a: layers.dropout_forward(ctx, a["x"], 0.25, "here"),
                     lambda ctx, a, saved, dy: {"x": layers.dropout_backward(ctx, saved, dy, 0.25)},
                     lambda a: _dropped(a["x"]), {"x": (70001,)}),
    "attention": _attention("all", lambda a: 2 * len(a["x"]) * 3 * a["x"].shape[1] ** 2),
    "attention again": _attention("selective", lambda a: 0),
    "attention tiled": _attention("tiled", lambda a: 4 * len(a["x"]) * 3 * a["x"].shape[1]),
    "attention of shared keys": _attention("all", lambda a: 2 * len(a["x"]) * 6 * a["x"].shape[1] ** 2, 6, 3),
    "attention of one key, again": _attention("selective", lambda a: 0, 4, 1),
    "attention of one key, tiled": _attention("tiled", lambda a: 4 * len(a["x"]) * 4 * a["x"].shape[1], 4, 1),
    "rmsnorm": _norm(meaning.rmsnorm, (6, 5), (300, 64), "w"),
    "rmsnorm of heads": _norm(meaning.rmsnorm, (3, 2, 4), (100, 3, 64), "w"),
    "swiglu": Layer({"x": (5, 14)}, lambda ctx, a: llama.swiglu_forward(ctx, a["x"]),
                    lambda ctx, a, saved, dy: {"x": llama.swiglu_backward(ctx, saved, dy)},
                    lambda a: meaning.swiglu(*np.split(a["x"], 2, -1)), {"x": (701, 200)}),
}


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    """float64 values in a format, by way of fp32."""
    return x.astype(np.float32).astype(FLOATS[name])
