"""Whole jobs under mpiexec, as a reader starts them: results, and every way in which a job can end badly.

What does not end a job runs on the pool's four processes; what does has a job of its own.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source import ROOT
from tests.backends.worlds import POOL, SECONDS, launch, mpi_missing, one_thread
from tests.cases import chosen
from tests.support import ask, assert_command_refuses, printed
from zerosim.course import running
from zerosim.planning import recording

JOB = str(Path(__file__).with_name("job.py"))
RANKS = POOL.ranks
REASON = mpi_missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"MPI: {REASON}")


def command(*words: str, ranks: int) -> list[str]:
    """``zerosim run ...`` under mpiexec."""
    return [*launch(ranks), sys.executable, "-m", "zerosim", "run", *words]


def finished(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    return subprocess.run(words, cwd=ROOT, env=one_thread() | {"COLUMNS": "200", "NO_COLOR": "1"} | variables,
                          text=True, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)


def said(*words: str) -> list[Any]:
    """``zerosim run ...`` on processes that are there already: what each of them said."""
    return POOL.said("run", *words)


def together(answers: list[Any]) -> tuple[list[int], str]:
    """The exit codes of all processes, and what they have said on stderr."""
    return [answer.exit_code for answer in answers], "".join(answer.stderr for answer in answers)


def here(*words: str) -> Any:
    """``zerosim run ...`` in this process."""
    return ask("run", *words, columns=200)


@pytest.mark.parametrize("compute", chosen(["bf16"], ["bf16", "fp16"]))
def test_a_training_program_has_the_same_fingerprints_and_recording_in_one_process_and_under_mpiexec(
        compute: str, tmp_path: Path) -> None:
    files = tmp_path / "here.json", tmp_path / "there.json"
    words = [f"{JOB}:train", "--with", f"compute={compute}", "--with", "steps=1", "--json", "--save"]
    answers = here(*words, str(files[0]), "--ranks", str(RANKS)), *said(*words, str(files[1]))
    assert {answer.exit_code for answer in answers} == {0}
    assert not any(answer.stdout for answer in answers[2:]), "rank 0 speaks for all"
    one, other = (json.loads(answer.stdout) for answer in answers[:2])
    assert (one["world"], other["world"]) == ("all in this process", "each a process, over MPI")
    assert [len(row["sha256"]) for row in one["rows"]] == [64] * RANKS
    assert one["rows"] == other["rows"]
    assert (other["blas_threads"], other["blas"]) == (1, one["blas"])
    assert sorted(tmp_path.iterdir()) == sorted(files)
    recordings = [recording.load(file) for file in files]
    assert [recording.ranks for recording in recordings] == [RANKS] * 2
    assert recordings[0].calls == recordings[1].calls
    assert recording.links(recordings[0]) == recording.links(recordings[1])


def test_a_table_shows_every_rank_once() -> None:
    found = re.sub(r"\x1b\[\d*m", "", said(f"{JOB}:sums")[0].stdout)
    assert found.startswith(f"{RANKS} ranks, each a process, over MPI")
    assert len(re.findall(r"^ +\d +\d+ +\d+ +[0-9a-f]{16} +\[10\.0\] *$", found, re.MULTILINE)) == RANKS


def test_a_result_takes_one_line_however_long_it_is_and_narrow_the_terminal() -> None:
    parts = [running.RanPart(rank, "[0.123456789, " * 40, "0123456789abcdef" * 4, 190_215_123, 41_488_456)
             for rank in range(3)]
    for width in (80, 100, 200):
        assert len(printed(running.run_view("somewhere", parts, width), width).splitlines()) == 3 + 3


def test_a_script_of_ones_own_connects_and_an_error_ends_all_of_it() -> None:
    done = finished([*launch(2), sys.executable, "-m", "mpi4py", JOB])
    assert done.stdout.splitlines() == ["[[3.0], [3.0]]"]
    assert done.returncode != 0
    assert "KeyError: 'no such thing'\nraised by rank 1 of 2" in done.stderr


def test_a_raising_rank_is_named_once_with_its_traceback_and_the_exit_code_is_1() -> None:
    """One that returns what cannot be shown raises too, and keeps nobody waiting."""
    for program, error in (("stumbles", "KeyError: 'no such thing'"), ("shows_nothing", "LookupError: nothing to see")):
        codes, text = together(said(f"{JOB}:{program}"))
        assert codes == [1] * RANKS
        assert text.count("Traceback") == 1
        assert f"{error}\nraised by rank 1 of {RANKS}" in text
        assert "job.py" in text


@pytest.mark.slow
@pytest.mark.parametrize(("program", "ranks", "why"), [
    ("computes", 3, "ranks [0, 2] did not hear of it for 30 seconds"),
    ("misses_a_native_sum", 2, "cannot be given up, and another rank does not take part in it")])
def test_a_job_is_ended_where_others_cannot_be_and_the_failure_is_told_first(program: str, ranks: int, why: str
                                                                             ) -> None:
    done = finished(command(f"{JOB}:{program}", ranks=ranks))
    assert done.returncode != 0
    assert "KeyError: 'no such thing'" in done.stderr
    assert f"{why}; all processes of the job are ended" in done.stderr


def test_a_file_that_raises_ends_the_job_and_is_told_with_its_line(tmp_path: Path) -> None:
    """In one of the processes, or in the only one."""
    rank = "os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK', '1'))"
    for error in ("ValueError('mine')", "OSError('mine')", "SystemExit('mine')", "KeyError('mine')"):
        file = tmp_path / f"half_{error[:3]}.py"
        file.write_text(f"import os\nif {rank} == '1':\n    raise {error}\ndef program(rank):\n    rank.barrier()\n")
        for answers in ([here(f"{file}:program")], said(f"{file}:program")):
            codes, text = together(answers)
            assert set(codes) == {1}, error
            assert "mine" in text, error
            assert f"{file.name}\", line 3" in text or error.startswith("SystemExit"), error


def test_a_file_that_some_machines_of_a_job_do_not_have_ends_all_processes_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "there0.py").write_text("def program(rank):\n    rank.barrier()\n")
    codes, text = together(said(f"{tmp_path}/there{{rank}}.py:program"))
    assert codes == [2] * RANKS
    assert f"zerosim run: ranks [1, 2, 3] of 4: no file '{tmp_path}/there1.py' to take" in text
    assert text.count("zerosim run:") == 1


@pytest.mark.parametrize(("by", "code", "said_so"),
                         [("interrupt", 130, "KeyboardInterrupt"), ("exit", 3, "SystemExit 3")])
def test_a_rank_that_ends_the_run_without_an_error_is_named(by: str, code: int, said_so: str) -> None:
    words = f"{JOB}:ends", "--with", f"by={by}"
    for answers in ([here(*words, "--ranks", str(RANKS))], said(*words)):
        codes, text = together(answers)
        assert set(codes) == {code}
        assert f"zerosim run: ended by {said_so}, raised by rank 1 of {RANKS}" in text
        assert text.count("zerosim run:") == 1


def test_a_file_that_would_take_a_modules_place_is_refused(tmp_path: Path) -> None:
    for name in ("sys", "queue", "numpy"):
        (tmp_path / f"{name}.py").write_text("def program(rank):\n    return 1\n")
        said = f"there is one called '{name}' already, which other code imports by that name; rename the"
        assert_command_refuses(said, "run", f"{tmp_path}/{name}.py:program", "--ranks", "2")


def test_ctrl_c_ends_all_processes_and_leaves_none_behind(tmp_path: Path) -> None:
    """Each process has a line to the test, which ends with it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "here"))
        server.listen(2)
        server.settimeout(SECONDS)
        with subprocess.Popen(command(f"{JOB}:waits_forever", "--with", f"address={tmp_path}/here", ranks=2), cwd=ROOT,
                              env=one_thread(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              stdin=subprocess.DEVNULL, start_new_session=True) as job:
            try:
                lines = [server.accept()[0] for _ in range(2)]
                os.killpg(job.pid, signal.SIGINT)  # as a terminal does
                assert job.wait(timeout=SECONDS) != 0
                for line in lines:
                    with line:
                        line.settimeout(SECONDS)
                        assert line.recv(1) == b""
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)


def test_a_library_that_cannot_be_loaded_is_named_with_its_reason() -> None:
    done = finished([sys.executable, "-c", "import zerosim; zerosim.connect()"], MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "is installed, but finds no MPI library that works" in done.stderr
    assert "pip install mpich" in done.stderr
