"""The doctor: what it finds is found by trying, and what is missing or broken is named with its reason."""

import importlib.metadata
import importlib.util
import json
import sys

import numpy as np
import pytest

import zerosim
from tests.support import ask, printed
from zerosim import doctor

MPI_IS_HERE = importlib.util.find_spec("mpi4py") is not None
REQUIRED = "CUDA (CuPy, NCCL) is required here and cannot be used: cupy is not installed\n"
ROWS = (doctor.BackendRow("in-process", True, "made"), doctor.BackendRow("MPI", True, "made"),
        doctor.BackendRow("CUDA (CuPy, NCCL)", False, "cupy is not installed"))


@pytest.fixture(scope="module")
def found():
    return doctor.examine()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a module of this text, for this interpreter and those that it starts; or a program of the shell, alone on
    the PATH."""
    def make(name: str, text: str) -> str:
        if name in ("mpiexec", "nvidia-smi"):
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            path.chmod(0o755)
            return str(path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return name

    return make


def test_the_versions_are_the_installed_ones_and_a_missing_package_is_said_to_be(found):
    versions = {version.name: version.version for version in found.versions}
    assert versions.pop("zerosim") == zerosim.__version__
    assert versions.pop("python") == ".".join(map(str, sys.version_info[:3]))
    assert versions.keys() == {"numpy", "ml_dtypes", "greenlet", "matplotlib", "rich", "typer", "threadpoolctl"}
    assert versions == {name: importlib.metadata.version(name) for name in versions}
    missing = doctor.version_of("a-package-that-nobody-has")
    assert missing.version is None
    assert "not installed" in printed(doctor.Doctor((missing,), "", "", 1, (), None, ()))


def test_blas_has_a_name_and_one_thread_while_ranks_run_or_is_named_as_numpy_names_it(found, monkeypatch):
    assert found.blas
    assert all(library.name for library in found.blas)
    assert found.blas_threads_in_a_run in {1, None}
    monkeypatch.setattr("threadpoolctl.threadpool_info", list)
    (library,) = doctor.blas_libraries()
    assert library.name == np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    assert doctor.blas_text(library).endswith("threads unknown")


def test_a_backend_is_usable_because_it_made_an_all_reduce(found):
    in_process, mpi, cuda = found.backends
    assert [backend.name for backend in found.backends] == [row.name for row in ROWS]
    assert (in_process.usable, mpi.usable) == (True, MPI_IS_HERE)
    assert "on 2 ranks gave 3 on both" in in_process.reason
    assert not mpi.usable or mpi.reason.startswith("an all-reduce of 1 and 2 on 2 processes gave 3 on both; ")
    if importlib.util.find_spec("cupy") is None:
        assert not cuda.usable
        assert cuda.reason.startswith("cupy is not installed; ")
        assert cuda.reason.endswith("pip install 'zerosim[gpu]', on a machine with an NVIDIA GPU")


def fails(rank):
    raise ImportError("no greenlet here")


@pytest.mark.parametrize(("all_reduce", "said"), [
    (fails, "an all-reduce on 2 ranks failed: ImportError: no greenlet here"),
    (lambda rank: ([rank.index], 1), "an all-reduce of 1 and 2 on 2 ranks gave [[0], [1]] instead of 3 everywhere")])
def test_an_in_process_backend_that_fails_or_adds_wrongly_is_not_usable(monkeypatch, all_reduce, said):
    monkeypatch.setattr(doctor, "_all_reduce", all_reduce)
    backend, _ = doctor.in_process()
    assert (backend.usable, backend.reason) == (False, said)


@pytest.mark.parametrize(("trial", "said"), [
    ("print('right')", "gave the right sums"), ("print('3.0'); print('4.0')", "printed '3.0 4.0' instead of 'right'"),
    ("raise SystemExit(3)", "failed: exit code 3"), ("raise SystemExit('---\\nno root\\x00\\nso')", "failed: no root"),
    ("raise OSError('NCCL is not to be had')", "failed: OSError: NCCL is not to be had")])
def test_cuda_is_usable_when_gpus_have_made_an_all_reduce(monkeypatch, trial, said):
    compile(doctor.CUDA_TRIAL, "trial", "exec")
    monkeypatch.setattr(doctor, "probe", lambda *_: "cupy 14.0 · NVIDIA H200")
    monkeypatch.setattr(doctor, "CUDA_TRIAL", trial)
    backend = doctor.cuda()
    assert backend.usable == ("right sums" in said)
    assert f"by our ring over NCCL and by NCCL's own, {said}; cupy 14.0 · NVIDIA H200" in backend.reason


@pytest.mark.parametrize(("words", "exit_code", "said"), [
    (["mpi, in-process"], 0, ""), (["mpi,nccl"], 1, REQUIRED), (["mpi,nccl", "--json"], 1, REQUIRED),
    (["mpi,gloo"], 2, "--require names 'gloo', and the backends are in-process, mpi, nccl")])
def test_what_is_required_and_missing_is_named_and_an_unknown_name_is_refused(monkeypatch, words, exit_code, said):
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Doctor((), "", "", 1, (), None, ROWS))
    done = ask("doctor", "--require", *words, columns=200)
    assert done.exit_code == exit_code
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


@pytest.mark.parametrize(("module", "program", "said"), [
    (None, "raise SystemExit", "a_package is not installed"),
    ("version = '1.2'", "import a_package; print('\\n', a_package.version, '·  found')", "a_package 1.2 · found"),
    ("raise OSError('libmpi.so: cannot open')", "import a_package",
     "a_package is installed, but does not work: OSError: libmpi.so: cannot open"),
    ("import os; os._exit(3)", "import a_package", "a_package is installed, but does not work: exit code 3"),
    ("import time; time.sleep(6000)", "import a_package",
     "a_package is installed, but did not answer within 0.3 seconds"),
], ids=["not installed", "works", "breaks", "kills its process", "hangs"])
def test_a_package_is_tried_in_a_process_of_its_own_and_says_what_it_is(made, module, program, said):
    if module is not None:
        made("a_package", module)
    assert doctor.probe("a_package", program, **({"seconds": 0.3} if "0.3" in said else {})) == said


def test_what_libraries_say_of_themselves_is_in_the_reasons(made):
    made("mpi4py", "__version__ = '4.1'\nclass MPI:\n    Get_library_version = staticmethod(lambda: 'MPI  X 5')")
    assert "mpi4py 4.1 · MPI X 5;" in doctor.mpi().reason
    made("cupy", "__version__ = '14.0'\nclass cuda:\n    class runtime:\n        @staticmethod\n"
                 "        def getDeviceCount():\n            raise RuntimeError('cudaErrorNoDevice')")
    assert "cupy is installed, but does not work: RuntimeError: cudaErrorNoDevice" in doctor.cuda().reason


@pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")
def test_programs_are_looked_for_on_the_path_and_beside_the_interpreter(made, monkeypatch, tmp_path):
    for text, gpus, said in (
            ("echo 'NVIDIA H200'; echo 'NVIDIA H200'", ["NVIDIA H200"] * 2, "GPU: NVIDIA H200, NVIDIA H200"),
            ("echo 'no driver'; exit 9", [], "no NVIDIA GPU to be seen"), ("", [], "no NVIDIA GPU to be seen")):
        monkeypatch.setenv("PATH", str(tmp_path))
        made("nvidia-smi", text)
        assert doctor.visible_gpus() == gpus
        assert said in doctor.cuda().reason
    monkeypatch.setattr(doctor, "probe", lambda *_: "mpi4py 4.1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "no mpiexec or mpirun on the PATH" in doctor.mpi().reason
    launcher, reason = made("mpiexec", "exit 0"), doctor.mpi().reason
    assert reason.startswith("an all-reduce of 1 and 2 on 2 processes printed '' instead of '3.0 3.0'")
    assert reason.endswith(launcher)
    with monkeypatch.context() as without:
        without.setattr(doctor, "probe", lambda *_: "mpi4py is not installed")
        assert doctor.mpi().reason == f"mpi4py is not installed; {launcher} is there; pip install 'zerosim[mpi]'"
    (tmp_path / "system").mkdir()  # another library's launcher, which would start worlds of one rank
    (tmp_path / "system" / "mpiexec").symlink_to(launcher)
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    assert doctor.mpi().reason.endswith(launcher)


def test_the_report_fits_80_columns_and_the_command_gives_the_same_as_json(found, monkeypatch):
    text = printed(found)
    assert max(map(len, text.splitlines())) <= 80
    for backend in found.backends:
        (line,) = (line for line in text.splitlines() if line.startswith(f"  {backend.name}  "))
        assert ("yes" if backend.usable else "no") in line.split()
    monkeypatch.setattr(doctor, "examine", lambda: found)  # each look takes some seconds
    shown, data = ask("doctor"), ask("doctor", "--json")
    assert (shown.exit_code, data.exit_code) == (0, 0)
    assert "in-process" in shown.stdout
    assert json.loads(data.stdout) == json.loads(json.dumps(found.as_json()))
