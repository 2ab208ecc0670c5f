"""A rank that fails stops all others, names itself, leaves nothing held, and the same cluster works again.

What holds in every world `tests/backends/test_failures.py` has.
"""

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import KINDS, assert_ends, works
from tests.ranks.programs import Boom
from tests.support import assert_refused
from zerosim.ranks import RankStopped

WAITING = [
    lambda rank: rank.barrier(),
    lambda rank: rank.all_reduce(np.zeros(2), async_op=True).wait(),
    lambda rank: rank.recv(np.empty(1), 2),
    lambda rank: rank.send(np.empty(1), 2),
    lambda rank: (rank.all_reduce(np.zeros(2), async_op=True), rank.barrier()),
]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("waits", WAITING)
def test_the_other_ranks_are_stopped_with_their_finally_blocks_run(kind: dict, waits) -> None:
    seen = []

    def program(rank):
        if rank.index == 2:
            rank.recv(np.empty(1), 3)
            raise Boom
        if rank.index == 3:
            rank.send(np.zeros(1), 2)
        begun = rank.all_reduce(np.zeros(2), async_op=True)
        try:
            waits(rank)
        except Exception:  # what this test is about
            seen.append(("swallowed", rank.index))
        finally:
            for again in (begun.wait, lambda: rank.all_reduce(np.zeros(2), async_op=True)):
                with pytest.raises(RankStopped):
                    again()
            seen.append(("stopped", rank.index))
        seen.append(("went on", rank.index))

    assert_ends(zs.Cluster(4, **kind), program, Boom)
    # A seeded schedule may fail before a rank has come to its try block.
    assert set(seen) <= {("stopped", 0), ("stopped", 1), ("stopped", 3)}
    assert len(seen) == len(set(seen)) == (3 if not kind.get("seed") else len(seen))


def test_cleaning_up_may_use_the_memory_and_is_noted_when_it_fails() -> None:
    def program(rank):
        mine = rank.memory.alloc(10, np.float32, "workspace")
        try:
            if rank.index == 1:
                raise Boom("the first")
            rank.barrier()
        finally:
            rank.memory.free(mine)
            if rank.index == 0:
                raise OSError("the second")

    assert_ends(zs.Cluster(3), program, Boom, "the first", "raised by rank 1 of 3",
                "rank 0 raised OSError('the second') when it was stopped")


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), KeyboardInterrupt(), AssertionError("so"),
                                   zs.RankStopped()], ids=repr)
def test_any_kind_of_exception_comes_out(error: BaseException) -> None:
    """A program cannot pass for stopped, either."""
    def program(rank):
        if rank.index:
            raise error
        rank.barrier()

    assert assert_ends(zs.Cluster(2), program, type(error), "", "raised by rank 1 of 2") is error


# -- what an error that is looked at keeps ----------------------------------------------------------------------------

def fail(*_: object) -> None:
    raise Boom("here")


def during_another_error(rank, thing):
    try:
        [fail() for _ in (thing,) if thing is not None]
    except Boom:
        return [fail() for _ in (thing,) if thing is not None]


# The exception, and what the last rank does with an array of its memory. A comprehension (before Python 3.12), a
# generator and a function inside another keep the variables that they share with the function around them.
FAILURES = {
    "here": (Boom, fail),
    "in nested comprehensions": (Boom, lambda rank, thing: [[{fail() for _ in (thing,)} for _ in (thing,)]
                                                            for _ in range(2)]),
    "in a generator": (Boom, lambda rank, thing: list(fail(thing) for _ in range(2) if [thing])),  # noqa: C400
    "during another error": (Boom, during_another_error),
    "a mismatch": (zs.MismatchError, lambda rank, thing: rank.all_reduce(thing[rank.index:])),
    "a deadlock": (zs.DeadlockError, lambda rank, thing: rank.recv(thing, (rank.index + 1) % 3)),
    "a work left": (zs.PendingWorkError, lambda rank, thing: rank.all_reduce(thing, async_op=True)),
    "a wrong argument": (ValueError, lambda rank, thing: rank.broadcast(thing, 9)),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("name", FAILURES)
def test_after_a_failure_the_memories_are_what_they_were_while_the_error_is_still_held(name: str, kind: dict) -> None:
    """The error's frames, the finished ranks' results and the messages under way hold arrays; none survives, and none
    needs the garbage collector."""
    (error, failing), references = FAILURES[name], []

    def program(rank):
        held = rank.memory.alloc((20, 3), np.float32, "parameter")
        batch = rank.memory.hold(np.ones(7), "input")
        unknown = np.ones(100)
        references.append(weakref.ref(unknown))
        _ = rank.all_gather(np.ones(3))
        if rank.index == 1 and name != "a mismatch":
            return held, batch, unknown  # finished, with a result
        failing(rank, rank.memory.alloc(50, np.float32, "gradient"))
        return held

    cluster = zs.Cluster(3, **kind)
    cluster.kept = cluster.run(lambda rank: rank.memory.alloc(5, np.float64, "master"))
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(error) as caught:
                cluster.run(program)
            assert [memory.now_nbytes_by_kind for memory in cluster.memory] == [{"master": 40}] * 3
            assert [reference() for reference in references] == [None] * len(references)
            assert caught.value.__traceback__ is not None
    finally:
        gc.enable()
    assert works(cluster)


def outer_failure() -> None:
    precious = [1, 2, 3]
    raise KeyError(len(precious))


def test_what_the_caller_still_holds_of_a_failed_run_or_of_another_error_stays_as_it_was() -> None:
    """Only frames of the run are cleared, and of those what nobody else holds."""
    kept = []

    def made() -> Callable[[zs.Rank], None]:
        def program(rank: zs.Rank) -> None:
            own = np.ones(3)
            kept.append(lambda: own)
            [fail(shared) for _ in (own,) if own.size]

        shared = np.ones(2)
        return program

    program = made()
    for _ in range(2):
        assert_refused(lambda: zs.Cluster(1).run(program), "here", Boom)
        assert kept.pop()().tolist() == [1, 1, 1]
    for failing, error in ((program, Boom), (lambda rank: rank.recv(np.empty(1), 1 - rank.index), zs.DeadlockError)):
        try:
            outer_failure()
        except KeyError as handled:
            with pytest.raises(error):
                zs.Cluster(2).run(failing)
            with pytest.raises(zs.AsymmetryError):
                zs.NullCluster(2, representative=0).run(lambda rank: rank.send(np.empty(1), 1))
            frame = handled.__traceback__.tb_next.tb_frame
        assert frame.f_locals["precious"] == [1, 2, 3]


def test_an_error_that_is_handled_while_a_run_is_stepped_through_keeps_its_frames() -> None:
    """It need not be there when the run begins, and the run may end by being closed."""
    def failing(rank: zs.Rank) -> None:
        _ = rank.broadcast(np.ones(1))
        rank.recv(np.empty(1), 1 - rank.index)

    def to_the_end(steps: Iterator) -> None:
        with pytest.raises(zs.DeadlockError):
            list(steps)

    for finish in (to_the_end, lambda steps: steps.close()):
        cluster = zs.Cluster(2)
        steps = cluster.events(failing)
        next(steps)
        try:
            outer_failure()
        except KeyError as handled:
            finish(steps)
            frame = handled.__traceback__.tb_next.tb_frame
        assert frame.f_locals["precious"] == [1, 2, 3]
        assert works(cluster)
