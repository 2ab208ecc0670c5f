"""Memory that arrays leave behind is used again, where malloc can be told so by example."""

import platform
import subprocess
import sys

import pytest

# In a process of its own: what other tests have freed would tell malloc the same.
PROGRAM = """
import resource
import numpy as np
from zerosim.numerics import kernels as arithmetic

def step(kernels):
    arrays = [kernels.empty(2**23, np.uint8) for _ in range(5)]
    for array in arrays:
        array.fill(0)

kernels = arithmetic.NumpyKernels()
step(kernels)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step(kernels)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc adapts to what it sees freed")
def test_arrays_that_die_leave_their_memory_to_those_that_come() -> None:
    faults = int(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout)
    # Pages that the system had to find and clear: once each at most, where it would be ten times.
    assert faults < 5 * 2**23 // 4096
