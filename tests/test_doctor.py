"""The doctor: what it finds is found by trying, and what is missing or broken is named with its reason."""

import importlib.metadata
import importlib.util
import json
import stat
import sys
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import zerosim
from zerosim import cli, doctor


@pytest.fixture(scope="module")
def found():
    return doctor.examine()


@pytest.fixture
def fake_module(tmp_path, monkeypatch):
    """Makes an importable module of this text, for this interpreter and those that it starts."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return name

    return make


@pytest.fixture
def fake_program(tmp_path, monkeypatch):
    """Makes a program that this shell text describes, alone on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def test_the_versions_are_the_installed_ones(found):
    versions = {version.name: version.version for version in found.versions}
    assert versions["numpy"] == np.__version__
    assert versions["zerosim"] == zerosim.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    for name in ("ml_dtypes", "greenlet", "matplotlib", "rich", "typer", "threadpoolctl"):
        assert versions[name] == importlib.metadata.version(name)


def test_a_package_that_is_missing_is_said_to_be(found):
    missing = doctor.version_of("a-package-that-nobody-has")
    assert missing.version is None
    assert "not installed" in printed(doctor.Doctor((missing,), "", "", 1, (), None, ()))


def test_blas_has_a_name_and_one_thread_while_ranks_run(found):
    assert found.blas
    assert all(library.name for library in found.blas)
    assert found.blas_threads_in_a_run in {1, None}


def test_a_blas_that_cannot_be_asked_is_named_as_numpy_names_it(monkeypatch):
    monkeypatch.setattr("threadpoolctl.threadpool_info", list)
    (library,) = doctor.blas_libraries()
    assert library.name == np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    assert library.threads is None
    assert doctor.blas_text(library).endswith("threads unknown")


def test_the_in_process_backend_is_usable_because_it_made_an_all_reduce(found):
    backend = found.backends[0]
    assert (backend.name, backend.usable) == ("in-process", True)
    assert "on 2 ranks gave 3 on both" in backend.reason


@pytest.mark.parametrize(("name", "said"), [
    ("Cluster", "an all-reduce on 2 ranks failed: ImportError: no greenlet here"),
    ("_all_reduce", "an all-reduce of 1 and 2 on 2 ranks gave [[0], [1]] instead of 3 everywhere")])
def test_an_in_process_backend_that_fails_or_adds_wrongly_is_not_usable(monkeypatch, name, said):
    def no_cluster(ranks):
        raise ImportError("no greenlet here")

    monkeypatch.setattr(doctor, name, {"Cluster": no_cluster, "_all_reduce": lambda rank: ([rank.index], 1)}[name])
    backend, _ = doctor.in_process()
    assert (backend.usable, backend.reason) == (False, said)


def test_mpi_is_usable_when_two_processes_have_made_an_all_reduce(found):
    backend = found.backends[1]
    assert backend.name == "MPI"
    assert backend.usable == (importlib.util.find_spec("mpi4py") is not None)
    assert not backend.usable or backend.reason.startswith("an all-reduce of 1 and 2 on 2 processes gave 3 on both; ")


@pytest.mark.parametrize(("program", "said"), [
    ("print('3.0'); print('3.0')", None), ("print('3.0 4.0')", "printed '3.0 4.0' instead of '3.0 3.0'"),
    ("raise SystemExit(3)", "failed: exit code 3"), ("raise SystemExit('---\\nno root\\x00\\n---')", "failed: no root"),
    ("1 / 0", "failed: ZeroDivisionError: division by zero")])
def test_a_trial_that_prints_something_else_has_failed(program, said):
    assert doctor.failure_of([sys.executable, "-c", program], "3.0 3.0") == said


def test_cuda_is_not_usable_without_cupy_and_the_reason_says_what_is_missing(found):
    backend = found.backends[2]
    assert backend.name == "CUDA (CuPy, NCCL)"
    if importlib.util.find_spec("cupy") is None:
        assert not backend.usable
        assert backend.reason.startswith("cupy is not installed; ")
        assert backend.reason.endswith("pip install 'zerosim[gpu]', on a machine with an NVIDIA GPU")


@pytest.mark.parametrize(("printed", "usable", "said"), [
    ("print('right')", True, "by our ring over NCCL and by NCCL's own, gave the right sums; cupy 14.0 · NVIDIA H200"),
    ("print([[3.0]])", False, "by NCCL's own, printed '[[3.0]]' instead of 'right'; cupy 14.0 · NVIDIA H200"),
    ("raise OSError('NCCL is not to be had')", False, "by NCCL's own, failed: OSError: NCCL is not to be had; cupy"),
])
def test_cuda_is_usable_when_gpus_have_made_an_all_reduce(monkeypatch, printed, usable, said):
    monkeypatch.setattr(doctor, "probe", lambda *_: "cupy 14.0 · NVIDIA H200")
    monkeypatch.setattr(doctor, "CUDA_TRIAL", printed)
    backend = doctor.cuda()
    assert backend.usable == usable
    assert said in backend.reason


def test_the_trial_of_cuda_is_a_program_that_compiles():
    compile(doctor.CUDA_TRIAL, "trial", "exec")


@pytest.mark.parametrize(("switches", "exit_code", "said"), [
    (["mpi, in-process"], 0, ""),
    (["mpi,nccl"], 1, "CUDA (CuPy, NCCL) is required here and cannot be used: cupy is not installed\n"),
    (["mpi,nccl", "--json"], 1, "CUDA (CuPy, NCCL) is required here and cannot be used: cupy is not installed\n")])
def test_what_is_required_and_missing_is_named_and_the_exit_code_is_1(monkeypatch, switches, exit_code, said):
    rows = (doctor.BackendRow("in-process", True, "made"), doctor.BackendRow("MPI", True, "made"),
            doctor.BackendRow("CUDA (CuPy, NCCL)", False, "cupy is not installed"))
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Doctor((), "", "", 1, (), None, rows))
    done = CliRunner().invoke(cli.app, ["doctor", "--require", *switches])
    assert (done.exit_code, done.stderr) == (exit_code, said)


def test_an_unknown_name_is_refused_before_anything_is_tried(monkeypatch):
    monkeypatch.setattr(doctor, "examine", None)
    done = CliRunner().invoke(cli.app, ["doctor", "--require", "mpi,gloo"])
    assert done.exit_code == 2
    assert "--require names 'gloo', and the backends are in-process, mpi, nccl" in " ".join(done.stderr.split())


@pytest.mark.parametrize(("module", "program", "said"), [
    (None, "raise SystemExit", "a_package is not installed"),
    ("version = '1.2'", "import a_package; print('\\n', a_package.version, '·  found')", "a_package 1.2 · found"),
    ("raise OSError('libmpi.so: cannot open')", "import a_package",
     "a_package is installed, but does not work: OSError: libmpi.so: cannot open"),
    ("import os; os._exit(3)", "import a_package", "a_package is installed, but does not work: exit code 3"),
], ids=["not installed", "works", "breaks", "kills its process"])
def test_a_package_is_tried_in_a_process_of_its_own_and_says_what_it_is(fake_module, module, program, said):
    if module is not None:
        fake_module("a_package", module)
    assert doctor.probe("a_package", program) == said


def test_a_package_that_hangs_is_given_up(fake_module):
    fake_module("hangs", "import time; time.sleep(6000)")
    said = doctor.probe("hangs", "import hangs", seconds=0.3)
    assert said == "hangs is installed, but did not answer within 0.3 seconds"


def test_programs_for_mpi_print_what_the_library_says(fake_module):
    fake_module("mpi4py", "__version__ = '4.1'\nclass MPI:\n    Get_library_version = staticmethod(lambda: 'MPI  X 5')")
    assert "mpi4py 4.1 · MPI X 5;" in doctor.mpi().reason


def test_a_cupy_without_a_gpu_is_named_with_cudas_reason(fake_module):
    fake_module("cupy", "__version__ = '14.0'\nclass cuda:\n    class runtime:\n        @staticmethod\n"
                        "        def getDeviceCount():\n            raise RuntimeError('cudaErrorNoDevice')")
    assert "cupy is installed, but does not work: RuntimeError: cudaErrorNoDevice" in doctor.cuda().reason


SHELL = pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")


@SHELL
def test_an_mpiexec_on_the_path_is_found_and_a_missing_one_is_said_to_be(fake_program, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "probe", lambda *_: "mpi4py 4.1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # where it is looked for, too
    assert "no mpiexec or mpirun on the PATH" in doctor.mpi().reason
    launcher = fake_program("mpiexec", "exit 0")
    reason = doctor.mpi().reason
    assert reason.startswith("an all-reduce of 1 and 2 on 2 processes printed '' instead of '3.0 3.0'")
    assert reason.endswith(launcher)


@SHELL
@pytest.mark.parametrize(("text", "gpus", "said"), [
    ("echo 'NVIDIA H200'; echo 'NVIDIA H200'", ["NVIDIA H200"] * 2, "GPU: NVIDIA H200, NVIDIA H200"),
    ("echo 'no driver'; exit 9", [], "no NVIDIA GPU to be seen"), ("", [], "no NVIDIA GPU to be seen")],
    ids=["two", "fails", "lists nothing"])
def test_gpus_are_those_that_the_driver_lists(fake_program, text, gpus, said):
    fake_program("nvidia-smi", text)
    assert doctor.visible_gpus() == gpus
    assert said in doctor.cuda().reason


def printed(found: doctor.Doctor) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(found)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_fits_80_columns_and_has_a_row_for_each_backend(found):
    text = printed(found)
    assert max(map(len, text.splitlines())) <= 80
    for backend in found.backends:
        (line,) = (line for line in text.splitlines() if line.startswith(f"  {backend.name}  "))
        assert ("yes" if backend.usable else "no") in line.split()


def test_the_command_exits_with_0_and_gives_the_same_as_json(found, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: found)  # each look takes some seconds
    text, data = (CliRunner().invoke(cli.app, ["doctor", *switch]) for switch in ([], ["--json"]))
    assert (text.exit_code, data.exit_code) == (0, 0)
    assert "in-process" in text.stdout
    report = json.loads(data.stdout)
    mpi_is_here = importlib.util.find_spec("mpi4py") is not None
    assert [backend["usable"] for backend in report["backends"][:2]] == [True, mpi_is_here]
    assert {"name": "numpy", "version": np.__version__} in report["versions"]
    assert report == json.loads(json.dumps(found.as_json()))
