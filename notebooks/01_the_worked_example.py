# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Four weights on two ranks
#
# **The idea.** When two *ranks* (two GPUs, say) train one model, each sees other data, and the weights must move by
# the mean of the ranks' gradients. Usually both ranks compute the same update, each for all weights. ZeRO's
# observation: it is enough if rank 0 updates the first half of the weights and rank 1 the second half. Then each needs
# only its own half of the mean gradient and of the optimizer's state, which is Adam's m and v, and the result is the
# same to the last bit.
#
# A model of four weights is large enough to watch that:
#
# $$h = w_1 x_1 + w_2 x_2, \qquad a = \max(h, 0), \qquad y = w_3 a + w_4, \qquad \text{loss} = \tfrac12 (y - t)^2$$

# %%
import numpy as np

import zerosim as zs

WEIGHTS = (2, -3, 1, 0.5)
SAMPLES = (((1, 3), 5), ((2, 1), 7))  # (x1, x2), t of rank 0 and of rank 1
LEARNING_RATE = 0.1

# %% [markdown]
# ## Predict first
#
# A layer computes with weights of 16 bits (the format *fp16*). Adam updates a copy of 32 bits (*fp32*), the *master*,
# and the 16-bit weights are rounded from it; why, is the subject of notebooks 2 and 3. Both ranks start with the same
# four weights, and each updates its own two (learning rate 0.1). The mean gradients are $-5.5$, $-2.75$, $-2.75$, $-5$.
#
# 1. Which weight moves furthest in this first step?
# 2. After the two local updates, before anything more is sent: which four weights are on rank 0, which on rank 1?
#
# Write your answers down, then read on.
#
# ## The step by hand
#
# The gradient, by the chain rule. As in hardware, a layer computes in fp32 and rounds its result to fp16, once:

# %%
def gradient(weights, x, t):
    """weights (4,) fp16 -> d loss / d weights (4,) fp16"""
    half = np.float16
    (w1, w2, w3, w4), (x1, x2) = weights.astype(np.float32), np.array(x, half).astype(np.float32)
    h = half(w1 * x1 + w2 * x2)
    a = max(h, half(0))
    y = half(w3 * a + w4)
    dy = half(y - np.float32(t))
    dh = half(w3 * dy) if h > 0 else half(0)
    return half(0) + np.array([x1 * dh, x2 * dh, a * dy, dy], half)  # sums over a batch begin at 0, so none is -0


found = [gradient(np.array(WEIGHTS, np.float16), x, t) for x, t in SAMPLES]
print("rank 0:", found[0], " rank 1:", found[1], " their mean:", (found[0] + found[1]) / 2)

# %% [markdown]
# The step is plain code in which a rank says what it needs from the others. `reduce_scatter` adds up the ranks'
# vectors and leaves each rank its own half of the sum; `all_gather` puts the halves together again on every rank.
# A `Cluster` of two ranks runs it once for each; its *trace* lists what each rank did, and so what it sent.

# %%
def step_by_hand(rank):
    """One training step of one rank, which owns two of the four weights."""
    own = slice(2 * rank.index, 2 * rank.index + 2)
    weights = np.array(WEIGHTS, np.float16)  # what the layers compute with: every rank has all four
    master = np.array(WEIGHTS[own], np.float32)  # what Adam updates: each rank has its own two

    local = gradient(weights, *SAMPLES[rank.index])
    g = rank.reduce_scatter(local).astype(np.float32) / 2  # the sum in fp16, the mean in fp32

    m = (1 - 0.9) * g  # Adam's first step: m and v were 0
    v = (1 - 0.999) * (g * g)
    master -= LEARNING_RATE * (m / (1 - 0.9)) / (np.sqrt(v / (1 - 0.999)) + 1e-8)

    weights[own] = master.astype(np.float16)
    between = weights.copy()
    rank.all_gather(weights[own], out=weights)
    return {"m": m, "v": v, "master": master, "between": between, "weights": weights}


cluster = zs.Cluster(2)
by_hand = cluster.run(step_by_hand)

for index, found in enumerate(by_hand):
    print(f"rank {index}: master", found["master"], " m", found["m"], " v", found["v"])
print()
for index, found in enumerate(by_hand):
    print(f"rank {index}: fp16 after its own update", found["between"], " after the all-gather", found["weights"])
print()
print("bytes sent by each rank:", cluster.trace.sent_nbytes())

# %% [markdown]
# So: **all four weights moved by 0.1.** Adam's first step is the learning rate, whatever the size of the gradient. And
# between the update and the all-gather **the two copies disagreed**: each rank had moved only what it owns. That
# disagreement is not a mistake, it is what makes the all-gather necessary.
#
# One more thing to see. NumPy prints 2.1, and so do texts about ZeRO, but fp16 has no such number:

# %%
for value in by_hand[0]["weights"]:
    print(f"prints as {value!s}, is {float(value)}")

# %% [markdown]
# ## What travelled
#
# The same two collectives, in a picture drawn from a run: four numbers in fp16 are cut in two *chunks* of 4 bytes, and
# each rank sends one chunk in each of them. That makes the 8 bytes counted above.

# %%
from zerosim.course import figures

figures.ring(figures.ring_data(ranks=2, length=4, format="fp16"))

# %% [markdown]
# ## The same step by the package, in all four stages
#
# ZeRO's *stages* cut ever more into *shards*, one for each rank: nothing (0), master and optimizer's state (1),
# gradients too (2), the weights too (3). `Engine` runs all of them. Its `policy` names the format that layers compute
# in; the layout `"contiguous"` cuts the whole vector of weights in two, as we did.

# %%
def step_by_engine(rank, stage):
    """The same step by the package: its result, and what this rank holds afterwards."""
    engine = zs.Engine(rank, zs.models.four_weights(WEIGHTS), zs.optim.Adam(lr=LEARNING_RATE), stage=stage,
                       policy=zs.Policy("fp16"), layout="contiguous")
    x, t = SAMPLES[rank.index]
    engine.step([(np.array([x]), np.array([[t]]))])
    held = rank.memory.now_nbytes_by_kind
    state = [engine.state(name) for name in ("layer1.weight", "layer2.weight", "layer2.bias")]
    return {key: np.concatenate([one[key].ravel() for one in state]) for key in ("m", "v", "master", "parameter")}, held


by_engine = {}
for stage in zs.STAGES:
    cluster = zs.Cluster(2)
    results = cluster.run(step_by_engine, stage)
    by_engine[stage] = [whole for whole, _ in results]
    sent = [trace.sent_nbytes("gradients") + trace.sent_nbytes("parameters") for trace in cluster.trace]
    held = results[0][1]
    print(f"stage {stage}: rank 0 holds {sum(held.values())} bytes, {held}; sent by each rank: {sent}")

# %% [markdown]
# Read it downwards. *At rest*, between two steps, a rank holds 64 bytes, then 40, 36 and 32. That is sixteen bytes per
# weight when nothing is sharded (2 for the fp16 weight, 2 for its gradient, 4 for the master, 8 for m and v), and eight
# when everything is shared by two. What is sent stays at 8 bytes, 4 for gradients and 4 for weights, until stage 3,
# which fetches the weights twice: to go forward, and to go back.
#
# ## Try it
#
# * On rank 0 $h$ is negative, so three of its gradients are 0. Make $w_2 = -0.5$ and run all again: which are they now?
# * Set `LEARNING_RATE = 3e-4`. In `master` all four weights move; in fp16 only one does. Which, and why that one?
# * Drop the `/ 2`. The weights come out (almost) the same. Why? And what does the proof below say to it?
# * In a shell: `zerosim replay --stage 3 --hops` tells the same step number by number; `--ranks 3` adds a rank.
#
# ## Proof
#
# Equal means equal bits. The last cell compares the step by hand with all four stages, on both ranks, as bytes.

# %%
halves = {key: np.concatenate([found[key] for found in by_hand]) for key in ("m", "v", "master")}
for stage, ranks in by_engine.items():
    for index, whole in enumerate(ranks):
        assert whole["parameter"].tobytes() == by_hand[index]["weights"].tobytes()
        for key, value in halves.items():
            assert whole[key].dtype == value.dtype
            assert whole[key].tobytes() == value.tobytes(), (stage, index, key)
print("by hand, stages 0, 1, 2 and 3: the same bits in m, v, the fp32 master and the fp16 weights, on both ranks")
