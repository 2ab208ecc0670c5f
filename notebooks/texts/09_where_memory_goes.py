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
# # 9. Where memory goes: every byte has a name
#
# **The idea.** ZeRO is about what *rests* on a rank between two steps: weights, gradients, optimizer state. But a rank
# runs out of memory in the middle of a step, at its *peak*, and then more is there: gathered weights,
# activations, a layer's gradient on its way, buffers of collectives. Each rank keeps a list of all of it, its *memory*,
# by kind, from birth to death. With the list one can name every array at the peak; with formulas one can say beforehand
# how many bytes that will be, to the byte.
#
# *Source.* Rajbhandari, Rasley, Ruwase and He 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
# Models*, section 3, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %%
import numpy as np

import zerosim as zs

WIDTH, LAYERS = 16, 8
MODEL = zs.models.MLP([WIDTH] * (LAYERS + 1))  # eight layers of 16 x 16 weights and 16 biases
ADAM = zs.optim.Adam(lr=0.01)
BF16 = zs.Policy("bf16")  # weights, gradients and what travels take 2 bytes per number


def one_step(rank, stage, rows):
    """One step on ``rows`` samples, other ones on every rank: the engine, with all that it keeps."""
    engine = zs.Engine(rank, MODEL, ADAM, stage=stage, policy=BF16)
    random = np.random.default_rng(rank.index)
    engine.step([tuple(random.standard_normal((2, rows, WIDTH)).astype(np.float32))])
    return engine


# %% [markdown]
# ## Predict first
#
# 1. Stage 3 on four ranks. When is a rank fullest: at the end of forward, at the loss, in the backward of the last
#    layer, in that of the first, or in the update?
# 2. With twice as many ranks, which of these shrink: weights at rest, gathered weights, activations, the buffers of a
#    ring?
# 3. The batch gets 16 times as large. What does the choice of the stage still matter?
# 4. A device has exactly as many bytes as the peak. And if it has one byte less?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # "forward", "loss", "last layer", "first layer" (both in backward) or "update"
    2: ...,  # a set out of "parameter", "gathered_parameter", "activation" and "communication_buffer"
    3: ...,  # the share of stage 0's bytes that stage 3 still saves, from 0 to 1
    4: ...,  # True or False: the step still runs
})

# %% [markdown]
# ## The same training, on fewer bytes
#
# First, what all four stages agree on. A small network learns under each of them, on four ranks:

# %%
zs.draw.stages()

# %% [markdown]
# **One curve**: the four losses are the same to the bit, in every step. What differs is what a rank holds, and at
# stage 3 what it sends. The bars are of the fullest moment, and not all of their colors are states at rest. So, moment
# by moment:
#
# ## Memory over a step
#
# `rank.memory` is what a rank holds, `cluster.memory` what all ranks hold. Both can be drawn. Here is rank 0 of four
# at stage 3, from the making of the engine to the end of its first step, change by change:

# %%
cluster = zs.Cluster(4)
engines = cluster.run(one_step, 3, 4)
memory, trace = cluster.memory[0], cluster.trace[0]
memory.plot()

# %% [markdown]
# Solid is what rests: this rank's share, a quarter of the model's states. Hatched is what comes and goes. In forward
# you see eight layers being gathered and freed, and activations piling up; backward takes the pile down again, and at
# each layer adds a gradient and, for a moment, the buffers in which the ring receives.
#
# What the rank did meanwhile is in its trace, and what it had sent by then:

# %%
trace.plot()

# %% [markdown]
# ## Who is there at the peak
#
# The trace knows when each array was born and when it died (`trace.lifetimes()`, with the rows of the trace as its
# clock). A peak is always reached at a birth. So try all births:

# %%
lives = trace.lifetimes()


def held_at(row):
    """The bytes of all that lives at one row of the trace."""
    return sum(life.nbytes for life in lives if life.lives_at(row))


fullest = max((life.born for life in lives), key=held_at)
assert held_at(fullest) == memory.peak_nbytes
born_in = " ".join(next(life.born_in for life in lives if life.born == fullest))
places = {f"forward layer{LAYERS - 1}": "forward", "loss": "loss", "backward layer0": "first layer",
          f"backward layer{LAYERS - 1}": "last layer"}
predictions.reveal(1, places.get(born_in, "update"))

# %%
rows = [(life.kind, life.name, "/".join(life.born_in) or "before forward", life.nbytes)
        for life in lives if life.lives_at(fullest)]
zs.draw.table(("kind", "array", "lives since", "bytes"), [*rows[-12:], ("all", "", "", held_at(fullest))],
              f"The youngest 12 of the {len(rows)} arrays at the peak, and all together")

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **The backward of the last layer**, when its gradient is being reduced. All other layers' inputs are still there (and
# one bit for each number that went through a ReLU), the layer's weights are whole, so is its gradient, the ring has its
# two buffers, and two gradients of activations meet: the one that came in and the one that goes out.
# </details>
#
# ## By formulas
#
# Now without a run. $u$ is a layer's length, padded; a batch of $B$ rows is $2Bd$ bytes in bf16. `zs.planning` has the
# closed forms for what rests (notebooks 6 to 8). What comes and goes we add by hand, at the three moments that can be
# the fullest:

# %%
def job(stage, ranks):
    """The training step on paper: lengths of the units, ranks, which states are sharded, formats."""
    lengths = tuple(unit.parameter_count for unit in MODEL.units)
    return zs.planning.Job(lengths, ranks, zs.planning.STAGES[stage], policy=BF16)


def estimate(stage, ranks, rows):
    """Bytes by kind at each moment that may be the peak."""
    states, u = zs.planning.STAGES[stage], job(stage, ranks).padded_lengths[0]
    rests = zs.planning.resting_nbytes(job(stage, ranks))[0]
    row, bits = 2 * rows * WIDTH, -(-rows * WIDTH // 8)  # bytes of a layer's output, and of a ReLU's signs
    signs = (LAYERS - 1) * bits
    ring = min(2, ranks - 1) * 2 * u // ranks  # what arrives while the last arrival leaves: two chunks
    # the loss: all layers' outputs, the differences to the target in fp32, the batch with its fp32 target
    moments = {"loss": {"activation": LAYERS * row + signs, "workspace": 2 * row, "input": 3 * row}}
    # the last layer's backward: with its input still there; then without, while its gradient is reduced
    back = {"gathered_parameter": 2 * u * states.parameters_sharded, "activation_gradient": 2 * row,
            "input": row}
    if states.gradients_sharded:
        back["unit_gradient"] = 2 * u
        moments["reduction"] = back | {"activation": (LAYERS - 2) * row + signs,
                                       "communication_buffer": ring}
    moments["backward"] = back | {"activation": (LAYERS - 1) * row + signs}
    # after backward, where gradients rest whole: the owner's chunk of the sum beside them, and the ring
    if states.optimizer_sharded and not states.gradients_sharded:
        whole = rests["gradient"] + rests["gradient"] // ranks
        moments["reduce"] = {"gradient": whole, "communication_buffer": ring}
        moments["norm"] = {"gradient": whole, "workspace": 8 * ranks}  # a sum of squares from each rank
    return {name: {kind: n for kind, n in (rests | held).items() if n} for name, held in moments.items()}


def fullest_of(moments):
    """The name and the bytes by kind of the fullest moment."""
    return max(moments.items(), key=lambda moment: sum(moment[1].values()))


name, held = fullest_of(estimate(3, 4, 4))
measured = memory.peak_nbytes_by_kind
zs.draw.table(("kind", "estimate", "measured"), [
    *((kind, held.get(kind, 0), measured.get(kind, 0)) for kind in held | measured),
    ("all", sum(held.values()), memory.peak_nbytes)], f"The fullest moment, at the {name} (bytes)")

# %% [markdown]
# The same for all stages, and for three sizes of the batch:

# %%
def line(rows, stage):
    """Rows, stage, bytes at rest and at most, and at which moment."""
    name, held = fullest_of(estimate(stage, 4, rows))
    rests = sum(zs.planning.resting_nbytes(job(stage, 4))[0].values())
    return rows, stage, rests, sum(held.values()), name


few, many = (fullest_of(estimate(3, ranks, 4))[1] for ranks in (4, 8))
kinds = "parameter", "gathered_parameter", "activation", "communication_buffer"
predictions.reveal(2, {kind for kind in kinds if many[kind] < few[kind]})
predictions.reveal(3, 1 - line(64, 3)[3] / line(64, 0)[3], within=0.25)

# %%
zs.draw.table(("rows", "stage", "at rest (bytes)", "at most (bytes)", "at the"),
              [line(rows, stage) for rows in (1, 4, 64) for stage in zs.STAGES])

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# With one row the stage is what counts; stage 0 holds 3.4 times as much as stage 3. With 64 rows the peak of stage 3 is
# **four times what it has at rest**, it moves to the loss, and the whole of ZeRO saves less than half. ZeRO does
# nothing about activations: each rank has a batch of its own. That is the next notebook's subject.
# </details>
#
# <details><summary>Answer to question 2</summary>
#
# And question 2: weights at rest shrink with N, and so do the ring's buffers, whose chunks are $u/N$ long. Gathered
# weights do not, they are a whole layer; activations do not either.
# </details>
#
# ## A real model
#
# Nothing of this needs numbers in the arrays. `zs.plan` computes it for models of any length, and the engine can run
# one step on arrays that have a shape and no data, and count its bytes. GPT-2 XL, 1.5 billion parameters, on 64 GPUs at
# stage 3, 4 sequences of 1,024 tokens on each:

# %%
config = zs.planning.plan_config("gpt2-xl", ranks=64, device="h100-80", link="nvlink4", batch=4,
                                 optimizer=ADAM, runtime="zerosim")
zs.draw.measured(config, stage=3)

# %% [markdown]
# Of each GPU's 80 GB states take 0.39 and **the peak takes 20.3, of which 19.7 are activations**. (`zs.plan` takes it
# that reductions run beside backward, and that one block is gathered ahead: that is notebook 11.) Once states are
# sharded, memory goes into activations.
#
# ## Try it
#
# * Which arrays live at the peak with 64 rows? Put 64 for 4 in `cluster.run(one_step, 3, 4)` above.
# * `trace.lifetimes("gathered_parameter")` at stage 3: does a second one ever begin before the first has ended? And
#   with `prefetch=1` in the engine?
# * Give the engine `recompute="segment(4)"`. Which line of `estimate` is wrong now?
# * `cluster.memory.plot()` shows all ranks. Let rank 1 have twice as many rows as the others.
#
# ## Proof
#
# Estimate and measurement: the same bytes of every kind at the peak, for all stages, 1 to 8 ranks and two batches, on
# every rank. And question 4: the step on a device with exactly that capacity, to the same bits, and with a byte less.
#
# <details><summary>Answer to question 4</summary>
#
# **It does not run**, and says what it holds.
# </details>

# %%
try:
    runs = bool(zs.Cluster(4, capacity_nbytes=memory.peak_nbytes - 1).run(one_step, 3, 4))
except zs.OutOfMemoryError:
    runs = False
predictions.reveal(4, runs)

# %%
print("measured:")
for ranks in (1, 2, 3, 4, 5, 8):
    for stage in zs.STAGES:
        for rows in (1, 64):
            held = fullest_of(estimate(stage, ranks, rows))[1]
            cluster = zs.Cluster(ranks)
            engines = cluster.run(one_step, stage, rows)
            for memory in cluster.memory:
                assert memory.peak_nbytes_by_kind == held, (ranks, stage, rows)
            capacity = sum(held.values())
            small = zs.Cluster(ranks, capacity_nbytes=capacity).run(one_step, stage, rows)
            for roomy, tight in zip(engines, small, strict=True):
                assert roomy.param_group.master.tobytes() == tight.param_group.master.tobytes()
            try:
                zs.Cluster(ranks, capacity_nbytes=capacity - 1).run(one_step, stage, rows)
            except zs.OutOfMemoryError as error:
                words = str(error)
            else:
                raise AssertionError("one byte less was enough")
    print(f"N = {ranks}: estimate and measurement agree in every kind; "
          "the peak suffices, a byte less does not")
print(words)
