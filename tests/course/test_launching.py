"""A program on processes of their own, started from Python: what comes back, and how it can fail."""

import re

import pytest

import zerosim as zs
from tests.backends.worlds import mpi_missing
from zerosim.course import running
from zerosim.course.running import launched, load
from zerosim.numerics.arrays import sha256

REASON = mpi_missing()
NEEDS_MPI = pytest.mark.skipif(REASON is not None, reason=f"MPI: {REASON}")
FILE = """
import numpy as np

def mean(rank, scale=1):
    return rank.all_reduce(np.full(5, scale * (rank.index + 0.1), np.float32), op="mean")

def stumbles(rank):
    if rank.index == 1:
        raise KeyError("no such thing")
    rank.barrier()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(FILE)
    return path


@NEEDS_MPI
def test_processes_give_the_bits_bytes_and_peaks_of_one_process(file):
    cluster = zs.Cluster(3)
    one, three = (cluster.run(lambda rank, scale=scale: load(f"{file}:mean")(rank, scale)) for scale in (1, 3))
    there = launched(f"{file}:mean", 3, {"scale": 3})
    assert [part.sha256 for part in there] == [sha256(result) for result in three]
    assert [part.sent_nbytes for part in there] == cluster.trace.sent_nbytes()
    assert [part.rank for part in there] == [0, 1, 2]
    assert sha256(one[0]) != there[0].sha256


@NEEDS_MPI
def test_a_rank_that_raises_is_named_in_what_the_job_said(file):
    with pytest.raises(RuntimeError, match=r"(?s)2 processes of .* ended with exit code \d+ and said: .*no such thing"):
        launched(f"{file}:stumbles", 2)


@NEEDS_MPI
def test_a_job_that_takes_too_long_is_ended(file):
    with pytest.raises(RuntimeError, match=r"2 processes of .* did not end within 0.01 seconds"):
        launched(f"{file}:mean", 2, seconds=0.01)


def test_what_is_missing_is_said_before_anything_is_started(file, monkeypatch):
    monkeypatch.setattr(running, "LAUNCHERS", ("no-such-launcher",))
    said = "processes over MPI cannot be had: there is no no-such-launcher here; pip install 'zerosim[mpi]'"
    with pytest.raises(zs.BackendError, match=re.escape(said)):
        launched(f"{file}:mean", 3)
    monkeypatch.setattr(running, "LAUNCHERS", ("python3", "python"))
    monkeypatch.setattr(running, "find_spec", lambda name: None)
    with pytest.raises(zs.BackendError, match="mpi4py is not installed"):
        launched(f"{file}:mean", 3)
    with pytest.raises(ValueError, match="0 processes were asked for; take one at least"):
        launched(f"{file}:mean", 0)


def test_the_next_file_of_a_name_replaces_the_one_before(tmp_path):
    for number in (1, 2):
        file = tmp_path / str(number) / "homework_of_many.py"
        file.parent.mkdir()
        file.write_text(f"def answer(rank):\n    return {number}\n")
        assert load(f"{file}:answer")(None) == number
