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
# # 2. Numbers and lost updates
#
# **The idea.** A format of 16 bits has $2^{16}$ numbers and no more; between two neighbors there is a *gap*. Training
# adds small updates to larger weights. An update that is smaller than half the gap next to the weight is rounded away:
# it is a *lost update*, in this step and in every one after it. That is why one trains with two copies of the weights,
# one of 16 bits to compute with and a *master* of 32 bits to add the updates to.
#
# *Sources.* Kahan 1965, *Further Remarks on Reducing Truncation Errors*,
# [doi:10.1145/363707.363723](https://doi.org/10.1145/363707.363723). Gupta, Agrawal, Gopalakrishnan and Narayanan 2015,
# *Deep Learning with Limited Numerical Precision*, section 3, [arXiv:1502.02551](https://arxiv.org/abs/1502.02551).
# Kalamkar et al. 2019, *A Study of BFLOAT16 for Deep Learning Training*, section 3,
# [arXiv:1905.12322](https://arxiv.org/abs/1905.12322).

# %%
import numpy as np

import zerosim as zs

# %% [markdown]
# ## Predict first
#
# Three formats: fp32 has 32 bits, *fp16* and *bf16* have 16. Just above 1 their numbers are 2⁻²³, 2⁻¹⁰ and 2⁻⁷ apart:
# roughly 0.0000001, 0.001 and 0.008. Wherever a power of two is passed, the gap doubles.
#
# 1. A weight is 1. One adds 0.0001 to it, a thousand times; every sum is rounded. What is the weight in the end if it
#    rests in fp32? In fp16? In bf16?
# 2. A weight of 1 in fp16: one adds 0.0003, or one subtracts 0.0003. Which of the two is lost?
# 3. Texts on mixed precision like this example: learning rate 0.001, gradient 0.00001, so that the update is 1e-8; fp16
#    loses it, "in fp32 the value will change". For which weights is that true?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # the weight in the end, in fp32, fp16 and bf16, as [1.5, 1.2, 1]
    2: ...,  # "added" or "subtracted"
    3: ...,  # of 1, 0.5, 0.25 and 0.1 the set of those that 1e-8 more changes, as {1, 0.5}
})

# %% [markdown]
# ## What a number is made of
#
# A floating-point number is a sign, an *exponent*, and a *mantissa*: $\pm 1.\text{mantissa} \cdot 2^{\text{exponent}}$.
# The bits of the exponent decide how far a format reaches, those of the mantissa how many numbers there are between one
# power of two and the next. fp32 is the usual float of 32 bits. Of 16 bits there are two: fp16 has the finer mantissa,
# bf16 has fp32's exponent and gives up mantissa for it.

# %%
def row_of(name):
    """What a format is made of, and how far it reaches."""
    row = zs.format_of(name)
    return (name, row.exponent_bits, row.mantissa_bits, f"{row.largest:.5g}", f"{row.smallest_normal:.4g}",
            f"{row.smallest_subnormal:.4g}", f"2^{np.log2(zs.spacing(1.0, name)):.0f}")


zs.draw.table(("format", "bits of exponent", "bits of mantissa", ">largest", ">smallest normal",
               ">smallest", ">gap above 1"), [row_of(name) for name in ("fp32", "fp16", "bf16")])

# %% [markdown]
# Below the smallest normal number a few more lie at equal distances down to 0; they are called *subnormal*.
#
# bf16's mantissa is sometimes called similar to fp16's. It has 3 bits less: **its gaps are 8 times as wide**.
#
# ## Rounding by hand
#
# What no format has is rounded to the nearest number that it does have; and if two are equally near, to the one whose
# last bit is 0, *to nearest even*. On the bits of an fp32 number that takes integer arithmetic alone: cut off the last
# bits of the mantissa, and add one if what was cut off was more than half of the last bit kept, or just half of an odd
# one.

# %%
def round_by_hand(x, name):
    """x fp32, any shape -> the nearest numbers of a format, ties to even, in fp32."""
    fmt, bits = zs.format_of(name), np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    exponent_field, mantissa = (bits >> 23) & 0xFF, bits & 0x7F_FFFF
    significand = np.where(exponent_field > 0, mantissa | 0x80_0000, mantissa)  # with the 1 in front
    exponent = np.maximum(exponent_field, 1) - 127

    cut = 23 - fmt.mantissa_bits + np.maximum(0, fmt.min_exponent - exponent)  # more in subnormal numbers
    cut = np.minimum(cut, 26)  # enough to cut off all there is
    kept, rest, half = significand >> cut, significand & ((1 << cut) - 1), (1 << cut) >> 1
    kept = kept + ((rest > half) | ((rest == half) & (cut > 0) & (kept % 2 == 1)))

    rounded = np.ldexp(kept.astype(np.float64), exponent - 23 + cut)
    rounded = np.where(rounded > fmt.largest, np.inf, rounded)
    return np.where(np.isfinite(x), np.copysign(rounded, x), x).astype(np.float32)


zs.draw.table((">number", ">in fp16", ">in bf16"), [
    (f"{value:g}", *(f"{float(round_by_hand(np.float32(value), name)):.10g}" for name in ("fp16", "bf16")))
    for value in (2.1, 0.1, 2049, 2051, 70_000, 4e-8, 2e-8)])

# %% [markdown]
# 2049 and 2051 both lie midway between two numbers of fp16, and become the two whose last bit is 0. 70,000 is too large
# for fp16, and 2e-8 too small: at half the smallest number and below there is nothing left but 0.
#
# ## Gaps
#
# The gap doubles with every power of two. Half of it is the least that makes a difference:

# %%
zs.draw.spacing(("bf16", "fp16", "fp32"))

# %% [markdown]
# ## Lost updates
#
# The three questions, computed with our own rounding. The sum itself is made in fp32, and rounded once:

# %%
def add(weight, update, name):
    """weight + update in a format: both rest in it, and so does the sum."""
    weight, update = (round_by_hand(np.float32(number), name) for number in (weight, update))
    return round_by_hand(weight + update, name)


rows = []
for name in ("fp32", "fp16", "bf16"):
    weight = np.float32(1)
    for _ in range(1000):
        weight = add(weight, 0.0001, name)
    rows.append((1, name, "1 + 0.0001, a thousand times", f"{float(weight):.7g}"))
for update in (0.0003, -0.0003):
    found = float(add(1, update, "fp16"))
    rows.append((2, "fp16", f"1 {'+' if update > 0 else '-'} 0.0003", f"{found:.6g}"))
for weight in (1, 0.5, 0.25, 0.1):
    for update in (1e-8, -1e-8):
        moved = float(add(weight, update, "fp32")) - float(np.float32(weight))
        rows.append((3, "fp32", f"{weight} {'+' if update > 0 else '-'} 1e-8", f"moves it by {moved:.3g}"))
predictions.reveal(1, [float(row[3]) for row in rows[:3]])
predictions.reveal(2, "added" if add(1, 0.0003, "fp16") == 1 else "subtracted")
predictions.reveal(3, {w for w in (1, 0.5, 0.25, 0.1) if add(w, 1e-8, "fp32") != np.float32(w)})

# %%
zs.draw.table(("question", "format", "sum", ">comes to"), rows)

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **1.** In 16 bits nothing has happened at all, a thousand times. fp32 comes near to 1.1.
# </details>
#
# <details><summary>Answer to question 2</summary>
#
# **2.** Upwards 0.0003 is lost, downwards it is kept. Below 1 the numbers lie twice as close as above it, and 1 -
# 0.0003 moves to the nearest of them, by 0.000488.
# </details>
#
# <details><summary>Answer to question 3</summary>
#
# **3.** Only for weights below 0.25 (and for 0.25 itself when one subtracts). At 0.5 and at 1 **fp32 loses the update
# too**, so the sentence is wrong about the weights that one thinks of first. Also, learning rate times gradient is the
# update of plain gradient descent; Adam's first update is about the learning rate, whatever the gradient (notebook 1).
# </details>
#
# ## A master copy
#
# So let the weight rest in fp32, and round it to 16 bits anew whenever the layers compute with it. The copy moves in
# stairs, but the master remembers what lies between two of them:

# %%
zs.draw.lost_updates()

# %% [markdown]
# On the right the update is more than half of fp16's gap: without a master it is rounded *up* to a whole gap each time,
# and the weight runs ahead.
#
# ## A training, with and without
#
# A linear layer of 64 weights learns from other data on each rank, by gradient descent. The gradients rest in the
# format; their sum over ranks (`all_reduce` gives it to every rank) is divided by the number of ranks, in fp32.
# `one_pass` runs one forward and one backward pass.

# %%
MODEL, WEIGHT, LEARNING_RATE = zs.models.MLP([16, 4], bias=False), "layer0.weight", 0.03
SOUGHT = np.random.default_rng(7).standard_normal((16, 4))


def batch(index, step):
    """x (8, 16), target (8, 4): other samples on every rank and in every step."""
    x = np.random.default_rng((index, step)).standard_normal((8, 16))
    return x.astype(np.float32), (x @ SOUGHT).astype(np.float32)


def train_by_hand(rank, name, keep_master, steps):
    """Losses, the weights that compute (16, 4), and the share of the updated ones that moved last."""
    first = zs.models.first_weights(MODEL)[WEIGHT]  # in fp32
    master, losses = first if keep_master else round_by_hand(first, name), []
    for step in range(steps):
        weights = {WEIGHT: round_by_hand(master, name)}
        found = zs.models.one_pass(MODEL, weights, zs.Policy(name), *batch(rank.index, step))
        total = rank.all_reduce(found.gradients[WEIGHT].ravel()).astype(np.float32).reshape(16, 4)
        before, master = master, master - np.float32(LEARNING_RATE) * (total / np.float32(rank.size))
        if not keep_master:
            master = round_by_hand(master, name)
        losses.append(found.loss)
    return losses, round_by_hand(master, name), np.mean(master != before)


rows = []
for name in ("fp16", "bf16"):
    for keep_master in (True, False):
        losses, _, moved = zs.Cluster(3).run(train_by_hand, name, keep_master, 240)[0]
        rows.append((name, "yes" if keep_master else "no", f"{losses[0]:.3f}",
                     f"{np.mean(losses[-20:]):.2g}", f"{moved:.0%}"))
zs.draw.table(("format", "master", ">first loss", ">last losses", ">weights moved by the last step"), rows)

# %% [markdown]
# Every run learns at first, as long as the gradients are large. Near the goal the updates become small, and **without a
# master the weights stand still** before they are there, in bf16 sooner than in fp16.
#
# The master takes 4 bytes more for each weight; together with Adam's m and v that makes the 12 of the 16 bytes per
# weight which ZeRO's first stage will share among the ranks.
#
# ## Try it
#
# * In `round_by_hand` leave out the line that begins with `kept = kept +`. Now it cuts off instead of rounding. Which
#   of the printed numbers change? And which cell says that something is wrong?
# * Is an update of 1e-5 lost at a weight of 0.1 in fp16? And at 0.01? Look at the picture of the gaps first, then call
#   `add(0.1, 1e-5, "fp16")`.
# * A third cure: round up or down *by chance*, so that the mean is right. `zs.round_to(x, "bf16", "stochastic",
#   bits=...)` does so, with `np.random.default_rng(0).integers(2**32, size=x.shape, dtype=np.uint32)` for bits. Let 100
#   weights of 1 grow by 0.0001 a thousand times, with new bits each time. What is their mean?
# * `zerosim lost-updates` in a shell has these experiments and more cures.
#
# ## Proof
#
# Rounding: all numbers of fp16, of bf16 and of an 8-bit format, the midpoints between all neighbors, and the fp32
# numbers right beside those, give the same bits by hand and by the package. Training: the same bits by hand and by the
# package's `Engine`, with and without a master, for 1 to 8 ranks.

# %%
def train_by_engine(rank, name, keep_master, steps):
    """The same steps by the package: its losses and weights."""
    policy = zs.Policy(name, master="fp32" if keep_master else name)
    engine = zs.Engine(rank, MODEL, zs.optim.SGD(LEARNING_RATE), policy=policy)
    losses = [engine.step([batch(rank.index, step)]).losses[0] for step in range(steps)]
    return losses, np.array(engine.state(WEIGHT)["parameter"]).reshape(16, 4)


for name in ("fp16", "bf16", "fp8_e5m2"):
    dtype = zs.format_of(name).dtype
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype).astype(np.float32)
    codes = codes[~np.isnan(codes)]
    numbers = codes[np.isfinite(codes)]
    midpoints = numbers + np.copysign(zs.spacing(numbers, name) / 2, numbers)
    beside = [np.nextafter(midpoints, np.float32(end)) for end in (0, np.inf, -np.inf)]
    x = np.concatenate([codes, midpoints, *beside])
    assert round_by_hand(x, name).tobytes() == zs.round_to(x, name).tobytes(), name
    print(f"{name}: {len(x):,} numbers rounded, the same bits by hand and by the package")

for ranks in (1, 2, 3, 4, 5, 8):
    for name in ("fp16", "bf16"):
        for keep_master in (True, False):
            runs = (zs.Cluster(ranks).run(how, name, keep_master, 6)
                    for how in (train_by_hand, train_by_engine))
            for (losses, weights, _), (losses_by_package, by_package) in zip(*runs, strict=True):
                assert losses == losses_by_package
                assert weights.astype(by_package.dtype).tobytes() == by_package.tobytes(), (ranks, name)
print("by hand and by the engine: the same losses and weights to the bit, on 1, 2, 3, 4, 5 and 8 ranks")
