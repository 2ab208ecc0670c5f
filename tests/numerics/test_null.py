"""Arrays and kernels without data agree with NumPy's in all that can be known without it."""

import inspect
import operator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.numerics import arrays, kernels

NullArray, NullKernels, NumpyKernels = arrays.NullArray, kernels.NullKernels, kernels.NumpyKernels


def public_methods(of: type) -> dict[str, list[str]]:
    """Each public method and the parameters that its callers give; the kernels themselves, or their scratch, apart."""
    found = {name: member for name, member in inspect.getmembers(of, callable) if not name.startswith("_")}
    return {name: [one for one in inspect.signature(member).parameters if one not in ("self", "k", "scratch") or
                   name == "step_blocks"] for name, member in found.items()}


def test_cupys_and_null_kernels_have_the_methods_of_numpys_with_the_same_parameters() -> None:
    assert public_methods(CupyKernels) == public_methods(NumpyKernels)
    kernels, own = NullKernels(), public_methods(NullKernels)
    assert all(callable(getattr(kernels, name)) for name in public_methods(NumpyKernels))
    assert own == {name: parameters for name, parameters in public_methods(NumpyKernels).items() if name in own}
    with pytest.raises(AttributeError, match="there is no kernel 'matmull'"):
        kernels.matmull(None)


def test_what_cupys_kernels_inherit_of_numpys_goes_through_the_loops_that_they_replace() -> None:
    """A kernel of NumPy's that met a device's array by inheritance would fail only on a GPU."""
    inherited = {name for name in public_methods(CupyKernels)
                 if "cupy" not in getattr(CupyKernels, name).__module__}
    of_elements = {"add_rounded", "maximum_rounded", "minimum_rounded", "multiply_rounded", "divide_rounded",
                   "sum_rounded", "elementwise", "step_blocks", "gelu", "gelu_gradient", "gradient_block",
                   "swiglu", "swiglu_gradient", "rotate"}
    of_rows = {"attend", "attend_gradient", "attend_tiled", "attend_tiled_gradient", "normalize_rows", "scale_rows",
               "normalize_rows_gradient", "softmax_loss", "count_targets", "index_range", "matmul", "column_sum"}
    of_matrices = {"trace", "symmetric_power", "eigenvectors", "orthogonal_factor", "mean_squares", "divide_by_roots",
                   "quantized"}
    assert inherited == of_elements | of_rows | of_matrices | {"fill", "matrix", "room", "room_for", "scratch"}
    for name in ("run_blocks", "_step", "_extremum", "_add", "_sum", "_product", "_column_sum"):
        assert "cupy" in getattr(CupyKernels, name).__module__


def test_null_kernels_compute_nothing_and_say_that_all_is_finite() -> None:
    kernels = NullKernels()
    x, real = kernels.empty((3, 4), np.float16), np.zeros(3)
    kernels.cast_pack(x, kernels.empty((3, 4), np.float32))
    kernels.matmul(x, x.T, out=kernels.empty((3, 3), np.float32))
    assert kernels.all_finite(x) is True
    assert kernels.widen(x) is kernels.quantized(x, "fp8_e4m3") is x
    assert [kernels.sum_of_squares(x), kernels.count_nan(x), kernels.trace(x), kernels.softmax_loss(x, x, x)] == [0] * 4
    assert (kernels.index_range(x), kernels.count_targets(x)) == ((0, 0), 12)
    assert kernels.slack_nbytes(10**6) == NumpyKernels().slack_nbytes(10**6)
    assert kernels.scratch("mine", 10**15, np.float32).nbytes == 4 * 10**15
    assert kernels.BLOCK > 10**15, "what is not computed is one block"
    assert kernels.serving(x) is kernels
    assert isinstance(kernels.serving(real), NumpyKernels), "what has data is computed"


def test_the_module_of_null_arrays_makes_arrays_and_has_numpys_types_alone() -> None:
    xp, x = NullKernels().xp, NullArray((2, 3), np.float16)
    made = [xp.empty(5, "f4"), xp.zeros((2, 3)), xp.full(4, 1.5), xp.full(4, 1, np.uint8), xp.empty_like(x),
            xp.ones_like(x, np.float64)]
    assert [(array.shape, array.dtype) for array in made] == [
        ((5,), "f4"), ((2, 3), "f8"), ((4,), "f8"), ((4,), "u1"), ((2, 3), "f2"), ((2, 3), "f8")]
    assert (xp.float32, xp.pi, xp.ndarray) == (np.float32, np.pi, NullArray)
    for name in ("exp", "what"):
        with pytest.raises(AttributeError, match=f"arrays without data have no {name}; they have empty, zeros, ones"):
            getattr(xp, name)


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
KEYS = st.lists(st.slices(7) | st.integers(-7, 6) | st.none() | st.just(Ellipsis), max_size=3).map(tuple)
OTHER_SHAPES = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 6, 24]), min_size=1, max_size=3).map(tuple)
STEPS = st.lists(st.tuples(st.just("[]"), KEYS) | st.tuples(st.just("reshape"), OTHER_SHAPES) | st.tuples(
    st.sampled_from(["view", "astype"]), st.sampled_from(["u1", "f2", "f4", "f8", ml_dtypes.bfloat16])) | st.tuples(
    st.sampled_from(["T", "copy"]), st.none()), max_size=4)


def taken(array, step: str, argument):
    """One step from an array to another."""
    match step:
        case "[]":
            return array[argument if len(argument) != 1 else argument[0]]
        case "T":
            return array.T
        case "copy":
            return array.copy()
        case "astype" if isinstance(array, np.ndarray | np.generic):
            return array.astype(argument, order="C")  # NumPy would keep an order of its own
    return getattr(array, step)(argument)


@given(shape=SHAPES | st.just((4, 6)), steps=STEPS)
@example(shape=(4, 6), steps=[("[]", (slice(1, None), slice(1, None, 2))), ("T", None), ("[]", (2,)), ("view", "u1")])
@example(shape=(4, 6), steps=[("[]", (slice(None, None, -1),)), ("reshape", (24,)), ("reshape", (-1, 3))])
def test_any_chain_of_views_and_copies_has_the_shape_strides_and_base_that_numpys_has(shape, steps) -> None:
    real, null = np.zeros(shape, np.float32), NullArray(shape, np.float32)
    first, whole = real, null
    for step, argument in steps:
        try:
            real = taken(real, step, argument)
        except (IndexError, ValueError) as error:
            with pytest.raises(type(error)):
                taken(null, step, argument)
            return
        before, null = null, taken(null, step, argument)
        real = np.asarray(real)
        assert (null.shape, null.dtype, null.ndim, null.size) == (real.shape, real.dtype, real.ndim, real.size)
        assert (null.itemsize, null.nbytes) == (real.itemsize, real.nbytes)
        if real.size and np.may_share_memory(real, first):
            assert null.base is whole
            assert NullKernels().xp.may_share_memory(null, whole)
            assert null.strides == real.strides
            assert null.flags.c_contiguous == real.flags.c_contiguous
            assert null.offset_nbytes == real.__array_interface__["data"][0] - first.__array_interface__["data"][0]
        if step in ("copy", "astype"):
            assert null.base is None
            assert null is not before
            first, whole = real, null
    assert not NullKernels().xp.may_share_memory(null, null.copy())
    null[...] = 1.0
    null.fill(2.0)
    assert null.astype(null.dtype, copy=False) is null
    assert repr(null) == f"NullArray({null.shape}, {null.dtype.name})"


@pytest.mark.parametrize("compare", [operator.eq, operator.lt])
def test_a_comparison_gives_bools_without_data(compare) -> None:
    """NumPy's own arrays and numbers are not compared with null ones."""
    x = NullArray(3, np.float32)
    for other, shape in ((0, (3,)), (1.5, (3,)), (None, (3,)), (NullArray((2, 1), np.float32), (2, 3))):
        for found in (compare(x, other), compare(other, x)):
            assert isinstance(found, NullArray)
            assert (found.shape, found.dtype) == (shape, bool)
    with pytest.raises(ValueError, match="shape mismatch"):
        compare(x, NullArray(2, np.float32))
    for other in (np.zeros(3), np.float32(0)):
        with pytest.raises(TypeError, match="a null array has no data"):
            compare(other, x)


def test_null_arrays_of_one_shape_have_flags_of_their_own_and_share_no_elements():
    one, other = NullArray((2, 3), np.float32), NullArray((2, 3), np.float32)
    one.flags.writeable = False
    assert other.flags.writeable
    assert not one.may_overlap(other)
