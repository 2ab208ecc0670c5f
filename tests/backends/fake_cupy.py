"""A stand-in for CuPy on the CPU, strict where CuPy is: the part of its interface that the package uses, on NumPy.

Kernels are not imitated: their CUDA text is compiled by a C++ compiler, without fused multiply-adds, and run thread by
thread, so that every expression in it is computed. What a library computes (sums, matmul, linalg) is NumPy's here.
Every use of an array is told to the judge in `fake_cuda`. So a test with it speaks of the kernels' arithmetic on the
CPU, and of how arrays are handled; of no GPU.
"""

from __future__ import annotations

import weakref
from functools import cached_property
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import zerosim as zs
from tests.backends import compiled_kernels
from tests.backends.fake_cuda import Cuda, Device, Event, RaceError, Stream, get_elapsed_time

OWN_TYPES = "?bhilqBHILQefdFD"  # what CuPy has C types for, and bfloat16
WORDS = {name: zs.FORMATS[name].dtype for name in ("fp16", "bf16", "fp32")}


def _refuse_type(dtype: np.dtype) -> None:
    if dtype.char not in OWN_TYPES and dtype != zs.FORMATS["bf16"].dtype:
        raise ValueError(f"Unsupported dtype {dtype}")


def _raw(x: Any) -> Any:
    """What NumPy computes with; CuPy takes its own arrays and numbers alone."""
    if isinstance(x, ndarray):
        _refuse_type(x.dtype)
        return _used(x)
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    if isinstance(x, tuple):
        return tuple(map(_raw, x))
    return x


def _used(x: ndarray, *, writes: bool = False, stream: Stream | None = None) -> np.ndarray:
    """The elements, which a stream uses: the current one of the current device, if none is said."""
    a = x._a
    if a.nbytes:
        low, high = (x._at, x._at + a.nbytes) if a.flags.c_contiguous else np.lib.array_utils.byte_bounds(a)
        Cuda.current.use(low, high, stream or Cuda.current.here(), writes=writes)
    return a


class PinnedMemory(bytearray):
    """Memory of the host that devices copy to and from by themselves."""

    def __init__(self, nbytes: int) -> None:
        assert nbytes > 0, "CUDA gives no memory of 0 bytes"
        super().__init__(b"\xa5" * nbytes)


def alloc_pinned_memory(nbytes: int) -> PinnedMemory:
    """From the pool, which has powers of two."""
    return PinnedMemory(max(512, 1 << (nbytes - 1).bit_length()))


def pinned_memory_of(x: Any) -> PinnedMemory:
    """The pinned memory in which an array of the host lies."""
    while isinstance(x, np.ndarray | memoryview):
        x = x.base if isinstance(x, np.ndarray) else x.obj
    assert isinstance(x, PinnedMemory), "only pinned memory is copied beside what the host does"
    return x


class ndarray:
    """A device's array: its elements are in `_a`, which only this module reads."""

    __module__ = "cupy"

    def __init__(self, shape: Any, dtype: Any = float, *, _of: np.ndarray | None = None,
                 _base: ndarray | None = None) -> None:
        self.base = _base
        if _of is None:
            _refuse_type(np.dtype(dtype))
            self._a = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)
            Cuda.current.allocated(self)
            return
        self._a = _of
        if _base is None:
            Cuda.current.allocated(self)
            _used(self, writes=True)

    # What an array is, it is as NumPy's; CuPy's arrays have no other attributes, or nobody has needed them here.
    shape, strides, dtype, ndim, size, itemsize, nbytes = (property(attrgetter(f"_a.{name}")) for name in (
        "shape", "strides", "dtype", "ndim", "size", "itemsize", "nbytes"))
    T = property(lambda self: self._view(self._a.T))
    data = property(lambda self: SimpleNamespace(
        ptr=self._at, copy_from_device_async=lambda source, nbytes: self._copy_from(source.ptr, nbytes)))
    _at = cached_property(lambda self: self._a.ctypes.data)  # the address
    flags = property(lambda self: SimpleNamespace(c_contiguous=self._a.flags.c_contiguous))

    def _view(self, a: np.ndarray) -> ndarray:
        if not np.may_share_memory(a, self._a) and a.size:
            _refuse_type(a.dtype)
            _used(self)
            return _new(a)
        return ndarray(None, _of=a, _base=self if self.base is None else self.base)

    def _copy_from(self, address: int, nbytes: int) -> None:
        """The bytes of an array of this device."""
        Cuda.current.use(address, address + nbytes, Cuda.current.here(), writes=False)
        target, bytes_ = _used(self, writes=True).reshape(-1).view(np.uint8), np.dtype(np.uint8)
        target[:nbytes] = compiled_kernels.at(address, bytes_, nbytes)

    def __len__(self) -> int:
        return len(self._a)

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        raise TypeError(f"np.{ufunc.__name__} met a device's array: compute by kernels")

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"np.{function.__name__} met a device's array: compute by kernels")

    def __getitem__(self, key: Any) -> ndarray:
        return self._view(np.asarray(self._a[_raw(key)]))

    def __setitem__(self, key: Any, value: Any) -> None:
        if not (isinstance(value, int | float) and value == 0 and self[key].flags.c_contiguous):  # zeros are bytes
            _refuse_type(self.dtype)
        target, source = _used(self, writes=True)[_raw(key)], _raw(value)
        if isinstance(source, np.ndarray) and np.may_share_memory(target, source):
            assert (target.ctypes.data, target.strides) == (source.ctypes.data, source.strides), "copied in no order"
        self._a[_raw(key)] = source

    __hash__ = None

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def get(self, stream: Stream | None = None, out: np.ndarray | None = None, *, blocking: bool = True) -> np.ndarray:
        """The elements on the host, which has waited for them; or, of a copy into pinned memory, waits for them yet."""
        if not blocking:
            assert stream is not None
            assert out is not None
            return self._get_beside(stream, out)
        with Device(Cuda.current.device_of(self)):
            found, stream = _raw(self).copy(), Cuda.current.here()
            stream.tick()
            stream.synchronize()
            return found

    def _get_beside(self, stream: Stream, out: np.ndarray) -> np.ndarray:
        """Until the host has waited for it, a copy shows nothing."""
        _refuse_type(self.dtype)
        assert (out.dtype, out.shape) == (self.dtype, self.shape)
        assert self.flags.c_contiguous
        assert out.flags.c_contiguous
        memory, found = pinned_memory_of(out), _used(self, stream=stream).copy()
        out.view(np.uint8)[...] = 0xA5

        def end() -> None:
            out[...] = found

        Cuda.current.copied(stream, memory, end)
        return out

    def _set_beside(self, arr: np.ndarray, stream: Stream) -> None:
        """Until the host has waited for it, what is copied may not change, and may not be freed."""
        memory, target = pinned_memory_of(arr), _used(self, writes=True, stream=stream)
        Cuda.current.before(stream, memory)
        target[...], was, address, alive = arr, arr.copy(), arr.ctypes.data, weakref.ref(memory)

        def end() -> None:
            if alive() is None:
                raise RaceError("pinned memory was freed that a device may still be reading")
            if compiled_kernels.at(address, np.dtype(np.uint8), was.nbytes).tobytes() != was.tobytes():
                raise RaceError("the host changed pinned memory that a device may still be reading")

        Cuda.current.copied(stream, memory, end)

    def set(self, arr: np.ndarray, stream: Stream | None = None) -> None:
        """The elements from the host, which has waited until they are there, unless a stream copies them."""
        _refuse_type(self.dtype)
        assert (arr.dtype, arr.shape) == (self.dtype, self.shape)
        assert self.flags.c_contiguous, "CuPy sets arrays without gaps"
        if stream is not None:
            self._set_beside(arr, stream)
            return
        with Device(Cuda.current.device_of(self)):
            _used(self, writes=True)[...] = arr
            Cuda.current.here().synchronize()

    def copy(self) -> ndarray:
        return _new(_raw(self).copy(order="C"))

    def fill(self, value: Any) -> None:
        self[...] = value

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        _refuse_type(np.dtype(dtype))
        return self if not copy and np.dtype(dtype) == self.dtype else _new(_raw(self).astype(dtype))

    def sum(self, dtype: Any = None) -> ndarray:
        assert self.dtype.kind in "biu", "CuPy adds floats in an order of its own"
        return _new(np.asarray(_raw(self).sum(dtype=dtype)))


def _new(a: np.ndarray) -> ndarray:
    return ndarray(None, _of=np.ascontiguousarray(a).reshape(a.shape))


def _viewing(name: str) -> Any:
    return lambda self, *arguments: self._view(getattr(self._a, name)(*arguments))


def _computing(name: str) -> Any:
    return lambda self, *others: _new(np.asarray(getattr(_raw(self), name)(*map(_raw, others))))


for _name in ("view", "reshape", "transpose", "swapaxes", "diagonal"):
    setattr(ndarray, _name, _viewing(_name))
for _name in ("__add__", "__ge__", "__eq__", "max", "min", "all"):
    setattr(ndarray, _name, _computing(_name))


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    _refuse_type(np.dtype(dtype))
    return _new(np.zeros(shape, dtype))


def arange(*limits: Any, dtype: Any = None) -> ndarray:
    return _new(np.arange(*limits, dtype=dtype))


def asarray(x: Any, dtype: Any = None) -> ndarray:
    """A copy on the device of what is on the host."""
    if isinstance(x, ndarray):
        return x if dtype is None else x.astype(dtype, copy=False)
    found = np.array(x, dtype, order="C")
    _refuse_type(found.dtype)
    return _new(found)


def broadcast_to(x: ndarray, shape: Any) -> ndarray:
    """Of CuPy a view with strides of 0, which kernels copy before they read it; here that copy."""
    return _new(np.array(np.broadcast_to(_raw(x), shape)))


def argsort(x: ndarray, kind: str | None = None) -> ndarray:
    assert kind in (None, "stable"), "CuPy has no other kind"
    return _new(np.argsort(_raw(x), kind="stable"))


def matmul(a: ndarray, b: ndarray, out: ndarray | None = None) -> ndarray:
    if out is None:
        return _new(np.matmul(_raw(a), _raw(b)))
    np.matmul(_raw(a), _raw(b), out=out._a)
    return out


def get_default_memory_pool() -> SimpleNamespace:
    """The pool, which keeps nothing for later."""
    return SimpleNamespace(used_bytes=lambda: Cuda.current.used_nbytes, total_bytes=lambda: Cuda.current.used_nbytes,
                           free_all_blocks=lambda: None)


linalg = SimpleNamespace(eigh=lambda a: tuple(map(_new, np.linalg.eigh(_raw(a)))),
                         qr=lambda a: tuple(map(_new, np.linalg.qr(_raw(a)))))


def compile_using_nvrtc(source: str, options: tuple[str, ...] = (), *, filename: str) -> tuple[bytes, None]:
    """What CuPy hands to NVRTC as it is; RawKernel, which adds -ftz=true, is not here."""
    assert {"--fmad=false", "--ftz=false"} <= set(options)
    assert filename.endswith(".cu")
    return source.encode(), None


class Module:
    """A compiled text, of which kernels are asked by name."""

    def load(self, binary: bytes) -> None:
        assert isinstance(binary, bytes)
        self._source, self._device = binary.decode(), Cuda.current.selected

    def get_function(self, name: str) -> Function:
        return Function(compiled_kernels.kernel(self._source, name),
                        compiled_kernels.parameters_of(self._source, name), self._device)


class Function:
    """A kernel that can be launched on one device. It is taken to write every array that is not const in its text."""

    def __init__(self, run: Any, parameters: list[str], device: int) -> None:
        self._run, self._parameters, self._device = run, parameters, device

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert Cuda.current.selected == self._device, "a kernel that was loaded for another device"
        for x, parameter in zip(args, self._parameters, strict=True):
            if isinstance(x, ndarray):
                _used(x, writes=not parameter.startswith("const "))
        self._run(grid[0], block[0], [x._a if isinstance(x, ndarray) else _scalar(x) for x in args])


def _scalar(x: Any) -> np.generic:
    assert isinstance(x, np.generic), f"a kernel was given {type(x).__name__}, whose C type CuPy would guess"
    return x


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for errors of CUDA's runtime."""


def gemm_ex(handle: int, turned_a: int, turned_b: int, m: int, n: int, k: int, alpha: int, a: int, a_type: str,
            lda: int, b: int, b_type: str, ldb: int, beta: int, c: int, c_type: str, ldc: int, compute: str,
            algo: str) -> None:
    """C (n rows of m in memory) = op(B) op(A), as the row-major matrices that they are; NumPy's product of float32."""
    assert (handle, compute, c_type) == (7, "32F", "fp32")
    left = _matrix(b, b_type, n, k, ldb, turned_b)
    right = _matrix(a, a_type, k, m, lda, turned_a)
    np.matmul(left, right, out=_matrix(c, c_type, n, m, ldc, 0))


def _matrix(address: int, kind: str, rows: int, columns: int, step: int, turned: int) -> np.ndarray:
    lines, length = (columns, rows) if turned else (rows, columns)
    assert step >= length
    memory = compiled_kernels.at(address, WORDS[kind], lines * step).reshape(lines, step)[:, :length]
    memory = memory.T if turned else memory
    return memory if kind == "fp32" else np.asarray(memory, np.float32, order="K")


def cuda_of(count: int) -> tuple[ModuleType, Cuda]:
    """A module in the place of cupy.cuda with so many devices, and its devices."""
    devices, module = Cuda(count), ModuleType("cupy.cuda")
    vars(module).update(
        Device=Device, Stream=Stream, Event=Event, get_elapsed_time=get_elapsed_time,
        get_current_stream=lambda device=-1: devices.here(), alloc_pinned_memory=alloc_pinned_memory,
        PinnedMemory=PinnedMemory, PinnedMemoryPointer=lambda memory, offset: memory,
        compiler=SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc), function=SimpleNamespace(Module=Module),
        cublas=SimpleNamespace(gemmEx=gemm_ex, CUBLAS_OP_N=0, CUBLAS_OP_T=1, CUBLAS_COMPUTE_32F="32F",
                               CUBLAS_GEMM_DEFAULT="any"),
        runtime=SimpleNamespace(CUDA_R_16F="fp16", CUDA_R_16BF="bf16", CUDA_R_32F="fp32",
                                getDeviceCount=lambda: count, getDevice=lambda: devices.selected,
                                getDeviceProperties=lambda index: {"uuid": bytes([index + 1]) * 16,
                                                                   "name": b"a double"},
                                runtimeGetVersion=lambda: 12090, driverGetVersion=lambda: 13000,
                                memGetInfo=lambda: (devices.capacity_nbytes - devices.used_nbytes,
                                                    devices.capacity_nbytes),
                                CUDARuntimeError=CUDARuntimeError, streamQuery=devices.stream_query,
                                eventQuery=devices.event_query),
        nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)))
    return module, devices


__version__ = "14.0.0"
