"""The memory: what a rank holds, by kind, from an array's birth to its death, at its peak, and up to its capacity."""

from collections import Counter
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import zerosim as zs
from tests.cases import covering
from tests.ranks.asking import KINDS as CLUSTERS
from tests.ranks.asking import ROWS, WORLDS, allowed, ask
from tests.ranks.data import FLOATS, INTEGERS, OTHERS, whole_numbers
from zerosim.numerics import arrays
from zerosim.ranks import trace


def new_memory(capacity_nbytes: int | None = None, *, debug: bool = False) -> zs.Memory:
    return zs.Cluster(4, capacity_nbytes=capacity_nbytes, debug=debug).memory[3]


SOME = trace.KINDS[1::3]


# Any history of a memory, beside a model of it that does nothing clever.

class History(RuleBasedStateMachine):
    """A memory beside a model of it: arrays, or views of them, by name, each with its kind and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: dict[int, np.ndarray] = {}
        self.freed: dict[int, np.ndarray] = {}
        self.model: dict[int, tuple[str, int, int]] = {}
        self.peak, self.peak_by_kind, self.peak_of_some, self.count = 0, Counter(), 0, 0

    @initialize(capacity=st.one_of(st.none(), st.just(0), st.integers(0, 9000)), debug=st.booleans())
    def begin(self, capacity: int | None, debug: bool) -> None:
        self.memory, self.capacity = new_memory(capacity, debug=debug), capacity

    @rule(count=st.integers(0, 300) | st.sampled_from([1023, 1024]), dtype=st.sampled_from(["f4", "f2", "i8", "u1"]),
          kind=st.sampled_from(trace.KINDS), exists=st.booleans())
    def enter(self, count: int, dtype: str, kind: str, exists: bool) -> None:
        """What exists already is held with all that its memory has, whatever view is named."""
        nbytes = count * np.dtype(dtype).itemsize
        fits = self.capacity is None or self.total() + nbytes <= self.capacity
        try:
            array = (self.memory.hold(np.empty((count, 1), dtype).T[:, count // 2:], kind) if exists
                     else self.memory.alloc(count, dtype, kind))
        except zs.OutOfMemoryError:
            assert not fits
            return
        assert fits
        self.count += 1
        self.arrays[self.count] = array
        self.model[self.count] = kind, nbytes, 64 if nbytes >= 4096 and not exists else 0
        assert exists or nbytes < 4096 or array.ctypes.data % 64 == 0
        self.note_peak()

    def some(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.arrays)))

    @precondition(lambda self: self.arrays)
    @rule(data=st.data())
    def keep_a_view_alone(self, data) -> None:
        """Any view keeps the whole array, and names it."""
        name = self.some(data)
        self.arrays[name] = self.arrays[name].view(np.uint8)[1:].reshape(-1, 1).T

    @precondition(lambda self: self.arrays)
    @rule(data=st.data(), how=st.sampled_from(["free", "drop", "free, drop"]))
    def leave(self, data, how: str) -> None:
        name = self.some(data)
        if "free" in how:
            self.memory.free(self.arrays[name])
        array = self.arrays.pop(name)
        if how == "free":
            self.freed[name] = array
        del self.model[name]

    @precondition(lambda self: self.arrays)
    @rule(data=st.data(), kind=st.sampled_from(trace.KINDS), again=st.booleans())
    def reclassify(self, data, kind: str, again: bool) -> None:
        """To hold what is held already changes nothing."""
        name = self.some(data)
        if again:
            assert self.memory.hold(self.arrays[name], kind) is self.arrays[name]
        else:
            self.memory.reclassify(self.arrays[name], kind)
            self.model[name] = kind, *self.model[name][1:]
            self.note_peak()

    @precondition(lambda self: self.freed)
    @rule()
    def what_was_freed_is_a_stranger(self) -> None:
        for array in self.freed.values():
            assert self.memory.kind_of(array) is None
            for refused in (self.memory.free, lambda array: self.memory.reclassify(array, "input")):
                with pytest.raises(ValueError, match=r"an array of .* that its memory does not hold"):
                    refused(array)

    @rule()
    def let_the_peak_start_anew(self) -> None:
        self.memory.reset_peak()
        self.peak, self.peak_by_kind = self.total(), self.by_kind()

    def total(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.model.values())

    def note_peak(self) -> None:
        self.peak_of_some = max(self.peak_of_some, sum(self.by_kind()[kind] for kind in SOME))
        if self.total() > self.peak:
            self.peak, self.peak_by_kind = self.total(), self.by_kind()

    def by_kind(self) -> Counter:
        found: Counter[str] = Counter()
        for kind, nbytes, _ in self.model.values():
            found[kind] += nbytes
        return +found

    @invariant()
    def the_memory_is_the_model(self) -> None:
        if hasattr(self, "memory"):
            assert self.memory.now_nbytes == self.total()
            assert self.memory.now_nbytes_by_kind == self.by_kind()
            assert (self.memory.peak_nbytes, self.memory.peak_nbytes_by_kind) == (self.peak, self.peak_by_kind)
            assert self.memory.peak_nbytes_of(SOME) == self.peak_of_some, "whatever the peak of all starts anew from"
            assert self.memory.slack_nbytes == sum(slack for *_, slack in self.model.values())
            assert all(self.memory.kind_of(array) == self.model[name][0] for name, array in self.arrays.items())

    def teardown(self) -> None:
        """What lives at a row of the trace adds up to what the rows say is held there."""
        lives, held = self.memory.trace.lifetimes(), Counter()
        for place, row in enumerate(self.memory.trace.rows):
            held[row.kind] += row.nbytes
            living = Counter()
            for life in lives:
                living[life.kind] += life.nbytes * life.lives_at(place)
            assert +living == +held
        assert +held == self.by_kind()


TestHistory = History.TestCase


@pytest.mark.parametrize("dtype", [*FLOATS.values(), *INTEGERS.values(), *OTHERS.values(), np.dtype("M8[s]"),
                                   np.dtype(ml_dtypes.int4), np.dtype([("a", "i2"), ("b", "f4")])], ids=str)
def test_in_debug_mode_what_is_new_and_what_was_freed_is_poison(dtype: np.dtype) -> None:
    def poisoned(a: np.ndarray) -> bool:
        if dtype.kind in "fc" or dtype in FLOATS.values():
            return bool(np.isnan(a).all())
        return a.tobytes() == b"\xa5" * a.nbytes

    for debug, shape in product((False, True), ((), 0, 7, (2, 3), [1, 5000])):
        memory = new_memory(debug=debug)
        a = memory.alloc(shape, dtype, "workspace")
        assert not debug or poisoned(a)  # without it a is chance, which may warn
        a[...] = np.zeros((), dtype)
        assert a.size == 0 or not poisoned(a)
        memory.free(a)
        assert poisoned(a) == arrays.is_poisoned(a) == (debug or a.size == 0), "without debug it stays as it was"
    a = memory.alloc((4, 4), dtype, "workspace")
    a[...] = np.zeros((), dtype)
    memory.free(a[:, ::2])
    assert poisoned(a[:, ::2])
    assert not poisoned(a[:, 1::2])
    a.flags.writeable = False
    memory.free(memory.hold(a, "input"))
    assert not poisoned(a), "what is read-only is left alone"


# A capacity is exact to the byte: who asks for more is told what is held, and nothing has changed afterwards.

def test_running_out_says_what_was_asked_what_is_left_and_what_is_held_by_kind() -> None:
    def program(rank):
        held = [rank.memory.alloc(1000, np.float32, "parameter"), rank.memory.alloc(500, np.float16, "gradient"),
                rank.memory.alloc((10, 10), np.float64, "parameter")]
        if rank.index == 1:
            rank.memory.alloc(3000, np.float32, "optimizer_state", "momentum")
        return held

    with pytest.raises(zs.OutOfMemoryError) as caught:
        zs.Cluster(2, capacity_nbytes=10_000).run(program)
    assert str(caught.value) == (
        "rank 1 asked for 12,000 bytes (optimizer_state momentum) and has 4,200 left of capacity_nbytes=10,000; "
        "it holds 5,800: parameter 4,800, gradient 1,000. Shard more, keep less, let go of earlier results "
        "(cluster.runs.clear()), or raise the capacity.")
    with pytest.raises(zs.OutOfMemoryError, match=r"asked for 8 bytes \(input\) and has 7 left .* it holds 0: nothing"):
        new_memory(7).hold(np.ones(1), "input")


@pytest.mark.parametrize("row", ROWS, ids=" by ".join)
def test_a_collective_fits_in_what_it_charges_and_no_less(row: tuple[str, str]) -> None:
    """At one byte less a rank that charges the most runs out, and all that had been taken is given back."""
    worlds = [n for n in WORLDS if allowed(*row, n)]
    for ranks, kind, asynchronous in covering(worlds, ("plain", "debug"), (False, True), turn=ROWS.index(row)):
        vectors = whole_numbers(ranks, 3 * ranks + 2)

        def program(rank, vectors=vectors, asynchronous=asynchronous):
            answer = ask(rank, *row, vectors[rank.index], async_op=asynchronous)
            if asynchronous:
                answer.wait()
            return rank.index

        roomy = zs.Cluster(ranks, **CLUSTERS[kind])
        roomy.run(program)
        assert roomy.memory.now_nbytes == [0] * ranks
        need = max(roomy.memory.peak_nbytes)
        fits, short = (zs.Cluster(ranks, capacity_nbytes=n, **CLUSTERS[kind]) for n in (need, need - 1))
        assert list(fits.run(program)) == list(range(ranks))
        for _ in range(2):
            with pytest.raises(zs.OutOfMemoryError, match=r"^rank \d asked for .* left of capacity_nbytes="):
                short.run(program)
            assert short.memory.now_nbytes == [0] * ranks
        assert list(short.run(lambda rank: rank.index)) == list(range(ranks))


def test_a_collective_that_runs_out_takes_no_call_number_and_the_program_may_ask_for_less() -> None:
    """The rank that catches it goes on with the others, at the same call."""
    def program(rank):
        if rank.index == 1:
            with pytest.raises(zs.OutOfMemoryError):
                rank.all_reduce(np.zeros(1000))
        return rank.all_reduce(np.array([rank.index]), op="max").tolist()

    cluster = zs.Cluster(3, capacity_nbytes=100)
    assert list(cluster.run(program)) == [[2]] * 3
    assert [len(trace.collectives()) for trace in cluster.trace] == [1, 1, 1]


def test_an_array_in_common_is_one_for_all_ranks_that_ask_before_the_same_call_and_another_if_asked_again() -> None:
    def program(rank: zs.Rank) -> tuple[int, ...]:
        rooms = [rank.alloc_in_common(4, np.float32, "workspace") for _ in range(2)]
        rank.barrier()
        rooms.append(rank.alloc_in_common(4, np.float32, "workspace"))
        assert rank.memory.now_nbytes == 3 * 16
        rank.barrier()
        return tuple(room.ctypes.data for room in rooms)

    (first, again, later), (its, _, its_later) = zs.Cluster(2).run(program)
    assert first == its
    assert later == its_later
    assert len({first, again, later}) == 3
