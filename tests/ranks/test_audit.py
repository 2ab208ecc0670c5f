"""The ledger is audited by NumPy's own allocations, as Python's tracer sees them."""

import gc
import tracemalloc
from functools import cache

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.ranks.asking import ROWS, ask
from tests.ranks.data import normals, whole_numbers
from zerosim.numerics.arrays import BLOCK
from zerosim.ranks import fast_ring as direct

PYTHON_NBYTES = 150_000  # objects that are no arrays: greenlets and their stacks, trace rows, entries
LENGTH = 1 << 18  # chunks of 65,536 elements: a forgotten one stands out


def at_rest() -> int:
    """Bytes of NumPy's arrays that live now and were made since tracing began."""
    snapshot = tracemalloc.take_snapshot()
    traces = snapshot.filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]).traces
    return sum(trace.size for trace in traces)


AT_REST = covering(ROWS, [({}, False), ({}, True), ({"debug": True}, True), ({"seed": 2}, True)])


@pytest.mark.parametrize(("row", "way"), AT_REST, ids=str)
def test_at_rest_numpy_holds_what_the_ledger_says(row: tuple[str, str], way: tuple[dict, bool]) -> None:
    """Results, views of results, a work's result, an array that is held; and nothing for what was dropped."""
    (operation, algorithm), (kind, asynchronous), ranks = row, way, 4
    vectors, cluster = whole_numbers(ranks, 4001), zs.Cluster(ranks, **kind)

    def program(rank, keep):
        answer = ask(rank, operation, algorithm, vectors[rank.index], async_op=asynchronous)
        kept = [answer.wait() if asynchronous else answer, rank.memory.alloc((30, 50), np.float32, "parameter"),
                rank.memory.hold(np.zeros(100), "input")]
        dropped = ask(rank, operation, algorithm, vectors[rank.index])
        del dropped
        return kept if keep else None

    cluster.run(program, False)  # fills the kernels' scratch, which is no rank's
    assert cluster.memory.now_nbytes == [0] * ranks
    tracemalloc.start()
    try:
        cluster.run(program, True)
        assert at_rest() == sum(cluster.memory.now_nbytes) + sum(memory.slack_nbytes for memory in cluster.memory)
        cluster.runs.clear()
        assert at_rest() == sum(cluster.memory.now_nbytes) == 0
    finally:
        tracemalloc.stop()


def peaks(cluster: zs.Cluster, program) -> tuple[int, int]:
    """(audit, ledger) at the peak of a run in which all ranks are at their peaks together."""
    cluster.run(program)
    for memory in cluster.memory:
        memory.reset_peak()
    gc.collect()
    tracemalloc.start()
    try:
        cluster.run(program)
        audit = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return audit, sum(cluster.memory.peak_nbytes)


def largest_scratch(cluster: zs.Cluster, *, hop_by_hop: bool) -> int:
    """What a way of computing declares for itself, beside the kernels' scratch, which the first run filled: direct
    rings what they say, all others a block of casts where values are added in another format than they come in."""
    call = cluster.trace[0].collectives()[0].call
    if direct.serves(call) and not hop_by_hop:
        return direct.scratch_nbytes(call)
    return BLOCK * 4 if call.wire or call.accumulate else 0


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
PEAKS = covering(OPTIONS, FORMS, ({}, {"debug": True}))


@cache
def long_vectors(ranks: int, dtype: type) -> list[np.ndarray]:
    """(LENGTH,) for each rank, made once."""
    return [vector.astype(dtype) for vector in normals(ranks, LENGTH)]


def called(rank: zs.Rank, operation: str, options: dict, form: str, vector: np.ndarray, out: np.ndarray) -> None:
    """One call of this form; ``vector`` and ``out`` are memory from before the audit."""
    options = options | {"async_op": "async" in form}
    in_place = "in place" in form and operation not in ("reduce_scatter", "all_to_all", "all_gather", "gather")
    if ("out" in form or in_place) and (operation not in ("reduce", "gather") or rank.index == 0):
        chunk = len(vector) // rank.size if operation == "reduce_scatter" else len(vector)
        options["out"] = vector if in_place else out[:chunk]
    answer = ask(rank, operation, options.pop("algorithm", "ring"), vector, **options)
    if "async" in form:
        answer.wait()


@pytest.mark.parametrize(("name", "form", "kind"), PEAKS, ids=str)
def test_at_the_peak_numpy_holds_the_ledger_and_no_more_than_declared_scratch(name: str, form: str, kind: dict) -> None:
    operation, options = OPTIONS[name]
    ranks = 4
    dtype = np.int32 if "by" in name and form == "new" else np.float16
    vectors = [vector.copy() for vector in long_vectors(ranks, dtype)]
    outs, cluster = [np.zeros_like(vector) for vector in vectors], zs.Cluster(ranks, **kind)
    audit, ledger = peaks(
        cluster, lambda rank: called(rank, operation, options, form, vectors[rank.index], outs[rank.index]))
    scratch = largest_scratch(cluster, hop_by_hop=bool(kind))
    assert ledger <= audit <= ledger + scratch + PYTHON_NBYTES


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_stacking_takes_the_scratch_that_it_declares_and_not_much_less(operation: str) -> None:
    ranks = 32
    vectors, cluster = normals(ranks, ranks * 2000), zs.Cluster(ranks)
    audit, ledger = peaks(cluster, lambda rank: ask(rank, operation, "ring", vectors[rank.index]) is None)
    scratch = largest_scratch(cluster, hop_by_hop=False)
    assert scratch > 8_000_000
    assert 0.9 * scratch < audit - ledger < scratch + PYTHON_NBYTES
