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
# # 13. Plan a run
#
# **The idea.** Does it fit, and how long does it take? Whoever rents GPUs wants to know before. What a rank holds and
# sends follows from the model's shapes, so formulas are enough, if nothing is forgotten. And one can find out
# whether something was: run the real program on arrays that have shapes and no data.
#
# *Sources.* Rajbhandari, Rasley, Ruwase and He 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
# Models*, sections 3 and 5, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054). Korthikanti et al. 2022, *Reducing
# Activation Recomputation in Large Transformer Models*, section 4,
# [arXiv:2205.05198](https://arxiv.org/abs/2205.05198). Narayanan et al. 2021, *Efficient Large-Scale Language Model
# Training on GPU Clusters Using Megatron-LM*, appendix, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473).

# %%
import numpy as np

import zerosim as zs
from zerosim.course.measured import measured_row

# %% [markdown]
# ## Predict first
#
# Llama-2-7B has 6,738,415,616 parameters. It shall be trained with Adam and 16-bit weights on 8 GPUs of 80 GB each, and
# each GPU takes 4 sequences of 2,048 tokens at a time.
#
# 1. By the formulas of notebooks 6 to 8, 16 bytes for each parameter and so on: which stages fit?
# 2. Which is the first stage that fits really, if no activations are recomputed? What did the formulas leave out?
# 3. What does one do if it does not fit, without another GPU? Find three ways.
# 4. A plan says 72.34 GB. How far off may it be, before you would call it wrong?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # a set, as {0, 3}
    2: ...,  # its number
    3: ...,  # a set out of "overlap", "batch", "recompute", "offload" and "attention"
    4: ...,  # the bytes of the difference to a run, apart from the runtime's own memory
})

# %% [markdown]
# ## By hand
#
# At rest, in stages 0 to 3, with P parameters on N ranks: $16P$, $4P + 12P/N$, $2P + 14P/N$, $16P/N$. One thing is
# wanting to be exact: each unit is padded to a multiple of N.

# %%
def at_rest_by_hand(unit_lengths, ranks, stage):
    """Bytes on one rank between two steps, for units of these lengths, with Adam and 16-bit weights."""
    padded = sum(-(-length // ranks) * ranks for length in unit_lengths)  # each rounded up
    whole, shared = ((16, 0), (4, 12), (2, 14), (0, 16))[stage]
    return whole * padded + shared * padded // ranks


llama = zs.planning.model_shape("llama-2-7b")
predictions.reveal(1, {stage for stage in zs.STAGES
                       if at_rest_by_hand(llama.unit_lengths, 8, stage) < 80e9})

# %%
zs.draw.table(("stage", ">at rest (GB)"), [
    (stage, f"{at_rest_by_hand(llama.unit_lengths, 8, stage) / 1e9:.2f}") for stage in zs.STAGES])

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# So by the formulas **stages 1, 2 and 3 fit** on 80 GB, and stage 1 with room to spare.
# </details>
#
# Now the plan, first of the engine in this package, whose bytes can be proved:

# %%
plan = zs.plan("llama-2-7b", ranks=8, device="h100-80", batch=4, sequence=2048, runtime="zerosim")
predictions.reveal(2, next(row.stage for row in plan.rows if row.fits and "without" in row.title))

# %%
plan

# %%
print(plan.verdict)
plan.plot()

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# **With nothing recomputed stage 1 is the first that fits**, 72.34 GB beside the 85.03 that a program can take of
# such a GPU. What the formulas left out is nearly half of it: 31.35 GB of activations in each stage, which ZeRO does
# not touch, since each rank has sequences of its own. Then there are gradients on their way and buffers, gathered
# layers in stage 3, and what the runtime itself takes, which is an estimate.
# </details>
#
# ## Whose program?
#
# That was the engine here. A program of PyTorch's keeps other things: norms' inputs in fp32, both factors of a gate and
# what becomes of them, logits in fp32. Its account has a row for each, with a source, and was held to peaks that
# PyTorch's own tracker measured. It is what `zs.plan` shows unless another runtime is named:

# %%
fsdp = zs.plan("llama-2-7b", ranks=8, device="h100-80", batch=4, sequence=2048, tokens="100B", price=2.5)
fsdp

# %%
zs.draw.table(("kind", "what", ">GB"), [
    (one.kind, one.what, f"{one.nbytes / 1e9:.2f}") for one in fsdp.fastest.held])

# %% [markdown]
# Seconds are worth less than bytes. Of the engine they rest on the rates in data sheets and on the assumption that
# arithmetic reaches half of them; of PyTorch's programs on measured rates, fitted to half of the step times that others
# published: [how far they are off](../docs/plan.md). No GPU of this project's has confirmed them.
#
# ## Options
#
# What can be turned without another GPU? One can recompute (the rows of the table); attend in tiles, so that the matrix
# of attention never exists (fused attention, which a plan takes for granted), or not; send beside computing and
# gather ahead, which costs memory and spares time (*overlap*, *prefetch*), or not; take smaller batches, several for
# one step; or keep the optimizer's state in the memory of the computer that the GPUs sit in (*offload*).

# %%
rows = []
for changed in ({}, {"overlap": False, "prefetch": 0}, {"batch": 2, "micro_batches": 2},
                {"recompute": "block"}, {"offload": "optimizer=host"}, {"attention": "unfused"}):
    options = {"ranks": 8, "batch": 4, "sequence": 2048, "recompute": "none"} | changed
    found = zs.plan("llama-2-7b", runtime="zerosim", **options)
    row = found.rows[2]
    rows.append((", ".join(f"{name}={value}" for name, value in changed.items()) or "as above",
                 f"{row.total_nbytes / 1e9:.2f}", "yes" if row.fits else "no",
                 f"{row.sent_nbytes_per_step / 1e9:.1f}", f"{row.step_seconds:.2f}"))
names, held = ("overlap", "batch", "recompute", "offload", "attention"), [float(row[1]) for row in rows]
predictions.reveal(3, {name for name, less in zip(names, held[1:], strict=True) if less < 0.99 * held[0]})

# %%
zs.draw.table(("ZeRO-2 with", ">held (GB)", "fits", ">sent in a step (GB)", ">a step (s)"), rows)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# Half the batch, twice, makes room and sends half as much again, since stage 2 reduces after each half (notebook 7).
# Recomputation makes room and computes more. Offload makes room and takes its time on the way there and back. The
# matrix of attention takes more than all states. Each option has its price in a different column; and some save little,
# if the fullest moment is elsewhere. The questions can be turned round, too:
# </details>

# %%
questions = zs.planning.questions
print("largest batch of each rank that fits:", questions.largest_batch(plan.config))
print("longest sequence:", questions.largest_sequence(plan.config))
print("fewest ranks:", questions.fewest_ranks(plan.config))
print("what sends least of all that fit:", plan.least_sent.title)

# %% [markdown]
# And one plan can be made on many numbers of GPUs: bytes and seconds of the fastest row that fits, over N.

# %%
nodes = zs.plan("llama-2-7b", ranks=16, nodes=2, device="h100-80", batch=4, sequence=2048)
questions.over_ranks(nodes, [2, 4, 8, 16, 32, 64, 128]).plot()

# %% [markdown]
# ## Where does a number come from?
#
# `zerosim plan ... --explain` prints each formula with its values; in Python it is `explained`:

# %%
gpt2 = zs.plan("gpt2-xl", ranks=8, stage=3, batch=2, recompute="none", attention="unfused",
               optimizer=zs.optim.AdamW(), runtime="zerosim")
for what, formula, value in zs.planning.explained(gpt2.config, gpt2.rows[0])[:6]:
    print(f"{what}: {value}\n    {formula}")

# %% [markdown]
# ## Estimate and measurement
#
# Now the test. `zs.NullCluster` runs the real engine and the real layers on arrays without data: each allocation and
# each message is noted, and nothing is computed. With `representative=0` one rank stands for all. So a step of GPT-2
# XL, 1,557,611,200 parameters, takes less than a second on a laptop. (In a
# shell: `zerosim plan --model gpt2-xl --runtime zerosim --measure`.)

# %%
predictions.reveal(4, max(abs(line.difference_nbytes) for line in measured_row(gpt2.config, 3, "none")))

# %%
zs.draw.measured(gpt2.config, stage=3)

# %% [markdown]
# <details><summary>Answer to question 4</summary>
#
# **To the byte**, the peak as well: all that the program itself holds and sends. The runtime's own memory remains an
# estimate.
# </details>
#
# The last test of the peak is a GPU of exactly that size:

# %%
def one_step(rank):
    """One step of GPT-2 XL without data, with the options of the plan; the bytes at rest after it."""
    model = zs.models.GPT(zs.models.GPTConfig(48, 1600, 25, 1024, 50257))
    engine = zs.Engine(rank, model, zs.optim.AdamW(), stage=3, policy=zs.Policy("bf16"), overlap=True,
                       prefetch=1)
    tokens = rank.xp.empty((2, 1024), "int64")
    engine.step([(tokens, tokens)])
    return rank.memory.now_nbytes


needed = gpt2.rows[0].total_nbytes - gpt2.rows[0].overhead_nbytes
for capacity in (needed, needed - 1):
    try:
        zs.NullCluster(8, representative=0, capacity_nbytes=capacity).run(one_step)
        print(f"{capacity:,} bytes: it runs")
    except zs.OutOfMemoryError as error:
        print(f"{capacity:,} bytes: {str(error).splitlines()[0]}")

# %% [markdown]
# ## Try it
#
# * In a shell: `zerosim plan --model llama-2-70b --ranks 64 --nodes 8 --between infiniband-ndr --batch 1`. What fits?
#   What is the least number of GPUs?
# * `zs.plan(params=1e12, ranks=1024, runtime="zerosim")` knows a number and no shapes. What can it say, and what
#   not? What does it say without the runtime?
# * An *accounting convention* counts bytes per parameter (`zs.planning.CONVENTIONS`): programs and papers count from 10
#   to 20. Plan with `runtime="zerosim", convention="megatron-bf16"`. Which stage gains most weight?
# * Let `at_rest_by_hand` forget the padding. On which N does the proof notice?
#
# ## Proof
#
# The formula by hand equals what a real run holds to the byte: of a small GPT that reads bytes, in each stage, on
# 1 to 6 ranks, and of the large one without data. And the options, which change bytes and seconds, change no bit of the
# weights.

# %%
SMALL = zs.models.GPT(zs.models.GPTConfig(layers=1, channels=10, heads=2, context=8, vocabulary=256))
RESTING = ("parameter", "gradient", "master", "optimizer_state")


def train(rank, stage, options):
    """Two steps on texts that differ by rank; the bytes at rest on this rank, and all masters."""
    engine = zs.Engine(rank, SMALL, zs.optim.AdamW(), stage=stage, policy=zs.Policy("bf16"), **options)
    for step in (1, 2):
        text = np.random.default_rng((step, rank.index)).integers(256, size=(2, 9))
        engine.step([(text[:, :-1], text[:, 1:])])
    at_rest = sum(rank.memory.now_nbytes_by_kind.get(kind, 0) for kind in RESTING)
    return at_rest, {name: engine.state(name)["master"] for unit in SMALL.units for name in unit.shapes}


for ranks in (1, 2, 3, 4, 6):
    plain = zs.Cluster(ranks).run(train, 0, {})[0][1]
    for stage in zs.STAGES:
        by_hand = at_rest_by_hand([unit.parameter_count for unit in SMALL.units], ranks, stage)
        for options in ({}, {"overlap": True, "prefetch": 1, "recompute": "block"}):
            for at_rest, masters in zs.Cluster(ranks).run(train, stage, options):
                assert at_rest == by_hand, (ranks, stage)
                for name in plain:
                    assert masters[name].tobytes() == plain[name].tobytes(), (ranks, stage, name)
    print(f"N = {ranks}: the bytes by hand are the measured ones in every stage, "
          "and no option changes a bit")

on_paper = at_rest_by_hand(gpt2.config.model.unit_lengths, 8, 3)
assert on_paper == zs.NullCluster(8, representative=0).run(one_step)[0]
print(f"GPT-2 XL at stage 3 on 8 ranks: {on_paper:,} bytes by hand and measured")
