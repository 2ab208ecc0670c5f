"""What may be handed to a collective: types, shapes, ``out=``, and input and output in the same memory."""

import math

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.ranks.asking import (
    GATHERS,
    KINDS,
    REDUCTIONS,
    ROOTED,
    ROWS,
    allowed,
    ask,
    bits,
    ceil_cut,
    cuts_of,
    expected,
    same,
    takes_splits,
)
from tests.ranks.data import FLOATS, INTEGERS, OTHERS, anything, whole_numbers

MOVING = [row for row in ROWS if "reduce" not in row[0]]


@pytest.mark.parametrize("kind", ["plain", "debug"])
@pytest.mark.parametrize(("operation", "algorithm"), MOVING)
def test_any_bits_of_any_type_arrive_as_they_were(operation, algorithm, kind) -> None:
    worlds = (1, 2, 4) if (operation, algorithm) == ("all_gather", "doubling") else (1, 3, 5)
    turn = MOVING.index((operation, algorithm))
    for dtype, ranks in covering((FLOATS | INTEGERS | OTHERS).values(), worlds, turn=turn):
        vectors = anything(ranks, 3 * ranks + 1, dtype)
        results = zs.Cluster(ranks, **KINDS[kind]).run(
            lambda rank, vectors=vectors: ask(rank, operation, algorithm, vectors[rank.index]))
        wanted = expected(operation, vectors, ceil_cut(3 * ranks + 1, ranks))
        assert all(same(found, right) for found, right in zip(results, wanted, strict=True))


@pytest.mark.parametrize("kind", ["plain", "debug"])
@pytest.mark.parametrize(("operation", "algorithm"), REDUCTIONS)
def test_small_whole_numbers_add_exactly_in_every_type(operation, algorithm, kind) -> None:
    """Zeros and ones, different by rank and place: the sum of four is at most 4, which has one bit in any format."""
    worlds = (1, 2, 4) if algorithm == "halving" else (1, 3, 4)
    turn = REDUCTIONS.index((operation, algorithm))
    for dtype, ranks in covering((FLOATS | INTEGERS).values(), worlds, turn=turn):
        vectors = [((np.arange(11) + rank) % 3 % 2).astype(dtype) for rank in range(ranks)]
        results = zs.Cluster(ranks, **KINDS[kind]).run(
            lambda rank, vectors=vectors: ask(rank, operation, algorithm, vectors[rank.index]))
        totals = expected(operation, [vector.astype(np.int64) for vector in vectors], ceil_cut(11, ranks))
        wanted = [None if total is None else total.astype(dtype) for total in totals]
        assert all(same(found, right) for found, right in zip(results, wanted, strict=True))


@pytest.mark.parametrize("kind", ["plain", "debug"])
def test_unsigned_sums_wrap_around(kind: str) -> None:
    results = zs.Cluster(3, **KINDS[kind]).run(lambda rank: rank.all_reduce(np.full(4, 100 + rank.index, np.uint8)))
    assert all(result.tolist() == [(100 + 101 + 102) % 256] * 4 for result in results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_out_receives_the_result_and_is_returned(operation, algorithm, kind) -> None:
    worlds = [n for n in (1, 2, 3, 4, 8) if allowed(operation, algorithm, n)]
    for ranks, asynchronous in covering(worlds, (False, True), turn=list(KINDS).index(kind)):
        length, root = 2 * ranks + 1, ranks - 1
        vectors = whole_numbers(ranks, length)
        wanted = expected(operation, vectors, ceil_cut(length, ranks), root)

        def program(rank, vectors=vectors, wanted=wanted, root=root, asynchronous=asynchronous):
            out = None if wanted[rank.index] is None else np.full_like(wanted[rank.index], -1)
            result = ask(rank, operation, algorithm, vectors[rank.index], root=root, out=out, async_op=asynchronous)
            result = result.wait() if asynchronous else result
            assert result is out
            return out

        results = zs.Cluster(ranks, **KINDS[kind]).run(program)
        assert all(same(found, right) for found, right in zip(results, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("operation", "algorithm"), [row for row in ROWS if row[0] != "all_to_all"])
def test_in_place_gives_the_same_as_out_of_place(operation, algorithm, kind) -> None:
    worlds = [n for n in (1, 2, 3, 4, 5, 8) if allowed(operation, algorithm, n)]
    for ranks, asynchronous in covering(worlds, (False, True), turn=list(KINDS).index(kind)):
        length, root = 2 * ranks + 1, ranks // 2
        vectors = whole_numbers(ranks, length)
        cuts = [None, *(cuts_of(length, ranks) if takes_splits(operation, algorithm, ranks) else ())]

        def program(rank, vectors=vectors, root=root, cuts=cuts, asynchronous=asynchronous):
            found = []
            for cut in cuts:
                vector = vectors[rank.index].copy()
                # The input is the vector, and the output its own chunk; or the reverse where chunks are gathered.
                bounds = cut or ceil_cut(len(vector), rank.size)
                out = vector[bounds[rank.index]:bounds[rank.index + 1]] if operation == "reduce_scatter" else vector
                here = {} if operation in ("reduce", "gather") and rank.index != root else {"out": out}
                result = ask(rank, operation, algorithm, vector, cut, root=root, async_op=asynchronous, **here)
                result = result.wait() if asynchronous else result
                assert result is here.get("out")
                found.append(None if result is None else result.copy())
            return found

        results = zs.Cluster(ranks, **KINDS[kind]).run(program)
        for position, cut in enumerate(cuts):
            wanted = expected(operation, vectors, cut or ceil_cut(length, ranks), root)
            assert all(same(results[r][position], wanted[r]) for r in range(ranks)), (ranks, cut)


@pytest.mark.parametrize("kind", ["plain", "debug"])
@pytest.mark.parametrize(("operation", "algorithm"),
                         [row for row in ROWS if row[0] in ("all_reduce", "broadcast", "reduce")])
def test_whole_vectors_keep_any_shape(operation, algorithm, kind) -> None:
    for shape, ranks in covering([(), (1,), (0, 3), (2, 3), (2, 1, 4), (3, 0)], (1, 2, 3, 4)):
        count = math.prod(shape)
        vectors = [vector.reshape(shape) for vector in whole_numbers(ranks, count)]

        def program(rank, vectors=vectors, shape=shape):
            in_place = vectors[rank.index].copy()
            # Only the root of a reduction has a result, and so an output.
            out = {} if operation == "reduce" and rank.index else {"out": in_place}
            return (ask(rank, operation, algorithm, vectors[rank.index]),
                    ask(rank, operation, algorithm, in_place, **out),
                    ask(rank, operation, algorithm, vectors[rank.index], async_op=True).wait())

        results = zs.Cluster(ranks, **KINDS[kind]).run(program)
        wanted = expected(operation, [v.reshape(-1) for v in vectors], ceil_cut(count, ranks))
        for rank in range(ranks):
            right = None if wanted[rank] is None else wanted[rank].reshape(shape)
            assert all(same(found, right) for found in results[rank])


def test_a_result_of_a_fortran_ordered_input_is_refused_and_a_transposed_copy_is_not() -> None:
    x = np.arange(6).reshape(2, 3)
    cluster = zs.Cluster(2)
    with pytest.raises(ValueError, match="not contiguous"):
        cluster.run(lambda rank: rank.all_reduce((x + rank.index).T))
    assert cluster.run(lambda rank: rank.all_reduce(np.ascontiguousarray((x + rank.index).T)))[1].shape == (3, 2)


@pytest.mark.parametrize("operation", GATHERS)
def test_without_a_length_all_chunks_are_as_long_as_the_own_one(operation: str) -> None:
    for ranks in (1, 2, 3, 5):
        results = zs.Cluster(ranks).run(lambda rank: getattr(rank, operation)(np.full(2, rank.index)))
        assert results[0].tolist() == [index for index in range(ranks) for _ in range(2)]


@pytest.mark.parametrize(("operation", "algorithm"), [row for row in ROWS if row[0] in ROOTED])
def test_who_is_not_the_root_of_a_reduction_receives_nothing(operation, algorithm) -> None:
    results = zs.Cluster(3).run(lambda rank: ask(rank, operation, algorithm, np.arange(6) + rank.index, root=1))
    assert [result is None for result in results] == [operation != "broadcast", False, operation != "broadcast"]


@pytest.mark.parametrize("kind", ["plain", "debug"])
def test_a_broadcast_reads_the_root_alone(kind: str) -> None:
    """Elsewhere the input gives the shape and type only, so what is in it may be anything."""
    vectors = [np.full(5, np.nan), np.arange(5.0), np.full(5, -7.0)]
    for algorithm in ("tree", "naive"):
        results = zs.Cluster(3, **KINDS[kind]).run(
            lambda rank, a=algorithm: rank.broadcast(vectors[rank.index], 1, algorithm=a))
        assert [bits(result) for result in results] == [bits(vectors[1])] * 3


def test_splits_may_be_any_integers_that_rise() -> None:
    for make in [lambda: (0, 2, 7), lambda: [0, 2, 7], lambda: np.array([0, 2, 7]), lambda: iter([0, 2, 7])]:
        def program(rank, make=make):
            own = rank.reduce_scatter(np.arange(7) * (rank.index + 1), splits=make())
            return rank.all_gather(own, splits=make())
        assert all(np.array_equal(result, np.arange(7) * 3) for result in zs.Cluster(2).run(program))
