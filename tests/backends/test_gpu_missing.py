"""What is said where CuPy, a driver, a GPU or NCCL is missing or does not fit: asked, found, and what to do.

Doubles stand for what is missing, except where the real CuPy, if it is installed, is asked for its signatures.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import zerosim as zs
from tests.backends import fake_nccl
from zerosim.backends.nccl.adapter import ID_NBYTES, NCCL, load
from zerosim.backends.nccl.cluster import together

# Of CuPy 14.2.0's compiled module with NCCL 2.32.3, as its docstrings have them (2026-11-21), less the C types.
SIGNATURES = {
    "send": "sendbuf count datatype peer stream", "recv": "recvbuf count datatype peer stream",
    "allReduce": "sendbuf recvbuf count datatype op stream", "allGather": "sendbuf recvbuf count datatype stream",
    "reduceScatter": "sendbuf recvbuf recvcount datatype op stream", "check_async_error": "", "abort": "",
    "reduce": "sendbuf recvbuf count datatype op root stream", "destroy": "", "initAll": "devices",
    "broadcast": "sendbuff recvbuff count datatype root stream"}
CONSTANTS = {"NCCL_INT8": 0, "NCCL_UINT8": 1, "NCCL_INT32": 2, "NCCL_UINT32": 3, "NCCL_INT64": 4, "NCCL_UINT64": 5,
             "NCCL_FLOAT16": 6, "NCCL_FLOAT32": 7, "NCCL_FLOAT64": 8, "NCCL_BFLOAT16": 9, "NCCL_SUM": 0, "NCCL_MAX": 2,
             "NCCL_MIN": 3}


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def cupy_that_finds(count: Any, *, built: int = 12090, driver: int = 13000) -> Any:
    """A CuPy whose CUDA lists so many GPUs, or raises."""
    def devices() -> int:
        if isinstance(count, str):
            raise CUDARuntimeError(count)
        return count

    runtime = SimpleNamespace(getDeviceCount=devices, CUDARuntimeError=CUDARuntimeError,
                              runtimeGetVersion=lambda: built, driverGetVersion=lambda: driver)
    return SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime, cublas=None, nvrtc=None))


def test_without_cupy_one_is_told_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(zs.BackendError, match=r"a GPU need CuPy, and importing it said: .*; pip install 'zerosim"):
        zs.NCCLCluster(2)


def test_a_cupy_that_cannot_be_imported_is_named_with_its_reason(monkeypatch, tmp_path) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1: cannot open', name='cupy._core')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(zs.BackendError, match=r"importing it said: libcuda.so.1: cannot open; pip install"):
        zs.NCCLCluster(2)


@pytest.mark.parametrize(("cupy", "said"), [
    (cupy_that_finds("cudaErrorNoDevice: no CUDA-capable device is detected"),
     r"CUDA found no GPU that can be used: cudaErrorNoDevice: .*; look at nvidia-smi, and at CUDA_VISIBLE_DEVICES"),
    (cupy_that_finds("cudaErrorInsufficientDriver: too old", driver=0), r"this machine has no NVIDIA driver; run the"),
    (cupy_that_finds("cudaErrorInsufficientDriver: too old", built=13000, driver=12040),
     r"built for CUDA 13.0, and this machine's driver knows CUDA 12.4 at most; install cupy-cuda12x, or a newer"),
    (cupy_that_finds(0), r"this machine shows 0 GPU\(s\), numbered from 0; CUDA_VISIBLE_DEVICES decides"),
])
def test_without_a_gpu_or_with_another_cuda_the_versions_are_named(monkeypatch, cupy: Any, said: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(zs.BackendError, match=said):
        zs.NCCLCluster(2)


@pytest.mark.parametrize("missing", ["cublas", "nvrtc"])
def test_a_library_of_cuda_that_is_missing_is_named_before_anything_runs(monkeypatch, missing: str) -> None:
    """As CuPy 14.2 does it: cuBLAS is missed where it is named, NVRTC where something is asked of it."""
    class Cuda:
        runtime, cublas = cupy_that_finds(1).cuda.runtime, None

        class nvrtc:
            @staticmethod
            def getVersion() -> tuple[int, int]:
                if missing == "nvrtc":
                    raise RuntimeError('Failure finding "libnvrtc.so.12"')
                return 12, 9

    def absent(self: Any) -> None:
        raise ImportError('Failure finding "libcublas.so.12"')

    if missing == "cublas":
        Cuda.cublas = property(absent)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="14.2.0", cuda=Cuda()))
    with pytest.raises(zs.BackendError, match=rf"need cuBLAS and NVRTC, .* found none \(.*lib{missing}\.so\.12.*pip"):
        zs.NCCLCluster(1)


def nccl_module(monkeypatch, text: str) -> None:
    """A cupy.cuda whose nccl is made by this text."""
    package, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cuda.__path__ = []  # type: ignore[attr-defined]

    class Loader:
        """Finds cupy.cuda.nccl and nothing else."""

        def find_spec(self, name: str, *_: object) -> Any:
            import importlib.util

            return importlib.util.spec_from_loader(name, self) if name == "cupy.cuda.nccl" else None  # type: ignore[arg-type]

        def create_module(self, spec: Any) -> None: ...

        def exec_module(self, module: Any) -> None:
            exec(text, vars(module))

    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", ModuleType("none"))  # so that what was there comes back
    monkeypatch.delitem(sys.modules, "cupy.cuda.nccl")
    monkeypatch.setattr(sys, "meta_path", [Loader(), *sys.meta_path])


def test_a_missing_nccl_is_told_with_cupys_reason_and_no_warning_escapes(monkeypatch) -> None:
    nccl_module(monkeypatch, "import warnings\navailable = False\nwarnings.warn('''\nnccl library could not be loaded."
                             "\n\nReason: ImportError (libnccl.so.2: cannot open shared object file)\n\nYou can''')")
    with pytest.raises(zs.BackendError) as caught:  # and not the warning: pytest makes errors of those
        NCCL()
    assert str(caught.value) == (
        "CuPy is installed, but NCCL is not to be had: ImportError (libnccl.so.2: cannot open shared object file). "
        "Install it: pip install nvidia-nccl-cu12 (for CuPy's cupy-cuda12x; nvidia-nccl-cu13 for cupy-cuda13x)")


def test_a_cupy_built_without_nccl_is_told_so(monkeypatch) -> None:
    nccl_module(monkeypatch, "available = False")
    with pytest.raises(zs.BackendError, match="NCCL is not to be had: CuPy was built without it"):
        NCCL()


def test_an_nccl_that_cannot_be_imported_is_named(monkeypatch) -> None:
    nccl_module(monkeypatch, "raise ImportError('undefined symbol: ncclCommSplit')")
    with pytest.raises(zs.BackendError, match=r"is not to be had: undefined symbol: ncclCommSplit\. Install it: "):
        NCCL()


class OneChannel:
    """A channel of whose other ranks one has said something."""

    index, size = 0, 3

    def __init__(self, others: str | None) -> None:
        self.others = others

    def everyone(self, value: Any) -> list[Any]:
        return [value, None, self.others]


def test_what_one_process_misses_every_process_is_told(monkeypatch) -> None:
    assert together(OneChannel(None), lambda: 7) == 7  # type: ignore[arg-type]
    with pytest.raises(zs.BackendError, match=r"rank 2 of 3 cannot take part: no GPU here"):
        together(OneChannel("no GPU here"), lambda: 7)  # type: ignore[arg-type]

    said = []
    for error in (zs.BackendError("CUDA", "mine is missing"), CUDARuntimeError("all CUDA devices are busy")):
        def missing(error: Exception = error) -> None:
            raise error

        channel = OneChannel("no GPU here")
        monkeypatch.setattr(channel, "everyone", lambda value: said.append(value) or [value, None, None])
        with pytest.raises(type(error), match=str(error)):
            together(channel, missing)  # type: ignore[arg-type]
    assert said == ["mine is missing", "all CUDA devices are busy"]


# -- the double beside the library ------------------------------------------------------------------------------------

def test_the_doubles_calls_have_the_librarys_parameters() -> None:
    for name, parameters in SIGNATURES.items():
        found = [p for p in inspect.signature(getattr(fake_nccl.Communicator, name)).parameters if p != "self"]
        assert found == parameters.split(), name


def test_the_doubles_constants_are_the_librarys() -> None:
    module = fake_nccl.fake_module(fake_nccl.World(None))  # type: ignore[arg-type]
    assert {name: getattr(module, name) for name in CONSTANTS} == CONSTANTS


def test_a_cupy_that_is_installed_has_the_signatures_that_are_recorded_here() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed, so what is recorded here of its NCCL is not asked again")
    try:
        nccl = load()
    except zs.BackendError as error:
        pytest.skip(str(error))
    for name, parameters in SIGNATURES.items():
        first = getattr(nccl.NcclCommunicator, name).__doc__.strip().split("\n")[0]
        inside = first.partition("(")[2].rpartition(")")[0].split(",")
        assert [p.split()[-1].split("=")[0] for p in inside if p.strip() != "self"] == parameters.split(), first
    assert {name: getattr(nccl, name) for name in CONSTANTS} == CONSTANTS
    assert len(nccl.get_unique_id()) == ID_NBYTES
