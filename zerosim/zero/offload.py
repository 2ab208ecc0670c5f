"""Offload: state that rests on the host or on disk, and every move between there and the device.

What rests on the host is an array in ``rank.memory.host``, what rests on disk a `DiskVector` in ``rank.memory.disk``;
`OffloadStore` brings either to where it is computed with, and back, and notes the bytes in the trace. What the parts of
a step do otherwise with such a store is in `zero.offloaded_step`.

Files are read ahead and written behind by a few threads. State that an update writes goes into a second file (a draft),
which takes the first one's place when the whole update is written on every rank: so a disk that is full or fails leaves
the state of before, and the step may be taken again.

Legend: n elements of a vector; a range [low, high) counts elements. A stretch is what is moved at once.
Sources: Ren et al. 2021 (ZeRO-Offload), section 4; Rajbhandari et al. 2021 (ZeRO-Infinity), section 6.
"""

import errno
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import mkstemp
from typing import Any, NamedTuple

import numpy as np

from zerosim.numerics.arrays import AnyArray, as_bytes, copy_elements, has_data, spans
from zerosim.numerics.kernels import do_nothing
from zerosim.numerics.places import DEVICE, DISK, FROM_DISK, HOST, TO_DEVICE, TO_DISK, TO_HOST, Offload
from zerosim.ranks.option_rows import Transfer, TransferWait, begin_transfer
from zerosim.ranks.rank import Rank
from zerosim.ranks.together import all_or_none
from zerosim.zero.placements import Store, Workplace

Outcome = Future[OSError | None]  # of what a thread does
THREADS = 2  # of one rank
WRITES_BEHIND = 4  # at most so many writes are under way, each with its memory on the host


class OffloadError(OSError):
    """State on disk could not be read or written; what rests is what rested before the step."""


class ScratchFile:
    """A file without a name in a directory: nobody else sees it, and its room is free again when nothing refers to it.

    Raises OSError where the directory has not the room. `pread` and `pwrite` are what a system does in one call, which
    may be less than was asked.
    """

    def __init__(self, directory: str | Path, nbytes: int) -> None:
        self.number, name = mkstemp(prefix="zerosim-offload-", dir=directory)
        weakref.finalize(self, os.close, self.number)
        os.unlink(name)
        os.truncate(self.number, nbytes)  # zeros
        if nbytes and hasattr(os, "posix_fallocate"):  # elsewhere the room is found, or not, by writing
            os.posix_fallocate(self.number, 0, nbytes)

    def pread(self, into: memoryview, start: int) -> int:
        """Reads bytes from ``start`` on; returns how many."""
        return os.preadv(self.number, [into], start)

    def pwrite(self, values: memoryview, start: int) -> int:
        """Writes bytes from ``start`` on; returns how many."""
        return os.pwrite(self.number, values, start)

    def read(self, into: memoryview, start: int) -> None:
        """Fills ``into``. Raises OSError where the file ends before."""
        self._whole(self.pread, into, start, "read")

    def write(self, values: memoryview, start: int) -> None:
        """Writes all of ``values``."""
        self._whole(self.pwrite, values, start, "write")

    @staticmethod
    def _whole(call: Callable[[memoryview, int], int], view: memoryview, start: int, what: str) -> None:
        while view:
            done = call(view, start)
            if done == 0:
                raise OSError(errno.EIO, f"a short {what}: {len(view)} bytes from byte {start} on are missing")
            view, start = view[done:], start + done


class ChargedFile(NamedTuple):
    """A file, None without data, and what stands for its bytes in the rank's account of the disk."""

    file: Any
    account: AnyArray


@dataclass(slots=True, eq=False)
class StoredVector:
    """A whole vector (n,) on disk: its file, and during an update the draft with the ranges that are new."""

    kind: str
    name: str
    dtype: np.dtype[Any]
    length: int
    old: Any = None  # a ChargedFile, as the draft
    draft: Any = None
    written: list[tuple[int, int]] = field(default_factory=list)  # of the draft, rising and apart

    def newest(self, low: int, high: int) -> list[tuple[ChargedFile, int, int]]:
        """The files in which the range's newest elements lie, piece by piece."""
        found, at = [], low
        for first, last in self.written:
            first, last = max(first, at), min(last, high)
            if first < last:
                found += [(self.old, at, first)] * (at < first) + [(self.draft, first, last)]
                at = last
        return found + [(self.old, at, high)] * (at < high)

    def note_written(self, low: int, high: int) -> None:
        """Adds a range of the draft."""
        touching = [one for one in self.written if one[0] <= high and low <= one[1]]
        for first, last in touching:
            self.written.remove((first, last))
            low, high = min(low, first), max(high, last)
        self.written = sorted([*self.written, (low, high)])

    def end_update(self, *, keep: bool) -> None:
        """Ends an update: the draft takes the file's place, or is dropped."""
        self.old, self.draft, self.written = (keep and self.draft) or self.old, None, []


class DiskVector:
    """A vector on disk, or a range of one: shape and dtype of an array, of which `OffloadStore` moves the values."""

    def __init__(self, stored: StoredVector, start: int, shape: tuple[int, ...]) -> None:
        self.stored, self.start, self.shape = stored, start, shape
        self.dtype, self.size = stored.dtype, prod(map(int, shape))

    @property
    def stop(self) -> int:
        """The end of its range in the whole vector."""
        return self.start + self.size

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice) -> "DiskVector":
        low, high, _ = key.indices(self.size)
        return DiskVector(self.stored, self.start + low, (max(0, high - low),))

    def reshape(self, *shape: Any) -> "DiskVector":
        """The same elements in another shape of as many."""
        asked = shape[0] if isinstance(shape[0], tuple) else shape
        return DiskVector(self.stored, self.start, (self.size,) if asked == (-1,) else asked)


def _in_a_thread(places: Sequence[tuple[Callable[[memoryview, int], None], int, int, int]],
                 room: list[AnyArray]) -> OSError | None:
    """Reads into stretches of an array, or writes them; returns an error. Then this thread refers to the array no more,
    so that its end is noted by the rank's own.
    """
    view = room.pop().data
    try:
        for call, low, high, start in places:
            call(view[low:high], start)
    except OSError as error:
        return error.with_traceback(None)
    return None


class OffloadStore(Store):
    """Moves one rank's state between its device, its host and its disk.

    A GPU copies on a stream of its own, beside what it computes. Of what leaves it one array at most is under way,
    whose memory is not free until then.
    """

    def __init__(self, rank: Rank, offload: Offload) -> None:
        super().__init__(rank)
        self.offload, self.host = offload, Workplace(rank.kernels.on_host, rank.memory.host, do_nothing)
        self.workplace = self.device if offload.optimizer == DEVICE else self.host
        self.read_next: Mapping[str, Any] = {}  # the vectors of which the first stretch is needed next
        self._open_file = offload.open_file or ScratchFile
        self._stored: list[StoredVector] = []
        self._ahead: dict[tuple[StoredVector, int, int], tuple[AnyArray, Outcome, Transfer]] = {}
        self._writes: list[tuple[DiskVector, AnyArray, Outcome, Transfer]] = []
        # Between device and host, not waited for yet, and what waits for the copy.
        self._under_way: list[tuple[Transfer, Callable[[], None]]] = []
        self._drafting = False
        self._failure: OSError | None = None  # of a file, in the update under way
        self.has_taken_effect = False  # some of what the update under way, or the last one, has written to disk
        self._pool = ThreadPoolExecutor(THREADS) if offload.uses_disk and has_data(
            rank.kernels.empty(0, np.float32)) else None

    # -- where things rest --------------------------------------------------------------------------------------------

    def alloc(self, shape: int | tuple[int, ...], dtype: Any, kind: str, name: str) -> Any:
        """A new array for state of a kind, charged where that rests.

        Raises OffloadError for a directory in which no file can be made.
        """
        place = self.offload.place_of(kind)
        if place == DEVICE:
            return super().alloc(shape, dtype, kind, name)
        if place == HOST:
            return self.memory.host.alloc(shape, dtype, kind, name)
        shape = shape if isinstance(shape, tuple) else (shape,)
        length, dtype = prod(map(int, shape)), np.dtype(dtype)
        stored = StoredVector(kind, name, dtype, length)
        try:
            stored.old = self._new_file(stored)
        except OSError as error:
            raise self._explained(error, f"{kind} {name}") from None
        if kind != "gradient":
            self._stored.append(stored)
        return DiskVector(stored, 0, shape)

    def _new_file(self, stored: StoredVector) -> ChargedFile:
        file = None if self._pool is None else self._open_file(
            Path(self.offload.directory or ""), stored.length * stored.dtype.itemsize)
        return ChargedFile(file, self.memory.disk.alloc(stored.length, stored.dtype, stored.kind, stored.name))

    def clear(self, x: Any) -> None:
        """Sets new elements to zero; a new file has zeros."""
        if not isinstance(x, DiskVector):
            super().clear(x)

    @contextmanager
    def writing(self, x: Any) -> Iterator[Any]:
        """The array itself, to be written to where it rests; or room on the host, whose values go to the disk."""
        with self.arrays_at({"": x}, self.device if self.is_array(x) else self.host, read=()) as room:
            yield room[""]

    def place_of(self, x: Any) -> str:
        """The place where an array rests."""
        if isinstance(x, DiskVector):
            return DISK
        return DEVICE if self.memory.host.kind_of(x) is None else HOST

    def is_array(self, x: Any) -> bool:
        return self.place_of(x) == DEVICE

    def _place(self, workplace: Workplace) -> str:
        return DEVICE if workplace is self.device else HOST

    def _room(self, place: str, like: Any) -> Any:
        """New memory on the device or the host for a copy of state."""
        memory, kind = (self.memory, "communication_buffer") if place == DEVICE else (self.memory.host, "workspace")
        return memory.alloc(like.shape, like.dtype, kind, "offload")

    def stretches(self, count: int, *vectors: Any) -> Iterator[slice]:
        """The ranges in which so many elements are moved; meanwhile the next one of each vector is read from disk."""
        stretch = self.rank.kernels.STRETCH
        for here in spans(count, stretch):
            self.read_ahead(*(x[here.stop:here.stop + stretch] for x in vectors))
            yield here

    # -- moves --------------------------------------------------------------------------------------------------------

    def at(self, place: str, x: Any, *, read: bool = True, of: Any = None, wait: bool = True) -> Any:
        """The elements on the device or the host: ``x`` itself if it is there, else a copy in a communication buffer or
        workspace, or room for one where ``read`` is False.

        ``of`` is the state whose values they are, where ``x`` is a buffer; ``wait`` is that of `move`.
        """
        here = self.place_of(x)
        if here == place:
            if place == HOST:
                self._arrive()
            return x
        if here == DISK and place == HOST and read:
            return self._read(x)
        room = self._room(place, x)
        if read:
            self.move(x, room, of=of, wait=wait)
        return room

    def read(self, x: Any, at: Workplace | None = None) -> Any:
        """The values where they are computed with: ``x`` itself if it rests there, else a copy."""
        return self.at(self._place(at or self.device), x)

    def saved(self, x: Any) -> Any:
        """The array itself, or of one on disk a copy on the host."""
        return self.at(HOST, x) if self.place_of(x) == DISK else x

    def read_stretches(self, x: Any) -> Iterator[Any]:
        """The values of a gradient, where it rests on the device or the host; from the disk they come to the host."""
        place = DEVICE if self.offload.gradients == DEVICE else HOST
        for here in self.stretches(len(x), x):
            yield self.at(place, x[here])

    def move(self, source: Any, target: Any, *, of: Any = None, wait: bool = True) -> None:
        """target = source, of one shape and type, wherever they lie; beside the program, unless ``wait`` is asked for.
        """
        there, here = self.place_of(source), self.place_of(target)
        if there == DISK:
            of, source, there = source, self._read(source), HOST
        if here == DISK:
            source = self.at(HOST, source, of=target, wait=wait)
            self._arrive()
            self._write(source, target)
            return
        if there == here:
            copy_elements(source, target)
            return
        row = begin_transfer(self.rank.trace, TO_HOST if here == HOST else TO_DEVICE,
                             self._kind(of, source, target), source.nbytes)
        if here == HOST:
            self._arrive()
        self._under_way.append((row, self.rank.kernels.copy_beside(source, target)))
        if wait:
            self._wait_for(*self._under_way.pop())

    def _kind(self, *arrays: Any) -> str:
        """The kind of state whose values are moved between these: that of the first which is no buffer."""
        for x in arrays:
            kind = x.stored.kind if isinstance(x, DiskVector) else None if x is None else (
                self.memory.kind_of(x) or self.memory.host.kind_of(x))
            if kind in ("parameter", "gradient", "master", "optimizer_state"):
                return str(kind)
        return "workspace"

    def put(self, values: Any, resting: Any, *, add: bool = False) -> None:
        """Puts what is on the device where it rests, with ``add`` onto what is there; the host rounds what rests there.
        """
        if self.is_array(resting):
            super().put(values, resting, add=add)
            return
        if not add and values.dtype == resting.dtype:
            self.move(values, resting, of=resting, wait=False)
            return
        for here in self.stretches(len(values)):
            arrived, kernels = self.at(HOST, values[here], of=resting, wait=False), self.rank.kernels.on_host
            with self.arrays_at({"": resting[here]}, self.host, read=("",) * add) as arrays:
                self._arrive()
                if add:
                    kernels.add_rounded(arrays[""], arrived, arrays[""])
                else:
                    kernels.cast_pack(arrived, arrays[""])

    @contextmanager
    def arrays_at(self, resting: Mapping[str, Any], at: Workplace, *, read: Collection[str] | None = None,
                written: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
        """As in the plain store: copies, but for arrays that rest at the workplace."""
        place = self._place(at)
        copies = {name: self.at(place, x, read=read is None or name in read) for name, x in resting.items()}
        yield copies
        for name, x in resting.items():
            if copies[name] is not x and (written is None or name in written):
                self.move(copies[name], x)

    def updating(self, resting: Mapping[str, Any], count: int,
                 unchanged: Collection[str] = ()) -> Iterator[tuple[slice, dict[str, Any]]]:
        """The vectors at the workplace, stretch by stretch; beside the last one what is needed next is read."""
        for here, arrays in super().updating(resting, count, unchanged):
            if here.stop == count:
                self.read_ahead(*(x[:self.rank.kernels.STRETCH] for x in self.read_next.values()))
            yield here, arrays

    def note(self, kind: str, nbytes: int) -> None:
        """Notes the memory traffic of arithmetic on state of a kind, where that is the device's."""
        if self.offload.place_of(kind) == DEVICE:
            super().note(kind, nbytes)

    def wait(self, direction: str | None = None) -> None:
        """Waits for what is under way between device and host, one way or both."""
        awaited = [one for one in self._under_way if direction in (None, one[0].direction)]
        self._under_way = [one for one in self._under_way if direction not in (None, one[0].direction)]
        for one in awaited:
            self._wait_for(*one)

    def _wait_for(self, row: Transfer, arrived: Callable[[], None] = do_nothing) -> None:
        arrived()
        self.rank.trace.add(TransferWait(row))

    def _arrive(self) -> None:
        """Lets copies to the host arrive, before it computes with them or writes them, and before the next one begins;
        in the trace the program waits where it asks to."""
        for number, (row, arrived) in enumerate(self._under_way):
            if row.direction == TO_HOST:
                arrived()
                self._under_way[number] = row, do_nothing

    # -- the disk -----------------------------------------------------------------------------------------------------

    def read_ahead(self, *vectors: Any) -> None:
        """Begins to read what will be asked for next, in these ranges; what does not rest on disk is there already."""
        for x in vectors:
            if isinstance(x, DiskVector) and x.size:
                key = (x.stored, x.start, x.size)
                if key not in self._ahead:
                    self._ahead[key] = self._start_read(x)

    def _read(self, x: DiskVector) -> AnyArray:
        """The values on the host, in new memory."""
        key = (x.stored, x.start, x.size)
        values, future, row = self._ahead.pop(key) if key in self._ahead else self._start_read(x)
        self._finish(future, row, x)
        return values

    def _start_read(self, x: DiskVector) -> tuple[AnyArray, Outcome, Transfer]:
        values = self._room(HOST, x)
        while any(stored.stored is x.stored and stored.start < x.stop and x.start < stored.stop
                  for stored, *_ in self._writes):
            self._finish_write()
        row = begin_transfer(self.rank.trace, FROM_DISK, x.stored.kind, x.nbytes)
        return values, self._submit("read", x, values, x.stored.newest(x.start, x.stop)), row

    def _write(self, values: AnyArray, target: DiskVector) -> None:
        """Begins to write values on the host, which nobody may change any more."""
        if not target.size:
            return
        stored = target.stored
        for key in [key for key in self._ahead if key[0] is stored and key[1] < target.stop
                    and target.start < key[1] + key[2]]:
            self._read(DiskVector(stored, key[1], (key[2],)))  # and drops it
        if self._drafting and stored in self._stored:
            try:
                if stored.draft is None:
                    stored.draft = self._new_file(stored)
            except OSError as error:
                self._failed(error, target)
                return
            stored.note_written(target.start, target.stop)
        row = begin_transfer(self.rank.trace, TO_DISK, stored.kind, target.nbytes)
        future = self._submit("write", target, values, [(stored.draft or stored.old, target.start, target.stop)])
        self._writes.append((target, values, future, row))
        if len(self._writes) > WRITES_BEHIND:
            self._finish_write()

    def _submit(self, what: str, x: DiskVector, values: AnyArray, parts: list[tuple[ChargedFile, int, int]]) -> Outcome:
        """Lets a thread read or write."""
        if self._pool is None:  # there are no data
            done = Outcome()
            done.set_result(None)
            return done
        itemsize = x.dtype.itemsize
        places = [(getattr(part.file, what), (low - x.start) * itemsize, (high - x.start) * itemsize, low * itemsize)
                  for part, low, high in parts]
        return self._pool.submit(_in_a_thread, places, [as_bytes(values)])

    def _finish_write(self) -> None:
        target, _values, future, row = self._writes.pop(0)
        self._finish(future, row, target)

    def _finish(self, future: Outcome, row: Transfer, x: DiskVector) -> None:
        self._wait_for(row)
        if (error := future.result()) is not None:
            self._failed(error, x)

    def _failed(self, error: OSError, x: DiskVector) -> None:
        """Raises OffloadError; in an update at its end, on every rank."""
        explained = self._explained(error, f"{x.stored.kind} {x.stored.name}, elements {x.start} to {x.stop}")
        if not self._drafting:
            raise explained from None
        self._failure = self._failure or explained

    def _explained(self, error: OSError, what: str) -> OffloadError:
        return OffloadError(error.errno, f"{error.strerror} ({what}, on disk for rank {self.rank.index}); what rests "
                            "is what rested before. Make room, place less on disk, or name another directory, and try "
                            "again", str(self.offload.directory or Path()))

    def finish(self) -> None:
        """Waits for all transfers that are under way."""
        self.wait()
        while self._writes:
            self._finish_write()

    @contextmanager
    def transaction(self, needed: bool = True) -> Iterator[None]:
        """Lets all that the block writes to state on disk take effect at its end; without such state it does nothing.

        Raises OffloadError on every rank where a file of one could not be read or written: then nothing has changed.
        What the block computes after a read that failed is dropped with it, and collectives go on until then.
        """
        if not (needed and self.offload.optimizer == DISK):
            yield
            self.finish()
            return
        self._drafting, self._failure, self.has_taken_effect = True, None, False
        try:
            yield
            for stored in self._stored:
                for file, low, high in stored.newest(0, stored.length) if stored.draft else []:
                    if file is stored.old:
                        kept = DiskVector(stored, low, (high - low,))
                        self._write(self._read(kept), kept)
            self.finish()
            all_or_none(self.rank, self._raise_failure, error=OffloadError)
            self.has_taken_effect = True
            for stored in self._stored:
                stored.end_update(keep=True)
        finally:
            self._drafting = False
            self.abandon()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Forgets what is under way, and drops drafts."""
        writes, self._writes, copies, self._under_way = self._writes, [], self._under_way, []
        self.forget_ahead()
        for _, arrived in copies:
            arrived()
        for _, _, future, _ in writes:
            future.result()  # a file that is written to is not to be read in the next step
        for stored in self._stored:
            stored.end_update(keep=False)

    def forget_ahead(self) -> None:
        """Drops what was read ahead and not asked for."""
        for _, future, _ in self._ahead.values():
            future.result()
        self._ahead = {}
