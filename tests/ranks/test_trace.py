"""The trace: rows in the order in which the program did things, in nested spans, with the bytes that were sent."""

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import KINDS
from zerosim.ranks.trace import PURPOSES, Collective, Compute, Held, Issue, Message, SpanBegin, SpanEnd, Wait


def told(trace: zs.Trace) -> list:
    """The rows but for the ledger's, each by its kind and what is worth comparing."""
    def one(row):
        match row:
            case Collective():
                return (row.call.operation, row.call.number, row.span, row.asynchronous, row.sent_nbytes)
            case Message():
                return ("message", row.source, row.destination, row.span, row.sent_nbytes)
            case Issue() | Wait():
                return (type(row).__name__, row.call.operation, row.call.number)
            case SpanBegin() | SpanEnd():
                return (type(row).__name__, *row.path)
        return ("compute", row.flops, row.nbytes, row.span)

    return [one(row) for row in trace.rows if not isinstance(row, Held)]


def program(rank: zs.Rank) -> None:
    x = np.full(4, rank.index, np.float32)
    with rank.trace.span("step"):
        work = rank.all_reduce(x, async_op=True, purpose="gradients")
        with rank.trace.span("forward"):
            rank.trace.compute(flops=10, nbytes=6)
            rank.all_gather(x[:2], purpose="parameters")
            late = rank.reduce_scatter(x, async_op=True)
        work.wait()
        rank.exchange(x, (rank.index + 1) % 2, np.empty(4, np.float32), (rank.index + 1) % 2, purpose="state")
    late.wait()
    rank.barrier()


@pytest.mark.parametrize("kind", [*KINDS.values(), {"seed": 99}], ids=str)
def test_rows_stand_where_the_program_wrote_them(kind: dict) -> None:
    cluster = zs.Cluster(2, **kind)
    cluster.run(program)
    for index, trace in enumerate(cluster.trace):
        assert told(trace) == [
            ("SpanBegin", "step"), ("all_reduce", 0, ("step",), True, 16), ("Issue", "all_reduce", 0),
            ("SpanBegin", "step", "forward"), ("compute", 10, 6, ("step", "forward")),
            ("all_gather", 1, ("step", "forward"), False, 8), ("reduce_scatter", 2, ("step", "forward"), True, 8),
            ("Issue", "reduce_scatter", 2), ("SpanEnd", "step", "forward"), ("Wait", "all_reduce", 0),
            ("message", 1 - index, 1 - index, ("step",), 16), ("SpanEnd", "step"), ("Wait", "reduce_scatter", 2),
            ("barrier", 3, (), False, 0)]


def test_sent_bytes_are_found_by_purpose_by_span_and_by_both() -> None:
    cluster = zs.Cluster(2)
    cluster.run(program)
    sent = cluster.trace.sent_nbytes
    assert sent() == [48, 48]
    assert {purpose: sent(purpose)[1] for purpose in PURPOSES} == {
        "parameters": 8, "gradients": 16, "state": 16, "control": 0, "unspecified": 8}
    assert [sent(span=name)[0] for name in ("step", "forward", "backward")] == [48, 16, 0]
    assert sent("parameters", "forward") == sent("parameters", "step") == [8, 8]
    assert sent("gradients", "forward") == [0, 0]
    assert cluster.trace[0].sent_nbytes("unspecified", "step") == 8


def test_an_unknown_purpose_is_refused() -> None:
    cluster = zs.Cluster(1)
    text = "no purpose 'params'; the purposes are parameters, gradients, state, control, unspecified"
    with pytest.raises(ValueError, match=text):
        cluster.trace.sent_nbytes("params")


def test_collectives_and_messages_can_be_picked_out() -> None:
    cluster = zs.Cluster(2)
    cluster.run(program)
    trace = cluster.trace[1]
    assert [row.call.number for row in trace.collectives()] == [0, 1, 2, 3]
    assert [row.call.number for row in trace.collectives("reduce_scatter")] == [2]
    assert [row.call.operation for row in trace.collectives(purpose="parameters")] == ["all_gather"]
    assert trace.collectives("all_reduce", "state") == []
    assert [type(row) for row in trace.messages()] == [Collective, Collective, Collective, Message, Collective]
    assert [row.sent_nbytes for row in trace.messages("state")] == [16]


def test_spans_end_in_the_order_in_which_they_began_also_when_the_program_fails() -> None:
    def failing(rank):
        with rank.trace.span("a"), rank.trace.span("b"):
            rank.barrier()
            if rank.index == 1:
                raise KeyError
            rank.barrier()

    cluster = zs.Cluster(3)
    with pytest.raises(KeyError):
        cluster.run(failing)
    for trace in cluster.trace:
        assert [row for row in trace.rows if isinstance(row, SpanBegin | SpanEnd)] == [
            SpanBegin(("a",)), SpanBegin(("a", "b")), SpanEnd(("a", "b")), SpanEnd(("a",))]
        assert trace.path == ()


def test_each_run_has_its_own_trace_and_keeps_it() -> None:
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: rank.all_reduce(np.zeros(2)) is None)
    cluster.run(lambda rank: rank.all_gather(np.zeros(2)) is None)
    assert [[row.call.operation for row in run.trace[0].collectives()] for run in cluster.runs] == [
        ["all_reduce"], ["all_gather"]]
    assert cluster.trace[0] is cluster.runs[-1].trace[0] is cluster.ranks[0].trace
    # Calls are numbered anew in each run, and groups alike on all their members.
    assert cluster.trace[0].collectives()[0].call.number == 0


def test_ranks_of_one_call_share_all_but_their_bytes() -> None:
    cluster = zs.Cluster(3)
    cluster.run(lambda rank: rank.reduce_scatter(np.zeros(5), purpose="gradients") is None)
    rows = [trace.collectives()[0] for trace in cluster.trace]
    assert rows[0].call == rows[1].call == rows[2].call
    assert [row.sent_nbytes for row in rows] == [24, 24, 32]
    assert rows[0].purpose == "gradients"
    assert sum(hop.nbytes for hop in rows[0].hops()) == 80


def test_hops_of_a_loop_are_expanded_once_whatever_their_number_purpose_or_group() -> None:
    from zerosim.ranks.hub import _expand

    def loop(rank):
        group = rank.split(rank.index % 2)
        for purpose in ("state", "control"):
            for handle in (group, group):
                handle.all_reduce(np.zeros(6), purpose=purpose)

    cluster = zs.Cluster(6)
    cluster.run(loop)
    _expand.cache_clear()
    expansions = [row.hops() for trace in cluster.trace for row in trace.collectives("all_reduce")]
    assert all(hops == expansions[0] for hops in expansions)
    assert _expand.cache_info().misses == 1
    expansions[0].clear()  # what is handed out is the caller's
    assert len(cluster.trace[0].collectives("all_reduce")[0].hops()) == 12


def test_results_are_in_rank_order_and_show_their_ranks() -> None:
    results = zs.Cluster(3).run(lambda rank: rank.index * 10)
    assert (len(results), results[1], results[-1], list(results), results[1:]) == (3, 10, 20, [0, 10, 20], (10, 20))
    assert repr(results) == "rank 0: 0\nrank 1: 10\nrank 2: 20"
    with pytest.raises(IndexError):
        results[3]


def test_arguments_are_handed_to_the_program_and_cluster_and_ranks_say_what_they_are() -> None:
    cluster = zs.Cluster(2)
    results = cluster.run(lambda rank, a, b: (rank.index, rank.size, a, b), 5, "x")
    assert list(results) == [(0, 2, 5, "x"), (1, 2, 5, "x")]
    assert (repr(cluster), repr(cluster.ranks[1])) == ("<Cluster of 2 ranks, 1 runs>", "<Rank 1 of 2>")
    assert cluster.ranks[0].xp is np


def test_compute_is_a_row_of_its_own() -> None:
    cluster = zs.Cluster(1)
    cluster.run(lambda rank: rank.trace.compute(flops=7))
    assert cluster.trace[0].rows == [Compute(7, 0, ())]
