"""A program on processes of their own, started from Python: what comes back, and how it can fail."""

import json
import os
import re
import shlex
import shutil

import pytest

import zerosim as zs
from tests.backends.worlds import mpi_missing
from tests.support import assert_refused
from zerosim.course import running
from zerosim.numerics import arrays

REASON = mpi_missing()
FILE = """
import numpy as np

def mean(rank, scale=1):
    return rank.all_reduce(np.full(5, scale * (rank.index + 0.1), np.float32), op="mean")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Makes a launcher of one's own, a script that runs these lines with the words of the job."""
    def made(lines):
        path = tmp_path / "some-launcher"
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo Open MPI 5 && exit\n{lines}\n')
        path.chmod(0o700)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(running, "LAUNCHERS", ("some-launcher",))
    monkeypatch.setattr(running, "find_spec", lambda name: name)
    return made


@pytest.mark.skipif(REASON is not None, reason=f"MPI: {REASON}")
def test_processes_give_the_bits_bytes_and_peaks_of_one_process(file):
    cluster, program = zs.Cluster(2), running.load(f"{file}:mean")
    here = cluster.run(lambda rank: program(rank, 3))
    there = running.launched(f"{file}:mean", 2, {"scale": 3})
    assert [part.sha256 for part in there] == [arrays.sha256(result) for result in here]
    assert [part.sent_nbytes for part in there] == cluster.trace.sent_nbytes()
    assert [part.peak_nbytes for part in there] == cluster.memory.peak_nbytes
    assert [part.rank for part in there] == [0, 1]
    assert arrays.sha256(zs.Cluster(2).run(program)[0]) != there[0].sha256


def test_a_file_that_has_changed_within_its_second_is_run_as_it_is_now_and_leaves_no_bytecode(tmp_path):
    file = tmp_path / "an_answer.py"
    for value in (1, 2):
        file.write_text(f"def program(rank):\n    return {value}\n")
        os.utime(file, (0, 0))
        assert running.load(f"{file}:program")(None) == value
    assert [*tmp_path.iterdir()] == [file]


def test_a_job_is_the_command_with_its_settings_under_the_launcher_with_the_flags_that_it_needs(launcher):
    row = {"rank": 0, "result": "5", "sha256": None, "sent_nbytes": 6, "peak_nbytes": 7}
    launcher('echo "$@" > "$0.words"; echo ' + shlex.quote(json.dumps({"rows": [row]})))
    given = {"scale": 3, "name": "x", "text": "3", "sizes": ["4", 5]}
    assert running.launched("train.py:program", 3, given) == [running.RanPart(**row)]
    with open(shutil.which("some-launcher") + ".words") as words:
        line = words.read()
    said = line.split()
    assert said[:4] == ["--oversubscribe", "--allow-run-as-root", "-n", "3"]
    job, *texts = line.rstrip().partition(" -m ")[2].split(" --with ")
    assert job == "zerosim run train.py:program --json"
    assert running.settings(texts) == given


def test_a_job_that_fails_or_takes_too_long_is_ended_with_what_it_said(launcher):
    launcher("echo no such thing >&2; exit 3")
    assert_refused(lambda: running.launched("train.py:program", 2), re.escape(
        "2 processes of train.py:program ended with exit code 3 and said: no such thing"), RuntimeError)
    launcher("exec tail -f /dev/null")
    assert_refused(lambda: running.launched("train.py:program", 2, seconds=0.01),
                   "2 processes of train.py:program did not end within 0.01 seconds", RuntimeError)


def test_what_is_missing_is_said_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(running, "LAUNCHERS", ("no-such-launcher",))
    assert_refused(lambda: running.launched("train.py:program", 3), re.escape(
        "processes over MPI cannot be had: there is no no-such-launcher here; pip install 'zerosim[mpi]'"),
        zs.BackendError)
    monkeypatch.setattr(running, "LAUNCHERS", ("sh",))
    monkeypatch.setattr(running, "find_spec", lambda name: None)
    assert_refused(lambda: running.launched("train.py:program", 3), "mpi4py is not installed", zs.BackendError)
    assert_refused(lambda: running.launched("train.py:program", 0), "0 processes were asked for; take one at least")
