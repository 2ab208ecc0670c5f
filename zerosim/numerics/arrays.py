"""What may be asked of an array, with numbers in it or without, on the host or on a device: where it lies, and with
whom it shares memory.

The one place that tells the kinds of arrays apart; what computes with them is in the kernels. CuPy's arrays are known
by their type's module, so that nobody imports cupy who has none of them.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from zerosim.numerics.blocks import spans
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.null import NullArray

Array = Any  # np.ndarray, NullArray or cupy.ndarray


def is_array(x: Any) -> bool:
    """True for what the ledger can hold and a collective can send."""
    return on_host(x) or isinstance(x, NullArray) or on_device(x)


def on_device(x: Any) -> bool:
    """True for CuPy's arrays."""
    return type(x).__module__ == "cupy" and type(x).__name__ == "ndarray"


def on_host(x: Any) -> bool:
    """True for NumPy's arrays."""
    return isinstance(x, np.ndarray)


def is_writable(array: Array) -> bool:
    """Whether values can be written to it; a device's memory knows no other."""
    return on_device(array) or bool(array.flags.writeable)


def to_host(array: Array) -> np.ndarray:
    """The elements as a NumPy array, bit for bit: NumPy's own as it is, a device's copied, which waits for it.

    Raises ValueError for an array without data.
    """
    if not has_data(array):
        raise ValueError(f"{array!r} has no data to look at; run the program on a Cluster for numbers")
    if not on_device(array):
        return np.asarray(array)
    found: np.ndarray = words(array).get()
    return found.view(array.dtype)


def copy_elements(source: Array, out: Array) -> None:
    """out = source, of one shape and type, bit for bit; both on the host, or both on the device. No data, no copy."""
    if on_device(out):
        source, out = words(source), words(out)
    if has_data(out):
        out[...] = source


def has_data(array: Array) -> bool:
    """False for an array that is a shape and a type alone."""
    return not isinstance(array, NullArray)


def base_of(array: Array) -> Array:
    """The array that owns the memory which ``array`` looks at; ValueError for what is no array."""
    if isinstance(array, NullArray) or on_device(array):
        return array if array.base is None else array.base
    if not isinstance(array, np.ndarray):
        raise ValueError(f"the ledger holds NumPy arrays, found {type(array).__name__}; wrap it with np.array first")
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def start(x: Array) -> int:
    """The address of the first element. Arrays without data have addresses too, each base in a space of its own."""
    if isinstance(x, NullArray):
        return (id(base_of(x)) << 64) + x.offset_nbytes
    address: int = x.__array_interface__["data"][0] if on_host(x) else x.data.ptr
    return address


def may_share_memory(a: Array, b: Array) -> bool:
    """True where the stretches of memory overlap in which the elements of two arrays lie, as NumPy means it."""
    if isinstance(a, NullArray) and isinstance(b, NullArray):
        return a.may_overlap(b)
    if on_device(a) and on_device(b):
        (low, high), (other_low, other_high) = _bounds(a), _bounds(b)
        return low < other_high and other_low < high
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b)


def is_same_memory(a: Array, b: Array) -> bool:
    """True when both arrays are views of the same elements in the same order."""
    return (start(a), a.shape, a.strides, a.dtype) == (start(b), b.shape, b.strides, b.dtype)


def contiguous(x: Any) -> Array:
    """The array itself where its elements lie in a row, else a copy; lists and numbers become arrays."""
    if isinstance(x, NullArray):
        return x if x.flags.c_contiguous else x.copy()
    if on_device(x):
        return x if x.flags.c_contiguous else words(x).copy().view(x.dtype)
    return np.ascontiguousarray(x)


def poison(array: Array) -> None:
    """Fills an array of any strides with what nobody can overlook: NaN, or bytes 0xA5 where the dtype has no NaN."""
    if isinstance(array, NullArray):
        return
    dtype = array.dtype
    has_nan = dtype.kind in "fc" or any(dtype == row.dtype for row in FORMATS.values())
    if on_device(array) and dtype.itemsize <= 8:
        pattern = dtype.type(np.nan).tobytes() if has_nan else b"\xa5" * dtype.itemsize
        codes = array.view(f"u{dtype.itemsize}")
        codes[...] = np.frombuffer(pattern, codes.dtype)[0]
    elif has_nan:
        array.fill(dtype.type(np.nan))
    else:
        array.view(f"V{dtype.itemsize}").fill(np.void(b"\xa5" * dtype.itemsize))


def is_poisoned(array: np.ndarray) -> bool:
    """True where all of an array on the host is as `poison` leaves it: nothing was written to it."""
    blank = np.empty_like(array)
    poison(blank)
    return blank.tobytes() == array.tobytes()


def checksum(x: Array) -> Any:
    """A number that changes with the bytes of a contiguous array: CRC-32, or 0 where there are none to read.

    Of a device's array it is the sum of the words, modulo 2**64, and an array itself: nobody waits until it is known.
    """
    if on_device(x):
        word = min(8, x.dtype.itemsize & -x.dtype.itemsize)
        return x.reshape(-1).view(f"u{word}").sum(dtype=np.dtype(np.uint64))
    return 0 if isinstance(x, NullArray) else zlib.crc32(_as_bytes(x).data)


def same_bytes(a: Array, b: Array) -> bool:
    """True when two contiguous arrays of one length hold the same bits; arrays without data hold none."""
    if isinstance(a, NullArray):
        return True
    if on_device(a):
        return bool((_as_bytes(a) == _as_bytes(b)).all())
    one, other = _as_bytes(a), _as_bytes(b)
    return all(np.array_equal(one[here], other[here]) for here in spans(one.size))


def _as_bytes(x: Array) -> Array:
    """The array's bytes, (nbytes,) uint8, without a copy."""
    return x.reshape(-1).view(np.uint8)


def words(x: Array) -> Array:
    """The bits of a device's array as whole numbers: CuPy copies no other than its own types."""
    return x if x.dtype.kind in "biuc" else x.view(f"u{x.dtype.itemsize}")


def _bounds(x: Array) -> tuple[int, int]:
    """Where the elements of a device's array begin and end."""
    if not x.size:
        return 0, 0
    steps = [stride * (length - 1) for stride, length in zip(x.strides, x.shape, strict=True)]
    return start(x) + sum(min(step, 0) for step in steps), start(x) + sum(max(step, 0) for step in steps) + x.itemsize
