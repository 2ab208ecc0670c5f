"""Memory that arrays leave behind is used again, where malloc can be told so by example."""

import platform

import numpy as np
import pytest

from zerosim.numerics.kernels import NumpyKernels


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc adapts to what it sees freed")
def test_arrays_that_die_leave_their_memory_to_those_that_come() -> None:
    import resource

    def faults() -> int:
        """Pages that the system had to find and clear."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    kernels, pages = NumpyKernels(), 8 * 2**20 // 4096
    kernels.empty(8 * 2**20, np.uint8).fill(0)
    before = faults()
    for _ in range(20):
        kernels.empty(8 * 2**20, np.uint8).fill(0)
    # Other arrays may lie in between and the first few may still move; 20 times all pages is what it took.
    assert faults() - before < 5 * pages
