"""Orthogonalizing a matrix with products alone: Newton-Schulz iterations.

Legend: a matrix X (r, c) and its singular values s. One iteration is X ← a·X + b·A X + c·A² X with A = X Xᵀ, and takes
each s to a·s + b·s³ + c·s⁵ and leaves the singular vectors alone. Everything in fp32, one product after the other;
practice runs it in bf16.
"""

from types import MappingProxyType

import numpy as np

from zerosim.optim.base import UpdateContext

# The cubic converges to 1 (Björck and Bowie 1971), slowly from below: 5 steps take 0.01 to 0.076, 10 to 0.53, 20 to 1.
# The quintic (Jordan et al. 2024, "Muon") is steeper at 0 and does not converge, since a + b + c = 0.701 is not 1:
# after 5 steps what was in [0.01, 1] is in [0.68, 1.13].
COEFFICIENTS = MappingProxyType({"cubic": (1.5, -0.5, 0.0), "quintic": (3.4445, -4.7750, 2.0315)})


def orthogonalize(ctx: UpdateContext, x: np.ndarray, iteration: str = "quintic", steps: int = 5) -> None:
    """x (r, c), in place, is divided by its Frobenius norm and iterated; zeros stay zeros. Raises KeyError for another
    iteration than "cubic" and "quintic".

    >>> from zerosim.numerics.kernels import NumpyKernels
    >>> x = np.array([[3, 0], [0, 0.3]], np.float32)
    >>> orthogonalize(UpdateContext(NumpyKernels()), x, "cubic", 20)
    >>> x.round(3).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    kernels, (a, b, c) = ctx.kernels, COEFFICIENTS[iteration]
    norm = kernels.sum_of_squares(x)**0.5
    if norm > 0:
        kernels.divide_rounded(x, norm, x)
    wide = x.shape[0] <= x.shape[1]  # the smaller of X Xᵀ and Xᵀ X has the same action on X
    side = min(x.shape)
    gram, square, change = ctx.empty((side, side)), ctx.empty((side, side)), ctx.empty(x.shape)

    def polynomial(gram: np.ndarray, square: np.ndarray) -> None:
        np.multiply(gram, b, out=gram)
        np.multiply(square, c, out=square)
        np.add(gram, square, out=gram)

    def move(x: np.ndarray, change: np.ndarray) -> None:
        np.multiply(x, a, out=x)
        np.add(x, change, out=x)

    for _ in range(steps):
        ctx.matmul(*((x, x.T) if wide else (x.T, x)), gram)
        if c:
            ctx.matmul(gram, gram, square)
            kernels.step_blocks(polynomial, gram, square, scratch=0)
        else:
            kernels.multiply_rounded(gram, b, gram)
        ctx.matmul(*((gram, x) if wide else (x, gram)), change)
        kernels.step_blocks(move, x, change, scratch=0)
