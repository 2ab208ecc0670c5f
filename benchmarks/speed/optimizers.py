"""Adam on many parameters, beside torch's."""

from typing import Any

import numpy as np

import zerosim as zs
from zerosim import optim
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import UpdateContext

from . import Action, Row, Side


def parameters(small: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights and gradient (16 Mi,), or few."""
    weights, gradient = np.random.default_rng(0).standard_normal((2, 1000 if small else 1 << 24), np.float32)
    return weights, gradient


def adam(small: bool) -> Action:
    """One step of zerosim's Adam."""
    w, g = parameters(small)
    optimizer, ctx = optim.Adam(lr=1e-3), UpdateContext(NumpyKernels())
    state = {name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots(w.shape).items()}
    steps = iter(range(1, 1 << 30))

    def action() -> np.ndarray:
        optimizer.update(ctx, w, g, state, next(steps))
        return w

    return action


def adam_on_ranks(small: bool) -> Action:
    """The same step as two ranks take it, each of its half, on a thread each."""
    w, g = parameters(small)
    optimizer, ctx, cluster = optim.Adam(lr=1e-3), UpdateContext(NumpyKernels()), zs.Cluster(2, workers=2)
    halves = list(zip(np.split(w, 2), np.split(g, 2), strict=True))
    states = [{name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots(mine.shape).items()}
              for mine, _ in halves]
    steps = iter(range(1, 1 << 30))

    def action() -> np.ndarray:
        step = next(steps)

        def program(rank: zs.Rank) -> None:
            mine, gradient = halves[rank.index]
            rank.compute(lambda: optimizer.update(ctx, mine, gradient, states[rank.index], step),
                         operations=16 * mine.size)

        cluster.run(program)
        cluster.runs.clear()
        return w

    return action


def torch_adam(**how: Any) -> Side:
    """One step of torch's Adam."""
    def prepare(small: bool) -> Action:
        import torch

        w, g = map(torch.from_numpy, parameters(small))
        w.grad = g
        optimizer = torch.optim.Adam([w.requires_grad_()], lr=1e-3, **how)

        def action() -> np.ndarray:
            optimizer.step()
            return w.detach().numpy()

        return action

    return prepare


WHAT = "Adam, 16 Mi parameters, fp32"
ROWS = (
    Row("adam", f"{WHAT}, one thread", "torch's foreach", 0.7, adam, torch_adam(foreach=True), needs=("torch",),
        tolerance=1e-6),  # torch divides by the roots in another order
    Row("adam-fused", f"{WHAT}, two ranks, two threads", "torch's fused", 2.0, adam_on_ranks, torch_adam(fused=True),
        needs=("torch",), threads=2, tolerance=1e-6),
)
