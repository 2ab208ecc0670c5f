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
#
# *Source.* Rajbhandari, Rasley, Ruwase and He 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
# Models*, sections 3 and 5, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %%
import numpy as np

import zerosim as zs

WEIGHTS = (2, -3, 1, 0.5)
SAMPLES = (  # (x1, x2), t of rank 0 and of rank 1, in the first step and in the second
    (((1, 3), 5), ((2, 1), 7)),
    (((3, 1), 2), ((2, 1), 3)))
LEARNING_RATE = 0.1

# %% [markdown]
# ## Predict first
#
# A layer computes with weights of 16 bits (the format *fp16*). Adam updates a copy of 32 bits (*fp32*), the *master*,
# and the 16-bit weights are rounded from it; why, is the subject of notebooks 2 and 3. Both ranks start with the same
# four weights, and each updates its own two (learning rate 0.1). In the first step the mean gradients are $-5.5$,
# $-2.75$, $-2.75$, $-5$.
#
# 1. Which weight moves furthest in this first step?
# 2. After the two local updates, before anything more is sent: which four weights are on rank 0, which on rank 1?
# 3. Somebody forgets to divide the sum of the gradients by two. After the first step, which weights are wrong? And
#    after the second?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # the set of those that move furthest, as {"w1", "w2"}
    2: ...,  # the fp16 weights of rank 0 and of rank 1, as [[2.5, -3, 1, 0.5], [2, -3, 1, 1]]
    3: ...,  # how many of the four fp16 weights are wrong after step 1 and after step 2, as [4, 4]
})

# %% [markdown]
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
    found = np.array([x1 * dh, x2 * dh, a * dy, dy], half)
    return half(0) + found  # sums over a batch begin at 0, so none is -0


local = [gradient(np.array(WEIGHTS, np.float16), x, t) for x, t in SAMPLES[0]]
zs.draw.table(["gradient of", "w1", "w2", "w3", "w4"], [
    ("rank 0's sample", *local[0].tolist()), ("rank 1's sample", *local[1].tolist()),
    ("both: the mean", *((local[0] + local[1]) / 2).tolist())])

# %% [markdown]
# The step is plain code in which a rank says what it needs from the others. `reduce_scatter` adds up the ranks'
# vectors and leaves each rank its own half of the sum; `all_gather` puts the halves together again on every rank.
# A `Cluster` of two ranks runs it once for each; its *trace* lists what each rank did, and so what it sent.

# %%
def adam(master, m, v, g, step):
    """One update in fp32, in place; the factors 1 - 0.9 ** step make up for m and v having begun at 0."""
    m[:] = 0.9 * m + (1 - 0.9) * g
    v[:] = 0.999 * v + (1 - 0.999) * (g * g)
    master -= LEARNING_RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


def sgd(master, m, v, g, step):
    """The same without m and v."""
    master -= np.float32(LEARNING_RATE) * g


def train_by_hand(rank, update=adam, divisor=2):
    """Two training steps of one rank, which owns two of the four weights: what it has after each."""
    own = slice(2 * rank.index, 2 * rank.index + 2)
    weights = np.array(WEIGHTS, np.float16)  # what the layers compute with: every rank has all four
    master = np.array(WEIGHTS[own], np.float32)  # what Adam updates: each rank has its own two
    m, v = np.zeros(2, np.float32), np.zeros(2, np.float32)
    steps = []
    for step, samples in enumerate(SAMPLES, 1):
        total = rank.reduce_scatter(gradient(weights, *samples[rank.index]))
        g = total.astype(np.float32) / np.float32(divisor)  # the sum in fp16, the mean in fp32
        update(master, m, v, g, step)
        weights[own] = master.astype(np.float16)
        between = weights.copy()
        rank.all_gather(weights[own], out=weights)
        steps.append({"g": g, "m": m.copy(), "v": v.copy(), "master": master.copy(), "between": between,
                      "weights": weights.copy()})
    return steps


cluster = zs.Cluster(2)
by_hand = cluster.run(train_by_hand)
moved = np.abs(np.concatenate([steps[0]["master"] for steps in by_hand]) - WEIGHTS).round(4)
predictions.reveal(1, {f"w{i + 1}" for i in np.flatnonzero(moved == moved.max())})
predictions.reveal(2, [steps[0]["between"] for steps in by_hand])

# %%
columns = ["after step", "rank", "master", "m", "v", "fp16 after its own update", "after the all-gather"]
zs.draw.table(columns, [
    (step, rank, *(" ".join(str(number) for number in found[key])
                   for key in ("master", "m", "v", "between", "weights")))
    for step in (1, 2) for rank, found in enumerate(steps[step - 1] for steps in by_hand)])

# %% [markdown]
# <details><summary>Answers to questions 1 and 2</summary>
#
# So: **in the first step all four weights moved by 0.1.** Adam's first step is the learning rate, whatever the size of
# the gradient; from the second step on m and v remember. And between the update and the all-gather **the two copies
# disagreed**: each rank had moved only what it owns. That disagreement is not a mistake, it is what makes the
# all-gather necessary.
# </details>
#
# One more thing to see. NumPy prints 2.1, and so do texts about ZeRO, but fp16 has no such number:

# %%
zs.draw.table(["after step 1", "prints as", "is"], [
    (name, str(value), str(float(value))) for name, value in zip(
        ("w1", "w2", "w3", "w4"), by_hand[0][0]["weights"], strict=True)])

# %% [markdown]
# ## What a mistake would show
#
# Question 3, by making it: `divisor=1`, with Adam and with plain gradient descent (*SGD*).

# %%
mean, total = (zs.Cluster(2).run(train_by_hand, adam, divisor)[0] for divisor in (2, 1))
predictions.reveal(3, [np.sum(one["weights"] != other["weights"])
                       for one, other in zip(mean, total, strict=True)])

# %%
rows = []
for update in (adam, sgd):
    for divisor in (2, 1):
        ranks = zs.Cluster(2).run(train_by_hand, update, divisor)
        for step in (0, 1):
            whole = [np.concatenate([found[step][key] for found in ranks])
                     for key in ("g", "m", "v", "master")]
            rows.append((update.__name__, "the mean" if divisor == 2 else "the sum", step + 1,
                         *(" ".join(f"{one:.5g}" for one in values) for values in whole)))
zs.draw.table(["", "of", "step", "gradient", "m", "v", "master"], rows)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **With Adam no weight is wrong, not in the first step and not in any other.** Twice the gradient makes m twice and
# $\sqrt v$ twice as large, and Adam divides one by the other. Who compares weights alone finds nothing; gradient, m and
# v say it at once, and so do SGD's weights. That is why the proof below compares m and v, too, and why there is a
# second step: an Adam that forgets its moments shows nothing in the first one. In a shell, `zerosim replay --mistakes`
# makes seven mistakes of this kind and says which numbers notice.
# </details>
#
# ## What travelled
#
# The same two collectives, in a picture drawn from a run: four numbers in fp16 are cut in two *chunks* of 4 bytes, and
# each rank sends one chunk in each of them. That makes 8 bytes in a step.

# %%
zs.draw.ring(ranks=2, length=4, format="fp16")

# %% [markdown]
# ## The same step by the package, in all four stages
#
# ZeRO's *stages* cut ever more into *shards*, one for each rank: nothing (0), master and optimizer's state (1),
# gradients too (2), the weights too (3). `Engine` runs all of them. Its `policy` names the format that layers compute
# in. We have cut the whole vector of weights in two; the engine cuts each layer in two, so that its rank 0 owns $w_1$
# and $w_3$. A sum of two numbers is the same whoever makes it.

# %%
def train_by_engine(rank, stage):
    """The same steps by the package: all four weights and their state after each, and the bytes held."""
    engine = zs.Engine(rank, zs.models.four_weights(WEIGHTS), zs.optim.Adam(lr=LEARNING_RATE), stage=stage,
                       policy="fp16")
    steps = []
    for samples in SAMPLES:
        x, t = samples[rank.index]
        engine.step([(np.array([x]), np.array([[t]]))])
        held = rank.memory.now_nbytes_by_kind
        state = [engine.state(name) for name in ("layer1.weight", "layer2.weight", "layer2.bias")]
        steps.append({key: np.concatenate([one[key].ravel() for one in state])
                      for key in ("m", "v", "master", "parameter")})
        del state  # they are whole, and would count as held
    return steps, held


by_engine, rows = {}, []
for stage in zs.STAGES:
    cluster = zs.Cluster(2)
    results = cluster.run(train_by_engine, stage)
    by_engine[stage] = [steps for steps, _ in results]
    sent = cluster.trace[0].sent_nbytes("gradients") + cluster.trace[0].sent_nbytes("parameters")
    held = results[0][1]
    kinds = [held[kind] for kind in ("parameter", "gradient", "master", "optimizer_state")]
    rows.append((f"stage {stage}", *kinds, sum(held.values()), sent // 2))
zs.draw.table(["rank 0, bytes", "weights", "gradients", "master", "m and v", "together", "sent in a step"],
              rows)

# %% [markdown]
# Read it downwards. *At rest*, between two steps, a rank holds 64 bytes, then 40, 36 and 32. That is sixteen bytes per
# weight when nothing is sharded (2 for the fp16 weight, 2 for its gradient, 4 for the master, 8 for m and v), and eight
# when everything is shared by two. What is sent stays at 8 bytes, 4 for gradients and 4 for weights, until stage 3,
# which fetches the weights twice: to go forward, and to go back.
#
# ## Try it
#
# * In the first step $h$ is negative on rank 0, so three of its gradients are 0. Make $w_2 = -0.5$ and run all again:
#   which are they now?
# * Set `LEARNING_RATE = 3e-4`. In `master` all four weights move in the first step; in fp16 only one does. Which, and
#   why that one?
# * Let m and v begin anew in every step. Which step notices?
# * In a shell: `zerosim replay --stage 3 --hops` tells the same steps number by number; `--ranks 3` adds a rank, and
#   `--published` is the first step as texts about ZeRO print it.
#
# ## Proof
#
# Equal means equal bits. The last cell compares both steps by hand with all four stages, on both ranks, as bytes.

# %%
for stage, ranks in by_engine.items():
    for step in (0, 1):
        for index, steps in enumerate(ranks):
            whole, mine = steps[step], by_hand[index][step]["weights"]
            assert whole["parameter"].tobytes() == mine.tobytes(), (stage, step, index)
            for key in ("m", "v", "master"):
                halves = np.concatenate([found[step][key] for found in by_hand])
                assert whole[key].dtype == halves.dtype
                assert whole[key].tobytes() == halves.tobytes(), (stage, step, index, key)
print("by hand, stages 0, 1, 2 and 3: the same bits in m, v, master and fp16 weights, on both ranks, "
      "after each step")
