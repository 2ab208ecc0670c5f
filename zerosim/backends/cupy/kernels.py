"""The parts that all CuPy kernels share: memory of their own, fused launches, values in the type of the arithmetic.

Shapes: n elements; all arrays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.backends.cupy.tracing import (
    Operand,
    as_row,
    copied,
    launch,
    narrowed,
    row_for,
    run_fused,
    run_in_place,
    storage_of,
    widened,
)
from zerosim.numerics.arrays import (
    BLOCK,
    contiguous,
    copy_elements,
    is_same_memory,
    may_share_memory,
    on_device,
    spans,
    start,
    to_host,
    words,
)
from zerosim.numerics.blockwise import Operation, nonfinite_codes
from zerosim.numerics.checks import (
    FP32,
    FP64,
    check_floating,
    check_operands,
    check_product,
    check_same_type,
    check_shapes,
    is_floating,
    split_divisor,
    work_type,
)
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.kernels import NumpyKernels, check_square, scale_for
from zerosim.numerics.layer_kernels import FORMULAS, Part, by_head, future, groups, strips, times_slope

Array = Any  # cupy.ndarray
POOL_NBYTES = 512  # CuPy's pool hands out multiples of it (cupy.cuda.memory, "round up to 512")


def pool_slack_nbytes(nbytes: int) -> int:
    """The bytes of CuPy's pool that an array takes beyond its own."""
    return -nbytes % POOL_NBYTES


class DeviceScratch:
    """Named pieces of device memory that are used again and again; what is in one is good until the next call for the
    same name."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._buffers: dict[str, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that are held now."""
        return sum(buffer.nbytes + pool_slack_nbytes(buffer.nbytes) for buffer in self._buffers.values())

    def array(self, name: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """An array that is not initialized; the memory grows to the longest ever asked for under this name."""
        dtype = np.dtype(dtype)
        nbytes = (prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers.pop(name, None)  # before the longer one is asked for: both would not always fit
            self._buffers[name] = buffer = self._xp.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)


class CupyBase:
    """Fused launches on arrays of any strides, and the kernels' own memory."""

    xp: Any
    _device_scratch: DeviceScratch

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """An array on the device that is not initialized; CuPy's pool aligns it to 512 bytes."""
        dtype = np.dtype(dtype)
        if dtype.type.__module__ == "numpy":
            return self.xp.empty(shape, dtype)
        # CuPy makes no arrays of 8-bit floats, and views them as such all the same.
        return self.xp.empty(shape, f"u{dtype.itemsize}").view(dtype)

    def _fused(self, function: Callable[..., object], inputs: Sequence[Array | Operand], out: Array,
               work: np.dtype[Any] | None = None, *, traced_scratch: bool = False) -> None:  # fmt: skip
        """out = function(*inputs, result) for every element, in the type `work`, rounded once to out's; of any strides,
        spread operands contiguous."""
        arrays = [x.array if isinstance(x, Operand) else x for x in inputs]
        row = out.reshape(-1) if out.flags.c_contiguous else self._room("gaps", out.size, out.dtype)
        operands = [Operand(as_row(x.array), x.every, x.cycle) if isinstance(x, Operand) and x.is_spread
                    else Operand(row_for(array, row)) for x, array in zip(inputs, arrays, strict=True)]
        run_fused(function, operands, row, work or work_type(*arrays, out), traced_scratch=traced_scratch)
        if not out.flags.c_contiguous:
            copy_elements(row.reshape(out.shape), out)

    def _room(self, name: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        return self._device_scratch.array(name, shape, dtype)

    def _widened(self, name: str, x: Array, work: np.dtype[Any]) -> Array:
        """x in the type `work` and contiguous: itself where it is so, else a copy in the scratch memory of the name."""
        if x.dtype == work and x.flags.c_contiguous:
            return x
        wide = self._room(name, x.shape, work)
        if x.dtype == work:
            copy_elements(x, wide)
        else:
            self._fused(copy, [x], wide)
        return wide

    def _round_into(self, wide: Array, out: Array) -> None:
        """out becomes `wide`, each value rounded once, unless they are one and the same."""
        if wide is not out:
            self._fused(copy, [wide], out)

    def _room_for(self, name: str, out: Array, work: np.dtype[Any]) -> Array:
        """The array in which to compute the values of `out`: itself where it has the type `work` and no gaps."""
        return out if out.dtype == work and out.flags.c_contiguous else self._room(name, out.shape, work)

    def _row_sums(self, x: Array) -> Array:
        """The sums along the last axis of x (..., n), in x's type, in the library's order."""
        return x.sum(axis=-1)

    def _row_products(self, x: Array, y: Array) -> Array:
        """The sums along the last axis of x·y (..., n), likewise."""
        products = self._room("row products", x.shape, x.dtype)
        self._fused(lambda x, y, result: np.multiply(x, y, out=result), [x, y], products)
        return self._row_sums(products)

    def _columns(self, x: Array, out: Array, step: int, work: np.dtype[Any], *, ends: bool = False) -> None:
        """out (⌈m/step⌉, n) = the sums of every `step` rows of x (m, n), from the first to the last."""
        raise NotImplementedError

    def all_finite(self, x: Any) -> bool:
        """True where no element of x is infinite or NaN."""
        raise NotImplementedError

    def _uploaded(self, x: np.ndarray) -> Array:
        """A NumPy array's elements on the device, bit for bit: the one place where users' data come to it."""
        return self.xp.asarray(words(np.ascontiguousarray(x))).view(x.dtype)


def copy(x: Any, result: Any) -> None:
    """result = x."""
    np.copyto(result, x)


# -- Activation functions and dropout on the device: the formulas of `activation_kernels`, fused; no tables ----------
# n elements.


DRAWN_AT_ONCE = 1 << 22  # words from the host's generator

_PACK = """
extern "C" __global__ void zs_pack_{code}(const {code}* y, u8* bits, u64 n) {{
  u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (first >= n) return;
  u32 packed = 0;
  for (int j = 0; j < 8; ++j) packed = packed << 1 | (first + j < n && y[first + j] != 0 ? 1u : 0u);
  bits[first / 8] = (u8)packed;
}}
"""

_SELECT = """
extern "C" __global__ void zs_select_{code}(const u8* bits, const {code}* x, {code}* out, u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = bits[i / 8] >> (7 - i % 8) & 1 ? x[i] : ({code})0;
}}
"""

_DROP = """
extern "C" __global__ void zs_drop_{name}(const {rest}* x, const u32* drawn, {to}* out, u64 threshold, {work} factor,
                                          u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  {rest} element = x[i];
  {work} value = drawn[i] >= threshold ? zs_multiply({wide}, factor) : ({work})0;
  out[i] = {narrow};
}}
"""


class CupyActivations(CupyBase):
    """The part of the CuPy kernels that works on elements of activations."""

    def relu(self, x: Any, out: Any, bits: Any) -> None:
        """out = max(x, 0), +0 for -0, NaN for NaN; bits (⌈n/8⌉,) uint8 says which elements are let through."""
        check_operands("relu", x=x, out=out)
        self._fused(_relu, [x], out)
        row, code = words(as_row(out)), f"u{8 * out.dtype.itemsize}"
        launch(_PACK.format(code=code), f"zs_pack_{code}", bits.size, [row, bits, np.uint64(row.size)])

    def relu_gradient(self, bits: Any, dy: Any, out: Any) -> None:
        """out = dy where its bit is set, else +0, even for a NaN; equal shapes and types."""
        check_shapes("relu_gradient", dy=dy, out=out)
        check_same_type("relu_gradient", dy, out)
        code, row = f"u{8 * out.dtype.itemsize}", as_row(out)
        launch(_SELECT.format(code=code), f"zs_select_{code}", row.size, [bits, as_row(dy), row, np.uint64(row.size)])
        self._put_back(row, out)

    def gelu(self, x: Any, out: Any, *, exact: bool = False) -> None:
        """out = x/2·(1 + tanh(√(2/π)·(x + 0.044715x³))), or, ``exact``, x·Φ(x) with Φ the normal distribution function;
        equal shapes; by CUDA's tanh and exp."""
        check_operands("gelu", x=x, out=out)
        self._fused(FORMULAS["gelu", exact], [x], out, traced_scratch=True)

    def gelu_gradient(self, x: Any, dy: Any, out: Any, *, exact: bool = False) -> None:
        """out = dy · d gelu(x)/dx; equal shapes."""
        check_operands("gelu_gradient", x=x, dy=dy, out=out)
        self._fused(partial(times_slope, FORMULAS["slope", exact]), [x, dy], out, traced_scratch=True)

    def drop(self, x: Any, draw: Callable[[slice], Any], threshold: int, factor: float, out: Any) -> None:
        """out = x·factor where the word drawn for the element is at least the threshold, else +0, even for a NaN.

        ``draw(span)`` gives the words of some elements, (n,), from the host; equal shapes, n elements of any.
        """
        check_operands("drop", x=x, out=out)
        work, row, source = work_type(x, out), as_row(out), as_row(x)
        name = f"{x.dtype.name}_{out.dtype.name}"
        text = _DROP.format(name=name, rest=storage_of(x.dtype), to=storage_of(out.dtype), work=storage_of(work),
                            wide=widened("element", x.dtype, work), narrow=narrowed("value", work, out.dtype))
        for span in spans(row.size, DRAWN_AT_ONCE):
            drawn = draw(span)
            arrays = [source[span], drawn if on_device(drawn) else self._uploaded(drawn), row[span]]
            launch(text, f"zs_drop_{name}", arrays[2].size,
                   [*arrays, np.uint64(threshold), np.asarray(factor, work)[()], np.uint64(arrays[2].size)])
        self._put_back(row, out)

    def _put_back(self, row: Any, out: Any) -> None:
        if not out.flags.c_contiguous:
            copy_elements(row.reshape(out.shape), out)


def _relu(x: Any, y: Any) -> None:
    np.maximum(x, 0, out=y)


# ----------------------------------------------------------------------------------------------------
# Products of matrices on tensor cores: operands in 16 bits as they rest, sums in float32, one rounding at the end
# cuBLAS is asked for a float32 result (`gemmEx` with 16-bit inputs and a float32 output): asked for 16 bits it may
# round partial sums too. The order of its additions is its own. fp8 operands are widened to fp16, which has all their
# values.
#
# Shapes: m rows, k inner, n columns.


FP16, BF16 = FORMATS["fp16"].dtype, FORMATS["bf16"].dtype
_ONE, _ZERO = np.ones((), np.float32), np.zeros((), np.float32)


class CupyProducts(CupyBase):
    """The part of the CuPy kernels that multiplies matrices."""

    def matmul(self, a: Any, b: Any, *, bias: Any = None, out: Any) -> None:
        """out (m, n) = a (m, k) @ b (k, n) + bias (n,): multiplied and summed in float32 by cuBLAS, the bias added in
        float32, rounded once to out's type; all in float64 if any array is."""
        check_product(a, b, bias, out)
        arrays = (a, b, out) if bias is None else (a, b, bias, out)
        work = work_type(*arrays)
        product = self._room_for("product", out, work)
        self._multiply(a, b, product, work)
        if bias is not None:
            operand = Operand(self._widened("bias", bias, work), cycle=max(1, out.shape[1]))
            self._fused(lambda x, bias, result: np.add(x, bias, out=result), [product, operand], out, work)
        elif product is not out:
            self._round_into(product, out)

    def widen(self, x: Any) -> Any:
        """x itself: matrix units take operands as they rest."""
        return x

    def _multiply(self, a: Array, b: Array, product: Array, work: np.dtype[Any]) -> None:
        """product (m, n), contiguous and of type `work`, = a @ b."""
        if not a.size or not b.size:
            product[...] = 0
        elif work == FP64:
            self.xp.matmul(self._matrix("left", a, work), self._matrix("right", b, work), out=product)
        else:
            self._gemm(*self._operands(a, b), product)

    def _operands(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Both operands in a type that cuBLAS takes for both."""
        narrow = {FP16 if x.dtype.itemsize == 1 else x.dtype for x in (a, b)}
        common = narrow.pop() if len(narrow) == 1 else FP32
        return self._matrix("left", a, common), self._matrix("right", b, common)

    def _matrix(self, name: str, x: Array, dtype: np.dtype[Any]) -> Array:
        """x (m, n) in a type, in the order of memory that it has: cuBLAS takes a transposed matrix as it lies."""
        if not x.flags.c_contiguous and x.T.flags.c_contiguous:
            return self._matrix(name, x.T, dtype).T
        return self._widened(name, x, dtype)

    def _gemm(self, a: Array, b: Array, product: Array) -> None:
        """product = a @ b; cuBLAS, which counts columns first, is asked for the transposed product bᵀ @ aᵀ."""
        cublas, types = self.xp.cuda.cublas, self._types()
        (m, k), n = a.shape, b.shape[1]
        (a_turned, a_step), (b_turned, b_step) = _lies(a), _lies(b)
        operations = (cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)
        cublas.gemmEx(self.xp.cuda.Device().cublas_handle, operations[b_turned], operations[a_turned], n, m, k,
                      _ONE.ctypes.data, start(b), types[b.dtype], b_step, start(a), types[a.dtype], a_step,
                      _ZERO.ctypes.data, start(product), types[FP32], n, cublas.CUBLAS_COMPUTE_32F,
                      cublas.CUBLAS_GEMM_DEFAULT)  # fmt: skip

    def _types(self) -> dict[np.dtype[Any], int]:
        runtime = self.xp.cuda.runtime
        return {FP32: runtime.CUDA_R_32F, FP16: runtime.CUDA_R_16F, BF16: runtime.CUDA_R_16BF}


def _lies(x: Array) -> tuple[bool, int]:
    """True for a matrix that lies transposed, False for a contiguous one; and the elements from line to line."""
    turned = not x.flags.c_contiguous
    return turned, x.shape[0 if turned else 1]


# -- Whole matrices on the device: decompositions by cuSOLVER, in float64, rounded to float32 once -------------------
# Legend: a symmetric matrix A (m, m); a matrix X (r, c). What is computed is what `matrix_kernels` says; eigenvectors
# are those that the library finds, which differ from LAPACK's by their signs, and in the space of equal eigenvalues.


class CupyMatrix(CupyBase):
    """The part of the CuPy kernels that works on whole matrices. All arrays are float32."""

    def trace(self, a: Any) -> float:
        """The sum of the diagonal of a (m, m), in float64."""
        check_square("trace", a)
        return float(np.add.reduce(to_host(a.diagonal().copy()), dtype=FP64))

    def symmetric_power(self, a: Any, exponent: float, damping: float, out: Any) -> None:
        """out = (a + damping·I)^exponent for a symmetric a (m, m) without negative eigenvalues.

        Eigenvalues that rounding has made negative count as 0. Raises ValueError for what is not square or not finite.
        """
        values, vectors = self.xp.linalg.eigh(self._checked("symmetric_power", a))
        with np.errstate(all="ignore"):
            powers = self._uploaded((np.maximum(to_host(values), 0.0) + damping) ** exponent)
        scaled = self.empty(vectors.shape, FP64)
        columns = Operand(powers, cycle=max(1, powers.size))
        self._fused(lambda v, power, result: np.multiply(v, power, out=result), [vectors, columns], scaled)
        self._round_into(self.xp.matmul(scaled, vectors.T), out)

    def eigenvectors(self, a: Any, out: Any) -> None:
        """out (m, m) = the eigenvectors of a symmetric a (m, m) as columns, that of the largest eigenvalue first.

        Raises ValueError for what is not square or not finite.
        """
        self._round_into(self.xp.linalg.eigh(self._checked("eigenvectors", a))[1][:, ::-1], out)

    def orthogonal_factor(self, a: Any, out: Any) -> None:
        """out (m, m) = Q, where a (m, m) = Q·R and R is upper triangular.

        Raises ValueError for what is not square or not finite.
        """
        self._round_into(self.xp.linalg.qr(self._checked("orthogonal_factor", a))[0], out)

    def _checked(self, call: str, a: Any) -> Any:
        check_square(call, a)
        if not self.all_finite(a):
            raise ValueError(f"{call} found inf or NaN in a matrix {a.shape}: sums of squares of gradients have left "
                             "float32's range; clip the gradients, or scale the loss less")
        return a.astype(FP64)

    def mean_squares(self, x: Any, rows: Any, columns: Any) -> None:
        """rows (r,) and columns (c,) become the means of the squares of x (r, c) along the other side; the squares are
        float32, their sums float64."""
        if x.ndim != 2 or rows.shape != x.shape[:1] or columns.shape != x.shape[1:]:
            raise ValueError(f"mean_squares takes x (r, c), rows (r,) and columns (c,), got {x.shape}, {rows.shape}, "
                             f"{columns.shape}")
        squares = self._room("squares", x.shape, FP32)
        self._fused(lambda x, result: np.multiply(x, x, out=result), [x], squares)
        for axis, means in ((1, rows), (0, columns)):
            count = max(1, x.shape[axis])
            sums = squares.sum(axis=axis, dtype=FP64)
            self._fused(_divided_by(count), [sums], means)

    def divide_by_roots(self, x: Any, rows: Any, columns: Any, out: Any) -> None:
        """out = x/√V, where V = rows·columns/mean(rows) is the matrix (r, c) whose means along its sides those are."""
        mean = float(np.add.reduce(to_host(rows), dtype=FP64) / max(1, rows.size))
        shares = self._room("shares", rows.shape, FP32)
        self._fused(_divided_by(mean), [rows], shares, FP64)

        def divided(x: Any, share: Any, column: Any, result: Any) -> None:
            np.divide(x, np.sqrt(np.multiply(share, column)), out=result)

        per_row, per_column = Operand(shares, every=max(1, x.shape[1])), Operand(columns, cycle=max(1, x.shape[1]))
        self._fused(divided, [x, per_row, per_column], out, FP32)


def _divided_by(divisor: float) -> Any:
    return lambda x, result: np.divide(x, divisor, out=result)


# -- Sums and tests over arrays on the device, in NumPy's own order of additions where one is promised ---------------
# Shapes: n elements or columns; m rows.


LEAF = 128  # elements that NumPy's pairwise sum adds without halving (PW_BLOCKSIZE, numpy/_core/src/umath)

_CODES_FROM = """
extern "C" __global__ void zs_codes_from_{code}(const {code}* x, u32* found, u64 mask, u64 low, u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && ((u64)x[i] & mask) >= low) {action};
}}
"""

# A thread adds a leaf as NumPy does, in eight partial sums; 512 leaves make a block, halved and halved again.
_LEAVES = """
extern "C" __global__ void zs_leaves_{name}(const {rest}* x, double* sums, {work} factor, {work} divisor,
                                            u64 leaves) {{
  u64 leaf = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (leaf >= leaves) return;
  double part[8];
  for (int i = 0; i < 128; i += 8) {{
    #pragma unroll
    for (int j = 0; j < 8; ++j) {{
      {rest} element = x[leaf * 128 + i + j];
      double quotient = zs_divide(zs_multiply({wide}, factor), divisor), square = zs_multiply(quotient, quotient);
      part[j] = i ? zs_add(part[j], square) : square;
    }}
  }}
  sums[leaf] = zs_add(zs_add(zs_add(part[0], part[1]), zs_add(part[2], part[3])),
                      zs_add(zs_add(part[4], part[5]), zs_add(part[6], part[7])));
}}
"""

_HALVES = """
extern "C" __global__ void zs_halves(const double* leaves, double* sums, u64 blocks) {
  u64 block = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  double level[10];  // level[k]: a sum of 2^k leaves that waits for its neighbor
  double sum = 0;
  for (int i = 0; i < 512; ++i) {
    sum = leaves[block * 512 + i];
    int k = 0;
    for (; (i >> k) & 1; ++k) sum = zs_add(level[k], sum);
    level[k] = sum;
  }
  sums[block] = sum;
}
"""

_COLUMNS = """
extern "C" __global__ void zs_columns_{name}(const {rest}* x, {to}* out, u64 rows, u64 columns, u64 step, u64 n,
                                             int ends) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64 first = i / columns * step, column = i % columns, stop = first + step < rows ? first + step : rows;
  {work} sum = 0;
  #pragma unroll 8
  for (u64 row = first; row < stop; ++row) {{
    {rest} element = x[row * columns + column];
    sum = row == first ? {wide} : zs_add(sum, {wide});
  }}
  if (ends) sum = zs_add(sum, ({work})0);
  out[i] = {narrow};
}}
"""


class CupyReductions(CupyBase):
    """The part of the CuPy kernels that makes few numbers of many."""

    _numbers: NumpyKernels

    def all_finite(self, x: Any) -> bool:
        """True where no element of x is infinite or NaN."""
        constants = nonfinite_codes(x.dtype)
        if not on_device(x) or constants is None:
            return self._numbers.all_finite(x) if constants else True
        return not self._codes_from(x, int(constants[0]), constants[1], "*found = 1u")

    def count_nan(self, x: Any) -> int:
        """The number of elements that are NaN; none of a type that has no NaN. Any type, byte order and strides."""
        if not on_device(x):
            return self._numbers.count_nan(x)
        constants = nonfinite_codes(x.dtype)
        if constants is None:
            return 0
        has_infinity = x.dtype == np.float64 or format_of(x.dtype).has_infinity
        return self._codes_from(x, int(constants[0]), constants[1] + has_infinity, "atomicAdd(found, 1u)")

    def _codes_from(self, x: Array, mask: int, low: int, action: str) -> int:
        """The value that `action` leaves of 0 after every element whose code, masked, is at least `low`."""
        row, found = as_row(x), self.xp.zeros(1, np.uint32)
        code = f"u{8 * x.dtype.itemsize}"
        launch(_CODES_FROM.format(code=code, action=action), f"zs_codes_from_{code}", row.size,
               [row, found, np.uint64(mask), np.uint64(low), np.uint64(row.size)])
        return int(to_host(found)[0])

    def sum_of_squares(self, x: Any, divisor: float = 1.0) -> float:
        """The sum of (x/divisor)², the quotient in float32 (float64 if x is), squares and sums in float64: NumPy's
        order, that is blocks of BLOCK elements added pairwise and their sums left to right. The last, shorter block is
        brought to the host, where NumPy itself adds it."""
        check_floating("sum_of_squares", x=x)
        if not on_device(x):
            return self._numbers.sum_of_squares(x, divisor)
        row, total = as_row(x), 0.0
        blocks = row.size // BLOCK
        if blocks:
            for sum_of_block in to_host(self._square_sums(row, blocks, divisor)).tolist():
                total += sum_of_block
        if row.size % BLOCK:
            total += self._numbers.sum_of_squares(to_host(row[blocks * BLOCK :]), divisor)
        return total

    def _square_sums(self, row: Array, blocks: int, divisor: float) -> Array:
        work, count = work_type(row), blocks * (BLOCK // LEAF)
        leaves, sums = self._room("leaves", count, np.float64), self._room("square sums", blocks, np.float64)
        text = _LEAVES.format(name=row.dtype.name, rest=storage_of(row.dtype), work=storage_of(work),
                              wide=widened("element", row.dtype, work))  # fmt: skip
        with np.errstate(all="ignore"):
            numbers = [np.asarray(number, work)[()] for number in split_divisor(divisor, work)]
        launch(text, f"zs_leaves_{row.dtype.name}", count, [row, leaves, *numbers, np.uint64(count)])
        launch(_HALVES, "zs_halves", blocks, [leaves, sums, np.uint64(blocks)])
        return sums

    def column_sum(self, x: Any, out: Any) -> None:
        """out (n,) = sum of the rows of x (m, n), added one after the other in float32 (float64 if x or out is),
        rounded once; zeros where m is 0. A thread has a column: the order is NumPy's."""
        check_floating("column_sum", x=x, out=out)
        if x.ndim != 2 or out.shape != x.shape[1:]:
            raise ValueError(f"column_sum adds the rows of x (m, n) into out (n,), got {x.shape} and {out.shape}")
        self._columns(x, out, max(1, x.shape[0]), work_type(x, out), ends=True)

    def _columns(self, x: Array, out: Array, step: int, work: np.dtype[Any], *, ends: bool = False) -> None:
        """out (⌈m/step⌉, n) = the sums of every `step` rows of x (m, n), from the first to the last."""
        row = out.reshape(-1) if out.flags.c_contiguous else self._room("columns", out.size, out.dtype)
        name = f"{x.dtype.name}_{out.dtype.name}_{work.name}"
        text = _COLUMNS.format(name=name, rest=storage_of(x.dtype), to=storage_of(out.dtype), work=storage_of(work),
                               wide=widened("element", x.dtype, work), narrow=narrowed("sum", work, out.dtype))
        launch(text, f"zs_columns_{name}", row.size,
               [contiguous(x), row, *map(np.uint64, (*x.shape, step, row.size)), np.int32(ends)])
        if not out.flags.c_contiguous:
            out[...] = row.reshape(out.shape)

    def quantized(self, x: Any, fmt: str) -> Any:
        """x as an 8-bit matrix unit sees it, with one scale for all of it: see `fp8`."""
        row, dtype = as_row(x), format_of(fmt).dtype
        values = self.empty(x.shape, np.float32)
        self._fused(_finite_magnitude, [row], values.reshape(-1), FP32)
        # By codes, which are in the order of magnitudes: CuPy's own maximum takes subnormal numbers for zeros.
        top = float(to_host(words(values).max()).view(np.float32)) if x.size else 0.0
        scale = np.float32(scale_for(top, format_of(fmt)))

        def rounded(x: Any, result: Any) -> None:
            np.multiply(x, scale, out=result)
            result.tape.rounded(result, dtype)
            np.divide(result, scale, out=result)

        self._fused(rounded, [row], values.reshape(-1), FP32)
        return values


def _finite_magnitude(x: Any, result: Any) -> None:
    """|x|, and 0 for infinities and NaN."""
    magnitude = np.abs(x)
    result[...] = 0
    np.copyto(result, magnitude, where=magnitude <= FORMATS["fp32"].largest)


# -- Kernels that work on rows, on the device: normalization, tables of rows, losses of softmax ----------------------
# Legend: M rows, C columns, V classes. Everything is computed in float32 (float64 where an array is) and rounded once;
# the sums along rows are CuPy's, in an order of its own that depends on nothing but the row's length; sums over rows
# are added in NumPy's order.


HALVINGS = 11  # of BLOCK rows, until 128 or fewer are left of each part, whose lengths are rounded to multiples of 8

# A thread adds one column of one class, in the blocks that NumPy's kernel makes: the class's first row in the block,
# plus the others, which np.add.reduceat halves down to 128 and adds in eight partial sums. Halves that wait for their
# other half are kept in arrays: of recursion a compiler cannot tell how much of a thread's stack, 1 KiB, it takes.
_ADD_ROWS = """
ZS {work} zs_element_{name}(const {rest}* x, u64 place) {{
  {rest} element = x[place];
  return {wide};
}}
ZS {work} zs_leaf_{name}(const {rest}* x, const long long* order, u64 columns, u64 column, u32 n) {{
  {work} part[8], sum = 0;
  u32 at = 0;
  for (; at + 8 <= n; at += 8)
    for (int j = 0; j < 8; ++j) {{
      {work} value = zs_element_{name}(x, order[at + j] * columns + column);
      part[j] = at ? zs_add(part[j], value) : value;
    }}
  if (at) sum = zs_add(zs_add(zs_add(part[0], part[1]), zs_add(part[2], part[3])),
                       zs_add(zs_add(part[4], part[5]), zs_add(part[6], part[7])));
  for (; at < n; ++at) {{
    {work} value = zs_element_{name}(x, order[at] * columns + column);
    sum = at ? zs_add(sum, value) : value;
  }}
  return sum;
}}
ZS {work} zs_pairwise_{name}(const {rest}* x, const long long* order, u64 columns, u64 column, u32 n) {{
  {work} left[{halvings}];  // a left half's sum, while the right one is added
  u32 right[{halvings}];    // rows of a right half that is not begun yet; 0 when it is
  for (int depth = 0;;) {{
    for (; n > 128; ++depth) {{
      u32 half = n / 2 - n / 2 % 8;
      right[depth] = n - half;
      n = half;
    }}
    {work} sum = zs_leaf_{name}(x, order, columns, column, n);
    order += n;
    for (; depth && !right[depth - 1]; --depth) sum = zs_add(left[depth - 1], sum);
    if (!depth) return sum;
    left[depth - 1] = sum;
    n = right[depth - 1];
    right[depth - 1] = 0;
  }}
}}
extern "C" __global__ void zs_add_rows_{name}(const {rest}* x, const long long* order, const long long* starts,
                                              {to}* out, u64 columns, u64 step, u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64 first = starts[i / columns], stop = starts[i / columns + 1], column = i % columns;
  {work} sum = 0;
  for (u64 at = first; at < stop;) {{
    u64 ends = (at / step + 1) * step < stop ? (at / step + 1) * step : stop;
    {work} part = zs_element_{name}(x, order[at] * columns + column);
    if (ends > at + 1)
      part = zs_add(part, zs_pairwise_{name}(x, order + at + 1, columns, column, (u32)(ends - at - 1)));
    sum = at == first ? part : zs_add(sum, part);
    at = ends;
  }}
  out[i] = {narrow};
}}
"""

_PICK = """
extern "C" __global__ void zs_pick_{name}(const {work}* shifted, const {target}* targets, {work}* picked, u64 columns,
                                          u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) picked[i] = (long long)targets[i] < 0 ? ({work})0 : shifted[i * columns + targets[i]];
}}
"""

_LOSS_GRADIENT = """
extern "C" __global__ void zs_loss_gradient_{name}(const {rest}* x, const {target}* targets, const {sums}* log_sums,
                                                   {to}* out, {work} factor, u64 columns, u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  {rest} element = x[i];
  long long target = (long long)targets[i / columns];
  {work} p = zs_exp(zs_subtract({wide}, ({work})log_sums[i / columns]));
  if (target == (long long)(i % columns)) p = zs_subtract(p, ({work})1);
  p = target < 0 ? ({work})0 : zs_multiply(p, factor);
  out[i] = {narrow};
}}
"""


class CupyRows(CupyBase):
    """The part of the CuPy kernels that works on rows."""

    # --- normalization --------------------------------------------------------------------------------------

    def normalize_rows(self, x: Any, w: Any, b: Any, epsilon: float, mean: Any, rstd: Any, y: Any) -> None:
        """y = (x - mean)·rstd·w + b, x and y (M, C), w and b (C,); writes mean and rstd = 1/√(variance + ε) (M,)."""
        work, columns = work_type(x), x.shape[1]
        wide = self._widened("rows", x, work)
        self._fused(lambda s, result: np.divide(s, columns, out=result), [self._row_sums(wide)], mean)
        centered = self._room("centered", x.shape, work)
        self._fused(_subtract, [wide, _per_row(mean, x)], centered, work)

        def deviation(s: Any, result: Any) -> None:
            np.divide(s, columns, out=result)
            result += epsilon
            np.divide(1, np.sqrt(result, out=result), out=result)

        self._fused(deviation, [self._row_products(centered, centered)], rstd)
        self.scale_rows(x, w, b, mean, rstd, y)

    def scale_rows(self, x: Any, w: Any, b: Any, mean: Any, rstd: Any, y: Any) -> None:
        """y as `normalize_rows` computes it, from the statistics that it wrote: the same bits."""

        def scaled(x: Any, mean: Any, rstd: Any, w: Any, b: Any, result: Any) -> None:
            np.subtract(x, mean, out=result)
            result *= rstd
            result *= w
            result += b

        self._fused(scaled, [x, _per_row(mean, x), _per_row(rstd, x), _per_column(w), _per_column(b)], y, work_type(x))

    def normalize_rows_gradient(self, x: Any, w: Any, mean: Any, rstd: Any, dy: Any, dx: Any, dw: Any,
                                db: Any) -> None:  # fmt: skip
        """dx = (dŷ - mean(dŷ) - x̂·mean(dŷ·x̂))·rstd with dŷ = dy·w; dw = Σ_M dy·x̂, db = Σ_M dy."""
        work, columns = work_type(x, dy), x.shape[1]
        normal, gradient = (self._room(name, x.shape, work) for name in ("centered", "gradient"))
        statistics = [_per_row(mean, x), _per_row(rstd, x)]
        wide_dy = self._widened("dy", dy, work)
        self._fused(_normal, [x, *statistics], normal, work)
        self._fused(lambda dy, x, result: np.multiply(dy, x, out=result), [wide_dy, normal], gradient, work)
        self._sum_over_rows(gradient, dw, work)
        self._sum_over_rows(wide_dy, db, work)
        self._fused(lambda dy, w, result: np.multiply(dy, w, out=result), [wide_dy, _per_column(w)], gradient, work)
        along, shift = self._row_products(gradient, normal), self._row_sums(gradient)

        def finished(g: Any, normal: Any, along: Any, shift: Any, rstd: Any, result: Any) -> None:
            np.multiply(normal, np.divide(along, columns), out=result)
            np.subtract(g, result, out=result)
            result -= np.divide(shift, columns)
            result *= rstd

        self._fused(finished, [gradient, normal, _per_row(along, x), _per_row(shift, x), statistics[1]], dx, work)

    def _sum_over_rows(self, x: Array, out: Array, work: np.dtype[Any]) -> None:
        """out (C,) = the sums over the rows of x (M, C), blocks of BLOCK elements first, then the blocks."""
        step = max(1, BLOCK // max(1, x.shape[1]))
        sums = self._room("sums of blocks", (-(-len(x) // step), x.shape[1]), work)
        self._columns(x, sums, step, work)
        self._columns(sums, out, max(1, len(sums)), work)

    # --- tables of rows -------------------------------------------------------------------------------------

    def index_range(self, x: Any) -> tuple[int, int]:
        """The smallest and the largest of some whole numbers; 0 and -1 where there are none."""
        return (int(x.min()), int(x.max())) if x.size else (0, -1)

    def take_rows(self, table: Any, rows: Any, out: Any) -> None:
        """out (M, C) = table[rows]: rows (M,) of whole numbers that the table (V, C), of out's type, has."""
        copy_elements(words(table)[rows].view(out.dtype), out)

    def add_rows(self, x: Any, rows: Any, out: Any) -> None:
        """out (V, C): for each v the sum of the x[i] with rows[i] == v, 0 where there is none; x (M, C), rows (M,);
        added in NumPy's order."""
        work, columns = work_type(x, out), x.shape[1]
        order = self.xp.argsort(rows.astype(np.int64), kind="stable")
        starts = self.xp.searchsorted(rows.astype(np.int64)[order], self.xp.arange(out.shape[0] + 1))
        name = f"{x.dtype.name}_{out.dtype.name}"
        text = _ADD_ROWS.format(name=name, rest=storage_of(x.dtype), to=storage_of(out.dtype), work=storage_of(work),
                                wide=widened("element", x.dtype, work), narrow=narrowed("sum", work, out.dtype),
                                halvings=HALVINGS)
        target = out if out.flags.c_contiguous else self._room("rows", out.shape, out.dtype)
        launch(text, f"zs_add_rows_{name}", out.size,
               [contiguous(x), order.astype(np.int64), starts.astype(np.int64), target,
                *map(np.uint64, (columns, max(1, BLOCK // max(1, columns)), out.size))])  # fmt: skip
        if target is not out:
            copy_elements(target, out)

    # --- losses of softmax ----------------------------------------------------------------------------------

    def count_targets(self, targets: Any) -> int:
        """The number of targets that are classes: 0 or more."""
        return int((targets >= 0).sum()) if on_device(targets) else int(np.count_nonzero(targets >= 0))

    def softmax_loss(self, logits: Any, targets: Any, log_sums: Any) -> float:
        """Σ over rows with a target of log Σ_v exp(logit_v) - logit_target, in float64; targets (M,), below 0 for none.

        The log of each row's sum is written to log_sums (M,), in its own type.
        """
        if not logits.size:
            return 0.0
        work, columns = work_type(logits), logits.shape[1]
        wide = self._widened("rows", logits, work)
        top = wide.max(axis=1)
        shifted = self._room("centered", logits.shape, work)
        self._fused(_subtract, [wide, _per_row(top, logits)], shifted, work)
        picked = self._room("picked", len(logits), work)
        name = f"{work.name}_{targets.dtype.name}"
        text = _PICK.format(name=name, work=storage_of(work), target=storage_of(targets.dtype))
        launch(text, f"zs_pick_{name}", len(logits),
               [shifted, contiguous(targets), picked, np.uint64(columns), np.uint64(len(logits))])
        self._fused(lambda x, result: np.exp(x, out=result), [shifted], shifted, work)
        logs = self._room("logs", len(logits), work)
        self._fused(lambda s, result: np.log(s, out=result), [self._row_sums(shifted)], logs, work)
        self._fused(lambda log, top, result: np.add(log, top, out=result), [logs, top], log_sums, work)
        return _total(to_host(logs), to_host(picked), to_host(targets), columns)

    def softmax_loss_gradient(self, logits: Any, targets: Any, log_sums: Any, factor: float, out: Any) -> None:
        """out = (softmax(logits) - [v = target])·factor, 0 in rows without a target; out (M, V) may be the logits."""
        work, columns = work_type(logits), logits.shape[1]
        name = "_".join(x.dtype.name for x in (logits, targets, log_sums, out))
        text = _LOSS_GRADIENT.format(
            name=name, rest=storage_of(logits.dtype), target=storage_of(targets.dtype), to=storage_of(out.dtype),
            sums=storage_of(log_sums.dtype), work=storage_of(work), wide=widened("element", logits.dtype, work),
            narrow=narrowed("p", work, out.dtype))  # fmt: skip
        target = out if out.flags.c_contiguous else self._room("gradient", out.shape, out.dtype)
        launch(text, f"zs_loss_gradient_{name}", out.size,
               [contiguous(logits), contiguous(targets), contiguous(log_sums), target, np.asarray(factor, work)[()],
                np.uint64(columns), np.uint64(out.size)])  # fmt: skip
        if target is not out:
            copy_elements(target, out)


def _total(logs: np.ndarray, picked: np.ndarray, targets: np.ndarray, columns: int) -> float:
    """The sum of the losses of rows with a target, in float64, on the host and in NumPy's order."""
    total, step = 0.0, max(1, BLOCK // max(1, columns))
    with np.errstate(all="ignore"):
        for first in range(0, len(logs), step):
            here = first + np.flatnonzero(targets[first : first + step] >= 0)
            total += float(np.add.reduce(np.subtract(logs[here], picked[here], dtype=np.float64)))
    return total


def _per_row(values: Array, x: Array) -> Operand:
    return Operand(values, every=max(1, x.shape[-1]))


def _per_column(values: Array) -> Operand:
    return Operand(values, cycle=max(1, values.size))


def _subtract(x: Any, y: Any, result: Any) -> None:
    np.subtract(x, y, out=result)


def _normal(x: Any, mean: Any, rstd: Any, result: Any) -> None:
    np.subtract(x, mean, out=result)
    result *= rstd


# -- Causal attention on the device: what `attention_kernels` computes, in longer strips and larger groups -----------
# Legend: B batch, T tokens, H heads, D channels of a head, C = H·D; R rows and S columns of a part of P. Scores and
# softmax are float32, their products cuBLAS's in float32, in stacks; P and dS are rounded to the type at rest where
# NumPy's kernels round them.


STRIP = 1024  # rows of P at a time
TILE = 512  # rows and columns at a time, in the tiled form
GROUP = 1 << 26  # elements of a strip of all heads that are taken together


class CupyAttention(CupyBase):
    """The part of the CuPy kernels that attends."""

    def attend(self, qkv: Any, heads: int, p: Any, o: Any) -> None:
        """o (B, T, C) from qkv (B, T, 3C); where it is to be kept, P (B, H, T, T) too, zeros above the diagonal."""
        for part in groups(qkv, heads, STRIP, GROUP):
            q, k, v = self._by_head("qkv", qkv, heads, part, 3)
            wide = self._room("o", q.shape, q.dtype)
            for rows in strips(qkv.shape[1], STRIP):
                s = self._probabilities(q, k, rows, None if p is None else p[part], qkv.dtype)
                self.xp.matmul(s, v[:, :, : rows.stop], out=wide[:, :, rows])
            self._round_into(wide, by_head(o, heads, 1)[0, *part])

    def attend_gradient(self, qkv: Any, heads: int, p: Any, do: Any, dqkv: Any, *, again: bool = False) -> None:
        """dqkv (B, T, 3C) from do (B, T, C) and P, which is read, or written ``again`` first, to the same bits."""
        for part in groups(qkv, heads, STRIP, GROUP):
            q, k, v = self._by_head("qkv", qkv, heads, part, 3)
            (g,) = self._by_head("do", do, heads, part, 1)
            dq, dk, dv = wide = self._room("dqkv", (3, *q.shape), q.dtype)
            for rows in reversed(strips(qkv.shape[1], STRIP)):  # the last strip has all columns: others add to it
                past, last = slice(0, rows.stop), rows.stop == qkv.shape[1]
                if again:
                    s = self._probabilities(q, k, rows, p[part], qkv.dtype)
                else:
                    s = self._widened("kept p", p[part][:, :, rows, past], q.dtype)
                dots = self.xp.matmul(g[:, :, rows], v[:, :, past].swapaxes(2, 3))
                ds = self._gradients_of_scores(s, dots, self._row_products(s, dots), qkv.dtype, q)
                self.xp.matmul(ds, k[:, :, past], out=dq[:, :, rows])
                self._add_product(ds.swapaxes(2, 3), q[:, :, rows], dk[:, :, past], anew=last)
                self._add_product(s.swapaxes(2, 3), g[:, :, rows], dv[:, :, past], anew=last)
            self._round_into(wide, by_head(dqkv, heads, 3)[:, *part])

    def _probabilities(self, q: Array, k: Array, rows: slice, p: Array | None, dtype: np.dtype[Any]) -> Array:
        """One strip of P (b, h, R, stop), wide and on the grid of its type; written into p (b, h, T, T) too."""
        s = self._scores(q, k, rows, slice(0, rows.stop))
        self._fused(_exponential, [s, _per_attention_row(s.max(axis=-1), s)], s)

        def divided(s: Any, total: Any, result: Any) -> None:
            np.divide(s, total, out=result)
            result.tape.rounded(result, dtype)

        self._fused(divided, [s, _per_attention_row(self._row_sums(s), s)], s)
        if p is not None:
            self._round_into(s, p[:, :, rows, : rows.stop])
            words(p)[:, :, rows, rows.stop :] = 0
        return s

    def _gradients_of_scores(self, p: Array, dots: Array, shift: Array, dtype: np.dtype[Any], q: Array) -> Array:
        """One strip of P·(dP - Σ P·dP)/√D (b, h, R, S), wide and on the grid of its type; it takes the place of dP."""
        scale = q.shape[-1] ** -0.5

        def finished(p: Any, dp: Any, shift: Any, result: Any) -> None:
            np.subtract(dp, shift, out=result)
            result *= p
            result *= scale
            result.tape.rounded(result, dtype)

        self._fused(finished, [p, dots, _per_attention_row(shift, p)], dots)
        return dots

    # --- tiled: no T·T array at any moment ------------------------------------------------------------------

    def attend_tiled(self, qkv: Any, heads: int, log_sums: Any, o: Any) -> None:
        """o (B, T, C) and the logs of the sums of each row's exponentials (B, H, T), tile by tile."""
        for part in groups(qkv, heads, TILE, GROUP):
            q, k, v = self._by_head("qkv", qkv, heads, part, 3)
            wide = self._room("o", q.shape, q.dtype)
            for rows in strips(qkv.shape[1], TILE):
                self._attend_row_of_tiles(q, k, v, rows, log_sums[part][:, :, rows], wide[:, :, rows], qkv.dtype)
            self._round_into(wide, by_head(o, heads, 1)[0, *part])

    def _attend_row_of_tiles(self, q: Array, k: Array, v: Array, rows: slice, log_sums: Array, o: Array,
                             dtype: np.dtype[Any]) -> None:  # fmt: skip
        sums, total, top = self.xp.zeros(o.shape, q.dtype), self.xp.zeros(log_sums.shape, q.dtype), None
        for columns in strips(rows.stop, TILE):
            s = self._scores(q, k, rows, columns)
            higher = s.max(axis=-1)
            if top is not None:
                self._fused(lambda a, b, result: np.maximum(a, b, out=result), [top, higher], higher)
                shrink = self._room("shrink", top.shape, q.dtype)
                self._fused(_exponential, [top, higher], shrink)
                self._fused(_times, [total, shrink], total)
                self._fused(_times, [sums, _per_attention_row(shrink, sums)], sums)
            self._fused(_exponential, [s, _per_attention_row(higher, s)], s)
            self._fused(_plus, [total, self._row_sums(s)], total)
            self._onto_grid(s, dtype)
            self._add_product(s, v[:, :, columns], sums)
            top = higher
        self._fused(lambda s, t, result: np.divide(s, t, out=result), [sums, _per_attention_row(total, sums)], o)

        def logs(top: Any, total: Any, result: Any) -> None:
            np.add(top, np.log(total), out=result)

        self._fused(logs, [top, total], log_sums)

    def attend_tiled_gradient(self, qkv: Any, heads: int, log_sums: Any, o: Any, do: Any, dqkv: Any) -> None:
        """dqkv (B, T, 3C), every tile of P computed again from the row's log-sum-exp; Σ dO·O stands for Σ P·dP."""
        for part in groups(qkv, heads, TILE, GROUP):
            q, k, v = self._by_head("qkv", qkv, heads, part, 3)
            (g,), (wide_o,) = self._by_head("do", do, heads, part, 1), self._by_head("kept o", o, heads, part, 1)
            dq, dk, dv = wide = self._room("dqkv", (3, *q.shape), q.dtype)
            wide[...] = 0
            for rows in strips(qkv.shape[1], TILE):
                shift = self._row_products(g[:, :, rows], wide_o[:, :, rows])
                for columns in strips(rows.stop, TILE):
                    s = self._scores(q, k, rows, columns)
                    self._fused(_exponential, [s, _per_attention_row(log_sums[part][:, :, rows], s)], s)
                    self._onto_grid(s, qkv.dtype)
                    self._add_product(s.swapaxes(2, 3), g[:, :, rows], dv[:, :, columns])
                    dots = self.xp.matmul(g[:, :, rows], v[:, :, columns].swapaxes(2, 3))
                    ds = self._gradients_of_scores(s, dots, shift, qkv.dtype, q)
                    self._add_product(ds, k[:, :, columns], dq[:, :, rows])
                    self._add_product(ds.swapaxes(2, 3), q[:, :, rows], dk[:, :, columns])
            self._round_into(wide, by_head(dqkv, heads, 3)[:, *part])

    # --- parts ----------------------------------------------------------------------------------------------

    def _scores(self, q: Array, k: Array, rows: slice, columns: slice) -> Array:
        """QKᵀ/√D of some rows and columns (b, h, R, S), -inf above the diagonal."""
        scale, ends = q.shape[-1] ** -0.5, columns.stop == rows.stop
        s = self._room("scores", (*q.shape[:2], rows.stop - rows.start, columns.stop - columns.start), q.dtype)
        self.xp.matmul(q[:, :, rows], k[:, :, columns].swapaxes(2, 3), out=s)

        def scaled(s: Any, *more: Any) -> None:
            result = more[-1]
            np.multiply(s, scale, out=result)
            if ends:
                np.copyto(result, -np.inf, where=more[0] > 0)

        mask = [Operand(self._future(rows, columns), cycle=s.shape[2] * s.shape[3])] if ends else []
        self._fused(scaled, [s, *mask], s)
        return s

    def _future(self, rows: slice, columns: slice) -> Array:
        """1 above the diagonal of a strip (R, S) whose columns end where its rows do, else 0."""
        count, ahead = rows.stop - rows.start, rows.start - columns.start
        mask = np.zeros((count, count + ahead), np.uint8)
        mask[:, ahead:] = future(count)
        return self._uploaded(mask)

    def _onto_grid(self, x: Array, dtype: np.dtype[Any]) -> None:
        """Rounds wide values to the grid of a narrower type, in place."""

        def rounded(x: Any, result: Any) -> None:
            np.copyto(result, x)
            result.tape.rounded(result, dtype)

        if dtype != x.dtype:
            self._fused(rounded, [x], x)

    def _add_product(self, a: Array, b: Array, total: Array, *, anew: bool = False) -> None:
        """total += a @ b, all wide, in stacks (b, h); ``anew``: total = a @ b."""
        if anew:
            self.xp.matmul(a, b, out=total)
        else:
            self._fused(_plus, [total, self.xp.matmul(a, b)], total)

    def _by_head(self, name: str, x: Array, heads: int, part: Part, parts: int) -> Array:
        """Some sequences and heads of x (B, T, parts·C), wide, by head: (parts, b, h, T, D)."""
        return self._widened(name, by_head(x, heads, parts)[:, *part], work_type(x))


def _per_attention_row(values: Array, x: Array) -> Operand:
    return Operand(values, every=max(1, x.shape[-1]))


def _exponential(x: Any, shift: Any, result: Any) -> None:
    np.exp(np.subtract(x, shift), out=result)


def _times(x: Any, y: Any, result: Any) -> None:
    np.multiply(x, y, out=result)


def _plus(x: Any, y: Any, result: Any) -> None:
    np.add(x, y, out=result)


# -- The cupy row of the kernels: the arithmetic of `kernels` on one GPU, in fused CUDA kernels at memory's speed ----
# What is promised, beside `NumpyKernels` on the same inputs (a NaN is a NaN, whatever its code):
#
# - The same bits: casts, sums, products and quotients of elements, maxima, accumulation, gradients' blocks, ReLU,
#   dropout, taking and adding rows, column sums, sums of squares, every optimizer's step that is a function of
#   elements.
# - The same formula with CUDA's exp, log and tanh, each within 2 ULP of the exact value where NumPy's are within 4
#   (CUDA C++ Programming Guide, "Mathematical Functions"): GELU, softmax.
# - The library's order of additions: products of matrices (cuBLAS, 16-bit operands on tensor cores, sums in float32,
#   one rounding at the end), means and variances of rows, softmax's sums, attention, decompositions of matrices. A sum
#   of k products is within k·2^-23·Σ|a·b| of the exact one, before the one rounding (tensor cores cut what they add
#   off, which doubles float32's 2^-24). CuPy's own sums along rows take subnormal float32 numbers for zeros.
#
# Shapes: n elements; m rows, k inner, n columns in a product of matrices.


AT_ONCE = 16  # addends of one launch


class CupyKernels(CupyReductions, CupyActivations, CupyRows, CupyAttention, CupyMatrix, CupyProducts, CupyBase,
                  NumpyKernels):  # fmt: skip
    """All arithmetic on CuPy's arrays, on the current device and stream. What is called on them is NumpyKernels', its
    checks included; `cast_pack` and `fill` also take NumPy arrays, which they move to the device."""

    BLOCK = 1 << 24  # elements: a launch costs microseconds, and there is no cache to stay in

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._device_scratch = DeviceScratch(cupy)
        self._numbers = NumpyKernels()

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of CuPy's pool that the kernels hold between calls."""
        return self._device_scratch.nbytes

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike) -> Any:
        """`count` elements of the kernels' own memory, (n,), not initialized, good until the next call of this name;
        it is part of `scratch_nbytes`."""
        return self._room(f"asked for: {name}", count, dtype)

    def slack_nbytes(self, nbytes: int) -> int:
        """The bytes of CuPy's pool that an array from `empty` takes beyond its own nbytes."""
        return pool_slack_nbytes(nbytes)

    def serving(self, x: Any) -> NumpyKernels:
        """These for an array on the device; NumPy's for one on the host, as flags and counts that programs make."""
        return self if on_device(x) else self._numbers

    # --- casts ----------------------------------------------------------------------------------------------

    def cast_pack(self, x: Any, out: Any) -> None:
        """out becomes x in out's type, rounded once to nearest even; equal shapes; types as NumpyKernels has them.

        One of the two may be a NumPy array: its elements are moved over, and the cast is made on the device.
        """
        check_shapes("cast_pack", x=x, out=out)
        if not on_device(x) and not on_device(out):
            self._numbers.cast_pack(x, out)
        elif not on_device(x):
            self.cast_pack(self._uploaded(x), out)
        elif not on_device(out):
            cast = x if x.dtype == out.dtype else self.empty(x.shape, out.dtype)
            if cast is not x:
                self.cast_pack(x, cast)
            np.copyto(out, to_host(cast))
        elif x.dtype == out.dtype:
            overlap = may_share_memory(x, out) and not is_same_memory(x, out)
            copy_elements(copied(x) if overlap else x, out)
        else:
            check_floating("cast_pack", x=x, out=out)
            self._fused(copy, [x], out)

    def fill(self, out: Any, values: Callable[[slice], Any]) -> None:
        """out (n,) becomes what ``values`` gives for each block's slice, rounded once to out's type."""
        for span in spans(out.size, 1 << 20):
            self.cast_pack(values(span), out[span])

    # --- one operation per element --------------------------------------------------------------------------

    def add_rounded(self, a: Any, b: Any, out: Any) -> None:
        """out = a + b: one addition in float32, rounded once (float64 and integers: their own addition).

        Equal shapes; a and out of one type; b is cast to it first, which rounds if b is wider.
        """
        check_shapes("add_rounded", a=a, b=b, out=out)
        self._with_cast("add_rounded", np.add, a, b, out)

    def _with_cast(self, name: str, ufunc: np.ufunc, a: Any, b: Any, out: Any) -> None:
        check_same_type(name, a, out)
        if b.dtype != out.dtype:
            check_floating(name, b=b, out=out)
            cast = self._room("recast", b.shape, out.dtype)
            self.cast_pack(b, cast)
            b = cast
        work = None if is_floating(out.dtype) else out.dtype
        self._fused(lambda a, b, result: ufunc(a, b, out=result), [a, b], out, work)

    def sum_rounded(self, addends: Sequence[Any], out: Any) -> None:
        """out = ((first + second) + third) + ..., each sum as `add_rounded` makes it, every addend read once; at least
        one addend, all of out's type and shape, `out` among them or not."""
        if not addends:
            raise ValueError("sum_rounded needs at least one addend, got none")
        check_shapes("sum_rounded", out=out, **{f"addend {i}": x for i, x in enumerate(addends)})
        for x in addends:
            check_same_type("sum_rounded", x, out)
        work = None if is_floating(out.dtype) else out.dtype
        total = out if len(addends) <= AT_ONCE else self._room("sum", out.shape, out.dtype)
        some = list(addends[:AT_ONCE])
        self._fused(_summed(out.dtype), some, total, work)
        for first in range(AT_ONCE, len(addends), AT_ONCE - 1):
            some = [total, *addends[first : first + AT_ONCE - 1]]
            self._fused(_summed(out.dtype), some, total, work)
        if total is not out:
            copy_elements(total, out)

    def _extremum(self, name: str, integers: np.ufunc, floats: Operation, a: Any, b: Any, out: Any) -> None:
        check_shapes(name, a=a, b=b, out=out)
        self._with_cast(name, integers, a, b, out)

    def _run(self, function: Operation, inputs: tuple[Any, ...], out: Any, **options: Any) -> None:
        self._fused(function, list(inputs), out, options.get("work"))

    # --- optimizer ------------------------------------------------------------------------------------------

    def gradient_block(self, x: Any, divisor: float, factor: float, out: Any) -> None:
        """out = x/divisor, then ·factor unless that is 1, each rounded to out's float32; equal shapes."""
        check_operands("gradient_block", x=x, out=out)

        brought, into_range = split_divisor(divisor, work_type(x, out))

        def scaled(x: Any, result: Any) -> None:
            if brought != 1:
                np.multiply(x, brought, out=result)
            np.divide(x if brought == 1 else result, into_range, out=result)
            result.tape.rounded(result, out.dtype)
            if factor != 1:
                np.multiply(result, factor, out=result)

        self._fused(scaled, [x], out)

    def _step(self, rows: list[Any], function: Callable[..., object], scratch: int) -> None:
        run_in_place(function, rows, scratch)


def _summed(dtype: np.dtype[Any]) -> Callable[..., None]:
    """The sum of all symbols but the last, written to the last, each partial sum rounded to the type."""

    def summed(*blocks: Any) -> None:
        *addends, result = blocks
        np.copyto(result, addends[0])
        for place, x in enumerate(addends[1:], start=2):
            np.add(result, x, out=result)
            if place < len(addends):
                result.tape.rounded(result, dtype)

    return summed
