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
# # 14. Common mistakes in published numbers
#
# **The idea.** Papers, lessons and documentation print numbers about memory and messages, and are copied from one
# another. Some do not follow from the formulas beside them. One need not argue about it: an estimate (the formula,
# filled in) and a measurement (a run) both have something to say, and where the two agree, the print is wrong.
#
# The texts are good ones, and most of their numbers are right. Each is cited with its section or table; authors, titles
# and links stand on the [page of references](../docs/references.md). Four lessons are cited most, by these letters:
#
# * **B**: Yan 2026, *The Burden of Memory*,
#   [ezyhdxm.github.io](https://ezyhdxm.github.io/hao-blog/2026/03/22/training-memory-zero.html).
# * **S**: stochi0 2025, *Mixed Precision and ZeRO: Training Large Models Without Running Out of Memory*,
#   [stochi0.vercel.app](https://stochi0.vercel.app/writings/mix-precision-training).
# * **M**: a note on mixed-precision training, without a title. We do not know its author and address; the page of
#   references says how one recognizes it.
# * **H**: Won 2025, *ZeRO by hand with a 4-parameter model*,
#   [dev.to](https://dev.to/lewis_won/data-parallelism-4g3m), whose example is that of notebook 1.

# %%
import numpy as np

import zerosim as zs
from zerosim.course.published import published
from zerosim.course.published_runs import blocks, checked

# %% [markdown]
# ## Predict first
#
# Four statements that are in print. Right or wrong, and if wrong, by how much?
#
# 1. 7 billion parameters on 8 GPUs take 21.5 GB on each with ZeRO-1, and 15.75 GB with ZeRO-2 (B, section 9).
# 2. To all-reduce 14 GB over NVLink, with its 900 GB/s, takes about 31 ms (B, section 8).
# 3. ZeRO-1 all-reduces the gradients, each rank updates its slice, the weights are all-gathered (B, section 9); that is
#    no more than plain data parallelism sends (B, section 10).
# 4. To scale the loss keeps fp16 from overflowing (S, "Engineering optimizations" and "Common failure modes").
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # GB with ZeRO-1 and with ZeRO-2, as [21.5, 15.75]
    2: ...,  # milliseconds
    3: ...,  # how many times as many bytes as with a reduce-scatter in the all-reduce's place
    4: ...,  # "overflow" or "underflow": what scaling cures
})

# %% [markdown]
# ## All at once
#
# The package keeps published numbers with their sources. `checked` runs those that a run can check, on arrays without
# data (notebook 13), and lays the result beside print and estimate.

# %%
zs.draw.published()

# %% [markdown]
# Most agree, among them the whole first table of ZeRO's paper. Of the others a few lines each. (Ψ is the bytes of all
# parameters in 16 bits, k the number of micro-batches; B, L, d and H are those of notebook 10.)
#
# ## Memory of the model's states

# %%
TRAFFIC = ("vectors at", "vectors beside ddp", "all-reduce then all-gather", "transfer milliseconds")


def lay_out(*subjects, traffic=False):
    """The statements about some subjects that do not close."""
    return zs.draw.table(["", "print", "estimate", "measured", "printed in", "why it is wrong"], [
        (one.row.name, f"{one.row.stated:g}", f"{one.estimated:.4g}",
         f"{one.measured:.4g} {one.row.unit}".rstrip(), one.row.source, one.row.why)
        for one in checked(*subjects) if not one.row.closes and (one.row.quantity in TRAFFIC) == traffic])


states = {one.row.name: one.measured for one in checked("states")}
predictions.reveal(1, [states[f"7e9 parameters on 8 ranks, stage {stage}"] for stage in (1, 2)])

# %%
lay_out("states")

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **38.5 and 26.25 GB**, 1.8 and 1.7 times what is printed. (The other two of that table, 112 GB without ZeRO and 14
# with ZeRO-3, are right.)
# </details>
#
# * "No current single GPU can hold" 112 GB (B, section 1, whose own table has one of 141 GB): that one can, with 29 GB
#   left for activations.
# * The bytes for each parameter in S, "Memory accounting" and "ZeRO", go wrong in three ways. Of the 12 that stage 1
#   cuts, master and two moments, a formula has 4; a sum leaves out the gradients that it lists; and a formula for all
#   stages comes to 10 on one rank, where each stage holds 16. And a billion parameters make 16 GB, not "terabytes".
# * Eight copies do not "waste 896 GB" (B, section 1). That is what they hold; one of them is needed, 784 are redundant.
# * M, "Concrete Walkthrough", is right that mixed precision halves no states: 2800 GB in both. But "per-step memory
#   savings: ~50%", its next number, are those of activations alone; with states, a step saves less.
#
# ## Messages

# %%
messages = {one.row.name: one.measured for one in checked("collectives")}
predictions.reveal(2, messages["milliseconds of transfer of a 14 GB all-reduce over NVLink 4 on 8 ranks"])

# %%
lay_out("states", "collectives", traffic=True)

# %%
vector, rows = np.zeros(250_000, np.float32), []
for algorithm in ("everyone", "ring"):
    cluster = zs.Cluster(8)
    cluster.run(lambda rank, how: rank.all_reduce(vector, algorithm=how), algorithm)
    rows.append((algorithm, cluster.trace.sent_nbytes()[0] / vector.nbytes))
zs.draw.table(["all-reduce on 8 ranks", "vectors that each sends"], rows)

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# **54.4 ms**. The 900 GB/s of a data sheet are both ways together, and a message goes one way: 2 · 14/450 are 62.2 ms,
# of which 8 ranks need 7/8. (The same section calls PCIe 5.0's 64 GB/s "bidirectional", which are one way, and section
# 10 gives NVLink 600 GB/s, which is the generation before, both ways together.)
# </details>
#
# * "2Ψ" and "3Ψ" (Rajbhandari et al. 2020, section 7) are limits for many ranks; what is sent is (N-1)/N of it. On 2
#   ranks that is half. H, "Stage 1", gives the factor to the reduce-scatter and not to the all-gather; both have it.
# * Stages 1 and 2 are "genuinely free" (B, section 10) with one micro-batch. With k of them stage 2 sends (k+1)/2 times
#   as much as stage 0.
# * "Each GPU sends its gradients to all other GPUs" (H, between "Stage 1" and "Stage 2") sends (N-1)Ψ, not 2Ψ(N-1)/N:
#   four times as much on 8 ranks.
#
# ## Activations

# %%
lay_out("activations")

# %%
SIZES = {"batch": 4, "tokens": 2048, "channels": 4096, "heads": 32}
none = blocks(32, "none", **SIZES)
zs.draw.table(["32 blocks", "GB at most", "more operations than without recomputation"], [
    (policy, round(found.peak_nbytes / 1e9, 2), f"{found.flops / none.flops - 1:.1%}")
    for policy in ("block", "segment(6)", "sub_block") for found in [blocks(32, policy, **SIZES)]])

# %%
zs.draw.table(["overhead, GB", "print", "sum of its parts"], [
    (row.name, row.stated, row.expected)
    for row in published("activations") if row.quantity == "overhead"])

# %% [markdown]
# * A multiply-add is two operations (B, section 5); with the softmax it is a little more still.
# * The column "Bytes stored" of B, section 5, "Activation checkpointing and selective recomputation", has elements for
#   Q, K and V ($3BLd$), bytes for the probabilities ($2BHL^2$), and neither for the two tensors of the feed-forward
#   network ($4BLd_\text{ff}$ each: they have $BLd_\text{ff}$ elements, which are $2BLd_\text{ff}$ bytes).
#   Section 5d calls the 8BLd elements of these two the largest cost of a layer: the probabilities are 16BLd here.
# * Recomputation by blocks does not leave the L² term "intact" (B, section 11): of 34.4 GB it leaves one block's 1.07.
# * Segments of √n blocks are best (B, section 5 and its note on Chen et al. 2016) if a block keeps as much inside as
#   its input is. It keeps far more here, so the best segment is one block: 4.16 GB, and 12.35 with segments of 6.
# * Saving the inputs of attention and of the feed-forward network "halves the recomputation cost" (B, section 5):
#   20.5% where whole blocks take 33.3%. That is more than half, and more is held.
# * "2 to 4 GB of overhead" (B, section 6) is less than the sum of the parts that the text lists, 2.7 to 7 GB. No run of
#   ours can show that; a GPU could.
#
# ## Numbers

# %%
lay_out("flops")

# %%
predictions.reveal(4, "overflow" if np.isfinite(zs.round_to(7e4 * 1024, "fp16")) else "underflow")

# %%
zs.draw.table(["a gradient of", "in fp16", "scaled by 1024", "scaled by 1/4"], [
    (f"{value:g}", *(f"{float(zs.round_to(value * scale, 'fp16') / scale):.3g}"
                     for scale in (1, 1024, 1 / 4))) for value in (1e-8, 7e4)])


# %%
def first_moves(rank, optimizer):
    """The way that the first step moves four weights of 1, by gradients from a thousandth to a hundred."""
    g, w = np.array([1e-3, 0.1, 1, 100], np.float32), np.ones(4, np.float32)
    state = {name: np.zeros(4, np.float32) for name in optimizer.slots((4,))}
    optimizer.update(zs.optim.UpdateContext(rank.kernels), w, g, state, 1)
    return ", ".join(f"{move:.1g}" for move in 1 - w)


zs.draw.table(["gradients", "0.001, 0.1, 1, 100"], [
    (f"{type(optimizer).__name__} moves weights by", zs.Cluster(1).run(first_moves, optimizer)[0])
    for optimizer in (zs.optim.SGD(lr=1e-3), zs.optim.Adam(lr=1e-3))])

# %% [markdown]
# <details><summary>Answer to question 4</summary>
#
# Scaling cures **underflow**: 1e-8 becomes 0 in fp16 and survives times 1024. 7e4 is inf, and a larger S makes it
# worse. Overflow is what a loss scaler must notice, in order to skip the step and shrink S (notebook 3).
# </details>
#
# * What is below 6e-5 does not become 0 in fp16, as M, "The Problem" ("denormalized fp16 values flush to zero"), and B,
#   section 2, have it: subnormals reach 6e-8, and half of that is the last to become 0.
# * bf16's mantissa is not "similar to fp16" (M, "What's Clever (continued)"), its spacing is 8 times as coarse.
# * The favorite example of a lost update, $\eta g = 10^{-8}$ (H, "Why make a copy of the model weights for optimizer
#   states"), is SGD's, where the text assumes Adam, whose first step is η whatever the gradient. Nor is one weight's
#   update like another's "since the gradient magnitude is close" (H, "Stage 1"): it is so for every magnitude. And fp32
#   loses $10^{-8}$, too, at every weight from 0.25 up (notebook 2).
#
# ## Optimizers
#
# B, section 9, prints Muon with the cubic iteration $X \leftarrow \frac32 X - \frac12 X X^T X$, of the gradient, with
# the remark that a matrix whose rows lie on several ranks must be all-gathered for it.

# %%
def singular_values(rank, iteration):
    """The values that 5 iterations make of singular values from 0.01 up."""
    x = np.diag(np.array([1, 0.1, 0.01], np.float32))
    zs.optim.orthogonalize(zs.optim.UpdateContext(rank.kernels), x, iteration, 5)
    return x.diagonal().astype(float).round(2).tolist()


def by_rows(rank, rows, columns):
    """20 cubic iterations on this rank's rows alone: what all need is the sum of their XᵀX."""
    whole = np.random.default_rng(0).standard_normal((rows, columns)) / rows
    mine, own = np.array_split(whole, rank.size)[rank.index], whole.copy()
    for _ in range(20):
        products = rank.all_reduce((mine.T @ mine).reshape(-1)).reshape(columns, columns)
        mine = 1.5 * mine - 0.5 * mine @ products
        own = 1.5 * own - 0.5 * own @ (own.T @ own)
    return np.abs(mine - np.array_split(own, rank.size)[rank.index]).max()


zs.draw.table(["5 iterations", "of 1, 0.1 and 0.01"], [
    (iteration, str(zs.Cluster(1).run(singular_values, iteration)[0]))
    for iteration in ("cubic", "quintic")])

# %%
cluster = zs.Cluster(4)
apart = max(cluster.run(by_rows, 1024, 32))
close = 1e-15  # how near exactly depends on a machine's BLAS
zs.draw.table(["a matrix of 1024 x 32 on 4 ranks, by rows", ""], [
    (f"within {close} of the whole matrix's iteration", apart < close),
    ("bytes sent by each, per iteration", cluster.trace.sent_nbytes()[0] // 20),
    ("bytes of an all-gather of the matrix", 8 * 1024 * 32 * 3 // 4)])


# %%
def third_v(rank):
    """Adan's average of differences after gradients of 1, 2 and 4."""
    adan, w = zs.optim.Adan(), np.ones(1, np.float32)
    state = {name: np.zeros(1, np.float32) for name in adan.slots((1,))}
    for step, g in enumerate((1, 2, 4), 1):
        adan.update(zs.optim.UpdateContext(rank.kernels), w, np.full(1, g, np.float32), state, step)
    return float(state["v"][0])


zs.draw.table(["Adan's v after gradients 1, 2, 4", ""], [
    ("measured", f"{zs.Cluster(1).run(third_v)[0]:.4f}"),
    ("by the formula of B, section 3", f"{(1 - zs.optim.Adan().beta2) * (4 - 2):.4f}")])

# %% [markdown]
# * In practice Muon takes a quintic iteration, of the momentum (Jordan et al. 2024). In 5 steps the cubic leaves 0.01
#   at 0.08; the quintic has all of them near 0.7, and never brings them to 1. The momentum is state, and ZeRO-1 shards
#   it, too.
# * Rows need no gather: $X_i$ times $X^T X$ is enough, and that is a small matrix which can be added up by an
#   all-reduce.
# * Adan's differences are averaged, like its gradients (Xie et al. 2022, algorithm 1); the printed formula, which is
#   $v_t = \beta_2 (g_t - g_{t-1})$, has lost the old average. (Its β is the share of what is new.)
#
# ## Question 3, by hand
#
# Stage 1 in two ways: with an all-reduce of the gradients, of which each rank takes its slice; and as in notebook 6,
# with a reduce-scatter. (fp32 throughout; the model is that of notebook 5.)

# %%
MODEL = zs.models.MLP([12, 20, 30, 4], bias=False)  # three matrices, ReLU in between; half squared error
FIRST = list(zs.models.first_weights(MODEL).values())
LEARNING_RATE = 0.01


def batch(index, step):
    """x (4, 12), target (4, 4): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    return tuple(random.standard_normal((4, n)).astype(np.float32) for n in (12, 4))


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
        dy = np.where(x > 0, dy @ w.T, 0)
    return found[::-1]


def adam(w, m, v, g, step):
    """One update in place, of as many weights as there are."""
    m[:] = 0.9 * m + (1 - 0.9) * g
    v[:] = 0.999 * v + (1 - 0.999) * (g * g)
    w -= LEARNING_RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


def train_by_hand(rank, all_reduce_first):
    """Two steps of stage 1; the weights of all layers."""
    weights = [w.copy() for w in FIRST]
    m, v = ([np.zeros(w.size // rank.size, np.float32) for w in FIRST] for _ in range(2))
    for step in (1, 2):
        for i, local in enumerate(gradients(weights, *batch(rank.index, step))):
            if all_reduce_first:
                g = np.split(rank.all_reduce(local.ravel()), rank.size)[rank.index]
            else:
                g = rank.reduce_scatter(local.ravel())
            own = np.split(weights[i].reshape(-1), rank.size)[rank.index].copy()
            adam(own, m[i], v[i], g / np.float32(rank.size), step)
            rank.all_gather(own, out=weights[i].reshape(-1))
    return weights


rows = []
for all_reduce_first in (True, False):
    cluster = zs.Cluster(8)
    cluster.run(train_by_hand, all_reduce_first)
    rows.append(("all-reduce, slice, all-gather" if all_reduce_first else "reduce-scatter, all-gather",
                 cluster.trace.sent_nbytes()[0] / 2 / (4 * MODEL.parameter_count)))
predictions.reveal(3, rows[0][1] / rows[1][1])

# %%
zs.draw.table(["8 ranks", "vectors sent by each in a step"], rows)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **Half as much again**: 3 · 7/8 vectors where 2 · 7/8 are enough. B, section 10, counts a reduce-scatter where section
# 9 has an all-reduce. The bits are the same, so nothing but a count of bytes can tell.
# </details>
#
# ## Try it
#
# * `for row in published(): print(row.name, row.stated, row.computed(), row.source)` shows all of them. Which sources
#   are never wrong? `cited_by(row.source)` of `zerosim.course.references` says who, when and where.
# * Take a number from a paper that you trust. Compute it with `zs.plan`, or measure it with a `zs.NullCluster`.
# * `blocks(64, "segment(2)", **SIZES).peak_nbytes`: from how many blocks on are segments of 2 better than those of 1?
# * The engine takes "all-reduce, then slice" too: `stage=zs.Stage(R, R, S)`, with `R, S = zs.Placement.REPLICATED,
#   zs.Placement.SHARDED`. What does it send with 4 micro-batches?
#
# ## Proof
#
# By hand in both ways and by the engine at stage 1, on 1 to 8 ranks: the same bits in all weights; and half as many
# bytes again for the way with the all-reduce. And of every number that does not close, estimate and measurement say the
# same, but for what only a run has: the softmax, a whole number of blocks.

# %%
def train_by_engine(rank):
    """The same two steps by the package."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(lr=LEARNING_RATE), stage=1)
    for step in (1, 2):
        engine.step([batch(rank.index, step)])
    return [engine.state(name)["parameter"] for name in MODEL.shapes]


for ranks in (1, 2, 3, 4, 5, 8):
    clusters = [zs.Cluster(ranks) for _ in range(3)]
    by_hand = [cluster.run(train_by_hand, first)
               for cluster, first in zip(clusters, (True, False), strict=False)]
    for of_rank in zip(*by_hand, clusters[2].run(train_by_engine), strict=True):
        for sliced, scattered, engine in zip(*of_rank, strict=True):
            assert sliced.tobytes() == engine.tobytes()
            assert scattered.tobytes() == engine.tobytes(), ranks
    sent = [cluster.trace.sent_nbytes() for cluster in clusters[:2]]
    assert all(2 * more == 3 * enough for more, enough in zip(*sent, strict=True))
    print(f"N = {ranks}: by hand in two ways and by the engine the same bits; sent {sent[0][0]} and "
          f"{sent[1][0]} bytes")

wrong = [one for one in checked() if not one.row.closes]
assert all(8 * abs(one.estimated - one.measured) < abs(one.row.stated - one.measured) for one in wrong)
print(f"{len(wrong)} numbers do not close: estimate and measurement are nearer to each other than to "
      "print, 8 times and more")
