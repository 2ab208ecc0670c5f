"""Arrays: blocks of them and scratch memory, questions asked of any array, and fingerprints."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.numerics.formats import FORMATS
from zerosim.numerics.null_arrays import NullArray

# -- Blocks, and scratch memory ----------------------------------------------------------------------------------------
# One NumPy call costs half a microsecond, and a result that falls out of the cache is paid for twice. Blocks of
# BLOCK elements are long enough to hide the first and short enough to avoid the second.

Array = npt.NDArray[Any]

BLOCK = 65536  # elements
WIDE_BLOCK = 4 * BLOCK  # elements: of sums of many addends, and of optimizers' steps
# Up to here the array types' own casts cost less than the dozen calls of a packed block, even on subnormals.
SMALL = 256  # elements
ALIGNMENT_NBYTES = 64  # a cache line
ALIGNED_FROM_NBYTES = 4096  # smaller arrays are not worth a cache line of slack
ADAPTS_UP_TO_NBYTES = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bit (malloc.c, 2.6 and later)


def spans(count: int, block: int = BLOCK) -> Iterator[slice]:
    """The slices that cut `count` elements into blocks, left to right; none where count is 0."""
    for start in range(0, count, block):
        yield slice(start, min(start + block, count))


def slack_nbytes(nbytes: int) -> int:
    """The bytes that the base of an array from `empty` holds beyond the array's own."""
    return ALIGNMENT_NBYTES if nbytes >= ALIGNED_FROM_NBYTES else 0


def empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An array that is not initialized; from 4096 bytes on, its data begins at a multiple of 64 bytes.

    A copy between two arrays whose addresses differ by a few bytes modulo 4096 is up to fifteen times slower than
    one between aligned arrays (glibc's memcpy on some processors), and malloc aligns to 16 bytes only.
    """
    dtype = np.dtype(dtype)
    nbytes = (prod(map(int, shape)) if isinstance(shape, tuple) else int(shape)) * dtype.itemsize
    slack = slack_nbytes(nbytes)
    if not slack:
        return np.empty(shape, dtype)
    base = np.empty(nbytes + slack, np.uint8)
    return np.ndarray(shape, dtype, base, -base.ctypes.data % ALIGNMENT_NBYTES)


@cache  # malloc is the process's: once is enough, and a second time its page would really be zeroed
def keep_freed_memory() -> None:
    """Makes malloc keep the memory of arrays that die for those that come, where it adapts to what it sees (glibc).

    It gives arrays back to the system when they die, and takes zeroed pages for the next ones, which costs a training
    step up to a fifth of its time; but not those that are shorter than the longest that it has seen die, up to a limit.
    So an array of that length dies here, which nobody has touched: it takes microseconds.
    """
    bytes(ADAPTS_UP_TO_NBYTES - 65536)  # less some pages for its header


class Scratch(threading.local):
    """Named pieces of memory that are used again and again; what is in one of them is only good until the next
    call for the same name. Each thread has its own. ``empty`` makes them, with ``slack_nbytes`` beyond their own."""

    def __init__(self, empty: Callable[..., Any] = empty, slack_nbytes: Callable[[int], int] = slack_nbytes) -> None:
        self._empty, self._slack_nbytes = empty, slack_nbytes
        self._buffers: dict[str, Array] = {}
        self._views: dict[tuple[str, npt.DTypeLike], Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held now, slack included."""
        return sum(buffer.nbytes + self._slack_nbytes(buffer.nbytes) for buffer in self._buffers.values())

    def array(self, name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array, not initialized; the memory grows to the longest ever asked for under this name."""
        count = shape if isinstance(shape, int) else prod(shape)
        view = self._views.get((name, dtype))
        if view is None or view.size < count:
            itemsize = np.dtype(dtype).itemsize
            buffer = self._buffers.get(name)
            if buffer is None or buffer.size < count * itemsize:
                view = buffer = None  # before the longer one is asked for: both would not always fit
                self._buffers.pop(name, None)
                self._views = {key: kept for key, kept in self._views.items() if key[0] != name}
                self._buffers[name] = buffer = self._empty(count * itemsize, np.uint8)
            view = self._views[name, dtype] = buffer[: buffer.size // itemsize * itemsize].view(dtype)
        return view[:count] if isinstance(shape, int) else view[:count].reshape(shape)


def in_blocks(out: Array, *inputs: Array) -> Iterator[list[Array]]:
    """Each block of ``out`` (n,), to be written, and those of the inputs beside it; of one shape, any strides.

    An input is copied first where it is strided, or shares memory with `out` without being the same elements in the
    same type: what a block overwrites would be read in the next one; one that is, comes as the same object. An `out`
    with gaps is written to at the end.
    """
    whole = out.flags.c_contiguous
    row = out.reshape(-1) if whole else np.empty(out.size, out.dtype)
    rows = [row if whole and x is out else _row_beside(x, row) for x in inputs]
    for here in spans(row.size):
        block = row if row.size <= BLOCK else row[here]
        yield [block, *[block if x is row else x[here] for x in rows]]
    if not whole:
        out[...] = row.reshape(out.shape)


def _row_beside(x: Array, out: Array) -> Array:
    """x as one row of elements that may be read while `out` is written block by block."""
    row = x.reshape(-1)
    if not np.may_share_memory(row, out):
        return row
    return out if is_same_memory(row, out) else row.copy()


# -- Questions asked of any array --------------------------------------------------------------------------------------
# With numbers in it or without, on the host or on a device: where it lies, and with whom it shares memory. CuPy's
# arrays are known by their type's module, so that nobody imports cupy who has none of them.

AnyArray = Any  # np.ndarray, NullArray or cupy.ndarray


def is_array(x: Any) -> bool:
    """True for what a rank's memory can hold and a collective can send."""
    return on_host(x) or isinstance(x, NullArray) or on_device(x)


def on_device(x: Any) -> bool:
    """True for CuPy's arrays."""
    return type(x).__module__ == "cupy" and type(x).__name__ == "ndarray"


def on_host(x: Any) -> bool:
    """True for NumPy's arrays."""
    return isinstance(x, np.ndarray)


def is_writable(array: AnyArray) -> bool:
    """True if values can be written to it; a device's memory knows no other."""
    return on_device(array) or bool(array.flags.writeable)


def to_host(array: AnyArray) -> np.ndarray:
    """The elements as a NumPy array, bit for bit: NumPy's own as it is, a device's copied, which waits for it.

    Raises ValueError for an array without data.
    """
    if not has_data(array):
        raise ValueError(f"{array!r} has no data to look at; run the program on a Cluster for numbers")
    if not on_device(array):
        return np.asarray(array)
    found: np.ndarray = words(array).get()
    return found.view(array.dtype)


def copy_elements(source: AnyArray, out: AnyArray) -> None:
    """out = source, of one shape and type, bit for bit; from the host to the host, or to a device from anywhere. No
    data, no copy."""
    if on_host(out):
        out[...] = source
    elif on_device(out) and on_host(source):
        words(out).set(words(source))
    elif on_device(out):
        words(out)[...] = words(source)


def has_data(array: AnyArray) -> bool:
    """False for an array that is a shape and a type alone."""
    return not isinstance(array, NullArray)


def base_of(array: AnyArray) -> AnyArray:
    """The array that owns the memory which ``array`` looks at; ValueError for what is no array."""
    if isinstance(array, np.ndarray):
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array
    if isinstance(array, NullArray) or on_device(array):
        return array if array.base is None else array.base
    raise ValueError(f"a memory holds NumPy arrays, found {type(array).__name__}; wrap it with np.array first")


def start(x: AnyArray) -> int:
    """The address of the first element. Arrays without data have addresses too, each base in a space of its own."""
    if isinstance(x, NullArray):
        return (id(base_of(x)) << 64) + x.offset_nbytes
    address: int = x.ctypes.data if on_host(x) else x.data.ptr
    return address


def may_share_memory(a: AnyArray, b: AnyArray) -> bool:
    """True where the stretches of memory overlap in which the elements of two arrays lie, as NumPy means it."""
    if isinstance(a, NullArray) and isinstance(b, NullArray):
        return a.may_overlap(b)
    if on_device(a) and on_device(b):
        (low, high), (other_low, other_high) = _bounds(a), _bounds(b)
        return low < other_high and other_low < high
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b)


def is_same_memory(a: AnyArray, b: AnyArray) -> bool:
    """True when both arrays are views of the same elements in the same order."""
    return a is b or ((a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype) and start(a) == start(b))


def contiguous(x: Any) -> AnyArray:
    """The array itself where its elements lie in a row, else a copy; lists and numbers become arrays."""
    if isinstance(x, NullArray):
        return x if x.flags.c_contiguous else x.copy()
    if on_device(x):
        return x if x.flags.c_contiguous else words(x).copy().view(x.dtype)
    return np.ascontiguousarray(x)


@cache
def _has_nan(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or any(dtype == row.dtype for row in FORMATS.values())


def poison(array: AnyArray) -> None:
    """Fills an array of any strides with what nobody can overlook: NaN, or bytes 0xA5 where the dtype has no NaN."""
    if isinstance(array, NullArray):
        return
    dtype, has_nan = array.dtype, _has_nan(array.dtype)
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


def checksum(x: AnyArray) -> Any:
    """A number that changes with the bytes of a contiguous array: CRC-32, or 0 where there are none to read.

    Of a device's array it is the sum of the words, modulo 2**64, and an array itself: nobody waits until it is known.
    """
    if on_device(x):
        word = min(8, x.dtype.itemsize & -x.dtype.itemsize)
        return x.reshape(-1).view(f"u{word}").sum(dtype=np.dtype(np.uint64))
    return 0 if isinstance(x, NullArray) else zlib.crc32(as_bytes(x).data)


def same_bytes(a: AnyArray, b: AnyArray) -> bool:
    """True when two contiguous arrays of one length hold the same bits; arrays without data hold none."""
    if isinstance(a, NullArray):
        return True
    if on_device(a):
        return bool((as_bytes(a) == as_bytes(b)).all())
    one, other = as_bytes(a), as_bytes(b)
    return all(np.array_equal(one[here], other[here]) for here in spans(one.size))


def as_bytes(x: AnyArray) -> AnyArray:
    """The array's bytes, (nbytes,) uint8, without a copy."""
    return x.reshape(-1).view(np.uint8)


def words(x: AnyArray) -> AnyArray:
    """The bits of a device's array as whole numbers: CuPy copies no other than its own types."""
    return x if x.dtype.kind in "biuc" else x.view(f"u{x.dtype.itemsize}")


def _bounds(x: AnyArray) -> tuple[int, int]:
    """The addresses at which the elements of a device's array begin and end."""
    if not x.size:
        return 0, 0
    steps = [stride * (length - 1) for stride, length in zip(x.strides, x.shape, strict=True)]
    return start(x) + sum(min(step, 0) for step in steps), start(x) + sum(max(step, 0) for step in steps) + x.itemsize


# -- Fingerprints ------------------------------------------------------------------------------------------------------
# One SHA-256 of any value with arrays in it, so that two machines can compare results without sending them.

def sha256(value: Any) -> str:
    """64 hex digits of arrays, numbers, texts, None, and tuples, lists and mappings (in their order) of them.

    Equal fingerprints mean equal bits: of an array its dtype, shape and bytes count, of a float its 8 bytes (so that
    0.0 and -0.0 differ, and two NaN of one pattern agree). Raises ValueError for anything else.

    >>> sha256({"w": np.zeros(2, np.float32)}) == sha256({"w": np.zeros(2, np.float64)})
    False
    """
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, np.generic) or (is_array(value) and has_data(value) and not value.dtype.hasobject):
        array = np.asarray(value) if isinstance(value, np.generic) else to_host(value)
        digest.update(f"array {array.dtype.name} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    elif isinstance(value, float):
        _feed(digest, np.float64(value))
    elif value is None or isinstance(value, bool | int | str | bytes):
        text = repr(value).encode()
        digest.update(f"{type(value).__name__} {len(text)} ".encode() + text)
    elif isinstance(value, Mapping):
        _feed_all(digest, "mapping", [part for item in value.items() for part in item])
    elif isinstance(value, tuple | list):
        _feed_all(digest, "sequence", value)
    else:
        raise ValueError(f"a fingerprint is of arrays, numbers, texts and collections of them, found "
                         f"{type(value).__name__}; return what is in it")


def _feed_all(digest: Any, kind: str, parts: Any) -> None:
    digest.update(f"{kind} {len(parts)} ".encode())
    for part in parts:
        _feed(digest, part)


# -- Boundaries and members --------------------------------------------------------------------------------------------


class Integers(tuple[int, ...]):
    """A tuple of whole numbers that is hashed once: N boundaries or members, which all N ranks look up in each call."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash
