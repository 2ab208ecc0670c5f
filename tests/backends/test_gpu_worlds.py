"""The one suite on GPUs: in one process on one card, over NCCL in one process, over NCCL between processes.

Where the arithmetic is ours the bits are a Cluster's; where it is the library's, as in training, those of a
CuPyCluster on one card of the same kind. A world that cannot be had is skipped by name, with what is missing; `make
gpu-check` takes no excuse for what should be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import zerosim as zs
from tests.backends import programs, test_failures, test_native, test_one_suite
from tests.backends.torchrun import Torchrun, UnderMPI
from tests.backends.worlds import Here, Processes, World
from zerosim.backends.cupy.cluster import cupy_on, device_count
from zerosim.backends.nccl.adapter import NCCL
from zerosim.numerics.arrays import sha256


def lacking(gpus: int, *, nccl: bool = True) -> str | None:
    """Why so many GPUs, and NCCL, cannot be had here; None where they can."""
    try:
        count = device_count(cupy_on(0))
        if nccl:
            NCCL()
    except zs.BackendError as error:
        return str(error)
    return None if count >= gpus else f"needs {gpus} GPUs, and this machine has {count}"


class OnOneCard(Here):
    """All ranks on the first GPU."""

    def missing(self) -> str | None:
        return lacking(1, nccl=False)


class OnCards(Here):
    """All ranks in this process, each on its GPU."""

    library = "NCCL"

    def missing(self) -> str | None:
        return lacking(self.ranks)


class ProcessesOnCards(Torchrun):
    """Each rank a process with a GPU, started as torchrun does it."""

    def missing(self) -> str | None:
        return lacking(self.ranks)


class ProcessesOfMPIOnCards(UnderMPI):
    """The same, started by mpiexec."""

    def missing(self) -> str | None:
        return lacking(self.ranks) or Processes.missing(self)


WORLDS: list[World] = [
    OnOneCard("CuPy, 3 ranks on one GPU", 3, zs.CuPyCluster),
    *(OnCards(f"NCCL, {ranks} GPUs in one process", ranks, zs.NCCLCluster) for ranks in (1, 2, 3, 4, 8)),
    *(ProcessesOnCards(f"NCCL, {ranks} process(es)", ranks) for ranks in (1, 2, 4)),
    ProcessesOfMPIOnCards("NCCL, 2 processes of MPI", 2)]


MISSING = {world.name: reason for world in WORLDS if (reason := world.missing()) is not None}
THERE = [world for world in WORLDS if world.name not in MISSING]
if not THERE:
    pytest.skip(f"the suite on {len(WORLDS)} worlds of GPUs did not run: {'; '.join(dict.fromkeys(MISSING.values()))}",
                allow_module_level=True)


@pytest.fixture(params=THERE, ids=lambda world: world.name, scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield request.param
    request.param.close()


@pytest.fixture(params=[world for world in THERE if world.library], ids=lambda world: world.name, scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[World]:
    yield request.param
    request.param.close()


if MISSING:
    @pytest.mark.parametrize("name", MISSING)
    def test_a_world_that_cannot_be_had_is_named(name: str) -> None:
        pytest.skip(f"{name}: {MISSING[name]}")


# Ours alone: additions, casts, moves, ledgers. What multiplies matrices is compared with one card below.
OURS = ["test_every_algorithm_gives_the_same_bits_and_sends_the_same_bytes",
        "test_means_wires_and_extrema_give_the_same_bits",
        "test_messages_groups_works_and_ledgers_are_the_same", "test_an_out_of_a_work_shows_nothing_before_wait"]
globals().update({name: getattr(test_one_suite, name) for name in OURS})
test_what_only_moves_has_the_same_bits = test_native.test_what_only_moves_has_the_same_bits
test_a_sum_of_n_terms_is_within_n_minus_1_roundings_of_the_sum_of_magnitudes = (
    test_native.test_a_sum_of_n_terms_is_within_n_minus_1_roundings_of_the_sum_of_magnitudes)
test_an_exception_of_any_rank_comes_out_on_every_rank_with_that_rank_named = (
    test_failures.test_an_exception_of_any_rank_comes_out_on_every_rank_with_that_rank_named)
test_in_debug_mode_ranks_that_disagree_are_told_what_each_of_them_asked_for = (
    test_failures.test_in_debug_mode_ranks_that_disagree_are_told_what_each_of_them_asked_for)


@pytest.mark.parametrize("stage", zs.STAGES)
@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16"])
def test_training_over_nccl_gives_the_bits_of_the_same_ranks_on_one_card(library: World, stage: int, compute: str
                                                                         ) -> None:
    found = library.run(trained, stage, compute)
    wanted = zs.CuPyCluster(library.ranks).run(trained, stage, compute)
    assert [sha256(outcome.result) for outcome in found] == [sha256(result) for result in wanted]


def trained(rank: zs.Rank, stage: int, compute: str) -> Any:
    """Two steps of gpt-nano; every array on the host."""
    return programs.on_host(programs.gpt(rank, stage, compute))
