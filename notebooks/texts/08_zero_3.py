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
# # 8. ZeRO-3: weights only while they are used
#
# **The idea.** After ZeRO-2 one thing is still on every rank: the weights, 2 bytes for each parameter. But a layer
# needs only its own weights, and only while it computes. In stage 3 each rank keeps its chunk of every layer. Before a
# layer computes, an all-gather makes its weights whole on every rank; after that they are freed. Then everything at
# rest is divided by N, and the price is paid in messages: once forward, once back, for each layer. PyTorch's
# `fully_shard` is this, and its name for it is *fully sharded data parallel*, FSDP.
#
# *Sources.* Rajbhandari, Rasley, Ruwase and He 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
# Models*, section 5.3, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054). Zhao et al. 2023, *PyTorch FSDP:
# Experiences on Scaling Fully Sharded Data Parallel*, section 3, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277).

# %%
from contextlib import contextmanager

import ml_dtypes
import numpy as np

import zerosim as zs

BF16 = ml_dtypes.bfloat16  # 2 bytes per number: weights, gradients and what travels
MODEL = zs.models.MLP([12, 10] * 4 + [12], bias=False)  # eight matrices of 120 weights, ReLU between them
FIRST = list(zs.models.first_weights(MODEL).values())  # (12, 10) and (10, 12) in turn, in fp32
P = sum(w.size for w in FIRST)  # 960
LEARNING_RATE = 0.01
STEPS = 3


def batch(index, step):
    """x (4, 12), target (4, 12): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    return random.standard_normal((4, 12)).astype(BF16), random.standard_normal((4, 12)).astype(np.float32)


# %% [markdown]
# ## Predict first
#
# 1. Stage 2 sends about twice the model's bytes in a step: gradients once, updated weights once. What does stage 3
#    send?
# 2. How many layers' weights are whole on a rank at one moment?
# 3. After the update, stages 1 and 2 gather the new weights. Does stage 3?
# 4. Do the results change in the last bit?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # how many times as much as stage 2
    2: ...,  # a number
    3: ...,  # True or False
    4: ...,  # True or False
})

# %% [markdown]
# ## The model by hand, layer by layer
#
# As in notebook 7.

# %%
def wide(x):
    """The same values in fp32."""
    return x.astype(np.float32)


def forward(w, x, relu):
    """x (B, I), w (I, O) -> (B, O) in bf16"""
    y = (wide(x) @ wide(w)).astype(BF16)
    return np.where(y > 0, y, BF16(0)) if relu else y


def backward(w, x, dy):
    """x (B, I), dy (B, O) -> dx (B, I), through the ReLU that made x, and dw (I, O); both in bf16"""
    dx = (wide(dy) @ wide(w).T).astype(BF16)
    return np.where(x > 0, dx, BF16(0)), (wide(x).T @ wide(dy)).astype(BF16)


def adam(w, m, v, g, step):
    """One update in fp32, in place, of as many weights as there are."""
    m[:] = 0.9 * m + (1 - 0.9) * g
    v[:] = 0.999 * v + (1 - 0.999) * (g * g)
    w -= LEARNING_RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


# %% [markdown]
# ## A lifetime is an indentation
#
# By hand, the whole of stage 3 is this: inside the `with` block a layer's weights are there, after it they are not.
# (What is gathered at a time is called a *unit*: here a layer, in a transformer a block.) `rank.memory.alloc` makes an
# array and enters it in the rank's memory, and `free` takes it out again.

# %%
@contextmanager
def gathered(rank, chunk, shape):
    """A layer's weights (I, O), of which each rank has a chunk: made whole on entry, freed on exit."""
    whole = rank.memory.alloc(chunk.size * rank.size, BF16, "gathered_parameter")
    rank.all_gather(chunk, out=whole, purpose="parameters")
    yield whole.reshape(shape)
    rank.memory.free(whole)


def train_by_hand(rank):
    """STEPS steps of one rank, which returns all that it keeps: its chunks of weights, master, m and v."""
    shapes = [w.shape for w in FIRST]
    master = [np.split(w.ravel(), rank.size)[rank.index].copy() for w in FIRST]
    weights = [w.astype(BF16) for w in master]
    m, v = [np.zeros_like(w) for w in master], [np.zeros_like(w) for w in master]
    for step in range(1, STEPS + 1):
        x, target = batch(rank.index, step)
        inputs, gradient = [], {}
        for i, shape in enumerate(shapes):
            inputs.append(x)
            with gathered(rank, weights[i], shape) as w:
                x = forward(w, x, relu=i < len(shapes) - 1)
        dy = ((wide(x) - target) / np.float32(len(x))).astype(BF16)
        for i in reversed(range(len(shapes))):
            with gathered(rank, weights[i], shapes[i]) as w:
                dy, dw = backward(w, inputs.pop(), dy)
            gradient[i] = rank.reduce_scatter(dw.ravel(), purpose="gradients")  # as in stage 2
        for i, g in gradient.items():
            adam(master[i], m[i], v[i], wide(g) / np.float32(rank.size), step)
            weights[i] = master[i].astype(BF16)
    return weights, master, m, v


# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **No.** The next forward gathers anyway, layer by layer. So stage 3 has no all-gather after the update, and no second
# copy of any weight.
# </details>

# %%
def held(found):
    """Bytes of the weights, of a gradient in bf16 for each, and of master, m and v."""
    weights, master, m, v = found
    return sum(array.nbytes for arrays in (weights, weights, master, m, v) for array in arrays)


cluster = zs.Cluster(4)
by_hand = cluster.run(train_by_hand)
peak = cluster.memory[0].peak_nbytes_of(["gathered_parameter"])
sent = [cluster.trace.sent_nbytes(purpose)[0] // STEPS for purpose in ("gradients", "parameters")]
gathers = len(cluster.trace[0].collectives("all_gather", "parameters")) // STEPS
predictions.reveal(1, sum(sent) / (2 * 2 * P * 3 // 4))
predictions.reveal(2, peak / (2 * FIRST[0].size))
predictions.reveal(3, gathers > 2 * len(FIRST))  # more than each layer's, in forward and in backward

# %%
columns = ["N = 4, bytes on each rank", "at rest", "whole weights", "sent for gradients", "for weights"]
zs.draw.table(columns, [
    ("stage 0, by formula", 16 * P, 2 * P, 2 * 2 * P * 3 // 4, 0),
    ("stage 1, by formula", 4 * P + 12 * P // 4, 2 * P, 2 * P * 3 // 4, 2 * P * 3 // 4),
    ("stage 2, by formula", 2 * P + 14 * P // 4, 2 * P, 2 * P * 3 // 4, 2 * P * 3 // 4),
    ("stage 3, by hand", held(by_hand[0]), peak, *sent)])

# %% [markdown]
# Every collective sends $(N-1)/N$ of the vector, here three quarters.
#
# <details><summary>Answers to questions 1 and 2</summary>
#
# So stage 3 sends **one and a half times as much as the others**: 3 · 0.75 times the model where they send 2 · 0.75.
# "Three times the model" is the limit for many ranks. And **one layer at a time** is whole on a rank: 240 bytes of
# 1,920.
# </details>
#
# ## The price in messages
#
# With many layers the gathers are many small messages, each of which takes its time to begin. The usual answer is to
# communicate while computing (*overlap*), and above all to ask for the next layer's weights while this one computes
# (*prefetch*): the second part of the picture, on the clock of a made-up machine (notebook 11). Two layers' weights are
# whole then, and the program waits about a quarter as long.

# %%
options = {"Waiting": {},
           "Overlapped, and each unit is gathered one ahead": {"overlap": True, "prefetch": 1}}
zs.draw.timeline(stage=3, options=options)

# %% [markdown]
# FSDP in PyTorch does both by itself. It keeps whole, between forward and backward, what is not wrapped in a layer of
# its own, since that is needed again at once; and it cuts each parameter along its first dimension, where we cut the
# flat vector.
#
# ## Try it
#
# * Indent `gradient[i] = ...` so that it stands inside the `with` block. Do bits change? Does a peak?
# * `zs.Cluster(4, debug=True).run(train_by_hand)` fills freed memory with NaN. Let `backward` stand after the `with`
#   block. What do the masters say? And without `debug`?
# * Do not free: leave out `rank.memory.free(whole)`. When do weights disappear now, and what says the proof?
# * Keep the last layer whole from forward to backward, as FSDP can. Count the bytes sent, then those held. (The
#   package's engine calls it `keep_gathered`.)
# * In a shell: `zerosim replay --stage 3 --hops` is the step of notebook 1 at stage 3, number by number.
#
# ## Proof
#
# By hand and by the package's engine at stage 3: the same bits, the same bytes sent and the same peak of gathered
# weights, for 1 to 8 ranks. And question 4: stage 0.
#
# <details><summary>Answer to question 4</summary>
#
# **No**: they have the bits of stage 0.
# </details>

# %%
def train_by_engine(rank, stage):
    """The same steps by the package: of each layer weights, master, m and v; its bytes."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(lr=LEARNING_RATE), stage=stage, policy="bf16")
    for step in range(1, STEPS + 1):
        engine.step([batch(rank.index, step)])
    nbytes = rank.memory.now_nbytes, rank.memory.peak_nbytes_of(["gathered_parameter"])
    states = [engine.state(name) for name in MODEL.shapes]
    return [[state[key] for state in states] for key in ("parameter", "master", "m", "v")], nbytes


plain = zs.Cluster(4).run(train_by_engine, 0)[0][0]
whole = [np.concatenate(parts) for parts in zip(*(masters for _, masters, *_ in by_hand), strict=True)]
predictions.reveal(4, any(one.tobytes() != other.tobytes()
                          for one, other in zip(whole, plain[1], strict=True)))

# %%
print("measured:")
for ranks in (1, 2, 3, 4, 5, 8):
    hand, package, plain = (zs.Cluster(ranks) for _ in range(3))
    mine, theirs = hand.run(train_by_hand), package.run(train_by_engine, 3)
    stage_0 = plain.run(train_by_engine, 0)
    for kind in (0, 1, 2, 3):  # weights, master, m, v: the chunks of all ranks
        for i in range(len(FIRST)):
            whole = np.concatenate([of_rank[kind][i] for of_rank in mine])
            assert whole.tobytes() == theirs[0][0][kind][i].tobytes(), (ranks, kind, i)
            assert whole.tobytes() == stage_0[0][0][kind][i].tobytes(), (ranks, kind, i)
    peaks = [memory.peak_nbytes_of(["gathered_parameter"]) for memory in hand.memory]
    assert list(zip(map(held, mine), peaks, strict=True)) == [nbytes for _, nbytes in theirs], ranks
    for purpose in ("gradients", "parameters"):
        assert hand.trace.sent_nbytes(purpose) == package.trace.sent_nbytes(purpose)
    print(f"N = {ranks}: by hand and at stage 3 the same bits and bytes; and the bits of stage 0")
