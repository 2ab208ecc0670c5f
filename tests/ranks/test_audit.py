"""The memory is audited by NumPy's own allocations, as Python's tracer sees them; every buffer is one that an algorithm
declares and uses, to the last element; and its messages may move in each order that it leaves open."""

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen, covering
from tests.ranks.asking import GATHERS, ROOTED, ROWS, WORLDS, allowed, ask, ceil_cut, cuts_of, takes_splits
from tests.ranks.data import FLOATS, NARROW, normals, whole_numbers
from zerosim.numerics import arrays, kernels
from zerosim.ranks import call, collectives, fast_ring

PYTHON_NBYTES = 150_000  # objects that are no arrays: greenlets and their stacks, trace rows, entries
LENGTH = 1 << 18  # chunks of 65,536 elements: a forgotten one stands out
BF16, F32 = NARROW["bf16"], FLOATS["fp32"]

OPTIONS = {
    "fp32 on the wire": ("all_reduce", {"wire": "fp32"}),
    "fp32 on the wire of shards": ("reduce_scatter", {"wire": "fp32"}),
    "bf16 on the wire": ("all_reduce", {"wire": "bf16"}),
    "fp32 at the owner": ("reduce_scatter", {"algorithm": "pairwise", "accumulate": "fp32"}),
    "fp32 at everyone": ("all_reduce", {"algorithm": "everyone", "accumulate": "fp32"}),
    "a maximum": ("all_reduce", {"op": "max"}), "a mean": ("all_reduce", {"op": "mean"}),
    "a mean that divides first": ("reduce_scatter", {"op": "mean", "average": "divide_then_sum"}),
    "a mean that multiplies": ("all_reduce", {"op": "mean", "average": "premultiply"}),
    **{f"{operation} by {algorithm}": (operation, {"algorithm": algorithm}) for operation, algorithm in ROWS},
}
FORMS = ["new", "async in place", "out", "async", "async out", "in place"]


@pytest.mark.parametrize(("name", "form", "kind"), covering(OPTIONS, FORMS, ({}, {"debug": True})), ids=str)
def test_at_the_peak_numpy_holds_what_is_counted_and_a_block_or_two(name: str, form: str, kind: dict) -> None:
    """Beside the kernels' scratch, which the first run filled, fast rings take two blocks, all others a block of casts
    where values are added in another format than they come in."""
    (operation, options), ranks = OPTIONS[name], 4
    vectors = normals(ranks, LENGTH, np.int32 if "by" in name and form == "new" else np.float16)
    outs, cluster = [np.zeros_like(vector) for vector in vectors], zs.Cluster(ranks, **kind)
    options = {"algorithm": "ring", "async_op": "async" in form} | options
    whole = operation in ("all_reduce", "broadcast", "reduce")

    def program(rank: zs.Rank) -> None:
        mine, out = {}, outs[rank.index][:LENGTH // ranks if operation == "reduce_scatter" else LENGTH]
        if operation not in ("reduce", "gather") or rank.index == 0:
            if "in place" in form and whole:
                mine = {"out": vectors[rank.index]}
            elif "out" in form:
                mine = {"out": out}
        answer = ask(rank, operation, vector=vectors[rank.index], **options, **mine)
        if "async" in form:
            answer.wait()

    cluster.run(program)
    for memory in cluster.memory:
        memory.reset_peak()
    audits = []
    for _ in range(2):  # in one of them at most, Python's table of names grows by megabytes
        tracemalloc.start()
        try:
            cluster.run(program)
            audits.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    audit, counted = min(audits), sum(cluster.memory.peak_nbytes)
    made = cluster.trace[0].collectives()[0].call
    scratch = arrays.BLOCK * 4 if made.wire or made.accumulate else 0
    if fast_ring.serves(made) and not kind:
        scratch = 2 * arrays.BLOCK * made.dtype.itemsize
    assert counted <= audit <= counted + scratch + PYTHON_NBYTES


# -- declared buffers -------------------------------------------------------------------------------------------------

UNTOUCHED = -77  # no sum of the data, which are positive, is this


def parts_of(asked: call.Call) -> list[call.PendingCall]:
    """All ranks' parts with their declared buffers, each filled with what no addition gives."""
    parts = []
    for index, vector in enumerate(whole_numbers(asked.ranks, asked.length, seed=1)):
        data = (vector % 7 + 1).astype(asked.dtype)
        lengths = collectives.without_data(asked, index, kernels.NullKernels())
        own = slice(asked.cut[index], asked.cut[index + 1])
        gets = asked.operation not in ("reduce", "gather") or index == asked.root
        me = call.PendingCall(asked, index, kernels.NumpyKernels(), data[own] if asked.operation in GATHERS else data,
                              np.empty(len(lengths.out) if gets else 0, asked.dtype))
        assert len(me.x) == len(lengths.x)
        declared = collectives.ALGORITHMS[asked.operation][asked.algorithm].buffers(me)
        me.buffers = [np.full(length, UNTOUCHED).astype(dtype) for length, dtype in declared]
        parts.append(me)
    return parts


CALLS = [*((row, np.dtype(np.int64), {}) for row in ROWS),
         *((("reduce_scatter", "ring"), BF16, options) for options in ({"wire": F32}, {})),
         *((("all_reduce", "ring"), BF16, options) for options in ({"wire": F32}, {"op": "max"})),
         (("reduce_scatter", "pairwise"), BF16, {"accumulate": F32}),
         (("all_reduce", "everyone"), BF16, {"accumulate": F32})]


@pytest.mark.parametrize(("row", "dtype", "options"), chosen(CALLS[::2], CALLS), ids=str)
def test_every_declared_element_is_used(row: tuple[str, str], dtype: np.dtype, options: dict) -> None:
    """Of any world, root and cut, even, uneven and with empty chunks; in the format that travels or accumulates."""
    for ranks in [n for n in (*WORLDS, 6, 7, 16) if allowed(*row, n)]:
        lengths = (0, ranks - 1, 3 * ranks + 2)
        cuts = [ceil_cut(length, ranks) for length in lengths]
        if takes_splits(*row, ranks):
            cuts += [cut for length in lengths for cut in cuts_of(length, ranks)]
        for cut, root in product(cuts, {0, ranks // 2, ranks - 1} if row[0] in ROOTED else {0}):
            asked = call.Call(0, (), tuple(range(ranks)), *row, (cut[-1],), dtype, cut, root=root, **options)
            parts = parts_of(asked)
            for step in collectives.lockstep({me.index: collectives.steps_of(me) for me in parts}):
                for delivery in step:
                    delivery.out[...] = delivery.sent
            for me in parts:
                unused = [int((buffer.astype(np.float64) == UNTOUCHED).sum()) for buffer in me.buffers]
                assert not any(unused), (asked, me.index, unused)
                assert {buffer.dtype for buffer in me.buffers} <= {*options.values(), dtype} - (
                    {dtype} if "wire" in options else set())


def ends_of_every_order(asked: call.Call, steps_of: Callable[[call.PendingCall], call.Exchanges]) -> Iterator[bytes]:
    """All ranks' results, for each order in which the messages of one collective can move one after the other."""
    path: list[list[int]] = []  # of each choice the move that is taken, and how many there were
    while True:
        parts = parts_of(asked)
        for me in parts:
            me.x = me.x / np.float32(3) ** me.index  # of these, unlike whole numbers, sums are rounded
        steps, sends, receives, taken = [*map(steps_of, parts)], {}, {}, 0
        ready = set(range(asked.ranks))
        while True:
            for rank in sorted(ready):
                if exchange := next(steps[rank], None):
                    sends |= {rank: exchange} if exchange.to is not None else {}
                    receives |= {rank: exchange} if exchange.source is not None else {}
            moves = [(rank, to) for rank in sorted(sends) if (to := sends[rank].to) in receives
                     and receives[to].source == rank]
            if not moves:
                break
            path += [[0, len(moves)]] * (taken == len(path))
            source, to = moves[path[taken][0]]
            receives.pop(to).out[...] = sends.pop(source).send
            taken, ready = taken + 1, {source, to} - sends.keys() - receives.keys()
        assert not sends | receives
        yield b"".join(me.out.tobytes() for me in parts)
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1][0] += 1


def test_the_messages_of_a_collective_may_move_in_each_order_and_results_are_the_same(
        record_property: Callable[[str, int], None]) -> None:
    explored = {}
    for row, ranks in product(ROWS, (2, 3)):
        if allowed(*row, ranks):
            cut = ceil_cut(2 * ranks + 1, ranks)
            asked = call.Call(0, (), tuple(range(ranks)), *row, (cut[-1],), F32, cut)
            ends = [*ends_of_every_order(asked, collectives.steps_of)]
            explored[row, ranks] = len(ends)
            assert len({*ends}) == 1, asked
    assert explored[("all_reduce", "ring"), 3] == 36**2
    record_property("schedules explored", sum(explored.values()))

    def overwriting(me: call.PendingCall) -> call.Exchanges:
        yield call.Exchange(me.x, me.neighbor(1), me.x, me.neighbor(-1))
        me.out[...] = me.x

    cut = ceil_cut(7, 3)
    asked = call.Call(0, (), (0, 1, 2), "all_reduce", "ring", (7,), F32, cut)
    assert len({*ends_of_every_order(asked, overwriting)}) > 1, "what arrives where something is still sent is seen"
