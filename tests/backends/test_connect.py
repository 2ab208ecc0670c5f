"""What zs.connect refuses, and what it asks of its surroundings."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import zerosim as zs
from zerosim import cli


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no backend 'gloo'; choose one of mpi, nccl"):
        zs.connect("gloo")


def test_cards_are_shared_over_nccl_alone() -> None:
    with pytest.raises(ValueError, match=r"share_devices=True is about GPUs, of which ranks over MPI have none"):
        zs.connect("mpi", share_devices=True)


def test_a_job_of_torchruns_that_is_described_in_part_is_refused(monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(zs.BackendError, match=r"as torchrun sets them, and MASTER_PORT is missing"):
        zs.connect("nccl")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_processes_of_which_mpi_knows_nothing_are_no_worlds_of_one_rank_each(monkeypatch, name: str) -> None:
    """As under torchrun, or where mpiexec and the library of mpi4py belong to two MPIs."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed; pip install 'zerosim[mpi]'")
    for count in ("", "1", "no number"):
        monkeypatch.setenv(name, count)
        assert len(zs.connect().run(lambda rank: rank.size)) == 1
    monkeypatch.setenv(name, "3")
    with pytest.raises(zs.BackendError, match=rf"a launcher has started 3 processes \({name}=3\), but mpi4py's MPI"):
        zs.connect()


def test_patience_seconds_still_says_how_long_a_rank_waits_with_a_warning() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed; pip install 'zerosim[mpi]'")
    with pytest.warns(DeprecationWarning, match="patience_seconds= is now called timeout_seconds="):
        assert zs.connect(patience_seconds=7.5).timeout_seconds == 7.5


def test_zerosim_run_takes_no_process_of_a_job_for_a_world_of_its_own() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    done = CliRunner().invoke(cli.app, ["run", "train.py:program"], env=place)
    assert done.exit_code == 2
    assert "this process was started as rank 1 of 2 (RANK and WORLD_SIZE), by what is no MPI; say --backend" in (
        done.stderr)


def test_one_process_of_torchruns_without_a_gpu_is_told_so(monkeypatch) -> None:
    """The channel of a lone rank needs nobody; then the GPU is looked for."""
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(zs.BackendError, match="ranks on a GPU need CuPy"):
        zs.connect("nccl")
