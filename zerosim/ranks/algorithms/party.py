"""What an algorithm sees of the world: its index, the cut, a few buffers, and arithmetic rounded like the wire's.

Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerosim.numerics.blocks import spans
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.null_kernels import NullKernels
from zerosim.ranks.call import Call

Array = Any  # numpy's, or an array without data when a call is only expanded


@dataclass(frozen=True, slots=True)
class Exchange:
    """The one primitive: send to one rank while receiving from one, either half possibly absent.

    ``out`` fixes how many elements arrive. ``chunks`` are the numbers of the chunks that ``send`` carries.
    """

    send: Array | None
    to: int | None
    out: Array | None
    source: int | None
    chunks: tuple[int, ...] = ()


Steps = Generator[Exchange, None, None]
Buffer = tuple[int, np.dtype[Any]]  # elements, dtype


@dataclass(slots=True)
class Party:
    """One rank inside one call. ``in_place``: its input already lies where the algorithm would copy it."""

    call: Call
    index: int
    kernels: NumpyKernels | NullKernels
    buffers: list[Array] = field(default_factory=list)
    in_place: bool = False

    @property
    def size(self) -> int:
        return self.call.ranks

    @property
    def root(self) -> int:
        return self.call.root

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.call.dtype

    @property
    def wire(self) -> np.dtype[Any]:
        return self.call.wire_dtype

    def neighbor(self, distance: int) -> int:
        """The rank ``distance`` places further on the ring."""
        return (self.index + distance) % self.size

    def bounds(self, chunk: int, count: int = 1) -> slice:
        """Where ``count`` consecutive chunks from ``chunk`` on lie in the whole vector."""
        return slice(self.call.cut[chunk], self.call.cut[chunk + count])

    def length(self, chunk: int) -> int:
        """Elements of one chunk; ``chunk`` counts modulo N."""
        low, high = self.call.cut[chunk % self.size:chunk % self.size + 2]
        return high - low

    def chunk(self, vector: Array, chunk: int) -> Array:
        """A view of one chunk of the whole vector; ``chunk`` counts modulo N."""
        return vector[self.bounds(chunk % self.size)]

    def copy(self, source: Array, out: Array) -> None:
        """Copies, casting to the dtype of ``out`` with one rounding; nothing to do when both are the same memory."""
        if source is not out:
            self.kernels.cast_pack(source, out)

    def copy_whole(self, source: Array, out: Array) -> None:
        """Copies the rank's whole vector to where it is worked on, unless it lies there already."""
        if not self.in_place and source is not out:
            self.kernels.cast_pack(source, out)

    def combine(self, a: Array, b: Array, out: Array) -> None:
        """out = a + b rounded once to out's format (or their maximum, minimum); b is cast to that format first."""
        casts = b.dtype != out.dtype and isinstance(out, np.ndarray)
        # A block at a time, since the cast takes memory that no ledger has.
        for here in spans(len(out)) if casts else (slice(None),):
            match self.call.op:
                case "max":
                    self.kernels.maximum_rounded(a[here], b[here], out[here])
                case "min":
                    self.kernels.minimum_rounded(a[here], b[here], out[here])
                case _:
                    self.kernels.add_rounded(a[here], b[here], out[here])
