"""The contract of an optimizer: its state per parameter, where that may be cut, and one update in place."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import FP32, is_count, is_number
from zerosim.numerics.kernels import NumpyKernels, do_nothing
from zerosim.numerics.ranges import Range, require_ranges

Cut = Literal["anywhere", "tensor", "matrix", "layer"]
State = Mapping[str, Array]


# An optimizer's fields have ranges: this one, or those of `zerosim.numerics.ranges`.
DecayRate = Annotated[float, Range("{name} lies in [0, 1): at 1 the moment would never leave 0",
                                   lambda value: is_number(value) and 0 <= value < 1)]


# -- State, and the context of an update ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of state beside a parameter: its shape, and the name of its format. It starts as zeros."""

    shape: tuple[int, ...]
    format: str = "fp32"


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """The arguments of an update besides its arrays.

    ``norms`` are those of the whole tensor's weights and of its direction, ``factors`` those of the layer's inputs
    (I, I) and output gradients (O, O), for optimizers that need them. ``alloc`` gives workspace that is charged to
    a rank's memory, ``note`` notes the arithmetic of matrices.
    """

    kernels: NumpyKernels
    norms: tuple[float, float] | None = None
    factors: tuple[Array, Array] | None = None
    alloc: Callable[[tuple[int, ...]], Array] | None = None
    note: Callable[..., None] = do_nothing

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Workspace in fp32, not initialized, for as long as the update runs."""
        return self.kernels.empty(shape, np.float32) if self.alloc is None else self.alloc(shape)

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """out (M, N) = a (M, K) @ b (K, N), and what it cost."""
        self.kernels.matmul(a, b, out=out)
        self.note(flops=2 * a.shape[0] * a.shape[1] * b.shape[1], nbytes=a.nbytes + b.nbytes + out.nbytes)

    def symmetric_power(self, a: Array, exponent: float, damping: float, out: Array) -> None:
        """out = (a + damping·I)^exponent of a symmetric a (n, n), by its eigenvectors, and what that cost: 9n³ for
        them (Golub & Van Loan 2013, section 8.3) and 2n³ for the product."""
        self.kernels.symmetric_power(a, exponent, damping, out)
        self.note(flops=11 * len(a)**3, nbytes=2 * a.nbytes)

    def eigenvectors(self, a: Array, out: Array) -> None:
        """out (n, n): the eigenvectors of a symmetric a (n, n), and what they cost: 9n³ (see `symmetric_power`)."""
        self.kernels.eigenvectors(a, out)
        self.note(flops=9 * len(a)**3, nbytes=2 * a.nbytes)

    def orthogonal_factor(self, a: Array, out: Array) -> None:
        """out: the Q of a = QR (n, n), and what it cost: 8n³/3 (Golub & Van Loan 2013, section 5.2)."""
        self.kernels.orthogonal_factor(a, out)
        self.note(flops=8 * len(a)**3 // 3, nbytes=2 * a.nbytes)


def upcast(kernels: Any, empty: Callable[[str, tuple[int, ...]], Array],
           at_rest: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays in fp32: those that are so already themselves, the others as copies, in ``empty(name, shape)``, which
    `round_back` ends."""
    wide = {name: array if array.dtype == FP32 else empty(name, array.shape) for name, array in at_rest.items()}
    for name, array in at_rest.items():
        if wide[name] is not array:
            kernels.cast_pack(array, wide[name])
    return wide


def round_back(kernels: Any, wide: Mapping[str, Array], at_rest: Mapping[str, Array]) -> None:
    """Rounds each copy that `upcast` made, as it is now, to its array's format, to nearest even, once."""
    for name, array in at_rest.items():
        if wide[name] is not array:
            kernels.cast_pack(wide[name], array)


# -- The contract ------------------------------------------------------------------------------------------------------


NEEDS = frozenset({"whole_matrix", "tensor_norm", "input_factors"})


class BrokenPromise(ValueError):
    """An update does what none may do, or not what each must."""


class Optimizer(ABC):
    """An update rule as a frozen value: its fields are hyperparameters, and state lives with the caller.

    ``cut`` says where a shard may begin: "anywhere" iff the update of element i reads only element i's
    weight, gradient and state, else on the borders of tensors, matrices or layers. ``needs`` names what it
    reads beyond its own shard: "whole_matrix", "tensor_norm", "input_factors". Whether ``cut`` is true,
    ``check_shardable`` finds out.
    """

    __slots__ = ()

    cut: ClassVar[Cut]
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Raises ValueError for a hyperparameter that is not in the range of its annotation."""
        require_ranges(self)  # a dataclass calls this

    @abstractmethod
    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The state kept for a parameter, or a flat piece of one, of this shape; by name."""

    def cut_of(self, shape: tuple[int, ...]) -> Cut:
        """The cut of a tensor of this shape: as ``cut`` says, unless an optimizer knows better."""
        return self.cut

    @abstractmethod
    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """One step, in place: w and every slot of ``state`` change, g (unscaled, averaged) does not.

        All arrays are fp32: flat and of one length where the tensor may be cut anywhere; else w and g in the
        tensor's own shape, and every slot in its own. ``step`` counts from 1. The hyperparameters are the optimizer's
        own: an engine whose schedule changes lr calls ``with_lr`` before. Raises ValueError for arrays or a step that
        do not fit.
        """

    def product_flops(self, shape: tuple[int, ...]) -> int | None:
        """Operations of the matrix products that update a tensor of this shape; None where an optimizer of whole
        matrices does not say, as one that makes their roots or eigenvectors, whose time no product foresees."""
        return None if "whole_matrix" in self.needs else 0

    def apply(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """``update``, and BrokenPromise where it left another array in the place of a slot: what is not written into
        the slot that it was handed is lost when the step is over."""
        handed = dict(state)
        self.update(ctx, w, g, state, step)
        if len(state) != len(handed) or any(state.get(name) is not x for name, x in handed.items()):
            changed = [name for name in {**handed, **state} if state.get(name) is not handed.get(name)]
            raise BrokenPromise(f"{type(self).__name__}.update replaced the state {', '.join(map(repr, changed))}, "
                                "and what it put there would be lost; declare it in slots(), and write into it: "
                                f"state[{changed[0]!r}][...] = ...")

    def __repr__(self) -> str:
        """The name and the attributes; a dataclass writes its own."""
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in getattr(self, '__dict__', {}).items())})"

    def with_lr(self, lr: float) -> Self:
        """This optimizer with another lr, as a schedule changes it from step to step."""
        return self.for_group({"lr": lr})

    def for_group(self, group: Mapping[str, Any] | None) -> Self:
        """This optimizer with a group's hyperparameters for its own; ValueError for one it does not have."""
        if not group:
            return self
        own: Any = self  # a user's class may be no dataclass
        if not dataclasses.is_dataclass(own):
            raise ValueError(f"{type(self).__name__} is no dataclass, whose hyperparameters a group or schedule could "
                             "replace; write @dataclass(frozen=True) above the class")
        known = [field.name for field in dataclasses.fields(own)]
        unknown = sorted(group.keys() - set(known))
        if unknown:
            raise ValueError(f"{type(self).__name__} was given a group with {', '.join(unknown)}; its "
                             f"hyperparameters are {', '.join(known)}")
        return dataclasses.replace(own, **group)  # type: ignore[type-var,return-value]


# -- What an update is handed ------------------------------------------------------------------------------------------


def require_update(optimizer: Optimizer, w: Array, g: Array, state: State, step: int) -> None:
    """Raises ValueError unless w and g are fp32 of one shape, the state what slots() says of it, and step 1 or more;
    what may be cut anywhere is flat.

    A flat piece of a matrix, which comes with the state of a matrix, is refused: the rest of it would be missing.
    """
    where = f"{type(optimizer).__name__}.update"
    slots = optimizer.slots(w.shape)
    if state.keys() != slots.keys():
        if w.ndim != 2 and state.keys() == optimizer.slots((1, 1)).keys():
            raise ValueError(f"{where} was handed a flat piece {w.shape} of a matrix, and never updates part of one: "
                             "take layout='whole_matrices', or gather=True, which gathers the matrix for each update "
                             "and pays in bytes sent, or give this parameter an elementwise optimizer by a Group")
        raise ValueError(f"{where} asked for the state {_listed(slots)} of a tensor {w.shape}, and found "
                         f"{_listed(state)}; allocate what slots() names, as zeros")
    flat, own = optimizer.cut_of(w.shape) == "anywhere", w.shape
    for name, array in {"w": w, "g": g, **state}.items():
        shape = (w.size,) if flat else slots[name].shape if name in slots else own
        if array.dtype != FP32 or array.shape != shape:
            remedy = "hand it flat fp32 shards" if flat else "hand it the whole tensor in its own shape"
            raise ValueError(f"{where} asked for {name} in float32 of shape {shape}, and found {array.dtype} of shape "
                             f"{array.shape}; {remedy}")
    if not is_count(step) or step < 1:
        raise ValueError(f"{where} was asked for step {step}; count steps from 1, since at 0 the corrections "
                         "of the moments, 1 - beta**step, are 0")


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "nothing"
