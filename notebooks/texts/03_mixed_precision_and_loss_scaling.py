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
# # 3. Mixed precision and loss scaling
#
# **The idea.** In *mixed precision* the layers compute in 16 bits, and the optimizer in 32. With fp16 one more thing is
# needed: gradients are often so small that fp16 makes 0 of them (*underflow*). So the loss is multiplied by a *loss
# scale* S before the backward pass. By the chain rule all gradients are then S times as large; in fp32, where there is
# room, they are divided by S again. If S is too large, gradients become infinite (*overflow*); then **all ranks skip
# the step** and S shrinks.
#
# *Source.* Micikevicius et al. 2018, *Mixed Precision Training*, sections 3.1 and 3.2,
# [arXiv:1710.03740](https://arxiv.org/abs/1710.03740).

# %%
import numpy as np

import zerosim as zs
from zerosim.course.precision_runs import format_run_network, samples

# %% [markdown]
# ## Predict first
#
# 1. The gradients 1e-3, 1e-6, 5e-8 and 2e-8 are stored in fp16. Some texts say that everything below fp16's smallest
#    normal number, 6.1e-5, becomes 0. What does become of each?
# 2. Does loss scaling help against gradients that are too large?
# 3. On one rank of three a gradient is infinite; those of the others are fine. Who skips the step? And can a step be
#    skipped although the gradients of all three are finite?
# 4. Adam divides a gradient by its own size. What does the loss scale change in Adam's update?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # what is stored of each, as [1e-3, 1e-6, 5e-8, 0]
    2: ...,  # True or False
    3: ...,  # how many of the three ranks skip, and True or False, as [2, True]
    4: ...,  # the share of the updated weights that change, from 0 to 1
})

# %% [markdown]
# ## What becomes of small gradients

# %%
rows = []
for g in (1e-3, 1e-6, 5e-8, 2e-8):
    scaled = zs.round_to(np.float32(1024 * g), "fp16") / np.float32(1024)
    in_fp16, in_bf16 = (float(zs.round_to(g, name)) for name in ("fp16", "bf16"))
    rows.append((f"{g:.0e}", f"{in_fp16:.10g}", f"{in_bf16:.4g}", f"{scaled:.10g}"))
predictions.reveal(1, [float(in_fp16) for _, in_fp16, *_ in rows])

# %%
zs.draw.table((">gradient", ">in fp16", ">in bf16", ">in fp16 with S = 1024, divided by it in fp32"), rows)

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **Subnormal numbers count.** Below 6.1e-5 there are fewer and fewer digits: 1e-6 is off by more than one percent, 5e-8
# is rounded *up* to the smallest number, 5.96e-8, and only half of that and less becomes 0. With S = 1024 all four are
# right to three digits or more. bf16 reaches as far down as fp32 and needs no scale.
# </details>
#
# Now the gradients of a network. Its data are measured in a unit 1024 times as large as theirs, so that all numbers,
# and with them the gradients, come out small; in large models one reason for small gradients is that the loss is a
# mean over many tokens. `samples(step, rank)` gives other data in every step and on every rank. `one_pass` runs one
# forward and one backward pass, with S times the loss:

# %%
MODEL = format_run_network()  # three linear layers, ReLU between them, half the squared error
FIRST = zs.models.first_weights(MODEL)  # by name, in fp32
FP16 = zs.Policy("fp16")
P = MODEL.parameter_count


def gradients_of(name, scale):
    """All gradients of one batch (P,), ``scale`` times as large, computed in a format."""
    found = zs.models.one_pass(MODEL, FIRST, zs.Policy(name), *samples(0, 0, unit=2**-10), scale).gradients
    return np.concatenate([gradient.astype(np.float32).ravel() for gradient in found.values()])


exact, rows = gradients_of("fp32", 1.0), []
for exponent in (0, 8, 16, 24, 32, 40):
    found = np.abs(gradients_of("fp16", 2.0**exponent))
    lost, small = (found == 0) & (exact != 0), (found > 0) & (found < zs.format_of("fp16").smallest_normal)
    rows.append((f"2^{exponent}", *(int(which.sum()) for which in (lost, small, ~np.isfinite(found)))))
predictions.reveal(2, any(infinite < rows[0][3] for *_, infinite in rows))

# %%
zs.draw.table(("S", "lost", "with fewer bits", "inf or NaN"), rows, f"Of {P} gradients")

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# Without a scale most of the gradients are damaged. A wide range of scales will do; beyond it they become infinite. So
# **scaling helps against underflow and against nothing else.** Gradients that are too large are what it causes, and
# has to notice. The often-heard "loss scaling avoids fp16's overflow" has it the wrong way round.
# </details>
#
# ## The whole step
#
# Here is where each array goes in a step, and what it takes. All formats and bytes are those of a real step:

# %%
zs.draw.mixed_precision()

# %% [markdown]
# Count the colored boxes: 16 bytes per parameter rest between two steps. In fp32 without a master it would be
# 4 + 4 + 8, just as many. **Mixed precision does not shrink what rests**; it halves what forward keeps for backward
# (the *activations*) and what is sent, and hardware computes faster in 16 bits.
#
# ## The step by hand
#
# As in notebook 1, `reduce_scatter` leaves each rank its chunk of the summed gradients, and each rank updates its own
# chunk of the master. Then nobody sees all gradients, so **the ranks must vote**: one infinite number in one chunk, and
# all of them skip. Skipped means: weights, moments and Adam's step count stay as they are, and S is halved. After
# `WINDOW` good steps in a row S is doubled, to find out how far it can go.
#
# (`ADAM.update` changes its arrays in place; the context tells it with which of the package's loops, the *kernels*, to
# compute. A `purpose` notes in the trace what the bytes were for.)

# %%
ADAM = zs.optim.Adam(lr=3e-4)
FIRST_SCALE, WINDOW, STEPS = 2.0**20, 16, 24


def train_by_hand(rank):
    """The report of every step, and this rank's weights (P,), master, m and v."""
    shapes, chunk = MODEL.shapes, -(-P // rank.size)  # P/N, rounded up
    own = slice(chunk * rank.index, chunk * (rank.index + 1))
    master = np.concatenate([FIRST[name].ravel() for name in shapes])[own].copy()
    weights = rank.all_gather(master.astype(np.float16), length=P)
    state = {"m": np.zeros_like(master), "v": np.zeros_like(master)}
    scale, good, taken, seen = FIRST_SCALE, 0, 0, []

    for step in range(STEPS):
        cut = np.split(weights, np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1])
        parts = zip(shapes.items(), cut, strict=True)
        named = {name: part.reshape(shape) for (name, shape), part in parts}
        gradients = zs.models.one_pass(MODEL, named, FP16, *samples(step, rank.index), scale).gradients
        local = np.concatenate([gradients[name].ravel() for name in shapes])

        total = rank.reduce_scatter(local, purpose="gradients")  # still S times too large, in fp16
        bad = not np.isfinite(total).all()
        skip = bool(rank.all_reduce(np.array([bad], np.float32), op="max", purpose="control")[0])
        seen.append((scale, skip, not np.isfinite(local).all()))
        if skip:
            scale, good = scale / 2, 0
            continue
        g = total.astype(np.float32) / np.float32(scale * rank.size)
        taken, good = taken + 1, good + 1
        ADAM.update(zs.optim.UpdateContext(rank.kernels), master, g, state, taken)
        weights = rank.all_gather(master.astype(np.float16), length=P, purpose="parameters")
        if good == WINDOW:
            scale, good = scale * 2, 0
    return seen, {"parameter": weights, "master": master} | state


cluster = zs.Cluster(3)
ranks = [seen for seen, _ in cluster.run(train_by_hand)]
steps = list(zip(*ranks, strict=True))  # of each step, by rank: S, whether skipped, own overflow
alone = next(of_ranks for of_ranks in steps if sum(bad for *_, bad in of_ranks) == 1)
unseen = [of_ranks for of_ranks in steps if of_ranks[0][1] and not any(bad for *_, bad in of_ranks)]
predictions.reveal(3, [sum(skip for _, skip, _ in alone), len(unseen) > 0])

# %%
before, rows = None, []
for step, of_ranks in enumerate(zip(*ranks, strict=True), 1):
    (scale, skip, _), alone = of_ranks[0], [index for index, (*_, bad) in enumerate(of_ranks) if bad]
    if (scale, skip) != before:
        rows.append((step, f"2^{np.log2(scale):.0f}", ", ".join(map(str, alone)) or "none",
                     "all skip" if skip else "all update, from here on"))
    before = scale, skip
zs.draw.table(("step", "S", "ranks whose own gradients overflow", "what happens"), rows)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **Who skips?** Everybody, always. In step 5 it is rank 2 alone whose gradients overflow. And in step 6 no rank's own
# gradients do: it is their *sum* that fp16 cannot hold. Then the scale is small enough, until 16 good steps have passed
# and it is doubled.
# </details>
#
# The same training for longer, under two rules that are in use. PyTorch's (`torch`) is the one that we have just
# written. That of DeepSpeed, a library for training on many GPUs, can be set to wait for a second overflow before it
# shrinks (its *hysteresis*):

# %%
zs.draw.loss_scale(steps=80)

# %% [markdown]
# Real trainings wait for 1000 or 2000 good steps, and skip far less.
#
# ## What Adam sees of it
#
# Question 4, without the ε in Adam's denominator, and where nobody divides by S: three steps of Adam and of SGD.

# %%
def after_three_steps(rank, optimizer, scale):
    """A thousand weights of 1, after three updates with ``scale`` times the same gradients."""
    w = np.ones(1000, np.float32)
    state = {slot: np.zeros(1000, np.float32) for slot in optimizer.slots((1000,))}
    for step in (1, 2, 3):
        g = np.random.default_rng(step).standard_normal(1000).astype(np.float32)
        optimizer.update(zs.optim.UpdateContext(rank.kernels), w, np.float32(scale) * g, state, step)
    return w


plain, scaled = (zs.Cluster(1).run(after_three_steps, zs.optim.Adam(lr=3e-4, epsilon=0.0), scale)[0]
                 for scale in (1, 1024))
predictions.reveal(4, np.mean(plain != scaled))

# %%
print("measured:")
for optimizer in (zs.optim.Adam(lr=3e-4, epsilon=0.0), zs.optim.SGD(lr=3e-4)):
    plain, scaled = (zs.Cluster(1).run(after_three_steps, optimizer, scale)[0] for scale in (1, 1024))
    print(f"{type(optimizer).__name__}: {np.mean(plain == scaled):.0%} of the weights have the same bits")

# %% [markdown]
# <details><summary>Answer to question 4</summary>
#
# **Nothing, if S is a power of two**: three steps of Adam give the same bits. Dividing by S still matters: for ε, for
# other optimizers, and because S changes from step to step while m and v remember earlier ones.
# </details>
#
# ## What scaling cannot do
#
# If a number overflows on the way forward, before S enters, no loss scale helps. Here the inputs are 18,000 times as
# large. fp16 still holds them, but not what the second layer adds up:

# %%
rows, (x, target) = [], samples(0, 0, unit=18_000)
for name in ("fp16", "bf16"):
    for exponent in (0, -16):
        found = zs.models.one_pass(MODEL, FIRST, zs.Policy(name), x, target, scale=2.0**exponent)
        finite = all(np.isfinite(gradient.astype(np.float32)).all()
                     for gradient in found.gradients.values())
        rows.append((name, f"2^{exponent}", *(f"{value:.3g}" for value in found.largest.values()),
                     f"{found.loss:.3g}", "finite" if finite else "not finite"))
zs.draw.table(("format", "S", *(f">largest of {name}" for name in found.largest), ">loss", "gradients"),
              rows, f"The largest input is {np.abs(x).max():.3g}")

# %% [markdown]
# ## Does it matter?
#
# The same training in five ways, with the small gradients from above:

# %%
zs.draw.format_losses(steps=100)

# %% [markdown]
# With a master, and with loss scaling where it is fp16, 16 bits learn as fp32 does. Leave out the scaling and gradients
# are lost; leave out the master and updates are lost (notebook 2).
#
# ## Adam's m and v in 16 bits, or in 8
#
# With the moments in 16 bits a parameter would take 12 bytes at rest, not 16. Some texts call that fatal. Adam moves v
# by $(1-\beta_2)(g^2 - v)$, a thousandth of the difference, and bf16's gap is between 1/256 and 1/128 of the number.
# Between which $g^2$ is v rounded to itself?

# %%
ratios, rows = np.linspace(0, 6, 60_001), []  # g²/v
for name in ("fp32", "fp16", "bf16"):
    for v in (1, 1.5, 1.9921875):
        still = ratios[zs.round_to(0.999 * v + 0.001 * (ratios * v), name) == v]
        rows.append((name, f"{v:.7g}", f"{still.min():.2f}", f"{still.max():.2f}"))
zs.draw.table(("format", ">v", ">stands still from g²/v =", ">to"), rows)

# %% [markdown]
# In bf16 v goes up only where g² is more than 3 to 5 times v, and **it never goes down**, not even where g is 0: a
# thousandth of v is less than half a gap. In fp16 it follows to a third or so, as long as it can hold the numbers: it
# begins at 0, and stays there while a thousandth of g² is 2⁻²⁵ or less, that is |g| up to 0.0054. But m, which takes
# a tenth of g, is not 0, and the update is the learning rate times m divided by ε. (With $\beta_2$ = 0.95, frequent
# for language models, v moves in bf16 too.)
#
# Two cures keep fewer bits. *Stochastic rounding* to bf16 is right on average. In 8 bits a block of 256 elements shares
# a scale, its largest magnitude, and an element is the nearest multiple of it, among evenly spaced ones (linear), or
# among 256 that lie closer together near 0 (dynamic; Dettmers et al. 2022, *8-bit Optimizers via Block-wise
# Quantization*, [arXiv:2110.02861](https://arxiv.org/abs/2110.02861)):

# %%
zs.draw.adam_states()

# %% [markdown]
# * **bf16 is not fatal here, it is slower**: v remembers the large gradients of the beginning, so the steps stay small.
#   After 1,500 steps the loss is 5 or 6 % above fp32's; in the first run it is 28 % after 6,000.
# * Stochastic rounding ends where fp32 does, with the bytes of bf16.
# * fp16 is fatal, in both runs, in the third or fourth step. So are linear 8 bits: of a block, all v below 1/254 of
#   the largest become 0, and their m does not.
# * Dynamic 8 bits reach down to 1.6e-7 of the largest; a few elements, three and ten in the first step, are smaller
#   still. The first run survives that, and its loss is even lower; the second explodes. (The paper's library leaves
#   tensors of less than 4096 elements in 32 bits, and all of ours are that small.)
#
# At rest, with 8 bits, a parameter takes 2 + 2 + 4 + 2.03 bytes, where fp32's m and v make it 16.
#
# ## Try it
#
# * Let every rank decide for itself: `skip = bool(bad)`. Run the cell and read the error. Who waits in which call, and
#   for whom?
# * Set `FIRST_SCALE = 2.0**10` and `WINDOW = 4`. How many of the 24 steps are skipped now?
# * Forget to divide by `scale`. Print m and the weights: m is more than ten thousand times as large, and the weights
#   hardly differ. Why do they differ at all?
# * In `zs.draw.adam_states(3000, ((3e-3, 0),))` bf16 ends below fp32. Why can steps that stay too small help, when the
#   learning rate is large and never shrinks?
# * In a shell: `zerosim precision` trains, counts lost gradients and compares the rules.
#
# ## Proof
#
# The step by hand and the package's `Engine` in ZeRO's stages 0 to 3, on 1 to 5 ranks: the same scales, the same
# skipped steps, and the same bits in weights, master and moments.

# %%
def train_by_engine(rank, stage):
    """The same training by the package: S and whether it was skipped, by step, and the whole state."""
    rule = zs.numerics.loss_scale.Dynamic("torch", initial=FIRST_SCALE, window=WINDOW)
    policy = zs.Policy("fp16", loss_scale=rule)
    engine = zs.Engine(rank, MODEL, ADAM, stage=stage, policy=policy, layout="contiguous")
    results = [engine.step([samples(step, rank.index)]) for step in range(STEPS)]
    states = [engine.state(name) for name in MODEL.shapes]
    whole = {key: np.concatenate([np.ravel(state[key]) for state in states])
             for key in ("parameter", "master", "m", "v")}
    return [(result.scale, result.skipped) for result in results], whole


for count in (1, 2, 3, 5):
    mine = zs.Cluster(count).run(train_by_hand)
    whole = {key: np.concatenate([found[key] for _, found in mine]) for key in ("master", "m", "v")}
    for stage in zs.STAGES:
        engines = zs.Cluster(count).run(train_by_engine, stage)
        for (seen, found), (by_package, state) in zip(mine, engines, strict=True):
            assert [(scale, skipped) for scale, skipped, _ in seen] == by_package
            assert found["parameter"].tobytes() == state["parameter"].tobytes(), (count, stage)
            for key, value in whole.items():
                assert value.tobytes() == state[key].tobytes(), (count, stage, key)
    print(f"N = {count}: by hand and in stages 0, 1, 2 and 3 the same bits; "
          f"{sum(skipped for _, skipped in by_package)} of {STEPS} steps skipped")
