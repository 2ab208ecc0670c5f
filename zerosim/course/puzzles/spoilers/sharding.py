"""Solutions of the puzzles about training: averages, the stages, overlap, norms, overflow, the broken program.

Legend: N ranks, n elements, k = ⌈n/N⌉, m micro-batches, L layers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from zerosim.ranks.rank import Rank, Work

Array = np.ndarray


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
