"""What goes wrong on one rank ends the run on all and says who and where; nothing stays held, the world works again."""

import re
from itertools import product

import pytest

import zerosim as zs
from tests.backends.fake_cuda import RaceError
from tests.backends.test_one_suite import assert_same
from tests.backends.worlds import DOUBLES, HERE, MPI, World
from tests.cases import THOROUGH
from tests.ranks import programs
from zerosim.backends.processes.control import raised_elsewhere
from zerosim.ranks import errors

TIMEOUT = {"timeout_seconds": 0.05}  # after which a rank that waits tells the others for what
CALLS = ("another collective", "another shape", "another type", "another op")


def matters(world: World) -> bool:
    """Who else hears of a failure takes a third rank, and no fourth."""
    return THOROUGH or world not in MPI or world.ranks in (1, 3)


def errors_of(world: World, program, *args, **options) -> list[BaseException]:
    """What each rank raised: every one of them must, and hold nothing afterwards; then the world must still work."""
    outcomes = world.outcomes(program, *args, **TIMEOUT, **options)
    errors = [outcome.error for outcome in outcomes]
    assert None not in errors, f"{program.__name__}{args}"
    assert [outcome.held_nbytes for outcome in outcomes] == [0] * world.ranks, f"{program.__name__}{args}"
    assert_same(world, programs.again)
    return errors


@pytest.mark.parametrize("kind", ["plain", "work"])
def test_an_exception_of_any_rank_comes_out_on_every_rank_with_that_rank_named(world: World, kind: str) -> None:
    ways: list[dict] = [{}, {"debug": True}, {"seed": 0}, {"seed": 8}] if world is HERE else [{}]
    every = kind == "plain" and world not in DOUBLES
    for failing, options in product(range(world.ranks) if every else (0, world.ranks - 1), ways):
        for error in errors_of(world, programs.fails, failing, kind, **options):
            assert type(error) is programs.Boom
            assert str(error) == f"only on rank {failing}"
            note, = [note for note in error.__notes__ if note.startswith(f"raised by rank {failing} of {world.ranks}")]
            assert raised_elsewhere(error) == ("in another process:\nTraceback" in note and "programs.py" in note)


def test_an_exception_that_cannot_travel_is_told_by_its_type_and_text(world: World) -> None:
    errors = errors_of(world, programs.fails, world.ranks - 1, "stubborn")
    elsewhere = [error for error in errors if isinstance(error, zs.RemoteError)]
    assert len(elsewhere) + sum(isinstance(error, programs.Stubborn) for error in errors) == world.ranks
    assert {str(error) for error in elsewhere} <= {"Stubborn: 1 and 2"}


def test_whatever_kind_of_exception_a_rank_raises_it_ends_the_run_on_every_rank(world: World) -> None:
    said = {"mute": r"<Mute, whose str\(\) failed>", "endless": r"\[\[\.\.\.\]\]", "stop": "let a StopIteration out",
            "file": "^\\[Errno 2\\] No such file: 'data.bin'$"}
    for kind, pattern in said.items():
        for error in errors_of(world, programs.fails, world.ranks - 1, kind):
            assert re.search(pattern, errors.text_of(error)), kind
            if kind == "file":
                assert type(error) is FileNotFoundError, "as it would be in one process"


@pytest.mark.usefixtures("partners")
def test_in_debug_mode_ranks_that_disagree_are_told_what_each_of_them_asked_for(world: World) -> None:
    """In this process every way to disagree is tried, and all ranks have been heard."""
    said = {what: programs.mismatch(what, world.ranks, all_heard=world is HERE)
            for what in (programs.DIFFERENT if world is HERE else CALLS)}
    messages = {"type": "((4,), int32)"} | ({"length": "((2,), float32)", "shape": "((4, 1), float32)"}
                                            if world is HERE else {})
    for what, sent in messages.items():
        said[f"a message of another {what}"] = re.escape(
            f"rank {world.ranks - 1} sends {sent} at HERE to rank 0, which expects ((4,), float32) at HERE; both "
            ).replace("HERE", r"programs\.py:\d+ in <lambda>")
    for what, pattern in said.items():
        errors = errors_of(world, programs.disagrees, what, debug=True)
        assert {type(error) for error in errors} == {zs.MismatchError}, what
        assert re.search(pattern, str(errors[0])), what


@pytest.mark.usefixtures("partners")
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_a_program_cannot_catch_what_ranks_have_done_wrong_together_and_go_on(world: World, debug: bool) -> None:
    """Without debug mode ranks that send what others do not expect are found where messages say how long they are."""
    asked = [*((programs.catches_that_it_disagrees, what) for what in CALLS[:4 if debug else 2]),
             (programs.disagrees, "a message of another length")]
    for program, what in asked if debug or world.checks else ():
        assert {type(error) for error in errors_of(world, program, what, debug=debug)} == {zs.MismatchError}, what


@pytest.mark.usefixtures("partners")
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_a_rank_that_does_not_come_is_named_as_the_one_that_all_wait_for(world: World, debug: bool) -> None:
    last = world.ranks - 1
    for error in errors_of(world, programs.disagrees, "nothing", debug=debug):
        assert isinstance(error, zs.DeadlockError)
        for said in (f"rank {last}: finished", f"waiting for rank {last}", "programs.py"):
            assert said in str(error)


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_receives_that_nobody_sends_are_a_deadlock_that_shows_every_rank(world: World, debug: bool) -> None:
    """No program can catch it and go on, either."""
    for error in errors_of(world, programs.everyone_receives, debug=debug):
        assert isinstance(error, zs.DeadlockError)
        for rank in range(world.ranks):
            assert (f"rank {rank}: in recv((4,), float32) from rank {(rank + 1) % world.ranks} at programs.py"
                    in str(error))


@pytest.mark.usefixtures("partners")
def test_what_nobody_receives_is_a_deadlock_however_small_and_is_not_there_in_the_next_run(world: World) -> None:
    for what in ("message", "sum"):
        for error in errors_of(world, programs.nobody_answers, what):
            assert isinstance(error, zs.DeadlockError), what
            assert f"rank {world.ranks - 1}" in str(error)


def test_a_program_that_lets_nothing_stop_it_is_over_all_the_same_when_another_rank_has_failed(world: World) -> None:
    assert {type(error) for error in errors_of(world, programs.goes_on_whatever_happens)} == {programs.Boom}


def test_a_rank_that_fails_beside_a_group_in_the_making_leaves_nobody_in_it(world: World) -> None:
    said = f"raised by rank {world.ranks - 1} of {world.ranks}"
    for seed in range(5):
        for error in errors_of(world, programs.fails_beside_a_new_group, seed):
            assert type(error) is programs.Boom
            assert any(note.startswith(said) for note in error.__notes__), "a rank's number is that in the whole world"


@pytest.mark.usefixtures("partners")
def test_a_rank_that_says_for_whom_it_waits_is_not_stuck_where_that_one_goes_on(mpi: World) -> None:
    assert mpi.run(programs.the_first_takes_long, **TIMEOUT)[-1].result == 7


def test_a_failure_while_all_are_in_the_librarys_own_collectives_leaves_a_world_that_works(library: World) -> None:
    assert {type(error) for error in errors_of(library, programs.fails_amid_native)} == {programs.Boom}


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_an_input_that_changes_before_its_wait_is_an_error(world: World, debug: bool) -> None:
    """Without a copy of the input the judge of a double's streams may be the first to see it."""
    seen = {zs.PendingWorkError} if debug or world.library != "NCCL" else {zs.PendingWorkError, RaceError}
    for error in errors_of(world, programs.changes_its_input, debug=debug):
        assert type(error) in seen
        assert type(error) is RaceError or "the input of all_gather(call 0, (" in str(error)


def test_a_rank_beyond_its_capacity_says_so_and_all_stop(world: World) -> None:
    outcomes = world.outcomes(programs.holds, 1001, capacity_nbytes=1000)
    assert {type(outcome.error) for outcome in outcomes} == {zs.OutOfMemoryError}
    assert f"rank {world.ranks - 1} asked for 1,001 bytes" in str(outcomes[0].error)
    assert world.run(programs.holds, 1000, capacity_nbytes=1000)[-1].result == 1000
