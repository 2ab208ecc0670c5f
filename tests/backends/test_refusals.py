"""What is refused, and what is said: where a library, a driver, a GPU or a launcher's word is missing or does not fit,
and what no GPU can be asked for. Asked, found, do.

Doubles stand for what is missing, except where the real CuPy, if it is installed, is asked for its signatures.
"""

from __future__ import annotations

import socket
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from tests.backends import compiled_kernels, doubles, fake_nccl
from tests.backends.fake_cupy import CUDARuntimeError
from tests.ranks import programs
from tests.ranks.asking import ask as asked
from tests.support import ask, assert_command_refuses, assert_refused
from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.backends.nccl.adapter import NCCL, load
from zerosim.backends.nccl.cluster import Card, check_cards, together
from zerosim.backends.processes.cluster import OwnResult
from zerosim.numerics import blockwise


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
        cuda.cublas = property(absent)
    return SimpleNamespace(__version__="14.2.0", cuda=cuda())


def cuda_whose_nccl(find: Callable[[], Any]) -> dict[str, Any]:
    """The modules of a CuPy that looks for NCCL so."""
    return {"cupy": ModuleType("cupy"), "cupy.cuda": type("Cuda", (), {"nccl": property(lambda self: find())})()}


def warns() -> Any:
    """What CuPy says where it does not find NCCL."""
    warnings.warn("\nnccl library could not be loaded.\n\nReason: ImportError (libnccl.so.2: cannot open shared object "
                  "file)\n\nYou can", stacklevel=1)
    return SimpleNamespace(available=False)


def raises() -> Any:
    raise ImportError("undefined symbol: ncclCommSplit")


def traced(function: Callable[..., Any]) -> None:
    """A function of elements, on two blocks that are one."""
    kernels = CupyKernels()
    x = kernels.uploaded(np.ones(3, np.float32))
    kernels.elementwise(function, x, out=x)


def on_the_host(rank: zs.Rank) -> None:
    x = np.zeros(4, np.float32)
    rank.kernels.multiply_rounded(x, 2.0, x)


def inf_in_a_matrix() -> None:
    kernels = CupyKernels()
    a = kernels.uploaded(np.full((12, 12), np.inf, np.float32))
    kernels.symmetric_power(a, -0.25, 1e-4, a)


def two_at_once(given: np.ndarray) -> None:
    """An array (2, 3), or a number (2,) for each row, is added to fp8 in float16."""
    kernels = CupyKernels()
    x, out = kernels.uploaded(given), kernels.empty((2, 3), ml_dtypes.float8_e5m2)
    kernels.apply(np.add, [out, blockwise.PerRow(x) if x.ndim == 1 else x], out, np.dtype(np.float16))


def of_two_kinds(rank: zs.Rank, call: str) -> None:
    """One rank brings an array on its device, or one of two arrays lies on the host."""
    here = np.ones(4, np.float32)
    there = rank.xp.asarray(here)
    match call:
        case "collective":
            _ = rank.all_reduce(there if rank.index else here)
        case "message":
            rank.send(here, 1) if rank.index == 0 else rank.recv(there, 0)
        case "exchange":
            rank.exchange(here, 1 - rank.index, there, 1 - rank.index)


def reducing(rank: zs.Rank, operation: str, algorithm: str, dtype: Any) -> None:
    asked(rank, operation, algorithm, programs.vector(rank, 4, dtype), None, op="sum")


ON_CUPY = [
    (None, r"ranks on a GPU need CuPy, and importing it said: import of cupy halted; .*; pip install 'zerosim\[gpu\]'"),
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
    (lacking("nvrtc"), r"need cuBLAS and NVRTC, .* found none \(.*libnvrtc\.so\.12.*pip install")]
ON_NCCL = [
    (warns, r"^CuPy is installed, but NCCL is not to be had: ImportError \(libnccl.so.2: cannot open shared object "
            r"file\). Install it: pip install nvidia-nccl-cu12 \(for CuPy's cupy-cuda12x; nvidia-nccl-cu13 for "
            r"cupy-cuda13x\)$"),  # and no warning escapes: pytest makes errors of those
    (lambda: SimpleNamespace(available=False), "NCCL is not to be had: CuPy was built without it"),
    (raises, r"is not to be had: undefined symbol: ncclCommSplit\. Install it: ")]
OF_TWO_GPUS = [
    (lambda: zs.NCCLCluster(3), r"3 ranks need 3 GPUs, and this machine has 2; run 2 ranks, run them on one card with "
                                r"zs.CuPyCluster\(3\)"),
    (lambda: zs.NCCLCluster(2, devices=[0, 2]),
     r"devices=\[0, 2\] must name a device from 0 to 1 for each of 2 .* no device 2"),
    (lambda: zs.NCCLCluster(2, devices=[0]),
     r"must name a device from 0 to 1 for each of 2 ranks, but 1 are named"),
    (lambda: zs.NCCLCluster(2, devices=[1, 1]),
     r"gives device 1 to ranks \[0, 1\], where NCCL wants a GPU for each rank; .* share_devices=True, with "
     r"NCCL_MULTI_RANK_GPU_ENABLE=1"),
    (lambda: zs.NCCLCluster(2).run(reducing, "reduce_scatter", "native", ml_dtypes.float8_e4m3fn),
     r"reduce_scatter by 'native' of float8_e4m3fn: through CuPy NCCL adds"),
    (lambda: zs.NCCLCluster(2).run(reducing, "all_reduce", "native", np.int16), r"all_reduce by 'native' of int16"),
    (lambda: zs.NCCLCluster(2).run(of_two_kinds, "exchange"), r"was given an array on a device and one on the host"),
    (lambda: zs.NCCLCluster(2).run(of_two_kinds, "collective"),
     r"rank 1 brought arrays on a device and rank 0 on the host", zs.MismatchError),
    (lambda: zs.NCCLCluster(2).run(of_two_kinds, "message"),
     r"rank 0 sends from the host to rank 1, which receives on a device", zs.MismatchError),
    (lambda: zs.NCCLCluster(3, share_devices=True).run(reducing, "all_reduce", "ring", np.float32), "duplicate GPU",
     fake_nccl.NcclError),  # NCCL's last word
    (lambda: zs.CuPyCluster(1).run(on_the_host), r"a NumPy array \(4,\) of type float32.*rank\.xp\.asarray"),
    (inf_in_a_matrix, r"symmetric_power found inf or NaN in a matrix \(12, 12\)"),
    (lambda: two_at_once(np.ones((2, 3), np.float16)), "float16 computes two neighboring elements of fp8 at once; it "
     "was asked for arrays of float8_e5m2, float16, float8_e5m2; compute in float32"),
    (lambda: two_at_once(np.ones(2, ml_dtypes.float8_e5m2)), "float8_e5m2, spread float8_e5m2, float8_e5m2; compute")]
OF_A_TRACE = [
    (lambda x, y: np.sin(x, out=y), r"np.sin, which cannot be written into one CUDA kernel"),
    (lambda x, y: np.add.reduce(x), r"np.add.reduce"),
    (lambda x, y: np.where(x > 0, x, y), r"np.where"),
    (lambda x, y: np.add(x * np.float64(0.1), x, out=y), r"np.multiply of a block of float32 .* needs out="),
    (lambda x, y: 1 if x > 0 else 2, r"whether a comparison"),
    (lambda x, y: 1 if x else 2, r"whether a block is true"),
    (lambda x, y: x.sum(), r"has no sum", AttributeError),
    (lambda x, y: y.__setitem__(0, 1.0), r"the place \[0\]"),
    (lambda x, y: np.add(x, np.ones(3, np.float32), out=y), r"an array \(3,\) beside its blocks")]

PLACE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
OF_A_JOB = [
    ({"MASTER_ADDR": ""}, r"needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT .* as torchrun sets them, and MASTER_ADDR "
                          "is missing"),
    ({"RANK": "", "MASTER_PORT": ""}, r"and RANK and MASTER_PORT are missing"),
    ({"RANK": "one"}, r"RANK='one' in the environment must be a whole number"),
    ({"RANK": "4", "WORLD_SIZE": "4"}, r"RANK=4 is none of the ranks 0 to 3 of WORLD_SIZE=4"),
    ({"MASTER_PORT": "65535"}, r"MASTER_PORT=65535 must be a port whose next one is a port too"),
    *(({"MASTER_ADDR": "node-1", **more}, rf"on several machines \({said}.* need a secret, .* set ZEROSIM_JOB_KEY")
      for more, said in (({}, "MASTER_ADDR=node-1, and no LOCAL_WORLD_SIZE"),
                         ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 of WORLD_SIZE=4"))),
    ({"ZEROSIM_JOB_KEY": "secret"}, "ZEROSIM_JOB_KEY has 6 characters, which somebody else may guess"),
    ({}, "ranks on a GPU need CuPy")]  # the channel of a lone rank needs nobody
LONE = [
    *(("mpi", {name: "3"}, rf"a launcher has started 3 processes \({name}=3\), but mpi4py's MPI")
      for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")),  # as under another MPI's mpiexec
    *(("mpi", {"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2", name: "3"},  # which PALS counts on this machine alone
       rf"a launcher has started 3 processes \({name}=3\), but .* build mpi4py with the MPI library of this system")
      for name in ("PALS_LOCAL_SIZE", "PMI_SIZE")),
    # As under srun that speaks no PMI, or one that the library does not know.
    *((backend, {"SLURM_STEP_NUM_TASKS": "3", **pmi},
       r"a launcher has started 3 processes \(SLURM_STEP_NUM_TASKS=3\), but .* alone; say srun --mpi=pmi2 for MPICH's "
       r"library, srun --mpi=pmix for Open MPI's")
      for backend, pmi in (("mpi", {}), ("mpi", {"PMI_SIZE": "3"}), ("nccl", {})))]
ELSEWHERE = (r"this process ran rank \d of \d and has its result alone: results\[\d\]\. cluster\.gather\(value\) gives "
             "every process the values of all")

# What is given (modules, variables of the environment in capitals, doubles of so many GPUs), the call, what it says,
# and the error, a ValueError where none is named.
ROWS: list[tuple[Any, ...]] = [
    *(({"cupy": found}, partial(kind, 2), said, zs.BackendError)
      for found, said in ON_CUPY for kind in (zs.CuPyCluster, zs.NCCLCluster)),
    *((cuda_whose_nccl(find), NCCL, said, zs.BackendError) for find, said in ON_NCCL),
    *(({"gpus": 2}, *row) for row in OF_TWO_GPUS),
    *(({"gpus": 1}, partial(traced, function), *row) for function, *row in OF_A_TRACE),
    *(({"cupy": None, **PLACE, **changed}, lambda: zs.connect("nccl"), said, zs.BackendError)
      for changed, said in OF_A_JOB),
    *(({"cupy": None, **variables}, partial(zs.connect, backend), said, zs.BackendError)
      for backend, variables, said in LONE),
    ({"mpi4py": None}, zs.connect, r"^ranks as processes need mpi4py, which is not installed here; "
                                   r"pip install 'zerosim\[mpi\]'$", zs.BackendError),
    ({}, lambda: zs.connect("gloo"), r"no backend 'gloo'; choose one of mpi, nccl"),
    ({}, lambda: zs.connect(share_devices=True), "share_devices=True is about NCCL, which wants a GPU for each rank"),
    ({}, lambda: zs.connect("nccl", device="cpu"), "device='cpu', but NCCL moves what lies on GPUs; say device='cuda'"),
    *(({}, partial(zs.connect, device=device), f"no device '{device}'; choose 'cpu', 'cuda' for the GPU of the")
      for device in ("gpu", "cuda:", "cuda:one", "cpu:0")),
    ({"cupy": None}, lambda: zs.connect(device="cuda"), "ranks on a GPU need CuPy", zs.BackendError),
    *(({}, partial(zs.CuPyCluster, 2, device=device), r"must be the number of a GPU")
      for device in (-1, 1.0, True, "0", None)),
    *(({}, partial(OwnResult(1, 3, "mine").__getitem__, index), ELSEWHERE, IndexError)
      for index in (0, 2, -1, -3, 7, slice(0, 2))),
    *(({}, partial(way, OwnResult(own, 2, 1)), ELSEWHERE, IndexError) for own in (0, 1)
      for way in (list, tuple, sum, lambda results: 1 in results, lambda results: [*results]))]


@pytest.mark.parametrize(("given", "call", "said", "error"), [(*row, ValueError)[:4] for row in ROWS],
                         ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_what_is_missing_or_cannot_be_is_refused_in_words(monkeypatch, given: dict[str, Any], call: Any, said: str,
                                                         error: type[Exception]) -> None:
    if "a launcher has" in said:
        pytest.importorskip("mpi4py", reason="mpi4py is not installed; pip install 'zerosim[mpi]'")
    if "gpus" in given:
        if compiled_kernels.COMPILER is None:
            pytest.skip(compiled_kernels.MISSING)
        with doubles.installed(given["gpus"]):
            assert_refused(call, said, error)
        return
    for name, value in given.items():
        monkeypatch.setenv(name, value) if name.isupper() else monkeypatch.setitem(sys.modules, name, value)
    assert_refused(call, said, error)


def test_what_one_process_misses_every_process_is_told() -> None:
    told: list[Any] = []

    def channel(others: str | None) -> Any:
        return SimpleNamespace(index=0, size=3, lost=set(),
                               all_gather=lambda value: [told.append(value) or value, None, others])

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


@pytest.mark.parametrize(("lost", "find", "said"), [
    (set(), lambda aborted: 1 / 0, "rank 0 of 3: ZeroDivisionError: division by zero; not all ranks heard of it"),
    ({2}, lambda aborted: aborted.wait(600), "rank 0 of 3: rank 2 of 3 can no longer be reached")])
def test_a_job_is_ended_where_a_rank_waits_inside_nccl_for_one_that_has_failed_or_gone(
        monkeypatch, capsys, lost: set[int], find: Callable[[threading.Event], Any], said: str) -> None:
    monkeypatch.setattr("zerosim.backends.nccl.transport.FAREWELL_SECONDS", 0.01)
    aborted = threading.Event()  # until then nobody answers
    channel: Any = SimpleNamespace(index=0, size=3, lost=lost, abort=aborted.set,
                                   all_gather=lambda value: [aborted.wait(600) and value] * 3)
    with suppress(ZeroDivisionError):
        together(channel, lambda: find(aborted))
    assert aborted.is_set()
    assert said in capsys.readouterr().err


def test_a_card_is_told_by_its_uuid_and_not_by_a_host_name_that_two_containers_may_have() -> None:
    def check(others: list[tuple[str, str, str]], *, share: bool = False) -> None:
        check_cards(SimpleNamespace(size=3, all_gather=lambda mine: [mine, *others]), Card("aa", "0000:00:00.0"),
                    share=share)

    here = socket.gethostname()
    check([("bb", "0000:00:00.0", here), ("aa", "0000:01:00.0", here)])  # a UUID may have been cut off
    same = [("bb", "0000:00:00.0", here), ("aa", "0000:00:00.0", "another")]
    assert_refused(lambda: check(same), rf"ranks \[0, 2\] of 3 have one GPU, 0000:00:00\.0 of {here}, and NCCL wants")
    check(same, share=True)


def test_one_process_is_a_world_of_one_rank_whatever_a_launcher_calls_its_count(monkeypatch) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed; pip install 'zerosim[mpi]'")
    for name, count in (("PMI_SIZE", ""), ("PMI_SIZE", "no number"), ("SLURM_STEP_NUM_TASKS", "1"), ("PMI_SIZE", "1"),
                        ("SLURM_STEP_NUM_TASKS", "3"), ("PALS_LOCAL_SIZE", "3")):  # as mpiexec -n 1 in a step of 3
        monkeypatch.setenv(name, count)
        assert len(zs.connect().run(lambda rank: rank.size)) == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert ask("run", f"{JOB}:sums", "--backend", "in-process").exit_code == 0


JOB, LAUNCHED = "tests/backends/job.py", {"PMI_SIZE": "1"}


@pytest.mark.parametrize(("words", "variables", "said"), [
    ((f"{JOB}:sums", "--ranks", "2"), LAUNCHED,
     "--ranks 2 is for ranks in one process; with mpi the launcher says how many"),
    ((f"{JOB}:sum",), LAUNCHED, "has no function 'sum'; it has train, sums, stumbles"),
    (("nothing.py:sums",), LAUNCHED, "no file 'nothing.py' to take the function 'sums' from"),
    ((JOB,), LAUNCHED, "write FILE.py:FUNCTION, as in train.py:program"),
    ((f"{JOB}:sums", "--with", "3"), LAUNCHED, "'3' sets nothing; write NAME=VALUE, as in stage=3"),
    ((f"{JOB}:sums", "--with", "n=3"), LAUNCHED, "--with sets 'n', which the program does not take beside its rank"),
    ((f"{JOB}:sums", "--device", "cuda"), {}, "--device cuda is for ranks that are processes, with mpi or nccl"),
    ((f"{JOB}:sums", "--device", "cuda"), LAUNCHED, "pip install 'zerosim[gpu]'"),
    ((f"{JOB}:sums", "--backend", "mpl"), {}, "no backend 'mpl'; choose one of"),
    ((f"{JOB}:sums", "--backend", "cupy"), {}, "pip install 'zerosim[gpu]'"),
    ((f"{JOB}:sums", "--backend", "nccl"), {}, "pip install 'zerosim[gpu]'"),
    ((f"{JOB}:sums",), {"SLURM_STEP_NUM_TASKS": "2"}, "a launcher has started 2 processes (SLURM_STEP_NUM_TASKS=2)"),
    ((f"{JOB}:sums",), {"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "2"}, "started 2 processes (PALS_LOCAL_SIZE=2)"),
    ((f"{JOB}:sums",), {**PLACE, "RANK": "1", "WORLD_SIZE": "2"},
     "this process was started as rank 1 of 2 (RANK and WORLD_SIZE), by what is no MPI; say --backend"),
], ids=lambda value: str(value)[-20:])
def test_wrong_input_is_one_clear_line_and_exit_code_2(monkeypatch, words: tuple[str, ...], variables: dict[str, str],
                                                      said: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_command_refuses(said, "run", *words)


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
    assert len(nccl.get_unique_id()) == 128
