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
# # 10. Activations: keep or recompute
#
# **The idea.** Backward needs what forward has computed on the way, the *activations*. ZeRO does not shard them: each
# rank has a batch of its own, and in a transformer with long sequences they take more than all states together. But
# they need not be kept. Whatever forward has computed, it can compute again. So for each tensor there is a price: bytes
# saved for operations spent. Some tensors are nearly free, one is enormous, and no policy that merely computes again
# changes a bit.

# %%
import numpy as np

import zerosim as zs
from zerosim.course import figures
from zerosim.planning import activations
from zerosim.planning.flops import savings

B, L, D, H, BLOCKS = 2, 32, 24, 3, 4  # sequences, tokens in each, channels, heads of attention, blocks
GPT = zs.models.GPT(zs.models.GPTConfig(BLOCKS, D, H, L, vocabulary=50), tied=False)
FIRST = zs.models.first_weights(GPT)  # by name, fp32; the same on every rank
BF16 = zs.Policy("bf16")  # computes in bf16: activations take 2 bytes per number


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
# 4. Which of all this changes the gradients in the last bit?
#
# Write your answers down, then read on.
#
# ## What one block keeps
#
# We run one block forward on a rank, throw nothing away that backward needs, and look which arrays are alive
# afterwards. The small model first:

# %%
def one_block(rank):
    """One block forward: its input, and what it kept."""
    ctx = zs.Engine(rank, GPT, zs.optim.SGD(lr=0.1), policy=BF16).context()
    block = GPT.units[1]
    x = ctx.empty((B, L, D), name="x, the block's input")
    x[...] = np.random.default_rng(rank.index).standard_normal(x.shape)
    return x, block.forward(ctx, {name: ctx.cast(FIRST[name]) for name in block.shapes}, x)[1]


cluster = zs.Cluster(1)
kept = cluster.run(one_block)
alive = [life for life in cluster.trace[0].lifetimes("activation") if life.died is None]
for life in alive:
    print(f"{life.name:20} {life.nbytes:6} bytes = {life.nbytes / (2 * B * L * D):5.3g} times the input")
by_formula = activations.kept(activations.Block(B, L, D, H))
print(f"together {sum(life.nbytes for life in alive):,} bytes; by formula {by_formula.nbytes:,}: "
      f"{by_formula.elements:,} numbers in bf16, {by_formula.statistics} in fp32")
print("14·BLd + BHL² =", 14 * B * L * D + B * H * L * L)

# %% [markdown]
# In the order in which they were made: the block's input; for each token LayerNorm's mean and deviation, in fp32;
# queries, keys and values; attention's output; its *probabilities*, a number for each pair of tokens and each head; the
# input of the second half; mean and deviation again; the wide layer before its GELU, and after it. The outputs of the
# LayerNorms are not there: they are always computed again.
#
# That makes **14·BLd + BHL²** numbers. All but one grow with the sequence's length. The probabilities grow with its
# square; in the large block they are more than half of it, which answers question 1:

# %%
for name, tensor in activations.tensors(activations.EXAMPLE).items():
    print(f"{name:24} {tensor.nbytes / 1e6:9.2f} MB")
print(f"{'a block':24} {activations.kept(activations.EXAMPLE).nbytes / 1e6:9.2f} MB, of which 32 are "
      f"{32 * activations.kept(activations.EXAMPLE).nbytes / 1e9:.1f} GB")

# %% [markdown]
# ## What it costs to make them again
#
# Each from what is kept beside it, as bytes saved for each operation:

# %%
for saving in savings(activations.EXAMPLE):
    print(f"{saving.tensor:24} {saving.nbytes / 1e6:8.2f} MB, {saving.flops / 1e9:7.2f} billion operations by "
          f"{saving.made_by:37}: {saving.nbytes_per_flop:.2g} bytes per operation")

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
    """One step's gradient, summed over ranks; what is kept when forward ends, and the most that is there."""
    engine = zs.Engine(rank, GPT, zs.optim.SGD(lr=0.1), policy=BF16, recompute=recompute)
    tape = engine.forward(*tokens(rank.index))  # a step in its parts; the tape is what forward leaves for backward
    held = rank.memory.now_nbytes_by_kind
    engine.backward(tape)
    engine.reduce()
    kept = sum(held.get(kind, 0) for kind in FLOWING)
    return engine.param_group.gradient, kept, rank.memory.peak_nbytes_of(FLOWING)


def flops(trace):
    """Floating-point operations in a rank's trace."""
    return sum(row.flops for row in trace.rows if hasattr(row, "flops"))


for recompute in ("none", "selective", "tiled", "sub_block", "block", "segment(2)", "segment(3)", "block+tiled"):
    cluster = zs.Cluster(3)
    gradient, kept, peak = cluster.run(by_engine, recompute)[0]
    if recompute == "none":
        whole, once = gradient, flops(cluster.trace[0])
    print(f"{recompute:11}: {kept:7,} bytes kept, {peak:7,} at most, {flops(cluster.trace[0]) / once - 1:+6.1%} "
          f"operations; {np.mean(gradient != whole):5.1%} of the gradient's numbers differ")

# %% [markdown]
# Question 4: **no policy changes a bit, but for `tiled`.** Who runs the same operations on the same numbers a second
# time gets the same results. A tiled softmax is another sequence of operations: it rounds elsewhere and adds in another
# order. (That does not make it less exact.)
#
# Question 2: `block` costs **a third more**: forward runs twice, where forward and backward together were three times
# forward. And of the large block it keeps a 30th, 67 of 2,013 MB.
#
# ## By hand
#
# `block` is a few lines: keep the inputs, and in backward run each unit forward again, under the same weights, before
# going back through it.

# %%
def by_hand(rank):
    """As `by_engine`, with each unit's input kept and nothing else."""
    layout = zs.layout_of(GPT, rank.size)
    gradient = np.zeros(layout.length, BF16.compute_dtype)

    def place(unit):
        """The arrays for the gradients of a unit's parameters: its stretch of the flat vector."""
        return layout.unit_views(unit.name, gradient[layout.units[unit.name]])

    ctx = zs.models.Context(np, BF16, rank.kernels, rank.memory, rank.trace.compute, place)
    x, target = tokens(rank.index)
    inputs = []
    for unit in GPT.units:
        inputs.append(x)
        x, kept = unit.forward(ctx, {name: ctx.cast(FIRST[name]) for name in unit.shapes}, x)
        del kept
    kept_by_loss = GPT.loss.forward(ctx, x, target)[1]
    held = rank.memory.now_nbytes_by_kind
    del x
    dy = GPT.loss.backward(ctx, kept_by_loss, 1.0)
    del kept_by_loss
    for unit in reversed(GPT.units):
        weights = {name: ctx.cast(FIRST[name]) for name in unit.shapes}
        kept = unit.forward(ctx, weights, inputs.pop())[1]  # forward again
        dy, _ = unit.backward(ctx, weights, kept, dy)
        del kept
    for lies in layout.units.values():
        gradient[lies] = rank.all_reduce(gradient[lies])
    kept = sum(held.get(kind, 0) for kind in FLOWING)
    return gradient, kept, rank.memory.peak_nbytes_of(FLOWING)


for how, program, arguments in (("by hand", by_hand, ()), ("block", by_engine, ("block",))):
    cluster = zs.Cluster(3)
    _, kept, peak = cluster.run(program, *arguments)[0]
    print(f"{how:7}: {kept:,} bytes kept, {peak:,} at most, {flops(cluster.trace[0]):,} operations")

# %% [markdown]
# ## How much of it, and for how long sequences
#
# The whole of it at the large scale. Bars and marks are measured in real runs of the engine, on arrays that
# have a shape and no data; lines are by formula.

# %%
figures.activations(figures.activations_data())

# %% [markdown]
# Below, everything that keeps the probabilities of even one block ends up steep: twice as long, four times as much.
# Only `tiled` has no L² anywhere. With 65,536 tokens it alone beats `block`, and together they take a tenth of either.
#
# ## Every √n-th input?
#
# With segments of k blocks, n/k inputs are kept, and while a segment goes back all k of its blocks are there in full.
# The popular √n takes it that the inside of a block weighs as much as its input. But it weighs 30 times as much:

# %%
for k in (1, 2, 3, 4, 6, 8, 16, 32):
    print(f"segment({k:2}): {activations.peak_nbytes(activations.EXAMPLE, 32, f'segment({k})').nbytes / 1e9:6.2f} GB")
print(f"best k by formula, √(n·input/inside): {activations.best_segment(activations.EXAMPLE, 32):.2f}; "
      f"√32 is {32**0.5:.2f}")

# %% [markdown]
# Question 3: **no, every single one.** And at stage 3 longer segments cost messages too (notebook 8).
#
# ## Try it
#
# * Keep in `by_hand` what the *first* forward kept, instead of running a second. Do the results change? What does?
# * Let `by_hand` keep every second unit's input only. Compare with `segment(2)`.
# * Make L in the first cell 256. Which policy now keeps least, and which holds least at its fullest?
# * Dropout draws random numbers. Why can a block with dropout be run again at all? Try `vocabulary=50, dropout=0.1`:
#   the policies still agree. In the proof N = 1 still agrees too, and N = 2 does not. What is missing in `by_hand`?
#
# ## Proof
#
# By hand and by the engine's `block`: the same bits of the summed gradient, the same bytes kept and at most, and the
# same operations, for 1 to 8 ranks, and the bits of `none`. On up to 3 ranks other policies have these bits as well.

# %%
for ranks in (1, 2, 3, 4, 5, 8):
    hand, package = zs.Cluster(ranks), zs.Cluster(ranks)
    pairs = zip(hand.run(by_hand), package.run(by_engine, "block"), strict=True)
    for (mine, *held), (theirs, *held_by_package) in pairs:
        assert mine.tobytes() == theirs.tobytes(), ranks
        assert held == held_by_package
    assert [flops(trace) for trace in hand.trace] == [flops(trace) for trace in package.trace]
    others = ("none", "selective", "sub_block", "segment(2)") if ranks < 4 else ("none",)
    for recompute in others:
        other = zs.Cluster(ranks).run(by_engine, recompute)
        assert all(one[0].tobytes() == mine.tobytes() for one in other), (ranks, recompute)
    print(f"N = {ranks}: by hand and by the package the same bits, bytes, operations; same bits: {', '.join(others)}")
