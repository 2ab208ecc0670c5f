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
# # 4. Rings: reduce-scatter, all-gather, all-reduce
#
# **The idea.** N *ranks* (N GPUs, say) have a gradient each, and every one of them needs the sum. No rank sees
# another's memory; all it can do is to send a message to one rank while it receives one from another. If the ranks
# stand in a circle and each talks to its neighbors only, then nobody is a bottleneck, and each rank sends less than
# twice the gradient's bytes, however many ranks there are.
#
# Three words first. An operation that all ranks call together is a *collective*. A **reduce-scatter** adds up the
# ranks' vectors and leaves each rank its own part of the sum, a *chunk*. An **all-gather** puts the chunks together
# again on every rank. One after the other they are an **all-reduce**: everybody has the whole sum.
#
# *Sources.* Patarasuk and Yuan 2009, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*,
# [doi:10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002). Thakur, Rabenseifner and Gropp 2005,
# *Optimization of Collective Communication Operations in MPICH*, section 4,
# [doi:10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521).

# %%
import numpy as np

import zerosim as zs

# %% [markdown]
# ## Predict first
#
# Three ranks have a vector of three numbers each, in fp16: rank 0 has `[2048, 2048, 2048]`, the ranks 1 and 2 have
# `[1, 1, 1]`. Between 2048 and 4096 fp16 has even numbers only: 2049 lies midway and is rounded to 2048. They add up
# their vectors on a ring.
#
# 1. Which three numbers come out? All three sums have the same addends.
# 2. Does every rank get the same three?
# 3. A gradient has 1 GB. What does each of 4 ranks send in an all-reduce? And each of 64?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # as [2050, 2050, 2050]
    2: ...,  # True or False
    3: ...,  # GB that a rank sends, of 4 ranks and of 64, as [1, 1]
})

# %% [markdown]
# ## The reduce-scatter by hand
#
# Each rank cuts its vector into N chunks; in the end rank $c$ shall have chunk $c$ of the sum. In each of N-1 steps
# everyone sends one chunk to the right, receives another from the left, and adds its own copy to it. What has just been
# added is what leaves next:

# %%
def chunks_of(x, ranks):
    """x (n,) -> its N chunks, as views; the last may be short, or empty."""
    length = -(-len(x) // ranks)  # n/N, rounded up
    return [x[i * length:(i + 1) * length] for i in range(ranks)]


def reduce_scatter_by_hand(rank, x):
    """x (n,) on every rank -> this rank's chunk of the sum."""
    left, right = (rank.index - 1) % rank.size, (rank.index + 1) % rank.size
    mine = chunks_of(x, rank.size)
    partial = mine[left]
    for step in range(rank.size - 1):
        own = mine[(rank.index - 2 - step) % rank.size]
        arrived = np.empty_like(own)
        rank.exchange(partial, right, arrived, left)  # send to the right, receive from the left
        partial = arrived + own
    return partial


# %% [markdown]
# Follow one chunk $c$: it sets out on rank $c+1$, meets the ranks $c+2, c+3, \dots$, and rank $c$ adds last. So **each
# chunk is added in an order of its own**, $x_{c+1} + x_{c+2} + \dots + x_c$, and that order depends on nothing but $c$.
#
# The all-gather goes round the same way and adds nothing: everyone passes on the chunk that came last.

# %%
def all_gather_by_hand(rank, shard, length):
    """shard: this rank's chunk of n = length elements -> (n,), the chunks of all ranks."""
    whole = np.empty(length, shard.dtype)
    left, right = (rank.index - 1) % rank.size, (rank.index + 1) % rank.size
    parts = chunks_of(whole, rank.size)
    parts[rank.index][:] = shard
    for step in range(rank.size - 1):
        last, next_ = ((rank.index - further) % rank.size for further in (step, step + 1))
        rank.exchange(parts[last], right, parts[next_], left)
    return whole


def all_reduce_by_hand(rank, x):
    """x (n,) on every rank -> the sum over ranks (n,), on every rank."""
    return all_gather_by_hand(rank, reduce_scatter_by_hand(rank, x), len(x))


def three_ranks(rank):
    """The three vectors of the prediction, added up."""
    return all_reduce_by_hand(rank, np.full(3, (2048, 1, 1)[rank.index], np.float16))


totals = zs.Cluster(3).run(three_ranks)
predictions.reveal(1, totals[0])
predictions.reveal(2, all(total.tobytes() == totals[0].tobytes() for total in totals))

# %%
print("measured:")
for index, total in enumerate(totals):
    print(f"rank {index}: {total.tolist()}")

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# So: **2050, 2048, 2048.** Chunk 0 was added as $(1 + 1) + 2048 = 2050$, which is exact. Chunk 1 was $(1 + 2048) + 1$
# and chunk 2 was $(2048 + 1) + 1$: there each 1 came alone to a number that has no room for it, and was rounded away.
# Addition of rounded numbers is not associative.
# </details>
#
# <details><summary>Answer to question 2</summary>
#
# And **every rank got the same**: a chunk is added up in one place and then copied. That is why ranks that train
# together do not drift apart.
# </details>
#
# The same in a picture, for four ranks. A cell lists the ranks whose vectors have been added in it; watch chunk 0 walk
# from rank 1 round to rank 0. (With a kernel you can turn N.)

# %%
zs.draw.turn(zs.draw.ring, ranks=(4, 2, 3, 5), format=("fp16",))

# %% [markdown]
# ## Why two ranks show nothing
#
# On two ranks chunk 0 is $x_1 + x_0$ and chunk 1 is $x_0 + x_1$. Each is one addition, and one addition gives the same
# either way round. Let us count, for 10,000 random numbers in fp32, how many sums differ from those in the order of the
# ranks, $x_0 + x_1 + x_2 + \dots$:

# %%
def random_vector(index, length, dtype=np.float32):
    """Other numbers on every rank, the same ones in every run."""
    return np.random.default_rng(index).standard_normal(length).astype(dtype)


def in_rank_order(ranks, length):
    """The vectors of all ranks, added from rank 0 on."""
    total = random_vector(0, length)
    for index in range(1, ranks):
        total = total + random_vector(index, length)
    return total


rows = []
for ranks in (2, 3, 4, 8, 64):
    total = zs.Cluster(ranks).run(lambda rank: rank.all_reduce(random_vector(rank.index, 10_000)))[0]
    rows.append((ranks, f"{np.mean(total != in_rank_order(ranks, 10_000)):.1%}"))
zs.draw.table(("ranks", ">sums that differ"), rows)

# %% [markdown]
# None of these sums is wrong, each is within a few roundings of the true one. But whoever checks on two ranks that
# their own collective adds in the right order has checked nothing.
#
# ## What travels
#
# A *naive* all-reduce sends everything to rank 0, which adds up and sends the sum back. Beside it the ring, for a
# vector of 1 MB, a million bytes:

# %%
vector, rows = np.zeros(250_000, np.float32), []
for ranks in (2, 4, 8, 64):
    sent = {}
    for algorithm in ("naive", "ring"):
        cluster = zs.Cluster(ranks)
        cluster.run(lambda rank, how: rank.all_reduce(vector, algorithm=how), algorithm)
        sent[algorithm] = [nbytes / 1e6 for nbytes in cluster.trace.sent_nbytes()]
    rows.append((ranks, f"{sent['naive'][0]:.1f}", f"{sent['naive'][1]:.1f}", f"{max(sent['ring']):.3f}",
                 2 * (ranks - 1)))
predictions.reveal(3, [float(row[3]) for row in rows if row[0] in (4, 64)])

# %%
zs.draw.table(("ranks", ">naive: rank 0", ">naive: the others", ">ring: everyone", "ring: in steps"), rows,
              "Sent by one rank (MB)")

# %% [markdown]
# On the ring a rank sends N-1 of the N chunks in the reduce-scatter and N-1 in the all-gather, together
#
# $$2\,\frac{N-1}{N}\ \text{of the vector.}$$
#
# The often-heard "twice" is the limit for many ranks.
#
# <details><summary>Answer to question 3</summary>
#
# With 1 GB that is **1.5 GB on 4 ranks and 1.97 GB on 64**.
# </details>
#
# What does grow is the number of steps, $2(N-1)$, and each step takes at least the time that a message needs to get
# anywhere at all, its *latency*. For short vectors on many ranks that is what counts, and there are other algorithms
# for it.
#
# ## Try it
#
# * Let ranks 1 and 2 have `[2, 2, 2]` in `three_ranks`. Why do all three sums agree now?
# * In `reduce_scatter_by_hand` swap `left` and `right` in the `exchange`. The three sums still look right. What is
#   wrong with them, and which cell notices?
# * Let rank 0 alone leave out the last step of it (`rank.size - 1 - (rank.index == 0)`), and read the error: who waits
#   for whom? A real machine would wait for ever.
# * `for call, hop, values in zs.step_through(three_ranks, ranks=3): print(hop, values)` walks through it message by
#   message.
# * In a shell: `zerosim cost --collective all_reduce --algorithm ring --nbytes 1e9 --ranks 64 --link nvlink4` says how
#   long that takes over NVLink, NVIDIA's wire between GPUs.
#
# ## Proof
#
# By hand and by the package: the same bits on every rank and the same bytes sent, for lengths that N divides or does
# not, for chunks that are empty, for one rank alone, and in two formats.

# %%
def both_ways(rank, length, dtype):
    """Each collective by the package and by hand, one after the other, with the bytes sent in each."""
    x, found = random_vector(rank.index, length, dtype), {}
    for how, (scatter, gather, reduce) in {
            "package": (rank.reduce_scatter, lambda s: rank.all_gather(s, length=length), rank.all_reduce),
            "by hand": (lambda x: reduce_scatter_by_hand(rank, x),
                        lambda s: all_gather_by_hand(rank, s, length),
                        lambda x: all_reduce_by_hand(rank, x))}.items():
        with rank.trace.span(how):  # a stretch of the trace, by name
            shard = scatter(x)
            found[how] = shard, gather(shard), reduce(x)
    sent = [rank.trace.sent_nbytes(span=how) for how in found]
    return *found.values(), sent


compared = 0
for ranks in (1, 2, 3, 4, 5, 8, 12):
    for length in (0, 1, 7, 24, 1000):
        for dtype in (np.float32, np.float16):
            for package, by_hand, (sent, sent_by_hand) in zs.Cluster(ranks).run(both_ways, length, dtype):
                for one, other in zip(package, by_hand, strict=True):
                    assert one.dtype == other.dtype
                    assert one.tobytes() == other.tobytes(), (ranks, length, dtype)
                    compared += 1
                assert sent == sent_by_hand
print(f"{compared} results, by hand and by the package: the same bits, and the same bytes sent")
