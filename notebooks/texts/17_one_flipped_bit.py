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
# # 17. One flipped bit
#
# **The idea.** Collectives trust their messages. If one bit of one message flips, the sum is wrong on every rank in the
# same way, or on some ranks and not on others, and nothing says so: training goes on. Here one bit flips, in a message
# that we choose, and we watch where it goes: along a ring, then over ranks and steps of a training. Then four bytes a
# message name it at once. A message that never arrives and a rank that dies are loud: they are explained, and survived.
#
# *Sources.* Dixit et al. 2021, *Silent Data Corruptions at Scale*,
# [arXiv:2102.11245](https://arxiv.org/abs/2102.11245); Grattafiori et al. 2024, *The Llama 3 Herd of Models*, section
# 3.3.4, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783): 466 interruptions of a job in 54 days, 419 of them
# unexpected.

# %%
import warnings
from functools import cache
from tempfile import TemporaryDirectory

import numpy as np

import zerosim as zs
from zerosim.course import training
from zerosim.display.drawing import LIGHT, Drawing
from zerosim.models.text import shipped
from zerosim.numerics.loss_scale import Static

BF16 = np.dtype("bfloat16")

# %% [markdown]
# ## Predict first
#
# 1. A weight of 0.3 in bf16: which of its 16 bits makes the largest difference when it flips, and how large?
# 2. Four ranks all-reduce on a ring: 3 hops add, 3 copy. A bit flips in the first hop. On how many ranks is the result
#    wrong? And in the last hop?
# 3. Under ZeRO-1 a bit of a *gradient* flips on its way, in step 4. After that step, do the ranks still have the same
#    weights as each other? And if it is a bit of a *weight*, in the all-gather?
# 4. Can a rank notice any of it?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # the bit, and what 0.3 becomes, as [15, -0.3]
    2: ...,  # how many ranks are wrong, of a flip in the first hop and in the last, as [1, 4]
    3: ...,  # True or False, for the gradient and for the weight, as [True, True]
    4: ...,  # True or False: if checksums are sent too
})

# %% [markdown]
# ## Which bit
#
# A bf16 number is a sign, 8 bits of exponent and 7 of mantissa: bit 15, bits 14 to 7, bits 6 to 0.

# %%
def flipped(message, bit):
    """The message with one bit of its first element flipped."""
    found = message.copy()
    found.view(f"u{message.dtype.itemsize}")[0] ^= 1 << bit
    return found


weight = np.array([0.3], BF16)
names = {0: "the last of the mantissa", 6: "the first of the mantissa", 7: "the last of the exponent",
         10: "of the exponent", 14: "the first of the exponent", 15: "the sign"}
furthest = max(range(16), key=lambda bit: abs(float(flipped(weight, bit)[0]) - 0.3))
predictions.reveal(1, [furthest, float(flipped(weight, furthest)[0])], within=0.1)

# %%
zs.draw.table([">bit", "is", ">0.3 becomes"],
              [(bit, name, f"{float(flipped(weight, bit)[0]):.4g}") for bit, name in names.items()])

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# The first bit of the exponent is 0 in every number below 2, and almost all weights and gradients are such: flipped, it
# multiplies by 2¹²⁸. The last bit of the mantissa moves by one place in 256, less than a step of training may do.
# </details>
#
# ## Along the ring
#
# The ring of [notebook 4](04_rings.ipynb), without ranks: `held[r][c]` is what rank r has of chunk c. In one hop every
# rank sends one chunk to its right; in the first N - 1 hops what arrives is added to, then it is copied.

# %%
def chunks_of(x, ranks):
    """The N chunks of a vector; the last ones may be shorter."""
    each = -(-len(x) // ranks)
    return [x[each * c:each * (c + 1)] for c in range(ranks)]


def ring_by_hand(vectors, rank=None, hop=None, bit=0):
    """The all-reduce of every rank's vector; one bit flips in what ``rank`` sends in ``hop``."""
    ranks = len(vectors)
    own = [chunks_of(x, ranks) for x in vectors]
    held = [list(chunks) for chunks in own]
    for step in range(2 * ranks - 2):
        adds = step < ranks - 1
        sent = {r: (r - 1 - step if adds else r - step + ranks - 1) % ranks for r in range(ranks)}
        messages = {r: held[r][c] for r, c in sent.items()}
        if step == hop:
            messages[rank] = flipped(messages[rank], bit)
        for r, c in sent.items():
            right = (r + 1) % ranks
            held[right][c] = messages[r] + own[right][c] if adds else messages[r]
    return [np.concatenate(chunks) for chunks in held]


def vectors_of(ranks, length=8, dtype=BF16):
    """Data that differ on every rank."""
    return [np.random.default_rng(r).standard_normal(length).astype(dtype) for r in range(ranks)]


data = vectors_of(4)
right = ring_by_hand(data)
rows = []
for hop in range(6):
    wrong = ring_by_hand(data, rank=1, hop=hop, bit=14)
    differ = [np.flatnonzero(a.view("u2") != b.view("u2")) for a, b in zip(wrong, right, strict=True)]
    rows.append((hop, "adds" if hop < 3 else "copies", *(str(one.tolist()) for one in differ)))
predictions.reveal(2, [sum(wrong != "[]" for wrong in rows[hop][2:]) for hop in (0, 5)])

# %%
zs.draw.table(["hop", "what arrives is", *(f"wrong elements of rank {r}" for r in range(4))], rows)

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# In a hop that adds, the wrong partial sum goes on to the owner, and the owner's sum to everybody: **all ranks have the
# same wrong element**, and comparing ranks shows nothing. In a hop that copies, only ranks further down the ring have
# it: ranks that should be equal are not.
# </details>
#
# `zs.Cluster` injects the same fault where messages move. A fault is a text, and has its row in the trace:

# %%
cluster = zs.Cluster(4, faults="rank=1,collective=all_reduce,hop=4,bitflip,bit=14")
found = cluster.run(lambda rank: rank.all_reduce(data[rank.index]))
print(next(row for row in cluster.trace[1].rows if type(row).__name__ == "InjectedFault"))
by_hand = ring_by_hand(data, rank=1, hop=4, bit=14)
print("the bits of the ring by hand:",
      [a.tobytes() == b.tobytes() for a, b in zip(found, by_hand, strict=True)])

# %% [markdown]
# ## Over ranks and steps
#
# A small model under ZeRO-1 on four ranks, in bf16, with Adam and gradients clipped to a norm of 1. A bit flips in step
# 4, once on the way of a gradient, bit 14, once on the way of a weight, its sign. After each step every rank's weights
# are compared with those of a training in which nothing happened.

# %%
MODEL, RANKS, STEPS = zs.models.MLP([8, 16, 16, 4]), 4, 10
POLICY = zs.Policy("bf16", loss_scale=Static(1.0, skips=None))  # skip a step whose gradients overflow


def weights_after_each_step(rank):
    """(steps, P): the weights with which this rank computes, as bits; the steps skipped; its last loss."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(lr=0.01), stage=1, policy=POLICY, clip_norm=1.0)
    random, seen, skipped = np.random.default_rng(rank.index), [], 0
    for _ in range(STEPS):
        x = random.standard_normal((4, 8)).astype(np.float32)
        result = engine.step(x, np.tanh(x[:, :4]))
        skipped += result.skipped
        parts = []
        for unit in MODEL.units:
            with engine.weights(unit) as weights:
                parts += [weights[name].reshape(-1).view(np.uint16).copy() for name in unit.shapes]
        seen.append(np.concatenate(parts))
    return np.array(seen), skipped, result.losses[0]


@cache  # a training that is asked for again
def trained(fault=None, **options):
    """All ranks' results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zs.SkippedStepWarning)
        return zs.Cluster(RANKS, faults=fault, **options).run(weights_after_each_step)


def share_that_differs(found, healthy):
    """(ranks, steps)"""
    return np.array([(a[0] != b[0]).mean(1) for a, b in zip(found, healthy, strict=True)])


GRADIENT = "rank=1,step=4,purpose=gradients,bitflip,bit={}"
WEIGHT = "rank=1,step=4,purpose=parameters,hop=1,bitflip,bit={}"
healthy = trained()
flips = {"bit 14 of a gradient, in the reduce-scatter": GRADIENT.format(14),
         "the sign of a weight, in the all-gather": WEIGHT.format(15)}
shares = {name: share_that_differs(trained(fault), healthy) for name, fault in flips.items()}
after = [[seen[3].tobytes() for seen, *_ in trained(fault)] for fault in flips.values()]  # step 4, by rank
predictions.reveal(3, [len(set(of_ranks)) == 1 for of_ranks in after])


# %%
def spread(shares):
    """A row for each rank, a column for each step; the darker, the more weights differ."""
    title = "Weights that differ from those of a training without the flip, in percent"
    with LIGHT.figure(11, 5.2) as figure:
        panels = figure.subplots(len(shares), 1, gridspec_kw={
            "hspace": 0.75, "top": 0.82, "left": 0.09, "right": 0.98})
        for axes, (name, share) in zip(panels, shares.items(), strict=True):
            axes.imshow(share ** 0.4, cmap="Oranges", vmin=0, vmax=1.7, aspect="auto")
            for (rank, step), value in np.ndenumerate(share):
                digits = 1 if 0 < value < 0.01 else 0
                axes.text(step, rank, f"{100 * value:.{digits}f}", ha="center", va="center")
            axes.set(xticks=range(STEPS), xticklabels=range(1, STEPS + 1), xlabel="after step",
                     yticks=range(RANKS), yticklabels=[f"rank {r}" for r in range(RANKS)])
            axes.set_title(f"Flipped in step 4: {name}", fontsize=12)
        figure.text(0.02, 0.95, title, va="center", fontsize=15, fontweight="bold")
    words = "; ".join(f"{name}, rank 0: {np.round(100 * share[0]).tolist()}, rank 3: "
                      f"{np.round(100 * share[3]).tolist()}" for name, share in shares.items())
    return Drawing("flipped-bit", title, f"Panels of ranks by steps. {words}.", LIGHT, figure)


spread(shares)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# *The gradient.* All ranks go the wrong way together. One element of the sum is huge; so is the norm, and clipping
# makes every other gradient almost zero: most weights differ after the same step, on all ranks alike.
# </details>
#
# <details><summary>Answer to question 3</summary>
#
# *The weight.* After step 4 one weight is wrong, on ranks 2 and 3 alone. In step 5 they compute with it, their
# gradients go into everybody's sum, and ranks 0 and 1 are wrong too. From then on the ranks agree again, since the
# all-gather brings every weight anew from its owner's master; what the wrong one did to the others stays.
# </details>
#
# Nobody was told anything. Which bits can one see in the loss?

# %%
rows = []
for bit in names:
    for what, fault in (("gradient", GRADIENT), ("weight", WEIGHT)):
        found = trained(fault.format(bit))
        share = share_that_differs(found, healthy)[0, -1]
        worst = max(found, key=lambda of_rank: abs(np.float64(of_rank[2])))
        rows.append((bit, what, f"{100 * share:.0f} %", f"{found[0][1]} of {STEPS}", f"{worst[2]:.2f}"))
columns = [">bit", "of a", ">weights that differ after step 10", ">steps skipped", ">largest loss"]
zs.draw.table(columns, rows,
              f"Without a flip the largest loss is {max(of_rank[2] for of_rank in healthy):.2f}")

# %% [markdown]
# One of twelve shows: the first bit of a weight's exponent. Its gradients overflow, every rank skips every step from
# then on, so no all-gather brings the right weight again: the loss stays infinite on two ranks. In the other eleven the
# loss tells nothing.
#
# ## With checksums
#
# `checksums=True` sends the *checksum* of each message and of its number on the link along with it, a CRC-32: 4 bytes,
# which are counted. What a bit does later no longer matters: its message is named.

# %%
plain, checked = zs.Cluster(RANKS), zs.Cluster(RANKS, checksums=True)
for cluster in (plain, checked):
    cluster.run(weights_after_each_step)
caught = 0
for bit in names:
    for fault in (GRADIENT, WEIGHT):
        try:
            trained(fault.format(bit), checksums=True)
        except zs.faults.ChecksumError as error:
            caught, said = caught + 1, error
predictions.reveal(4, caught > 0)

# %%
print("measured:")
print("bytes sent by rank 0 without and with:",
      plain.trace[0].sent_nbytes(), checked.trace[0].sent_nbytes(), "\n")
print(f"{caught} of {2 * len(names)} flips were found. The last one:\n{said}")

# %% [markdown]
# <details><summary>Answer to question 4</summary>
#
# They find what happens on the way. A rank whose arithmetic is wrong sends the checksum of a wrong number: `nan` is
# such a fault, and it is the check for overflow that finds it.
# </details>
#
# All ranks skip the step, and go on:

# %%
found = trained("rank=1,step=4,purpose=gradients,nan", checksums=True)
print("steps skipped, by rank:", [skipped for _, skipped, _ in found])

# %% [markdown]
# ## A message that never arrives, and a rank that dies
#
# Real ranks wait until a watchdog ends the job. Here no rank can go on, and that is said at once, with who waits in
# which call, in which line of the program:

# %%
try:
    zs.Cluster(4, faults="rank=2,hop=1,lost").run(lambda rank: rank.all_reduce(data[rank.index]))
except zs.DeadlockError as error:
    first, where = str(error).splitlines()[:2]
    print(first, where.partition(" at ")[0], error.__notes__[0], sep="\n")

# %% [markdown]
# A dead rank takes its shards of masters and moments with it. From a [checkpoint](../docs/checkpoints.md) the others go
# on, each with a larger shard: what `torchrun --max-restarts` begins anew, and `zerosim train --max-restarts` too.

# %%
options = training.Options(model="gpt-nano", ranks=4, steps=6, batch=1, sample_tokens=0)
folder = TemporaryDirectory()
found = training.train(options, shipped(), faults=zs.faults.Plan("rank=2,step=5,dies"), max_restarts=1,
                       checkpoints=training.Checkpoints(folder.name, every=2))
print(*found.happened[:1], *found.differences, sep="\n")
print("steps taken by three ranks:", [step.number for step in found.steps])
folder.cleanup()

# %% [markdown]
# ## Try it
#
# * Flip a bit at stage 3, where weights are gathered twice a step (`purpose=parameters`). How long does the wrong
#   weight live?
# * Without clipping (`clip_norm=None`), how many weights differ after step 4? Adam divides by the root of v: what does
#   a huge gradient do to the element's later steps?
# * `repeated` and `reordered` in place of `bitflip`: which of them would a sum of all bytes, as a checksum, not find?
# * `zerosim train --fault rank=2,step=40,bitflip`, then with `--checksums`.
#
# ## Proof
#
# In every world, for a flip in each hop of the ring and several bits, the cluster has the bits of the ring by hand on
# all ranks, and with checksums the flip is found, by its hop.

# %%
def summed(rank, data):
    return rank.all_reduce(data[rank.index])


for ranks in (1, 2, 3, 4, 5, 8):
    data, flips = vectors_of(ranks, 3 * ranks), 0
    for hop in range(2 * ranks - 2):
        for bit in (0, 7, 15):
            fault = f"rank={hop % ranks},hop={hop},bitflip,bit={bit}"
            there = zs.Cluster(ranks, faults=fault).run(summed, data)
            here = ring_by_hand(data, hop % ranks, hop, bit)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(here, there, strict=True))
            said = "nobody has found it"
            try:
                zs.Cluster(ranks, faults=fault, checksums=True).run(summed, data)
            except zs.faults.ChecksumError as error:
                said = str(error)
            assert f"hop {hop} of all_reduce" in said
            flips += 1
    print(f"N = {ranks}: {flips} flips have the bits of the ring by hand, and checksums find each")
