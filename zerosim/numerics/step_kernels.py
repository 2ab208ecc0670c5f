"""The loop of every elementwise optimizer step: blocks of the arrays, scratch of the same length, in place.

Scalars are Python floats, that is double, up to the moment when they meet an array; arrays are (n,), float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zerosim.numerics.blocks import Array, Scratch, spans
from zerosim.numerics.checks import check_state

_quiet = np.errstate(all="ignore")


class StepKernels:
    """The part of the kernels that takes optimizers' steps."""

    _scratch: Scratch

    @_quiet
    def step_blocks(self, function: Callable[..., object], *arrays: Array, scratch: int = 1) -> None:
        """Calls ``function(*blocks, *scratch)`` for each block of the arrays, which it may write to.

        All (n,) in float32; the scratch blocks hold whatever was in them. Raises ValueError for other arrays.
        """
        check_state("step_blocks", **{f"array {i}": x for i, x in enumerate(arrays)})
        for span in spans(arrays[0].size):
            blocks = [x[span] for x in arrays]
            function(*blocks, *(self._scratch.array(f"step {i}", blocks[0].size, np.float32) for i in range(scratch)))
