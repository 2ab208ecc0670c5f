"""Devices, streams and events for the stand-in for CuPy, and a judge of the order in which they work.

Everything is computed at once, in the order in which it is asked for; so a forgotten dependency would change no bit.
The judge finds it nevertheless: it keeps what each stream knows to have happened before (vector clocks), and raises
where an array is used on two streams that do not know of each other. This is a double: it says nothing of GPUs.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Clock = dict[int, int]


class RaceError(AssertionError):
    """Two streams used one array, and nothing said which of them comes first."""


class OutOfMemoryError(MemoryError):
    """What CuPy raises where a card has no more."""


class Stream:
    """What has been asked of one device in one order."""

    def __init__(self, null: bool = False, ptds: bool = False, non_blocking: bool = False, *,
                 _cuda: Any = None) -> None:
        cuda: Any = _cuda or Cuda.current
        assert null or non_blocking, "a blocking stream waits for the default stream, and would hide what is forgotten"
        self.cuda, self.device_id = cuda, cuda.selected
        self.ptr = cuda.number_stream(self)
        self.clock: Clock = {}

    def __enter__(self) -> Stream:
        assert self.cuda.selected == self.device_id, "this stream is another device's"
        self.cuda.stacks[self.device_id].append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.cuda.stacks[self.device_id].pop() is self

    def synchronize(self) -> None:
        self.cuda.heard(self.clock)

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def tick(self) -> int:
        """The number of the next thing that this stream does, after all that the host knows of."""
        merge(self.clock, self.cuda.host)
        self.clock[self.ptr] = self.clock.get(self.ptr, 0) + 1
        return self.clock[self.ptr]


class Event:
    """A moment on a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.cuda: Any = Cuda.current
        self.ptr, self.clock = id(self), {}
        self.cuda.alive[self.ptr] = self

    def record(self, stream: Stream | None = None) -> None:
        assert stream is not None, "without a stream CuPy would take the null stream"
        assert self.cuda.selected == stream.device_id, "an event is recorded on the device's own streams"
        stream.tick()
        self.clock, self.at = dict(stream.clock), time.perf_counter()

    def synchronize(self) -> None:
        self.cuda.heard(self.clock)


def get_elapsed_time(begin: Event, end: Event) -> float:
    """Milliseconds between two moments, in which everything was computed at once."""
    return 1e3 * (end.at - begin.at)


def merge(into: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        into[stream] = max(into.get(stream, 0), tick)


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy to or from the host that may be under way: by which stream, at what time of its, of which memory."""

    stream: int
    tick: int
    memory: int
    end: Callable[[], None]

    def is_known_to(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.tick


class Cuda:
    """The devices of one test, and who uses which of their arrays."""

    current: Cuda

    def __init__(self, count: int) -> None:
        Cuda.current = self
        self.count, self.selected = count, 0
        self.host: Clock = {}
        self.alive: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self.streams: list[Stream] = []
        self.stacks: list[list[Stream]] = []
        for self.selected in range(count):
            self.stacks.append([Stream(null=True, _cuda=self)])
        self.selected = 0
        self.used_nbytes, self.capacity_nbytes = 0, 1 << 62
        self.copies: list[Copy] = []
        self.starts: list[int] = []
        self.owners: dict[int, tuple[int, int]] = {}  # address: nbytes, device
        # By allocation: bytes [low, high) that a stream has read or written, and when it last did.
        self.uses: dict[int, dict[tuple[int, int, bool, int], int]] = defaultdict(dict)

    def number_stream(self, stream: Stream) -> int:
        self.streams.append(stream)
        return 1000 * (self.selected + 1) + sum(s.device_id == self.selected for s in self.streams)

    def stream_query(self, pointer: int) -> int:
        """The status, 0: all is done; whoever asks knows it from here on."""
        next(stream for stream in self.streams if stream.ptr == pointer).synchronize()
        return 0

    def event_query(self, pointer: int) -> int:
        """Likewise."""
        self.alive[pointer].synchronize()
        return 0

    def here(self) -> Stream:
        """The current stream of the current device."""
        return self.stacks[self.selected][-1]

    # -- what the host knows, and copies to and from its pinned memory --------------------------------------------

    def heard(self, clock: Clock) -> None:
        """The host has waited for this; copies that are done by then are there."""
        merge(self.host, clock)
        self._end([copy for copy in self.copies if copy.is_known_to(self.host)])

    def copied(self, stream: Stream, memory: object, end: Callable[[], None]) -> None:
        """The stream's last use was a copy to or from this memory of the host, at the end of which this happens."""
        self.copies.append(Copy(stream.ptr, stream.clock[stream.ptr], id(memory), end))

    def before(self, stream: Stream, memory: object) -> None:
        """The stream copies from this memory: those that it comes after are there, in whatever the host sees."""
        self._end([copy for copy in self.copies if copy.memory == id(memory) and copy.is_known_to(stream.clock)])

    def _end(self, done: list[Copy]) -> None:
        self.copies = [copy for copy in self.copies if copy not in done]
        for copy in done:
            copy.end()

    # -- arrays and their devices ---------------------------------------------------------------------------------

    def allocated(self, array: Any) -> None:
        """A new base array, on the current device; its pool hands out multiples of 512 bytes."""
        address, nbytes = array.data.ptr, array.nbytes
        if nbytes:
            if self.used_nbytes + nbytes > self.capacity_nbytes:
                raise OutOfMemoryError(f"Out of memory allocating {nbytes:,} bytes")
            self.used_nbytes += -(-nbytes // 512) * 512
            self.starts.insert(bisect.bisect(self.starts, address), address)
            self.owners[address] = nbytes, self.selected
            weakref.finalize(array, self.freed, address)

    def freed(self, address: int) -> None:
        self.starts.pop(bisect.bisect_left(self.starts, address))
        self.used_nbytes -= -(-self.owners[address][0] // 512) * 512
        for table in (self.owners, self.uses):
            table.pop(address, None)

    def base(self, address: int) -> int:
        """The start of the allocation in which the address lies."""
        start = self.starts[bisect.bisect(self.starts, address) - 1]
        assert start <= address < start + self.owners[start][0], "an address outside every array"
        return start

    def device_of(self, array: Any) -> int:
        """Where the array lies; anywhere, if it is empty."""
        return self.owners[self.base(array.data.ptr)][1] if array.nbytes else self.selected

    def use(self, low: int, high: int, stream: Stream, *, writes: bool) -> None:
        """The stream reads or writes these bytes; RaceError where another one may be at some of them still."""
        base = self.base(low)
        assert self.owners[base][1] == stream.device_id, "an array of another device"
        tick = stream.tick()
        for (its_low, its_high, wrote, other), when in self.uses[base].items():
            if (writes or wrote) and low < its_high and its_low < high and when > stream.clock.get(other, 0):
                raise RaceError(f"stream {stream.ptr} uses an array that stream {other} may still be using")
        self.uses[base][low, high, writes, stream.ptr] = tick


class Device:
    """One of them; ``with`` and ``use`` select it for the thread."""

    cublas_handle = 7

    def __init__(self, index: int | None = None) -> None:
        self.id = Cuda.current.selected if index is None else index
        self.pci_bus_id = f"0000:{self.id:02x}:00.0"
        self._before: list[int] = []

    def use(self) -> None:
        Cuda.current.selected = self.id

    def __enter__(self) -> Device:
        self._before.append(Cuda.current.selected)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        Cuda.current.selected = self._before.pop()

    def synchronize(self) -> None: ...
