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
# # 7. ZeRO-2: no rank holds the whole gradient
#
# **The idea.** After ZeRO-1 an owner needs the gradient's sum for its own chunk only, and yet every rank still keeps
# its whole local gradient, 2 bytes for each parameter, until the reduction. But backward makes gradients layer by
# layer, from the last to the first. Stage 2 reduces each layer's gradient as soon as it is there, keeps its own chunk
# of the sum, and frees the rest *before the next layer's exists*. So what is left is P/N gradients at rest, and one
# layer's in passing. In PyTorch this is `fully_shard` (FSDP) with `reshard_after_forward=False`, nearly.
#
# *Source.* Rajbhandari, Rasley, Ruwase and He 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
# Models*, section 5.2, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %%
import ml_dtypes
import numpy as np

import zerosim as zs

BF16 = ml_dtypes.bfloat16  # 2 bytes per number: weights, gradients and what travels
MODEL = zs.models.MLP([12, 10] * 4 + [12], bias=False)  # eight matrices of 120 weights, ReLU between them
FIRST = list(zs.models.first_weights(MODEL).values())  # (12, 10) and (10, 12) in turn, in fp32
P = sum(w.size for w in FIRST)  # 960
LEARNING_RATE = 0.01
STEPS = 3


def batches(index, step, k):
    """k pairs of x (4, 12) and target (4, 12): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    pairs = [random.standard_normal((2, 4, 12)) for _ in range(k)]
    return [(x.astype(BF16), target.astype(np.float32)) for x, target in pairs]


# %% [markdown]
# ## Predict first
#
# 1. Eight equal layers, four ranks. A whole gradient has 2P bytes, in bf16. How many bytes of gradients does a rank of
#    stage 2 hold at most at one moment? And of stage 1?
# 2. Large batches are often done as k *micro-batches*: k times forward and back, gradients added up, then one update.
#    Stage 1 adds them up on the spot and reduces the sum, once. Stage 2 has no place where a whole sum could lie. What
#    does it send for k = 8, compared with stage 1?
# 3. Do stages 1 and 2 give the same bits? For k = 1? For k = 2?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # bytes of stage 2 and of stage 1, where P = 960, as [1920, 1920]
    2: ...,  # how many times as much as stage 1
    3: ...,  # True or False, for k = 1 and for k = 2, as [False, False]
})

# %% [markdown]
# ## The model by hand, layer by layer
#
# The model of notebook 6, now with a function for each layer's way forward and back, since stage 2 does something in
# between.

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
# ## Stage 2 by hand
#
# `rank.memory.alloc` makes an array and enters it in the rank's memory, under a kind and a name; when the array dies,
# it leaves. So we shall see which gradients were alive, and when. All of stage 2 is in the last lines of
# `micro_batch`: reduce, keep the chunk, forget the rest.

# %%
def micro_batch(rank, weights, gradient, x, target):
    """Forward and back; adds this rank's chunks of the sum over ranks to those in gradient."""
    inputs = []
    for w in weights:
        inputs.append(x)
        x = forward(w, x, relu=w is not weights[-1])
    dy = ((wide(x) - target) / np.float32(len(x))).astype(BF16)
    for i in reversed(range(len(weights))):
        whole = rank.memory.alloc(weights[i].size, BF16, "unit_gradient", f"layer {i}")
        dy, dw = backward(weights[i], inputs.pop(), dy)
        whole[:] = dw.ravel()
        gradient[i] += rank.reduce_scatter(whole, purpose="gradients")
        del whole, dw  # before the next layer's gradient is made, this one's is freed


def train_by_hand(rank, k=1):
    """STEPS steps: weights, this rank's chunks of master, m and v, and the most it held of gradients."""
    weights = [w.astype(BF16) for w in FIRST]  # whole, on every rank
    master = [np.split(w.ravel(), rank.size)[rank.index].copy() for w in FIRST]
    m, v = [np.zeros_like(w) for w in master], [np.zeros_like(w) for w in master]
    gradient = [rank.memory.alloc(w.size, BF16, "gradient") for w in master]  # its chunks alone
    for step in range(1, STEPS + 1):
        for g in gradient:
            g[:] = 0
        for x, target in batches(rank.index, step, k):
            micro_batch(rank, weights, gradient, x, target)
        for i, g in enumerate(gradient):  # from here on as in stage 1
            adam(master[i], m[i], v[i], wide(g) / np.float32(rank.size * k), step)
            rank.all_gather(master[i].astype(BF16), out=weights[i].reshape(-1), purpose="parameters")
    return weights, master, m, v, rank.memory.peak_nbytes_of(("gradient", "unit_gradient"))


cluster = zs.Cluster(4)
by_hand = cluster.run(train_by_hand)
lives = [row for row in cluster.trace[0].rows if getattr(row, "kind", None) == "unit_gradient"]
zs.draw.table(["whole gradient of", "", "bytes"],
              [(row.name, "begins" if row.nbytes > 0 else "ends", abs(row.nbytes)) for row in lives[:6]])

# %% [markdown]
# One lives at a time. That is all of stage 2. And what a rank holds of gradients at most:

# %%
predictions.reveal(1, [by_hand[0][4], 2 * (P + P // 4)])

# %%
zs.draw.table(["N = 4", "gradients at most, bytes"], [
    ("a whole gradient", 2 * P), ("one layer's", 2 * FIRST[0].size),
    ("stage 1: a whole one and a chunk of the sum, 2(P + P/4)", 2 * (P + P // 4)),
    ("stage 2 by hand", by_hand[0][4])])

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# Stage 2 holds **2(P/N + one layer) bytes, here 480 + 240**. Stage 1 holds more than the whole gradient: its own local
# one, and its chunk of the sum. The smaller a layer is beside the model, the nearer stage 2 comes to P/N. (PyTorch and
# DeepSpeed reduce several layers together, in *buckets*, to send fewer and larger messages. Then "one layer" is a
# bucket.)
# </details>
#
# In the picture: the gradients that a rank holds in the course of a step, on the clock of a made-up machine. In stage 2
# each hatched band is one layer's gradient: it comes with that layer's backward and goes with its reduction.

# %%
zs.draw.liveness()

# %% [markdown]
# ## Micro-batches: the price
#
# Question 2. Since no rank can keep a whole sum, each micro-batch's gradients must travel by themselves:

# %%
def sent_in_a_step(k):
    """Bytes that a rank sends in a step of k micro-batches by hand."""
    cluster = zs.Cluster(4)
    cluster.run(train_by_hand, k)
    return cluster.trace.sent_nbytes()[0] // STEPS


predictions.reveal(2, sent_in_a_step(8) / (2 * 2 * P * 3 // 4))

# %%
zs.draw.table(["k", "stage 1, by formula", "stage 2, by hand", "times"], [
    (k, 2 * 2 * P * 3 // 4, sent_in_a_step(k), sent_in_a_step(k) / (3 * P))
    for k in (1, 2, 8)])

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# Reductions k times instead of once, and one gather of weights: **(k+1)/2 times as much, 4.5 times for k = 8**. "ZeRO-2
# costs no communication" is true for k = 1.
# </details>
#
# ## Micro-batches: the order of additions
#
# Question 3. Stage 1 adds a rank's own gradients first and then over ranks; stage 2 adds over ranks first and then over
# micro-batches. The addends are the same and the order is not. With random numbers:

# %%
def both_orders(rank, k):
    """The sum over k micro-batches and all ranks, in stage 1's order and in stage 2's."""
    found = np.random.default_rng(rank.index).standard_normal((k, 40_000)).astype(BF16)
    stage_1, stage_2 = found[0].copy(), rank.reduce_scatter(found[0])
    for one in found[1:]:
        stage_1 += one
        stage_2 += rank.reduce_scatter(one)
    return rank.reduce_scatter(stage_1), stage_2


rows = []
for k in (1, 2, 8):
    stage_1, stage_2 = map(wide, zs.Cluster(4).run(both_orders, k)[0])
    apart = np.linalg.norm(stage_1 - stage_2) / np.linalg.norm(stage_1)
    rows.append((k, f"{np.mean(stage_1 != stage_2):.1%}", f"{apart:.2%}"))
predictions.reveal(3, [differ == "0.0%" for _, differ, _ in rows[:2]])

# %%
zs.draw.table(["k", "sums that differ", "length of the difference, beside that of the sum"], rows)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **Equal to the last bit for k = 1, and not for k = 2.** Neither order is right, each sum is within its roundings; but
# bf16 rounds coarsely, and each step goes on from where the one before has ended.
# </details>
#
# ## Try it
#
# * Leave out the `del` line. Which number changes, and which bits?
# * Add the micro-batches up in fp32 (`gradient` in `np.float32`). How much nearer are the orders of the last table
#   then, and what does it cost at rest? (The package calls it `zs.Policy("bf16", accumulate="fp32")`.)
# * Make one layer much larger: `[12, 10, 12, 1000, 12, 10, 12]`. Who decides the peak now?
# * Give the package's engine `bucket_nbytes=600`, so that several layers are reduced together: fewer messages, and what
#   else?
#
# ## Proof
#
# By hand and by the package's engine at stage 2: the same bits, the same most bytes of gradients, the same bytes sent;
# for 1 to 8 ranks and 1 to 3 micro-batches.

# %%
def train_by_engine(rank, k):
    """The same steps by the package: of each layer weights, master, m and v; its peak of gradients."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(lr=LEARNING_RATE), stage=2, policy="bf16")
    for step in range(1, STEPS + 1):
        engine.step(batches(rank.index, step, k))
    peak = rank.memory.peak_nbytes_of(("gradient", "unit_gradient"))
    states = [engine.state(name) for name in MODEL.shapes]
    return *([state[key] for state in states] for key in ("parameter", "master", "m", "v")), peak


for ranks in (1, 2, 3, 4, 5, 8):
    for k in (1, 2, 3):
        hand, package = zs.Cluster(ranks), zs.Cluster(ranks)
        mine, theirs = hand.run(train_by_hand, k), package.run(train_by_engine, k)
        for i in range(len(FIRST)):
            for one, other in zip(mine, theirs, strict=True):
                assert one[0][i].tobytes() == other[0][i].tobytes(), (ranks, k, i)
            for kind in (1, 2, 3):
                whole = np.concatenate([of_rank[kind][i] for of_rank in mine])  # of master, m, v
                assert whole.tobytes() == theirs[0][kind][i].tobytes(), (ranks, k, i, kind)
        assert [one[4] for one in mine] == [one[4] for one in theirs], (ranks, k)
        for purpose in ("gradients", "parameters"):
            assert hand.trace.sent_nbytes(purpose) == package.trace.sent_nbytes(purpose)
    print(f"N = {ranks}: by hand and by the package the same bits, peaks and bytes sent, for k = 1, 2, 3")
