"""What a rank must do, stated once for all worlds. The in-process cluster of NumPy arrays is the reference.

Equal means equal bits, of results, bytes sent and peaks, except where a test's name speaks of a bound.
"""

from functools import cache

import pytest

import zerosim as zs
from tests.backends import programs
from tests.backends.worlds import Here, Outcome, World
from zerosim.numerics.arrays import sha256

# A row and a column: every length in one format, and every format at the lengths that cut unevenly.
LENGTHS = {format: (0, 1, 2, 7, 40, 1000) if format == "bf16" else (7, 40) for format in programs.FORMATS}
# Every stage in one format, and every format on one stage.
STAGES_AND_FORMATS = [(stage, compute) for stage in zs.STAGES for compute in ("fp32", "fp16", "bf16")
                      if stage == 3 or compute == "bf16"]


@cache
def reference(ranks: int, program, *args, **options) -> list[Outcome]:
    """The same on as many ranks in this process."""
    return Here("the reference", ranks).run(program, *args, **options)


@cache
def ran(world: World, program, *args) -> list[Outcome]:
    """What came of it here; it is run once, whoever asks for it."""
    return world.run(program, *args)


def assert_same(world: World, program, *args, **options) -> list[Outcome]:
    """Equal bits and bytes on every rank; returns what the reference found."""
    return same(world.run(program, *args, **options), reference(world.ranks, program, *args, **options))


def same(found: list[Outcome], wanted: list[Outcome]) -> list[Outcome]:
    """Equal bits and bytes on every rank; returns what was wanted."""
    for rank, (mine, its) in enumerate(zip(found, wanted, strict=True)):
        assert sha256(mine.result) == sha256(its.result), f"rank {rank} differs"
        assert mine.sent_nbytes == its.sent_nbytes
        assert mine.peak_nbytes == its.peak_nbytes
    return wanted


@pytest.mark.parametrize("format", programs.FORMATS)
def test_every_algorithm_gives_the_same_bits_and_sends_the_same_bytes(world: World, format: str) -> None:
    wanted = assert_same(world, programs.every_collective, format, LENGTHS[format])
    assert len({sha256(outcome.result) for outcome in wanted}) == world.ranks


@pytest.mark.parametrize("format", programs.FORMATS)
def test_means_wires_and_extrema_give_the_same_bits(world: World, format: str) -> None:
    assert_same(world, programs.options_of_reductions, format)


@pytest.mark.parametrize("program", [programs.messages, programs.groups, programs.works, programs.counted,
                                     programs.under_way, programs.late_comer],
                         ids=lambda program: program.__name__)
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_messages_groups_works_and_ledgers_are_the_same(world: World, program, debug: bool) -> None:
    assert_same(world, program, debug=debug)


def test_an_out_of_a_work_shows_nothing_before_wait(world: World) -> None:
    assert all(outcome.result[0] for outcome in world.run(programs.works))


@pytest.mark.parametrize(("stage", "compute"), STAGES_AND_FORMATS)
def test_the_worked_example_gives_the_same_weights_masters_and_moments(world: World, stage: int, compute: str) -> None:
    assert_same(world, programs.four, stage, compute)


def test_training_a_gpt_gives_the_same_losses_and_states(world: World) -> None:
    for stage, compute in STAGES_AND_FORMATS if world.ranks == 3 else [(1, "fp16"), (3, "bf16")]:
        same(ran(world, programs.gpt, stage, compute), reference(world.ranks, programs.gpt, stage, compute))


def test_the_stages_agree_here_as_they_do_there(library: World) -> None:
    """Accumulation aside, which adds in another order on stages 2 and 3 (k = 1 would agree across all four)."""
    if library.ranks == 3:
        states = [sha256([outcome.result[1] for outcome in ran(library, programs.gpt, stage, "bf16")])
                  for stage in zs.STAGES]
        assert states[0] == states[1]
        assert states[2] == states[3]


def test_optimizers_of_whole_matrices_and_norms_give_the_same_bits(world: World) -> None:
    assert_same(world, whole_matrices, {2: "LAMB", 3: "Muon", 4: "Adafactor", 5: "Muon"}[world.ranks])


def whole_matrices(rank: zs.Rank, optimizer: str):
    """GPT by whole matrices."""
    return programs.gpt(rank, 2, "bf16", optimizer, layout="whole_matrices", steps=1)


def test_levers_change_no_bit(world: World) -> None:
    plain, pulled = ran(world, programs.gpt, 3, "bf16"), world.run(with_levers)
    assert [sha256(outcome.result) for outcome in plain] == [sha256(outcome.result) for outcome in pulled]


def with_levers(rank: zs.Rank):
    """GPT with all levers pulled that move communication."""
    return programs.gpt(rank, 3, "bf16", overlap=True, prefetch=1, bucket_nbytes=5000)


def test_an_asynchronous_collective_goes_on_beside_arithmetic_alone(library: World) -> None:
    """Every hop of a ring waits for the one before; all have left before the program asks for anything."""
    for outcome in library.run(programs.computing):
        at_once, beside, in_all = outcome.result
        assert beside == in_all == 2 * (library.ranks - 1) * 48_000 * 4 // library.ranks
        assert at_once <= beside
