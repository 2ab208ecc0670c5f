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
# # Puzzles
#
# Seventeen exercises on *ranks*: equal workers, GPUs in real life, each with memory of its own, that know of
# each other what comes in messages. You write the messages, then the collectives, then ZeRO's stages with them;
# the last four are programs to repair: bugs that real implementations had, in three of them.
#
# Each puzzle has three cells: what is asked, a function with holes, and a check. Replace every
# `zs.puzzles.hole(...)` by code of your own, run the cell, run the check. It runs your function on 4 simulated
# ranks first, then on 1, 2, 3, 5 and 8, each with other data, and compares bits. A hole that is still open is said,
# and is no error; a wrong answer gets one sentence that says what is wrong, and on which N.
#
# Three stars are three targets: bytes held at the fullest, bytes sent, and *steps*, which are messages that
# must wait for each other. What is right and wasteful passes with fewer, and is told where. What your function prints
# is shown below the verdict. `zs.puzzles.hint("ring", 1)` helps, and a higher number helps more.
#
# `rank.index` and `rank.size` say which rank it is, of how many. Each puzzle lists the calls that it allows. All ranks
# call a collective in the same way, with `out=` for the result and `async_op=True` for a Work that one waits for. New
# arrays come from `rank.memory.alloc(shape, dtype, kind)`, so that the rank's memory lists them; `kind` is "workspace",
# say.

# %%
import numpy as np

import zerosim as zs

# %%
zs.puzzles.statement("mean")


# %%
def mean(rank, x):
    total = zs.puzzles.hole("add up the x of all ranks; which collective does that?")
    total /= zs.puzzles.hole("how many numbers were added?")
    return total


# %%
zs.puzzles.check("mean", mean)

# %%
zs.puzzles.statement("broadcast")


# %%
def broadcast(rank, x):
    distance = 1  # the ranks below it have x
    while distance < rank.size:
        if rank.index < distance:
            zs.puzzles.hole("I have it: to whom do I send it, if there is such a rank?")
        elif rank.index < 2 * distance:
            zs.puzzles.hole("I get it in this step: from whom?")
        distance *= 2
    return x


# %%
zs.puzzles.check("broadcast", broadcast)

# %%
zs.puzzles.statement("ring")


# %%
def ring(rank, x):
    n, N = len(x), rank.size
    k = -(-n // N)

    def chunk(c):
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    landings = [rank.memory.alloc(k, x.dtype, "workspace") for _ in range(2)]
    partial = x[chunk(rank.index - 1)]
    for step in range(N - 1):
        own = x[zs.puzzles.hole("which chunk arrives in this step?")]
        landing = landings[step % 2][:len(own)]
        zs.puzzles.hole("send partial to the right neighbor while receiving landing from the left one")
        zs.puzzles.hole("add your own copy")
        partial = landing
    return partial


# %%
zs.puzzles.check("ring", ring)

# %%
zs.puzzles.statement("gather")


# %%
def gather(rank, shard, n):
    N, k = rank.size, -(-n // rank.size)

    def chunk(c):
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    whole = rank.memory.alloc(n, shard.dtype, "gathered_parameter")
    zs.puzzles.hole("put your own chunk in its place")
    for step in range(N - 1):
        zs.puzzles.hole("send one chunk of whole on, and receive another one right into its place")
    return whole


# %%
zs.puzzles.check("gather", gather)

# %%
zs.puzzles.statement("all_reduce")


# %%
def all_reduce(rank, x):
    shard = zs.puzzles.hole("your chunk of the sum")
    return zs.puzzles.hole("all chunks of the sum; how long is the whole?")


# %%
zs.puzzles.check("all_reduce", all_reduce)

# %%
zs.puzzles.statement("average")


# %%
def average(rank, gradients, scale):
    m, n = gradients.shape
    total = rank.memory.alloc(n, np.float32, "gradient")
    total[...] = gradients[0]
    for gradient in gradients[1:]:
        total += gradient
    zs.puzzles.hole("add up over ranks, in place")
    total /= zs.puzzles.hole("by how much, in all?")
    return total


# %%
zs.puzzles.check("average", average)

# %%
zs.puzzles.statement("ddp")


# %%
def ddp(rank, gradients):
    bucket = rank.memory.alloc(sum(g.size for g in gradients), np.float32, "gradient")
    start = 0
    for g in gradients:
        zs.puzzles.hole("put g into the bucket, flat, from start on; where does the next one start?")
    zs.puzzles.hole("one all-reduce, in place, and the mean")
    return zs.puzzles.hole("the tensors, in their shapes again")


# %%
zs.puzzles.check("ddp", ddp)

# %%
zs.puzzles.statement("zero1")


# %%
def zero1(rank, weights, gradient, momentum, lr):
    n, k = len(weights), -(-len(weights) // rank.size)
    own = slice(min(n, rank.index * k), min(n, (rank.index + 1) * k))
    mean = zs.puzzles.hole("the sum over ranks of the own shard of the gradient")
    zs.puzzles.hole("make it the mean")
    momentum *= 0.9
    momentum += mean
    weights[own] -= lr * momentum
    zs.puzzles.hole("show the own shard to all, and get theirs; right into weights")
    return weights, momentum


# %%
zs.puzzles.check("zero1", zero1)

# %%
zs.puzzles.statement("zero2")


# %%
def zero2(rank, lengths, gradient_of):
    shards = [None] * len(lengths)
    for layer in reversed(range(len(lengths))):
        gradient = gradient_of(layer)
        shards[layer] = zs.puzzles.hole("your shard of the sum over ranks")
        zs.puzzles.hole("the mean")
        zs.puzzles.hole("let the whole gradient go, before the next one is computed")
    return shards


# %%
zs.puzzles.check("zero2", zero2)

# %%
zs.puzzles.statement("zero3")


# %%
def zero3(rank, shards, layer, x):
    n, inputs = len(x), []
    for shard in shards:
        w = zs.puzzles.hole("gather this layer's weights")
        inputs.append(x)
        x = layer.forward(w, x)
        zs.puzzles.hole("let the gathered weights go")
    dy, grads = x, [None] * len(shards)
    del x
    for number in reversed(range(len(shards))):
        zs.puzzles.hole("gather the weights again; backward; let them go")
        zs.puzzles.hole("reduce dw, and keep your shard of the mean")
    return grads


# %%
zs.puzzles.check("zero3", zero3)

# %%
zs.puzzles.statement("overlap")


# %%
def overlap(rank, lengths, gradient_of):
    shards, work = [None] * len(lengths), None
    for layer in reversed(range(len(lengths))):
        gradient = gradient_of(layer)
        if work is not None:
            zs.puzzles.hole("layer + 1 has been travelling meanwhile: wait for it, and take the mean")
        work = zs.puzzles.hole("send this one on its way, without waiting")
        del gradient
    zs.puzzles.hole("one is still travelling")
    return shards


# %%
zs.puzzles.check("overlap", overlap)

# %%
zs.puzzles.statement("lamb")


# %%
def lamb(rank, weights, direction, valid, bias, bias_direction, lr):
    def squares(x):
        wide = x.astype(np.float64)
        return np.dot(wide, wide)

    partial = rank.memory.alloc(2, np.float64, "workspace")  # of the weights, of the direction
    partial[0] = zs.puzzles.hole("squares of what is real in your shard")
    partial[1] = zs.puzzles.hole("the same for the direction")
    total = zs.puzzles.hole("the sum over ranks")
    zs.puzzles.hole("the bias counts once, not N times")
    ratio = zs.puzzles.hole("norm of the weights by norm of the direction")
    weights[:valid] -= lr * ratio * direction[:valid]
    bias -= lr * ratio * bias_direction
    return weights, bias


# %%
zs.puzzles.check("lamb", lamb)

# %%
zs.puzzles.statement("overflow")


# %%
def overflow(rank, weights, gradient, lr, scale):
    flag = rank.memory.alloc(1, np.uint8, "workspace")
    flag[0] = zs.puzzles.hole("1 if something in my shard is inf or NaN, else 0")
    flags = zs.puzzles.hole("everybody's flag, or the largest of them; also when mine is 0")
    if flags.any():
        return weights, scale / 2, True
    weights -= lr * (gradient / scale)
    return weights, scale, False


# %%
zs.puzzles.check("overflow", overflow)

# %%
zs.puzzles.statement("repair")


# %%
def repair(rank, shards, layer, x, gradient):
    n, N = len(x), rank.size
    weights = [rank.all_gather(shard, length=n) for shard in shards]
    for w in weights:
        x = layer.forward(w, x)

    k = -(-n // N)

    def chunk(c):
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    landings = [rank.memory.alloc(k, np.float32, "workspace") for _ in range(2)]
    partial = gradient[chunk(rank.index + 1)]
    for step in range(N - 1):
        own = gradient[chunk(rank.index + 2 + step)]
        landing = landings[step % 2][:len(own)]
        rank.exchange(partial, (rank.index - 1) % N, landing, (rank.index + 1) % N)
        landing += own
        partial = landing
    return x, partial


# %%
zs.puzzles.check("repair", repair)

# %%
zs.puzzles.statement("find_batch")


# %%
def find_batch(rank, gradients, scale):
    m, n = gradients.shape
    total = rank.memory.alloc(n, np.float32, "gradient")
    total[...] = 0
    for number, gradient in enumerate(gradients, 1):
        if number == m:  # no other follows
            rank.all_reduce(total, out=total)
        total += gradient
    if m == 1:
        rank.all_reduce(total, out=total)
    total /= scale * rank.size * m
    return total


# %%
zs.puzzles.check("find_batch", find_batch)

# %%
zs.puzzles.statement("find_ring")


# %%
def find_ring(rank, shard, n):
    N, k = rank.size, -(-n // rank.size)

    def chunk(c):
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    whole = rank.memory.alloc(n, shard.dtype, "gathered_parameter")
    whole[...] = 0
    whole[chunk(rank.index)] = shard
    for step in range(N - 1):
        sent, arriving = chunk(rank.index + 2 - step), chunk(rank.index + 1 - step)
        rank.exchange(whole[sent], (rank.index + 1) % N, whole[arriving], (rank.index - 1) % N)
    return whole


# %%
zs.puzzles.check("find_ring", find_ring)

# %%
zs.puzzles.statement("find_skip")


# %%
def find_skip(rank, weights, gradient, lr, scale):
    overflowed = not np.isfinite(gradient).all()
    if overflowed:
        return weights, scale / 2, True
    weights -= lr * (gradient / scale)
    return weights, scale, False


# %%
zs.puzzles.check("find_skip", find_skip)

# %% [markdown]
# ## All of them

# %%
answers = [
    mean, broadcast, ring, gather, all_reduce, average, ddp, zero1, zero2, zero3, overlap, lamb, overflow,
    repair, find_batch, find_ring, find_skip,
]
for answer in answers:
    score = zs.puzzles.check(answer.__name__, answer)
    print(f"{score.puzzle:10}  {score.verdict:7}  {score.stars}")
