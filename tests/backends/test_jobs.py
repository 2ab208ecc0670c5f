"""Whole jobs under mpiexec, as a reader starts them: results, and every way in which a job can end badly.

What does not end a job runs on the pool's four processes; what does has a job of its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import zerosim as zs
from tests.backends.worlds import POOL, ROOT, SECONDS, Job, Said, Task, launch, mpi_missing, one_thread
from tests.cases import chosen
from tests.support import printed
from zerosim.course import running
from zerosim.course.figures.timeline import MACHINE
from zerosim.display import report
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


def said(*words: str) -> Said:
    """``zerosim run ...`` on processes that are there already."""
    return POOL.said("run", *words)


def here(*words: str) -> Said:
    """``zerosim run ...`` in this process."""
    return Said.of(("run", *words))


@pytest.mark.parametrize("compute", chosen(["bf16"], ["bf16", "fp16"]))
def test_a_training_program_has_the_same_fingerprints_and_recording_in_one_process_and_under_mpiexec(
        compute: str, tmp_path: Path) -> None:
    files = tmp_path / "here.json", tmp_path / "there.json"
    words = [f"{JOB}:train", "--with", f"compute={compute}", "--with", "steps=1", "--json", "--save"]
    both = here(*words, str(files[0]), "--ranks", str(RANKS)), said(*words, str(files[1]))
    assert [set(one.codes) for one in both] == [{0}, {0}]
    one, other = (json.loads(each.stdout) for each in both)
    assert (one["world"], other["world"]) == ("all in this process", "each a process, over MPI")
    assert [len(row["sha256"]) for row in one["rows"]] == [64] * RANKS
    assert one["rows"] == other["rows"]
    assert (other["blas_threads"], other["blas"]) == (1, one["blas"])
    assert sorted(tmp_path.iterdir()) == sorted(files)
    recordings = [recording.load(file) for file in files]
    assert [recording.ranks for recording in recordings] == [RANKS] * 2
    assert recordings[0].calls == recordings[1].calls
    links = [report.report_data(one, MACHINE, "").links for one in recordings]
    assert links[0] == links[1]


def begun_for_ever(rank: zs.Rank, pipe: str) -> None:
    """Says that it runs, and goes on until its process ends."""
    with open(pipe, "w", encoding="utf-8"):
        pass
    threading.Event().wait()


def test_a_process_of_the_pool_ends_with_the_tests_also_in_the_midst_of_a_program(tmp_path: Path) -> None:
    job, pipe = Job(1, "mpiexec"), tmp_path / "pipe"
    os.mkfifo(pipe)
    job.begin()
    job.lines[0].send(Task(begun_for_ever, (str(pipe),), {}, 1))
    pipe.read_text(encoding="utf-8")
    (process,) = job.processes
    job.end()
    assert process.returncode > 0, "it was not killed"


def test_a_table_shows_every_rank_once() -> None:
    found = re.sub(r"\x1b\[\d*m", "", said(f"{JOB}:sums").stdout)
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
    alone, there = finished(command(f"{JOB}:stumbles", ranks=2)), said(f"{JOB}:stumbles")
    assert (alone.returncode, there.codes) == (1, (1,) * RANKS)
    for ranks, text in (2, alone.stderr), (RANKS, there.stderr):
        assert text.count("Traceback") == 1
        assert f"KeyError: 'no such thing'\nraised by rank 1 of {ranks}" in text
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


def test_a_result_that_cannot_be_shown_is_an_error_of_its_rank_and_keeps_nobody_waiting() -> None:
    done = said(f"{JOB}:shows_nothing")
    assert done.codes == (1,) * RANKS
    assert f"LookupError: nothing to see\nraised by rank 1 of {RANKS}" in done.stderr


@pytest.mark.parametrize("error", ["ValueError('mine')", "OSError('mine')", "SystemExit('mine')", "KeyError('mine')"])
def test_a_file_that_raises_in_one_process_ends_the_job_and_is_told_with_its_line(error: str, tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text("import os\nif '1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):\n"
                    f"    raise {error}\n\n\ndef program(rank):\n    rank.barrier()\n")
    done = said(f"{file}:program")
    assert done.codes == (1,) * RANKS
    assert "mine" in done.stderr
    assert "half.py\", line 3" in done.stderr or error.startswith("SystemExit")


def test_a_file_that_some_machines_of_a_job_do_not_have_ends_all_processes_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "there0.py").write_text("def program(rank):\n    rank.barrier()\n")
    done = said(f"{tmp_path}/there{{rank}}.py:program")
    assert done.codes == (2,) * RANKS
    assert f"zerosim run: ranks [1, 2, 3] of 4: no file '{tmp_path}/there1.py' to take" in done.stderr
    assert done.stderr.count("zerosim run:") == 1


@pytest.mark.parametrize(("by", "code", "text"), [("interrupt", 130, "KeyboardInterrupt"), ("exit", 3, "SystemExit 3")])
def test_a_rank_that_ends_the_run_without_an_error_is_named(by: str, code: int, text: str) -> None:
    words = f"{JOB}:ends", "--with", f"by={by}"
    for done in (here(*words, "--ranks", str(RANKS)), said(*words)):
        assert set(done.codes) == {code}
        assert f"zerosim run: ended by {text}, raised by rank 1 of {RANKS}" in done.stderr
        assert done.stderr.count("zerosim run:") == 1


def test_a_file_that_would_take_a_modules_place_is_refused(tmp_path: Path) -> None:
    for name in ("sys", "queue", "numpy"):
        (tmp_path / f"{name}.py").write_text("def program(rank):\n    return 1\n")
        done = here(f"{tmp_path}/{name}.py:program", "--ranks", "2")
        assert done.codes == (2,)
        assert f"there is one called '{name}' already, which other code imports by that name; rename the" in done.stderr


def test_a_file_that_raises_is_told_with_its_line_in_one_process_too(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text("def program(rank):\n    return int('no number')\n\n\nprogram(None)\n")
    done = here(f"{file}:program")
    assert done.codes == (1,)
    assert "odd.py\", line 2, in program" in done.stderr
    assert "ValueError: invalid literal" in done.stderr


def test_a_killed_process_ends_the_job_and_is_named() -> None:
    done = finished(command(f"{JOB}:is_killed", ranks=2))
    assert done.returncode != 0
    assert re.search("KILLED BY SIGNAL: 9|signal 9", done.stdout + done.stderr)


def test_ctrl_c_ends_all_processes_and_leaves_none_behind(tmp_path: Path) -> None:
    with subprocess.Popen(command(f"{JOB}:waits_forever", "--with", f"folder={tmp_path}", ranks=2), cwd=ROOT,
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


def test_a_library_that_cannot_be_loaded_is_named_with_its_reason() -> None:
    done = finished([sys.executable, "-c", "import zerosim; zerosim.connect()"], MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "is installed, but finds no MPI library that works" in done.stderr
    assert "pip install mpich" in done.stderr
