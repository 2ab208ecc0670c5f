"""Arrays without data: a shape and a type, and what NumPy says of these.

A NullArray answers what can be known without numbers: shapes, types, bytes. Whatever would need a number raises. So a
step of a trillion parameters runs in no memory.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from types import EllipsisType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

_Index = int | slice | EllipsisType | None
_INDICES = (int, slice, EllipsisType, type(None), np.integer)


def _numpys(name: str) -> Any:
    """A property of the array: what NumPy says of the view that stands for it."""
    return property(attrgetter(f"_ghost.{name}"))


class NullArray:
    """A shape and a type. Views (slices, reshape, view, T) share their `base`, as NumPy's do.

    A view's shape, strides and place in its base are NumPy's own: those of a view of the same name of one element that
    is said to have the strides of the whole array, and that nobody reads.
    """

    __slots__ = ("__weakref__", "_ghost", "base")

    def __init__(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> None:
        ghost = _ghost((shape,) if isinstance(shape, int | np.integer) else tuple(shape), np.dtype(dtype))
        self._ghost = ghost.view()  # with flags of its own
        self.base: NullArray | None = None

    shape: tuple[int, ...] = _numpys("shape")
    strides: tuple[int, ...] = _numpys("strides")  # bytes from one element to the next, along each dimension
    dtype: np.dtype[Any] = _numpys("dtype")
    flags: Any = _numpys("flags")  # contiguous, writable
    ndim: int = _numpys("ndim")
    size: int = _numpys("size")
    itemsize: int = _numpys("itemsize")
    nbytes: int = _numpys("nbytes")

    @property
    def offset_nbytes(self) -> int:
        """The first element's place in the base, in bytes."""
        return _address(self._ghost) - _address((self if self.base is None else self.base)._ghost)

    @property
    def T(self) -> NullArray:
        return self._view(self._ghost.T)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, key: _Index | tuple[_Index, ...]) -> NullArray:
        """Integers, slices, ... and None, as in NumPy; no arrays of indices, since which elements they name would
        be data. An element is an array without dimensions."""
        keys = key if isinstance(key, tuple) else (key,)
        for part in keys:
            if not isinstance(part, _INDICES):
                raise TypeError(f"a null array is indexed by integers, slices, ... and None, got {key!r}")
        return self._view(self._ghost[keys if ... in keys else (*keys, ...)])

    def __setitem__(self, key: _Index | tuple[_Index, ...], value: object) -> None:
        self[key]

    def reshape(self, *shape: int | tuple[int, ...]) -> NullArray:
        """The same elements in another shape; one length may be -1. A copy where NumPy makes one."""
        asked: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        try:
            return self._view(self._ghost.reshape(asked, copy=False))
        except ValueError:
            copy = self.copy()._ghost  # without gaps: a view of it has any shape of as many elements
        try:
            return NullArray(copy.reshape(asked).shape, self.dtype)
        except ValueError as error:
            raise ValueError(f"an array of shape {self.shape} has not as many elements as shape {tuple(asked)}") from (
                error)

    def view(self, dtype: npt.DTypeLike) -> NullArray:
        """The same bytes in another type; the last length changes with the bytes of an element."""
        try:
            return self._view(self._ghost.view(dtype))
        except ValueError as error:
            raise ValueError(f"an array of shape {self.shape} and type {self.dtype.name} has no view as "
                             f"{np.dtype(dtype).name}") from error

    def astype(self, dtype: npt.DTypeLike, copy: bool = True) -> NullArray:
        return self if not copy and np.dtype(dtype) == self.dtype else NullArray(self.shape, dtype)

    def copy(self) -> NullArray:
        return NullArray(self.shape, self.dtype)

    def fill(self, value: object) -> None:
        pass

    def may_overlap(self, other: NullArray) -> bool:
        """True if both look at one base, and at overlapping stretches of it."""
        one_base = (self if self.base is None else self.base) is (other if other.base is None else other.base)
        return one_base and np.may_share_memory(self._ghost, other._ghost)

    def _compared(self, other: Any) -> NullArray:
        """Bools that nobody knows, of the shape that NumPy's comparison has."""
        return NullArray(np.broadcast_shapes(self.shape, np.shape(getattr(other, "_ghost", other))), bool)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]  # as NumPy's arrays, since equality is no bool

    def _view(self, ghost: npt.NDArray[Any]) -> NullArray:
        found = NullArray.__new__(NullArray)
        found._ghost, found.base = ghost, self if self.base is None else self.base
        return found

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a null array has no data, so it is neither true nor false: a branch on numbers cannot be taken in a "
            "run without numbers"
        )

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a null array has no data: NumPy's functions cannot compute with it, NullKernels can")

    def __repr__(self) -> str:
        return f"NullArray({self.shape}, {self.dtype.name})"


@lru_cache(maxsize=1024)  # a step makes arrays of few shapes, again and again
def _ghost(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """One element that is said to be an array of this shape: its metadata are true, and its elements are not there."""
    if any(length < 0 for length in shape):
        raise ValueError(f"an array has no negative lengths, got shape {shape}")
    strides = [dtype.itemsize]
    for length in shape[:0:-1]:
        strides.append(strides[-1] * max(1, length))
    element = np.empty(1, f"V{dtype.itemsize}")  # a type that as_strided knows
    return np.lib.stride_tricks.as_strided(element, shape, strides[::-1] if shape else ()).view(dtype)


def _address(ghost: npt.NDArray[Any]) -> int:
    address: int = ghost.__array_interface__["data"][0]
    return address


class NullModule:
    """The array module of a run without numbers: what makes arrays, and NumPy's own types and constants.

    Functions that compute are not there: layers and optimizers compute by kernels.
    """

    ndarray = NullArray

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = float) -> NullArray:
        return NullArray(shape, dtype)

    zeros = ones = empty

    def full(self, shape: int | tuple[int, ...], value: object, dtype: npt.DTypeLike | None = None) -> NullArray:
        return NullArray(shape, np.asarray(value).dtype if dtype is None else dtype)

    def empty_like(self, x: Any, dtype: npt.DTypeLike | None = None) -> NullArray:
        return NullArray(x.shape, x.dtype if dtype is None else dtype)

    zeros_like = ones_like = empty_like

    def may_share_memory(self, a: Any, b: Any) -> bool:
        return isinstance(a, NullArray) and isinstance(b, NullArray) and a.may_overlap(b)

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name, None)
        if found is None or (callable(found) and not isinstance(found, type)):
            raise AttributeError(f"arrays without data have no {name}; they have empty, zeros, ones, full, empty_like, "
                                 "zeros_like, ones_like, may_share_memory and NumPy's types: compute by rank.kernels")
        return found
