"""Solutions of the three functions that `adapters` grades.

Legend: N ranks; B rows, I and O widths of a layer.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.module import Module
from zerosim.optim.base import Optimizer, UpdateContext
from zerosim.ranks.rank import Rank

Array = np.ndarray
Arrays = dict[str, Array]


def own_part(rank: Rank, length: int) -> slice:
    """The elements that a rank owns of a flat tensor."""
    chunk = -(-length // rank.size)
    return slice(min(length, rank.index * chunk), min(length, (rank.index + 1) * chunk))


def new_state(rank: Rank, optimizer: Optimizer, length: int) -> Arrays:
    """The optimizer's slots for a shard, in the ledger."""
    state = {}
    for name, slot in optimizer.slots((length,)).items():
        state[name] = rank.memory.alloc(slot.shape, np.float32, "optimizer_state", name)
        state[name].fill(0)
    return state


class DDP:
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


def get_ddp(rank: Rank, module: Module) -> DDP:
    """Data parallel."""
    return DDP(rank, module)


def get_sharded_optimizer(rank: Rank, parameters: Arrays, optimizer: Optimizer) -> ShardedOptimizer:
    """ZeRO-1's optimizer."""
    return ShardedOptimizer(rank, parameters, optimizer)


def get_fsdp(rank: Rank, module: Module, optimizer: Optimizer) -> FSDP:
    """ZeRO-3."""
    return FSDP(rank, module, optimizer)
