"""Equal fingerprints mean equal bits, and nothing else does."""

import ml_dtypes
import numpy as np

from zerosim.numerics import arrays

DIFFERENT = [
    np.float32([0, 1e-45]),  # one bit beside the next
    np.zeros(2, np.float32), np.zeros(2, np.float64), np.zeros((2, 1), np.float32), np.zeros((1, 2), np.float32),
    np.zeros(2, np.int32), np.zeros(4, np.float16), np.zeros(4, ml_dtypes.bfloat16), -np.zeros(2, np.float32),
    np.zeros((), np.float32), np.zeros(1, np.float32), np.zeros(0, np.float32), np.zeros((0, 3), np.float32),
    0, 0.0, -0.0, False, None, "", b"", "0", (), {}, (0,), ((0,),), (0, 0), ((), 0), (0, ()), {"a": 0}, {"a": 0.0},
    {"b": 0}, ("a", 0), float("nan"), float("inf"), {"a": 1, "b": 2}, {"b": 2, "a": 1}, ("ab", "c"), ("a", "bc")]


def test_no_two_different_values_have_one_fingerprint() -> None:
    assert len({arrays.sha256(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_the_same_bits_have_the_same_fingerprint_however_they_lie() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for other in (x.copy(), np.asfortranarray(x), np.stack([x, x], axis=-1)[..., 0]):
        assert arrays.sha256(other) == arrays.sha256(x)


def test_lists_and_tuples_are_one_thing_and_so_are_a_number_and_the_array_without_dimensions() -> None:
    assert arrays.sha256([1, 2]) == arrays.sha256((1, 2))
    assert arrays.sha256(np.float32(3)) == arrays.sha256(np.array(3, np.float32))
    assert arrays.sha256(0.5) == arrays.sha256(np.float64(0.5))
