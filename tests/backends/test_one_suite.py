"""What a rank must do, stated once for all worlds. The in-process cluster of NumPy arrays is the reference.

Equal means equal bits, of results, bytes sent and peaks, except where a test's name speaks of a bound.
"""

from functools import cache
from itertools import product
from pathlib import Path

import pytest

import zerosim as zs
from tests.backends.worlds import DOUBLES, GPUS, HERE, MPI, Here, Outcome, Processes, World
from tests.cases import THOROUGH, chosen
from tests.ranks import programs
from tests.ranks.data import FLOATS
from zerosim.numerics import arrays

# What is trained, and the worlds on which it is tried: each on some, and on most what overlaps. Thorough: all on all.
TRAININGS = [
    ((programs.four, 3, "fp16"), (HERE, *MPI, *DOUBLES, *GPUS)),
    *(((programs.gpt, stage, "bf16"), (MPI[2], *([MPI[0]] if stage == 0 else []), *GPUS)) for stage in zs.STAGES),
    ((programs.gpt, 3, "fp16"), (HERE, *GPUS)), ((programs.gpt, 3, "fp32"), (MPI[3], *GPUS)),
    ((programs.gpt, 1, "fp16", "one contiguous vector"), (HERE, MPI[1], DOUBLES[0], GPUS[0])),
    ((programs.gpt, 3, "bf16", "by micro-batch"), (MPI[2], DOUBLES[1], GPUS[0])),
    *(((programs.gpt, 3, "bf16", how), (DOUBLES[0],)) for how in ("fp32 sums", "fp8 products, bf16 at rest")),
    ((programs.gpt, 3, "bf16", "blocks computed again"), ()),
    ((programs.on_a_mesh,), (MPI[3], *DOUBLES[:2], *GPUS)),  # hybrid sharding and ZeRO++
    ((programs.skips_and_goes_on,), (MPI[1], DOUBLES[1], GPUS[0]))]
# A stage, and what changes no bit of its training. On a GPU copies to the host go on a stream of their own, and norms
# are added in the GPU's order.
UNCHANGED = [
    (0, "overlapping", (DOUBLES[1],)), (1, "overlapping", (DOUBLES[0], DOUBLES[2], GPUS[0])),
    (2, "overlapping", (HERE, DOUBLES[5])), (3, "overlapping", (MPI[2], *GPUS[1:])),
    (3, "all on disk", (HERE, MPI[0], DOUBLES[0], *GPUS)), (2, "all on the host, overlapping", (DOUBLES[1], *GPUS))]
WHOLE_MATRICES = {1: "Muon", 2: "LAMB", 3: "Muon", 4: "Adafactor", 5: "Muon", 8: "Adafactor"}


@cache
def reference(kind, ranks: int, program, *args, **options) -> list[Outcome]:
    """The same on as many ranks in this process."""
    return Here("the reference", ranks, kind).run(program, *args, **options)


def assert_same(world: World, program, *args, kind=zs.Cluster, **options) -> list[Outcome]:
    """Equal bits and bytes on every rank; returns what the reference gave."""
    wanted = reference(kind, world.ranks, program, *args, **options)
    for rank, (mine, its) in enumerate(zip(world.run(program, *args, **options), wanted, strict=True)):
        case = f"rank {rank}: {program.__name__}{args}"
        assert arrays.sha256(mine.result) == arrays.sha256(its.result), case
        assert (mine.sent_nbytes, mine.peak_nbytes) == (its.sent_nbytes, its.peak_nbytes), case
    return wanted


def formats(world: World) -> list[str]:
    """All of them; on doubles and over MPI, which move bytes, such as stand for 64, 32, 16 and 8 bits."""
    few = dict(zip((*DOUBLES, *MPI), (
        ["fp32", "bf16"], ["bf16", "fp8_e5m2"], ["fp8_e4m3"], ["fp32"], ["bf16"], ["fp8_e5m2"],
        ["fp32", "bf16"], ["fp64", "fp8_e4m3"], ["fp32", "bf16", "fp8_e5m2"], ["fp16"]), strict=True))
    return chosen(few.get(world, FLOATS), FLOATS)


def test_every_algorithm_gives_the_same_bits_and_sends_the_same_bytes(world: World) -> None:
    """No elements, fewer than ranks and many in one format, on a world of each kind; every format at an uneven cut."""
    all_lengths = THOROUGH or world in (HERE, MPI[2], DOUBLES[0], *GPUS)
    for format in formats(world):
        lengths = tuple(chosen((0, 1, 7, 1000), (0, 1, 2, 7, 40, 1000))) if format == "bf16" and all_lengths else (7,)
        wanted = assert_same(world, programs.every_collective, format, lengths)
        assert len({arrays.sha256(outcome.result) for outcome in wanted}) == world.ranks, "data differ by rank"


def test_means_wires_and_extrema_give_the_same_bits(world: World) -> None:
    for format in formats(world):
        assert_same(world, programs.options_of_reductions, format)


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_messages_groups_works_and_memories_are_the_same(world: World, debug: bool) -> None:
    for program in (programs.messages, programs.groups, programs.works, programs.counted, programs.on_the_host):
        assert_same(world, program, debug=debug)
    assert all(outcome.result[0] for outcome in world.run(programs.works)), "an out shows nothing before wait"


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_who_waits_lets_others_go_on(world: World, debug: bool) -> None:
    assert_same(world, programs.under_way, debug=debug)
    if not world.in_order:
        assert_same(world, programs.late_comer, debug=debug)
        assert_same(world, programs.answers_after_it_has_heard)
        world.run(programs.answers_after_it_has_heard, debug=debug)


def test_a_group_serves_the_runs_after_the_one_that_made_it(world: World) -> None:
    if isinstance(world, Processes):  # whose cluster is the same in each
        found = [world.outcomes(programs.keeps_a_group, turn) for turn in range(4)]
        assert all(outcome.error for outcome in found[2])
        assert [[arrays.sha256(outcome.result) for outcome in found[turn]] for turn in (1, 3)] == [
            [arrays.sha256(outcome.result) for outcome in found[0]]] * 2


def test_trainings_give_the_same_losses_and_states(world: World) -> None:
    for (program, *args), worlds in TRAININGS:
        if THOROUGH or world in worlds:
            assert_same(world, program, *args, kind=world.kind)


def test_overlap_buckets_and_state_on_the_host_or_on_disk_change_no_bit_of_a_training(world: World) -> None:
    hows = {how for _, how, _ in UNCHANGED}
    for stage, how in chosen([(stage, how) for stage, how, worlds in UNCHANGED if world in worlds],
                             product(zs.STAGES, hows)):
        wanted = reference(world.kind, world.ranks, programs.gpt, stage, "bf16", "one step")
        for mine, its in zip(world.run(programs.gpt, stage, "bf16", how), wanted, strict=True):
            assert arrays.sha256(mine.result) == arrays.sha256(its.result), (stage, how)


def test_a_checkpoint_of_one_stage_goes_on_in_another(world: World, tmp_path: Path) -> None:
    if THOROUGH or world in (HERE, MPI[1], DOUBLES[0]):
        assert_same(world, programs.saved_and_loaded, str(tmp_path), kind=world.kind)


def test_optimizers_of_whole_matrices_and_norms_give_the_same_bits(world: World) -> None:
    if world not in DOUBLES:  # a decomposition's product of another layout has other bits: see test_cupy
        assert_same(world, programs.gpt, 2, "bf16", WHOLE_MATRICES[world.ranks], kind=world.kind)


def test_an_asynchronous_collective_goes_on_beside_arithmetic_alone(mpi: World) -> None:
    """Every hop of a ring waits for the one before; all have left before the program asks for anything."""
    for outcome in mpi.run(programs.computing):
        at_once, beside, in_all = outcome.result
        assert beside == in_all == 2 * (mpi.ranks - 1) * 48_000 * 4 // mpi.ranks
        assert at_once <= beside


def test_worlds_that_cannot_be_had_here_are_skipped_with_the_reason(lack: None) -> None:
    """In one line each: see the fixture."""
