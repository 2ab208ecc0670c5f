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
# # 6. ZeRO-1: one owner for each piece of the optimizer's state
#
# **The idea.** In data parallelism every rank makes the same update of all weights, and keeps all of Adam's state for
# it. N ranks do the same work N times. ZeRO's stage 1 gives each weight one *owner*: that rank alone keeps the weight's
# moments and its fp32 *master* copy, and updates it. The others get the result. With 16-bit weights the owner's part is
# 12 of the 16 bytes that a parameter takes; these shrink to 12/N.

# %%
import numpy as np

import zerosim as zs
from zerosim.course import figures

MODEL = zs.models.MLP([6, 10, 10, 3])  # three linear layers, ReLU between them, half the squared error
ADAM = zs.optim.Adam(lr=0.01)
BF16 = zs.Policy("bf16")  # computes in bf16: weights, gradients and what travels take 2 bytes per number
STEPS = 5


def batch(index, step):
    """x (4, 6), target (4, 3): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    return random.standard_normal((4, 6)).astype(np.float32), random.standard_normal((4, 3)).astype(np.float32)


# %% [markdown]
# ## Predict first
#
# 1. Stage 0 sends each rank's gradients through an all-reduce. Stage 1 must in addition bring the updated weights from
#    their owners to everybody. How much more does it send?
# 2. A model of 7.5 billion parameters takes 16 bytes for each, 120 GB on every rank. What does stage 1 leave of that on
#    64 ranks? And on 6400?
# 3. Are the weights the same as without ZeRO? To how many digits?
#
# Write your answers down, then read on.
#
# ## Who owns what
#
# All parameters lie one behind the other in one long vector, the *flat vector*. Each layer's stretch of it is filled up
# (*padding*) to a length that N divides and cut in N equal chunks; chunk r belongs to rank r. (Notebook 1 cut the whole
# vector at once.) What a rank owns of all layers together is its *shard*. Borders between weights and biases do not
# matter: Adam looks at each number by itself.

# %%
print(zs.layout_of(MODEL, ranks=4))

# %% [markdown]
# ## The step by hand
#
# Remember from notebook 4 that an all-reduce *is* a reduce-scatter followed by an all-gather. Stage 1 does its update
# between the two:
#
# 1. reduce-scatter of the gradients: each owner has the sum for its own chunk, and nobody has more;
# 2. the owner updates its chunk of the master weights;
# 3. all-gather of the updated weights, in 16 bits.
#
# `rank.memory.alloc` makes an array and enters it in the rank's memory, under a kind; so we can compare what is held.

# %%
def train_by_hand(rank):
    """STEPS steps of one rank: its weights (n,), its shards of master, m and v, and what it holds at the end."""
    layout, hold = zs.layout_of(MODEL, rank.size), rank.memory.alloc
    n, shard = layout.length, layout.shard_length(rank.index)
    vector, gradient = hold(n, BF16.compute_dtype, "parameter"), hold(n, BF16.compute_dtype, "gradient")
    master = hold(shard, np.float32, "master")
    state = {slot: hold(shard, np.float32, "optimizer_state") for slot in ("m", "v")}
    first = layout.flattened(zs.models.first_weights(MODEL))  # fp32: each rank keeps its shard so, and all in bf16
    vector[...], master[...] = first, layout.shard(rank.index, first)
    for array in (gradient, *state.values()):
        array[...] = 0
    weights, gradients = layout.views(vector), layout.views(gradient)
    owned = {unit: layout.owned(rank.index, where.start, where.stop) for unit, where in layout.units.items()}

    for step in range(1, STEPS + 1):
        for name, local in zs.models.one_pass(MODEL, weights, BF16, *batch(rank.index, step)).gradients.items():
            gradients[name][...] = local
        g = np.empty(shard, np.float32)
        for unit, where in layout.units.items():
            g[owned[unit]] = rank.reduce_scatter(gradient[where], purpose="gradients")
        g /= np.float32(rank.size)  # the sum in bf16, the mean in fp32
        ADAM.update(zs.optim.UpdateContext(rank.kernels), master, g, state, step)
        for unit, where in layout.units.items():
            np.split(vector[where], rank.size)[rank.index][...] = master[owned[unit]]
        between = float(vector[0])
        for where in layout.units.values():
            mine = np.split(vector[where], rank.size)[rank.index]
            rank.all_gather(mine, out=vector[where], purpose="parameters")
    return {"parameter": vector, "master": master} | state, between, rank.memory.now_nbytes_by_kind


cluster = zs.Cluster(4)
by_hand = cluster.run(train_by_hand)
print("rank 0 holds", by_hand[0][2])
print("the first weight in the last step, between update and all-gather:", [between for _, between, _ in by_hand])
print("and after it:", [float(found["parameter"][0]) for found, _, _ in by_hand])
for purpose in ("gradients", "parameters"):
    print(f"bytes sent by each rank for {purpose} in {STEPS} steps:", cluster.trace.sent_nbytes(purpose))

# %% [markdown]
# The first weight belongs to rank 0. In between only rank 0 has its new value; the all-gather brings it to the others.
#
# ## Beside stage 0
#
# The package's `Engine` runs both stages; they differ in where the optimizer's state rests, and in nothing else that
# one would have to say.

# %%
def train_by_engine(rank, stage):
    """The same steps by the package: its weights, this rank's shards, and what the rank holds."""
    engine = zs.Engine(rank, MODEL, ADAM, stage=stage, policy=BF16)
    for step in range(1, STEPS + 1):
        engine.step([batch(rank.index, step)])
    group = engine.param_group
    return {"parameter": group.parameter, "master": group.master} | group.slots, rank.memory.now_nbytes_by_kind


for stage in (0, 1):
    cluster = zs.Cluster(4)
    held = cluster.run(train_by_engine, stage)[0][1]
    sent = cluster.trace[0].sent_nbytes("gradients") + cluster.trace[0].sent_nbytes("parameters")
    print(f"stage {stage}: rank 0 holds {sum(held.values())} bytes, {held}, and has sent {sent} bytes")

# %% [markdown]
# **Not one byte more is sent.** The all-reduce of stage 0 already consisted of these two halves; stage 1 puts the
# update in between and lets the second half carry weights instead of gradients. It would be otherwise if one
# all-reduced the gradients, then took one's slice, and then gathered the weights: half as much again, and some programs
# do that. (Not counted here are the few bytes by which ranks agree that no gradient has overflowed, as in notebook 3.)
#
# Question 2, by the formula: 2 bytes of weight and 2 of gradient stay on every rank, and 12/N are its share of the
# rest.

# %%
for ranks in (1, 4, 64, 6400):
    print(f"7.5e9 parameters, N = {ranks:4}: {7.5 * (4 + 12 / ranks):6.2f} GB on each")

# %% [markdown]
# 31.4 GB on 64 ranks, and **a hundred times as many ranks save little more**: what is not sharded stays. Stages 2 and 3
# are about those 4 bytes.

# %%
figures.memory(figures.memory_data(worlds=(4, 16)))

# %% [markdown]
# Look at stage 1's "peak" in the picture: while the reduce-scatter runs, a rank holds its whole gradient *and* its
# chunk of the sum. That too is stage 2's business.
#
# ## Try it
#
# * Take 3 ranks instead of 4 in the layout printed above. Which layers need padding, and who owns it?
# * Leave out the last all-gather. Which assertion of the proof fails first, and would you have seen it in the loss?
# * Replace Adam by `zs.optim.SGD(lr=0.01)` in `train_by_engine`. What does sharding save now, and why is it less? (The
#   proof then fails: by hand it is still Adam.)
# * Some optimizers need a whole matrix (`zs.optim.Muon(lr=0.01)`). What does the engine say to it at stage 1?
#
# ## Proof
#
# By hand and by the engine at stage 1: the same bits in weights, master and moments, the same bytes held at rest and
# the same bytes sent, for 1 to 8 ranks. And stage 0 has the same weights, to the last bit: that answers question 3.

# %%
for ranks in (1, 2, 3, 4, 5, 8):
    hand, engine, plain = (zs.Cluster(ranks) for _ in range(3))
    runs = hand.run(train_by_hand), engine.run(train_by_engine, 1), plain.run(train_by_engine, 0)
    for (mine, _, held), (package, held_by_package), (stage_0, _) in zip(*runs, strict=True):
        for name, array in mine.items():
            assert array.dtype == package[name].dtype
            assert array.tobytes() == package[name].tobytes(), (ranks, name)
        assert held == held_by_package
        assert mine["parameter"].tobytes() == stage_0["parameter"].tobytes()
    for purpose in ("gradients", "parameters"):
        assert hand.trace.sent_nbytes(purpose) == engine.trace.sent_nbytes(purpose)
    print(f"N = {ranks}: the same bits by hand, at stage 1 and at stage 0; the same bytes held and sent as at stage 1")
