"""All codes of the 16- and 8-bit formats, all midpoints between their values, and the midpoints' neighbors."""

import numpy as np
import pytest

from tests.numerics.oracle import LOW, Row, cast, decode, every_code, magnitudes, same, values
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to

by_row = pytest.mark.parametrize("row", LOW, ids=lambda row: row.name)
by_container = pytest.mark.parametrize("container", [np.float32, np.float64])


@by_row
def test_the_array_type_means_what_the_definition_says(row: Row) -> None:
    defined = np.array([decode(row, code) for code in range(2**row.bits)])
    assert same(values(row), defined)


@by_row
@by_container
def test_every_code_unpacks_to_its_value(row: Row, container: type[np.floating]) -> None:
    codes = every_code(row)
    unpacked = np.empty(codes.shape, container)
    NumpyKernels().cast_pack(codes, unpacked)
    assert same(unpacked, values(row).astype(container))
    assert (np.signbit(unpacked) == (np.arange(codes.size) >= codes.size // 2)).all()


@by_row
@by_container
@pytest.mark.parametrize("length", ["whole", "pieces"])
def test_every_value_packs_to_its_code(row: Row, container: type[np.floating], length: str) -> None:
    numbers = values(row).astype(container)
    packed = np.empty(numbers.shape, row.dtype)
    pieces = 1 if length == "whole" else 512  # short arrays take another way
    for x, out in zip(np.split(numbers, min(pieces, 16)), np.split(packed, min(pieces, 16)), strict=True):
        NumpyKernels().cast_pack(x, out)
    assert same(packed, every_code(row))


@by_row
@by_container
def test_every_value_of_the_grid_rounds_to_itself(row: Row, container: type[np.floating]) -> None:
    numbers = values(row).astype(container)
    words = np.full(numbers.shape, 0, np.uint32)  # the word that rounds up whenever anything can
    assert same(round_to(numbers, row.name), numbers)
    assert same(round_to(numbers, row.name, "toward_zero"), numbers)
    assert same(round_to(numbers, row.name, "stochastic", bits=words), numbers)


def midpoints(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """The midpoints between neighbors from 0 to the largest value and beyond it, exact in float32, and the code below
    each."""
    grid = magnitudes(row)
    beyond = 2 * grid[-1] - grid[-2]
    return (grid + np.append(grid[1:], beyond)) / 2, np.arange(grid.size)


@by_row
@by_container
@pytest.mark.parametrize("sign", [1, -1])
def test_midpoints_round_to_the_even_code_and_their_neighbors_to_the_nearer(
    row: Row, container: type[np.floating], sign: int
) -> None:
    middle, below = midpoints(row)
    middle = middle.astype(container)
    codes = np.concatenate([below, below + below % 2, below + 1])
    around = np.concatenate([np.nextafter(middle, container(0)), middle, np.nextafter(middle, container(np.inf))])
    expected = np.append(magnitudes(row), np.inf if row.has_infinity else np.nan)[codes]
    result = round_to(container(sign) * around, row.name)
    assert same(result, (sign * expected).astype(container))
    packed = np.empty(around.shape, row.dtype)
    NumpyKernels().cast_pack(container(sign) * around, packed)
    assert same(packed.astype(np.float32), (sign * expected).astype(np.float32))


@by_row
@by_container
def test_toward_zero_takes_the_code_below_until_the_next_value_is_reached(
    row: Row, container: type[np.floating]
) -> None:
    grid = magnitudes(row).astype(container)
    almost = np.nextafter(grid[1:], container(0))
    assert same(round_to(almost, row.name, "toward_zero"), grid[:-1])
    assert same(round_to(-almost, row.name, "toward_zero"), -grid[:-1])


@by_row
def test_packing_a_random_float32_gives_the_bits_of_the_array_types_own_cast(row: Row) -> None:
    x = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    packed = np.empty(x.shape, row.dtype)
    NumpyKernels().cast_pack(x, packed)
    # Here NaN too, bit for bit: packing hands them to that cast.
    assert (packed.view(row.code) == cast(x, row.dtype).view(row.code)).all()
