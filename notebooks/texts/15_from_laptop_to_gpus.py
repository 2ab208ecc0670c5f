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
# # 15. From laptop to GPUs
#
# **The idea.** A program for one rank is plain code: it computes, and now and then it calls a collective. Nothing in it
# says where the other ranks are. So the same program runs with all ranks in one process, with each rank in a process of
# its own, and on GPUs. What carries the messages changes, and the additions do not: not one bit of what is sent and
# added up may differ. What may differ is another matter, and it is good to know it beforehand.
#
# *Source.* Message Passing Interface Forum 2021, *MPI: A Message-Passing Interface Standard, Version 4.0*, chapter 6,
# [mpi-forum.org](https://www.mpi-forum.org/docs/).

# %%
import queue
import runpy
import tempfile
import threading
from pathlib import Path

import numpy as np

import zerosim as zs
from zerosim.course.running import launched

# %% [markdown]
# ## Predict first
#
# 1. Three ranks train in one process, where they take turns. Then each of them is a process, and MPI, the usual library
#    for messages between processes, carries what they send. To how many digits are the losses the same?
# 2. MPI has an all-reduce of its own, tuned for the machine. Does it give the same bits as our ring?
# 3. The same program on another computer, or on a GPU. What can change: a rounding to bf16, Adam's step, a matrix
#    product?
# 4. What must a world of ranks be able to do, at least, so that all collectives run on it?
#
# Type your answers in place of the dots, and run the cell. What is measured below is held against them.

# %%
predictions = zs.Predictions({
    1: ...,  # True or False: the same bits of all losses and weights
    2: ...,  # True or False: of an all-reduce that adds in another order
    3: ...,  # the set of those, out of "rounding", "Adam" and "product"
    4: ...,  # the set of its methods, as {"send", "all_reduce"}
})

# %% [markdown]
# ## One file
#
# A file with three functions. `train` takes five steps of ZeRO-3. `ring_sum` is the all-reduce of notebook 4, made of
# nothing but `rank.exchange`. `native_is_near` asks MPI for its own all-reduce, beside the ring's.

# %%
TEXT = '''
import numpy as np
import zerosim as zs


def train(rank):
    """Five steps of ZeRO-3 in bf16: the losses, and the rank's shard of the fp32 weights."""
    data = np.random.default_rng(rank.index)  # other samples on every rank
    model, adam = zs.models.MLP([32] * 9), zs.optim.Adam(lr=0.01)
    engine = zs.Engine(rank, model, adam, stage=3, policy=zs.Policy("bf16"))
    steps = [engine.step([(data.normal(size=(4, 32)), data.normal(size=(4, 32)))]) for _ in range(5)]
    return [step.losses[0] for step in steps], engine.param_group.master


def vector(index, length, dtype="float32"):
    """Other numbers on every rank."""
    return np.random.default_rng(index).standard_normal(length).astype(dtype)


def ring_sum(rank, x):
    """x (n,) on every rank -> the sum over ranks (n,): N - 1 steps that add, N - 1 that pass on."""
    ranks = rank.size
    left, right = (rank.index - 1) % ranks, (rank.index + 1) % ranks
    total, length = x.copy(), -(-len(x) // rank.size)
    chunks = [total[i * length:(i + 1) * length] for i in range(ranks)]
    for step in range(ranks - 1):
        mine = chunks[(rank.index - 2 - step) % ranks]
        arrived = np.empty_like(mine)
        rank.exchange(chunks[(rank.index - 1 - step) % ranks], right, arrived, left)
        mine[...] = arrived + mine
    for step in range(ranks - 1):
        last, next_ = (rank.index - step) % ranks, (rank.index - 1 - step) % ranks
        rank.exchange(chunks[last], right, chunks[next_], left)
    return total


def ring(rank):
    """The ring on some lengths, empty chunks among them."""
    return [ring_sum(rank, vector(rank.index, length)) for length in (0, 1, 7, 1000)]


def native_is_near(rank):
    """True where MPI's own sums are within N - 1 roundings of the sum of magnitudes, of the ring's."""
    x = vector(rank.index, 1000)
    near = (rank.size - 1) * np.finfo(np.float32).eps * rank.all_reduce(np.abs(x))
    return bool((np.abs(rank.all_reduce(x, algorithm="native") - rank.all_reduce(x)) <= near).all())


def all_three(rank):
    return train(rank), ring(rank), native_is_near(rank)
'''
folder = tempfile.TemporaryDirectory()
file = Path(folder.name) / "program.py"
file.write_text(TEXT, encoding="utf-8")
program = runpy.run_path(str(file))

# %% [markdown]
# ## In one process
#
# In a shell: `zerosim run program.py:train --ranks 3`.

# %%
cluster = zs.Cluster(3)
here = cluster.run(program["train"])
zs.draw.table(("rank", "losses", "weights in its shard", "bytes sent"), [
    (index, len(losses), len(master), cluster.trace.sent_nbytes()[index])
    for index, (losses, master) in enumerate(here)])

# %%
cluster.show_ring()

# %% [markdown]
# Those arrows are what will have to travel. So far nothing did: the ranks took turns, and what one sent, the other read
# from the same memory.
#
# ## Three processes
#
# Now `mpiexec -n 3 zerosim run program.py:...`: the same file, three processes with memories of their own. `launched`
# does what one would type, and brings back a fingerprint (SHA-256) of each rank's result: two results have the same
# fingerprint if all their bits are the same, and there is nothing to send for comparing them.

# %%
try:
    there = launched(f"{file}:all_three", 3)
except zs.BackendError as error:
    there = None
    print(error)
else:
    expected = zip(here, zs.Cluster(3).run(program["ring"]), strict=True)
    same = [part.sha256 == zs.numerics.arrays.sha256((*both, True))
            for part, both in zip(there, expected, strict=True)]
    predictions.reveal(1, all(same))

# %%
if there is not None:
    print("measured:")
    for part, is_same in zip(there, same, strict=True):
        print(f"rank {part.rank}: {'the same bits' if is_same else 'OTHER BITS'} as in one process")

# %% [markdown]
# <details><summary>Answer to question 1</summary>
#
# **All digits**, of the losses, of the weights and of the ring's sums. MPI has moved bytes; each addition was made by
# the same kernel in the same order. (The fingerprint has the third function's True in it, too.)
# </details>
#
# <details><summary>Answer to question 2</summary>
#
# MPI's own all-reduce adds in an order that it chooses, by the length, the number of ranks, the machine. It is a sum of
# the same numbers, within N - 1 roundings, and the bits are promised by nobody. That is why zerosim takes it only when
# asked: `algorithm="native"`.
# </details>
#
# ## What may change
#
# <details><summary>Answer to question 3</summary>
#
# Between these two worlds nothing changed. On another computer one thing may: the order in which a matrix product
# adds up. It is chosen by a library (BLAS, on a GPU cuBLAS), and other processors, versions and numbers of threads get
# others. An operation on single elements has no order:
# </details>

# %%
x, w = program["vector"](0, 64 * 512).reshape(64, 512), program["vector"](1, 512 * 64).reshape(512, 64)
one_order, another = x @ w, x[:, ::2] @ w[::2] + x[:, 1::2] @ w[1::2]
backwards = zs.round_to(x[::-1].copy(), "bf16")[::-1]


def first_step(g):
    """The first step of Adam, over lr."""
    return g / (np.sqrt(g * g) + np.float32(1e-8))


def two_orders(rank):
    """The sum of the ranks' vectors, on a ring and in the order of the ranks."""
    x = program["vector"](rank.index, 1000)
    return [rank.all_reduce(x, algorithm=how).tobytes() for how in ("ring", "naive")]


ring, naive = zs.Cluster(3).run(two_orders)[0]
same_bits = {"rounding": zs.round_to(x, "bf16").tobytes() == backwards.tobytes(),
             "Adam": first_step(x).tobytes() == first_step(x[::-1])[::-1].tobytes(),
             "product": one_order.tobytes() == another.tobytes()}
predictions.reveal(2, ring == naive)
predictions.reveal(3, {name for name, same in same_bits.items() if not same})

# %%
print("measured:")
print("a product, added up in two orders: the same bits?", same_bits["product"],
      "- nearly the same?", np.allclose(one_order, another, atol=1e-3))
print("rounded to bf16, from the first number and from the last: the same bits?",
      same_bits["rounding"])

# %% [markdown]
# | | one process, MPI | another BLAS, or a GPU |
# |---|---|---|
# | what is sent and added up in the ring | same bits | same bits |
# | casts, roundings, optimizers' steps | same bits | same bits |
# | matrix products, exp, log, tanh; a GPU's sums of rows and columns | same bits | within a bound |
# | `algorithm="native"` | within a bound | within a bound |
# | bytes held and sent | same | same |
#
# Where these differ the losses differ in their last digits, and after many steps the weights do. The four stages
# still agree with each other to the bit, for they make the same products and sums.
#
# ## On GPUs
#
# ```python
# zs.CuPyCluster(4).run(train)       # four ranks on one GPU
# zs.NCCLCluster(8).run(train)       # eight GPUs in one machine, from one notebook
# zs.connect("nccl").run(train)      # many machines: mpiexec or torchrun starts a process for each GPU
# ```
#
# The arrays are CuPy's then (`rank.xp` is what one writes instead of `np`), and NCCL carries what is sent. **This
# notebook was not run on a GPU**: what the last column says of GPUs is what the kernels are built for.
# [Verified on](../docs/verified_on.md) says what has been tried, and on which machine; `zerosim doctor` what can be
# used on yours.
#
# ## A world by hand
#
# <details><summary>Answer to question 4</summary>
#
# **`exchange` is enough**, to send to one rank while receiving from another. All collectives are made of it.
# </details>
#
# So a world is quickly made. This one has a thread for each rank and a mailbox for each pair; threads run as the
# computer pleases, in no order that anyone has planned.

# %%
class ThreadRank:
    """A rank with what a ring needs: its index, how many there are, and exchange."""

    def __init__(self, index, size, boxes):
        self.index, self.size, self.boxes = index, size, boxes

    def exchange(self, send, to, receive, source):
        self.boxes[self.index, to].put(send.tobytes())
        arrived = self.boxes[source, self.index].get(timeout=60)
        receive[...] = np.frombuffer(arrived, receive.dtype)


def run_on_threads(ranks, program, *args):
    """The program on N threads; results in rank order."""
    boxes = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}
    results = [None] * ranks

    def one(index):
        results[index] = program(ThreadRank(index, ranks, boxes), *args)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


predictions.reveal(4, {name for name in vars(ThreadRank) if not name.startswith("_")})

# %%
worlds = {"5 threads": run_on_threads(5, program["ring"]), "5 turns": zs.Cluster(5).run(program["ring"])}
zs.draw.table(("1000 sums, in", ">the first on rank 0", ">the last on rank 4"), [
    (name, f"{found[0][3][0]:.9g}", f"{found[4][3][-1]:.9g}") for name, found in worlds.items()])

# %% [markdown]
# ## Try it
#
# * `mpiexec -n 4 zerosim run program.py:train` in a shell, with `TEXT` in that file. Then on 2 and on 8, and
#   `zerosim run program.py:train --ranks 8`.
# * Let rank 1 leave out its last exchange in `ring_sum`. What does each of the three worlds do? Which of them says what
#   is wrong?
# * Turn the ring of `ring_sum` round: swap `left` and `right`, and make each minus in the chunks' numbers a plus. From
#   how many ranks on does the proof notice? Why not from three?
# * Two computers, the same program, `zerosim run ... --json` on both: which function's fingerprints agree, `ring` or
#   `train`?
#
# ## Proof
#
# The ring by hand, in one process and on threads: the bits of the package's all-reduce, for 1 to 8 ranks, in three
# formats. And on three processes over MPI, where there is one.

# %%
def by_package(rank, length, dtype):
    """The package's ring."""
    return rank.all_reduce(program["vector"](rank.index, length, dtype), algorithm="ring")


def by_hand(rank, length, dtype):
    """The same by exchange alone."""
    return program["ring_sum"](rank, program["vector"](rank.index, length, dtype))


for ranks in (1, 2, 3, 4, 5, 8):
    for length in (0, 1, 7, 1000):
        for dtype in ("float32", "float16", "float64"):
            expected = zs.Cluster(ranks).run(by_package, length, dtype)
            for found in (zs.Cluster(ranks).run(by_hand, length, dtype),
                          run_on_threads(ranks, by_hand, length, dtype)):
                for one, other in zip(found, expected, strict=True):
                    assert one.tobytes() == other.tobytes()
    print(f"N = {ranks}: by hand in one process and on threads the bits of the package's all-reduce")
if there is not None:
    packages = zs.Cluster(3).run(
        lambda rank: [by_package(rank, length, "float32") for length in (0, 1, 7, 1000)])
    for part, trained, summed in zip(there, here, packages, strict=True):
        assert part.sha256 == zs.numerics.arrays.sha256((trained, summed, True))
    print("N = 3: and on processes, the ring and the training, over MPI")
folder.cleanup()
