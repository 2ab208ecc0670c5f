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
# # 19. Checkpoints: saved on four ranks, continued on two
#
# **The idea.** After ZeRO no rank has the state of a training, so none can save it. Each writes its own shard, and says
# which elements these are; then any number of ranks can go on from this *checkpoint*, each taking what it needs from
# whoever wrote it. What it lacks is seldom seen: the loss after loading looks right. And with every bit there, another
# number of ranks still gets other bits later, by another *order of additions*. Another order cures that.
#
# *Sources.* Lian et al. 2024, *Universal Checkpointing: Efficient and Flexible Checkpointing for Large Scale
# Distributed Training*, [arXiv:2406.18820](https://arxiv.org/abs/2406.18820).

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import zerosim as zs
from zerosim.display.drawing import LIGHT, Drawing

BF16 = np.dtype("bfloat16")  # 2 bytes per number: weights, gradients and what travels
MODEL = zs.models.MLP([30, 35], bias=False)  # one matrix
(FIRST,) = zs.models.first_weights(MODEL).values()  # (30, 35), in fp32: 1,050 numbers
TEACHER = np.random.default_rng(0).standard_normal((30, 35)) / 4
MICRO_BATCHES = 12  # in a step, whoever computes them
FOLDER = TemporaryDirectory()
COLORS = "#0072b2", "#e69f00", "#009e73", "#cc79a7"


def batch(number, step):
    """x (4, 30), target (4, 35) of one micro-batch of a step."""
    x = np.random.default_rng((number, step)).standard_normal((4, 30)).astype(BF16).astype(np.float32)
    return x, np.tanh(x @ TEACHER).astype(np.float32)


# %% [markdown]
# ## Predict first
#
# 1. Adam in bf16 with fp32 masters. What must a checkpoint hold beside master, m and v? Must it hold the bf16 weights?
# 2. One of all these is forgotten. Which shows in the first loss after loading?
# 3. Each of four ranks has saved its quarter of 1,050 numbers. From how many files does each of two ranks read?
# 4. Saved on four ranks, continued on four, on two: which later bits are those of the training that never stopped?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # the set of what is needed, out of "weights", "step", "place" and "losses"
    2: ...,  # the set of those, out of "master", "m, v", "step" and "place"
    3: ...,  # a number for each of the two, as [4, 4]
    4: ...,  # True or False, on four and on two, as [True, True]
})

# %% [markdown]
# ## A training that can stop
#
# ZeRO-2 (notebook 7), on what is in `state`: this rank's chunk of master, m and v, the steps that Adam has counted, and
# the place in the data. A step has 12 micro-batches; the j-th of rank r is number $jN + r$.

# %%
def chunk_of(index, ranks):
    """The range of the flat vector that a rank owns; the last may be short."""
    length = -(-FIRST.size // ranks)
    return min(index * length, FIRST.size), min((index + 1) * length, FIRST.size)


def train(rank, state, steps, order="rank"):
    """So many steps; changes the state, and returns it and the losses of this rank's micro-batches."""
    losses = []
    for _ in range(steps):
        weights = state["master"].astype(BF16)
        w, gradient = rank.all_gather(weights, length=FIRST.size), np.zeros_like(weights)
        state["step"], state["place"] = state["step"] + 1, state["place"] + 1
        for number in range(rank.index, MICRO_BATCHES, rank.size):
            x, target = batch(number, state["place"])
            error = (x @ w.reshape(30, 35).astype(np.float32)).astype(BF16) - target
            losses.append(0.5 * np.mean(np.sum(error * error, 1)))
            dy = (error / np.float32(len(x))).astype(BF16)
            dw = (x.T @ dy.astype(np.float32)).astype(BF16).ravel()
            found = rank.reduce_scatter(dw) if order == "rank" else rank.all_to_all(dw)
            for addend in found.reshape(-1, len(gradient)):  # one sum, or every rank's addend
                gradient += addend
        g, t = gradient.astype(np.float32) / np.float32(MICRO_BATCHES), state["step"]
        state["m"] = 0.9 * state["m"] + (1 - 0.9) * g
        state["v"] = 0.999 * state["v"] + (1 - 0.999) * (g * g)
        m, v = state["m"] / (1 - 0.9**t), state["v"] / (1 - 0.999**t)
        state["master"] -= 0.01 * m / (np.sqrt(v) + 1e-8)
    return state, losses


# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# It needs **the count of steps and the place in the data**. The bf16 weights are the masters, rounded. (Not after the
# delayed update of notebook 18; so the package saves them too.)
# </details>
#
# ## Save and load by hand
#
# A file says at which element its chunks begin. Who reads takes what overlaps with its own; nothing is gathered.

# %%
def load(rank, folder):
    """This rank's state from the files of any number of ranks, and how many elements came from which."""
    low, high = chunk_of(rank.index, rank.size)
    state, came = {kind: np.empty(high - low, np.float32) for kind in ("master", "m", "v")}, {}
    for path in sorted(Path(folder).glob("*.npz")):
        with np.load(path) as file:
            start = int(file["start"])
            first, last = max(low, start), min(high, start + len(file["master"]))
            if first < last:
                came[path.stem] = last - first
                for kind in ("master", "m", "v"):
                    state[kind][first - low:last - low] = file[kind][first - start:last - start]
            state["step"], state["place"] = int(file["step"]), int(file["place"])
    if sum(came.values()) != high - low:
        raise ValueError(f"the files have {came} of {high - low} elements; find the others")
    return state, came


def begin(rank, steps, order="rank", folder=None):
    """The state after so many steps from the first on, saved where a folder is named; the losses."""
    low, high = chunk_of(rank.index, rank.size)
    m, v = np.zeros((2, high - low), np.float32)
    state = {"master": FIRST.ravel()[low:high].copy(), "m": m, "v": v, "step": 0, "place": 0}
    state, losses = train(rank, state, steps, order)
    if folder:
        np.savez(f"{folder}/{rank.index}.npz", start=low, **state)  # this rank's part
    return state, losses


def go_on(rank, folder, order="rank", forgotten=()):
    """The state three steps after a checkpoint, their losses, and where it came from."""
    state, came = load(rank, folder)
    for kind in state.keys() & forgotten:
        state[kind] = state[kind].astype(BF16).astype(np.float32) if kind == "master" else 0 * state[kind]
    return *train(rank, state, 3, order), came


def whole(found, kind="master"):
    """A kind of state of all ranks, put together (P,)."""
    return np.concatenate([state[kind] for state, *_ in found])


zs.Cluster(4).run(begin, 3, "rank", FOLDER.name)
straight, again = zs.Cluster(4).run(begin, 6), zs.Cluster(4).run(go_on, FOLDER.name)
predictions.reveal(1, again[0][0].keys() - {"master", "m", "v"})  # all that was saved

# %%
print("measured:")
print("3 steps, a checkpoint, 3 steps: the bits of 6 steps:",
      [whole(again, kind).tobytes() == whole(straight, kind).tobytes() for kind in ("master", "m", "v")])

# %% [markdown]
# ## What is forgotten
#
# The same, but one thing begins anew: moments, count or data from zero, or masters from the bf16 weights.

# %%
def row(name, found, straight):
    """The mean losses of steps 4 to 6, and how masters differ from those of another training."""
    losses = np.mean([losses for _, losses, *_ in found], 0).reshape(3, -1).mean(1)  # (steps,)
    moved = np.abs(whole(found) - whole(straight)) / 0.01
    return name, *(f"{loss:.3f}" for loss in losses), f"{np.mean(moved > 0):.0%}", f"{moved.max():.1g}"


columns = (">loss of step 4", ">5", ">6", ">masters that differ", ">by at most, in learning rates")
rows = [row(", ".join(lost), zs.Cluster(4).run(go_on, FOLDER.name, "rank", lost), straight)
        for lost in (["nothing"], ["master"], ["m", "v"], ["step"], ["place"])]
predictions.reveal(2, {name for name, loss, *_ in rows if loss != rows[0][1]})

# %%
zs.draw.table(("forgotten", *columns), rows)

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# **Only the place in the data**, and as a success: the model has seen these data. Without the count Adam corrects the
# moments of three steps as those of a first one, too much; here that looks like luck.
# </details>
#
# Who tests one compares bits, some steps later, with a training that did not stop.
#
# ## Four files, other readers

# %%
predictions.reveal(3, [len(came) for *_, came in zs.Cluster(2).run(load, FOLDER.name)])

# %% [markdown]
# In colors the files of four ranks, in frames what each of two and of three ranks reads:

# %%
with LIGHT.figure(12, 3.2) as figure:
    axes = figure.subplots(gridspec_kw={"left": 0.12, "right": 0.98, "bottom": 0.2})
    for y, ranks in ((2, 4), (1, 2), (0, 3)):
        (low, high), (first, last) = (np.transpose([chunk_of(i, n) for i in range(n)]) for n in (4, ranks))
        axes.barh([y] * 4, high - low, 0.7, low, color=COLORS, alpha=0.5)
        axes.barh([y] * ranks, last - first, 0.7, first, fill=False, linewidth=2)
        for i in range(ranks):
            axes.text((first[i] + last[i]) / 2, y, f"rank {i}", ha="center", va="center")
    axes.set(yticks=range(3), yticklabels=["read by 3", "read by 2", "written by 4"], xlabel="element")
print("elements by file, of two ranks:", *(came for *_, came in zs.Cluster(2).run(load, FOLDER.name)))
Drawing("checkpoint-readers", "Four files", "Chunks of 4 ranks, framed by 2 and by 3.", LIGHT, figure)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **Rank 0 from two files, rank 1 from three**, since 4 does not divide 1,050.
# </details>
#
# ## Later bits
#
# The loaded state has the same bits on any number of ranks, and a step the same 12 gradients. But a ring of four ranks
# adds four at a time and one of two adds two, rounded to bf16 each time (notebook 4). The cure is an order without
# ranks: the owner adds micro-batch 0, 1, 2, and so on.

# %%
rows = []
for order in ("rank", "micro_batch"):
    zs.Cluster(4).run(begin, 3, order, FOLDER.name)
    straight = zs.Cluster(4).run(begin, 6, order)
    rows += [row(f"by {order}, on {later}", zs.Cluster(later).run(go_on, FOLDER.name, order), straight)
             for later in (4, 2, 3, 1)]
predictions.reveal(4, [differ == "0%" for *_, differ, _ in rows[:2]])

# %%
zs.draw.table(("added, and continued", *columns), rows)

# %% [markdown]
# <details><summary>Answer to question 4</summary>
#
# **On four ranks all; on others few, unless gradients are added by micro-batch.** By rank masters differ by a fiftieth
# of a learning rate at most, and losses by 0.001: these bits are not worse, only others. By micro-batch every addend
# travels by itself, and the owner needs room for those of all ranks.
# </details>
#
# ## Try it
#
# * Save on 4 ranks, later on 2, into one folder, and load. What does `load` make of the old files? (Ours has no index.)
# * Delete a file, then load. What would you have got without the last check in `load`?
# * Let rank r compute the micro-batches from $12r/N$ on. Which rows of the last table change?
#
# ## Proof
#
# By the package, saved at stage 2 and loaded at stage 3, the same bits; where later ones may differ, `load` says so.

# %%
def by_engine(rank, folder, order, saved=False):
    """Three steps and a checkpoint, or three more after it: master, m and v, whole; what load says."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(0.01), stage=2 + saved, policy="bf16", reduction=order)
    said = saved and engine.load(folder).differences
    for step in (4, 5, 6) if saved else (1, 2, 3):
        engine.step([batch(number, step) for number in range(rank.index, MICRO_BATCHES, rank.size)])
    return engine.state(*MODEL.shapes), said if saved else engine.save(folder)


for ranks in (1, 2, 3, 4, 6):
    for order in ("rank", "micro_batch"):
        unbroken = whole(zs.Cluster(ranks).run(begin, 6, order))
        with TemporaryDirectory() as ours, TemporaryDirectory() as theirs:
            saved = whole(zs.Cluster(ranks).run(begin, 3, order, ours))
            zs.Cluster(ranks).run(by_engine, theirs, order)
            for later in (1, 2, 3, 4, 6):
                assert whole(zs.Cluster(later).run(load, ours)).tobytes() == saved.tobytes()
                hand = zs.Cluster(later).run(go_on, ours, order)
                (package, said), *_ = zs.Cluster(later).run(by_engine, theirs, order, True)
                for kind in ("master", "m", "v"):
                    assert whole(hand, kind).tobytes() == package[kind].tobytes(), (ranks, later, order)
                same = order == "micro_batch" or later == ranks
                assert (whole(hand).tobytes() == unbroken.tobytes()) is same, (ranks, later, order)
                assert any(one.startswith("ranks: ") for one in said) is not same, said
    print(f"N = {ranks}: continued on 1, 2, 3, 4 and 6 ranks, by hand and by the package the same bits")
FOLDER.cleanup()
