"""One operation per element, rounded once; and whatever the blocks, the memory and the error state are."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from tests.cases import chosen, covering
from tests.numerics.oracle import ROWS, Row, awkward_floats, by_low, by_row, cast, same
from tests.support import assert_refused
from zerosim.numerics import arrays, kernels, layer_kernels, rounding

BLOCK, SMALL, SMALL_SUM = arrays.BLOCK, arrays.SMALL, kernels.SMALL_SUM
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
OTHERS = [*(row.dtype for row in ROWS), F64]
LENGTHS = [0, 1, SMALL, SMALL + 1, SMALL_SUM, SMALL_SUM + 1, BLOCK - 1, BLOCK, BLOCK + 1]
Apply = Callable[..., object]  # (inputs ..., out)
NO_WORDS = np.zeros(BLOCK + 1, np.uint32)  # which drop nothing


def operations(row: Row, other: np.dtype) -> dict[str, tuple[list[np.dtype], np.dtype, Apply]]:
    """The types of the inputs and of the result of every kernel that looks at one element at a time; and the call."""
    k, dtype = kernels.NumpyKernels(), row.dtype
    rounded = {mode: partial(rounding.round_to, fmt=row.name, mode=mode) for mode in ("nearest", "toward_zero")}
    return {
        "a sum": ([dtype, dtype], dtype, k.add_rounded), "a mixed sum": ([dtype, other], dtype, k.add_rounded),
        "a maximum": ([dtype, dtype], dtype, k.maximum_rounded),
        "a minimum": ([dtype, dtype], dtype, k.minimum_rounded),
        "a product": ([dtype], dtype, lambda x, out: k.multiply_rounded(x, 0.3, out)),
        "a quotient": ([dtype], other, lambda x, out: k.divide_rounded(x, 3.0, out)),
        "a chain of sums": ([dtype] * 3, dtype, lambda *xs: k.sum_rounded(xs[:-1], xs[-1])),
        "a function": ([dtype, dtype], dtype, lambda a, b, out: k.elementwise(np.multiply, a, b, out=out)),
        "a cast": ([dtype], other, k.cast_pack), "a cast back": ([other], dtype, k.cast_pack),
        **{f"rounding {mode}": ([F32], F32, lambda x, out, f=function: f(x, out=out))
           for mode, function in rounded.items()},
        **({} if other != dtype else {
            "a gelu": ([dtype], dtype, k.gelu),
            "an exact gelu's slope": ([dtype, dtype], dtype, partial(k.gelu_gradient, exact=True)),
            "dropout": ([dtype], dtype, lambda x, out: k.drop(x, lambda span: NO_WORDS[span], 0, 1e30, out))}),
        "stochastic rounding": ([F32, np.dtype(np.uint32)], F32, lambda x, bits, out: rounding.round_to(
            x, row.name, "stochastic", bits=bits, out=out)),
    }


def inputs(dtypes: list[np.dtype], length: int) -> list[np.ndarray]:
    return [np.arange(length, dtype=np.uint32) * np.uint32(2654435761) if dtype == np.uint32
            else cast(awkward_floats(length, seed), dtype) for seed, dtype in enumerate(dtypes)]


def applied(apply: Apply, xs: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The result in new memory; the inputs are left as they were."""
    out, before = np.empty(xs[0].shape, dtype), [x.copy() for x in xs]
    apply(*xs, out)
    assert all(same(x, y) for x, y in zip(xs, before, strict=True))
    return out


@pytest.mark.parametrize(("row", "other"), chosen(
    [*((row, row.dtype) for row in ROWS), *covering(ROWS, OTHERS)], product(ROWS, OTHERS)), ids=str)
def test_results_depend_on_neither_blocks_nor_memory_nor_the_users_error_state(row: Row, other: np.dtype) -> None:
    for name, (dtypes, dtype, apply) in operations(row, other).items():
        for length in LENGTHS[(row.p + other.itemsize) % 3::3]:
            xs, here = inputs(dtypes, length), f"{name}, {length} elements"
            whole, cut = applied(apply, xs, dtype), length // 3
            halves = [applied(apply, [x[part] for x in xs], dtype) for part in (slice(0, cut), slice(cut, None))]
            assert same(whole, np.concatenate(halves)), here
            with np.errstate(all="raise"):
                assert same(whole, applied(apply, xs, dtype)), here
            for place, x in enumerate(xs):
                if x.dtype == dtype:  # over an operand, and over memory that begins one element later
                    over = [x.copy() for x in xs]
                    apply(*over, over[place])
                    assert same(over[place], whole), here
                    memory = np.append(x, x[:1])
                    over = [memory[:length] if other == place else x for other, x in enumerate(xs)]
                    apply(*over, memory[len(memory) - length:])
                    assert same(memory[len(memory) - length:].copy(), whole), here
                    over = [np.repeat(x, 2)[::2] for x in xs]
                    apply(*over, over[place])
                    assert same(over[place].copy(), whole), here
            spread, out = [np.repeat(x, 2)[::2] for x in xs], np.zeros((length, 3), dtype)
            apply(*spread, out[:, 1])
            assert same(out[:, 1].copy(), whole), here
            assert not out[:, ::2].any()
        xs = [x.reshape(2, 3, 5) for x in inputs(dtypes, 30)]
        out = np.zeros((5, 3, 2), dtype).T
        apply(*(np.asfortranarray(x) for x in xs), out)
        assert same(np.ascontiguousarray(out), applied(apply, xs, dtype)), name
        scalar = applied(apply, [x.reshape(30)[:1].reshape(()) for x in xs], dtype)
        assert same(scalar, applied(apply, [x.reshape(30)[:1] for x in xs], dtype).reshape(())), name


def test_another_shape_and_whole_numbers_are_refused_by_every_operation() -> None:
    for dtypes, dtype, apply in operations(ROWS[1], F32).values():
        x, *others = inputs(dtypes, 6)
        for out in (np.empty(7, dtype), np.empty((1, 6), dtype)):
            assert_refused(partial(apply, x, *others, out), r"needs (arrays of one shape|out of shape \(6,\))")
        for of, out in ((x, np.empty(6, np.int64)), (np.ones(6, np.int64), np.empty(6, dtype))):
            assert_refused(partial(apply, of, *others, out), "of type int64|int64 and|and int64|in the type of out")


@by_low
def test_memory_that_a_cast_and_its_input_share_does_not_matter(row: Row) -> None:
    for length in (10, 3 * BLOCK):
        x = awkward_floats(length, seed=7)
        narrow = applied(kernels.NumpyKernels().cast_pack, [x], row.dtype)
        memory = x.copy()
        kernels.NumpyKernels().cast_pack(memory, memory.view(row.dtype)[:length])
        assert same(memory.view(row.dtype)[:length].copy(), narrow)
        memory.view(row.dtype)[-length:] = narrow
        kernels.NumpyKernels().cast_pack(memory.view(row.dtype)[-length:], memory)
        assert same(memory, applied(kernels.NumpyKernels().cast_pack, [narrow], F32))


# -- values -----------------------------------------------------------------------------------------------------------

@by_row
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_an_operation_is_made_in_float32_and_rounded_once_and_in_float64_where_that_is_an_operand(
        row: Row, other: np.dtype) -> None:
    """A scalar is not rounded to 16 bits first; another addend is, to the type of the sum. float32 has more than twice
    the bits of the narrower formats, so rounding an exact sum to it first does no harm (Figueroa 1995)."""
    k, (x, y, z) = kernels.NumpyKernels(), inputs([row.dtype, row.dtype, other], 3000)

    def once(wide: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return wide.astype(dtype) if dtype in (F32, F64) else cast(rounding.round_to(wide, dtype), dtype)

    with np.errstate(all="ignore"):
        exact = F64 if row.bits <= 16 else F32
        assert same(applied(k.add_rounded, [x, y], row.dtype), once(x.astype(exact) + y.astype(exact), row.dtype))
        narrow = applied(k.add_rounded, [x, once(z, row.dtype)], row.dtype)
        assert same(applied(k.add_rounded, [x, z], row.dtype), narrow)
        for of, dtype in ((x, other), (z, row.dtype), (z, other)):
            work = F64 if F64 in (of.dtype, dtype) else F32
            for scalar in (3.0, 1 / 3, 0.1, -7.5, 1e-30, 0.0, 1e300):
                for call, ufunc in ((k.multiply_rounded, np.multiply), (k.divide_rounded, np.divide)):
                    found = applied(lambda x, out, s=scalar, call=call: call(x, s, out), [of], dtype)
                    wanted = once(ufunc(of.astype(work), np.float64(scalar).astype(work)), dtype)
                    assert same(found, wanted), (ufunc, scalar, of.dtype, dtype)


@by_row
@pytest.mark.parametrize("length", LENGTHS)
def test_a_chain_of_sums_has_the_bits_of_its_links(row: Row, length: int) -> None:
    addends = inputs([row.dtype] * 4, length)
    for count in (1, 2, 4):
        chain = addends[0].copy()
        for x in addends[1:count]:
            kernels.NumpyKernels().add_rounded(chain, x, chain)
        found = np.empty_like(chain)
        kernels.NumpyKernels().sum_rounded(addends[:count], found)
        assert same(found, chain)


def test_integers_and_float64_are_added_compared_and_copied_as_they_are() -> None:
    k = kernels.NumpyKernels()
    for dtype in (np.int64, np.float64):
        a, b = np.arange(5).astype(dtype) / dtype(1 if dtype is np.int64 else 10), np.arange(5)[::-1].astype(dtype)
        a = a.astype(dtype)
        for apply, wanted in ((k.add_rounded, a + b), (k.maximum_rounded, np.maximum(a, b)),
                              (k.minimum_rounded, np.minimum(a, b)), (lambda a, b, out: k.cast_pack(a, out), a),
                              (lambda a, b, out: k.sum_rounded([a, b, b], out), a + b + b)):
            assert same(applied(apply, [a, b], np.dtype(dtype)), wanted)


@by_row
@pytest.mark.parametrize("name", ["maximum_rounded", "minimum_rounded"])
def test_extrema_propagate_nan_and_order_the_zeros(row: Row, name: str) -> None:
    inf = np.float32(np.inf if row.has_infinity else 448)
    a = np.array([1, np.nan, 2, np.nan, -0.0, 0.0, -0.0, inf, -inf], np.float32).repeat(1000).astype(row.dtype)
    b = np.array([2, 1, np.nan, np.nan, 0.0, -0.0, -0.0, 1, 1], np.float32).repeat(1000).astype(row.dtype)
    largest = np.array([2, np.nan, np.nan, np.nan, 0.0, 0.0, -0.0, inf, 1], np.float32)
    smallest = np.array([1, np.nan, np.nan, np.nan, -0.0, -0.0, -0.0, 1, -inf], np.float32)
    expected = (largest if name == "maximum_rounded" else smallest).repeat(1000).astype(row.dtype)
    for xs in ([a, b], [b, a]):
        assert same(applied(getattr(kernels.NumpyKernels(), name), xs, row.dtype), expected)


@by_row
def test_elementwise_widens_calls_block_by_block_and_rounds_once(row: Row) -> None:
    """The function's result is not its input; where an array is float64, so are the blocks."""
    for work, extra in ((F32, []), (F64, [np.ones(2 * BLOCK + 5)])):
        x, y, lengths = *inputs([row.dtype] * 2, 2 * BLOCK + 5), []

        def product_plus_one(a, b, *rest_and_out, work=work, lengths=lengths):
            out = rest_and_out[-1]
            lengths.append(len(out))
            assert a.dtype == b.dtype == out.dtype == work
            out[...] = 1
            np.add(out, a * b, out=out)

        with np.errstate(all="ignore"):
            expected = cast(rounding.round_to(x.astype(work) * y.astype(work) + work.type(1), row.name), row.dtype)
        kernels.NumpyKernels().elementwise(product_plus_one, x, y, *extra, out=x)
        assert same(x, expected)
        assert lengths == [BLOCK, BLOCK, 5]


def test_a_kernel_that_has_numpy_copy_short_pieces_leaves_the_size_of_its_buffers_as_it_was() -> None:
    h, seen = np.ones((3, 8), F32), []
    k = kernels.NumpyKernels()
    k.apply = lambda *given, **options: seen.append(np.getbufsize())  # type: ignore[method-assign]
    k.swiglu(h, h[:, :4].copy())
    assert seen == [layer_kernels.PIECE] != [np.getbufsize()]


# -- memory -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_a_cast_takes_declared_scratch_that_does_not_grow_with_the_array(dtype: np.dtype) -> None:
    k, x, out = kernels.NumpyKernels(), np.zeros(40 * BLOCK, np.float32), np.empty(40 * BLOCK, dtype)
    assert k.scratch_nbytes == 0
    for _ in range(2):
        k.cast_pack(x[:2 * BLOCK], out[:2 * BLOCK])
        k.cast_pack(out[:2 * BLOCK], x[:2 * BLOCK])
    held = k.scratch_nbytes
    tracemalloc.start()
    try:
        k.cast_pack(x, out)
        k.cast_pack(out, x)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 10 * BLOCK * 8
    assert k.scratch_nbytes == held < 10 * BLOCK * 8


def test_large_arrays_begin_at_a_cache_line_and_small_ones_have_no_slack() -> None:
    k = kernels.NumpyKernels()
    for nbytes in (4096, 4100, 100_000):
        for _ in range(8):
            x = k.empty(nbytes, np.uint8)
            assert x.ctypes.data % 64 == 0
            assert x.base.nbytes == nbytes + k.slack_nbytes(nbytes) == nbytes + 64
            assert x.flags.writeable
            assert x.flags.c_contiguous
    small = k.empty((3, 4), ml_dtypes.bfloat16)
    assert (small.shape, small.dtype, small.base) == ((3, 4), ml_dtypes.bfloat16, None)
    assert (k.slack_nbytes(4095), arrays.slack_nbytes(4096)) == (0, 64)
    assert [k.empty(shape, np.float16).shape for shape in ((0, 5), (64, 32))] == [(0, 5), (64, 32)]


def test_scratch_of_a_name_grows_to_the_longest_that_was_asked_for() -> None:
    k = kernels.NumpyKernels()
    first, longer = k.scratch("mine", 10, np.float32), k.scratch("mine", 1000, np.float64)
    assert np.may_share_memory(k.scratch("mine", 5, np.uint8), longer)
    assert not np.may_share_memory(k.scratch("other", 5, np.uint8), longer)
    assert (first.shape, longer.shape, longer.dtype) == ((10,), (1000,), F64)
    assert k.scratch_nbytes == 8000 + 64 + 5
