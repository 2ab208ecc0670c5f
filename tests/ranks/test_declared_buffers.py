"""What an algorithm declares it uses, to the last element, and nothing beside it."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen
from tests.ranks.asking import GATHERS, ROOTED, ROWS, WORLDS, allowed, ask, ceil_cut, cuts_of, takes_splits
from tests.ranks.data import NARROW, whole_numbers
from zerosim.numerics.kernels import NullKernels, NumpyKernels
from zerosim.ranks.call import Call, PendingCall
from zerosim.ranks.collectives import ALGORITHMS
from zerosim.ranks.hub import lockstep, without_data
from zerosim.ranks.trace import Held

UNTOUCHED = -77  # no sum of the data, which are positive, is this
BF16, F32 = NARROW["bf16"], np.dtype(np.float32)


def call_of(operation: str, algorithm: str, cut: tuple[int, ...], dtype: np.dtype, **options) -> Call:
    return Call(0, (), tuple(range(len(cut) - 1)), operation, algorithm, (cut[-1],), dtype, cut, **options)


def parts_of(call: Call) -> list[PendingCall]:
    """All ranks' parts with their declared buffers, each filled with what no addition gives."""
    kernels, parts = NumpyKernels(), []
    for index, vector in enumerate(whole_numbers(call.ranks, call.length, seed=1)):
        data, lengths = (vector % 7 + 1).astype(call.dtype), without_data(call, index, NullKernels())
        own = slice(call.cut[index], call.cut[index + 1])
        gets = call.operation not in ("reduce", "gather") or index == call.root
        me = PendingCall(call, index, kernels, data[own] if call.operation in GATHERS else data,
                         np.empty(len(lengths.out) if gets else 0, call.dtype))
        assert len(me.x) == len(lengths.x)
        declared = ALGORITHMS[call.operation][call.algorithm].buffers(me)
        me.buffers = [np.full(length, UNTOUCHED).astype(dtype) for length, dtype in declared]
        parts.append(me)
    return parts


def check(call: Call) -> None:
    """Runs the call's generators on the declared buffers: every element of every buffer is written at least once."""
    parts = parts_of(call)
    for _ in lockstep(parts):
        pass
    for me in parts:
        unused = [int((buffer.astype(np.float64) == UNTOUCHED).sum()) for buffer in me.buffers]
        assert not any(unused), (call, me.index, unused)


def cuts(operation: str, algorithm: str, ranks: int) -> list[tuple[int, ...]]:
    """Even and uneven cuts, and cuts with empty chunks."""
    lengths = chosen((0, ranks - 1, 3 * ranks + 2), (0, 1, ranks - 1, 2 * ranks, 3 * ranks + 2))
    found = [ceil_cut(length, ranks) for length in lengths]
    if takes_splits(operation, algorithm, ranks):
        found += [cut for length in lengths for cut in cuts_of(length, ranks)]
    return found


@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_every_declared_element_is_used(operation: str, algorithm: str) -> None:
    for ranks in [n for n in (*WORLDS, 6, 7, 16) if allowed(operation, algorithm, n)]:
        for root in chosen({0, 1 % ranks, ranks - 1}, range(ranks)) if operation in ROOTED else [0]:
            for cut in cuts(operation, algorithm, ranks):
                check(call_of(operation, algorithm, cut, np.dtype(np.int64), root=root))


@pytest.mark.parametrize(("operation", "algorithm", "options"), [
    ("reduce_scatter", "ring", {"wire": F32}), ("all_reduce", "ring", {"wire": F32}),
    ("all_reduce", "ring", {"op": "max"}),
    ("reduce_scatter", "pairwise", {"accumulate": F32}), ("all_reduce", "everyone", {"accumulate": F32})])
def test_every_declared_element_is_used_where_formats_differ(operation, algorithm, options) -> None:
    for ranks in WORLDS:
        for cut in cuts(operation, algorithm, ranks):
            check(call_of(operation, algorithm, cut, BF16, **options))


@pytest.mark.parametrize(("operation", "algorithm", "options", "formats"), [
    *((*row, {}, {BF16}) for row in ROWS if row[0] in ("all_reduce", "reduce_scatter")),
    ("reduce_scatter", "ring", {"wire": F32}, {F32}), ("all_reduce", "ring", {"wire": F32}, {F32}),
    ("reduce_scatter", "pairwise", {"accumulate": F32}, {F32, BF16}),
    ("all_reduce", "everyone", {"accumulate": F32}, {F32, BF16})])
def test_buffers_have_the_format_that_travels_or_accumulates(operation, algorithm, options, formats) -> None:
    call = call_of(operation, algorithm, (0, 2, 4, 6, 8), BF16, **options)
    assert {buffer.dtype for buffer in parts_of(call)[1].buffers} == formats


# N = 4, n = 16 elements of 4 bytes, equal chunks of 4; ranks 0 to 3. By pencil.
CHARGED = {
    ("reduce_scatter", "ring"): [32] * 4,  # a chunk that leaves and one that comes
    ("reduce_scatter", "pairwise"): [32] * 4,  # the sum so far, and what comes
    ("reduce_scatter", "halving"): [48] * 4,  # half, then a quarter
    ("all_gather", "ring"): [0] * 4,
    ("all_gather", "doubling"): [0] * 4,
    ("all_gather", "bruck"): [64] * 4,  # the rotated vector
    ("all_reduce", "ring"): [32] * 4,
    ("all_reduce", "doubling"): [64] * 4,  # the partner's vector
    ("all_reduce", "rabenseifner"): [48] * 4,
    ("all_reduce", "tree"): [64, 0, 64, 0],  # odd ranks only send
    ("all_reduce", "naive"): [64, 0, 0, 0],
    ("all_reduce", "everyone"): [256] * 4,  # the sum, and the vectors of three others
    ("broadcast", "tree"): [0] * 4,
    ("broadcast", "naive"): [0] * 4,
    ("reduce", "tree"): [64, 0, 128, 0],  # rank 2 adds, but has no result to add it in
    ("reduce", "naive"): [64, 0, 0, 0],
    ("gather", "pairwise"): [0] * 4,
    ("all_to_all", "pairwise"): [0] * 4,
}


@pytest.mark.parametrize("kind", [{}, {"debug": True}], ids=str)
@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_every_way_of_computing_charges_the_declared_buffers(operation: str, algorithm: str, kind: dict) -> None:
    """They are communication buffers, and so is the result of a work until its wait; a result is workspace."""
    vectors, cluster = whole_numbers(4, 16, np.int32), zs.Cluster(4, **kind)
    for asynchronous in (False, True):
        def program(rank, asynchronous=asynchronous):
            answer = ask(rank, operation, algorithm, vectors[rank.index], async_op=asynchronous)
            if asynchronous:
                answer.wait()

        cluster.run(program)
        result = [0 if operation in ("reduce", "gather") and r else 64 for r in range(4)]
        result = [16] * 4 if operation == "reduce_scatter" else result
        captured = [16 if operation in GATHERS else 64] * 4 if asynchronous and kind else [0] * 4
        charged = [memory.peak_nbytes_of(["communication_buffer"]) for memory in cluster.memory]
        hidden = result if asynchronous else [0] * 4
        assert charged == [sum(parts) for parts in zip(CHARGED[operation, algorithm], hidden, captured, strict=True)]
        assert [memory.peak_nbytes_of(["workspace"]) for memory in cluster.memory] == result


def test_an_output_of_the_caller_s_is_not_charged_again() -> None:
    def program(rank):
        x = rank.memory.alloc(8, np.float64, "gradient")
        x.fill(rank.index)
        rank.all_reduce(x, out=x)
        rank.reduce_scatter(x, out=x[2 * rank.index:2 * rank.index + 2])

    cluster = zs.Cluster(4)
    cluster.run(program)
    assert [memory.peak_nbytes_of(["workspace"]) for memory in cluster.memory] == [0] * 4
    assert cluster.memory.peak_nbytes == [64 + 2 * 16] * 4


def test_a_work_holds_its_buffers_until_its_wait_whatever_has_been_computed() -> None:
    def program(rank):
        held = []
        work = rank.all_reduce(np.full(8, rank.index, np.float64), async_op=True)
        held.append(rank.memory.now_nbytes_by_kind)
        rank.barrier()
        held.append(rank.memory.now_nbytes_by_kind)
        result = work.wait()
        held.append(rank.memory.now_nbytes_by_kind)
        del work
        held.append(rank.memory.now_nbytes_by_kind)
        del result
        return [*held, rank.memory.now_nbytes_by_kind]

    for seed in range(8):
        before, after = {"communication_buffer": 64 + 32}, {"workspace": 64}
        assert list(zs.Cluster(4, seed=seed).run(program)) == [[before, before, after, after, {}]] * 4


def test_works_that_are_done_and_dropped_hold_nothing() -> None:
    def program(rank):
        for _ in range(3):
            rank.all_gather(np.zeros(10), async_op=True).wait()
        return rank.memory.now_nbytes

    assert list(zs.Cluster(2).run(program)) == [0, 0]


def test_buffers_enter_and_leave_the_trace_around_their_collective() -> None:
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: rank.all_reduce(np.arange(4.0) + rank.index) is None)
    rows = [(row.kind, row.nbytes) if isinstance(row, Held) else row for row in cluster.trace[0].rows]
    [place] = [i for i, row in enumerate(rows) if not isinstance(row, tuple)]
    # Rank 0 receives one chunk, of two elements; the other of the ring's two buffers is not needed at N = 2.
    assert rows[:place] == [("workspace", 32), ("communication_buffer", 0), ("communication_buffer", 16)]
    assert sorted(rows[place + 1:]) == [("communication_buffer", -16), ("communication_buffer", 0), ("workspace", -32)]
