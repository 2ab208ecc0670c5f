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
# # 6. ZeRO-1: one owner for each piece of the optimizer's state
#
# **The idea.** In data parallelism every rank makes the same update of all weights, and keeps all of Adam's state for
# it. N ranks do the same work N times. ZeRO's stage 1 gives each weight one *owner*: that rank alone keeps the weight's
# moments and its fp32 *master* copy, and updates it. The others get the result. With 16-bit weights the owner's part is
# 12 of the 16 bytes that a parameter takes; these shrink to 12/N. PyTorch has this as `ZeroRedundancyOptimizer`.
#
# *Source.* Rajbhandari, Rasley, Ruwase and He 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
# Models*, section 5.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %%
import ml_dtypes
import numpy as np

import zerosim as zs

BF16 = ml_dtypes.bfloat16  # 2 bytes per number: weights, gradients and what travels
MODEL = zs.models.MLP([12, 20, 30, 4], bias=False)  # three matrices, ReLU in between; half squared error
FIRST = list(zs.models.first_weights(MODEL).values())  # (12, 20), (20, 30) and (30, 4), in fp32
P = sum(w.size for w in FIRST)  # 960; every matrix can be cut in 2, 3, 4, 5 or 8 equal chunks
LEARNING_RATE = 0.01
STEPS = 5


def batch(index, step):
    """x (4, 12), target (4, 4): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    return random.standard_normal((4, 12)).astype(BF16), random.standard_normal((4, 4)).astype(np.float32)


# %% [markdown]
# ## Predict first
#
# 1. Stage 0 sends each rank's gradients through an all-reduce. Stage 1 must in addition bring the updated weights from
#    their owners to everybody. How much more does it send?
# 2. A model of 7.5 billion parameters takes 16 bytes for each, 120 GB on every rank. What does stage 1 leave of that on
#    64 ranks? And on 6400?
# 3. Are the weights the same as without ZeRO? To how many digits?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # how many times as much as stage 0
    2: ...,  # GB on 64 ranks and on 6,400, as [60, 1]
    3: ...,  # True or False: the same to the last bit
})

# %% [markdown]
# ## The model by hand, in 16 bits
#
# As in notebook 5, but for the rounding: a matrix product adds in fp32 and is rounded to bf16 once, as on a GPU.

# %%
def wide(x):
    """The same values in fp32."""
    return x.astype(np.float32)


def gradients(weights, x, target):
    """weights: three matrices in bf16; x (B, I), target (B, O) -> d loss / d each matrix, in bf16"""
    inputs = []
    for w in weights:
        inputs.append(x)
        y = (wide(x) @ wide(w)).astype(BF16)
        x = y if w is weights[-1] else np.where(y > 0, y, BF16(0))
    dy, found = ((wide(x) - target) / np.float32(len(x))).astype(BF16), []
    for w in reversed(weights):
        x = inputs.pop()
        found.append((wide(x).T @ wide(dy)).astype(BF16))
        dy = np.where(x > 0, (wide(dy) @ wide(w).T).astype(BF16), BF16(0))
    return found[::-1]


def adam(w, m, v, g, step):
    """One update in fp32, in place, of as many weights as there are."""
    m[:] = 0.9 * m + (1 - 0.9) * g
    v[:] = 0.999 * v + (1 - 0.999) * (g * g)
    w -= LEARNING_RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


# %% [markdown]
# ## Who owns what
#
# Each matrix, read row after row, is cut into N equal *chunks*; chunk r belongs to rank r. Where rows end does not
# matter: Adam looks at each number by itself. (A matrix that N does not divide would be filled up, which is *padding*.)
#
# ## The step by hand
#
# Remember from notebook 4 that an all-reduce *is* a reduce-scatter followed by an all-gather. Stage 1 does its update
# between the two:
#
# 1. reduce-scatter of the gradients: each owner has the sum for its own chunk, and nobody has more;
# 2. the owner updates its chunk of the master weights;
# 3. all-gather of the updated weights, in 16 bits.

# %%
def chunk(matrix, rank):
    """The part of a matrix that a rank owns: (n/N,), a copy."""
    return np.split(matrix.ravel(), rank.size)[rank.index].copy()


def train_by_hand(rank):
    """STEPS steps: weights, this rank's chunks of master, m and v; one weight before the all-gather."""
    weights = [w.astype(BF16) for w in FIRST]  # whole, on every rank
    master = [chunk(w, rank) for w in FIRST]  # in fp32, and like m and v this rank's part alone
    m, v = [np.zeros_like(w) for w in master], [np.zeros_like(w) for w in master]
    for step in range(1, STEPS + 1):
        for i, local in enumerate(gradients(weights, *batch(rank.index, step))):
            g = wide(rank.reduce_scatter(local.ravel(), purpose="gradients")) / np.float32(rank.size)
            adam(master[i], m[i], v[i], g, step)
            np.split(weights[i].reshape(-1), rank.size)[rank.index][:] = master[i].astype(BF16)
            if i == 0:
                between = float(weights[0][0, 0])
            rank.all_gather(master[i].astype(BF16), out=weights[i].reshape(-1), purpose="parameters")
    return weights, master, m, v, between


cluster = zs.Cluster(4)
by_hand = cluster.run(train_by_hand)
zs.draw.table(["rank", "first weight, after its own update", "after the all-gather"], [
    (index, str(between), str(float(weights[0][0, 0])))
    for index, (weights, *_, between) in enumerate(by_hand)])

# %% [markdown]
# The first weight belongs to rank 0. In between only rank 0 has its new value; the all-gather brings it to the others.
#
# ## Beside stage 0
#
# What does a rank hold between two steps, and what does it send in one? For stage 0 we use what notebook 5 has shown.

# %%
def held(found):
    """Bytes of weights, of a gradient in bf16 for each, and of master, m and v."""
    weights, master, m, v = found[:4]
    return sum(array.nbytes for arrays in (weights, weights, master, m, v) for array in arrays)


sent = [cluster.trace.sent_nbytes(purpose)[0] // STEPS for purpose in ("gradients", "parameters")]
predictions.reveal(1, sum(sent) / (2 * 2 * P * 3 // 4))

# %%
zs.draw.table(["N = 4", "held", "sent for gradients", "for weights", "together"], [
    ("stage 0, by formula", 16 * P, 2 * 2 * P * 3 // 4, 0, 2 * 2 * P * 3 // 4),
    ("stage 1, by hand", held(by_hand[0]), *sent, sum(sent))])

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **Not one byte more is sent.** The all-reduce of stage 0 already consisted of these two halves; stage 1 puts the
# update in between and lets the second half carry weights instead of gradients. It would be otherwise if one
# all-reduced the gradients, then took one's slice, and then gathered the weights: half as much again, and some programs
# do that: PyTorch's `ZeroRedundancyOptimizer` under DDP, whose slices are whole tensors.
# </details>
#
# Question 2, by the formula: 2 bytes of weight and 2 of gradient stay on every rank, and 12/N are its share of the
# rest.

# %%
def gb(ranks):
    """GB at rest on each rank of stage 1, with 7.5 billion parameters."""
    return 7.5 * (4 + 12 / ranks)


predictions.reveal(2, [gb(64), gb(6400)])

# %%
zs.draw.table(["7.5e9 parameters on N ranks", "GB on each"],
              [(f"{ranks:,}", round(gb(ranks), 2)) for ranks in (1, 4, 64, 6400)])

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# 31.4 GB on 64 ranks, and **a hundred times as many ranks save little more**: what is not sharded stays. Stages 2 and 3
# are about those 4 bytes.
# </details>

# %%
zs.draw.memory(worlds=(4, 16))

# %% [markdown]
# Look at stage 1's "peak" in the picture: while the reduce-scatter runs, a rank holds its whole gradient *and* its
# chunk of the sum. That too is stage 2's business.
#
# ## Try it
#
# * Leave out the last all-gather. Which assertion of the proof fails first, and would you have seen it in the loss?
# * Take widths of `[6, 10, 10, 3]`. Where does the cut into equal chunks fail, and what would padding add?
# * Replace `adam` by SGD without a master: 2 bytes of weight, 2 of gradient and nothing else. What is left to shard?
# * Some optimizers need a whole matrix (`zs.optim.Muon(lr=0.01)`). What does the engine say to it at stage 1?
#
# ## Proof
#
# By hand and by the package's engine at stage 1: the same bits in weights, master and moments, the same bytes held at
# rest and the same bytes sent, for 1 to 8 ranks. And stage 0, for question 3.
#
# <details><summary>Answer to question 3</summary>
#
# **All digits**: they have the bits of stage 0.
# </details>

# %%
def train_by_engine(rank, stage):
    """The same steps by the package: of each layer weights, master, m and v; what this rank holds."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(lr=LEARNING_RATE), stage=stage, policy="bf16")
    for step in range(1, STEPS + 1):
        engine.step([batch(rank.index, step)])
    held_nbytes, states = rank.memory.now_nbytes, [engine.state(name) for name in MODEL.shapes]
    return [[state[key] for state in states] for key in ("parameter", "master", "m", "v")], held_nbytes


stage_0 = zs.Cluster(4).run(train_by_engine, 0)[0][0][0]
predictions.reveal(3, all(one.tobytes() == other.tobytes()
                          for one, other in zip(by_hand[0][0], stage_0, strict=True)))

# %%
print("measured:")
for ranks in (1, 2, 3, 4, 5, 8):
    hand, engine, plain = (zs.Cluster(ranks) for _ in range(3))
    mine, theirs = hand.run(train_by_hand), engine.run(train_by_engine, 1)
    stage_0 = plain.run(train_by_engine, 0)
    for i in range(len(FIRST)):
        for index in range(ranks):
            weights = mine[index][0][i].tobytes()
            assert weights == theirs[index][0][0][i].tobytes(), (ranks, i)
            assert weights == stage_0[index][0][0][i].tobytes(), (ranks, i)
            assert held(mine[index]) == theirs[index][1]
        for kind in (1, 2, 3):
            whole = np.concatenate([of_rank[kind][i] for of_rank in mine])  # of master, m, v
            assert whole.tobytes() == theirs[0][0][kind][i].tobytes(), (ranks, i, kind)
    for purpose in ("gradients", "parameters"):
        assert hand.trace.sent_nbytes(purpose) == engine.trace.sent_nbytes(purpose)
    print(f"N = {ranks}: by hand the bits of stages 1 and 0, and the bytes held and sent of stage 1")
