"""The ledger: what a rank holds, by kind, from an array's birth to its death, and at its peak."""

import gc
import re

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from tests.ranks.data import FLOATS, INTEGERS, OTHERS
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.memory import Memory
from zerosim.ranks.trace import KINDS, Held


def ledger(capacity_nbytes: int | None = None, *, debug: bool = False) -> Memory:
    return Memory("rank 3", NumpyKernels(), capacity_nbytes, debug)


def test_an_array_is_held_from_alloc_until_it_dies() -> None:
    memory = ledger()
    a = memory.alloc((3, 4), np.float16, "parameter", "w")
    b = memory.alloc(5, "f4", "gradient")
    assert (a.shape, a.dtype, b.shape, b.dtype) == ((3, 4), np.float16, (5,), np.float32)
    assert (memory.now_nbytes, memory.now_nbytes_by_kind) == (44, {"parameter": 24, "gradient": 20})
    assert memory.kind_of(a) == "parameter"
    del a
    assert (memory.now_nbytes, memory.now_nbytes_by_kind) == (20, {"gradient": 20})
    del b
    assert (memory.now_nbytes, memory.now_nbytes_by_kind, memory.slack_nbytes) == (0, {}, 0)
    assert (memory.peak_nbytes, memory.peak_nbytes_by_kind) == (44, {"parameter": 24, "gradient": 20})


def test_a_view_keeps_the_whole_array_alive() -> None:
    memory = ledger()
    views = [memory.alloc(10_000, np.float32, "activation")[5:7].reshape(2, 1).T]
    assert (memory.now_nbytes, memory.kind_of(views[0])) == (40_000, "activation")
    views.append(views.pop().view(np.int32))
    assert memory.now_nbytes == 40_000
    views.clear()
    assert memory.now_nbytes == 0


def test_an_array_in_a_cycle_dies_with_the_garbage() -> None:
    memory, cycle = ledger(), []
    cycle += [cycle, memory.alloc(10, np.int64, "input")]
    del cycle
    gc.collect()
    assert memory.now_nbytes == 0


def test_what_is_freed_leaves_at_once_and_only_once() -> None:
    memory = ledger()
    a = memory.alloc(6, np.float32, "gathered_parameter")
    memory.free(a[2:4])  # any view of it names it
    assert (memory.now_nbytes, memory.kind_of(a)) == (0, None)
    text = ("rank 3 asked to free an array of 24 bytes that its memory does not hold; only what alloc() or hold() "
            "charged is there, and only until free() or its death")
    for stranger in (a, np.zeros(3)):
        with pytest.raises(ValueError, match=f"^{re.escape(text.replace('24', str(stranger.nbytes)))}$"):
            memory.free(stranger)
    del a
    assert memory.now_nbytes == 0


def test_an_array_that_was_freed_may_be_held_again() -> None:
    memory = ledger()
    a = memory.alloc(6, np.float32, "workspace")
    memory.free(a)
    assert memory.hold(a, "gradient") is a
    assert memory.now_nbytes_by_kind == {"gradient": 24}
    del a
    assert memory.now_nbytes == 0


def test_what_exists_already_is_held_once_with_all_that_its_memory_has() -> None:
    memory, batch = ledger(), np.zeros((10, 8), np.float32)
    assert memory.hold(batch[2:5], "input", "x").base is batch
    memory.hold(batch, "activation")  # held already, as an input
    assert memory.now_nbytes_by_kind == {"input": 320}
    memory.reclassify(batch[0], "checkpointed_input")
    assert memory.now_nbytes_by_kind == {"checkpointed_input": 320}
    del batch
    assert memory.now_nbytes == 0


def test_reclassifying_changes_no_total_and_no_peak() -> None:
    memory = ledger(100)
    a = memory.alloc(100, np.uint8, "activation")
    memory.reclassify(a, "checkpointed_input")
    assert (memory.now_nbytes, memory.peak_nbytes) == (100, 100)
    assert memory.peak_nbytes_by_kind == {"activation": 100}
    with pytest.raises(ValueError, match=r"^rank 3 asked to reclassify an array of 8 bytes that its memory does not"):
        memory.reclassify(np.zeros(1), "input")


@pytest.mark.parametrize("ask", [
    lambda m: m.alloc(1, "f4", "gradients"), lambda m: m.hold(np.zeros(1), "gradients"),
    lambda m: m.reclassify(np.zeros(1), "gradients"), lambda m: m.peak_nbytes_of(["gradients"]),
    lambda m: m.peak_nbytes_of("gradients")])
def test_a_kind_that_there_is_not_is_refused(ask) -> None:
    memory = ledger()
    with pytest.raises(ValueError, match=f"^no kind of memory is called 'gradients'; the kinds are {', '.join(KINDS)}"):
        ask(memory)
    assert memory.now_nbytes == 0


@pytest.mark.parametrize("ask", [lambda m: m.hold([1.0], "input"), lambda m: m.free([1.0]), lambda m: m.kind_of(None)])
def test_what_is_no_array_is_refused(ask) -> None:
    with pytest.raises(ValueError, match=r"^the ledger holds NumPy arrays, found (list|NoneType); wrap it"):
        ask(ledger())


@pytest.mark.parametrize("shape", [-1, (3, -2)])
def test_a_negative_length_is_refused(shape) -> None:
    with pytest.raises(ValueError, match=re.escape(f"rank 3 asked for an array of shape {shape}, but no length can")):
        ledger().alloc(shape, np.float32, "input")


def test_a_shape_too_large_to_count_in_64_bits_is_out_of_memory_and_not_a_small_number() -> None:
    with pytest.raises(zs.OutOfMemoryError, match=r"asked for 19,807,040,628,566,084,398,385,987,584 bytes"):
        ledger(10**15).alloc((1 << 46, 1 << 46), np.float32, "parameter")


def test_the_breakdown_of_the_peak_is_that_of_one_instant() -> None:
    memory = ledger()
    a = memory.alloc(60, np.uint8, "parameter")
    memory.free(a)
    b, c = memory.alloc(50, np.uint8, "gradient"), memory.alloc(50, np.uint8, "activation")
    memory.free(b)
    d = memory.alloc(49, np.uint8, "parameter")
    assert (memory.peak_nbytes, memory.peak_nbytes_by_kind) == (100, {"gradient": 50, "activation": 50})
    memory.reset_peak()
    assert (memory.peak_nbytes, memory.peak_nbytes_by_kind) == (99, {"parameter": 49, "activation": 50})
    del c, d
    assert memory.peak_nbytes == 99


def test_the_peak_of_some_kinds_is_their_largest_sum_in_this_run() -> None:
    cluster = zs.Cluster(1)

    def program(rank, first):
        memory, arrays = rank.memory, []
        if first:
            arrays.append(memory.alloc(1000, np.uint8, "gradient"))
        for count, kind in ((30, "gradient"), (40, "unit_gradient"), (100, "activation")):
            arrays.append(memory.alloc(count, np.uint8, kind))
        memory.free(arrays[-2])
        arrays.append(memory.alloc(20, np.uint8, "unit_gradient"))
        return arrays[:1] if first else None

    cluster.run(program, True)
    memory = cluster.memory[0]
    assert memory.peak_nbytes_of(["gradient"]) == 1030
    cluster.run(program, False)  # the first run's 1000 are still held
    assert memory.peak_nbytes_of(["gradient"]) == 1030
    assert memory.peak_nbytes_of(["unit_gradient"]) == memory.peak_nbytes_of("unit_gradient") == 40
    assert memory.peak_nbytes_of(["gradient", "unit_gradient"]) == 1070
    assert memory.peak_nbytes_of(KINDS) == memory.peak_nbytes == 1000 + 30 + 40 + 100


@pytest.mark.parametrize("dtype", [*FLOATS.values(), *INTEGERS.values(), *OTHERS.values(), np.dtype("M8[s]"),
                                   np.dtype(ml_dtypes.int4), np.dtype([("a", "i2"), ("b", "f4")])], ids=str)
def test_in_debug_mode_what_is_new_and_what_was_freed_is_poison(dtype: np.dtype) -> None:
    def poisoned(a: np.ndarray) -> bool:
        if dtype.kind in "fc" or dtype in FLOATS.values():
            return bool(np.isnan(a).all())
        return a.tobytes() == b"\xa5" * a.nbytes

    for shape in ((), 0, 7, (2, 3), 5000):
        memory = ledger(debug=True)
        a = memory.alloc(shape, dtype, "workspace")
        assert poisoned(a)
        a[...] = np.zeros((), dtype)
        assert a.size == 0 or not poisoned(a)
        memory.free(a)
        assert poisoned(a)


def test_freeing_a_part_with_strides_poisons_that_part() -> None:
    memory = ledger(debug=True)
    for dtype in (np.float32, np.int16):
        a = memory.alloc((4, 4), dtype, "workspace")
        a[...] = 1
        memory.free(a[:, ::2])
        assert (a[:, 1::2] == 1).all()
        assert not (a[:, ::2] == 1).any()


def test_a_read_only_input_may_be_freed_in_debug_mode() -> None:
    memory, batch = ledger(debug=True), np.ones(3)
    batch.flags.writeable = False
    memory.free(memory.hold(batch, "input"))
    assert (memory.now_nbytes, batch.tolist()) == (0, [1, 1, 1])


def test_without_debug_freed_values_stay() -> None:
    memory = ledger()
    a = memory.alloc(3, np.float32, "workspace")
    a[...] = 5
    memory.free(a)
    assert a.tolist() == [5, 5, 5]


@pytest.mark.parametrize(("count", "slack"), [(1023, 0), (1024, 64), (5000, 64)])
def test_arrays_of_4_kib_and_more_are_aligned_and_their_slack_is_no_kind(count: int, slack: int) -> None:
    memory = ledger()
    arrays = [memory.alloc(count, np.float32, "parameter") for _ in range(5)]
    assert (memory.now_nbytes, memory.slack_nbytes) == (20 * count, 5 * slack)
    assert all(array.ctypes.data % 64 == 0 for array in arrays) or not slack
    memory.free(arrays[0])
    assert memory.slack_nbytes == 4 * slack
    arrays.clear()
    assert memory.slack_nbytes == 0


def test_memory_lives_as_long_as_the_cluster_and_each_trace_tells_its_own_run() -> None:
    cluster, kept = zs.Cluster(2), []
    cluster.run(lambda rank: kept.append(rank.memory.alloc(10, np.float32, "master", "m")))
    assert [row for row in cluster.trace[0].rows if isinstance(row, Held)] == [Held("master", "m", 40)]
    assert cluster.memory.now_nbytes == [40, 40]
    cluster.run(lambda rank: kept.pop() is None)
    assert [row for row in cluster.trace[0].rows if isinstance(row, Held)] == [Held("master", "m", -40)]
    assert (cluster.memory.now_nbytes, cluster.memory.peak_nbytes) == ([0, 0], [40, 40])
