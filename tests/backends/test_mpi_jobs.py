"""Whole jobs under mpiexec, as a reader starts them: results, and every way in which a job can end badly."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import zerosim as zs
from tests.backends.worlds import MPI, ROOT, SECONDS, Said, launch, one_thread
from zerosim import cli
from zerosim.course.figures.timeline import MACHINE
from zerosim.course.running import RanPart, run_view
from zerosim.display.report import report_data
from zerosim.display.terminal import as_text
from zerosim.planning.recording import load

JOB = str(Path(__file__).with_name("job.py"))
REASON = MPI[2].missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"MPI: {REASON}")


def command(*words: str, ranks: int | None = None) -> list[str]:
    """``zerosim ...``, under mpiexec where ``ranks`` says so."""
    return [*(launch(ranks) if ranks else ()), sys.executable, "-m", "zerosim", *words]


def finished(words: list[str], seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    return subprocess.run(words, cwd=ROOT, env=one_thread() | {"COLUMNS": "200", "NO_COLOR": "1"}, text=True,
                          capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)


def in_one_process(*words: str) -> Said:
    """``zerosim ...`` here."""
    return Said.of(words)


@pytest.mark.parametrize(("ranks", "compute"), [(3, "bf16"), (2, "fp16")])
def test_a_training_program_has_the_same_fingerprints_and_recording_in_one_process_and_under_mpiexec(
        ranks: int, compute: str, tmp_path: Path) -> None:
    files = tmp_path / "here.json", tmp_path / "there.json"
    words = ["run", f"{JOB}:train", "--with", f"compute={compute}", "--json", "--save"]
    said = in_one_process(*words, str(files[0]), "--ranks", str(ranks)), MPI[ranks].said(*words, str(files[1]))
    assert [set(one.codes) for one in said] == [{0}, {0}]
    here, there = (json.loads(one.stdout) for one in said)
    assert (here["world"], there["world"]) == ("all in this process", "each a process, over MPI")
    assert [len(row["sha256"]) for row in here["rows"]] == [64] * ranks
    assert here["rows"] == there["rows"]
    assert (there["blas_threads"], there["blas"]) == (1, here["blas"])
    assert sorted(tmp_path.iterdir()) == sorted(files)
    one, other = map(load, files)
    assert one.ranks == other.ranks == ranks
    assert one.calls == other.calls
    data = [report_data(recording, MACHINE, "") for recording in (one, other)]
    assert data[0].links == data[1].links


def test_a_table_shows_every_rank_once() -> None:
    found = re.sub(r"\x1b\[\d*m", "", finished(command("run", f"{JOB}:sums", ranks=2)).stdout)  # on a launcher's tty
    assert found.startswith("2 ranks, each a process, over MPI")
    assert len(re.findall(r"^ +\d +\d+ +\d+ +[0-9a-f]{16} +\[3\.0\] *$", found, re.MULTILINE)) == 2


def test_a_result_takes_one_line_however_long_it_is_and_narrow_the_terminal() -> None:
    parts = [RanPart(rank, "[0.123456789, " * 40, "0123456789abcdef" * 4, 190_215_123, 41_488_456) for rank in range(3)]
    for width in (80, 100, 200):
        out = StringIO()
        Console(file=out, width=width).print(as_text(run_view("somewhere", parts, width)))
        assert len(out.getvalue().splitlines()) == 3 + 3


def test_a_script_of_ones_own_connects_and_an_error_ends_all_of_it() -> None:
    done = finished([*launch(2), sys.executable, "-m", "mpi4py", JOB])
    assert done.stdout.splitlines() == ["[[3.0], [3.0]]"]
    assert done.returncode != 0
    assert "KeyError: 'no such thing'\nraised by rank 1 of 2" in done.stderr


def test_a_raising_rank_is_named_once_with_its_traceback_and_the_exit_code_is_1() -> None:
    done = finished(command("run", f"{JOB}:stumbles", ranks=2))
    there = MPI[3].said("run", f"{JOB}:stumbles")
    assert (done.returncode, there.codes) == (1, (1, 1, 1))
    for ranks, said in (2, done.stderr), (3, there.stderr):
        assert said.count("Traceback") == 1
        assert f"KeyError: 'no such thing'\nraised by rank 1 of {ranks}" in said
        assert "job.py" in said


@pytest.mark.slow
def test_a_job_is_ended_where_the_others_do_not_hear_of_a_failure() -> None:
    done = finished(command("run", f"{JOB}:computes", ranks=3))
    assert done.returncode != 0
    assert "KeyError: 'no such thing'" in done.stderr
    assert "ranks [0, 2] did not hear of it for 30 seconds; all processes of the job are ended" in done.stderr


def test_a_result_that_cannot_be_shown_is_an_error_of_its_rank_and_keeps_nobody_waiting() -> None:
    done = MPI[3].said("run", f"{JOB}:shows_nothing")
    assert done.codes == (1, 1, 1)
    assert "LookupError: nothing to see\nraised by rank 1 of 3" in done.stderr


@pytest.mark.parametrize("error", ["ValueError('mine')", "OSError('mine')", "SystemExit('mine')", "KeyError('mine')"])
def test_a_file_that_raises_in_one_process_ends_the_job_and_is_told_with_its_line(error: str, tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text("import os\nif '1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):\n"
                    f"    raise {error}\n\n\ndef program(rank):\n    rank.barrier()\n")
    done = MPI[2].said("run", f"{file}:program")
    assert done.codes == (1, 1)
    assert "mine" in done.stderr
    assert "half.py\", line 3" in done.stderr or error.startswith("SystemExit")


def test_a_file_that_some_machines_of_a_job_do_not_have_ends_all_processes_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "there0.py").write_text("def program(rank):\n    rank.barrier()\n")
    done = MPI[3].said("run", f"{tmp_path}/there{{rank}}.py:program")
    assert done.codes == (2, 2, 2)
    assert f"zerosim run: ranks [1, 2] of 3: no file '{tmp_path}/there1.py' to take" in done.stderr
    assert done.stderr.count("zerosim run:") == 1


@pytest.mark.parametrize(("by", "code", "said"), [("interrupt", 130, "KeyboardInterrupt"), ("exit", 3, "SystemExit 3")])
@pytest.mark.parametrize("ranks", [None, 3])
def test_a_rank_that_ends_the_run_without_an_error_is_named(by: str, code: int, said: str, ranks: int | None) -> None:
    words = "run", f"{JOB}:ends", "--with", f"by={by}"
    done = MPI[ranks].said(*words) if ranks else in_one_process(*words, "--ranks", "3")
    assert done.codes == (code,) * (ranks or 1)
    assert f"zerosim run: ended by {said}, raised by rank 1 of 3" in done.stderr
    assert done.stderr.count("zerosim run:") == 1


@pytest.mark.parametrize("name", ["sys", "queue", "numpy"])
def test_a_file_that_would_take_a_modules_place_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("def program(rank):\n    return 1\n")
    done = in_one_process("run", f"{tmp_path}/{name}.py:program", "--ranks", "2")
    assert done.codes == (2,)
    assert f"there is one called '{name}' already, which other code imports by that name; rename the" in done.stderr


def test_a_file_that_raises_is_told_with_its_line_in_one_process_too(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text("def program(rank):\n    return int('no number')\n\n\nprogram(None)\n")
    done = in_one_process("run", f"{file}:program")
    assert done.codes == (1,)
    assert "odd.py\", line 2, in program" in done.stderr
    assert "ValueError: invalid literal" in done.stderr


@pytest.mark.slow
def test_a_failure_that_leaves_others_in_a_collective_of_mpis_own_ends_the_job_and_is_told_first() -> None:
    done = finished(command("run", f"{JOB}:misses_a_native_sum", ranks=2))
    assert done.returncode != 0
    assert "KeyError: 'no such thing'\nraised by rank 1 of 2" in done.stderr
    assert "cannot be given up, and another rank does not take part in it; all processes of the job are ended" in (
        done.stderr)


def test_a_killed_process_ends_the_job_and_is_named() -> None:
    done = finished(command("run", f"{JOB}:is_killed", ranks=2))
    assert done.returncode != 0
    assert re.search("KILLED BY SIGNAL: 9|signal 9", done.stdout + done.stderr)


def test_ctrl_c_ends_all_processes_and_leaves_none_behind(tmp_path: Path) -> None:
    with subprocess.Popen(command("run", f"{JOB}:waits_forever", "--with", f"folder={tmp_path}", ranks=2), cwd=ROOT,
                          env=one_thread(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          stdin=subprocess.DEVNULL, start_new_session=True) as job:
        try:
            assert soon(lambda: len(list(tmp_path.iterdir())) == 2)
            assert all(map(alive, processes_in(tmp_path)))
            os.killpg(job.pid, signal.SIGINT)  # as a terminal does
            assert job.wait(timeout=SECONDS) != 0
            assert soon(lambda: not any(map(alive, processes_in(tmp_path))))
        finally:
            for process in (job.pid, *processes_in(tmp_path)):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def processes_in(folder: Path) -> list[int]:
    """The processes that have left their number there."""
    return [int(path.name) for path in folder.iterdir()]


def soon(happens: Callable[[], bool]) -> bool:
    """True where it happens before everybody has given up."""
    deadline = time.monotonic() + SECONDS
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happens()


def alive(process: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("words", "said"), [
    ((f"{JOB}:sums", "--ranks", "2"), "--ranks 2 is for ranks in one process; with mpi the launcher says how many"),
    ((f"{JOB}:sum",), "has no function 'sum'; it has train, sums, stumbles"),
    (("nothing.py:sums",), "no file 'nothing.py' to take the function 'sums' from"),
    ((JOB,), "write FILE.py:FUNCTION, as in train.py:program"),
    ((f"{JOB}:sums", "--with", "3"), "'3' sets nothing; write NAME=VALUE, as in stage=3"),
    ((f"{JOB}:sums", "--with", "n=3"), "--with sets 'n', which the program does not take beside its rank"),
    ((f"{JOB}:sums", "--backend", "mpl"), "no backend 'mpl'; choose one of"),
], ids=lambda value: str(value)[-20:])
def test_wrong_input_is_one_clear_line_and_exit_code_2(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["run", *words], env={"PMI_SIZE": "1"})  # as under a launcher
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("backend", ["cupy", "nccl"])
def test_a_backend_that_cannot_be_had_is_one_clear_line_and_exit_code_2(backend: str,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    done = CliRunner().invoke(cli.app, ["run", f"{JOB}:sums", "--backend", backend])
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("zerosim run: ")
    assert "pip install 'zerosim[gpu]'" in done.stderr


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(zs.BackendError, match=r"^ranks as processes need mpi4py, which is not installed here; "
                                              r"pip install 'zerosim\[mpi\]'$"):
        zs.connect()


def test_a_library_that_cannot_be_loaded_is_named_with_its_reason() -> None:
    found = finished([sys.executable, "-c", "import zerosim; zerosim.connect()"])
    assert found.returncode == 0, found.stderr
    done = subprocess.run([sys.executable, "-c", "import zerosim; zerosim.connect()"], cwd=ROOT, capture_output=True,
                          text=True, env=one_thread() | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert "is installed, but finds no MPI library that works" in done.stderr
    assert "pip install mpich" in done.stderr
