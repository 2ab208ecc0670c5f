"""The trace: rows in the order in which the program did things, in nested spans, with the bytes that were sent, and
from which row to which each array lived."""

import gc
import sys
from functools import partial

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import KINDS
from tests.support import assert_refused
from zerosim.ranks import trace

SHOWN = ("operation", "number", "source", "destination", "path", "flops", "nbytes", "span", "asynchronous",
         "sent_nbytes")


def rows_of(found: zs.Trace) -> list[tuple]:
    """The rows but for the memory's, each by its type and what is worth comparing of its call and of itself."""
    return [(type(row).__name__, *(getattr(part, name) for part in (getattr(row, "call", None), row)
                                   for name in SHOWN if hasattr(part, name)))
            for row in found.rows if not isinstance(row, trace.Held)]


def program(rank: zs.Rank) -> None:
    x = np.full(4, rank.index, np.float32)
    with rank.trace.span("step"):
        work = rank.all_reduce(x, async_op=True, purpose="gradients")
        with rank.trace.span("forward"):
            rank.trace.compute(flops=10, nbytes=6)
            _ = rank.all_gather(x[:2], purpose="parameters")
            late = rank.reduce_scatter(x, async_op=True)
        work.wait()
        rank.exchange(x, (rank.index + 1) % 2, np.empty(4, np.float32), (rank.index + 1) % 2, purpose="state")
    late.wait()
    rank.barrier()


@pytest.mark.parametrize("kind", [*KINDS.values(), {"seed": 99}], ids=str)
def test_rows_stand_where_the_program_wrote_them(kind: dict) -> None:
    cluster = zs.Cluster(2, **kind)
    cluster.run(program)
    step, forward = ("step",), ("step", "forward")
    for index, found in enumerate(cluster.trace):
        assert rows_of(found) == [
            ("SpanBegin", step), ("Collective", "all_reduce", 0, step, True, 16), ("Issue", "all_reduce", 0),
            ("SpanBegin", forward), ("Compute", 10, 6, forward), ("Collective", "all_gather", 1, forward, False, 8),
            ("Collective", "reduce_scatter", 2, forward, True, 8), ("Issue", "reduce_scatter", 2),
            ("SpanEnd", forward), ("Wait", "all_reduce", 0), ("Message", 1 - index, 1 - index, step, 16),
            ("SpanEnd", step), ("Wait", "reduce_scatter", 2), ("Collective", "barrier", 3, (), False, 0)]


def test_sent_bytes_collectives_and_messages_are_found_by_purpose_and_by_span() -> None:
    cluster = zs.Cluster(2)
    cluster.run(program)
    sent, found = cluster.trace.sent_nbytes, cluster.trace[1]
    assert sent() == [48, 48]
    assert {purpose: sent(purpose)[1] for purpose in trace.PURPOSES} == {
        "parameters": 8, "gradients": 16, "state": 16, "control": 0, "unspecified": 8}
    assert [sent(span=name)[0] for name in ("step", "forward", "backward")] == [48, 16, 0]
    assert sent("parameters", "forward") == sent("parameters", "step") == [8, 8]
    assert sent("gradients", "forward") == [0, 0]
    assert found.sent_nbytes("unspecified", "step") == 8
    assert [row.call.number for row in found.collectives()] == [0, 1, 2, 3]
    assert [row.call.number for row in found.collectives("reduce_scatter")] == [2]
    assert [row.call.operation for row in found.collectives(purpose="parameters")] == ["all_gather"]
    assert found.collectives("all_reduce", "state") == []
    assert [type(row).__name__ for row in found.messages()] == [*["Collective"] * 3, "Message", "Collective"]
    assert [row.sent_nbytes for row in found.messages("state")] == [16]


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
    for found in cluster.trace:
        assert [row for row in rows_of(found) if "Span" in row[0]] == [
            ("SpanBegin", ("a",)), ("SpanBegin", ("a", "b")), ("SpanEnd", ("a", "b")), ("SpanEnd", ("a",))]
        assert found.path == ()


def test_cluster_ranks_and_results_say_what_they_are() -> None:
    cluster = zs.Cluster(3)
    results = cluster.run(lambda rank, a, b: rank.index * a + b, 10, 1)
    assert (len(results), results[1], results[-1], list(results), results[1:]) == (3, 11, 21, [1, 11, 21], (11, 21))
    assert repr(results) == "rank 0: 1\nrank 1: 11\nrank 2: 21"
    assert (repr(cluster), repr(cluster.ranks[1])) == ("<Cluster of 3 ranks, 1 runs>", "<Rank 1 of 3>")
    assert cluster.ranks[0].xp is np
    with pytest.raises(IndexError):
        results[3]


# That what lives at a row adds up to what is held there, the property in `test_memory.py` shows.

def test_arrays_of_one_kind_name_and_length_are_distinguished_and_know_their_spans() -> None:
    """One that changes its kind has a life in either; one without elements has none."""
    def nested(rank):
        with rank.trace.span("outer"):
            with rank.trace.span("inner"):
                one, other = (rank.memory.alloc(4, np.float32, "activation", "h") for _ in range(2))
            rank.memory.free(other)
            third = rank.memory.alloc(1, np.uint8, "activation", "h")
            rank.memory.alloc(0, np.float32, "activation", "empty")
        rank.memory.reclassify(third, "checkpointed_input")
        rank.memory.free(one)
        return third

    cluster, outer = zs.Cluster(1), ("outer",)
    cluster.run(nested)
    lives = cluster.trace[0].lifetimes
    assert [(life.born, life.died, life.born_in, life.died_in) for life in lives()] == [
        (2, 12, ("outer", "inner"), ()), (3, 5, ("outer", "inner"), outer), (6, 10, outer, ()), (11, None, (), ())]
    assert (lives("activation"), lives(["checkpointed_input"])) == (lives()[:3], lives()[3:])


def test_what_was_held_before_the_run_has_no_birth_and_what_stays_no_row() -> None:
    kept, cluster = [], zs.Cluster(1)
    cluster.run(lambda rank: kept.extend(rank.memory.alloc(n, np.float32, "master", "m") for n in (10, 0, 20)))
    cluster.run(lambda rank: kept.pop(0) is None)
    life, = cluster.trace[0].lifetimes()
    assert (life.name, life.nbytes, life.born, life.died) == ("m", 40, None, 0)
    assert life.lives_at(-1)
    assert not life.lives_at(0)
    assert cluster.memory[0].peak_nbytes_of("master") == 120, "what was held before is a part of the run's peak"


# -- traces of long runs, of which the latest rows stay --------------------------------------------------------------

ROWS = 40  # that are kept


def steps(rank: zs.Rank, count: int, blocks: list[int]) -> list[float]:
    """The last losses of so many steps; rank 0 notes how many blocks of memory there are after half of them, and all.

    Blocks and not bytes: one table of the interpreter that grows is one block, whatever its size.
    """
    engine = zs.Engine(rank, zs.models.MLP((3, 4, 2)), zs.optim.Adam(lr=0.01), stage=3, overlap=True)
    data, losses = np.random.default_rng(rank.index), []
    for number in range(1, count + 1):
        with rank.trace.span("odd" if number % 2 else "even"):
            losses += engine.step([(data.normal(size=(2, 3)), data.normal(size=(2, 2)))]).losses
        del losses[:-6]
        if rank.index == 0 and number in (count // 2, count):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    return losses


def test_a_bounded_trace_keeps_its_latest_rows_and_counts_every_byte_that_was_sent() -> None:
    whole = zs.Cluster(2)
    losses = list(whole.run(steps, 6, []))
    for kept in (1, ROWS, 10**6):
        bounded = zs.Cluster(2, trace_rows=kept)
        assert list(bounded.run(steps, 6, [])) == losses
        for found, full in zip(bounded.trace, whole.trace, strict=True):
            assert min(kept, len(full.rows)) <= len(found.rows) < 2 * kept
            assert found.rows == full.rows[-len(found.rows):]
            assert found.dropped == len(full.rows) - len(found.rows)
            for purpose in (None, *trace.PURPOSES):
                for span in (None, "odd", "forward", "reduce", "nowhere"):
                    sent = sum(row.sent_nbytes for row in full.messages(purpose) if span in (None, *row.span))
                    assert found.sent_nbytes(purpose, span) == full.sent_nbytes(purpose, span) == sent
        assert bounded.memory.peak_nbytes_by_kind == whole.memory.peak_nbytes_by_kind


def test_a_step_has_its_own_bytes_rows_and_what_was_held_when_it_began() -> None:
    """Of 1, 2 and 3 micro-batches at stage 3: gathers and reductions of each, one of them forward and one back."""
    def program(rank: zs.Rank, stage: int) -> zs.Engine:
        rank.all_reduce(np.ones(6, np.float32))  # before the first step, and in none
        engine = zs.Engine(rank, zs.models.MLP((3, 4, 2)), zs.optim.Adam(lr=0.01), stage=stage,
                           offload="optimizer=host")
        data = np.random.default_rng(rank.index)
        for count in (1, 2, 3):
            engine.step([(data.normal(size=(2, 3)), data.normal(size=(2, 2))) for _ in range(count)])
        return engine

    for stage in (2, 3):
        cluster = zs.Cluster(2)
        cluster.run(program, stage)
        for purpose in ("gradients", "parameters", None):
            of_steps = [cluster.trace.step(number).sent_nbytes(purpose) for number in (0, 1, -1)]
            assert np.sum(of_steps, axis=0).tolist() == [
                total - 24 * (purpose is None) for total in cluster.trace.sent_nbytes(purpose)]
            if purpose == "gradients" or (purpose and stage == 3):
                assert of_steps == [[count * sent for sent in of_steps[0]] for count in (1, 2, 3)]
        whole, steps = cluster.trace[0], [cluster.trace[0].step(number) for number in range(3)]
        assert [row for step in steps for row in step.rows] == whole.rows[-sum(len(step.rows) for step in steps):]
        assert [sum(step.moved_nbytes.values()) > 0 for step in steps] == [True] * 3
        assert steps[0].moved_nbytes + steps[1].moved_nbytes + steps[2].moved_nbytes == whole.moved_nbytes
        assert [step.held_at_start for step in steps] == [cluster.memory[0].now_nbytes_by_kind] * 3 != [{}] * 3
        assert len(steps[-1].collectives("reduce_scatter")) == 3 * 2

    bounded = zs.Cluster(2, trace_rows=200)  # the first two steps have lost rows
    bounded.run(program, 3)
    assert bounded.trace[0].dropped == 200
    assert bounded.trace.step(-1).sent_nbytes() == cluster.trace.step(-1).sent_nbytes()
    for found, number, said in [
            (cluster, 3, "asked for step 3 of a trace that has 3; an engine's first forward"),
            (bounded, 1, "asked for step 1 of a trace that has 1;"),
            (zs.Cluster(2, trace_rows=1), 0, r"step 0 of a trace that has 0; .* trace_rows= and drop\(\) let"),
            (cluster, "last", "a step is a whole number, 0 the first and -1 the last, found 'last'")]:
        assert_refused(partial(found.trace.step, number), said)


def test_what_needs_every_row_is_refused_when_some_are_gone_and_the_rest_can_still_be_shown(tmp_path) -> None:
    cluster = zs.Cluster(2, trace_rows=ROWS)
    cluster.run(steps, 2, [])
    found, memory = cluster.trace[0], cluster.memory[0]
    for asked in (lambda: cluster.save(tmp_path / "run.json"), found.collectives, found.lifetimes, found.plot,
                  memory.plot, cluster.show_ring, lambda: memory.peak_nbytes_of("parameter")):
        with pytest.raises(ValueError, match=rf"dropped {found.dropped} rows, as trace_rows=40 or drop"):
            asked()
    assert not list(tmp_path.iterdir())
    for shown in (cluster, cluster.trace, found, memory):
        assert shown._repr_html_()
    assert f"{found.dropped} dropped before them" in repr(found)
    all_of_them, sent = found.dropped + len(found.rows), found.sent_nbytes()
    found.drop()
    assert (found.rows, found.dropped, found.sent_nbytes()) == ([], all_of_them, sent)
    for wrong in (0, -1, 2.5, True, "many"):
        with pytest.raises(ValueError, match=r"trace_rows=.* must be a number of rows"):
            zs.Cluster(2, trace_rows=wrong)


def test_steps_show_the_rows_that_there_were_as_long_as_the_trace_keeps_them() -> None:
    every = [step.ranks[0].rows for step in zs.step_through(program, ranks=2)]
    ranks = [(now.ranks[0], now.ranks[0].rows) for now in zs.step_through(program, cluster=zs.Cluster(2, trace_rows=3))]
    for (rank, shown), rows in zip(ranks, every, strict=True):
        assert len(shown) >= min(3, len(rows))
        for its in (shown, rank.rows):  # at the step, and after the run
            assert its == rows[len(rows) - len(its):]


def blocks_grown(count: int, trace_rows: int | None) -> int:
    """The blocks of memory that the second half of so many steps of two ranks adds."""
    blocks: list[int] = []
    zs.Cluster(2, trace_rows=trace_rows).run(steps, count, blocks)
    return blocks[1] - blocks[0]


@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_is_flat_from_step_to_step_where_the_trace_is_bounded_and_grows_where_it_is_not(count: int) -> None:
    assert abs(blocks_grown(count, ROWS)) < 2 * 5 * ROWS  # rows of up to ROWS more, and what hangs on each
    assert blocks_grown(40, None) > 20 * 2 * 80  # the rows of two ranks, in the 20 steps between
