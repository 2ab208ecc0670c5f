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
# # 20. Nodes: what crosses a slow link
#
# **The idea.** NVLink joins the GPUs of one machine, a *node*; network cards join nodes, and are many times slower. So
# what counts is not what a step sends, but how much of it crosses from node to node. Less crosses if more is kept
# inside, which costs memory (*hybrid sharding*, *hpZ*), or if numbers have fewer bits on their way, which changes the
# result (*qwZ*, *qgZ*; the last three are ZeRO++).
#
# *Sources.* Zhang et al. 2022, *MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud*, section 3,
# [arXiv:2205.00119](https://arxiv.org/abs/2205.00119). Wang et al. 2023, *ZeRO++: Extremely Efficient Collective
# Communication for Giant Model Training*, section 3, [arXiv:2306.10209](https://arxiv.org/abs/2306.10209).

# %%
from dataclasses import replace
from functools import reduce

import numpy as np

import zerosim as zs
from zerosim.display.drawing import LIGHT, Drawing
from zerosim.numerics.quantization import ZeroPlusPlus

BF16, BLOCK, MESH = np.dtype("bfloat16"), 64, zs.Mesh(2, 4)  # two nodes of four ranks
MODEL = zs.models.MLP([64, 48], bias=False)  # one layer: what holds for it holds for each
(FIRST,) = zs.models.first_weights(MODEL).values()  # (64, 48), fp32
PSI = 2 * FIRST.size  # bytes of the weights, or of the gradient, in bf16
WAYS = "flat", "hybrid", "hpz", "qwz", "qgz", "hpz+qwz+qgz"

# %% [markdown]
# ## Predict first
#
# Two nodes of four ranks each.
#
# 1. They reduce-scatter a vector on one ring, 0, 1, ..., 7. What share of it leaves each node? Can it be less?
# 2. ZeRO-3 moves the weights twice a step and the gradients once. Which of the three has to cross? What does it cost to
#    keep the others inside?
# 3. Weights cross as 8-bit integers, 64 of which share a scale. How far off are they at most, and if one is huge?
# 4. Gradients travel in 4 bits, on a ring of N ranks. How often is a sum rounded on its way?
#
# Write your answers down, then read on.
#
# ## A ring inside, a ring across
#
# Add up inside the node first: then each rank has a fourth of the vector, and that alone has to be added across.
# `mesh.inside(rank)` are the ranks of its node, `mesh.across(rank)` those at its place, one of each node. Chunks, which
# stand node by node, are put place by place first, so that each rank ends with its own: a *hierarchical collective*.

# %%
def by_place(x, mesh):
    """x (n,), a chunk for each rank -> (R, n/R): a row for each place, with its chunks for all nodes."""
    return x.reshape(mesh.nodes, mesh.ranks_per_node, -1).swapaxes(0, 1).reshape(mesh.ranks_per_node, -1)


def reduced(rank, mesh, how):
    """A random vector reduce-scattered: this rank's chunk of the sum."""
    x = np.random.default_rng(rank.index).standard_normal(24_000).astype(np.float32)
    if how == "by hand":
        of_node = mesh.inside(rank).reduce_scatter(by_place(x, mesh).ravel())
        return mesh.across(rank).reduce_scatter(of_node)
    return rank.reduce_scatter(x, algorithm=how)


for mesh in (MESH, zs.Mesh(2, 12), zs.Mesh(4, 4)):
    for how in ("ring", "by hand"):
        cluster = zs.Cluster(mesh.ranks)
        nbytes = np.array(cluster.run(reduced, mesh, how)).nbytes
        left = sum(mesh.sent_nbytes_across(cluster.trace)) / mesh.nodes / nbytes
        print(f"{mesh.nodes} nodes of {mesh.ranks_per_node}, {how}: {left:.3f} of the vector leaves a node")

# %% [markdown]
# Question 1: on one ring a single link leaves each node, and $(N-1)/N$ of the vector goes through it; in two steps
# $(M-1)/M$, with M nodes: **a half, however many ranks a node has**. Bits differ, since the order of additions does.
#
# ## Fewer bits
#
# In *blockwise quantization* the largest magnitude of a block, over the largest integer, 127 or 7, is its scale; each
# number becomes the nearest multiple of that.

# %%
def quantized(x, bits):
    """x (n,) -> bytes: an fp32 scale for each block, then the integers, two to a byte if of 4 bits."""
    blocks = x.astype(np.float32).reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1) / np.float32(2**(bits - 1) - 1)
    integers = np.rint(blocks / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8).ravel()
    if bits == 4:
        integers = (integers[0::2] & 15) | (integers[1::2] << 4)
    return np.concatenate([scales.view(np.uint8), integers.view(np.uint8)])


def restored(message, bits):
    """Such bytes -> x (n,), fp32."""
    count = len(message) // (4 + BLOCK * bits // 8)  # of blocks
    scales, integers = message[:4 * count].view(np.float32), message[4 * count:].view(np.int8)
    if bits == 4:
        integers = np.stack([(integers << 4) >> 4, integers >> 4], axis=1)
    return (integers.reshape(count, BLOCK) * scales[:, None]).ravel()


block = np.random.default_rng(0).standard_normal(BLOCK).astype(np.float32)
for times in (1, 100):
    block[0] = times * np.abs(block[1:]).max()
    back = restored(quantized(block, 8), 8)
    off = np.abs(back - block).max() / (block[0] / 127)
    print(f"largest of 64: {block[0]:.1f}; off by {off:.2f} scales at most; {np.sum(back == 0)} are 0 now")
for ranks in (8, 64):
    vectors = np.random.default_rng(0).standard_normal((ranks, 4096)).astype(np.float32)
    ring = reduce(lambda total, x: restored(quantized(total, 4), 4) + x, vectors)
    once, exact = sum(restored(quantized(x, 4), 4) for x in vectors), vectors.sum(axis=0)
    off = [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (ring, once)]
    print(f"a sum of {ranks}: off by {off[0]:.0%} on a ring, by {off[1]:.0%} if each addend is sent to its owner")

# %% [markdown]
# Question 3: **half a scale**. One large number makes the scale a hundred times as large, and most of the others become
# 0: so blocks are small. Question 4: **at each of N - 1 hops**, and the error grows with N. So gradients in 4 bits are
# not sent round a ring: each addend goes to the rank that adds it, in fp32, by an *all-to-all*.
#
# ## A step of ZeRO-3, in six ways
#
# - **flat**: notebook 8's. Each rank has 1/N of the weights, gathered for forward and again for backward.
# - **hybrid sharding**: states are cut among the ranks of a node, and each node has all of them. No gather leaves a
#   node, and gradients cross once a step, whatever the number of micro-batches.
# - **hpZ**: of what forward has gathered a rank keeps a *secondary shard*, cut inside its node, for backward.
# - **qwZ**: weights are gathered in 8 bits. **qgZ**: gradients are added in 4, inside nodes and then across.

# %%
def batch(index, step):
    """x (8, 64) in bf16, target (8, 48): other samples on every rank and in every step."""
    x = np.random.default_rng((index, step)).standard_normal((8, 64)).astype(np.float32)
    return x.astype(BF16), x[:, :48] - x[:, 16:]


def gathered(group, shard, bits=16):
    """The shards of all ranks of a group, put together in bf16."""
    if bits == 16:
        return group.all_gather(shard, purpose="parameters")
    messages = np.split(group.all_gather(quantized(shard, bits), purpose="parameters"), group.size)
    return np.concatenate([restored(message, bits).astype(BF16) for message in messages])


def added(group, parts):
    """parts (ranks, n), one for each rank, in 4 bits -> the sum of those for this rank (n,), fp32."""
    sent = np.concatenate([quantized(part, 4) for part in parts])
    arrived = np.split(group.all_to_all(sent, purpose="gradients"), group.size)
    return sum(restored(message, 4) for message in arrived)


def train_by_hand(rank, mesh, way, steps=2):
    """One rank's shards of weights and master, the bytes that it keeps, and its last loss."""
    inside, across, bits = mesh.inside(rank), mesh.across(rank), 8 if "qwz" in way else 16
    owners = inside if way == "hybrid" else rank  # among whom states are cut
    master = np.split(FIRST.ravel(), owners.size)[owners.index].copy()
    shard = master.astype(BF16)
    for step in range(1, steps + 1):
        w = gathered(owners, shard, bits)  # for forward
        second = np.split(w, inside.size)[inside.index]  # what hpZ keeps of it
        x, target = (one.astype(np.float32) for one in batch(rank.index, step))
        y = (x @ w.reshape(FIRST.shape).astype(np.float32)).astype(BF16).astype(np.float32)
        dy = ((y - target) / np.float32(len(x))).astype(BF16)
        gathered(*(inside, second) if "hpz" in way else (owners, shard, bits))  # for the layer before, if any
        dw = (x.T @ dy.astype(np.float32)).astype(BF16).ravel()
        if "qgz" in way:
            of_node = added(inside, by_place(dw, mesh))
            sums = added(across, of_node.reshape(mesh.nodes, -1)).astype(BF16)
        else:
            sums = owners.reduce_scatter(dw, purpose="gradients")
        if way == "hybrid":
            sums = across.all_reduce(sums, purpose="gradients")
        master -= np.float32(0.5) * (sums.astype(np.float32) / np.float32(rank.size))  # SGD
        shard = master.astype(BF16)
    kept = shard.nbytes + master.nbytes + sums.nbytes + ("hpz" in way) * second.nbytes
    return (shard, master), kept, np.mean((y - target)**2)


# %% [markdown]
# ## What crosses

# %%
clusters, rows = {way: zs.Cluster(8) for way in WAYS}, []
for way, cluster in clusters.items():
    _, kept, _ = cluster.run(train_by_hand, MESH, way, 1)[0]
    crossed = [sum(MESH.sent_nbytes_across(cluster.trace, purpose)) / MESH.nodes / PSI
               for purpose in ("parameters", "gradients")]
    losses = [loss for *_, loss in zs.Cluster(8).run(train_by_hand, MESH, way, 100)]
    rows.append((way, kept, *(f"{vectors:.3f}" for vectors in (*crossed, sum(crossed))), f"{np.mean(losses):.1e}"))
columns = ["", "bytes kept", ">weights cross", ">gradients", ">together", ">loss, step 100"]
zs.draw.table(columns, rows, f"What leaves a node in a step, in Ψ = {PSI:,} bytes")

# %% [markdown]
# Question 2: **nothing but gradients has to cross**, if every node has all states: with Adam's 16P/R bytes of P
# parameters on each rank in place of 16P/N. hpZ pays 2P/R to keep the second gather inside. In Ψ a node sends
# $3(N-1)/N$ by ZeRO-3, $2(M-1)/M$ by hybrid sharding, and $\frac{17}{32}(N-1)/N + \frac{9}{32}(M-1)/M$ by all of
# ZeRO++, whose numbers have 8 or 4 bits of 16, and half a bit of a scale: **less than a quarter of ZeRO-3's**.
#
# hpZ has ZeRO-3's bits. Hybrid sharding adds in another order, the others round more: what that costs is a question of
# the model, and this one hardly notices. Who sends how much to whom:

# %%
with LIGHT.figure(11, 7.6, "kB that each rank (row) sends to each other one (column) in a step") as figure:
    panels = figure.subplots(2, 3, gridspec_kw={"top": 0.86, "bottom": 0.03, "hspace": 0.2}).flat
    for axes, (way, cluster) in zip(panels, clusters.items(), strict=True):
        sent = np.zeros((8, 8))
        for rank, trace in enumerate(cluster.trace):
            for row in trace.messages():
                for hop in row.hops():  # of all ranks of the group
                    source, to = row.call.group[hop.source], row.call.group[hop.destination]
                    sent[source, to] += hop.nbytes / 1e3 * (source == rank)
        axes.imshow(sent**0.5, cmap="Oranges", vmax=7)
        axes.set(title=way, xticks=range(8), yticks=range(8))
        axes.axhline(3.5, color="black")  # beyond these lines it crosses from node to node
        axes.axvline(3.5, color="black")
Drawing("crossing", "What ranks send", "kB from each rank to each other one, six ways.", LIGHT, figure)

# %% [markdown]
# A ring crosses by one link of each node; in two steps each rank has a link of its own across. What that is worth in
# seconds, for a Llama-2-7B over slow Ethernet, is [here](../docs/nodes.md).
#
# ## Try it
#
# * `MESH = zs.Mesh(4, 2)`, or `zs.Mesh(8, 1)`: what is left of hybrid sharding if a node has one rank?
# * `BLOCK = 16`, or weights in 4 bits too: what grows, and does the loss notice?
# * Let `second` outlive the step. From which step on are weights stale, and what says so?
# * In a shell: `zerosim compare --over zeropp --mesh 2x2 --steps 20` trains a small GPT in each way.
#
# ## Proof
#
# By hand and by the package's engine, all ways on a mesh: the same bits of weights and masters, and the same bytes
# inside nodes and between them. hpZ has ZeRO-3's bits. A ring inside and one across have the bits of
# `algorithm="hierarchical(R)"`.

# %%
def train_by_engine(rank, mesh, way):
    """The same steps by the package: weights and master."""
    zeropp = None if way == "hybrid" else replace(ZeroPlusPlus.parse(way), block=BLOCK)
    engine = zs.Engine(rank, MODEL, zs.optim.SGD(0.5), stage=3, policy="bf16", mesh=mesh, zeropp=zeropp)
    for step in (1, 2):
        engine.step([batch(rank.index, step)])
    return [engine.state(*MODEL.shapes)[key].ravel() for key in ("parameter", "master")]


for ranks in (1, 2, 3, 4, 6):
    for nodes in (one for one in (1, 2, 3) if ranks % one == 0):
        mesh, bits = zs.Mesh(nodes, ranks // nodes), {}
        for way in WAYS:
            hand, package = zs.Cluster(ranks), zs.Cluster(ranks)
            mine, theirs = hand.run(train_by_hand, mesh, way), package.run(train_by_engine, mesh, way)[0]
            mine = mine[:mesh.ranks_per_node] if way == "hybrid" else mine  # one node has everything
            whole = [np.concatenate(shards) for shards in zip(*(states for states, *_ in mine), strict=True)]
            bits[way] = [one.tobytes() for one in whole]
            assert all(one.tobytes() == other.tobytes() for one, other in zip(whole, theirs, strict=True))
            for purpose in ("parameters", "gradients"):
                assert hand.trace.sent_nbytes(purpose) == package.trace.sent_nbytes(purpose), (mesh, way)
                sent = [mesh.sent_nbytes_across(of.trace, purpose) for of in (hand, package)]
                assert sent[0] == sent[1], (mesh, way)
        assert bits["hpz"] == bits["flat"]
        one, other = (zs.Cluster(ranks).run(reduced, mesh, how)
                      for how in ("by hand", f"hierarchical({mesh.ranks_per_node})"))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)), mesh
    print(f"N = {ranks}: on each mesh the same bits and bytes, by hand and by the package")
