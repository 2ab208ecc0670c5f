"""The table of formats, and what names and array types find in it."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

from tests.numerics.oracle import Row, by_row, cast
from zerosim import FORMATS, format_of


@by_row
def test_a_row_says_what_the_definition_of_its_format_and_ml_dtypes_say(row: Row) -> None:
    fmt, info = FORMATS[row.name], ml_dtypes.finfo(row.dtype)
    assert (fmt.name, fmt.dtype, fmt.bits, fmt.nbytes) == (row.name, row.dtype, row.bits, row.bits // 8)
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.min_exponent) == (row.exponent_bits, row.p, row.emin)
    assert (fmt.largest, fmt.has_infinity) == (row.largest, row.has_infinity)
    assert fmt.largest == float(info.max)
    assert (fmt.smallest_normal, fmt.smallest_subnormal) == (info.smallest_normal, info.smallest_subnormal)
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


@by_row
def test_a_format_is_found_by_name_by_array_type_and_by_itself(row: Row) -> None:
    fmt = FORMATS[row.name]
    assert format_of(row.name) is fmt
    assert format_of(row.dtype) is fmt
    assert format_of(row.dtype.type) is fmt
    assert format_of(fmt) is fmt
    assert copy.deepcopy(fmt) is pickle.loads(pickle.dumps(fmt)) is fmt
    assert str(fmt) == row.name


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="item assignment"):
        FORMATS["fp4"] = FORMATS["fp16"]
    with pytest.raises(AttributeError):
        FORMATS["fp16"].largest = 1.0
