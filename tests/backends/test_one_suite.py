"""What a rank must do, stated once for all worlds. The in-process cluster of NumPy arrays is the reference.

Equal means equal bits, of results, bytes sent and peaks, except where a test's name speaks of a bound.
"""

from functools import cache
from pathlib import Path

import pytest

import zerosim as zs
from tests.backends.worlds import DOUBLES, GPUS, HERE, MPI, Here, Outcome, Processes, World
from tests.cases import THOROUGH, chosen
from tests.ranks import programs
from tests.ranks.data import FLOATS
from zerosim.numerics import arrays

# Every stage in one format, and every format on one stage.
STAGES_AND_FORMATS = [(stage, compute) for stage in zs.STAGES for compute in ("fp32", "fp16", "bf16")
                      if stage == 3 or compute == "bf16"]
# Each on some world; what overlaps is (3, bf16) on most of them. Thorough: all on all.
TRAINED = {HERE: [(3, "fp16")], MPI[0]: [(0, "bf16")], MPI[1]: [(1, "fp16")],
           MPI[2]: [(stage, "bf16") for stage in zs.STAGES], MPI[3]: [(3, "fp32")],
           **{double: [] for double in DOUBLES}, DOUBLES[0]: [(1, "fp16")]}
OVERLAPPED = {HERE: 2, DOUBLES[0]: 1, DOUBLES[1]: 0, DOUBLES[2]: 1, DOUBLES[3]: 0, DOUBLES[5]: 2, GPUS[0]: 1}
WHOLE_MATRICES = {1: "Muon", 2: "LAMB", 3: "Muon", 4: "Adafactor", 5: "Muon", 8: "Adafactor"}


@cache
def reference(kind, ranks: int, program, *args, **options) -> list[Outcome]:
    """The same on as many ranks in this process."""
    return Here("the reference", ranks, kind).run(program, *args, **options)


@cache
def ran(world: World, program, *args) -> list[Outcome]:
    """What came of it here; it is run once, whoever asks for it."""
    return world.run(program, *args)


def assert_same(world: World, program, *args, kind=zs.Cluster, found=None, **options) -> list[Outcome]:
    """Equal bits and bytes on every rank, of a new run or of one ``found``; returns what the reference gave."""
    wanted = reference(kind, world.ranks, program, *args, **options)
    for rank, (mine, its) in enumerate(zip(found or world.run(program, *args, **options), wanted, strict=True)):
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
    """Every length in one format, on a world of each kind, and every format at one that cuts unevenly."""
    all_lengths = THOROUGH or world in (HERE, MPI[2], DOUBLES[0], *GPUS)
    for format in formats(world):
        lengths = (0, 1, 2, 7, 40, 1000) if format == "bf16" and all_lengths else (7,)
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


def test_hybrid_sharding_and_zeropp_give_the_same_bits_on_a_mesh(world: World) -> None:
    if THOROUGH or world in (MPI[3], *DOUBLES[:2], *GPUS):
        assert_same(world, programs.on_a_mesh, kind=world.kind)


def test_the_worked_example_gives_the_same_weights_masters_and_moments(world: World) -> None:
    for stage, compute in chosen([(3, "fp16")], STAGES_AND_FORMATS):
        assert_same(world, programs.four, stage, compute, kind=world.kind)


def test_training_a_gpt_gives_the_same_losses_and_states(world: World) -> None:
    for stage, compute in chosen(TRAINED.get(world, STAGES_AND_FORMATS), STAGES_AND_FORMATS):
        found = ran(world, programs.gpt, stage, compute)
        assert_same(world, programs.gpt, stage, compute, kind=world.kind, found=found)


def test_overlap_prefetch_and_buckets_change_no_bit_of_a_training(world: World) -> None:
    if not THOROUGH and world in (*MPI[:2], MPI[3], DOUBLES[3], DOUBLES[4]):
        return  # one world of each kind is enough
    for stage in chosen([OVERLAPPED.get(world, 3)], list(zs.STAGES)):
        wanted = reference(world.kind, world.ranks, programs.gpt, stage, "bf16", "one step")
        for mine, its in zip(world.run(programs.gpt, stage, "bf16", "overlapping"), wanted, strict=True):
            assert arrays.sha256(mine.result) == arrays.sha256(its.result)


def test_a_skipped_step_is_an_error_that_every_rank_hears_and_goes_on_from(world: World) -> None:
    if THOROUGH or world in (MPI[1], DOUBLES[1], GPUS[0]):
        for outcome in assert_same(world, programs.skips_and_goes_on, kind=world.kind):
            assert ["a step was skipped on every rank (steps taken: 0)" in str(text) for text in outcome.result] == [
                True, False] * 2


def test_gradients_added_by_micro_batch_give_the_same_losses_and_states(world: World) -> None:
    if THOROUGH or world in (MPI[2], DOUBLES[1], GPUS[0]):
        assert_same(world, programs.gpt, 3, "bf16", "by micro-batch", kind=world.kind)


def test_state_on_the_host_or_on_disk_changes_no_bit_of_a_training(world: World) -> None:
    """Of one on a GPU neither: there copies go on a stream of their own, and norms are added in the GPU's order."""
    on_disk, on_host = "all on disk", "all on the host, overlapping"
    offloaded = {HERE: [(3, on_disk)], MPI[0]: [(3, on_disk)], DOUBLES[0]: [(3, on_disk)],
                 DOUBLES[1]: [(2, on_host)], **{card: [(3, on_disk), (2, on_host)] for card in GPUS}}
    for stage, how in chosen(offloaded.get(world, []), [(stage, how) for stage in zs.STAGES
                                                        for how in (on_disk, on_host)]):
        wanted = reference(world.kind, world.ranks, programs.gpt, stage, "bf16", "one step")
        for mine, its in zip(world.run(programs.gpt, stage, "bf16", how), wanted, strict=True):
            assert arrays.sha256(mine.result) == arrays.sha256(its.result), (stage, how)


def test_a_checkpoint_of_one_stage_goes_on_in_another(world: World, tmp_path: Path) -> None:
    if THOROUGH or world in (HERE, MPI[1], DOUBLES[0]):
        assert_same(world, programs.saved_and_loaded, str(tmp_path), kind=world.kind)


def test_a_contiguous_layout_gives_the_same_losses_and_states(world: World) -> None:
    if THOROUGH or world in (HERE, MPI[1], DOUBLES[0], GPUS[0]):
        assert_same(world, programs.gpt, 1, "bf16", "one contiguous vector", kind=world.kind)


def test_the_stages_agree_here_as_they_do_there(world: World) -> None:
    """Accumulation aside, which adds in another order on stages 2 and 3 (k = 1 would agree across all four)."""
    if world in (MPI[2], GPUS[0]):
        states = [arrays.sha256([outcome.result[1] for outcome in ran(world, programs.gpt, stage, "bf16")])
                  for stage in zs.STAGES]
        assert states[0] == states[1] != states[2] == states[3]


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
