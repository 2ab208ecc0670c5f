"""An error that is looked at keeps nothing of what its frames held; what others hold of it stays as it was."""

import weakref

import numpy as np
import pytest

import zerosim as zs
from zerosim.ranks.process import clear_frames


class Thing:
    """Something whose death is seen."""


def fail(*_):
    raise RuntimeError("here")


def in_a_comprehension(thing):
    return [fail() for _ in (thing,) if thing]


def in_nested_comprehensions(thing):
    return [[{fail() for _ in (thing,)} for _ in (thing,)] for _ in range(2)]


def in_a_generator(thing):
    return list(fail(thing) for _ in range(2) if [thing])  # noqa: C400


def in_a_lambda(thing):
    return list(map(lambda _: fail(thing), range(2)))  # noqa: C417


def in_a_function_of_its_own(thing):
    def inner():
        fail(thing)

    inner()


def during_another_error(thing):
    try:
        in_a_comprehension(thing)
    except RuntimeError:
        return [fail() for _ in (thing,) if thing]


@pytest.mark.parametrize("failing", [
    in_a_comprehension, in_nested_comprehensions, in_a_generator, in_a_lambda, in_a_function_of_its_own,
    during_another_error])
def test_what_only_dead_frames_hold_is_let_go(failing):
    def begin():
        thing = Thing()
        seen.append(weakref.ref(thing))
        failing(thing)

    seen = []
    with pytest.raises(RuntimeError, match="here") as caught:
        begin()
    assert seen[0]() is not None, "the traceback keeps it"
    clear_frames(caught.value)
    assert seen[0]() is None


def test_what_a_function_that_lives_on_shares_with_a_dead_frame_stays():
    kept, mine = [], Thing()

    def program():
        own = Thing()
        kept.append(lambda: own)
        return [fail(mine) for _ in (own,) if own]

    with pytest.raises(RuntimeError) as caught:
        program()
    clear_frames(caught.value)
    assert isinstance(kept[0](), Thing)
    assert isinstance(mine, Thing)
    with pytest.raises(RuntimeError, match="here"):
        program()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_rank_that_fails_inside_a_comprehension_leaves_an_empty_ledger(ranks):
    def program(rank):
        held = rank.memory.alloc(10 + rank.index, np.float32, "gradient")
        return [fail() if rank.index == rank.size - 1 else rank.all_reduce(held[:10]) for _ in range(2) if held.size]

    cluster = zs.Cluster(ranks)
    with pytest.raises(RuntimeError, match="here") as caught:
        cluster.run(program)
    assert cluster.memory.now_nbytes == [0] * ranks
    assert caught.value.__traceback__ is not None
