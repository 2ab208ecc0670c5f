"""The memory of one rank: every array that outlives a kernel is here, with its kind, from birth to death.

Legend: nbytes are those of the values (2 for each 16-bit value). An array of 4 KiB or more is aligned to 64 bytes;
the up to 64 bytes more that its base takes for that are ``slack_nbytes``, and no part of any kind. On a GPU an array
takes multiples of 512 bytes of CuPy's pool, and what is beyond its own is slack.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np

from zerosim.numerics.arrays import base_of, is_writable, on_device, poison
from zerosim.numerics.kernels import NullKernels, NumpyKernels
from zerosim.ranks.errors import OutOfMemoryError
from zerosim.ranks.process import guarded
from zerosim.ranks.trace import KINDS, Held, Trace, checked_kind, checked_kinds
from zerosim.shown import Plotted

RESTING_KINDS = KINDS[:4]  # those that stay from one step to the next; the others live inside a step


class Holding(weakref.ref[Any]):
    """One held array: the reference that notices its death, and what is known of it."""

    __slots__ = "key", "kind", "name", "nbytes", "number", "slack_nbytes"
    key: int
    kind: str
    name: str
    nbytes: int
    slack_nbytes: int
    number: int


@guarded
class Memory(Plotted):
    """Bytes that one rank holds, by kind; the only place in the package where held bytes are counted."""

    def __init__(self, owner: str, kernels: NumpyKernels, capacity_nbytes: int | None, debug: bool, *,
                 kept_rows: int | None = None) -> None:
        """``kept_rows`` bounds the trace of an account that no run begins anew."""
        self.owner = owner
        self.capacity_nbytes = capacity_nbytes
        self.debug = debug
        self.kernels = kernels
        self.trace = Trace(kept_rows=kept_rows)
        self._holdings: dict[int, Holding] = {}
        self._entered = 0  # how many arrays have ever been held
        self._by_kind = dict.fromkeys(KINDS, 0)
        self._peak_by_kind = self._by_kind.copy()
        self.now_nbytes = 0
        self.peak_nbytes = 0
        self.slack_nbytes = 0

    def __repr__(self) -> str:
        return f"<Memory of {self.owner}: {self.now_nbytes:,} bytes now, {self.peak_nbytes:,} at the peak>"

    @cached_property
    def host(self) -> "Memory":
        """An account of its own: of what the rank keeps in the memory of its host (offload)."""
        return Memory(f"the host of {self.owner}", self.kernels.on_host, None, self.debug, kept_rows=1)

    @cached_property
    def disk(self) -> "Memory":
        """An account of its own: of what the rank keeps on disk, where arrays without data stand for files."""
        return Memory(f"the disk of {self.owner}", cast(NumpyKernels, NullKernels()), None, False, kept_rows=1)

    @property
    def now_nbytes_by_kind(self) -> dict[str, int]:
        """Bytes held now, by kind; kinds of which nothing is held are left out."""
        return {kind: nbytes for kind, nbytes in self._by_kind.items() if nbytes}

    @property
    def peak_nbytes_by_kind(self) -> dict[str, int]:
        """The breakdown at the instant of the total peak."""
        return {kind: nbytes for kind, nbytes in self._peak_by_kind.items() if nbytes}

    def alloc(self, shape: int | Sequence[int], dtype: Any, kind: str, name: str = "", *, like: Any = None,
              room: np.ndarray | None = None) -> np.ndarray:
        """A new array of this shape and dtype, charged to ``kind``; uninitialized, in debug mode NaN.

        On a rank whose arrays have no data, it has some if ``like`` has. ``room`` is such an array of another rank, for
        both to hold, if this one does not yet. Raises OutOfMemoryError when the capacity does
        not leave the bytes, and ValueError for an unknown kind, and for Python objects, whose bytes are elsewhere.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise ValueError(f"{self.owner} asked for an array of type {dtype}, whose elements lie where no memory "
                             "counts their bytes; take a type of numbers, such as np.float32")
        lengths = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        if min(lengths, default=0) < 0:
            raise ValueError(f"{self.owner} asked for an array of shape {shape}, but no length can be negative")
        nbytes = dtype.itemsize * math.prod(map(int, lengths))
        self._admit(nbytes, kind, name)
        kernels = self.kernels if like is None else self.kernels.serving(like)
        array = kernels.empty(lengths, dtype) if room is None or self.kind_of(room) else room
        if self.debug:
            poison(array)
        self._enter(base_of(array), kind, name, nbytes, kernels.slack_nbytes(nbytes))
        return array

    def hold(self, array: np.ndarray, kind: str, name: str = "") -> np.ndarray:
        """Charges an array that exists already (a batch, say) to ``kind``, once, until it dies; returns it."""
        base = base_of(array)
        if id(base) not in self._holdings:
            self._admit(base.nbytes, kind, name)
            slack_nbytes = self.kernels.slack_nbytes(base.nbytes) if on_device(base) else 0
            self._enter(base, kind, name, base.nbytes, slack_nbytes)
        return array

    def free(self, array: np.ndarray) -> None:
        """Takes the array out of the memory now, and fills it with NaN in debug mode, so that a late reader is seen.

        Raises ValueError when the memory does not hold it.
        """
        holding = self._holding(array, "free")
        if self.debug and is_writable(array):
            poison(array)
        self._leave(holding)

    def reclassify(self, array: np.ndarray, kind: str) -> None:
        """Moves a held array to another kind (a layer's input that is now kept for recomputation, say)."""
        checked_kind(kind)
        holding = self._holding(array, "reclassify")
        self._move(holding, -holding.nbytes)
        holding.kind = kind
        self._move(holding, holding.nbytes)

    def _holding(self, array: np.ndarray, asked: str) -> Holding:
        holding = self._holdings.get(id(base_of(array)))
        if holding is None:
            raise ValueError(f"{self.owner} asked to {asked} an array of {array.nbytes} bytes that its memory does not "
                             "hold; only what alloc() or hold() charged is there, and only until free() or its death")
        return holding

    def kind_of(self, array: np.ndarray) -> str | None:
        """The kind under which the array's memory is held; None when it is not in this memory."""
        holding = self._holdings.get(id(base_of(array)))
        return None if holding is None else holding.kind

    def reset_peak(self) -> None:
        """Lets the peak start anew from what is held now."""
        self.peak_nbytes = self.now_nbytes
        self._peak_by_kind = self._by_kind.copy()

    def peak_nbytes_of(self, kinds: str | Iterable[str]) -> int:
        """The most bytes that these kinds held together at one moment of the current trace.

        Raises ValueError for a kind that there is not.
        """
        asked = checked_kinds(kinds)
        held = peak = sum(self.trace.held_at_start.get(kind, 0) for kind in asked)
        for row in self.trace.all_rows():
            if isinstance(row, Held) and row.kind in asked:
                held += row.nbytes
                peak = max(peak, held)
        return peak

    def _admit(self, nbytes: int, kind: str, name: str) -> None:
        checked_kind(kind)
        if self.capacity_nbytes is not None and self.now_nbytes + nbytes > self.capacity_nbytes:
            held = ", ".join(f"{k} {n:,}" for k, n in self.now_nbytes_by_kind.items()) or "nothing"
            raise OutOfMemoryError(
                f"{self.owner} asked for {nbytes:,} bytes ({kind}{' ' + name if name else ''}) and has "
                f"{self.capacity_nbytes - self.now_nbytes:,} left of capacity_nbytes={self.capacity_nbytes:,}; "
                f"it holds {self.now_nbytes:,}: {held}. Shard more, keep less, let go of earlier results "
                "(cluster.runs.clear()), or raise the capacity."
            )

    def _enter(self, base: np.ndarray, kind: str, name: str, nbytes: int, slack_nbytes: int) -> None:
        self._entered += 1
        holding = Holding(base, self._leave)
        holding.key, holding.kind, holding.name, holding.number = id(base), kind, name, self._entered
        holding.nbytes, holding.slack_nbytes = nbytes, slack_nbytes
        self._holdings[holding.key] = holding
        self.slack_nbytes += slack_nbytes
        self._move(holding, nbytes)

    def _leave(self, holding: Holding) -> None:
        """Once: freed, or at its array's death."""
        if self._holdings.pop(holding.key, None) is not None:
            self.slack_nbytes -= holding.slack_nbytes
            self._move(holding, -holding.nbytes)

    def _move(self, holding: Holding, nbytes: int) -> None:
        self._by_kind[holding.kind] += nbytes
        self.now_nbytes += nbytes
        self.trace.add(Held(holding.kind, holding.name, nbytes, holding.number))
        if self.now_nbytes > self.peak_nbytes:
            self.peak_nbytes = self.now_nbytes
            self._peak_by_kind = self._by_kind.copy()


@guarded
class Memories(tuple[Memory, ...], Plotted):
    """The memories of all ranks of a cluster, in rank order."""

    __slots__ = ()

    @property
    def now_nbytes(self) -> list[int]:
        """Bytes held now by each rank."""
        return [memory.now_nbytes for memory in self]

    @property
    def now_nbytes_by_kind(self) -> list[dict[str, int]]:
        """Bytes held now by each rank, by kind."""
        return [memory.now_nbytes_by_kind for memory in self]

    @property
    def peak_nbytes(self) -> list[int]:
        """The peak of each rank."""
        return [memory.peak_nbytes for memory in self]

    @property
    def peak_nbytes_by_kind(self) -> list[dict[str, int]]:
        """The breakdown of each rank's peak, by kind."""
        return [memory.peak_nbytes_by_kind for memory in self]

    def __repr__(self) -> str:
        return f"<Memories of {len(self)} ranks: {self.now_nbytes} bytes now, {self.peak_nbytes} at the peak>"
