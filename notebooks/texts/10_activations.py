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
# # 10. Activations: keep or recompute
#
# **The idea.** Backward needs what forward has computed on the way, the *activations*. ZeRO does not shard them: each
# rank has a batch of its own, and in a transformer with long sequences they take more than all states together. But
# they need not be kept. Whatever forward has computed, it can compute again (*recomputation*, or activation
# checkpointing). So for each tensor there is a price: bytes saved for operations spent. Some tensors are nearly free,
# one is enormous, and no policy that merely computes again changes a bit.
#
# *Sources.* Chen, Xu, Zhang and Guestrin 2016, *Training Deep Nets with Sublinear Memory Cost*, section 4,
# [arXiv:1604.06174](https://arxiv.org/abs/1604.06174). Korthikanti et al. 2022, *Reducing Activation Recomputation in
# Large Transformer Models*, sections 4 and 5, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198). Milakov and
# Gimelshein 2018, *Online normalizer calculation for softmax*, section 3,
# [arXiv:1805.02867](https://arxiv.org/abs/1805.02867). Dao et al. 2022, *FlashAttention: Fast and Memory-Efficient
# Exact Attention with IO-Awareness*, section 3, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135).

# %%
import ml_dtypes
import numpy as np

import zerosim as zs
from zerosim.planning import activations
from zerosim.planning.flops import savings

B, L, D, H, BLOCKS = 2, 32, 24, 3, 4  # sequences, tokens in each, channels, heads of attention, blocks
GPT = zs.models.GPT(zs.models.GPTConfig(BLOCKS, D, H, L, vocabulary=50), tied=False)
FIRST = zs.models.first_weights(GPT)  # by name, fp32; the same on every rank
BF16 = ml_dtypes.bfloat16  # 2 bytes per number: weights, activations, gradients and what travels


def tokens(index):
    """Tokens (B, L) and their successors (B, L): other ones on every rank."""
    return np.random.default_rng(index).integers(0, 50, (2, B, L))


# %% [markdown]
# ## Predict first
#
# A transformer's block is attention and then a feed-forward network four times as wide as the channels, each behind a
# LayerNorm. Take a large one: 4,096 channels, 32 heads, 4 sequences of 2,048 tokens, in 16 bits.
#
# 1. Which tensor is the largest that such a block keeps?
# 2. We keep each block's input and nothing else, and run the block again in backward. Backward costs about twice as
#    much as forward. How much more arithmetic is that, and how many times less is kept of a block?
# 3. One often reads that of n blocks one should keep every √n-th input. Of 32 blocks, is that every sixth?
# 4. Under ZeRO-3 a layer's weights are there only while it computes. Does recomputation cost messages?
# 5. Which of all this changes the gradients in the last bit?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # "QKV", "probabilities", "attention output", "pre-GELU" or "post-GELU"
    2: ...,  # the share of operations that comes on top, and how many times less is kept, as [1, 10]
    3: ...,  # of 32 blocks, every how many-th: 6?
    4: ...,  # True or False, for `block` and for `segment(2)`, as [True, True]
    5: ...,  # the set of those, out of "selective", "tiled", "sub_block" and "block" (below)
})

# %% [markdown]
# ## What one block keeps
#
# We run one block forward on a rank, throw nothing away that backward needs, and look which arrays are alive
# afterwards. The small model first:

# %%
def one_block(rank):
    """One block forward: its input, and what it kept."""
    ctx = zs.Engine(rank, GPT, zs.optim.SGD(lr=0.1), policy="bf16").context()
    block = GPT.units[1]
    x = ctx.empty((B, L, D), name="x, the block's input")
    x[...] = np.random.default_rng(rank.index).standard_normal(x.shape)
    return x, block.forward(ctx, {name: ctx.cast(FIRST[name]) for name in block.shapes}, x)[1]


cluster = zs.Cluster(1)
kept = cluster.run(one_block)
alive = [life for life in cluster.trace[0].lifetimes("activation") if life.died is None]
by_formula = activations.kept(activations.Block(B, L, D, H))
zs.draw.table(["kept", "bytes", "times the input"], [
    *((life.name, life.nbytes, round(life.nbytes / (2 * B * L * D), 3)) for life in alive),
    ("together", sum(life.nbytes for life in alive), "-"),
    ("2 · (14·BLd + BHL²) + 4 for each statistic",
     2 * (14 * B * L * D + B * H * L * L) + 4 * by_formula.statistics, "-")])

# %% [markdown]
# In the order in which they were made: the block's input; for each token LayerNorm's mean and deviation, in fp32;
# queries, keys and values; attention's output; its *probabilities*, a number for each pair of tokens and each head; the
# input of the second half; mean and deviation again; the wide layer before its GELU, and after it. The outputs of the
# LayerNorms are not there: they are always computed again.
#
# That makes **14·BLd + BHL²** numbers. All but one grow with the sequence's length. The probabilities grow with its
# square. Of the large block, for question 1:

# %%
whole = activations.kept(activations.EXAMPLE).nbytes
tensors = activations.tensors(activations.EXAMPLE)
predictions.reveal(1, max(tensors, key=lambda name: tensors[name].nbytes))

# %%
zs.draw.table(["of the large block", "MB"], [
    *((name, round(tensor.nbytes / 1e6, 2))
      for name, tensor in tensors.items()),
    ("a block", round(whole / 1e6, 2)), ("32 blocks", round(32 * whole / 1e6, 2))])

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **The probabilities**: more than half of what the block keeps.
# </details>
#
# ## What it costs to make them again
#
# Each from what is kept beside it, as bytes saved for each operation:

# %%
zs.draw.table(["tensor", "MB", "billion operations", "made by", "bytes per operation"], [
    (one.tensor, round(one.nbytes / 1e6, 2), round(one.flops / 1e9, 2), one.made_by,
     f"{one.nbytes_per_flop:.2g}") for one in savings(activations.EXAMPLE)])

# %% [markdown]
# A factor of a thousand lies between the best bargain and the worst. The probabilities stand second: a little
# arithmetic for the largest tensor of all. What has to go through a large matrix again is dear.
#
# ## Policies
#
# A policy says what is kept; the engine takes its name.
#
# * `none`: nothing is recomputed.
# * `selective`: all but the probabilities is kept.
# * `tiled`: the same, and the probabilities are never there as a whole, neither forward nor back. They are made tile by
#   tile; forward keeps one number for each of their rows.
# * `sub_block`: the inputs of attention and of the feed-forward network.
# * `block`: each block's input. `segment(k)`: that of every k-th block.

# %%
FLOWING = ["activation", "checkpointed_input", "activation_gradient"]


def by_engine(rank, recompute):
    """One step's gradient, summed over ranks; what is kept when forward ends, and the most there is."""
    engine = zs.Engine(rank, GPT, zs.optim.SGD(lr=0.1), policy="bf16", recompute=recompute)
    tape = engine.forward(*tokens(rank.index))  # a step in its parts; the tape is what backward needs
    held = rank.memory.now_nbytes_by_kind
    engine.backward(tape)
    engine.reduce()
    kept = sum(held.get(kind, 0) for kind in FLOWING)
    return engine.param_group.gradient, kept, rank.memory.peak_nbytes_of(FLOWING)


def flops(trace):
    """Floating-point operations in a rank's trace."""
    return sum(row.flops for row in trace.rows if hasattr(row, "flops"))


rows = []
for recompute in ("none", "selective", "tiled", "sub_block", "block", "segment(2)", "segment(3)",
                  "block+tiled"):
    cluster = zs.Cluster(3)
    gradient, kept, peak = cluster.run(by_engine, recompute)[0]
    if recompute == "none":
        unchanged, once = gradient, flops(cluster.trace[0])
    rows.append((recompute, kept, peak, f"{flops(cluster.trace[0]) / once - 1:+.1%}",
                 f"{np.mean(gradient != unchanged):.1%}"))
predictions.reveal(2, [next(float(operations.rstrip("%")) / 100 for name, _, _, operations, _ in rows
                            if name == "block"), whole / tensors["LayerNorm 1 input"].nbytes], within=0.05)
predictions.reveal(5, {name for name, *_, differ in rows[:-1] if differ != "0.0%"})

# %%
zs.draw.table(["policy", "bytes kept", "at most", ">operations", ">gradients that differ"], rows)

# %% [markdown]
# <details><summary>Answer to question 5</summary>
#
# **No policy changes a bit, but for `tiled`.** Who runs the same operations on the same numbers a second time gets the
# same results. A tiled softmax is another sequence of operations: it rounds elsewhere and adds in another order. (That
# does not make it less exact.)
# </details>
#
# <details><summary>Answer to question 2</summary>
#
# `block` costs **a third more**: forward runs twice, where forward and backward together were three times forward. And
# of the large block it keeps a 30th, 67 of 2,013 MB.
# </details>
#
# ## By hand, under ZeRO-3
#
# `segment(k)` is a few lines more than what notebook 8 has: keep the input of every k-th layer; in backward run the
# segment forward again, up to its last layer, before going back through it. Here for eight matrices, each of which
# rests in chunks and is gathered when it is used.

# %%
MLP = zs.models.MLP([12, 10] * 4 + [12], bias=False)  # eight matrices of 120 weights, ReLU between them
MATRICES = [w.astype(BF16) for w in zs.models.first_weights(MLP).values()]


def batch(index):
    """x (4, 12), target (4, 12): other samples on every rank."""
    random = np.random.default_rng(index)
    return random.standard_normal((4, 12)).astype(BF16), random.standard_normal((4, 12)).astype(np.float32)


def wide(x):
    """The same values in fp32."""
    return x.astype(np.float32)


def forward(w, x, relu):
    """x (B, I), w (I, O) -> (B, O) in bf16"""
    y = (wide(x) @ wide(w)).astype(BF16)
    return np.where(y > 0, y, BF16(0)) if relu else y


def backward(w, x, dy):
    """x (B, I), dy (B, O) -> dx (B, I), through the ReLU that made x, and dw (I, O); both in bf16"""
    dx = (wide(dy) @ wide(w).T).astype(BF16)
    return np.where(x > 0, dx, BF16(0)), (wide(x).T @ wide(dy)).astype(BF16)


def by_hand(rank, k):
    """This rank's chunks of one step's summed gradient, and how many layers' inputs it held at most."""
    layers, inputs, gradient, most = len(MATRICES), [], {}, 0
    chunks = [np.split(w.ravel(), rank.size)[rank.index] for w in MATRICES]

    def weights(i):
        return rank.all_gather(chunks[i], purpose="parameters").reshape(MATRICES[i].shape)

    x, target = batch(rank.index)
    for i in range(layers):
        if i % k == 0:
            inputs.append(x)
        x = forward(weights(i), x, relu=i < layers - 1)
    dy = ((wide(x) - target) / np.float32(len(x))).astype(BF16)
    for start in reversed(range(0, layers, k)):
        again = [inputs.pop()]
        for i in range(start, start + k - 1):  # forward again, up to the segment's last layer
            again.append(forward(weights(i), again[-1], relu=True))
        most = max(most, len(inputs) + len(again))
        for i in reversed(range(start, start + k)):
            dy, dw = backward(weights(i), again.pop(), dy)
            gradient[i] = rank.reduce_scatter(dw.ravel(), purpose="gradients")
    return [gradient[i] for i in range(layers)], most


rows = []
for k in (1, 2, 4, 8):
    cluster = zs.Cluster(4)
    _, most = cluster.run(by_hand, k)[0]
    gathers = [getattr(row, "purpose", "") for row in cluster.trace[0].rows].count("parameters")
    rows.append((f"segment({k})", most, gathers, cluster.trace.sent_nbytes("parameters")[0]))
predictions.reveal(4, [gathers > 2 * len(MATRICES) for _, _, gathers, _ in rows[:2]])

# %%
zs.draw.table(["policy", "inputs held at most", "all-gathers of weights", "bytes sent for weights"], rows)

# %% [markdown]
# <details><summary>Answer to question 4</summary>
#
# **It can cost messages.** A layer that runs forward again needs its weights again. `segment(1)` has none of that,
# since each layer's input is there; a segment of k layers gathers k-1 of them once more.
# </details>
#
# And there is a best k: with few segments few inputs are kept, but while a segment goes back, all that it has computed
# again is there at once. (Here, where a layer keeps no more than its input, that is √8 or near it. Wait for the
# transformer.)
#
# ## How much of it, and for how long sequences
#
# The whole of it at the large scale. Bars and marks are measured in real runs of the engine, on arrays that
# have a shape and no data; lines are by formula.

# %%
zs.draw.activations()

# %% [markdown]
# Below, everything that keeps the probabilities of even one block ends up steep: twice as long, four times as much.
# Only `tiled` has no L² anywhere. With 65,536 tokens it alone beats `block`, and together they take a tenth of either.
#
# ## Every √n-th input?
#
# With segments of k blocks, n/k inputs are kept, and while a segment goes back all k of its blocks are there in full.
# The popular √n takes it that the inside of a block weighs as much as its input. But it weighs 30 times as much:

# %%
predictions.reveal(3, min((1, 2, 3, 4, 6, 8, 16, 32), key=lambda k: activations.peak_nbytes(
    activations.EXAMPLE, 32, f"segment({k})").nbytes))

# %%
print("measured:")
print(f"best k by formula, √(n·input/inside): {activations.best_segment(activations.EXAMPLE, 32):.2f}; "
      f"√32 is {32**0.5:.2f}")
zs.draw.table(["policy", "GB at most"], [
    (policy, round(activations.peak_nbytes(activations.EXAMPLE, 32, policy).nbytes / 1e9, 2))
    for policy in map("segment({})".format, (1, 2, 3, 4, 6, 8, 16, 32))])

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **No, every single one.** And at stage 3 longer segments cost messages too.
# </details>
#
# ## Try it
#
# * Let `by_hand` keep all that it computes again until the step ends (no `pop`). Do the results change? What does?
# * Free nothing: gather each layer once, in forward, and keep it. How many messages are left, and what is held?
# * Make L in the first cell 256. Which policy now keeps least, and which holds least at its fullest?
# * Dropout draws random numbers. Why can a block with dropout be run again at all? Try `vocabulary=50, dropout=0.1`:
#   the policies still agree.
#
# ## Proof
#
# By hand and by the package's engine at stage 3 with `segment(k)`: the same bits of the summed gradient and the same
# bytes sent, for 1 to 8 ranks; and the bits of `none`. Of the transformer, on up to 3 ranks, all policies but `tiled`
# have the bits of `none`.

# %%
def mlp_by_engine(rank, recompute):
    """One step's gradient by the package at stage 3: this rank's chunk of each layer."""
    engine = zs.Engine(rank, MLP, zs.optim.SGD(lr=0.1), stage=3, policy="bf16", recompute=recompute)
    engine.backward(engine.forward(*batch(rank.index)))
    engine.reduce()
    return np.split(engine.param_group.gradient.copy(), len(MATRICES))


for ranks in (1, 2, 3, 4, 5, 8):
    plain = zs.Cluster(ranks).run(mlp_by_engine, "none")
    for k in (1, 2, 4, 8):
        hand, package = zs.Cluster(ranks), zs.Cluster(ranks)
        for index, ((mine, _), theirs) in enumerate(zip(
                hand.run(by_hand, k), package.run(mlp_by_engine, f"segment({k})"), strict=True)):
            for one, other, without in zip(mine, theirs, plain[index], strict=True):
                assert one.tobytes() == other.tobytes() == without.tobytes(), (ranks, k)
        for purpose in ("gradients", "parameters"):
            assert hand.trace.sent_nbytes(purpose) == package.trace.sent_nbytes(purpose), (ranks, k)
    others = ("none", "selective", "sub_block", "block", "segment(2)") if ranks < 4 else ()
    of_policies = [zs.Cluster(ranks).run(by_engine, recompute)[0][0].tobytes() for recompute in others]
    assert len(set(of_policies)) <= 1, ranks
    print(f"N = {ranks}: segments of 1, 2, 4, 8 by hand and by the package the same bits and bytes sent; "
          f"the transformer's: {', '.join(others) or 'not run'}")
