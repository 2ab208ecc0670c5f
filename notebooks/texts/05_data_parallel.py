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
# # 5. Data parallel: everyone holds everything
#
# **The idea.** N ranks have the same model. Each computes the gradient of *its own* batch; the ranks exchange these
# gradients, take the mean, and all make the same update. The mean of the gradients of N batches is the gradient of all
# their samples together, so N ranks with 4 samples each train like one device with 4N samples. This is *data
# parallelism*; PyTorch's name for it is `DistributedDataParallel`, in short DDP. It is the stage 0 from which ZeRO
# starts, and it has one fault: what it holds.
#
# *Sources.* Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, section 2,
# [arXiv:2006.15704](https://arxiv.org/abs/2006.15704). Kingma and Ba 2015, *Adam: A Method for Stochastic
# Optimization*, algorithm 1, [arXiv:1412.6980](https://arxiv.org/abs/1412.6980).

# %%
import numpy as np

import zerosim as zs

MODEL = zs.models.MLP([12, 20, 30, 4], bias=False)  # three matrices, ReLU in between; half squared error
FIRST = list(zs.models.first_weights(MODEL).values())  # (12, 20), (20, 30) and (30, 4), in fp32
LEARNING_RATE = 0.01
STEPS = 5


def batch(index, step):
    """x (4, 12), target (4, 4): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    return tuple(random.standard_normal((4, n)).astype(np.float32) for n in (12, 4))


# %% [markdown]
# ## Predict first
#
# 1. Someone forgets to divide the sum by N. With SGD, what happens to the step? And with Adam?
# 2. 1024 ranks all have the gradient 100, in fp16, whose largest number is 65504. They add and then divide by 1024.
#    What comes out? Would you rather divide first? Then what becomes of a gradient of 0.00002?
# 3. Instead of one rank you take four. By how much does the memory shrink that each needs for the model's weights,
#    gradients and optimizer state?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # how many times as far the weights move then, with SGD and with Adam, as [2, 2]
    2: ...,  # 100 if one adds first, 0.00002 if one divides first, as [100, 2e-5]; np.inf is one too
    3: ...,  # how many times as much memory a rank needs alone as it does among four
})

# %% [markdown]
# ## A model by hand
#
# Forward keeps the input of each layer; backward goes from the last layer to the first. Adam is three lines.

# %%
def gradients(weights, x, target):
    """weights: three matrices; x (B, I), target (B, O) -> d loss / d each matrix"""
    inputs = []
    for w in weights:
        inputs.append(x)
        x = x @ w if w is weights[-1] else np.maximum(x @ w, 0)
    dy, found = (x - target) / np.float32(len(x)), []
    for w in reversed(weights):
        x = inputs.pop()
        found.append(x.T @ dy)
        dy = np.where(x > 0, dy @ w.T, 0)  # through the ReLU that made x
    return found[::-1]


def adam(w, m, v, g, step):
    """One update in place, of as many weights as there are."""
    m[:] = 0.9 * m + (1 - 0.9) * g
    v[:] = 0.999 * v + (1 - 0.999) * (g * g)
    w -= LEARNING_RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


def sgd(w, m, v, g, step):
    """The same without m and v."""
    w -= LEARNING_RATE * g


# %% [markdown]
# ## Data parallel by hand
#
# That was a program for one device. To train on N ranks, one line is added: an *all-reduce*, which gives every rank the
# sum over ranks (notebook 4).

# %%
def train_by_hand(rank, update=adam, average=True):
    """STEPS steps of one rank, all in fp32: its weights, and the optimizer's m and v."""
    weights = [w.copy() for w in FIRST]  # the same on every rank
    m, v = [np.zeros_like(w) for w in FIRST], [np.zeros_like(w) for w in FIRST]
    for step in range(1, STEPS + 1):
        for i, local in enumerate(gradients(weights, *batch(rank.index, step))):
            total = rank.all_reduce(local.ravel()).reshape(local.shape)
            update(weights[i], m[i], v[i], total / np.float32(rank.size if average else 1), step)
    return weights, m, v


by_hand = zs.Cluster(4).run(train_by_hand)
zs.draw.table(["rank", "the first weights after 5 steps"],
              [(index, str(weights[0][0, :4])) for index, (weights, _, _) in enumerate(by_hand)])

# %% [markdown]
# Four ranks saw four different sets of data and have the same weights, without ever having sent a weight: the same
# start and the same mean, step after step. If one bit of a mean differed, they would drift apart unseen.
#
# ## One device with all the samples
#
# Does this train like one device with the 16 samples of all ranks in one batch?

# %%
def one_device(ranks):
    """The same steps on one device, with the batches of all ranks as one."""
    weights = [w.copy() for w in FIRST]
    m, v = [np.zeros_like(w) for w in FIRST], [np.zeros_like(w) for w in FIRST]
    for step in range(1, STEPS + 1):
        batches = [batch(index, step) for index in range(ranks)]
        x, target = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        for i, g in enumerate(gradients(weights, x, target)):
            adam(weights[i], m[i], v[i], g, step)
    return weights


def furthest(some, others):
    """The largest difference between two lists of arrays."""
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))


zs.draw.table(["largest difference between", ""], [
    ("weights before and after the steps", f"{furthest(by_hand[0][0], FIRST):.3f}"),
    ("4 ranks and one device", f"{furthest(by_hand[0][0], one_device(4)):.1e}")])

# %% [markdown]
# Equal but for rounding: 16 samples added on one device are added in another order than 4 on each of four.
#
# ## Where to divide, and who notices
#
# Question 1. Every rank's loss is a mean over its own 4 samples, so the sum over ranks has to be divided by N, once.
# Without that:

# %%
def way(weights):
    """How far the weights have moved in all."""
    return sum(float(np.abs(w - first).sum()) for w, first in zip(weights, FIRST, strict=True))


runs = {update: [zs.Cluster(4).run(train_by_hand, update, average)[0] for average in (True, False)]
        for update in (sgd, adam)}
predictions.reveal(1, [way(wrong[0]) / way(right[0]) for right, wrong in runs.values()], within=0.5)

# %%
zs.draw.table(["without the division", "weights move", "m is larger"], [
    (update.__name__, f"{way(wrong[0]) / way(right[0]):.3f} times as far",
     f"{np.abs(wrong[1][0]).sum() / np.abs(right[1][0]).sum():.3f} times" if update is adam else "-")
    for update, (right, wrong) in runs.items()])

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **SGD's steps are four times too long** (and lead less than four times as far only because the model learns on the
# way); **Adam's weights do not notice**, since Adam divides by the gradient's own size; only m and v do. There the
# mistake sleeps until someone clips gradients by their norm, adds weight decay to them, or compares two runs.
# </details>
#
# Question 2 is about *where* one divides. In 16 bits it matters:

# %%
def mean_of(rank, value, rule):
    """The mean over ranks of the same fp16 number on every rank."""
    return rank.all_reduce(np.full(1, value, np.float16), op="mean", average=rule)[0]


predictions.reveal(2, [zs.Cluster(1024).run(mean_of, value, rule)[0] for value, rule in (
    (100, "sum_then_divide"), (0.00002, "divide_then_sum"))])

# %%
zs.draw.table(["rule", "mean of 1024 times 100", "of 1024 times 0.00002"], [
    (rule, *(str(zs.Cluster(1024).run(mean_of, value, rule)[0]) for value in (100, 0.00002)))
    for rule in ("sum_then_divide", "divide_then_sum", "split")])

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# **The sum overflows to infinity; dividing first makes small gradients 0.**
# </details>
#
# `split` divides by 32 before the sum and by 32 after it. (That finite means are a few per cent off has another cause:
# 1023 additions, each rounded to fp16.) The engine adds in the 16-bit format and divides in fp32, and leaves it to
# *loss scaling*, the subject of notebook 3, to keep gradients in the middle of the range. DDP in PyTorch divides first:
# another way, other bits.
#
# ## What every rank holds
#
# Question 3. Between two steps a rank keeps weights, m and v; a gradient for each weight comes beside:

# %%
def held(found):
    """Bytes of weights, m and v, and of one gradient for each weight."""
    weights, m, v = found
    return sum(array.nbytes for arrays in (weights, weights, m, v) for array in arrays)


predictions.reveal(3, held(zs.Cluster(1).run(train_by_hand)[0]) / held(by_hand[0]))

# %%
zs.draw.table(["N", "bytes on each rank", "per parameter"], [
    (ranks, held(zs.Cluster(ranks).run(train_by_hand)[0]),
     held(zs.Cluster(ranks).run(train_by_hand)[0]) / MODEL.parameter_count) for ranks in (1, 2, 4)])

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **It does not shrink at all**: 16 bytes for each parameter on every rank, 4 each for weight, gradient and Adam's two
# moments. With 16-bit weights and a master it is 16 again, 2 + 2 + 4 + 8 (notebook 1).
# </details>
#
# In the picture: what one rank holds, alone and among four; at rest, and at its *peak*, the fullest moment of a step.
# Hatched is what is there in passing; notebook 9 gives each of it a name. Stage 0 is this notebook; the other three are
# ZeRO's, and the subject of the next ones.

# %%
zs.draw.memory(worlds=(1, 4))

# %% [markdown]
# ## Try it
#
# * Let the ranks begin with different weights (multiply by `1 + rank.index`). They get the same mean gradient; do they
#   ever agree?
# * Give rank 0 a batch of 8 samples. The mean of the ranks' means is not the mean over all samples any more: which
#   samples count less?
# * Find the least N at which the sum of 100s overflows. It is more than 65504/100 = 655. Why?
# * In a shell: `zerosim replay --mistakes` makes seven mistakes in the step of notebook 1. Which else hides?
#
# ## Proof
#
# By hand and by the package's engine at stage 0: the same bits in weights and moments, and the same bytes at rest, on
# every rank, for 1 to 8 ranks.

# %%
def train_by_engine(rank):
    """The same steps by the package: weights, m and v of each layer, and what this rank holds."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(lr=LEARNING_RATE), stage=0)
    for step in range(1, STEPS + 1):
        engine.step([batch(rank.index, step)])
    states = [engine.state(name) for name in MODEL.shapes]
    return [[state[key] for state in states] for key in ("parameter", "m", "v")], rank.memory.now_nbytes


for ranks in (1, 2, 3, 4, 5, 8):
    pairs = zip(zs.Cluster(ranks).run(train_by_hand), zs.Cluster(ranks).run(train_by_engine), strict=True)
    for mine, (theirs, nbytes) in pairs:
        for of_one, of_other in zip(mine, theirs, strict=True):
            for array, other in zip(of_one, of_other, strict=True):
                assert array.tobytes() == other.tobytes(), ranks
        assert held(mine) == nbytes
    print(f"N = {ranks}: the same bits in weights, m and v after {STEPS} steps, and the same bytes held")
