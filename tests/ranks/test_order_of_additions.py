"""In which order an algorithm adds, and where a mean divides, decides bits: what must differ, and by how much."""

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import REDUCTIONS, ask, bits
from tests.ranks.data import NARROW, normals
from zerosim.ranks import call

ALL_REDUCES = [algorithm for operation, algorithm in REDUCTIONS if operation == "all_reduce"]
BF16 = NARROW["bf16"]


def summed(x: list[np.ndarray], algorithm: str = "ring", operation: str = "all_reduce", **options) -> np.ndarray:
    """The reduction (n,), wherever it lies."""
    results = list(zs.Cluster(len(x)).run(lambda rank: ask(rank, operation, algorithm, x[rank.index], **options)))
    return np.concatenate(results) if operation == "reduce_scatter" else results[0]


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_fp32_on_the_wire_or_at_the_owner_is_other_arithmetic_than_the_ring_from_three_ranks_on(dtype) -> None:
    for ranks in (1, 2, 3, 4, 5, 8, 16):
        x = normals(ranks, 600, dtype)
        ring, naive = summed(x), summed(x, "naive")
        wire, everyone = summed(x, wire="fp32"), summed(x, "everyone", accumulate="fp32")
        owner = summed(x, "pairwise", "reduce_scatter", accumulate="fp32")
        assert bits(wire) == bits(owner), "the same additions, of partial sums that travel or stay with their owner"
        assert (bits(wire) != bits(ring)) == (bits(everyone) != bits(naive)) == (ranks >= 3)


@pytest.mark.parametrize("ranks", [4, 8])
def test_from_four_ranks_on_every_two_orders_differ(ranks: int) -> None:
    x = normals(ranks, 2000)
    by_algorithm = {algorithm: bits(summed(x, algorithm)) for algorithm in ALL_REDUCES}
    assert by_algorithm.pop("everyone") == by_algorithm["naive"]
    # The tree adds (0 + 1) + (2 + 3) as doubling does; halving pairs ranks the other way round.
    assert by_algorithm.pop("tree") == by_algorithm["doubling"]
    assert len(set(by_algorithm.values())) == len(by_algorithm) == 4


# -- means ------------------------------------------------------------------------------------------------------------

def test_the_rules_of_a_mean_differ_where_n_is_no_power_of_two() -> None:
    def means(ranks: int) -> dict[str, bytes]:
        return {rule: bits(summed(normals(ranks, 500, BF16), op="mean", average=rule)) for rule in call.MEANS}

    found = means(6)
    # What split divides by before is a power of two, which is exact where nothing overflows or becomes subnormal.
    assert found.pop("split") == found["sum_then_divide"]
    assert len(set(found.values())) == 3
    alone, peaks = zs.Cluster(1), set()
    for options in ({"op": "sum"}, *({"op": "mean", "average": rule} for rule in call.MEANS)):
        alone.run(lambda rank, options=options: rank.reduce_scatter(np.ones(9, BF16), **options))
        peaks.add(alone.memory.peak_nbytes[0])
        alone.runs.clear()
        alone.memory[0].reset_peak()
    assert len(peaks) == 1, "of one rank no rule needs a copy"
    assert len(set(means(4).values())) == 1


def test_hundreds_of_equal_fp16_gradients_overflow_or_vanish_by_the_rule() -> None:
    def mean(ranks: int, rule: str) -> list[float]:
        x = np.array([600, 5e-6], np.float16)  # equal on all ranks, so that every order adds the same
        return zs.Cluster(ranks).run(lambda rank: rank.all_reduce(x, op="mean", average=rule).tolist())[0]

    large, small = pytest.approx(600, rel=0.05), pytest.approx(5e-6, rel=0.05)
    assert mean(256, "sum_then_divide") == [np.inf, small]
    assert mean(256, "divide_then_sum") == [large, 0]
    assert mean(256, "split") == [large, small]
    assert mean(255, "split")[0] == np.inf, "an odd number is divided by 2 alone before the sum"
