"""Arrays and kernels without data agree with NumPy's in all that can be known without it."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.numerics.arrays import NullArray
from zerosim.numerics.kernels import NullKernels, NumpyKernels

SLICES = st.slices(7) | st.integers(-7, 6) | st.none() | st.just(Ellipsis)


def public_methods(kernels: type) -> dict[str, list[str]]:
    """Each public method and the parameters that its callers give; the kernels themselves, or their scratch, apart."""
    found = {name: member for name, member in inspect.getmembers(kernels, callable) if not name.startswith("_")}
    return {name: [one for one in inspect.signature(member).parameters if one not in ("self", "k", "scratch") or
                   name == "step_blocks"] for name, member in found.items()}


def test_cupys_kernels_have_the_methods_of_numpys_with_the_same_parameters() -> None:
    assert public_methods(CupyKernels) == public_methods(NumpyKernels)


def test_null_kernels_have_the_methods_of_numpys_and_no_others() -> None:
    kernels = NullKernels()
    assert all(callable(getattr(kernels, name)) for name in public_methods(NumpyKernels))
    own = public_methods(NullKernels)
    assert own == {name: parameters for name, parameters in public_methods(NumpyKernels).items() if name in own}
    with pytest.raises(AttributeError, match="there is no kernel 'matmull'"):
        kernels.matmull(None)


def test_what_cupys_kernels_inherit_of_numpys_goes_through_the_loops_that_they_replace() -> None:
    """A kernel of NumPy's that met a device's array by inheritance would fail only on a GPU."""
    inherited = {name for name in public_methods(CupyKernels)
                 if "cupy" not in getattr(CupyKernels, name).__module__}
    of_elements = {"add_rounded", "maximum_rounded", "minimum_rounded", "multiply_rounded", "divide_rounded",
                   "sum_rounded", "accumulate", "elementwise", "step_blocks"}
    of_rows = {"attend", "attend_gradient", "attend_tiled", "attend_tiled_gradient", "normalize_rows", "scale_rows",
               "normalize_rows_gradient", "softmax_loss", "count_targets", "index_range", "matmul", "column_sum"}
    of_matrices = {"trace", "symmetric_power", "eigenvectors", "orthogonal_factor", "mean_squares", "divide_by_roots"}
    assert inherited == of_elements | of_rows | of_matrices | {"fill", "room", "room_for", "scratch"}
    for name in ("_run", "_step", "_extremum", "_add", "_sum", "_product", "_column_sum"):
        assert "cupy" in getattr(CupyKernels, name).__module__


def test_null_kernels_compute_nothing_and_say_that_all_is_finite() -> None:
    kernels = NullKernels()
    x = kernels.empty((3, 4), np.float16)
    kernels.cast_pack(x, kernels.empty((3, 4), np.float32))
    kernels.add_rounded(x, x, x)
    kernels.matmul(x, x.T, out=kernels.empty((3, 3), np.float32))
    assert kernels.all_finite(x) is True
    assert kernels.sum_of_squares(x) == 0.0
    assert kernels.slack_nbytes(10**6) == NumpyKernels().slack_nbytes(10**6)
    assert kernels.BLOCK > 10**15, "what is not computed is one block"


def test_a_trillion_elements_take_no_memory() -> None:
    x = NullArray((10**6, 10**6), np.float32)
    assert x.size == 10**12
    assert x.nbytes == 4 * 10**12
    assert x[5:, ::2].shape == (10**6 - 5, 5 * 10**5)
    assert NullArray(2**60, np.uint8).nbytes == 2**60


@given(shape=st.lists(st.integers(0, 5), max_size=3).map(tuple), key=st.lists(SLICES, max_size=3).map(tuple))
def test_indexing_gives_the_shape_that_numpy_gives(shape: tuple[int, ...], key: tuple) -> None:
    real, null = np.zeros(shape, np.float16), NullArray(shape, np.float16)
    try:
        expected = real[key].shape
    except IndexError:
        with pytest.raises(IndexError):
            null[key]
    else:
        assert null[key].shape == expected
        null[key] = 1.0


def test_reshape_view_and_transposition_follow_numpy() -> None:
    real, null = np.zeros((4, 6), np.float32), NullArray((4, 6), np.float32)
    for shape in [(24,), (2, 12), (-1,), (3, -1), (2, -1, 3)]:
        assert null.reshape(shape).shape == null.reshape(*shape).shape == real.reshape(shape).shape
    assert null.reshape(-1).shape == (24,)
    for dtype in (np.uint8, np.uint32, ml_dtypes.bfloat16, np.float64):
        assert (null.view(dtype).shape, null.view(dtype).dtype) == (
            real.view(dtype).shape,
            real.view(dtype).dtype,
        )
    assert null.T.shape == (6, 4)
    assert (null.ndim, len(null), null.itemsize) == (2, 4, 4)
    assert null.astype(np.float16).nbytes == 48


def test_a_view_knows_the_array_that_it_looks_at_and_a_copy_does_not() -> None:
    x = NullArray((4, 6), np.float32)
    assert x.base is None
    assert x[1:].base is x
    assert x[1:].reshape(-1).view(np.uint8).base is x
    assert x.T.base is x
    assert x.copy().base is None
    assert x.astype(np.float32, copy=False) is x


def test_what_would_need_a_number_raises_with_the_reason() -> None:
    x = NullArray(3, np.float32)
    with pytest.raises(TypeError, match="neither true nor false: a branch on numbers"):
        bool(x)
    with pytest.raises(TypeError, match="NumPy's functions cannot compute with it"):
        np.asarray(x)
    with pytest.raises(TypeError, match=r"indexed by integers, slices, \.\.\. and None, got \[0, 1\]"):
        x[[0, 1]]  # type: ignore[index]
    with pytest.raises(ValueError, match=r"of shape \(3,\) has not as many elements as shape \(2, 2\)"):
        x.reshape(2, 2)
    with pytest.raises(ValueError, match=r"of shape \(3,\) and type float32 has no view as float64"):
        x.view(np.float64)
    with pytest.raises(ValueError, match=r"no negative lengths, got shape \(-1,\)"):
        NullArray(-1, np.float32)
    with pytest.raises(TypeError, match="without dimensions has no length"):
        len(NullArray((), np.float32))


COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("other", [0, 1.5, None, NullArray((2, 1), np.float32)], ids=repr)
def test_a_comparison_gives_bools_without_data(compare: Callable[[Any, Any], Any], other: Any) -> None:
    x, real = NullArray(3, np.float32), np.zeros((2, 1)) if isinstance(other, NullArray) else 0
    for found in (compare(x, other), compare(other, x)):
        assert isinstance(found, NullArray)
        assert (found.shape, found.dtype) == ((np.zeros(3) == real).shape, bool)
        with pytest.raises(TypeError, match="neither true nor false"):
            bool(found)
    with pytest.raises(ValueError, match="shape mismatch"):
        compare(x, NullArray(2, np.float32))
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


@pytest.mark.parametrize("compare", COMPARISONS)
def test_numpys_own_arrays_and_numbers_are_not_compared_with_null_ones(compare: Callable[[Any, Any], Any]) -> None:
    for other in (np.zeros(3), np.float32(0)):
        with pytest.raises(TypeError, match="a null array has no data"):
            compare(other, NullArray(3, np.float32))


def test_a_null_array_shows_its_shape_and_type() -> None:
    assert repr(NullArray((2, 3), ml_dtypes.bfloat16)) == "NullArray((2, 3), bfloat16)"
