"""What goes wrong on one rank ends the run on all and says who and where; nothing stays held, the world works again."""

import pytest

import zerosim as zs
from tests.backends import programs
from tests.backends.test_one_suite import assert_same
from tests.backends.worlds import Outcome, World

KINDS = ("plain", "work")
TIMEOUT = {"timeout_seconds": 0.05}  # of worlds of processes; the in-process hub knows at once


def failures(world: World, program, *args, **options) -> list[BaseException]:
    """What each rank raised: every one of them must, and hold nothing afterwards; then the world must still work."""
    outcomes: list[Outcome] = world.outcomes(program, *args, **TIMEOUT, **options)
    errors = [outcome.error for outcome in outcomes]
    assert None not in errors
    assert [outcome.held_nbytes for outcome in outcomes] == [0] * world.ranks
    assert_same(world, programs.messages)
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_any_rank_comes_out_on_every_rank_with_that_rank_named(world: World, kind: str) -> None:
    for failing in range(world.ranks):
        outcomes = world.outcomes(programs.fails, failing, kind)
        for outcome in outcomes:
            assert type(outcome.error) is programs.Boom
            assert str(outcome.error) == f"only on rank {failing}"
            assert any(note.startswith(f"raised by rank {failing} of {world.ranks}") for note in outcome.notes)
        assert_same(world, programs.messages)


def test_an_exception_that_cannot_travel_is_told_by_its_type_and_text(world: World) -> None:
    errors = [outcome.error for outcome in world.outcomes(programs.fails, 1, "stubborn")]
    elsewhere = [error for error in errors if isinstance(error, zs.RemoteError)]
    assert len(elsewhere) + sum(isinstance(error, programs.Stubborn) for error in errors) == world.ranks
    assert {str(error) for error in elsewhere} <= {"Stubborn: 1 and 2"}


@pytest.mark.parametrize("what", ["operation", "shape", "dtype", "op", "message"])
def test_in_debug_mode_ranks_that_disagree_are_told_what_each_of_them_asked_for(world: World, what: str) -> None:
    errors = failures(world, programs.disagrees, what, debug=True)
    assert all(isinstance(error, zs.MismatchError) for error in errors)
    last = world.ranks - 1
    said = {"operation": f"rank {last} is in all_reduce(call 0, (12,), float32)",
            "shape": f"rank {last} is in all_reduce(call 0, (6,), float32)",
            "dtype": f"rank {last} is in all_reduce(call 0, (12,), int32)",
            "op": f"rank {last} is in all_reduce(call 0, (12,), float32, op=max)",
            "message": f"rank {last} sends ((4,), int32) to rank 0, which expects ((4,), float32)"}
    assert said[what] in str(errors[0])


@pytest.mark.parametrize("what", ["operation", "shape", "dtype", "op"])
def test_in_debug_mode_works_under_way_hold_nothing_when_ranks_have_disagreed_beside_them(world: World, what: str
                                                                                         ) -> None:
    errors = failures(world, programs.disagrees_beside_works, what, debug=True)
    assert all(isinstance(error, zs.MismatchError) for error in errors)


@pytest.mark.parametrize("what", ["operation", "shape"])
def test_without_debug_a_mismatch_is_an_error_too_and_never_a_wrong_result(world: World, what: str) -> None:
    errors = failures(world, programs.disagrees, what)
    assert all(isinstance(error, zs.MismatchError) for error in errors)


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_a_rank_that_does_not_come_is_named_as_the_one_that_all_wait_for(world: World, debug: bool) -> None:
    errors = failures(world, programs.disagrees, "nothing", debug=debug)
    last = world.ranks - 1
    for error in errors:
        assert isinstance(error, zs.DeadlockError)
        assert f"rank {last}: finished" in str(error)
        assert f"waiting for rank {last}" in str(error)
        assert "programs.py" in str(error)


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_an_exchange_can_be_answered_by_a_receive_and_then_a_send(world: World, debug: bool) -> None:
    assert_same(world, programs.answers_after_it_has_heard)
    world.run(programs.answers_after_it_has_heard, debug=debug)


def test_receives_that_nobody_sends_are_a_deadlock_that_shows_every_rank(world: World) -> None:
    for error in failures(world, programs.everyone_receives):
        assert isinstance(error, zs.DeadlockError)
        for rank in range(world.ranks):
            assert (f"rank {rank}: in recv((4,), float32) from rank {(rank + 1) % world.ranks} at programs.py"
                    in str(error))


@pytest.mark.parametrize("what", ["message", "sum"])
def test_what_nobody_receives_is_a_deadlock_however_small_and_is_not_there_in_the_next_run(world: World, what: str
                                                                                          ) -> None:
    for error in failures(world, programs.nobody_answers, what):
        assert isinstance(error, zs.DeadlockError)
        assert f"rank {world.ranks - 1}" in str(error)


def test_a_program_that_lets_nothing_stop_it_is_over_all_the_same_when_another_rank_has_failed(world: World) -> None:
    assert all(isinstance(error, programs.Boom) for error in failures(world, programs.goes_on_whatever_happens))


def test_a_program_cannot_catch_a_deadlock_and_go_on(world: World) -> None:
    assert all(isinstance(error, zs.DeadlockError) for error in failures(world, programs.catches_what_it_can))


@pytest.mark.parametrize("what", ["operation", "shape"])
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_a_program_cannot_catch_that_ranks_disagree_and_go_on(world: World, what: str, debug: bool) -> None:
    for error in failures(world, programs.catches_that_it_disagrees, what, debug=debug):
        assert isinstance(error, zs.MismatchError)


def test_a_rank_that_fails_beside_a_group_in_the_making_leaves_nobody_in_it(world: World) -> None:
    for seed in range(8):
        assert all(isinstance(outcome.error, programs.Boom)
                   for outcome in world.outcomes(programs.fails_beside_a_new_group, seed, **TIMEOUT))


def test_a_rank_that_has_waited_for_the_end_of_a_run_has_not_ended_the_next_one(world: World) -> None:
    world.run(programs.the_last_takes_long, 0.1, **TIMEOUT)
    assert world.run(programs.the_first_takes_long, 0.2, **TIMEOUT)[-1].result == 7


def test_a_failure_while_all_are_in_the_librarys_own_collectives_leaves_a_world_that_works(library: World) -> None:
    assert all(isinstance(error, programs.Boom) for error in failures(library, programs.fails_amid_native))


def test_a_rank_beyond_its_capacity_says_so_and_all_stop(world: World) -> None:
    outcomes = world.outcomes(programs.holds, 1001, capacity_nbytes=1000)
    assert all(isinstance(outcome.error, zs.OutOfMemoryError) for outcome in outcomes)
    assert f"rank {world.ranks - 1} asked for 1,001 bytes" in str(outcomes[0].error)
    assert [outcome.result for outcome in world.run(programs.holds, 1000, capacity_nbytes=1000)][-1] == 1000
