"""Checks of what a program hands to a collective; every text says what was asked, what was found and what to do."""

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from zerosim.numerics.arrays import is_array, is_writable, may_share_memory, start
from zerosim.numerics.checks import did_you_mean
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.ranks.call import AVERAGES, OPS
from zerosim.ranks.collectives import ALGORITHMS, NATIVE, Algorithm
from zerosim.ranks.trace import PURPOSES

if TYPE_CHECKING:
    from zerosim.ranks.call import CollectiveEntry


Part = slice | EllipsisType
Same = tuple[Part, Part]
WHOLE: Same = (..., ...)

FLOATS = frozenset(f.dtype for f in FORMATS.values()) | {np.dtype(np.float64)}


def vector(x: Any, what: str, *, flat: bool = False) -> np.ndarray:
    """The array, if it is one whose bytes lie in a row; ``flat`` asks for one dimension too."""
    if not is_array(x):
        raise ValueError(f"{what} must be a NumPy array, found {type(x).__name__}; "
                         "wrap numbers as np.array([...], np.float32)")
    if not x.flags.c_contiguous:
        raise ValueError(f"{what} of shape {x.shape} is not contiguous, and a collective makes no hidden copies; "
                         "pass np.ascontiguousarray(...)")
    if not x.dtype.isnative:
        raise ValueError(f"{what} is in {x.dtype.str}, whose byte order is not this machine's; "
                         "pass x.astype(x.dtype.newbyteorder('='))")
    if x.dtype.hasobject:
        raise ValueError(f"{what} holds Python objects ({x.dtype}); only numbers travel")
    if flat and x.ndim != 1:
        raise ValueError(f"{what} is cut among ranks and must have one dimension, found shape {x.shape}; "
                         "pass x.reshape(-1)")
    found: np.ndarray = x
    return found


def output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """``out=`` as given, if the result fits in it."""
    out = vector(out, "out=")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out= has shape {out.shape} and dtype {out.dtype}, but the result has {shape} and {dtype}; "
                         "pass an array of that shape and dtype, or none")
    return writable(out, "out=")


def writable(out: Any, what: str) -> np.ndarray:
    """The array, if values can arrive in it."""
    if not is_writable(vector(out, what)):
        raise ValueError(f"{what} is read-only; pass a writable array")
    found: np.ndarray = out
    return found


def member(index: Any, ranks: int, what: str) -> int:
    """A rank's index, if there is such a rank."""
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < ranks:
        raise ValueError(f"{what}={index!r}, but the group has the ranks 0 to {ranks - 1}")
    return int(index)


def reduction(op: str, average: str | None, dtype: np.dtype[Any]) -> str | None:
    """The averaging rule in force: the one asked for, or the default of ``op="mean"``."""
    if op not in OPS:
        raise ValueError(f"no reduction op={op!r}; choose one of {', '.join(OPS)}")
    if average is not None and op != "mean":
        raise ValueError(f"average={average!r} says how to take a mean, but op={op!r}; pass op='mean'")
    if dtype.kind not in "iu" and dtype not in FLOATS:
        raise ValueError(f"{dtype} cannot be reduced; cast to an integer or a float first")
    if op == "mean" and dtype not in FLOATS:
        raise ValueError(f"op='mean' of {dtype} would need rounding rules that integers do not have; "
                         "sum, or cast to a float")
    return (average or AVERAGES[0]) if op == "mean" else None


def wire_options(row: Algorithm, operation: str, algorithm: str, dtype: np.dtype[Any], op: str, *, wire: str | None,
                 accumulate: str | None) -> tuple[np.dtype[Any] | None, np.dtype[Any] | None]:
    """The dtypes of ``wire=`` and ``accumulate=``, where the algorithm can honor them."""
    if (wire or accumulate) and (dtype not in FLOATS or op not in ("sum", "mean")):
        raise ValueError(f"wire= and accumulate= are about rounding sums of floats; found op={op!r} of {dtype}")
    if wire and not row.wire:
        raise ValueError(f"wire={wire!r} is served by algorithm='ring' of reduce_scatter and all_reduce, where partial "
                         f"sums travel; found {operation} by {algorithm!r}")
    if accumulate and algorithm == NATIVE:
        raise ValueError(f"accumulate={accumulate!r}: in what format {operation} by {NATIVE!r} adds is the library's "
                         "choice; leave it out, or use algorithm='pairwise' (reduce_scatter) or 'everyone' "
                         "(all_reduce)")
    if accumulate and not row.accumulate:
        raise ValueError(f"accumulate={accumulate!r} would change nothing in {operation} by {algorithm!r}: it makes "
                         "one addition per hop, and one addition rounded to the wire's format is the addition in fp32, "
                         "rounded. Use wire='fp32', or algorithm='pairwise' (reduce_scatter) or 'everyone' "
                         "(all_reduce)")
    dtypes = [format_of(name).dtype if name else None for name in (wire, accumulate)]
    return (None if dtypes[0] == dtype else dtypes[0]), (None if dtypes[1] == dtype else dtypes[1])


def served(operation: str, algorithm: str, library: str | None) -> None:
    """Raises ValueError where a library's own collective is asked for and no library carries the messages."""
    if algorithm == NATIVE and library is None:
        raise ValueError(f"{operation} by {NATIVE!r} asks MPI or NCCL for its own, but the ranks of one process have "
                         f"no such library; choose one of {', '.join(ALGORITHMS[operation])}, or run the program "
                         "under mpiexec with zs.connect()")


def overlap(x: np.ndarray, out: np.ndarray, same: Same | None) -> bool:
    """True when the operation is in place; both arrays are contiguous.

    ``same`` names the parts of ``x`` and ``out`` that may be the same memory, None where none may.
    """
    if not may_share_memory(x, out):
        return False
    if same is None:
        raise ValueError("out= overlaps the input, which is still sent from when the first elements arrive; "
                         "pass memory of its own")
    mine, its = x[same[0]], out[same[1]]
    if start(mine) == start(its) and mine.nbytes == its.nbytes:
        return True
    raise ValueError("out= overlaps the input without being the same elements; pass the input itself (or, where one of "
                     "them is the rank's chunk of the other, a view of that chunk), or memory of its own")


def purpose(name: str) -> str:
    """The purpose that a message is counted under, if there is such a one."""
    if name not in PURPOSES:
        raise ValueError(f"no purpose {name!r}; choose one of {', '.join(PURPOSES)}"
                         f"{did_you_mean(name, PURPOSES)}")
    return name


def cutting(row: Algorithm, operation: str, algorithm: str, ranks: int) -> None:
    """Raises ValueError where ``splits=`` would change nothing."""
    if not row.cuts:
        raise ValueError(f"splits= would change nothing in {operation} by {algorithm!r}, which cuts nothing; "
                         "leave it out")
    if row.folds and ranks & (ranks - 1):
        raise ValueError(f"splits= would change nothing in {operation} by {algorithm!r} on {ranks} ranks, of which "
                         "only a power of two take chunks, by a cut of their own; leave it out, or take 'ring'")


def private_memory(entries: "Sequence[CollectiveEntry]") -> None:
    """Raises ValueError where one rank's result would be written over what another one reads or writes."""
    spans = sorted((start(array), start(array) + array.nbytes, entry.index, writes)
                   for entry in entries for array, writes in ((entry.out, True), (entry.x, False)) if array.nbytes)
    written, read = (0, -1), [(0, -1)]  # the farthest end so far, and whose; of two ranks, where they only read
    for low, high, rank, writes in spans:
        for end, other in [written, *(read if writes else [])]:
            if low < end and other != rank:
                raise ValueError(
                    f"ranks {min(rank, other)} and {max(rank, other)} handed the same memory to a collective that "
                    "writes to it, but a rank's memory is its own; give each rank an array of its own"
                )
        if writes:
            written = max(written, (high, rank))
        else:
            others = [pair for pair in read if pair[1] != rank]
            mine = max([pair for pair in read if pair[1] == rank] + [(high, rank)])
            read = sorted([*others, mine])[-2:]
