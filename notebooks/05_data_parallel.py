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
# # 5. Data parallel: everyone holds everything
#
# **The idea.** N ranks have the same model. Each computes the gradient of *its own* batch; the ranks exchange these
# gradients, take the mean, and all make the same update. The mean of the gradients of N batches is the gradient of all
# their samples together, so N ranks with 4 samples each train like one device with 4N samples. This is *data
# parallelism*, in short DDP. It is the stage 0 from which ZeRO starts, and it has one fault: what it holds.

# %%
import numpy as np

import zerosim as zs
from zerosim.course import figures

MODEL = zs.models.MLP([6, 10, 10, 3])  # three linear layers, ReLU between them, half the squared error
ADAM = zs.optim.Adam(lr=0.01)
STEPS = 5


def batch(index, step):
    """x (4, 6), target (4, 3): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    return random.standard_normal((4, 6)).astype(np.float32), random.standard_normal((4, 3)).astype(np.float32)


# %% [markdown]
# ## Predict first
#
# 1. Someone forgets to divide the sum by N. With SGD, what happens to the step? And with Adam?
# 2. 1024 ranks all have the gradient 100, in fp16, whose largest number is 65504. They add and then divide by 1024.
#    What comes out? Would you rather divide first? Then what becomes of a gradient of 0.00002?
# 3. Instead of one rank you take four. By how much does the memory shrink that each needs for the model's weights,
#    gradients and optimizer state?
#
# Write your answers down, then read on.
#
# ## Data parallel by hand
#
# `one_pass` runs a model forward and back, without ranks. The rest is one line of communication: an *all-reduce*, which
# gives every rank the sum over ranks (notebook 4). One vector travels for each layer (a *unit* of the model), with the
# gradients of its weight and its bias behind each other. An optimizer's `slots` name its arrays, here m and v.

# %%
def train_by_hand(rank, optimizer, average=True):
    """STEPS steps of one rank, all in fp32: the weights by name, and the optimizer's state."""
    weights = zs.models.first_weights(MODEL)  # the same on every rank
    state = {name: {slot: np.zeros(w.size, np.float32) for slot in optimizer.slots(w.shape)}
             for name, w in weights.items()}
    for step in range(1, STEPS + 1):
        local = zs.models.one_pass(MODEL, weights, zs.Policy("fp32"), *batch(rank.index, step)).gradients
        for unit in MODEL.units:
            total = rank.all_reduce(np.concatenate([local[name].ravel() for name in unit.names]))
            mean = total / np.float32(rank.size) if average else total
            for name in unit.names:
                g, mean = mean[:weights[name].size], mean[weights[name].size:]
                optimizer.update(zs.optim.UpdateContext(rank.kernels), weights[name].reshape(-1), g, state[name], step)
    return weights, state


by_hand = zs.Cluster(4).run(train_by_hand, ADAM)
for index, (weights, _) in enumerate(by_hand):
    print(f"rank {index}: layer0.weight begins {weights['layer0.weight'][0, :4]}")

# %% [markdown]
# Four ranks saw four different sets of data and have the same weights, without ever having sent a weight: the same
# start and the same mean, step after step. If one bit of a mean differed, they would drift apart unseen.
#
# ## One device with all the samples
#
# Does this train like one device with the 16 samples of all ranks in one batch?

# %%
def one_device(rank):
    """The same steps on one rank, with the four batches as one."""
    engine = zs.Engine(rank, MODEL, ADAM)
    for step in range(1, STEPS + 1):
        x, target = (np.concatenate(parts) for parts in zip(*(batch(index, step) for index in range(4)), strict=True))
        engine.step([(x, target)])
    return {name: engine.state(name)["parameter"] for name in MODEL.shapes}


alone = zs.Cluster(1).run(one_device)[0]
start = zs.models.first_weights(MODEL)
moved = max(np.abs(by_hand[0][0][name] - start[name]).max() for name in MODEL.shapes)
apart = max(np.abs(by_hand[0][0][name] - alone[name]).max() for name in MODEL.shapes)
print(f"in {STEPS} steps weights moved by up to {moved:.3f}, and the two results are up to {apart:.1e} apart")

# %% [markdown]
# Equal but for rounding: 16 samples added on one device are added in another order than 4 on each of four.
#
# ## Where to divide, and who notices
#
# Question 1. Every rank's loss is a mean over its own 4 samples, so the sum over ranks has to be divided by N, once.
# Without that:

# %%
for optimizer in (zs.optim.SGD(lr=0.01), ADAM):
    means, sums = (zs.Cluster(4).run(train_by_hand, optimizer, average)[0][0] for average in (True, False))
    right = sum(float(np.abs(means[name] - start[name]).sum()) for name in start)
    wrong = sum(float(np.abs(sums[name] - start[name]).sum()) for name in start)
    print(f"{type(optimizer).__name__:4} without the division: weights moved {wrong / right:.3f} times as far")

# %% [markdown]
# **SGD's steps are four times too long** (and lead less than four times as far only because the model learns on the
# way); **Adam hardly notices**, since it divides by the gradient's own size. There the mistake sleeps until someone
# clips gradients by their norm, adds weight decay to them, or compares two runs.
#
# Question 2 is about *where* one divides. In 16 bits it matters:

# %%
def mean_of(rank, value, rule):
    """The mean over ranks of the same fp16 number on every rank."""
    return rank.all_reduce(np.full(1, value, np.float16), op="mean", average=rule)[0]


for rule in ("sum_then_divide", "divide_then_sum", "split"):
    means = [zs.Cluster(1024).run(mean_of, value, rule)[0] for value in (100, 0.00002)]
    print(f"{rule:15}: the mean of 1024 times 100 is {means[0]}, that of 1024 times 0.00002 is {means[1]}")

# %% [markdown]
# **The sum overflows to infinity; dividing first makes small gradients 0.** `split` divides by 32 before the sum and by
# 32 after it. (That finite means are a few per cent off has another cause: 1023 additions, each rounded to fp16.) The
# engine adds in the 16-bit format and divides in fp32, and leaves it to *loss scaling*, the subject of notebook 3, to
# keep gradients in the middle of the range.
#
# ## What every rank holds
#
# Question 3. The package's `Engine` does the same steps at stage 0, and each rank keeps a list of what it holds, its
# *memory*:

# %%
def train_by_engine(rank):
    """The same steps by the package, and what this rank holds afterwards."""
    engine = zs.Engine(rank, MODEL, ADAM, stage=0)
    for step in range(1, STEPS + 1):
        engine.step([batch(rank.index, step)])
    return {name: engine.state(name) for name in MODEL.shapes}, rank.memory.now_nbytes_by_kind


for ranks in (1, 2, 4):
    held = zs.Cluster(ranks).run(train_by_engine)[0][1]
    print(f"N = {ranks}: each holds {sum(held.values()) / MODEL.parameter_count:.2f} bytes per parameter: {held}")

# %% [markdown]
# **It does not shrink at all**: 16 bytes for each parameter on every rank, 4 each for weight, gradient and Adam's two
# moments. (What is above 16 is *padding*: a vector is filled up to a length that N divides.) With 16-bit weights and a
# master it is 16 again, 2 + 2 + 4 + 8 (notebook 1).
#
# In the picture: what one rank holds, alone and among four; at rest, and at its *peak*, the fullest moment of a step.
# Hatched is what is there in passing; notebook 9 gives each of it a name. Stage 0 is this notebook; the other three are
# ZeRO's, and the subject of the next ones.

# %%
figures.memory(figures.memory_data(worlds=(1, 4)))

# %% [markdown]
# ## Try it
#
# * Let the ranks begin with different weights (multiply by `1 + rank.index`). They get the same mean gradient; do they
#   ever agree?
# * Give rank 0 a batch of 8 samples. The mean of the ranks' means is not the mean over all samples any more: which
#   samples count less?
# * Find the least N at which the sum of 100s overflows. It is more than 65504/100 = 655. Why?
# * In a shell: `zerosim train --help`, and a run of your own on `--ranks 4`.
#
# ## Proof
#
# By hand and by the engine: the same bits in weights and moments, on every rank, for 1 to 8 ranks.

# %%
for ranks in (1, 2, 3, 4, 5, 8):
    pairs = zip(zs.Cluster(ranks).run(train_by_hand, ADAM), zs.Cluster(ranks).run(train_by_engine), strict=True)
    for (weights, state), (engine, _) in pairs:
        for name in MODEL.shapes:
            assert weights[name].tobytes() == engine[name]["parameter"].tobytes(), (ranks, name)
            for slot in ("m", "v"):
                assert state[name][slot].tobytes() == engine[name][slot].tobytes(), (ranks, name, slot)
    print(f"N = {ranks}: the same bits in weights, m and v after {STEPS} steps, on every rank")
