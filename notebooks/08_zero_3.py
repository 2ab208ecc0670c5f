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
# # 8. ZeRO-3: weights only while they are used, and recomputation
#
# **The idea.** After ZeRO-2 one thing is still on every rank: the weights, 2 bytes for each parameter. But a layer
# needs only its own weights, and only while it computes. In stage 3 each rank keeps its chunk of every layer. Before a
# layer computes, an all-gather makes its weights whole on every rank; after that they are freed. Then everything at
# rest is divided by N, and the price is paid in messages: once forward, once back, for each layer.

# %%
from contextlib import contextmanager

import numpy as np

import zerosim as zs
from zerosim.course import figures

MODEL = zs.models.MLP([16] * 9)  # eight linear layers of 16 x 16 weights and 16 biases
ADAM = zs.optim.Adam(lr=0.01)
BF16 = zs.Policy("bf16")  # computes in bf16: weights, gradients and what travels take 2 bytes per number
STEPS = 3


def batch(index, step):
    """x (64, 16), target (64, 16): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    return tuple(random.standard_normal((2, 64, 16)).astype(np.float32))


# %% [markdown]
# ## Predict first
#
# 1. Stage 2 sends about twice the model's bytes in a step: gradients once, updated weights once. What does stage 3
#    send?
# 2. How many layers' weights are whole on a rank at one moment?
# 3. Backward also needs what forward has kept, the *activations*: the input of each layer. Suppose we keep only every
#    fourth layer's input and run the layers between again, during backward (*recomputation*). That saves memory and
#    costs arithmetic. Does it cost messages too?
# 4. Do the results change in the last bit?
#
# Write your answers down, then read on.
#
# ## A lifetime is an indentation
#
# By hand, the whole of stage 3 is this: inside the `with` block a unit's weights are there, after it they are not. (A
# *unit* is what is gathered at a time: here a layer, in a transformer a block.)

# %%
class ByHand:
    """One rank's part of the model: of every unit's padded vector the chunk that it owns, in bf16 and fp32."""

    def __init__(self, rank):
        self.rank = rank
        self.layout = zs.layout_of(MODEL, rank.size)
        self.master = self.layout.shard(rank.index, self.layout.flattened(zs.models.first_weights(MODEL)))
        self.parameter, self.gradient = (self.master.astype(BF16.compute_dtype) for _ in range(2))
        self.m, self.v = np.zeros_like(self.master), np.zeros_like(self.master)

    def owned(self, unit):
        """The place of the unit's chunk in this rank's shards."""
        lies = self.layout.units[unit.name]
        return self.layout.owned(self.rank.index, lies.start, lies.stop)

    @contextmanager
    def weights(self, unit):
        """The unit's weights by name: gathered on entry, freed on exit."""
        lies = self.layout.units[unit.name]
        whole = self.rank.memory.alloc(lies.stop - lies.start, BF16.compute_dtype, "gathered_parameter", unit.name)
        self.rank.all_gather(self.parameter[self.owned(unit)], out=whole, purpose="parameters")
        yield self.layout.unit_views(unit.name, whole)
        self.rank.memory.free(whole)

    def step(self, step, x, target, run_again):
        """One step, keeping each layer's input (run_again=1) or every so many's, and running the rest again."""
        places = {}
        ctx = zs.models.Context(np, BF16, self.rank.kernels, self.rank.memory, self.rank.trace.compute, places.get)
        segments = [MODEL.units[start:start + run_again] for start in range(0, len(MODEL.units), run_again)]
        inputs, x = [], ctx.cast(x)
        for segment in segments:
            inputs.append(x)
            for unit in segment:
                with self.weights(unit) as w:
                    x, _ = unit.forward(ctx, w, x)
        dy = MODEL.loss.backward(ctx, MODEL.loss.forward(ctx, x, target)[1], 1.0)

        for segment in reversed(segments):
            x, kept = inputs.pop(), []
            for unit in segment[:-1]:  # forward again, up to the segment's last unit
                with self.weights(unit) as w:
                    x, of_unit = unit.forward(ctx, w, x)
                kept.append(of_unit)
            for unit in reversed(segment):
                with self.weights(unit) as w:
                    of_unit = unit.forward(ctx, w, x)[1] if unit is segment[-1] else kept.pop()
                    dy = self.backward(ctx, unit, w, of_unit, dy, places)

        g = self.gradient.astype(np.float32) / np.float32(self.rank.size)
        ADAM.update(zs.optim.UpdateContext(self.rank.kernels), self.master, g, {"m": self.m, "v": self.v}, step)
        self.parameter[...] = self.master

    def backward(self, ctx, unit, w, kept, dy, places):
        """As in stage 2: the unit's gradient, of which this rank keeps its chunk of the sum."""
        lies = self.layout.units[unit.name]
        whole = self.rank.memory.alloc(lies.stop - lies.start, BF16.compute_dtype, "unit_gradient", unit.name)
        whole[...] = 0
        places[unit] = self.layout.unit_views(unit.name, whole)
        dy, _ = unit.backward(ctx, w, kept, dy)
        del places[unit]  # or the whole gradients of all units would stay
        self.rank.reduce_scatter(whole, out=self.gradient[self.owned(unit)], purpose="gradients")
        return dy


# %% [markdown]
# Two things that one might look for are not there: no all-gather after the update, since the next forward gathers
# anyway, and no second copy of any weight. A layer runs forward again where its input had not been kept, or, in the
# last layer of each segment, under the same gathered weights with which it then goes back.

# %%
def train_by_hand(rank, run_again):
    """STEPS steps of one rank: its shards."""
    mine = ByHand(rank)
    for step in range(1, STEPS + 1):
        mine.step(step, *batch(rank.index, step), run_again)
    return {"parameter": mine.parameter, "master": mine.master, "m": mine.m, "v": mine.v}


def train_by_engine(rank, stage, recompute):
    """The same by the package: the rank's shards, what it holds at rest, and its peaks of some kinds."""
    engine = zs.Engine(rank, MODEL, ADAM, stage=stage, policy=BF16, recompute=recompute)
    for step in range(1, STEPS + 1):
        engine.step([batch(rank.index, step)])
    found = {"parameter": engine.param_group.parameter, "master": engine.param_group.master} | engine.param_group.slots
    peaks = [rank.memory.peak_nbytes_of(kinds) for kinds in (["gathered_parameter"], ACTIVATIONS)]
    return found, sum(rank.memory.now_nbytes_by_kind.values()), *peaks


ACTIVATIONS = ["activation", "activation_gradient", "checkpointed_input", "input"]
nbytes = 2 * MODEL.parameter_count
for stage in (0, 1, 2, 3):
    cluster = zs.Cluster(4)
    _, rests, gathered, _ = cluster.run(train_by_engine, stage, "none")[0]
    sent = (cluster.trace[0].sent_nbytes("gradients") + cluster.trace[0].sent_nbytes("parameters")) / STEPS
    print(f"stage {stage}: a rank holds {rests} bytes at rest, at most {gathered} of gathered weights, and sends "
          f"{sent / nbytes:.2f} times the model's {nbytes} bytes in a step")

# %% [markdown]
# Every collective sends $(N-1)/N$ of the vector, here three quarters. So stage 3 sends **one and a half times as much
# as the others**: 3 · 0.75 where they send 2 · 0.75. "Three times the model" is the limit for many ranks. And **one
# layer at a time** is whole on a rank: 544 bytes.
#
# With many layers the gathers also are many small messages, each of which takes its time to begin. The usual answer is
# to communicate while computing (*overlap*), and above all to ask for the next layer's weights while this one computes
# (*prefetch*): the second part of the picture, on the clock of a made-up machine (notebook 11). Two layers' weights are
# whole then, and the program waits about a quarter as long.

# %%
options = {"Waiting": {}, "Overlapped, and each unit is gathered one ahead": {"overlap": True, "prefetch": 1}}
figures.timeline(figures.timeline_data(stage=3, options=options))

# %% [markdown]
# ## Recomputation
#
# Question 3. `segment(k)` keeps the input of every k-th unit; `block` is `segment(1)`, every unit's input and nothing
# else.

# %%
for recompute in ("none", "block", "segment(2)", "segment(4)", "segment(8)"):
    cluster = zs.Cluster(4)
    *_, kept = cluster.run(train_by_engine, 3, recompute)[0]
    gathers = [getattr(row, "purpose", "") for row in cluster.trace[0].rows].count("parameters") / STEPS
    flops = sum(row.flops for row in cluster.trace[0].rows if hasattr(row, "flops"))
    print(f"{recompute:10}: at most {kept:6} bytes of activations, {gathers:.0f} all-gathers of weights a step, "
          f"{flops / STEPS / 1e6:.2f} million operations")

# %% [markdown]
# **It can cost messages**: a unit that runs forward again needs its weights again. `block` has none of that, since each
# unit runs again under the gathered weights with which it goes back; a segment of k units gathers k-1 of them once
# more. All cost the same arithmetic, a third more. And there is a best k: with few segments few inputs are kept, but
# while a segment goes back, everything that it keeps is there at once.
#
# (In an MLP of linear layers a unit keeps hardly more than its input, so `block` saves little here. A transformer's
# block keeps fourteen times as much as its input, and more: notebook 10.)
#
# ## Try it
#
# * `zs.Cluster(4, debug=True).run(train_by_hand, 1)` fills freed memory with NaN. Let `ByHand.step` call
#   `self.backward` after the `with` block has ended. What do the masters say? And without `debug`?
# * `keep_gathered="all"` keeps units whole from forward to backward. Count the bytes sent, then those held.
# * The worked example of notebook 1 at stage 3, with `segment(2)`, number by number: `zerosim replay --stage 3 --hops`.
#
# ## Proof
#
# By hand and by the engine at stage 3, with and without recomputation: the same bits, the same bytes sent, and the same
# peaks of gathered weights and of layers' gradients, for 1 to 8 ranks. And question 4: the bits of stage 0.

# %%
for ranks in (1, 2, 3, 4, 5, 8):
    unsharded = zs.Cluster(ranks).run(train_by_engine, 0, "none")
    for run_again in (1, 3, 8):
        hand, package = zs.Cluster(ranks), zs.Cluster(ranks)
        results = zip(hand.run(train_by_hand, run_again), package.run(train_by_engine, 3, f"segment({run_again})"),
                      unsharded, strict=True)
        for index, (mine, (theirs, *_), (stage_0, *_)) in enumerate(results):
            layout = zs.layout_of(MODEL, ranks)
            for name, array in mine.items():
                shard = layout.shard(index, stage_0[name])
                assert array.dtype == theirs[name].dtype
                assert array.tobytes() == theirs[name].tobytes() == shard.tobytes(), (ranks, name)
        for purpose in ("gradients", "parameters"):
            assert hand.trace.sent_nbytes(purpose) == package.trace.sent_nbytes(purpose)
        for kind in ("gathered_parameter", "unit_gradient"):
            peaks = [[memory.peak_nbytes_of([kind]) for memory in cluster.memory] for cluster in (hand, package)]
            assert peaks[0] == peaks[1], (ranks, kind, peaks)
    print(f"N = {ranks}: by hand and at stage 3 the same bits, peaks and bytes sent, and the bits of stage 0")
