"""The twin: one device, no ranks, no shards; the definition of what every stage must compute, bit for bit.

Legend: P parameters in one flat vector without padding, N imagined ranks, k micro-batches.
It adds the gradients of N batches in the order of a ring, each addition rounded as NumPy and ml_dtypes round, and
feeds the sum to the unsharded optimizer. It imports nothing of zerosim.zero and zerosim.ranks.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from zerosim.models.context import Context
from zerosim.models.units import Model
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer, UpdateContext

BLOCK = 65536


def owners(model: Model, ranks: int, layout: str) -> np.ndarray:
    """(P,): the rank that owns each parameter element, by ceil(length / N) in each unit or in the whole vector."""
    lengths = [unit.parameter_count for unit in model.units]
    if layout == "contiguous":
        lengths = [sum(lengths)]
    return np.concatenate([np.arange(n) // max(1, -(-n // ranks)) for n in lengths]).astype(int)


def parameters(model: Model) -> list[slice]:
    """Where each parameter lies in the vector."""
    ends = np.cumsum([0] + [int(np.prod(shape, dtype=int)) for shape in model.shapes.values()])
    return [slice(int(a), int(b)) for a, b in pairwise(ends)]


def rounded_add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in fp32, rounded once to a's format."""
    with np.errstate(all="ignore"):
        return (a.astype(np.float32) + b.astype(a.dtype).astype(np.float32)).astype(a.dtype)


def ring_sum(vectors: list[np.ndarray], owner: np.ndarray) -> np.ndarray:
    """The sum of N vectors (P,) in which an element of owner c is x[c+1] + x[c+2] + ... + x[c]."""
    ranks = len(vectors)
    total = np.empty_like(vectors[0])
    for c in range(ranks):
        mine = owner == c
        partial = vectors[(c + 1) % ranks][mine]
        for step in range(2, ranks + 1):
            partial = rounded_add(partial, vectors[(c + step) % ranks][mine])
        total[mine] = partial
    return total


@dataclass
class Twin:
    """Single-device training on the batches of N imagined ranks. ``order`` is "local_first" or "reduce_first"."""

    model: Model
    optimizer: Optimizer
    ranks: int
    policy: Policy
    layout: str
    order: str
    taken: int = 0
    master: np.ndarray = field(init=False)
    slots: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.master = np.concatenate([unit.initial(name, 0, int(np.prod(shape, dtype=int)))
                                      for unit in self.model.units for name, shape in unit.shapes.items()])
        self.slots = {name: np.zeros(len(self.master), np.float32) for name in self.optimizer.slots(self.master.shape)}
        self.kernels = NumpyKernels()
        self.owner = owners(self.model, self.ranks, self.layout)

    @property
    def compute(self) -> np.ndarray:
        """(P,): the weights in the compute format."""
        with np.errstate(all="ignore"):
            return self.master.astype(self.policy.compute_dtype)

    def gradient(self, x: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss and the local gradient (P,) of one micro-batch, from its own forward and backward."""
        ctx, flat, kept, weights, low = Context.standalone(self.policy), self.compute, [], [], 0
        y = np.ascontiguousarray(x).astype(self.policy.compute_dtype)
        for unit in self.model.units:
            w = {}
            for name, shape in unit.shapes.items():
                high = low + int(np.prod(shape, dtype=int))
                w[name], low = flat[low:high].reshape(shape), high
            y, keeps = unit.forward(ctx, w, y)
            kept.append(keeps)
            weights.append(w)
        loss, keeps = self.model.loss.forward(ctx, y, target)
        dy = self.model.loss.backward(ctx, keeps, self.policy.loss_scale)
        parts: list[np.ndarray] = []
        for unit, w, keeps in zip(reversed(self.model.units), reversed(weights), reversed(kept), strict=True):
            dy, grads = unit.backward(ctx, w, keeps, dy)
            parts = [grads[name].reshape(-1).copy() for name in unit.shapes] + parts
        return loss, np.concatenate(parts)

    def reduced(self, gradients: list[list[np.ndarray]]) -> np.ndarray:
        """The sum of gradients[r][j] over ranks and micro-batches, in the twin's order."""
        accumulate, reduce = self.policy.accumulate_dtype, self.policy.reduce_dtype
        with np.errstate(all="ignore"):
            if self.order == "local_first":
                sums = []
                for mine in gradients:
                    total = mine[0].astype(accumulate)
                    for g in mine[1:]:
                        total = rounded_add(total, g)
                    sums.append(total.astype(reduce))
                return ring_sum(sums, self.owner)
            total = None
            for j in range(len(gradients[0])):
                summed = ring_sum([mine[j].astype(reduce) for mine in gradients], self.owner)
                total = summed.astype(accumulate) if total is None else rounded_add(total, summed)
            return total

    def norm(self, g32: np.ndarray) -> float:
        """The global norm: per owner the float64 sum of squares in blocks, tensor by tensor; owners in rank order."""
        total = 0.0
        for rank in range(self.ranks):
            partial = 0
            for lies in parameters(self.model):
                mine, piece = g32[lies][self.owner[lies] == rank].astype(np.float64), 0.0
                for low in range(0, len(mine), BLOCK):
                    piece += float(np.add.reduce(mine[low:low + BLOCK] ** 2))
                partial += piece
            total += partial
        return float(np.sqrt(total))

    def step(self, batches: list[list[tuple[np.ndarray, np.ndarray]]], clip_norm: float | None = None) -> dict:
        """One step on batches[r][j] = (x, target); the losses per rank, the norm, and whether it was skipped."""
        pairs = [[self.gradient(x, t) for x, t in mine] for mine in batches]
        losses = [[loss for loss, _ in mine] for mine in pairs]
        total = self.reduced([[g for _, g in mine] for mine in pairs])
        divisor = np.float32(self.policy.loss_scale * self.ranks * len(batches[0]))
        with np.errstate(all="ignore"):
            g32 = total.astype(np.float32) / divisor
        if not np.isfinite(g32).all():
            return {"losses": losses, "norm": float("nan"), "skipped": True}
        norm = self.norm(g32)
        if clip_norm is not None and norm > clip_norm:
            g32 = g32 * np.float32(clip_norm / norm)
        self.taken += 1
        self.optimizer.update(UpdateContext(self.kernels), self.master, g32, self.slots, self.taken)
        return {"losses": losses, "norm": norm, "skipped": False}
