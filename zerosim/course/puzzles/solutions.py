"""The solutions. Nobody opens this by accident: try first, then `zs.puzzles.hint`, and only then look here.

Legend: N ranks, n elements, k = ⌈n/N⌉, m micro-batches, L layers; B rows, I and O widths of a layer. The puzzles come
first, in their order, then the three functions that `grading` grades.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zerosim.course.puzzles.grading import Module
from zerosim.optim.base import Optimizer, UpdateContext
from zerosim.ranks.rank import Rank, Work

Array = np.ndarray
Arrays = dict[str, Array]


def mean(rank: Rank, x: Array) -> Array:
    """x (1,) -> (1,)."""
    total: Array = rank.all_reduce(x)
    total /= rank.size
    return total


def broadcast(rank: Rank, x: Array) -> Array:
    """x (n,) -> rank 0's x, in place."""
    distance = 1  # the ranks below it have x
    while distance < rank.size:
        if rank.index < distance:
            if rank.index + distance < rank.size:
                rank.send(x, rank.index + distance)
        elif rank.index < 2 * distance:
            rank.recv(x, rank.index - distance)
        distance *= 2
    return x


def ring(rank: Rank, x: Array) -> Array:
    """x (n,) -> chunk r of the sum."""
    n, N = len(x), rank.size
    k = -(-n // N)

    def chunk(c: int) -> slice:
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    landings = [rank.memory.alloc(k, x.dtype, "workspace") for _ in range(2)]  # one leaves while the next comes
    partial = x[chunk(rank.index - 1)]
    for step in range(N - 1):
        own = x[chunk(rank.index - 2 - step)]
        landing = landings[step % 2][:len(own)]
        rank.exchange(partial, (rank.index + 1) % N, landing, (rank.index - 1) % N)
        landing += own
        partial = landing
    return partial


def gather(rank: Rank, shard: Array, n: int) -> Array:
    """shard, chunk r -> (n,)."""
    N, k = rank.size, -(-n // rank.size)

    def chunk(c: int) -> slice:
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    whole = rank.memory.alloc(n, shard.dtype, "gathered_parameter")
    whole[chunk(rank.index)] = shard
    for step in range(N - 1):
        rank.exchange(whole[chunk(rank.index - step)], (rank.index + 1) % N,
                      whole[chunk(rank.index - step - 1)], (rank.index - 1) % N)
    return whole


def all_reduce(rank: Rank, x: Array) -> Array:
    """x (n,) -> the sum (n,)."""
    shard = rank.reduce_scatter(x)
    whole: Array = rank.all_gather(shard, length=len(x))
    return whole


def average(rank: Rank, gradients: Array, scale: float) -> Array:
    """gradients (m, n) of S times the loss -> the mean gradient (n,)."""
    m, n = gradients.shape
    total = rank.memory.alloc(n, np.float32, "gradient")
    total[...] = gradients[0]
    for gradient in gradients[1:]:
        total += gradient
    rank.all_reduce(total, out=total)
    total /= scale * rank.size * m
    return total


def ddp(rank: Rank, gradients: list[Array]) -> list[Array]:
    """A list of tensors -> the list of their means, views of one bucket."""
    bucket = rank.memory.alloc(sum(g.size for g in gradients), np.float32, "gradient")
    places, start = [], 0
    for g in gradients:
        places.append(slice(start, start + g.size))
        bucket[places[-1]] = g.reshape(-1)
        start += g.size
    rank.all_reduce(bucket, out=bucket)
    bucket /= rank.size
    return [bucket[place].reshape(g.shape) for place, g in zip(places, gradients, strict=True)]


def zero1(rank: Rank, weights: Array, gradient: Array, momentum: Array, lr: float) -> tuple[Array, Array]:
    """weights (n,), gradient (n,), momentum (own shard,) -> weights and momentum after the step."""
    n, k = len(weights), -(-len(weights) // rank.size)
    own = slice(min(n, rank.index * k), min(n, (rank.index + 1) * k))
    mean = rank.reduce_scatter(gradient)
    mean /= rank.size
    momentum *= 0.9
    momentum += mean
    weights[own] -= lr * momentum
    rank.all_gather(weights[own], out=weights, length=n)
    return weights, momentum


def zero2(rank: Rank, lengths: list[int], gradient_of: Callable[[int], Array]) -> list[Array]:
    """One backward pass -> this rank's shards of the mean gradients."""
    shards: list[Any] = [None] * len(lengths)
    for layer in reversed(range(len(lengths))):
        gradient = gradient_of(layer)
        shards[layer] = rank.reduce_scatter(gradient)
        shards[layer] /= rank.size
        del gradient
    return shards


def zero3(rank: Rank, shards: list[Array], layer: Any, x: Array) -> list[Array]:
    """One forward and backward through sharded layers -> this rank's shards of the mean gradients."""
    n, inputs = len(x), []
    for shard in shards:
        w = rank.all_gather(shard, length=n)
        inputs.append(x)
        x = layer.forward(w, x)
        del w
    dy, grads = x, [np.empty(0, np.float32)] * len(shards)
    del x
    for number in reversed(range(len(shards))):
        w = rank.all_gather(shards[number], length=n)
        dx, dw = layer.backward(w, inputs.pop(), dy)
        del w
        dy = dx
        del dx
        grads[number] = rank.reduce_scatter(dw)
        del dw
        grads[number] /= rank.size
    return grads


def overlap(rank: Rank, lengths: list[int], gradient_of: Callable[[int], Array]) -> list[Array]:
    """As zero2; each layer's reduction travels while the next gradient is computed."""
    shards: list[Any] = [None] * len(lengths)
    work: Work | None = None
    for layer in reversed(range(len(lengths))):
        gradient = gradient_of(layer)
        if work is not None:
            shards[layer + 1] = work.wait()
            shards[layer + 1] /= rank.size
        work = rank.reduce_scatter(gradient, async_op=True)
        del gradient
    if work is not None:
        shards[0] = work.wait()
        shards[0] /= rank.size
    return shards


def lamb(rank: Rank, weights: Array, direction: Array, valid: int, bias: Array, bias_direction: Array,
         lr: float) -> tuple[Array, Array]:
    """weights (k,) of which ``valid`` are real, bias (b,) the same on all ranks -> both after the step."""
    def squares(x: Array) -> float:
        wide = x.astype(np.float64)
        return float(np.dot(wide, wide))

    partial = rank.memory.alloc(2, np.float64, "workspace")  # of the weights, of the direction
    partial[0] = squares(weights[:valid])
    partial[1] = squares(direction[:valid])
    total = rank.all_gather(partial).reshape(rank.size, 2).sum(axis=0)
    total[0] += squares(bias)
    total[1] += squares(bias_direction)
    ratio = np.float32(np.sqrt(total[0] / total[1]))
    weights[:valid] -= lr * ratio * direction[:valid]
    bias -= lr * ratio * bias_direction
    return weights, bias


def overflow(rank: Rank, weights: Array, gradient: Array, lr: float, scale: float) -> tuple[Array, float, bool]:
    """weights and gradient, this rank's shards -> weights, S and whether the step was skipped."""
    flag = rank.memory.alloc(1, np.uint8, "workspace")
    flag[0] = not np.isfinite(gradient).all()
    flags = rank.all_gather(flag)
    if flags.any():
        return weights, scale / 2, True
    weights -= lr * (gradient / scale)
    return weights, scale, False


def repair(rank: Rank, shards: list[Array], layer: Any, x: Array, gradient: Array) -> tuple[Array, Array]:
    """Forward through sharded layers, and the mean of a gradient -> (n,) and this rank's chunk."""
    n = len(x)
    for shard in shards:
        w = rank.all_gather(shard, length=n)
        x = layer.forward(w, x)
        del w
    mean: Array = rank.reduce_scatter(gradient)
    mean /= rank.size
    return x, mean


def own_part(rank: Rank, length: int) -> slice:
    """The elements that a rank owns of a flat tensor."""
    chunk = -(-length // rank.size)
    return slice(min(length, rank.index * chunk), min(length, (rank.index + 1) * chunk))


def new_state(rank: Rank, optimizer: Optimizer, length: int) -> Arrays:
    """The optimizer's slots for a shard, in the rank's memory."""
    state = {}
    for name, slot in optimizer.slots((length,)).items():
        state[name] = rank.memory.alloc(slot.shape, np.float32, "optimizer_state", name)
        state[name].fill(0)
    return state


class DataParallel:
    """Replicas that begin like rank 0's; the mean gradient of every parameter."""

    def __init__(self, rank: Rank, module: Module) -> None:
        self.rank, self.module = rank, module
        for parameter in module.parameters.values():
            rank.broadcast(parameter, out=parameter)

    def forward_backward(self, x: Array, target: Array) -> tuple[float, Arrays]:
        """x (B, I), target (B, O) -> the loss and the mean gradients."""
        loss, gradients = self.module.forward_backward(x, target)
        for gradient in gradients.values():
            self.rank.all_reduce(gradient, out=gradient)
            gradient /= self.rank.size
        return loss, gradients


class ShardedOptimizer:
    """Every rank updates its part of every tensor, and all gather the parts."""

    def __init__(self, rank: Rank, parameters: Arrays, optimizer: Optimizer) -> None:
        self.rank, self.optimizer, self.steps = rank, optimizer, 0
        self.parameters = {name: w.reshape(-1) for name, w in parameters.items()}  # views
        self.own = {name: own_part(rank, len(w)) for name, w in self.parameters.items()}
        self.state = {name: new_state(rank, optimizer, own.stop - own.start) for name, own in self.own.items()}

    def step(self, gradients: Arrays) -> None:
        """One step, with mean gradients."""
        self.steps += 1
        for name, w in self.parameters.items():
            own, g = self.own[name], gradients[name].reshape(-1)
            self.optimizer.update(UpdateContext(self.rank.kernels), w[own], g[own], self.state[name], self.steps)
            self.rank.all_gather(w[own], out=w, length=len(w))


class FSDP:
    """Shards of weights and state; a layer is whole while it is used."""

    def __init__(self, rank: Rank, module: Module, optimizer: Optimizer) -> None:
        self.rank, self.module, self.optimizer, self.steps = rank, module, optimizer, 0
        self.shards: Arrays = {}
        self.state: dict[str, Arrays] = {}
        for name in module.names:
            whole = module.initial(name).reshape(-1)
            own = own_part(rank, len(whole))
            self.shards[name] = rank.memory.alloc(own.stop - own.start, np.float32, "parameter", name)
            self.shards[name][...] = whole[own]
            self.state[name] = new_state(rank, optimizer, own.stop - own.start)
            del whole

    def gathered(self, name: str) -> Array:
        """A whole parameter, (I, O)."""
        shape = self.module.shapes[name]
        whole: Array = self.rank.all_gather(self.shards[name], length=shape[0] * shape[1])
        return whole.reshape(shape)

    def step(self, x: Array, target: Array) -> float:
        """x (B, I), target (B, O) -> the loss, after which shards are those of the next step."""
        self.steps += 1
        kept: list[Any] = []
        for name in self.module.names:
            x, keep = self.module.forward(name, self.gathered(name), x)
            kept.append(keep)
        loss, dy = self.module.loss(x, target)
        del x, keep
        means = {}
        for name in reversed(self.module.names):
            before, gradient = self.module.backward(name, self.gathered(name), kept.pop(), dy)
            dy = dy if before is None else before
            means[name] = self.rank.reduce_scatter(gradient.reshape(-1))
            means[name] /= self.rank.size
            del gradient, before
        for name, mean in means.items():
            context = UpdateContext(self.rank.kernels)
            self.optimizer.update(context, self.shards[name], mean, self.state[name], self.steps)
        return loss


get_ddp, get_sharded_optimizer, get_fsdp = DataParallel, ShardedOptimizer, FSDP

SOLUTIONS: Mapping[str, Callable[..., Any]] = {solution.__name__: solution for solution in (
    mean, broadcast, ring, gather, all_reduce, average, ddp, zero1, zero2, zero3, overlap, lamb, overflow, repair)} | {
        "find_batch": average, "find_ring": gather, "find_skip": overflow}
