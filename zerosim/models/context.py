"""What a layer is handed besides its arrays: an array module, a policy, kernels and a place to allocate.

A context knows nothing of ranks. A layer asks it for memory and tells it what it computed; who charges the
one and adds up the other is the caller's matter. The same layer runs alone (`Context.standalone`) and inside
a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from zerosim.numerics import random
from zerosim.numerics.kernels import NumpyKernels

if TYPE_CHECKING:
    from zerosim.models.units import Unit

Gradients = dict[str, np.ndarray]


class ComputePolicy(Protocol):
    """The part of a precision policy that layers read."""

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype in which weights, activations and their gradients are at rest."""

    @property
    def output_dtype(self) -> np.dtype:
        """The dtype of the model's last output."""

    @property
    def matmul(self) -> str | None:
        """"fp8" where the operands of matrix products are rounded to fp8."""


class Workspace(Protocol):
    """Where arrays that outlive a kernel come from: a rank's memory, or plain allocation."""

    def alloc(self, shape: int | tuple[int, ...], dtype: Any, kind: str, name: str = "") -> np.ndarray:
        """A new uninitialized array, charged to ``kind``."""


class Note(Protocol):
    """Hears what was computed: floating-point operations, and bytes read and written."""

    def __call__(self, *, flops: int = 0, nbytes: int = 0) -> None:
        """Adds to what has been noted before."""


@dataclass(frozen=True, slots=True)
class PlainWorkspace:
    """A workspace that charges nobody."""

    kernels: NumpyKernels

    def alloc(self, shape: int | tuple[int, ...], dtype: Any, kind: str, name: str = "") -> np.ndarray:
        """A new uninitialized array; ``kind`` and ``name`` are for workspaces that keep books."""
        return self.kernels.empty(shape, np.dtype(dtype))


def note_nothing(*, flops: int = 0, nbytes: int = 0) -> None:
    """Hears what was computed and forgets it."""


def observe_nothing(weight: str, x: np.ndarray, dy: np.ndarray) -> None:
    """Hears a linear layer's input (M, I) and output gradient (M, O), and forgets them."""


def draw_for(seed: int, step: int, number: int, name: str, span: slice) -> np.ndarray:
    """Some of the random words of micro-batch ``number`` of a step, uint32.

    The number is part of the key: no two micro-batches share a word, however many each of them draws.
    """
    return random.bits((seed, f"dropout of micro-batch {number}", step, name), span.start, span.stop - span.start)


def draw_first(name: str, count: int, span: slice) -> np.ndarray:
    """Some of ``count`` random words, uint32: those of the first micro-batch of the first step."""
    return draw_for(0, 0, 0, name, span)


@dataclass(frozen=True, slots=True)
class Context:
    """Array module, policy, kernels and workspace of the layers that are called with it.

    ``gradients(unit)`` says where the gradients of a unit's parameters are to be written: one array of the
    parameter's shape per name, in the parameter's own format (the compute dtype, or its group's).
    """

    xp: Any
    policy: ComputePolicy
    kernels: NumpyKernels
    workspace: Workspace
    note: Note
    gradients: Callable[[Unit], Gradients]
    draw: Callable[[str, int, slice], np.ndarray] = draw_first
    observe: Callable[[str, np.ndarray, np.ndarray], None] = observe_nothing
    keep: str = "all"

    @classmethod
    def standalone(cls, policy: ComputePolicy, kernels: NumpyKernels | None = None) -> Context:
        """A context without ranks: plain allocation, fresh gradients at each backward, nothing noted."""
        kernels = kernels or NumpyKernels()
        workspace = PlainWorkspace(kernels)

        def fresh(unit: Unit) -> Gradients:
            return {name: workspace.alloc(shape, policy.compute_dtype, "unit_gradient", name)
                    for name, shape in unit.shapes.items()}

        return cls(np, policy, kernels, workspace, note_nothing, fresh)

    @property
    def dtype(self) -> np.dtype:
        """The compute dtype: that of every value at rest."""
        return self.policy.compute_dtype

    @property
    def wide_dtype(self) -> np.dtype:
        """The dtype of arithmetic inside a kernel: float64 where values rest in float64, else float32."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def empty(self, shape: int | tuple[int, ...], kind: str = "activation", dtype: Any = None,
              name: str = "") -> np.ndarray:
        """A new uninitialized array charged to ``kind``; in the compute dtype unless told otherwise."""
        return self.workspace.alloc(shape, self.dtype if dtype is None else dtype, kind, name)

    @property
    def output_dtype(self) -> np.dtype:
        """The dtype of the model's last output, which the loss reads."""
        return self.policy.output_dtype

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, bias: np.ndarray | None = None,
               gradient: str | None = None) -> None:
        """out (M, N) = a (M, K) @ b (K, N) + bias (N,), added up in fp32, rounded once; and what it cost.

        ``gradient`` ("a" or "b") names the operand that is a gradient: in the fp8 experiment it is rounded to e5m2,
        other operands to e4m3, each with a scale of its own. An operand may have been widened: what is read is what is
        at rest, in the compute dtype.
        """
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1] + (0 if bias is None else out.size)
        at_rest = (a.size + b.size) * self.dtype.itemsize
        self.note(flops=flops, nbytes=at_rest + out.nbytes + (bias.nbytes if bias is not None else 0))
        if self.policy.matmul == "fp8":
            a, b = (self.kernels.quantized(x, "fp8_e5m2" if gradient == name else "fp8_e4m3")
                    for name, x in (("a", a), ("b", b)))
        self.kernels.matmul(a, b, bias=bias, out=out)

    def cast(self, x: np.ndarray, kind: str = "input", name: str = "") -> np.ndarray:
        """``x`` in the compute dtype: itself where it is so already, else a new array, nearest even."""
        if x.dtype == self.dtype:
            return x
        out = self.empty(x.shape, kind, name=name)
        self.kernels.cast_pack(x, out)
        return out
