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
# **The idea.** Inside a machine, a *node*, GPUs talk over NVLink; between nodes over a network many times slower.
# So what counts is how much of a step crosses. Less does if more is kept inside, which costs memory (*hybrid sharding*,
# *hpZ*), or if numbers have fewer bits on their way, which changes the result (*qwZ*, *qgZ*; the last three: ZeRO++).
#
# *Sources.* Zhang et al. 2022, *MiCS*, section 3, [arXiv:2205.00119](https://arxiv.org/abs/2205.00119). Wang et al.
# 2023, *ZeRO++*, section 3, [arXiv:2306.10209](https://arxiv.org/abs/2306.10209).

# %%
from dataclasses import replace

import numpy as np

import zerosim as zs
from zerosim.display.drawing import LIGHT, Drawing
from zerosim.numerics.quantization import ZeroPlusPlus

BF16, BLOCK, MESH = np.dtype("bfloat16"), 64, zs.Mesh(2, 4)  # two nodes of four ranks
MODEL = zs.models.MLP([64, 48], bias=False)  # one layer: what holds for it holds for each
(FIRST,) = zs.models.first_weights(MODEL).values()  # (64, 48), fp32
WAYS = "flat", "hybrid", "hpz", "qwz", "qgz", "hpz+qwz+qgz"

# %% [markdown]
# ## Predict first
#
# 1. Two nodes of four ranks reduce-scatter a vector on one ring of 8. What share leaves a node? Can it be less?
# 2. ZeRO-3 moves weights twice a step, gradients once. What has to cross? What does it cost to keep the rest inside?
# 3. Weights cross as 8-bit integers, 64 of which share a scale. How far off are they at most, and if one is huge?
# 4. Gradients travel in 4 bits, on a ring of N ranks. How often is a sum rounded on its way?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # the share on one ring and the least, as [1, 1]
    2: ...,  # vectors of weights, of gradients, and how many times as many bytes to keep, as [2, 1, 4]
    3: ...,  # in scales, and how many of 64 become 0 beside a huge one, as [1, 1]
    4: ...,  # times, for N = 8
})

# %% [markdown]
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


left = {}
for mesh in (MESH, zs.Mesh(2, 12), zs.Mesh(4, 4)):
    for how in ("ring", "by hand"):
        cluster = zs.Cluster(mesh.ranks)
        nbytes = np.array(cluster.run(reduced, mesh, how)).nbytes
        left[mesh, how] = sum(mesh.sent_nbytes_across(cluster.trace)) / mesh.nodes / nbytes
predictions.reveal(1, [left[MESH, how] for how in ("ring", "by hand")])

# %%
print("measured:")
for (mesh, how), share in left.items():
    print(f"{mesh.nodes} nodes of {mesh.ranks_per_node}, {how}: {share:.3f} of the vector leaves a node")

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# On one ring a single link leaves each node, and $(N-1)/N$ of the vector goes through it; in two steps $(M-1)/M$, with
# M nodes: **a half, however many ranks a node has**. Bits differ, since the order of additions does.
# </details>
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


block, blocks, sums = np.random.default_rng(0).standard_normal(BLOCK).astype(np.float32), [], []
for times in (1, 100):
    block[0] = times * np.abs(block[1:]).max()
    back = restored(quantized(block, 8), 8)
    blocks.append((block[0], np.abs(back - block).max() / (block[0] / 127), np.sum(back == 0)))
for ranks in (8, 64):
    vectors = np.random.default_rng(0).standard_normal((ranks, 4096)).astype(np.float32)
    partial = [vectors[0]]
    for x in vectors[1:]:
        partial.append(restored(quantized(partial[-1], 4), 4) + x)
    once, exact = sum(restored(quantized(x, 4), 4) for x in vectors), vectors.sum(axis=0)
    off = [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (partial[-1], once)]
    sums.append((ranks, len(partial) - 1, off))
predictions.reveal(3, blocks[1][1:], within=0.1)
predictions.reveal(4, sums[0][1])

# %%
print("measured:")
for largest, off, zeros in blocks:
    print(f"largest of 64: {largest:.1f}; off by {off:.2f} scales at most; {zeros} are 0 now")
for ranks, _, off in sums:
    print(f"a sum of {ranks}: off by {off[0]:.0%} on a ring, "
          f"by {off[1]:.0%} if each addend is sent to its owner")

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **Half a scale**. One large number makes the scale a hundred times as large, and most of the others become 0: so
# blocks are small.
# </details>
#
# <details><summary>Answer to question 4</summary>
#
# **At each of N - 1 hops**, and the error grows with N. So gradients in 4 bits are not sent round a ring: each addend
# goes to the rank that adds it, in fp32, by an *all-to-all*.
# </details>
#
# ## A step of ZeRO-3, in six ways
#
# - **flat**: notebook 8's. Each rank has 1/N of the weights, gathered for forward and again for backward.
# - **hybrid sharding**: each node has all states, cut among its ranks: no gather leaves it. Gradients cross once.
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
    for step in range(1, steps + 1):
        shard = master.astype(BF16)
        w = gathered(owners, shard, bits)  # for forward
        second = np.split(w, inside.size)[inside.index]  # what hpZ keeps of it
        x, target = (one.astype(np.float32) for one in batch(rank.index, step))
        y = (x @ w.reshape(FIRST.shape).astype(np.float32)).astype(BF16).astype(np.float32)
        dy = ((y - target) / np.float32(len(x))).astype(BF16)
        again = (inside, second) if "hpz" in way else (owners, shard, bits)
        gathered(*again)  # for backward: what the layer before needs, if there is one
        dw = (x.T @ dy.astype(np.float32)).astype(BF16).ravel()
        if "qgz" in way:
            of_node = added(inside, by_place(dw, mesh))
            sums = added(across, of_node.reshape(mesh.nodes, -1)).astype(BF16)
        else:
            sums = owners.reduce_scatter(dw, purpose="gradients")
        if way == "hybrid":
            sums = across.all_reduce(sums, purpose="gradients")
        master -= np.float32(0.5) * (sums.astype(np.float32) / np.float32(rank.size))  # SGD
    kept = shard.nbytes + master.nbytes + sums.nbytes + ("hpz" in way) * second.nbytes
    return (master.astype(BF16), master), kept, np.mean((y - target)**2)


# %%
clusters, rows = {way: zs.Cluster(8) for way in WAYS}, []
for way, cluster in clusters.items():
    _, kept, _ = cluster.run(train_by_hand, MESH, way, 1)[0]
    crossed = [sum(MESH.sent_nbytes_across(cluster.trace, purpose)) / MESH.nodes / (2 * FIRST.size)
               for purpose in ("parameters", "gradients")]
    losses = [loss for *_, loss in zs.Cluster(8).run(train_by_hand, MESH, way, 100)]
    rows.append((way, kept, *(f"{vectors:.3f}" for vectors in (*crossed, sum(crossed))),
                 f"{np.mean(losses):.1e}"))
predictions.reveal(2, [float(rows[1][2]), float(rows[1][3]), rows[1][1] / rows[0][1]])

# %%
columns = ["", "bytes kept", ">weights cross", ">gradients", ">together", ">loss, step 100"]
zs.draw.table(columns, rows,
              f"What leaves a node in a step, in Ψ = {2 * FIRST.size:,} bytes, the weights in bf16")

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# **Nothing but gradients has to cross**, if every node has all states: with Adam's 16P/R bytes of P parameters on a
# rank in place of 16P/N. hpZ pays 2P/R to keep the second gather inside.
# </details>
#
# ZeRO-3 sends $3(N-1)/N$ Ψ, hybrid sharding $2(M-1)/M$, all of ZeRO++ $\frac{17}{32}(N-1)/N + \frac{9}{32}(M-1)/M$: 8
# or 4 bits of 16, and half a bit of a scale. hpZ has ZeRO-3's bits; hybrid sharding adds in another order, the others
# round more. Who sends it:

# %%
sent = np.array([MESH.sent_nbytes_across(cluster.trace) for cluster in clusters.values()]) / 1e3
with LIGHT.figure(11, 4.2, "kB that each rank sends to the other node in a step") as figure:
    axes = figure.subplots(gridspec_kw={"left": 0.14, "right": 0.98, "bottom": 0.14})
    axes.imshow(sent**0.5, cmap="Oranges", aspect="auto", vmax=6)
    for (way, rank), kB in np.ndenumerate(sent):
        axes.text(rank, way, f"{kB:.2f}", ha="center", va="center")
    axes.set(xticks=range(8), yticks=range(6), yticklabels=WAYS, xlabel="rank; 0 to 3 are one node")
Drawing("crossing", "What crosses", "kB that each rank sends to the other node.", LIGHT, figure)

# %% [markdown]
# A ring crosses by one link of each node; in two steps each rank has a link of its own across. What that is worth in
# seconds, for a Llama-2-7B over slow Ethernet, is [here](../docs/nodes.md).
#
# ## Try it
#
# * `MESH = zs.Mesh(4, 2)`, or `zs.Mesh(8, 1)`: what is left of hybrid sharding if a node has one rank?
# * `BLOCK = 16`, or weights in 4 bits too: what grows, and does the loss notice?
# * In a shell: `zerosim compare --over zeropp --mesh 2x2 --steps 20` trains a small GPT in each way.
#
# ## Proof
#
# All ways, by hand and by the package's engine: the same bits of weights and masters, the same bytes inside nodes and
# across. hpZ has ZeRO-3's bits, a ring inside and one across those of `algorithm="hierarchical(R)"`.

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
            states = zip(*(states for states, *_ in mine), strict=True)  # weights, masters: of all ranks
            bits[way] = [np.concatenate(shards).tobytes() for shards in states]
            assert bits[way] == [whole.tobytes() for whole in theirs], (mesh, way)
            for purpose in ("parameters", "gradients"):
                one, other = ((of.trace.sent_nbytes(purpose), mesh.sent_nbytes_across(of.trace, purpose))
                              for of in (hand, package))
                assert one == other, (mesh, way, purpose)
        assert bits["hpz"] == bits["flat"]
        one, other = (zs.Cluster(ranks).run(reduced, mesh, how)
                      for how in ("by hand", f"hierarchical({mesh.ranks_per_node})"))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)), mesh
    print(f"N = {ranks}: on each mesh the same bits and bytes, by hand and by the package")
