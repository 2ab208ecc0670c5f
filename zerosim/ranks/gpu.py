"""CuPy and a GPU to compute on: the one place that asks whether they are here, and says what is missing."""

from typing import Any

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
