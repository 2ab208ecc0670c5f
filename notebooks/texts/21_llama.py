# ---
# jupyter:
#   jupytext:
#     formats: ipynb,texts//py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 21. Llama: four parts of a block
#
# **The idea.** A block of a Llama is a block of GPT-2 with four parts changed: *RMSNorm* for LayerNorm, *rotary
# positions* for a table of positions, heads that share keys and values (*grouped-query attention*), and a gate in the
# feed-forward network (*SwiGLU*). What each is good for is a matter of training. What each costs can be counted. We
# write the block forward and back, and count.
#
# *Sources.* Touvron et al. 2023, *Llama 2*, section 2.2, [arXiv:2307.09288](https://arxiv.org/abs/2307.09288); of the
# parts: Zhang & Sennrich 2019, *RMSNorm*, section 3, [arXiv:1910.07467](https://arxiv.org/abs/1910.07467); Su et al.
# 2021, *RoFormer*, section 3.4, [arXiv:2104.09864](https://arxiv.org/abs/2104.09864); Ainslie et al. 2023, *GQA*,
# section 2.2, [arXiv:2305.13245](https://arxiv.org/abs/2305.13245); Shazeer 2020, *GLU Variants*, section 2,
# [arXiv:2002.05202](https://arxiv.org/abs/2002.05202).

# %%
import numpy as np

import zerosim as zs
from zerosim.display.drawing import LIGHT, Drawing

EPSILON, BASE = 1e-5, 10_000.0

# %% [markdown]
# ## Predict first
#
# B sequences of T tokens, C channels, H heads of D = C/H channels for queries and S heads for keys and values. GPT-2
# has S = H, and F = 4C channels between its two matrices; its block keeps 14·BTC + BHT² numbers (notebook 10).
#
# 1. RMSNorm divides by the root of the mean square: no mean, no bias. What does that save of what is kept?
# 2. Rotary positions turn each query and key by an angle that grows with its place. What is kept for backward? And how
#    does the score of two tokens change if both move on by 100 places?
# 3. 32 heads of queries share 8 heads of keys and values. What becomes smaller, and does T² become cheaper?
# 4. A gate makes three matrices of two. How wide is it at as many parameters, and what does it keep?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # numbers kept for each token (LayerNorm keeps 2)
    2: ...,  # the change of the score
    3: ...,  # how many times less is kept of queries, keys and values, and True or False, as [4, True]
    4: ...,  # in multiples of C, as [4, 8]
})

# %% [markdown]
# ## Three parts, forward and back
#
# Each backward computes from what its forward was given or says. In fp32; x has a row for each token, M = BT.

# %%
def along(x, y):
    """The sum over the last axis of x·y (..., 1)."""
    return np.einsum("...n,...n->...", x, y)[..., None]


def norm(x, w):
    """x (M, C), w (C,) -> y (M, C), and a number for each row."""
    scale = 1 / np.sqrt(along(x, x) / np.float32(x.shape[-1]) + np.float32(EPSILON))
    return x * scale * w, scale


def norm_back(x, scale, w, dy):
    """dy (M, C) -> dx (M, C), dw (C,)"""
    normal, g = x * scale, dy * w
    return (g - normal * (along(g, normal) / np.float32(x.shape[-1]))) * scale, (dy * normal).sum(axis=0)


def turned(x, sign=1):
    """x (B, h, T, D): channels i and i + D/2 turned by t·BASE^(-2i/D) at place t; back with sign=-1."""
    half = x.shape[3] // 2
    angles = np.outer(np.arange(x.shape[2]), BASE ** (-np.arange(0, 2 * half, 2) / (2 * half)))
    cos, sin = np.cos(angles).astype(np.float32), sign * np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q, k, v):
    """q (B, H, T, D), k and v (B, S, T, D) -> o (B, H, T, D), and the probabilities p (B, H, T, T)."""
    share = q.shape[1] // k.shape[1]
    scores = q @ np.repeat(k, share, axis=1).swapaxes(2, 3) * np.float32(q.shape[3]**-0.5)
    scores[..., np.triu(np.ones(scores.shape[2:], bool), 1)] = -np.inf  # nobody sees what comes later
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= np.einsum("...n->...", p)[..., None]
    return p @ np.repeat(v, share, axis=1), p


def attention_back(q, k, v, p, do):
    """do (B, H, T, D) -> dq (B, H, T, D), dk and dv (B, S, T, D): of the heads that share, the sum."""
    share = q.shape[1] // k.shape[1]
    dp = do @ np.repeat(v, share, axis=1).swapaxes(2, 3)
    ds = (dp - along(p, dp)) * p * np.float32(q.shape[3]**-0.5)
    dk, dv = ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
    return ds @ np.repeat(k, share, axis=1), *(sum(x[:, i::share] for i in range(share)) for x in (dk, dv))


q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 64)).astype(np.float32)
q, k = (turned(np.repeat(one, 1200, axis=2))[0, 0] for one in (q, k))  # the same vector at each place
predictions.reveal(1, norm(q, np.ones(64, np.float32))[1].shape[1])
predictions.reveal(2, round(float(q[101] @ k[100] - q[1] @ k[0]), 3))

# %%
print("measured:")
for apart in (0, 1, 100):
    scores = [f"{q[place + apart] @ k[place]:.4f}" for place in (0, 100, 1000)]
    print(f"the score {apart:3} places apart, from place 0, 100, 1,000 on:", *scores)

# %% [markdown]
# <details><summary>Answers to questions 1 and 2</summary>
#
# **One number a token in place of two**, mean and deviation, and no bias: next to nothing. Question 2: **nothing is
# kept for it**, since a rotation's transpose is its inverse: backward turns gradients back. Two rotations make one, by
# the difference of the angles, so that a score knows how far apart two tokens are, and not where.
# </details>
#
# Which channels make a pair is a convention. RoFormer's are neighbors, 2i and 2i + 1 (equation 15), and so are those of
# Meta's own code for Llama. A Llama of `transformers` pairs i with i + D/2 (`rotate_half`), as here: when weights are
# converted, the rows of queries and keys change places. Scores are the same either way, up to rounding.
#
# ## The block
#
# The gate is in its last lines: silu(gate)·up, of a product that is twice as wide.

# %%
def heads(x, B, D):
    """x (M, h·D) -> (B, h, T, D)"""
    return x.reshape(B, len(x) // B, -1, D).swapaxes(1, 2)


def rows(x):
    """(B, h, T, D) -> (M, h·D)"""
    return x.swapaxes(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def block(w, x, B, D):
    """x (M, C) -> y (M, C), and what backward needs, by name; w: six arrays of weights by name."""
    H = w["projection"].shape[0] // D
    h, scale_1 = norm(x, w["norm_1"])
    every = heads(h @ w["qkv"], B, D)
    S = (every.shape[1] - H) // 2
    qkv = rows(np.concatenate([turned(every[:, :H + S]), every[:, H + S:]], axis=1))
    o, p = attention(*np.split(heads(qkv, B, D), [H, H + S], axis=1))
    middle = rows(o) @ w["projection"] + x
    h, scale_2 = norm(middle, w["norm_2"])
    gate_up = h @ w["gate_up"]
    gate, up = np.split(gate_up, 2, axis=1)
    z = gate / (np.exp(-gate) + 1) * up
    kept = {"x": x, "scale 1": scale_1, "qkv": qkv, "p": p, "o": rows(o), "mid": middle,
            "scale 2": scale_2, "gate, up": gate_up, "product": z}
    return z @ w["down"] + middle, kept


def block_back(w, kept, dy, B, D):
    """dy (M, C) -> dx (M, C), and the weights' gradients by name."""
    x, scale_1, qkv, p, o, middle, scale_2, gate_up, z = kept.values()
    H, dw, dz = p.shape[1], {"down": z.T @ dy}, dy @ w["down"].T
    S = (qkv.shape[1] // D - H) // 2
    (gate, up), s = np.split(gate_up, 2, axis=1), 1 / (np.exp(-gate_up[:, :z.shape[1]]) + 1)
    dh = np.concatenate([(gate * (1 - s) + 1) * s * (dz * up), gate / (np.exp(-gate) + 1) * dz], axis=1)
    dw["gate_up"] = (middle * scale_2 * w["norm_2"]).T @ dh  # the norm's output is made again
    dh, dw["norm_2"] = norm_back(middle, scale_2, w["norm_2"], dh @ w["gate_up"].T)
    dy = dh + dy
    dw["projection"] = o.T @ dy
    do = heads(dy @ w["projection"].T, B, D)
    dq, dk, dv = attention_back(*np.split(heads(qkv, B, D), [H, H + S], axis=1), p, do)
    dh = rows(np.concatenate([turned(dq, -1), turned(dk, -1), dv], axis=1))
    dw["qkv"] = (x * scale_1 * w["norm_1"]).T @ dh
    dh, dw["norm_1"] = norm_back(x, scale_1, w["norm_1"], dh @ w["qkv"].T)
    return dh + dy, dw


# %% [markdown]
# ## At the size of a Llama
#
# What `kept` holds for each token, and what a block costs at T = 2,048 in bf16: GPT-2's at 4,096 channels, that of
# Llama 2 7B, the same with 8 heads of keys and values for 32 of queries, and that of Llama 3 8B.

# %%
def kept_numbers(T, C, H, S, F, matrices=3):
    """For each token, by name; of GPT-2 "gate, up" is what the GELU is given, "product" its output."""
    return {"x": C, "qkv": C * (H + 2 * S) // H, "o": C, "mid": C, "gate, up": (matrices - 1) * F,
            "product": F, "p": H * T}


T, C, H = 2048, 4096, 32
BLOCKS = {"GPT-2's": (H, 4 * C, 2), "Llama 2's": (H, 11_008, 3), "with 8 shared": (8, 11_008, 3),
          "Llama 3's": (8, 14_336, 3)}  # S, F, and the matrices of the feed-forward network
counted, lines = {what: kept_numbers(T, C, H, *sizes) for what, sizes in BLOCKS.items()}, []
for what, (_, F, matrices) in BLOCKS.items():
    weights = C * (counted[what]["qkv"] + C + matrices * F)  # of the matrices
    lines.append((what, f"{weights / 1e6:.1f}", f"{2 * T * sum(counted[what].values()) / 1e6:.1f}",
                  f"{T * (2 * weights + 4 * T * C) / 1e9:.1f}"))
few, many = counted["with 8 shared"], counted["Llama 2's"]
predictions.reveal(3, [many["qkv"] / few["qkv"], few["p"] < many["p"]])
predictions.reveal(4, [BLOCKS["Llama 2's"][1] / C, (many["gate, up"] + many["product"]) / C], within=0.05)

# %%
zs.draw.table(["block", ">weights (M)", ">kept (MB)", ">operations of products, forward (G)"], lines)

# %%
TITLE = "Numbers that a block keeps for each token, in multiples of its channels"
with LIGHT.figure(11, 4.2, TITLE) as figure:
    axes = figure.add_axes((0.13, 0.12, 0.85, 0.72))
    for row, numbers in enumerate(counted.values()):
        ends = np.cumsum([*numbers.values()]) / C
        for color, (end, (name, number)) in enumerate(zip(ends, numbers.items(), strict=True)):
            axes.barh(row, -number / C, left=end, color=f"C{color}", alpha=0.5, height=0.7)
            words = f"{name}\n{number / C:.3g}"
            axes.text(end - number / C / 2, row, words, ha="center", va="center", size=10)
    axes.set(xlim=(0, 31.2), yticks=range(len(counted)), yticklabels=counted)
    axes.invert_yaxis()
Drawing("llama-blocks", "What a block keeps", "For each token, by tensor, four blocks.", LIGHT, figure)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **The weights and what is kept of queries, keys and values, both by half of qkv**, and the operations of that product.
# The probabilities are a matter of the 32 heads that ask: neither their bytes nor the operations with T² change. (What
# a model that writes remembers of each token, its keys and values, is a fourth.)
# </details>
#
# <details><summary>Answer to question 4</summary>
#
# Three matrices of 8C/3 have the parameters of two of 4C. They keep gate, up and their product, 3 · 8C/3, which is
# GPT-2's 4C before its GELU and 4C after it. Llama 2's 11,008 are a little more than 8C/3, Llama 3's 14,336 are 3.5C.
# </details>
#
# ## Try it
#
# * Turn values too, in `block`. Which bits change, and does a score still depend on the distance alone?
# * Let `turned` pair neighbors, RoFormer's way. Who notices, and which order of the weights' columns mends it?
# * Keep only gate and up, and make the product again in `block_back`. How many bytes and operations is that?
# * In a shell: `zerosim train --model llama-micro --stage 3 --steps 20`.
#
# ## Proof
#
# By hand and by the package, in fp32: the same bits of the block's output, of the gradient of its input, and of those
# of its six weights; the same bytes kept, tensor by tensor; and those of the formula.

# %%
def by_package(rank, config, w, x, dy, B):
    """y, dx and the gradients of the weights; bytes of each array that forward made and did not free."""
    model = zs.models.decoder(config)
    unit, ctx = model.units[1], zs.Engine(rank, model, zs.optim.SGD(lr=0.1), policy="fp32").context()
    weights = dict(zip(unit.shapes, w.values(), strict=True))
    own = ctx.empty((B, config.context, config.channels), name="x")
    own[...] = x.reshape(own.shape)
    y, kept = unit.forward(ctx, weights, own)
    alive = [life.nbytes for life in rank.trace.lifetimes("activation") if life.died is None]
    dx, gradients = unit.backward(ctx, weights, kept, dy.reshape(y.shape))
    return [y, dx, *gradients.values()], alive


for B, T, C, H, S, F in ((2, 8, 12, 2, 1, 20), (1, 16, 32, 4, 4, 24), (2, 32, 24, 4, 2, 64)):
    shapes = {"norm_1": (C,), "qkv": (C, (H + 2 * S) * C // H), "projection": (C, C),
              "norm_2": (C,), "gate_up": (C, 2 * F), "down": (F, C)}
    random = np.random.default_rng(T)
    w = {name: random.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    x, dy = random.standard_normal((2, B * T, C)).astype(np.float32)
    y, kept = block(w, x, B, C // H)
    dx, dw = block_back(w, kept, dy, B, C // H)
    config = zs.models.LlamaConfig(1, C, H, T, vocabulary=1, key_value_heads=S, feed_forward=F)
    theirs, alive = zs.Cluster(1).run(by_package, config, w, x, dy, B)[0]
    for mine, other in zip([y, dx, *(dw[name] for name in w)], theirs, strict=True):
        assert mine.tobytes() == other.tobytes(), (B, T, C, H, S, F)
    assert sorted(alive) == sorted(one.nbytes for one in (y, *kept.values()))
    numbers = kept_numbers(T, C, H, S, F)
    assert B * T * (sum(numbers.values()) + 2) == sum(one.size for one in kept.values())
    print(f"{H} heads, {S} of keys and values: by hand and by the package the same bits, and bytes kept")
