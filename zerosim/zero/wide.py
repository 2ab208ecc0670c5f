"""Wide stand-ins: arithmetic in fp32 on arrays that rest in fewer bits."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

FP32 = np.dtype(np.float32)


@contextmanager
def wide(kernels: Any, empty: Callable[[str, tuple[int, ...]], np.ndarray],
         at_rest: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The arrays in fp32: those that are so already themselves, the others as copies, in ``empty(name, shape)``.

    On exit what was written to a copy is rounded to its array's format, to nearest even, once.
    """
    copies = {name: array if array.dtype == FP32 else empty(name, array.shape) for name, array in at_rest.items()}
    narrow = [name for name, copy in copies.items() if copy is not at_rest[name]]
    for name in narrow:
        kernels.cast_pack(at_rest[name], copies[name])
    yield copies
    for name in narrow:
        kernels.cast_pack(copies[name], at_rest[name])
