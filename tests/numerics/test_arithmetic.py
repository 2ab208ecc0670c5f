"""One operation per element, rounded once: sums of all pairs of 8-bit numbers, of random 16-bit ones, and the rest."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.numerics.oracle import LOW, ROWS, Row, awkward_floats, cast, every_code, same
from zerosim.numerics.arrays import BLOCK
from zerosim.numerics.kernels import SMALL_SUM, NumpyKernels
from zerosim.numerics.rounding import round_to

by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
by_low = pytest.mark.parametrize("row", LOW, ids=lambda row: row.name)
PAIRS = 2**18  # random pairs of 16-bit codes
LENGTHS = [0, 1, SMALL_SUM, SMALL_SUM + 1, BLOCK - 1, BLOCK, BLOCK + 1]
BINARY = ["add_rounded", "maximum_rounded", "minimum_rounded"]
SCALAR = ["multiply_rounded", "divide_rounded"]


def applied(name: str, *operands: object, like: np.ndarray) -> np.ndarray:
    out = np.empty(like.shape, like.dtype)
    getattr(NumpyKernels(), name)(*operands, out)
    return out


def pairs(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of codes of an 8-bit format, many random ones of a 16-bit format."""
    codes = every_code(row)
    if row.bits == 8:
        return np.repeat(codes, 256), np.tile(codes, 256)
    rng = np.random.default_rng(row.p)
    return codes[rng.integers(0, codes.size, PAIRS)], codes[rng.integers(0, codes.size, PAIRS)]


@by_low
def test_a_sum_is_one_float32_addition_rounded_once(row: Row) -> None:
    a, b = pairs(row)
    with np.errstate(all="ignore"):
        in_float32 = (a.astype(np.float32) + b.astype(np.float32)).astype(row.dtype)
    assert same(applied("add_rounded", a, b, like=a), in_float32)


@by_low
def test_a_sum_is_the_array_types_own_sum(row: Row) -> None:
    a, b = pairs(row)
    with np.errstate(all="ignore"):
        assert same(applied("add_rounded", a, b, like=a), a + b)


@by_low
def test_a_sum_is_the_exact_sum_rounded_once(row: Row) -> None:
    # float32 has more than twice the bits of these formats, so rounding to it first does no harm (Figueroa 1995).
    a, b = pairs(row)
    with np.errstate(all="ignore"):
        wide = a.astype(np.float32).astype(np.float64) + b.astype(np.float32).astype(np.float64)
    assert same(cast(applied("add_rounded", a, b, like=a), np.float64), round_to(wide, row.name))


@by_low
def test_a_short_sum_has_the_bits_of_a_long_one(row: Row) -> None:
    a, b = pairs(row)
    whole = applied("add_rounded", a, b, like=a)
    short = [applied("add_rounded", x, y, like=x) for x, y in zip(np.split(a, 64), np.split(b, 64), strict=True)]
    assert same(whole, np.concatenate(short))


@by_low
def test_the_other_addend_is_first_rounded_to_the_sums_type(row: Row) -> None:
    for length in (100, SMALL_SUM + 5):
        a = cast(awkward_floats(length, 1), row.dtype)
        b = awkward_floats(length, 2)
        assert same(applied("add_rounded", a, b, like=a), applied("add_rounded", a, cast(b, row.dtype), like=a))
    a, b = np.full(1, 1, np.float16), np.full(1, 1.5 * 2.0**-11, np.float32) + np.float32(2.0**-30)
    assert applied("add_rounded", a, b, like=a) == 1 + 2.0**-10


@by_row
@pytest.mark.parametrize("length", LENGTHS)
def test_a_chain_of_sums_has_the_bits_of_its_links(row: Row, length: int) -> None:
    addends = [cast(awkward_floats(length, seed), row.dtype) for seed in range(4)]
    for count in (1, 2, 4):
        chain = addends[0].copy()
        for x in addends[1:count]:
            NumpyKernels().add_rounded(chain, x, chain)
        assert same(applied("sum_rounded", addends[:count], like=chain), chain)
        for place in range(count):
            over_itself = [x.copy() for x in addends[:count]]
            NumpyKernels().sum_rounded(over_itself, over_itself[place])
            assert same(over_itself[place], chain)


def test_a_chain_of_sums_takes_float64_and_integers_too() -> None:
    for dtype in (np.int64, np.float64):
        addends = [np.arange(5, dtype=dtype) * factor for factor in (1, 2, 3)]
        assert (applied("sum_rounded", addends, like=addends[0]) == addends[0] * 6).all()


def test_a_chain_of_sums_overflows_at_the_link_where_the_links_do() -> None:
    addends = [np.full(5000, value, np.float16) for value in (60000, 60000, -60000)]
    assert np.isposinf(applied("sum_rounded", addends, like=addends[0])).all()


def test_integers_and_float64_are_added_as_they_are() -> None:
    a, b = np.arange(5), np.arange(5) * 7
    assert (applied("add_rounded", a, b, like=a) == a + b).all()
    x, y = np.full(3, 0.1), np.full(3, 0.2)
    assert same(applied("add_rounded", x, y, like=x), x + y)


@by_row
@pytest.mark.parametrize("name", ["maximum_rounded", "minimum_rounded"])
def test_extrema_propagate_nan_and_order_the_zeros(row: Row, name: str) -> None:
    inf = np.float32(np.inf if row.has_infinity else 448)
    a = np.array([1, np.nan, 2, np.nan, -0.0, 0.0, -0.0, inf, -inf], np.float32).repeat(1000).astype(row.dtype)
    b = np.array([2, 1, np.nan, np.nan, 0.0, -0.0, -0.0, 1, 1], np.float32).repeat(1000).astype(row.dtype)
    largest = np.array([2, np.nan, np.nan, np.nan, 0.0, 0.0, -0.0, inf, 1], np.float32)
    smallest = np.array([1, np.nan, np.nan, np.nan, -0.0, -0.0, -0.0, 1, -inf], np.float32)
    expected = (largest if name == "maximum_rounded" else smallest).repeat(1000).astype(row.dtype)
    assert same(applied(name, a, b, like=a), expected)
    assert same(applied(name, b, a, like=a), expected)
    over_itself = a.copy()
    getattr(NumpyKernels(), name)(over_itself, b, over_itself)
    assert same(over_itself, expected)


def test_extrema_of_integers_are_numpys() -> None:
    a, b = np.array([1, 5, -3]), np.array([2, 4, -4])
    assert applied("maximum_rounded", a, b, like=a).tolist() == [2, 5, -3]
    assert applied("minimum_rounded", a, b, like=a).tolist() == [1, 4, -4]


@by_low
@pytest.mark.parametrize("name", SCALAR)
def test_a_product_and_a_quotient_are_computed_in_float32_and_rounded_once(row: Row, name: str) -> None:
    ufunc = {"multiply_rounded": np.multiply, "divide_rounded": np.divide}[name]
    x = every_code(row)
    for scalar in (3.0, 1 / 3, 0.1, -7.5, 1e-30, 0.0, 1e300):
        with np.errstate(all="ignore"):
            expected = ufunc(x.astype(np.float32), np.float64(scalar).astype(np.float32)).astype(row.dtype)
        assert same(applied(name, x, scalar, like=x), expected)


def test_the_scalar_is_not_rounded_to_16_bits_first() -> None:
    x = np.arange(1, 1000).astype(np.float16)
    product = applied("multiply_rounded", x, 0.1, like=x)
    assert same(product, round_to(x.astype(np.float32) * np.float32(0.1), "fp16").astype(np.float16))
    assert (product != x * np.float16(0.1)).any()


def test_a_product_may_go_to_another_type_and_is_rounded_once_there() -> None:
    x = np.array([1 + 2.0**-11 + 2.0**-40])
    out = np.empty(1, np.float16)
    NumpyKernels().multiply_rounded(x, 1.0, out)
    assert out == 1 + 2.0**-10
    wide = np.empty(1)
    NumpyKernels().divide_rounded(np.full(1, 1, np.float16), 3.0, wide)
    assert wide == 1 / 3


@by_row
def test_accumulate_adds_in_the_totals_own_width(row: Row) -> None:
    x = cast(awkward_floats(BLOCK + 3, 3), row.dtype)
    for container in (np.float32, np.float64):
        total = cast(awkward_floats(BLOCK + 3, 4), container)
        with np.errstate(all="ignore"):
            expected = total + x.astype(container)
        NumpyKernels().accumulate(total, x)
        assert same(total, expected)


def test_accumulate_refuses_a_total_of_low_precision() -> None:
    with pytest.raises(ValueError, match="got a total of type float16; add_rounded adds in low precision"):
        NumpyKernels().accumulate(np.zeros(2, np.float16), np.zeros(2, np.float16))


@by_row
def test_elementwise_widens_calls_and_rounds_once(row: Row) -> None:
    x, y = (
        cast(awkward_floats(2 * BLOCK + 5, 5), row.dtype),
        cast(awkward_floats(2 * BLOCK + 5, 6), row.dtype),
    )
    lengths = []

    def product_plus_one(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        lengths.append(len(out))
        assert a.dtype == b.dtype == out.dtype == np.float32
        np.multiply(a, b, out=out)
        np.add(out, 1, out=out)

    out = np.empty_like(x)
    NumpyKernels().elementwise(product_plus_one, x, y, out=out)
    with np.errstate(all="ignore"):
        expected = (x.astype(np.float32) * y.astype(np.float32) + np.float32(1)).astype(row.dtype)
    assert same(out, expected)
    assert lengths == [BLOCK, BLOCK, 5]


@by_row
def test_elementwise_gives_the_function_a_result_that_is_not_its_input(row: Row) -> None:
    def reads_after_writing(a: np.ndarray, out: np.ndarray) -> None:
        out[...] = 0
        np.add(out, a, out=out)

    x = cast(awkward_floats(1000, 7), row.dtype)
    expected = x.copy()
    expected[expected == 0] = 0  # 0 + -0 is +0
    NumpyKernels().elementwise(reads_after_writing, x, out=x)
    assert same(x, expected)


def test_elementwise_computes_in_float64_where_an_array_is_float64() -> None:
    x, out = np.full(3, 0.1), np.empty(3, np.float16)
    kinds = []
    NumpyKernels().elementwise(lambda a, o: (kinds.append(a.dtype), np.copyto(o, a)), x, out=out)
    assert kinds == [np.float64]


@by_row
@pytest.mark.parametrize("name", BINARY + SCALAR)
def test_results_depend_on_neither_blocks_nor_errstate_nor_an_out_that_is_the_input(row: Row, name: str) -> None:
    for length in LENGTHS:
        a, b = cast(awkward_floats(length, 8), row.dtype), cast(awkward_floats(length, 9), row.dtype)
        whole = applied(name, a, b if name in BINARY else 0.3, like=a)
        cut = length // 3
        halves = [
            applied(name, a[part], b[part] if name in BINARY else 0.3, like=a[part])
            for part in (slice(0, cut), slice(cut, None))
        ]
        assert same(whole, np.concatenate(halves))
        with np.errstate(all="raise"):
            assert same(whole, applied(name, a, b if name in BINARY else 0.3, like=a))
        for operand in ("first", "second") if name in BINARY else ("first",):
            x, y = a.copy(), b.copy()
            out = x if operand == "first" else y
            getattr(NumpyKernels(), name)(x, y if name in BINARY else 0.3, out)
            assert same(out, whole)


def test_an_out_that_overlaps_an_operand_elsewhere_is_written_as_if_it_did_not() -> None:
    for row in ROWS:
        memory = cast(awkward_floats(2 * BLOCK + 1, 10), row.dtype)
        a, b, out = memory[:-1], cast(awkward_floats(2 * BLOCK, 11), row.dtype), memory[1:]
        expected = applied("add_rounded", a.copy(), b, like=out)
        NumpyKernels().add_rounded(a, b, out)
        assert same(out.copy(), expected)


CALLS: dict[str, Callable[[NumpyKernels], None]] = {
    r"add_rounded needs arrays of one shape, got a \(2,\), b \(3,\), out \(2,\)": lambda k: k.add_rounded(
        np.zeros(2), np.zeros(3), np.zeros(2)
    ),
    "add_rounded needs its first operand in the type of out, got float32 and float16: cast_pack": lambda k: (
        k.add_rounded(np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float16))
    ),
    "maximum_rounded needs its first operand in the type of out": lambda k: k.maximum_rounded(
        np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float16)
    ),
    "multiply_rounded computes in floating point .* got x of type int64": lambda k: k.multiply_rounded(
        np.arange(2), 2.0, np.zeros(2)
    ),
    "divide_rounded computes in floating point .* got out of type int64": lambda k: k.divide_rounded(
        np.zeros(2), 2.0, np.arange(2)
    ),
    r"elementwise needs arrays of one shape, got out \(2,\), input 0 \(3,\)": lambda k: k.elementwise(
        np.negative, np.zeros(3), out=np.zeros(2)
    ),
    "elementwise computes in floating point .* got input 0 of type bool": lambda k: k.elementwise(
        np.negative, np.zeros(2, bool), out=np.zeros(2)
    ),
    "sum_rounded needs at least one addend, got none": lambda k: k.sum_rounded([], np.zeros(2)),
    r"sum_rounded needs arrays of one shape, got out \(2,\), addend 0 \(2,\), addend 1 \(3,\)": lambda k: k.sum_rounded(
        [np.zeros(2), np.zeros(3)], np.zeros(2)
    ),
    "sum_rounded needs its first operand in the type of out": lambda k: k.sum_rounded(
        [np.zeros(2), np.zeros(2, np.float32)], np.zeros(2)
    ),
    r"accumulate needs arrays of one shape, got total \(2,\), x \(3,\)": lambda k: k.accumulate(
        np.zeros(2, np.float32), np.zeros(3, np.float32)
    ),
}


@pytest.mark.parametrize("message", CALLS)
def test_operands_that_do_not_fit_are_refused_with_what_was_found(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CALLS[message](NumpyKernels())
