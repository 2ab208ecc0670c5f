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
# # 11. Time on a wire: buckets, overlap, prefetch
#
# **The idea.** So far we counted bytes. What a step feels is time, and a message takes time for two reasons: it has to
# get there at all, the *latency* α, and its n bytes have to go through, at β bytes per second:
#
# $$\text{seconds} = \alpha + n/\beta.$$
#
# From this one line follow three tricks. Put small messages together (*buckets*), so that α is paid less often. Let
# messages travel while the program computes (*overlap*). Ask for weights before they are needed (*prefetch*). None of
# them changes a bit, and each costs memory.
#
# *Sources.* Thakur, Rabenseifner and Gropp 2005, *Optimization of Collective Communication Operations in MPICH*,
# section 3, [doi:10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521). Li et al. 2020, *PyTorch
# Distributed: Experiences on Accelerating Data Parallel Training*, section 3.2,
# [arXiv:2006.15704](https://arxiv.org/abs/2006.15704).

# %%
import numpy as np

import zerosim as zs

INFINIBAND = zs.planning.hardware.link("infiniband-ndr")
print(f"{INFINIBAND.name}: α = {INFINIBAND.latency_seconds * 1e6:g} µs, "
      f"β = {INFINIBAND.bytes_per_second / 1e9:g} GB/s in each direction")

# %% [markdown]
# ## Predict first
#
# 1. 64 ranks on these links all-reduce 25.6 MB on a ring: in one piece, or as a thousand tensors of 25.6 kB, one after
#    the other. How much longer does the second take?
# 2. The same 25.6 MB on more and more ranks. From how many on is the ring mostly latency?
# 3. Each layer's reduction runs beside the backward of the next. Suppose that arithmetic and communication take as long
#    as each other. How much of the communication is left to wait for? What can never be hidden?
# 4. A program reads a gradient after it has asked for its reduction and before that is done. What does it see?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # how many times as long
    2: ...,  # a number of ranks
    3: ...,  # the share of it, from 0 to 1
    4: ...,  # the number: 4 ranks add up [1], each into an out= of [0]; np.nan is a number too
})

# %% [markdown]
# ## A ring in seconds
#
# A ring's all-reduce is $2(N-1)$ steps (notebook 4), and in each of them everyone sends a chunk of $n/N$ bytes:

# %%
def ring_seconds(nbytes, ranks, link):
    """2(N-1)(α + n/Nβ)."""
    return 2 * (ranks - 1) * (link.latency_seconds + nbytes / ranks / link.bytes_per_second)


def replayed_seconds(nbytes, ranks, link):
    """The same of a real run: recorded, and replayed message by message on such links."""
    cluster = zs.NullCluster(ranks)  # arrays with a shape and no data
    cluster.run(lambda rank: rank.all_reduce(rank.xp.zeros(nbytes // 4, "float32")).shape)
    machine = zs.planning.Machine(zs.planning.hardware.device("h100-80"), zs.planning.Network(link))
    return zs.planning.replay(zs.planning.record(cluster.trace), machine).step_seconds


def planned(nbytes, ranks, link):
    """The same by the package's formulas: its seconds, and those of latency among them."""
    cut = zs.planning.ceil_cut(nbytes // 4, ranks)
    return zs.planning.cost.cost("all_reduce", "ring", cut, 4, zs.planning.Network(link))


rows = []
for ranks, nbytes in ((8, 25_600_000), (64, 25_600_000), (64, 25_600), (256, 25_600_000)):
    by_plan = planned(nbytes, ranks, INFINIBAND)
    seconds = (ring_seconds(nbytes, ranks, INFINIBAND), by_plan.seconds,
               replayed_seconds(nbytes, ranks, INFINIBAND))
    rows.append((ranks, nbytes, *(f"{1e3 * found:.4f}" for found in seconds),
                 f"{by_plan.latency_seconds / by_plan.seconds:.0%}"))
pieces, whole = (replayed_seconds(nbytes, 64, INFINIBAND) for nbytes in (25_600, 25_600_000))
predictions.reveal(1, 1000 * pieces / whole, within=0.25)
mostly = (n for n in range(2, 257) for found in [planned(25_600_000, n, INFINIBAND)]
          if found.latency_seconds > found.seconds / 2)
predictions.reveal(2, next(mostly), within=0.1)

# %%
zs.draw.table(("N", "bytes", ">by hand (ms)", ">by zs.planning (ms)", ">replayed (ms)", ">latency"), rows)

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# On 64 ranks **one piece takes 2.8 ms, a thousand pieces take 1,000 · 1.76 ms**, almost two seconds. A piece of 25.6 kB
# is all latency: even its full thousandfold in bytes would take only 1.6 times as long. That is why everybody reduces
# in buckets.
# </details>
#
# Question 2 is the *latency wall*. A ring's latency grows with N, what it transfers hardly does, so there is an N from
# which on latency rules, $N = n/\alpha\beta$. Seen the other way, on N ranks it rules below $n = N\alpha\beta$ bytes.

# %%
zs.draw.latency_wall()

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# For 26 MB **the wall stands at 37 ranks**. Other algorithms need $\log_2 N$ steps in place of $N$. Trees send the
# whole vector in each; *halving and doubling* sends as little as a ring, and in this model it never loses, as long as
# N is a power of two. Real rings are better than the model: they cut chunks into smaller pieces that follow each other
# like wagons, so that a link is busy while the next step begins.
# </details>
#
# ## Buckets
#
# The engine's `bucket_nbytes` says how much one collective may take. Six layers of 64 x 64, on a small made-up machine
# whose arithmetic and communication take about as long as each other:

# %%
MADE_UP = ("made up for a notebook", "2025-01-01")
WIRE = zs.planning.Link("made up", 5e9, 0.3e-6, *MADE_UP)
CHIP = zs.planning.Device("made up", 10**9, 10**9, 100e9, {"bf16": 1e12}, *MADE_UP)
MACHINE = zs.planning.Machine(CHIP, zs.planning.Network(WIRE), "bf16", efficiency=0.5)
BF16 = zs.Policy("bf16")  # computes in bf16: gradients and what travels take 2 bytes per number
MODEL = zs.models.MLP([64] * 7)


def batch(index, rows=64):
    """x and target (rows, 64): other samples on every rank."""
    return tuple(np.random.default_rng(index).standard_normal((2, rows, 64)).astype(np.float32))


def by_engine(rank, options):
    """Forward and backward at stage 2: this rank's shard of the summed gradient."""
    engine = zs.Engine(rank, MODEL, zs.optim.Adam(), stage=2, policy=BF16, **options)
    with rank.trace.span("step"):
        engine.backward(engine.forward(*batch(rank.index)))
    return engine.param_group.gradient


def on_the_clock(cluster):
    """The last run's span "step", replayed on the made-up machine."""
    return zs.planning.replay(zs.planning.record(cluster.trace).inside("step"), MACHINE)


def on_their_way(cluster):
    """The most bytes of layers' gradients and of buffers at one moment, on rank 0."""
    return cluster.memory[0].peak_nbytes_of(["unit_gradient", "communication_buffer"])


rows = []
for bucket_nbytes in (1_000, None, 20_000, 60_000):
    cluster = zs.Cluster(4)
    cluster.run(by_engine, {"bucket_nbytes": bucket_nbytes})
    found = on_the_clock(cluster)
    rows.append((f"{bucket_nbytes:,} bytes" if bucket_nbytes else "a layer",
                 len(cluster.trace[0].collectives()), f"{found.step_seconds * 1e6:.1f}",
                 f"{found.exposed_seconds * 1e6:.1f}", on_their_way(cluster)))
zs.draw.table((">bucket", "reduce-scatters", ">time (µs)", ">waiting (µs)", "on their way (bytes)"), rows)

# %% [markdown]
# Fewer and larger messages wait less and hold more: a bucket's gradients have to be there together. With one bucket for
# everything stage 2 holds the whole gradient after all, and twice: in the layers' arrays, and packed. Here the layers
# are large enough by themselves; 1,000 bytes at a time would be a bad idea.
#
# ## Overlap by hand
#
# With `async_op=True` a collective returns at once, with a handle. Its `wait()` blocks until the result is there. In
# between the program may do what it likes, but for two things: change what it handed over, or read what it has not got.
#
# <details><summary>Answer to question 4</summary>
#
# Here it sees **NaN** in its `out=` until its own `wait`, on any schedule, since what arrives is hidden in a second
# copy until then. On a GPU, as here with `copy_in_flight=False`, it sees whatever is there by then: mostly the right
# thing, and rarely not.
# </details>
#
# So backward issues a layer's reduction, goes back through the next layer, and only then waits. One reduction is under
# way at a time.

# %%
def by_hand(rank, overlap):
    """Forward and backward at stage 2, its reductions waited for at once, or one layer later."""
    layout = zs.layout_of(MODEL, rank.size)
    length, whole = layout.shard_length(rank.index), {}
    gradient = rank.memory.alloc(length, BF16.compute_dtype, "gradient")

    def place(unit):
        """The arrays for the gradients of a unit's parameters."""
        stretch = layout.units[unit.name]
        length = stretch.stop - stretch.start
        whole[unit.name] = rank.memory.alloc(length, BF16.compute_dtype, "unit_gradient", unit.name)
        whole[unit.name][...] = 0
        return layout.unit_views(unit.name, whole[unit.name])

    ctx = zs.models.Context(np, BF16, rank.kernels, rank.memory, rank.trace.compute, place)
    weights = {name: rank.memory.hold(first.astype(BF16.compute_dtype), "parameter", name)
               for name, first in zs.models.first_weights(MODEL).items()}
    span, kept, under_way = rank.trace.span, [], []
    with span("step"):
        x, target = ctx.cast(batch(rank.index)[0]), batch(rank.index)[1]
        for unit in MODEL.units:
            with span("forward"), span(unit.name):
                x, of_unit = unit.forward(ctx, weights, x)
                kept.append(of_unit)
        with span("loss"):
            dy = MODEL.loss.backward(ctx, MODEL.loss.forward(ctx, x, target)[1], 1.0)
        for unit in reversed(MODEL.units):
            with span("backward"), span(unit.name):
                dy = unit.backward(ctx, weights, kept.pop(), dy)[0]
                while under_way:  # the reduction of the layer before
                    under_way.pop().wait()
                stretch = layout.units[unit.name]
                own = gradient[layout.owned(rank.index, stretch.start, stretch.stop)]
                found = rank.reduce_scatter(whole.pop(unit.name), out=own, async_op=overlap,
                                            purpose="gradients")
                under_way += [found] if overlap else []
        while under_way:
            under_way.pop().wait()
    return gradient


runs, rows = {}, []
for title, overlap in (("Waiting", False), ("Overlapped", True)):
    cluster = zs.Cluster(4)
    cluster.run(by_hand, overlap)
    runs[title], found = cluster.trace, on_the_clock(cluster)
    rows.append((title, f"{found.step_seconds * 1e6:.1f}", f"{found.exposed_seconds * 1e6:.1f}",
                 on_their_way(cluster)))
def read_too_early(rank):
    """What stands in the sum before it has been waited for."""
    total = np.zeros(1, np.float32)
    work = rank.all_reduce(np.ones(1, np.float32), out=total, async_op=True)
    early = float(total[0])
    work.wait()
    return early


predictions.reveal(3, float(rows[1][2]) / float(rows[0][2]), within=0.25)
predictions.reveal(4, zs.Cluster(4).run(read_too_early)[0])

# %%
zs.draw.table(("", ">time (µs)", ">waiting (µs)", "on their way, at most (bytes)"), rows)

# %%
zs.draw.timeline_of("six layers of 64 by hand, 64 samples per rank, N = 4, stage 2", runs, MACHINE)

# %% [markdown]
# <details><summary>Answer to question 3</summary>
#
# **3.0 µs are left of 12.9.** They are the reduction of the first layer, after which nothing is left to compute, and
# the end of the one before it.
# </details>
#
# The price is in the lower curves: two layers' gradients live at a time, and the ring's buffers beside activations. And
# overlap hides at most as much as there is arithmetic to hide behind: look at N = 8 in the proof below, where a
# reduction takes longer than the backward of a layer.
#
# ## Prefetch
#
# Stage 3 has to have a layer's weights before it can compute with them. With `prefetch=1` the engine issues the gather
# of the next layer's while this one computes, with `prefetch=2` the next two's:

# %%
options = {f"{ahead} ahead": {"overlap": True, "prefetch": ahead} for ahead in range(4)}
ways = zs.draw.timeline.data(stage=3, options=options).replays
zs.draw.table(("gathered", ">time (µs)", ">waiting (µs)", "gathered weights, at most (bytes)"), [
    (title, f"{way.step_microseconds:.1f}", f"{way.exposed_microseconds:.1f}",
     max(way.nbytes["gathered_parameter"])) for title, way in ways.items()])

# %% [markdown]
# **One ahead saves 204 µs, and two ahead save nothing more**, they only hold more. Gathers and reductions go through
# the same link one after the other; once it is busy all the time in which there is something to send, earlier requests
# just wait longer. What is left is the first gather, before which there is nothing to compute, the last reduction, and
# at the end a few bytes by which the ranks agree that no gradient has overflowed. (This is the larger model of notebook
# 8's timeline.) Turn the knobs, if you have a kernel: on which bucket does a second unit ahead begin to pay?

# %%
def step_with(prefetch, bucket, stage):
    """One step with these settings, over time."""
    options = {"overlap": True, "bucket_nbytes": bucket} | ({"prefetch": prefetch} if stage == 3 else {})
    title = f"stage {stage}, {prefetch} ahead, bucket {bucket}"
    return zs.draw.timeline(stage=stage, options={title: options})


zs.draw.turn(step_with, prefetch=(1, 0, 2, 3), bucket=(None, 50_000, 400_000), stage=(3, 0, 1, 2))

# %% [markdown]
# ## Try it
#
# * Replace the last `wait` of `by_hand` by nothing. What does the cluster say at the end?
# * Print `own` right after the reduction has been issued.
# * On which machine is overlap worth nothing? Give `WIRE` a thousandth of its bandwidth, then a thousand times.
# * `zs.draw.timeline(stage=0, options={"DDP": {"overlap": True}})`: what is still waited for?
# * In a shell: `zerosim cost --collective all_reduce --nbytes 25600000 --ranks 64 --link infiniband-ndr`.
#
# ## Proof
#
# By hand and by the engine, overlapped: the same bits, the same order of arithmetic, issues and waits, and so the same
# time on the clock, to the last digit, and the same bytes on their way. Waiting or overlapped, in buckets or not: the
# same bits. And the program waits less. First the ring in seconds: formula, `zs.planning` and replayed run are the same
# to twelve digits.

# %%
def order(trace):
    """The events of a rank in order: arithmetic with its operations, issues, waits, and what was sent."""
    return [(type(row).__name__, getattr(row, "flops", None), getattr(row, "sent_nbytes", None))
            for row in trace.rows if type(row).__name__ in ("Compute", "Issue", "Wait", "Collective")]


for ranks in (1, 2, 4, 5, 8, 64):  # divide the vectors, of 6,400 and 6.4 million numbers
    for nbytes in (25_600, 25_600_000):
        job = nbytes, ranks, INFINIBAND
        others = [planned(*job).seconds, replayed_seconds(*job)]
        assert np.allclose(ring_seconds(*job), others, rtol=1e-12, atol=0), (ranks, nbytes)

HIDDEN = {"overlap": True, "copy_in_flight": True}  # as by hand: what is under way has a second copy
for ranks in (1, 2, 3, 4, 5, 8):
    hand, package, waiting = zs.Cluster(ranks), zs.Cluster(ranks), zs.Cluster(ranks)
    results = [hand.run(by_hand, True), package.run(by_engine, HIDDEN), waiting.run(by_hand, False),
               *(zs.Cluster(ranks).run(by_engine, options) for options in ({}, {"bucket_nbytes": 20_000}))]
    for mine, *others in zip(*results, strict=True):
        assert all(mine.tobytes() == other.tobytes() for other in others), ranks
    assert [order(trace) for trace in hand.trace] == [order(trace) for trace in package.trace]
    clocks = [on_the_clock(cluster) for cluster in (hand, package, waiting)]
    assert clocks[0].step_seconds == clocks[1].step_seconds
    assert clocks[0].exposed_seconds == clocks[1].exposed_seconds
    assert clocks[0].exposed_seconds < clocks[2].exposed_seconds or ranks == 1
    assert on_their_way(hand) == on_their_way(package)
    print(f"N = {ranks}: the same bits and order; waiting {clocks[2].exposed_seconds * 1e6:6.1f} µs, "
          f"overlapped {clocks[0].exposed_seconds * 1e6:6.1f}")
