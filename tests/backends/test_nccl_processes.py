"""One process per GPU, on doubles: real processes, real notes over TCP or MPI, and no GPU and no NCCL.

What is shown: that its calls match those of the other processes and add up to a Cluster's bits, that streams
wait where they must (the judge of ``fake_cuda`` runs in each process), and that failures reach every process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import zerosim as zs
from tests.backends import compiled_kernels, programs
from tests.backends.test_one_suite import assert_same
from tests.backends.torchrun import Torchrun, UnderMPI
from tests.backends.worlds import SECONDS
from zerosim.numerics.arrays import sha256

pytestmark = pytest.mark.skipif(compiled_kernels.COMPILER is None, reason=compiled_kernels.MISSING)


class Doubled(Torchrun):
    """Processes with doubles of GPUs, as torchrun would start them."""

    module = "tests.backends.gpu_worker"
    settings = {"DOUBLED_GPUS": "4"}  # noqa: RUF012


class DoubledUnderMPI(UnderMPI):
    """The same, started by mpiexec."""

    module = Doubled.module
    settings = Doubled.settings


WORLDS = (Doubled("doubles of GPUs, 3 processes of torchrun's", 3),
          DoubledUnderMPI("doubles of GPUs, 2 processes of MPI", 2))


@pytest.fixture(scope="module")
def torchrun() -> Doubled:
    """Where it cannot matter who started the processes."""
    return WORLDS[0]


@pytest.fixture(params=WORLDS, ids=lambda world: world.name, scope="module")
def doubled(request: pytest.FixtureRequest) -> Doubled:
    reason = request.param.missing()
    if reason is not None:
        pytest.skip(f"{request.param.name}: {reason}")
    found: Doubled = request.param
    return found


@pytest.fixture(scope="module", autouse=True)
def end_of_the_processes() -> Iterator[None]:
    """When all tests here are over."""
    yield
    for world in WORLDS:
        world.close()


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8_e5m2"])
def test_every_algorithm_gives_a_clusters_bits(torchrun: Doubled, format: str) -> None:
    assert_same(torchrun, programs.every_collective, format, (0, 1, 2, 7) if format == "bf16" else (7,))
    assert_same(torchrun, programs.options_of_reductions, format)


@pytest.mark.parametrize("program", [programs.messages, programs.groups, programs.works, programs.counted],
                         ids=lambda program: program.__name__)
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_messages_groups_works_and_ledgers_are_a_clusters(doubled: Doubled, program: Any, debug: bool) -> None:
    assert_same(doubled, program, debug=debug)


def test_training_a_gpt_gives_a_clusters_losses_and_states(doubled: Doubled) -> None:
    found = doubled.run(trained)
    wanted = zs.Cluster(doubled.ranks).run(trained)
    assert [sha256(outcome.result) for outcome in found] == [sha256(its) for its in wanted]


def trained(rank: zs.Rank) -> Any:
    """A step of gpt-nano; every array on the host."""
    return programs.on_host(programs.gpt(rank, 3, "bf16", steps=1, overlap=True))


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_native_asks_the_library_and_is_close(doubled: Doubled, operation: str) -> None:
    for outcome, other in zip(doubled.run(programs.native, operation, "bf16"),
                              doubled.run(programs.native, operation, "fp32"), strict=True):
        (own, later), _ = outcome.result
        assert sha256(own) == sha256(later)
        assert abs(own.astype("f4") - other.result[0][0].astype("f4")).max(initial=0) < 0.25


@pytest.mark.parametrize("kind", ["plain", "work", "stubborn"])
def test_a_rank_that_raises_ends_the_run_on_every_process_and_the_next_one_works(doubled: Doubled, kind: str) -> None:
    for failing in range(doubled.ranks):
        outcomes = doubled.outcomes(programs.fails, failing, kind)
        for outcome in outcomes:
            assert any(note.startswith(f"raised by rank {failing} of {doubled.ranks}") for note in outcome.notes)
        assert_same(doubled, programs.messages)


@pytest.mark.parametrize("what", ["operation", "shape", "dtype", "message"])
def test_in_debug_mode_ranks_that_disagree_are_told(doubled: Doubled, what: str) -> None:
    outcomes = doubled.outcomes(programs.disagrees, what, debug=True)
    assert all(isinstance(outcome.error, zs.MismatchError) for outcome in outcomes)
    assert_same(doubled, programs.messages)


@pytest.mark.parametrize("what", ["operation", "shape", "dtype", "op"])
def test_works_under_way_hold_nothing_when_ranks_have_disagreed_beside_them(torchrun: Doubled, what: str) -> None:
    outcomes = torchrun.outcomes(programs.disagrees_beside_works, what, debug=True)
    assert [type(outcome.error) for outcome in outcomes] == [zs.MismatchError] * torchrun.ranks
    assert [outcome.held_nbytes for outcome in outcomes] == [0] * torchrun.ranks
    assert_same(torchrun, programs.messages)


def test_arrays_on_the_host_travel_by_way_of_the_device(doubled: Doubled) -> None:
    assert_same(doubled, on_the_host)


def on_the_host(rank: zs.Rank) -> Any:
    """Flags and counts, in place, asynchronously, as a message, by the library."""
    import numpy as np

    x = np.arange(6) + rank.index
    found = [rank.all_reduce(x), rank.all_gather(np.array([rank.index])), rank.reduce(x, rank.size - 1)]
    work = rank.all_reduce(x, async_op=True)
    rank.exchange(x, (rank.index + 1) % rank.size, out := np.empty(6, x.dtype), (rank.index - 1) % rank.size)
    found += [out, work.wait()]
    rank.all_reduce(x, out=x)
    return [*found, x]


def test_two_ranks_on_one_card_are_refused_on_every_process_unless_asked_for() -> None:
    for process in Doubled("doubles", 2).begin(["127.0.0.1", "1", "00", "nccl"], DOUBLED_GPUS="1"):
        said = process.communicate(timeout=SECONDS)[1]
        assert "ranks [0, 1] of 2 have one GPU, 0000:00:00.0 of " in said
        assert "start no more processes on a machine than it has GPUs, or, to share cards pass share_devices" in said


def dies(rank: zs.Rank) -> None:
    """The last rank is killed while the others wait for it."""
    if rank.index == rank.size - 1:
        os.kill(os.getpid(), 9)
    rank.barrier()


@pytest.mark.skipif(os.name != "posix", reason="processes are killed as on Unix")
def test_a_process_that_is_killed_ends_the_run_of_the_others_with_its_rank_named() -> None:
    world = WORLDS[0]
    with pytest.raises(RuntimeError, match="rank 2 of 3 can no longer be reached: its process has ended") as caught:
        world.run(dies)
    assert "did not hear of it" not in str(caught.value)  # nobody has waited for its farewell
