"""Random words as a function of key and index."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.numerics import arrays, random

bits, uniform, normal = random.bits, random.uniform, random.normal
KEY = (0, "init", 0, "layer0.weight")


def test_the_words_of_a_key_never_change() -> None:
    # Frozen: a change would change every initialization and every stochastic rounding.
    assert bits(KEY, 0, 4).tolist() == [1659959328, 677029399, 3503973107, 4055742417]
    assert bits(KEY, 10**15, 2).tolist() == [3050724329, 3880108]
    assert bits(KEY, 5, 0).shape == (0,)


def test_uniform_numbers_are_the_words_upper_bits_and_normal_ones_the_cosines_of_box_and_muller() -> None:
    words = bits(KEY, 0, 2000)
    assert uniform(KEY, 0, 2000).tolist() == [int(word) // 2**8 / 2**24 for word in words]
    first, second = ((words[start::2] + 0.5) / 2**32 for start in (0, 1))
    wanted = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    # One rounding to fp32, and float64's own.
    np.testing.assert_allclose(normal(KEY, 0, 1000), wanted, rtol=2.0**-24 + 1e-13)


@given(start=st.integers(0, 2**40), cuts=st.lists(st.integers(0, 40), max_size=5), count=st.integers(0, 40))
def test_any_split_of_a_range_gives_the_same_words(start: int, cuts: list[int], count: int) -> None:
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    for draw in (bits, uniform, normal):
        whole = draw(KEY, start, count)
        pieces = [draw(KEY, start + a, b - a) for a, b in pairwise(edges)]
        assert whole.shape == (count,)
        assert (whole == np.concatenate(pieces)).all()


def test_normal_numbers_do_not_depend_on_blocks() -> None:
    whole, late = normal(KEY, 3, 2 * arrays.BLOCK + 5), arrays.BLOCK - 7
    assert (whole[late:] == normal(KEY, 3 + late, arrays.BLOCK + 12)).all()


def test_every_part_of_the_key_changes_the_words() -> None:
    keys = [KEY, (1, *KEY[1:]), (-1, *KEY[1:]), (0, "dropout", *KEY[2:]), (0, "init", 1, KEY[3]),
            *((0, "init", 0, tensor) for tensor in ("layer0.bias", 1, "1")), (0, "init', 0, '1", 0, "1")]
    words = {tuple(bits(key, 0, 4).tolist()) for key in keys}
    assert len(words) == len(keys)


def test_numpys_integers_and_pythons_name_the_same_key() -> None:
    assert (bits((np.int64(3), "init", np.int32(1), np.int64(2)), 0, 9) == bits((3, "init", 1, 2), 0, 9)).all()


def test_a_key_needs_whole_numbers() -> None:
    with pytest.raises(TypeError):
        bits((0.5, "init", 0, "w"), 0, 1)


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    z = normal(KEY, 0, 200_000).astype(np.float64)
    assert abs(z.mean()) < 6 / np.sqrt(z.size)
    assert abs(z.var() - 1) < 6 * np.sqrt(2 / z.size)
    assert abs((np.abs(z) < 1).mean() - 0.6827) < 0.01
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.02
