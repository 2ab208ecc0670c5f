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
# # 12. Which optimizers shard
#
# **The idea.** ZeRO cuts the long vector of all parameters in N chunks wherever N says, in the middle of a matrix too.
# Adam does not notice: it treats every number by itself. Other optimizers look at more than one number at a time: at
# the length of a whole tensor, or at a whole matrix. What they look at decides where they may be cut, and what the cut
# costs.
#
# *Sources.* Rajbhandari, Rasley, Ruwase and He 2020, *ZeRO*, section 5.1,
# [arXiv:1910.02054](https://arxiv.org/abs/1910.02054). You et al. 2020, *Large Batch Optimization for Deep Learning*
# (LAMB), algorithm 2, [arXiv:1904.00962](https://arxiv.org/abs/1904.00962). Shazeer and Stern 2018, *Adafactor*,
# algorithm 4, [arXiv:1804.04235](https://arxiv.org/abs/1804.04235). Jordan et al. 2024, *Muon: An optimizer for hidden
# layers in neural networks*, [kellerjordan.github.io](https://kellerjordan.github.io/posts/muon/).

# %%
import numpy as np

import zerosim as zs

MODEL = zs.models.MLP([24, 64, 64, 10])  # three matrices and three biases, 6410 parameters
LAMB = zs.optim.LAMB(lr=0.01)
STEPS = 3


def batch(index, step):
    """x (8, 24), target (8, 10): other samples on every rank and in every step."""
    random = np.random.default_rng((index, step))
    return tuple(random.standard_normal((8, width)).astype(np.float32) for width in (24, 10))


# %% [markdown]
# ## Predict first
#
# Three optimizers besides Adam. *LAMB* takes Adam's direction $u$ (and adds some weight decay to it), and makes the
# step of each tensor, that is of each matrix and each bias, as long as that tensor's weights say:
# $w \leftarrow w - \eta\,\frac{\|w\|}{\|u\|}\,u$, with $\|x\|$ the root of the sum of squares. *Adafactor* keeps one
# mean of squares for each row and one for each column of a matrix, instead of one for each weight. *Muon* makes the
# momentum of a matrix orthogonal before it takes the step: it brings all its singular values to about 1.
#
# 1. Which of the four may be cut in the middle of a matrix?
# 2. LAMB's tensor lies on 4 ranks, a piece on each. What must they tell each other, and how many bytes are that if the
#    tensor has a billion weights?
# 3. Suppose that nobody may own part of a matrix, and each of 4 ranks owns whole ones. Does each hold a quarter?
# 4. The other way out: cut anywhere, and gather each matrix when its update is due. What does that cost?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # a set out of "Adam", "LAMB", "Adafactor" and "Muon"
    2: ...,  # bytes that a rank sends of that tensor
    3: ...,  # True or False
    4: ...,  # how many times as many bytes a rank sends in a step
})

# %% [markdown]
# ## A property that can be tested
#
# "May be cut" means: update the whole, update the pieces, and the bits are the same. `check_shardable` does that with
# random tensors and random cuts. It takes an optimizer of your own, too.

# %%
answers = [zs.optim.check_shardable(optimizer) for optimizer in (
    zs.optim.SGD(lr=0.1), zs.optim.Adam(), zs.optim.Lion(), LAMB, zs.optim.LARS(), zs.optim.Adafactor(),
    zs.optim.Muon(), zs.optim.Shampoo(), zs.optim.SOAP(), zs.optim.KFAC())]
asked = "Adam", "LAMB", "Adafactor", "Muon"
predictions.reveal(1, {one.optimizer for one in answers
                       if one.cut == "anywhere" and one.optimizer in asked})

# %%
zs.draw.table(("optimizer", "may be cut", "since"),
              [(one.optimizer, one.cut, one.reason) for one in answers])

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# So **Adam and LAMB may be cut inside a matrix, Adafactor and Muon may not.**
# </details>
#
# There are three kinds. **Elementwise** optimizers may be cut anywhere. **LAMB and LARS** may, if each piece is given
# the norms of the whole tensor. **The others** may be cut on the borders of tensors only. Of Muon and its like the
# package refuses a piece of a matrix outright; that this is no whim, the next cell shows. Without singular values the
# decomposition $U \Sigma V^T$ of a matrix is $U V^T$, which is what Muon aims at. Here it is for a matrix, and for its
# upper half alone:

# %%
def orthogonal(matrix):
    """U Vᵀ of a matrix U Σ Vᵀ: its singular vectors, with all singular values 1."""
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    return u @ v


momentum = np.random.default_rng(0).standard_normal((4, 3))
print("orthogonal, then the upper half:", *orthogonal(momentum)[:2].round(3).tolist())
print("the upper half, then orthogonal:", *orthogonal(momentum[:2]).round(3).tolist())

# %% [markdown]
# Different numbers altogether. A rank that owns two of the rows cannot know what these should become.
#
# Those that may be cut do not all gain the same. What stage 1 cuts is the optimizer's part, and that is small for some
# (SGD keeps nothing but the master) and large for others (Adan keeps three moments, and the gradient before). Stage 3
# cuts everything. How many times less does one of 64 ranks hold? (`NullCluster` runs the real thing on arrays that have
# shapes and no data, here one rank for all 64.)

# %%
def bytes_at_rest(rank, optimizer, stage):
    """The bytes that an engine holds before its first step."""
    engine = zs.Engine(rank, zs.models.MLP([1024] * 9), optimizer, stage=stage, policy=zs.Policy("bf16"))
    return sum(rank.memory.now_nbytes_by_kind.values()) / engine.model.parameter_count


rows = []
for optimizer in (zs.optim.SGD(lr=0.1), zs.optim.Lion(), zs.optim.Adam(), zs.optim.Adan()):
    whole, cut, all_cut = (zs.NullCluster(64, representative=0).run(bytes_at_rest, optimizer, stage)[0]
                           for stage in (0, 1, 3))
    rows.append((type(optimizer).__name__, f"{whole:.0f}", f"{whole / cut:.2f}", f"{whole / all_cut:.0f}"))
zs.draw.table(("optimizer", ">bytes per parameter", ">times less in stage 1", ">times less in stage 3"),
              rows)

# %% [markdown]
# ## LAMB by hand: sixteen bytes
#
# The squares of a tensor add up to the sum of what the squares of its pieces add up to. So each rank adds up the
# squares of its pieces; an all-gather brings these sums to everybody; and all add them in the order of the ranks. The
# rest is stage 1, as in notebook 6 (in fp32 throughout, to be short: then the weights are their own masters).

# %%
class ByHand:
    """One rank with LAMB at stage 1: the whole vector of weights, and of its own chunks m and v."""

    def __init__(self, rank):
        self.rank, self.layout = rank, zs.layout_of(MODEL, rank.size)
        self.vector = self.layout.flattened(zs.models.first_weights(MODEL))
        self.m, self.v = np.zeros((2, self.layout.shard_length(rank.index)), np.float32)

    def norms(self, w, u, together=True):
        """Of each piece of this rank's shards w, u (s,): (piece, ‖w‖, ‖u‖), norms of whole tensors."""
        pieces, names = self.layout.parameter_pieces(self.rank.index), list(self.layout.by_name)
        sums = np.zeros((len(names), 2))  # in fp64: 16 bytes for each tensor
        for piece in pieces:
            squares = [np.sum(x[piece.shard].astype(np.float64)**2) for x in (w, u)]
            sums[names.index(piece.entry.name)] = squares
        if together:
            with self.rank.trace.span("norms"):
                of_all = self.rank.all_gather(sums.reshape(-1), purpose="control")
            sums = sum(of_all.reshape(-1, len(names), 2))  # from rank 0 on
        return [(piece, *np.sqrt(sums[names.index(piece.entry.name)]).tolist()) for piece in pieces]

    def step(self, step, x, target, together=True):
        """Gradients, their mean, LAMB's two halves with norms between, and the weights for everybody."""
        weights, g = self.layout.views(self.vector), np.empty_like(self.m)
        local = zs.models.one_pass(MODEL, weights, zs.Policy("fp32"), x, target).gradients
        gradient, w = self.layout.flattened(local), self.layout.shard(self.rank.index, self.vector)
        owned = [(where, self.layout.owned(self.rank.index, where.start, where.stop))
                 for where in self.layout.units.values()]
        for where, own in owned:
            total = self.rank.reduce_scatter(gradient[where], purpose="gradients")
            g[own] = total / np.float32(self.rank.size)

        self.m[...] = self.m * LAMB.beta1 + g * (1 - LAMB.beta1)
        self.v[...] = self.v * LAMB.beta2 + g * g * (1 - LAMB.beta2)
        u = (self.m / (1 - LAMB.beta1**step)) / (np.sqrt(self.v / (1 - LAMB.beta2**step)) + LAMB.epsilon)
        u += w * LAMB.weight_decay
        for piece, weights, direction in self.norms(w, u, together):
            ratio = weights / direction if weights > 0 and direction > 0 else 1.0  # a bias begins at zero
            w[piece.shard] -= u[piece.shard] * (LAMB.lr * ratio)

        for where, own in owned:
            self.rank.all_gather(w[own], out=self.vector[where], purpose="parameters")


def train_by_hand(rank, together=True):
    """STEPS steps of one rank; the rank with what it has then."""
    mine = ByHand(rank)
    for step in range(1, STEPS + 1):
        mine.step(step, *batch(rank.index, step), together)
    return mine


cluster = zs.Cluster(4)
together = cluster.run(train_by_hand)[0]
alone = zs.Cluster(4).run(train_by_hand, False)[0]
norms = cluster.trace[0].sent_nbytes(span="norms") / STEPS
others = sum(map(cluster.trace[0].sent_nbytes, ("gradients", "parameters"))) / STEPS
predictions.reveal(2, norms / 3 / len(MODEL.shapes))

# %%
print("measured:")
print(f"for the norms each rank sends {norms:.0f} bytes a step, "
      f"for the gradients and weights {others:.0f}")
share = np.mean(together.vector != alone.vector)
print(f"with the norms of pieces instead, {share:.0%} of the weights differ")

# %% [markdown]
# <details><summary>Answer to question 2</summary>
#
# For one tensor a rank contributes **16 bytes, however large the tensor is**: two sums in fp64. (288 bytes here: 6
# tensors of 16 bytes, which in an all-gather among 4 ranks everyone sends 3 times.)
# </details>
#
# That is the price of the norms. Leave it out, and everything still trains; it just is another optimizer, and another
# one again on 8 ranks.
#
# ## Whole matrices, or gather first
#
# For Muon the engine offers two ways, and takes neither unasked. With `layout="whole_matrices"` the cuts are moved to
# the nearest border between tensors. With `gather=True` they stay where they are, and before its update each matrix is
# gathered with its state.

# %%
def train_by_engine(rank, optimizer, policy, how):
    """The same steps by the package; the engine, with all that it holds."""
    engine = zs.Engine(rank, MODEL, optimizer, policy=zs.Policy(policy), **how)
    for step in range(1, STEPS + 1):
        engine.step([batch(rank.index, step)])
    return engine


MUON = zs.optim.Muon()
try:
    zs.Cluster(4).run(train_by_engine, MUON, "bf16", {"stage": 1})
except ValueError as error:
    print(error)
print(zs.layout_of(MODEL, 4, "whole_matrices"))

# %%
def measured(optimizer, **how):
    """STEPS steps on 4 ranks at stage 1 in bf16: the cluster, and its engines, which hold their arrays."""
    cluster = zs.Cluster(4)
    return cluster, cluster.run(train_by_engine, optimizer, "bf16", {"stage": 1, **how})


runs = {"Adam": measured(zs.optim.Adam()), "Muon, whole matrices": measured(MUON, layout="whole_matrices"),
        "Muon, gathering": measured(MUON, gather=True)}
rows = []
for name, (cluster, _) in runs.items():
    now = [memory.now_nbytes_by_kind for memory in cluster.memory]
    states = [one.get("master", 0) + one.get("optimizer_state", 0) for one in now]
    rows.append((name, "masters and state", *states))
    rows.append((name, "at the fullest moment", *cluster.memory.peak_nbytes))
    for kind in ("gradients", "parameters", "state"):
        sent = (nbytes // STEPS for nbytes in cluster.trace.sent_nbytes(kind))
        rows.append((name, f"sent in a step: {kind}", *sent))
predictions.reveal(3, next(len(set(nbytes)) == 1 for name, what, *nbytes in rows
                           if what == "masters and state" and name != "Adam"))
sent_in_all = {name: sum(cluster.trace.sent_nbytes()) for name, (cluster, _) in runs.items()}
predictions.reveal(4, sent_in_all["Muon, gathering"] / sent_in_all["Muon, whole matrices"], within=0.1)

# %%
zs.draw.table(("", "bytes", *(f"rank {index}" for index in range(4))), rows)

# %% [markdown]
# (Muon keeps one number of state for each weight of a matrix, Adam two: hence 19236 and 13056.)
#
# <details><summary>Answers to questions 3 and 4</summary>
#
# With whole matrices nothing is sent beyond the usual, but the shards are as uneven as the matrices are. Rank 2 owns
# the largest one, 64% of the model, and rank 1 owns nothing; and it is for the fullest rank that one needs a GPU. With
# gathering everyone holds its quarter, but in addition sends more than twice what a step sends otherwise: with the
# gradient go the fp32 master and the momentum. And while a matrix is updated, every rank holds all of it after all.
# </details>

# %%
cluster, _ = runs["Muon, whole matrices"]
cluster.memory.plot()

# %% [markdown]
# The hatched gray is what Muon works in: five more matrices in fp32, for as long as one update takes.
#
# ## Try it
#
# * `zs.optim.check_shardable(zs.optim.Adafactor())`, printed whole, shows a counterexample. Follow it: which number of
#   the other piece did the update read?
# * Write an optimizer that divides the gradient by its own largest element, and says `cut = "anywhere"`
#   ([docs/check_your_own_update.md](../docs/check_your_own_update.md) has one to begin with). Is it found out?
# * Train Muon at stage 1 on 3 ranks with whole matrices and with gathering, and compare bits. Two ways of adding up a
#   gradient (notebook 4) are behind the difference. Which rank adds last, and where?
# * `print(zs.layout_of(zs.models.MLP([64] * 9), 4, "whole_matrices"))`: which models make Muon easy to shard?
# * `groups=[zs.Group("*.bias", optimizer=zs.optim.AdamW(lr=1e-3))]` gives the biases another optimizer. Who uses that
#   with Muon, and for which other matrices?
#
# ## Proof
#
# LAMB by hand and by the engine at stage 1: the same bits, and the same bytes sent for gradients and weights, for 1 to
# 8 ranks. And Muon, whole or gathered, in stages 1 and 3: the bits of stage 0, which shards nothing, with the same
# layout.

# %%
def masters_of(engine):
    """The fp32 weights of every parameter, gathered where they lie in pieces."""
    return np.concatenate([engine.state(name)["master"].reshape(-1) for name in engine.layout.by_name])


def masters_after(rank, optimizer, how):
    """Trained as above."""
    return masters_of(train_by_engine(rank, optimizer, "bf16", how))


for ranks in (1, 2, 3, 4, 5, 8):
    hand, package = zs.Cluster(ranks), zs.Cluster(ranks)
    by_engine = package.run(train_by_engine, LAMB, "fp32", {"stage": 1})
    for mine, engine in zip(hand.run(train_by_hand), by_engine, strict=True):
        assert mine.vector.tobytes() == engine.param_group.parameter.tobytes(), ranks
        for name in ("m", "v"):
            slot = engine.param_group.slots[name]
            assert getattr(mine, name).tobytes() == slot.tobytes(), (ranks, name)
    for purpose in ("gradients", "parameters"):
        assert hand.trace.sent_nbytes(purpose) == package.trace.sent_nbytes(purpose)
    for how in ({"layout": "whole_matrices"}, {"gather": True}):
        unsharded = zs.Cluster(ranks).run(masters_after, MUON, {"stage": 0, **how})
        for stage in (1, 3):
            sharded = zs.Cluster(ranks).run(masters_after, MUON, {"stage": stage, **how})
            for one, whole in zip(sharded, unsharded, strict=True):
                assert one.tobytes() == whole.tobytes()
    print(f"N = {ranks}: LAMB by hand and by the engine, Muon sharded and not: the same bits")
