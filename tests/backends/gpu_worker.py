"""A worker of the suite whose GPU, CuPy and NCCL are doubles: one process of ``DoubledGPUs``. Nothing here is a GPU."""

import os
import sys
from typing import Any

import numpy as np

from tests.backends import fake_cuda, fake_cupy, fake_links, fake_nccl, worker


def install(count: int) -> None:
    """Puts doubles of so many GPUs in the places of CuPy and NCCL, for the rest of this process' life."""
    from zerosim.numerics.arrays import to_host
    from zerosim.numerics.kernels import NumpyKernels

    module, cuda = fake_cuda.fake_module(count)
    module.cuda.nccl = fake_nccl.fake_module(fake_nccl.World(cuda), fake_links.LinkedCommunicator, fake_links.unique_id)
    replaced: Any = fake_cupy
    replaced.ndarray = fake_cuda.ndarray
    sys.modules.update({"cupy": module, "cupy.cuda": module.cuda, "cupy.cuda.nccl": module.cuda.nccl})

    from zerosim.backends.cupy.kernels import CupyKernels

    kernels: Any = CupyKernels  # in the order of NumPy's kernels, as in `fakes`
    kernels.row_products = lambda self, x, y: fake_cupy.asarray(NumpyKernels().row_products(to_host(x), to_host(y)))


if __name__ == "__main__":
    install(int(os.environ["DOUBLED_GPUS"]))
    with np.errstate(all="ignore"):
        worker.main(*sys.argv[1:])
