"""The simulator on one GPU: what it needs, and what is said where that is missing; N ranks whose arrays are CuPy's."""

from contextlib import AbstractContextManager
from typing import Any

from zerosim.numerics.checks import is_count
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.cluster import Cluster, Processor
from zerosim.ranks.errors import BackendError

INSTALL = "pip install 'zerosim[gpu]' brings it for CUDA 12; for CUDA 13 install 'cupy-cuda13x[ctk]' instead"
OLDEST = 14  # CuPy's first with bfloat16


def cupy_on(device: int) -> Any:
    """The module cupy, if it can compute on this device. Raises BackendError with what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise BackendError("CuPy", f"ranks on a GPU need CuPy, and importing it said: {error}; {INSTALL}") from error
    if int(cupy.__version__.split(".")[0]) < OLDEST:
        raise BackendError("CuPy", f"ranks on a GPU need CuPy {OLDEST} or later, which has bfloat16, and found "
                                   f"{cupy.__version__}; {INSTALL}")
    _require_device(cupy, device)
    try:
        cupy.cuda.cublas  # noqa: B018  # loaded when it is first named
        cupy.cuda.nvrtc.getVersion()  # loaded when it is first asked for something
    except (ImportError, AttributeError, RuntimeError) as error:
        raise BackendError("CUDA", "ranks on a GPU need cuBLAS and NVRTC, CUDA's libraries, and CuPy found none "
                                   f"({error}); {INSTALL}") from error
    return cupy


def cupy_kernels() -> NumpyKernels:
    """The arithmetic of the current device; its module is imported where a device is there."""
    from zerosim.backends.cupy.kernels import CupyKernels

    return CupyKernels()


def device_count(cupy: Any) -> int:
    """The GPUs that CUDA shows to this process."""
    count: int = cupy.cuda.runtime.getDeviceCount()
    return count


def _require_device(cupy: Any, device: int) -> None:
    runtime = cupy.cuda.runtime
    driver, built_for = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not driver:
        raise BackendError("CUDA", "ranks on a GPU need one, and this machine has no NVIDIA driver; run the program "
                                   "on a Cluster, whose arrays are NumPy's")
    if driver // 1000 < built_for // 1000:
        raise BackendError("CUDA", f"CuPy is built for CUDA {cuda_text(built_for)}, and this machine's driver knows "
                                   f"CUDA {cuda_text(driver)} at most; install cupy-cuda{driver // 1000}x, or a newer "
                                   "driver")
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise BackendError("CUDA", f"CUDA found no GPU that can be used: {error}; look at nvidia-smi, and at "
                                   "CUDA_VISIBLE_DEVICES, which hides some") from error
    if device >= count:
        raise BackendError("CUDA", f"device={device} was asked for, and this machine shows {count} GPU(s), numbered "
                                   "from 0; CUDA_VISIBLE_DEVICES decides which are shown")


def cuda_text(number: int) -> str:
    """``12.9`` for 12090."""
    return f"{number // 1000}.{number % 1000 // 10}"


class CuPyDevice(Processor):
    """One GPU."""

    def __init__(self, cupy: Any, number: int) -> None:
        self.cupy, self.number = cupy, number

    def kernels(self, count: int) -> list[NumpyKernels]:
        """All ranks share them, as only one of them runs at a time."""
        with self.scope():
            return [cupy_kernels()] * count

    def scope(self) -> AbstractContextManager[Any]:
        """The device is selected: CuPy's current one belongs to the thread."""
        selected: AbstractContextManager[Any] = self.cupy.cuda.Device(self.number)
        return selected


def gpu_of(local_rank: int, number: int) -> CuPyDevice:
    """The GPU of a process that has this place on its machine; the one of that number, if it is not below 0.

    Raises BackendError where CuPy or the GPU is missing.
    """
    cupy = cupy_on(max(0, number))
    return CuPyDevice(cupy, local_rank % device_count(cupy) if number < 0 else number)


class CuPyCluster(Cluster):
    """N ranks on one GPU, of which exactly one runs at a time: the same program, memory and trace as on a Cluster.

    ``device`` is the GPU's number. The hub, the algorithms and the traces are those of every cluster; ``rank.xp`` is
    CuPy. Element by element the bits are those of a Cluster. Sums have a GPU's own order, and products of matrices the
    library's, within the bounds that `backends.cupy.kernels` states: stages and ranks agree in bits, as on a Cluster.
    All ranks' bytes lie in CuPy's pool; ``capacity_nbytes`` is what each rank may hold of it. What rests on the host
    (offload) lies in pinned memory. Flags and counts of some bytes that travel on the host are in the memories too, as
    on a Cluster, and at rest there are none.
    """

    def __init__(self, ranks: int, *, device: int = 0, capacity_nbytes: int | None = None, debug: bool = False,
                 seed: int = 0, blas_threads: int = 1, trace_rows: int | None = None) -> None:
        """Raises BackendError where CuPy, its libraries, a driver that fits or the device is missing, and
        ValueError for what is no number of a device."""
        if not is_count(device) or device < 0:
            raise ValueError(f"device={device!r} must be the number of a GPU, 0 or more; 0 is the first")
        self.device, self._where = device, f" on device {device}"
        super().__init__(ranks, capacity_nbytes=capacity_nbytes, debug=debug, seed=seed, blas_threads=blas_threads,
                         trace_rows=trace_rows, processor=CuPyDevice(cupy_on(device), device))
