"""The host of a GPU: pinned memory, copies between the two beside what the device computes, and arithmetic there.

State that rests on the host (offload) lies in pinned memory, which a device can copy to and from by itself. Copies run
on a stream of their own: one begins when all is computed that was asked for before it, and what is asked for afterwards
goes on beside it. Whoever needs what it brings waits on the host. The numbers of an update made there are those that
the device would have: elements have one result, and sums of squares the device's order. Products of matrices, and sums
of rows, are in the order of NumPy's libraries.

Source: CUDA C++ Programming Guide, "Overlap of Data Transfer and Kernel Execution" and "Page-Locked Host Memory".
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.numerics.arrays import on_device, spans, words
from zerosim.numerics.checks import FP64, check_floating, work_type
from zerosim.numerics.kernels import NumpyKernels, do_nothing

# CuPy's pool of pinned memory hands out powers of two, from 512 on (cupy.cuda.PinnedMemoryPool of CuPy 14.2.0, tried).
# It spares what is made for a moment a call of CUDA; what is larger than a stretch of fp32 is made to measure.
SMALLEST_NBYTES, LARGEST_POOLED_NBYTES = 512, 1 << 26


class HostKernels(NumpyKernels):
    """NumPy's arithmetic with a GPU's order in sums of squares, so that a norm does not depend on where a gradient
    rests. ``block`` are the GPU's elements of a block, ``width`` gives the columns of its table of so many addends."""

    def __init__(self, block: int, width: Callable[[int], int]) -> None:
        super().__init__()
        self.BLOCK, self._width = block, width

    def sum_of_squares(self, x: Any, divisor: float = 1.0) -> float:
        """The sum of (x/divisor)², the quotient in float32 (float64 if x is), squares and sums in float64."""
        check_floating("sum_of_squares", x=x)
        row, width = x.reshape(-1), self._width(x.size)
        quotients, total = self.room("quotient", min(width, row.size), work_type(x)), np.zeros(width)
        with np.errstate(all="ignore"):
            for here in spans(row.size, width):
                quotient = quotients[:here.stop - here.start]
                self.divide_rounded(row[here], divisor, quotient)
                total[:len(quotient)] += np.square(quotient, dtype=FP64)
            while len(total) > 1:
                addends, total = total, np.zeros(self._width(len(total)))
                for here in spans(len(addends), len(total)):
                    total[:here.stop - here.start] += addends[here]
        return float(total[0])


class PinnedKernels(HostKernels):
    """The same, of arrays in pinned memory."""

    def __init__(self, cupy: Any, block: int, width: Callable[[int], int]) -> None:
        super().__init__(block, width)
        self._cuda = cupy.cuda

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """An array in pinned memory that is not initialized."""
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize * (prod(map(int, shape)) if isinstance(shape, tuple) else int(shape))
        if not nbytes:
            return np.empty(shape, dtype)
        cuda, is_pooled = self._cuda, nbytes <= LARGEST_POOLED_NBYTES
        memory = cuda.alloc_pinned_memory(nbytes) if is_pooled else cuda.PinnedMemoryPointer(
            cuda.PinnedMemory(nbytes), 0)
        return np.frombuffer(memory, np.uint8, nbytes).view(dtype).reshape(shape)

    def slack_nbytes(self, nbytes: int) -> int:
        """The bytes that an array from `empty` takes beyond its own nbytes."""
        if not 0 < nbytes <= LARGEST_POOLED_NBYTES:
            return 0
        power: int = max(SMALLEST_NBYTES, 1 << (nbytes - 1).bit_length())
        return power - nbytes


def event_after(cuda: Any, stream: Any) -> Any:
    """An event of CUDA after all that has been asked of a stream so far."""
    event = cuda.Event(disable_timing=True)
    event.record(stream)
    return event


class HostCopies:
    """Copies between one device and the pinned memory of its host, on a stream of their own."""

    def __init__(self, cupy: Any) -> None:
        self._cuda = cupy.cuda
        self._stream: Any = None  # made where the device is the thread's current one

    def begin(self, source: Any, out: Any) -> Callable[[], None]:
        """Begins out = source, bit for bit, after all that the device has been asked to compute; returns what waits
        until it is there. Until then both arrays are kept."""
        if not source.nbytes:
            return do_nothing
        self._stream = self._stream or self._cuda.Stream(non_blocking=True)
        self._stream.wait_event(event_after(self._cuda, self._cuda.get_current_stream()))
        if on_device(out):
            words(out).set(words(source), stream=self._stream)
        else:
            words(source).get(stream=self._stream, out=words(out), blocking=False)
        under_way = [(event_after(self._cuda, self._stream), source, out)]

        def wait() -> None:
            while under_way:
                under_way[-1][0].synchronize()
                under_way.pop()

        return wait
