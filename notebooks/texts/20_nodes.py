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

import ml_dtypes
import numpy as np

import zerosim as zs
from zerosim.display.drawing import LIGHT, Drawing
from zerosim.numerics.quantization import ZeroPlusPlus

BF16, BLOCK, MESH = ml_dtypes.bfloat16, 64, zs.Mesh(2, 4)  # two nodes of four ranks
MODEL = zs.models.MLP([64, 48], bias=False)  # one layer: what holds for it holds for each
(FIRST,) = zs.models.first_weights(MODEL).values()  # (64, 48), fp32
PSI = 2 * FIRST.size  # bytes of the weights, or of the gradient, in bf16

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


rows = []
for mesh in (MESH, zs.Mesh(2, 12), zs.Mesh(4, 4)):
    flat, two_steps = zs.Cluster(mesh.ranks), zs.Cluster(mesh.ranks)
    one, two = np.array(flat.run(reduced, mesh, "ring")), np.array(two_steps.run(reduced, mesh, "by hand"))
    left = [sum(mesh.sent_nbytes_across(of.trace)) / mesh.nodes / one.nbytes for of in (flat, two_steps)]
    rows.append((f"{mesh.nodes} nodes of {mesh.ranks_per_node}", *(f"{share:.3f}" for share in left),
                 f"{np.mean(one != two):.0%}"))
zs.draw.table(["", ">one ring", ">two steps", ">sums that differ"], rows, "What leaves a node, in vectors")

# %% [markdown]
# Question 1: on one ring a single link leaves each node, and $(N-1)/N$ of the vector goes through it; in two steps
# $(M-1)/M$, with M nodes: **a half, however many ranks a node has**. Bits differ, since the order of additions does.
#
# ## ZeRO-3, and where shards lie
#
# A step of notebook 8, of one layer, with its messages as methods, so that they can be changed:

# %%
class OneRing:
    """ZeRO-3: every rank has a shard, and all are on one ring."""

    def __init__(self, rank, mesh):
        self.mesh, self.inside, self.across = mesh, mesh.inside(rank), mesh.across(rank)
        self.owners, self.second = rank, None  # among whom states are cut

    def gather(self, shard):
        """This rank's shard of the weights -> all of them."""
        return self.owners.all_gather(shard, purpose="parameters")

    def reduce(self, dw):
        """dw (n,) -> this rank's shard of the sum."""
        return self.owners.reduce_scatter(dw, purpose="gradients")


def wide(x):
    """The same values in fp32."""
    return x.astype(np.float32)


def batch(index, step):
    """x (8, 64), target (8, 48): other samples on every rank and in every step."""
    x = np.random.default_rng((index, step)).standard_normal((8, 64)).astype(np.float32)
    return x.astype(BF16), x[:, :48] - x[:, 16:]


def train_by_hand(rank, mesh, messages, steps=2):
    """One rank's shards of weights, master, m and v; its loss in the last step."""
    way = messages(rank, mesh)
    master = np.split(FIRST.ravel(), way.owners.size)[way.owners.index].copy()
    m, v, shard = np.zeros_like(master), np.zeros_like(master), master.astype(BF16)
    for step in range(1, steps + 1):
        x, target = batch(rank.index, step)
        w = way.gather(shard).reshape(FIRST.shape)
        y = (wide(x) @ wide(w)).astype(BF16)
        dy = ((wide(y) - target) / np.float32(len(x))).astype(BF16)
        way.gather(shard)  # again: the layer before, if there were one, would be handed dy @ w.T
        g = wide(way.reduce((wide(x).T @ wide(dy)).astype(BF16).ravel())) / np.float32(rank.size)
        m[:] = 0.9 * m + (1 - 0.9) * g
        v[:] = 0.999 * v + (1 - 0.999) * (g * g)
        master -= 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        shard = master.astype(BF16)
    return [shard, master, m, v], np.mean((wide(y) - target)**2)


# %% [markdown]
# **Hybrid sharding** cuts states among the ranks of a node, and each node has all of them: no gather leaves a node, and
# gradients cross once a step, whatever the number of micro-batches. **hpZ** leaves the states cut among all ranks; of
# what forward has gathered each rank keeps a *secondary shard*, cut among its node's ranks, for backward to gather:

# %%
class Hybrid(OneRing):
    def __init__(self, rank, mesh):
        super().__init__(rank, mesh)
        self.owners = self.inside

    def reduce(self, dw):
        return self.across.all_reduce(super().reduce(dw), purpose="gradients")


class Hpz(OneRing):
    def gather(self, shard):
        if self.second is None:
            whole = super().gather(shard)
            self.second = np.split(whole, self.inside.size)[self.inside.index]
        else:  # once: then the weights change
            whole, self.second = self.inside.all_gather(self.second, purpose="parameters"), None
        return whole


# %% [markdown]
# ## Fewer bits
#
# In *blockwise quantization* the largest magnitude of a block, over the largest integer, 127 or 7, is its scale; each
# number becomes the nearest multiple of that. **qwZ** gathers weights so, in 8 bits. A ring of gradients in 4 bits
# would round at each hop; **qgZ** sends each addend once, to the rank of its node that adds it, in fp32, and then each
# node's sum, to its owner: two all-to-alls.

# %%
def quantized(x, bits):
    """x (n,) -> bytes: an fp32 scale for each block, then the integers, two to a byte if of 4 bits."""
    blocks = wide(x).reshape(-1, BLOCK)
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


class Qwz(OneRing):
    def gather(self, shard):
        messages = np.split(super().gather(quantized(shard, 8)), self.owners.size)
        return np.concatenate([restored(message, 8).astype(BF16) for message in messages])


class Qgz(OneRing):
    def reduce(self, dw):
        of_node = self.exchanged(self.inside, by_place(dw, self.mesh))
        return self.exchanged(self.across, of_node.reshape(self.mesh.nodes, -1)).astype(BF16)

    def exchanged(self, group, parts):
        """parts (ranks, n), one for each rank -> the sum of those for this rank (n,), fp32."""
        sent = np.concatenate([quantized(part, 4) for part in parts])
        arrived = np.split(group.all_to_all(sent, purpose="gradients"), group.size)
        return sum(restored(message, 4) for message in arrived)


class All(Hpz, Qwz, Qgz):
    """The first gather by qwZ, the second inside the node, gradients by qgZ."""


# %%
block = np.random.default_rng(0).standard_normal(BLOCK).astype(np.float32)
for times in (1, 100):
    block[0] = times * np.abs(block[1:]).max()
    back = restored(quantized(block, 8), 8)
    off = np.abs(back - block).max() / (block[0] / 127)
    print(f"largest of 64: {block[0]:.1f}; off by {off:.2f} scales at most; {np.sum(back == 0)} are 0 now")
for nodes, each in ((2, 4), (8, 8)):
    vectors = np.random.default_rng(0).standard_normal((nodes, each, 4096)).astype(np.float32)
    ring = reduce(lambda total, x: restored(quantized(total, 4), 4) + x, vectors.reshape(-1, 4096))
    of_nodes = [sum(restored(quantized(x, 4), 4) for x in node) for node in vectors]
    twice, exact = sum(restored(quantized(x, 4), 4) for x in of_nodes), vectors.sum(axis=(0, 1))
    off = [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (ring, twice)]
    print(f"{nodes} nodes of {each}: off by {off[0]:.0%} on a ring, by {off[1]:.0%} in two all-to-alls")

# %% [markdown]
# Question 3: **half a scale**. One large number makes the scale a hundred times as large, and most of the others become
# 0: so blocks are small. Question 4: **at each of N - 1 hops**, and the error grows with N. Two all-to-alls round twice
# on any number of ranks.
#
# ## What crosses

# %%
WAYS = {OneRing: "flat", Hybrid: None, Hpz: "hpz", Qwz: "qwz", Qgz: "qgz", All: "hpz+qwz+qgz"}
clusters, rows = {way: zs.Cluster(8) for way in WAYS}, []
for way, cluster in clusters.items():
    states, _ = cluster.run(train_by_hand, MESH, way, 1)[0]
    crossed = [sum(MESH.sent_nbytes_across(cluster.trace, purpose)) / MESH.nodes / PSI
               for purpose in ("parameters", "gradients")]
    losses = [loss for _, loss in zs.Cluster(8).run(train_by_hand, MESH, way, 100)]
    kept = states[0].nbytes + sum(state.nbytes for state in states)  # with a gradient, as large as weights
    rows.append((way.__name__, kept, PSI // MESH.ranks_per_node if issubclass(way, Hpz) else 0,
                 *(f"{vectors:.3f}" for vectors in (*crossed, sum(crossed))), f"{np.mean(losses):.4f}"))
columns = ["", "states", "second shard", ">weights cross", ">gradients", ">together", ">loss, step 100"]
zs.draw.table(columns, rows, f"Bytes of a rank; what leaves a node in a step, in Ψ = {PSI:,} bytes")

# %% [markdown]
# Question 2: **nothing but gradients has to cross**, if every node has all states: 16P/R bytes of P parameters on each
# rank in place of 16P/N. hpZ pays 2P/R to keep the second gather inside. In Ψ a node sends $3(N-1)/N$ by ZeRO-3,
# $2(M-1)/M$ by hybrid sharding, and $\frac{17}{32}(N-1)/N + \frac{9}{32}(M-1)/M$ by all of ZeRO++, whose numbers have 8
# or 4 bits of 16, and half a bit of a scale: **here less than a quarter of ZeRO-3's**.
#
# hpZ has ZeRO-3's bits. Hybrid sharding adds in another order, the others round more: what that costs is a question of
# the model, and this one hardly notices. Who sends what to whom:

# %%
def squares():
    """For each way, what each rank sends to each other one."""
    title = "What each rank (row) sends to each other one (column) in a step, in kB"
    with LIGHT.figure(11, 7.6, title, "Beyond the lines it crosses from node to node") as figure:
        panels = figure.subplots(2, 3, gridspec_kw={"top": 0.82, "bottom": 0.03, "hspace": 0.2}).flat
        for axes, (way, cluster) in zip(panels, clusters.items(), strict=True):
            sent = np.zeros((8, 8))
            for rank, trace in enumerate(cluster.trace):
                for row in trace.messages():
                    for hop in row.hops():  # of all ranks of the group
                        source, to = row.call.group[hop.source], row.call.group[hop.destination]
                        sent[source, to] += hop.nbytes / 1e3 * (source == rank)
            axes.imshow(sent**0.5, cmap="Oranges", vmax=7)
            for (source, to), kB in np.ndenumerate(sent):
                axes.text(to, source, f"{kB:.1f}" if kB else "", ha="center", va="center", fontsize=9)
            for border in range(MESH.ranks_per_node, 8, MESH.ranks_per_node):
                axes.axhline(border - 0.5, color="black")
                axes.axvline(border - 0.5, color="black")
            axes.set(title=way.__name__, xticks=range(8), yticks=range(8))
    return Drawing("crossing", title, f"{title}: a square for each way.", LIGHT, figure)


squares()

# %% [markdown]
# A ring crosses by one link of each node; in two steps each rank has a link of its own across. What that is worth in
# seconds, for a Llama-2-7B over slow Ethernet, is [here](../docs/nodes.md).
#
# ## Try it
#
# * `MESH = zs.Mesh(4, 2)`, or `zs.Mesh(8, 1)`: what is left of hybrid sharding if a node has one rank?
# * `BLOCK = 16`, or weights in 4 bits too (`Qwz`), or gradients in 8 (`Qgz`): what grows, and does the loss notice?
# * Let `Hpz` keep its secondary shard for ever. From which step on are weights stale, and what says so?
# * In a shell: `zerosim compare --over zeropp --mesh 2x2 --steps 20` trains a small GPT in each way.
#
# ## Proof
#
# By hand and by the package's engine, all ways on a mesh: the same bits of weights, masters and moments, and the same
# bytes inside nodes and between them, with all of ZeRO++ those of the formula. hpZ has ZeRO-3's bits. A ring inside and
# one across have the bits of `algorithm="hierarchical(R)"`.

# %%
def train_by_engine(rank, mesh, parts):
    """The same steps by the package: weights, master, m and v."""
    zeropp = parts and replace(ZeroPlusPlus.parse(parts), block=BLOCK)
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(0.01), stage=3, policy="bf16", mesh=mesh,
                       zeropp=zeropp)
    for step in (1, 2):
        engine.step([batch(rank.index, step)])
    (state,) = (engine.state(name) for name in MODEL.shapes)
    return [state[key].ravel() for key in ("parameter", "master", "m", "v")]


for ranks in (1, 2, 3, 4, 6):
    for nodes in (one for one in (1, 2, 3) if ranks % one == 0):
        mesh, bits = zs.Mesh(nodes, ranks // nodes), {}
        for way, parts in WAYS.items():
            hand, package = zs.Cluster(ranks), zs.Cluster(ranks)
            mine, theirs = hand.run(train_by_hand, mesh, way), package.run(train_by_engine, mesh, parts)[0]
            mine = mine[:mesh.ranks_per_node] if way is Hybrid else mine  # one node has everything
            shards = zip(*(states for states, _ in mine), strict=True)  # of weights, master, m, v
            whole = [np.concatenate(of_ranks) for of_ranks in shards]
            bits[way] = [one.tobytes() for one in whole]
            assert all(one.tobytes() == other.tobytes() for one, other in zip(whole, theirs, strict=True))
            for purpose in ("parameters", "gradients"):
                assert hand.trace.sent_nbytes(purpose) == package.trace.sent_nbytes(purpose), (mesh, way)
                sent = [mesh.sent_nbytes_across(of.trace, purpose) for of in (hand, package)]
                assert sent[0] == sent[1], (mesh, way)
        weights, gradient = ((bits_of_one + 32 / BLOCK) / 16 for bits_of_one in (8, 4))
        of_all = weights * (ranks - 1) / ranks * (nodes > 1) + gradient * (nodes - 1) / nodes
        assert np.isclose(sum(mesh.sent_nbytes_across(hand.trace)) / nodes / 2, PSI * of_all), mesh
        assert bits[Hpz] == bits[OneRing]
        one, other = (zs.Cluster(ranks).run(reduced, mesh, how)
                      for how in ("by hand", f"hierarchical({mesh.ranks_per_node})"))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)), mesh
    print(f"N = {ranks}: on each mesh the same bits and bytes, by hand and by the package")
