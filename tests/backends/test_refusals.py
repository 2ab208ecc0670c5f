"""What is said where a library, a driver, a GPU or a launcher's word is missing or does not fit: asked, found, do.

Doubles stand for what is missing, except where the real CuPy, if it is installed, is asked for its signatures.
"""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from tests.backends import fake_nccl
from tests.support import ask, assert_refused
from zerosim.backends.nccl.adapter import ID_NBYTES, NCCL, load
from zerosim.backends.nccl.cluster import Card, check_cards, together


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def cupy_that_finds(count: Any = 1, *, version: str = "14.2.0", built: int = 12090, driver: int = 13000) -> Any:
    """A CuPy whose CUDA lists so many GPUs, or raises."""
    def devices() -> int:
        if isinstance(count, str):
            raise CUDARuntimeError(count)
        return count

    runtime = SimpleNamespace(getDeviceCount=devices, CUDARuntimeError=CUDARuntimeError,
                              runtimeGetVersion=lambda: built, driverGetVersion=lambda: driver)
    return SimpleNamespace(__version__=version, cuda=SimpleNamespace(runtime=runtime, cublas=None, nvrtc=None))


def lacking(library: str) -> Any:
    """A CuPy without a library of CUDA's, as CuPy 14.2 does it: cuBLAS is missed where it is named, NVRTC where
    something is asked of it."""
    def absent(*_: Any) -> None:
        raise (ImportError if library == "cublas" else RuntimeError)(f'Failure finding "lib{library}.so.12"')

    cuda = type("Cuda", (), {"runtime": cupy_that_finds().cuda.runtime, "cublas": None,
                             "nvrtc": SimpleNamespace(getVersion=absent)})
    if library == "cublas":
        cuda.cublas = property(absent)  # type: ignore[attr-defined]
    return SimpleNamespace(__version__="14.2.0", cuda=cuda())


@pytest.mark.parametrize(("found", "said"), [
    (None, r"ranks on a GPU need CuPy, and importing it said: .*; pip install 'zerosim\[gpu\]'"),
    (cupy_that_finds(version="13.6.0"), r"CuPy 14 or later, which has bfloat16, and found 13\.6\.0; pip install"),
    (cupy_that_finds("cudaErrorNoDevice: no CUDA-capable device is detected"),
     r"CUDA found no GPU that can be used: cudaErrorNoDevice: .*; look at nvidia-smi, and at CUDA_VISIBLE_DEVICES"),
    (cupy_that_finds("cudaErrorInsufficientDriver: too old", driver=0),
     r"this machine has no NVIDIA driver; run the program on a Cluster"),
    (cupy_that_finds("cudaErrorInsufficientDriver: too old", built=13000, driver=12040),
     r"built for CUDA 13.0, and this machine's driver knows CUDA 12.4 at most; install cupy-cuda12x, or a newer"),
    (cupy_that_finds(0), r"device=0 was asked for, and this machine shows 0 GPU\(s\), numbered from 0; "
                         r"CUDA_VISIBLE_DEVICES decides"),
    (lacking("cublas"), r"need cuBLAS and NVRTC, .* found none \(.*libcublas\.so\.12.*pip install"),
    (lacking("nvrtc"), r"need cuBLAS and NVRTC, .* found none \(.*libnvrtc\.so\.12.*pip install"),
], ids=lambda value: value[:30] if isinstance(value, str) else "")
@pytest.mark.parametrize("kind", [zs.CuPyCluster, zs.NCCLCluster])
def test_what_cupy_lacks_is_named_with_what_to_do(monkeypatch, kind: Any, found: Any, said: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", found)
    assert_refused(lambda: kind(2), said, zs.BackendError)


def test_a_cupy_that_cannot_be_imported_is_named_with_its_reason(monkeypatch, tmp_path) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1: cannot open', name='cupy._core')")
    monkeypatch.syspath_prepend(tmp_path)
    assert_refused(lambda: zs.NCCLCluster(2), r"importing it said: libcuda.so.1: cannot open; pip install",
                   zs.BackendError)


def warns() -> Any:
    """What CuPy says where it does not find NCCL."""
    warnings.warn("\nnccl library could not be loaded.\n\nReason: ImportError (libnccl.so.2: cannot open shared object "
                  "file)\n\nYou can", stacklevel=1)
    return SimpleNamespace(available=False)


def raises() -> Any:
    raise ImportError("undefined symbol: ncclCommSplit")


@pytest.mark.parametrize(("found", "said"), [
    (warns, r"^CuPy is installed, but NCCL is not to be had: ImportError \(libnccl.so.2: cannot open shared object "
            r"file\). Install it: pip install nvidia-nccl-cu12 \(for CuPy's cupy-cuda12x; nvidia-nccl-cu13 for "
            r"cupy-cuda13x\)$"),  # and no warning escapes: pytest makes errors of those
    (lambda: SimpleNamespace(available=False), "NCCL is not to be had: CuPy was built without it"),
    (raises, r"is not to be had: undefined symbol: ncclCommSplit\. Install it: "),
])
def test_a_missing_nccl_is_told_with_its_reason(monkeypatch, found: Callable[[], Any], said: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", type("Cuda", (), {"nccl": property(lambda self: found())})())
    assert_refused(NCCL, said, zs.BackendError)


def test_what_one_process_misses_every_process_is_told() -> None:
    told: list[Any] = []

    def channel(others: str | None) -> Any:
        return SimpleNamespace(index=0, size=3, everyone=lambda value: [told.append(value) or value, None, others])

    def missing(error: Exception) -> Callable[[], Any]:
        def find() -> None:
            raise error
        return find

    assert together(channel(None), lambda: 7) == 7
    assert_refused(lambda: together(channel("no GPU here"), lambda: 7), "rank 2 of 3 cannot take part: no GPU here",
                   zs.BackendError)
    for error in (zs.BackendError("CUDA", "mine is missing"), CUDARuntimeError("all CUDA devices are busy")):
        assert_refused(lambda error=error: together(channel(None), missing(error)), str(error), type(error))
    assert told == [None, None, "mine is missing", "all CUDA devices are busy"]


def test_a_card_is_told_by_its_uuid_and_not_by_a_host_name_that_two_containers_may_have() -> None:
    def check(others: list[tuple[str, str, str]], *, share: bool = False) -> None:
        check_cards(SimpleNamespace(size=3, everyone=lambda mine: [mine, *others]), Card("aa", "0000:00:00.0"),
                    share=share)

    here = socket.gethostname()
    check([("bb", "0000:00:00.0", here), ("aa", "0000:01:00.0", here)])  # a UUID may have been cut off
    same = [("bb", "0000:00:00.0", here), ("aa", "0000:00:00.0", "another")]
    assert_refused(lambda: check(same), rf"ranks \[0, 2\] of 3 have one GPU, 0000:00:00\.0 of {here}, and NCCL wants")
    check(same, share=True)


# -- who has started this process, and what it is asked for ------------------------------------------------------------

PLACE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("arguments", "variables", "error", "said"), [
    (("gloo",), {}, ValueError, r"no backend 'gloo'; choose one of mpi, nccl"),
    (("mpi", True), {}, ValueError, r"share_devices=True is about GPUs, of which ranks over MPI have none"),
    (("nccl",), {**PLACE, "MASTER_PORT": ""}, zs.BackendError, r"as torchrun sets them, and MASTER_PORT is missing"),
    (("nccl",), PLACE, zs.BackendError, "ranks on a GPU need CuPy"),  # the channel of a lone rank needs nobody
    *((("mpi",), {name: "3"}, zs.BackendError, rf"a launcher has started 3 processes \({name}=3\), but mpi4py's MPI")
      for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")),  # as under another MPI's mpiexec
    # As under srun that speaks no PMI, or one that the library does not know.
    *(((backend,), {"SLURM_STEP_NUM_TASKS": "3", **pmi}, zs.BackendError,
       r"a launcher has started 3 processes \(SLURM_STEP_NUM_TASKS=3\), but .* alone; say srun --mpi=pmi2 for MPICH's "
       r"library, srun --mpi=pmix for Open MPI's") for backend, pmi in
      (("mpi", {}), ("mpi", {"PMI_SIZE": "3"}), ("nccl", {}))),
], ids=str)
def test_a_connection_that_cannot_be_had_is_refused(monkeypatch, arguments: Any, variables: dict[str, str],
                                                   error: Any, said: str) -> None:
    if "launcher" in said:
        pytest.importorskip("mpi4py", reason="mpi4py is not installed; pip install 'zerosim[mpi]'")
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_refused(lambda: zs.connect(arguments[0], share_devices=arguments[1:] == (True,)), said, error)


def test_one_process_is_a_world_of_one_rank_whatever_a_launcher_calls_its_count(monkeypatch) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed; pip install 'zerosim[mpi]'")
    for name, count in (("PMI_SIZE", ""), ("PMI_SIZE", "no number"), ("SLURM_STEP_NUM_TASKS", "1"), ("PMI_SIZE", "1"),
                        ("SLURM_STEP_NUM_TASKS", "3")):  # in the end, as mpiexec -n 1 in a step of 3 tasks
        monkeypatch.setenv(name, count)
        assert len(zs.connect().run(lambda rank: rank.size)) == 1


def test_a_missing_mpi_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert_refused(zs.connect, r"^ranks as processes need mpi4py, which is not installed here; "
                               r"pip install 'zerosim\[mpi\]'$", zs.BackendError)


@pytest.mark.parametrize("device", [-1, 1.0, True, "0", None])
def test_a_device_is_a_number(device: Any) -> None:
    assert_refused(lambda: zs.CuPyCluster(2, device=device), r"must be the number of a GPU")


def test_native_where_no_library_is_says_where_there_is_one() -> None:
    assert_refused(lambda: zs.Cluster(3).run(lambda rank: rank.all_reduce(np.ones(4, np.float32), algorithm="native")),
                   "asks MPI or NCCL for its own, but the ranks of one process have no such library; choose one of "
                   "ring, doubling")


JOB = "tests/backends/job.py"


@pytest.mark.parametrize(("words", "said"), [
    ((f"{JOB}:sums", "--ranks", "2"), "--ranks 2 is for ranks in one process; with mpi the launcher says how many"),
    ((f"{JOB}:sum",), "has no function 'sum'; it has train, sums, stumbles"),
    (("nothing.py:sums",), "no file 'nothing.py' to take the function 'sums' from"),
    ((JOB,), "write FILE.py:FUNCTION, as in train.py:program"),
    ((f"{JOB}:sums", "--with", "3"), "'3' sets nothing; write NAME=VALUE, as in stage=3"),
    ((f"{JOB}:sums", "--with", "n=3"), "--with sets 'n', which the program does not take beside its rank"),
    ((f"{JOB}:sums", "--backend", "mpl"), "no backend 'mpl'; choose one of"),
    ((f"{JOB}:sums", "--backend", "cupy"), "pip install 'zerosim[gpu]'"),
    ((f"{JOB}:sums", "--backend", "nccl"), "pip install 'zerosim[gpu]'"),
], ids=lambda value: str(value)[-20:])
def test_wrong_input_is_one_clear_line_and_exit_code_2(monkeypatch, words: tuple[str, ...], said: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    if "--ranks" in words or "--backend" not in words:
        monkeypatch.setenv("PMI_SIZE", "1")  # as under a launcher
    done = ask("run", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("zerosim run: ")


def test_a_process_that_srun_has_started_beside_others_is_no_world_of_its_own(monkeypatch) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed; pip install 'zerosim[mpi]'")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    done = ask("run", f"{JOB}:sums")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "a launcher has started 2 processes (SLURM_STEP_NUM_TASKS=2)" in done.stderr
    assert ask("run", f"{JOB}:sums", "--backend", "in-process").exit_code == 0


def test_a_process_of_a_job_is_no_world_of_its_own(monkeypatch) -> None:
    for name, value in {**PLACE, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    done = ask("run", "train.py:program")
    assert done.exit_code == 2
    assert "this process was started as rank 1 of 2 (RANK and WORLD_SIZE), by what is no MPI; say --backend" in (
        done.stderr)


@pytest.mark.gpu
def test_the_doubles_calls_and_constants_are_those_of_a_cupy_that_is_installed(cupy: Any) -> None:
    try:
        nccl = load()
    except zs.BackendError as error:
        pytest.skip(str(error))
    for name, parameters in (fake_nccl.CALLS | fake_nccl.OTHERS).items():
        first = getattr(nccl.NcclCommunicator, name).__doc__.strip().split("\n")[0]
        inside = first.partition("(")[2].rpartition(")")[0].split(",")
        assert [p.split()[-1].split("=")[0] for p in inside if p.strip() != "self"] == parameters.split(), first
    assert {name: getattr(nccl, name) for name in fake_nccl.CONSTANTS} == fake_nccl.CONSTANTS
    assert len(nccl.get_unique_id()) == ID_NBYTES
