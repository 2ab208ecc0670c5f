"""What a rank holds beside states and activations: gathered units as the engine gathers them, logits, overheads."""

import re

import numpy as np
import pytest

import zerosim as zs
from zerosim.models import GPT, MLP, GPTConfig
from zerosim.models.units import Recompute
from zerosim.planning.activations import Block
from zerosim.planning.closed_forms import STAGES, Job
from zerosim.planning.step import (
    OVERHEADS,
    accumulator_nbytes,
    bucket_nbytes,
    gathered_nbytes,
    logits_nbytes,
    overheads_nbytes,
)

POLICY = zs.Policy("bf16")
WIDTHS = [5, 9, 4, 11, 3, 7, 6]


def job_of(model, stage, recompute="none", keep=(), ranks=2):
    names = [unit.name for unit in model.units]
    borrows = tuple((index, names.index(owner)) for index, unit in enumerate(model.units)
                    for owner in dict.fromkeys(unit.borrows.values()))
    return Job(tuple(unit.parameter_count for unit in model.units), ranks, STAGES[stage], policy=POLICY,
               recompute_units=Recompute.parse(recompute).units_per_segment,
               kept_gathered=tuple(names.index(name) for name in keep), borrows=borrows)


def peak_of_gathered(model, batch, ranks=2, **options):
    cluster = zs.Cluster(ranks)
    cluster.run(lambda rank: zs.Engine(rank, model, zs.optim.SGD(lr=0.1), policy=POLICY, stage=3, **options).step(
        [batch]) and None)
    return {memory.peak_nbytes_of(("gathered_parameter",)) for memory in cluster.memory}


@pytest.mark.parametrize("recompute", ["none", "block", "segment(2)", "segment(4)"])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_gathered_units_peak_where_the_walk_says(prefetch: int, recompute: str) -> None:
    model = MLP(WIDTHS)
    batch = np.ones((2, WIDTHS[0]), np.float32), np.ones((2, WIDTHS[-1]), np.float32)
    for ranks in (2, 3):
        found = peak_of_gathered(model, batch, ranks, recompute=recompute, prefetch=prefetch)
        assert found == {gathered_nbytes(job_of(model, 3, recompute, ranks=ranks), prefetch)}


@pytest.mark.parametrize("keep", [(), ("embed",), ("embed", "block1")])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_borrowed_and_kept_units_are_gathered_beside_their_users(prefetch: int, keep: tuple[str, ...]) -> None:
    model = GPT(GPTConfig(layers=3, channels=12, heads=3, context=8, vocabulary=17))
    batch = (np.arange(16).reshape(2, 8) % 17, np.arange(16).reshape(2, 8) % 17)
    found = peak_of_gathered(model, batch, keep_gathered=keep, prefetch=prefetch)
    assert found == {gathered_nbytes(job_of(model, 3, keep=keep), prefetch)}


def test_nothing_is_gathered_where_parameters_are_whole() -> None:
    assert [gathered_nbytes(Job((4, 8), 2, STAGES[stage]), 1) for stage in (0, 1, 2)] == [0, 0, 0]


def test_a_bucket_is_no_larger_than_the_gradients_nor_than_its_limit() -> None:
    whole, cut = (Job((400, 600, 200), 2, STAGES[stage], layout="contiguous") for stage in (1, 2))
    assert (bucket_nbytes(whole), bucket_nbytes(cut)) == (2 * 1200, 2 * 600)
    assert bucket_nbytes(cut, 10**9) == 2 * 1200
    assert bucket_nbytes(cut, 64, overlap=True) == 128
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        bucket_nbytes(cut, 0)


def test_a_second_accumulator_takes_four_bytes_and_is_cut_as_gradients_are() -> None:
    assert [accumulator_nbytes(Job((1000,), 4, states)) for states in STAGES.values()] == [4000, 4000, 1000, 1000]


def test_logits_in_16_bit_cost_six_bytes_where_the_softmax_copies_them() -> None:
    block = Block(4, 2048, 4096, 32)
    assert logits_nbytes(block, 32000) == block.positions * (6 * 32000 + 4)
    assert logits_nbytes(block, 32000, fp32_copy=False) == block.positions * (2 * 32000 + 4)
    assert logits_nbytes(Block(4, 2048, 4096, 32, itemsize=4), 32000) == block.positions * (4 * 32000 + 4)


def test_two_to_four_gigabytes_of_overhead_are_less_than_their_own_parts() -> None:
    """A rule of thumb says 2-4 GB; its own three parts are 2.7 to 7."""
    parts = [OVERHEADS[name] for name in ("runtime context", "allocator fragmentation", "communication channels")]
    assert sum(part.least_nbytes for part in parts) == 2_700_000_000
    assert sum(part.most_nbytes for part in parts) == 7_000_000_000
    assert all(part.least_nbytes <= part.middle_nbytes <= part.most_nbytes for part in OVERHEADS.values())


def test_an_overhead_is_replaced_by_name_and_an_unknown_one_is_refused() -> None:
    assert overheads_nbytes({"runtime context": 450_000_000})["runtime context"] == 450_000_000
    with pytest.raises(ValueError, match=re.escape("no overhead is called 'cuda'; there are runtime context, alloc")):
        overheads_nbytes({"cuda": 1})
    with pytest.raises(ValueError, match="runtime context must be at least 0, got -1"):
        overheads_nbytes({"runtime context": -1})
