"""Stochastic rounding: unbiased, a function of its words, and refused without them."""

import numpy as np
import pytest

from tests.numerics.oracle import LOW, Row, same
from zerosim.numerics.random import bits, normal
from zerosim.numerics.rounding import round_to

COUNT = 200_000
KEY = (0, "test", 0, "stochastic")


@pytest.mark.parametrize("row", LOW, ids=lambda row: row.name)
@pytest.mark.parametrize("place", [1.3, 0.77, 3e-5])
def test_the_mean_of_many_roundings_is_the_number_itself(row: Row, place: float) -> None:
    x = np.full(COUNT, place, np.float32)
    y = round_to(x, row.name, "stochastic", bits=bits(KEY, 0, COUNT)).astype(np.float64)
    lower, upper = y.min(), y.max()
    assert len(np.unique(y)) == 2
    assert lower < x[0] < upper
    # The mean of COUNT draws strays by (upper - lower)/(2·√COUNT) at most; six times that is never seen.
    assert abs(y.mean() - x[0]) < 3 * (upper - lower) / np.sqrt(COUNT)


def test_rounding_to_nearest_is_biased_where_stochastic_rounding_is_not() -> None:
    x = np.full(COUNT, 1 + 2.0**-12, np.float32)
    assert (round_to(x, "fp16") == 1).all()
    assert round_to(x, "fp16", "stochastic", bits=bits(KEY, 0, COUNT)).mean(dtype=np.float64) > 1 + 2.0**-13


def test_a_number_goes_up_exactly_when_its_word_lies_below_its_place() -> None:
    # A quarter of the way from 1 to 1 + 2^-10: words up to 2^30 - 1 round up, (2^30 - 1 + 1/2)/2^32 < 1/4.
    x = np.full(4, 1 + 2.0**-12, np.float32)
    words = np.array([0, 2**30 - 1, 2**30, 2**32 - 1], np.uint32)
    up, down = 1 + 2.0**-10, 1.0
    assert round_to(x, "fp16", "stochastic", bits=words).tolist() == [up, up, down, down]
    assert round_to(-x, "fp16", "stochastic", bits=words).tolist() == [-up, -up, -down, -down]


def test_a_word_that_equals_the_place_rounds_down() -> None:
    # (0 + 1/2)/2^32 = 2^-33 of the way from 1 to 1 + 2^-10, and a little more.
    equal, more = 1 + 2.0**-43, 1 + 2.0**-43 + 2.0**-52
    assert round_to(equal, "fp16", "stochastic", bits=np.array(0, np.uint32)) == 1
    assert round_to(more, "fp16", "stochastic", bits=np.array(0, np.uint32)) == 1 + 2.0**-10


def test_numbers_below_the_smallest_subnormal_jump_to_it_in_proportion() -> None:
    x = np.full(COUNT, 2.0**-24 / 5, np.float32)
    y = round_to(x, "fp16", "stochastic", bits=bits(KEY, 0, COUNT))
    assert set(np.unique(y)) == {0.0, 2.0**-24}
    assert abs((y > 0).mean() - 0.2) < 0.01


def test_beyond_the_largest_number_the_upper_neighbor_is_an_overflow() -> None:
    x = np.full(2, 65504 + 8, np.float32)  # a quarter of the way to 65536
    y = round_to(x, "fp16", "stochastic", bits=np.array([2**30 - 1, 2**30], np.uint32))
    assert y.tolist() == [np.inf, 65504]
    z = round_to(np.full(2, 456.0), "fp8_e4m3", "stochastic", bits=np.array([2**30 - 1, 2**30], np.uint32))
    assert np.isnan(z[0])
    assert z[1] == 448


def test_any_cut_of_an_array_is_rounded_alike() -> None:
    x = normal(KEY, 0, 1000)
    whole = round_to(x, "bf16", "stochastic", bits=bits(KEY, 0, 1000))
    pieces = [
        round_to(x[a:b], "bf16", "stochastic", bits=bits(KEY, a, b - a)) for a, b in [(0, 7), (7, 500), (500, 1000)]
    ]
    assert same(whole, np.concatenate(pieces))


def test_missing_superfluous_and_misshapen_bits_are_refused() -> None:
    x = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"stochastic rounding needs bits=.*numerics\.random\.bits"):
        round_to(x, "fp16", "stochastic")
    with pytest.raises(ValueError, match="mode 'nearest' takes no bits; only 'stochastic' does"):
        round_to(x, "fp16", bits=np.zeros(3, np.uint32))
    with pytest.raises(ValueError, match=r"bits of shape \(3,\) and type uint32, got \(2,\) and uint32"):
        round_to(x, "fp16", "stochastic", bits=np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match=r"bits of shape \(3,\) and type uint32, got \(3,\) and int64"):
        round_to(x, "fp16", "stochastic", bits=np.zeros(3, np.int64))  # type: ignore[arg-type]
