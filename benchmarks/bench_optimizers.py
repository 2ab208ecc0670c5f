"""The time of a step of each optimizer, beside its floor in the same run.

For elementwise optimizers the floor is memory traffic: as many copies as reading and writing the same arrays takes. For
optimizers of matrices it is the products and decompositions that the paper asks for, by NumPy alone (for Adafactor one
copy of the gradient). Times are the best of some repetitions, on this machine and in this minute: trust the ratios.
"""

from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table
from timing import best_seconds

from zerosim import optim
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import Optimizer, UpdateContext

COUNT = 1 << 22  # elements: too many for most caches, as a model's are
SHAPE = (256, 1024)  # a layer of a small GPT
ELEMENTWISE = [optim.SGD(lr=0.1), optim.Momentum(lr=0.1), optim.AdaGrad(), optim.RMSprop(), optim.Adam(), optim.AdamW(),
               optim.Lion(), optim.Adan(), optim.LAMB(), optim.LARS()]


def tensors(optimizer: Optimizer, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Weights, a gradient and state (of ones) in fp32."""
    w, g = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    return w, g, {name: np.ones(slot.shape, np.float32) for name, slot in optimizer.slots(shape).items()}


def elementwise_table() -> Table:
    """Each elementwise step beside copies that move as many bytes."""
    table = Table("", "ms", "Gel/s", "floor, ms", "times the floor", title=f"{COUNT / 2**20:.0f} Mi parameters, fp32")
    kernels, source, target = NumpyKernels(), np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    copy_seconds = best_seconds(lambda: np.copyto(target, source))
    for optimizer in ELEMENTWISE:
        w, g, state = tensors(optimizer, (COUNT,))
        ctx = UpdateContext(kernels, norms=(1.0, 1.0))

        def step(o=optimizer, w=w, g=g, state=state, ctx=ctx) -> None:
            if "tensor_norm" in o.needs:
                o.advance(ctx, w, g, state, 10)
            o.update(ctx, w, g, state, 10)

        seconds = best_seconds(step)
        floor_seconds = copy_seconds * (2 * (1 + len(state)) + 1) / 2  # all are read, all but the gradient written
        table.add_row(type(optimizer).__name__, f"{1e3 * seconds:.1f}", f"{COUNT / seconds / 1e9:.2f}",
                      f"{1e3 * floor_seconds:.1f}", f"{seconds / floor_seconds:.1f}")
    return table


def products(*shapes: tuple[int, int, int]) -> Callable[[], object]:
    """Products of (m, k) and (k, n) matrices, given as (m, k, n)."""
    rng = np.random.default_rng(0)
    pairs = [(rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32),
              np.empty((m, n), np.float32)) for m, k, n in shapes]

    def multiply() -> None:
        for a, b, out in pairs:
            np.matmul(a, b, out=out)

    return multiply


def iterations(rows: int, columns: int, steps: int, *, quintic: bool) -> Callable[[], object]:
    """The products of Newton-Schulz iterations, of which BLAS makes X Xᵀ in half the time."""
    x = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    gram, square, out = (np.empty(shape, np.float32) for shape in ((rows, rows), (rows, rows), (rows, columns)))

    def multiply() -> None:
        for _ in range(steps):
            np.matmul(x, x.T, out=gram)
            if quintic:
                np.matmul(gram, gram, out=square)
            np.matmul(gram, x, out=out)

    return multiply


def decompositions(rows: int, columns: int) -> Callable[[], object]:
    """Eigenvectors of both factors in float64, and the products that put a power together again."""
    factors = [x @ x.T for x in (np.random.default_rng(0).standard_normal((n, n)) for n in (rows, columns))]

    def decompose() -> None:
        for factor in factors:
            values, vectors = np.linalg.eigh(factor)
            (vectors * values) @ vectors.T

    return decompose


def matrix_table() -> Table:
    """Each matrix step beside what its paper cannot do without."""
    table = Table("", "ms", "floor, ms", "times the floor", title=f"a weight {SHAPE}, fp32")
    r, c = SHAPE
    around, outer = ((r, r, c), (r, c, c)), ((r, c, r), (c, r, c))
    decompose = decompositions(r, c)
    source, target = (np.ones(SHAPE, np.float32) for _ in range(2))
    cases: list[tuple[str, Optimizer, int, list[Callable[[], object]]]] = [
        ("Muon, quintic", optim.Muon(), 10, [iterations(r, c, 5, quintic=True)]),
        ("Muon, cubic", optim.Muon(iteration="cubic"), 10, [iterations(r, c, 5, quintic=False)]),
        ("Adafactor", optim.Adafactor(), 10, [lambda: np.copyto(target, source)]),
        ("Shampoo", optim.Shampoo(), 10, [products(*outer, *around), decompose]),
        ("SOAP, bases kept", optim.SOAP(), 11, [products(*outer, *around, *around, *around)]),
        ("K-FAC", optim.KFAC(), 10, [products(*around), decompose])]
    for name, optimizer, at, parts in cases:
        w, g, state = tensors(optimizer, SHAPE)
        factors = tuple((x @ x.T / 9).astype(np.float32) for x in np.split(np.random.default_rng(1).standard_normal(
            (r + c, 9)), [r]))
        ctx = UpdateContext(NumpyKernels(), factors=factors)
        seconds = best_seconds(lambda o=optimizer, a=(ctx, w, g, state, at): o.update(*a))
        floor_seconds = sum(map(best_seconds, parts))
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{1e3 * floor_seconds:.1f}", f"{seconds / floor_seconds:.1f}")
    return table


def main() -> None:
    """Prints the tables."""
    console = Console()
    console.print(elementwise_table())
    console.print(matrix_table())


if __name__ == "__main__":
    main()
