"""ZeRO in one file: data-parallel training (DDP) and ZeRO's stages 1, 2 and 3, on ranks that pass messages in a ring.

Ranks and collectives, automatic differentiation, Adam, and four stages, each a class that changes two lines of the one
before. `python -m zerosim.tiny 8` trains a small model under each, on 8 ranks. It imports NumPy and ml_dtypes alone:
copy the file and change it. A rank communicates where its program says `await`. Numbers are rounded as on a GPU: what
computes and what travels has 16 bits, matrix products are added up in fp32 and rounded once, Adam updates master
weights in fp32. Left to zerosim's engine: overflow checks, clipping, buckets, overlap, recomputation, other models.

Legend: N ranks; n elements of a matrix, padded to a multiple of N; B rows of a batch, I inputs, O outputs.
Source: Rajbhandari, Rasley, Ruwase & He 2020, ZeRO (https://arxiv.org/abs/1910.02054), sections 5 and 7.
"""

import sys
import types
from collections.abc import Callable, Generator, Sequence

import ml_dtypes
import numpy as np

# -- Ranks on a ring, and collectives hop by hop -----------------------------------------------------------------------

class RingRank:
    """One of N ranks on a ring: it sends to the next one and receives from the one before."""

    def __init__(self, index: int, inboxes: list[list[np.ndarray]]) -> None:
        self.index, self.size, self.inboxes, self.sent_nbytes = index, len(inboxes), inboxes, 0

    @types.coroutine
    def exchange(self, chunk: np.ndarray) -> Generator[None, None, np.ndarray]:
        """Sends a chunk to the next rank; returns the one that the rank before sent."""
        self.inboxes[(self.index + 1) % self.size].append(chunk.copy())
        self.sent_nbytes += chunk.nbytes
        yield  # the other ranks come as far as this
        return self.inboxes[self.index].pop(0)


async def reduce_scatter(rank: RingRank, vector: np.ndarray) -> np.ndarray:
    """Every rank gives a vector (n,) and receives its own chunk (n/N,) of their sum, in N-1 hops."""
    chunks = vector.reshape(rank.size, -1)  # (N, n/N): chunk c belongs to rank c, and its sum starts on rank c+1
    partial_sum: np.ndarray = chunks[rank.index - 1]
    for hop in range(1, rank.size):
        arrived = await rank.exchange(partial_sum)
        partial_sum = arrived + chunks[rank.index - 1 - hop]  # one addition per hop, rounded to the vector's format
    return partial_sum


async def all_gather(rank: RingRank, chunk: np.ndarray) -> np.ndarray:
    """Every rank gives its own chunk (n/N,) and receives all of them as one vector (n,), in N-1 hops."""
    chunks = np.zeros((rank.size, len(chunk)), chunk.dtype)
    chunks[rank.index] = chunk
    for hop in range(1, rank.size):
        chunks[rank.index - hop] = await rank.exchange(chunks[rank.index - hop + 1])  # passes on what came last
    return chunks.reshape(-1)


async def all_reduce(rank: RingRank, vector: np.ndarray) -> np.ndarray:
    """Every rank gives a vector (n,) and receives the whole sum (n,)."""
    return await all_gather(rank, await reduce_scatter(rank, vector))


# -- Automatic differentiation, parameters, Adam -----------------------------------------------------------------------

class Tensor:
    """An array and its gradient. Each operation writes on a tape how its result's gradient flows back."""

    def __init__(self, data: np.ndarray, tape: list[Callable[[], None]]) -> None:
        self.data, self.tape, self.made_at = data, tape, len(tape)
        self.gradient = np.zeros_like(data)

    def flow_back(self, to: "Tensor") -> None:
        """Takes back, last first, what was computed since the tensor ``to``: its operands receive their gradients."""
        while len(self.tape) > to.made_at:
            self.tape.pop()()

    def receive(self, gradient: np.ndarray) -> None:
        """Adds to the gradient, which has the tensor's own format: what arrives is rounded to it."""
        self.gradient += gradient.astype(self.data.dtype)

    def result(self, data: np.ndarray, hand_back: Callable[[np.ndarray], None]) -> "Tensor":
        """The result of an operation; ``hand_back`` gives the operands their part of the result's gradient."""
        self.tape.append(lambda: hand_back(y.gradient))
        y = Tensor(data, self.tape)
        return y

    def __matmul__(self, w: "Tensor") -> "Tensor":
        def hand_back(dy: np.ndarray) -> None:
            w.receive(wide(self.data).T @ wide(dy))
            self.receive(wide(dy) @ wide(w.data).T)
        y = wide(self.data) @ wide(w.data)  # (B, I) @ (I, O) -> (B, O)
        return self.result(y.astype(self.data.dtype), hand_back)

    def relu(self) -> "Tensor":
        """max(x, 0), element by element."""
        off, zeros = self.data <= 0, np.zeros_like(self.data)
        return self.result(np.where(off, zeros, self.data), lambda dy: self.receive(np.where(off, zeros, dy)))

    def half_squared_error(self, target: np.ndarray) -> "Tensor":
        """The mean over the batch of ½ Σ (y - target)²."""
        difference, rows = wide(self.data) - wide(target), len(target)  # (B, O)
        loss = np.array(0.5 * np.sum(np.square(difference, dtype=np.float64)) / rows, np.float32)
        return self.result(loss, lambda dloss: self.receive(difference * (dloss / rows)))


def wide(x: np.ndarray) -> np.ndarray:
    """The same values in fp32."""
    return x.astype(np.float32, copy=False)


class Parameter(Tensor):
    """A matrix of the model (I, O), whole while it computes; and what one rank keeps of it between steps."""

    def __init__(self, first: np.ndarray, dtype: type, kept: Callable[[str, np.ndarray], np.ndarray]) -> None:
        super().__init__(first, tape=[])
        self.shape = first.shape
        self.weights = kept("weights", first.astype(dtype))  # these five rest as vectors (n,), or as chunks (n/N,)
        self.gradients = kept("gradients", np.zeros(first.shape, dtype))
        self.master = kept("optimizer", wide(first))
        self.m, self.v = np.zeros_like(self.master), np.zeros_like(self.master)

    def load(self, whole: np.ndarray) -> np.ndarray:
        """Computes with the weights in a vector (n,); returns a vector (n,) where their gradient will be."""
        gradient, size = np.zeros_like(whole), self.shape[0] * self.shape[1]
        self.data, self.gradient = whole[:size].reshape(self.shape), gradient[:size].reshape(self.shape)
        return gradient

    def free(self) -> None:
        self.data = self.gradient = np.empty(0)


def adam(w: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, lr: float, step: int) -> None:
    """One step of Adam (Kingma & Ba 2015) in fp32, in place, on as many elements as there are."""
    m[:] = 0.9 * m + (1 - 0.9) * g
    v[:] = 0.999 * v + (1 - 0.999) * (g * g)
    w -= lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


# -- DDP, and ZeRO's three stages --------------------------------------------------------------------------------------

class DDP:
    """Each rank holds the whole model and computes with data of its own; the gradients are averaged."""
    sharded: tuple[str, ...] = ()  # what each rank keeps only its own chunk of

    def __init__(self, rank: RingRank, model: Sequence[np.ndarray], dtype: type) -> None:
        self.rank, self.dtype, self.losses, self.steps_taken = rank, dtype, list[float](), 0
        self.parameters = [Parameter(matrix, dtype, self.kept) for matrix in model]

    def kept(self, what: str, matrix: np.ndarray) -> np.ndarray:
        """The part of a matrix that rests on this rank: all of it as a vector (n,), or its own chunk (n/N,)."""
        vector = np.pad(matrix.reshape(-1), (0, -matrix.size % self.rank.size))
        return vector.reshape(self.rank.size, -1)[self.rank.index].copy() if what in self.sharded else vector

    async def step(self, batches: list[tuple[np.ndarray, np.ndarray]], lr: float, loss_scale: float) -> None:
        """One training step on this rank's micro-batches, each of them x (B, I) and target (B, O)."""
        for x, target in batches:
            await self.forward_and_backward(x, target, loss_scale)
        self.steps_taken += 1
        for p in self.parameters:
            mean = wide(await self.gradient_sum(p)) / (loss_scale * self.rank.size * len(batches))
            adam(p.master, p.m, p.v, mean, lr, self.steps_taken)
            await self.renew_weights(p)
            p.gradients[:] = 0

    async def forward_and_backward(self, x: np.ndarray, target: np.ndarray, loss_scale: float) -> None:
        """Adds the gradients of one micro-batch to those of the step, matrix by matrix from the last one on."""
        y, inputs = Tensor(x.astype(self.dtype), tape=[]), []
        for p in self.parameters:
            inputs.append(y)
            p.load(await self.whole_weights(p))
            y = y @ p if p is self.parameters[-1] else (y @ p).relu()
            p.free()
        loss = y.half_squared_error(target)
        self.losses.append(float(loss.data))
        loss.gradient[...] = loss_scale  # without it, small gradients would be rounded to 0 in fp16
        for p in reversed(self.parameters):
            gradient = p.load(await self.whole_weights(p))
            loss.flow_back(to=inputs.pop())
            p.free()
            await self.add_gradient(p, gradient)

    async def whole_weights(self, p: Parameter) -> np.ndarray:  # before it computes, forward and backward
        return p.weights

    async def add_gradient(self, p: Parameter, gradient: np.ndarray) -> None:  # after its backward
        p.gradients += gradient

    async def gradient_sum(self, p: Parameter) -> np.ndarray:  # before the optimizer's step
        return await all_reduce(self.rank, p.gradients)

    async def renew_weights(self, p: Parameter) -> None:  # after the optimizer's step
        p.weights[:] = p.master.astype(self.dtype)


class ZeRO1(DDP):
    """Each rank keeps and updates only its own chunk of the optimizer's state; the new weights are gathered."""
    sharded: tuple[str, ...] = ("optimizer",)

    async def gradient_sum(self, p: Parameter) -> np.ndarray:
        return await reduce_scatter(self.rank, p.gradients)

    async def renew_weights(self, p: Parameter) -> None:
        p.weights[:] = await all_gather(self.rank, p.master.astype(self.dtype))


class ZeRO2(ZeRO1):
    """Each rank also keeps only its own chunk of the gradients, which are reduced as backward makes them."""
    sharded: tuple[str, ...] = ("optimizer", "gradients")

    async def add_gradient(self, p: Parameter, gradient: np.ndarray) -> None:
        p.gradients += await reduce_scatter(self.rank, gradient)

    async def gradient_sum(self, p: Parameter) -> np.ndarray:
        return p.gradients


class ZeRO3(ZeRO2):
    """Each rank also keeps only its own chunk of the weights, which are gathered to compute and freed again."""
    sharded: tuple[str, ...] = ("optimizer", "gradients", "weights")

    async def whole_weights(self, p: Parameter) -> np.ndarray:
        return await all_gather(self.rank, p.weights)

    async def renew_weights(self, p: Parameter) -> None:
        p.weights[:] = p.master.astype(self.dtype)


def train(stage: type[DDP], model: Sequence[np.ndarray], data: list[list[list[tuple[np.ndarray, np.ndarray]]]],
          dtype: type, lr: float, loss_scale: float = 1.0) -> list[DDP]:
    """Trains on data[step][rank], each a list of micro-batches; returns what every rank has at the end."""
    inboxes: list[list[np.ndarray]] = [[] for _ in data[0]]
    trainers = [stage(RingRank(index, inboxes), model, dtype) for index in range(len(inboxes))]
    for batches in data:
        programs = [one.step(mine, lr, loss_scale).__await__() for one, mine in zip(trainers, batches, strict=True)]
        for _ in zip(*programs, strict=True):  # each rank in turn goes on to its next message, until all have ended
            pass
    return trainers


def main() -> None:
    """Trains under each stage; prints what every rank holds between steps and sends in one, beside the closed forms."""
    n, steps, draw = int(sys.argv[1]) if len(sys.argv) > 1 else 4, 50, np.random.default_rng(0).normal
    model = [draw(0, 1 / shape[0]**0.5, shape).astype(np.float32) for shape in ((16, 64), (64, 64), (64, 8))]
    data = [[[(x := draw(size=(8, 16)), np.tanh(x[:, :8]))] for _ in range(n)] for _ in range(steps)]
    psi = sum(-(-matrix.size // n) * n for matrix in model)
    table = [(DDP, "2Ψ + 2Ψ + 12Ψ", 2 * psi + 2 * psi + 12 * psi, 2),
             (ZeRO1, "2Ψ + 2Ψ + 12Ψ/N", 2 * psi + 2 * psi + 12 * psi // n, 2),
             (ZeRO2, "2Ψ + 2Ψ/N + 12Ψ/N", 2 * psi + 2 * psi // n + 12 * psi // n, 2),
             (ZeRO3, "2Ψ/N + 2Ψ/N + 12Ψ/N", 2 * psi // n + 2 * psi // n + 12 * psi // n, 3)]
    print(f"Ψ = {psi:,} parameters, N = {n} ranks, {steps} steps: weights and gradients in bf16, Adam's state in fp32")
    for stage, formula, at_rest, collectives in table:
        runs = train(stage, model, data, ml_dtypes.bfloat16, lr=0.01)
        held = [sum(x.nbytes for p in r.parameters for x in (p.weights, p.gradients, p.master, p.m, p.v)) for r in runs]
        print(f"\n{stage.__name__}: loss {runs[0].losses[0]:.9f} -> {runs[0].losses[-1]:.9f} on rank 0")
        print(f"  bytes at rest  {formula:20} = {at_rest:7,}, measured on each rank:", *held)
        print(f"  bytes sent     {collectives} · 2Ψ·(N-1)/N       = {collectives * 2 * psi * (n - 1) // n:7,}, "
              "measured on each rank:", *[r.rank.sent_nbytes // steps for r in runs])


if __name__ == "__main__":
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")  # ? for Ψ on a poor terminal; notebooks cannot
    main()
