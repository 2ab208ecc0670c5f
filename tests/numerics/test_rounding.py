"""round_to against exact fractions, and every rule of its docstring."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.numerics.oracle import LOW, ROWS, Row, awkward_floats, cast, rounded, same
from zerosim.numerics.arrays import BLOCK, SMALL
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.rounding import round_to

by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
by_low = pytest.mark.parametrize("row", LOW, ids=lambda row: row.name)
MODES = ["nearest", "toward_zero", "stochastic"]
WORD = st.integers(0, 2**32 - 1)


def assert_exact(x: np.ndarray, row: Row, mode: str, words: np.ndarray) -> None:
    bits = words if mode == "stochastic" else None
    found = round_to(x, row.name, mode, bits=bits)  # type: ignore[arg-type]
    expected = [rounded(float(one), row, mode, int(word)) for one, word in zip(x, words, strict=True)]
    assert same(found, np.array(expected).astype(x.dtype))


@by_row
@pytest.mark.parametrize("mode", MODES)
@given(pairs=st.lists(st.tuples(st.floats(), WORD), min_size=1, max_size=40))
def test_a_float64_is_rounded_as_the_fraction_that_it_is(row: Row, mode: str, pairs: list[tuple[float, int]]) -> None:
    x, words = zip(*pairs, strict=True)
    assert_exact(np.array(x), row, mode, np.array(words, np.uint32))


@by_row
@pytest.mark.parametrize("mode", MODES)
@given(pairs=st.lists(st.tuples(st.floats(width=32), WORD), min_size=1, max_size=40))
def test_a_float32_is_rounded_as_the_fraction_that_it_is(row: Row, mode: str, pairs: list[tuple[float, int]]) -> None:
    x, words = zip(*pairs, strict=True)
    assert_exact(np.array(x, np.float32), row, mode, np.array(words, np.uint32))


@by_row
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("container", [np.float32, np.float64])
def test_long_arrays_are_rounded_as_the_fractions_that_they_are(row: Row, mode: str, container: type) -> None:
    x = cast(awkward_floats(2000, seed=row.bits + row.p), container)
    words = np.random.default_rng(1).integers(0, 2**32, x.size, dtype=np.uint32)
    assert_exact(x, row, mode, words)


@by_low
@pytest.mark.parametrize("mode", MODES)
@given(x=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20))
def test_rounding_keeps_order_and_sign_and_is_idempotent(row: Row, mode: str, x: list[float]) -> None:
    numbers = np.sort(np.array(x, np.float32))
    bits = np.full(numbers.shape, 2**31, np.uint32) if mode == "stochastic" else None
    once = round_to(numbers, row.name, mode, bits=bits)  # type: ignore[arg-type]
    assert (np.signbit(once) == np.signbit(numbers)).all()
    finite = once[np.isfinite(once)]
    assert (np.diff(finite) >= 0).all()
    assert same(round_to(once, row.name, mode, bits=bits), once)  # type: ignore[arg-type]


def test_a_float64_is_rounded_once_and_not_by_way_of_float32() -> None:
    # Just above the midpoint of 1 and 1 + 2^-10, by less than float32 can tell.
    x = 1 + 2.0**-11 + 2.0**-40
    assert round_to(x, "fp16") == 1 + 2.0**-10
    assert round_to(np.float32(x), "fp16") == 1
    y = 1 + 2.0**-8 + 2.0**-40
    assert round_to(y, "bf16") == 1 + 2.0**-7
    assert round_to(np.float32(y), "bf16") == 1


def test_the_container_is_float64_for_float64_and_float32_for_all_else() -> None:
    assert round_to(0.1, "fp16").dtype == np.float64
    assert round_to(np.float32(0.1), "fp16").dtype == np.float32
    for row in LOW:
        x = np.array([0.1, -2.5], row.dtype)
        assert same(round_to(x, "fp32"), x.astype(np.float32))


@by_row
def test_zeros_keep_their_sign_and_so_do_numbers_that_become_zero(row: Row) -> None:
    tiny = FORMATS[row.name].smallest_subnormal / 4
    x = np.array([0.0, -0.0, tiny, -tiny])
    for mode, bits in [
        ("nearest", None),
        ("toward_zero", None),
        ("stochastic", np.full(4, 2**32 - 1, np.uint32)),
    ]:
        y = round_to(x, row.name, mode, bits=bits)  # type: ignore[arg-type]
        assert (y == 0).all()
        assert (np.signbit(y) == [False, True, False, True]).all()


@by_row
def test_infinities_stay_and_become_nan_where_the_format_has_none(row: Row) -> None:
    x = np.array([np.inf, -np.inf])
    expected = x if row.has_infinity else x * np.nan
    for mode, bits in [("nearest", None), ("toward_zero", None), ("stochastic", np.zeros(2, np.uint32))]:
        assert same(round_to(x, row.name, mode, bits=bits), expected)  # type: ignore[arg-type]


@by_low
def test_a_finite_number_overflows_to_nearest_but_not_toward_zero(row: Row) -> None:
    x = np.array([1.0, -1.0], np.float32) * np.float32(3.4e38)
    largest = np.float32(FORMATS[row.name].largest)
    overflow = np.float32(FORMATS[row.name].overflow_value)
    assert same(round_to(x, row.name), np.copysign(overflow, x))
    assert same(round_to(x, row.name, "toward_zero"), np.copysign(largest, x))


@by_low
def test_saturation_gives_the_largest_number_for_every_overflow_and_infinity(row: Row) -> None:
    largest = np.float32(FORMATS[row.name].largest)
    x = np.array([3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1.5], np.float32)
    expected = np.array([largest, -largest, largest, -largest, np.nan, 1.5], np.float32)
    words = np.zeros(6, np.uint32)
    for container in (np.float32, np.float64):
        wide = x.astype(container)
        assert same(round_to(wide, row.name, saturate=True), expected.astype(container))
        assert same(round_to(wide, row.name, "toward_zero", saturate=True), expected.astype(container))
        assert same(round_to(wide, row.name, "stochastic", bits=words, saturate=True), expected.astype(container))


def test_saturation_is_not_the_default() -> None:
    assert np.isinf(round_to(1e6, "fp16"))
    assert round_to(1e6, "fp16", saturate=True) == 65504


@by_row
@pytest.mark.parametrize("length", [0, 1, SMALL, SMALL + 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_the_result_depends_on_neither_blocks_nor_an_out_that_is_the_input(row: Row, length: int) -> None:
    x = awkward_floats(length, seed=length)
    words = np.arange(length, dtype=np.uint32) * np.uint32(2654435761)
    for mode, bits in [("nearest", None), ("stochastic", words)]:
        whole = round_to(x, row.name, mode, bits=bits)  # type: ignore[arg-type]
        cut = length // 3
        pieces = [
            round_to(x[part], row.name, mode, bits=None if bits is None else bits[part])  # type: ignore[arg-type]
            for part in (slice(0, cut), slice(cut, None))
        ]
        assert same(whole, np.concatenate(pieces))
        over_itself = x.copy()
        assert round_to(over_itself, row.name, mode, bits=bits, out=over_itself) is over_itself  # type: ignore[arg-type]
        assert same(over_itself, whole)


@pytest.mark.parametrize("length", [10, 3 * BLOCK])
def test_an_out_that_overlaps_the_input_elsewhere_is_written_as_if_it_did_not(length: int) -> None:
    memory = awkward_floats(length + 1, seed=3)
    expected = round_to(memory[:-1].copy(), "fp16")
    round_to(memory[:-1], "fp16", out=memory[1:])
    assert same(memory[1:], expected)


@pytest.mark.parametrize("mode", MODES)
def test_any_shape_and_any_strides_are_welcome(mode: str) -> None:
    x = awkward_floats(600, seed=4).reshape(20, 30)
    words = np.arange(600, dtype=np.uint32).reshape(20, 30) * np.uint32(2654435761)
    bits = words if mode == "stochastic" else None
    expected = round_to(x, "fp16", mode, bits=bits)  # type: ignore[arg-type]
    turned = None if bits is None else bits.T
    assert same(round_to(x.T, "fp16", mode, bits=turned), expected.T)  # type: ignore[arg-type]
    out = np.zeros((30, 20), np.float32).T
    round_to(x, "fp16", mode, bits=bits, out=out)  # type: ignore[arg-type]
    assert same(np.ascontiguousarray(out), expected)
    row = None if bits is None else bits[0, ::2]
    assert same(round_to(x[0, ::2], "fp16", mode, bits=row), expected[0, ::2])  # type: ignore[arg-type]
    assert round_to(np.float32(0.1), "fp16").shape == ()


@pytest.mark.parametrize("row", LOW, ids=lambda row: row.name)
def test_a_strict_errstate_changes_neither_bits_nor_raises(row: Row) -> None:
    x = awkward_floats(3000, seed=5)
    words = np.zeros(3000, np.uint32)
    calls = [("nearest", None), ("toward_zero", None), ("stochastic", words)]
    relaxed = [round_to(x, row.name, mode, bits=bits) for mode, bits in calls]  # type: ignore[arg-type]
    with np.errstate(all="raise"):
        strict = [round_to(x, row.name, mode, bits=bits) for mode, bits in calls]  # type: ignore[arg-type]
        strict_wide = round_to(np.array([1e300, 1e-300, np.inf]), row.name)
    assert all(same(a, b) for a, b in zip(relaxed, strict, strict=True))
    assert not np.isfinite(strict_wide[0])


def test_x_is_left_as_it_was() -> None:
    x = awkward_floats(1000, seed=6)
    before = x.copy()
    round_to(x, "fp16")
    assert same(x, before)


def test_what_cannot_be_rounded_is_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match="rounding mode 'up' is none of nearest, toward_zero, stochastic"):
        round_to(1.0, "fp16", "up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="given elements of type int64; it rounds float64, float32"):
        round_to(np.array([1, 2]), "fp16")
    with pytest.raises(ValueError, match=r"needs out of shape \(3,\) and type float32, got \(4,\) and float32"):
        round_to(np.zeros(3, np.float32), "fp16", out=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"needs out of shape \(3,\) and type float64, got \(3,\) and float32"):
        round_to(np.zeros(3), "fp16", out=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="no number format is named 'fp17'"):
        round_to(1.0, "fp17")
    with pytest.raises(ValueError, match=r"needs out as a NumPy array, got list; wrap it with np\.array"):
        round_to(np.zeros(2, np.float32), "fp16", out=[0.0, 0.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stochastic rounding needs bits as a NumPy array, got list"):
        round_to(np.zeros(2, np.float32), "fp16", "stochastic", bits=[1, 2])  # type: ignore[arg-type]
