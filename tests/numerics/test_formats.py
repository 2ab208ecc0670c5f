"""The table of formats, what names and array types find in it, and the spacing of its grids."""

import ml_dtypes
import numpy as np
import pytest

from tests.numerics.oracle import LOW, ROWS, Row, cast, magnitudes
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.rounding import spacing

by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@by_row
def test_a_row_says_what_the_definition_of_its_format_says(row: Row) -> None:
    fmt = FORMATS[row.name]
    assert (fmt.name, fmt.dtype, fmt.bits, fmt.nbytes) == (row.name, row.dtype, row.bits, row.bits // 8)
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.min_exponent) == (row.exponent_bits, row.p, row.emin)
    assert fmt.largest == row.largest
    assert fmt.has_infinity == row.has_infinity


@by_row
def test_a_row_says_what_ml_dtypes_says(row: Row) -> None:
    fmt, info = FORMATS[row.name], ml_dtypes.finfo(row.dtype)
    assert fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert 2.0**fmt.max_exponent <= fmt.largest < 2.0 ** (fmt.max_exponent + 1)
    assert fmt.overflow_value == np.inf if fmt.has_infinity else np.isnan(fmt.overflow_value)


@by_row
def test_overflow_begins_where_the_row_says(row: Row) -> None:
    fmt = FORMATS[row.name]
    # ml_dtypes' own casts round a float64 twice, by way of float32: their neighbors are float32's.
    at = np.array(fmt.overflow_from, np.float64 if row.name == "fp32" else np.float32)
    around = np.array([np.nextafter(at, at.dtype.type(0)), at, np.nextafter(at, at.dtype.type(np.inf))])
    below, at, above = cast(cast(around, row.dtype), np.float64)
    assert below == fmt.largest
    assert not np.isfinite(above)
    assert np.isfinite(at) == (not fmt.has_infinity)


def test_overflow_begins_at_the_published_numbers() -> None:
    assert FORMATS["fp16"].overflow_from == 65520
    assert FORMATS["fp8_e5m2"].overflow_from == 61440
    assert FORMATS["fp8_e4m3"].overflow_from == 464


@by_row
def test_a_format_is_found_by_name_by_array_type_and_by_itself(row: Row) -> None:
    fmt = FORMATS[row.name]
    assert format_of(row.name) is fmt
    assert format_of(row.dtype) is fmt
    assert format_of(row.dtype.type) is fmt
    assert format_of(fmt) is fmt
    assert str(fmt) == row.name


def test_an_unknown_name_is_answered_with_the_most_similar_ones_first() -> None:
    with pytest.raises(ValueError, match="no number format is named 'fp61'; there are fp16, "):
        format_of("fp61")
    with pytest.raises(ValueError, match="no number format is named 'bfloat'; there are bf16, "):
        format_of("bfloat")


def test_an_array_type_without_a_format_is_answered_with_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"has the array type float64; there are fp32 \(float32\), fp16 \(float16\), "):
        format_of(np.float64)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="item assignment"):
        FORMATS["fp4"] = FORMATS["fp16"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        FORMATS["fp16"].largest = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("row", LOW, ids=lambda row: row.name)
def test_spacing_is_the_distance_to_the_next_number_of_the_grid(row: Row) -> None:
    grid = magnitudes(row)
    assert (spacing(grid[:-1], row.name) == np.diff(grid)).all()
    assert (spacing(-grid[:-1].astype(np.float32), row.name) == np.diff(grid)).all()


def test_spacing_at_one_has_the_published_values() -> None:
    found = {name: float(spacing(1.0, name)) for name in FORMATS}
    assert found == {"fp32": 2**-23, "fp16": 2**-10, "bf16": 2**-7, "fp8_e4m3": 2**-3, "fp8_e5m2": 2**-2}


def test_spacing_of_fp32_is_numpys() -> None:
    x = np.array([0.0, 1e-45, 1e-40, 1e-38, 0.1, 1.0, 3e38], np.float32)
    assert (spacing(x, "fp32") == np.spacing(x)).all()
    assert spacing(x, "fp32").dtype == np.float32
    assert spacing(x.astype(np.float64), "fp32").dtype == np.float64


def test_spacing_is_taken_where_x_lies_after_rounding() -> None:
    almost_two = 2 - 2.0**-20
    assert spacing(almost_two, "fp16") == 2 * spacing(1.0, "fp16")


def test_spacing_at_the_ends_of_a_grid() -> None:
    assert spacing(0.0, "fp16") == spacing(1e-9, "fp16") == 2.0**-24
    assert spacing(65504.0, "fp16") == 32
    assert np.isnan(spacing([65520.0, np.inf, np.nan, -np.inf], "fp16")).all()
    assert np.isnan(spacing(465.0, "fp8_e4m3"))
