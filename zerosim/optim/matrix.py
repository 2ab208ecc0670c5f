"""Optimizers of whole matrices: Muon, Adafactor, and those with a factor for each side, Shampoo, SOAP, K-FAC.

None updates part of a matrix: a flat piece of one is refused. Workspace comes from the context, so that a rank's memory
counts it.

Legend: a matrix W (I, O), inputs by outputs as a linear layer has it, with gradient G; left factors (I, I), right ones
(O, O); n elements of a piece.
"""

import math
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, ClassVar, Self

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.kernels import corrected_root, descend, move_average, move_square_average
from zerosim.numerics.ranges import AtLeastZero, Count, Flag, Positive, one_of
from zerosim.optim.base import Cut, DecayRate, Optimizer, Slot, State, UpdateContext, require_update
from zerosim.optim.elementwise import AdamW

# -- Newton-Schulz iterations: a matrix made orthogonal by products alone ----------------------------------------------

# The cubic converges to 1 (Björck and Bowie 1971), slowly from below: 5 steps take 0.01 to 0.076, 10 to 0.53, 20 to 1.
# The quintic (Jordan et al. 2024, "Muon") is steeper at 0 and does not converge, since a + b + c = 0.701 is not 1:
# after 5 steps what was in [0.01, 1] is in [0.68, 1.13].
COEFFICIENTS = MappingProxyType({"cubic": (1.5, -0.5, 0.0), "quintic": (3.4445, -4.7750, 2.0315)})


def orthogonalize(ctx: UpdateContext, x: Array, iteration: str = "quintic", steps: int = 5) -> None:
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
    for _ in range(steps):
        ctx.matmul(*((x, x.T) if wide else (x.T, x)), gram)
        if c:
            ctx.matmul(gram, gram, square)
            kernels.step_blocks(partial(_weighted_sum, b, c), gram, square, scratch=0)
        else:
            kernels.multiply_rounded(gram, b, gram)
        ctx.matmul(*((gram, x) if wide else (x, gram)), change)
        kernels.step_blocks(partial(_weighted_sum, a, 1.0), x, change, scratch=0)


def _weighted_sum(weight: float, others: float, x: Array, other: Array) -> None:
    """x = weight·x + others·other; the other is overwritten."""
    np.multiply(x, weight, out=x)
    np.multiply(other, others, out=other)
    np.add(x, other, out=x)


# -- Muon and Adafactor ------------------------------------------------------------------------------------------------

class MatrixOptimizer(Optimizer):
    """An optimizer that needs matrices whole, and takes any other tensor element by element."""

    __slots__ = ()
    cut: ClassVar[Cut] = "matrix"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix"})

    def cut_of(self, shape: tuple[int, ...]) -> Cut:
        """A tensor of two dimensions only whole, any other anywhere."""
        return "matrix" if len(shape) == 2 else "anywhere"


@dataclass(frozen=True, slots=True)
class Muon(MatrixOptimizer):
    """b = momentum·b + g; w = (1 - lr·weight_decay)·w - lr·√max(1, O/I)·U, U being b made orthogonal, or, with
    Nesterov's look ahead, g + momentum·b made orthogonal.

    Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks", and its code. ``iteration`` is
    "quintic", as published, or "cubic", the classical one that converges. As in practice tensors that are no matrices
    take AdamW, with ``vector_lr`` (what changes lr for a step, as a schedule does, changes it in proportion), beta1,
    beta2 and epsilon; embeddings and the head, matrices but no hidden layers, should be given AdamW by a Group.
    """

    lr: AtLeastZero = 0.02
    momentum: DecayRate = 0.95
    nesterov: Flag = True
    iteration: Annotated[str, one_of(COEFFICIENTS)] = "quintic"
    iterations: Count = 5
    weight_decay: AtLeastZero = 0.0
    vector_lr: AtLeastZero = 3e-4
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.95
    epsilon: AtLeastZero = 1e-10

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The buffer b of a matrix; AdamW's m and v of anything else."""
        return {"b": Slot(shape)} if len(shape) == 2 else {"m": Slot(shape), "v": Slot(shape)}

    def product_flops(self, shape: tuple[int, ...]) -> int:
        """Those of `orthogonalize`: two of s x s by s x l a step, s the smaller side, and the quintic's of s x s.

        >>> Muon().product_flops((4096, 11008)) == 5 * (4 * 4096**2 * 11008 + 2 * 4096**3), Muon().product_flops((9,))
        (True, 0)
        """
        small, large = sorted(shape) if len(shape) == 2 else (0, 0)
        return self.iterations * (4 * small**2 * large + 2 * small**3 * (COEFFICIENTS[self.iteration][2] != 0))

    def with_lr(self, lr: float) -> Self:
        """This optimizer with another lr for matrices, and ``vector_lr`` changed in proportion."""
        return self.for_group({"lr": lr, "vector_lr": self.vector_lr * (lr / self.lr) if self.lr else 0.0})

    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """One step on a matrix w (I, O), or on a piece w (n,) of a tensor that is no matrix."""
        require_update(self, w, g, state, step)
        if w.ndim != 2:
            lr = self.vector_lr if self.lr else 0.0
            AdamW(lr, self.beta1, self.beta2, self.epsilon, self.weight_decay).update(ctx, w, g, state, step)
        elif w.size:
            self._matrix_step(ctx, w, g, state["b"])

    def _matrix_step(self, ctx: UpdateContext, w: Array, g: Array, b: Array) -> None:
        moved = ctx.empty(w.shape)
        rate, decay = self.lr * max(1.0, w.shape[1] / w.shape[0])**0.5, 1.0 - self.lr * self.weight_decay
        ctx.kernels.step_blocks(self._look_ahead, b, g, moved, scratch=0)
        orthogonalize(ctx, moved, self.iteration, self.iterations)
        move(ctx, w, moved, rate, decay)

    def _look_ahead(self, b: Array, g: Array, moved: Array) -> None:
        np.multiply(b, self.momentum, out=b)
        np.add(b, g, out=b)
        np.multiply(b, self.momentum if self.nesterov else 1.0, out=moved)
        if self.nesterov:
            np.add(moved, g, out=moved)


def move(ctx: UpdateContext, w: Array, change: Array, rate: float, decay: float = 1.0) -> None:
    """w = decay·w - rate·change, in place; the change is overwritten."""
    ctx.kernels.step_blocks(partial(descend, rate, decay), w, change, scratch=0)


@dataclass(frozen=True, slots=True)
class Adafactor(Optimizer):
    """Adam's second moment as a mean for each row and one for each column, and an update of bounded size.

    β = 1 - step^(-decay); rows = β·rows + (1-β)·(mean of g² along the row + ε₁), columns likewise; u = g/√V with
    V = rows·columns/mean(rows); w -= α·u/max(1, RMS(u)/threshold), α = max(ε₂, RMS(w))·min(lr, 1/√step). Tensors that
    are no matrices keep V itself, and are needed whole too, since RMS is a tensor's.
    Shazeer and Stern 2018 (arXiv:1804.04235), algorithms 4 and 5 with section 8's step sizes, without momentum.
    """

    cut: ClassVar[Cut] = "tensor"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix"})
    lr: AtLeastZero = 1e-2
    decay: AtLeastZero = 0.8
    threshold: Positive = 1.0
    epsilon1: AtLeastZero = 1e-30
    epsilon2: AtLeastZero = 1e-3

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """A mean for each row and for each column of a matrix; one for each element of anything else."""
        return {"rows": Slot(shape[:1]), "columns": Slot(shape[1:])} if len(shape) == 2 else {"v": Slot(shape)}

    def product_flops(self, shape: tuple[int, ...]) -> int:
        """None: means and roots are taken element by element."""
        return 0

    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """One step on a whole tensor w, in its own shape."""
        require_update(self, w, g, state, step)
        if not w.size:
            return
        u = ctx.empty(w.shape)
        (self._matrix_direction if w.ndim == 2 else self._vector_direction)(ctx, g, state, step, u)
        alpha = min(self.lr, step**-0.5) * max(self.epsilon2, _rms(ctx, w))
        alpha /= max(1.0, _rms(ctx, u) / self.threshold)
        move(ctx, w, u, alpha)

    def _matrix_direction(self, ctx: UpdateContext, g: Array, state: State, step: int, u: Array) -> None:
        """Moves the means and writes g/√V."""
        means = {name: ctx.empty(state[name].shape) for name in ("rows", "columns")}
        ctx.kernels.mean_squares(g, means["rows"], means["columns"])
        for name, mean in means.items():
            ctx.kernels.step_blocks(partial(self._move_mean, step), state[name], mean)
        ctx.kernels.divide_by_roots(g, state["rows"], state["columns"], u)

    def _vector_direction(self, ctx: UpdateContext, g: Array, state: State, step: int, u: Array) -> None:
        """Moves V and writes g/√V."""
        ctx.kernels.step_blocks(partial(self._vector_block, step), state["v"], g, u)

    def _vector_block(self, step: int, v: Array, g: Array, u: Array, part: Array) -> None:
        np.multiply(g, g, out=u)
        self._move_mean(step, v, u, part)
        np.sqrt(v, out=part)
        np.divide(g, part, out=u)

    def _move_mean(self, step: int, mean: Array, squares: Array, part: Array) -> None:
        """mean = β·mean + (1-β)·(squares + ε₁); the squares are overwritten."""
        np.add(squares, self.epsilon1, out=squares)
        move_average(1.0 - step**-self.decay, mean, squares, part)


def _rms(ctx: UpdateContext, x: Array) -> float:
    """The root of the mean square, added up in float64."""
    return float((ctx.kernels.sum_of_squares(x) / x.size)**0.5)


# -- Factors for each side of a matrix ---------------------------------------------------------------------------------
# They are kept in fp32; their roots, inverses and eigenvectors are computed in float64.

def outer_products(ctx: UpdateContext, g: Array) -> tuple[Array, Array]:
    """G Gᵀ (I, I) and Gᵀ G (O, O)."""
    return _product(ctx, g, g.T), _product(ctx, g.T, g)


def between(ctx: UpdateContext, left: Array, x: Array, right: Array) -> Array:
    """left @ x @ right (I, O), from the left."""
    return _product(ctx, _product(ctx, left, x), right)


def move_factor(ctx: UpdateContext, factor: Array, product: Array, kept: float) -> None:
    """factor = kept·factor + (1-kept)·product, in place; the product is left as it is."""
    ctx.kernels.step_blocks(partial(move_average, kept), factor, product)


def _product(ctx: UpdateContext, a: Array, b: Array) -> Array:
    out = ctx.empty((a.shape[0], b.shape[1]))
    ctx.matmul(a, b, out)
    return out


@dataclass(frozen=True, slots=True)
class Shampoo(MatrixOptimizer):
    """L += G Gᵀ; R += Gᵀ G; w -= lr·(L + εI)^(-1/4) G (R + εI)^(-1/4), with the roots made anew in every step.

    Gupta, Koren and Singer 2018 (arXiv:1802.09568), algorithm 1. Tensors that are no matrices take the diagonal form,
    elementwise: v += g·g; w -= lr·g/√(v + ε).
    """

    lr: AtLeastZero = 0.1
    epsilon: Positive = 1e-4

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The two factors of a matrix; the sum of squares of anything else."""
        if len(shape) != 2:
            return {"v": Slot(shape)}
        return {"left": Slot((shape[0], shape[0])), "right": Slot((shape[1], shape[1]))}

    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """One step on a matrix w (I, O), or on a piece w (n,) of a tensor that is no matrix."""
        require_update(self, w, g, state, step)
        if w.ndim != 2:
            ctx.kernels.step_blocks(self._vector_block, w, state["v"], g, scratch=2)
            return
        factors = (state["left"], state["right"])
        roots = outer_products(ctx, g)
        for factor, root in zip(factors, roots, strict=True):
            ctx.kernels.add_rounded(factor, root, factor)
            ctx.symmetric_power(factor, -0.25, self.epsilon, root)
        move(ctx, w, between(ctx, roots[0], g, roots[1]), self.lr)

    def _vector_block(self, w: Array, v: Array, g: Array, change: Array, root: Array) -> None:
        np.multiply(g, g, out=change)
        np.add(v, change, out=v)
        np.add(v, self.epsilon, out=root)
        np.sqrt(root, out=root)
        np.multiply(g, self.lr, out=change)
        np.divide(change, root, out=change)
        np.subtract(w, change, out=w)


@dataclass(frozen=True, slots=True)
class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's factors, which is turned every ``every`` steps.

    G' = Qₗᵀ G Qᵣ; m = β1·m + (1-β1)·G; v = β2·v + (1-β2)·G'²; u = Qₗ (Qₗᵀ m̂ Qᵣ/(√v̂ + ε)) Qᵣᵀ;
    w = (1 - lr·weight_decay)·w - lr·u; then L = β2·L + (1-β2)·G Gᵀ, R likewise, and Q = the orthogonal factor of L Q.
    The first step only begins L, R and Q, and leaves w alone: in its own gradient's basis that gradient is diagonal,
    and the rest of it rounding.
    Vyas et al. 2024 (arXiv:2409.11321), algorithm 3; the first step and the defaults as in its published code, without
    that code's sorting of eigenvectors. Tensors that are no matrices take AdamW, from the first step on.
    """

    lr: AtLeastZero = 3e-3
    beta1: DecayRate = 0.95
    beta2: DecayRate = 0.95
    epsilon: AtLeastZero = 1e-8
    weight_decay: AtLeastZero = 0.01
    every: Count = 10

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """m and v; of a matrix two factors and their eigenvectors beside them."""
        own = {"m": Slot(shape), "v": Slot(shape)}
        if len(shape) != 2:
            return own
        left, right = Slot((shape[0], shape[0])), Slot((shape[1], shape[1]))
        return own | {"left": left, "right": right, "left_basis": left, "right_basis": right}

    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """One step on a matrix w (I, O), or on a piece w (n,) of a tensor that is no matrix."""
        require_update(self, w, g, state, step)
        if w.ndim != 2:
            AdamW(self.lr, self.beta1, self.beta2, self.epsilon, self.weight_decay).update(ctx, w, g, state, step)
            return
        if step > 1:
            self._adam_step(ctx, w, g, state, step - 1)
        self._turn(ctx, g, state, step)

    def _adam_step(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """Adam on the rotated gradient, and back; ``step`` counts those that moved w."""
        left, right = state["left_basis"], state["right_basis"]
        turned = between(ctx, left.T, g, right)
        ctx.kernels.step_blocks(self._move_moments, state["m"], state["v"], g, turned)
        turned = between(ctx, left.T, state["m"], right)
        ctx.kernels.step_blocks(partial(self._divide, step), turned, state["v"])
        move(ctx, w, between(ctx, left, turned, right.T), self.lr, 1.0 - self.lr * self.weight_decay)

    def _move_moments(self, m: Array, v: Array, g: Array, turned: Array, part: Array) -> None:
        move_average(self.beta1, m, g, part)
        move_square_average(self.beta2, v, turned, part)

    def _divide(self, step: int, turned: Array, v: Array, root: Array) -> None:
        corrected_root(v, 1.0 - self.beta2**step, self.epsilon, root)
        np.divide(turned, 1.0 - self.beta1**step, out=turned)
        np.divide(turned, root, out=turned)

    def _turn(self, ctx: UpdateContext, g: Array, state: State, step: int) -> None:
        """Moves the factors, and the bases where it is their turn."""
        for side, product in zip(("left", "right"), outer_products(ctx, g), strict=True):
            factor, basis = state[side], state[f"{side}_basis"]
            move_factor(ctx, factor, product, self.beta2)
            if step == 1:
                ctx.eigenvectors(factor, basis)
            elif step % self.every == 0:
                ctx.matmul(factor, basis, product)
                ctx.orthogonal_factor(product, basis)


@dataclass(frozen=True, slots=True)
class KFAC(Optimizer):
    """w -= lr·(A + π√λ·I)⁻¹ G (B + √λ/π·I)⁻¹, A and B running means of the layer's factors.

    A (I, I) is that of its inputs, B (O, O) of the gradients of its outputs; λ is ``damping``, and
    π = √((trace(A)/I)/(trace(B)/O)).
    Martens and Grosse 2015 (arXiv:1503.05671): sections 3 and 4.2, the running means of section 5 (kept by
    min(1 - 1/step, decay)), the damping of section 6.3. Its step length and momentum (sections 6.4 and 7) are left out,
    since they need products with the exact Fisher matrix: ``lr`` and ``damping`` are fixed. The factors come in the
    context, from a linear layer that hands them over. Weights of such layers alone: biases, gains and embeddings are
    refused, and take another optimizer by a Group.
    """

    cut: ClassVar[Cut] = "layer"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix", "input_factors"})
    lr: AtLeastZero = 0.1
    damping: Positive = 1e-2
    decay: DecayRate = 0.95

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The running factors of a weight (I, O); ValueError for a tensor that is no weight."""
        if len(shape) != 2:
            raise ValueError("KFAC updates the weights of linear layers, (inputs, outputs), and was asked for a tensor "
                             f"or a flat piece of one, of shape {shape}; it never updates part of a matrix. Take "
                             "layout='whole_matrices' for weights; give the others another optimizer by a Group")
        return {"inputs": Slot((shape[0], shape[0])), "outputs": Slot((shape[1], shape[1]))}

    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """One step on a weight w (I, O)."""
        require_update(self, w, g, state, step)
        kept = min(1.0 - 1.0 / step, self.decay)
        for name, factor in zip(("inputs", "outputs"), _factors_in(ctx, w), strict=True):
            move_factor(ctx, state[name], factor, kept)
        balance, root = _balance(ctx, state["inputs"], state["outputs"]), self.damping**0.5
        inputs, outputs = ctx.empty(state["inputs"].shape), ctx.empty(state["outputs"].shape)
        ctx.symmetric_power(state["inputs"], -1.0, root * balance, inputs)
        ctx.symmetric_power(state["outputs"], -1.0, root / balance, outputs)
        move(ctx, w, between(ctx, inputs, g, outputs), self.lr)


def _balance(ctx: UpdateContext, inputs: Array, outputs: Array) -> float:
    """π: the root of how much larger A's mean eigenvalue is than B's; 1 where one of them is 0 or not finite."""
    first, second = (ctx.kernels.trace(factor) / max(1, len(factor)) for factor in (inputs, outputs))
    return float((first / second)**0.5) if 0 < first < math.inf and 0 < second < math.inf else 1.0


def _factors_in(ctx: UpdateContext, w: Array) -> tuple[Array, Array]:
    """The factors of a context, for a weight (I, O); ValueError without them, and for those of another layer."""
    if ctx.factors is None:
        raise ValueError("KFAC.update needs the layer's factors, and found none in its context; an engine observes "
                         "them, or put them in UpdateContext(kernels, factors=(A, B))")
    found = tuple(factor.shape for factor in ctx.factors)
    wanted = ((w.shape[0], w.shape[0]), (w.shape[1], w.shape[1]))
    if found != wanted:
        raise ValueError(f"KFAC.update asked for factors of shapes {wanted} for a weight {w.shape}, and found {found}; "
                         "hand it those of the same layer, inputs first")
    return ctx.factors
