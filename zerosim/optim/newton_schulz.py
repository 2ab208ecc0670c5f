"""Orthogonalizing a matrix with products alone: Newton-Schulz iterations.

Legend: a matrix G (R, C), its singular values s; the iterations act on each s alone. fp32, one product after the other.
Sources: Björck & Bowie 1971 (the cubic); Jordan et al. 2024, "Muon" (the quintic's coefficients).
"""

from typing import Any

import numpy as np

# s -> a·s + b·s³ + c·s⁵. The cubic converges to 1; the quintic is faster, and stays about 1 without converging.
COEFFICIENTS = {"cubic": (1.5, -0.5, 0.0), "quintic": (3.4445, -4.7750, 2.0315)}


def orthogonalized(kernels: Any, g: np.ndarray, steps: int, iteration: str) -> np.ndarray:
    """The iterations' result on G/‖G‖_F, fp32 (R, C): singular values near 1, those of G = 0 stay 0.

    After 5 quintic steps, singular values of G/‖G‖_F from 0.01 to 1 lie in [0.68, 1.13].
    """
    a, b, c = COEFFICIENTS[iteration]
    wide = g.shape[0] <= g.shape[1]
    norm = float(np.sqrt(np.einsum("ij,ij->", g, g, dtype=np.float64)))
    x = kernels.empty(g.shape if wide else g.shape[::-1], np.float32)
    np.divide(g if wide else g.T, np.float32(norm) if norm else np.float32(1), out=x)
    rows = x.shape[0]
    gram, squared = (kernels.empty((rows, rows), np.float32) for _ in range(2))
    change = kernels.empty(x.shape, np.float32)
    for _ in range(steps):
        kernels.matmul(x, x.T, out=gram)
        if c:
            kernels.matmul(gram, gram, out=squared)
            squared *= np.float32(c)
            gram *= np.float32(b)
            gram += squared
        else:
            gram *= np.float32(b)
        kernels.matmul(gram, x, out=change)
        x *= np.float32(a)
        x += change
    return x if wide else np.ascontiguousarray(x.T)
