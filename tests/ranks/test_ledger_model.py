"""Any history of a ledger, beside a model of it that does nothing clever."""

from collections import Counter

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import zerosim as zs
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.memory import Memory
from zerosim.ranks.trace import KINDS, Held


class Ledger(RuleBasedStateMachine):
    """A ledger beside a model of it: arrays by name, each with its kind and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: dict[int, np.ndarray] = {}
        self.model: dict[int, tuple[str, int]] = {}
        self.peak, self.peak_by_kind, self.count = 0, Counter(), 0

    @initialize(capacity=st.one_of(st.none(), st.integers(0, 4000)), debug=st.booleans())
    def begin(self, capacity: int | None, debug: bool) -> None:
        self.memory, self.capacity = Memory("rank 0", NumpyKernels(), capacity, debug), capacity

    @rule(count=st.integers(0, 300), dtype=st.sampled_from(["f4", "f2", "i8", "u1"]), kind=st.sampled_from(KINDS),
          exists=st.booleans())
    def enter(self, count: int, dtype: str, kind: str, exists: bool) -> None:
        nbytes = count * np.dtype(dtype).itemsize
        fits = self.capacity is None or self.total() + nbytes <= self.capacity
        try:
            array = self.memory.hold(np.empty(count, dtype), kind) if exists else self.memory.alloc(count, dtype, kind)
        except zs.OutOfMemoryError:
            assert not fits
            return
        assert fits
        self.count += 1
        self.arrays[self.count], self.model[self.count] = array, (kind, nbytes)
        self.note_peak()

    def some(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.arrays)))

    @precondition(lambda self: self.arrays)
    @rule(data=st.data(), how=st.sampled_from(["free", "drop", "free, drop"]))
    def leave(self, data, how: str) -> None:
        name = self.some(data)
        if "free" in how:
            self.memory.free(self.arrays[name])
        del self.arrays[name], self.model[name]

    @precondition(lambda self: self.arrays)
    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def reclassify(self, data, kind: str) -> None:
        name = self.some(data)
        self.memory.reclassify(self.arrays[name], kind)
        self.model[name] = kind, self.model[name][1]

    def total(self) -> int:
        return sum(nbytes for _, nbytes in self.model.values())

    def note_peak(self) -> None:
        if self.total() > self.peak:
            self.peak, self.peak_by_kind = self.total(), self.by_kind()

    def by_kind(self) -> Counter:
        found: Counter[str] = Counter()
        for kind, nbytes in self.model.values():
            found[kind] += nbytes
        return +found

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        if hasattr(self, "memory"):
            assert self.memory.now_nbytes == self.total()
            assert self.memory.now_nbytes_by_kind == self.by_kind()
            assert (self.memory.peak_nbytes, self.memory.peak_nbytes_by_kind) == (self.peak, self.peak_by_kind)
            held = [row.nbytes for row in self.memory.trace.rows if isinstance(row, Held)]
            assert sum(held) == self.total()


TestLedger = Ledger.TestCase
