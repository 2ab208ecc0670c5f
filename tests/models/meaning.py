"""What each layer and model computes, in float64 from its paper; imports nothing of zerosim.

Only `slope` knows derivatives: every function here goes on to complex numbers, and an imaginary part that is tiny comes
out as the derivative along it, exact but for rounding (Squire & Trapp 1998, "Using complex variables to estimate
derivatives of real functions", section 2). So a backward is held to what a layer means, and not to its own forward.

Legend: B batch, T tokens, C channels, D channels of a head, F channels inside a feed-forward network, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Drop = Callable[[str, Array], Array]
TINY = 1e-30


def slope(function: Callable[[Array], Any], x: Array, direction: Array) -> float:
    """The derivative of a number that is a function of x, along a direction of x's shape."""
    return float(function(x + 1j * TINY * direction).imag / TINY)


def gradient(function: Callable[[Array], Any], x: Array) -> Array:
    """The derivatives of a number by every element of x, one at a time."""
    single = np.eye(x.size).reshape(x.size, *x.shape)
    return np.array([slope(function, x, direction) for direction in single]).reshape(x.shape)


# -- Layers ------------------------------------------------------------------------------------------------------------


def linear(x: Array, w: Weights, name: str) -> Array:
    """x W, and a bias where there is one."""
    return x @ w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def layernorm(x: Array, w: Array, b: Array, epsilon: float) -> Array:
    """Ba et al. 2016 (arXiv:1607.06450), section 3: the variance is a mean over the C channels, ε stands in the
    root."""
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered * centered).mean(-1, keepdims=True) + epsilon) * w + b


def rmsnorm(x: Array, w: Array, epsilon: float) -> Array:
    """Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4, with Llama's ε in the root."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * w


def relu(x: Array) -> Array:
    """Whoever is not positive is 0."""
    return np.where(x.real > 0, x, 0)


def gelu(x: Array) -> Array:
    """The tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2), which is GPT-2's."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def exact_gelu(x: Array) -> Array:
    """x·Φ(x) of the same section; Φ(x) = erfc(-x/√2)/2, whose slope is the normal density."""
    distribution = np.vectorize(lambda v: math.erfc(-v / math.sqrt(2)) / 2)(x.real)
    return x * (distribution + 1j * x.imag * np.exp(-x.real**2 / 2) / math.sqrt(2 * math.pi))


def swiglu(gate: Array, up: Array) -> Array:
    """Shazeer 2020 (arXiv:2002.05202), equation 6, β = 1: the gate goes through the sigmoid, and up does not."""
    return gate / (1 + np.exp(-gate)) * up


# -- Attention: of lists of heads (B, T, D) ----------------------------------------------------------------------------


def heads_of(x: Array, width: int) -> list[Array]:
    """The heads that lie side by side in x."""
    return np.split(x, x.shape[-1] // width, axis=-1)


def attention(queries: list[Array], keys: list[Array], values: list[Array]) -> Array:
    """Vaswani et al. 2017 (arXiv:1706.03762), equation 1, of every place over itself and its past, heads side by side.

    Neighboring queries share a key and a value (Ainslie et al. 2023, arXiv:2305.13245, figure 2).
    """
    heads = []
    for number, query in enumerate(queries):
        key, value = (x[number * len(x) // len(queries)] for x in (keys, values))
        weights = np.tril(np.exp(query @ key.swapaxes(1, 2) / math.sqrt(query.shape[2])))  # (B, T, T)
        heads.append(weights / weights.sum(2, keepdims=True) @ value)
    return np.concatenate(heads, -1)


def frequencies(width: int, base: float, factor: float = 1.0, low: float | None = None, high: float = 0.0,
                original_context: float = 0.0) -> Array:
    """θ of the D/2 planes of a head (Su et al. 2021, arXiv:2104.09864, section 3.2.2).

    ``factor`` divides the places (Chen et al. 2023, arXiv:2306.15595, equation 4). With ``low`` and ``high`` it is
    Llama 3.1's, by the wavelength of each plane (https://github.com/meta-llama/llama-models, models/llama3/model.py,
    `apply_scaling`).
    """
    found = []
    for plane in range(width // 2):
        theta = base ** (-2 * plane / width)
        if low is None:
            found.append(theta / factor)
            continue
        wavelength = 2 * math.pi / theta
        if wavelength < original_context / high:
            found.append(theta)
        elif wavelength > original_context / low:
            found.append(theta / factor)
        else:
            smooth = (original_context / wavelength - low) / (high - low)
            found.append((1 - smooth) * theta / factor + smooth * theta)
    return np.array(found)


def turned(x: Array, thetas: Array) -> Array:
    """RoFormer's equation 15 of one head, places from 0 on; a plane is channels i and i + D/2, as in Llama's files."""
    angles = np.outer(np.arange(x.shape[1]), thetas)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * np.cos(angles) - second * np.sin(angles),
                           first * np.sin(angles) + second * np.cos(angles)], -1)


# -- Losses ------------------------------------------------------------------------------------------------------------


def cross_entropy(logits: Array, target: Array, *, everywhere: bool = False) -> Any:
    """-log of the softmax at the target, averaged over the places that have one, not -1, or over all places."""
    rows, classes = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    losses = [np.log(np.exp(row).sum()) - row[one] for row, one in zip(rows, classes, strict=True) if one != -1]
    return sum(losses) / (len(classes) if everywhere else len(losses))


def half_squared_error(y: Array, target: Array) -> Any:
    """½·Σ of the squares of a row, averaged over the rows."""
    return ((y - target) ** 2).sum() / 2 / len(y)


# -- Models: what `drop` is given by name is what dropout falls on -----------------------------------------------------


def gpt(w: Weights, of: Any, tokens: Array, *, tied: bool, drop: Drop) -> Array:
    """The logits (B, T, V) of Radford et al. 2019, section 2.3: norms before each part, and one at the end."""
    def norm(x: Array, name: str) -> Array:
        return layernorm(x, w[f"{name}.weight"], w[f"{name}.bias"], of.epsilon)

    x = drop("embed", w["wte"][tokens] + w["wpe"][:tokens.shape[1]])
    for block in (f"block{number}" for number in range(of.layers)):
        q, k, v = np.split(linear(norm(x, f"{block}.ln_1"), w, f"{block}.attention.qkv"), 3, axis=-1)
        o = attention(*(heads_of(part, of.channels // of.heads) for part in (q, k, v)))
        x = x + drop(f"{block}.attention", linear(o, w, f"{block}.attention.projection"))
        h = gelu(linear(norm(x, f"{block}.ln_2"), w, f"{block}.ffn.up"))
        x = x + drop(f"{block}.ffn", linear(h, w, f"{block}.ffn.down"))
    return norm(x, "ln_f") @ (w["wte"].T if tied else w["lm_head.weight"])


def llama(w: Weights, of: Any, tokens: Array, thetas: Array, *, tied: bool, drop: Drop) -> Array:
    """The logits (B, T, V) of Touvron et al. 2023 (arXiv:2307.09288), section 2.2; of Qwen 2 and Qwen 3 where there are
    biases, and norms of each head's query and key before these are turned (arXiv:2505.09388, section 2)."""
    def norm(x: Array, name: str) -> Array:
        return rmsnorm(x, w[f"{name}.weight"], of.epsilon) if f"{name}.weight" in w else x

    x = drop("embed", w["wte"][tokens])
    for block in (f"block{number}" for number in range(of.layers)):
        heads = heads_of(linear(norm(x, f"{block}.attention_norm"), w, f"{block}.attention.qkv"), of.head_channels)
        kinds = heads[:of.heads], heads[of.heads:-of.key_value_heads], heads[-of.key_value_heads:]
        queries, keys = ([turned(norm(head, f"{block}.attention.{kind}_norm"), thetas) for head in some]
                         for kind, some in zip(("query", "key"), kinds, strict=False))
        o = attention(queries, keys, kinds[2])
        x = x + drop(f"{block}.attention", linear(o, w, f"{block}.attention.projection"))
        gate, up = np.split(linear(norm(x, f"{block}.ffn_norm"), w, f"{block}.ffn.gate_up"), 2, axis=-1)
        x = x + drop(f"{block}.ffn", linear(swiglu(gate, up), w, f"{block}.ffn.down"))
    return norm(x, "norm") @ (w["wte"].T if tied else w["lm_head.weight"])


def mlp(w: Weights, layers: int, activation: str | None, x: Array) -> Array:
    """Linear layers, and the activation between them."""
    between = {None: lambda h: h, "relu": relu, "gelu": gelu}[activation]
    for number in range(layers):
        x = linear(x if number == 0 else between(x), w, f"layer{number}")
    return x
