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
# # 18. Adam on the host: offload
#
# **The idea.** The computer that a GPU sits in, its *host*, has much more memory. Of the 16 bytes per parameter the GPU
# computes with 2; the other 14 Adam needs, once a step. So let these rest on the host, and let the host update
# (*offload*): gradients go there over a link, and new weights come back. No bit changes. The price is seconds, as many
# for a small batch as for a large one. Who does not want to pay them computes meanwhile with weights that are one step
# old, a *delayed update*, and that does change bits.
#
# *Sources.* Ren et al. 2021, *ZeRO-Offload: Democratizing Billion-Scale Model Training*, sections 3 to 6,
# [arXiv:2101.06840](https://arxiv.org/abs/2101.06840).

# %%
from collections import Counter
from itertools import compress, product

import numpy as np

import zerosim as zs
from zerosim.display.drawing import LIGHT, Drawing

BF16 = np.dtype("bfloat16")  # 2 bytes per number: weights, gradients and what travels
MODEL = zs.models.MLP([12, 80], bias=False)  # one matrix: how many there are does not matter here
(FIRST,) = zs.models.first_weights(MODEL).values()  # (12, 80), in fp32
STEPS = 4
TEACHER = np.random.default_rng(0).standard_normal((12, 80)) / 4


def batch(index, step):
    """x (4, 12), target (4, 80): other samples on every rank and in every step, of one function."""
    x = np.random.default_rng((index, step)).standard_normal((4, 12))
    return x.astype(BF16), np.tanh(x @ TEACHER).astype(np.float32)


# %% [markdown]
# ## Predict first
#
# 1. Master, m, v and gradients rest on the host. How many bytes per parameter cross the link in a step?
# 2. The GPU is far faster: should it not fetch the state, update, and bring it back?
# 3. Link and host take 0.8 s for a billion parameters. From how many tokens on does computing take longer? For ten?
# 4. With the delayed update, the loss of which step is the first that differs?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # bytes
    2: ...,  # bytes per parameter that cross then
    3: ...,  # tokens, for a billion parameters and for ten, as [1e3, 1e4]
    4: ...,  # the step's number
})

# %% [markdown]
# ## All the ways to cut a step
#
# Per parameter: forward and backward read the weights, once each, and make a gradient; the update reads gradient,
# master, m and v, and writes the last three and new weights. Computing stays on the device, all else may be on either
# side, and what one side reads of the other crosses the link. Let us try all 64 ways:

# %%
HELD = {"weights": 2, "gradient": 2, "master": 4, "m": 4, "v": 4}  # bytes per parameter, at rest
READ = {("weights", "computing"): 4, ("computing", "gradient"): 2, ("gradient", "update"): 2,
        ("update", "weights"): 2, ("master", "update"): 8, ("m", "update"): 8, ("v", "update"): 8}


def bytes_of(device):
    """What crosses the link in a step, and what the device holds; ``device`` names all that is there."""
    return (sum(nbytes for (one, other), nbytes in READ.items() if (one in device) != (other in device)),
            sum(nbytes for name, nbytes in HELD.items() if name in device))


choices = [{"computing", *compress([*HELD, "update"], here)} for here in product((1, 0), repeat=6)]
rows = []
for crossing, held, device in sorted((*bytes_of(device), sorted(device)) for device in choices):
    if not rows or held < rows[-1][1]:  # nothing that sends as little makes as much room
        rows.append((crossing, held, ", ".join(device)))
predictions.reveal(2, bytes_of({"computing", "weights", "gradient", "update"})[0])

# %%
print("measured:")
print("the GPU updates, the host stores:", bytes_of({"computing", "weights", "gradient", "update"}))
zs.draw.table(("crosses in a step", "held on the device", "on the device"), rows,
              f"Of {len(choices)} choices, those that no other beats: bytes per parameter")

# %% [markdown]
# **Three ways are worth having**: nothing crosses, or 4 bytes, or 6. With 4 the device holds an eighth.
#
# <details><summary>Answer to question 2</summary>
#
# It would fetch and bring back **24 bytes in place of 4**, and hold more. The update belongs where its state is.
# </details>
#
# ## By hand
#
# Two memories are two dicts of arrays, with one rule: the device computes with what is in `device`, the host with what
# is in `host`, and only `cross` copies from one to the other. The rest is ZeRO-2 (notebook 7): over its own link a rank
# sends its shard of the gradient, and gets its shard of the weights.

# %%
def adam(w, m, v, g, step, lr):
    """One update in fp32, in place, of as many weights as there are."""
    m[:] = 0.9 * m + (1 - 0.9) * g
    v[:] = 0.999 * v + (1 - 0.999) * (g * g)
    w -= lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


def train_by_hand(rank, steps, delayed=False, lr=0.01):
    """What is on the device and on the host in the end; the bytes of it, and that crossed; all losses."""
    master = np.split(FIRST.ravel(), rank.size)[rank.index].copy()
    device, losses = {"weights": FIRST.astype(BF16)}, []
    host, crossed = {"master": master, "m": np.zeros_like(master), "v": np.zeros_like(master)}, Counter()

    def cross(x, way):
        crossed[way] += x.nbytes
        return x.copy()

    for step in range(1, steps + 1):
        x, target = batch(rank.index, step)
        x = x.astype(np.float32)  # products of bf16 are added up in fp32
        error = (x @ device["weights"].astype(np.float32)).astype(BF16) - target  # forward
        losses.append(0.5 * np.mean(np.sum(error * error, 1)))
        dy = (error / np.float32(len(x))).astype(BF16)
        dw = (x.T @ dy.astype(np.float32)).astype(BF16)  # backward
        host["gradient"] = cross(rank.reduce_scatter(dw.ravel(), purpose="gradients"), "to host")
        mean = host["gradient"].astype(np.float32) / np.float32(rank.size)
        adam(host["master"], host["m"], host["v"], mean, step, lr)
        due = host.pop("waiting", None)  # the weights of the update before
        host["waiting"] = host["master"].astype(BF16)
        if not delayed:
            due = host.pop("waiting")
        if due is not None:
            shard = cross(due, "to device")
            rank.all_gather(shard, out=device["weights"].reshape(-1), purpose="parameters")
    held = [sum(x.nbytes for x in memory.values()) for memory in (device, host)]
    return device, host, (*held, crossed), losses


nbytes = {ranks: zs.Cluster(ranks).run(train_by_hand, STEPS)[0][2] for ranks in (1, 2, 4, 8)}
predictions.reveal(1, sum(nbytes[1][2].values()) / STEPS / FIRST.size)

# %%
rows = [(ranks, (2 * ranks + 14) * FIRST.size // ranks, *held, *(n // STEPS for n in crossed.values()))
        for ranks, (*held, crossed) in nbytes.items()]
columns = ("N", "ZeRO-2, by formula", "on the device", "on the host", "to the host in a step", "and back")
zs.draw.table(columns, rows, f"Bytes of one rank, by hand; the model has {FIRST.size} parameters")

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **2 bytes there and 2 back, for each parameter of a rank's shard.**
# </details>
#
# And how long does that take? For one H100 on PCIe 5, by published rates, of products and of DeepSpeed's Adam for
# hosts. Forward and backward of T tokens compute 6PT FLOPs.

# %%
RATES = zs.planning.efficiency.efficiency(zs.planning.hardware.device("h100-80"), "deepspeed")
LINK = zs.planning.hardware.link("pcie5")


def seconds_of(parameters, tokens):
    """Seconds of computing, of the link one way, and of the host's update, in one step on one GPU."""
    return (6 * parameters * tokens / RATES.products, 2 * parameters / LINK.bytes_per_second,
            parameters / RATES.host_update)


rows = [(f"{n / 1e9:g}", f"{tokens:,}", *(f"{seconds:.2f}" for seconds in seconds_of(n, tokens)))
        for n in (1e9, 10e9) for tokens in (4_096, 65_536)]
equal = RATES.products / 6 * (4 / LINK.bytes_per_second + 1 / RATES.host_update)
predictions.reveal(3, [equal, equal], within=0.25)  # whatever the number of parameters

# %%
print("measured:")
print(f"computing takes as long as link and host from {equal:,.0f} tokens on")
zs.draw.table((">10⁹ parameters", ">tokens", ">computing (s)", ">link, each way", ">host's Adam"), rows)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **Some 100,000 tokens, for any model**, since all three grow with P. The link takes little; Adam does nothing but read
# and write the host's slow memory. So many micro-batches in a step make offload cheap.
# </details>
#
# ## The delayed update
#
# While the host updates the device idles, and the other way round. If the device goes on with the weights that it has,
# both work at once: step $s$ computes with what the update of step $s-2$ made.

# %%
def schedule(steps, delayed, computing, link, update):
    """Who does what when: (lane, seconds, end, step), ..."""
    bars, there, computed, updated = [], {0: 0, -1: 0}, 0, 0  # when the weights of which update are there
    for step in range(1, steps + 1):
        computed = max(computed, there[step - 1 - delayed]) + computing
        arrived = computed + max(0, link - computing * 2 / 3)  # gradients leave as backward makes them
        updated = max(arrived, updated) + update
        there[step] = updated + link
        bars += [("computing", computing, computed, step), ("gradients cross", link, arrived, step),
                 ("host's Adam", update, updated, step), ("weights cross", link, there[step], step)]
    return bars


with LIGHT.figure(12, 5.6) as figure:
    panels, said = figure.subplots(2, 1, gridspec_kw={"hspace": 0.55, "left": 0.14, "right": 0.98}), []
    for axes, delayed, name in zip(panels, (0, 1), ("Each step waits", "Delayed update"), strict=True):
        bars = schedule(4, delayed, *seconds_of(10e9, 65_536))
        said.append(f"{name}: 4 steps in {bars[-1][2]:.1f} s")
        for lane, seconds, end, step in reversed(bars):
            axes.barh(lane, -seconds, 0.8, end, color=("#e69f00", "#56b4e9")[step % 2])
            axes.text(end + (0.5 if seconds < 1 else -seconds / 2), lane, step, ha="center", va="center")
        axes.set(xlim=(0, 51), title=said[-1], xlabel="seconds (10 billion parameters, 65,536 tokens)")
Drawing("offload-schedule", "Adam on the host", "; ".join(said), LIGHT, figure)

# %% [markdown]
# Now the slower of the two never idles. (The host needs room for a second gradient, which comes while it reads the
# first.) What does a delay do to learning? The same 60 steps on four ranks, by hand, at three learning rates:

# %%
rows = []
for lr in (0.003, 0.01, 0.03):
    found = [zs.Cluster(4).run(train_by_hand, 60, delayed, lr) for delayed in (False, True)]
    losses = np.mean([[of_rank[3] for of_rank in ranks] for ranks in found], 1)  # (2, steps)
    second, last = losses[:, 1], losses[:, 50:].mean(1)
    rows.append((lr, *(f"{loss:.2f}" for loss in (*second, *last)), f"{last[1] / last[0] - 1:.0%}"))
predictions.reveal(4, 1 + np.argmax(losses[0] != losses[1]))

# %%
columns = (">learning rate", ">loss of step 2", ">delayed", ">of steps 51 to 60", ">delayed", ">more")
zs.draw.table(columns, rows)

# %% [markdown]
# <details><summary>Answer to question 4</summary>
#
# **Step 2's**, which computes with the first weights once more. From then on every gradient is of where the weights
# were a step ago.
# </details>
#
# The less they have moved since, the less it matters: in the end the loss is 1, 4 and 20 % larger. Ren et al. (section
# 6.2.4) delay from step 40 on: a GPT-2's loss lags a little up to step 5,000, and then is that without a delay;
# BERT-large, fine-tuned, comes to the same F1 score, 92.8.
#
# ## Try it
#
# * Let the weights rest on the host too, as the table of ways has it. Where must `cross` stand, and how often?
# * Eight GPUs have eight links, and one host. Which of the three results of `seconds_of` becomes smaller?
# * Leave `host["waiting"]` out of a checkpoint, and go on from it. Who notices? (Notebook 19.)
#
# ## Proof
#
# By hand and by the package's engine with `offload`: the same bits, and the same bytes on the device, on the host and
# over the link. They are the bits of an engine that offloads nothing, unless the update is delayed.

# %%
def train_by_engine(rank, offload):
    """The same steps by the package: the bits of weights, master, m and v; its bytes; its losses."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(lr=0.01), stage=2, policy="bf16", offload=offload)
    losses = [engine.step([batch(rank.index, step)]).losses[0] for step in range(1, STEPS + 1)]
    nbytes = rank.memory.now_nbytes, rank.memory.host.now_nbytes, dict(rank.trace.moved_nbytes)
    state = engine.state(*MODEL.shapes)
    return {kind: state[kind].tobytes() for kind in ("parameter", "master", "m", "v")}, nbytes, losses


for ranks in (1, 2, 3, 4, 5, 8):
    plain = zs.Cluster(ranks).run(train_by_engine, None)[0]
    for delayed in (False, True):
        mine = zs.Cluster(ranks).run(train_by_hand, STEPS, delayed)
        theirs = zs.Cluster(ranks).run(train_by_engine, zs.Offload("host", "host", delayed_update=delayed))
        for (device, _, by_hand, losses), (bits, nbytes, by_engine) in zip(mine, theirs, strict=True):
            assert device["weights"].tobytes() == bits["parameter"], (ranks, delayed)
            for kind in ("master", "m", "v"):
                whole = np.concatenate([host[kind] for _, host, *_ in mine])
                assert whole.tobytes() == bits[kind], (ranks, delayed, kind)
            assert by_hand == nbytes, (ranks, delayed)
            assert np.allclose(losses, by_engine, rtol=1e-6)
        assert (theirs[0][0] == plain[0]) is (not delayed)
    print(f"N = {ranks}: by hand and with offload the same bits and bytes; delayed, other bits")
