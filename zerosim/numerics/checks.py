"""Argument checks that every floor shares, and suggestions for names that are not known."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.formats import FORMATS

# -- Suggestions for unknown names -------------------------------------------------------------------------------------

def did_you_mean(name: object, known: Iterable[str], *, most: int = 1, likeness: float = 0.6) -> str:
    """``; did you mean 'ring'?``, the end of an error's text: the nearest known names, or nothing where none is near.

    ``likeness`` runs from 0 (any) to 1 (equal), as in Python's difflib.

    >>> did_you_mean("rings", ["ring", "tree"]), did_you_mean("star", ["ring"])
    ("; did you mean 'ring'?", '')
    """
    known, text = list(known), str(name)
    near = get_close_matches(text, known, most, likeness) or get_close_matches(text.lower(), known, most, likeness)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def unknown_name(asked: str, name: object, known: Collection[str], offer: str = "choose one of") -> ValueError:
    """The refusal of an unknown name: what was asked, what there is, and the nearest.

    >>> unknown_name("no shape is called 'rings'", "rings", ["ring", "tree"])
    ValueError("no shape is called 'rings'; choose one of ring, tree; did you mean 'ring'?")
    """
    return ValueError(f"{asked}; {offer} {', '.join(known)}{did_you_mean(name, known)}")


# -- Checks of arrays and numbers --------------------------------------------------------------------------------------

FP32, FP64 = np.dtype(np.float32), np.dtype(np.float64)
FLOATING = frozenset(fmt.dtype for fmt in FORMATS.values()) | {FP64}
LARGEST = {dtype: float(np.finfo(dtype).max) for dtype in (FP32, FP64)}  # finite numbers of the types to compute in


def is_floating(dtype: np.dtype[Any]) -> bool:
    """True if the kernels compute in this type: the formats' array types and float64 (np.floating has not bf16)."""
    return dtype in FLOATING


def work_type(*arrays: Array) -> np.dtype[Any]:
    """The type to compute in: float64 if any array is, else float32."""
    for x in arrays:
        if x.dtype == FP64:
            return FP64
    return FP32


def split_divisor(divisor: float, work: np.dtype[Any]) -> tuple[float, float]:
    """(factor, divisor'): x/divisor is (x·factor)/divisor', the factor a power of two that brings the divisor into the
    type's range from above; 1 where it is there already, or infinite.

    x·factor is rounded only where it is subnormal, and where that is so the quotient is 0.
    """
    largest = LARGEST[work]
    if not largest < abs(divisor) < math.inf:
        return 1.0, divisor
    surplus = math.frexp(divisor)[1] - math.frexp(largest)[1] + 1  # one more, as rounding may go up
    return math.ldexp(1.0, -surplus), math.ldexp(divisor, -surplus)


def check_shapes(call: str, **arrays: Array) -> None:
    """Raises ValueError, naming all shapes, unless all are equal."""
    if len({x.shape for x in arrays.values()}) > 1:
        found = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        raise ValueError(f"{call} needs arrays of one shape, got {found}")


def check_floating(call: str, **arrays: Array) -> None:
    """Raises ValueError, naming the first array of another type, unless all are of floating point."""
    for name, x in arrays.items():
        if x.dtype not in FLOATING:
            known = ", ".join(sorted(dtype.name for dtype in FLOATING))
            raise ValueError(f"{call} computes in floating point ({known}), got {name} of type {x.dtype.name}")


def check_operands(call: str, **arrays: Array) -> None:
    """Raises ValueError, naming what differs, unless all arrays have one shape and are of floating point."""
    check_shapes(call, **arrays)
    check_floating(call, **arrays)


def check_same_type(call: str, a: Array, out: Array) -> None:
    """Raises ValueError unless the first operand has the type of the result."""
    if a.dtype != out.dtype:
        raise ValueError(
            f"{call} needs its first operand in the type of out, got {a.dtype.name} and {out.dtype.name}: "
            "cast_pack one of them first"
        )


def check_product(a: Array, b: Array, bias: Array | None, out: Array) -> None:
    """Raises ValueError unless a (m, k), b (k, n), bias (n,), out (m, n) fit and are of floating point."""
    arrays = {"a": a, "b": b, "out": out} if bias is None else {"a": a, "b": b, "out": out, "bias": bias}
    check_floating("matmul", **arrays)
    fits = (
        a.ndim == b.ndim == out.ndim == 2
        and a.shape[1] == b.shape[0]
        and out.shape == (a.shape[0], b.shape[1])
        and (bias is None or bias.shape == out.shape[1:])
    )
    if not fits:
        found = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        raise ValueError(f"matmul needs a (m, k), b (k, n), bias (n,) if any, and out (m, n), got {found}")


def is_count(value: object) -> bool:
    """True for a whole number, which True and 2.0 are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for Python's and NumPy's real numbers, which True and "1" are not."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_finite_number(value: object) -> bool:
    """True for the numbers that a double can be: not for inf, NaN and 10**400."""
    try:
        return is_number(value) and math.isfinite(value)  # type: ignore[arg-type]  # a number, says is_number
    except OverflowError:
        return False


def require_count(name: str, value: Any, least: int, what: str = "a whole number", none: str = "") -> None:
    """Raises ValueError unless the value is a count of at least so many, or None where ``none`` says what for."""
    if (value is not None or not none) and (not is_count(value) or value < least):
        raise ValueError(f"{name}={value!r} must be {what}, {least} or more" + f"; pass None {none}" * bool(none))


MOST_BITS = 62  # of a count: products of a few of them still are floats, and sums of bytes fit 64 bits


def checked_count(name: str, value: int, least: int, bits: int = MOST_BITS) -> int:
    """The value as a Python int; raises ValueError unless it is a whole number of at least `least`, below 2^bits."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}; write {name}=int(...)") from None
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    if count.bit_length() > bits:
        raise ValueError(f"{name} must be below 2^{bits}, got a number of {count.bit_length()} bits")
    return count


def count_fields(record: Any, bits: int = MOST_BITS, /, **least: int) -> None:
    """Makes fields of a frozen record Python ints; raises ValueError as `checked_count` does, by the least of each."""
    for name, low in least.items():
        object.__setattr__(record, name, checked_count(name, getattr(record, name), low, bits))


def check_array(call: str, name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a NumPy array."""
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{call} needs {name} as a NumPy array, got {type(value).__name__}; wrap it with np.array")


# -- Checks of what a model or a layer is handed -----------------------------------------------------------------------

def require_shape(where: str, what: str, found: Any, wanted: tuple[int, ...], remedy: str) -> None:
    """Raises ValueError unless the array ``found`` has the shape ``wanted``."""
    if found.shape != wanted:
        raise ValueError(f"{where} asked for {what} of shape {wanted}, and found {found.shape}; {remedy}")


def require_matrix(where: str, what: str, found: Any, axes: str) -> None:
    """Raises ValueError unless ``found`` has two dimensions, which ``axes`` names."""
    if found.ndim != 2:
        raise ValueError(f"{where} asked for {what} of shape {axes}, and found {found.shape}; reshape it to "
                         "two dimensions")


def require_integers(where: str, least: int | None = None, /, **numbers: Any) -> None:
    """Raises ValueError unless every number is an integer, of at least so much where a least is given."""
    for what, number in numbers.items():
        if not is_count(number) or (least is not None and number < least):
            raise ValueError(f"{where} was given {what}={number!r}; {what} is a whole number"
                             + ("" if least is None else f", {least} or more"))


def require_list(where: str, what: str, found: Any, least: int, example: str) -> None:
    """Raises ValueError unless ``found`` is a list or tuple of at least so many."""
    if not isinstance(found, list | tuple) or len(found) < least:
        raise ValueError(f"{where} was asked for {what} {found!r}; it needs a list of at least {least}, as in "
                         f"{example}")


def checked_heads(where: str, channels: int, heads: int, key_value_heads: int = 0,
                  head_channels: int | None = None) -> tuple[int, int]:
    """The heads of keys and of values (0: as many as there are) and a head's channels (0 or None: C/H).

    Raises ValueError for heads that do not divide the channels, unless each head's are said, and for heads of keys that
    do not divide the heads.
    """
    if not head_channels and channels % heads:
        raise ValueError(f"{where} of {channels} channels was asked for {heads} heads, which do not divide them; take "
                         f"a number of heads that does{'' if head_channels is None else ', or say head_channels'}")
    shared = key_value_heads or heads
    if heads % shared:
        raise ValueError(f"{heads} heads were asked to share {shared} key and value heads; each of these serves as "
                         "many heads as the others, so take a number that divides the heads")
    return shared, head_channels or channels // heads


LINEAR_LAYERS = ("qkv", "projection", "feed_forward")  # of a transformer's block, by what they are for


def require_biases(where: str, biases: Any) -> None:
    """Raises ValueError unless ``biases`` is a tuple of linear layers."""
    if not isinstance(biases, tuple) or any(layer not in LINEAR_LAYERS for layer in biases):
        raise ValueError(f"{where} was given biases={biases!r}; name the layers that have one in a tuple: "
                         f"{', '.join(LINEAR_LAYERS)}")
