"""round_to and packing against exact fractions: all codes, all midpoints between them, and awkward numbers."""

import numpy as np
import pytest

import zerosim as zs
from tests.numerics.oracle import ROWS, Row, awkward_floats, by_low, by_row, cast, every_code, magnitudes, rounded, same
from tests.numerics.oracle import values as values_of
from zerosim import round_to, spacing
from zerosim.numerics import arrays, kernels, rounding

by_mode = pytest.mark.parametrize("mode", rounding.MODES)
CONTAINERS = (np.float32, np.float64)


def packed(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in another type, by the kernels."""
    out = np.empty(x.shape, dtype)
    kernels.NumpyKernels().cast_pack(x, out)
    return out


def assert_exact(x: np.ndarray, row: Row, mode: str, words: np.ndarray, *, saturate: bool = False) -> None:
    found = round_to(x, row.name, mode, bits=words if mode == "stochastic" else None, saturate=saturate)
    expected = [rounded(float(one), row, mode, int(word), saturate=saturate)
                for one, word in zip(x, words, strict=True)]
    assert same(found, np.array(expected).astype(x.dtype))


@by_row
@by_mode
def test_awkward_numbers_are_rounded_as_the_fractions_that_they_are(row: Row, mode: str) -> None:
    """Zeros keep their sign, infinities and overflows are what the format has for them, or the largest number."""
    words = np.random.default_rng(1).integers(0, 2**32, 600, dtype=np.uint32)
    for container in CONTAINERS:
        for count, saturate in ((600, False), (100, True)):
            assert_exact(cast(awkward_floats(count, row.p), container), row, mode, words[:count], saturate=saturate)


@by_low
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_code_unpacks_to_its_value_which_packs_and_rounds_to_itself(row: Row, container: type) -> None:
    codes, values = every_code(row), values_of(row).astype(container)
    unpacked = packed(codes, np.dtype(container))
    assert same(unpacked, values)
    assert (np.signbit(unpacked) == (np.arange(codes.size) >= codes.size // 2)).all()
    assert same(packed(values, row.dtype), codes)
    for mode in rounding.MODES:  # the word 0 rounds up whenever anything can
        words = np.zeros(values.shape, np.uint32) if mode == "stochastic" else None
        assert same(round_to(values, row.name, mode, bits=words), values)


@by_low
@pytest.mark.parametrize("container", CONTAINERS)
def test_midpoints_round_to_the_even_code_and_their_neighbors_to_the_nearer(row: Row, container: type) -> None:
    """From 0 to the largest value and beyond it; toward zero, to the code below until the next value is reached."""
    grid = magnitudes(row)
    beyond, below = 2 * grid[-1] - grid[-2], np.arange(grid.size)
    middle = ((grid + np.append(grid[1:], beyond)) / 2).astype(container)
    around = np.concatenate([np.nextafter(middle, container(0)), middle, np.nextafter(middle, container(np.inf))])
    codes = np.concatenate([below, below + below % 2, below + 1])
    expected = np.append(grid, np.inf if row.has_infinity else np.nan)[codes]
    almost = np.nextafter(grid[1:].astype(container), container(0))
    for sign in (container(1), container(-1)):
        assert same(round_to(sign * around, row.name), (sign * expected).astype(container))
        assert same(packed(sign * around, row.dtype).astype(np.float32), (sign * expected).astype(np.float32))
        assert same(round_to(sign * almost, row.name, "toward_zero"), sign * grid[:-1].astype(container))


@by_low
def test_packing_any_float32_gives_the_bits_of_the_array_types_own_cast(row: Row) -> None:
    """NaN too, bit for bit: packing hands them to that cast."""
    x = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
    assert (packed(x, row.dtype).view(row.code) == cast(x, row.dtype).view(row.code)).all()


@by_low
def test_sums_of_two_numbers_round_as_any_number_does_on_both_sides_of_the_largest(row: Row) -> None:
    """Each code with 40 others: ties, zeros of both signs, subnormals; with overflow and infinities, or without."""
    values, scratch = values_of(row).astype(np.float32), arrays.Scratch()
    small = values[np.abs(values) < min(zs.FORMATS[row.name].largest, 2.0**100) / 2]
    for numbers in (values, small):
        for shift in np.random.default_rng(2).integers(0, numbers.size, 40):
            with np.errstate(all="ignore"):
                sums = numbers + np.roll(numbers, shift)
                found = sums.copy()
                for here in arrays.spans(sums.size):
                    rounding.round_sums(found[here], zs.FORMATS[row.name], scratch)
            assert same(found, round_to(sums, row.name))


@pytest.mark.parametrize("dtype", [*(row.dtype for row in ROWS), np.dtype(np.float64)], ids=str)
def test_any_type_is_cast_to_any_format_with_one_rounding(dtype: np.dtype) -> None:
    """Also numbers that float32 does not have, at the places where double rounding shows."""
    x = cast(awkward_floats(800, seed=1), dtype)
    if dtype == np.float64:
        x[:300] = (1 + np.tile(2.0 ** -np.array([3, 4, 8, 11]), 75) + 2.0**-50) * 2.0 ** np.arange(-30, 0).repeat(10)
    for row in ROWS:
        expected = [rounded(float(one), row) for one in cast(x, np.float64)]
        assert same(cast(packed(x, row.dtype), np.float64), np.array(expected))
        assert same(cast(packed(x[100:300], row.dtype), np.float64), np.array(expected[100:300])), "few are as many"
    for source in (row for row in ROWS[1:] if row.dtype == dtype):
        codes = every_code(source)
        assert all(same(packed(codes, row.dtype), cast(cast(codes, np.float32), row.dtype)) for row in ROWS[1:])


def test_the_container_is_float64_for_float64_and_float32_for_all_else() -> None:
    assert round_to(0.1, "fp16").dtype == np.float64
    assert round_to(np.float32(0.1), "fp16").dtype == np.float32
    assert round_to(np.float32(0.1), "fp16").shape == ()
    for row in ROWS[1:]:
        x = np.array([0.1, -2.5], row.dtype)
        assert same(round_to(x, "fp32"), x.astype(np.float32))


# -- stochastic rounding ----------------------------------------------------------------------------------------------

def test_a_number_goes_up_exactly_when_its_word_lies_below_its_place() -> None:
    """Above the largest number, to an overflow."""
    # A quarter of the way from 1 to 1 + 2^-10: words up to 2^30 - 1 round up, (2^30 - 1 + 1/2)/2^32 < 1/4.
    words = np.array([0, 2**30 - 1, 2**30, 2**32 - 1], np.uint32)
    for x, fmt, up, down in ((1 + 2.0**-12, "fp16", 1 + 2.0**-10, 1.0), (65504 + 8, "fp16", np.inf, 65504),
                             (456.0, "fp8_e4m3", np.nan, 448)):
        found = round_to(np.full(4, x, np.float32), fmt, "stochastic", bits=words)
        np.testing.assert_array_equal(found, [up, up, down, down])
    # (0 + 1/2)/2^32 = 2^-33 of the way from 1 to 1 + 2^-10, and a little more.
    equal = np.array([1 + 2.0**-43, 1 + 2.0**-43 + 2.0**-52])
    assert round_to(equal, "fp16", "stochastic", bits=words[[0, 0]]).tolist() == [1, 1 + 2.0**-10]


# -- spacing ----------------------------------------------------------------------------------------------------------

@by_low
def test_spacing_is_the_distance_to_the_next_number_of_the_grid(row: Row) -> None:
    grid = magnitudes(row)
    assert (spacing(grid[:-1], row.name) == np.diff(grid)).all()
    assert (spacing(-grid[:-1].astype(np.float32), row.name) == np.diff(grid)).all()
    almost = np.nextafter(grid[1:], 0)  # taken where x lies after rounding
    assert (spacing(almost[:-1], row.name) == np.diff(grid)[1:]).all()
    assert np.isnan(spacing([np.inf, np.nan, -np.inf, 2 * grid[-1]], row.name)).all()


def test_spacing_of_fp32_is_numpys() -> None:
    x = np.array([0.0, 1e-45, 1e-40, 1e-38, 0.1, 1.0, 3e38], np.float32)
    assert (spacing(x, "fp32") == np.spacing(x)).all()
    assert spacing(x, "fp32").dtype == np.float32
    assert spacing(x.astype(np.float64), "fp32").dtype == np.float64


def test_spacing_has_the_published_values() -> None:
    found = {name: float(spacing(1.0, name)) for name in ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")}
    assert found == {"fp32": 2**-23, "fp16": 2**-10, "bf16": 2**-7, "fp8_e4m3": 2**-3, "fp8_e5m2": 2**-2}
    assert (spacing(0.0, "fp16"), spacing(65504.0, "fp16")) == (2.0**-24, 32)
